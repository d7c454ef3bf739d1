"""`python -m autopipe` is the `autopipe` command."""

from autopipe.cli import main

if __name__ == "__main__":
    main()
