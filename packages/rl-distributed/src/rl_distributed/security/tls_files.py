"""The files by which a Ray cluster encrypts, as a configuration names them."""

from __future__ import annotations

import os
from pathlib import Path

from rl_distributed.config import Config

__all__ = ["AUTHORITY", "CERTIFICATE", "KEY", "TlsFiles"]

CERTIFICATE, KEY, AUTHORITY = "node.crt", "node.key", "ca.crt"
"""Names of the files that `create_certificates` writes."""


class TlsFiles(Config):
    """The three PEM files that every process of a cluster with TLS needs."""

    certificate: Path
    """Certificate of this machine's processes; each is server and client."""
    key: Path
    """Private key of the certificate, readable by its owner only."""
    authority: Path
    """Certificate of the authority that signed those of all machines."""

    @classmethod
    def in_folder(cls, folder: str | os.PathLike[str]) -> TlsFiles:
        """Return the files that `create_certificates` has written to a folder."""
        place = Path(folder).resolve()
        return cls(
            certificate=place / CERTIFICATE,
            key=place / KEY,
            authority=place / AUTHORITY,
        )

    def environment(self) -> dict[str, str]:
        """Return the variables by which Ray's processes find the files."""
        return {
            "RAY_USE_TLS": "1",
            # Absolute, because Ray's processes run in other folders.
            "RAY_TLS_SERVER_CERT": str(self.certificate.resolve()),
            "RAY_TLS_SERVER_KEY": str(self.key.resolve()),
            "RAY_TLS_CA_CERT": str(self.authority.resolve()),
        }
