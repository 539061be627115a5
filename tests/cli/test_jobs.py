"""Jobs from a shell, against the real service."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fxlib import connect
from fxlib.errors import ServiceUnavailableError
from fxlib.spec.job import Job
from tests.cli.conftest import Run
from tests.client.models import made
from tests.shared.real_service import adopt, real_service, scripted_worker

pytestmark = pytest.mark.slow

FACTORY = "tests.client.models:made"


def no_workload() -> tuple[int, str]:
    return 3, "no workload"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_service(tmp_path_factory.mktemp("service")) as address, scripted_worker(address, adopt):
        yield address


@pytest.fixture
def job(fxlib: Run, service: str) -> str:
    ran = fxlib("optimize", FACTORY, "--service", service, "--name", "clicks", "--label", "team=a", "--json")
    assert ran.code == 0
    return str(json.loads(ran.out)["job_id"])


def test_optimize_prints_the_answer(fxlib: Run, service: str, tmp_path: Path) -> None:
    page = tmp_path / "clicks.html"
    ran = fxlib("optimize", FACTORY, "--service", service, "--report", str(page))
    assert page.read_text().startswith("<!doctype html>")
    assert ran.code == 0
    assert ran.out.startswith("ADOPT the rewritten module")
    assert "fxlib: sending the graph" in ran.err


def test_optimize_shows_what_each_pass_did(fxlib: Run, service: str) -> None:
    ran = fxlib("optimize", FACTORY, "--service", service, "--diff")
    assert ran.code == 0
    assert "what passes changed in the generated code\n--- before split_calls\n" in ran.out
    assert "issue_call('ps0', 'fxlib.ps:lookup'" in ran.out


def test_an_interrupt_leaves_the_job_s_id_and_what_to_do(tmp_path: Path) -> None:
    # A shell that runs tests in the background has interrupts ignored, which processes inherit.
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from fxlib.cli import main; sys.exit(main())"
    )
    with real_service(tmp_path) as address:  # and no worker
        command = [sys.executable, "-c", program, "optimize", FACTORY, "--service", address]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as asking:
            assert asking.stderr is not None
            while "queued" not in (line := asking.stderr.readline()):
                assert line, "it ended"
            asking.send_signal(signal.SIGINT)
            *_, said = asking.stderr.read().splitlines()
            assert asking.wait(60) == 130
        with connect(address) as client:
            (waiting,) = client.jobs()
    assert said == (
        f"fxlib: job {waiting.id} is not done. It goes on, and its answer will be reused: "
        f"fxlib jobs watch {waiting.id}. To end it: fxlib jobs cancel {waiting.id}"
    )


def test_optimize_without_a_service_fails_and_says_so(fxlib: Run) -> None:
    ran = fxlib("optimize", FACTORY, "--service", "127.0.0.1:1", "--patience", "0.2")
    assert ran.code == 1
    assert ran.out.startswith("KEEP the original module: the service at 127.0.0.1:1: not reached within 0.2 s")


@pytest.mark.parametrize(
    "factory, problem",
    [
        ("models", "'models' is not of the form pkg.mod:function"),
        (".models:made", "'.models:made' is not of the form pkg.mod:function"),
        (
            "no_such_package.models:made",
            f"No module named 'no_such_package' in {Path.cwd()}, on PYTHONPATH or installed",
        ),
        ("tests.client.models:no_such", "tests.client.models has no 'no_such'"),
        ("tests.client.models:workload", "returned Workload"),
        ("tests.cli.test_jobs:FACTORY", "'FACTORY' is not a function"),
        ("tests.cli.test_jobs:no_workload", "returned (int, str)"),
    ],
)
def test_a_factory_that_is_none_is_one_line(fxlib: Run, factory: str, problem: str) -> None:
    ran = fxlib("optimize", factory)
    assert ran.code == 2
    assert problem in ran.err
    assert len(ran.err.splitlines()) == 1


def ends() -> None:
    sys.exit(3)


def test_a_factory_that_ends_the_process_is_told(fxlib: Run) -> None:
    ran = fxlib("optimize", "tests.cli.test_jobs:ends")
    assert (ran.code, ran.err) == (1, "fxlib: FACTORY tests.cli.test_jobs:ends: it called sys.exit(3)\n")


def test_a_folder_that_is_not_there_is_told_before_anything_is_measured(fxlib: Run, tmp_path: Path) -> None:
    for option in ("--report", "--save"):
        ran = fxlib("optimize", FACTORY, option, str(tmp_path / "none" / "clicks"))
        assert ran.code == 2
        assert f"there is no folder {tmp_path / 'none'}" in ran.err


def test_jobs_lists_what_the_service_did(fxlib: Run, service: str, job: str) -> None:
    lines = fxlib("jobs", "--service", service, "--label", "team=a").out.splitlines()
    header = ["job", "model", "namespace", "state", "phase", "decision", "gain", "live", "created", "took"]
    assert lines[0].split() == header
    assert any(line.startswith(job) and "adopt" in line and "%]" in line for line in lines)
    as_json = fxlib("jobs", "list", "--service", service, "--name", "clicks", "--json").out.splitlines()
    assert job in {json.loads(line)["id"] for line in as_json}


def test_jobs_without_a_match_say_so_and_print_nothing(fxlib: Run, service: str) -> None:
    ran = fxlib("jobs", "--service", service, "--namespace", "nobody")
    assert (ran.code, ran.out, ran.err) == (0, "", "no jobs\n")


def test_a_job_is_shown_with_its_figures(fxlib: Run, service: str, job: str) -> None:
    out = fxlib("jobs", "show", job, "--service", service).out
    assert out.startswith(f"job {job}: succeeded\n  model: clicks\n")
    assert "gain" in out
    assert json.loads(fxlib("jobs", "show", job, "--service", service, "--json").out)["id"] == job


def test_a_job_is_watched_to_its_end(fxlib: Run, service: str, job: str) -> None:
    ran = fxlib("jobs", "watch", job, "--service", service)
    assert ran.code == 0
    assert ran.err.startswith("fxlib: ")


def test_cancelling_a_job_that_is_done_leaves_it_as_it_is(fxlib: Run, service: str, job: str) -> None:
    assert fxlib("jobs", "cancel", job, "--service", service).out == f"job {job}: succeeded\n"


def test_a_job_is_found_by_the_beginning_of_its_id(fxlib: Run, service: str, job: str) -> None:
    assert fxlib("jobs", "show", job[:12], "--service", service).out.startswith(f"job {job}: succeeded\n")
    others = fxlib("optimize", FACTORY, "--service", service, "--json")
    second = str(json.loads(others.out)["job_id"])
    shared = next(end for end in range(len(job)) if job[:end] != second[:end]) - 1
    if shared:
        ran = fxlib("jobs", "cancel", job[:shared], "--service", service)
        assert (ran.code, ran.out) == (1, "")
        assert "several jobs begin with" in ran.err


def test_the_environment_says_where_the_service_is(fxlib: Run, service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXLIB_SERVICE", service)
    assert fxlib("jobs").code == 0
    monkeypatch.setenv("FXLIB_SERVICE", "127.0.0.1:1")
    assert "127.0.0.1:1" in fxlib("jobs", "--patience", "0.2").err


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["--recipe", "shedule"], "no recipe is called 'shedule'. There are: schedule"),
        (["--pass", "no_such"], "no pass is called 'no_such'"),
        (["--pass", "split_calls:depth=3"], "split_calls: has no option 'depth'"),
    ],
)
def test_a_wrong_recipe_is_exit_code_2_before_the_model_is_made(fxlib: Run, arguments: list[str], problem: str) -> None:
    ran = fxlib("optimize", "no_such_package.models:made", *arguments)
    assert ran.code == 2
    assert problem in ran.err


def test_an_unknown_job_is_one_line(fxlib: Run, service: str) -> None:
    ran = fxlib("jobs", "show", "nobody", "--service", service)
    assert ran.code == 1
    assert ran.err.count("\n") == 1


def test_passes_are_those_of_the_library_and_of_the_service(fxlib: Run, service: str) -> None:
    own = fxlib("passes").out
    assert own.startswith("recipe")
    assert "schedule" in own
    here, there = (json.loads(fxlib("passes", "--json", *where).out) for where in ((), ("--service", service)))
    assert here["recipes"] == there["recipes"]
    known = {each["name"]: each for each in here["passes"]}  # other tests may have registered passes in this process
    assert there["passes"] == [known[each["name"]] for each in there["passes"]]


def test_capabilities_are_limits_recipes_and_workers_with_their_containment(fxlib: Run, service: str) -> None:
    told = json.loads(fxlib("capabilities", "--json", "--service", service).out)
    assert {"fxlib_version", "torch_versions", "workers", "recipes", "max_blob_bytes", "max_graph_nodes"} == told.keys()
    assert int(told["max_graph_nodes"]) == 1_000_000
    assert told["workers"][0]["worker_id"]
    shown = fxlib("capabilities", "--service", service).out
    assert "largest graph  1,000,000 nodes" in shown
    assert "worker" in shown
    assert "containment" in shown
    assert told["workers"][0]["worker_id"] in shown


def test_a_job_for_which_there_is_no_worker_says_so(fxlib: Run, service: str, job: str) -> None:
    with connect(service) as client:
        waiting = client.hand_in(*made(), name="picky", where={"hardware": "h200"})
        assert isinstance(waiting, Job)
        assert waiting.where == {"hardware": "h200"}
        with pytest.raises(ServiceUnavailableError, match="last it said: queued; no live worker has hardware=h200 yet"):
            client.watch(waiting.id, lambda event: None, timeout_s=5)
        told = fxlib("jobs", "show", waiting.id, "--service", service).out
        assert "measured where: hardware=h200" in told
        assert "waits for a worker: no live worker has hardware=h200 yet; none has the label hardware" in told
        assert "no worker" in fxlib("jobs", "--service", service, "--name", "picky").out
        client.cancel(waiting.id)


def test_where_a_job_may_run_is_checked_before_it_is_sent(fxlib: Run, service: str) -> None:
    misused = fxlib("optimize", FACTORY, "--service", service, "--where", "a b=c")
    assert misused.code == 2
    assert "--where['a b']: must be named by up to 63 letters, digits or ._/-" in misused.err
