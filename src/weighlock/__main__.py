"""`python -m weighlock`."""

import sys

__all__ = []

if __name__ == "__main__":
    try:
        from weighlock.cli import main
    except KeyboardInterrupt:  # before there is anything to unwind
        sys.exit(130)
    main()
