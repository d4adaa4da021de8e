"""`python -m enginehouse`: the same as the installed command, for a parent that starts its children by interpreter."""

from enginehouse.cli.main import main

if __name__ == "__main__":
    main()
