from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import ray
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID
from rl_distributed_scripts import run_script

import rl_distributed
from rl_distributed.cluster.config import ClusterConfig
from rl_distributed.cluster.start import init_ray
from rl_distributed.errors import ConfigError, SecurityError, UserError
from rl_distributed.security import certificates, ray_access as security
from rl_distributed.security.ray_access import (
    adopt_token_authentication,
    check_certificates,
    check_token_settings,
    create_certificates,
    forget_adopted_mode,
    own_hosts,
    tls_in_use,
    variables_undone_on_failure,
)
from rl_distributed.security.tls_files import TlsFiles


@pytest.fixture
def files(tmp_path):
    return create_certificates(tmp_path / "tls", hosts=["node-7", "10.1.2.3"])


def loaded(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_certificates_are_good_for_this_machine_and_the_named_hosts(files):
    check_certificates(files, hosts=[*own_hosts(), "node-7", "10.1.2.3"])
    own, authority = loaded(files.certificate), loaded(files.authority)
    own.verify_directly_issued_by(authority)
    uses = own.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(uses) == {
        ExtendedKeyUsageOID.SERVER_AUTH,
        ExtendedKeyUsageOID.CLIENT_AUTH,
    }
    assert {"localhost", "127.0.0.1", "::1"} <= set(own_hosts())
    assert own.not_valid_after_utc - datetime.now(UTC) < timedelta(days=31)


def test_files_are_the_owners_only_and_the_authority_is_forgotten(files):
    folder = files.key.parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(path.name for path in folder.iterdir()) == [
        "ca.crt",
        "node.crt",
        "node.key",
    ]
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_one_authority_signs_for_several_machines(tmp_path):
    create_certificates(tmp_path / "authority", keep_authority_key=True)
    nodes = [
        create_certificates(tmp_path / name, authority=tmp_path / "authority")
        for name in ("a", "b")
    ]
    for node in nodes:
        check_certificates(node, hosts=["127.0.0.1"])
        assert not (node.key.parent / "ca.key").exists()
    assert nodes[0].authority.read_bytes() == nodes[1].authority.read_bytes()
    assert nodes[0].key.read_bytes() != nodes[1].key.read_bytes()
    with pytest.raises(SecurityError, match=r"ca\.key cannot be read"):
        create_certificates(tmp_path / "c", authority=tmp_path / "a")


def test_making_them_again_replaces_them(files):
    before = files.key.read_bytes()
    again = create_certificates(files.key.parent)
    assert again == TlsFiles.in_folder(files.key.parent)
    assert again.key.read_bytes() != before
    check_certificates(again)


def problem(files, *, hosts=(), days=0.0):
    return certificates.certificate_problem(
        files.certificate,
        files.key,
        files.authority,
        list(hosts),
        datetime.now(UTC) + timedelta(days=days),
    )


def test_time_is_checked(files):
    assert problem(files) == ""
    assert f"{files.certificate} expired on" in problem(files, days=31)
    assert "is not valid before" in problem(files, days=-1)


def test_hosts_are_checked(files):
    found = problem(files, hosts=["127.0.0.1", "10.9.9.9"])
    assert f"{files.certificate} is not for 10.9.9.9: its subject" in found


def test_keys_and_authorities_must_belong(files, tmp_path):
    other = create_certificates(tmp_path / "other")
    with pytest.raises(SecurityError, match=f"{other.key} does not belong to"):
        check_certificates(files.replace(key=other.key))
    with pytest.raises(SecurityError, match=f"not signed by {other.authority}"):
        check_certificates(files.replace(authority=other.authority))


def test_files_that_are_none_are_named(files, tmp_path):
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    for name, words in (
        ("certificate", "holds no certificate in PEM form"),
        ("authority", "holds no certificate in PEM form"),
        ("key", "holds no private key in PEM form"),
    ):
        with pytest.raises(SecurityError, match=f"{text} {words}"):
            check_certificates(files.replace(**{name: text}))
        with pytest.raises(SecurityError, match=r"missing\.pem cannot be read"):
            check_certificates(files.replace(**{name: tmp_path / "missing.pem"}))


def signed(folder, monkeypatch, *, uses):
    """Return certificates with another extended key usage."""
    monkeypatch.setattr(certificates, "_USES", uses)
    made = create_certificates(folder)
    monkeypatch.undo()
    return made


def test_a_certificate_for_servers_only_is_refused(tmp_path, monkeypatch):
    made = signed(tmp_path, monkeypatch, uses=(ExtendedKeyUsageOID.SERVER_AUTH,))
    with pytest.raises(SecurityError, match="serverAuth and clientAuth"):
        check_certificates(made)


def test_certificates_between_are_followed(tmp_path):
    valid = timedelta(days=1)
    root, middle = (certificates.create_authority(valid) for _ in range(2))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "middle")])
    signed_middle = (
        certificates._builder(
            name, root.certificate.subject, middle.key.public_key(), valid
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(root.key, certificates.hashes.SHA256())
    )
    between = certificates.Authority(signed_middle, middle.key)
    own, key = certificates.issue_certificate(between, ["localhost"], valid)
    made = TlsFiles.in_folder(tmp_path)
    made.authority.write_bytes(root.certificate_pem())
    certificates.write_private(made.key, key)
    made.certificate.write_bytes(own)
    with pytest.raises(SecurityError, match="is not signed by"):
        check_certificates(made)
    made.certificate.write_bytes(own + between.certificate_pem())
    check_certificates(made, hosts=["localhost"])


def test_a_key_that_others_can_read_is_told(files, caplog):
    files.key.chmod(0o644)
    with caplog.at_level(logging.WARNING, logger=security.__name__):
        check_certificates(files)
    assert "can be read by others: chmod 600" in caplog.text


def test_a_key_with_a_password_is_refused(files):
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    files.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"word"),
        )
    )
    with pytest.raises(SecurityError, match="without a password"):
        check_certificates(files)


def test_what_the_variables_say(files):
    assert tls_in_use({}) is None
    assert tls_in_use({"RAY_USE_TLS": "0"}) is None
    assert tls_in_use(files.environment()) == files
    variables = files.environment()
    del variables["RAY_TLS_CA_CERT"]
    with pytest.raises(SecurityError, match="but RAY_TLS_CA_CERT is not set"):
        tls_in_use(variables)


def test_the_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rl_distributed.security.certificates", None)
    room = sys.modules[certificates.__package__]
    monkeypatch.delattr(room, "certificates", raising=False)
    with pytest.raises(SecurityError, match=r"pip install 'rl-distributed\[tls\]'"):
        create_certificates(tmp_path)


@pytest.mark.parametrize("days", [0, -1])
def test_a_wrong_time_is_refused(tmp_path, days):
    with pytest.raises(SecurityError, match="valid_days must be positive"):
        create_certificates(tmp_path, valid_days=days)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SecurityError, match="certificates cannot be written to"):
        create_certificates(tmp_path / "file")


def test_ray_that_is_up_cannot_change_to_tls(ray_cluster, files):
    with pytest.raises(SecurityError, match="Ray is up without TLS"):
        init_ray(tls=files)
    with pytest.raises(SecurityError, match="Ray is up without TLS"):
        init_ray(tls=True)


def test_joining_needs_given_files(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(SecurityError, match="makes certificates for a new cluster"):
        init_ray(address="127.0.0.1:1", tls=True)


def test_a_failed_attempt_leaves_tls_as_it_was(monkeypatch, files):
    refreshed = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(security, "refresh_ray_variables", lambda: refreshed.append(1))
    before = {k: v for k, v in os.environ.items() if "TLS" in k}
    with pytest.raises(UserError, match="nothing answers"):
        init_ray(address="127.0.0.1:1", tls=files, deadline_s=5)
    assert {k: v for k, v in os.environ.items() if "TLS" in k} == before
    # Once to enable it, once to disable it.
    assert refreshed[-2:] == [1, 1]


def test_an_old_ray_that_cannot_read_again_is_told(monkeypatch):
    monkeypatch.setattr(security, "_raylet", object())
    with pytest.raises(SecurityError, match="in the environment before Python starts"):
        security.refresh_ray_variables()


def test_authentication_that_is_off_is_told(monkeypatch, caplog):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with caplog.at_level(logging.WARNING, logger=security.__name__):
        check_token_settings()
    assert "whoever reaches the cluster's ports can run code" in caplog.text


@pytest.fixture
def open_mode(monkeypatch):
    """Set no mode, but provide a token; nothing reaches Ray."""
    monkeypatch.setenv("RAY_AUTH_MODE", "")
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setattr(security, "refresh_ray_variables", lambda: None)
    monkeypatch.setattr(security, "has_token", lambda: True)


@pytest.mark.usefixtures("open_mode")
def test_both_sides_do_the_same_about_tokens(monkeypatch, caplog):
    with caplog.at_level(logging.WARNING, logger=security.__name__):
        adopt_token_authentication(False, "h:1")
    assert "RAY_AUTH_MODE" not in os.environ
    assert "'h:1' runs without token authentication: whoever" in caplog.text
    for demands in (True, None):
        adopt_token_authentication(demands, "h:1")
        assert os.environ.pop("RAY_AUTH_MODE") == "token"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    adopt_token_authentication(True, "h:1")
    assert os.environ["RAY_AUTH_MODE"] == "disabled"
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(SecurityError, match="has RAY_AUTH_MODE=token: start"):
        adopt_token_authentication(False, "h:1")


@pytest.mark.usefixtures("open_mode")
def test_the_mode_of_a_cluster_is_not_that_of_the_next(monkeypatch):
    def fail() -> None:
        with variables_undone_on_failure():
            os.environ["RAY_AUTH_MODE"] = "token"
            raise UserError("refused")

    with pytest.raises(UserError):
        fail()
    assert "RAY_AUTH_MODE" not in os.environ
    with variables_undone_on_failure():
        os.environ["RAY_AUTH_MODE"] = "token"
    forget_adopted_mode()
    assert "RAY_AUTH_MODE" not in os.environ
    # The user's settings are kept.
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with variables_undone_on_failure():
        pass
    forget_adopted_mode()
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_tls_is_one_key_of_the_configuration(files):
    assert ClusterConfig().tls is False
    assert ClusterConfig.from_dict({"tls": True}).tls is True
    names = {name: str(getattr(files, name)) for name in type(files).model_fields}
    config = ClusterConfig.from_dict({"tls": names})
    assert config.tls == files
    assert ClusterConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ConfigError, match="certificat"):
        ClusterConfig.from_dict({"tls": {**names, "certificat": "x"}})


@pytest.mark.slow
def test_two_nodes_and_their_workers_under_tls(tmp_path):
    found = run_script("tls_nodes.py", str(tmp_path / "tls"))
    assert found["in_use"]
    assert not found["plain"], "the head answers without TLS"
    assert found["nodes"] == 2
    assert found["answers"] == [2, 2]
    assert found["worker_tls"] == [{"RAY_USE_TLS": "1"}] * 2


@pytest.mark.slow
def test_tls_by_one_option(tmp_path):
    log = tmp_path / "audit.jsonl"
    found = run_script(
        "tls_one_option.py",
        TMPDIR=str(tmp_path),
        RL_AUDIT_LOG=str(log),
        RL_NVLINK_DOMAIN="rack-1",
    )
    assert found["answer"] == 42
    assert found["token"] == "token"
    assert not found["plain"], "the head answers without TLS"
    # The key is deleted with the program.
    assert list(tmp_path.glob("rl-tls-*")) == []
    assert found["domain"] == "rack-1"
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(e["action"], e["object"]) for e in entries] == [
        ("cluster.start", "local"),
        ("cluster.stop", "local"),
    ]


PICKLE = (
    "pickle.load",
    "torch.load(",
    "allow_pickle=True",
    "joblib.load",
    "dill.load",
    "shelve.",
    "read_pickle",
    "yaml.load(",
    "yaml.unsafe_load",
)


def test_nothing_reads_pickle_from_a_file():
    """Only bytes that Ray passes between processes are unpickled, never files."""
    source = Path(rl_distributed.__file__).parent
    found = []
    for path in sorted(source.rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            code = line.replace("pickle.loads(", "")
            safe = "weights_only=True" in line
            if any(word in code for word in PICKLE) and not safe:
                found.append(f"{path.relative_to(source)}:{number}: {line.strip()}")
    assert found == []


def test_a_script_is_needed_for_no_import():
    """`security` imports without `cryptography`."""
    code = (
        "import sys; sys.modules['cryptography'] = None; "
        "import rl_distributed.security.ray_access"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},
    )
    assert done.returncode == 0, done.stderr
