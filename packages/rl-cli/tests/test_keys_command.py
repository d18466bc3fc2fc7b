"""`rl keys`: creating, listing and revoking keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_cli.main import _run
from rl_distributed.access.access_key import split_key
from rl_distributed.access.key_file import KeyFile


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeyFile:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("RL_KEYS_FILE", raising=False)
    return KeyFile(tmp_path / "rl" / "keys.json")


def test_a_key_from_its_making_to_its_end(
    file: KeyFile, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(["keys", "list"], False) == 0
    assert capsys.readouterr().out == "no keys yet; rl keys create makes one\n"
    made = ["--name", "alice", "--role", "viewer", "--expires", "30d"]
    assert _run(["keys", "create", *made, "--rate", "60/min"], False) == 0
    out, err = capsys.readouterr()
    parts = split_key(out.strip())
    assert parts is not None
    assert "the only time that the key is shown" in err
    stored = file.find(parts[0])
    assert stored is not None
    assert stored.fits(parts[1])
    assert (stored.role, stored.rate) == ("viewer", "60/min")
    assert _run(["keys", "list"], False) == 0
    listed = capsys.readouterr().out
    for word in (parts[0], "alice", "viewer", "valid", "in 30 d", "60/min"):
        assert word in listed
    assert parts[1] not in listed
    assert _run(["keys", "list", "--json"], False) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert shown == stored.public()
    assert _run(["keys", "revoke", "alice"], False) == 0
    assert "revoked: " in capsys.readouterr().out
    assert [key.state() for key in file.read()] == ["revoked"]


def test_another_file(
    file: KeyFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "team.json"
    made = ["--name", "a", "--role", "user", "--file", str(other), "--json"]
    assert _run(["keys", "create", *made], False) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["expires"] is None
    assert [key.id for key in KeyFile(other).read()] == [found["id"]]
    assert not file.path.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["create", "--name", "a"], "Missing option '--role'"),
        (["create", "--role", "user"], "Missing option '--name'"),
        (["create", "--name", "a", "--role", "king"], "viewer"),
        (["create", "--name", "a/b", "--role", "user"], "the name of a key"),
        (["create", "--name", "a", "--role", "user", "--expires", "soon"], "30d"),
        (["create", "--name", "a", "--role", "user", "--rate", "5"], "NUMBER/UNIT"),
        (["revoke", "nobody"], "there is no key 'nobody'"),
        (["list", "--file", "x", "--url", "http://127.0.0.1:1"], "not both"),
    ],
)
def test_wrong_input(
    file: KeyFile,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert _run(["keys", *arguments], False) == 2
    assert message in capsys.readouterr().err
    assert not file.path.exists()
