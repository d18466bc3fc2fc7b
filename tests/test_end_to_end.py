"""Complete runs through the `rl` command, as real processes."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_cli.grafana import grafana_dashboard
from rl_cli.report.page import write_page
from rl_cli.report.run_reader import read_run
from rl_distributed.metrics.probes import HostProbe
from rl_distributed.metrics.sinks.jsonl import read_metrics
from rl_distributed.metrics.sinks.prometheus import PrometheusSink
from rl_models.generation.config import GenerationConfig
from rl_models.tokens.tokenizer import load_tokenizer


@pytest.mark.slow
def test_run_ends_with_one_json_object_and_a_report(whole_run: Any) -> None:
    result = whole_run.json
    assert list(result)[:6] == [
        "measure", "start", "start_step", "best", "best_step", "end"
    ]  # fmt: skip
    assert {"run_dir", "checkpoint", "wall_s", "seed", "metrics"} <= set(result)
    assert result["measure"] == "val:accuracy"
    assert result["metrics"]["val:accuracy"] == result["end"]
    assert result["steps"] == 6
    run_dir = Path(result["run_dir"])
    for name in ("result.json", "samples.json", "curve.png", "config.yaml", "run.json"):
        assert (run_dir / name).stat().st_size > 0
    for said in ("warmup", "grpo", "reward", "accuracy", "tok/s", "checkpoint"):
        assert said in whole_run.err
    lines = (run_dir / "logs" / "run.jsonl").read_text().splitlines()
    assert {json.loads(line)["pid"] for line in lines if line}
    samples = json.loads((run_dir / "samples.json").read_text())["samples"]
    assert len(samples) == 2
    assert all({"prompt", "before", "after", "expected"} <= set(s) for s in samples)
    path = run_dir / "stages" / "grpo" / "validation_samples.jsonl"
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert all({"prompt", "response", "reward", "expected"} <= set(s) for s in kept)
    assert len({s["step"] for s in kept}) > 1


@pytest.mark.slow
def test_answers_of_training_steps_are_kept_and_reported(
    whole_run: Any, tmp_path: Path
) -> None:
    run_dir = Path(whole_run.json["run_dir"])
    (part,) = (run_dir / "stages" / "grpo" / "rollouts").iterdir()
    kept = [json.loads(line) for line in part.read_text().splitlines()]
    assert [answer["step"] for answer in kept] == [
        step for step in range(1, 7) for _ in range(4)
    ]
    for answer in kept:
        assert len(answer["tokens"]) == len(answer["logprobs"]) == answer["length"]
        assert answer["versions"] == [[answer["step"] - 1, answer["length"]]]
    page = tmp_path / "page.html"
    write_page([read_run(run_dir)], page)
    data = json.loads(re.findall(r">({.*})</script>", page.read_text())[0])
    (run,) = data["runs"]
    assert run["started_by"].partition(" ")[0] in ("rl", "__main__.py")
    assert "cores" in run["machine"]
    training = run["stages"][1]["samples"][0]
    assert (training["kind"], [row[:2] for row in training["steps"]]) == (
        "training",
        [[step, 4] for step in range(1, 7)],
    )
    shown = data["chunks"][f"{training['key']}-0"]
    assert [answer["response"] for answer in shown] == [
        answer["response"] for answer in kept
    ]


@pytest.mark.slow
def test_checkpoint_loads_in_plain_transformers_and_in_rl_generate(
    whole_run: Any, rl: Callable[..., Any]
) -> None:
    checkpoint = whole_run.json["checkpoint"]
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer("312=", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = int(model(ids).logits[0, -1].argmax())
    done = rl("generate", checkpoint, "312=", "--greedy", "--max-new-tokens", "1")
    assert done.code == 0, done.err
    assert done.out.strip() == tokenizer.decode([expected], skip_special_tokens=True)


@pytest.mark.slow
def test_the_tokenizer_stays_the_one_that_was_built(whole_run: Any) -> None:
    run_dir = Path(whole_run.json["run_dir"])
    folders = run_dir / "model", Path(whole_run.json["checkpoint"])
    built, saved = ((path / "tokenizer.json").read_bytes() for path in folders)
    assert saved == built
    readings = [
        reader(path)("x9y2z1=<eos>é")["input_ids"]
        for path in folders
        for reader in (load_tokenizer, AutoTokenizer.from_pretrained)
    ]
    assert readings == readings[:1] * 4


@pytest.mark.slow
def test_weights_of_stages_are_handed_on(whole_run: Any) -> None:
    run_dir = Path(whole_run.json["run_dir"])
    built = load_file(run_dir / "model" / "model.safetensors")
    stages = [
        json.loads((run_dir / "stages" / f"{name}.json").read_text())
        for name in ("warmup", "grpo")
    ]
    warmed, trained = (
        load_file(Path(stage["model"]) / "model.safetensors") for stage in stages
    )
    assert set(built) == set(warmed) == set(trained)
    name = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(built[name], warmed[name])
    assert not torch.equal(warmed[name], trained[name])


def test_default_sampling_is_that_of_hugging_face() -> None:
    config = GenerationConfig(max_new_tokens=1)
    assert (config.temperature, config.top_p, config.top_k) == (1.0, 1.0, None)


@pytest.mark.slow
def test_the_dashboard_asks_for_what_a_run_exposes(
    whole_run: Any, tmp_path: Path
) -> None:
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    folder = Path(whole_run.json["run_dir"]) / "stages" / "grpo"
    sink = PrometheusSink(tmp_path)
    for step, metrics in read_metrics(folder / "metrics.jsonl"):
        sink.log_metrics(metrics, step, 0.0)
    sampled = {f"system/{name}": v for name, v in HostProbe().read().items()}
    sink.log_metrics(sampled, 7, 0.0)
    # As a Prometheus server scrapes, bypassing the machine's proxies.
    accepted = (
        "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    )
    request = urllib.request.Request(sink.url, headers={"Accept": accepted})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        families = list(parser.text_string_to_metric_families(answer.read().decode()))
    sink.close()
    exposed = {
        (sample.name, sample.labels.get("metric"))
        for family in families
        for sample in family.samples
    }
    asked = set()
    for panel in grafana_dashboard()["panels"]:
        for target in panel.get("targets", ()):
            query = r'(\w+)\{instance=~"\$instance"(?:, metric="(.*?)")?\}'
            # Without a GPU, GPU metrics have no names to find.
            if found := re.fullmatch(query, target["expr"]):
                asked.add((found[1], found[2]))
            else:
                assert "system_gpu" in target["expr"]
    assert len(asked) > 20
    assert asked <= exposed
