"""Which of a worker's environment variables the processes that it starts get to see: what libraries need, no more.

A worker's environment may hold credentials; trials run code of modules that the operator allowed, and graphs of
strangers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Final

_NEEDED: Final = (
    *("PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "TZ", "LANG", "LC_*"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "PYTHONHASHSEED", "PYTHONWARNINGS", "FXLIB_*"),
    *("OMP_*", "MKL_*", "KMP_*", "OPENBLAS_*", "MALLOC_*", "TORCH_*", "PYTORCH_*", "ATEN_*", "ONEDNN_*", "DNNL_*"),
    *("CUDA_*", "NVIDIA_*", "NCCL_*", "GLOO_*", "TP_*"),
)


def kept(environment: Mapping[str, str] = os.environ, more: Iterable[str] = ()) -> dict[str, str]:
    """Return the variables that a child of a worker inherits.

    Args:
        environment: the worker's.
        more: names that are kept, too, or patterns of them (`AWS_*`).
    """
    patterns = (*_NEEDED, *more)
    return {name: value for name, value in environment.items() if any(fnmatchcase(name, each) for each in patterns)}
