"""Keys with roles: what is stored of them, and when they are valid."""

from __future__ import annotations

import json
import os
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from rl_distributed.access.access_key import AccessKey, parse_lifetime, split_key
from rl_distributed.access.key_file import KeyFile, default_key_file
from rl_distributed.access.rate_limit import RateLimit, TokenBucket
from rl_distributed.access.replay import ReplayGuard
from rl_distributed.access.roles import ROLES
from rl_distributed.errors import ConfigError, SecurityError
from rl_distributed.security.audit import disable_audit, enable_audit
from rl_distributed.security.audit_chain import verify_audit_log


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "private" / "keys.json")


def test_each_role_has_what_the_one_before_it_has() -> None:
    assert {role: sorted(found) for role, found in ROLES.items()} == {
        "viewer": ["view"],
        "user": ["infer", "view"],
        "operator": ["infer", "operate", "view"],
        "admin": ["infer", "keys", "operate", "view"],
    }


def test_a_key_is_not_stored_and_is_recognized(file: KeyFile) -> None:
    stored, key = file.create("alice", "user", lifetime=timedelta(days=30))
    text = file.path.read_text()
    parts = split_key(key)
    assert parts is not None
    identity, secret = parts
    assert len(secret) == 43  # 256 bits
    assert secret not in text
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert file.path.parent.stat().st_mode & 0o777 == 0o700
    found = file.find(identity)
    assert found == stored
    assert found.fits(secret)
    assert not found.fits(secret[:-1] + ("A" if secret[-1] != "A" else "B"))
    assert not found.fits("")
    assert "digest" not in found.public()
    assert "salt" not in found.public()


def test_equal_secrets_have_different_digests() -> None:
    digests = {AccessKey.generate("a", "user")[0].salt for _ in range(20)}
    assert len(digests) == 20


def test_the_states_of_a_key(file: KeyFile) -> None:
    stored, _ = file.create("a", "viewer", lifetime=timedelta(hours=1))
    now = datetime.now(UTC)
    assert stored.state(now) == "valid"
    assert stored.state(now + timedelta(hours=1, seconds=1)) == "expired"
    assert file.revoke("a").state(now) == "revoked"
    found = file.find(stored.id)
    assert found is not None
    assert found.state(now) == "revoked"
    with pytest.raises(ConfigError, match="revoked already"):
        file.revoke(stored.id)
    with pytest.raises(ConfigError, match="no key 'b'"):
        file.revoke("b")
    # The name is available again.
    assert file.create("a", "viewer")[0].id != stored.id


def test_what_another_process_changes_counts_from_then_on(file: KeyFile) -> None:
    other = KeyFile(file.path)
    stored, _ = other.create("a", "user")
    assert file.find(stored.id) == stored
    other.revoke("a")
    found = file.find(stored.id)
    assert found is not None
    assert found.state() == "revoked"
    file.path.unlink()
    assert file.find(stored.id) is None


def test_two_valid_keys_have_two_names(file: KeyFile) -> None:
    file.create("a", "user")
    with pytest.raises(ConfigError, match="a valid key named 'a' already"):
        file.create("a", "viewer")
    assert [key.name for key in file.read()] == ["a"]


def test_keys_made_at_the_same_time_are_all_kept(file: KeyFile) -> None:
    names = [f"k{number}" for number in range(8)]
    threads = [
        threading.Thread(target=KeyFile(file.path).create, args=(name, "user"))
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(key.name for key in file.read()) == names


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.chmod(0o640), "chmod 600"),
        (lambda path: path.write_text("{"), "is not a file of keys"),
        (lambda path: path.write_text("[]"), "is not a file of keys"),
        (lambda path: path.write_text('{"format": "rl-keys-9"}'), "rl-keys-1"),
        (lambda path: path.write_bytes(b"[" * 100_000), "is not a file of keys"),
        (lambda path: _edit(path, role="root"), "role must be one of"),
        (lambda path: _edit(path, digest="xx"), "damaged"),
        (lambda path: _edit(path, expires="2000-01-01"), "a time without its zone"),
        (lambda path: _edit(path, rate="9"), "NUMBER/UNIT"),
        (lambda path: _edit(path, extra=1), "unexpected keyword"),
    ],
)
def test_a_file_that_is_unsafe_or_damaged_admits_nobody(
    file: KeyFile, spoil: object, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    stored, _ = file.create("a", "admin")
    assert file.find(stored.id) is not None
    assert callable(spoil)
    spoil(file.path)
    assert file.find(stored.id) is None
    assert file.find(stored.id) is None
    with pytest.raises(SecurityError, match=message):
        file.check()
    with pytest.raises(SecurityError, match=message):
        file.create("b", "user")


def _edit(path: Path, **values: object) -> None:
    content = json.loads(path.read_text())
    content["keys"][0] |= values
    path.write_text(json.dumps(content))


def test_a_missing_file_says_how_to_make_it(file: KeyFile) -> None:
    assert file.read() == []
    with pytest.raises(SecurityError, match="rl keys create"):
        file.check()


def test_where_the_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RL_KEYS_FILE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert default_key_file() == tmp_path / "rl" / "keys.json"
    monkeypatch.setenv("RL_KEYS_FILE", "elsewhere.json")
    assert default_key_file() == Path("elsewhere.json")


@pytest.mark.parametrize("name", ["", " a", "a\nb", "x" * 65, "a/b", "ä", 5])
def test_names_are_plain(file: KeyFile, name: object) -> None:
    with pytest.raises(ConfigError, match="the name of a key"):
        file.create(name, "user")  # type: ignore[arg-type]
    assert not file.path.exists()


@pytest.mark.parametrize(
    ("text", "hours"), [("30d", 720.0), ("12h", 12.0), ("90min", 1.5)]
)
def test_lifetimes(text: str, hours: float) -> None:
    assert parse_lifetime(text) == timedelta(hours=hours)


@pytest.mark.parametrize("text", ["", "0d", "-1d", "30", "1y", "1.5h", "30 d", "9" * 9])
def test_wrong_lifetimes(text: str) -> None:
    with pytest.raises(ConfigError, match="a lifetime must be like 30d"):
        parse_lifetime(text)


@pytest.mark.parametrize("text", ["", "60", "0/min", "60/", "60/week", "-1/s", "1e3/s"])
def test_wrong_rates(text: str) -> None:
    with pytest.raises(ConfigError, match="NUMBER/UNIT"):
        RateLimit.parse(text)


def test_a_rate_admits_a_burst_and_then_one_by_one() -> None:
    now = 100.0
    bucket = TokenBucket(RateLimit.parse("60/min"), lambda: now)
    assert [bucket.take() for _ in range(60)] == [0.0] * 60
    assert bucket.take() == pytest.approx(1.0)
    now += 1.0
    assert bucket.take() == 0.0
    assert bucket.take() == pytest.approx(1.0)
    now += 3_600.0  # at most one burst is saved up
    assert [bucket.take() for _ in range(60)] == [0.0] * 60
    assert bucket.take() > 0.0


def nonce(number: int) -> str:
    return f"{number:032x}"


def test_a_request_has_its_effect_once() -> None:
    now = 1_000.0
    guard = ReplayGuard(now_s=lambda: now)
    assert guard.problem("k", nonce(1), "1000.0") is None
    found = guard.problem("k", nonce(1), "1000.0")
    assert found is not None
    assert found[0] == "replayed"
    # Another key may use the same number; the same key needs another one.
    assert guard.problem("l", nonce(1), "1000.0") is None
    assert guard.problem("k", nonce(2), "1000.0") is None
    now += 59.0
    found = guard.problem("k", nonce(1), "1000.0")
    assert found is not None
    assert found[0] == "replayed"
    now += 2.0
    found = guard.problem("k", nonce(1), "1000.0")
    assert found is not None
    assert found[0] == "too_old"


def test_a_number_is_kept_as_long_as_its_request_is_in_time() -> None:
    now = 1_000.0
    guard = ReplayGuard(now_s=lambda: now)
    # From a clock that is ahead by almost the window.
    assert guard.problem("k", nonce(1), "1059.0") is None
    for _ in range(118):
        now += 1.0
        found = guard.problem("k", nonce(1), "1059.0")
        assert found is not None
        assert found[0] == "replayed"


@pytest.mark.parametrize(
    ("sent", "number", "reason"),
    [
        ("2000", nonce(1), "too_old"),
        ("900", nonce(1), "too_old"),
        ("998.5", nonce(1), "too_old"),  # before the listener existed
        ("", nonce(1), "nonce_missing"),
        ("nan", nonce(1), "nonce_missing"),
        ("inf", nonce(1), "nonce_missing"),
        ("-1000", nonce(1), "nonce_missing"),
        ("1" * 400, nonce(1), "nonce_missing"),
        ("1000", "", "nonce_missing"),
        ("1000", "x" * 32, "nonce_missing"),
        ("1000", "a" * 33, "nonce_missing"),
    ],
)
def test_requests_without_a_good_time_and_number(
    sent: str, number: str, reason: str
) -> None:
    found = ReplayGuard(now_s=lambda: 1_000.0).problem("k", number, sent)
    assert found is not None
    assert found[0] == reason


def test_what_is_noted_of_requests_is_bounded() -> None:
    now = 1_000.0
    guard = ReplayGuard(now_s=lambda: now, most=100)
    found = [guard.problem("k", nonce(n), "1000.0") for n in range(101)]
    assert found[:100] == [None] * 100
    assert found[100] is not None
    assert found[100][0] == "too_many"
    now += 121.0
    assert guard.problem("k", nonce(200), str(now)) is None
    assert len(guard._used) == 1


def test_making_and_revoking_is_in_the_audit_log(file: KeyFile, tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    enable_audit(log)
    try:
        stored, key = file.create("a", "operator")
        file.revoke("a", by="the admin")
    finally:
        disable_audit()
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(e["action"], e["object"]) for e in entries] == [
        ("keys.create", stored.id),
        ("keys.revoke", stored.id),
    ]
    assert entries[0]["role"] == "operator"
    assert entries[1]["by"] == "the admin"
    # The secret itself may have underscores.
    _, _, secret = key.split("_", 2)
    assert secret not in log.read_text()
    verify_audit_log(log, min_entries=2)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_admits_nobody(file: KeyFile) -> None:
    stored, _ = file.create("a", "admin")
    os.chown(file.path, 65_534, 65_534)
    assert file.find(stored.id) is None
    with pytest.raises(SecurityError, match="belongs to another user"):
        file.check()
