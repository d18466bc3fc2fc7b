"""When the base of adapters is sent, and which sides are incompatible."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rl_distributed.errors import ConfigError
from rl_models.lora_config import LoRAConfig
from rl_models.weights.base_weights import BaseWeights

LORA = {"r": 2, "sync": "adapter"}


class Sides:
    """A policy and a generator, as far as `BaseWeights` reads them."""

    def __init__(self, lora=None, taken=None):
        self.sent_adapter = lora and LoRAConfig(**lora)
        self.taken_adapter = taken and LoRAConfig(**taken)
        self.base_version = self.weight_version = 0
        self.processes = [(0, 0)]

    def live_processes(self):
        return list(self.processes)


def test_the_base_is_sent_where_it_is_missing():
    sides = Sides(LORA, LORA)
    base = BaseWeights(sides, sides)

    def sync(is_loaded=True):
        kind = base.next_kind()
        base.settle(is_loaded=is_loaded)
        sides.weight_version += is_loaded
        return kind

    assert [sync() for _ in range(3)] == ["apart", "adapter", "adapter"]
    sides.processes = [(0, 1)]  # it was restarted
    assert [sync() for _ in range(2)] == ["apart", "adapter"]
    sides.processes.append((1, 0))  # another one has joined
    assert [sync(), sync(is_loaded=False), sync(), sync()] == [
        "apart",
        "adapter",
        "apart",
        "adapter",
    ]
    sides.base_version += 1
    assert [sync(), sync()] == ["apart", "adapter"]
    sides.weight_version = 0  # the generator has reloaded its model
    assert sync() == "apart"
    # A side that does not report its processes gets the base each time.
    silent = SimpleNamespace(taken_adapter=sides.taken_adapter, weight_version=1)
    base = BaseWeights(sides, silent)
    assert [sync(), sync()] == ["apart", "apart"]


def test_without_adapters_weights_are_merged():
    sides = Sides()
    base = BaseWeights(sides, sides)
    assert base.next_kind() == "merged"
    assert BaseWeights(object(), object()).next_kind() == "merged"


@pytest.mark.parametrize(
    ("sent", "taken", "message"),
    [
        (LORA, None, "got a generator that has no adapter apart"),
        (None, LORA, "got a policy that has no adapter apart"),
        (LORA, {**LORA, "r": 4}, "r 2 and scale 2 against r 4 and scale 2"),
        (LORA, {**LORA, "alpha": 1.0}, "scale 2 against r 2 and scale 0.5"),
    ],
)
def test_sides_that_do_not_fit_are_refused(sent, taken, message):
    sides = Sides(sent, taken)
    with pytest.raises(ConfigError, match=message):
        BaseWeights(sides, sides)
