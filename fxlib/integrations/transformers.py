"""A callback for the Trainer of Hugging Face's transformers."""

from __future__ import annotations

import importlib
from typing import Any

from typing_extensions import Unpack

from fxlib.client.request import RequestOptions
from fxlib.integrations import Training
from fxlib.spec.workload import Workload


def callback(part: str, workload: Workload, address: str = "localhost:8470", **asked: Unpack[RequestOptions]) -> Any:
    """Return a callback: `Trainer(..., callbacks=[fxlib.integrations.transformers.callback("net", workload)])`.

    Args:
        part: path of the submodule of the model that calls servers; from the beginning of training to its end, it is
            the service's answer. The callback's `training.result` has the figures.
        workload: how a step runs. With `gradient_accumulation_steps`, set its `accumulation` accordingly.
        address: the service's address.
        **asked: arguments for `fxlib.Client.optimize`.

    Raises:
        ImportError: transformers is not installed.
        WorkloadError: `part` is empty.
    """
    base: Any = importlib.import_module("transformers").TrainerCallback

    class Optimizes(base):  # type: ignore[misc]
        """Asks the service when training begins, and pushes when the optimizer has stepped."""

        def __init__(self) -> None:
            self.training = Training(part, workload, address, **asked)

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.training.begin(given["model"])

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.training.push()

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.training.end()

    return Optimizes()
