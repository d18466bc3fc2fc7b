"""The process of one training rank: a plain class that hosts a backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.checkpoint.memory import (
    Files,
    FolderInMemory,
    passing_folder,
    read_files,
    size_of,
)
from rl_distributed.cluster.ports import PortAllocator
from rl_distributed.registrations import Registration
from rl_distributed.transfer import LinkSet, TensorLink
from rl_models.errors import UnsupportedModelError
from rl_models.interfaces import (
    AdapterExport,
    LiveOptimizer,
    LossFunction,
    TrainingMemory,
    lacking,
)
from rl_models.registry import adopt_training_backends
from rl_models.training.process_group import Ranks
from rl_models.training.six_methods import build_training_backend
from rl_models.training.worker_sampler import WorkerSampler
from rl_models.types import (
    GENERATION_INPUT,
    SEQUENCES,
    TRAINING_ROWS,
    GenerationInput,
    GenerationOutput,
    InputRows,
    LogprobOutputSpec,
    SamplingParams,
    TopkOutputSpec,
    TrainingRows,
    ValueOutputSpec,
)
from rl_models.weight_request import WeightRequest
from rl_models.weights.collecting import Bucket, ShardedExport, WeightCollector
from rl_models.weights.sending import Message, WeightSender, whole_buckets

if TYPE_CHECKING:
    from torch import Tensor

    from rl_models.weights.collecting import ShardedWeights

__all__ = ["TrainingWorker"]


class TrainingWorker:
    """Hosts the training backend that the config names; imports and runs without Ray.

    Args:
        config: `PolicyConfig.to_dict()`.
        init_reference_model: Keep a frozen copy of the initial model.
        weights_path: Model folder to start from in place of `model_name`.
        optimizer_path: Training state to resume exactly.
        registrations: Backends that the driver has registered in code.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        init_reference_model: bool = False,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
        registrations: Sequence[Registration] = (),
    ) -> None:
        # This process has imported none of the driver's modules that register backends.
        adopt_training_backends(registrations)
        self._config = config
        self._arguments = {
            "init_reference_model": init_reference_model,
            "weights_path": weights_path,
            "optimizer_path": optimizer_path,
        }
        self._backend: Any = None
        self._snapshot_size: int | None = None
        self._sender = WeightSender(lambda request: iter(()), -1)
        self._sampler = WorkerSampler(config, None)

    def setup(
        self,
        config: Mapping[str, Any] | None = None,
        snapshot: FolderInMemory | None = None,
        **arguments: Any,
    ) -> bool:
        """Load the model; every rank must be called, because ranks join here.

        Args:
            config: Replaces the one given at construction, together with `arguments`:
                the worker starts over with another model in the same process.
            snapshot: Start from the weights and the training state of
                `save_snapshot`, in place of the paths of `arguments`.
            arguments: Arguments of the constructor.

        Returns:
            Whether the backend frees memory between its turns.
        """
        if config is not None:
            # The process group stays: a rank that left and joined again at the same
            # port could meet ranks that have not left yet.
            self._sender.close()
            self._sampler.close()
            # Dropped before the next one is made, so that both need not fit in memory.
            self._backend = None
            self._config, self._arguments = config, arguments
        self._backend = build_training_backend(str(self._config["backend"]))
        with ExitStack() as stack:
            arguments = dict(self._arguments)
            if snapshot is not None:
                arguments |= _snapshot_paths(stack.enter_context(snapshot.opened()))
            self._backend.setup(self._config, **arguments)
        # A new sender, because the tensors of the next model are others.
        ranks = Ranks.from_environment()
        self._collector: WeightCollector | None = None
        # A rank alone has all tensors whole, and saves describing its parts of them.
        if ranks.world_size > 1 and not lacking(self._backend, ShardedExport):
            self._collector = WeightCollector(ranks, self._held)
        self._sender = WeightSender(self._buckets, ranks.rank)
        self._sampler = WorkerSampler(self._config, self._backend)
        backend = self._backend
        return not lacking(backend, TrainingMemory) and bool(backend.frees_memory)

    def train(
        self,
        data: TrainingRows,
        loss_fn: LossFunction,
        eval_mode: bool,
        global_batch_size: int,
        micro_batch_size: int,
    ) -> dict[str, Any]:
        """Take one optimizer step per global batch on this rank's shard."""
        # A wrong column is named here; in the backend it would fail far from its cause.
        TRAINING_ROWS.check(data)
        if not eval_mode:
            # Before the step: one that raises may have changed weights.
            self._sampler.mark_stale()
        result: dict[str, Any] = self._backend.train_step(
            data,
            loss_fn,
            eval_mode=eval_mode,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
        )
        return result

    def change_optimizer(self, settings: Mapping[str, float]) -> None:
        """Change settings of the optimizer.

        Raises:
            UnsupportedModelError: The backend cannot.
        """
        if lacking(self._backend, LiveOptimizer):
            raise UnsupportedModelError(
                f"the training backend {self._config['backend']!r} cannot change "
                f"{', '.join(settings)} while a run goes on: it has no method "
                "change_optimizer(settings)"
            )
        self._backend.change_optimizer(settings)

    def get_logprobs(
        self,
        data: InputRows,
        micro_batch_size: int,
        reference: bool = False,
    ) -> BatchedDataDict[LogprobOutputSpec]:
        """Return log-probs of this rank's shard as column `logprobs`."""
        SEQUENCES.check(data)
        logprobs = self._backend.get_logprobs(
            data, micro_batch_size=micro_batch_size, reference=reference
        )
        return BatchedDataDict({"logprobs": logprobs})

    def get_topk_logits(
        self,
        data: InputRows,
        k: int,
        micro_batch_size: int,
        temperature: float | None = None,
    ) -> BatchedDataDict[TopkOutputSpec]:
        """Return the columns of `TopkOutputSpec` for this rank's shard."""
        SEQUENCES.check(data)
        columns = self._backend.get_topk_logits(
            data, k=k, micro_batch_size=micro_batch_size, temperature=temperature
        )
        return BatchedDataDict(columns)

    def get_values(
        self, data: InputRows, micro_batch_size: int
    ) -> BatchedDataDict[ValueOutputSpec]:
        """Return outputs of a scalar head for this rank's shard as column `values`."""
        SEQUENCES.check(data)
        return BatchedDataDict(
            {
                "values": self._backend.get_values(
                    data, micro_batch_size=micro_batch_size
                )
            }
        )

    def generate(
        self,
        data: GenerationInput | None,
        version: int,
        greedy: bool = False,
        sampling: SamplingParams | None = None,
    ) -> tuple[GenerationOutput | None, int]:
        """Continue this rank's rows; see `WorkerSampler.generate`.

        Every rank must be called, because weights may be gathered.
        """
        if data is not None:
            GENERATION_INPUT.check(data)
        return self._sampler.generate(data, version, greedy, sampling)

    def weight_turns(self, request: WeightRequest) -> tuple[int, ...]:
        """Return for each bucket of the weights the rank that is to send it.

        Every rank must be called, because they tell each other what they hold.
        """
        if self._collector is not None:
            return self._collector.turns(request)
        if request.kind == "merged":
            specs = self._backend.weight_specs()
        else:
            self._check_adapters()
            with_base = request.kind == "apart"
            specs = self._backend.adapter_specs(with_base=with_base)
        return (0,) * self._sender.num_buckets(specs, request)

    def _held(self, request: WeightRequest) -> ShardedWeights:
        """Return what this rank holds of the tensors of a request."""
        held: ShardedWeights = self._backend.sharded_weights(
            request.precision, request.kind
        )
        return held

    def _buckets(self, request: WeightRequest) -> Iterator[Bucket | None]:
        """Return the buckets of a request; see `WeightSender`."""
        if self._collector is not None:
            return self._collector.buckets(request)
        rank = Ranks.from_environment().rank
        return whole_buckets(self._exported(request), request, rank)

    def _exported(self, request: WeightRequest) -> Iterator[tuple[str, Tensor]]:
        """Return the tensors of a request, whole on every rank."""
        precision = request.precision
        tensors: Iterator[tuple[str, Tensor]]
        if request.kind == "merged":
            tensors = self._backend.export_weights(precision)
        else:
            self._check_adapters()
            with_base = request.kind == "apart"
            tensors = self._backend.export_adapters(precision, with_base=with_base)
        return tensors

    def _check_adapters(self) -> None:
        missing = lacking(self._backend, AdapterExport)
        if missing:
            raise UnsupportedModelError(
                f"the training backend {self._config['backend']!r} hands out no "
                f"adapters: it has no {', '.join(missing)}; set policy.lora.sync to "
                "merged"
            )

    def export_weights(
        self, request: WeightRequest, index: int, is_last: bool
    ) -> list[Message] | None:
        """Return bucket `index` of the weights on its sender, None on other ranks.

        Every rank must be called, for one bucket after the other.
        """
        return self._sender.messages(request, index, is_last)

    def free_port(self) -> int:
        """Return a port of this machine for a link."""
        return PortAllocator().allocate("weight links")[0]

    def open_weight_link(self, link: TensorLink | LinkSet, deadline_s: float) -> None:
        """Join the link that `send_weights` uses from now on."""
        self._sender.open(link, deadline_s)

    def send_weights(
        self, link: TensorLink | LinkSet, request: WeightRequest
    ) -> str | None:
        """Send this rank's share; return the digest of its manifest, if it has any."""
        return self._sender.send(link, request)

    def save_checkpoint(
        self,
        weights_path: str,
        optimizer_path: str | None = None,
        tokenizer_path: str | None = None,
    ) -> None:
        """Write this rank's part of a checkpoint."""
        self._backend.save_checkpoint(weights_path, optimizer_path, tokenizer_path)

    def load_checkpoint(
        self, weights_path: str | None = None, optimizer_path: str | None = None
    ) -> None:
        """Load this rank's part of a checkpoint."""
        # Before the call: one that fails may have replaced some weights.
        self._sampler.mark_stale()
        self._backend.load_checkpoint(weights_path, optimizer_path)

    def save_snapshot(self) -> Files:
        """Return the files of this rank's part of a checkpoint; every rank is called.

        The files of all ranks together are what `setup` starts from.
        """
        # As large as the last one, so that the folder is in memory from the second on.
        with passing_folder(self._snapshot_size) as folder:
            paths = _snapshot_paths(folder)
            self.save_checkpoint(**paths, tokenizer_path=paths["weights_path"])
            files = read_files(folder)
        self._snapshot_size = size_of(files)
        return files

    def prepare_for_training(self) -> None:
        """Let the backend bring back memory that it had freed, if it can."""
        # First, so that both do not hold their memory at once.
        self._sampler.release_memory()
        if not lacking(self._backend, TrainingMemory):
            self._backend.prepare_for_training()

    def finish_training(self) -> None:
        """Let the backend free memory that only training needs, if it can."""
        if not lacking(self._backend, TrainingMemory):
            self._backend.finish_training()

    def shutdown(self) -> None:
        """Leave the process group."""
        if self._backend is not None:
            self._sender.close()
            self._sampler.close()
            self._backend.shutdown()
            self._backend = None


def _snapshot_paths(folder: Path) -> dict[str, str]:
    return {
        "weights_path": str(folder / "weights"),
        "optimizer_path": str(folder / "optimizer"),
    }
