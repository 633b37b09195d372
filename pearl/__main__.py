"""`python -m pearl`: the same as the command `pearl`."""

from pearl.cli import main

if __name__ == "__main__":
    main()
