"""Format tasks: sections and their contents."""

from __future__ import annotations

import random

from rl_envs.registry import register_task_source
from rl_envs.tasks import Task, TaskSource, check_choice, check_range

__all__ = ["FormatTasks"]

_NAMES = (
    "answer", "checks", "facts", "goal", "idea", "method", "notes", "plan", "result",
    "review", "steps", "summary", "thoughts", "title",
)  # fmt: skip
_WORDS = (
    "birch", "cloud", "dune", "eagle", "flint", "grass", "heron", "inlet", "jetty",
    "knoll", "larch", "marsh", "otter", "pine", "quail", "reed", "stone", "thorn",
)  # fmt: skip


@register_task_source("format")
class FormatTasks(TaskSource):
    """Generates sections, their order and their words.

    The split depends on the sections in their order and on their contents.

    Args:
        num_sections: Number of sections, 1 to 10.
        num_words: Number of words in each section, 1 to 12.
        style: `tags` or `headings`, as in the environment; stated in the prompt.
        seed: Seed of the samples.
        held_out_fraction: Share of all tasks that are held out.

    Raises:
        TaskError: A size or the style is invalid.
    """

    def __init__(
        self,
        num_sections: int = 2,
        *,
        num_words: int = 2,
        style: str = "tags",
        seed: int = 0,
        held_out_fraction: float = 0.1,
    ) -> None:
        super().__init__("format", seed=seed, held_out_fraction=held_out_fraction)
        check_range("num_sections", num_sections, 1, 10)
        check_range("num_words", num_words, 1, 12)
        check_choice("style", style, "tags", "headings")
        self.num_sections, self.num_words, self.style = num_sections, num_words, style

    def propose(self, rng: random.Random) -> Task:
        """Draw sections and words, and list them in a different order."""
        names = rng.sample(_NAMES, self.num_sections)
        contents = {
            name: " ".join(rng.choices(_WORDS, k=self.num_words)) for name in names
        }
        # Listed in another order than required, so that copying the list is not enough.
        said = rng.sample(names, len(names))
        listed = "\n".join(f"- {name} holds: {contents[name]}" for name in said)
        form = (
            "<name>...</name>"
            if self.style == "tags"
            else "a line '# name', then its text"
        )
        return Task(
            prompt=(
                f"Write sections in this order, each once: {', '.join(names)}. A "
                f"section is {form}. Write nothing else.\n{listed}"
            ),
            answer="\n".join(self._section(name, contents[name]) for name in names),
            metadata={"sections": names, "contents": contents},
        )

    def _section(self, name: str, content: str) -> str:
        if self.style == "tags":
            return f"<{name}>{content}</{name}>"
        return f"# {name}\n{content}"

    def key(self, task: Task) -> str:
        """Return the sections in their order, with their contents."""
        contents = task.metadata["contents"]
        return "; ".join(f"{n}: {contents[n]}" for n in task.metadata["sections"])
