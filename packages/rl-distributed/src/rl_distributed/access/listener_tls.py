"""TLS of what listens, by one option: files of one's own, or certificates made here.

```
~/.config/rl/tls/authority   ca.crt, ca.key: signs this user's listeners here, 10 years
~/.config/rl/tls             node.crt, node.key: of the listeners, replaced in time
                             ca.crt: give this to those who connect
```
"""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rl_distributed.access.key_file import private_config_folder
from rl_distributed.errors import SecurityError
from rl_distributed.file_lock import FileLock
from rl_distributed.private_files import create_private_folder
from rl_distributed.security.tls_files import TlsFiles

__all__ = ["own_authority", "own_certificates", "server_context", "tls_files"]

_AUTHORITY_DAYS, _DAYS = 3650.0, 90.0
# A listener may run for weeks with the certificate that it has read at its start.
_LEFT = timedelta(days=45)
_DEADLINE_S = 30.0


def server_context(tls: bool | TlsFiles, host: str) -> ssl.SSLContext | None:
    """Return how a listener encrypts; None: it does not.

    Args:
        tls: Files to use; True: those of `own_certificates`; False: none.
        host: Name or address that it listens on.

    Raises:
        SecurityError: A file is missing or wrong, or `cryptography` is not installed.
    """
    files = tls_files(tls, host)
    if files is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(files.certificate, files.key)
    except (OSError, ssl.SSLError) as error:
        raise SecurityError(
            f"tls: certificate {files.certificate} and key {files.key} cannot be used: "
            f"{error}"
        ) from error
    return context


def tls_files(tls: bool | TlsFiles, host: str) -> TlsFiles | None:
    """Return the files of a listener; None: it does not encrypt.

    Args:
        tls: Files to use; True: those of `own_certificates`; False: none.
        host: Name or address that it listens on.

    Raises:
        SecurityError: They cannot be made.
    """
    if isinstance(tls, TlsFiles):
        return tls
    return own_certificates(host) if tls else None


def own_authority() -> Path:
    """Return the certificate that clients of this user's listeners trust."""
    return TlsFiles.in_folder(private_config_folder() / "tls").authority


def own_certificates(host: str) -> TlsFiles:
    """Return certificates for this user's listeners on this machine.

    They are made at the first call, and again before they expire, by one authority,
    so that clients need its certificate once.

    Args:
        host: A name or address that they must be good for, besides this machine's own.

    Raises:
        SecurityError: They cannot be made, or `cryptography` is not installed.
    """
    # Ray's module of security is imported here: what listens without TLS needs none.
    from rl_distributed.security.ray_access import (  # noqa: PLC0415
        create_certificates,
        own_hosts,
    )

    folder = private_config_folder() / "tls"
    files = TlsFiles.in_folder(folder)
    authority = folder / "authority"
    # A wildcard is not an address; this machine's own are in every certificate.
    named = [] if host in ("0.0.0.0", "::", *own_hosts()) else [host]
    try:
        create_private_folder(folder)
        lock = FileLock(folder / ".lock", "making certificates", mode=0o600)
        # Two listeners that start together would otherwise replace each other's files.
        with lock.held(_DEADLINE_S):
            signer = TlsFiles.in_folder(authority)
            if _problem(signer, ()):
                create_certificates(
                    authority, valid_days=_AUTHORITY_DAYS, keep_authority_key=True
                )
            if _problem(files, [*own_hosts(), *named]):
                create_certificates(
                    folder, hosts=named, valid_days=_DAYS, authority=authority
                )
    except SecurityError:
        raise
    except OSError as error:
        raise SecurityError(f"{folder} cannot be written: {error}") from error
    return files


def _problem(files: TlsFiles, hosts: list[str] | tuple[str, ...]) -> str:
    try:
        from rl_distributed.security.certificates import (  # noqa: PLC0415
            certificate_problem,
        )

        return certificate_problem(
            files.certificate,
            files.key,
            files.authority,
            hosts,
            now=datetime.now(UTC) + _LEFT,
        )
    except (SecurityError, ImportError):
        return "there is none"
