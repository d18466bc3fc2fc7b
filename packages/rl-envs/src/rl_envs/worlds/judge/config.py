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
    """Address of an OpenAI-compatible server, such as `http://127.0.0.1:8000/v1`."""
    model: str
    """Name of the judge model."""
    api_key_variable: str | None = None
    """Environment variable with the server's key; null: none is sent."""
    compare: Literal["rubric", "reference", "group"] = "rubric"
    """Kind of judging. `rubric`: a score for each response. `reference`: a comparison
    with the row's reference answer. `group`: comparisons among the responses to one
    prompt. Comparisons are made in both orders."""
    rubric: str = DEFAULT_RUBRIC
    """Criteria of a good response; overridden by a row's column `rubric`."""
    reference_column: str | None = None
    """Column with a known good answer, shown to the judge with `rubric` and required by
    `reference`."""
    min_score: int = 0
    """Score of a response without merit, for a reward of 0."""
    max_score: int = 10
    """Score of a perfect response, for a reward of 1."""
    opponents: int | None = Field(default=2, gt=0)
    """Number of responses to the same prompt with which each is compared in `group`;
    null: all of them."""
    votes: int = Field(default=1, gt=0)
    """Number of times that each question is asked; verdicts are averaged."""
    temperature: float = Field(default=0.0, ge=0.0)
    """Sampling temperature of the judge; at 0, several votes are mostly equal."""
    max_tokens: int = Field(default=512, gt=0)
    """Maximum length of the judge's reply."""
    max_response_characters: int = Field(default=32_000, gt=0)
    """Length beyond which a response is cut off; the judge is told so."""
    max_requests: int = Field(default=16, gt=0)
    """Maximum number of concurrent requests."""
    request_deadline_s: float = Field(default=120.0, gt=0.0)
    """Time limit of one attempt, in seconds."""
    num_attempts: int = Field(default=3, gt=0)
    """Number of attempts per request if the server fails or is busy."""
    max_calls: int | None = Field(default=None, gt=0)
    """Maximum number of replies that this process may request, after which judging is
    an error. Kept replies do not count. null: no limit."""
    cache_folder: str | None = None
    """Folder of kept replies, which make repeated questions free, even in later runs;
    null: kept for the life of the process."""

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
