"""The files that say who may do what, the policy and the owner's token: read at the start, and whenever they change."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fxlib.errors import FxlibError
from fxlib.utils.local_service import new_token, read_token
from fxlib_service import audit
from fxlib_service.authentication import Authenticator
from fxlib_service.config import Config
from fxlib_service.followed_files import FollowedFiles
from fxlib_service.policy import Policy

logger = logging.getLogger(__name__)


class AccessFiles:
    """Reads the files, and reads them again while the service runs.

    A file that cannot be used changes nothing: the service goes on with what it read before, and logs why.

    Raises:
        FxlibError: a file cannot be used, and there is nothing from before.

    Attributes:
        authenticator: identifies callers by what was read last.
        owner_token: the token whose bearer is the owner, as it was at the start.
        files: the files, to be followed.
    """

    def __init__(self, config: Config) -> None:
        self._policy, self._token = config.policy, config.token_file
        self.files = FollowedFiles(self._policy, self._token)
        policy = None if self._policy is None else Policy.read(self._policy)
        self.owner_token = new_token() if self._token is None else _owner_token(self._token)
        self.authenticator = Authenticator(
            policy=policy,
            owner_tokens=_digests(self.owner_token),
            certificates_own=policy is None and config.tls is not None and config.tls.client_ca is not None,
        )

    async def follow(self, recheck: Callable[[], int]) -> None:
        """Read the files again when they have changed, or when asked to; it ends by being cancelled.

        Args:
            recheck: is called after a change; ends the calls whose callers are no longer who they were, and returns
                their number.
        """
        async for _ in self.files.changes():
            await self._reread(recheck)

    async def _reread(self, recheck: Callable[[], int]) -> None:
        try:
            policy, token = await asyncio.to_thread(self._contents)
        except FxlibError as error:
            logger.error("%s; the service goes on with what it read before", error)  # noqa: TRY400  # one line
            audit.write_change("kept", problem=str(error))
            return
        changes = self._take(policy, token)
        ended = recheck()
        told = "; ".join(f"{kind} {', '.join(names)}" for kind, names in changes.items() if names) or "nothing changed"
        logger.info("read again who may do what: %s; calls ended: %d", told, ended)
        audit.write_change("changed", **changes, ended=ended)

    def _contents(self) -> tuple[Policy | None, str | None]:
        return (
            None if self._policy is None else Policy.read(self._policy),
            None if self._token is None else _owner_token(self._token),
        )

    def _take(self, policy: Policy | None, token: str | None) -> Mapping[str, Sequence[str]]:
        known, changes = self.authenticator, dict[str, Sequence[str]]()
        if known.policy is not None and policy is not None:
            changes |= known.policy.take(policy)
        if token is not None and (digests := _digests(token)) != known.owner_tokens:
            known.owner_tokens = digests
            changes["changed"] = [*changes.get("changed", ()), "the owner's token"]
        return changes


def _owner_token(path: Path) -> str:
    """Read the owner's token, and warn if it is not the owner's alone.

    Raises:
        FxlibError: the file cannot be read, or holds no token.
    """
    token = read_token(path)
    with suppress(OSError):  # it was there just now
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            logger.warning("others may read %s, and whoever has its token may do everything: chmod go-rwx it", path)
    return token


def _digests(token: str) -> frozenset[str]:
    return frozenset({hashlib.sha256(token.encode()).hexdigest()})
