"""The benchmark of public programs: which file it takes, and what it says of a case."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from benchmarks.programs.__main__ import rows
from benchmarks.programs.case import Found
from benchmarks.programs.catalogue import PROGRAMS, Program
from fxlib.spec.workload import Batch


def program(**given: str) -> Program:
    described = {"name": "sought", "path": "rpc/main.py", "holds": "class Sought", **given}
    return Program(**described, servers=("ps",), make=lambda _: nn.Identity(), batch=lambda: Batch(inputs=()))  # type: ignore[arg-type]


def test_a_program_is_found_by_its_path_and_by_what_its_file_holds(tmp_path: Path) -> None:
    for folder, text in (("one/rpc", "class Other:\n    pass\n"), ("two/rpc", "class Sought:\n    place = 2\n")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "main.py").write_text(text)

    assert program().load(tmp_path).Sought.place == 2
    with pytest.raises(FileNotFoundError, match="class Absent"):
        program(holds="class Absent").load(tmp_path)


def test_what_no_step_takes_need_not_be_installed(tmp_path: Path) -> None:
    file = tmp_path / "rpc" / "main.py"
    file.parent.mkdir()
    file.write_text(
        "from timm.optim.adam import Adam\nfrom torchmetrics import Accuracy, transforms\n"
        "class Sought:\n    made = Adam(1), transforms.Compose([transforms.ToTensor()])\n"
    )
    assert len(program().load(tmp_path).Sought.made) == 2


def test_a_program_of_the_installed_torch_is_imported() -> None:
    module = program(path="torch/distributed/nn/api/remote_module.py").load(Path())
    assert module.__name__ == "torch.distributed.nn.api.remote_module"


def test_a_case_that_was_not_adopted_says_why() -> None:
    (captured, adopted) = rows("sought", 2.0, Found(captured=True, why="there is\nnothing to overlap"))

    assert (captured.metric, captured.value, adopted.metric, adopted.value) == ("captured", 1.0, "adopted", 0.0)
    assert captured.case == {"program": "sought", "service_ms": 2.0, "why": "there is nothing to overlap"}


def test_how_long_the_answer_took_is_told_where_there_was_one() -> None:
    (*_, decided) = rows("sought", 2.0, Found(captured=True, asked_s=2.5))

    assert (decided.arm, decided.metric, decided.value, decided.unit) == ("fxlib", "decided_seconds", 2.5, "s")
    assert "decided_seconds" not in {each.metric for each in rows("sought", 2.0, Found())}


def test_a_gain_is_that_over_the_original_and_stands_beside_the_experts() -> None:
    seconds = {"original": [0.4] * 5, "fxlib": [0.1] * 5, "hand": [0.2] * 5}
    found = {(each.arm, each.metric): each.value for each in rows("sought", 2.0, Found(seconds=seconds))}

    assert found["fxlib", "gain"] == pytest.approx(4.0)
    assert found["hand", "gain"] == pytest.approx(2.0)
    assert found["fxlib/hand", "speed"] == pytest.approx(2.0)


def test_programs_have_names_and_servers_of_their_own() -> None:
    assert len({each.name for each in PROGRAMS}) == len(PROGRAMS)
    assert all(each.servers for each in PROGRAMS)
