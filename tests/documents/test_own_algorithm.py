"""The documented custom algorithm: its section, its loss, its unit test."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

from rl_algorithms import KeptWorkers, SFTTrainer, registry
from rl_algorithms.errors import AlgorithmError
from rl_algorithms.trainers.base import BaseTrainer
from rl_algorithms.trainers.setup.components import Components
from rl_algorithms.trainers.steps.method_loss import MethodLoss
from rl_cli.main import _run
from rl_distributed import BatchedDataDict
from rl_distributed.errors import ConfigError
from rl_models.tokens.tokenizer import load_tokenizer

Run = Callable[..., dict[str, Any]]
PROGRAMS = str(Path(__file__).parent / "programs")
ROWS = [{"prompt": f"{n} ", "response": "yes"} for n in range(8)]


@pytest.fixture
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    own = registry.Registry[Any]("rl.algorithms", "algorithm")
    monkeypatch.setattr(registry, "_ALGORITHMS", own)


@pytest.mark.usefixtures("_registry")
def test_an_algorithm_of_one_s_own(run_program: Run, model: str) -> None:
    names = run_program("my_algorithm", model)
    trainer = names["trainer"]
    assert trainer.config.to_dict()["myalgo"] == {"my_param": 2.0}
    first = trainer.history[0]["train:loss"]
    other = names["by_name"].history[0]["train:loss"]
    # With the same weights and rows, the loss is the method's, with its parameter.
    assert first > 0
    assert other == pytest.approx(-first / 2, rel=1e-5)
    # The loss trains: the answers are more likely than with the previous weights.
    again = names["MyAlgoTrainer"].from_pretrained(
        str(trainer.run_dir / "checkpoints/step_1/policy/weights"), my_param=2.0
    )
    assert again.fit(ROWS, progress=False).history[0]["train:loss"] < 0.9 * first
    assert (trainer.algorithm, trainer.run_dir.name) == ("myalgo", "myalgo-001")
    # The command also trains it, although its `__init__` takes only a config.
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    by_command = ["train", "myalgo", "data.train=rows.jsonl", "myalgo.my_param=2.0"]
    settings = [f"policy.model_name={model}", "policy.optimizer.kwargs.lr=1e-2"]
    out = "output_dir=by_command"
    assert _run([*by_command, *settings, out, "--quiet"], debug=False) == 0
    stored = json.loads(Path("by_command/result.json").read_text())
    assert stored["start"] == pytest.approx(first, rel=1e-5)


class ConfigOnly(SFTTrainer):
    """An `__init__` without the parts that a run may be given."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)


def test_parts_reach_a_trainer_that_takes_a_config_only(model: str) -> None:
    claim: Any = object()
    pool, tokenizer = KeptWorkers(), load_tokenizer(model)
    trainer = ConfigOnly.from_pretrained(model, tokenizer=tokenizer)
    assert trainer.given.tokenizer is tokenizer
    trainer = ConfigOnly.from_config(trainer.config, pool=pool, claim=claim)
    assert (trainer._pool, trainer._claim) == (pool, claim)
    with pytest.raises(ConfigError, match=r"takes a policy .*: got dict"):
        ConfigOnly.from_config(trainer.config, Components(policy={}))


@pytest.mark.usefixtures("_registry")
def test_a_step_without_a_run(
    run_program: Run, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(PROGRAMS)
    names = run_program("check_my_algorithm", model)
    trainer = names["trainer"]
    try:
        assert names["result"]["loss"] > 0
        # The step has trained: the next one starts with another loss.
        assert trainer._train_step(names["batch"])["loss"] < names["result"]["loss"]
    finally:
        trainer._alone.close()


class Weighted(BaseTrainer[Any]):
    """Adds a section, as a plain mapping."""

    @classmethod
    def _build_config_from_pretrained(cls, model: Any, **kwargs: Any) -> Any:
        config = super()._build_config_from_pretrained(model, **kwargs)
        config["weighted"] = {"factor": kwargs.pop("factor", 1), "name": "a"}
        return config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.factor = config["weighted"]["factor"]
        self.handle = (n for n in range(3))  # which no other process can have

    def _compute_loss(self, batch: Any, outputs: Any) -> Any:  # type: ignore[override]
        return self.factor * outputs["logprobs"].sum(1).mean()


def test_keys_of_its_own_are_checked_like_others(model: str) -> None:
    make = Weighted.from_pretrained
    assert make(model).config.weighted.factor == 1
    assert make(model, factor=0.5).factor == 0.5
    assert make(model, weighted={"factor": 3}).factor == 3
    assert make(model, **{"weighted.factor": 4}).factor == 4
    assert make(model, config={"weighted": {"factor": 5}}).factor == 5
    assert make(model, config={"weighted": {"factor": 5}}, factor=6).factor == 6
    assert make(model, max_num_steps=7).config.training.max_num_steps == 7
    with pytest.raises(ConfigError, match=r"'facter'.*did you mean .*factor'"):
        make(model, facter=2)
    with pytest.raises(ConfigError, match=r"weighted\.facter.*did you mean .*factor'"):
        make(model, weighted={"facter": 2})
    with pytest.raises(ConfigError, match=r"weighted\.factor"):
        make(model, factor="much")
    policy = {"model_name": model}
    with pytest.raises(ConfigError, match=r"weighted\.facter.*did you mean .*factor'"):
        Weighted({"policy": policy, "weighted": {"facter": 2}})
    with pytest.raises(ConfigError, match=r"data\.train is not set and no dataset"):
        make(model).fit(progress=False)


def _share(loss: MethodLoss, logprobs: torch.Tensor, mask: list[float]) -> Any:
    data = BatchedDataDict({"sample_mask": torch.tensor(mask)})
    return loss(data, torch.tensor(4.0), None, next_token_logprobs=logprobs)[0]


def test_the_loss_is_the_mean_over_rows_that_count(model: str) -> None:
    trainer = Weighted.from_pretrained(model, factor=2)
    loss = pickle.loads(cloudpickle.dumps(MethodLoss(trainer, ["factor", "handle"])))
    rows = torch.randn(6, 3, requires_grad=True)
    whole = 2 * rows[:4].sum(1).mean()
    parts = _share(loss, rows[:3], [1, 1, 1]) + _share(loss, rows[3:], [1, 0, 0])
    assert parts.item() == pytest.approx(whole.item())
    parts.backward()
    assert torch.allclose(rows.grad, torch.tensor([[0.5]] * 4 + [[0.0]] * 2))
    assert _share(loss, rows[:2], [0, 0]).item() == 0.0


def test_a_loss_that_is_none(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Weighted.from_pretrained(model)
    loss = pickle.loads(cloudpickle.dumps(MethodLoss(trainer, ["factor", "handle"])))
    for wrong, got in (
        (lambda *_: 1.0, "float"),
        (lambda _, b, o: o["logprobs"], "a te"),
    ):
        monkeypatch.setattr(Weighted, "_compute_loss", wrong)
        with pytest.raises(AlgorithmError, match=f"as one number.*: got {got}"):
            _share(loss, torch.zeros(2, 3), [1, 1])
    monkeypatch.setattr(Weighted, "_compute_loss", lambda self, *_: self.handle)
    with pytest.raises(AlgorithmError, match=r"where self\.handle cannot be sent"):
        _share(loss, torch.zeros(2, 3), [1, 1])
