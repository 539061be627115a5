"""Answers of a trial's processes come back as they were, and whatever else arrives is malformed and nothing more."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxlib.analysis.effects.process_groups import Groups
from fxlib.spec.contract import Contract
from fxlib.spec.profile import Profile
from fxlib.spec.report import CompiledPart, Span, Timeline
from fxlib_workers.process.exceptions import Raised
from fxlib_workers.trial.answers import (
    FORMS,
    MalformedAnswerError,
    ProcessFailureError,
    read_answer,
    write_answer,
    write_failure,
)
from fxlib_workers.trial.requirements import Requirements
from fxlib_workers.trial.trainer import Trainer
from fxlib_workers.trial.trial_process import ServerProcess, StoreAddress
from tests.workers.replayed_model import recorded, weighed_profile

REQUIRED = Requirements(
    opaque=("function 'f'",),
    functions={"ps0": ("fxlib.ps:lookup", "shop:call"), "": ()},
    contracts={"shop:call#call_1": Contract(reads=frozenset({"a", "b"}), part="key", gradient="shop:push")},
    created={"shop:make": ("fetch",)},
    groups=Groups(collectives={"0": (2, 4)}, reducing={}),
)
TIMELINES = [Timeline(spans=(Span(kind="call", name="f", to="ps0", start_s=-0.1, end_s=0.5),), step_s=1.5)]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@pytest.mark.parametrize(
    "method, answer",
    [
        ("join", None),
        ("host_store", StoreAddress("127.0.0.1", 4711)),
        ("not_served", ["f", "g"]),
        ("load", REQUIRED),
        ("profile", weighed_profile()),
        ("digest_step", {"output": "ab", "loss \N{GRINNING FACE}": "cd"}),
        ("errors", {"output": math.inf}),
        ("samples", [8, 3]),
        ("writes_inputs", True),
        ("block", 0.25),
        ("time_parts", [CompiledPart(first="relu", nodes=3, backend="inductor==2.13.0", plain_s=0.1, why="slow")]),
        ("timelines", TIMELINES),
        ("reset", Raised(text="ValueError: no", out_of_memory=False, stranded=True)),
    ],
)
def test_an_answer_is_read_as_it_was_written(method: str, answer: object) -> None:
    assert read_answer(method, write_answer(method, answer)) == answer


def test_each_answer_with_a_form_is_one_of_a_process_s_methods() -> None:
    asked = FORMS.keys() - {"make"}
    assert {name for name in asked if not (hasattr(Trainer, name) or hasattr(ServerProcess, name))} == set()


def test_an_answer_that_cannot_be_written_is_told_as_an_exception() -> None:
    excessive = Profile(calls=(recorded("x" * 5000, "shop:call", "ps0"),))
    found = read_answer("profile", write_answer("profile", excessive))
    assert isinstance(found, Raised)
    assert "LimitError" in found.text


class Bomb:
    """What runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self._path,))


def test_a_pickle_is_malformed_and_runs_nothing(tmp_path: Path) -> None:
    with pytest.raises(MalformedAnswerError, match="not JSON"):
        read_answer("load", pickle.dumps(Bomb(tmp_path / "ran")))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "method, message",
    [
        ("block", '{"answer": NaN}'),
        ("block", '{"answer": 0}'),
        ("block", '{"answer": -1}'),
        ("block", '{"answer": 1' + "0" * 400 + "}"),
        ("block", '{"answer": true}'),
        ("block", '{"answer": 1, "raised": {}}'),
        ("block", '{"raised": {"text": "", "out_of_memory": 1, "stranded": false}}'),
        ("join", '{"answer": 1}'),
        ("timelines", '{"answer": []}'),
        ("timelines", '{"answer": [{"step_s": 1, "spans": [["call", "f", "ps0", 0]]}]}'),
        ("host_store", '{"answer": {"host": "127.0.0.1", "port": 70000}}'),
        ("profile", '{"answer": "not base64"}'),
        ("profile", '{"answer": "CgFh\\u03c0"}'),
        ("digest_step", '{"answer": {"output": 1}}'),
        ("digest_step", json.dumps({"answer": {"x" * 100_001: ""}})),
        ("load", "[" * 100_000),
        ("load", "{}"),
        ("load", ""),
    ],
)
def test_what_has_not_the_form_of_an_answer_is_malformed(method: str, message: str) -> None:
    with pytest.raises(MalformedAnswerError):
        read_answer(method, message.encode())


@pytest.mark.slow
@given(st.sampled_from(sorted(FORMS)), st.sampled_from(["answer", "raised", "failed"]), JSON)
def test_nothing_but_an_answer_or_a_refusal_comes_of_any_message(method: str, kind: str, value: object) -> None:
    try:
        read_answer(method, json.dumps({kind: value}).encode())
    except (MalformedAnswerError, ProcessFailureError) as refused:
        assert str(refused) or kind == "failed"  # noqa: PT017 - which of the two it is, is chance


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32-le"])
def test_json_in_another_encoding_is_malformed(encoding: str) -> None:
    with pytest.raises(MalformedAnswerError, match="not JSON"):
        read_answer("join", '{"answer": null}'.encode(encoding))


@given(st.binary(max_size=50))
def test_bytes_that_are_no_message_are_malformed(message: bytes) -> None:
    with pytest.raises(MalformedAnswerError):
        read_answer("block", message)


def test_an_exception_of_our_own_code_is_told_in_words() -> None:
    with pytest.raises(ProcessFailureError, match="KeyError: 'x'"):
        read_answer("load", write_failure("KeyError: 'x'"))


def test_half_a_character_in_a_text_becomes_a_mark_of_a_question() -> None:
    assert read_answer("not_made", b'{"answer": ["a\\ud800b"]}') == ["a?b"]
