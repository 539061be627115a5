"""A zoo's models: one that calls a server, and some that do what a model should not."""

import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

from fxlib import Workload
from tests.client.models import Clicks, workload


def clicks(size: int = 8) -> tuple[nn.Module, Workload]:
    assert size == 8
    return Clicks(), workload()


def layer(width: int = 4) -> tuple[nn.Module, Workload]:
    torch.manual_seed(0)
    return nn.Linear(width, width).eval(), Workload.describe([torch.randn(2, width)], mode="forward")


def bare() -> nn.Module:
    return nn.Linear(4, 4).eval()


def reads_a_file() -> tuple[nn.Module, Workload]:
    return layer(int(Path(os.environ["FXLIB_TEST_WIDTH"]).read_text()))


def exits() -> None:
    sys.exit(3)


def crashes() -> None:
    os.abort()


def hangs() -> None:
    print("hanging", flush=True)
    time.sleep(1000)


def eats() -> tuple[nn.Module, Workload]:
    torch.zeros(1 << 34)
    return layer()


def writes_nonsense() -> None:
    os.write(int(sys.argv[1]), b"[1]\n")
    time.sleep(1000)


def nests() -> None:
    os.write(int(sys.argv[1]), b"[" * 100_000 + b"\n")
    time.sleep(1000)


def answers_otherwise() -> None:
    os.write(int(sys.argv[1]), b'{"job": "a", "cached": false, "capture_s": {"x": 1}}\n')
    time.sleep(1000)


def answers_no_job() -> None:
    os.write(int(sys.argv[1]), b'{"jobs": [""], "cached": false}\n')
    time.sleep(1000)


def answers_half_a_letter() -> None:
    os.write(int(sys.argv[1]), b'{"jobs": ["\\ud800"], "cached": false}\n')
    time.sleep(1000)


def stops_answering() -> None:
    os.close(int(sys.argv[1]))
    time.sleep(1000)


def leaves_a_daemon() -> tuple[nn.Module, Workload]:
    print(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid, flush=True)
    return layer()


def raises() -> None:
    raise KeyError("no such weights")


def needs_a_gpu() -> nn.Module:
    return bare().cuda()


def returns_text() -> str:
    return "model"


def prints_and_forks() -> tuple[nn.Module, Workload]:
    os.write(1, b'{"failed": "FORGED", "message": "by print"}\n')
    if os.fork() == 0:
        time.sleep(0.2)  # then it goes on as the model's process does
    return layer()


def refused() -> tuple[nn.Module, Workload]:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if float(x.sum()) > 0 else -x

    return Branches().eval(), Workload.describe([torch.randn(2, 4)], mode="forward")
