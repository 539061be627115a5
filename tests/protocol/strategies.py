"""Random instances of what travels."""

import math
from datetime import UTC, datetime
from typing import Any

import torch
from hypothesis import strategies as st

from fxlib.reasons import Declined, Reason
from fxlib.spec.contract import Contract
from fxlib.spec.inputs import Batch, BatchSpec, Tensors
from fxlib.spec.job import Blob, Event, Job, JobFailure, JobFilter, TrialOptions
from fxlib.spec.profile import CallProfile, NodeProfile, Opaque, Profile, Push, ServerProfile, Spread, TensorShape
from fxlib.spec.report import (
    CallReport,
    CandidateReport,
    Estimate,
    PassReport,
    Report,
    Sensitivity,
    Span,
    Timeline,
    Undeclared,
)
from fxlib.spec.workload import OPTIMIZERS, Dense, LayerRange, Optimizer, RemoteObject, Server, Table, Workload

text = st.text("ab ×\n", max_size=4)
word = st.sampled_from(["a", "bc", "def_0", "weight", "x1"])
function = st.sampled_from(["ps:push", "my.ps:Table.lookup", "a.b.c:d"])
number = st.floats(allow_nan=False)
amount = st.floats(0, 1e9)
line = st.text("ab ×", max_size=4)
size = st.integers(0, 2**31 - 1)

immediate: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | number | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(word, inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=8,
)
structure: st.SearchStrategy[Any] = st.recursive(
    st.none(),
    lambda inner: st.tuples(inner, inner) | st.lists(inner, min_size=1, max_size=3) | st.dictionaries(word, inner),
    max_leaves=6,
)

contracts = st.builds(Contract, pure=st.just(True), returns=structure) | st.builds(
    Contract,
    reads=st.frozensets(word, max_size=3),
    writes=st.frozensets(word, min_size=1, max_size=3),
    commutes=st.booleans(),
    gradient=st.none() | function,
    batchable=st.booleans(),
    part=st.just("table"),
    part_at=st.none() | st.integers(0, 5),
    keys=st.just("indices"),
    keys_at=st.none() | st.integers(0, 5),
    batched_by=st.none() | function,
)

dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float8_e5m2])
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
tensors = st.builds(Tensors, shape=shapes, dtype=dtypes) | st.builds(
    lambda shape, dtype, low, span: Tensors(shape=shape, dtype=dtype, low=low, high=low + span),
    shapes,
    dtypes,
    st.integers(0, 100),
    st.integers(1, 100),
)
real_tensors = st.builds(lambda shape, dtype: torch.ones(shape).to(dtype), shapes, dtypes)
specs = st.builds(
    BatchSpec,
    inputs=st.lists(tensors, min_size=1, max_size=3).map(tuple),
    kwargs=st.dictionaries(word, tensors, max_size=2),
    target=st.none() | tensors,
    count=st.integers(1, 9),
)
batches = st.builds(
    Batch,
    inputs=st.lists(real_tensors, min_size=1, max_size=3).map(tuple),
    kwargs=st.dictionaries(word, real_tensors, max_size=2),
    target=st.none() | real_tensors,
)

table_optimizers = st.sampled_from(["sgd", "adagrad"])
servers = st.builds(
    Server,
    name=word,
    tables=st.lists(
        st.builds(Table, name=word, rows=st.integers(1, 99), dim=st.integers(1, 9), optimizer=table_optimizers)
    ).map(tuple),
    dense=st.lists(st.builds(Dense, name=word, shape=shapes, optimizer=table_optimizers)).map(tuple),
    setup=st.none() | function,
    service_time_s=st.floats(0, 10),
    service_time_per=st.sampled_from(["call", "item"]),
)
_step: dict[str, st.SearchStrategy[Any]] = {
    "batches": specs,
    "loss": st.sampled_from(["mean", "sum"]),
    "optimizer": st.builds(
        Optimizer, name=st.sampled_from(OPTIMIZERS), lr=amount, momentum=amount, weight_decay=amount
    ),
    "threads": st.integers(1, 99),
    "trainers": st.integers(1, 99),
    "servers": st.lists(servers, max_size=3, unique_by=lambda server: server.name).map(tuple),
    "rrefs": st.dictionaries(
        word,
        st.builds(
            RemoteObject,
            owner=word,
            cls=function,
            args=st.lists(immediate, max_size=2).map(tuple),
            kwargs=st.dictionaries(word, immediate, max_size=2),
        ),
        max_size=2,
    ),
    "contracts": st.dictionaries(function, contracts, max_size=2),
    "assume": st.sampled_from(["", "reads", "pure"]),
    "seed": st.integers(0, 2**63 - 1),
    "ranges": st.lists(
        st.builds(
            LayerRange,
            weights=st.lists(word, max_size=2).map(tuple),
            use=st.integers(0, 9),
            least=st.floats(-9, 0),
            most=st.floats(0, 9),
            values=st.integers(0, 2**62),
            too_far=word,
            shape=st.lists(st.integers(0, 2**62), max_size=4).map(tuple),
        )
        | st.just(LayerRange(weights=("weight",), least=-math.inf, most=math.inf, values=0)),
        max_size=2,
    ).map(tuple),
}
workloads = st.builds(Workload, mode=st.sampled_from(["forward", "distributed"]), **_step) | st.builds(
    Workload,
    mode=st.just("local"),
    accumulation=st.integers(1, 9),
    clip_norm=st.none() | st.floats(0.1, 9),
    loss_scale=st.none() | st.floats(0.1, 9),
    pipeline=st.integers(1, 64),
    stale=st.integers(0, 64),
    **_step,
)

trials = st.builds(
    TrialOptions,
    min_gain=st.floats(0, 10),
    confidence=st.floats(0.5, 0.9999),
    budget_s=st.floats(1, 86_400),
    sameness_steps=st.integers(1, 1000),
    step_timeout_s=st.floats(0.1, 3600),
)

reasons = st.sampled_from(Reason)
estimates = st.builds(Estimate, value=amount, low=amount, high=amount)
gains = st.lists(st.floats(-1, 1e9), min_size=3, max_size=3).map(
    lambda ends: Estimate(**dict(zip(("low", "value", "high"), sorted(ends), strict=True)))
)
spans = st.builds(Span, kind=word, name=line, to=line, start_s=amount, end_s=amount)
timelines = st.builds(Timeline, spans=st.lists(spans, max_size=3).map(tuple), step_s=amount, steps=st.integers(1, 4))
calls = st.builds(
    CallReport,
    node=word,
    function=function,
    to=line,
    action=st.sampled_from(["moved", "merged", "left_alone"]),
    reason=reasons,
    detail=line,
    remedy=line,
    source=line,
    exposed_before_s=st.none() | amount,
    exposed_after_s=st.none() | amount,
    limited_by=st.none() | reasons,
    limit_detail=line,
    ahead=st.none() | reasons,
    ahead_detail=line,
    ahead_remedy=line,
    way=word,
)
candidates = st.builds(
    CandidateReport, name=line, predicted_step_s=st.none() | amount, gain=st.none() | gains, verdict=line
)
undeclared = st.builds(
    Undeclared,
    functions=st.lists(line, min_size=1, max_size=2).map(tuple),
    calls=size,
    gain=st.floats(-1, 1e6),
    remedy=line,
    measured=st.booleans(),
)
declined = st.builds(Declined, node=word, reason=reasons, detail=line, remedy=line)
sensitivity = st.builds(
    Sensitivity,
    nodes=st.lists(word, max_size=2).map(tuple),
    error=st.floats(0.0, allow_nan=False),
    lossy=st.booleans(),
)
passes = st.builds(
    PassReport,
    name=word,
    changes=size,
    seconds=amount,
    declined=st.lists(declined, max_size=2).map(tuple),
    diff=st.lists(line, max_size=2).map("\n".join),
    sensitivity=st.lists(sensitivity, max_size=2).map(tuple),
)
lines = st.lists(line, max_size=2).map(tuple)
reports = st.builds(
    Report,
    decision=st.sampled_from(["adopt", "keep_original"]),
    reason=st.none() | reasons,
    explanation=line,
    qps_original=st.none() | estimates,
    qps_optimized=st.none() | estimates,
    gain=st.none() | gains,
    calls=st.lists(calls, max_size=3).map(tuple),
    passes=st.lists(passes, max_size=3).map(tuple),
    not_reproduced=lines,
    notes=lines,
    preserves=st.sampled_from(["bitwise", "tolerance", "lossy"]),
    assumptions=lines,
    timeline_original=st.none() | timelines,
    timeline_optimized=st.none() | timelines,
    timeline_bound=st.none() | timelines,
    bound_s=st.none() | amount,
    candidates=st.lists(candidates, max_size=3).map(tuple),
    undeclared=st.lists(undeclared, max_size=2).map(tuple),
    pipeline=st.integers(0, 64),
    stale=st.integers(0, 64),
    staleness=st.dictionaries(st.integers(0, 64), st.integers(0, 2**62), max_size=3),
    pipeline_bound_s=st.none() | amount,
    pipeline_limit=word,
    blocks=size,
    phase_seconds=st.dictionaries(word, amount, max_size=3),
    hardware=line,
    torch_version=line,
)

seconds = st.floats(0, 86_400)
spreads = st.builds(lambda samples: Spread.of(samples, points=3), st.lists(st.floats(0, 3600), min_size=1, max_size=9))
floating = st.sampled_from([torch.float32, torch.bfloat16, torch.complex64])
tensor_shapes = st.builds(TensorShape, shape=shapes, dtype=dtypes) | st.builds(
    TensorShape, shape=shapes, dtype=floating, requires_grad=st.just(True)
)
returned: st.SearchStrategy[Any] = st.recursive(
    tensor_shapes | st.builds(Opaque, value=st.none() | st.booleans() | st.integers() | number | text),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3) | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=8,
)
pushes = st.builds(Push, function=function, request_bytes=size, issue_s=seconds, service_s=spreads, ready_s=seconds)
call_profiles = st.builds(
    CallProfile,
    call=text,
    function=function,
    to=word,
    request_bytes=size,
    response_bytes=size,
    returns=returned,
    issue_s=seconds,
    wait_s=seconds,
    service_s=spreads,
    wake_s=seconds,
    push=st.none() | pushes,
)
node_profiles = st.builds(NodeProfile, node=text, seconds=seconds, output_bytes=size)
server_profiles = st.builds(
    ServerProfile,
    name=text,
    round_trip_s=seconds,
    concurrency=st.integers(1, 64),
    bytes_per_s=st.floats(1, 1e12),
    per_item_s=st.none() | seconds,
    per_call_s=st.none() | seconds,
    per_turn_s=st.none() | seconds,
)
profiles = st.builds(
    Profile,
    calls=st.lists(call_profiles, max_size=3, unique_by=lambda each: each.call).map(tuple),
    nodes=st.lists(node_profiles, max_size=3, unique_by=lambda each: each.node).map(tuple),
    servers=st.lists(server_profiles, max_size=3, unique_by=lambda each: each.name).map(tuple),
    loss_s=seconds,
    backward_s=seconds,
    rest_s=seconds,
    step_s=seconds,
    least_share=st.floats(0, 1, exclude_min=True),
    cores_s=seconds,
    steps=size,
    hardware=line,
    torch_version=line,
    notes=lines,
)

blobs = st.builds(Blob, sha256=st.from_regex(r"[0-9a-f]{64}", fullmatch=True), size=size)
times = st.datetimes(datetime(1970, 1, 2), datetime(2100, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001 - bounds
states = st.sampled_from(["queued", "running", "succeeded", "failed", "cancelled"])
events = st.builds(
    Event, sequence=size, at=times, state=states, phase=line, message=line, progress=st.none() | st.floats(0, 1)
)
labels = st.dictionaries(line, line, max_size=2)
filters = st.builds(
    JobFilter, namespace=line, name=line, labels=labels, states=st.lists(states, max_size=3).map(tuple), id_prefix=line
)
jobs = st.builds(
    lambda job, report, graph: Job(**{**job, "report": report, "graph": graph if report else None}),
    st.fixed_dictionaries(
        {
            "id": word,
            "request_id": line,
            "name": line,
            "namespace": line,
            "labels": labels,
            "where": labels,
            "state": states,
            "phase": line,
            "attempts": size,
            "worker_id": line,
            "created_at": st.none() | times,
            "started_at": st.none() | times,
            "finished_at": st.none() | times,
            "failure": st.none() | st.builds(JobFailure, code=word, message=line),
            "cached": st.booleans(),
            "last_sequence": size,
            "asked_by": line,
            "measured_by": line,
            "waits_for": line,
        }
    ),
    st.none() | reports,
    st.none() | blobs,
)
