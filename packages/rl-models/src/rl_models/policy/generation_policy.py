"""The driver side of generation: shards rows over replicas, calls them, joins rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rl_distributed.batched_data_dict import BatchedDataDict
from rl_distributed.errors import BatchError, ConfigError
from rl_distributed.virtual_cluster import RayVirtualCluster
from rl_distributed.workers.builder import RayWorkerBuilder
from rl_distributed.workers.future import MultiWorkerFuture
from rl_distributed.workers.group import RayWorkerGroup
from rl_models.checkpoint.model_folder import check_model_folder
from rl_models.errors import GenerationError, WeightSyncError
from rl_models.generation.config import GenerationConfig
from rl_models.generation.noise import derive_seeds
from rl_models.generation.sampling import check_sampling_params
from rl_models.interfaces import GenerationInterface, Path
from rl_models.policy.generation_worker import LoadReport
from rl_models.policy.row_sharding import split_rows
from rl_models.registry import get_generation_backend
from rl_models.types import GenerationDatumSpec, GenerationOutputSpec, SamplingParams

__all__ = ["GenerationPolicy"]

_WORKER = "rl_models.policy.generation_worker.GenerationWorker"
_COLUMNS = ("input_ids", "input_lengths", "seeds", "stop_strings")


class GenerationPolicy(GenerationInterface):
    """A model that samples, on one replica per bundle of a cluster.

    Args:
        cluster: Where the replicas run.
        config: The generation config.
        model_name: Folder or hub name of the model.
        tokenizer_name: The same for its tokenizer; None takes the model's.
        load_weights: False refuses to generate before the first weight update; use it
            where a trainer has newer weights than `model_name`.
        hf_config_overrides: Fields of the model's `config.json` to replace; those of
            the trainer, if it has any.
        name_prefix: Name of the group of workers.

    Raises:
        RegistryError: The backend is unknown; before any process is started.
        ModelLoadError: The model folder is missing; likewise.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        config: GenerationConfig,
        *,
        model_name: Path,
        tokenizer_name: Path | None = None,
        load_weights: bool = True,
        hf_config_overrides: Mapping[str, Any] | None = None,
        name_prefix: str = "generation",
    ) -> None:
        self._pad_token_id = 0
        context = self._begin(
            config, model_name, tokenizer_name, load_weights, hf_config_overrides
        )
        self.group = RayWorkerGroup(
            cluster,
            RayWorkerBuilder(_WORKER, config.to_dict(), context),
            workers_per_node=_replicas_per_node(cluster, config.num_replicas),
            name_prefix=name_prefix,
            start_deadline_s=config.start_deadline_s,
            call_deadline_s=config.call_deadline_s,
        )
        try:
            replicas = list(range(self.num_replicas))
            self._pad_token_id = self._await(
                "setup",
                self.group.run_all_workers_multiple_data("setup", replica=replicas),
                config.start_deadline_s,
            )[0]
        except BaseException:
            self.group.shutdown(force=True)
            raise

    def _begin(
        self,
        config: GenerationConfig,
        model_name: Path,
        tokenizer_name: Path | None,
        load_weights: bool,
        hf_config_overrides: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """Check the settings, reset the versions, and give what replicas are told."""
        get_generation_backend(config.backend)
        check_model_folder(str(model_name))
        self.config = config
        self._version = 0
        self._is_consistent = True
        self._num_calls = 0
        return {
            "model_name": str(model_name),
            "tokenizer_name": None if tokenizer_name is None else str(tokenizer_name),
            "load_weights": load_weights,
            "hf_config_overrides": dict(hf_config_overrides or {}),
        }

    def reload(
        self,
        config: GenerationConfig,
        *,
        model_name: Path,
        tokenizer_name: Path | None = None,
        load_weights: bool = True,
        hf_config_overrides: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin anew with another config and model, in the same processes.

        Args:
            config: See the class; `num_replicas` is not read again.
            model_name: See the class.
            tokenizer_name: See the class.
            load_weights: See the class.
            hf_config_overrides: See the class.

        Raises:
            RegistryError: As the constructor.
            ModelLoadError: Likewise.
        """
        context = self._begin(
            config, model_name, tokenizer_name, load_weights, hf_config_overrides
        )
        references = self.group.run_all_workers_multiple_data(
            "setup",
            replica=list(range(self.num_replicas)),
            common_kwargs={"config": config.to_dict(), "context": context},
        )
        self._pad_token_id = self._await("setup", references, config.start_deadline_s)[
            0
        ]

    @property
    def num_replicas(self) -> int:
        """Copies of the model."""
        return self.group.world_size

    @property
    def weight_version(self) -> int:
        """Version that every replica serves; 0 is the checkpoint's weights."""
        return self._version

    def generate(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        greedy: bool = False,
        *,
        sampling: SamplingParams | None = None,
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Sample one continuation per row; see `GenerationInterface.generate`.

        A row's sample depends on its tokens, its seed and the weights, not on the
        number of replicas. Rows without a column `seeds` get seeds from `config.seed`
        and the number of calls so far.
        """
        rows = self._checked(data)
        if sampling is not None:
            check_sampling_params(sampling)
        if "seeds" not in rows:
            rows["seeds"] = derive_seeds(self.config.seed, self._num_calls, rows.size)
        self._num_calls += 1
        parts = [(0, rows.size)]
        if self.num_replicas > 1:
            parts = split_rows(rows["input_ids"].cpu().numpy(), self.num_replicas)
        busy = [replica for replica, (start, end) in enumerate(parts) if end > start]
        references = [
            self.group.run_single_worker_single_data(
                "generate",
                replica,
                data=rows if len(busy) == 1 else rows.slice(*parts[replica]),
                greedy=greedy,
                sampling=sampling,
                first_row=parts[replica][0],
            )
            for replica in busy
        ]
        outputs = self._await("generate", references, replicas=busy)
        self._check_versions(outputs)
        if len(outputs) == 1:
            only: BatchedDataDict[GenerationOutputSpec] = outputs[0]
            return only
        return BatchedDataDict.from_batches(
            outputs, pad_value_dict={"output_ids": self._pad_token_id}
        )

    def _checked(self, data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        """The columns that replicas need."""
        if not self._is_consistent:
            raise GenerationError(
                "The last weight update failed, so the replicas may hold different "
                "weights. Call WeightSynchronizer.sync_weights() again first."
            )
        missing = [name for name in _COLUMNS[:2] if name not in data]
        if missing:
            raise BatchError(
                f"The batch lacks {' and '.join(missing)}; it has "
                f"{', '.join(map(str, data.keys()))}."
            )
        rows: BatchedDataDict[Any] = BatchedDataDict(
            {name: data[name] for name in _COLUMNS if name in data}
        )
        if not rows.size:
            raise BatchError("The batch has no rows; generate needs at least one.")
        return rows

    def _check_versions(self, outputs: list[BatchedDataDict[Any]]) -> None:
        for part in outputs:
            served = torch.unique(part["weight_version"]).tolist()
            if served != [self._version]:
                raise GenerationError(
                    f"A replica sampled with weights of version {served}, but all have "
                    f"confirmed version {self._version}. Was it updated by somebody "
                    "else? Call WeightSynchronizer.sync_weights()."
                )

    def _await(
        self,
        method: str,
        references: list[Any],
        deadline_s: float | None = None,
        replicas: list[int] | None = None,
    ) -> list[Any]:
        """Results of calls of all replicas, or of some."""
        called = list(range(len(references))) if replicas is None else replicas
        future = MultiWorkerFuture(references, called, called, method)
        limit = deadline_s or self.config.call_deadline_s
        results: list[Any] = self.group.get_all_worker_results(future, deadline_s=limit)
        return results

    def update_weights(self, bundles: list[Any], version: int) -> None:
        """Load weights on every replica and check that each confirms the same.

        Args:
            bundles: One reference to a `WeightBundle` (or the bundle). It is passed on
                unopened, so the weights do not go through this process.
            version: What the replicas call these weights.

        Raises:
            WeightSyncError: A replica refused; the message says which, and why. Until
                an update succeeds, `generate` refuses as well.
        """
        if len(bundles) != 1:
            raise ConfigError(
                "update_weights takes one bundle, which holds all weights: got "
                f"{len(bundles)}."
            )
        self._is_consistent = False
        references = self.group.run_all_workers_single_data(
            "load_weights", bundle=bundles[0], version=version
        )
        reports = self._await("load_weights", references)
        _check_reports(reports, version)
        self._version = version
        self._is_consistent = True

    def prepare_for_generation(self) -> None:
        """Nothing to do: weights stay loaded, and the cache is taken when needed."""

    def finish_generation(self) -> None:
        """Free the memory of the replicas' caches."""
        references = self.group.run_all_workers_single_data("release_memory")
        self._await("release_memory", references)

    def shutdown(self) -> bool:
        """End the workers; True if nothing went wrong."""
        return bool(self.group.shutdown(cleanup_method="shutdown"))


def _check_reports(reports: list[LoadReport], version: int) -> None:
    problems = [report.problem for report in reports if report.problem]
    if problems:
        raise WeightSyncError(" ".join(problems))
    for report in reports:
        if report.version != version or report.digest != reports[0].digest:
            raise WeightSyncError(
                f"generation replica {report.replica} confirmed version "
                f"{report.version} with manifest {report.digest}, but version "
                f"{version} with manifest {reports[0].digest} was sent."
            )


def _replicas_per_node(
    cluster: RayVirtualCluster, num_replicas: int | None
) -> list[int] | None:
    """Fill the nodes in order; None uses every bundle."""
    if num_replicas is None:
        return None
    counts = list(cluster.bundle_counts)
    if num_replicas > sum(counts):
        raise ConfigError(
            f"generation.num_replicas must not exceed the bundles of the cluster: got "
            f"{num_replicas} with {sum(counts)}; lower it, or enlarge the cluster."
        )
    used: list[int] = []
    for count in counts:
        used.append(min(count, num_replicas - sum(used)))
    return used
