"""`python -m workers`, in a checkout: the same as `python -m fxlib_workers`."""

from fxlib_workers.__main__ import main

if __name__ == "__main__":
    main()
