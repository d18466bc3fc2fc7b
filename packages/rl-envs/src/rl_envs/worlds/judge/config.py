"""Settings of the judge."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from rl_distributed.config import Config

__all__ = ["JudgeConfig"]

DEFAULT_RUBRIC = (
    "Judge how well the response does what the request asks: it is correct, complete, "
    "clear, and as long as it needs to be."
)


class JudgeConfig(Config):
    """Settings of the judge environment."""

    address: str
    """Where an OpenAI-compatible server listens, such as `http://127.0.0.1:8000/v1`."""
    model: str
    """Name of the model that judges."""
    api_key_variable: str | None = None
    """Environment variable that holds the server's key; null: none is sent."""
    compare: Literal["rubric", "reference", "group"] = "rubric"
    """`rubric`: the judge gives each response a score. `reference`: it compares the
    response with the row's reference answer. `group`: it compares the responses to one
    prompt with each other. Both comparisons are made in both orders."""
    rubric: str = DEFAULT_RUBRIC
    """What a good response is; a row's column `rubric` replaces it."""
    reference_column: str | None = None
    """Column with an answer that is known to be good. `rubric` shows it to the judge,
    and `reference` needs it."""
    min_score: int = 0
    """Score of a response without any merit, which is a reward of 0."""
    max_score: int = 10
    """Score of a perfect response, which is a reward of 1."""
    opponents: int | None = Field(default=2, gt=0)
    """With how many other responses of its prompt each is compared in `group`; null:
    with all of them."""
    votes: int = Field(default=1, gt=0)
    """How often each question is asked; the mean of the verdicts counts."""
    temperature: float = Field(default=0.0, ge=0.0)
    """Of the judge; several votes at 0 are mostly equal."""
    max_tokens: int = Field(default=512, gt=0)
    """Longest reply of the judge."""
    max_response_characters: int = Field(default=32_000, gt=0)
    """The rest of a longer response is not shown, and the judge is told so."""
    max_requests: int = Field(default=16, gt=0)
    """Requests in progress; further ones wait."""
    request_deadline_s: float = Field(default=120.0, gt=0.0)
    """Seconds that one try of a request may take."""
    num_attempts: int = Field(default=3, gt=0)
    """How often a request is tried where the server fails or is busy."""
    max_calls: int | None = Field(default=None, gt=0)
    """Replies that this process may ask the server for; after that, judging is an
    error. Kept replies cost nothing. Null: no limit."""
    cache_folder: str | None = None
    """Folder in which replies are kept, so that a repeated question costs nothing, also
    in a later run; null: they are kept as long as the process lives."""

    @field_validator("address")
    @classmethod
    def _check_address(cls, address: str) -> str:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"must be an address such as http://127.0.0.1:8000/v1: got {address!r}"
            )
        return address.rstrip("/")

    @model_validator(mode="after")
    def _check_together(self) -> JudgeConfig:
        if self.min_score >= self.max_score:
            raise ValueError(
                f"min_score must be below max_score: got {self.min_score} and "
                f"{self.max_score}"
            )
        if self.compare == "reference" and self.reference_column is None:
            raise ValueError(
                "compare=reference needs reference_column, the column with the answer "
                "that responses are compared with"
            )
        return self
