"""`python -m sparkserve`."""

from sparkserve.cli import main

if __name__ == "__main__":
    main()
