from __future__ import annotations

import pytest

from rl_distributed.redaction import (
    hide_values,
    is_secret_name,
    named_secrets,
    redacted,
    secret_values,
)


@pytest.mark.parametrize(
    "name",
    [
        "token",
        "RAY_AUTH_TOKEN",
        "WANDB_API_KEY",
        "apiKey",
        "db-password",
        "secret_key",
        "api_key_2",
        "TOKEN1",
        "PGPASSWORD",
        "clientSecret",
    ],
)
def test_names_of_secrets(name):
    assert is_secret_name(name)
    assert redacted({"a": [{name: "value"}]}) == {"a": [{name: "***"}]}


@pytest.mark.parametrize(
    "name",
    [
        "num_tokens",
        "RAY_AUTH_TOKEN_PATH",
        "token_ids",
        "keys",
        "key",
        "mode",
        "monkey",
        "tokenizer",
        "eos_token",
        "sort_key",
        "PWD",
        "",
        "_1",
    ],
)
def test_other_names(name):
    assert not is_secret_name(name)
    assert redacted({name: "value"}) == {name: "value"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgres://u:hunter2@host/db", "postgres://u:***@host/db"),
        ("Authorization: Bearer abcdef123456", "Authorization: Bearer ***"),
        ("RAY_AUTH_TOKEN=abc tail", "RAY_AUTH_TOKEN=*** tail"),
        ('{"api_key": "abc"}', '{"api_key": "***"}'),
        ("the token is missing; num_tokens=5", "the token is missing; num_tokens=5"),
        ("ms_per_token=0.25 token: -1e-3", "ms_per_token=0.25 token: -1e-3"),
        ("token=123abc", "token=***"),
        (
            "-----BEGIN EC PRIVATE KEY-----\nabc\n-----END EC PRIVATE KEY-----\nrest",
            "***\nrest",
        ),
    ],
)
def test_texts(text, shown):
    assert redacted(text) == shown


def test_deep_nesting_ends():
    value: dict[str, object] = {}
    value["self"] = value
    assert "***" in repr(redacted(value))


def test_values_of_the_environment(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "correct horse")
    monkeypatch.setenv("OTHER_TOKEN", "ab")
    assert "correct horse" in secret_values()
    assert hide_values("a correct horse about") == "a *** about"
    assert hide_values("one two", ["one"]) == "*** two"
    # A secret that contains another is redacted as a whole.
    monkeypatch.setenv("LONG_TOKEN", "correct horse battery")
    assert hide_values("a correct horse battery") == "a ***"


@pytest.mark.parametrize("part", ["0a", "a.", "_-", "token", "a://b:", "token= "])
def test_long_texts_take_linear_time(part):
    # Backtracking would take minutes.
    redacted(part * 100_000)


def test_secrets_of_data_are_found_by_their_names():
    data = {
        "lr": "much",
        "env": [{"api_key": "long"}, {"password": "abc"}],
        "logger.api_key": "hunter22",
        "token": {"secret": "deeper"},
    }
    assert named_secrets(data) == ("hunter22", "deeper", "long")
    assert named_secrets(["hunter22"]) == ()
