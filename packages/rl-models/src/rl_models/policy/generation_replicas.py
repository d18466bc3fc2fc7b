"""The replicas of a generation policy: start, setup, restart and resizing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import ActorEnvironmentError
from rl_distributed.logs.logging import get_logger
from rl_distributed.workers.builder import RayWorkerBuilder
from rl_distributed.workers.group import RayWorkerGroup
from rl_distributed.workers.policy import FailFast
from rl_distributed.workers.wait import fetch
from rl_models.checkpoint.hub import check_hub_name, hub_secrets
from rl_models.checkpoint.model_folder import read_model_config
from rl_models.generation.choice import choose_backend
from rl_models.generation.config import GenerationConfig
from rl_models.generation.traits import get_generation_traits
from rl_models.interfaces import AnyPath
from rl_models.lora_config import LoRAConfig
from rl_models.policy.hosting import Hosting, hosting_of
from rl_models.policy.weight_updates import ServedWeights
from rl_models.replicas.broadcast import Broadcast
from rl_models.replicas.load import ReplicaLoad
from rl_models.replicas.replicas import Replicas
from rl_models.replicas.uses import Uses
from rl_models.replicas.workers import ReplicaWorkers, replica_layout

__all__ = ["GenerationReplicas", "Sampled"]

_logger = get_logger(__name__)

# What a group of workers and the state of its replicas are made with, and keep.
_KEPT_SETTINGS = (
    "start_deadline_s",
    "call_deadline_s",
    "heartbeat_limit_s",
    "on_node_lost",
    "min_replicas",
    "node_deadline_s",
)


@dataclass(frozen=True)
class Sampled:
    """A model, and how replicas sample from it."""

    config: GenerationConfig
    hosting: Hosting
    context: Mapping[str, Any]
    """Keyword arguments of the backend's `setup`."""

    @classmethod
    def checked(
        cls,
        config: GenerationConfig,
        model_name: AnyPath,
        tokenizer_name: AnyPath | None,
        *,
        load_weights: bool,
        hf_config_overrides: Mapping[str, Any] | None,
        adapter: LoRAConfig | None,
        updates_in_flight: bool,
        on_gpu: bool,
    ) -> Sampled:
        """Check what can be checked before a process is started.

        Raises:
            RegistryError: The backend is unknown.
            ModelLoadError: The model folder is missing.
            ConfigError: Settings that cannot work.
        """
        config = choose_backend(config, on_gpu=on_gpu)
        traits = get_generation_traits(config.backend)
        overrides = dict(hf_config_overrides or {})
        hosting = hosting_of(
            traits, config, on_gpu=on_gpu, updates_in_flight=updates_in_flight
        )
        variables = {**hosting.variables, **hub_secrets(model_name, tokenizer_name)}
        model_config = read_model_config(str(model_name))
        if model_config is None:
            check_hub_name(str(model_name))
        else:
            traits.check_model(config, {**model_config, **overrides})
        if adapter is not None:
            known = {**(model_config or {}), **overrides}
            traits.check_adapter(config, adapter, known, on_gpu=on_gpu)
        context = {
            "model_name": str(model_name),
            "tokenizer_name": None if tokenizer_name is None else str(tokenizer_name),
            "load_weights": load_weights,
            "hf_config_overrides": overrides,
            # Left out if None, so that a backend without adapters needs no argument for
            # them.
            **({} if adapter is None else {"adapter": adapter}),
        }
        return cls(config, replace(hosting, variables=variables), context)

    def with_config(self, config: GenerationConfig) -> Sampled:
        """Return the same with another config."""
        return replace(self, config=config)

    def without_weights(self) -> Sampled:
        """Return the same, where weights come from a trainer."""
        return replace(self, context={**self.context, "load_weights": False})


class GenerationReplicas:
    """Owns the processes of a generation policy.

    Args:
        cluster: Where they run.
        name: Name of the group of workers.
        sampled: The model, and how to sample from it.
        served: Which weights are served; a replica that comes back asks it.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        name: str,
        sampled: Sampled,
        served: ServedWeights,
    ) -> None:
        self.cluster = cluster
        self.name = name
        self.sampled = sampled
        self.uses = Uses()
        self.pad_token_id = 0
        """Token that rows are filled with."""
        self._served = served
        self._start()

    @property
    def config(self) -> GenerationConfig:
        """Their generation config."""
        return self.sampled.config

    @property
    def hosting(self) -> Hosting:
        """Settings of their workers."""
        return self.sampled.hosting

    def _start(self) -> None:
        """Start the workers and have them load the model."""
        self._is_resized = False
        config, hosting = self.config, self.hosting
        builder = RayWorkerBuilder(
            hosting.worker_class,
            config.to_dict(),
            self.sampled.context,
            registrations=hosting.registrations,
        )
        calls = hosting.calls_at_once
        if hosting.updates_in_flight:
            # As many calls as keep all replicas busy may come to one of them, and one
            # more for a validation: an update must not wait behind them.
            calls = calls * self.check_num_replicas(config.num_replicas) + 1
        if calls > 1:
            # In addition to these, one call for updates and one for everything else.
            builder = builder.with_options(max_concurrency=calls + 2)
        try:
            self.group = RayWorkerGroup(
                self.cluster,
                builder,
                **self._layout(config.num_replicas),
                name_prefix=self.name,
                env_vars=hosting.variables,
                start_deadline_s=config.start_deadline_s,
                call_deadline_s=config.call_deadline_s,
                failure_policy=FailFast(
                    heartbeat_limit_s=config.heartbeat_limit_s,
                    release="tied",
                    on_node_lost=config.on_node_lost,
                    min_workers=config.min_replicas * hosting.workers_per_replica,
                    resources_deadline_s=config.node_deadline_s,
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
        self.load = ReplicaLoad(self.workers.num_replicas)
        """Parts in flight on each of them, of all calls of `generate`."""
        self.replicas = Replicas(
            self.workers,
            self._revive,
            max_restarts=config.max_restarts,
            deadline_s=config.node_deadline_s + config.start_deadline_s,
        )
        self.all = Broadcast(self.workers, self.replicas)
        """Calls on all of them."""
        try:
            if not self.cluster.use_gpus:
                self.group.warn_of_crowding(
                    config.num_threads, "policy.generation.num_threads"
                )
            self._set_up(self.replicas.live)
        except BaseException:
            # Nobody else has the group yet, so its processes would stay.
            self.group.shutdown(force=True)
            raise
        self.replicas.start_unplaced()

    def _layout(self, num_replicas: int | None) -> dict[str, Any]:
        """Return the placement of the workers, as arguments of their group."""
        size = self.hosting.workers_per_replica
        return replica_layout(self.cluster, num_replicas, size)

    def _set_up(self, replicas: Sequence[int]) -> None:
        """Have replicas load the model."""
        self._served.num_setups += 1
        calls = self.workers.set_up(
            replicas, self.config.to_dict(), self.sampled.context
        )
        references = {rank: r for call in calls for rank, r in call.references.items()}
        future = self.workers.future(references, "setup")
        ids = future.get_results(deadline_s=self.config.start_deadline_s)
        self.pad_token_id = ids[0]

    def _revive(self, replica: int) -> bool:
        """Set up the new processes of a lost replica; return whether it can serve.

        Only the weights of the model's folder can be read again here.
        """
        context = self.sampled.context
        can_serve = self._served.version == 0 and bool(context["load_weights"])
        context = {**context, "load_weights": can_serve}
        (call,) = self.workers.set_up([replica], self.config.to_dict(), context)
        what = f"setup of generation replica {replica}"
        try:
            # Not with the group's own wait, which ends when any other replica fails.
            fetch(list(call.references.values()), what, self.config.start_deadline_s)
        except BaseException:
            self.workers.end(replica, f"{what} failed")
            raise
        return can_serve

    def check_room(self, sampled: Sampled) -> None:
        """Check that `reload` finds room, while the present replicas serve.

        Raises:
            ConfigError: There is none for the workers that it would start.
        """
        if self._needs_workers(sampled):
            size = sampled.hosting.workers_per_replica
            replica_layout(self.cluster, sampled.config.num_replicas, size)

    def _needs_workers(self, sampled: Sampled) -> bool:
        """Return whether the present workers do not fit what is to be sampled."""
        if sampled.hosting != self.hosting or self._is_resized:
            return True
        return any(
            getattr(sampled.config, name) != getattr(self.config, name)
            for name in _KEPT_SETTINGS
        )

    def reload(self, sampled: Sampled) -> None:
        """Sample from another model, in the same processes where they fit it.

        Call `check_room` first: what is served before is forgotten here.
        """
        needs_workers = self._needs_workers(sampled)
        self.sampled = sampled
        if needs_workers:
            self.shutdown()
            self._start()
            return
        self.replicas.renew(self.config.max_restarts)
        # Replicas that are being started would miss the setup.
        live = self.replicas.settle()
        self._set_up(live)
        self.replicas.updated(live)

    def resize(self, num_replicas: int | None) -> None:
        """Serve with another number of replicas; see `GenerationPolicy.resize`."""
        wanted = self.check_num_replicas(num_replicas)
        config = self.config.replace(num_replicas=num_replicas)
        with self.uses.alone(config.call_deadline_s):
            if wanted <= self.workers.num_replicas:
                self.replicas.resize(wanted)
                self._is_resized = True
                self.sampled = self.sampled.with_config(config)
            else:
                self._replace_workers(config)
        _logger.info("generation has %d replicas", wanted)

    def check_num_replicas(self, num_replicas: int | None) -> int:
        """Return how many replicas that means; see `GenerationPolicy`."""
        layout = self._layout(num_replicas)
        count: int = layout["sharding_annotations"].shape["data_parallel"]
        return count

    def _replace_workers(self, config: GenerationConfig) -> None:
        """Start a larger group in the place of the one that is there."""
        before = self.sampled
        self.replicas.close()
        self.group.shutdown(cleanup_method="shutdown")
        if self._served.version:
            # Weights that they load at the start are older than those that were served.
            self._served.refusal = (
                "the replicas were restarted and have no weights yet."
            )
        self.sampled = before.with_config(config)
        try:
            self._start()
        except BaseException:
            # The larger group did not start; go on with as many as before.
            self.sampled = before
            self._start()
            raise
        self._is_resized = True

    def shutdown(self) -> bool:
        """End the workers; True if nothing went wrong."""
        self.replicas.close()
        return bool(self.group.shutdown(cleanup_method="shutdown"))
