"""`python -m mtgrpo` is the command `mtgrpo`."""

from mtgrpo.cli import main

if __name__ == "__main__":
    main()
