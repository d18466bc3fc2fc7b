"""A server on OpenEnv's own package: one sum per step, three per episode.

Run as `python openenv_server.py PORT [SESSIONS]` with the Python of the extra
`openenv-server`.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from typing import Any

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field, field_validator

QUESTIONS = 3


class SumAction(Action):
    message: str = Field(max_length=40)

    @field_validator("message")
    @classmethod
    def _no_star(cls, value: str) -> str:
        # pydantic includes the exception object, which is not JSON.
        if "*" in value:
            raise ValueError("no products")
        return value


class SumObservation(Observation):
    text: str


class Sums(Environment[SumAction, SumObservation, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        largest: int = 9,
        **_: Any,
    ) -> SumObservation:
        if largest < 1:
            raise ValueError("largest must be positive")
        self.rng = random.Random(seed)
        self.largest, self.asked = largest, 0
        self._state = State(episode_id=episode_id)
        return SumObservation(text=self._question())

    def _question(self) -> str:
        self.numbers = [self.rng.randint(0, self.largest) for _ in range(2)]
        self.asked += 1
        return f"{self.numbers[0]}+{self.numbers[1]}="

    def step(self, action: SumAction, **_: Any) -> SumObservation:
        if action.message == "hang":
            threading.Event().wait()
        if action.message == "die":
            os._exit(3)
        if action.message == "dice":
            return SumObservation(text=str(random.random()), reward=0.0)
        answer = int(action.message)
        reward = float(answer == sum(self.numbers))
        if self.asked == QUESTIONS:
            return SumObservation(text="That is all.", reward=reward, done=True)
        return SumObservation(text=self._question(), reward=reward)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    sessions = int(sys.argv[2]) if len(sys.argv) > 2 else 100
    app = create_fastapi_app(Sums, SumAction, SumObservation, sessions)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
