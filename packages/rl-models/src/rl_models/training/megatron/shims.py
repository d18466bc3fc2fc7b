"""Shims that let Megatron-core run without a GPU: on a CPU, over gloo.

Megatron-core uses CUDA's current device and its streams, although most of its
computations do not need them. The functions here replace them for a CPU, in this
process only, and are installed only if there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["CpuDevices", "install_cpu_shims"]

_CPU = torch.device("cpu")


def install_cpu_shims() -> None:
    """Make the CPU CUDA's current device, and its synchronization do nothing."""
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None
    # Megatron-core compiles small functions, which pays off on a GPU only, and compiles
    # some again for each new shape.
    torch.compiler.set_stance("force_eager")
    # The default tracker forks the random state of a GPU.
    random.initialize_rng_tracker(inference_rng_tracker=True)
    # Recomputing a layer restores the states of CPU and GPU; the CPU's is enough.
    random._get_cuda_rng_state = lambda **_: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, **_: None
    # Counts of tokens are copied to the host by a stream; here they are there already.
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = _CPU
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _counts_as_numbers


def _counts_as_numbers(
    dispatcher: Any, point: str, tokens_per_expert: Tensor | None = None
) -> Tensor | None:
    """Take the place of the copy after which collectives read counts of tokens."""
    if point == dispatcher.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            counts = getattr(dispatcher, name)
            if isinstance(counts, Tensor):
                setattr(dispatcher, name, counts.numpy())
    return tokens_per_expert


class CpuDevices(TorchFunctionMode):
    """Creates tensors on the CPU that are requested on CUDA.

    This is a mode, because replacing `torch.empty` and the like by setting attributes
    silently leaves buffers of models uninitialised.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function with the CPU in place of CUDA devices."""
        chosen = dict(kwargs or {})
        if str(chosen.get("device", "")).startswith("cuda"):
            chosen["device"] = _CPU
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*args, **chosen)
