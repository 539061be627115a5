"""A policy for tests: two namespaces, and a principal of each role."""

import hashlib
from pathlib import Path

ENTRIES = {
    "ads": 'role = "client"\nnamespace = "ads"',
    "web": 'role = "client"\nnamespace = "web"',
    "ads-viewer": 'role = "viewer"\nnamespace = "ads"',
    "viewer": 'role = "viewer"',
    "worker": 'role = "worker"',
    "worker-2": 'role = "worker"',
    "operator": 'role = "operator"',
}


def token(name: str) -> str:
    return f"the-token-of-{name}"


def bearer(name: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call by a principal; of one that nobody is, if the name is empty."""
    return (("authorization", f"Bearer {token(name)}"),) if name else ()


def write_policy(folder: Path, more: str = "") -> Path:
    path = folder / "policy.toml"
    entries = [
        f'[principals.{name}]\n{entry}\ntokens_sha256 = ["{hashlib.sha256(token(name).encode()).hexdigest()}"]\n'
        for name, entry in ENTRIES.items()
    ]
    path.write_text("\n".join([more, *entries]))
    return path
