from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from rl_distributed.errors import RegistryError
from rl_distributed.registry import Registry


@pytest.fixture
def registry() -> Registry[object]:
    return Registry("rl.test_group", "color")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package on the path with entry points, as pip would install it."""
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
