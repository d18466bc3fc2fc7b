"""The world `length`: what is counted, and what is mere filler."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from rl_distributed.errors import ConfigError
from rl_envs.errors import MessageLogError, TaskError
from rl_envs.interfaces import total_reward
from rl_envs.registry import env_registry, task_registry
from rl_envs.testing import assert_passed, examine_environment, examine_tasks
from rl_envs.worlds.length import LengthConfig, LengthEnvironment, LengthTasks

PROMPT = "Write two to four words."


def said_of(observation: Any) -> str:
    return str(observation["content"])


def judge(
    response: str, row: Any = None, prompt: str = PROMPT, **config: Any
) -> tuple[float, str]:
    log = [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": response},
    ]
    columns = {"min_length": 2, "max_length": 4} if row is None else row
    found = LengthEnvironment(LengthConfig(**config)).step([log], [columns])
    return float(total_reward(found.rewards)[0]), said_of(found.observations[0])


@given(
    unit=st.sampled_from(["words", "characters", "sentences"]),
    length=st.integers(1, 30),
    slack=st.integers(0, 5),
    num_words=st.integers(1, 12),
    style=st.sampled_from(["compact", "words"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_every_gold_answer_is_right(
    unit: str, length: int, slack: int, num_words: int, style: str, seed: int
) -> None:
    tasks = LengthTasks(
        unit,
        max_length=length + 5,
        min_length=length,
        slack=slack,
        num_words=num_words,
        style=style,
        seed=seed,
    )
    for row in tasks.train(3, unique=False):
        assert judge(row["answer"], row, row["prompt"]) == (1.0, "correct")
        more = row["answer"] + (f" {row['words'][0]}." * (slack + 1))
        assert judge(more, row, row["prompt"])[0] == 0.0
        assert row["max_length"] - row["min_length"] == slack
        if style == "compact":
            assert set(row["prompt"] + row["answer"]) <= set(tasks.alphabet)


@pytest.mark.parametrize(
    "source",
    [{}, {"unit": "characters", "slack": 3}, {"unit": "sentences", "style": "compact"}],
    ids=["words", "characters", "sentences"],
)
def test_right_and_wrong_answers(source: dict[str, Any]) -> None:
    def make(seed: int) -> LengthTasks:
        return LengthTasks(**source, seed=seed)

    assert_passed(examine_tasks(make, 24))
    assert_passed(examine_environment("length", make(0).train(24)))


@pytest.mark.parametrize(
    ("unit", "text", "length"),
    [
        ("words", "one, two - three!", 3),
        ("words", "don't stop", 2),
        ("words", "a\u200b b\n\n  c", 3),
        ("words", ". . . a", 1),
        ("characters", " ab   cd\n", 5),
        ("characters", "a\u200b\u200bb\u200e", 2),
        ("characters", "h\u00e9llo", 5),
        ("sentences", "One. Two! Three? Four", 4),
        ("sentences", "It is 3.5 m. Really...", 2),
        ("sentences", '"Stop!" he said. ...', 2),
        ("sentences", "\u4f60\u597d\u3002 \u4f60\u597d\u3002", 2),
    ],
)
def test_what_is_counted(unit: str, text: str, length: int) -> None:
    def row(low: int, high: int) -> dict[str, Any]:
        return {"length_unit": unit, "min_length": low, "max_length": high}

    assert judge(text, row(length, length)) == (1.0, "correct")
    assert judge(text, row(length + 1, length + 9))[1] == (
        f"incorrect: {length} {unit}, not {length + 1} to {length + 9}"
    )


def test_one_bound_is_enough() -> None:
    assert judge("a b c", {"min_length": 3})[0] == 1.0
    assert judge("a b", {"min_length": 3}) == (
        0.0,
        "incorrect: 2 words, not at least 3",
    )
    assert judge("a b c", {"max_length": 2, "min_length": None})[0] == 0.0
    assert judge("", {"max_length": 2}) == (0.0, "incorrect: it has no words")
    assert judge("a", {}, min_length=1, max_length=1)[0] == 1.0
    assert judge("x <answer>a b</answer>", {"max_length": 2})[0] == 1.0


def test_what_fills_a_text_does_not_count() -> None:
    row = {"min_length": 1}
    for filler in ("\u200b \u200b \u200b", "- - - -", "...", " \n\t "):
        assert judge(filler, row) == (0.0, "incorrect: it has no words")
    said = "incorrect: it repeats the prompt"
    assert judge(PROMPT, row) == (0.0, said)
    assert judge(f"You say: {PROMPT.upper()} Well.", row) == (0.0, said)
    assert judge("Hi there", row, prompt="Hi")[0] == 1.0
    assert judge("very very very good", row, min_distinct=0.6)[0] == 0.0
    assert judge("very very good", row, min_distinct=0.6)[0] == 1.0
    only = {"min_length": 1, "words": ["Oak", "elm"]}
    assert judge("oak, ELM. elm", only)[0] == 1.0
    for other in ("oak ash", "oak-elm", "oak # elm", "o\u0430k"):
        assert "none of the words" in judge(other, only)[1]


def test_graded_credit_falls_with_the_distance() -> None:
    def graded(length: int) -> float:
        row = {"min_length": 10, "max_length": 20}
        text = " ".join(map(str, range(length)))
        return judge(text, row, credit="graded")[0]

    assert graded(10) == graded(20) == 1.0
    assert graded(5) == pytest.approx(0.45)
    assert graded(9) == pytest.approx(0.81)
    assert graded(30) == pytest.approx(0.45)
    assert graded(40) == graded(400) == 0.0


def test_tokens_are_those_of_a_tokenizer(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    row = {"length_unit": "tokens", "min_length": 3, "max_length": 3}
    assert judge("abz", row, tokenizer=str(tmp_path))[0] == 1.0
    assert judge("ab", row, tokenizer=str(tmp_path))[0] == 0.0
    env = LengthEnvironment(LengthConfig(tokenizer=str(tmp_path / "tokenizer.json")))
    log = [{"role": "assistant", "content": "aba"}]
    copy = pickle.loads(pickle.dumps(env))
    assert float(copy.step([log], [row]).rewards[0]) == 1.0
    with pytest.raises(MessageLogError, match=r"words, characters, sentences.*set tok"):
        judge("ab", row)
    with pytest.raises(ConfigError, match="tokenizer must be set"):
        LengthEnvironment(LengthConfig(unit="tokens"))
    with pytest.raises(ConfigError, match="cannot be read"):
        LengthEnvironment(LengthConfig(tokenizer=str(tmp_path / "none")))


def test_wrong_settings_and_rows_are_named() -> None:
    for wrong, message in (
        ({"unit": "tokens"}, "unit must be one of words"),
        ({"min_length": 5, "max_length": 4}, "in order: got 5 and 4"),
        ({"slack": -1}, "must not be negative"),
        ({"num_words": 13}, "num_words must be 1 to 12"),
        ({"style": "long"}, "'compact' or 'words'"),
    ):
        with pytest.raises(TaskError, match=message):
            LengthTasks(**wrong)
    rows: list[Any] = [
        {"min_length": 1},
        {},
        {"min_length": 3, "max_length": 2},
        {"max_length": 0},
        {"min_length": "3"},
        {"min_length": True},
        {"min_length": 1, "words": []},
        {"min_length": 1, "length_unit": "pages"},
        None,
    ]
    assert list(LengthEnvironment().unusable_rows(rows)) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_it_is_registered() -> None:
    assert env_registry.get("length") is LengthEnvironment
    assert task_registry.get("length") is LengthTasks
