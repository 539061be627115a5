"""A zoo of models that nobody here wrote, measured by `fxlib zoo` as a user runs it, and killed at random moments.

The models are small ones of pytorchcv and transformers, and of timm where it is installed (`pip install --no-deps
timm`), with weights drawn from a seed: all in inference, and some in training besides. `fxlib serve`, `fxlib worker`
and `fxlib zoo run` are processes of their own. `whole`: all models, with two workers; `gain` is the median over the
models that were adopted, and `again` a second run of the zoo as it is. `wall-time`: each eighth of them, with one
worker and with two, which take turns at measuring on the one host. `interrupted`: each fourth of them, while the run is
killed (SIGKILL) or interrupted (SIGINT), or its service is killed and started again, and the same command goes on;
`measured twice` counts the measurements beyond one of a row.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.report import Case, Row, main, median_interval
from fxlib.client import connect
from tests.models.zoo import models
from tests.shared.real_service import free_port

ROOT: Final = Path(__file__).parents[1]
FAMILIES: Final = {
    "pytorchcv": [
        *models(family="convolutional"),
        *("preresnet20_cifar10", "seresnet20_cifar10", "sepreresnet20_cifar10", "diaresnet20_cifar10"),
        *("ror3_56_cifar10", "xdensenet40_2_k24_bc_cifar10", "nin_cifar10"),
    ],
    "transformers": models(family="transformer"),
    "timm": [
        *("test_resnet", "test_vit", "test_vit2", "test_vit4", "test_convnext", "test_convnext2", "test_convnext3"),
        *(
            "test_byobnet",
            "test_efficientnet",
            "test_efficientnet_gn",
            "test_nfnet",
            "test_mambaout",
            "mobilenetv3_small_050",
        ),
    ],
}
"""Names of models by the package that has them."""
TRAINED: Final = {
    "pytorchcv": ["nin_cifar10", "resnet20_cifar10", "seresnet20_cifar10", "densenet40_k12_cifar10"],
    "transformers": ["bert", "gpt2", "vit", "convnext"],
    "timm": ["test_resnet", "test_vit", "test_efficientnet", "test_convnext"],
}
"""Those of them that are measured in training, too."""
SETTINGS: Final = """
[defaults]
recipe = "inference"
max_relative_error = 1e-3
budget_s = 6
capture_s = 1500
"""
WORKERS: Final = 2
LONGEST_PAUSE_S: Final = 90.0
"""The longest time between two kills."""
INTERRUPTED: Final = 4
"""The zoo's part that is killed: each so manieth row."""
LEASE_S: Final = 900.0
"""The time after which a silent worker has lost its job: nobody kills workers, and the machine may be others', too."""
STARTS: Final = 3
"""How often a service is started that does not answer within its minute, as on a machine that stands still."""
PART: Final = 8
"""The zoo's part whose wall time is measured: each so manieth row."""
MOST_JOBS: Final = 10_000


def manifest(families: dict[str, list[str]], trained: dict[str, list[str]]) -> str:
    """Return the manifest of all models whose package is installed."""
    text = SETTINGS
    for family in filter(find_spec, families):
        text += _models(family, families[family], "{net}")
        text += _models(family, trained[family], "{net}/training", 'recipe = "training"', "args = { training = true }")
    return text


def _models(family: str, nets: Sequence[str], name: str, *more: str) -> str:
    lines = [
        "\n[[model]]",
        f'name = "{family}/{name}"',
        f'factory = "benchmarks.zoo_parts.factories:{family}"',
        f"matrix = {{ net = {json.dumps(nets)} }}",
        *more,
    ]
    return "\n".join(lines) + "\n" if nets else ""


# ------------------------------------------------------------------------------------------------------- the processes


class Service:
    """`fxlib serve` on an address of its own, and `fxlib worker` as often as asked.

    Args:
        folder: the folder for what they keep and log.
    """

    def __init__(self, folder: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._folder = folder
        self._log = (folder / "log").open("ab")
        self._service = self._start()
        self._workers: list[subprocess.Popen[bytes]] = []

    def start_worker(self) -> None:
        """Start one more worker."""
        name = f"worker-{len(self._workers)}"
        self._workers.append(_command("worker", "--service", self.address, "--name", name, log=self._log))

    def kill(self) -> None:
        """Kill the service, and start it anew on the same folder."""
        for each in (*psutil.Process(self._service.pid).children(recursive=True), self._service):
            each.kill()
        self._service.wait()
        self._service = self._start()

    def measured(self) -> Counter[str]:
        """Return how often each model was measured, by its name."""
        with connect(self.address) as client:
            jobs = [job for job in client.jobs(limit=MOST_JOBS) if not job.cached]
        found = Counter[str]()
        for job in jobs:
            found[job.name] += job.attempts
        return found

    def close(self) -> None:
        """End all processes."""
        for process in (*self._workers, self._service):
            process.terminate()
        for process in (*self._workers, self._service):
            process.wait(120)
        self._log.close()

    def _start(self) -> subprocess.Popen[bytes]:
        ready = self._folder / "ready"
        options = ["--data", str(self._folder / "data"), "--ready-file", str(ready), "--lease-seconds", str(LEASE_S)]
        options += ["--listen", self.address, "--metrics", "127.0.0.1:0"]
        for _ in range(STARTS):
            ready.unlink(missing_ok=True)
            process = _command("serve", "--no-worker", *options, log=self._log)
            while process.poll() is None:
                if ready.exists():
                    return process
                time.sleep(0.1)
        raise RuntimeError(f"the service did not start: {Path(self._log.name).read_text()}")


@contextmanager
def serving(folder: Path, workers: int) -> Iterator[Service]:
    """Run a service with so many workers."""
    folder.mkdir()
    service = Service(folder)
    try:
        for _ in range(workers):
            service.start_worker()
        yield service
    finally:
        service.close()


def _command(*arguments: str, log: Any) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "fxlib.cli", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=log,
        stderr=log,
        preexec_fn=_hear_interrupts,  # noqa: PLW1509 - this process has one thread
    )


def _hear_interrupts() -> None:
    """Have interrupts end this process, also where a shell has started the benchmark in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Zoo:
    """The commands of one zoo.

    Args:
        path: its manifest.
        service: where it is measured.
        log: the file of what the commands print.
        options: further options of each run.
    """

    def __init__(self, path: Path, service: Service, log: Path, *options: str) -> None:
        self._path, self._service, self._log, self._options = path, service, log, options

    def begin(self) -> subprocess.Popen[bytes]:
        """Start a run, or go on with the one that is not over."""
        with self._log.open("ab") as log:
            found = ("--service", self._service.address, "--patience", "60", "--max-parallel", str(2 * WORKERS))
            return _command("zoo", "run", str(self._path), *found, *self._options, log=log)

    def seconds(self) -> float:
        """Run to the end, and return the seconds that it took."""
        began = time.perf_counter()
        self.begin().wait()
        return time.perf_counter() - began

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the newest run."""
        rows: list[dict[str, Any]] = self._told("status")["rows"]
        return rows

    def report_bytes(self, site: Path) -> int:
        """Write the report, and return its size."""
        size: int = self._told("report", "-o", str(site))["bytes"]
        return size

    def _told(self, action: str, *options: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "fxlib.cli", "zoo", action, str(self._path), *options, "--json"]
        told: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, cwd=ROOT).stdout)
        return told


def interrupted(zoo: Zoo, service: Service, longest_s: float) -> Counter[str]:
    """Run a zoo to its end, through kills at random moments; return how many there were of each kind."""
    chance, kills, began = random.Random(0), Counter[str](), time.perf_counter()
    how: dict[str, Callable[[subprocess.Popen[bytes]], None]] = {
        "killed": lambda run: run.kill(),
        "interrupted": lambda run: run.send_signal(signal.SIGINT),
        "service killed": lambda _: service.kill(),
    }
    run = zoo.begin()
    while True:
        try:
            run.wait(chance.uniform(0.0, longest_s))
        except subprocess.TimeoutExpired:
            kind = chance.choice(list(how))
            how[kind](run)
            kills[kind] += 1
            print(f"{kind} after {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
            if kind != "service killed":
                run.wait()
                run = zoo.begin()
        else:
            return kills


# --------------------------------------------------------------------------------------------------------- the figures


def figure(case: Case, metric: str, value: float, unit: str = "", arm: str = "zoo") -> Row:
    """Return a figure that was measured or counted once."""
    return Row(
        benchmark="zoo", case=case, arm=arm, metric=metric, value=value, unit=unit, low=value, high=value, runs=1
    )


def by_family(rows: Sequence[dict[str, Any]]) -> Iterator[Row]:
    """Count models by family and mode, and yield the median gain of those that were adopted."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        family, _, net = row["name"].partition("/")
        groups.setdefault((family, "training" if net.endswith("/training") else "inference"), []).append(row)
    for (family, mode), found in groups.items():
        case: Case = {"family": family, "mode": mode}
        adopted = [row["gain"]["value"] for row in found if row["decision"] == "adopt"]
        yield figure(case, "models", len(found))
        yield figure(case, "captured", sum(bool(row["job_id"]) for row in found))
        yield figure(case, "measured", sum(row["gain"] is not None for row in found))
        yield figure(case, "adopted", len(adopted))
        if adopted:
            value, low, high = median_interval(adopted)
            yield Row(
                benchmark="zoo", case=case, arm="zoo", metric="gain", value=value, unit="", low=low, high=high,
                runs=len(adopted),
            )  # fmt: skip


@contextmanager
def place(*, quick: bool) -> Iterator[tuple[Path, Path]]:
    """Yield a folder, and the manifest in it; with `quick`, of one model of each package."""
    families = {family: nets[-1:] if quick else nets for family, nets in FAMILIES.items()}
    trained = {family: [] if quick else nets for family, nets in TRAINED.items()}
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary, "zoo.toml")
        path.write_text(manifest(families, trained))
        yield Path(temporary), path


def wall_times(quick: bool) -> list[Row]:
    """Measure a part of the zoo with one worker and with two, each with a service that knows nothing yet."""
    rows = list[Row]()
    with place(quick=quick) as (folder, path):
        for workers in range(1, WORKERS + 1):
            with serving(folder / f"workers-{workers}", workers) as service:
                runs = ("--runs", str(folder / f"runs-{workers}"))
                zoo = Zoo(path, service, folder / "zoo.log", *runs, "--shard", f"1/{1 if quick else PART}")
                seconds = zoo.seconds()
                case: Case = {"figure": "wall time", "rows": len(service.measured())}
            rows.append(figure(case, "time", seconds, "s", arm=f"{workers} worker" + "s" * (workers > 1)))
    return rows


def whole(quick: bool) -> list[Row]:
    """Measure the whole zoo, run it again, and report on it."""
    with place(quick=quick) as (folder, path), serving(folder / "whole", WORKERS) as service:
        zoo = Zoo(path, service, folder / "zoo.log")
        zoo.seconds()
        rows, measured = zoo.rows(), service.measured()
        again: Case = {"figure": "again", "rows": len(rows)}
        report: Case = {"figure": "report", "rows": len(rows)}
        return [
            *by_family(rows),
            figure(again, "time", zoo.seconds(), "s"),
            figure(again, "measured", (service.measured() - measured).total()),
            figure(report, "size", zoo.report_bytes(folder / "site"), "bytes"),
        ]


def killed(quick: bool) -> list[Row]:
    """Measure a part of the zoo through kills."""
    with place(quick=quick) as (folder, path), serving(folder / "killed", WORKERS) as service:
        zoo = Zoo(path, service, folder / "zoo.log", "--shard", f"1/{1 if quick else INTERRUPTED}")
        kills = interrupted(zoo, service, 20.0 if quick else LONGEST_PAUSE_S)
        measured = service.measured()
        case: Case = {"figure": "interrupted", "rows": len(measured)}
        found = [figure(case, kind, kills[kind]) for kind in ("killed", "interrupted", "service killed")]
        return [*found, figure(case, "measured twice", sum(count - 1 for count in measured.values()))]


if __name__ == "__main__":
    main("zoo", {"whole": whole, "wall-time": wall_times, "interrupted": killed}, about=__doc__ or "")
