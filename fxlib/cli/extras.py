"""Whether what an application needs is installed."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution, requires

from fxlib.errors import FxlibError

_REQUIREMENT = re.compile(r"""^([A-Za-z0-9._-]+).*;.*\bextra\s*==\s*['"](\w+)['"]""")


def require(extra: str) -> None:
    """Check that all of an extra's packages are there.

    Raises:
        FxlibError: one is not; says how to install them.
    """
    for line in requires("fxlib") or []:
        found = _REQUIREMENT.match(line)
        if found is not None and found[2] == extra and not _installed(found[1]):
            raise FxlibError(f"{found[1]} is not installed", hint=f"Run: pip install 'fxlib[{extra}]'")


def _installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True
