from __future__ import annotations

from pathlib import Path

from rl_algorithms.trainers.sampling.validation_samples import ValidationSamples


def sample(prompt: str) -> dict[str, object]:
    return {"prompt": prompt, "response": "4", "reward": 1.0, "expected": "4"}


def test_answers_of_every_validation_are_kept_with_their_step(tmp_path: Path) -> None:
    kept = ValidationSamples(tmp_path)
    kept.add(0, [sample("1+3="), sample("2+2=")])
    kept.add(1, [])
    kept.add(2, [sample("1+3=")])
    records = list(ValidationSamples(tmp_path).read())
    assert [(r["step"], r["prompt"]) for r in records] == [
        (0, "1+3="),
        (0, "2+2="),
        (2, "1+3="),
    ]
    assert records[0] == {"step": 0, **sample("1+3=")}
    assert kept.path.stat().st_mode & 0o077 == 0


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    kept = ValidationSamples(tmp_path)
    kept.resume_at(3)  # nothing exists yet
    for step in (2, 4, 6):
        kept.add(step, [sample("1+3=")])
    with open(kept.path, "ab") as file:
        file.write(b'{"step": 8, "pro')  # as left by a killed run
    kept.resume_at(4)
    kept.add(6, [sample("2+2=")])
    found = [(r["step"], r["prompt"]) for r in kept.read()]
    assert found == [(2, "1+3="), (4, "1+3="), (6, "2+2=")]
    assert kept.path.stat().st_mode & 0o077 == 0
