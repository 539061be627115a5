"""`python -m benchmarks.kill_parts.service`: the service, by a clock that is set while it runs."""

from __future__ import annotations

import sys

from benchmarks.kill_parts import wall_clock

wall_clock.install()

from fxlib_service.__main__ import main  # noqa: E402 - after the clock

if __name__ == "__main__":
    sys.exit(main())
