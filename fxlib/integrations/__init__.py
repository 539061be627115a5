"""Callbacks for other libraries' training loops, and results for experiment trackers.

With a callback, the model asks the service when training begins, and pushes after each step. Neither `lightning` nor
`transformers` is needed to import it; only `mlflow` needs MLflow. fxlib installs none of them.
Nothing here knows how a model is optimized: `fxlib.client` and `fxlib.runtime.push_gradients` do.
"""

from __future__ import annotations

from torch import nn
from typing_extensions import Unpack

from fxlib.client import connect
from fxlib.client.request import RequestOptions
from fxlib.client.result import Result
from fxlib.errors import WorkloadError
from fxlib.runtime.push_gradients import drop_gradients, push_gradients
from fxlib.runtime.submodules import local_modules
from fxlib.spec.workload import Workload


class Training:
    """The part of a model that calls servers, from the beginning of its training to the end.

    Args:
        part: path, from the model that the loop trains, of the submodule to optimize.
        workload: how a step runs.
        address: the service's address, "host:port".
        **asked: arguments for `fxlib.Client.optimize`.

    Raises:
        WorkloadError: `part` is empty: a loop holds its own model, which cannot be replaced.
    """

    def __init__(self, part: str, workload: Workload, address: str, **asked: Unpack[RequestOptions]) -> None:
        if not part:
            raise WorkloadError(
                "a training loop holds its model itself",
                where="part",
                hint="Name the submodule that calls servers; or pass the loop what client.optimize returned.",
            )
        self._part = part
        self._workload, self._address, self._asked = workload, address, asked
        self._replaced: list[tuple[nn.Module, str, nn.Module]] = []
        """The places of the part, each as the module that holds it, its name there, and the original, while the answer
        stands in them."""
        self.result: Result | None = None
        """The service's answer; None before training."""

    def begin(self, model: nn.Module) -> None:
        """Ask the service, and replace the part by the answer; one that an earlier training left is put back first."""
        if self._replaced:  # by a training that failed, whose loop said nothing of that
            self.drop()
            self.end()
        original = model.get_submodule(self._part)
        with connect(self._address) as client:
            self.result = client.optimize(original, self._workload, progress=False, **self._asked)
        held = ((owner, name, part) for _, owner in local_modules(model) for name, part in owner._modules.items())
        self._replaced = [(owner, name, part) for owner, name, part in held if part is original]  # it may be shared
        for owner, name, _ in self._replaced:
            setattr(owner, name, self.result.module)

    def push(self) -> None:
        """Push the gradients of remote results; call it after each step of the optimizer."""
        if self.result is not None:
            push_gradients(self.result.module)

    def drop(self) -> None:
        """Drop the gradients of a step that failed."""
        if self.result is not None:
            drop_gradients(self.result.module)

    def end(self) -> None:
        """Restore the part; it has the same parameters."""
        for owner, name, original in self._replaced:
            setattr(owner, name, original)
        self._replaced = []
