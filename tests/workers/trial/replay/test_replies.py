"""Made-up results: as recorded in form, and decided by a digest in value."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxlib.spec.profile import Opaque, TensorShape
from fxlib_workers.trial.replay.replies import attach_to, call_digest, make_reply
from fxlib_workers.trial.replay.server import ReplayedFunction

SEED, OTHER = bytes(16), b"\1" * 16


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.uint8, torch.bool, torch.float8_e4m3fn),
    ],
)
def test_tensors_have_the_recorded_shape_and_dtype(dtype: torch.dtype) -> None:
    made = make_reply(TensorShape(shape=(3, 0, 2), dtype=dtype), SEED, attached=False)
    assert made.shape == (3, 0, 2)
    made = make_reply(TensorShape(shape=(3, 5), dtype=dtype), SEED, attached=False)
    assert (made.shape, made.dtype, made.requires_grad) == ((3, 5), dtype, False)


@pytest.mark.parametrize("shape", [(64,), (300, 300), (1 << 17,)])
def test_equal_seeds_give_equal_bits_and_others_do_not(shape: tuple[int, ...]) -> None:
    described = TensorShape(shape=shape, dtype=torch.float32)
    made = make_reply(described, SEED, attached=False)
    assert torch.equal(made, make_reply(described, SEED, attached=False))
    assert not torch.equal(made, make_reply(described, OTHER, attached=False))
    assert made.abs().max() < 1
    assert made.std() > 0.05


def test_integers_are_rows_of_any_table_with_two() -> None:
    made = make_reply(TensorShape(shape=(500,), dtype=torch.int64), SEED, attached=False)
    assert set(made.tolist()) == {0, 1}


@pytest.mark.slow
def test_integers_of_thousands_of_seeds_differ() -> None:
    shape = TensorShape(shape=(64,), dtype=torch.int64, requires_grad=False)
    replies = {make_reply(shape, call_digest(place), attached=False).numpy().tobytes() for place in range(3000)}
    assert len(replies) == 3000


def test_structure_and_plain_values_are_as_recorded() -> None:
    tensor = TensorShape(shape=(2,), dtype=torch.float32, requires_grad=True)
    made = make_reply(
        {"rows": (tensor, [Opaque(value=7)]), "name": Opaque(value="x"), "none": Opaque()}, SEED, attached=True
    )
    assert made["rows"][1] == [7]
    assert (made["name"], made["none"]) == ("x", None)
    assert made["rows"][0].requires_grad
    assert made["rows"][0].is_leaf


def test_two_tensors_of_one_reply_differ() -> None:
    tensor = TensorShape(shape=(8,), dtype=torch.float32)
    one, other = make_reply((tensor, tensor), SEED, attached=False)
    assert not torch.equal(one, other)


@pytest.mark.slow
@given(st.lists(st.one_of(st.integers(), st.text(), st.floats(allow_nan=False), st.none(), st.booleans()), max_size=4))
def test_plain_arguments_count_by_value(values: list[object]) -> None:
    assert call_digest("f", tuple(values), {}) == call_digest("f", (*values,), {})
    assert call_digest("f", tuple(values), {}) != call_digest("f", (*values, 1), {})
    assert call_digest("f", tuple(values), {}) != call_digest("g", tuple(values), {})


def test_tensors_count_by_their_bits() -> None:
    assert call_digest(torch.ones(2)) == call_digest(torch.ones(2))
    assert call_digest(torch.ones(2)) != call_digest(torch.ones(2, dtype=torch.float64))
    assert call_digest(torch.tensor([0.0])) != call_digest(torch.tensor([-0.0]))


def test_objects_count_by_their_class_alone_since_their_text_may_hold_an_address() -> None:
    assert call_digest(object()) == call_digest(object())


def test_a_reply_belongs_to_the_autograd_graph_of_what_was_sent() -> None:
    sent = torch.ones(3, 2, requires_grad=True)
    reply = {"found": torch.arange(4.0).requires_grad_(), "rows": torch.arange(3)}
    found = attach_to(reply, [sent])
    (found["found"] * torch.tensor([1.0, 2.0, 3.0, 6.0])).sum().backward()

    assert torch.equal(found["found"], reply["found"])
    assert found["rows"] is reply["rows"]
    assert reply["found"].grad is not None
    assert reply["found"].grad.tolist() == [1.0, 2.0, 3.0, 6.0]
    assert sent.grad is not None
    assert torch.equal(sent.grad, torch.full((3, 2), 3.0))


def test_functions_and_rrefs_among_what_is_sent_count_by_their_names() -> None:
    assert call_digest(torch.relu) != call_digest(torch.sigmoid)
    assert call_digest(ReplayedFunction("job:a")) != call_digest(ReplayedFunction("job:b"))
    assert call_digest(ReplayedFunction("job:a")) == call_digest(ReplayedFunction("job:a"))
