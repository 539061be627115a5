"""Serve the dashboard: pages, the same data as JSON, live messages, and actions of visitors with their own tokens.

It is served on its own port until the process is asked to end.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, get_args
from urllib.parse import parse_qsl, quote, urlencode

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fxlib.client import Client
from fxlib.dashboard.live import Feed, Live
from fxlib.dashboard.view import LARGEST_PAGE, PAGE, Page, View, event_data, gain_chart
from fxlib.dashboard.visitors import COOKIE, Visitors, check_origin, check_private
from fxlib.dashboard.zoos import UnknownRunError, Zoos
from fxlib.errors import CredentialError, FxlibError, RejectedError, RemoteError, WireError
from fxlib.pages import environment, style
from fxlib.spec.job import Event, JobFilter, State
from fxlib.utils.text import as_json
from fxlib.zoo.runs import RunError

_STATES: Final[Sequence[State]] = get_args(State)
_MOST_FORM_BYTES: Final = 1 << 14
_QUIET_TICKS: Final = 15
"""Number of seconds without a message after which a line tells the browser and proxies that the stream is alive."""

_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Vary": "Accept",
}
_REPORTED: Final = (RemoteError, WireError, HTTPException, UnknownRunError, RunError)
"""Exceptions that are reported as a page or as JSON."""
_STATUSES: Final = {"JOB_NOT_FOUND": 404, "INVALID_REQUEST": 400, "PERMISSION_DENIED": 403, "UNAUTHENTICATED": 401}


def make_app(
    client: Client, *, hosts: Sequence[str], zoos: Sequence[Path] = (), stopping: Callable[[], bool] = lambda: False
) -> Starlette:
    """Return the application.

    Args:
        client: a client of the service, with the credential of a viewer.
        hosts: the host names that visitors use; others are refused, so that no other site's name leads here.
        zoos: folders of zoo runs, which are also shown.
        stopping: returns whether the process is about to end, for streams that would go on.

    Raises:
        FxlibError: a zoo's folder does not exist, or two have the same name.
    """
    site = _Site(client, Zoos(zoos), stopping)
    pages = {
        "/": site.workers,
        "/queue": site.queue,
        "/jobs": site.jobs,
        "/jobs/{job_id}": site.job,
        "/models": site.models,
        "/model": site.model,
        "/zoo": site.zoos,
        "/zoo/diff": site.zoo_diff,
        "/zoo/{run}": site.zoo_run,
    }
    routes = [
        Route("/workers.json", site.workers),
        *(Route(f"{path}.json", page) for path, page in pages.items() if path != "/"),
        Route("/jobs/{job_id}/events", site.events),
        Route("/jobs/{job_id}/cancel", site.cancel, methods=["POST"]),
        Route("/jobs/{job_id}/retry", site.retry, methods=["POST"]),
        *(Route(path, page) for path, page in pages.items()),
        Route("/live", site.live),
        Route("/live/zoo", site.live_zoos),
        Route("/sign-in", site.sign_in_page, methods=["GET"]),
        Route("/sign-in", site.sign_in, methods=["POST"]),
        Route("/sign-out", site.sign_out, methods=["POST"]),
        Route("/static/{name}", site.static),
        Route("/healthz", _healthy),
        Route("/favicon.ico", _nothing),
    ]
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(_Headers),
            Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False),
        ],
        exception_handlers=dict.fromkeys(_REPORTED, site.failed),
        lifespan=site.lifespan,
    )


def _healthy(_: Request) -> Response:
    return PlainTextResponse("ok\n")


def _nothing(_: Request) -> Response:
    return Response(status_code=204)


class _Headers:
    """Adds the headers that every response has."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await self._app(scope, receive, sent)


class _Site:
    """The endpoints. Those that query the service run on threads."""

    def __init__(self, client: Client, zoos: Zoos, stopping: Callable[[], bool]) -> None:
        self._client, self._zoos, self._stopping = client, zoos, stopping
        self._view, self._visitors = View(client), Visitors()
        self._live: Live | None = None
        self._templates = environment("fxlib.dashboard")
        self._templates.filters |= {"moment": _moment, "gain_chart": gain_chart}
        self._templates.globals["zoos"] = bool(zoos)
        self._static = {
            "style.css": (style() + _file("dashboard.css"), "text/css"),
            "dashboard.js": (_file("dashboard.js"), "text/javascript"),
        }

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Create the objects that live on the event loop."""
        self._live = Live(self._client, self._view, self._zoos)
        yield

    def workers(self, request: Request) -> Response:
        """Show the workers, and the work of each."""
        return self._page(request, "workers", self._view.workers())

    def queue(self, request: Request) -> Response:
        """Show the running jobs, and the waiting ones."""
        return self._page(request, "queue", self._view.queue(_page_of(request)))

    def jobs(self, request: Request) -> Response:
        """Show the jobs that fit the filter."""
        wanted, page = _filter_of(request), _page_of(request)
        return self._page(request, "jobs", self._view.jobs(wanted, page), wanted=wanted, states=_STATES, page=page)

    def job(self, request: Request) -> Response:
        """Show one job."""
        answer = self._view.job(request.path_params["job_id"])
        return self._page(request, "job", answer, request_id=secrets.token_hex(16))

    def models(self, request: Request) -> Response:
        """Show the models, and the outcome of each."""
        return self._page(request, "models", self._view.models())

    def model(self, request: Request) -> Response:
        """Show the gains of one model over time."""
        answer = self._view.model(request.query_params.get("namespace", ""), request.query_params.get("name", ""))
        return self._page(request, "model", answer)

    def zoos(self, request: Request) -> Response:
        """Show the zoos, and the newest runs of each."""
        return self._page(request, "zoo", self._zoos.all())

    def zoo_run(self, request: Request) -> Response:
        """Show one run of a zoo, with the rows that fit the filter."""
        asked = request.query_params
        answer = self._zoos.run(request.path_params["run"], asked.get("zoo", ""))
        outcome, name = asked.get("outcome", ""), asked.get("name", "")
        rows = [each for each in answer["rows"] if outcome in ("", each["outcome"]) and name in each["name"]]
        wanted = {"outcome": outcome, "name": name}
        return self._page(request, "zoo_run", {**answer, "rows": rows}, wanted=wanted)

    def zoo_diff(self, request: Request) -> Response:
        """Show the changes between two runs of a zoo."""
        asked = request.query_params
        answer = self._zoos.diff(asked.get("a", ""), asked.get("b", ""), asked.get("zoo", ""))
        return self._page(request, "zoo_diff", answer)

    async def live(self, request: Request) -> Response:
        """Announce changes as server-sent events."""
        assert self._live is not None  # noqa: S101 - the application has started
        return self._stream(self._live.changes, lambda _: "event: changed\ndata: \n\n", from_now=True)

    async def live_zoos(self, request: Request) -> Response:
        """Announce the progress of zoo runs as server-sent events."""
        assert self._live is not None  # noqa: S101 - the application has started
        return self._stream(self._live.zoos, lambda _: "event: changed\ndata: \n\n", from_now=True)

    async def events(self, request: Request) -> Response:
        """Send a job's events as they happen, and the end of the job, as server-sent events."""
        assert self._live is not None  # noqa: S101 - the application has started
        job_id = request.path_params["job_id"]
        await run_in_threadpool(self._client.job, job_id, timeout_s=10.0)  # a job that does not exist is an error here
        asked = request.headers.get("last-event-id") or request.query_params.get("after") or "0"
        if not (asked.isdecimal() and len(asked) < 19):
            raise HTTPException(400, "after: a number of an event is wanted")
        feed, after = self._live.job(job_id), int(asked)
        if feed is None:
            raise HTTPException(503, "so many jobs are followed that there is no room for another")

        def message(event: Event) -> str:
            if event.sequence <= after:
                return ""
            return f"id: {event.sequence}\nevent: event\ndata: {json.dumps(event_data(event))}\n\n"

        return self._stream(feed, message)

    async def cancel(self, request: Request) -> Response:
        """Cancel a job, with the visitor's token."""
        return await self._act(request, lambda client, job_id, _: client.cancel(job_id))

    async def retry(self, request: Request) -> Response:
        """Make a new job from an earlier one's request, with the visitor's token."""
        return await self._act(
            request, lambda client, job_id, form: client.retry(job_id, request_id=form.get("request_id", ""))
        )

    def sign_in_page(self, request: Request) -> Response:
        """Ask for a token."""
        return self._page(request, "sign_in", {}, following=request.query_params.get("next", "/"))

    async def sign_in(self, request: Request) -> Response:
        """Remember a visitor whose token the service knows."""
        check_origin(request)
        check_private(request)
        form = await _form(request)
        token = form.get("token", "").strip()

        def known() -> None:
            with self._client.speaking_for(token) as client:
                client.capabilities(timeout_s=10.0)

        await run_in_threadpool(known)
        answer = RedirectResponse(_own_path(form.get("next", "/")), status_code=303)
        answer.set_cookie(
            COOKIE,
            self._visitors.sign_in(token),
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return answer

    async def sign_out(self, request: Request) -> Response:
        """Forget a visitor."""
        check_origin(request)
        self._visitors.sign_out(request)
        answer = RedirectResponse("/", status_code=303)
        answer.delete_cookie(COOKIE)
        return answer

    def static(self, request: Request) -> Response:
        """Serve the style sheet and the script."""
        name = request.path_params["name"]
        if name not in self._static:
            raise HTTPException(404, "there is no such page")
        text, kind = self._static[name]
        return Response(text, media_type=kind)

    async def failed(self, request: Request, error: Exception) -> Response:
        """Show an error as a page or as JSON."""
        status, headers = 503, dict[str, str]()
        if isinstance(error, HTTPException):
            status = error.status_code
        elif isinstance(error, UnknownRunError):
            status = 404
        elif isinstance(error, RunError):
            status = 500
        elif isinstance(error, RejectedError):
            status = _STATUSES.get(error.code, 502)
        elif isinstance(error, CredentialError | WireError):
            status = 400 if request.method == "POST" else 502
        if status == 503:
            headers["Retry-After"] = "2"
        text = str(error.detail) if isinstance(error, HTTPException) else str(error)
        return self._page(request, "error", {"status": status, "error": text}, status=status, headers=headers)

    async def _act(self, request: Request, do: Callable[[Client, str, Mapping[str, str]], Any]) -> Response:
        form = await _form(request)
        token = self._visitors.token_of(request, form)
        check_private(request)

        def done() -> Any:
            with self._client.speaking_for(token) as client:
                return do(client, request.path_params["job_id"], form)

        job = await run_in_threadpool(done)
        self._view.forget()
        if _wants_json(request):
            return JSONResponse({"id": job.id, "state": job.state})
        return RedirectResponse(f"/jobs/{quote(job.id, safe='')}", status_code=303)

    def _page(
        self,
        request: Request,
        name: str,
        answer: Mapping[str, Any],
        *,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> Response:
        if _wants_json(request):
            return JSONResponse(as_json(answer), status_code=status, headers=headers)
        text = self._templates.get_template(f"{name}.html").render(
            answer=answer,
            current=name,
            visitor=self._visitors.of(request),
            address=str(request.url.replace(scheme="", netloc="")),
            following_page=_following(request, answer.get("following", "")),
            **more,
        )
        return HTMLResponse(text, status_code=status, headers=headers)

    def _stream(self, feed: Feed[Any], write: Callable[[Any], str], *, from_now: bool = False) -> Response:
        async def lines() -> AsyncGenerator[str]:
            quiet = 0
            yield "retry: 2000\n\n"
            async with aclosing(feed.read(from_now=from_now)) as messages:
                async for message in messages:
                    if self._stopping():
                        return
                    quiet += 1
                    if message is not None and (text := write(message)):
                        yield text
                    elif message is None and quiet >= _QUIET_TICKS:
                        quiet = 0
                        yield ": still here\n\n"
            yield "event: end\ndata: \n\n"

        return StreamingResponse(lines(), media_type="text/event-stream")


def _wants_json(request: Request) -> bool:
    """Whether the path or the Accept header asks for JSON."""
    accepted = request.headers.get("accept", "")
    return request.url.path.endswith(".json") or ("application/json" in accepted and "text/html" not in accepted)


def _filter_of(request: Request) -> JobFilter:
    """Read the filter for jobs from a request.

    Raises:
        HTTPException: 400, with a description of the error.
    """
    asked = request.query_params
    states, labels = [each for each in asked.getlist("state") if each], dict[str, str]()
    for state in states:
        if state not in _STATES:
            raise HTTPException(400, f"state: must be one of {', '.join(_STATES)}")
    for label in filter(None, asked.getlist("label")):
        key, equals, value = label.partition("=")
        if not (key and equals):
            raise HTTPException(400, "label: KEY=VALUE is wanted")
        labels[key] = value
    return JobFilter(
        namespace=asked.get("namespace", ""),
        name=asked.get("name", ""),
        labels=labels,
        states=tuple(each for each in _STATES if each in states),
        id_prefix=asked.get("id", ""),
    )


def _page_of(request: Request) -> Page:
    size = request.query_params.get("size", "") or str(PAGE)
    if not (size.isdecimal() and len(size) < 6 and 1 <= int(size) <= LARGEST_PAGE):
        raise HTTPException(400, f"size: a number from 1 to {LARGEST_PAGE} is wanted")
    return Page(size=int(size), token=request.query_params.get("page", ""))


def _following(request: Request, token: str) -> str:
    """Return the address of the next page of a listing; "" if there is none."""
    if not token:
        return ""
    asked = [(key, value) for key, value in request.query_params.multi_items() if key != "page" and value]
    return "?" + urlencode([*asked, ("page", token)])


def _own_path(path: str) -> str:
    """Return the path that a form names if it is one of the dashboard's own, else that of the start page."""
    own = path.startswith("/") and not path.startswith("//") and path.isprintable() and "\\" not in path
    return path if own else "/"


async def _form(request: Request) -> dict[str, str]:
    """Read a form's fields.

    Raises:
        HTTPException: 413, if the form is larger than any of the dashboard's.
    """
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MOST_FORM_BYTES:
            raise HTTPException(413, "that is larger than any form of this dashboard")
    return dict(parse_qsl(body.decode("utf-8", "replace")))


def _file(name: str) -> str:
    return (files("fxlib.dashboard") / "static" / name).read_text(encoding="utf-8")


def _moment(at: str | None) -> str:
    """Return an ISO time in readable form, in UTC."""
    return "" if not at else at[:19].replace("T", " ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """The address at which visitors reach the dashboard.

    Attributes:
        host: the address to listen on.
        port: the port; 0: a free one.
        names: the host names that visitors use, besides the address itself and those of loopback.
        certificate: PEM file of the certificate for HTTPS; None: HTTP.
        key: PEM file of the certificate's key.
    """

    host: str
    port: int
    names: Sequence[str] = ()
    certificate: Path | None = None
    key: Path | None = None


def serve(
    client: Client, door: Door, *, zoos: Sequence[Path] = (), listening: Callable[[str], object] = lambda _: None
) -> None:
    """Serve the dashboard of a service until SIGTERM or SIGINT.

    Args:
        client: a client of the service, with the credential of a viewer.
        door: the address at which visitors reach the dashboard.
        zoos: folders of zoo runs, which are also shown.
        listening: a function that is called once the dashboard listens, with its address: HOST:PORT.

    Raises:
        FxlibError: the dashboard cannot listen there, or a certificate file or a zoo's folder cannot be used.
    """
    hosts = ["localhost", "127.0.0.1", "[::1]", "::1", door.host, *door.names]
    app = make_app(client, hosts=hosts, zoos=zoos, stopping=lambda: server.should_exit)
    config = uvicorn.Config(
        app,
        log_level="warning",
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=3,
        ssl_certfile=door.certificate,
        ssl_keyfile=door.key,
    )
    server = uvicorn.Server(config)
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is an OSError, too
        raise FxlibError(f"it cannot be used: {error.strerror or error}", where="--https-cert, --https-key") from error
    with _listening(door) as listener:
        host = f"[{door.host}]" if ":" in door.host else door.host
        listening(f"{host}:{listener.getsockname()[1]}")
        server.run(sockets=[listener])


def _listening(door: Door) -> socket.socket:
    family = socket.AF_INET6 if ":" in door.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((door.host, door.port))
    except OSError as error:
        listener.close()
        where = f"--listen {door.host}:{door.port}"
        raise FxlibError(f"cannot listen there: {error.strerror or error}", where=where) from error
    return listener
