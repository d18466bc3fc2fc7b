"""Settings of the openenv environment."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from rl_distributed.config import Config
from rl_envs.bridges.openenv.functions import absolute_name
from rl_envs.worlds.game import GameConfig

__all__ = ["PORT", "PYTHON", "OpenEnvConfig", "OpenEnvServer"]

PORT, PYTHON = "{port}", "{python}"


class OpenEnvServer(Config):
    """Which server has the environment, and how its observations become text."""

    address: str | None = None
    """Address of a running server, such as `http://127.0.0.1:8000`; null: `command`
    starts one."""
    command: tuple[str, ...] = ()
    """Command line of a server that each process starts for itself, and ends with
    itself. `{port}` stands for a free port of 127.0.0.1, `{python}` for the Python of
    the extra `openenv-server`, an environment of its own that is built once."""
    start_s: float = Field(120.0, gt=0.0)
    """Seconds in which a server that `command` starts must listen."""
    connect_s: float = Field(10.0, gt=0.0)
    """Seconds in which a session must begin. Only this is tried again until then: a
    server that is away may come back, and one that is full may have room."""
    call_s: float = Field(60.0, gt=0.0)
    """Seconds that the server may take for one reset or step."""
    max_message_mib: int = Field(16, ge=1)
    """Maximum size of a message of the server, in MiB."""
    show: str = ""
    """Text of an observation, with the names of fields in braces, such as
    `{board}\\nMoves left: {info.left}`. Empty: the only field if it is text, otherwise
    all as JSON."""
    observation_function: str | None = None
    """Function from an observation, a dict, to its text, in place of `show`:
    `file.py:name` or `package.module:name`."""

    @field_validator("address")
    @classmethod
    def _check_address(cls, address: str | None) -> str | None:
        if address is None:
            return None
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
            raise ValueError(
                f"must be an address such as http://127.0.0.1:8000: got {address!r}"
            )
        return address.rstrip("/")

    @field_validator("observation_function")
    @classmethod
    def _check_function(cls, name: str | None) -> str | None:
        return None if name is None else absolute_name(name)

    @model_validator(mode="after")
    def _check_server(self) -> OpenEnvServer:
        if (self.address is None) == (not self.command):
            got = "both" if self.command else "neither"
            raise ValueError(
                "the server needs an address, or a command that starts it "
                f"(address=http://127.0.0.1:8000): got {got}"
            )
        if self.command and not any(PORT in word for word in self.command):
            raise ValueError(
                f"command must say where the server listens, by {PORT}: got "
                f"{list(self.command)}"
            )
        if self.show and self.observation_function is not None:
            raise ValueError("give show or observation_function, not both")
        return self


class OpenEnvConfig(OpenEnvServer, GameConfig):
    """Settings of the openenv environment."""

    read_action: Literal["move", "response"] = "move"
    """Part of a response that is the action. `move`: the content of the last `<move>`
    tag or, without one, the last line. `response`: all of it."""
    action: dict[str, Any] | Literal["{json}"] = Field(
        default_factory=lambda: {"message": "{text}"}
    )
    """The action sent to the server, in which `{text}` stands for that part, and
    `{int}`, `{float}` or `{json}`, as a whole value, for the number or JSON value that
    it must be. `{json}` in place of a mapping: that part is the whole action."""
    action_function: str | None = None
    """Function from that part to the action, a dict, in place of `action`:
    `file.py:name` or `package.module:name`. What it raises as ValueError is told to
    the model, as an illegal response."""
    credit: Literal["sum", "last"] = "sum"
    """`sum`: the rewards of all steps. `last`: the reward of the step that ends the
    episode; one that a limit ends earns 0. A reward of null is 0."""
    solved_reward: float | None = None
    """Reward of a conversation from which it is `solved`, and below it `lost`; null:
    it is `finished`, as the protocol does not say."""
    failed_step: Literal["error", "illegal"] = "error"
    """What a step is in which the environment raises. `error`: the conversation ends
    unscored. `illegal`: an illegal response, told the message."""
    is_repeatable: bool = True
    """Whether equal resets and actions give equal observations and rewards. A session
    that was lost, or made room for another, is then played again from its start.
    false: its conversation ends as `error`, unscored."""
    max_sessions: int = Field(64, ge=1)
    """Maximum number of sessions of a process, which should not exceed what the server
    allows it (`max_concurrent_envs`)."""

    @field_validator("action_function")
    @classmethod
    def _check_action_function(cls, name: str | None) -> str | None:
        return None if name is None else absolute_name(name)
