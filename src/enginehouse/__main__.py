"""`python -m enginehouse`: the same as the `enginehouse` command. `up` starts its children this way."""

from enginehouse.cli.main import main

if __name__ == "__main__":
    main()
