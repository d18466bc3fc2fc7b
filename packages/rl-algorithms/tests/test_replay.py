"""Recorded runs and their replay, on Ray with a tiny model."""

from __future__ import annotations

import json
import shutil

import pytest
from matrix_cells import cells
from safetensors.torch import load_file, save_file

import rl_algorithms as rl
from rl_algorithms.testing import weights_digest
from rl_algorithms.trainers.recording.columns import describe
from rl_algorithms.trainers.recording.recording import Recording
from rl_distributed.errors import ConfigError

ROWS = [{"prompt": f"{a}+{b}="} for a in range(8) for b in range(4)]
GRPO = {
    "num_prompts_per_step": 4,
    "num_generations_per_prompt": 4,
    "max_new_tokens": 3,
    "max_total_sequence_length": 16,
    "train_micro_batch_size": 64,
    "reference_policy_kl_penalty": 0.0,
    "lr": 1e-2,
    "max_num_steps": 4,
    "save_period": 2,
    "record_training": True,
}
PPO = {
    **{name: value for name, value in GRPO.items() if name != "lr"},
    "policy.optimizer.kwargs.lr": 1e-2,
    "num_generations_per_prompt": 2,
    "max_num_steps": 2,
    "ppo.ppo_epochs": 2,
    "ppo.critic_warmup_steps": 1,
}


def sevens(prompt, response):
    return float(response[:1] == "7")


def train(pool, model, folder, *, resume=False, algorithm="grpo", callbacks=(), **keys):
    made = rl.get_algorithm(algorithm).from_pretrained(
        model, output_dir=str(folder), **keys
    )
    trainer = type(made)(made.config, pool=pool)
    return trainer.fit(
        ROWS, resume=resume, progress=False, reward_fn=sevens, callbacks=callbacks
    )


@pytest.fixture(scope="module")
def replay_pool(ray_cluster):
    """Processes of the replays, which need no generator."""
    with rl.KeptWorkers() as kept:
        yield kept


@pytest.fixture
def replay(replay_pool):
    def again(folder, **options):
        return rl.replay_run(folder, pool=replay_pool, **options)

    return again


@pytest.fixture(scope="module")
def grpo_run(pool, tiny_model, tmp_path_factory):
    """A run with two optimizer steps per step and a changing learning rate."""
    return train(
        pool,
        tiny_model,
        tmp_path_factory.mktemp("runs") / "grpo",
        train_global_batch_size=8,
        callbacks=[Slower()],
        **GRPO,
    ).run_dir


class Slower(rl.Callback):
    def on_step_end(self, trainer, step, metrics):
        if step == 2:
            trainer.update_config({"lr": 5e-3}, by="the test")


def metrics_of(folder):
    found = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "metrics" in record:
            found.setdefault(record["step"], {}).update(record["metrics"])
    return found


def test_a_synchronous_run_is_replayed_to_the_same_weights(grpo_run, replay, tmp_path):
    seen = []
    result = replay(
        grpo_run, to=tmp_path / "again", on_step=lambda *step: seen.append(step)
    )
    assert result.difference is None
    assert (result.first_step, result.last_step) == (1, 4)
    assert result.checkpoint == grpo_run / "checkpoints" / "step_4"
    assert result.num_tensors > 20
    assert seen == [(step, 4) for step in (1, 2, 3, 4)]
    assert weights_digest(tmp_path / "again") == weights_digest(result.checkpoint)
    assert not list(grpo_run.glob(".replay*"))


def test_the_record_has_the_values_of_the_metrics(grpo_run):
    steps = Recording.read(grpo_run).steps
    metrics = metrics_of(grpo_run)
    assert [s.weight_version for s in steps.values()] == [2, 4, 6, 8]
    for number, step in steps.items():
        (call,) = step.trained
        for name, values in call.values.items():
            assert len(values) == 2
            assert sum(values) / 2 == metrics[number][f"train:{name}"]
    rates = [step.trained[0].values["lr"] for step in steps.values()]
    assert rates == [[1e-2] * 2] * 2 + [[5e-3] * 2] * 2
    answers = Recording.read(grpo_run).rows(steps[3].calls[0])
    assert answers["group_index"].tolist() == [row // 4 for row in range(16)]
    assert set(answers["weight_version"].tolist()) == {4}


def test_changes_of_the_run_are_repeated(grpo_run, replay, tmp_path):
    folder = shutil.copytree(grpo_run, tmp_path / "copy")
    (folder / "updates.jsonl").unlink()
    found = replay(folder)
    assert found.last_step == 2
    assert (found.difference.step, found.difference.what) == (
        3,
        "lr of the policy, optimizer step 1 of 2",
    )
    assert (found.difference.recorded, found.difference.replayed) == (5e-3, 1e-2)


def test_a_part_of_a_run_is_replayed_from_a_checkpoint(grpo_run, replay, tmp_path):
    found = replay(grpo_run, from_checkpoint=2)
    assert (found.first_step, found.last_step, found.is_same) == (3, 4, True)
    assert found.checkpoint == grpo_run / "checkpoints" / "step_4"
    part = replay(grpo_run, from_checkpoint=2, steps=1)
    assert (part.last_step, part.is_same, part.checkpoint) == (3, True, None)
    # The training state of the checkpoint counts.
    folder = shutil.copytree(grpo_run, tmp_path / "copy")
    (state,) = (folder / "checkpoints/step_2/policy/optimizer").glob("*.safetensors")
    tensors = load_file(state)
    moment = next(name for name in tensors if name.endswith("exp_avg"))
    save_file({**tensors, moment: tensors[moment] * 2}, state)
    shutil.rmtree(folder / "checkpoints" / "step_4")
    other = replay(folder, from_checkpoint=2)
    # At the latest in step 4, if the rewards of step 3 leave nothing to learn.
    assert other.difference.step in (3, 4)
    assert other.difference.what.startswith("loss of the policy, optimizer step")


def file_of(folder, step, model="policy"):
    return next((folder / "recording").glob(f"step_{step:06d}-*-{model}.safetensors"))


def test_a_changed_byte_is_named(grpo_run, replay, tmp_path):
    folder = shutil.copytree(grpo_run, tmp_path / "copy")
    path = file_of(folder, 3)
    tensors = load_file(path)
    tensors["advantages"].view(-1)[5] += 1e-6
    save_file(tensors, path)
    found = replay(folder)
    assert found.last_step == 2
    assert found.difference.step == 3
    name = f"column advantages of the rows of the policy ({path.name})"
    assert found.difference.what == name
    # Even with its digest changed, the recomputation reveals it.
    lines = folder / "recording" / "steps.jsonl"
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    for record in records:
        if record.get("step") == 3:
            record["calls"][1]["columns"] = describe(load_file(path), {})
    lines.write_text("".join(json.dumps(record) + "\n" for record in records))
    found = replay(folder)
    assert found.difference.step == 3
    assert found.difference.what == "loss of the policy, optimizer step 1 of 2"


def test_another_tensor_of_the_checkpoint_is_named(grpo_run, replay, tmp_path):
    folder = shutil.copytree(grpo_run, tmp_path / "copy")
    path = folder / "checkpoints/step_4/policy/weights/model.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[2]
    tensors[name].view(-1)[0] += 1e-3
    save_file(tensors, path, metadata={"format": "pt"})
    found = replay(folder)
    assert found.difference.step == 4
    assert found.difference.what == f"tensor {name} of policy/weights"
    assert "1 other elements" in found.difference.replayed


def test_what_cannot_be_replayed_is_refused(grpo_run, replay, tmp_path):
    with pytest.raises(ConfigError, match="record_training=true"):
        replay(tmp_path)
    with pytest.raises(ConfigError, match="no checkpoint of step 3: it has 2, 4"):
        replay(grpo_run, from_checkpoint=3)
    with pytest.raises(ConfigError, match="lacks step 5"):
        replay(grpo_run, steps=5)
    with pytest.raises(ConfigError, match="no step from 5 on: the last recorded one"):
        replay(grpo_run, from_checkpoint=4)
    with pytest.raises(ConfigError, match="not empty"):
        replay(grpo_run, to=grpo_run)
    folder = shutil.copytree(grpo_run, tmp_path / "copy")
    file_of(folder, 2).unlink()
    with pytest.raises(ConfigError, match=r"step_000002-1-policy.*is missing"):
        replay(folder)
    assert replay(folder, steps=1).is_same
    lines = folder / "recording" / "steps.jsonl"
    kept = lines.read_text().splitlines(keepends=True)
    lines.write_text("".join([*kept[:2], *kept[3:]]))
    with pytest.raises(ConfigError, match="lacks step 2 of 1 to 4"):
        replay(folder)
    lines.write_text("".join(kept[1:]))
    with pytest.raises(ConfigError, match="start is missing"):
        replay(folder)
    lines.write_text(
        kept[0].replace('"algorithm":"grpo"', '"algorithm":"unregistered"')
    )
    lines.write_text(lines.read_text() + "".join(kept[1:2]))
    with pytest.raises(ConfigError, match=r"trainer_class=\.\.\."):
        replay(folder)
    assert replay(folder, trainer_class=rl.GRPOTrainer).is_same


def test_other_versions_are_told(grpo_run, replay, tmp_path):
    folder = shutil.copytree(grpo_run, tmp_path / "copy")
    lines = folder / "recording" / "steps.jsonl"
    first, *rest = lines.read_text().splitlines(keepends=True)
    start = json.loads(first)
    start["start"]["versions"]["torch"] = "1.0"
    lines.write_text(json.dumps(start) + "\n" + "".join(rest))
    (warning,) = replay(folder, steps=1).warnings
    assert warning.startswith("the run had torch 1.0, and here is ")


class Broken(rl.Callback):
    """Raises in a step that is already recorded."""

    def on_step_end(self, trainer, step, metrics):
        if step == 3:
            raise OSError("the disk is gone")


def test_a_resumed_run_is_replayed_as_a_whole(pool, tiny_model, replay, tmp_path):
    with pytest.raises(OSError, match="the disk is gone"):
        train(pool, tiny_model, tmp_path / "run", callbacks=[Broken()], **GRPO)
    assert list(Recording.read(tmp_path / "run").steps) == [1, 2, 3]
    run = train(pool, tiny_model, tmp_path / "run", resume=True, **GRPO).run_dir
    recording = Recording.read(run)
    assert list(recording.steps) == [1, 2, 3, 4]
    assert [start.step for start in recording.starts] == [0, 2]
    found = replay(run)
    assert (found.last_step, found.difference) == (4, None)
    assert found.checkpoint == run / "checkpoints" / "step_4"


def test_a_run_resumed_with_other_settings_is_replayed_in_parts(
    pool, tiny_model, replay, tmp_path
):
    settings = {**GRPO, "max_num_steps": 2}
    train(pool, tiny_model, tmp_path / "run", **settings)
    settings |= {"max_num_steps": 4, "ratio_clip_max": 0.3}
    run = train(pool, tiny_model, tmp_path / "run", resume=True, **settings).run_dir
    with pytest.raises(ConfigError, match=r"after step 2 with another loss_fn\.ratio"):
        replay(run)
    assert replay(run, steps=2).is_same
    found = replay(run, from_checkpoint=2)
    assert (found.first_step, found.last_step, found.is_same) == (3, 4, True)


def test_an_asynchronous_run_is_replayed(pool, tiny_model, replay, tmp_path):
    run = train(
        pool,
        tiny_model,
        tmp_path / "run",
        **GRPO,
        **{
            "loss_fn.use_importance_sampling_correction": True,
            "grpo.asynchronous": {"max_staleness": 1},
        },
    ).run_dir
    recording = Recording.read(run)
    versions = {
        version
        for step in recording.steps.values()
        for version in recording.rows(step.calls[0])["weight_version"].tolist()
    }
    assert min(versions) == 0
    found = replay(run)
    assert (found.last_step, found.difference) == (4, None)
    # The schedule decides again, as in the run.
    (log,) = (run / "asynchronous").glob("events_*.jsonl")
    lines = log.read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if '"Train"' in line)
    entry = json.loads(lines[place])
    entry["actions"] = entry["actions"][:-1]
    lines[place] = json.dumps(entry)
    log.write_text("\n".join(lines) + "\n")
    found = replay(run)
    assert found.difference.step == 1
    assert found.difference.what == f"decision at event {place} of {log.name}"


@pytest.mark.matrix
def test_ppo_is_replayed_with_its_critic(pool, tiny_model, replay, tmp_path):
    run = train(
        pool,
        tiny_model,
        tmp_path / "run",
        algorithm="ppo",
        **PPO,
    ).run_dir
    recording = Recording.read(run)
    trained = [[c.model for c in s.trained] for s in recording.steps.values()]
    assert trained == [["critic"] * 2, ["critic", "policy"] * 2]
    found = replay(run)
    assert (found.last_step, found.difference) == (2, None)
    path = run / "checkpoints/step_2/critic/weights/model.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[0]
    tensors[name].view(-1)[0] += 1e-3
    save_file(tensors, path, metadata={"format": "pt"})
    assert replay(run).difference.what == f"tensor {name} of critic/weights"


PAIRS = [
    {"prompt": f"{a}?", "chosen": str(a + 1), "rejected": str(a)} for a in range(8)
]
ANSWERED = [{**row, "answer": row["prompt"][::-1]} for row in ROWS[:8]]
OTHERS = {
    "dpo": (rl.DPOTrainer, PAIRS, {}),
    "rm": (rl.RMTrainer, PAIRS, {}),
    "distillation": (
        rl.DistillationTrainer,
        ANSWERED,
        {"on_policy": False, "topk_logits_k": 4, "num_prompts_per_step": 4},
    ),
}


@pytest.mark.parametrize("algorithm", cells(OTHERS, ["dpo"]))
def test_other_algorithms_are_replayed(algorithm, tiny_model, replay_pool, tmp_path):
    cls, rows, settings = OTHERS[algorithm]
    settings = {"train_global_batch_size": 4, **settings}
    if algorithm == "distillation":
        settings["teacher"] = str(tiny_model)
    made = cls.from_pretrained(
        tiny_model,
        max_num_steps=2,
        output_dir=str(tmp_path / "run"),
        max_total_sequence_length=16,
        lr=1e-2,
        record_training=True,
        **settings,
    )
    run = cls(made.config, pool=replay_pool).fit(rows, progress=False).run_dir
    found = rl.replay_run(run, pool=replay_pool)
    assert (found.last_step, found.difference) == (2, None)
    assert found.num_tensors > 10


class Hinge(rl.BaseTrainer):
    """A user-defined trainer, with a method as its loss."""

    data_kind = "demonstrations"

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.margin = 0.5

    def _load_data(self, dataset, val_dataset):
        data = rl.DataModule(
            self.config.data,
            self.components.required.tokenizer,
            kind="demonstrations",
            batch_size=4,
            train=dataset,
            seed=1,
        )
        return data.train_loader, None

    def _compute_loss(self, data, outputs):
        return (self.margin - outputs["logprobs"] * data["token_mask"]).relu().mean()


def test_a_trainer_of_ones_own_is_replayed(tiny_model, replay_pool, tmp_path):
    settings = {"policy.train_global_batch_size": 4, "lr": 1e-2}
    made = Hinge.from_pretrained(
        tiny_model, output_dir=str(tmp_path / "run"), record_training=True, **settings
    )
    made._pool = replay_pool
    run = made.fit(ANSWERED, progress=False).run_dir
    with pytest.raises(ConfigError, match=r"Hinge, which is registered under no name"):
        rl.replay_run(run, pool=replay_pool)
    found = rl.replay_run(run, trainer_class=Hinge, pool=replay_pool)
    assert (found.last_step, found.difference) == (2, None)
