"""Float32 weights of a rank that its optimizer updates, and their gradients.

| precision | shared among ranks | a master is |
|---|---|---|
| `float32` | no | the model's parameter itself |
| `float32` | yes | this rank's slice of it |
| `bfloat16` | no | a copy in float32 |
| `bfloat16` | yes | a copy of this rank's slice in float32 |

Ranks with the same part of the model share masters and optimizer state by slices of
each parameter, its numbers in a row (`policy.megatron.distributed_optimizer`):
```
gradients -> reduce-scatter -> own slices -> optimizer -> all-gather -> parameters
```

Letters in shapes: A ranks with the same part of the model, N numbers of a parameter,
K those of a slice, at most N/A rounded up.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_models.training.megatron.layout import RankLayout

__all__ = ["MasterWeights"]


class MasterWeights:
    """The masters of one rank.

    Args:
        computed: The model's parameters by name, which compute.
        of_experts: Which of these are of experts: other ranks have the same ones.
        layout: This rank's place.
        is_shared: Whether ranks with the same part of the model share its masters.
        has_copies: Whether there are masters of weights in another type; not for a
            model that is not trained.
    """

    def __init__(
        self,
        computed: Mapping[str, nn.Parameter],
        of_experts: set[str],
        layout: RankLayout,
        *,
        is_shared: bool,
        has_copies: bool = True,
    ) -> None:
        self._computed = computed
        self._layout = layout
        self.is_shared = is_shared
        """Whether ranks with the same part of the model share its masters."""
        self._experts = of_experts
        self._summed: dict[str, Tensor] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        """What the optimizer updates, by name."""
        for name, parameter in computed.items():
            if not has_copies:
                self.parameters[name] = parameter
                continue
            self.parameters[name] = self._master(name, parameter)
            if parameter.dtype != torch.float32:
                self._sum_in_float32(name, parameter)

    def _master(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        if not self.is_shared and parameter.dtype == torch.float32:
            return parameter
        # In float32 a view, so that no number is kept twice.
        own = self.own_slice(name, parameter.detach()).float()
        return nn.Parameter(own, requires_grad=False)

    def _sum_in_float32(self, name: str, parameter: nn.Parameter) -> None:
        """Add gradients of micro-batches in float32, where bfloat16 loses bits."""

        def add(found: Tensor) -> None:
            assert found.grad is not None
            if name in self._summed:
                self._summed[name].add_(found.grad)
            else:
                self._summed[name] = found.grad.float()
            found.grad = None

        parameter.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self._summed.clear()
        for name, parameter in self._computed.items():
            parameter.grad = self.parameters[name].grad = None

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's float32 gradients, not reduced; zeros where none is."""
        found = {}
        for name, parameter in self._computed.items():
            gradient = self._summed.get(name, parameter.grad)
            if gradient is None:
                # All ranks must reduce the same tensors.
                gradient = torch.zeros_like(parameter, dtype=torch.float32)
            found[name] = gradient
        return found

    def reduce(self, gradients: Mapping[str, Tensor]) -> None:
        """Sum gradients over the ranks with the same weights, for the masters.

        A sum and not a mean, because losses are divided by global counts already.
        """
        for of_experts in (False, True):
            names = [n for n in gradients if (n in self._experts) == of_experts]
            if not names:
                continue
            if self.is_shared:
                self._scatter(names, gradients, of_experts)
                continue
            if self._layout.num_alike(of_experts=of_experts) > 1:
                flat = torch.cat([gradients[name].flatten() for name in names])
                self._layout.sum_over_alike(flat, of_experts=of_experts)
                sizes = [gradients[name].numel() for name in names]
                for name, part in zip(names, torch.split(flat, sizes), strict=True):
                    gradients[name].copy_(part.view_as(gradients[name]))
            for name in names:
                self.parameters[name].grad = gradients[name]

    def _scatter(
        self, names: list[str], gradients: Mapping[str, Tensor], of_experts: bool
    ) -> None:
        group = self._layout.alike(of_experts=of_experts)
        size = group.size()
        flat = torch.cat([_rows(gradients[name], size) for name in names], dim=1)
        own = flat.new_empty(flat.shape[1])
        if size > 1:
            dist.reduce_scatter_tensor(own, flat.flatten(), group=group)
        else:
            own.copy_(flat[0])
        at = 0
        for name in names:
            master = self.parameters[name]
            # Copies, so that the memory of what was summed is freed.
            master.grad = own[at : at + master.numel()].clone()
            at += -(-gradients[name].numel() // size)
        # What computed the sums is not needed any more.
        self._summed.clear()
        for name in names:
            self._computed[name].grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Bring updated masters to the model's parameters; collective if shared."""
        if not self.is_shared:
            for name, parameter in self._computed.items():
                if parameter is not self.parameters[name]:
                    parameter.copy_(self.parameters[name])
            return
        for of_experts in (False, True):
            names = [n for n in self._computed if (n in self._experts) == of_experts]
            # By data type, in which the numbers travel.
            for dtype in {self._computed[name].dtype: None for name in names}:
                alike = [n for n in names if self._computed[n].dtype == dtype]
                slices = [self._padded(name).to(dtype) for name in alike]
                rows = self._gathered(torch.cat(slices), of_experts)
                parts = torch.split(rows, [s.numel() for s in slices], dim=1)
                for name, part in zip(alike, parts, strict=True):
                    _fill(self._computed[name], part)

    @torch.no_grad()
    def assign(self, name: str, value: Tensor) -> None:
        """Set a parameter, and its master, to a float32 tensor of its shape."""
        self._computed[name].copy_(value)
        master = self.parameters[name]
        if master is not self._computed[name]:
            master.copy_(self.own_slice(name, value))

    def whole(self, name: str, value: Tensor | None = None) -> Tensor:
        """Return a rank's whole part of a parameter in float32; collective if shared.

        Args:
            name: The parameter.
            value: Like its master, such as a gradient; None: the master.
        """
        like = self._computed[name]
        if value is None:
            if like.dtype == torch.float32:
                return like.detach()
            value = self.parameters[name].detach()
        if not self.is_shared:
            return value
        size = self._num_alike(name)
        per_rank = -(-like.numel() // size)
        padded = torch.nn.functional.pad(value, (0, per_rank - value.numel()))
        found = torch.empty(like.shape, dtype=value.dtype, device=value.device)
        _fill(found, self._gathered(padded, name in self._experts))
        return found

    def own_slice(self, name: str, whole: Tensor) -> Tensor:
        """[K] this rank's numbers of a tensor of the parameter's shape, or all."""
        if not self.is_shared:
            return whole
        group = self._layout.alike(of_experts=name in self._experts)
        per_rank = -(-whole.numel() // group.size())
        first = per_rank * group.rank()
        return whole.reshape(-1)[first : first + per_rank]

    def _num_alike(self, name: str) -> int:
        return self._layout.num_alike(of_experts=name in self._experts)

    def _padded(self, name: str) -> Tensor:
        """[N/A rounded up] this rank's master, with zeros behind the last one."""
        master = self.parameters[name].detach()
        per_rank = -(-self._computed[name].numel() // self._num_alike(name))
        return torch.nn.functional.pad(master, (0, per_rank - master.numel()))

    def _gathered(self, own: Tensor, of_experts: bool) -> Tensor:
        """Return [A, ...], from each rank its own numbers."""
        group = self._layout.alike(of_experts=of_experts)
        if group.size() == 1:
            return own[None]
        found = own.new_empty(group.size() * own.numel())
        dist.all_gather_into_tensor(found, own.contiguous(), group=group)
        return found.view(group.size(), -1)


def _rows(value: Tensor, size: int) -> Tensor:
    """Return the numbers of a tensor, [A, N/A rounded up], a row per rank."""
    flat = value.flatten()
    return torch.nn.functional.pad(flat, (0, -flat.numel() % size)).view(size, -1)


def _fill(target: Tensor, rows: Tensor) -> None:
    """Set a tensor to numbers that lie in rows, the last of them padded."""
    target.copy_(rows.reshape(-1)[: target.numel()].view_as(target))
