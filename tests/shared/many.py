"""How many random programs a test tries; `FXLIB_PROGRAMS=2000`, by hand, has every such test try as many."""

import os


def many(usual: int) -> int:
    """Return how many: what is usual is short enough for the suite, and bugs that are planted show within it."""
    return int(os.environ.get("FXLIB_PROGRAMS", usual))
