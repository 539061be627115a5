"""Keeps what backends make of a part of a graph in a folder of the user's, so that a later process starts sooner.

Only this user's own processes write there: nothing compiled is taken from a service. The key of an entry is a digest of
all that a backend sees: the part's graph, its weights and modules, the kind of its inputs, the number of threads, the
processor's instructions, and the versions of torch and of the backend. Whatever goes wrong with the folder costs the
time of a compilation, and nothing else.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.fx import GraphModule

from fxlib.config import CACHE
from fxlib.utils.compare import largest_error
from fxlib.utils.hardware import instructions

Run = Callable[..., tuple[torch.Tensor, ...]]
"""A function that computes a part."""
MOST_BYTES: Final = 2 << 30
"""The size up to which the folder grows; then the entries that were used longest ago go."""
_FORMAT: Final = "2"
_SAME: Final = 1e-3
"""The largest relative error of what was kept against the part as it is; what is farther off is made anew."""
_PLAIN: Final = (bool, int, float, str, type(None), torch.dtype)


def folder() -> Path | None:
    """Return the folder, which is this user's alone; None if there is none, or others may read or write it."""
    named = os.environ.get(CACHE)
    if named == "":
        return None
    found = Path(named) if named else _default()
    try:
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
        known = found.lstat()
    except OSError:
        return None
    alone = stat.S_ISDIR(known.st_mode) and known.st_uid == os.getuid() and not known.st_mode & 0o077
    return found if alone else None


def _default() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fxlib" / "compiled"


def load(key: str) -> bytes | None:
    """Return what was kept under a key; None if nothing was, or it cannot be read."""
    where = folder()
    if where is None:
        return None
    try:
        found = (where / key).read_bytes()
        os.utime(where / key)  # so that it counts as used just now
    except OSError:
        return None
    return found


def keep(key: str, made: bytes) -> None:
    """Keep bytes under a key, if there is room for them, and drop the entries that were used longest ago."""
    where = folder()
    if where is None or len(made) > MOST_BYTES:
        return
    with suppress(OSError):
        _make_room(where, len(made))
        number, name = tempfile.mkstemp(dir=where)  # which nobody else may read
        try:
            with os.fdopen(number, "wb") as file:
                file.write(made)
            Path(name).replace(where / key)
        except OSError:
            Path(name).unlink(missing_ok=True)


def drop(key: str) -> None:
    """Forget what is kept under a key."""
    if (where := folder()) is not None:
        with suppress(OSError):
            (where / key).unlink(missing_ok=True)


def _make_room(where: Path, wanted: int) -> None:
    entries = sorted((each.stat().st_mtime, each.stat().st_size, each) for each in where.iterdir())
    held = sum(size for _, size, _ in entries)
    for _, size, each in entries:
        if held + wanted <= MOST_BYTES:
            return
        each.unlink(missing_ok=True)
        held -= size


def through_cache(
    backend: str,
    part: nn.Module,
    inputs: Sequence[Any],
    *,
    read: Callable[[bytes], Run],
    make: Callable[[], tuple[Run, Callable[[], bytes]]],
) -> Run:
    """Return what a backend made of a part in an earlier process or, if there is nothing or it is of no use, makes now.

    What was kept is run once beside the part, and used if the results agree.

    Args:
        backend: the backend with its version.
        part: the part; only what it makes of graphs is kept.
        inputs: the part's inputs.
        read: turns bytes that were kept into a function.
        make: returns the function that the backend makes, and another one that returns the bytes to keep.
    """
    if not isinstance(part, GraphModule) or folder() is None:
        return make()[0]
    key = key_of(backend, part, inputs)
    kept = load(key)
    if kept is not None:
        with suppress(Exception):  # whatever a backend thinks of a file that is damaged
            run = read(kept)
            if largest_error(run(*inputs), part(*inputs)) <= _SAME:
                return run
        drop(key)
    run, made = make()
    with suppress(Exception):  # a backend that cannot write it down has compiled it all the same
        keep(key, made())
    return run


def key_of(backend: str, part: GraphModule, inputs: Sequence[Any]) -> str:
    """Return the key of a part for inputs of this kind; `backend` is the backend with its version."""
    digest = hashlib.sha256()
    for each in _described(backend, part, inputs):
        digest.update(each.encode() + b"\0" if isinstance(each, str) else each)
    return f"{backend.partition('==')[0]}-{digest.hexdigest()}"


def _described(backend: str, part: GraphModule, inputs: Sequence[Any]) -> Iterator[str | bytes]:
    yield f"{_FORMAT} {backend} {torch.__version__} {torch.get_num_threads()} {instructions()}"
    for value in inputs:
        yield _form(value) if isinstance(value, torch.Tensor) else repr(value)
    for node in part.graph.nodes:
        yield f"{node.op} {node.name} {node._pretty_print_target(node.target)} {node.args} {node.kwargs}"
        if node.op == "call_module":
            yield from _module(part.get_submodule(node.target))
        if node.op == "get_attr":
            yield from _tensor(attrgetter(node.target)(part))


def _module(called: nn.Module) -> Iterator[str | bytes]:
    for name, module in called.named_modules():
        options = {key: value for key, value in vars(module).items() if _is_plain(value)}
        yield f"{name} {type(module).__module__}.{type(module).__qualname__} {sorted(options.items())}"
    for tensor in (*called.parameters(), *called.buffers()):
        yield from _tensor(tensor)


def _tensor(value: torch.Tensor) -> Iterator[str | bytes]:
    yield _form(value)
    yield value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _form(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.stride()} {tensor.dtype} {tensor.device}"


def _is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, (tuple, list)) and all(map(_is_plain, value)))
