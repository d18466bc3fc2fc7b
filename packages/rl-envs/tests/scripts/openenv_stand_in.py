"""A fast-starting replacement for `openenv_server.py` without the package.

A test compares their outputs. Run as `python openenv_stand_in.py PORT [SESSIONS]`.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

QUESTIONS = 3


class SessionError(Exception):
    pass


class Sums:
    def reset(self, seed: int | None = None, largest: int = 9, **_: Any) -> Any:
        if largest < 1:
            raise ValueError("largest must be positive")
        self.rng = random.Random(seed)
        self.largest, self.asked = largest, 0
        return self._reply(self._question())

    def _question(self) -> str:
        self.numbers = [self.rng.randint(0, self.largest) for _ in range(2)]
        self.asked += 1
        return f"{self.numbers[0]}+{self.numbers[1]}="

    def _reply(self, text: str, reward: float | None = None, done: bool = False) -> Any:
        return {"observation": {"text": text}, "reward": reward, "done": done}

    def step(self, message: str) -> Any:
        if message == "hang":
            threading.Event().wait()
        if message == "die":
            os._exit(3)
        if message == "dice":
            return self._reply(str(random.random()), 0.0)
        answer = int(message)
        reward = float(answer == sum(self.numbers))
        if self.asked == QUESTIONS:
            return self._reply("That is all.", reward, True)
        return self._reply(self._question(), reward)


def error(code: str, message: str, **more: Any) -> Any:
    return {"type": "error", "data": {"message": message, "code": code, **more}}


def answer(world: Sums, message: Any) -> Any:
    data = message["data"]
    try:
        if message["type"] == "reset":
            return {"type": "observation", "data": world.reset(**data)}
        text = data.get("message")
        if not isinstance(text, str) or len(text) > 40:
            told = "String should have at most 40 characters"
            errors = [{"loc": ["message"], "msg": told}]
            return error("VALIDATION_ERROR", "Invalid message", errors=errors)
        if "*" in text:
            raise SessionError("Unable to serialize")
        return {"type": "observation", "data": world.step(text)}
    except ValueError as problem:
        return error("EXECUTION_ERROR", str(problem))


def main(port: int, sessions: int) -> None:
    room = threading.Semaphore(sessions)

    def talk(socket: ServerConnection) -> None:
        def say(message: Any) -> None:
            socket.send(json.dumps(message))

        if not room.acquire(blocking=False):
            say(error("CAPACITY_REACHED", "full", max_sessions=sessions))
            return
        world = Sums()
        try:
            while (message := json.loads(socket.recv()))["type"] != "close":
                say(answer(world, message))
        except SessionError as problem:
            say(error("SESSION_ERROR", str(problem)))
        except ConnectionClosed:
            return
        finally:
            room.release()

    with serve(talk, "127.0.0.1", port) as server:
        server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 100)
