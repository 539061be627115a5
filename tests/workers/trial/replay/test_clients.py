"""The names of servers that stand for what clients of the job's own reach."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.fx import Graph, GraphModule

from fxlib import wire
from fxlib.spec.profile import CallProfile, Opaque, Profile, ServerProfile, Spread
from fxlib.spec.servers import is_worker_name
from fxlib_workers.trial.replay.clients import reached_by, with_remote_calls, worker_name

texts = st.text(max_size=200)


@given(texts)
@example("features.example.com:8000")
@example("a" * 200)
@example(":61:")
@example("::" * 100)
def test_a_name_is_one_that_a_worker_may_have(reached: str) -> None:
    assert is_worker_name(worker_name(reached))


@given(st.text(max_size=20))
@example("features.example.com:8000")
@example("\N{GRINNING FACE}é:61:")
def test_a_short_name_leads_back_to_what_the_client_reaches(reached: str) -> None:
    assert reached_by(worker_name(reached)) == reached or len(worker_name(reached)) == 120


@given(texts, texts)
@example("a" * 150 + "b", "a" * 150 + "c")
@example("." * 60, "." * 61)
def test_different_texts_have_different_names(one: str, other: str) -> None:
    assert (worker_name(one) == worker_name(other)) == (one == other)


@given(st.from_regex(r"client:[A-Za-z0-9_:-]{0,119}", fullmatch=True))
@example("client::110000:")  # beyond the last character
@example("client::d800:")  # half of a surrogate pair, which no message holds
@example("client::" + "f" * 100 + ":")
@example("client::61:")  # `worker_name` does not escape an "a"
@example("client::00002e:")
def test_a_name_that_nothing_was_turned_into_stays_as_it_is(worker: str) -> None:
    reached = reached_by(worker)
    reached.encode()
    assert reached == worker or worker_name(reached) == worker


def test_a_server_of_the_profile_that_has_the_name_of_a_stand_in_gives_way() -> None:
    name = worker_name("features.example.com")
    servers = tuple(
        ServerProfile(name=each, round_trip_s=0.0, concurrency=count, bytes_per_s=1.0)
        for each, count in ((name, 1), ("features.example.com", 2))
    )
    call = CallProfile(
        call="fetch",
        function="shop.features:fetch",
        to="features.example.com",
        request_bytes=0,
        response_bytes=0,
        returns=Opaque(),
        issue_s=0.0,
        wait_s=0.0,
        service_s=Spread(quantiles=(0.0,)),
    )
    turned = with_remote_calls(Profile(calls=(call,), servers=servers), _graph_of_client())
    assert turned is not None
    assert [each.to for each in turned.calls] == [name]
    assert turned.server_by_name[name].concurrency == 2
    assert len({each.name for each in turned.servers}) == len(turned.servers)


def _graph_of_client() -> bytes:
    graph = Graph()
    graph.output(graph.placeholder("x"))
    message = wire.encode(GraphModule(nn.Module(), graph)).graph
    message.clients.add(function="shop.features:fetch")
    return message.SerializeToString()
