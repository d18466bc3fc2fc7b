"""The driver side of generation: shards rows over replicas, calls them, joins rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import ActorEnvironmentError
from rl_distributed.workers.builder import RayWorkerBuilder
from rl_distributed.workers.future import MultiWorkerFuture
from rl_distributed.workers.group import RayWorkerGroup
from rl_distributed.workers.policy import FailFast
from rl_distributed.workers.wait import fetch
from rl_models.checkpoint.hub import check_hub_name, hub_secrets
from rl_models.checkpoint.model_folder import read_model_config
from rl_models.errors import GenerationError
from rl_models.generation.choice import choose_backend
from rl_models.generation.config import GenerationConfig
from rl_models.generation.noise import derive_seeds
from rl_models.generation.row_checks import check_versions, columns_to_sample
from rl_models.generation.sampling import check_sampling_params
from rl_models.interfaces import AnyPath, GenerationInterface
from rl_models.policy.backend_traits import check_model, hosting_of, rows_at_once
from rl_models.policy.row_sharding import num_parts, split_rows
from rl_models.policy.text_rows import TextRows, has_texts
from rl_models.policy.weight_updates import WeightUpdates, but_losses, raise_first
from rl_models.registry import get_generation_traits
from rl_models.replicas.count import ReplicaCount, Uses
from rl_models.replicas.replicas import Replicas
from rl_models.replicas.row_queue import serve_parts
from rl_models.replicas.server import ReplicaServer
from rl_models.replicas.workers import (
    ReplicaCall,
    ReplicaWorkers,
    replica_layout,
)
from rl_models.types import GenerationDatumSpec, GenerationOutputSpec, SamplingParams
from rl_models.weights.following import Following
from rl_models.weights.protocols import WeightSource

__all__ = ["GenerationPolicy"]


class GenerationPolicy(ReplicaCount, WeightUpdates, GenerationInterface):
    """A model that samples, on replicas over the bundles of a cluster.

    A replica takes one bundle, or as many neighbouring ones as the backend shares a
    model among (`vllm.tensor_parallel_size`).

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
        ConfigError: Settings that cannot work; likewise.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        config: GenerationConfig,
        *,
        model_name: AnyPath,
        tokenizer_name: AnyPath | None = None,
        load_weights: bool = True,
        hf_config_overrides: Mapping[str, Any] | None = None,
        name_prefix: str = "generation",
    ) -> None:
        self._cluster = cluster
        self._name_prefix = name_prefix
        self._pad_token_id = 0
        self._following: Following | None = None
        self._begin(
            config, model_name, tokenizer_name, load_weights, hf_config_overrides
        )
        self._start()

    def _start(self) -> None:
        """Start the workers and have them load the model."""
        self._is_resized = False
        config, hosting = self.config, self._hosting
        builder = RayWorkerBuilder(
            hosting.worker_class,
            config.to_dict(),
            self._context,
            registrations=hosting.registrations,
        )
        if hosting.calls_at_once > 1:
            # Besides these, one for updates and one for what else there is to ask.
            builder = builder.with_options(max_concurrency=hosting.calls_at_once + 2)
        try:
            self.group = RayWorkerGroup(
                self._cluster,
                builder,
                **self._layout(),
                name_prefix=self._name_prefix,
                env_vars=hosting.variables,
                start_deadline_s=config.start_deadline_s,
                call_deadline_s=config.call_deadline_s,
                failure_policy=FailFast(
                    heartbeat_limit_s=config.heartbeat_limit_s, release="tied"
                ),
            )
        except ActorEnvironmentError as error:
            module = hosting.worker_class.rpartition(".")[0]
            error.add_note(
                f"The backend {config.backend} runs in an environment of its own; "
                f"build it ahead of the run by: rl env build {module}"
            )
            raise
        self.workers = ReplicaWorkers(self.group, hosting.workers_per_replica)
        self.replicas = Replicas(
            self.workers,
            self._revive,
            max_restarts=config.max_restarts,
            deadline_s=config.start_deadline_s,
        )
        try:
            self._set_up(range(self.workers.num_replicas))
        except BaseException:
            self.group.shutdown(force=True)
            raise

    def _layout(self) -> dict[str, Any]:
        """Where the workers go, as arguments of their group."""
        size = self._hosting.workers_per_replica
        return replica_layout(self._cluster, self.config.num_replicas, size)

    def _set_up(self, replicas: Sequence[int]) -> None:
        """Have replicas load the model."""
        calls = self.workers.set_up(replicas, self.config.to_dict(), self._context)
        pad_token_ids = self._await("setup", calls, self.config.start_deadline_s)
        self._pad_token_id = pad_token_ids[0]

    def _revive(self, replica: int) -> bool:
        """Make new processes of a lost replica what it was; True if it can serve.

        Only the weights of the model's folder can be read again here.
        """
        can_serve = self._version == 0 and bool(self._context["load_weights"])
        context = {**self._context, "load_weights": can_serve}
        (call,) = self.workers.set_up([replica], self.config.to_dict(), context)
        what = f"setup of generation replica {replica}"
        try:
            # Not by the group, whose waits end with the failure of any other replica.
            fetch(list(call.references.values()), what, self.config.start_deadline_s)
        except BaseException:
            self.workers.end(replica, f"{what} failed")
            raise
        return can_serve

    def _begin(
        self,
        config: GenerationConfig,
        model_name: AnyPath,
        tokenizer_name: AnyPath | None,
        load_weights: bool,
        hf_config_overrides: Mapping[str, Any] | None,
    ) -> None:
        """Check the settings, reset the versions, and note what replicas are told."""
        on_gpu = self._cluster.use_gpus
        self.config = config = choose_backend(config, on_gpu=on_gpu)
        backend = get_generation_traits(config.backend)
        overrides = dict(hf_config_overrides or {})
        hosting = hosting_of(backend, config, on_gpu=on_gpu)
        variables = {**hosting.variables, **hub_secrets(model_name, tokenizer_name)}
        self._hosting = replace(hosting, variables=variables)
        model_config = read_model_config(str(model_name))
        if model_config is None:
            check_hub_name(str(model_name))
        else:
            check_model(backend, config, {**model_config, **overrides})
        self._version = 0
        self._refusal = ""
        self._num_calls = 0
        self._uses = Uses()
        self._restore: Callable[[], None] | None = None
        self._texts = TextRows(str(tokenizer_name or model_name))
        self._context = {
            "model_name": str(model_name),
            "tokenizer_name": None if tokenizer_name is None else str(tokenizer_name),
            "load_weights": load_weights,
            "hf_config_overrides": overrides,
        }

    def reload(
        self,
        config: GenerationConfig,
        *,
        model_name: AnyPath,
        tokenizer_name: AnyPath | None = None,
        load_weights: bool = True,
        hf_config_overrides: Mapping[str, Any] | None = None,
    ) -> None:
        """Start over with another config and model, in the same processes.

        A backend that needs other processes gets new ones.

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
        before = self._hosting
        self._end_following()
        self._begin(
            config, model_name, tokenizer_name, load_weights, hf_config_overrides
        )
        if self._hosting != before or self._is_resized:
            self._layout()  # raises while there is still something to go on with
            self.shutdown()
            self._start()
            return
        live = self.replicas.settle()
        self._set_up(live)
        self.replicas.updated(live)

    @property
    def cluster(self) -> RayVirtualCluster:
        """Whose bundles the replicas run on."""
        return self._cluster

    @property
    def num_replicas(self) -> int:
        """Copies of the model that serve, or will when they are up again."""
        return self.workers.num_replicas - self.replicas.num_away

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

        A batch may have texts in place of tokens: see `TextRows.sample`.
        """
        if self._following is not None:
            self._following.update()

        def generate(rows: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
            with self._uses.one():
                return self._generate(rows, greedy, sampling)

        return self._texts.sample(data, generate) if has_texts(data) else generate(data)

    def follow(self, policy: WeightSource) -> None:
        """Serve the weights of a policy from now on.

        Each `generate` brings them first, verified, where the policy has trained or
        loaded a checkpoint since. One call after both are made is enough. Where a
        `WeightSynchronizer` brings the weights, as in a trainer, it is not needed.

        Args:
            policy: A policy of a model of the same kind.

        Raises:
            ConfigError: It cannot hand out its weights.
        """
        following = Following(policy, self)
        self._end_following()
        self._following = following
        # A replica that comes back must wait for the policy's weights.
        self._context["load_weights"] = False

    def _end_following(self) -> None:
        if self._following is not None:
            self._following.close()
            self._following = None

    def _generate(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        greedy: bool,
        sampling: SamplingParams | None,
    ) -> BatchedDataDict[GenerationOutputSpec]:
        if self._refusal:
            raise GenerationError(
                f"Nothing is generated: {self._refusal} Call "
                "WeightSynchronizer.sync_weights() first."
            )
        rows = columns_to_sample(data)
        if sampling is not None:
            check_sampling_params(sampling)
        if "seeds" not in rows:
            rows["seeds"] = derive_seeds(self.config.seed, self._num_calls, rows.size)
        self._num_calls += 1
        oldest = self._version
        parts = self._parts(rows)
        server = ReplicaServer(
            self.workers,
            self.replicas,
            [
                {
                    "data": rows if len(parts) == 1 else rows.slice(start, end),
                    "greedy": greedy,
                    "sampling": sampling,
                    "first_row": start,
                }
                for start, end in parts
            ],
            calls_at_once=self._hosting.calls_at_once,
            deadline_s=self.config.call_deadline_s,
            restore=self._restore_weights,
        )
        outputs = serve_parts(len(parts), server)
        check_versions(outputs, oldest)
        if len(outputs) == 1:
            only: BatchedDataDict[GenerationOutputSpec] = outputs[0]
            return only
        return BatchedDataDict.from_batches(
            outputs,
            pad_value_dict={"output_ids": self._pad_token_id, "token_versions": -1},
        )

    def _parts(self, rows: BatchedDataDict[Any]) -> list[tuple[int, int]]:
        """Contiguous parts of the rows; equal prompts stay together where they can."""
        count = num_parts(
            rows.size,
            len(self.replicas.live) or 1,
            rows_at_once(self.config),
            self._hosting.calls_at_once,
        )
        if count == 1:
            return [(0, rows.size)]
        parts = split_rows(rows["input_ids"].cpu().numpy(), count)
        return [(start, end) for start, end in parts if end > start]

    def restore_weights_by(self, restore: Callable[[], None]) -> None:
        """Say how replicas get the weights again that are served.

        Args:
            restore: Updates all live replicas with the same version as before; raises
                where the trainer has other weights by now. It is called when a lost
                replica has come back and no other serves.
        """
        self._restore = restore

    def _restore_weights(self) -> None:
        """Bring replicas that came back without weights to serve, as nobody does."""
        if self._restore is None:
            raise GenerationError(
                "All generation replicas were lost, and those that came back have no "
                "weights yet. Call WeightSynchronizer.sync_weights()."
            )
        self._restore()

    def _await(
        self, method: str, calls: Sequence[ReplicaCall], deadline_s: float | None = None
    ) -> list[Any]:
        """Results of calls of replicas, those of all their workers."""
        references = {rank: r for call in calls for rank, r in call.references.items()}
        ranks = list(references)
        future = MultiWorkerFuture(list(references.values()), ranks, ranks, method)
        limit = deadline_s or self.config.call_deadline_s
        results: list[Any] = self.group.get_all_worker_results(future, deadline_s=limit)
        return results

    def prepare_for_generation(self) -> None:
        """Do nothing: a replica takes memory when weights or rows need it.

        What holds an update is taken before the cache, which then has what is left.
        """

    def finish_generation(self) -> None:
        """Free the replicas' caches; without a call where the backend has none.

        A replica that is lost here is brought back as one that is lost in `generate`.
        """
        if not self._hosting.frees_memory:
            return
        method = "release_memory"
        ranks = [rank for r in self.replicas.live for rank in self.workers.ranks(r)]
        calls = self._call(method, {rank: {} for rank in ranks})
        _, failures = self._results(method, calls, self.config.call_deadline_s)
        raise_first(but_losses(failures))

    def shutdown(self) -> bool:
        """End the workers; True if nothing went wrong."""
        self._end_following()
        self.replicas.close()
        return bool(self.group.shutdown(cleanup_method="shutdown"))
