"""`python -m weighlock`."""

from weighlock.cli import main

if __name__ == "__main__":
    main()
