"""Run a property on generated examples, with the error for a violated one."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

try:
    from hypothesis import HealthCheck, Phase, given, settings, strategies as st
except ImportError as error:
    raise ImportError(
        "the conformance kit generates its examples with hypothesis: pip install "
        "hypothesis"
    ) from error

from rl_algorithms.errors import AlgorithmError

__all__ = ["ConformanceError", "for_examples"]

Property = Callable[[int, Random], None]


class ConformanceError(AlgorithmError, AssertionError):
    """A loss or an estimator violates a rule.

    Args:
        check: Name of the check.
        message: Description of the violation.
    """

    def __init__(self, check: str, message: str) -> None:
        super().__init__(check, message)
        self.check = check

    def __str__(self) -> str:
        return f"{self.args[0]}: {self.args[1]}"


def for_examples(holds: Property, num_examples: int) -> None:
    """Call `holds(seed, random)` with generated seeds, the same ones in each run."""

    @settings(
        max_examples=num_examples,
        # The same examples in each run, and no files: a check must not fail by chance.
        derandomize=True,
        database=None,
        # Slow code is not wrong.
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 2**16), st.randoms(use_true_random=False))
    def run(seed: int, random: Random) -> None:
        holds(seed, random)

    run()
