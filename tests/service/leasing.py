"""What a worker says to a service without a network."""

from fxlib.v1 import jobs_pb2, workers_pb2
from fxlib_service.core import Core
from fxlib_service.leases import MemoryLeases
from tests.service.support import (
    claim,
)


async def report(core: Core, lease: workers_pb2.Lease, phase: str = "qps", progress: float = 0.5) -> None:
    said = workers_pb2.ReportRequest(job_id=lease.job_id, token=lease.token, phase=phase, progress=progress)
    await core.workers.Report(said, None)


async def leased(core: Core, who: jobs_pb2.WorkerInfo | None = None) -> workers_pb2.Lease:
    lease = await claim(core, who)
    assert lease is not None
    return lease


def pass_time(core: Core, seconds: float) -> None:
    """Put the clock of the leases forward."""
    leases = core.dispatcher.leases
    assert isinstance(leases, MemoryLeases)
    before = leases._clock
    leases._clock = lambda: before() + seconds
