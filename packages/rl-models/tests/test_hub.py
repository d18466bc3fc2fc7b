"""Hub names: a wrong one, or an unreachable hub, is reported at once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from rl_models.checkpoint.hub import check_hub_name, hub_secrets, why_not_on_hub
from rl_models.config import PolicyConfig
from rl_models.errors import ModelLoadError
from rl_models.generation.config import GenerationConfig
from rl_models.ops.causal_lm import load_causal_lm
from rl_models.ops.scalar_head import load_scalar_model
from rl_models.policy import generation_replicas, training_policy, training_ranks
from rl_models.policy.generation_policy import GenerationPolicy
from rl_models.policy.generation_replicas import GenerationReplicas
from rl_models.policy.training_policy import TrainingPolicy
from rl_models.tokens.tokenizer import load_tokenizer

NAME = "nobody/nothing"


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An empty cache and a hub without a network; lists the requested names."""
    names: list[str] = []

    def refuse(self: Any, name: str, repo_type: str, timeout: float) -> None:
        names.append(name)
        raise ConnectionError("no route to host")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", refuse)
    return names


@pytest.mark.parametrize(
    "load",
    [load_tokenizer, load_causal_lm, lambda name: load_scalar_model(name, "value")],
    ids=["tokenizer", "model", "critic"],
)
def test_without_a_network_it_is_asked_once(asked: list[str], load: Any) -> None:
    with pytest.raises(ModelLoadError) as caught:
        load(NAME)
    assert asked == [NAME]
    message = str(caught.value)
    for part in (NAME, constants.HF_HUB_CACHE, constants.ENDPOINT, "no route to host"):
        assert part in message
    assert "give the path of a folder" in message


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (errors.OfflineModeIsEnabled("off"), "HF_HUB_OFFLINE forbids"),
        (errors.HFValidationError("bad name"), "knows no such name"),
    ],
)
def test_the_reason_is_told(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, error: Exception, expected: str
) -> None:
    def refuse(self: Any, name: str, repo_type: str, timeout: float) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", refuse)
    with pytest.raises(ModelLoadError, match=expected):
        check_hub_name(NAME)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (errors.RepositoryNotFoundError, "knows no such name"),
        (errors.GatedRepoError, "ask for access"),
    ],
)
def test_what_the_hub_answers_is_told(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, kind: Any, expected: str
) -> None:
    def refuse(self: Any, name: str, repo_type: str, timeout: float) -> None:
        raise kind.__new__(kind)

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", refuse)
    with pytest.raises(ModelLoadError, match=expected):
        check_hub_name(NAME)


def test_what_the_cache_has_is_not_asked_for(asked: list[str], tmp_path: Path) -> None:
    (tmp_path / "models--nobody--nothing" / "snapshots" / "1a2b").mkdir(parents=True)
    check_hub_name(NAME)
    assert not asked


def test_data_sets_are_asked_for_as_such(asked: list[str], tmp_path: Path) -> None:
    (tmp_path / "models--nobody--nothing" / "snapshots" / "1a2b").mkdir(parents=True)
    reason = why_not_on_hub(NAME, "dataset")
    assert reason is not None
    assert reason.startswith(f"the dataset {NAME!r} is neither a folder here")
    assert asked == [NAME]


def test_workers_that_load_from_the_hub_get_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    assert hub_secrets(tmp_path, None) == {}
    assert hub_secrets(NAME) == hub_secrets(tmp_path, NAME) == {"HF_TOKEN": "hf_secret"}
    monkeypatch.delenv("HF_TOKEN")
    assert hub_secrets(NAME) == {}


class _Asked(Exception):
    """Carries the variables that a worker group would be created with."""


@pytest.mark.parametrize("is_on_hub", [False, True])
def test_policies_hand_it_to_their_workers(
    is_on_hub: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def group(*arguments: Any, **options: Any) -> None:
        raise _Asked(options["env_vars"])

    for module in (training_ranks, generation_replicas):
        monkeypatch.setattr(module, "RayWorkerGroup", group)
    monkeypatch.setattr(training_policy, "check_policy", lambda *_: None)
    monkeypatch.setattr(generation_replicas, "check_hub_name", lambda *_: None)
    monkeypatch.setattr(generation_replicas, "read_model_config", lambda *_: None)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    name = NAME if is_on_hub else str(tmp_path)
    cluster: Any = SimpleNamespace(
        world_size=lambda: 1, slots=lambda: [], use_gpus=False
    )
    # The model is not queried for the maximum length of its rows.
    policy = PolicyConfig(model_name=name, max_total_sequence_length=8)
    with pytest.raises(_Asked) as trained:
        TrainingPolicy(cluster, policy)
    monkeypatch.setattr(GenerationReplicas, "_layout", lambda *_: {})
    config = GenerationConfig(backend="huggingface", max_new_tokens=1)
    with pytest.raises(_Asked) as sampled:
        GenerationPolicy(cluster, config, model_name=name)
    for asked in (trained, sampled):
        given = asked.value.args[0]
        assert given.get("HF_TOKEN") == ("hf_secret" if is_on_hub else None)
