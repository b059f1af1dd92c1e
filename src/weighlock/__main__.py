"""`python -m weighlock`, and the `weighlock` command."""

import sys
from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command and exit."""
    try:
        from weighlock.cli import main as run
    except KeyboardInterrupt:  # before there is anything to unwind
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
