"""Nim tasks: heaps from which the first player can win."""

from __future__ import annotations

import random

from rl_envs.errors import TaskError
from rl_envs.registry import register_task_source
from rl_envs.tasks import Task, TaskSource, check_choice, check_range
from rl_envs.worlds.game import Columns
from rl_envs.worlds.nim.environment import nim_prompt
from rl_envs.worlds.nim.solver import HEAP_NAMES, best_move, is_won

__all__ = ["NimTasks"]

# Some settings, such as two heaps of one, have no winnable position at all.
_TRIES = 1000


@register_task_source("nim")
class NimTasks(TaskSource):
    """Draws heaps from which the first player wins under perfect play.

    The answer of a task is a winning first move. The split depends on the sorted heaps,
    so that a held-out task does not appear in training with its heaps in another order.

    Args:
        num_heaps: Number of heaps, 1 to 8.
        max_heap: Largest heap; the smallest is 1.
        misere: True if the player who takes last loses.
        style: `compact`: "3,4,5>", for the smallest models. `words`: rules and heaps.
        seed: Seed of the samples.
        held_out_fraction: Share of all tasks that are held out.

    Raises:
        TaskError: A size or the style is invalid.
    """

    def __init__(
        self,
        num_heaps: int = 3,
        *,
        max_heap: int = 7,
        misere: bool = False,
        style: str = "compact",
        seed: int = 0,
        held_out_fraction: float = 0.1,
    ) -> None:
        super().__init__("nim", seed=seed, held_out_fraction=held_out_fraction)
        check_range("num_heaps", num_heaps, 1, len(HEAP_NAMES))
        check_range("max_heap", max_heap, 1, 999)
        check_choice("style", style, "compact", "words")
        self.num_heaps, self.max_heap = num_heaps, max_heap
        self.misere, self.style = misere, style

    def propose(self, rng: random.Random) -> Task:
        """Draw heaps until the first player wins.

        Raises:
            TaskError: No such heaps were found.
        """
        for _ in range(_TRIES):
            heaps = [rng.randint(1, self.max_heap) for _ in range(self.num_heaps)]
            # Only positions that the policy can win: its first move then decides.
            if is_won(heaps, misere=self.misere):
                return Task(
                    prompt=nim_prompt(heaps, self.style, misere=self.misere),
                    answer=best_move(heaps, misere=self.misere).text,
                    metadata={
                        "heaps": heaps,
                        "misere": self.misere,
                        "opponent_seed": rng.randrange(2**31),
                        "style": self.style,
                    },
                )
        raise TaskError(
            f"no {self.num_heaps} heaps of up to {self.max_heap} were found from which "
            "the first player wins: raise max_heap"
        )

    def key(self, task: Task) -> str:
        """Return the sorted heaps and the rule."""
        return f"{sorted(task.metadata['heaps'])}{'-' * task.metadata['misere']}"

    def perfect(self, columns: Columns) -> str:
        """Return the response of a perfect player.

        Args:
            columns: A row, or the metadata of a later turn.
        """
        heaps = columns.get("game", columns)["heaps"]
        move = best_move(heaps, misere=columns["misere"]).text
        return move if self.style == "compact" else f"<move>{move}</move>"

    @property
    def alphabet(self) -> str:
        """All distinct characters of compact conversations."""
        return f"0123456789,;>!-{HEAP_NAMES}"
