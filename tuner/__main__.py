"""The entry points of zyfa-tune and zyfa-bench; they say in one line what to install where the extra is missing."""

import os
import sys

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the search inverts small matrices; threads would only wait

EXTRA = ("click", "optuna", "sqlite_utils", "rich", "numpy", "platformdirs")


def main() -> None:
    """Runs zyfa-tune; exit code 1 with a hint when a package of the extra `tune` is missing."""
    try:
        from .cli import main as command

        command()
    except ModuleNotFoundError as error:
        _hint("zyfa-tune", error)


def bench() -> None:
    """Runs zyfa-bench, likewise."""
    try:
        from .bench_cli import main as command

        command()
    except ModuleNotFoundError as error:
        _hint("zyfa-bench", error)


def _hint(program: str, error: ModuleNotFoundError) -> None:
    if error.name not in EXTRA:
        raise error
    sys.exit(f"{program} needs the package {error.name}: pip install 'zyfa[tune]'")


if __name__ == "__main__":
    main()
