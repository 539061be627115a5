"""Capture further graphs of a model for its variants, such as evaluation or calls without a mask."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fxlib.capture.api import Options, capture
from fxlib.capture.coerce import sizes_that_differ
from fxlib.capture.samples import arguments_given, left_at_defaults
from fxlib.errors import CaptureError, FxlibWarning
from fxlib.runtime import CapturedModule
from fxlib.runtime.guards.export_guards import GuardedCodeGen
from fxlib.runtime.submodules import local_modules
from fxlib.spec.workload import Variant, Workload

_FLAG_SETTERS = ("train", "eval")


def capture_variant(main: CapturedModule, variant: Variant, workload: Workload) -> CapturedModule:
    """Capture the model of `main` as a variant of its workload calls it, and leave the model as it was.

    A variant that cannot be traced is exported with one of its batches. If the main graph was exported, so is the
    variant.

    Raises:
        CaptureError: `main` has no model, the model sets its training flags itself, or its forward does something in
            this variant that a graph cannot hold.
    """
    original, where = main._fxlib.original, f"variant {variant.name!r}"
    if original is None:
        raise CaptureError("there is no model to capture, but its graph alone", where=where)
    samples, options = workload.of(variant).samples, main._fxlib.captured_with or Options()
    batch = samples[0]
    given = arguments_given(original.forward, batch)
    fixed = {name: each for name, each in (options.concrete_args or {}).items() if name not in given}
    exported = isinstance(main.graph._codegen, GuardedCodeGen)
    with mode_of(main, variant), warnings.catch_warnings():
        warnings.simplefilter("ignore", FxlibWarning)  # about contracts that no call of this variant has
        return capture(
            original,
            tracer_class=options.tracer_class,
            leaf_modules=options.leaf_modules,
            wrap=options.wrap,
            concrete_args=fixed | left_at_defaults(original.forward, batch),
            contracts={**(options.contracts or {}), **workload.contracts},
            sample_inputs=batch,
            dynamic_shapes=sizes_that_differ(samples),
            how="export" if exported else "auto",
        )


@contextmanager
def mode_of(main: CapturedModule, variant: Variant) -> Iterator[None]:
    """Set the mode of a variant for the block: grad mode, and the training flags of all modules of `main`'s model.

    Raises:
        CaptureError: a module sets its training flags itself.
    """
    modules = [main, *(each for _, each in local_modules(main._fxlib.original or main))]
    flags = [each.training for each in modules]
    if variant.training is not None:
        for each in modules[1:]:
            _check_setters(each, variant)
    try:
        if variant.training is not None:
            for each in modules:
                each.training = variant.training
        with torch.set_grad_enabled(variant.grad):
            yield
    finally:
        for each, flag in zip(modules, flags, strict=True):
            each.training = flag


def _check_setters(module: nn.Module, variant: Variant) -> None:
    kind = type(module)
    own = [name for name in _FLAG_SETTERS if not getattr(kind, name).__module__.startswith("torch.")]
    if own:
        raise CaptureError(
            f"{kind.__name__} overrides {own[0]}(), so its flags in that mode are not known before it is called",
            where=f"variant {variant.name!r}",
            hint="Leave training= out, and capture the model in that mode.",
        )
