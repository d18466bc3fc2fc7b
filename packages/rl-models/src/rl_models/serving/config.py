"""Settings of a server: where it listens, how many replicas, what it allows."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr, field_validator, model_validator

from rl_distributed.config import Config
from rl_distributed.security.tls_files import TlsFiles
from rl_models.generation.config import GenerationConfig
from rl_models.generation.vllm_config import VllmConfig
from rl_models.serving.tool_parsers import TOOL_CALL_PARSERS

__all__ = ["ENGINE", "DType", "Engine", "ServeConfig"]

ENGINE = "rl_models.generation.vllm"
"""What the Python environment of replicas is declared for."""

_MIB = 1 << 20

Engine = Literal["auto", "vllm", "huggingface"]
"""What samples; auto: see `rl_models.serving.engine_choice`."""

DType = Literal["auto", "float32", "bfloat16", "float16"]
"""Data types that a model can be served in."""


class ServeConfig(Config):
    """How a model is served."""

    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback needs an API key."""
    port: int = Field(8000, ge=0, le=65_535)
    """Port to listen on; 0: any that is free."""
    api_key: SecretStr | None = None
    """What clients send as `Authorization: Bearer KEY`; null: none is needed on a
    loopback address, and elsewhere one is made."""
    weights_key: SecretStr | None = None
    """What `POST /rl/weights` needs as `Authorization: Bearer KEY`, together with
    `weights_root` and other than `api_key`; null: the route is off, but for operators
    of `keys_file`."""
    keys_file: str | None = None
    """File of `rl keys create`, whose keys are good according to their roles; null:
    none."""
    tls: bool | TlsFiles = False
    """Encrypt: true, with certificates that are made for this user's listeners on this
    machine, or the three files to use."""
    weights_root: str | None = None
    """Folder below which weights must lie that are named over HTTP, links followed."""
    model_name: str | None = None
    """What requests call the model; null: the name of its folder, or the hub name."""
    engine: Engine = "auto"
    """What samples: `vllm`, in an environment of its own, or `huggingface`, slower and
    with fewer features, which needs nothing further. auto: vllm where it is installed
    or a setting needs it, else huggingface."""
    num_replicas: int = Field(1, gt=0)
    """Copies of the model that share the requests."""
    dtype: DType = "auto"
    """Data type of weights and cache; auto: that of the model folder."""
    max_model_len: int | None = Field(None, gt=0)
    """Longest prompt and answer together; null: what the model's config says."""
    num_threads: int | None = Field(1, gt=0)
    """Threads per replica on a CPU; null: one per processor."""
    seed: int = 0
    """Seed of the engines, for requests that bring none."""
    vllm: VllmConfig = Field(default_factory=VllmConfig)
    """The engine of each replica, as in a training run."""
    tool_call_parser: str | None = None
    """How the model writes tool calls, by vLLM's name; a request with tools may then
    leave it to the model whether to call one. null: such requests are refused."""
    request_deadline_s: float = Field(600.0, gt=0)
    """A request that has not ended by then gets an error."""
    max_body_bytes: int = Field(16 * _MIB, gt=0)
    """Largest body of a request."""
    max_requests: int = Field(1_024, gt=0)
    """Requests in progress; further ones are told to come back."""
    drain_deadline_s: float = Field(30.0, ge=0)
    """How long a shutdown waits for requests in progress."""
    start_deadline_s: float = Field(300.0, gt=0)
    """A replica that does not serve by then is reported."""
    update_deadline_s: float = Field(600.0, gt=0)
    """A weight update of a replica that has not ended by then has failed."""
    hang_deadline_s: float = Field(8.0, gt=0)
    """A replica that gives no sign of life for so long is ended and replaced."""
    max_restarts: int = Field(3, ge=0)
    """How often within an hour a replica is replaced before it is dropped."""

    @field_validator("api_key", "weights_key")
    @classmethod
    def _check_key(cls, value: SecretStr | None) -> SecretStr | None:
        key = "x" if value is None else value.get_secret_value()
        if not key or not key.isascii() or any(c.isspace() for c in key):
            raise ValueError(
                "must be ASCII text without spaces, or null: got one that is "
                "empty or holds other characters"
            )
        return value

    @model_validator(mode="after")
    def _check_weights(self) -> ServeConfig:
        key, root = self.weights_key, self.weights_root
        # Operators of a file of keys need no weights key.
        needs_key = root is not None and self.keys_file is None
        if (key is None and needs_key) or (key is not None and root is None):
            missing = "weights_key" if key is None else "weights_root"
            raise ValueError(
                "weights_key and weights_root go together, or neither is set: got no "
                f"{missing}; set it (--{missing.replace('_', '-')}), or leave out the "
                "other, which turns POST /rl/weights off"
            )
        if key is not None and key == self.api_key:
            raise ValueError(
                "weights_key must not be api_key, because whoever may sample must not "
                "change the weights; make another one"
            )
        return self

    @field_validator("tool_call_parser")
    @classmethod
    def _check_tool_call_parser(cls, value: str | None) -> str | None:
        if value is not None and value not in TOOL_CALL_PARSERS:
            raise ValueError(
                f"must be one of {', '.join(TOOL_CALL_PARSERS)}, or null: got {value!r}"
            )
        return value

    @model_validator(mode="after")
    def _check_huggingface(self) -> ServeConfig:
        needless = [] if self.engine != "huggingface" else self.of_vllm_alone()
        if needless:
            raise ValueError(
                f"{needless[0]} is not read by engine huggingface; leave it out, or "
                "take engine vllm (--engine vllm)"
            )
        return self

    def of_vllm_alone(self) -> list[str]:
        """Names of settings that were made and that only vLLM reads."""
        made = {
            "dtype": self.dtype == "float16",
            "tool_call_parser": self.tool_call_parser is not None,
            "vllm": self.vllm != VllmConfig(),
        }
        return [name for name, is_made in made.items() if is_made]

    @field_validator("vllm")
    @classmethod
    def _check_engine(cls, value: VllmConfig) -> VllmConfig:
        if value.tensor_parallel_size != 1:
            raise ValueError(
                "tensor_parallel_size must be 1, because a replica of a server has one "
                f"GPU: got {value.tensor_parallel_size}; use more replicas"
            )
        return value

    def generation(self) -> GenerationConfig:
        """Return the settings of each replica's engine, as a generation config."""
        own: dict[str, object] = {
            "backend": "vllm",
            "vllm": {**self.vllm.to_dict(), "async_engine": True},
        }
        if self.engine == "huggingface":
            precision = "bfloat16" if self.dtype == "bfloat16" else "float32"
            own = {"backend": "huggingface", "precision": precision}
        return GenerationConfig.from_dict(
            {
                **own,
                "max_new_tokens": self.max_model_len or 1,
                "max_context_length": self.max_model_len,
                "num_threads": self.num_threads,
                "seed": self.seed,
            },
            source="the settings of the server",
        )
