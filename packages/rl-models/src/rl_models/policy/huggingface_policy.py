"""A training policy for a Hugging Face model, from keyword arguments."""

from __future__ import annotations

import os
from typing import Any

from rl_distributed.cluster.own_cluster import OwnCluster
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import ConfigError
from rl_models.config import PolicyConfig
from rl_models.interfaces import AnyPath
from rl_models.policy.preflight import check_policy
from rl_models.policy.training_policy import TrainingPolicy

__all__ = ["HuggingFacePolicy"]


class HuggingFacePolicy(TrainingPolicy):
    """A `TrainingPolicy` whose config is given as keyword arguments.

    ```python
    policy = HuggingFacePolicy("path/or/hub-name")  # one worker on this machine
    policy = HuggingFacePolicy(
        model_name="path/or/hub-name",
        cluster=RayVirtualCluster([2], use_gpus=False),
        optimizer={"kwargs": {"lr": 1e-4}},
    )
    ```

    Args:
        model_name: Folder or hub name of a causal language model.
        cluster: Where the workers run. None: one worker on this machine, on a GPU if
            there is one; Ray is started for it if it is not up. `shutdown` and the end
            of the program end what was started.
        init_reference_model: Keep a frozen copy of the initial model.
        weights_path: Model folder to start from in place of `model_name`.
        optimizer_path: Training state to resume exactly.
        name_prefix: Name of the group of workers.
        settings: Further fields of `PolicyConfig`; sections as mappings.
    """

    def __init__(
        self,
        model_name: str | os.PathLike[str],
        cluster: RayVirtualCluster | None = None,
        *,
        init_reference_model: bool = False,
        weights_path: AnyPath | None = None,
        optimizer_path: AnyPath | None = None,
        name_prefix: str = "policy",
        **settings: Any,
    ) -> None:
        config = PolicyConfig.from_dict(
            {"model_name": os.fspath(model_name), **settings}, source="policy"
        )
        self._own_cluster = None
        if cluster is None:
            check_policy(config, num_ranks=1)  # before Ray is started for it
            self._own_cluster = OwnCluster(name=name_prefix)
            cluster = self._own_cluster.cluster
        elif not isinstance(cluster, RayVirtualCluster):
            raise ConfigError(
                "cluster must be a RayVirtualCluster, or None for one worker on this "
                f"machine: got {cluster!r}; make one such as RayVirtualCluster([2])"
            )
        try:
            super().__init__(
                cluster,
                config,
                init_reference_model=init_reference_model,
                weights_path=weights_path,
                optimizer_path=optimizer_path,
                name_prefix=name_prefix,
            )
        except BaseException:
            # The caller has no object yet to shut down.
            self._end_own_cluster()
            raise

    def shutdown(self) -> bool:
        """End the workers, and what was started for them; True if all went well."""
        clean = super().shutdown()
        self._end_own_cluster()
        return clean

    def _end_own_cluster(self) -> None:
        if self._own_cluster is not None:
            self._own_cluster.shutdown()
