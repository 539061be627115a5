"""The policy file says who is who; what it gets wrong is said by place, and no service starts on it."""

import hashlib
from pathlib import Path

import pytest

from fxlib.errors import FxlibError
from fxlib.v1 import blobs_pb2, jobs_pb2, workers_pb2
from fxlib_service.policy import Policy
from fxlib_service.roles import MAY_CALL, Caller, Role
from fxlib_service.server import SERVICES
from tests.service.principals import token, write_policy
from tests.service.support import refused

DIGEST = hashlib.sha256(b"secret").hexdigest()


def test_a_policy_tells_callers_by_the_digests_of_their_tokens(tmp_path: Path) -> None:
    policy = Policy.read(write_policy(tmp_path))
    caller = policy.tokens[hashlib.sha256(token("ads").encode()).hexdigest()]
    assert caller == Caller(name="ads", roles=frozenset({Role.CLIENT}), namespace="ads")
    assert not policy.share_results


def test_a_principal_may_have_certificates_as_well(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text('[principals.w]\nrole = "worker"\ncertificates = ["dns:w.example.org", "uri:spiffe://a/w"]\n')
    assert set(Policy.read(path).certificates) == {"dns:w.example.org", "uri:spiffe://a/w"}


@pytest.mark.parametrize(
    "text, says",
    [
        ("roles = 1", "roles: is not a known key"),
        ("share_results = 1", "share_results: must be true or false"),
        ("principals = 1", "principals: must be a table"),
        ("[principals.a]\ntokens_sha256 = ['D']", "principals.a.role: must be one of client, viewer, worker, operator"),
        ("[principals.a]\nrole = ['viewer']\ntokens_sha256 = ['D']", "principals.a.role: must be one of client"),
        ("[principals.a]\nrole = 'client'\ntokens_sha256 = ['D']", "principals.a.namespace: is missing"),
        (
            "[principals.a]\nrole = 'worker'\nnamespace = 'x'\ntokens_sha256 = ['D']",
            "does not apply to the role worker",
        ),
        ("[principals.a]\nrole = 'viewer'\nnamespace = '../x'\ntokens_sha256 = ['D']", "a.namespace: must be up to 63"),
        ("[principals.a]\nrole = 'worker'", "principals.a: has neither"),
        ("[principals.a]\nrole = 'worker'\ntokens_sha256 = ['secret']", "tokens_sha256: must be a list"),
        ("[principals.a]\nrole = 'worker'\ncertificates = ['w']", "certificates: must be a list"),
        ("[principals.a]\nrole = 'worker'\ntoken = 'D'", "principals.a.token: is not a known key"),
        (
            "[principals.a]\nrole='worker'\ntokens_sha256=['D']\n[principals.b]\nrole = 'viewer'\ntokens_sha256=['D']",
            "principals.b.tokens_sha256: one of them also belongs to 'a'",
        ),
        (
            f"[principals.a]\nrole = 'operator'\ntokens_sha256 = ['{hashlib.sha256(b'').hexdigest()}']",
            "principals.a.tokens_sha256: one of them is the digest of an empty token",
        ),
        ("[principals.owner]\nrole = 'viewer'\ntokens_sha256 = ['D']", "principals.owner: is the name of"),
        ("[principals", "cannot read"),
        (f"[quota]\nqueued_jobs = {'9' * 5_000}", "cannot read"),
        (f"x = {'[' * 5_000}", "cannot read"),
    ],
)
def test_what_is_wrong_is_said_by_its_place(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text.replace("'D'", f"'{DIGEST}'"))
    with pytest.raises(FxlibError) as caught:
        Policy.read(path)
    assert says in str(caught.value)


def test_a_policy_that_others_may_write_is_refused(tmp_path: Path) -> None:
    path = write_policy(tmp_path)
    path.chmod(0o666)
    with pytest.raises(FxlibError, match="others may write"):
        Policy.read(path)


@pytest.mark.slow
def test_a_service_does_not_start_without_the_policy_that_it_was_given(tmp_path: Path) -> None:
    assert "--policy: cannot read" in refused("--data", str(tmp_path / "data"), "--policy", str(tmp_path / "absent"))


def test_every_method_of_the_protocol_is_in_the_table_of_roles() -> None:
    files = (jobs_pb2.DESCRIPTOR, blobs_pb2.DESCRIPTOR, workers_pb2.DESCRIPTOR)
    services = [service for file in files for service in file.services_by_name.values()]
    assert {service.full_name for service in services} == set(SERVICES)
    methods = {f"{service.name}/{method.name}" for service in services for method in service.methods}
    assert set(MAY_CALL) == methods
