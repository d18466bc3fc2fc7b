"""Traits of the backend `openai` for the driver, without its HTTP client."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping

from rl_distributed.errors import ConfigError
from rl_models.generation.config import GenerationConfig
from rl_models.generation.traits import GenerationTraits

__all__ = ["Traits"]


class Traits(GenerationTraits):
    """One process asks all servers, which are not of this cluster."""

    holds_model = False

    @staticmethod
    def check_config(config: GenerationConfig, *, on_gpu: bool) -> None:
        """Refuse what the servers decide, and what is missing to ask them.

        Raises:
            ConfigError: A setting cannot work, or would have no effect.
        """
        section = "policy.generation"
        if not config.openai.addresses:
            raise ConfigError(
                f"{section}.openai.addresses must name a server with the backend "
                "openai: got []; give one such as http://127.0.0.1:8000"
            )
        if config.num_replicas != 1:
            raise ConfigError(
                f"{section}.num_replicas must be 1 with the backend openai, where one "
                f"process asks all servers: got {config.num_replicas}; set it to 1, "
                "and name more addresses for more servers"
            )
        if config.max_batch_size is not None:
            raise ConfigError(
                f"{section}.max_batch_size must be null with the backend openai, where "
                f"the server decides: got {config.max_batch_size}; set openai."
                "max_requests to limit the requests in progress"
            )
        if importlib.util.find_spec("aiohttp") is None:
            raise ConfigError(
                f"{section}.backend openai needs aiohttp, which is not installed: "
                "install rl-models[openai]"
            )

    @staticmethod
    def process_variables(
        config: GenerationConfig, *, on_gpu: bool
    ) -> Mapping[str, str]:
        """Keys of the servers, which workers get by no other way.

        Raises:
            ConfigError: A variable that is named is not set, or holds no key.
        """
        found = {}
        for key in ("api_key_variable", "weights_key_variable"):
            name = getattr(config.openai, key)
            if name is None:
                continue
            if name not in os.environ:
                raise ConfigError(
                    f"policy.generation.openai.{key} must name a variable that is set: "
                    f"{name} is not; export it, or set the key to null"
                )
            secret = os.environ[name]
            if not secret.strip() or "\n" in secret or "\r" in secret:
                # The value is a secret: it is not shown.
                raise ConfigError(
                    f"{name} (policy.generation.openai.{key}) must hold a key, which "
                    "is text without line breaks: got an empty value or one with a "
                    "line break; export the key alone"
                )
            found[name] = secret
        return found

    @staticmethod
    def frees_memory(config: GenerationConfig, *, on_gpu: bool) -> bool:
        """Whether there is a cache to free here: it is the servers'."""
        return False
