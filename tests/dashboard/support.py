"""A real service with principals of each role, and jobs of every kind."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fxlib.spec.report import Estimate
from fxlib.v1 import jobs_pb2, workers_pb2
from fxlib.zoo import Row
from tests.service.client import Client, running
from tests.service.principals import token, write_policy
from tests.service.support import Process, answer, graph_bytes, worker

RIGHT_TO_LEFT = "\u05e9\u05dc\u05d5\u05dd"
"""Letters that are read from the right, and have what stands beside them follow on their left."""
HOSTILE = (
    "<script>document.title='hit'</script><img src=x onerror=document.title='hit'>\"'&{{ 7*7 }}"
    "'); DROP TABLE jobs; --" + RIGHT_TO_LEFT
)
"""What the service takes as a name: markup, a template, SQL, and letters of another direction."""
STEERING = "\u202egnp\x1b[31m\u2066"
"""What turns the direction of text, and steers a terminal."""


def measured(name: str, gain: float, job: str = "") -> Row:
    estimate = Estimate(value=gain, low=gain - 0.02, high=gain + 0.02)
    return Row(name=name, state="done", decision="adopt", reason="FASTER", explanation="f", gain=estimate, job_id=job)


@dataclass(frozen=True, kw_only=True)
class Served:
    """A service in a process of its own, stubs that the owner calls it by, and a file with a viewer's token."""

    process: Process
    owner: Client
    viewer: Path

    @property
    def address(self) -> str:
        return str(self.process.listen)

    def claim(self, name: str = "w1", hardware: str = "cpu-a") -> workers_pb2.Lease:
        who = worker(name, hardware=hardware)
        lease = self.owner.workers.Claim(workers_pb2.ClaimRequest(worker=who), timeout=60).lease
        assert isinstance(lease, workers_pb2.Lease)
        return lease

    def report(self, lease: workers_pb2.Lease, message: str) -> None:
        said = workers_pb2.ReportRequest(
            job_id=lease.job_id, token=lease.token, phase="rewrite", message=message, progress=0.5
        )
        self.owner.workers.Report(said, timeout=60)

    def answered(self, name: str, result: jobs_pb2.JobResult | None = None) -> str:
        """Have a job of its own measured, and return its id."""
        job = self.owner.submit(name=name)
        lease = self.claim()
        assert lease.job_id == job.id
        self.owner.complete(lease, result or answer())
        return job.id


@contextmanager
def served(folder: Path, *options: str) -> Iterator[Served]:
    """Run a service with a policy, in a folder that may have been one's before."""
    folder.mkdir(exist_ok=True)
    viewer = folder / "viewer.token"
    viewer.write_text(token("viewer"))
    with running(folder / "service", "--policy", str(write_policy(folder)), *options) as (process, owner):
        owner.put(graph_bytes())
        yield Served(process=process, owner=owner, viewer=viewer)
