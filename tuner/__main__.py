"""The entry point of zyfa-tune; says in one line what to install where the extra is missing."""

import sys

EXTRA = ("click", "optuna", "sqlite_utils", "rich", "numpy", "platformdirs")


def main() -> None:
    """Runs the command; exit code 1 with a hint when a package of the extra `tune` is missing."""
    try:
        from .cli import main as command

        command()
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        sys.exit(f"zyfa-tune needs the package {error.name}: pip install 'zyfa[tune]'")


if __name__ == "__main__":
    main()
