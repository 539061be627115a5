"""The policy file: a TOML file that assigns certificates and tokens to principals. It holds digests, not secrets.

`docs/how-to/secure.md` shows one and explains every key.
"""

from __future__ import annotations

import hashlib
import re
import stat
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final, cast

from fxlib.errors import FxlibError
from fxlib.spec.labels import is_namespace
from fxlib_service.quotas import Quota, Quotas, merged
from fxlib_service.roles import OWNER, Caller, Role

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}")
_CERTIFICATE: Final = re.compile(r"(uri|dns|email|ip):\S{1,512}")
_NEVER: Final = hashlib.sha256(b"").hexdigest()
_QUOTAS: Final = frozenset(each.name for each in fields(Quota))
_KEYS: Final = frozenset({"role", "namespace", "tokens_sha256", "certificates"})


@dataclass(slots=True, kw_only=True)
class Policy:
    """The principals and their permissions. A service has one policy for as long as it runs; `take` updates it.

    Attributes:
        tokens: callers by the SHA-256 of their tokens, in hex.
        certificates: callers by an alternative name of their certificates, such as "dns:ads.example.org".
        share_results: whether namespaces share the answers of the result cache.
        quotas: the quotas of the namespaces.
    """

    tokens: Mapping[str, Caller] = field(default_factory=dict)
    certificates: Mapping[str, Caller] = field(default_factory=dict)
    share_results: bool = False
    quotas: Quotas = field(default_factory=Quotas)

    @staticmethod
    def read(path: Path) -> Policy:
        """Read a policy file.

        Raises:
            FxlibError: the file cannot be read, others than its owner may write it, or an entry is not valid.
        """
        try:
            with path.open("rb") as file:
                mode = path.stat().st_mode
                table = tomllib.load(file)
        except (OSError, ValueError, RecursionError) as error:
            problem = (error.strerror or "") if isinstance(error, OSError) else str(error)
            raise FxlibError(f"cannot read {path}: {problem}", where="--policy") from error
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise FxlibError(f"others may write {path}", where="--policy", hint=f"chmod go-w {path}")
        return _policy(table)

    def take(self, newer: Policy) -> Mapping[str, Sequence[str]]:
        """Adopt the contents of a newer policy; return the names of the entries that were added, removed or changed."""
        before, now = self._entries(), newer._entries()
        self.tokens, self.certificates = newer.tokens, newer.certificates
        self.share_results = newer.share_results
        self.quotas.take(newer.quotas)
        return {
            "added": sorted(now.keys() - before.keys()),
            "removed": sorted(before.keys() - now.keys()),
            "changed": sorted(name for name in now.keys() & before.keys() if now[name] != before[name]),
        }

    def _entries(self) -> Mapping[str, object]:
        """Return the whole contents of the policy as named entries."""
        entries: dict[str, object] = {"share_results": self.share_results, "quota": self.quotas.general}
        entries |= {f"namespaces.{namespace}": quota for namespace, quota in self.quotas.own.items()}
        for known in (self.tokens, self.certificates):
            for each, caller in known.items():
                name = f"principals.{caller.name}"
                entries[name] = {*cast(set[object], entries.get(name, set())), (each, caller)}
        return entries


def _policy(table: Mapping[str, object]) -> Policy:
    _check_keys(table, frozenset({"share_results", "principals", "quota", "namespaces"}), "")
    shared = table.get("share_results", False)
    if not isinstance(shared, bool):
        raise _wrong("share_results", "must be true or false")
    tokens, certificates = dict[str, Caller](), dict[str, Caller]()
    for name, entry in _table(table, "principals").items():
        where = f"principals.{name}"
        if not _NAME.fullmatch(name):
            raise _wrong(where, "must be named by up to 63 letters, digits or ._@-")
        if name == OWNER.name:
            raise _wrong(where, "is the name of whoever started the service, in logs and in jobs; choose another")
        if not isinstance(entry, dict):
            raise _wrong(where, "must be a table")
        _check_keys(entry, _KEYS, where)
        caller = _caller(name, entry, where)
        digests = _strings(entry, "tokens_sha256", where, _DIGEST, "64 lower-case hex digits")
        names = _strings(entry, "certificates", where, _CERTIFICATE, "uri:, dns:, email: or ip: and a name")
        if not (digests or names):
            raise _wrong(where, "has neither tokens_sha256 nor certificates, so nobody can authenticate as it")
        for known, given, key in ((tokens, digests, "tokens_sha256"), (certificates, names, "certificates")):
            for each in given:
                if each in known:
                    raise _wrong(f"{where}.{key}", f"one of them also belongs to {known[each].name!r}")
                known[each] = caller
    if _NEVER in tokens:
        raise _wrong(f"principals.{tokens[_NEVER].name}.tokens_sha256", "one of them is the digest of an empty token")
    quotas = _quotas(table)
    return Policy(tokens=tokens, certificates=certificates, share_results=shared, quotas=quotas)


def _quotas(table: Mapping[str, object]) -> Quotas:
    general = merged(Quota(), _amounts(_table(table, "quota"), "quota"))
    own = dict[str, Quota]()
    for namespace, entry in _table(table, "namespaces").items():
        where = f"namespaces.{namespace}"
        if not is_namespace(namespace):
            raise _wrong(where, "is not the name of a namespace, which has up to 63 letters, digits or ._-")
        if not isinstance(entry, dict):
            raise _wrong(where, "must be a table")
        own[namespace] = merged(general, _amounts(entry, where))
    return Quotas(general=general, own=own)


def _amounts(entry: Mapping[str, object], where: str) -> Mapping[str, float]:
    _check_keys(entry, _QUOTAS, where)
    amounts = dict[str, float]()
    for key, value in entry.items():
        fits = isinstance(value, int) or (key == "trial_seconds" and isinstance(value, float))
        if not fits or isinstance(value, bool) or not 0 < value < float("inf"):  # type: ignore[operator]
            raise _wrong(f"{where}.{key}", "must be a positive number")
        amounts[key] = value  # type: ignore[assignment]
    return amounts


def _caller(name: str, entry: Mapping[str, object], where: str) -> Caller:
    role, namespace = entry.get("role"), entry.get("namespace")
    if role not in list(Role):  # not a set, since the value may be a list, which has no hash
        raise _wrong(f"{where}.role", f"must be one of {', '.join(Role)}")
    if role == Role.CLIENT and namespace is None:
        raise _wrong(f"{where}.namespace", "is missing; a client belongs to one namespace")
    if namespace is not None and role not in (Role.CLIENT, Role.VIEWER):
        raise _wrong(f"{where}.namespace", f"does not apply to the role {role}, which serves all namespaces")
    if namespace is not None and not (isinstance(namespace, str) and is_namespace(namespace)):
        raise _wrong(f"{where}.namespace", "must be up to 63 letters, digits or ._-")
    return Caller(name=name, roles=frozenset({Role(str(role))}), namespace=namespace)


def _table(table: Mapping[str, object], key: str) -> Mapping[str, object]:
    found = table.get(key, {})
    if not isinstance(found, dict):
        raise _wrong(key, "must be a table")
    return found


def _strings(entry: Mapping[str, object], key: str, where: str, form: re.Pattern[str], wanted: str) -> Sequence[str]:
    found = entry.get(key, [])
    if not (isinstance(found, list) and all(isinstance(each, str) and form.fullmatch(each) for each in found)):
        raise _wrong(f"{where}.{key}", f"must be a list, each entry of the form: {wanted}")
    return found


def _check_keys(table: Mapping[str, object], known: frozenset[str], where: str) -> None:
    for key in sorted(table.keys() - known):
        raise _wrong(
            f"{where}.{key}" if where else key, f"is not a known key; the known ones are {', '.join(sorted(known))}"
        )


def _wrong(key: str, problem: str) -> FxlibError:
    return FxlibError(problem, where=f"--policy: {key}")
