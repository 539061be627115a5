"""Messages of many calls that a server refuses: its fxlib is older, or it has none."""

from __future__ import annotations

import warnings

from fxlib.errors import FxlibWarning

_UNREAD = "Error on Node "
"""How `torch.distributed.rpc` begins an error that it met before it ran what a message asks for."""
_UNKNOWN = "Default RPC pickler does not serialize"
"""What its pickler says of a function that is not in a module."""
_OTHERWISE = "run_in_order() takes "
"""What Python says of a function with other parameters."""


def is_refusal(error: Exception) -> bool:
    """Whether a message that runs calls in order failed before any of them ran, so that they may be made singly.

    Their own errors never are the message's.

    Args:
        error: of the message itself.
    """
    text = str(error)
    if text.startswith(_UNREAD) and "): deserialize" in text:
        return True
    return "On WorkerInfo(" in text and (_UNKNOWN in text or _OTHERWISE in text)


def tell_of_refusal(server: str, cause: Exception) -> None:
    """Warn, once for each server, that it refused a message whose calls then went one by one."""
    if server in _REFUSED_BY:
        return
    _REFUSED_BY.add(server)
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    reason = " ".join(lines[:2]) or type(cause).__name__
    warnings.warn(
        f"{server}: many calls in one message are refused, and made one by one, which is slow: {reason} "
        "Install this version of fxlib on the server, or rewrite without coalesce_calls.",
        FxlibWarning,
        stacklevel=2,
    )


_REFUSED_BY: set[str] = set()
