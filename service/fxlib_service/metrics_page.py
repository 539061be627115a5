"""What is served over HTTP: the metrics, to whoever may read them, and whether the service lives and is ready."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric
from typing_extensions import override

from fxlib_service.authentication import Authenticator
from fxlib_service.errors import ServiceError
from fxlib_service.roles import Role

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

_OF_MODELS: Final = "fxlib_model_"
_SCHEME: Final = "bearer "
_PLAIN: Final = ("Content-Type", "text/plain; charset=utf-8")


def pages(metrics: App, not_ready: Callable[[], str]) -> App:
    """Return the WSGI application that serves `/metrics`, `/healthz` and `/readyz`, and nothing else.

    `/healthz` answers 200 as long as the process does: to restart it would not bring a database back. `/readyz` answers
    200 while it can serve calls, else 503 with the reason. Neither asks for a token, as probes have none.

    Args:
        metrics: serves the metrics; see `metrics_app`.
        not_ready: says why the service cannot serve calls now; "" if it can.
    """

    def routed(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path, method = environ.get("PATH_INFO", ""), environ.get("REQUEST_METHOD", "")
        if path not in ("/metrics", "/healthz", "/readyz"):
            start_response("404 Not Found", [_PLAIN])
            return [b"There are /metrics, /healthz and /readyz.\n"]
        if method not in ("GET", "HEAD"):
            start_response("405 Method Not Allowed", [_PLAIN, ("Allow", "GET, HEAD")])
            return [b""]
        if path == "/metrics":
            return metrics(environ, start_response)
        why = "" if path == "/healthz" else not_ready()
        start_response("503 Service Unavailable" if why else "200 OK", [_PLAIN])
        return [f"not ready: {why}\n".encode() if why else b"ok\n"]

    return routed


def metrics_app(registry: CollectorRegistry, authenticator: Authenticator | None) -> App:
    """Return the WSGI application that serves the metrics.

    Without an authenticator, whoever reaches the address reads everything. With one, operators read everything, viewers
    of all namespaces read everything but the figures that name models, and others read nothing.
    """
    everything: App = make_wsgi_app(registry)
    if authenticator is None:
        return everything
    nameless: App = make_wsgi_app(_WithoutModels(registry))

    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        shown = environ.get("HTTP_AUTHORIZATION", "")
        token = shown[len(_SCHEME) :].strip() if shown.lower().startswith(_SCHEME) else ""
        try:
            caller = authenticator.bearer(token)
        except ServiceError:
            start_response("401 Unauthorized", [_PLAIN, ("WWW-Authenticate", "Bearer")])
            return [b"Send the bearer token of an operator or a viewer.\n"]
        if Role.OPERATOR in caller.roles:
            return everything(environ, start_response)
        if Role.VIEWER in caller.roles and caller.namespace is None:
            return nameless(environ, start_response)
        start_response("403 Forbidden", [_PLAIN])
        return [b"Metrics are for operators, and for viewers of all namespaces.\n"]

    return guarded


class _WithoutModels(CollectorRegistry):
    """A registry that collects what another one does, without the metrics that name models."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self._all = registry

    @override
    def collect(self) -> Iterator[Metric]:
        yield from (metric for metric in self._all.collect() if not metric.name.startswith(_OF_MODELS))
