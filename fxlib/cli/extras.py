"""Checks that an application of fxlib is installed, with everything that it requires."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires

from fxlib.errors import FxlibError

_NAME = re.compile(r"[A-Za-z0-9._-]+")


def require(application: str, folder: str) -> None:
    """Check that the distribution of an application is installed, and all its requirements.

    Args:
        application: name of the distribution, such as "fxlib-service".
        folder: folder of the distribution in a checkout.

    Raises:
        FxlibError: it or a requirement is not installed; the error says how to install them.
    """
    hint = f"Run: pip install {application} (in a checkout: pip install ./{folder})"
    needed = _requirements(application)
    if needed is None:
        raise FxlibError(f"{application} is not installed", hint=hint)
    for package in needed:
        if _requirements(package) is None:
            raise FxlibError(f"{package} is not installed, which {application} needs", hint=hint)


def _requirements(distribution: str) -> list[str] | None:
    """Return what an installed distribution requires, without extras; None if it is not installed."""
    try:
        lines = requires(distribution) or []
    except PackageNotFoundError:
        return None
    return [found[0] for line in lines if "extra ==" not in line and (found := _NAME.match(line)) is not None]
