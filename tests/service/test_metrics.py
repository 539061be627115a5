"""What the metrics say, and that no client can make them grow without bound."""

import asyncio
import re
import sys

import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics import exposition

from fxlib.v1 import jobs_pb2, workers_pb2
from fxlib_service.core import Core
from fxlib_service.metrics import Figures, ModelFigures, _all_decided
from tests.service.leasing import leased
from tests.service.memory_blob_store import MemoryBlobStore
from tests.service.memory_job_store import MemoryJobStore
from tests.service.support import answer, claim, make_service, request, submit, work, worker


def samples(core: Core) -> dict[str, float]:
    lines = generate_latest(core.registry).decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line.startswith("fxlib_"))}


def figures(gain: float = 0.5) -> Figures:
    return Figures.of(answer(gain=gain), job_id="j")


async def test_an_answer_is_counted_and_its_figures_shown() -> None:
    async with make_service() as core:
        await submit(core)
        await work(core)
        found = samples(core)
        assert found['fxlib_answers_total{cached="false",decision="adopt",reason="FASTER"}'] == 1
        assert found['fxlib_calls_total{action="moved",reason="MOVED"}'] == 3
        assert found['fxlib_model_qps{arm="optimized",fxlib_namespace="default",model="dlrm"}'] == 150
        assert found['fxlib_model_gain_ratio{bound="low",fxlib_namespace="default",model="dlrm"}'] == 0.4
        assert found['fxlib_model_adopted{fxlib_namespace="default",model="dlrm"}'] == 1
        assert found['fxlib_job_phase_seconds_sum{phase="qps"}'] == 4.0
        assert found['fxlib_jobs_finished_total{state="succeeded"}'] == 1
        assert found['fxlib_workers_live{torch_version="2.13.0"}'] == 1


@pytest.mark.slow
async def test_a_large_answer_is_counted_beside_the_event_loop() -> None:
    async with make_service() as core:
        await submit(core)
        large = answer(calls=5_000)
        assert large.ByteSize() > 100_000
        await work(core, large)
        async with asyncio.timeout(60):
            while samples(core).get('fxlib_calls_total{action="moved",reason="MOVED"}') != 5_000:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


def test_a_large_answer_is_not_kept_for_having_been_counted() -> None:
    large = answer(calls=5_000).SerializeToString()
    references = sys.getrefcount(large)
    assert _all_decided(large) == (("adopt", "FASTER"),)
    assert sys.getrefcount(large) == references


async def test_a_cached_answer_is_told_from_a_measured_one() -> None:
    async with make_service() as core:
        await submit(core)
        await work(core)
        await submit(core)
        found = samples(core)
        assert found['fxlib_answers_total{cached="true",decision="adopt",reason="FASTER"}'] == 1
        assert found['fxlib_calls_total{action="moved",reason="MOVED"}'] == 3


async def test_a_job_that_is_claimed_again_has_waited_once() -> None:
    async with make_service() as core:
        await submit(core)
        for _ in range(3):
            lease = await leased(core)
            await core.workers.Release(workers_pb2.ReleaseRequest(job_id=lease.job_id, token=lease.token), None)
        assert samples(core)['fxlib_job_phase_seconds_count{phase="queued"}'] == 1


async def test_the_queue_is_shown() -> None:
    async with make_service() as core:
        assert samples(core)["fxlib_oldest_queued_age_seconds"] == 0
        await submit(core)
        await submit(core, request(fresh=True))
        await claim(core)
        found = samples(core)
        assert found["fxlib_queue_depth"] == found['fxlib_jobs{state="queued"}'] == 1
        assert found['fxlib_jobs{state="running"}'] == 1
        assert 0 < found["fxlib_oldest_queued_age_seconds"] < 60


async def test_gauges_are_as_they_were_after_a_restart() -> None:
    store, blobs = MemoryJobStore(), MemoryBlobStore()
    gauges = re.compile(r"fxlib_(jobs\{|queue_depth|model_|workers_live)")

    def told(core: Core) -> dict[str, float]:
        return {name: value for name, value in samples(core).items() if gauges.match(name)}

    async with make_service(store, blobs) as core:
        for name, gain in (("dlrm", 0.2), ("bert", 0.3), ("dlrm", 0.4)):
            await submit(core, request(name=name, fresh=True))
            await work(core, answer(gain=gain))
        await submit(core, request(fresh=True))
        before = told(core)
    async with make_service(store, blobs) as core:
        assert told(core) == before
        assert before['fxlib_model_gain_ratio{bound="value",fxlib_namespace="default",model="dlrm"}'] == 0.4


async def test_a_figure_leads_to_a_job() -> None:
    async with make_service() as core:
        await submit(core)
        job_id = await work(core)
        text = exposition.generate_latest(core.registry).decode()  # type: ignore[no-untyped-call]
        for figure in ("job_phase_seconds_bucket", "answers_total", "jobs_finished_total"):
            assert re.search(rf'^fxlib_{figure}\S+ 1.0 # \{{job_id="{job_id}"\}}', text, re.MULTILINE)


@pytest.mark.slow
async def test_no_client_makes_the_metrics_grow_without_bound() -> None:
    strange = answer()
    del strange.calls[:], strange.passes[:]
    for number in range(100):
        strange.calls.add(node="n", action="moved", reason_code=f"REASON_{number}")
        strange.passes.add(name=f"pass_{number}", changes=-1, seconds=0.0)
        strange.phase_seconds[f"phase_{number}"] = 1.0
    async with make_service() as core:
        for number in range(60):
            await submit(core, request(name=f"model-{number}", fresh=True))
            strange.reason_code = f"REASON_{number}"
            await work(core, strange, worker(f"w{number}"))
            await claim(core, worker(f"x{number}", torch_version=f"2.{number}"))
        found = samples(core)
        assert len({name for name in found if name.startswith("fxlib_model_adopted")}) == 51
        assert found['fxlib_calls_total{action="moved",reason="other"}'] == 6000
        assert found['fxlib_pass_changes_total{pass="other"}'] == 0
        assert found['fxlib_workers_live{torch_version="other"}'] == 41
        assert not [name for name in found if "REASON_" in name or "pass_1" in name or "phase_1" in name]


def test_the_names_answered_most_often_are_shown_and_the_rest_share_one() -> None:
    models = ModelFigures(shown=2)
    for name in ("a", "a", "b", "b", "c", "d"):
        models.record(("ads", name), figures())
    models.record(("ads", "a"), figures(0.9))
    rows = dict(models.rows())
    assert sorted(rows) == [("ads", "a"), ("ads", "b"), ("other", "other")]
    assert rows["ads", "a"].gain == answer(gain=0.9).gain


def test_a_board_remembers_a_bounded_number_of_names() -> None:
    models = ModelFigures(shown=2)
    for number in range(1000):
        models.record(("ads", f"m{number}"), figures())
    assert len(models._rows) == 20


def test_a_namespace_of_many_names_takes_no_row_from_a_model_that_is_answered_often() -> None:
    models = ModelFigures(shown=2)
    for model in [("feed", "ranker")] * 3 + [("ads", f"m{number}") for number in range(1000)]:
        models.record(model, figures())
    assert ("feed", "ranker") in dict(models.rows())
    assert list(models._rows)[-2:] == [("ads", "m998"), ("ads", "m999")]


def test_a_namespace_of_many_names_hides_no_live_figures_of_the_others() -> None:
    models = ModelFigures(shown=2)
    models.record_live(("feed", "ranker"), jobs_pb2.LiveFigures(qps_optimized=3.0))
    for number in range(1000):
        models.record_live(("ads", f"m{number}"), jobs_pb2.LiveFigures(qps_optimized=float(number)))
    shown = {model: live.qps_optimized for model, live in models.live_rows()}
    assert shown == {("feed", "ranker"): 3.0, ("ads", "m999"): 999.0}
    assert len(models._live) == 20


def test_a_model_called_other_is_one_of_the_others() -> None:
    models = ModelFigures(shown=2)
    models.record(("other", "other"), figures())
    assert [model for model, _ in models.rows()] == [("other", "other")]


def test_models_of_one_name_in_two_namespaces_keep_figures_of_their_own() -> None:
    models = ModelFigures(shown=4)
    models.record(("ads", "ranker"), figures(0.5))
    models.record(("feed", "ranker"), figures(0.1))
    rows = dict(models.rows())
    assert [rows[each, "ranker"].gain for each in ("ads", "feed")] == [answer(gain=each).gain for each in (0.5, 0.1)]


@pytest.mark.parametrize("missing", ["qps_original", "qps_optimized", "gain"])
async def test_a_figure_that_was_not_measured_is_not_shown(missing: str) -> None:
    kept = answer(reason="NO_CALLS")
    kept.ClearField(missing)
    async with make_service() as core:
        await submit(core)
        await work(core, kept)
        found = samples(core)
        shown = {"qps_original": "original", "qps_optimized": "optimized", "gain": "value"}[missing]
        assert not [name for name in found if f'"{shown}"' in name and "fxlib_model" in name]
        assert found['fxlib_model_adopted{fxlib_namespace="default",model="dlrm"}'] == 0
        assert kept.decision == jobs_pb2.DECISION_KEEP_ORIGINAL
