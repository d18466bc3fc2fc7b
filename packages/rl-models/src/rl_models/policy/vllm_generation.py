"""A generation policy that runs vLLM, from the config of a policy or its section."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import ConfigError
from rl_models.config import PolicyConfig
from rl_models.generation.config import GenerationConfig
from rl_models.interfaces import AnyPath
from rl_models.lora_config import LoRAConfig
from rl_models.policy.generation_policy import GenerationPolicy

__all__ = ["VllmGeneration"]


class VllmGeneration(GenerationPolicy):
    """A `GenerationPolicy` whose replicas run vLLM, whatever the config's backend is.

    ```python
    generator = VllmGeneration(cluster, PolicyConfig(model_name=..., generation=...))
    ```

    Args:
        cluster: Where the replicas run.
        config: The config of a policy, from whose section `generation` it is taken,
            with the policy's model, tokenizer and overrides; or that section alone.
        model_name: Folder or hub name of the model; None: the policy's.
        tokenizer_name: The same for its tokenizer; None: the policy's, or the model's.
        load_weights: See `GenerationPolicy`.
        hf_config_overrides: See `GenerationPolicy`; None: the policy's.
        adapter: See `GenerationPolicy`; None: the policy's, if it sends one.
        updates_in_flight: See `GenerationPolicy`; needs `vllm.async_engine`.
        name_prefix: Name of the group of workers.

    Raises:
        ConfigError: There is no section `generation`, or no model.
        ActorEnvironmentError: vLLM's environment cannot be built.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        config: PolicyConfig | GenerationConfig,
        *,
        model_name: AnyPath | None = None,
        tokenizer_name: AnyPath | None = None,
        load_weights: bool = True,
        hf_config_overrides: Mapping[str, Any] | None = None,
        adapter: LoRAConfig | None = None,
        updates_in_flight: bool = False,
        name_prefix: str = "generation",
    ) -> None:
        if isinstance(config, GenerationConfig):
            section: GenerationConfig | None = config
        else:
            section = config.generation
            model_name = model_name or config.model_name
            tokenizer_name = tokenizer_name or config.tokenizer.name
            adapter = adapter or config.sent_adapter
            # Not `or`: an empty mapping says that nothing is replaced.
            if hf_config_overrides is None:
                hf_config_overrides = config.hf_config_overrides
        if section is None:
            raise ConfigError(
                "VllmGeneration needs the section generation of the policy's config: "
                "got null; give it max_new_tokens."
            )
        if model_name is None:
            raise ConfigError(
                "VllmGeneration needs model_name beside a GenerationConfig: got None; "
                "name the model, or pass the whole PolicyConfig."
            )
        super().__init__(
            cluster,
            section.model_copy(update={"backend": "vllm"}),
            model_name=os.fspath(model_name),
            tokenizer_name=tokenizer_name,
            load_weights=load_weights,
            hf_config_overrides=hf_config_overrides,
            adapter=adapter,
            updates_in_flight=updates_in_flight,
            name_prefix=name_prefix,
        )
