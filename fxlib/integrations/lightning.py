"""A callback for Lightning's Trainer."""

from __future__ import annotations

import importlib
from typing import Any

from typing_extensions import Unpack

from fxlib.client.request import RequestOptions
from fxlib.integrations import Training
from fxlib.spec.workload import Workload


def callback(
    part: str,
    workload: Workload,
    address: str = "localhost:8470",
    *,
    package: str = "lightning.pytorch",
    **asked: Unpack[RequestOptions],
) -> Any:
    """Return a callback: `Trainer(callbacks=[fxlib.integrations.lightning.callback("net", workload)])`.

    Args:
        part: path of the submodule of the LightningModule that calls servers; from the beginning of the fit to its end,
            it is the service's answer. The callback's `training.result` has the figures.
        workload: how a step runs. With `accumulate_grad_batches`, set its `accumulation` accordingly.
        address: the service's address.
        package: "lightning.pytorch", or "pytorch_lightning" for trainers of that package.
        **asked: arguments for `fxlib.Client.optimize`.

    Raises:
        ImportError: Lightning is not installed.
        WorkloadError: `part` is empty.
    """
    base: Any = importlib.import_module(package).Callback

    class Optimizes(base):  # type: ignore[misc]
        """Asks the service when the fit begins, and pushes when the optimizer has stepped."""

        def __init__(self) -> None:
            self.training = Training(part, workload, address, **asked)
            self._pushed = 0

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            self.training.begin(pl_module)

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self._pushed = trainer.global_step  # a checkpoint that the fit goes on from has been read by now

        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            if trainer.global_step != self._pushed:  # gradients accumulate until the optimizer steps
                self._pushed = trainer.global_step
                self.training.push()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self.training.drop()
            self.training.end()

        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            self.training.end()

    return Optimizes()
