"""`python -m fxlib.cli` is `fxlib`."""

import sys

from fxlib.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
