"""`python -m service`, in a checkout: the same as `python -m fxlib_service`."""

from fxlib_service.__main__ import main

if __name__ == "__main__":
    main()
