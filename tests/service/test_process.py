"""`python -m fxlib_service` as a process: started, killed at any moment, started again."""

import hashlib
import itertools
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

import grpc
import pytest

from fxlib.v1 import blobs_pb2, workers_pb2
from tests.service.client import running
from tests.service.support import eventually, graph_bytes, ref, refused, states

pytestmark = pytest.mark.slow


def test_it_says_where_it_is_and_ends_in_order(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    with running(tmp_path / "data", "--ready-file", str(ready)) as (process, client):
        assert json.loads(ready.read_text()) == process.ready
        assert process.ready["pid"] == process.pid
        client.put(graph_bytes())
        assert states([client.submit()]) == ["queued"]
        assert process.stop() == 0  # or it would have been waited for in vain


_FREED: Final = """
import sys
from fxlib_service.__main__ import return_freed_memory
def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20
if "ours" in sys.argv:
    return_freed_memory()
kept = []
for _ in range(3):
    held = []
    for _ in range(60):
        held.append(bytearray(b"x") * (5 << 20))
        kept += [bytes(4096 + n) for n in range(50)]
    del held
print(resident_mib())
"""


def test_memory_of_large_messages_goes_back_when_it_is_freed() -> None:
    left = {
        who: int(subprocess.run([sys.executable, "-c", _FREED, who], check=True, capture_output=True).stdout)
        for who in ("ours", "libc's")
    }
    assert left["ours"] < 200, left


def test_killed_with_jobs_queued_and_running_it_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = bytes(range(256)) * 1000
    with running(tmp_path / "data") as (process, client):
        client.put(graph_bytes())
        done, run, queued = client.submit(), client.submit(), client.submit(labels={"team": "ads"})
        first = client.claim()
        assert first is not None
        client.complete(first)
        lease = client.claim()
        assert lease is not None
        part = blobs_pb2.WriteRequest(blob=ref(whole), data=whole[:1000])
        assert client.blobs.Write(iter([part])).committed_bytes == 1000
        process.kill()
    with running(tmp_path / "data") as (_, client):
        jobs = [client.get(job.id) for job in (done, run, queued)]
        assert states(jobs) == ["succeeded", "running", "queued"]
        assert dict(jobs[2].labels) == {"team": "ads"}
        beat = workers_pb2.HeartbeatRequest(job_id=run.id, token=lease.token)
        assert not client.workers.Heartbeat(beat).cancelled
        client.complete(lease)
        assert client.watch(run.id, 1) == [2, 3]
        last = client.claim()
        assert last is not None
        assert last.job_id == queued.id
        rest = blobs_pb2.WriteRequest(blob=ref(whole), offset=1000, data=whole[1000:])
        assert client.blobs.Write(iter([rest])).committed_bytes == len(whole)
        read = b"".join(each.data for each in client.blobs.Read(blobs_pb2.ReadRequest(blob=ref(whole))))
        assert hashlib.sha256(read).hexdigest() == ref(whole).sha256


def test_killed_together_with_a_worker_it_gives_the_job_to_another(tmp_path: Path) -> None:
    with running(tmp_path / "data", "--lease-seconds", "1") as (process, client):
        client.put(graph_bytes())
        client.submit()
        assert client.claim("w1") is not None
        process.kill()
    with running(tmp_path / "data", "--lease-seconds", "1") as (_, client):
        lease = client.claim("w2", wait_s=50)
        assert lease is not None
        assert lease.attempt == 2


@pytest.mark.slow
def test_whenever_it_is_killed_what_it_accepted_is_there(tmp_path: Path) -> None:
    accepted: dict[str, str] = {}
    for round_ in range(3):
        with running(tmp_path / "data") as (process, client):
            client.put(graph_bytes())
            killer = threading.Timer(0.02 * round_, process.kill)
            for number in itertools.count():
                if number == 12:
                    killer.start()
                request_id = f"round-{round_}-{number}"
                try:
                    accepted[request_id] = client.submit(request_id=request_id, namespace=f"n{round_}").id
                except grpc.RpcError:
                    break
            killer.join()
    assert len(accepted) > 30
    with running(tmp_path / "data") as (_, client):
        for request_id, job_id in accepted.items():
            job = client.get(job_id)
            assert (job.request_id, states([job])) == (request_id, ["queued"])


def test_a_client_rides_out_a_restart(tmp_path: Path) -> None:
    with running(tmp_path / "data") as (process, client):
        client.put(graph_bytes())
        job = client.submit()
        listen = process.listen
        assert process.stop() == 0
        with running(tmp_path / "data", "--listen", listen):
            for _ in eventually():
                try:
                    assert client.get(job.id).id == job.id
                except grpc.RpcError:
                    continue
                return
            pytest.fail("not reached again")


def test_what_it_keeps_is_its_user_s_alone_in_a_folder_that_others_enter(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o755)
    with running(data) as (_, client):
        client.put(graph_bytes())
        kept = [*data.glob("service.sqlite*"), *data.glob("blobs/**/*"), data / "blobs", data / "partial"]
        assert len(kept) > 4
        assert [path.name for path in kept if path.stat().st_mode & 0o077] == []


def test_what_it_cannot_do_it_says_in_a_sentence_and_ends(tmp_path: Path) -> None:
    said = refused("--data", str(tmp_path / "data"), "--listen", "0.0.0.0:0")
    assert "and TLS is off" in said
    assert "Traceback" not in said


def test_a_data_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = refused("--data", str(tmp_path / "file" / "data"), "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0")
    assert said == f"fxlib service: --data: cannot use {tmp_path}/file/data: Not a directory\n"


def test_a_ready_file_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    ready = tmp_path / "nowhere" / "ready"
    options = ("--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--ready-file", str(ready))
    said = refused("--data", str(tmp_path / "data"), *options)
    assert f"--ready-file: cannot write {ready}: No such file or directory" in said
    assert "Traceback" not in said
