"""Random instances of what travels."""

from datetime import UTC, datetime
from typing import Any

import torch
from hypothesis import strategies as st

from fxlib.batches import Batch, BatchSpec, Tensors
from fxlib.contracts import Contract
from fxlib.jobs import Blob, Event, Failure, Job
from fxlib.reasons import Declined, Reason
from fxlib.result import CallReport, Estimate, PassReport, Report, Span, Timeline
from fxlib.trial import TrialOptions
from fxlib.workload import OPTIMIZERS, Dense, Optimizer, RemoteObject, Server, Table, Workload

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
    batched_by=st.none() | function,
)

dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float8_e5m2])
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
tensors = st.builds(Tensors, shape=shapes, dtype=dtypes) | st.builds(
    lambda shape, dtype, low, span: Tensors(shape=shape, dtype=dtype, low=low, high=low + span),
    shapes,
    dtypes,
    st.integers(-1000, 1000),
    st.integers(1, 1000),
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
)
workloads = st.builds(
    Workload,
    batches=specs,
    loss=st.sampled_from(["mean", "sum"]),
    optimizer=st.builds(Optimizer, name=st.sampled_from(OPTIMIZERS), lr=amount, momentum=amount, weight_decay=amount),
    mode=st.sampled_from(["forward", "local", "distributed"]),
    threads=st.integers(1, 99),
    trainers=st.integers(1, 99),
    servers=st.lists(servers, max_size=3, unique_by=lambda server: server.name).map(tuple),
    rrefs=st.dictionaries(
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
    contracts=st.dictionaries(function, contracts, max_size=2),
    assume=st.sampled_from(["", "reads", "pure"]),
    seed=st.integers(0, 2**63 - 1),
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
timelines = st.builds(Timeline, spans=st.lists(spans, max_size=3).map(tuple), step_s=amount)
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
)
declined = st.builds(Declined, node=word, reason=reasons, detail=line, remedy=line)
passes = st.builds(
    PassReport, name=word, changes=size, seconds=amount, declined=st.lists(declined, max_size=2).map(tuple)
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
    preserves=st.sampled_from(["bitwise", "tolerance", "lossy"]),
    assumptions=lines,
    timeline_original=st.none() | timelines,
    timeline_optimized=st.none() | timelines,
    blocks=size,
    phase_seconds=st.dictionaries(word, amount, max_size=3),
    hardware=line,
    torch_version=line,
)

blobs = st.builds(Blob, sha256=st.from_regex(r"[0-9a-f]{64}", fullmatch=True), size=size)
times = st.datetimes(datetime(1970, 1, 2), datetime(2100, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001 - bounds
states = st.sampled_from(["queued", "running", "succeeded", "failed", "cancelled"])
events = st.builds(
    Event, sequence=size, at=times, state=states, phase=line, message=line, progress=st.none() | st.floats(0, 1)
)
jobs = st.builds(
    lambda job, report, graph: Job(**{**job, "report": report, "graph": graph if report else None}),
    st.fixed_dictionaries(
        {
            "id": word,
            "request_id": line,
            "name": line,
            "namespace": line,
            "labels": st.dictionaries(line, line, max_size=2),
            "state": states,
            "phase": line,
            "attempts": size,
            "worker_id": line,
            "created_at": st.none() | times,
            "started_at": st.none() | times,
            "finished_at": st.none() | times,
            "failure": st.none() | st.builds(Failure, code=word, message=line),
            "cached": st.booleans(),
            "last_sequence": size,
        }
    ),
    st.none() | reports,
    st.none() | blobs,
)
