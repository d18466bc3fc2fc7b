"""Section `policy.generation.openai`: servers that sample, by their addresses."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from rl_distributed.config import Config

__all__ = ["OpenAIConfig"]


class OpenAIConfig(Config):
    """Section `policy.generation.openai`: who samples, and how its weights change."""

    addresses: list[str] = Field(default_factory=list)
    """Addresses of servers of one model, such as `http://127.0.0.1:8000`; rows go to
    whichever has the fewest."""
    server: Literal["rl", "vllm", "sglang"] = "rl"
    """What they are: `rl serve`, vLLM's own server, or SGLang's. It decides by which
    requests weights are updated and confirmed."""
    model: str | None = None
    """Name that requests give the model; null: the first that the server lists."""
    api_key_variable: str | None = None
    """Environment variable that holds the key of requests; null: none is sent."""
    weights_key_variable: str | None = None
    """Environment variable that holds the key of weight updates; null: the same key."""
    weights_folder: str | None = None
    """Folder that servers can read too; each version of the weights is written to a
    folder of its own below it, and removed when the next is served."""
    max_requests: int = Field(64, gt=0)
    """Requests in progress per address; further rows wait."""
    request_deadline_s: float = Field(600.0, gt=0)
    """A request that has not been answered by then is given up."""
    num_attempts: int = Field(3, gt=0)
    """How often a row is asked for where a server cannot be reached or fails."""
    unverified_weights: bool = False
    """Train also where the server cannot confirm which weights it serves. Log-probs are
    compared all the same."""

    @field_validator("addresses")
    @classmethod
    def _check_addresses(cls, addresses: list[str]) -> list[str]:
        for address in addresses:
            parts = urlsplit(address)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(
                    f"must be addresses such as http://127.0.0.1:8000: got {address!r}"
                )
        return [a.rstrip("/").removesuffix("/v1") for a in addresses]
