from __future__ import annotations

import importlib
import importlib.util
import pickle
import subprocess
import sys
import threading
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from rl_distributed.errors import RegistryError
from rl_distributed.registrations import Registration
from rl_distributed.registry import Registry


@pytest.fixture
def registry() -> Registry[object]:
    return Registry("rl.test_group", "color")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package on the path with entry points, as installed by pip."""
    (tmp_path / "paintbox.py").write_text("class Red: pass\n")
    (tmp_path / "needs_more.py").write_text("import not_there_at_all\n")
    info = tmp_path / "paintbox-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: paintbox\nVersion: 1.0\n"
        "Provides-Extra: gold\nRequires-Dist: not-there-at-all ; extra == 'gold'\n"
    )
    (info / "entry_points.txt").write_text(
        "[rl.test_group]\nred = paintbox:Red\ngold = needs_more:Gold\n"
        "pale = paintbox:Pale\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("paintbox", "needs_more"):
        sys.modules.pop(name, None)


def test_a_registered_class_is_found(registry: Registry[object]) -> None:
    @registry.register("red")
    class Red:
        pass

    assert registry.get("red") is Red
    assert registry.names() == ["red"]
    assert "red" in registry
    assert "blue" not in registry


def test_an_entry_point_is_imported_when_asked_for(
    registry: Registry[object], installed: Path
) -> None:
    assert registry.names() == ["gold", "pale", "red"]
    assert "paintbox" not in sys.modules
    assert registry.get("red") is sys.modules["paintbox"].Red
    assert registry.get("red") is registry.get("red")


def test_entry_points_are_told_without_an_import(
    registry: Registry[object], installed: Path
) -> None:
    (point,) = registry.entry_points("red")
    assert (point.value, point.dist and point.dist.name) == ("paintbox:Red", "paintbox")
    assert registry.entry_points("blue") == ()
    assert "paintbox" not in sys.modules


def test_a_missing_extra_says_what_to_install(
    registry: Registry[object], installed: Path
) -> None:
    with pytest.raises(RegistryError, match=r'pip install "paintbox\[gold\]"'):
        registry.get("gold")
    with pytest.raises(RegistryError, match="paintbox:Pale does not exist"):
        registry.get("pale")


def test_code_wins_over_an_entry_point(
    registry: Registry[object], installed: Path
) -> None:
    registry.register("red")(int)
    assert registry.get("red") is int


def test_an_unknown_name_gives_the_nearest(registry: Registry[object]) -> None:
    registry.register("crimson")(int)
    with pytest.raises(
        RegistryError, match=r"unknown color 'crimsn'; did you mean 'crimson'.*known: c"
    ):
        registry.get("crimsn")


def test_a_name_is_taken_once(registry: Registry[object]) -> None:
    registry.register("red")(int)
    registry.register("red")(int)
    with pytest.raises(RegistryError, match=r"registered already, as builtins\.int"):
        registry.register("red")(str)
    registry.register("red", replace=True)(str)
    assert registry.get("red") is str


def test_two_packages_with_one_name_are_named(
    registry: Registry[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    points = [EntryPoint("red", value, "rl.test_group") for value in ("a:Red", "b:Red")]
    monkeypatch.setattr("rl_distributed.registry.entry_points", lambda group: points)
    with pytest.raises(RegistryError, match="provided more than once: a:Red"):
        registry.get("red")


def test_the_decorator_needs_a_name(registry: Registry[object]) -> None:
    with pytest.raises(RegistryError, match="non-empty string"):
        registry.register(int)  # type: ignore[arg-type]


_RUN_THERE = """
import pickle, sys
from rl_distributed.registry import Registry
registry = Registry("rl.test_group", "color")
registry.adopt(pickle.loads(sys.stdin.buffer.read()))
assert registry.names() == ["red"] and "red" in registry, registry.names()
registry.check("red")
print(registry.get("red")().shade())
"""


def _shade_in_another_process(
    registrations: tuple[Registration, ...], folder: Path
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", _RUN_THERE],
        input=pickle.dumps(registrations),
        capture_output=True,
        cwd=folder,
        timeout=120,
        check=False,
    )


def test_what_is_registered_in_a_program_reaches_another_process(
    registry: Registry[object], tmp_path: Path
) -> None:
    base = 3

    @registry.register("red")
    class Red:
        def shade(self) -> int:
            return base + 1

    (sent,) = registry.registrations("red")
    assert sent.pickled is not None
    done = _shade_in_another_process((sent,), tmp_path)
    assert done.stdout.strip() == b"4", done.stderr.decode()


def test_a_class_of_an_importable_module_goes_by_its_path(
    registry: Registry[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tube_of_red.py").write_text(
        "class Red:\n    def shade(self):\n        return 7\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.register("red")(importlib.import_module("tube_of_red").Red)
    sent = registry.registrations("red")
    assert sent == (Registration("color", "red", "tube_of_red:Red"),)
    done = _shade_in_another_process(sent, tmp_path)
    assert done.stdout.strip() == b"7", done.stderr.decode()
    (tmp_path / "elsewhere").mkdir()
    done = _shade_in_another_process(sent, tmp_path / "elsewhere")
    assert b"RegistryError: color 'red' is registered in the program as" in done.stderr
    assert b"No module named 'tube_of_red'; install what is missing" in done.stderr
    monkeypatch.delitem(sys.modules, "tube_of_red")


def test_a_module_loaded_by_hand_goes_by_value(
    registry: Registry[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "by_hand.py"
    file.write_text(
        "SHADE = 5\n\ndef shade():\n    return SHADE\n\n\n"
        "class Red:\n    def shade(self):\n        return shade()\n"
    )
    spec = importlib.util.spec_from_file_location("by_hand", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "by_hand", module)
    spec.loader.exec_module(module)
    registry.register("red")(module.Red)
    (tmp_path / "elsewhere").mkdir()
    sent = registry.registrations("red")
    done = _shade_in_another_process(sent, tmp_path / "elsewhere")
    assert done.stdout.strip() == b"5", done.stderr.decode()


def test_what_packages_declare_is_not_sent(
    registry: Registry[object], installed: Path
) -> None:
    registry.get("red")
    assert registry.registrations() == ()
    # A program's own class that takes a package's name is sent.
    registry.register("red", replace=True)(type("Red", (), {"shade": lambda self: 1}))
    assert [each.name for each in registry.registrations()] == ["red"]


def test_only_the_needed_one_must_be_sent(registry: Registry[object]) -> None:
    lock = threading.Lock()

    @registry.register("held")
    class Held:
        def shade(self) -> object:
            return lock

    registry.register("red")(type("Red", (), {}))
    assert [each.name for each in registry.registrations("red")] == ["red"]
    with pytest.raises(RegistryError, match=r"'held'.*cannot be sent to workers.*lock"):
        registry.registrations("held")


def test_what_was_adopted_is_passed_on(registry: Registry[object]) -> None:
    registry.register("red")(type("Red", (), {"shade": lambda self: 2}))
    other: Registry[type] = Registry("rl.test_group", "color")
    other.adopt(registry.registrations())
    assert other.registrations() == registry.registrations()
    assert other.home("red") is None
    assert other.get("red")().shade() == 2
    with pytest.raises(RegistryError, match="did you mean 'red'"):
        other.get("rod")
