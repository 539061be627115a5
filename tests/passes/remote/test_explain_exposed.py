"""What keeps a call exposed is named: its arguments, an effect, the server, the link, or that no work is left."""

from __future__ import annotations

import torch

from fxlib.reasons import Reason
from fxlib.recipes import recipes
from fxlib.runtime import CapturedModule
from fxlib.spec.profile import CallProfile, NodeProfile, Profile, ServerProfile, Spread, TensorShape
from fxlib.spec.report import CallReport
from tests.analysis.sketch import WRITE, Sketch


def measured(call: str, *, service_s: float = 0.01, response_bytes: int = 100) -> CallProfile:
    return CallProfile(
        call=call,
        function=f"shop:{call}",
        to="ps0",
        request_bytes=100,
        response_bytes=response_bytes,
        returns=TensorShape(shape=(2, 4), dtype=torch.float32),
        issue_s=1e-5,
        wait_s=1e-5,
        service_s=Spread(quantiles=(service_s,)),
    )


def report(
    module: CapturedModule, name: str, *calls: CallProfile, work_s: float = 0.0, concurrency: int = 16
) -> CallReport:
    """What becomes of a call, where the work called "work" takes so long and all else nothing."""
    nodes = tuple(
        NodeProfile(node=node.name, seconds=work_s if node.name == "work" else 1e-7, output_bytes=32)
        for node in module.graph.nodes
    )
    server = ServerProfile(name="ps0", round_trip_s=1e-4, concurrency=concurrency, bytes_per_s=1e7)
    rewrite = recipes.apply(module, profile=Profile(calls=calls, nodes=nodes, servers=(server,)))
    return next(call for call in rewrite.calls if call.node == name)


def beside_work() -> CapturedModule:
    program = Sketch("x", "ids")
    x, ids = program.inputs
    rows = program.call("rows", ids)
    work = program.work("work", torch.matmul, x, x)
    return program.returns(program.work("sum", torch.add, work, rows))


def test_a_call_that_work_hides_has_no_limit() -> None:
    found = report(beside_work(), "rows", measured("rows"), work_s=0.02)
    assert found.action == "moved"
    assert found.limited_by is None


def test_a_call_longer_than_all_work_is_limited_by_the_work_there_is() -> None:
    assert report(beside_work(), "rows", measured("rows"), work_s=0.001).limited_by is Reason.LIMITED_BY_WORK


def test_a_large_answer_is_limited_by_the_link() -> None:
    large = measured("rows", service_s=0.1, response_bytes=1_000_000)
    found = report(beside_work(), "rows", large, work_s=0.001)
    assert (found.limited_by, found.limit_detail) == (Reason.LIMITED_BY_BANDWIDTH, "ps0")


def test_calls_that_queue_are_limited_by_the_server() -> None:
    program = Sketch("x", "ids")
    x, ids = program.inputs
    names = [f"rows{index}" for index in range(8)]
    rows = [program.call(name, ids) for name in names]
    work = program.work("work", torch.matmul, x, x)
    module = program.returns(program.work("sum", torch.stack, [work, *rows]))
    found = report(module, "rows7", *map(measured, names), work_s=0.001, concurrency=1)
    assert (found.limited_by, found.limit_detail) == (Reason.LIMITED_BY_SERVER, "ps0")


def test_a_call_whose_arguments_come_late_is_limited_by_them() -> None:
    program = Sketch("x", "ids")
    x, _ = program.inputs
    work = program.work("work", torch.matmul, x, x)
    rows = program.call("rows", work)
    module = program.returns(program.work("sum", torch.add, x, rows))
    found = report(module, "rows", measured("rows"), work_s=0.02)
    assert (found.limited_by, found.limit_detail) == (Reason.LIMITED_BY_DATA, "work")


def test_a_call_that_may_not_cross_a_write_is_limited_by_that() -> None:
    program = Sketch("x", "ids")
    x, ids = program.inputs
    program.call("push", ids, contract=WRITE)
    rows = program.call("rows", ids)
    work = program.work("work", torch.matmul, x, x)
    module = program.returns(program.work("sum", torch.add, work, rows))
    found = report(module, "rows", measured("push"), measured("rows"), work_s=0.0001)
    assert (found.limited_by, found.limit_detail) == (Reason.LIMITED_BY_EFFECT, "push")
