"""X.509 certificates for the processes of one cluster: made, read and checked.

Needs `cryptography`, which the extra `rl-distributed[tls]` brings.
"""

from __future__ import annotations

import ipaddress
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rl_distributed.errors import SecurityError

__all__ = [
    "Authority",
    "certificate_problem",
    "issue_certificate",
    "create_authority",
    "read_authority",
    "read_certificates",
    "write_private",
]

# Clocks of the machines of a cluster differ a little.
_CLOCK_SLACK = timedelta(minutes=5)
_USES = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs the certificates of one cluster."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def certificate_pem(self) -> bytes:
        """Return the certificate, which every process of the cluster trusts."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def key_pem(self) -> bytes:
        """Return the private key; its holder can sign for the cluster."""
        return _key_pem(self.key)


def create_authority(valid_for: timedelta) -> Authority:
    """Make an authority that is used for nothing but one cluster."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "cluster authority")])
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _builder(name, name, key.public_key(), valid_for)
        # Length 0: it may sign certificates of processes but no further authority.
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(
            x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate, key)


def issue_certificate(
    authority: Authority, hosts: Iterable[str], valid_for: timedelta
) -> tuple[bytes, bytes]:
    """Make a certificate for these host names and addresses.

    Returns:
        The certificate and its private key, as PEM.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "cluster process")])
    signer = authority.certificate
    builder = (
        _builder(name, signer.subject, key.public_key(), valid_for)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([_general_name(host) for host in hosts]),
            critical=False,
        )
        .add_extension(x509.ExtendedKeyUsage(list(_USES)), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()),  # type: ignore[arg-type]
            critical=False,
        )
    )
    certificate = builder.sign(authority.key, hashes.SHA256())
    return certificate.public_bytes(serialization.Encoding.PEM), _key_pem(key)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a private key as PEM without a password, the only form that Ray reads."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    valid_for: timedelta,
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SLACK)
        .not_valid_after(now + valid_for)
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def write_private(path: Path, data: bytes) -> None:
    """Write or replace a file that only its owner can read."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    # May be left over from a process with the same id; O_EXCL would fail on it.
    part.unlink(missing_ok=True)
    # Created private: a later chmod would leave a moment in which others could read it.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    file = os.open(part, flags, stat.S_IRUSR | stat.S_IWUSR)
    with os.fdopen(file, "wb") as stream:
        stream.write(data)
    part.replace(path)


def read_certificates(path: Path) -> list[x509.Certificate]:
    """Read the certificates of a PEM file, the process's own first.

    Raises:
        SecurityError: the file is missing or holds none.
    """
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as error:
        raise SecurityError(f"certificate {path} cannot be read: {error}") from error
    except ValueError as error:
        raise SecurityError(
            f"{path} holds no certificate in PEM form: {error}"
        ) from error


def _read_key(path: Path) -> serialization.base.PrivateKeyTypes:  # type: ignore[name-defined]
    try:
        return serialization.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise SecurityError(f"private key {path} cannot be read: {error}") from error
    except (TypeError, ValueError) as error:
        raise SecurityError(
            f"{path} holds no private key in PEM form without a password: {error}"
        ) from error


def read_authority(certificate: Path, key: Path) -> Authority:
    """Read an authority that `create_certificates` is to sign with.

    Raises:
        SecurityError: a file is missing, or the two do not belong together.
    """
    (found, *_), secret = read_certificates(certificate), _read_key(key)
    if not isinstance(secret, ec.EllipticCurvePrivateKey):
        raise SecurityError(f"the key {key} of an authority must be an EC key")
    if found.public_key() != secret.public_key():
        raise SecurityError(f"private key {key} does not belong to {certificate}")
    return Authority(found, secret)


def certificate_problem(
    certificate: Path,
    key: Path,
    authority: Path,
    hosts: Sequence[str],
    now: datetime | None = None,
) -> str:
    """Describe the problem of a certificate, its key or authority; empty if none.

    Args:
        certificate: PEM file with the certificate, and those between it and the
            authority if there are any.
        key: PEM file with its private key.
        authority: PEM file with the certificates that are trusted.
        hosts: names or addresses by which others reach this process.
        now: time to compare with; None: the present.

    Raises:
        SecurityError: a file cannot be read.
    """
    now = now or datetime.now(UTC)
    chain, trusted = read_certificates(certificate), read_certificates(authority)
    own = chain[0]
    for path, found in ((certificate, own), (authority, trusted[0])):
        if now > found.not_valid_after_utc:
            return f"{path} expired on {found.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        if now < found.not_valid_before_utc:
            begin = f"{found.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
            return f"{path} is not valid before {begin}; check the clock"
    if _read_key(key).public_key() != own.public_key():
        return f"private key {key} does not belong to certificate {certificate}"
    if not _is_signed(own, chain[1:], trusted):
        return f"{certificate} is not signed by {authority}"
    return _wrong_use(certificate, own) or _missing_hosts(certificate, own, hosts)


def _is_signed(
    own: x509.Certificate,
    between: Sequence[x509.Certificate],
    trusted: Sequence[x509.Certificate],
) -> bool:
    # A self-signed certificate may itself be the trusted one.
    if own in trusted:
        return True
    for signer in (*trusted, *between):
        try:
            own.verify_directly_issued_by(signer)
        except (InvalidSignature, TypeError, ValueError):
            continue
        # Without this signer, or a cycle of signers would never end.
        rest = [other for other in between if other != signer]
        if signer in trusted or _is_signed(signer, rest, trusted):
            return True
    return False


def _wrong_use(path: Path, own: x509.Certificate) -> str:
    try:
        # Without this extension, any use is allowed (RFC 5280, 4.2.1.12).
        uses = own.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return ""
    if all(use in uses for use in _USES):
        return ""
    return (
        f"{path} must allow serverAuth and clientAuth in its extended key usage: each "
        "process of a cluster is both"
    )


def _missing_hosts(path: Path, own: x509.Certificate, hosts: Sequence[str]) -> str:
    try:
        names = own.extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        ).value
    except x509.ExtensionNotFound:
        return f"{path} has no subject alternative name; it needs {', '.join(hosts)}"
    given = {
        *map(str, names.get_values_for_type(x509.IPAddress)),
        *names.get_values_for_type(x509.DNSName),
    }
    missing = [host for host in hosts if host not in given]
    if not missing:
        return ""
    return (
        f"{path} is not for {', '.join(missing)}: its subject alternative names are "
        f"{', '.join(sorted(given))}"
    )
