"""`MemoryTurns`: alternating use of memory by training and generation.

```
finish_training -> (weight sync) -> prepare_for_generation -> generate
finish_generation -> prepare_for_training -> train
```
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence

from rl_models.interfaces import GenerationInterface, PolicyInterface
from rl_models.model_traits import GeneratorTraits, PolicyTraits

__all__ = ["MemoryTurns", "Turn", "generation_turn"]


class Turn:
    """One side of the alternation.

    Args:
        prepare: Calls at the start of the turn, which take memory.
        finish: Calls at the end of the turn, which free it.
    """

    def __init__(
        self,
        prepare: Iterable[Callable[[], None]],
        finish: Iterable[Callable[[], None]],
    ) -> None:
        self._prepare, self._finish = tuple(prepare), tuple(finish)
        self._is_ready = False
        # A model holds memory as soon as it is loaded, or when an earlier run left it
        # in the middle of a turn.
        self._holds_memory = True

    @property
    def must_prepare(self) -> bool:
        """Whether `prepare` has something to do."""
        return bool(self._prepare) and not self._is_ready

    @property
    def must_finish(self) -> bool:
        """Whether `finish` has something to do."""
        return bool(self._finish) and self._holds_memory

    def prepare(self) -> None:
        """Begin the turn, unless it has begun."""
        if not self.must_prepare:
            return
        # Set before the calls, because one that fails may have taken memory as well.
        self._holds_memory = True
        for call in self._prepare:
            call()
        self._is_ready = True

    def finish(self) -> None:
        """End the turn; after a failure the next call tries again."""
        if not self.must_finish:
            return
        self._is_ready = False
        for call in self._finish:
            call()
        self._holds_memory = False


class MemoryTurns:
    """The turns of training and generation; empty if they share no memory.

    Args:
        policy: Model that is trained.
        generation: Model that samples, or None.
        critic: Second model that is trained, or None.
    """

    def __init__(
        self,
        policy: PolicyInterface | None,
        generation: GenerationInterface | None,
        critic: PolicyInterface | None = None,
    ) -> None:
        trained: list[object] = []
        sampling: list[GenerationInterface] = []
        if generation is not None and share_devices(policy, generation):
            trained = [model for model in (policy, critic) if model is not None]
            sampling = [generation]
        self.training = Turn(
            _calls(trained, "prepare_for_training"), _calls(trained, "finish_training")
        )
        self.generation = generation_turn(sampling)


def generation_turn(generators: Sequence[GenerationInterface]) -> Turn:
    """Return the turn of models that sample."""
    return Turn(
        _calls(generators, "prepare_for_generation"),
        _calls(generators, "finish_generation"),
    )


def share_devices(policy: object, generation: object) -> bool:
    """Return whether two models use memory of the same devices.

    A model without workers of its own, such as one in this process, has no cluster. Its
    own methods then decide whether there is anything to free. A generator whose model
    is in servers elsewhere shares nothing.
    """
    sampling = GeneratorTraits.of(generation)
    places = [PolicyTraits.of(policy).cluster, sampling.cluster]
    shared = None in places or places[0] is places[1]
    return shared and sampling.holds_model


def _calls(models: Iterable[object], method: str) -> list[Callable[[], None]]:
    """Return a method of each model that overrides the empty default."""
    found = [getattr(model, method, None) for model in models]
    nothing = getattr(PolicyInterface, method, None)
    return [
        call
        for call in found
        if call is not None
        and (not inspect.ismethod(call) or call.__func__ is not nothing)
    ]
