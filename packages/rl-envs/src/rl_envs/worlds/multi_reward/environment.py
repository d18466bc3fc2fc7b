"""The environment `multi_reward`.

conversation --> first part: observations, its end --+
                                                     | when it has ended
row, by part --> the other parts --------------------+--> reward/<name> each
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from rl_distributed.batch.arrays import as_array, to_numpy
from rl_distributed.errors import ConfigError
from rl_envs.errors import EnvironmentContractError
from rl_envs.interfaces import (
    EnvironmentInterface,
    EnvironmentReturn,
    MessageLog,
    Rewards,
    as_columns,
    has_own,
    num_rows,
    observation_messages,
    total_reward,
)
from rl_envs.metrics import reward_metrics
from rl_envs.outcomes import OUTCOME_KEY
from rl_envs.registry import register_env
from rl_envs.worlds.multi_reward.reward_parts import (
    MultiRewardConfig,
    RewardPart,
    build_parts,
    checked_parts,
    named_error,
)

__all__ = ["PARTS_KEY", "MultiRewardEnvironment"]

PARTS_KEY = "reward_parts"
"""Metadata key of each part's score and returned metadata."""
_SCORE, _KEPT = "score", "metadata"
_PER_ROW = ("group_index", "truncated", "generation_lengths")

ResultT = TypeVar("ResultT")
FloatArray = npt.NDArray[np.float64]


@register_env("multi_reward")
class MultiRewardEnvironment(EnvironmentInterface[Any]):
    """Scores one conversation with several environments, each with a named reward.

    The first part leads: it replies and decides when the conversation ends. The others
    score the finished conversation, in its last turn. The reward of a part is its total
    times its weight, as `reward/<name>`; the sum over parts is the reward of the row. A
    part that does not score a row (NaN) does not apply to it.

    Args:
        config: The settings, or a mapping of them.
        parts: Environments or reward functions in place of settings.

    Raises:
        ConfigError: Neither or both are given, a name occurs twice, a weight is not
            finite, or the settings of a part are invalid.
        RegistryError: A part names an unknown environment.
    """

    config_class = MultiRewardConfig

    def __init__(
        self,
        config: MultiRewardConfig | Mapping[str, Any] | None = None,
        *,
        parts: Sequence[RewardPart] | None = None,
    ) -> None:
        if (config is None) == (parts is None):
            raise ConfigError(
                "environment 'multi_reward' takes either settings with parts, or parts"
            )
        if parts is None:
            if not isinstance(config, MultiRewardConfig):
                config = MultiRewardConfig.from_dict(
                    dict(config or {}), source="environment 'multi_reward'"
                )
            parts = build_parts(config)
        self._parts = checked_parts(parts)
        self._lead, self._others = self._parts[0], self._parts[1:]

    def reset(self, metadata: Sequence[Any], seeds: Sequence[int]) -> list[Any]:
        """Begin conversations in the parts that do so.

        Raises:
            DistributedError: As `step`.
        """
        begun: list[dict[str, Any]] = [{} for _ in metadata]
        for part in self._parts:
            if not has_own(part.environment, "reset"):
                continue
            rows = [part.row(row) for row in metadata]
            found = _named(
                part,
                lambda part=part, rows=rows: part.environment.reset(rows, seeds),  # type: ignore[misc]
            )
            for states, columns, row in zip(begun, metadata, found, strict=True):
                states[part.name] = {_KEPT: _added(part, columns, row)}
        return [
            {**(columns or {}), PARTS_KEY: states} if states else columns
            for columns, states in zip(metadata, begun, strict=True)
        ]

    def close(self, metadata: Sequence[Any]) -> None:
        """Release what the parts keep for conversations, even if one of them raises."""
        with ExitStack() as closing:
            for part in self._parts:
                if has_own(part.environment, "close"):
                    rows = [self._own_row(part, row) for row in metadata]
                    closing.callback(part.environment.close, rows)

    def step(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[Any]
    ) -> EnvironmentReturn[Any]:
        """Step the first part, and score finished conversations with all parts.

        Raises:
            DistributedError: A part raised it; the message names the part.
            EnvironmentContractError: A part other than the first continues.
        """
        size = num_rows(message_log_batch, metadata)
        rows = [self._own_row(self._lead, row) for row in metadata]
        lead = self._ask(self._lead, message_log_batch, rows)
        ended = np.flatnonzero(to_numpy(lead.terminateds)).tolist()
        # 0 and not NaN for rows that go on: NaN would mean that they are not scored.
        scores = {part.name: np.zeros(size) for part in self._parts}
        scores[self._lead.name] = _scores(lead)
        kept: list[dict[str, Any]] = [
            {
                # What the other parts began with, until they score.
                **_states(metadata[row]),
                self._lead.name: _state(
                    self._lead, metadata[row], lead.metadata[row], lead_score
                ),
            }
            for row, lead_score in enumerate(_scores(lead).tolist())
        ]
        said = {row: [_said(self._lead, lead, row)] for row in ended}
        # Only finished conversations: the others judge a result, and may be costly.
        for part in self._others if ended else ():
            rows = [self._own_row(part, metadata[row]) for row in ended]
            found = self._ask(part, [message_log_batch[row] for row in ended], rows)
            if not to_numpy(found.terminateds).all():
                raise EnvironmentContractError(
                    f"part {part.name!r} of environment 'multi_reward' must end each "
                    "conversation that it scores, but continues; put it first"
                )
            part_scores = _scores(found)
            scores[part.name][ended] = part_scores
            for place, row in enumerate(ended):
                kept[row][part.name] = _state(
                    part,
                    metadata[row],
                    found.metadata[place],
                    part_scores[place].item(),
                )
                said[row].append(_said(part, found, place))
        return lead._replace(
            observations=[
                _joined(said[row]) if row in said else lead.observations[row]
                for row in range(size)
            ],
            metadata=[
                _metadata(columns, lead.metadata[row], kept[row])
                for row, columns in enumerate(metadata)
            ],
            rewards={
                f"reward/{part.name}": as_array(
                    part.weight * scores[part.name], "float32"
                )
                for part in self._parts
            },
        )

    def _ask(
        self, part: RewardPart, logs: Sequence[MessageLog], rows: Sequence[Any]
    ) -> EnvironmentReturn[Any]:
        found = _named(part, lambda: as_columns(part.environment.step(logs, rows)))
        if len(found.terminateds) != len(rows) or len(found.metadata) != len(rows):
            raise EnvironmentContractError(
                f"part {part.name!r} of environment 'multi_reward' must return one of "
                f"each per row: got {len(found.terminateds)} terminateds and "
                f"{len(found.metadata)} metadata for {len(rows)} rows"
            )
        return found

    def score_groups(
        self,
        message_logs: Sequence[Sequence[MessageLog]],
        metadata: Sequence[Sequence[Any]],
    ) -> list[Rewards] | None:
        """Score the conversations of each prompt together with the parts that do so.

        Raises:
            DistributedError: As `step`.
        """
        groups: list[dict[str, Any]] = [{} for _ in message_logs]
        for part in self._parts:
            rows = [[self._own_row(part, row) for row in group] for group in metadata]
            found = _named(
                part,
                lambda part=part, rows=rows: part.environment.score_groups(  # type: ignore[misc]
                    message_logs, rows
                ),
            )
            if found is None:
                continue
            for group, rewards in zip(groups, found, strict=True):
                total = to_numpy(total_reward(rewards)) * part.weight
                group[f"reward/{part.name}"] = as_array(total, "float32")
        return list(groups) if any(groups) else None

    def _own_row(self, part: RewardPart, metadata: Any) -> Any:
        """Return the row with the metadata that the part returned for it."""
        row = part.row(_plain(metadata))
        states = _states(metadata)
        return {**row, **states[part.name][_KEPT]} if part.name in states else row

    def unusable_rows(self, metadata: Sequence[Any]) -> dict[int, str]:
        """Return the rows that a part cannot score, naming the part."""
        found: dict[int, str] = {}
        for part in self._parts:
            rows = [part.row(row) for row in metadata]
            reasons = _named(
                part,
                lambda part=part, rows=rows: part.environment.unusable_rows(rows),  # type: ignore[misc]
            )
            for row, reason in reasons.items():
                found.setdefault(row, f"part {part.name!r}: {reason}")
        return dict(sorted(found.items()))

    def tool_schemas(self) -> list[dict[str, Any]]:
        """Return the tools of the first part."""
        return self._lead.environment.tool_schemas()

    def global_post_process_and_metrics(
        self, batch: MutableMapping[str, Any]
    ) -> tuple[MutableMapping[str, Any], dict[str, float]]:
        """Return the batch unchanged, and the metrics of each part as `<part>/<name>`.

        They cover the conversations that the part has scored, with unweighted rewards.

        Raises:
            DistributedError: As `step`.
        """
        metrics = reward_metrics(batch)
        for part in self._parts:
            own = self._own_batch(part, batch)
            if own is None:
                continue
            _, found = _named(
                part,
                lambda part=part, own=own: (  # type: ignore[misc]
                    part.environment.global_post_process_and_metrics(own)
                ),
            )
            metrics |= {f"{part.name}/{name}": value for name, value in found.items()}
        return batch, metrics

    def _own_batch(
        self, part: RewardPart, batch: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Return the rows that a part has scored; None: there are none."""
        metadata = batch.get("metadata") or ()
        judged = [
            row
            for row, columns in enumerate(metadata)
            # A part may have begun the conversation, and not scored it.
            if _SCORE in _states(columns).get(part.name, ())
        ]
        if not judged:
            return None
        states = [metadata[row][PARTS_KEY][part.name] for row in judged]
        columns = {
            name: to_numpy(batch[name])[judged] for name in _PER_ROW if name in batch
        }
        return columns | {
            "rewards": as_array([state[_SCORE] for state in states], "float32"),
            "metadata": [self._own_row(part, metadata[row]) for row in judged],
        }

    def shutdown(self) -> None:
        """Shut all parts down, even if one of them raises."""
        with ExitStack() as closing:
            for part in self._parts:
                closing.callback(part.environment.shutdown)


def _named(part: RewardPart, call: Callable[[], ResultT]) -> ResultT:
    try:
        return call()
    except Exception as error:
        raise named_error(part.name, error) from error


def _scores(result: EnvironmentReturn[Any]) -> FloatArray:
    return to_numpy(total_reward(result.rewards)).astype(np.float64)


def _plain(metadata: Any) -> Any:
    """Return the columns of the row, without the metadata of the parts."""
    if not isinstance(metadata, Mapping) or PARTS_KEY not in metadata:
        return metadata
    return {k: v for k, v in metadata.items() if k not in (PARTS_KEY, OUTCOME_KEY)}


def _state(
    part: RewardPart, metadata: Any, returned: Any, score: float
) -> dict[str, Any]:
    """Return the score of a part, and the metadata that it added to the row."""
    score += _states(metadata).get(part.name, {}).get(_SCORE, 0.0)
    return {_SCORE: score, _KEPT: _added(part, metadata, returned)}


def _states(metadata: Any) -> Mapping[str, Any]:
    """Return the state of each part that has one."""
    return (metadata.get(PARTS_KEY) if isinstance(metadata, Mapping) else None) or {}


def _added(part: RewardPart, metadata: Any, returned: Any) -> dict[str, Any]:
    """Return the metadata that a part added to the row."""
    columns = part.row(_plain(metadata))
    known = columns if isinstance(columns, Mapping) else {}
    # Only additions are kept per part: a copy of every column for every part would
    # multiply the metadata that travels with each row.
    return {
        name: value
        for name, value in (returned if isinstance(returned, Mapping) else {}).items()
        if name not in known or known[name] is not value
    }


def _metadata(columns: Any, lead: Any, kept: Mapping[str, Any]) -> dict[str, Any]:
    plain = _plain(columns)
    found = dict(plain) if isinstance(plain, Mapping) else {}
    if isinstance(lead, Mapping) and OUTCOME_KEY in lead:
        found[OUTCOME_KEY] = lead[OUTCOME_KEY]
    return {**found, PARTS_KEY: dict(kept)}


def _said(part: RewardPart, result: EnvironmentReturn[Any], row: int) -> str:
    texts = [m["content"] for m in observation_messages(result.observations[row])]
    said = " ".join(text for text in texts if text)
    return f"{part.name}: {said}" if said else ""


def _joined(said: Sequence[str]) -> dict[str, str]:
    return {"role": "environment", "content": "\n".join(filter(None, said))}
