"""Base of text games with many turns.

An environment keeps no state between calls. The state of a game is part of the metadata
of its row:

    row of the data set          metadata after a turn
    {"board": "12/.3", ...}  ->  {"board": "12/.3", ..., "game": {"turns": 1, ...}}

Rows are therefore independent, a call can be repeated, and a conversation is the same
with one process or many.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from pydantic import Field

from rl_distributed.batch.arrays import as_array
from rl_distributed.config import Config
from rl_envs.errors import MessageLogError
from rl_envs.interfaces import (
    EnvironmentInterface,
    EnvironmentReturn,
    MessageLog,
    last_response,
    num_rows,
    total_reward,
)
from rl_envs.metrics import reward_metrics
from rl_envs.outcomes import (
    OUTCOME_KEY,
    ConversationOutcome,
    outcome_metrics,
    outcome_of,
)

__all__ = [
    "GAME_KEY",
    "Columns",
    "GameConfig",
    "GameEnvironment",
    "GameTurn",
    "Playthrough",
    "played",
    "said_action",
    "said_move",
]

Columns: TypeAlias = Mapping[str, Any]

GAME_KEY = "game"
"""Metadata key of the state of a game."""
_TAGGED = re.compile(r"<move>(.*?)(?:</move>|\Z)", re.DOTALL)


class GameConfig(Config):
    """Settings shared by all games."""

    max_turns: int = Field(50, ge=1)
    """Maximum number of responses, legal or not, after which a conversation ends as
    `out_of_turns`. A smaller `max_rollout_turns` of the trainer ends it first, without
    an outcome."""
    max_illegal: int | None = Field(3, ge=1)
    """Number of illegal or unreadable responses at which a conversation ends as
    `illegal`. null: no limit, other than `max_turns`."""


@dataclass(frozen=True, slots=True)
class GameTurn:
    """Effect of a response."""

    state: Mapping[str, Any]
    """State of the game after it, of JSON values."""
    observation: str
    reward: float = 0.0
    outcome: ConversationOutcome | None = None
    """Outcome of the game; None: it continues."""
    is_legal: bool = True
    answer: str | None = None
    """The move as it was read, for logs."""


class GameEnvironment(EnvironmentInterface[Columns]):
    """Plays a game with each row; subclasses define its start and its moves.

    Metrics are the outcomes of the conversations, `accuracy` (the share solved), and
    turns and illegal responses per conversation.

    Args:
        config: The limits.
    """

    many_turns = True

    def __init__(self, config: GameConfig) -> None:
        self.limits = config

    @abstractmethod
    def start(self, columns: Columns, row: int) -> Mapping[str, Any]:
        """Return the initial state of the game of a data set row.

        Args:
            columns: The row.
            row: Its index in the batch, for error messages.

        Raises:
            MessageLogError: A column is missing or has a wrong value.
        """

    @abstractmethod
    def play(
        self, columns: Columns, state: Mapping[str, Any], response: str
    ) -> GameTurn:
        """Apply a response to a game, reporting its mistakes as an observation.

        Args:
            columns: The row.
            state: State returned by `start` or the last turn.
            response: Text of the policy.
        """

    def play_all(
        self, turns: Sequence[tuple[Columns, Mapping[str, Any], str]]
    ) -> list[GameTurn]:
        """Apply responses to their games.

        Games that wait for something, such as a server, override it to wait for all.

        Args:
            turns: Arguments of `play`.
        """
        return [self.play(*turn) for turn in turns]

    def step(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[Columns]
    ) -> EnvironmentReturn[Columns]:
        """Play the last response of each conversation.

        Raises:
            MessageLogError: A conversation has no response, or a row cannot be played.
        """
        size = num_rows(message_log_batch, metadata)
        responses = [
            last_response(log, row=row) for row, log in enumerate(message_log_batch)
        ]
        # A row without columns reaches `start`, whose error names what is missing.
        rows = [each if isinstance(each, Mapping) else {} for each in metadata]
        states = [self._state_of(columns, row) for row, columns in enumerate(rows)]
        played_turns = self.play_all(list(zip(rows, states, responses, strict=True)))
        turns = [
            self._counted(state, turn)
            for state, turn in zip(states, played_turns, strict=True)
        ]
        return EnvironmentReturn(
            observations=[
                {"role": "environment", "content": turn.observation} for turn in turns
            ],
            metadata=[
                _advanced(columns, turn)
                for columns, turn in zip(metadata, turns, strict=True)
            ],
            next_stop_strings=[None] * size,
            rewards=as_array([turn.reward for turn in turns], "float32"),
            terminateds=as_array([turn.outcome is not None for turn in turns], "bool"),
            answers=[turn.answer for turn in turns],
        )

    def unusable_rows(self, metadata: Sequence[Columns]) -> dict[int, str]:
        """Return the rows with which no game can start."""
        found: dict[int, str] = {}
        for row, columns in enumerate(metadata):
            try:
                self.start(columns if isinstance(columns, Mapping) else {}, row)
            except MessageLogError as error:
                found[row] = str(error)
        return found

    def global_post_process_and_metrics(
        self, batch: MutableMapping[str, Any]
    ) -> tuple[MutableMapping[str, Any], dict[str, float]]:
        """Return the batch unchanged, with metrics of its conversations' outcomes."""
        metrics = reward_metrics(batch)
        rows = [
            row
            for row in batch.get("metadata") or ()
            if isinstance(row, Mapping) and isinstance(row.get(GAME_KEY), Mapping)
        ]
        if not rows:
            return batch, metrics
        metrics.update(outcome_metrics(rows))
        metrics["accuracy"] = metrics[f"outcome/{ConversationOutcome.SOLVED}"]
        for key in ("turns", "illegal"):
            total = sum(row[GAME_KEY][key] for row in rows)
            metrics[f"{key}_per_game"] = total / len(rows)
        return batch, metrics

    def _state_of(self, columns: Columns, row: int) -> Mapping[str, Any]:
        """Return the state of a row's game, which starts in its first turn."""
        state = columns.get(GAME_KEY)
        if state is None:
            return {"turns": 0, "illegal": 0, **self.start(columns, row)}
        if not isinstance(state, Mapping) or not {"turns", "illegal"} <= set(state):
            raise MessageLogError(
                f"metadata[{row}][{GAME_KEY!r}] must be the state returned by the last "
                f"turn, or missing in the first turn: got {state!r:.80}; rename that "
                "column of your data set"
            )
        return state

    def _counted(self, state: Mapping[str, Any], turn: GameTurn) -> GameTurn:
        """Count a response, ending the game at a limit."""
        num_turns = state["turns"] + 1
        num_illegal = state["illegal"] + (not turn.is_legal)
        # The game's own end takes precedence: a winning last move is a win.
        outcome = turn.outcome
        # Equality, since `max_illegal` may be None; the count rises by one at most.
        if outcome is None and num_illegal == self.limits.max_illegal:
            outcome = ConversationOutcome.ILLEGAL
        if outcome is None and num_turns >= self.limits.max_turns:
            outcome = ConversationOutcome.OUT_OF_TURNS
        counted = {**turn.state, "turns": num_turns, "illegal": num_illegal}
        return replace(turn, state=counted, outcome=outcome)


def _advanced(columns: Columns, turn: GameTurn) -> dict[str, Any]:
    """Return the metadata after a turn."""
    advanced = {**columns, GAME_KEY: dict(turn.state)}
    if turn.outcome is not None:
        # Plain text, so that metadata stays JSON.
        advanced[OUTCOME_KEY] = turn.outcome.value
    return advanced


def said_action(response: str) -> str:
    """Return the part of a response that is the action, of one line or several.

    This is the content of the last `<move>` tag or, without one, the last line.
    """
    tagged = _TAGGED.findall(response)
    if tagged:
        return str(tagged[-1]).strip()
    lines = response.strip().splitlines()
    return lines[-1].strip() if lines else ""


def said_move(response: str) -> str:
    """Return the part of a response that names the move.

    This is the content of the last `<move>` tag or, without one, the last line.
    """
    tagged = _TAGGED.findall(response)
    # The last one: a model that thinks aloud corrects itself towards the end.
    lines = (tagged[-1] if tagged else response).strip().splitlines()
    return lines[-1].strip() if lines else ""


@dataclass(frozen=True, slots=True)
class Playthrough:
    """A conversation played to its end."""

    messages: list[dict[str, str]]
    """The prompt, then responses and observations in turn, ending with a response."""
    reward: float
    """Sum over all turns."""
    outcome: ConversationOutcome | None
    columns: Columns
    """Metadata after the last turn."""


def played(
    environment: EnvironmentInterface[Columns],
    row: Columns,
    player: Callable[[Columns], str],
) -> Playthrough:
    """Play one conversation with a function in place of a model.

    Args:
        environment: The environment, which must end the conversation at some turn.
        row: A row with `prompt` and the columns of the environment.
        player: Function from the metadata (first the row itself) to a response.
    """
    messages = [{"role": "user", "content": str(row["prompt"])}]
    columns, reward = row, 0.0
    while True:
        messages.append({"role": "assistant", "content": player(columns)})
        result = environment.step([messages], [columns])
        columns = result.metadata[0]
        reward += float(total_reward(result.rewards)[0])
        if result.terminateds[0]:
            return Playthrough(messages, reward, outcome_of(columns), columns)
        observation = result.observations[0]
        messages += [observation] if isinstance(observation, dict) else observation
