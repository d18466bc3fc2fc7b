"""Backends defined in a user's program reach the workers and work as promised."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_distributed.errors import RegistryError
from rl_models import (
    GenerationConfig,
    PolicyConfig,
    register_training_backend,
    registry as backends,
)
from rl_models.testing import (
    build_tiny_model,
    check_generation_backend,
    check_training_backend,
)

PROGRAMS = Path(__file__).parent / "programs"

Run = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo a program's registrations: other tests list the names."""
    for registry in (backends._TRAINING, backends._GENERATION):
        monkeypatch.setattr(registry, "_registered", dict(registry._registered))


@pytest.mark.slow
def test_a_training_backend_of_six_methods_trains_saves_and_resumes(
    run_program: Run, model: str
) -> None:
    left = run_program("custom_training_backend", model)
    assert left["backend"] is left["CustomTrainingBackend"]
    losses = left["whole"].history.to_pandas()["train:loss"]
    assert losses.iloc[-1] < 0.5 * losses.iloc[0]
    assert left["first"].steps == 10
    assert left["resumed"].steps == 20
    # The saved state is exact: the second half equals that of one long run.
    resumed = left["resumed"].history.to_pandas()["train:loss"]
    assert resumed.iloc[-1] == pytest.approx(losses.iloc[-1], abs=1e-6)
    assert left["first"].metrics["train:loss"] == pytest.approx(
        losses.iloc[9], abs=1e-6
    )
    held_out = left["whole"].metrics["val:val_loss"]
    assert 0.0 < held_out < losses.iloc[0]


@pytest.mark.slow
def test_a_generation_backend_of_four_methods_samples_with_the_trainers_weights(
    run_program: Run, model: str
) -> None:
    left = run_program("custom_generation_backend", model)
    assert left["backend"] is left["CustomGenerationBackend"]
    result = left["result"]
    assert result.steps == 3
    # The first sync is probed, and each step compares the log-probs of both sides.
    history = result.history.to_pandas()
    apart = history["train:mismatch/logprob_diff/max"]
    assert apart.max() < 1e-4
    assert len(apart.dropna()) == 3
    assert history["train:grad_norm"].max() > 0.0


@pytest.mark.matrix
@pytest.mark.slow
def test_texts_without_logprobs_teach_as_well(run_program: Run, model: str) -> None:
    result = run_program("custom_backends_by_text", model)["result"]
    history = result.history.to_pandas()
    rewards = history["train:reward"]
    assert rewards.iloc[-3:].mean() > rewards.iloc[:3].mean() + 0.3
    assert not [name for name in history if "mismatch/logprob_diff" in name]


@pytest.mark.slow
def test_backends_of_the_whole_protocols_that_inherit_from_nothing_train_on_two_ranks(
    run_program: Run, model: str
) -> None:
    left = run_program("whole_backends", model)
    for name in ("DataParallelBackend", "OneByOneBackend"):
        assert left[name].__mro__ == (left[name], object)
    history = left["result"].history.to_pandas()
    rewards = history["train:reward"]
    assert rewards.iloc[-3:].mean() > rewards.iloc[:3].mean() + 0.3
    # The probe and each step compare log-probs of the two, which share no code.
    assert history["train:mismatch/logprob_diff/max"].max() < 1e-4


def test_backends_of_the_whole_protocols_keep_the_contract(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = str(PROGRAMS / "whole_backends.py")
    left = runpy.run_path(program, run_name="whole_backends")
    folder = build_tiny_model(tmp_path / "model")

    def make_training() -> Any:
        settings = {"model_name": str(folder), "optimizer": {"kwargs": {"lr": 1e-3}}}
        backend = left["DataParallelBackend"]()
        backend.setup(PolicyConfig.from_dict(settings).to_dict())
        return backend

    def make_generation() -> Any:
        backend = left["OneByOneBackend"]()
        config = GenerationConfig(max_new_tokens=8).to_dict()
        backend.setup(config, model_name=str(folder))
        return backend

    check_training_backend(make_training, folder, tmp_path / "checkpoint")
    check_generation_backend(make_generation, folder)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, r"setup is missing; train_step is missing.*give it setup\(config\)"),
        (
            {"setup": lambda self: None},
            r"setup\(self\) cannot be called as setup\(config\)",
        ),
        ({"train_step": lambda self, batch: {}}, r"as train_step\(batch, loss_fn\)"),
        ({"shutdown": 3}, "shutdown is no method"),
    ],
)
def test_a_class_of_neither_form_is_refused_when_it_is_registered(
    body: dict[str, Any], message: str
) -> None:
    cls = type("Mine", (), body)
    with pytest.raises(RegistryError, match=message):
        register_training_backend("mine")(cls)
    assert "mine" not in backends._TRAINING
