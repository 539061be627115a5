"""Rewrite rules from a shell: the user's function is called here, and what travels are graphs."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.cli.conftest import Run
from tests.client.asked import as_asked
from tests.shared.real_service import real_service, scripted_worker

FACTORY = "tests.cli.gates:made"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_service(tmp_path_factory.mktemp("service")) as address, scripted_worker(address, as_asked):
        yield address


@pytest.mark.slow
def test_rules_of_a_function_are_applied_by_the_worker(fxlib: Run, service: str) -> None:
    chosen = ("--pass", "rewrite_rules:rounds=3", "--rules", "tests.cli.gates:any_rules", "--pass", "dead_code")
    ran = fxlib("optimize", FACTORY, "--service", service, *chosen, "--json")
    assert ran.code == 0, ran.err
    answer = json.loads(ran.out)
    assert [(each["name"], int(each.get("changes", 0))) for each in answer["passes"]] == [
        ("rewrite_rules", 1),
        ("dead_code", 0),
    ]
    assert answer["preserves"] == "tolerance"


@pytest.mark.slow
def test_a_named_guard_travels_and_tells_why_it_declined(fxlib: Run, service: str) -> None:
    chosen = ("--pass", "rewrite_rules", "--rules", "tests.cli.gates:rules")
    ran = fxlib("optimize", FACTORY, "--service", service, *chosen, "--json")
    (step,) = json.loads(ran.out)["passes"]
    assert [(each["reason"], each["detail"]) for each in step["declined"]] == [("GUARD", "silu")]


@pytest.mark.parametrize(
    "chosen, problem",
    [
        (("--rules", "tests.cli.gates:rules"), "no pass takes them; add --pass rewrite_rules"),
        (("--pass", "rewrite_rules", "--rules", "gates"), "not of the form"),
        (("--pass", "rewrite_rules", "--rules", "tests.cli.gates:no_such"), "tests.cli.gates has no 'no_such'"),
        (("--pass", "rewrite_rules", "--rules", "tests.cli.gates:no_rules"), "returned []"),
        (("--pass", "rewrite_rules", "--rules", "tests.cli.gates:no_rule"), "rule 'mine' (.*gates.py:"),
    ],
)
def test_bad_rules_are_one_line(fxlib: Run, chosen: tuple[str, ...], problem: str) -> None:
    ran = fxlib("optimize", FACTORY, *chosen)
    assert ran.code == (1 if problem.startswith("rule") else 2)
    assert all(part in ran.err for part in problem.split(".*"))
    assert len(ran.err.splitlines()) == 1
