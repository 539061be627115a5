"""What a replaying server remembers of writes, by their contracts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fxlib.spec.contract import PURE, Contract
from fxlib_workers.trial.replay.server import WriteHistory

TABLES = Contract(reads=frozenset({"tables"}))
WRITES = Contract(writes=frozenset({"tables"}))
DENSE = Contract(writes=frozenset({"dense"}))
ADDS = Contract(writes=frozenset({"tables"}), commutes=True)
A, B = b"a" * 16, b"b" * 16


def after(*writes: tuple[Contract | None, bytes]) -> WriteHistory:
    history = WriteHistory()
    for contract, call in writes:
        history.write(contract, call)
    return history


def test_a_read_sees_the_writes_of_what_it_reads() -> None:
    assert after((WRITES, A)).visible_to(TABLES) != after().visible_to(TABLES)
    assert after((WRITES, A)).visible_to(TABLES) != after((WRITES, A), (WRITES, A)).visible_to(TABLES)


def test_a_read_does_not_see_writes_of_other_state() -> None:
    assert after((DENSE, A)).visible_to(TABLES) == after().visible_to(TABLES)


def test_a_pure_call_sees_nothing() -> None:
    assert after((None, A), (WRITES, B)).visible_to(PURE) == after().visible_to(PURE)


def test_a_call_without_a_contract_sees_and_writes_everything() -> None:
    assert after((None, A)).visible_to(TABLES) != after().visible_to(TABLES)
    assert after((DENSE, A)).visible_to(None) != after().visible_to(None)
    assert after((ADDS, A)).visible_to(None) != after().visible_to(None)


def test_a_star_is_everything() -> None:
    assert after((Contract(writes=frozenset({"*"})), A)).visible_to(TABLES) != after().visible_to(TABLES)
    assert after((DENSE, A)).visible_to(Contract(reads=frozenset({"*"}))) != after().visible_to(
        Contract(reads=frozenset({"*"}))
    )


def test_reads_leave_nothing_behind() -> None:
    assert after((TABLES, A), (PURE, B)).digest() == after().digest()


def test_the_order_of_writes_shows() -> None:
    assert after((WRITES, A), (WRITES, B)).digest() != after((WRITES, B), (WRITES, A)).digest()
    assert after((None, A), (None, B)).digest() != after((None, B), (None, A)).digest()


def test_the_order_of_writes_of_different_state_does_not_show() -> None:
    assert after((WRITES, A), (DENSE, B)).digest() == after((DENSE, B), (WRITES, A)).digest()


@given(st.permutations([A, B, b"c" * 16, A]))
def test_writes_that_commute_may_come_in_any_order(calls: list[bytes]) -> None:
    history = after(*((ADDS, call) for call in calls))
    assert history.digest() == after((ADDS, A), (ADDS, A), (ADDS, B), (ADDS, b"c" * 16)).digest()
    assert history.digest() != after((ADDS, A), (ADDS, B), (ADDS, b"c" * 16)).digest()


def test_a_write_that_commutes_does_not_tell_which_came_before_it() -> None:
    assert after((ADDS, A)).visible_to(ADDS) == after().visible_to(ADDS)
    assert after((WRITES, A)).visible_to(ADDS) != after().visible_to(ADDS)


def test_writes_that_commute_keep_their_order_with_others() -> None:
    assert after((ADDS, A), (WRITES, B)).digest() != after((WRITES, B), (ADDS, A)).digest()


def test_writes_to_different_parts_may_come_in_any_order_and_those_to_one_may_not() -> None:
    def parts(*writes: tuple[str, bytes]) -> WriteHistory:
        history = WriteHistory()
        for part, call in writes:
            history.write(WRITES, call, part)
        return history

    assert parts(("x", A), ("y", B)).digest() == parts(("y", B), ("x", A)).digest()
    assert parts(("x", A), ("x", B)).digest() != parts(("x", B), ("x", A)).digest()
    assert parts(("x", A), ("", B)).digest() != parts(("", B), ("x", A)).digest()
    assert parts(("x", A)).visible_to(WRITES, "y") == parts().visible_to(WRITES, "y")
    assert parts(("x", A)).visible_to(TABLES) != parts().visible_to(TABLES)


CONTRACTS = (
    *(None, PURE, TABLES, WRITES, DENSE, ADDS, Contract(reads=frozenset({"dense"}))),
    *(Contract(reads=frozenset({"*"})), Contract(writes=frozenset({"*"}))),
    Contract(reads=frozenset({"dense"}), writes=frozenset({"tables"})),
)
ANYTHING = Contract(writes=frozenset({"*"}))
Steps = list[tuple[Contract | None, bytes]]


def conflict(one: Contract | None, other: Contract | None) -> bool:
    """Whether two calls must keep their order: one may write what the other touches."""
    one, other = (ANYTHING if each is None else each for each in (one, other))
    if one.commutes and other.commutes:
        return meet(one.writes, other.reads) or meet(one.reads, other.writes)
    return meet(one.writes, other.reads | other.writes) or meet(other.writes, one.reads | one.writes)


def meet(some: frozenset[str], others: frozenset[str]) -> bool:
    return bool(some & others) or bool(some and others and "*" in some | others)


def outcome(steps: Steps) -> tuple[dict[bytes, bytes], str]:
    """What each call sees, and what is left at the end."""
    history, seen = WriteHistory(), {}
    for contract, call in steps:
        seen[call] = history.visible_to(contract)
        history.write(contract, call)
    return seen, history.digest()


PROGRAMS = st.lists(st.sampled_from(CONTRACTS), min_size=2, max_size=8).map(
    lambda contracts: [(contract, bytes([place + 1]) * 16) for place, contract in enumerate(contracts)]
)


@given(PROGRAMS, st.data())
def test_a_legal_motion_does_not_show_and_an_illegal_one_does(steps: Steps, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(steps) - 2))
    moved = [*steps[:place], steps[place + 1], steps[place], *steps[place + 2 :]]
    assert (outcome(steps) == outcome(moved)) is not conflict(steps[place][0], steps[place + 1][0])
