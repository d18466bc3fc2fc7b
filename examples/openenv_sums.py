"""A server of OpenEnv that asks sums: `python openenv_sums.py PORT`."""

from __future__ import annotations

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class SumAction(Action):
    """An answer."""

    answer: int


class SumObservation(Observation):
    """The next sum."""

    question: str


class Sums(Environment[SumAction, SumObservation, State]):
    """Asks three sums, one a step."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(
        self, seed: int | None = None, largest: int = 9, **_: Any
    ) -> SumObservation:
        """Begin an episode; all its sums follow from the seed."""
        self.chance, self.largest = random.Random(seed), largest
        self.asked = 0
        return SumObservation(question=self.question())

    def question(self) -> str:
        """Draw the next sum."""
        self.numbers = [self.chance.randint(0, self.largest) for _ in range(2)]
        self.asked += 1
        return f"{self.numbers[0]} + {self.numbers[1]} = ?"

    def step(self, action: SumAction, **_: Any) -> SumObservation:
        """Reward the answer, and ask the next one."""
        reward = float(action.answer == sum(self.numbers))
        if self.asked == 3:
            return SumObservation(question="", reward=reward, done=True)
        return SumObservation(question=self.question(), reward=reward)

    @property
    def state(self) -> State:
        """Where the episode is."""
        return State(step_count=self.asked - 1)


if __name__ == "__main__":
    app = create_fastapi_app(Sums, SumAction, SumObservation, max_concurrent_envs=256)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
