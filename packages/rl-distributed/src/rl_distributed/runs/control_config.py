"""Settings of the address at which a run is asked."""

from __future__ import annotations

from pydantic import Field, model_validator

from rl_distributed.access.door import is_loopback
from rl_distributed.config import Config
from rl_distributed.security.tls_files import TlsFiles

__all__ = ["ControlConfig"]


class ControlConfig(Config):
    """Where a run listens for `rl ctl`, and whose keys are good there."""

    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback needs `tls`."""
    port: int = Field(0, ge=0, le=65_535)
    """Port to listen on; 0: a free one, which the log and `control.json` name."""
    keys_file: str | None = None
    """File of `rl keys create`; null: `RL_KEYS_FILE`, else that of this user."""
    tls: bool | TlsFiles = False
    """Encrypt: true, with certificates that are made for this user's listeners on this
    machine, or the three files to use."""

    @model_validator(mode="after")
    def _check_tls(self) -> ControlConfig:
        if not self.tls and not is_loopback(self.host):
            raise ValueError(
                "tls must be set where host is not a loopback address, because keys "
                f"would be sent in the clear: got host {self.host!r}; set tls to true"
            )
        return self
