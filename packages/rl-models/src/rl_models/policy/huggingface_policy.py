"""A training policy for a Hugging Face model, from keyword arguments."""

from __future__ import annotations

import os
from typing import Any

from rl_distributed.virtual_cluster import RayVirtualCluster
from rl_models.config import PolicyConfig
from rl_models.interfaces import Path
from rl_models.policy.training_policy import TrainingPolicy

__all__ = ["HuggingFacePolicy"]


class HuggingFacePolicy(TrainingPolicy):
    """A `TrainingPolicy` whose config is given as keyword arguments.

    ```python
    policy = HuggingFacePolicy(
        model_name="path/or/hub-name",
        cluster=RayVirtualCluster([2], use_gpus=False),
        optimizer={"kwargs": {"lr": 1e-4}},
    )
    ```

    Args:
        model_name: Folder or hub name of a causal language model.
        cluster: Where the workers run.
        init_reference_model: Keep a frozen copy of the initial model.
        weights_path: Model folder to start from in place of `model_name`.
        optimizer_path: Training state to resume exactly.
        name_prefix: Name of the group of workers.
        settings: Further fields of `PolicyConfig`; sections as mappings.
    """

    def __init__(
        self,
        model_name: str | os.PathLike[str],
        cluster: RayVirtualCluster,
        *,
        init_reference_model: bool = False,
        weights_path: Path | None = None,
        optimizer_path: Path | None = None,
        name_prefix: str = "policy",
        **settings: Any,
    ) -> None:
        config = PolicyConfig.from_dict(
            {"model_name": os.fspath(model_name), **settings}, source="policy"
        )
        super().__init__(
            cluster,
            config,
            init_reference_model=init_reference_model,
            weights_path=weights_path,
            optimizer_path=optimizer_path,
            name_prefix=name_prefix,
        )
