"""The pinned list and the lock agree, including two versions of one package."""

import hashlib
import tomllib
from pathlib import Path

import pytest
from tools import wheelhouse

ROOT = Path(__file__).parents[1]


def test_every_locked_wheel_is_pinned_and_nothing_else():
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    locked = {
        (package["name"], package["version"])
        for package in packages
        if "registry" in package["source"]
    }
    pins = wheelhouse.read_pins(wheelhouse.PINS.read_text())
    assert {(pin.name, pin.version) for pin in pins} == locked
    assert len(pins) == len(locked)
    # The isolated bridges need older versions than the rest.
    assert len(locked) > len({name for name, _ in locked})


def _wheel(folder, name, version, content=b"wheel"):
    path = folder / f"{name}-{version}-py3-none-any.whl"
    path.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def test_two_versions_and_built_wheels_are_kept_and_others_removed(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(wheelhouse, "WHEELHOUSE", tmp_path)
    digest = _wheel(tmp_path, "some_thing", "1.0")
    _wheel(tmp_path, "some_thing", "2.0")
    _wheel(tmp_path, "some_thing", "3.0")
    _wheel(tmp_path, "built", "1.0", b"built here")
    text = "\n".join(
        [
            f"some-thing==1.0 --hash=sha256:{digest}",
            f"some-thing==2.0 --hash=sha256:{digest}",
            f"built==1.0 --hash=sha256:{'0' * 64}{wheelhouse.SOURCE}",
        ]
    )
    wheelhouse.remove_unpinned(wheelhouse.read_pins(text))
    assert sorted(path.name.split("-py3")[0] for path in tmp_path.iterdir()) == [
        "built-1.0",
        "some_thing-1.0",
        "some_thing-2.0",
    ]
    damaged = text.replace(digest, "1" * 64, 1)
    with pytest.raises(SystemExit, match=r"some-thing==1\.0 is missing or damaged"):
        wheelhouse.remove_unpinned(wheelhouse.read_pins(damaged))
    assert not (tmp_path / "some_thing-1.0-py3-none-any.whl").exists()


def test_a_package_in_two_versions_takes_two_calls_of_pip(monkeypatch):
    calls = []
    monkeypatch.setattr(
        wheelhouse, "call_pip", lambda command, lines, options: calls.append(lines) or 1
    )
    assert wheelhouse.download(["a==1", "a==2", "b==1"])
    assert calls == [["a==1", "b==1"], ["a==2"]]
    assert wheelhouse.download([])
    assert len(calls) == 2
