"""What lets Megatron-core run where there is no GPU: on a CPU, over gloo.

Megatron-core asks for CUDA's current device and its streams without need for most of
what it computes. The functions here answer for a CPU, in this process only, and are
installed only where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from torch.overrides import TorchFunctionMode

__all__ = ["CpuDevices", "install_cpu_shims"]

_CPU = torch.device("cpu")


def install_cpu_shims() -> None:
    """Have CUDA's current device be the CPU, and its synchronization do nothing."""
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None
    # It compiles small functions for a GPU's sake, and some again for other shapes.
    torch.compiler.set_stance("force_eager")
    # The usual tracker forks the state of a GPU's random numbers.
    random.initialize_rng_tracker(inference_rng_tracker=True)
    # Recomputing a layer restores both states; that of the CPU is enough.
    random._get_cuda_rng_state = lambda **_: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, **_: None


class CpuDevices(TorchFunctionMode):
    """Within it, tensors that are asked for on CUDA are made on the CPU.

    A mode, because replacing `torch.empty` and its like by attributes leaves buffers of
    models uninitialised, in silence.
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
