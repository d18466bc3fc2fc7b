from __future__ import annotations

import fcntl
import getpass
import json
import os
import pickle
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import ray
from rl_distributed_scripts import SCRIPTS, clean_environment

from rl_distributed.checkpoint import CheckpointingConfig, CheckpointManager
from rl_distributed.cluster.start import init_ray
from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import (
    AuditError,
    ConfigError,
    DistributedError,
    LockHeldError,
    ResourceInsufficientError,
    UserError,
)
from rl_distributed.logs.logging import log_context
from rl_distributed.security import audit as audit_module
from rl_distributed.security.audit import (
    AuditLog,
    audit,
    audit_path,
    audited,
    disable_audit,
    enable_audit,
)
from rl_distributed.security.audit_chain import (
    create_audit_key,
    digest_of,
    verify_audit_log,
)
from rl_distributed.workers import RayWorkerBuilder, RayWorkerGroup


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "logs" / "audit.jsonl"
    enable_audit(file)
    yield file
    disable_audit()


def entries(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_entry_says_who_did_what_and_how_it_ended(path):
    with log_context(step=3):
        audit("checkpoint.saved", "step_3", size_bytes=10)
    (entry,) = entries(path)
    assert list(entry)[:7] == [
        "time",
        "user",
        "host",
        "pid",
        "action",
        "object",
        "outcome",
    ]
    assert entry["user"] == getpass.getuser()
    assert (entry["host"], entry["pid"]) == (socket.gethostname(), os.getpid())
    assert (entry["action"], entry["object"]) == ("checkpoint.saved", "step_3")
    assert (entry["outcome"], entry["size_bytes"], entry["step"]) == ("ok", 10, 3)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_secrets_are_hidden(path):
    audit(
        "cluster.attach",
        "redis://u:hunter2@host",
        api_key="abc",
        nested=[{"token": "t"}],
    )
    assert "hunter2" not in path.read_text()
    (entry,) = entries(path)
    assert entry["api_key"] == "***"
    assert entry["nested"] == [{"token": "***"}]


def test_a_block_is_noted_with_its_end(path):
    with audited("cluster.place", "c"):
        pass
    with pytest.raises(ValueError, match="broke"), audited("cluster.place", "c"):
        raise ValueError("it broke")
    good, bad = entries(path)
    assert (good["outcome"], bad["outcome"]) == ("ok", "failed")
    assert bad["error"] == "ValueError: it broke"


def test_a_line_break_stays_inside_its_entry(path):
    audit("a", "one\ntwo")
    assert entries(path)[0]["object"] == "one\ntwo"
    assert verify_audit_log(path).num_entries == 1


def test_a_name_that_is_not_utf_8_is_noted(path):
    folder = os.fsdecode(b"/data/mod\xe8le")
    audit("checkpoint.deleted", folder)
    (line,) = path.read_bytes().splitlines()
    assert json.loads(line)["object"] == folder
    assert verify_audit_log(path).num_entries == 1


def test_off_by_default_and_by_call(tmp_path, monkeypatch):
    monkeypatch.delenv("RL_AUDIT_LOG", raising=False)
    monkeypatch.setattr(audit_module, "_is_decided", False)
    monkeypatch.setattr(audit_module, "_log", None)
    audit("nothing")
    # Already decided: the environment is not read again.
    monkeypatch.setenv("RL_AUDIT_LOG", str(tmp_path / "late.jsonl"))
    audit("nothing")
    assert list(tmp_path.iterdir()) == []


def write(path, count):
    return subprocess.Popen(
        [sys.executable, str(SCRIPTS / "write_audit.py"), str(count)],
        env=clean_environment(RL_AUDIT_LOG=str(path)),
        stderr=subprocess.PIPE,
        text=True,
    )


def test_programs_that_write_at_the_same_time_keep_the_chain(path):
    programs = [write(path, 60) for _ in range(5)]
    for program in programs:
        _, err = program.communicate(timeout=120)
        assert program.returncode == 0, err
        assert err == ""
    assert verify_audit_log(path).num_entries == 300
    assert len({entry["pid"] for entry in entries(path)}) == 5


def test_threads_keep_the_chain(path):
    threads = [
        threading.Thread(target=lambda: [audit("a", str(n)) for n in range(25)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert verify_audit_log(path).num_entries == 100


def test_a_killed_writer_leaves_a_log_that_goes_on(path):
    program = write(path, 100_000)
    try:
        wait_for_lines(path, 20)
    finally:
        program.send_signal(signal.SIGKILL)
        program.communicate(timeout=60)
    audit("after")
    assert verify_audit_log(path).num_entries >= 21
    assert entries(path)[-1]["action"] == "after"


def wait_for_lines(path, count):
    pause = threading.Event()
    for _ in range(6_000):
        if path.read_bytes().count(b"\n") >= count:
            return
        pause.wait(0.01)
    raise AssertionError("the program wrote too little")


@pytest.fixture
def ten(path):
    for number in range(10):
        audit("test", str(number))
    return path


def rewrite(path, change):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(change(lines)))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda lines: lines[1:], 1),
        (lambda lines: lines[:4] + lines[5:], 5),
        (lambda lines: [*lines[:3], lines[3].replace(b'"3"', b'"9"'), *lines[4:]], 5),
        (lambda lines: [lines[1], lines[0], *lines[2:]], 1),
        (lambda lines: [*lines[:2], lines[1], *lines[2:]], 3),
        (lambda lines: [*lines[:2], b"{}\n", *lines[2:]], 3),
        (lambda lines: [*lines, b'{"previous"'], 11),
    ],
)
def test_every_change_shows_with_its_line(ten, change, line):
    rewrite(ten, change)
    with pytest.raises(AuditError, match=rf"line {line}\b") as error:
        verify_audit_log(ten)
    assert error.value.line == line
    assert str(error.value).endswith(f"line {line} {error.value.reason}")


def test_the_first_of_several_is_named(ten):
    rewrite(ten, lambda lines: [*lines[:2], *lines[3:], b'{"previous"'])
    with pytest.raises(AuditError, match="line 3 does not follow"):
        verify_audit_log(ten)


def test_a_line_that_breaks_its_reader_shows(ten):
    rewrite(ten, lambda lines: [*lines[:2], b"[" * 100_000 + b"\n", *lines[2:]])
    with pytest.raises(AuditError, match="line 3 is no entry with a chain"):
        verify_audit_log(ten)


def test_a_summary_has_the_times(ten, tmp_path):
    times = [entry["time"] for entry in entries(ten)]
    summary = verify_audit_log(ten)
    assert (summary.first_time, summary.last_time) == (times[0], times[-1])
    (tmp_path / "empty").write_text("")
    summary = verify_audit_log(tmp_path / "empty")
    assert (summary.num_entries, summary.first_time, summary.last_time) == (
        0,
        None,
        None,
    )


def test_the_log_that_is_written_to_is_known(path):
    assert audit_path() == path.resolve()
    disable_audit()
    assert audit_path() is None


def test_lines_taken_from_the_end_show_by_the_last_digest(ten):
    summary = verify_audit_log(ten)
    assert summary.num_entries == 10
    audit("later")
    assert verify_audit_log(ten, last_digest=summary.last_digest).num_entries == 11
    rewrite(ten, lambda lines: lines[:8])
    assert verify_audit_log(ten).num_entries == 8
    with pytest.raises(AuditError, match="lines were taken from the end"):
        verify_audit_log(ten, last_digest=summary.last_digest)


# --- with a key ---------------------------------------------------------------------


@pytest.fixture
def key(tmp_path):
    return create_audit_key(tmp_path / "keys" / "audit.key")


@pytest.fixture
def signed(tmp_path, key):
    file = tmp_path / "signed.jsonl"
    enable_audit(file, key_file=key)
    for number in range(10):
        audit("test", str(number), code=number)
    yield file
    disable_audit()


def chained_again(lines):
    """Rewrite a log as someone who knows the chain but not the key."""
    made, previous = [], None
    for line in lines:
        entry = json.loads(line)
        entry["previous"] = digest_of(previous)
        previous = json.dumps(entry, ensure_ascii=False).encode()
        made.append(previous + b"\n")
    return made


FORGERIES = {
    "last line": lambda lines: [*lines[:-1], lines[-1].replace(b'"9"', b'"7"')],
    "chain": lambda lines: chained_again([*lines[:4], *lines[5:]]),
    "no code": lambda lines: [
        *lines[:-1],
        lines[-1].partition(b', "hmac"')[0] + b"}\n",
    ],
    "added": lambda lines: [*lines, *chained_again([*lines, lines[0]])[-1:]],
}


@pytest.mark.parametrize("change", FORGERIES.values(), ids=FORGERIES)
def test_a_forgery_shows_by_the_key(signed, key, change):
    assert verify_audit_log(signed, key_file=key).is_authentic
    rewrite(signed, change)
    with pytest.raises(AuditError, match=r"line (10|11|4|5|1) was"):
        verify_audit_log(signed, key_file=key)


def test_without_the_key_only_the_chain_is_checked(signed):
    summary = verify_audit_log(signed)
    assert (summary.num_entries, summary.is_authentic) == (10, False)
    rewrite(signed, FORGERIES["last line"])
    assert verify_audit_log(signed).num_entries == 10


@pytest.mark.parametrize("kept", [0, 8])
def test_an_emptied_file_shows_by_the_least_length(signed, key, kept):
    assert verify_audit_log(signed, key_file=key, min_entries=10).num_entries == 10
    rewrite(signed, lambda lines: lines[:kept])
    assert verify_audit_log(signed, key_file=key).num_entries == kept
    with pytest.raises(AuditError, match=f"has {kept} entries, and there were at leas"):
        verify_audit_log(signed, key_file=key, min_entries=10)


def test_another_key_signs_nothing(signed, tmp_path):
    other = create_audit_key(tmp_path / "other.key")
    with pytest.raises(AuditError, match=r"line 1 was changed, or was written with an"):
        verify_audit_log(signed, key_file=other)


def test_lines_of_before_the_key_show(ten, key):
    enable_audit(ten, key_file=key)
    audit("test", "with the key")
    assert verify_audit_log(ten).num_entries == 11
    with pytest.raises(AuditError, match="line 1 was written without the key"):
        verify_audit_log(ten, key_file=key)


def test_keys(tmp_path, key, caplog):
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    with pytest.raises(AuditError, match="is there already"):
        create_audit_key(key)
    (tmp_path / "short").write_text("abc\n")
    with pytest.raises(AuditError, match="holds 3 bytes, and at least 16 are needed"):
        AuditLog(tmp_path / "log", key_file=tmp_path / "short")
    with pytest.raises(AuditError, match=r"none cannot be read: .* create_audit_key"):
        AuditLog(tmp_path / "log", key_file=tmp_path / "none")
    with pytest.raises(ConfigError, match="key_file needs the chain"):
        AuditLog(tmp_path / "log", key_file=key, chain=False)
    key.chmod(0o644)
    AuditLog(tmp_path / "log", key_file=key)
    assert "can be read by others: chmod 600" in caplog.text


def test_programs_find_the_key_by_its_variable(path, key):
    program = subprocess.run(
        [sys.executable, str(SCRIPTS / "write_audit.py"), "3"],
        env=clean_environment(RL_AUDIT_LOG=str(path), RL_AUDIT_KEY_FILE=str(key)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert program.returncode == 0, program.stderr
    summary = verify_audit_log(path, key_file=key, min_entries=3)
    assert (summary.num_entries, summary.is_authentic) == (3, True)


def test_a_torn_line_stays_and_the_log_goes_on(ten):
    with ten.open("ab") as file:
        file.write(b'{"time": "20')
    audit("after")
    lines = ten.read_bytes().splitlines()
    assert lines[-2] == b'{"time": "20'
    assert json.loads(lines[-1])["action"] == "after"
    with pytest.raises(AuditError, match="line 11 is no entry"):
        verify_audit_log(ten)


def test_long_lines_are_chained(path):
    audit("long", "x" * 200_000)
    audit("next")
    assert verify_audit_log(path).num_entries == 2


def test_without_a_chain(tmp_path):
    file = tmp_path / "audit.jsonl"
    log = AuditLog(file, chain=False, sync=True)
    log.append({"a": 1})
    assert entries(file) == [{"a": 1}]
    with pytest.raises(AuditError, match="no entry with a chain"):
        verify_audit_log(file)


def test_a_log_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AuditError, match="choose another path in enable_audit"):
        enable_audit(tmp_path / "file" / "audit.jsonl")
    with pytest.raises(AuditError, match="cannot be read"):
        verify_audit_log(tmp_path / "none.jsonl")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(AuditError, match="cannot be written"):
        AuditLog(tmp_path).append({})
    error = AuditError("x")
    assert str(pickle.loads(pickle.dumps(error))) == "x"


def test_the_wait_for_another_writer_ends_and_the_action_goes_on(tmp_path, caplog):
    file = tmp_path / "audit.jsonl"
    enable_audit(file, deadline_s=0.05)
    try:
        with file.open("rb") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            with pytest.raises(LockHeldError, match="held by another process"):
                AuditLog(file, deadline_s=0.05).append({})
            audit("cluster.place", "c")
    finally:
        disable_audit()
    assert "cluster.place is missing from the audit log" in caplog.text
    assert file.read_bytes() == b""


def test_actions_of_a_cluster_are_noted(ray_cluster, path):
    with RayVirtualCluster([1], name="mine", use_gpus=False) as cluster:
        cluster.slots()
    with (
        RayVirtualCluster([99], name="large", use_gpus=False) as large,
        pytest.raises(ResourceInsufficientError),
    ):
        large.slots()
    seen = [(e["action"], e["object"], e["outcome"]) for e in entries(path)]
    assert seen == [
        ("cluster.place", "mine", "ok"),
        ("cluster.release", "mine", "ok"),
        ("cluster.place", "large", "failed"),
    ]
    assert "needs 99 CPUs" in entries(path)[-1]["error"]


def test_actions_of_workers_are_noted(ray_cluster, path):
    builder = RayWorkerBuilder("rl_distributed_sample_places.Place")
    missing = RayWorkerBuilder("rl_distributed_sample_places.Nowhere")
    with RayVirtualCluster([1], use_gpus=False) as cluster:
        with RayWorkerGroup(cluster, builder, name_prefix="adders"):
            pass
        with pytest.raises(DistributedError):
            RayWorkerGroup(cluster, missing, name_prefix="others")
    seen = {(e["action"], e["object"]): e for e in entries(path)}
    assert seen["group.up", "adders"]["num_workers"] == 1
    end = seen["group.shutdown", "adders"]
    assert (end["outcome"], end["clean"], end["gone"]) == ("ok", True, True)
    assert seen["group.up", "others"]["outcome"] == "failed"
    assert verify_audit_log(path).num_entries == len(entries(path))


def test_actions_of_checkpoints_are_noted(path, tmp_path):
    config = CheckpointingConfig(checkpoint_dir=str(tmp_path / "kept"), keep_top_k=2)
    manager = CheckpointManager(config)
    for step in (1, 2, 3):
        with manager.writing(step, {"step": step}) as folder:
            (folder / "policy" / "weights").mkdir(parents=True)
            (folder / "policy" / "weights" / "w").write_text(str(step))
    newest = manager.get_latest_checkpoint_path()
    assert newest is not None
    manager.get_resume_paths(newest)
    (newest / "policy" / "weights" / "w").write_text("9")
    CheckpointManager(config).get_latest_checkpoint_path()
    seen = [(e["action"], Path(e["object"]).name, e["outcome"]) for e in entries(path)]
    assert seen == [
        ("checkpoint.saved", "step_1", "ok"),
        ("checkpoint.saved", "step_2", "ok"),
        ("checkpoint.saved", "step_3", "ok"),
        ("checkpoint.deleted", "step_1", "ok"),
        ("checkpoint.restored", "step_3", "ok"),
        ("checkpoint.refused", "", "refused"),
    ]
    assert "step_3" in entries(path)[-1]["damage"]


def test_a_refused_attachment_is_noted(path, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(UserError):
        init_ray(address="127.0.0.1:1", deadline_s=2)
    (entry,) = entries(path)
    assert (entry["action"], entry["object"]) == ("cluster.attach", "127.0.0.1:1")
    assert entry["outcome"] == "failed"
