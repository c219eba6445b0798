"""`python -m kimik3_prep`: the same command as `kimik3-prep`."""

from kimik3_prep.cli import main

if __name__ == "__main__":
    main()
