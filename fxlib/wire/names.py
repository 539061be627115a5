"""Checks of text in a graph: generated code is text, so a name that is more than a name would be executed.

torch's own constants are known by their exact names.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from keyword import iskeyword
from typing import TypeVar

import torch

from fxlib.wire.faults import Fault, Limits, excess
from fxlib.wire.targets import METHODS_WITHHELD

_ATOM = re.compile(r"[0-9A-Za-z_+:/|=@~%& -]+")
_LONGEST_FUNCTION = 1_000
_REMOTE = re.compile(r"(?:[^\W\d]\w*\.)*[^\W\d]\w*:(?:[^\W\d]\w*\.)*[^\W\d]\w*|\.[^\W\d]\w*")
_LABEL = re.compile(r"[\w.:<>#$@ \[\]-]{1,500}")
# torch.fx deletes each line of generated code that holds this mark, wherever it is in the line.
_COUNTER = re.compile(r"# COUNTER: \d")
# A carriage return ends a comment for Python but not for torch.fx; triple quotes end its dump of metadata.
_COMMENT_BREAKERS = re.compile(r'[\x00-\x08\x0b-\x1f\x7f]|"""')

T = TypeVar("T")

_DEVICE = re.compile(r"(cpu|cuda|meta|xpu|mps|hpu|mtia|privateuseone)(:\d{1,3})?")


def is_name(text: str) -> bool:
    """Return whether Python reads the text as one identifier, and as this one."""
    return (
        text.isidentifier() and not iskeyword(text) and (text.isascii() or unicodedata.normalize("NFKC", text) == text)
    )


def is_dunder(text: str) -> bool:
    """Return whether a name belongs to Python's own machinery."""
    return text.startswith("__") and text.endswith("__")


def as_name(text: str) -> str:
    """Return the text, or the nearest identifier: a GraphModule traced from a lambda is called `<lambda>`."""
    return text if is_name(text) and not is_dunder(text) else "m_" + re.sub(r"\W", "_", text, flags=re.ASCII)


def check_name(text: str, what: str) -> None:
    """Raise Fault unless the text is an identifier that is not reserved by Python."""
    if not is_name(text) or is_dunder(text):
        raise Fault(f"{what} {text[:80]!r} is not an identifier")


def check_node_name(text: str) -> None:
    """Raise Fault unless torch.fx would keep the text as the name of a node."""
    if not (text.isascii() and text.isidentifier()) or iskeyword(text) or is_dunder(text):
        raise Fault(f"name {text[:80]!r} is not an identifier")
    if text == "self":
        raise Fault("name 'self' would hide the module itself", "Rename it.")


def check_atom(text: str, what: str) -> None:
    """Raise Fault unless the text can be one step of a path: an identifier, or what is harmless within quotes.

    Names of the latter kind are those that programs give to the parts of a `ModuleDict`, such as "user+item".
    """
    if text.isidentifier():
        check_name(text, what)
    elif _ATOM.fullmatch(text) is None:
        raise Fault(
            f"{what} {text[:80]!r} is neither an identifier nor made of letters, digits, blanks and _-+:/|=@~%&",
            "Rename it.",
        )


def check_parameter(text: str) -> None:
    """Raise Fault unless the text is the name of a parameter of `forward`: x, *args or **kwargs."""
    bare = text[2:] if text.startswith("**") else text.removeprefix("*")
    check_name(bare, "target")
    if bare == "self":
        raise Fault("target 'self' would be the module itself")


def check_remote_function(text: str) -> None:
    """Raise Fault unless the text reads "package.module:qualname", or ".method"."""
    if len(text) > _LONGEST_FUNCTION:  # before it is matched, which takes memory for each part
        raise Fault(f"{text[:80]!r}... does not name a remote function: it has {len(text):,} characters")
    method = text[1:] if text.startswith(".") else ""
    if _REMOTE.fullmatch(text) is None or (is_dunder(method) and method != "__call__"):
        raise Fault(
            f"{text[:80]!r} does not name a remote function", 'It reads "package.module:function" or ".method".'
        )
    # The RRef may be to a tensor, whose withheld methods reach files and memory.
    if method in METHODS_WITHHELD or (method.startswith("_") and hasattr(torch.Tensor, method)):
        raise Fault(f"{text[:80]!r} may not be called through an RRef", "Give the remote method another name.")


def check_label(text: str) -> None:
    """Raise Fault unless the text can be the label of something that stays with the client."""
    if _LABEL.fullmatch(text) is None:
        raise Fault(f"{text[:80]!r} is not the label of a class or callable")


def check_text(text: str, limits: Limits) -> None:
    """Raise Fault unless the text, once quoted, is harmless in generated code."""
    if len(text) > limits.text_chars:
        raise excess("length of a string", len(text), limits.text_chars, "text_chars")
    if "# COUNTER" in text and _COUNTER.search(text):
        raise Fault("a string holds the mark '# COUNTER: <n>', for which torch.fx deletes a line of code", "Change it.")


def check_comment(text: str, limits: Limits) -> None:
    """Raise Fault unless the text is harmless in a comment of generated code."""
    if len(text) > limits.text_chars:
        raise excess("length of a string", len(text), limits.text_chars, "text_chars")
    if _COMMENT_BREAKERS.search(text):
        raise Fault("a text holds control characters or triple quotes, which could end a comment of generated code")


def clean_comment(text: str) -> str:
    """Return the text in a form that is allowed in a comment of generated code."""
    return _COMMENT_BREAKERS.sub(lambda found: "'''" if found[0] == '"""' else "", text.replace("\r\n", "\n"))


def _named(values: Iterable[T]) -> dict[str, T]:
    return {str(value).removeprefix("torch."): value for value in values}


DTYPES: dict[str, torch.dtype] = _named(value for value in vars(torch).values() if isinstance(value, torch.dtype))
LAYOUTS: dict[str, torch.layout] = _named(value for value in vars(torch).values() if isinstance(value, torch.layout))
MEMORY_FORMATS: dict[str, torch.memory_format] = _named(
    value for value in vars(torch).values() if isinstance(value, torch.memory_format)
)
QSCHEMES: dict[str, torch.qscheme] = _named(value for value in vars(torch).values() if isinstance(value, torch.qscheme))


def check_device(name: str) -> None:
    """Raise Fault unless the text names a device; this machine need not have it."""
    if _DEVICE.fullmatch(name) is None:
        raise Fault(f"unknown device {name[:80]!r}")
