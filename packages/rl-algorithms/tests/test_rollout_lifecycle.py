"""Environments with state per conversation: `reset` and `close`."""

from __future__ import annotations

import importlib.util
import itertools
import threading
from pathlib import Path

import pytest

from rl_algorithms.data.collate import rl_collate_fn
from rl_algorithms.data.prompts import process_prompts
from rl_algorithms.errors import RolloutError
from rl_algorithms.rollout import RolloutConfig, RolloutEngine
from rl_algorithms.trainers.ahead.scoring import for_several_threads
from rl_distributed.errors import WorkerDiedError
from rl_envs.interfaces import EnvironmentInterface, EnvironmentReturn

_spec = importlib.util.spec_from_file_location(
    "scripted_rollouts", Path(__file__).with_name("scripted_rollouts.py")
)
scripted = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(scripted)
EOS = scripted.EOS


@pytest.fixture(scope="module")
def tokenizer():
    return scripted.ambiguous_tokenizer()


class Keeping(EnvironmentInterface):
    """Opens a resource per conversation, and ends after `until` turns."""

    def __init__(self, *, fail_step=(), fail_reset=()):
        self.open, self.closed, self.seeds = {}, [], []
        self.fail_step, self.fail_reset = set(fail_step), set(fail_reset)
        self.numbers = itertools.count()
        self.lock = threading.Lock()

    def reset(self, metadata, seeds):
        if self.fail_reset & {row["name"] for row in metadata}:
            raise OSError("no room")
        with self.lock:
            begun = []
            for row, seed in zip(metadata, seeds, strict=True):
                number = next(self.numbers)
                self.open[number] = 0
                self.seeds.append((row["name"], seed))
                begun.append({**row, "number": number})
            return begun

    def step(self, message_log_batch, metadata):
        if self.fail_step & {row["name"] for row in metadata}:
            raise OSError("broken")
        with self.lock:
            for row in metadata:
                self.open[row["number"]] += 1
            turns = [self.open[row["number"]] for row in metadata]
        return EnvironmentReturn(
            observations=[{"role": "user", "content": "b"}] * len(turns),
            metadata=list(metadata),
            next_stop_strings=[None] * len(turns),
            rewards=[1.0] * len(turns),
            terminateds=[
                turn >= row["until"] for turn, row in zip(turns, metadata, strict=True)
            ],
            answers=None,
        )

    def close(self, metadata):
        with self.lock:
            for row in metadata:
                self.open.pop(row.get("number"), None)
                self.closed.append(row["name"])


def run(tokenizer, environment, rows, *, copies=2, step=0, sample=None, **settings):
    sample = sample or (lambda call, row, seed: [3, EOS])
    generator = scripted.TokenGenerator(sample)
    config = RolloutConfig(
        **{"max_turns": 3, "on_environment_error": "drop"} | settings
    )
    engine = RolloutEngine(generator, environment, tokenizer, config)
    prompts = process_prompts([{"prompt": "a", **row} for row in rows], tokenizer)
    batch = rl_collate_fn(prompts[:], pad_token_id=tokenizer.pad_token_id)
    return engine.run(batch, num_generations=copies, seed=5, step=step)


ROWS = [{"name": "short", "until": 1}, {"name": "long", "until": 9}]


def test_each_conversation_begins_and_ends_once(tokenizer):
    environment = Keeping()
    result = run(tokenizer, environment, ROWS)
    assert not environment.open
    # Short ones as soon as they end, long ones at the turn limit.
    assert environment.closed == ["short", "short", "long", "long"]
    assert result.rows["num_turns"].tolist() == [1, 1, 3, 3]
    seeds = dict(environment.seeds)
    assert environment.seeds == [
        (name, seeds[name]) for name in ("short", "short", "long", "long")
    ]
    assert seeds["short"] != seeds["long"]
    again, later = Keeping(), Keeping()
    run(tokenizer, again, ROWS)
    run(tokenizer, later, ROWS, step=1)
    assert again.seeds == environment.seeds
    assert not {seed for _, seed in later.seeds} & {seed for _, seed in again.seeds}


def test_a_failed_step_begins_nothing_twice_and_leaves_nothing(tokenizer):
    environment = Keeping(fail_step={"short"})
    result = run(tokenizer, environment, ROWS)
    assert [each.value for each in result.rows["ending"]] == [
        *["error"] * 2,
        *["out_of_turns"] * 2,
    ]
    assert len(environment.seeds) == 4
    assert not environment.open


def test_a_failed_reset_fails_its_own_rows(tokenizer):
    environment = Keeping(fail_reset={"short"})
    result = run(tokenizer, environment, ROWS)
    assert [each.value for each in result.rows["ending"]] == [
        *["error"] * 2,
        *["out_of_turns"] * 2,
    ]
    assert not environment.open
    # It is told as well: it may hold part of what it could not finish.
    assert environment.closed.count("short") == 2


def test_a_lost_generator_and_a_task_limit_close_too(tokenizer):
    def sample(call, row, seed):
        if call == 1:
            raise WorkerDiedError("gone")
        return [3, EOS]

    environment = Keeping()
    with pytest.raises(RolloutError, match="4 infrastructure error"):
        run(tokenizer, environment, [ROWS[1]] * 2, sample=sample)
    assert not environment.open
    limited = {**ROWS[1], "task_limits": {"turns": 2}}
    run(tokenizer, environment, [limited])
    assert not environment.open


def test_a_rollout_that_ends_early_closes_what_it_has_begun(tokenizer):
    def sample(call, row, seed):
        if call == 1:
            raise ValueError("a bug of the generator")
        return [3, EOS]

    environment = Keeping()
    with pytest.raises(ValueError, match="a bug"):
        run(tokenizer, environment, ROWS, sample=sample)
    assert sorted(environment.closed) == ["long", "long", "short", "short"]
    assert not environment.open


def test_what_is_left_of_an_iteration_is_closed(tokenizer):
    environment = Keeping()
    generator = scripted.TokenGenerator(lambda call, row, seed: [3, EOS])
    engine = RolloutEngine(
        generator, environment, tokenizer, RolloutConfig(max_turns=3)
    )
    prompts = process_prompts([{"prompt": "a", **row} for row in ROWS], tokenizer)
    batch = rl_collate_fn(prompts[:], pad_token_id=tokenizer.pad_token_id)
    parts = engine.run_iter(batch)
    assert next(parts).rows.size == 1
    assert environment.open
    parts.close()
    assert not environment.open
    assert sorted(environment.closed) == ["long", "short"]


def test_a_wrong_reset_is_named_and_a_broken_close_is_logged(tokenizer, caplog):
    class Short(Keeping):
        def reset(self, metadata, seeds):
            return super().reset(metadata, seeds)[1:]

    class Broken(Keeping):
        def close(self, metadata):
            raise OSError("cannot close")

    with pytest.raises(RolloutError, match=r"Short\.reset was given 4 rows and"):
        run(tokenizer, Short(), ROWS, on_environment_error="raise")
    with caplog.at_level("WARNING"):
        result = run(tokenizer, Broken(), ROWS)
    assert "did not close 2 conversations: OSError: cannot close" in caplog.text
    assert result.rows["rewards"].tolist() == [1.0, 1.0, 3.0, 3.0]


def test_a_class_with_methods_of_these_names_goes_on_working(tokenizer):
    class Older(scripted.Judge):
        """Releases a file as environments did before conversations could be closed."""

        def close(self):
            raise AssertionError("nobody asked for it")

        def reset(self):
            raise AssertionError("nobody asked for it")

    environment = Older(lambda log, info: (1.0, True, ""))
    for used in (environment, for_several_threads(environment)):
        result = run(tokenizer, used, ROWS)
        assert result.rows["rewards"].tolist() == [1.0] * 4


def test_a_lock_around_an_environment_passes_both_on(tokenizer):
    environment = Keeping()
    run(tokenizer, for_several_threads(environment), ROWS)
    assert len(environment.seeds) == 4
    assert not environment.open
