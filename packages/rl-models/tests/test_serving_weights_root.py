"""Request paths: what lies below the root, and that nothing else is distinguishable."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rl_distributed.errors import ConfigError
from rl_models.serving import ServeConfig, Server
from rl_models.serving.errors import ApiError
from rl_models.serving.weights_root import WeightsRoot


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with two models, and existing files outside of it."""
    made = tmp_path / "root"
    for folder in ("model", "run/checkpoints/step_3/policy/weights"):
        (made / folder).mkdir(parents=True)
        (made / folder / "config.json").write_text("{}")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "config.json").write_text("{}")
    (tmp_path / "root-2").mkdir()
    (made / "link-out").symlink_to(outside)
    (made / "link-nowhere").symlink_to(tmp_path / "nowhere")
    (made / "link-in").symlink_to(made / "model")
    (made / "loop").symlink_to(made / "loop")
    (made / "mixed").mkdir()
    (made / "mixed" / "model.safetensors").symlink_to(outside / "config.json")
    (made / "hidden" / "policy").mkdir(parents=True)
    (made / "hidden" / "policy" / "weights").symlink_to(outside)
    return made


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("model", "model"),
        ("./model/", "model"),
        ("{root}/model", "model"),
        ("run/../model", "model"),
        ("link-in", "model"),
        ("run/checkpoints/step_3", "run/checkpoints/step_3/policy/weights"),
        ("not-there", "not-there"),
    ],
)
def test_paths_below_the_root_are_resolved(root: Path, path: str, found: str) -> None:
    folder = WeightsRoot(root).folder_of(path.format(root=root))
    assert folder == (root / found).resolve()


@pytest.mark.parametrize(
    "path",
    [
        "..",
        "../outside",
        "../nowhere",
        "model/../../outside",
        "{root}/../outside",
        "{root}-2",
        "/etc/passwd",
        "/etc/no-such-file",
        "/",
        "~",
        "link-out",
        "link-out/config.json",
        "link-out/not-there",
        "link-nowhere",
        "mixed",
        "hidden",
        "a\0b",
        "x" * 5_000,
        "x/" * 3_000,
    ],
)
def test_whatever_lies_elsewhere_is_refused_in_the_same_words(
    root: Path, path: str
) -> None:
    path = path.format(root=root)
    if path == "~":
        # Not the home folder: a name like any other.
        assert WeightsRoot(root).folder_of(path) == root / "~"
        return
    with pytest.raises(ApiError) as caught:
        WeightsRoot(root).folder_of(path)
    assert (caught.value.status, caught.value.code) == (403, "path_refused")
    with pytest.raises(ApiError) as other:
        WeightsRoot(root).folder_of("../nowhere")
    words = str(caught.value).replace(repr(path), "PATH")
    assert words == str(other.value).replace(repr("../nowhere"), "PATH")


def test_nothing_outside_is_looked_at(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timing could otherwise reveal type, size or content."""
    touched: list[str] = []
    real_stat = os.stat

    def noting(path: object, *rest: object, **more: object) -> object:
        touched.append(str(path))
        return real_stat(path, *rest, **more)  # type: ignore[arg-type]

    weights_root = WeightsRoot(root)
    monkeypatch.setattr(os, "stat", noting)
    for path in ("../outside", "link-out", str(root.parent / "outside")):
        with pytest.raises(ApiError):
            weights_root.folder_of(path)
    assert not any("outside" in path for path in touched)


def test_a_root_must_be_a_folder(root: Path, tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="weights_root must be an existing folder"):
        WeightsRoot(root / "model" / "config.json")
    config = ServeConfig.from_dict(
        {"weights_key": "k", "weights_root": str(root / "none"), "port": 0}
    )
    with pytest.raises(ConfigError, match="weights_root must be an existing folder"):
        Server(tiny_folder, config)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"weights_key": "k"}, "got no weights_root"),
        ({"weights_root": "/tmp"}, "got no weights_key"),
        (
            {"weights_key": "k", "weights_root": "/tmp", "api_key": "k"},
            "weights_key must not be api_key",
        ),
        ({"weights_key": "two words", "weights_root": "/tmp"}, "without spaces"),
        ({"weights_key": "", "weights_root": "/tmp"}, "empty"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ServeConfig.from_dict(settings)
