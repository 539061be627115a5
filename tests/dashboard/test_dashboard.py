"""The dashboard over a real service: its pages, the same as JSON, and who may change what."""

import json
import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
from starlette.requests import Request
from starlette.testclient import TestClient

from fxlib.cli import main
from fxlib.client import connect
from fxlib.dashboard import visitors
from fxlib.dashboard.app import make_app
from fxlib.dashboard.view import View
from fxlib.v1 import jobs_pb2, workers_pb2
from tests.dashboard.support import HOSTILE, STEERING, Served, served
from tests.service.principals import token
from tests.service.support import answer
from tests.shared.real_service import free_port

pytestmark = pytest.mark.slow

ORIGIN = {"origin": "http://localhost"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("dashboard")) as found:
        yield found


@contextmanager
def browsing(service: Served, *, address: str = "") -> Iterator[TestClient]:
    """A browser at the dashboard of a service; each has cookies of its own."""
    client = connect(address or service.address, token_file=service.viewer, patience_s=2.0)
    app = make_app(client, hosts=["localhost"])
    with client, TestClient(app, base_url="http://localhost", follow_redirects=False) as found:
        yield found


@pytest.fixture
def browser(service: Served) -> Iterator[TestClient]:
    with browsing(service) as found:
        yield found


def sign_in(browser: TestClient, who: str) -> None:
    answered = browser.post("/sign-in", data={"token": token(who), "next": "/jobs"}, headers=ORIGIN)
    assert (answered.status_code, answered.headers["location"]) == (303, "/jobs")


def form_of(browser: TestClient, job_id: str) -> dict[str, str]:
    """The hidden fields of the form on a job's page."""
    return dict(re.findall(r'name="(\w+)" value="([^"]*)"', browser.get(f"/jobs/{job_id}").text))


@pytest.mark.parametrize("path", ["/", "/queue", "/jobs", "/models", "/model?namespace=ads&name=ranker"])
def test_each_page_is_there_as_html_and_as_json(browser: TestClient, path: str) -> None:
    page = browser.get(path)
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    asked = browser.get(path, headers={"accept": "application/json"})
    name, question, query = ("/workers" if path == "/" else path).partition("?")
    assert browser.get(f"{name}.json{question}{query}").json() == asked.json()


def test_the_page_of_workers_says_what_each_worker_does_now(service: Served, browser: TestClient) -> None:
    job = service.owner.submit(name="busy-now")
    lease = service.claim("busy", hardware="epyc, 2 cores")
    service.report(lease, "rewriting")
    rows = {each["id"]: each for each in browser.get("/workers.json").json()["workers"]}
    assert (rows["busy"]["hardware"], rows["busy"]["job"]["id"]) == ("epyc, 2 cores", job.id)
    assert "busy-now</bdi>: rewrite" in browser.get("/").text
    service.owner.complete(lease)


def test_jobs_are_filtered_and_say_why_in_a_line(service: Served, browser: TestClient) -> None:
    kept = service.answered("kept", answer(reason="NOT_FASTER"))
    service.answered("adopted")
    labelled = service.owner.submit(name="waits", labels={"team": "ads"})
    found = browser.get("/jobs.json?state=succeeded&name=kept").json()["jobs"]
    assert [(each["id"], each["decision"], each["why"]) for each in found] == [(kept, "keep_original", "a reason")]
    (waiting,) = browser.get("/jobs.json?label=team%3Dads").json()["jobs"]
    assert (waiting["id"], waiting["why"]) == (labelled.id, "waits for a worker")
    assert [each["id"] for each in browser.get(f"/jobs.json?id={kept}").json()["jobs"]] == [kept]
    service.owner.complete(service.claim())
    service.owner.submit(name="nowhere", where={"rack": "3"})
    (nowhere,) = browser.get("/jobs.json?name=nowhere").json()["jobs"]
    assert nowhere["why"] == "no live worker has rack=3 yet; none has the label rack"
    service.owner.jobs.CancelJob(jobs_pb2.CancelJobRequest(job_id=nowhere["id"]))


def test_a_gain_without_an_upper_bound_is_there_as_json_and_in_the_picture(
    service: Served, browser: TestClient
) -> None:
    result = answer(reason="NOT_FASTER")
    result.gain.high = math.inf
    job_id = service.answered("unbounded", result)
    assert browser.get(f"/jobs/{job_id}.json").json()["gain"] == {"value": 0.5, "low": 0.4, "high": None}
    page = browser.get("/model?namespace=default&name=unbounded").text
    assert "+50.0%" in page
    assert '"nan"' not in page


@pytest.mark.parametrize("query", ["state=busy", "label=team", "size=0", "size=x", "page=no-token", "id=%25"])
def test_a_filter_that_makes_no_sense_is_told_as_that(browser: TestClient, query: str) -> None:
    answered = browser.get(f"/jobs?{query}")
    assert answered.status_code == 400
    assert query.partition("=")[0] in answered.text


def test_pages_of_jobs_follow_each_other_with_their_filter(service: Served, browser: TestClient) -> None:
    ids = [service.answered("paged") for _ in range(3)]
    first = browser.get("/jobs?name=paged&size=2").text
    (address,) = re.findall(r'rel="next" href="([^"]+)"', first)
    second = browser.get("/jobs" + address.replace("&amp;", "&")).text
    shown = [re.findall(r'href="/jobs/([^"]+)"', page) for page in (first, second)]
    assert shown == [[ids[2], ids[1]], [ids[0]]]
    assert 'rel="next"' not in second


def test_the_queue_begins_with_who_has_waited_longest(service: Served, browser: TestClient) -> None:
    ids = [service.owner.submit(name="queued").id for _ in range(3)]
    told = browser.get("/queue.json").json()
    assert [each["id"] for each in told["queued"]] == ids
    for _ in ids:
        service.owner.complete(service.claim())


def test_a_job_shows_its_answer_and_its_events(service: Served, browser: TestClient) -> None:
    job_id = service.answered("whole")
    told = browser.get(f"/jobs/{job_id}.json").json()
    assert [each["sequence"] for each in told["events"]] == list(range(1, told["last_sequence"] + 1))
    assert (told["done"], told["report"]["gain"]["value"], len(told["report"]["calls"])) == (True, 0.5, 3)
    page = browser.get(f"/jobs/{job_id}").text
    for words in ("+50.0% [+40.0%, +60.0%]", "Remote calls", "Passes", "samples per second, original"):
        assert words in page
    running = service.owner.submit(name="not done")
    assert len(browser.get(f"/jobs/{running.id}.json").json()["events"]) == 1
    service.owner.complete(service.claim())


def test_a_job_shows_its_step_before_and_after(service: Served, browser: TestClient) -> None:
    told = answer()
    call = jobs_pb2.Span(kind="call", name="lookup<b>", to="ps0", start_s=0.001, end_s=0.004)
    told.timeline_original.CopyFrom(jobs_pb2.Timeline(step_s=0.01, spans=[call]))
    told.candidates.add(name="schedule", verdict="chosen for its speed")
    page = browser.get(f"/jobs/{service.answered('drawn', told)}").text
    assert "original: 10.0 ms a step" in page
    assert "call lookup&lt;b&gt; ps0: 3.000 ms" in page
    assert "chosen for its speed" in page


def test_what_was_asked_before_something_happened_is_asked_again(service: Served) -> None:
    job = service.owner.submit(name="looked at twice")
    with connect(service.address, token_file=service.viewer) as client:
        view = View(client)
        assert view.job(job.id)["state"] == "queued"
        lease = service.claim()
        view.forget()
        assert view.job(job.id)["state"] == "running"
    service.owner.complete(lease)


def test_a_job_that_is_not_there_is_not_found(browser: TestClient) -> None:
    for path in ("/jobs/nobody", "/jobs/nobody.json", "/jobs/nobody/events"):
        assert browser.get(path).status_code == 404


def test_events_are_told_as_a_stream_from_where_a_reader_was(service: Served, browser: TestClient) -> None:
    job_id = service.answered("streamed")
    whole = browser.get(f"/jobs/{job_id}/events")
    assert whole.headers["content-type"].startswith("text/event-stream")
    numbers = [json.loads(data)["sequence"] for data in re.findall(r"^data: (\{.*)$", whole.text, re.MULTILINE)]
    assert numbers == list(range(1, numbers[-1] + 1))
    assert whole.text.endswith("event: end\ndata: \n\n")
    again = browser.get(f"/jobs/{job_id}/events", headers={"last-event-id": str(numbers[-2])})
    assert re.findall(r"^id: (\d+)$", again.text, re.MULTILINE) == [str(numbers[-1])]


def test_models_show_their_gains_over_time(service: Served, browser: TestClient) -> None:
    for gain in (0.2, 0.4, 0.3):
        service.answered("trend", answer(gain=gain))
    (row,) = [each for each in browser.get("/models.json").json()["models"] if each["name"] == "trend"]
    assert (row["jobs"], row["last"]["gain"]["value"]) == (3, 0.3)
    page = browser.get("/model?namespace=default&name=trend").text
    drawn = re.findall(r"<title>.*?: (\S+) \[", page.partition("<svg")[2])
    assert drawn == ["+20.0%", "+40.0%", "+30.0%"]


def test_what_jobs_saw_in_training_stands_beside_their_trials(service: Served, browser: TestClient) -> None:
    job_id = service.answered("seen-live")
    gain = jobs_pb2.Estimate(value=-0.07, low=-0.09, high=-0.05)
    live = jobs_pb2.LiveFigures(qps_original=107, qps_optimized=100, gain=gain, steps=4242, went_back=True)
    service.owner.jobs.ReportLive(jobs_pb2.ReportLiveRequest(job_id=job_id, live=live), timeout=60)
    page = browser.get(f"/jobs/{job_id}").text
    assert "<td>+50.0% [+40.0%, +60.0%]</td><td>-7.0% [-9.0%, -5.0%]</td>" in page
    assert "The launcher went back to its original" in page
    assert "after 4,242 steps, the launcher went back to its original" in page
    told = browser.get(f"/jobs/{job_id}.json").json()
    assert (told["live"]["qps_optimized"], told["events"][-1]["phase"]) == (100, "went_back")
    model = browser.get("/model", params={"namespace": "default", "name": "seen-live"}).text
    assert "in training: -7.0% [-9.0%, -5.0%]" in model
    assert '<span class="failed">went back</span>' in model


def test_names_and_messages_of_strangers_are_inert(service: Served, browser: TestClient) -> None:
    job = service.owner.submit(name=HOSTILE, labels={"a": "<b>"})
    lease = service.claim(HOSTILE, hardware=HOSTILE + STEERING)
    service.report(lease, HOSTILE + STEERING)
    done = service.owner.submit(name=HOSTILE)
    failed = service.claim(HOSTILE, hardware=STEERING)
    failure = jobs_pb2.JobFailure(code="CRASHED", message=HOSTILE + STEERING)
    assert failed.job_id == done.id
    service.owner.workers.Complete(
        workers_pb2.CompleteRequest(job_id=done.id, token=failed.token, failure=failure), timeout=60
    )
    (address,) = set(re.findall(r'href="(/model\?[^"]+)"', browser.get(f"/jobs/{job.id}").text))
    for path in ("/", "/queue", "/jobs", f"/jobs/{job.id}", f"/jobs/{done.id}", address.replace("&amp;", "&")):
        text = browser.get(path).text
        assert "&lt;script&gt;" in text
        assert "<img" not in text
        assert text.count("<script") == text.count("</script>") == 1
        assert not any(each in text for each in "\u202e\x1b\u2066")
        assert "{{ 7*7 }}" in text
    service.owner.complete(lease)


def test_a_visitor_who_has_not_signed_in_changes_nothing(service: Served, browser: TestClient) -> None:
    job_id = service.answered("not theirs")
    for action in ("cancel", "retry"):
        assert browser.post(f"/jobs/{job_id}/{action}", headers=ORIGIN).status_code == 401
        assert browser.get(f"/jobs/{job_id}/{action}").status_code == 405
    assert f"/sign-in?next=/jobs/{job_id}" in browser.get(f"/jobs/{job_id}").text


def test_a_visitor_cancels_and_retries_with_a_token_of_their_own(service: Served, browser: TestClient) -> None:
    job = service.owner.submit(name="theirs")
    sign_in(browser, "operator")
    form = form_of(browser, job.id)
    assert browser.post(f"/jobs/{job.id}/cancel", data=form, headers=ORIGIN).status_code == 303
    assert service.owner.get(job.id).state == jobs_pb2.JOB_STATE_CANCELLED
    form = form_of(browser, job.id)
    again = [browser.post(f"/jobs/{job.id}/retry", data=form, headers=ORIGIN) for _ in range(2)]
    (address,) = {each.headers["location"] for each in again}  # a button pressed twice makes one job
    retried = service.owner.get(address.removeprefix("/jobs/"))
    assert (retried.name, retried.state, retried.asked_by) == ("theirs", jobs_pb2.JOB_STATE_QUEUED, "operator")
    service.owner.complete(service.claim())


def test_what_the_visitor_s_own_role_may_not_is_refused_by_the_service(service: Served, browser: TestClient) -> None:
    job_id = service.answered("looked at")
    sign_in(browser, "viewer")
    refused = browser.post(f"/jobs/{job_id}/retry", data=form_of(browser, job_id), headers=ORIGIN)
    assert refused.status_code == 403
    assert "is for client or operator" in refused.text


def test_forms_of_other_sites_are_refused(service: Served, browser: TestClient) -> None:
    job = service.owner.submit(name="attacked")
    sign_in(browser, "operator")
    form, address = form_of(browser, job.id), f"/jobs/{job.id}/cancel"
    attempts = [
        browser.post(address, data=form, headers={"origin": "http://evil.example"}),
        browser.post(address, data=form, headers={"origin": "null"}),
        browser.post(address, data=form, headers={"origin": "http://["}),
        browser.post(address, data=form, headers={"origin": "localhost"}),
        browser.post(address, data=form),
        browser.post(address, data=form | {"secret": "guessed"}, headers=ORIGIN),
        browser.post(address, headers=ORIGIN),
        browser.post("/sign-in", data={"token": token("ads")}, headers={"origin": "http://evil.example"}),
    ]
    assert [each.status_code for each in attempts] == [403] * len(attempts)
    assert service.owner.get(job.id).state == jobs_pb2.JOB_STATE_QUEUED
    service.owner.complete(service.claim())


def test_a_program_shows_its_token_as_a_bearer(service: Served, browser: TestClient) -> None:
    job = service.owner.submit(name="by a program")
    shown = {"authorization": f"Bearer {token('operator')}", "accept": "application/json"}
    answered = browser.post(f"/jobs/{job.id}/cancel", headers=shown)
    assert (answered.status_code, answered.json()) == (200, {"id": job.id, "state": "cancelled"})


def test_a_visitor_may_sign_out_while_a_page_is_made_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    known = visitors.Visitors()
    cookie = f"fxlib_session={known.sign_in('t')}".encode()
    shown = Request({"type": "http", "headers": [(b"cookie", cookie)]})
    leaving = Thread(target=known.sign_out, args=(shown,))

    def now() -> float:
        if leaving.ident is None:
            leaving.start()
            leaving.join(0.3)
        return time.monotonic()

    monkeypatch.setattr(visitors, "time", SimpleNamespace(monotonic=now))
    found = known.of(shown)
    assert found is not None
    assert found.token == "t"
    leaving.join(60)
    assert known.of(shown) is None


def test_a_visitor_who_signs_in_often_signs_nobody_else_out() -> None:
    def known(cookie: str) -> bool:
        cookies = [(b"cookie", f"{visitors.COOKIE}={cookie}".encode())]
        return here.of(Request({"type": "http", "headers": cookies})) is not None

    here = visitors.Visitors()
    other, *own = here.sign_in("other"), *(here.sign_in("own") for _ in range(2000))
    assert known(other)
    assert known(own[-1])
    assert not known(own[0])


def test_a_token_that_the_service_does_not_know_signs_nobody_in(browser: TestClient) -> None:
    for wrong in ("guessed", "", "two words", "ü"):
        answered = browser.post("/sign-in", data={"token": wrong}, headers=ORIGIN)
        assert answered.status_code in (400, 401)
        assert "set-cookie" not in answered.headers
        assert not wrong or f'"{wrong}"' not in answered.text


def test_a_session_is_for_the_browser_alone_and_ends_when_it_is_told_to(browser: TestClient) -> None:
    for elsewhere in ("//evil.example", "//[", "/\\evil.example", "http://evil.example", "/\nevil", ""):
        answered = browser.post("/sign-in", data={"token": token("operator"), "next": elsewhere}, headers=ORIGIN)
        assert (answered.status_code, answered.headers["location"]) == (303, "/")
    cookie = answered.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert "Sign out" in browser.get("/").text
    before = dict(browser.cookies)
    browser.post("/sign-out", headers=ORIGIN)
    browser.cookies.update(before)
    assert "Sign out" not in browser.get("/").text


def test_no_token_is_taken_over_a_connection_that_others_can_read(service: Served) -> None:
    client = connect(service.address, token_file=service.viewer)
    app = make_app(client, hosts=["localhost"])
    with client, TestClient(app, base_url="http://localhost", client=("192.0.2.1", 1)) as far:
        assert far.post("/sign-in", data={"token": token("ads")}, headers=ORIGIN).status_code == 403


@pytest.mark.parametrize("path", ["/", "/jobs/nobody", "/static/dashboard.js", "/nothing", "/healthz"])
def test_every_answer_allows_only_what_is_our_own(browser: TestClient, path: str) -> None:
    headers = browser.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"


def test_pages_need_nothing_from_elsewhere(browser: TestClient) -> None:
    text = browser.get("/").text + browser.get("/static/style.css").text + browser.get("/static/dashboard.js").text
    assert not re.search(r"https?://|style=|onclick=|@import", text)


def test_another_site_s_name_does_not_lead_here(browser: TestClient) -> None:
    assert browser.get("/", headers={"host": "evil.example"}).status_code == 400


def test_a_page_says_that_the_service_is_away_and_recovers(tmp_path: Path) -> None:
    listen = ("--listen", f"127.0.0.1:{free_port()}")
    with served(tmp_path / "s", *listen) as service:
        job_id = service.answered("survives")
        with browsing(service) as browser:
            assert browser.get(f"/jobs/{job_id}").status_code == 200
            service.process.kill()
            for path in ("/", "/queue", "/jobs", f"/jobs/{job_id}", "/models"):
                answered = browser.get(path)
                assert (answered.status_code, answered.headers["retry-after"]) == (503, "2")
                assert "The service is away" in answered.text
            assert browser.get("/workers.json").json()["status"] == 503
            with served(tmp_path / "s", *listen):
                assert browser.get(f"/jobs/{job_id}").status_code == 200


@pytest.mark.parametrize(
    "options, says",
    [
        (["--listen", "0.0.0.0:0"], "name the hosts under which visitors reach it"),
        (["--listen", "192.0.2.1:0"], "cannot listen there"),
        (["--https-cert", "/nowhere.pem"], "--https-cert"),
    ],
)
def test_a_dashboard_that_cannot_serve_says_why(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dashboard", *options]) == 1
    assert says in capsys.readouterr().err
