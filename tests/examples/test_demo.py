"""`make demo`, in small: the whole loop, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
MARK = "FXLIB_DEMO_TEST"


def start(out: Path) -> subprocess.Popen[str]:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell; it is inherited
        signal.signal(signal.SIGINT, signal.default_int_handler)
    options = ["--out", str(out), "--steps", "16", "--rounds", "3", "--budget-s", "60", "--service-ms", "2"]
    return subprocess.Popen(
        [sys.executable, "-m", "examples.dlrm.demo", *options],
        cwd=ROOT,
        env={**os.environ, MARK: str(out)},  # inherited by all that it starts
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def left_behind(out: Path) -> list[psutil.Process]:
    """Processes that carry the mark of this demo, wherever they hang in the process tree."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(out) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def assert_nothing_left(out: Path, *, within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while (processes := left_behind(out)) and time.monotonic() < end:
        time.sleep(0.2)
    names = [" ".join(process.cmdline())[:100] for process in processes if process.is_running()]
    for process in processes:
        process.kill()
    assert not names


@pytest.mark.cluster
@pytest.mark.own_cluster
@pytest.mark.timeout(300)
def test_the_demo_adopts_trains_the_same_losses_and_leaves_a_report(tmp_path: Path) -> None:
    demo = start(tmp_path)
    output, _ = demo.communicate(timeout=280)
    assert demo.returncode == 0, output
    assert "ADOPT" in output
    assert "original, optimized and pipelined: identical bit for bit" in output
    assert "made ahead by fxlib.pipeline" in output
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") >= 2
    assert "http" not in page.replace("http://www.w3.org", "").replace("https://ui.perfetto.dev", "")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert {event["cat"] for event in events if event["ph"] == "X"} >= {"call", "issue", "wait", "in_flight"}
    assert_nothing_left(tmp_path)


@pytest.mark.cluster
@pytest.mark.own_cluster
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "signum, seen",
    [
        (signal.SIGTERM, "fxlib: the service is at"),  # a worker comes up
        (signal.SIGKILL, " rewritten "),  # the trial is next
    ],
)
def test_an_interrupted_demo_leaves_no_process_behind(tmp_path: Path, signum: signal.Signals, seen: str) -> None:
    with start(tmp_path) as demo:
        assert demo.stdout is not None
        assert any(seen in line for line in demo.stdout)
        demo.send_signal(signum)
        demo.stdout.read()
        assert demo.wait(60) != 0
    assert_nothing_left(tmp_path)
