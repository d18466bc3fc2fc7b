"""What a run records about its data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl_algorithms import DataConfig, DataModule
from rl_algorithms.data.provenance import SourceRecord, fingerprint, joint_fingerprint
from rl_models.build.model import TokenizerBuildConfig, build_tokenizer

ROWS: list[dict[str, Any]] = [
    {"question": f"{n}?", "answer": f"so\n#### {n}"} for n in range(8)
]


def module(config: dict[str, Any], **options: Any) -> DataModule:
    tokenizer = build_tokenizer(TokenizerBuildConfig())
    settings = DataConfig.from_dict(config)
    return DataModule(settings, tokenizer, kind="prompts", batch_size=2, **options)


def test_sources_are_recorded_with_format_and_licence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    train = [{"format": "gsm8k", "path": str(file)}]
    with caplog.at_level("INFO", logger="rl_algorithms"):
        data = module({"train": train, "split_validation_size": 0.25})
    trained, held_out = data.provenance
    assert (trained.part, trained.num_rows) == ("train", 6)
    assert (held_out.part, held_out.num_rows) == ("validation", 2)
    assert (trained.format, trained.licence) == ("gsm8k", "MIT")
    assert trained.fingerprint != held_out.fingerprint
    logged = [message for message in caplog.messages if "data source" in message]
    assert len(logged) == 2
    assert trained.fingerprint in logged[0]
    assert "licence MIT" in logged[0]


def test_rows_that_are_handed_in_have_no_licence() -> None:
    (record,) = module({}, train=[{"prompt": "1?"}, {"prompt": "2?"}]).provenance
    assert (record.format, record.licence, record.num_rows) == (None, None, 2)
    assert "licence" not in str(record)


def test_a_fingerprint_tells_rows_and_their_order_apart() -> None:
    same = [dict(reversed(row.items())) for row in ROWS]
    assert fingerprint(same) == fingerprint(ROWS)
    changed = [*ROWS[:-1], {**ROWS[-1], "answer": "#### 9"}]
    others = [changed, ROWS[::-1], ROWS[:-1], [*ROWS, ROWS[0]]]
    found = {fingerprint(rows) for rows in [ROWS, *others]}
    assert len(found) == 1 + len(others)
    assert all(len(digits) == 16 for digits in found)


def test_a_fingerprint_takes_values_that_json_lacks() -> None:
    board = {"prompt": "x", "board": {(0, 0): 1, "size": {2: [{None: 3}]}}}
    (record,) = module({}, train=[board]).provenance
    moved = {"prompt": "x", "board": {(0, 1): 1, "size": {2: [{None: 3}]}}}
    assert record.fingerprint != fingerprint([moved])


def test_a_fingerprint_is_the_same_in_each_process() -> None:
    class Judge:
        pass

    # Kept, as an object that is gone may leave its place in memory to the next one.
    kept = [Judge(), Judge()]
    assert len({fingerprint([{"judge": judge}]) for judge in kept}) == 1
    # Of these, the one that is added first comes first.
    sets = [{0, 8}, {8, 0}]
    assert [repr(value) for value in sets] == ["{0, 8}", "{8, 0}"]
    assert len({fingerprint([{"tags": tags}]) for tags in sets}) == 1


def test_a_fingerprint_of_many_rows_reads_a_thousand() -> None:
    read = []

    class Many(list[dict[str, int]]):
        def __getitem__(self, index: Any) -> Any:
            read.append(index)
            return {"n": index}

        def __len__(self) -> int:
            return 1_000_000

    assert fingerprint(Many()) == fingerprint(Many())
    assert len(read) == 2000
    assert read[:3] == [0, 1000, 2000]


def test_a_resume_with_other_rows_is_told(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": f"{n}?"} for n in range(4)]
    other = [{"prompt": "9?"}]

    def loader(train: list[dict[str, Any]]) -> Any:
        return module({}, train=train).train_loader

    state = loader(rows).state_dict()
    with caplog.at_level("WARNING", logger="rl_algorithms"):
        loader(rows).load_state_dict(state)
        older = {key: value for key, value in state.items() if key != "fingerprint"}
        loader([*other, *rows[1:]]).load_state_dict(older)
        assert not caplog.messages
        changed = loader([*other, *rows[1:]])
        changed.load_state_dict({**state, "position": 2})
    [said] = caplog.messages
    assert "has other rows than when the checkpoint was saved" in said
    assert state["fingerprint"] in said
    assert changed.state_dict()["position"] == 2


def test_a_mixture_has_a_fingerprint_of_all_its_training_rows() -> None:
    def record(part: str, digits: str) -> SourceRecord:
        return SourceRecord(part, "rows", 4, digits, None, None)

    first, second = record("train", "a" * 16), record("train", "b" * 16)
    held_out = record("validation", "c" * 16)
    assert joint_fingerprint([first, held_out]) == first.fingerprint
    found = [[first, second], [second, first], [first, first], [first]]
    assert len({joint_fingerprint(records) for records in found}) == 4
