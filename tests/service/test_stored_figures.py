"""What a service reads of models from the store: what others recorded, once, and nothing that is older."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from fxlib_service.clock import Clock
from fxlib_service.core import Core
from fxlib_service.metrics import Figures, ModelFigures
from fxlib_service.stored_figures import StoredFigures
from tests.service.support import answer, make_service, request, submit, work
from tests.service.test_live_figures import figures, report

DLRM = ("default", "dlrm")


@asynccontextmanager
async def two_services() -> AsyncIterator[tuple[Core, ModelFigures, StoredFigures]]:
    """A service, and the figures of another one on the same store."""
    async with make_service() as core:
        models = ModelFigures(shown=2)
        yield core, models, StoredFigures(models, core.ledger, limit=8)


def told(models: ModelFigures) -> list[tuple[bool, float | None, float | None]]:
    """The model's decision, its gain, and its gain in training."""
    live = {model: each.gain.value for model, each in models.live_rows()}
    return [
        (each.adopted, None if each.gain is None else each.gain.value, live.get(model)) for model, each in models.rows()
    ]


async def test_a_model_s_last_answer_stands_whichever_service_took_it() -> None:
    async with two_services() as (core, models, stored):
        await submit(core)
        await work(core)
        await stored.recall()
        assert told(models) == [(True, 0.5, None)]
        job = await submit(core, request(fresh=True))
        await work(core, answer(gain=-0.3, reason="NOT_FASTER"))
        await report(core, job.id, figures(-0.2))
        await stored.recall()
        assert told(models) == [(False, -0.3, -0.2)]
        await report(core, job.id, figures(-0.1))
        await stored.recall()
        assert told(models) == [(False, -0.3, -0.1)]


async def test_what_is_known_already_is_neither_read_nor_counted_again() -> None:
    async with two_services() as (core, models, stored):
        for name in ("dlrm", "bert", "bert", "ncf"):
            await submit(core, request(name=name, fresh=True))
            await work(core)
        for _ in range(9):
            await stored.recall()
        assert [count for count, _ in models._rows.values()] == [1, 2, 1]


@pytest.mark.parametrize("both_stored", [True, False])
async def test_what_this_service_took_later_is_not_replaced(both_stored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_services() as (core, models, stored):
        job = await submit(core, request(fresh=True))
        await work(core)
        await report(core, job.id, figures(0.4))
        later, figures_of = figures(-0.2), answer(gain=-0.3, reason="NOT_FASTER")
        later.at.FromSeconds(4_000_000_000)
        models.record_live(DLRM, later)
        if both_stored:
            await submit(core, request(fresh=True))
            models.record(DLRM, Figures.of(figures_of, job_id=await work(core, figures_of)))
        else:  # it does so while it reads of the other
            read = core.ledger.store.result_of

            def taking(job_id: str) -> bytes | None:
                models.record(DLRM, Figures.of(figures_of, job_id="later"))
                return read(job_id)

            monkeypatch.setattr(core.ledger.store, "result_of", taking)
        await stored.recall()
        assert told(models) == [(False, -0.3, -0.2)]


async def test_a_restart_shows_the_last_accepted_answer_though_the_clock_was_set_back() -> None:
    ahead = [3600.0]
    async with make_service(clock=Clock(wall=lambda: time.time() + ahead[0])) as core:
        await submit(core)
        await work(core)
        ahead[0] = 0.0
        await submit(core, request(fresh=True))
        await work(core, answer(gain=-0.3, reason="NOT_FASTER"))
        models = ModelFigures(shown=2)
        await StoredFigures(models, core.ledger, limit=8).recall()
        assert told(models) == [(False, -0.3, None)]
