"""Multiple-choice letters in other languages and scripts."""

from __future__ import annotations

import tomllib
import unicodedata
from pathlib import Path

import pytest

from rl_envs import create_env
from rl_envs.worlds.math import choices
from rl_envs.worlds.math.choices import (
    canonical_choice,
    find_choice,
    find_english_choice,
)

DATA = tomllib.loads(
    Path(choices.__file__).with_name("choices.toml").read_text("utf-8")
)
WORDS = [(lang, word) for lang, words in DATA["words"].items() for word in words]
LETTERS = [pair for script in DATA["letters"].values() for pair in script.items()]


@pytest.mark.parametrize(("language", "word"), WORDS)
def test_each_word_is_known(language: str, word: str) -> None:
    for text in (
        f"... D ... {word}: B",
        f"{word.upper()} - **B**.",
        f"{word} $\\boxed{{\\text{{B}}}}$",
        f"{word}: A\n{word}: (B)",
        # Full-width and circled.
        f"{word}\N{FULLWIDTH COLON}\N{FULLWIDTH LATIN CAPITAL LETTER B}",
        f"{word} \N{CIRCLED LATIN CAPITAL LETTER B}",
        # Letters with accents of their own.
        unicodedata.normalize("NFD", f"{word}: B"),
    ):
        assert find_choice(text) == "B", (language, text)


@pytest.mark.parametrize(("letter", "latin"), LETTERS)
def test_letters_of_other_scripts(letter: str, latin: str) -> None:
    for text in (f"Answer: {letter}", f"\\boxed{{{letter}}}", f"Answer ({letter})."):
        assert find_choice(text) == latin
    assert canonical_choice(f" ({letter})") == latin
    # Within a word it is not one.
    assert find_choice(f"Answer: {letter}{letter}") is None


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("La respuesta correcta es la C.", "C"),
        ("Die Antwort ist D, weil E = mc2.", "D"),
        ("Die richtige Antwort: Berlin", None),
        ("a resposta \N{LATIN SMALL LETTER E WITH ACUTE} a J", "J"),
        ("B", None),
        ("answer:\nB", None),
        ("answer: b", None),
    ],
)
def test_a_letter_stands_by_itself(text: str, letter: str | None) -> None:
    assert find_choice(text) == letter


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is: B", "B"),
        ("The answer is A. No, the answer is: (B).", "B"),
        ("**Answer**: B", "B"),
        ("**Answer:** B", "B"),
        ("Answer: \\textbf{B}", "B"),
        ("So \\boxed{\\textbf{(B)}}", "B"),
        ("So \\boxed{ \\mathrm{B} }", "B"),
        ("The answer isn't clear", None),
        ("The answer is Berlin", None),
    ],
)
def test_ways_to_write_an_english_answer(text: str, letter: str | None) -> None:
    assert find_english_choice(text) == letter
    if "boxed" in text:
        assert find_choice(text) == letter


def test_answers_are_compared_across_scripts() -> None:
    environment = create_env("math", {"verifier_type": "multilingual_multichoice"})
    arabic = {latin: letter for letter, latin in DATA["letters"]["Arabic"].items()}
    word = DATA["words"]["Arabic"][0]
    answers = [f"{word}: {arabic['B']}", "Answer: B", "Answer: C", "?"]
    logs = [
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
        for answer in answers
    ]
    for solution in ("B", "(B)", arabic["B"]):
        result = environment.step(logs, [{"ground_truth": solution}] * len(logs))
        assert result.answers == ["B", "B", "C", None]
        assert result.rewards.tolist() == [1.0, 1.0, 0.0, 0.0]  # type: ignore[union-attr]
