"""What is refused at the door, and that it is said which field is at fault."""

import pytest

from fxlib.v1 import graph_pb2, jobs_pb2
from fxlib_service.config import Limits
from fxlib_service.errors import Code, ServiceError
from tests.service.asking import Change, profiled
from tests.service.support import (
    fields,
    graph_bytes,
    make_service,
    ref,
    request,
    submit,
)


async def refusal(asked: jobs_pb2.OptimizeRequest, limits: Limits | None = None) -> ServiceError:
    async with make_service(limits=limits) as core:
        with pytest.raises(ServiceError) as caught:
            await submit(core, asked)
        assert (await core.optimizer.ListJobs(jobs_pb2.ListJobsRequest(), None)).jobs == []
        return caught.value


async def test_a_profile_out_of_bounds_is_refused_by_its_field() -> None:
    error = await refusal(profiled(service_s=float("nan")))
    assert error.code is Code.INVALID_REQUEST
    assert [each.field for each in error.violations] == ["profile: Profile.calls[0].service_s.quantiles"]


@pytest.mark.parametrize(
    "change, field",
    [
        (lambda asked: asked.ClearField("request_id"), "request_id"),
        (lambda asked: setattr(asked, "request_id", "x" * 129), "request_id"),
        (lambda asked: setattr(asked, "name", "a\nb"), "name"),
        (lambda asked: setattr(asked, "name", "x" * 257), "name"),
        (lambda asked: setattr(asked, "namespace", "../etc"), "namespace"),
        (lambda asked: setattr(asked, "torch_version", ""), "torch_version"),
        (lambda asked: setattr(asked, "torch_version", "2.13; rm -rf /"), "torch_version"),
        (lambda asked: asked.labels.update({"a b": "c"}), "labels['a b']"),
        (lambda asked: asked.labels.update({f"l{i}": "" for i in range(33)}), "labels"),
        (lambda asked: asked.ClearField("graph"), "graph"),
        (lambda asked: setattr(asked.graph, "sha256", "../../etc/passwd"), "graph.sha256"),
        (lambda asked: setattr(asked.recipe, "name", "no-such-recipe"), "recipe"),
        (lambda asked: asked.recipe.passes.add(name="no_such_pass"), "recipe"),
        (lambda asked: setattr(asked.workload.loss, "name", "no-such-loss"), "workload"),
        (lambda asked: asked.workload.ClearField("description"), "workload"),
        (lambda asked: setattr(asked.workload, "mode", 77), "workload"),
        (lambda asked: setattr(asked.workload, "threads", 0), "workload"),
        (lambda asked: setattr(asked.workload.optimizer, "lr", float("nan")), "workload"),
        (lambda asked: setattr(asked.trial, "budget_s", -1.0), "trial"),
    ],
)
async def test_a_field_that_is_not_valid_is_named(change: Change, field: str) -> None:
    asked = request()
    change(asked)
    error = await refusal(asked)
    assert error.code is Code.INVALID_REQUEST
    assert any(each.startswith(field) for each in fields(error)), fields(error)


async def test_all_fields_at_fault_are_named_at_once() -> None:
    asked = request(request_id="", name="\n", namespace=".")
    assert fields(await refusal(asked)) == ["request_id", "name", "namespace"]


async def test_a_graph_that_was_not_uploaded_is_missing() -> None:
    error = await refusal(request(graph=b"never sent"))
    assert error.code is Code.BLOB_MISSING
    assert fields(error) == ["graph"]


async def test_batches_that_were_not_uploaded_are_missing() -> None:
    asked = request()
    asked.workload.batches.batches.append(ref(b"never sent"))
    error = await refusal(asked)
    assert error.code is Code.BLOB_MISSING
    assert fields(error) == ["workload.blobs[0]"]


@pytest.mark.parametrize("data", [b"", b"not a graph", b"\x80\x04\x95pickle", b"\xff" * 1000])
async def test_bytes_that_are_no_graph_are_refused(data: bytes) -> None:
    async with make_service(graphs=[data]) as core:
        with pytest.raises(ServiceError) as caught:
            await submit(core, request(graph=data))
    assert caught.value.code is Code.INVALID_GRAPH
    assert fields(caught.value)[0].startswith("graph")


async def test_a_graph_of_a_later_format_is_refused() -> None:
    graph = graph_pb2.Graph.FromString(graph_bytes())
    graph.format = 99
    async with make_service(graphs=[graph.SerializeToString()]) as core:
        with pytest.raises(ServiceError) as caught:
            await submit(core, request(graph=graph.SerializeToString()))
    assert caught.value.code is Code.INVALID_GRAPH


async def test_a_graph_that_is_too_large_is_not_even_read() -> None:
    assert (await refusal(request(), Limits(graph_bytes=10))).code is Code.INVALID_GRAPH


async def test_a_recipe_that_needs_weights_wants_a_graph_that_was_sent_with_them() -> None:
    asked = request()
    asked.recipe.name = "inference"
    error = await refusal(asked)
    assert error.code is Code.INVALID_GRAPH
    assert fields(error) == ["graph: fold_norms"]
    assert "without the values of 'weight'" in error.violations[0].problem
