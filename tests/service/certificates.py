"""Authorities and certificates for tests."""

import datetime as dt
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


@dataclass(frozen=True)
class Authority:
    name: x509.Name
    key: ec.EllipticCurvePrivateKey

    def sign(
        self,
        subject: str,
        key: ec.EllipticCurvePrivateKey,
        *,
        names: Sequence[str] = (),
        authority: bool = False,
        hours: int = 1,
    ) -> bytes:
        now = dt.datetime.now(dt.UTC)
        places: list[x509.GeneralName] = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        places += [x509.UniformResourceIdentifier(each) for each in names]
        builder = (
            x509.CertificateBuilder()
            .subject_name(self.name if authority else _name(subject))
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=2))
            .not_valid_after(now + dt.timedelta(hours=hours))
            .add_extension(x509.SubjectAlternativeName(places), critical=False)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common)])


@dataclass(frozen=True)
class Files:
    ca: Path
    certificate: Path
    key: Path


def certificates(folder: Path, subject: str, *names: str, hours: int = 1) -> Files:
    """An authority, and a certificate that it signed for so many hours, with more names (URIs) if they are given."""
    authority = Authority(_name(f"{subject} authority"), ec.generate_private_key(ec.SECP256R1()))
    key = ec.generate_private_key(ec.SECP256R1())
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    contents = {
        "ca": authority.sign("", authority.key, authority=True),
        "crt": authority.sign(subject, key, names=names, hours=hours),
        "key": pem,
    }
    paths = {kind: folder / f"{subject}.{kind}" for kind in contents}
    for kind, path in paths.items():
        path.write_bytes(contents[kind])
    return Files(ca=paths["ca"], certificate=paths["crt"], key=paths["key"])
