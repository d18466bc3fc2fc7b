"""The driver side of training: shard rows over ranks, call workers, join results."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from rl_distributed.batch.batched_data_dict import (
    AnyRows,
    BatchedDataDict,
)
from rl_distributed.checkpoint.memory import FolderInMemory
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import BatchError, ConfigError
from rl_distributed.timing.timer import Timer
from rl_distributed.transfer import LinkSet, TensorLink
from rl_distributed.workers.group import RayWorkerGroup
from rl_models.config import PolicyConfig
from rl_models.interfaces import AnyPath, LossFunction, PolicyInterface
from rl_models.lora_config import LoRAConfig
from rl_models.loss_traits import LossTraits
from rl_models.policy.elastic_ranks import ElasticRanks
from rl_models.policy.head_checks import (
    check_lm_head,
    check_loss_fits_head,
    check_scalar_head,
)
from rl_models.policy.own_sampling import OwnSampling
from rl_models.policy.preflight import check_policy
from rl_models.policy.rank_rows import (
    check_rows,
    fit_shares,
    logprob_budget,
    shard,
    train_budget,
    with_extra_rows,
)
from rl_models.policy.reward_rows import ReinforceLoss, Rewards, reinforce_rows
from rl_models.policy.row_length import with_row_length
from rl_models.policy.training_ranks import TrainingRanks
from rl_models.policy.weight_exports import WeightExports
from rl_models.policy.weight_versions import WeightVersions
from rl_models.types import (
    SEQUENCES,
    TRAINING_ROWS,
    GenerationInput,
    GenerationOutput,
    InputRows,
    LogprobOutputSpec,
    ReferenceLogprobOutputSpec,
    SamplingParams,
    TopkOutputSpec,
    TrainOutput,
    ValueOutputSpec,
)
from rl_models.weight_request import Pending, WeightRequest

__all__ = ["TrainingPolicy"]


class TrainingPolicy(PolicyInterface):
    """A model that is trained by one worker per bundle of a cluster.

    Args:
        cluster: Where the workers run; `config.parallelism` says how they share the
            model and the rows.
        config: The policy's config.
        init_reference_model: Keep a frozen copy of the initial model for
            `get_reference_policy_logprobs`.
        weights_path: Model folder to start from in place of `config.model_name`; the
            reference model stays that of `config.model_name`.
        optimizer_path: Training state to resume exactly; it holds the weights as well.
        name_prefix: Name of the group of workers.
        elastic: What to do if some of the bundles have no node; None: wait for all.

    Raises:
        ConfigError: A batch size or length is impossible; before any model is loaded.
        ModelLoadError: The model folder is missing or incomplete; likewise.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        config: PolicyConfig,
        *,
        init_reference_model: bool = False,
        weights_path: AnyPath | None = None,
        optimizer_path: AnyPath | None = None,
        name_prefix: str = "policy",
        elastic: ElasticRanks | None = None,
    ) -> None:
        config = _checked(config, cluster.world_size(), init_reference_model)
        self._ranks = TrainingRanks(
            cluster,
            name_prefix,
            config,
            elastic or ElasticRanks(),
            **_settings(init_reference_model, weights_path, optimizer_path),
        )
        self._begin(init_reference_model)

    def _begin(self, init_reference_model: bool) -> None:
        """Start counting with the weights that the workers have now."""
        self._has_reference = init_reference_model
        self._versions = WeightVersions()
        self._sampling = OwnSampling(self._ranks, self._versions)
        self._exports = WeightExports(self._ranks, self._versions)

    @property
    def config(self) -> PolicyConfig:
        """The policy's config, defaults included."""
        return self._ranks.config

    @property
    def num_ranks(self) -> int:
        """Workers of the policy."""
        return self._ranks.num_ranks

    @property
    def can_grow(self) -> bool:
        """Whether `reload` would start more ranks, as nodes have come."""
        return self._ranks.can_grow

    @property
    def data_parallel_size(self) -> int:
        """Shares that the rows of a batch are cut into."""
        return self._ranks.data_parallel_size

    @property
    def group(self) -> RayWorkerGroup:
        """Its workers."""
        return self._ranks.group

    @property
    def cluster(self) -> RayVirtualCluster:
        """Whose bundles the workers run on."""
        return self.group.cluster

    @property
    def has_reference(self) -> bool:
        """Whether a frozen copy of the initial model is kept."""
        return self._has_reference

    @property
    def is_lost(self) -> bool:
        """Whether a worker has died or hangs: `reload` starts all of them again."""
        return self._ranks.is_lost

    def reload(
        self,
        config: PolicyConfig,
        *,
        init_reference_model: bool = False,
        weights_path: AnyPath | None = None,
        optimizer_path: AnyPath | None = None,
        snapshot: FolderInMemory | None = None,
    ) -> None:
        """Start over with another config and model, in the same processes.

        It spares what a new process costs: imports, and on GPUs a CUDA context. A model
        of the hub after one of a folder gets new ones, which have the hub's token, and
        so do all ranks where one is lost.

        Args:
            config: See the class.
            init_reference_model: See the class.
            weights_path: See the class.
            optimizer_path: See the class.
            snapshot: What `take_snapshot` has returned, in place of both paths.

        Raises:
            ConfigError: As the constructor; the present model is then untouched.
            ModelLoadError: Likewise.
        """
        config = _checked(config, self.cluster.world_size(), init_reference_model)
        settings = _settings(init_reference_model, weights_path, optimizer_path)
        self._ranks.reload(config, snapshot, **settings)
        self._begin(init_reference_model)

    def generate(
        self,
        data: GenerationInput,
        greedy: bool = False,
        *,
        sampling: SamplingParams | None = None,
    ) -> GenerationOutput:
        """Sample one continuation per row; see `PolicyInterface.generate`.

        The rows are shared among the training workers, each of which decodes its part
        with the engine of the generation backend `huggingface`. Nothing is sent: the
        weights are those of the last `train`. From the first call on each worker keeps
        a second copy of the weights, whole and in `policy.precision`.

        A row's sample depends on its tokens, its seed and the weights, not on the
        number of workers. Rows without a column `seeds` get seeds from the section
        `generation` and the number of calls so far. Without that section rows get 128
        new tokens at most, or what room there is, at temperature 1.

        A batch may have texts in place of tokens: see `TextRows.sample`.

        Raises:
            ConfigError: The model has a scalar head, or `sampling` is no distribution.
            BatchError: Columns are missing, or there are no rows.
            ContextLengthError: A row leaves no room for an answer.
        """
        return self._sampling.generate(data, greedy, sampling)

    def train(
        self,
        data: AnyRows,
        loss_fn: LossFunction | Rewards,
        eval_mode: bool = False,
        *,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        timer: Timer | None = None,
    ) -> TrainOutput:
        """Take one optimizer step per global batch; see `PolicyInterface.train`.

        A single global batch that the ranks cannot share evenly is padded with rows
        that do not count.

        Rewards in place of a loss mean REINFORCE, one step over all rows unless
        `global_batch_size` says otherwise, on rows that `generate` has just sampled:
        see `rl_models.policy.reward_rows`. Rows of older weights are refused.
        """
        if not callable(loss_fn):
            self._versions.check_newest(data.get("weight_version"))
            data, loss_fn = reinforce_rows(data, loss_fn), ReinforceLoss()
            global_batch_size = global_batch_size or data.size
        check_loss_fits_head(self.config, loss_fn)
        check_rows(data, TRAINING_ROWS, self.config.row_limit)
        global_batch_size = (
            global_batch_size or self.config.train_global_batch_size or data.size
        )
        micro_batch_size = micro_batch_size or self.config.train_micro_batch_size
        group = LossTraits.of(loss_fn).rows_per_group
        # Rows that the loss compares with each other stay in one micro-batch.
        micro_batch_size += -micro_batch_size % group
        with _span(timer, "policy_training/sharding_data"):
            data, global_batch_size = fit_shares(
                data, global_batch_size, self.data_parallel_size, group
            )
            budget = train_budget(self.config)
            budget["rows_per_group"] = group
            shards, _ = shard(data, global_batch_size, self.data_parallel_size, budget)
        if not eval_mode:
            # Before the call: one that fails may have changed the weights as well.
            self._versions.present += data.size // global_batch_size
        with _span(timer, "policy_training/train"):
            results = self._ranks.call_sharded(
                "train",
                shards,
                loss_fn=loss_fn,
                eval_mode=eval_mode,
                global_batch_size=global_batch_size,
                micro_batch_size=micro_batch_size,
            )
        return _join_train_results(results)

    def change_optimizer(self, **settings: float) -> None:
        """Change settings of the optimizer on all ranks, from the next step on.

        Args:
            settings: `lr`, the base rate where there is a schedule, which goes on; or
                `weight_decay`.

        Raises:
            ConfigError: The section `optimizer` does not take them.
            WorkerError: The optimizer or the backend has no such setting.
        """
        optimizer = self.config.optimizer
        kwargs = {**optimizer.kwargs, **settings}
        changed = self.config.replace(optimizer=optimizer.replace(kwargs=kwargs))
        # The config last: it must describe what the workers do, also after an error.
        self._ranks.call_all("change_optimizer", settings=settings)
        self._ranks.config = changed

    def get_logprobs(
        self, data: InputRows, *, timer: Timer | None = None
    ) -> BatchedDataDict[LogprobOutputSpec]:
        """Return current log-probs; see `PolicyInterface.get_logprobs`."""
        return self._logprobs("get_logprobs", data, None, False, timer)

    def get_values(
        self, data: InputRows, *, timer: Timer | None = None
    ) -> BatchedDataDict[ValueOutputSpec]:
        """Return the outputs of a scalar head; see `PolicyInterface.get_values`.

        Raises:
            ConfigError: The model has a language-model head.
        """
        check_scalar_head(self.config, "get_values")
        columns = ("token_mask", "value_mask")
        with _span(timer, "policy_values"):
            return self._per_token(data, columns, "get_values", None, None)

    def get_topk_logits(
        self,
        data: InputRows,
        k: int,
        *,
        temperature: float | None = None,
        micro_batch_size: int | None = None,
        timer: Timer | None = None,
    ) -> BatchedDataDict[TopkOutputSpec]:
        """Return the largest logits; see `PolicyInterface.get_topk_logits`.

        Raises:
            BatchError: k is less than 1, or more than the vocabulary has.
            ConfigError: The model has a scalar head.
        """
        check_lm_head(self.config, "get_topk_logits")
        if k < 1:
            raise BatchError(f"get_topk_logits: k must be at least 1: got {k}")
        columns = ("token_mask",)
        with _span(timer, "policy_topk_logits"):
            return self._per_token(
                data,
                columns,
                "get_topk_logits",
                micro_batch_size,
                None,
                k=k,
                temperature=temperature,
            )

    def get_reference_policy_logprobs(
        self,
        data: InputRows,
        *,
        micro_batch_size: int | None = None,
        timer: Timer | None = None,
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """Return log-probs of the frozen initial weights.

        Raises:
            ConfigError: The policy was built without a reference model.
        """
        if not self._has_reference:
            raise ConfigError(
                "the policy keeps no reference model: build it with "
                "init_reference_model=True"
            )
        name = "get_reference_policy_logprobs"
        found = self._logprobs(name, data, micro_batch_size, True, timer)
        return BatchedDataDict({"reference_logprobs": found["logprobs"]})

    def _logprobs(
        self,
        name: str,
        data: InputRows,
        micro_batch_size: int | None,
        reference: bool,
        timer: Timer | None,
    ) -> BatchedDataDict[LogprobOutputSpec]:
        check_lm_head(self.config, name)
        return self._per_token(
            data,
            ("token_mask",),
            "get_logprobs",
            micro_batch_size,
            timer,
            reference=reference,
        )

    def _per_token(
        self,
        data: InputRows,
        columns: tuple[str, ...],
        method: str,
        micro_batch_size: int | None,
        timer: Timer | None,
        **arguments: Any,
    ) -> BatchedDataDict[Any]:
        """Call a method of every worker that returns columns for its rows."""
        check_rows(data, SEQUENCES, self.config.row_limit)
        num_rows = data.size
        # Other columns, such as texts and rewards, would travel for nothing.
        names = ("input_ids", "input_lengths", *columns)
        part: InputRows = BatchedDataDict(
            {name: data[name] for name in names if name in data}
        )
        reference = arguments.get("reference", False)
        prefix = "get_reference_policy_logprobs" if reference else method
        with _span(timer, f"{prefix}/shard_data"):
            extra = -num_rows % self.data_parallel_size
            if extra:
                part = with_extra_rows(part, extra)
            budget = logprob_budget(self.config)
            shares = self.data_parallel_size
            shards, order = shard(part, part.size, shares, budget)
        with _span(timer, f"{prefix}/compute"):
            micro_batch_size = micro_batch_size or self.config.logprob_batch_size
            parts = self._ranks.call_sharded(
                method, shards, micro_batch_size=micro_batch_size, **arguments
            )
        joined = parts[0] if len(parts) == 1 else BatchedDataDict.from_batches(parts)
        # A token budget sorts rows by length; callers expect them in their own order.
        if order is not None:
            joined.reorder_data(order)
        return joined.slice(0, num_rows) if extra else joined

    # --- what a weight sync calls: see `rl_models.weights.protocols` ---------------

    @property
    def weight_version(self) -> int:
        """Version of the present weights, which `generate` states of its rows.

        It begins at 0 and counts optimizer steps and checkpoints that were loaded.
        """
        return self._versions.present

    def go_on_at(self, version: int) -> None:
        """Continue counting at the version of a checkpoint's weights."""
        self._versions.present = version

    @property
    def sent_adapter(self) -> LoRAConfig | None:
        """The adapter that generators are sent apart from the base, if they are."""
        return self.config.sent_adapter

    @property
    def base_version(self) -> int:
        """Number of the base of its adapters; it changes where a base is loaded."""
        return self._versions.base

    @property
    def node_ids(self) -> set[str]:
        """Nodes of Ray that the workers run on."""
        return {seat.slot.node_id for seat in self.group.seats}

    @property
    def uses_gpus(self) -> bool:
        """Whether each worker has a GPU."""
        return bool(self.cluster.use_gpus)

    def live_processes(self) -> list[tuple[int, int, int]]:
        """Return each rank, its incarnation, and the setups so far."""
        setups, incarnation = self._ranks.num_setups, self.group.incarnation
        return [(rank, incarnation(rank), setups) for rank in range(self.num_ranks)]

    def weight_link_address(self) -> tuple[str, int]:
        """Address of rank 0, and a port that is free there."""
        return self._exports.link_address()

    def weight_turns(self, request: WeightRequest) -> tuple[int, ...]:
        """Return for each bucket the rank that is to send it."""
        return self._exports.turns(request)

    def open_weight_link(
        self, link: TensorLink | LinkSet, deadline_s: float
    ) -> Pending:
        """Have every rank join a link for `start_weight_export`."""
        return self._exports.open_link(link, deadline_s)

    def start_weight_export(
        self, request: WeightRequest, link: TensorLink | LinkSet | None = None
    ) -> Pending:
        """Have the weights sent over a link that was opened, or as messages."""
        return self._exports.start(request, link)

    # --- memory, checkpoints, and the end ------------------------------------------

    def prepare_for_training(self) -> None:
        """Bring weights and optimizer state back for training.

        Workers that have nothing to bring back or to free are not called.
        """
        if self._ranks.frees_memory or self._sampling.holds_cache:
            self._ranks.call_all("prepare_for_training")
            self._sampling.holds_cache = False

    def finish_training(self) -> None:
        """Free what only training needs; workers without any are not called."""
        if self._ranks.frees_memory:
            self._ranks.call_all("finish_training")

    def save_checkpoint(
        self,
        weights_path: AnyPath,
        optimizer_path: AnyPath | None = None,
        tokenizer_path: AnyPath | None = None,
    ) -> None:
        """Write a Hugging Face folder and, if asked, the exact training state."""
        self._ranks.call_all(
            "save_checkpoint",
            weights_path=str(weights_path),
            optimizer_path=_text(optimizer_path),
            tokenizer_path=_text(tokenizer_path),
        )

    def load_checkpoint(
        self, weights_path: AnyPath | None, optimizer_path: AnyPath | None = None
    ) -> None:
        """Load weights; with `optimizer_path`, the exact training state."""
        # Before the call: one that fails may have replaced some weights.
        self._versions.load()
        self._ranks.call_all(
            "load_checkpoint",
            weights_path=_text(weights_path),
            optimizer_path=_text(optimizer_path),
        )

    def take_snapshot(self) -> FolderInMemory:
        """Return the exact training state, in the memory of this process.

        It has the files of `save_checkpoint`, those of all ranks on any machines;
        `reload` starts from it, also on other ranks.
        """
        # Copies: the results lie in Ray's object store, which would stay full.
        parts = self._ranks.call_all("save_snapshot")
        return FolderInMemory(
            {name: file.copy() for part in parts for name, file in part.items()}
        )

    def shutdown(self) -> bool:
        """End the workers; True if nothing went wrong."""
        return self._ranks.shutdown()


def _checked(
    config: PolicyConfig, num_ranks: int, init_reference_model: bool
) -> PolicyConfig:
    check_policy(config, num_ranks)
    if init_reference_model:
        check_lm_head(config, "init_reference_model")
    return with_row_length(config)


def _settings(
    init_reference_model: bool,
    weights_path: AnyPath | None,
    optimizer_path: AnyPath | None,
) -> dict[str, Any]:
    """Return the arguments of workers besides the config."""
    return {
        "init_reference_model": init_reference_model,
        "weights_path": _text(weights_path),
        "optimizer_path": _text(optimizer_path),
    }


def _text(path: AnyPath | None) -> str | None:
    return None if path is None else str(path)


def _span(timer: Timer | None, label: str) -> AbstractContextManager[Any]:
    return nullcontext() if timer is None else timer.time(label)


def _join_train_results(results: list[dict[str, Any]]) -> TrainOutput:
    """Join results: losses and norms are equal on all ranks, metrics are not."""
    metrics: dict[str, list[Any]] = {}
    for result in results:
        for name, values in result["all_mb_metrics"].items():
            metrics.setdefault(name, []).extend(values)
    first = results[0]
    return TrainOutput(
        loss=torch.as_tensor(first["loss"]),
        grad_norm=torch.as_tensor(first["grad_norm"]),
        lr=torch.as_tensor(first["lr"]),
        all_mb_metrics=metrics,
    )
