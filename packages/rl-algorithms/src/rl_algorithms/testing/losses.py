"""`check_loss`: check a loss against its paper's formula and for independence.

A loss gets micro-batches of any composition together with the counts of the global
batch, and the shares are summed. So its value, gradient and metrics must equal those of
the whole batch, however it is cut, ordered, padded or distributed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

from rl_algorithms.testing.batches import LossBatch
from rl_algorithms.testing.examples import ConformanceError, for_examples
from rl_algorithms.testing.loss_case import LossCase, Reference, check_close
from rl_distributed.batch.packing import PackingAlgorithm, get_packer

__all__ = ["LOSS_CHECKS", "check_loss"]

_JUNK = 1e3
_STEP = 1e-6
_NUM_DIRECTIONS = 6
_ALWAYS_THERE = ("input_ids", "input_lengths", "token_mask", "sample_mask")


def check_loss(
    loss_fn: Any,
    make_batch: Callable[[int], LossBatch],
    reference: Reference,
    *,
    checks: Collection[str] | None = None,
    masks: Collection[str] = ("sample_mask", "token_mask"),
    optional: Collection[str] = (),
    num_examples: int = 15,
    compare_metrics: bool = True,
) -> None:
    """Check a loss against its paper's formula and for independence of its batching.

    ```python
    def reference(data, inputs, held):  # in float64, row by row, as the paper writes it
        ...

    check_loss(NLLLossFn(), token_batch, reference)
    ```

    Args:
        loss_fn: A `LossFunction`.
        make_batch: Function of a seed that returns a batch in float64; see
            `token_batch`.
        reference: Function that returns the loss of the whole batch of `data` and
            `inputs`, as a plain formula without masked means and autograd. `held` are
            the same inputs, kept constant when the gradient is measured: use them where
            the paper has a stop-gradient.
        checks: Names from `LOSS_CHECKS`; default all.
        masks: Columns that exclude everything from the loss when they are 0.
        optional: Columns that the loss can do without.
        num_examples: Number of batches per check.
        compare_metrics: Whether metrics must also equal those of the whole batch.

    Raises:
        ConformanceError: A check failed; `.check` names it.
    """
    case = LossCase(loss_fn, make_batch, reference, masks, optional, compare_metrics)
    for name in LOSS_CHECKS if checks is None else checks:
        check = _CHECKS[name]
        for_examples(
            lambda seed, random, check=check: check(case, make_batch(seed), random),  # type: ignore[misc]
            num_examples,
        )


def _value(case: LossCase, batch: LossBatch, random: Random) -> None:
    """Check that the value is that of the reference."""
    want = _number(case.reference(batch.data, batch.inputs, batch.inputs))
    check_close(
        "value", "the loss is not that of the reference", case.run(batch)[0], want
    )


def _gradient(case: LossCase, batch: LossBatch, random: Random) -> None:
    """Check the gradient against the reference's, by central differences.

    The directions are random and include masked positions, which have no gradient.
    """
    _, grads, _ = case.run(batch)
    generator = torch.Generator().manual_seed(random.randrange(2**32))
    for name, value in batch.inputs.items():
        for _ in range(_NUM_DIRECTIONS):
            # Random directions test all entries at once; one by one would cost a call
            # for each.
            direction = torch.randn(value.shape, generator=generator, dtype=value.dtype)
            ends = [
                _number(
                    case.reference(
                        batch.data,
                        {**batch.inputs, name: value + sign * _STEP * direction},
                        batch.inputs,
                    )
                )
                for sign in (1, -1)
            ]
            want = (ends[0] - ends[1]) / (2 * _STEP)
            got = (grads[name] * direction).sum()
            check_close(
                "gradient",
                f"the gradient with respect to {name} is not that of the reference",
                got,
                want,
                rtol=1e-5,
                atol=1e-7,
            )


def _float32(case: LossCase, batch: LossBatch, random: Random) -> None:
    """Check that float32 inputs give the same loss to five digits."""
    want, want_grads, _ = case.run(batch)
    got, grads, _ = case.run(batch.cast(torch.float32))
    message = "float32 inputs give another {}"
    check_close("float32", message.format("loss"), got, want, rtol=1e-4, atol=1e-5)
    for name, grad in grads.items():
        want_grad = want_grads[name]
        check_close("float32", message.format("gradient"), grad, want_grad, 1e-3, 1e-5)


def _pure(case: LossCase, batch: LossBatch, random: Random) -> None:
    """Check that no column is modified, and that a second call is bitwise equal."""
    before = {name: value.clone() for name, value in batch.data.items()}
    first, second = case.run(batch)[0], case.run(batch)[0]
    for name, value in batch.data.items():
        if not torch.equal(value, before[name]):
            raise ConformanceError("pure", f"the loss changed column {name!r}")
    if not torch.equal(first, second):
        raise ConformanceError("pure", f"two calls gave {first} and {second}")


def _padding(case: LossCase, batch: LossBatch, random: Random) -> None:
    """Check that padding after the longest row has no effect, whatever it holds."""
    if batch.width is None:
        return
    width = batch.width + random.randint(1, 5)
    what = "padding behind the longest row"
    case.same("padding", what, batch, lambda b: [b.with_width(width, _JUNK)])


def _row_order(case: LossCase, batch: LossBatch, random: Random) -> None:
    """Check that the order of rows has no effect."""
    index = torch.cat(_shuffled(batch, random))
    case.same("row_order", "the order of rows", batch, lambda b: [b.rows(index)])


def _micro_batches(case: LossCase, batch: LossBatch, random: Random) -> None:
    """Check that cutting into micro-batches of minimal width has no effect."""
    units = _units(batch)
    size = random.randint(1, len(units))
    what = f"micro-batches of {size * batch.rows_per_unit} rows"
    case.same("micro_batches", what, batch, lambda b: _cut(b, units, size))


def _packing(case: LossCase, batch: LossBatch, random: Random) -> None:
    """Check that binning rows by length has no effect, as in sequence packing."""
    units = _shuffled(batch, random)
    lengths = [int(batch.lengths()[unit].sum()) for unit in units]
    packer = get_packer(
        PackingAlgorithm.FIRST_FIT_DECREASING,
        max(lengths) + random.randint(0, sum(lengths)),
    )
    bins = [[units[i] for i in members] for members in packer.pack(lengths)]
    case.same(
        "packing",
        "how rows are packed",
        batch,
        lambda b: [_narrow(b.rows(torch.cat(members))) for members in bins],
    )


def _data_parallel(case: LossCase, batch: LossBatch, random: Random) -> None:
    """Check that distribution over ranks, padded with masked rows, has no effect."""
    units = _shuffled(batch, random)
    num_ranks, size = random.randint(2, 5), random.randint(1, 3)
    extra = -len(units) % num_ranks
    # Ranks are filled up with masked copies of a row.
    filled = [*units, *[units[0]] * extra]
    per_rank = len(filled) // num_ranks

    def spread(whole: LossBatch) -> Iterable[LossBatch]:
        index = torch.cat(filled)
        rows = whole.rows(index)
        sample_mask = rows.data["sample_mask"].clone()
        sample_mask[len(index) - extra * whole.rows_per_unit :] = 0
        rows = rows.replaced(sample_mask=sample_mask)
        places = _units(rows)
        for first in range(0, len(places), per_rank):
            yield from _cut(rows, places[first : first + per_rank], size)

    case.same("data_parallel", f"the {num_ranks} ranks it ran on", batch, spread)


def _all_masked(case: LossCase, batch: LossBatch, random: Random) -> None:
    """Check that a fully masked batch gives loss 0 and no gradient."""
    for name in case.masks:
        if name not in batch.data:
            continue
        empty = batch.replaced(**{name: torch.zeros_like(batch.data[name])})
        loss, grads, metrics = case.run(empty)
        worst = max((float(g.abs().max()) for g in grads.values()), default=0.0)
        # `not worst == 0`, since NaN must fail as well.
        if float(loss) != 0 or not worst == 0:
            raise ConformanceError(
                "all_masked",
                f"with {name} all 0 the loss must be 0 without gradient: got "
                f"{float(loss)} and {worst}",
            )
        for key, metric in metrics.items():
            if not metric.is_empty and not math.isfinite(float(metric)):
                raise ConformanceError(
                    "all_masked", f"with {name} all 0 metric {key!r} is {float(metric)}"
                )


def _missing_columns(case: LossCase, batch: LossBatch, random: Random) -> None:
    """Check that a loss fails without a column that it reads."""
    want = case.run(batch)[0]
    # Sorted, so that a failing check names the same column each time.
    for name in sorted({*batch.data} - {*_ALWAYS_THERE, *case.optional}):
        data = {key: value for key, value in batch.data.items() if key != name}
        try:
            got = case.run(LossBatch(data, batch.inputs, batch.rows_per_unit))[0]
        except Exception:  # whichever: it was loud
            continue
        check_close(
            "missing_columns",
            f"without column {name!r} the loss silently changes",
            got,
            want,
        )


_CHECKS: dict[str, Callable[[LossCase, LossBatch, Random], None]] = {
    "value": _value,
    "gradient": _gradient,
    "float32": _float32,
    "pure": _pure,
    "padding": _padding,
    "row_order": _row_order,
    "micro_batches": _micro_batches,
    "packing": _packing,
    "data_parallel": _data_parallel,
    "all_masked": _all_masked,
    "missing_columns": _missing_columns,
}
LOSS_CHECKS = tuple(_CHECKS)
"""Names of the checks of `check_loss`, in order."""


def _units(batch: LossBatch) -> list[Tensor]:
    """Return the row indices of these units, whose rows stay together."""
    return list(torch.split(torch.arange(batch.num_rows), batch.rows_per_unit))


def _shuffled(batch: LossBatch, random: Random) -> list[Tensor]:
    units = _units(batch)
    random.shuffle(units)
    return units


def _narrow(batch: LossBatch) -> LossBatch:
    return batch.with_width(int(batch.lengths().max()))


def _cut(batch: LossBatch, units: Sequence[Tensor], size: int) -> Iterable[LossBatch]:
    for first in range(0, len(units), size):
        yield _narrow(batch.rows(torch.cat(list(units[first : first + size]))))


def _number(value: Tensor | float) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64).detach()
