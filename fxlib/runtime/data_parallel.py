"""`DistributedDataParallel` inside a model: its description, and its stand-in in processes without the process group.

A graph holds such a submodule as one node. Its forward runs the module inside, and may broadcast buffers; its backward
reduces gradients over the ranks. Only the description travels: the module inside, and the options as data.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, cast

import torch
from torch import distributed as dist
from torch import nn
from torch.fx import GraphModule
from torch.nn.parallel import DistributedDataParallel

from fxlib.errors import OpaqueError
from fxlib.runtime.submodules import local_modules, local_tensors

ALL_RANKS: Final = "0"
"""The name that torch gives the group of all ranks."""

HOOKS: Final = ("allreduce_hook", "fp16_compress_hook")
"""Names of the communication hooks that travel: those of torch that gloo has."""

_MIB: Final = 1024 * 1024
_FLAGS: Final = (
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
    "skip_all_reduce_unused_params",
    "batched_grad_copy",
)
_DECIDING: Final = ("forward_sync_buffers", "_join_config", "buffer_hook", "_delay_all_reduce_all_params")
"""Attributes that decide whether a forward communicates with the other ranks."""


def _torchs_hooks() -> Mapping[str, object]:
    """Return the communication hooks of torch that need no state, by name; they are imported on the first use."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return {name: getattr(default_hooks, name) for name in HOOKS}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelOptions:
    """The options with which a module is wrapped.

    Attributes:
        forward_sync_buffers: whether a forward first broadcasts the buffers of rank 0.
        bucket_cap_mb: size of a bucket of gradients, in MiB; None is torch's default.
        hook: the name of a communication hook in HOOKS; if it is empty, gradients are averaged as they are.
    """

    forward_sync_buffers: bool = True
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    skip_all_reduce_unused_params: bool = False
    batched_grad_copy: bool = False
    bucket_cap_mb: float | None = None
    hook: str = ""


class DataParallel(nn.Module):
    """Stands for a `DistributedDataParallel` of another process: its module, its options, and its process group.

    Args:
        module: the module inside.
        options: the options with which it is wrapped.
        group: the name of the process group, in the process that made it.
        ranks: the number of ranks in the group.
        oddity: why the options do not describe the wrapping completely, in words; empty if they do.
    """

    def __init__(
        self, module: nn.Module, options: DataParallelOptions, *, group: str, ranks: int, oddity: str = ""
    ) -> None:
        super().__init__()
        self.module = module
        self.options = options
        self.group = group
        self.ranks = ranks
        self.oddity = oddity

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module inside; nothing else is needed while no gradients are recorded.

        Raises:
            OpaqueError: gradients are recorded, and no group is here to reduce them; `join` makes a module that can.
        """
        if torch.is_grad_enabled():
            raise OpaqueError(
                "gradients of DistributedDataParallel are reduced over a process group, and there is none here",
                hint="Decode with root=, the module that was captured, or run it under torch.no_grad().",
            )
        return self.module(*args, **kwargs)

    def join(self) -> DistributedDataParallel:
        """Return the module inside, wrapped with these options over the group of all ranks of this process."""
        options = asdict(self.options)
        name, static = options.pop("hook"), options.pop("static_graph")
        made = DistributedDataParallel(self.module, static_graph=static, **options)
        if name:
            made.register_comm_hook(None, cast("Callable[..., Any]", _torchs_hooks()[name]))
        return made

    def extra_repr(self) -> str:
        """Show the options."""
        return str(self.options)


def described(module: nn.Module) -> DataParallel | None:
    """Return the description of a `DistributedDataParallel`, or of a module that is one; None for any other module."""
    if isinstance(module, DataParallel):
        return module
    if type(module) is not DistributedDataParallel:
        return None
    capacity = None if module.bucket_bytes_cap_default else module.bucket_bytes_cap / _MIB
    hook, oddity = _hook_of(module)
    flags: dict[str, bool] = {name: bool(getattr(module, name, False)) for name in _FLAGS}
    options = DataParallelOptions(
        forward_sync_buffers=bool(module.forward_sync_buffers), bucket_cap_mb=capacity, hook=hook, **flags
    )
    name, ranks = _group_of(module)
    inside = body_of(module) or module.module
    return DataParallel(inside, options, group=name, ranks=ranks, oddity=oddity or _oddity(module))


def is_ordinary(module: nn.Module) -> bool:
    """Return whether a `DistributedDataParallel` does just what its class does, without hooks or code of the user."""
    if isinstance(module, DataParallel):
        return True
    held = vars(module)
    return (
        type(module) is DistributedDataParallel
        and "forward" not in held
        and not any(held[name] for name in held if name.endswith("_hooks") and name.startswith(("_forward", "_back")))
        and "buffer_hook" not in held
        and not module._delay_all_reduce_params
        and module.mixed_precision is None
        and not module._use_python_reducer
    )


def broadcasts(module: nn.Module) -> bool:
    """Return whether a forward may broadcast buffers over the ranks."""
    options: Any = module.options if isinstance(module, DataParallel) else module
    return bool(options.forward_sync_buffers) and next(cast("nn.Module", module.module).buffers(), None) is not None


def deciding(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield the attributes that decide what a forward sends to other ranks; their values are compared by identity."""
    if isinstance(module, DistributedDataParallel):
        yield from ((name, vars(module).get(name)) for name in _DECIDING)


def parallel_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of each `DistributedDataParallel` below a module, and of each stand-in for one."""
    for path, module in local_modules(root):
        if isinstance(module, (DataParallel, DistributedDataParallel)):
            yield path, module


_bodies: weakref.WeakKeyDictionary[nn.Module, GraphModule] = weakref.WeakKeyDictionary()
_closed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The wrapped modules whose module inside is known to change nothing, by the trace of its graph."""


def body_of(module: nn.Module) -> GraphModule | None:
    """Return the graph of the module inside; None if capture has made none."""
    inside = module.module
    return inside if isinstance(inside, GraphModule) else _bodies.get(module)


def keep_body(module: nn.Module, body: GraphModule | None, *, closed: bool = False) -> None:
    """Keep the graph of the module inside a `DistributedDataParallel` for as long as that lives.

    Args:
        module: the `DistributedDataParallel`.
        body: the graph; None if there is none.
        closed: whether the module inside, while the conditions of that graph hold, runs nothing besides the graph that
            could change anything.
    """
    _closed.discard(module)
    _bodies.pop(module, None)
    if body is not None:
        _bodies[module] = body
    if closed:
        _closed.add(module)


def is_closed(module: nn.Module) -> bool:
    """Return whether a `DistributedDataParallel` is ordinary, and its module inside is known to change nothing."""
    return module in _closed and is_ordinary(module)


def _hook_of(module: DistributedDataParallel) -> tuple[str, str]:
    """Return the name of the communication hook, and why it cannot travel; both are empty if there is no hook."""
    named = module._get_ddp_logging_data().get("comm_hook") if module.logger is not None else None
    if not named:
        return "", ""
    if len(module._comm_hooks) == 1:
        (hook, state), known = module._comm_hooks[0], _torchs_hooks()
        name = getattr(hook, "__name__", "")
        if known.get(name) is hook and state is None:
            return name, ""
    return "", f"the communication hook {named}"


def _oddity(module: DistributedDataParallel) -> str:
    """Return in words what the options leave out of the wrapping; empty if they describe all of it."""
    if not is_ordinary(module):
        return "hooks, or options that change its forward (mixed precision, delayed reduction)"
    if module.parameters_to_ignore:
        return "parameters that it was told to ignore"
    if module._bucket_config.has_custom_per_bucket_caps:
        return "bucket_cap_mb_list"
    if any(hasattr(each, "_in_backward_optimizers") for each in module.parameters()):
        return "optimizers that run inside backward"
    return ""


def _group_of(module: DistributedDataParallel) -> tuple[str, int]:
    """Return the name of the process group, `ALL_RANKS` if it holds all ranks, and its size."""
    group: Any = module.process_group
    name, size = str(group.group_name), int(group.size())
    return (ALL_RANKS if dist.is_initialized() and size == dist.get_world_size() else name), size


def tensors_of(module: nn.Module) -> tuple[torch.Tensor, ...]:
    """Return the parameters and buffers of the module inside."""
    inside = cast("nn.Module", module.module)
    return tuple(local_tensors(inside).values())  # its own `parameters` may leave some out
