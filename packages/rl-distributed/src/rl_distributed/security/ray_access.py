"""Access to a Ray cluster and encryption of its traffic: tokens and TLS.

Ray's token keeps out programs that do not know it; TLS encrypts the traffic between
Ray's processes, and admits only holders of a certificate of the cluster's authority.
Neither covers direct traffic between workers through gloo or NCCL.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
from ray import _raylet

from rl_distributed.errors import SecurityError
from rl_distributed.security.tls_files import AUTHORITY, TlsFiles
from rl_distributed.security.tokens import check_token_file, has_token, missing_token

__all__ = [
    "adopt_token_authentication",
    "check_certificates",
    "check_token_settings",
    "forget_adopted_mode",
    "create_certificates",
    "own_hosts",
    "temporary_certificates",
    "tls_in_use",
    "use_tls",
    "variables_undone_on_failure",
]

logger = logging.getLogger(__name__)

_AUTHORITY_KEY = "ca.key"
_ON = ("1", "true")
_FILE_VARIABLES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
_MODE = "RAY_AUTH_MODE"
_VARIABLES = ("RAY_USE_TLS", *_FILE_VARIABLES, _MODE)
_DAYS = 30.0


def own_hosts() -> list[str]:
    """Names and addresses by which this machine is reached, loopback included."""
    addresses = {
        # Link-local addresses carry their interface after a %, unlike in certificates.
        entry.address.partition("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
    first = ["localhost", "127.0.0.1", "::1"]
    rest = sorted({socket.gethostname(), *addresses} - set(first))
    return [*first, *rest]


def create_certificates(
    folder: str | os.PathLike[str],
    *,
    hosts: Iterable[str] = (),
    valid_days: float = _DAYS,
    authority: str | os.PathLike[str] | None = None,
    keep_authority_key: bool = False,
) -> TlsFiles:
    """Make a certificate for this machine and write the files that Ray needs.

    The key of a new authority is discarded, so no other certificate can be signed for
    the cluster, unless `keep_authority_key` is set.

    Args:
        folder: where to; it is made readable by its owner only.
        hosts: further names and addresses, such as those of the other nodes where all
            use this certificate.
        valid_days: how long the certificate is good for.
        authority: folder with `ca.crt` and `ca.key` to sign with; None: a new
            authority.
        keep_authority_key: write `ca.key` as well, to sign for other machines.

    Returns:
        The files.

    Raises:
        SecurityError: `cryptography` is not installed, or the folder cannot be written.
    """
    certificates = _certificates_module()
    if valid_days <= 0:
        raise SecurityError(f"valid_days must be positive: got {valid_days}")
    valid_for = timedelta(days=valid_days)
    if authority is None:
        signer = certificates.create_authority(valid_for)
    else:
        source = Path(authority)
        signer = certificates.read_authority(
            source / AUTHORITY, source / _AUTHORITY_KEY
        )
    names = list(dict.fromkeys([*own_hosts(), *hosts]))
    certificate, key = certificates.issue_certificate(signer, names, valid_for)
    files = TlsFiles.in_folder(folder)
    try:
        place = files.key.parent
        place.mkdir(parents=True, exist_ok=True)
        # An existing folder may have other permissions.
        place.chmod(stat.S_IRWXU)
        certificates.write_private(files.key, key)
        certificates.write_private(files.certificate, certificate)
        certificates.write_private(files.authority, signer.certificate_pem())
        if keep_authority_key:
            certificates.write_private(place / _AUTHORITY_KEY, signer.key_pem())
    except OSError as error:
        raise SecurityError(
            f"certificates cannot be written to {folder}: {error}"
        ) from error
    return files


def temporary_certificates() -> TlsFiles:
    """Certificates for a cluster that ends with this process, removed at its end."""
    folder = tempfile.mkdtemp(prefix="rl-tls-")
    owner = os.getpid()

    def remove() -> None:
        # A forked child inherits the hook, but not the folder.
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return create_certificates(folder)


def check_certificates(files: TlsFiles, *, hosts: Sequence[str] = ()) -> None:
    """Check certificates before Ray uses them; Ray itself only fails to connect.

    Args:
        files: the certificate, its key and the authority.
        hosts: names or addresses that the certificate must be good for.

    Raises:
        SecurityError: a file is missing or not in PEM form, the certificate or the
            authority has expired, the key belongs to another certificate, the authority
            did not sign it, or it is for other hosts or another use.
    """
    problem = _certificates_module().certificate_problem(
        files.certificate, files.key, files.authority, hosts
    )
    if problem:
        raise SecurityError(
            f"TLS cannot be used: {problem}; make new certificates with "
            "create_certificates, or give the right files"
        )
    if files.key.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        logger.warning("private key %s can be read by others: chmod 600", files.key)


def tls_in_use(variables: Mapping[str, str] | None = None) -> TlsFiles | None:
    """Return the files that Ray's variables name, or None where TLS is off.

    Raises:
        SecurityError: TLS is on, but a variable is missing.
    """
    variables = os.environ if variables is None else variables
    if variables.get("RAY_USE_TLS", "0").lower() not in _ON:
        return None
    missing = [name for name in _FILE_VARIABLES if not variables.get(name)]
    if missing:
        raise SecurityError(
            f"RAY_USE_TLS is on, but {' and '.join(missing)} is not set; set all three "
            "files, or leave RAY_USE_TLS out and pass tls= to init_ray"
        )
    certificate, key, authority = (Path(variables[name]) for name in _FILE_VARIABLES)
    return TlsFiles(certificate=certificate, key=key, authority=authority)


def use_tls(files: TlsFiles) -> None:
    """Make Ray use TLS from now on, in this process and those that it starts.

    Ray reads its variables when it is imported; they are set, and read once more. TLS
    stays on for the rest of this process.

    Raises:
        SecurityError: this version of Ray cannot read its variables again.
    """
    os.environ.update(files.environment())
    refresh_ray_variables()


# Whether the mode in the environment is one that Ray, or this module, has put there for
# a cluster, and not the user.
_mode_is_adopted = False


@contextmanager
def variables_undone_on_failure() -> Iterator[None]:
    """Put TLS and the mode of authentication back if the block raises."""
    global _mode_is_adopted
    before = {name: os.environ.get(name) for name in _VARIABLES}
    was_adopted = _mode_is_adopted
    try:
        yield
    except BaseException:
        _mode_is_adopted = was_adopted
        # Only if something changed, because old versions of Ray cannot
        # re-read variables.
        if before != {name: os.environ.get(name) for name in _VARIABLES}:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
            refresh_ray_variables()
        raise
    # A local cluster that Ray starts turns the mode on by itself.
    is_open = was_adopted or before[_MODE] is None
    _mode_is_adopted = is_open and _MODE in os.environ


def forget_adopted_mode() -> None:
    """Leave the mode of authentication open again, where an earlier cluster set it."""
    global _mode_is_adopted
    if _mode_is_adopted and os.environ.pop(_MODE, None) is not None:
        refresh_ray_variables()
    _mode_is_adopted = False


def refresh_ray_variables() -> None:
    """Let Ray's compiled part read its `RAY_...` variables again.

    Raises:
        SecurityError: this version of Ray cannot.
    """
    refresh: Any = getattr(getattr(_raylet, "Config", None), "initialize", None)
    if refresh is None:
        raise SecurityError(
            "this version of Ray reads its settings only when it is imported: set "
            "RAY_USE_TLS, RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY, RAY_TLS_CA_CERT and "
            "RAY_AUTH_MODE in the environment before Python starts"
        )
    refresh("")


def check_token_settings() -> None:
    """Check what the environment says of tokens, before Ray reads it.

    Raises:
        SecurityError: `RAY_AUTH_TOKEN_PATH` names a file without a token.
    """
    if os.environ.get(_MODE, "").lower() == "disabled":
        logger.warning(
            "RAY_AUTH_MODE=disabled: whoever reaches the cluster's ports can run code "
            "on it; remove the variable to have token authentication"
        )
    check_token_file()


def adopt_token_authentication(demands_token: bool | None, address: str) -> None:
    """Have this process present its token if the cluster that it joins asks for one.

    Ray looks for a token by itself only for a cluster that it starts. A process that
    uses tokens refuses the workers of a cluster that does not, and so loses every
    actor; therefore both sides must do the same.

    Args:
        demands_token: What the cluster does; None: it does not say.
        address: Its address, for messages.

    Raises:
        SecurityError: The environment turns tokens on and the cluster has none, or this
            process has none.
    """
    mode = os.environ.get(_MODE, "").lower()
    if demands_token is False:
        if mode not in ("", "disabled"):
            raise SecurityError(
                f"the Ray cluster at '{address}' runs without token authentication, "
                f"and this process has RAY_AUTH_MODE={mode}: start the cluster with "
                "RAY_AUTH_MODE=token, or remove the variable here"
            )
        logger.warning(
            "the Ray cluster at '%s' runs without token authentication: whoever "
            "reaches its ports can run code on it; start it with RAY_AUTH_MODE=token",
            address,
        )
    elif not mode and has_token():
        os.environ[_MODE] = "token"
        refresh_ray_variables()
    elif mode == "token" and not has_token():
        # Ray would end the process.
        raise missing_token(address)


def _certificates_module() -> Any:
    try:
        from rl_distributed.security import certificates  # noqa: PLC0415 - the extra `tls`
    except ImportError as error:
        raise SecurityError(
            "TLS needs the package cryptography: pip install 'rl-distributed[tls]'"
        ) from error
    return certificates
