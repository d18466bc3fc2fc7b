"""Calling a reward function on a batch, and checking its results.

Asynchronous functions run on an event loop of their own, in a separate thread if the
caller already runs one:

| part | consumes | produces | waits for | is unblocked by |
|---|---|---|---|---|
| caller | rows | scores | the loop | all calls done, one failed, or the deadline |
| a task per row | a row | a score | a free slot, its own I/O | the loop, cancelling |
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeAlias

from rl_envs.errors import RewardCallError, RewardError, RewardValueError
from rl_envs.rewards.rows import RewardRows, short
from rl_envs.rewards.signature import (
    RewardFn,
    RewardSignature,
    fn_name,
    inspect_reward_fn,
)

__all__ = ["RewardCall", "Score"]

Score: TypeAlias = float | dict[str, float | None] | None
"""One row's reward, rewards by name (None if one does not apply to the row), or None if
the row was not scored."""
# Arguments that only TRL's trainer passes; a function that needs them gets a hint.
_TRL_ONLY = frozenset(
    {"completion_ids", "completions_ids", "trainer_state", "log_extra"}
)


def _remedy(column: str) -> str:
    if column in _TRL_ONLY:
        return "It is passed by TRL only: give the parameter a default"
    return "Give the parameter a default, or add the column to the data set"


def _where(error: BaseException) -> str:
    # The innermost frame, where the user's code failed.
    frames = traceback.extract_tb(error.__traceback__)
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


class RewardCall:
    """A reward function together with its inspected signature.

    Args:
        fn: The function.
        name: Its name in messages and metrics; None: its own name.
        batched: True if it takes lists; None: determined by inspection.
        deadline_s: Time limit of the asynchronous calls of one batch, in seconds.
        max_concurrency: Number of asynchronous calls that run at the same time.

    Raises:
        RewardSignatureError: Its parameters cannot be filled.
    """

    def __init__(
        self,
        fn: RewardFn,
        name: str | None = None,
        *,
        batched: bool | None = None,
        deadline_s: float = 600.0,
        max_concurrency: int = 64,
    ) -> None:
        self.fn = fn
        self.name = name or fn_name(fn)
        self.signature: RewardSignature = inspect_reward_fn(fn, batched=batched)
        self._deadline_s = deadline_s
        self._max_concurrency = max_concurrency

    @property
    def batched(self) -> bool:
        """True if the function takes lists."""
        return self.signature.batched

    @property
    def needs_messages(self) -> bool:
        """True if it may need messages instead of texts."""
        return self.signature.needs_messages

    @property
    def taken(self) -> frozenset[str]:
        """Columns of the data set that it receives as prompt and response."""
        names = {"response"} if self.signature.uses("response") else set()
        return frozenset(names if self.signature.needs_messages else names | {"prompt"})

    def __call__(self, rows: RewardRows) -> list[Score]:
        """Score a batch; one score per row.

        Raises:
            RewardError: A column is missing, the function raised, or it returned an
                invalid reward; the message names the function and the row.
        """
        if not len(rows):
            return []
        self._check_columns(rows)
        signature = self.signature
        if rows.has_message_prompts:
            signature = signature.for_messages()
        if signature.batched:
            return self._score_batch(rows, signature)
        return self._score_rows(rows)

    # Arguments ------------------------------------------------------------------

    def _check_columns(self, rows: RewardRows) -> None:
        for row, columns in enumerate(rows.columns):
            for name in self.signature.required_columns:
                if name not in columns:
                    raise RewardError(
                        f"reward function {self.name!r} asks for the column {name!r}, "
                        f"which {rows.describe(row)} lacks; its columns are "
                        f"{sorted(columns)}. {_remedy(name)}"
                    )

    def _batch_columns(self, rows: RewardRows) -> dict[str, list[Any]]:
        names: dict[str, None] = dict.fromkeys(self.signature.required_columns)
        # A dict, not a set: it keeps the order of columns, and so that of arguments.
        present: dict[str, None] = {}
        for columns in rows.columns:
            present.update(dict.fromkeys(columns))
        if self.signature.all_columns:
            names.update(present)
        names.update((n, None) for n in self.signature.optional_columns if n in present)
        return {name: [columns.get(name) for columns in rows.columns] for name in names}

    # Calls ----------------------------------------------------------------------

    def _score_rows(self, rows: RewardRows) -> list[Score]:
        # Messages are empty unless a function asks for them.
        roles = {role: column for role, column in rows.by_role().items() if len(column)}
        results = [self._call_row(rows, roles, row) for row in range(len(rows))]
        # The type check first: nearly all results are floats, and inspection is slow.
        if any(
            type(result) is not float and inspect.isawaitable(result)
            for result in results
        ):
            results = self._run_async(self._gather(results, rows))
        return [self._row_score(raw, rows, row) for row, raw in enumerate(results)]

    def _call_row(
        self, rows: RewardRows, roles: Mapping[str, Sequence[Any]], row: int
    ) -> Any:
        values = {role: column[row] for role, column in roles.items()}
        places, named = self.signature.bind(values, rows.columns[row])
        try:
            return self.fn(*places, **named)
        except RewardError:
            raise
        except Exception as error:
            raise self._raised(error, rows.describe(row)) from error

    def _score_batch(self, rows: RewardRows, signature: RewardSignature) -> list[Score]:
        # Copies: a function may sort or change the lists that it gets.
        values = {role: list(column) for role, column in rows.by_role().items()}
        places, named = signature.bind(values, self._batch_columns(rows))
        what = f"a batch of {len(rows)}"
        try:
            raw = self.fn(*places, **named)
        except RewardError:
            raise
        except Exception as error:
            raise self._raised(error, what) from error
        if inspect.isawaitable(raw):
            raw = self._run_async(self._await_one(raw, what))
        return self._batch_scores(raw, rows)

    def _raised(self, error: BaseException, what: str) -> RewardCallError:
        return RewardCallError(
            f"reward function {self.name!r} raised {type(error).__name__}: {error} for "
            f"{what}{_where(error)}. Handle whatever a model may write, and return "
            "None for a row that cannot be scored"
        )

    async def _await_one(self, awaitable: Awaitable[Any], what: str) -> Any:
        try:
            return await awaitable
        except RewardError:
            raise
        except Exception as error:
            raise self._raised(error, what) from error

    async def _gather(self, results: list[Any], rows: RewardRows) -> list[Any]:
        slots = asyncio.Semaphore(self._max_concurrency)

        async def finish(row: int, result: Any) -> Any:
            if not inspect.isawaitable(result):
                return result
            async with slots:
                return await self._await_one(result, rows.describe(row))

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(finish(row, result))
                    for row, result in enumerate(results)
                ]
        except BaseExceptionGroup as group_error:
            # The first error cancels the rest; users expect it, not a group.
            raise group_error.exceptions[0] from None
        finally:
            for result in results:
                # A coroutine that was never awaited would warn on garbage collection.
                if inspect.iscoroutine(result):
                    result.close()
        return [task.result() for task in tasks]

    def _run_async(self, work: Awaitable[Any]) -> Any:
        async def bounded() -> Any:
            try:
                async with asyncio.timeout(self._deadline_s) as bound:
                    return await work
            except TimeoutError as error:
                # The function itself may raise TimeoutError.
                if not bound.expired():
                    raise
                raise RewardCallError(
                    f"reward function {self.name!r} did not finish within "
                    f"{self._deadline_s:g} s; give its requests a time limit, or raise "
                    "deadline_s"
                ) from error

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(bounded())
        # The caller runs in an event loop, such as a notebook's, and a thread cannot
        # have two. A daemon, since a function that blocks its loop cannot be stopped.
        outcome: list[Any] = []

        def run() -> None:
            try:
                outcome.extend((True, asyncio.run(bounded())))
            except BaseException as error:
                # Passed to the caller's thread, which raises it.
                outcome.extend((False, error))

        thread = threading.Thread(target=run, name=f"reward-{self.name}", daemon=True)
        thread.start()
        # Longer than the timeout inside, which has the better message.
        thread.join(self._deadline_s + 10.0)
        if not outcome:
            raise RewardCallError(
                f"reward function {self.name!r} blocked its event loop for more than "
                f"{self._deadline_s:g} s; await its requests instead of blocking"
            )
        if not outcome[0]:
            raise outcome[1]
        return outcome[1]

    # Results --------------------------------------------------------------------

    def _row_score(self, raw: Any, rows: RewardRows, row: int) -> Score:
        if raw is None or (type(raw) is float and math.isfinite(raw)):
            return raw
        if isinstance(raw, Mapping):
            if not raw:
                raise RewardValueError(
                    f"reward function {self.name!r} returned an empty mapping for "
                    f"{rows.describe(row)}; return None for a row without a score"
                )
            return {
                # Added again when columns are named, whether the function wrote it or
                # not.
                str(key).removeprefix("reward/"): None
                if value is None
                else self._number(value, rows, row, key)
                for key, value in raw.items()
            }
        return self._number(raw, rows, row)

    def _number(self, raw: Any, rows: RewardRows, row: int, key: Any = None) -> float:
        part = "" if key is None else f" as {key!r}"
        # numpy and torch scalars, without importing either.
        value = raw
        if not isinstance(raw, (bool, int, float)) and hasattr(raw, "tolist"):
            value = raw.tolist()
            # A tensor of one element, whatever its shape, is a number as well.
            while isinstance(value, list) and len(value) == 1:
                value = value[0]
        if not isinstance(value, (bool, int, float)):
            remedy = (
                "it takes one row at a time: return one number"
                if isinstance(value, (list, tuple))
                else "return a number, a bool, a mapping of numbers, or None"
            )
            raise RewardValueError(
                f"reward function {self.name!r} returned {type(raw).__name__} "
                f"{short(str(raw))}{part} for {rows.describe(row)}; {remedy}"
            )
        try:
            number = float(value)
        except OverflowError:
            # An int of arbitrary size.
            number = math.inf
        if not math.isfinite(number):
            raise RewardValueError(
                f"reward function {self.name!r} returned {number}{part} for "
                f"{rows.describe(row)}; return a finite number, or None for a row that "
                "cannot be scored"
            )
        return number

    def _batch_scores(self, raw: Any, rows: RewardRows) -> list[Score]:
        if isinstance(raw, Mapping):
            columns = {
                name: self._check_length(values, rows, f" as {name!r}")
                for name, values in raw.items()
            }
            raw = [
                {name: values[row] for name, values in columns.items()}
                for row in range(len(rows))
            ]
        values = self._check_length(raw, rows, "")
        return [self._row_score(value, rows, row) for row, value in enumerate(values)]

    def _check_length(self, raw: Any, rows: RewardRows, part: str) -> Sequence[Any]:
        if hasattr(raw, "tolist"):
            raw = raw.tolist()
        if not isinstance(raw, Sequence) or isinstance(raw, (str, bytes)):
            raise RewardValueError(
                f"reward function {self.name!r} takes a batch and must return a list "
                f"of {len(rows)} rewards: got {type(raw).__name__}{part}"
            )
        if len(raw) != len(rows):
            raise RewardValueError(
                f"reward function {self.name!r} must return one reward per response: "
                f"got {len(raw)}{part} for {len(rows)} responses"
            )
        return raw
