"""Running a random program, and all that it leaves behind."""

from __future__ import annotations

import re

import torch
from torch.fx import GraphModule

import fxlib
from tests.random_programs import programs
from tests.random_programs.programs import Program
from tests.random_programs.simulation import simulated


def outcome(program: Program, module: GraphModule, *, adversary: int) -> dict[str, object]:
    """Run forward, backward and push from the program's first state; return every bit of what became of it."""
    before = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    try:
        return _run(program, module, adversary)
    finally:
        with torch.no_grad():
            for name, tensor in module.state_dict(keep_vars=True).items():
                tensor.detach_().requires_grad_(isinstance(tensor, torch.nn.Parameter)).copy_(before[name])
                tensor.grad = None
        programs.NOISE.zero_()


def _run(program: Program, module: GraphModule, adversary: int) -> dict[str, object]:
    torch.manual_seed(program.seed)
    leaves = [torch.randn(2, 4).requires_grad_() for _ in range(2)]
    x, y = (leaf.clone() for leaf in leaves)
    error = ""
    with simulated(adversary) as world:
        try:
            second = {"own": y, "view of the first": x.view(2, 4), "the buffer": module.buffer}
            outputs = module(x, second[program.second_input], "ps1")
            takers = [each for each in outputs if each.requires_grad]
            if takers:
                torch.autograd.backward(takers, [torch.linspace(1, 2, 8).view(2, 4) / 3 for _ in takers])
            fxlib.push_gradients(module)
        except Exception as raised:  # noqa: BLE001 - an error is an outcome
            # Versions count every write since the tensor was made, those of earlier runs among them.
            error = re.sub(r"version \d+", "version", f"{type(raised).__name__}: {raised}")
    found: dict[str, object] = {"error": error, **{name: _bits(value) for name, value in world.snapshot().items()}}
    if error:
        return found  # after an exception, local state is unspecified
    tensors = {"x": x, "y": y, "noise": programs.NOISE, "random": torch.get_rng_state()}
    tensors |= {f"output {place}": each for place, each in enumerate(outputs)}
    tensors |= {f"state {name}": each for name, each in module.state_dict().items()}
    tensors |= {f"grad of leaf {place}": leaf.grad for place, leaf in enumerate(leaves) if leaf.grad is not None}
    tensors |= {f"grad of {name}": each.grad for name, each in module.named_parameters() if each.grad is not None}
    return found | {name: _bits(tensor) for name, tensor in tensors.items()}


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()


def differences(one: dict[str, object], other: dict[str, object]) -> list[str]:
    """Name what differs."""
    return [name for name in one | other if one.get(name) != other.get(name)]
