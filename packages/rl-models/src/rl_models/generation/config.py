"""Section `policy.generation`: which generation backend, and how it samples."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from rl_distributed.config import Config, changeable
from rl_distributed.workers.policy import OnNodeLost
from rl_models.generation.openai_config import OpenAIConfig
from rl_models.generation.vllm_config import VllmConfig
from rl_models.types import SamplingParams
from rl_models.weights.config import WeightSyncConfig

__all__ = ["GenerationConfig"]


class GenerationConfig(Config):
    """Section `policy.generation`: the backend, and how it samples."""

    backend: str = "huggingface"
    """Name of a registered generation backend; `auto`: `vllm` on GPUs where its
    environment is built, else `huggingface`."""
    max_new_tokens: int = Field(gt=0)
    """Maximum number of tokens generated per row."""
    temperature: float = Field(1.0, gt=0)
    """Logits are divided by it; log-probabilities are reported at it."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus: the smallest set of tokens with this probability is sampled from."""
    top_k: int | None = Field(None, gt=0)
    """Number of most probable tokens to sample from; null: all."""
    val_temperature: float | None = Field(None, gt=0)
    """Temperature in validation; null: `temperature`."""
    val_top_p: float | None = Field(None, gt=0, le=1)
    """`top_p` in validation; null: `top_p`."""
    val_top_k: int | None = Field(None, gt=0)
    """`top_k` in validation; null: `top_k`."""
    stop_token_ids: list[int] | None = None
    """Tokens that end a row (and are kept); null: the end-of-text token."""
    stop_strings: list[str] | None = None
    """Texts that end a row once they appear in what it generated (and are kept)."""
    seed: int = Field(0, ge=0)
    """Start of the noise of rows that bring no seed of their own."""
    precision: str = Field("float32", pattern="^(float32|bfloat16)$")
    """Data type of weights and cache."""
    max_context_length: int | None = Field(None, gt=0)
    """Longest row, input and output together; null: what the model's config says."""
    max_batch_size: int | None = Field(None, gt=0)
    """Rows decoded at once per replica, the bound of the cache's memory; the others
    take the places of rows that have ended. Null: all."""
    num_replicas: int | None = Field(None, gt=0, json_schema_extra=changeable())
    """Copies of the model that share the rows; null: one per bundle of the cluster."""
    num_threads: int | None = Field(1, gt=0)
    """Threads of torch per replica on a CPU; null leaves torch's own choice."""
    start_deadline_s: float = Field(300.0, gt=0)
    """A replica that has not loaded its model by then is reported."""
    call_deadline_s: float = Field(3600.0, gt=0)
    """A call of a replica that has not ended by then is considered hung: the replica is
    replaced, and its rows go to others."""
    heartbeat_limit_s: float = Field(6.0, gt=0)
    """Seconds without a sign of life after which a replica is considered hung."""
    max_restarts: int = Field(3, ge=0)
    """How often lost replicas are started again, all together; those lost later stay
    away, and what they were sampling goes to the others."""
    on_node_lost: OnNodeLost = "shrink"
    """A replica that no node has room for, because its node is lost or still to come
    (`cluster.min_nodes`): with `shrink` the others go on, and it is started as soon as
    a node has room; with `wait` it stays away after `node_deadline_s`, with `fail` at
    once."""
    min_replicas: int = Field(1, gt=0)
    """Smallest number of replicas to start with and, with `shrink`, to go on with for
    longer than `node_deadline_s`."""
    node_deadline_s: float = Field(300.0, gt=0)
    """Seconds that a lost node may take to come back, or another one to come."""
    weight_sync: WeightSyncConfig = Field(default_factory=WeightSyncConfig)
    """How the trainer's weights get here."""
    backend_options: dict[str, Any] = Field(default_factory=dict)
    """Further settings, whose meaning the backend defines."""
    vllm: VllmConfig = Field(default_factory=VllmConfig)
    """The engine of the backend vllm."""
    openai: OpenAIConfig = Field(default_factory=OpenAIConfig)
    """The servers of the backend openai."""

    @model_validator(mode="after")
    def _check_stop_strings(self) -> GenerationConfig:
        if self.stop_strings is not None and "" in self.stop_strings:
            raise ValueError("stop_strings must not hold an empty text: got ''")
        return self

    @model_validator(mode="after")
    def _check_min_replicas(self) -> GenerationConfig:
        if self.num_replicas is not None and self.min_replicas > self.num_replicas:
            raise ValueError(
                f"min_replicas must not exceed num_replicas ({self.num_replicas}): got "
                f"{self.min_replicas}"
            )
        return self

    def sampling_params(self, *, validation: bool = False) -> SamplingParams:
        """Return the settings of one call, for training rows or for validation rows."""
        if not validation:
            return SamplingParams(
                self.temperature, self.top_p, self.top_k, self.max_new_tokens
            )
        return SamplingParams(
            self.val_temperature or self.temperature,
            self.val_top_p or self.top_p,
            self.val_top_k or self.top_k,
            self.max_new_tokens,
        )
