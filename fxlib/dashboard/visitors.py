"""Keep the visitors who have signed in with their own tokens, which alone let them cancel and retry jobs.

A token is kept in this process, under a cookie that no script can read and no other site can send along. Besides the
cookie, a request that changes anything needs the session's own secret in the form (a page of another site cannot read
it), and the dashboard's origin. A program sends its token as a bearer instead, which no page of another site can do.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request

COOKIE: Final = "fxlib_session"
_SCHEME: Final = "bearer "
_MOST: Final = 1000
_MOST_OF_TOKEN: Final = 20
"""Number of browsers in which one token is signed in, so that nobody signs the others out by signing in often."""
_IDLE_S: Final = 8 * 3600.0
_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost", "testclient")


@dataclass(slots=True, kw_only=True)
class Visitor:
    """A visitor who has signed in.

    Attributes:
        token: the token to show to the service.
        secret: the secret in the forms on the visitor's pages, as protection against forms of other sites.
        seen_at: the time of the visitor's last request, in seconds of the monotonic clock.
    """

    token: str
    secret: str
    seen_at: float


class Visitors:
    """The visitors, by their cookies. Each is forgotten after eight idle hours, and all when the dashboard ends."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Visitor] = OrderedDict()
        self._using = Lock()  # pages are made on threads

    def of(self, request: Request) -> Visitor | None:
        """Return the visitor who sent a request; None if they have not signed in."""
        cookie = request.cookies.get(COOKIE, "")
        with self._using:
            found = self._known.pop(cookie, None)
            if found is None or time.monotonic() - found.seen_at > _IDLE_S:
                return None
            found.seen_at = time.monotonic()
            self._known[cookie] = found  # reinserted as the most recent visitor
            return found

    def sign_in(self, token: str) -> str:
        """Remember a visitor, and return the cookie. If there are too many, the least recent visitor is forgotten."""
        cookie = secrets.token_urlsafe(32)
        with self._using:
            same = [each for each, visitor in self._known.items() if visitor.token == token]
            for each in same[: max(0, len(same) + 1 - _MOST_OF_TOKEN)]:
                del self._known[each]
            self._known[cookie] = Visitor(token=token, secret=secrets.token_urlsafe(32), seen_at=time.monotonic())
            while len(self._known) > _MOST:
                self._known.popitem(last=False)
        return cookie

    def sign_out(self, request: Request) -> None:
        """Forget the visitor who sent a request."""
        with self._using:
            self._known.pop(request.cookies.get(COOKIE, ""), None)

    def token_of(self, request: Request, form: Mapping[str, str]) -> str:
        """Return the token of a request that changes something.

        Raises:
            HTTPException: 401, if there is none; 403, if another site may have caused the request.
        """
        shown = request.headers.get("authorization", "")
        if shown.lower().startswith(_SCHEME):
            return shown[len(_SCHEME) :].strip()
        check_origin(request)
        visitor = self.of(request)
        if visitor is None:
            raise HTTPException(401, "Sign in with a token of your own first: the dashboard's own may only look.")
        if not hmac.compare_digest(form.get("secret", "").encode(), visitor.secret.encode()):
            raise HTTPException(403, "The form is not of this session. Go back, load the page again, and repeat it.")
        return visitor.token


def check_origin(request: Request) -> None:
    """Check that a page of the dashboard sent a form.

    Raises:
        HTTPException: 403, if another site sent it, or the origin is not given.
    """
    host = request.headers.get("origin", "").partition("://")[2]
    if not host or host != request.headers.get("host"):
        raise HTTPException(403, "The form was not sent by a page of this dashboard.")


def check_private(request: Request) -> None:
    """Check that nobody can read a token in transit.

    Raises:
        HTTPException: 403, if the connection is neither encrypted nor local to this machine.
    """
    if request.url.scheme != "https" and (request.client is None or request.client.host not in _LOOPBACK):
        raise HTTPException(403, "A token is not sent over an unencrypted connection: come by HTTPS.")
