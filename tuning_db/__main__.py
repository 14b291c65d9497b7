"""zyfa-db, also as `python -m zyfa.tuning_db`."""

import sys


def main() -> None:
    """Runs the command line; without its extra, one line says what to install (exit 1)."""
    try:
        from .cli import cli
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        sys.exit("zyfa-db needs click: pip install zyfa[tune]")
    cli(prog_name="zyfa-db")


if __name__ == "__main__":
    main()
