"""The driver side of training: shards rows over ranks, calls workers, joins results."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.batch.schema import Schema
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import ActorEnvironmentError, BatchError, ConfigError
from rl_distributed.timing.timer import Timer
from rl_distributed.workers.builder import RayWorkerBuilder
from rl_distributed.workers.future import MultiWorkerFuture
from rl_distributed.workers.group import RayWorkerGroup
from rl_models.checkpoint.hub import hub_secrets
from rl_models.config import PolicyConfig
from rl_models.errors import ContextLengthError
from rl_models.interfaces import AnyPath, LossFunction, PolicyInterface
from rl_models.parallelism import DATA_AXIS
from rl_models.policy.head_checks import (
    check_lm_head,
    check_loss_fits_head,
    check_scalar_head,
)
from rl_models.policy.own_sampling import OwnSampling
from rl_models.policy.preflight import check_policy
from rl_models.policy.reward_rows import ReinforceLoss, Rewards, reinforce_rows
from rl_models.policy.row_length import with_row_length
from rl_models.policy.weight_exports import WeightExports
from rl_models.registry import training_registrations, training_worker_class
from rl_models.types import (
    SEQUENCES,
    TRAINING_ROWS,
    LogprobOutputSpec,
    ReferenceLogprobOutputSpec,
    TopkOutputSpec,
    TrainOutput,
    ValueOutputSpec,
)

__all__ = ["TrainingPolicy"]


class TrainingPolicy(WeightExports, OwnSampling, PolicyInterface):
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
    ) -> None:
        self.num_ranks = cluster.world_size()
        config = self._checked(config, init_reference_model)
        self._bucket_counts = {}
        self._start(
            cluster,
            name_prefix,
            config,
            init_reference_model=init_reference_model,
            weights_path=_text(weights_path),
            optimizer_path=_text(optimizer_path),
        )

    def _checked(
        self, config: PolicyConfig, init_reference_model: bool
    ) -> PolicyConfig:
        check_policy(config, self.num_ranks)
        if init_reference_model:
            check_lm_head(config, "init_reference_model")
        return with_row_length(config)

    def _start(
        self,
        cluster: RayVirtualCluster,
        name: str,
        config: PolicyConfig,
        *,
        init_reference_model: bool,
        **paths: str | None,
    ) -> None:
        """Start the workers and have them load the model."""
        self._take(config)
        self._has_reference = init_reference_model
        self._secrets = _secrets_of(config)
        self._registrations = training_registrations(config.backend)
        self._worker_class = training_worker_class(config.backend)
        builder = RayWorkerBuilder(
            self._worker_class,
            config.to_dict(),
            init_reference_model=init_reference_model,
            registrations=self._registrations,
            **paths,
        )
        try:
            self.group = RayWorkerGroup(
                cluster,
                builder.with_options(num_threads=config.num_threads),
                name_prefix=name,
                env_vars=self._secrets,
                sharding_annotations=self._sharding,
            )
        except ActorEnvironmentError as error:
            module = self._worker_class.rpartition(".")[0]
            error.add_note(
                f"The backend {config.backend} runs in an environment of its own; "
                f"build it ahead of the run by: rl env build {module}"
            )
            raise
        try:
            frees = self._call_all("setup", deadline_s=config.start_deadline_s)
        except BaseException:
            self.group.shutdown(force=True)
            raise
        self._frees_memory = any(frees)

    def _take(self, config: PolicyConfig) -> None:
        self.config = config
        self.data_parallel_size = config.parallelism.data_size(self.num_ranks)
        """Shares that the rows of a batch are cut into."""
        self._sharding = config.parallelism.sharding(self.num_ranks)
        self._begin_versions()

    @property
    def cluster(self) -> RayVirtualCluster:
        """Whose bundles the workers run on."""
        return self.group.cluster

    @property
    def has_reference(self) -> bool:
        """Whether a frozen copy of the initial model is kept."""
        return self._has_reference

    def reload(
        self,
        config: PolicyConfig,
        *,
        init_reference_model: bool = False,
        weights_path: AnyPath | None = None,
        optimizer_path: AnyPath | None = None,
    ) -> None:
        """Start over with another config and model, in the same processes.

        It spares what a new process costs: imports, and on GPUs a CUDA context. A model
        of the hub after one of a folder gets new ones, which have the hub's token.

        Args:
            config: See the class.
            init_reference_model: See the class.
            weights_path: See the class.
            optimizer_path: See the class.

        Raises:
            ConfigError: As the constructor; the present model is then untouched.
            ModelLoadError: Likewise.
        """
        config = self._checked(config, init_reference_model)
        self._bucket_counts.clear()
        settings: dict[str, Any] = {
            "init_reference_model": init_reference_model,
            "weights_path": _text(weights_path),
            "optimizer_path": _text(optimizer_path),
        }
        known = (self._secrets, self._registrations, self._worker_class)
        if (
            known
            != (
                _secrets_of(config),
                training_registrations(config.backend),
                training_worker_class(config.backend),
            )
            # The ranks stay in one process group, whose layout is fixed.
            or config.parallelism != self.config.parallelism
        ):
            # A process gets its secrets, and classes of the program, when it is made.
            self.group.shutdown()
            self._start(self.group.cluster, self.group.name, config, **settings)
            return
        self._take(config)
        self._has_reference = init_reference_model
        frees = self._call_all(
            "setup",
            deadline_s=config.start_deadline_s,
            config=config.to_dict(),
            **settings,
        )
        self._frees_memory = any(frees)

    def _call_all(self, method: str, deadline_s: float | None = None, **kw: Any) -> Any:
        """Call every rank and waits; gives the results in the order of the ranks."""
        refs = self.group.run_all_workers_single_data(method, **kw)
        future = MultiWorkerFuture(list(refs), method_name=method)
        limit = deadline_s or self.config.call_deadline_s
        return self.group.get_all_worker_results(future, deadline_s=limit)

    def _call_each(self, method: str, parts: list[Any], **common: Any) -> list[Any]:
        """Call every rank with its own part; gives the results in their order."""
        refs = self.group.run_all_workers_multiple_data(
            method, data=parts, common_kwargs=common
        )
        future = MultiWorkerFuture(list(refs), method_name=method)
        limit = self.config.call_deadline_s
        results: list[Any] = self.group.get_all_worker_results(future, deadline_s=limit)
        return results

    def _call_sharded(self, method: str, shards: list[Any], **common: Any) -> list[Any]:
        same_rows = self._sharding.names[1:]
        future = self.group.run_all_workers_sharded_data(
            method,
            in_sharded_axes=[DATA_AXIS],
            replicate_on_axes=same_rows,
            output_is_replicated=same_rows,
            common_kwargs=common,
            data=shards,
        )
        results: list[Any] = self.group.get_all_worker_results(
            future, deadline_s=self.config.call_deadline_s
        )
        return results

    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction | Rewards,
        eval_mode: bool = False,
        *,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Timer | None = None,
    ) -> TrainOutput:
        """One optimizer step per global batch; see `PolicyInterface.train`.

        One global batch of a size that the ranks cannot share evenly is filled up with
        rows that do not count.

        Rewards in place of a loss mean REINFORCE, one step over all rows unless `gbs`
        says otherwise, on rows that `generate` has just sampled: see
        `rl_models.policy.reward_rows`. Rows of older weights are refused.
        """
        if not callable(loss_fn):
            self._check_newest(data.get("weight_version"))
            data, loss_fn = reinforce_rows(data, loss_fn), ReinforceLoss()
            gbs = gbs or data.size
        check_loss_fits_head(self.config, loss_fn)
        self._check_rows(data, TRAINING_ROWS)
        gbs = gbs or self.config.train_global_batch_size or data.size
        mbs = mbs or self.config.train_micro_batch_size
        group: int = getattr(loss_fn, "rows_per_group", 1)
        mbs += -mbs % group
        with _span(timer, "policy_training/sharding_data"):
            data, gbs = self._fit_ranks(data, gbs, group)
            budget = _train_budget(self.config)
            budget["rows_per_group"] = group
            shards, _ = self._shard(data, gbs, budget)
        if not eval_mode:
            # Before the call: one that fails may have changed the weights as well.
            self._weight_version += data.size // gbs
        with _span(timer, "policy_training/train"):
            results = self._call_sharded(
                "train",
                shards,
                loss_fn=loss_fn,
                eval_mode=eval_mode,
                gbs=gbs,
                mbs=mbs,
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
        self._call_all("change_optimizer", settings=settings)
        self.config = changed

    def _fit_ranks(
        self, data: BatchedDataDict[Any], gbs: int, group: int
    ) -> tuple[BatchedDataDict[Any], int]:
        if gbs % group:
            raise BatchError(
                f"gbs must be a multiple of {group}, the rows that the loss compares "
                f"with each other: got {gbs}; use {gbs + -gbs % group}"
            )
        if data.size % gbs:
            raise BatchError(
                "policy.train needs a multiple of the global batch size in rows: got "
                f"{data.size} rows with gbs {gbs}; drop {data.size % gbs} rows or pass "
                f"gbs={data.size}"
            )
        extra = -gbs % (self.data_parallel_size * group)
        if not extra:
            return data, gbs
        if data.size != gbs:
            raise BatchError(
                "gbs must be a multiple of data-parallel size where train gets several "
                f"global batches: got gbs {gbs} with {self.data_parallel_size} ranks; "
                f"use {gbs + extra}"
            )
        filled = _with_extra_rows(data, extra, group)
        filled["sample_mask"][data.size :] = 0
        return filled, gbs + extra

    def get_logprobs(
        self, data: BatchedDataDict[Any], *, timer: Timer | None = None
    ) -> BatchedDataDict[LogprobOutputSpec]:
        """Log-probs under the current weights; see `PolicyInterface.get_logprobs`."""
        return self._logprobs("get_logprobs", data, None, False, timer)

    def get_values(
        self, data: BatchedDataDict[Any], *, timer: Timer | None = None
    ) -> BatchedDataDict[ValueOutputSpec]:
        """Numbers of a scalar head; see `PolicyInterface.get_values`.

        Raises:
            ConfigError: The model has a language-model head.
        """
        check_scalar_head(self.config, "get_values")
        columns = ("token_mask", "value_mask")
        with _span(timer, "policy_values"):
            return self._per_token(data, columns, "get_values", None, None)

    def get_topk_logits(
        self,
        data: BatchedDataDict[Any],
        k: int,
        *,
        temperature: float | None = None,
        micro_batch_size: int | None = None,
        timer: Timer | None = None,
    ) -> BatchedDataDict[TopkOutputSpec]:
        """Logits of the most probable tokens; see `PolicyInterface.get_topk_logits`.

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
        data: BatchedDataDict[Any],
        *,
        micro_batch_size: int | None = None,
        timer: Timer | None = None,
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """Log-probs under the frozen initial weights.

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
        data: BatchedDataDict[Any],
        micro_batch_size: int | None,
        reference: bool,
        timer: Timer | None,
    ) -> BatchedDataDict[Any]:
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
        data: BatchedDataDict[Any],
        columns: tuple[str, ...],
        method: str,
        micro_batch_size: int | None,
        timer: Timer | None,
        **arguments: Any,
    ) -> BatchedDataDict[Any]:
        """Call a method of every worker that gives columns for its rows."""
        self._check_rows(data, SEQUENCES)
        num_rows = data.size
        names = ("input_ids", "input_lengths", *columns)
        part: BatchedDataDict[Any] = BatchedDataDict(
            {name: data[name] for name in names if name in data}
        )
        reference = arguments.get("reference", False)
        prefix = "get_reference_policy_logprobs" if reference else method
        with _span(timer, f"{prefix}/shard_data"):
            extra = -num_rows % self.data_parallel_size
            if extra:
                part = _with_extra_rows(part, extra)
            budget = _logprob_budget(self.config)
            shards, order = self._shard(part, part.size, budget)
        with _span(timer, f"{prefix}/compute"):
            mbs = micro_batch_size or self.config.logprob_batch_size
            parts = self._call_sharded(method, shards, mbs=mbs, **arguments)
        joined = parts[0] if len(parts) == 1 else BatchedDataDict.from_batches(parts)
        if order is not None:
            joined.reorder_data(order)
        return joined.slice(0, num_rows) if extra else joined

    def _shard(
        self, data: BatchedDataDict[Any], gbs: int, budget: dict[str, Any]
    ) -> tuple[list[Any], list[int] | None]:
        """Get the shard of each rank, and where rows went if they were re-ordered."""
        shares = self.data_parallel_size
        if len(budget) > ("rows_per_group" in budget):
            shards, order = data.shard_by_batch_size(shares, gbs, **budget)
            return shards, order
        if shares == 1:
            return [data], None
        return data.shard_by_batch_size(shares, gbs, **budget), None

    def _check_rows(self, data: BatchedDataDict[Any], schema: Schema) -> None:
        schema.check(data)
        if data.size == 0:
            raise BatchError("the batch has no rows; the policy needs at least one")
        lengths, width = data["input_lengths"], data["input_ids"].shape[1]
        row, longest = int(lengths.argmax()), int(lengths.max())
        limit = self.config.row_limit
        if longest > limit:
            raise ContextLengthError(
                f"row {row} of the batch has {longest} tokens, more than "
                f"policy.max_total_sequence_length = {limit}; shorten it, or raise the "
                "limit up to the model's context"
            )
        if longest > width or int(lengths.min()) < 1:
            raise BatchError(
                "input_lengths must be from 1 to the width of input_ids "
                f"({width}): got {int(lengths.min())} to {longest}"
            )

    def prepare_for_training(self) -> None:
        """Bring weights and optimizer state to where training needs them.

        Workers that have nothing to bring back or to free are not called.
        """
        if self._frees_memory or self._holds_cache:
            self._call_all("prepare_for_training")
            self._holds_cache = False

    def finish_training(self) -> None:
        """Free what only training needs; workers without any are not called."""
        if self._frees_memory:
            self._call_all("finish_training")

    def save_checkpoint(
        self,
        weights_path: AnyPath,
        optimizer_path: AnyPath | None = None,
        tokenizer_path: AnyPath | None = None,
    ) -> None:
        """Write a Hugging Face folder and, if asked, the exact training state."""
        self._call_all(
            "save_checkpoint",
            weights_path=str(weights_path),
            optimizer_path=_text(optimizer_path),
            tokenizer_path=_text(tokenizer_path),
        )

    def load_checkpoint(
        self, weights_path: AnyPath | None, optimizer_path: AnyPath | None = None
    ) -> None:
        """Load weights; with `optimizer_path`, the exact training state."""
        self._weight_version += 1
        self._call_all(
            "load_checkpoint",
            weights_path=_text(weights_path),
            optimizer_path=_text(optimizer_path),
        )

    def shutdown(self) -> bool:
        """End the workers; True if nothing went wrong."""
        return bool(self.group.shutdown(cleanup_method="shutdown"))


def _secrets_of(config: PolicyConfig) -> dict[str, str]:
    return hub_secrets(config.model_name, config.tokenizer.name)


def _text(path: AnyPath | None) -> str | None:
    return None if path is None else str(path)


def _span(timer: Timer | None, label: str) -> AbstractContextManager[Any]:
    return nullcontext() if timer is None else timer.time(label)


def _with_extra_rows(
    data: BatchedDataDict[Any], extra: int, group: int = 1
) -> BatchedDataDict[Any]:
    """Return the batch followed by copies of its last group of rows."""
    last = range(data.size - group, data.size)
    return data.select_indices([*range(data.size), *[*last] * (extra // group)])


def _train_budget(config: PolicyConfig) -> dict[str, Any]:
    section = config.sequence_packing or config.dynamic_batching
    return _budget(config, section.train_mb_tokens) if section else {}


def _logprob_budget(config: PolicyConfig) -> dict[str, Any]:
    section = config.sequence_packing or config.dynamic_batching
    if section is None:
        return {}
    return _budget(config, section.logprob_mb_tokens or section.train_mb_tokens)


def _budget(config: PolicyConfig, tokens: int) -> dict[str, Any]:
    """Return the arguments of `shard_by_batch_size` for a token budget."""
    columns = {
        "max_tokens_per_microbatch": tokens,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
    }
    if config.sequence_packing is not None:
        packing = config.sequence_packing
        columns["algorithm"] = packing.algorithm
        columns["sequence_length_pad_multiple"] = packing.sequence_length_pad_multiple
        return {"sequence_packing_args": columns}
    if config.dynamic_batching is not None:
        columns["sequence_length_round"] = config.dynamic_batching.sequence_length_round
        return {"dynamic_batching_args": columns}
    return {}


def _join_train_results(results: list[dict[str, Any]]) -> TrainOutput:
    """Losses and norms are the same on all ranks; metrics are of all micro-batches."""
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
