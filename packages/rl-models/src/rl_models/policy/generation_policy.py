"""The driver side of generation: shard rows over replicas, call them, join the rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.transfer import LinkSet, TensorLink
from rl_distributed.workers.group import RayWorkerGroup
from rl_models.errors import GenerationError
from rl_models.generation.config import GenerationConfig
from rl_models.generation.noise import derive_seeds
from rl_models.generation.row_checks import check_versions, columns_to_sample
from rl_models.generation.sampling import check_sampling_params
from rl_models.generation.traits import get_generation_traits
from rl_models.interfaces import AnyPath, GenerationInterface
from rl_models.lora_config import LoRAConfig
from rl_models.policy.generation_replicas import GenerationReplicas, Sampled
from rl_models.policy.hosting import rows_at_once
from rl_models.policy.row_sharding import num_parts, split_rows
from rl_models.policy.text_rows import TextRows, has_texts
from rl_models.policy.weight_updates import ServedWeights, WeightUpdates
from rl_models.replicas.broadcast import but_losses, raise_first
from rl_models.replicas.replicas import Replicas
from rl_models.replicas.row_queue import serve_parts
from rl_models.replicas.server import ReplicaServer
from rl_models.replicas.workers import ReplicaWorkers
from rl_models.types import (
    GenerationInput,
    GenerationOutput,
    SamplingParams,
)
from rl_models.weight_request import ConfirmedWeights, Pending, WeightRequest
from rl_models.weights.following import Following
from rl_models.weights.protocols import WeightSource

__all__ = ["GenerationPolicy"]


class GenerationPolicy(GenerationInterface):
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
        adapter: The trainer sends its adapters apart from their base, with these
            settings (`PolicyConfig.sent_adapter`); None: it sends merged weights, or
            there is none.
        updates_in_flight: Weights may be loaded while rows are sampled, which go on
            with the new ones; `token_versions` tells them apart. For a backend that can
            (`GenerationTraits.in_flight_obstacle`).
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
        adapter: LoRAConfig | None = None,
        updates_in_flight: bool = False,
        name_prefix: str = "generation",
    ) -> None:
        sampled = Sampled.checked(
            config,
            model_name,
            tokenizer_name,
            load_weights=load_weights,
            hf_config_overrides=hf_config_overrides,
            adapter=adapter,
            updates_in_flight=updates_in_flight,
            on_gpu=cluster.use_gpus,
        )
        self._served = ServedWeights()
        self._following: Following | None = None
        self._begin(sampled)
        self._fleet = GenerationReplicas(cluster, name_prefix, sampled, self._served)

    def _begin(self, sampled: Sampled) -> None:
        """Reset the state of serving for another model."""
        self._served.version, self._served.refusal = 0, ""
        self._served.confirmed = None
        # Counted by `next`, which threads may call at the same time.
        self._calls = itertools.count()
        self._restore: Callable[[], None] | None = None
        context = sampled.context
        self._texts = TextRows(context["tokenizer_name"] or context["model_name"])

    def reload(
        self,
        config: GenerationConfig,
        *,
        model_name: AnyPath,
        tokenizer_name: AnyPath | None = None,
        load_weights: bool = True,
        hf_config_overrides: Mapping[str, Any] | None = None,
        adapter: LoRAConfig | None = None,
        updates_in_flight: bool = False,
    ) -> None:
        """Start over with another config and model, in the same processes.

        A backend that needs other processes gets new ones; so do other deadlines, and
        other rules for lost replicas and nodes. `max_restarts` counts from here on.

        Args:
            config: See the class; where the processes stay, `num_replicas` is not read
                again.
            model_name: See the class.
            tokenizer_name: See the class.
            load_weights: See the class.
            hf_config_overrides: See the class.
            adapter: See the class.
            updates_in_flight: See the class.

        Raises:
            RegistryError: As the constructor.
            ModelLoadError: Likewise.
            ConfigError: Likewise.
        """
        # Checked first: after a wrong setting the present model is still served.
        sampled = Sampled.checked(
            config,
            model_name,
            tokenizer_name,
            load_weights=load_weights,
            hf_config_overrides=hf_config_overrides,
            adapter=adapter,
            updates_in_flight=updates_in_flight,
            on_gpu=self.cluster.use_gpus,
        )
        self._fleet.check_room(sampled)
        self._end_following()
        self._begin(sampled)
        self._fleet.reload(sampled)

    @property
    def config(self) -> GenerationConfig:
        """The generation config of the replicas."""
        return self._fleet.config

    @property
    def cluster(self) -> RayVirtualCluster:
        """Whose bundles the replicas run on."""
        return self._fleet.cluster

    @property
    def group(self) -> RayWorkerGroup:
        """The workers that the replicas consist of."""
        return self._fleet.group

    @property
    def workers(self) -> ReplicaWorkers:
        """Calls of whole replicas."""
        return self._fleet.workers

    @property
    def replicas(self) -> Replicas:
        """State of the replicas: serving, lost, or being restarted."""
        return self._fleet.replicas

    @property
    def num_replicas(self) -> int:
        """Number of replicas that serve, or will once they are up again."""
        return self.workers.num_replicas - self.replicas.num_away

    @property
    def calls_at_once(self) -> int:
        """Calls of `generate` that keep all replicas busy, from as many threads.

        Where a replica decodes one call at a time (its rows as one batch), as many as
        there are replicas.
        """
        return max(1, len(self.replicas.live)) * self._fleet.hosting.calls_at_once

    @property
    def holds_model(self) -> bool:
        """Whether the replicas hold the model in the memory of their devices."""
        return get_generation_traits(self.config.backend).holds_model

    @property
    def updates_in_flight(self) -> bool:
        """Whether weights may be loaded while `generate` runs."""
        return self._fleet.hosting.updates_in_flight

    def resize(self, num_replicas: int | None) -> None:
        """Serve with another number of replicas.

        Calls of `generate` that run are waited for, so that a replica that is removed
        has finished its rows. One that is added has no weights: it serves from the next
        weight update on (`WeightSynchronizer.sync_weights`, or `restore_weights` where
        the trainer's weights have not changed). Beyond the number that it was started
        with, all replicas are restarted.

        Args:
            num_replicas: How many; None: one per bundle of the cluster.

        Raises:
            ConfigError: There is no room for that number.
            DeadlineExceededError: A call did not end in time.
            WorkerStartError: A replica did not come up; the number is what it was.
        """
        self._fleet.resize(num_replicas)

    def check_num_replicas(self, num_replicas: int | None) -> int:
        """Return the number of replicas, resolved if it is None.

        Raises:
            ConfigError: There is no room for that number.
        """
        return self._fleet.check_num_replicas(num_replicas)

    def generate(
        self,
        data: GenerationInput,
        greedy: bool = False,
        *,
        sampling: SamplingParams | None = None,
    ) -> GenerationOutput:
        """Sample one continuation per row; see `GenerationInterface.generate`.

        A row's sample depends on its tokens, its seed and the weights, not on the
        number of replicas. Rows without a column `seeds` get seeds from `config.seed`
        and the number of calls so far.

        A batch may have texts in place of tokens: see `TextRows.sample`.
        """
        if self._following is not None:
            self._following.update()

        def generate(
            rows: GenerationInput,
        ) -> GenerationOutput:
            with self._fleet.uses.one():
                return self._generate(rows, greedy, sampling)

        return self._texts.sample(data, generate) if has_texts(data) else generate(data)

    def follow(self, policy: WeightSource) -> None:
        """Serve the weights of a policy from now on.

        Each `generate` first syncs them, verified, if the policy has trained or loaded
        a checkpoint since. A single call after both are made is enough. It is not
        needed if a `WeightSynchronizer` syncs the weights, as in a trainer.

        Args:
            policy: A policy of a model of the same kind.

        Raises:
            ConfigError: It cannot hand out its weights.
        """
        following = Following(policy, self)
        self._end_following()
        self._following = following
        # A restarted replica must wait for the policy's weights and not serve the
        # folder's.
        self._fleet.sampled = self._fleet.sampled.without_weights()

    def _end_following(self) -> None:
        if self._following is not None:
            self._following.close()
            self._following = None

    def _generate(
        self,
        data: GenerationInput,
        greedy: bool,
        sampling: SamplingParams | None,
    ) -> GenerationOutput:
        if self._served.refusal:
            raise GenerationError(
                f"Nothing is generated: {self._served.refusal} Call "
                "WeightSynchronizer.sync_weights() first."
            )
        rows = columns_to_sample(data)
        if sampling is not None:
            check_sampling_params(sampling)
        call = next(self._calls)
        if "seeds" not in rows:
            rows["seeds"] = derive_seeds(self.config.seed, call, rows.size)
        # Before the rows are sampled: an update may come meanwhile, and newer tokens
        # are fine.
        oldest = self._served.version
        parts = self._parts(rows)
        server = ReplicaServer(
            self.workers,
            self.replicas,
            self._fleet.load,
            [
                {
                    # Errors name rows by `first_row`, counted in the whole batch.
                    "data": rows if len(parts) == 1 else rows.slice(start, end),
                    "greedy": greedy,
                    "sampling": sampling,
                    "first_row": start,
                }
                for start, end in parts
            ],
            calls_at_once=self._fleet.hosting.calls_at_once,
            deadline_s=self.config.call_deadline_s,
            restore=self._restore_weights,
        )
        outputs = serve_parts(len(parts), server)
        check_versions(outputs, oldest)
        if len(outputs) == 1:
            only: GenerationOutput = outputs[0]
            return only
        return BatchedDataDict.from_batches(
            outputs,
            pad_value_dict={
                "output_ids": self._fleet.pad_token_id,
                "token_versions": -1,
            },
        )

    def _parts(self, rows: GenerationInput) -> list[tuple[int, int]]:
        """Return contiguous parts of the rows, with equal prompts kept together."""
        count = num_parts(
            rows.size,
            len(self.replicas.live) or 1,
            rows_at_once(self.config),
            self._fleet.hosting.calls_at_once,
        )
        if count == 1:
            return [(0, rows.size)]
        parts = split_rows(rows["input_ids"].cpu().numpy(), count)
        return [(start, end) for start, end in parts if end > start]

    # --- what a weight sync calls: see `rl_models.weights.protocols` ---------------

    @property
    def weight_version(self) -> int:
        """Version that every replica serves; 0 is the checkpoint's weights."""
        return self._served.version

    @property
    def confirmed_weights(self) -> ConfirmedWeights | None:
        """The last weight update, as all processes confirmed it; None before one."""
        return self._served.confirmed

    @property
    def taken_adapter(self) -> LoRAConfig | None:
        """The adapter that is taken apart from its base; None if weights are merged."""
        adapter: LoRAConfig | None = self._fleet.sampled.context.get("adapter")
        return adapter

    @property
    def node_ids(self) -> set[str]:
        """Nodes of Ray that the replicas run on."""
        return {seat.slot.node_id for seat in self.group.seats if seat.slot.node_id}

    @property
    def uses_gpus(self) -> bool:
        """Whether each replica has a GPU."""
        return bool(self.cluster.use_gpus)

    @property
    def _updates(self) -> WeightUpdates:
        return WeightUpdates(self._fleet.all, self._served)

    def live_processes(self) -> list[tuple[int, int, int]]:
        """Return each live worker, its incarnation, and the setups so far."""
        return self._updates.live_processes()

    def open_weight_link(
        self, link: TensorLink | LinkSet, deadline_s: float
    ) -> Pending:
        """Have every live replica join a link for `start_weight_update`."""
        return self._updates.open_link(link, deadline_s)

    def start_weight_update(self, source: Any, request: WeightRequest) -> Pending:
        """Have every live replica load weights; see `GenerationInterface`."""
        return self._updates.start(source, request)

    def generate_on_each(
        self, rows: GenerationInput, sampling: SamplingParams
    ) -> dict[int, GenerationOutput]:
        """Get the same rows on every serving replica at the same time, by replica."""
        return self._updates.generate_on_each(rows, sampling)

    def changed_weights(self, replica: int) -> list[str] | None:
        """Return the names of tensors that differ from what a replica was sent.

        None if its backend cannot read weights back.
        """
        return self._updates.changed_weights(replica)

    def refuse(self, reason: str) -> None:
        """Refuse to generate until a weight update succeeds."""
        self._served.refusal = reason

    def restore_weights_by(self, restore: Callable[[], None]) -> None:
        """Register the function that sends the served weights again.

        Args:
            restore: Updates all live replicas with the same version as before; raises
                if the trainer has other weights by now. It is called when a lost
                replica has been restarted and no other serves.
        """
        self._restore = restore

    def _restore_weights(self) -> None:
        """Send weights to restarted replicas, because no other replica serves."""
        if self._restore is None:
            raise GenerationError(
                "All generation replicas were lost, and those that came back have no "
                "weights yet. Call WeightSynchronizer.sync_weights()."
            )
        self._restore()

    # --- memory, and the end --------------------------------------------------------

    def prepare_for_generation(self) -> None:
        """Do nothing: a replica allocates memory when weights or rows need it.

        Memory for an update is allocated before the cache, which gets the rest.
        """

    def finish_generation(self) -> None:
        """Free the replicas' caches; without a call where the backend has none.

        A replica that is lost here is brought back as one that is lost in `generate`.
        """
        if not self._fleet.hosting.frees_memory:
            return
        method = "release_memory"
        every = self._fleet.all
        ranks = [rank for r in self.replicas.live for rank in self.workers.ranks(r)]
        calls = every.call(method, {rank: {} for rank in ranks})
        _, failures = every.results(method, calls, self.config.call_deadline_s)
        raise_first(but_losses(failures))

    def shutdown(self) -> bool:
        """End the workers; True if nothing went wrong."""
        self._end_following()
        return self._fleet.shutdown()
