"""A training policy whose workers run Megatron-core, from keyword arguments."""

from __future__ import annotations

import os
from typing import Any

from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_models.policy.huggingface_policy import HuggingFacePolicy

__all__ = ["MegatronPolicy"]


class MegatronPolicy(HuggingFacePolicy):
    """A `HuggingFacePolicy` with the backend `megatron`.

    ```python
    policy = MegatronPolicy(
        model_name="path/or/hub-name",
        cluster=RayVirtualCluster([2], use_gpus=False),
        parallelism={"tensor": 2},
    )
    ```

    Its workers run in an environment that has Megatron-core (`rl-models[megatron]`),
    which is built at the first start.

    Args:
        model_name: As in `HuggingFacePolicy`.
        cluster: As in `HuggingFacePolicy`.
        settings: The other arguments of `HuggingFacePolicy`.

    Raises:
        ActorEnvironmentError: The environment cannot be built.
    """

    def __init__(
        self,
        model_name: str | os.PathLike[str],
        cluster: RayVirtualCluster | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(model_name, cluster, **{**settings, "backend": "megatron"})
