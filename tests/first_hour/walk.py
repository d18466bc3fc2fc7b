"""The steps of a new user: the input, and the expected output."""

from __future__ import annotations

import getpass
import json
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
from tests.first_hour.terminal import Command, processes_with

MARK = "FIRST_HOUR_WALK"
START_S, RUN_S = 300.0, 900.0
# Limit of a step in units of `import torch, ray`: ten times its target.
ERROR_RATIO, FIRST_STEP_RATIO, GENERATE_RATIO = 5.0, 30.0, 17.0

MODEL = """
from rl_models import ModelBuildConfig, build_model

build_model(ModelBuildConfig(hidden_size=32, num_hidden_layers=1), "model")
"""
REWARD = """
def reward(prompt: str, response: str) -> float:
    return response.count("7") / max(len(response), 1)
"""
CLIENT = """
import sys
from openai import OpenAI

client = OpenAI(base_url=sys.argv[1], api_key="none", timeout=120, max_retries=0)
[model] = client.models.list().data
print("models:", model.id)
asked = {"model": model.id, "prompt": "123 ", "max_tokens": 4}
print("tokens:", client.completions.create(**asked).usage.completion_tokens)
parts = list(client.completions.create(**asked, stream=True))
print("parts:", len(parts))
"""
COMMON = ("policy.model_name=model", "cluster.use_gpus=false")


class Walk:
    """One user, in one folder.

    Args:
        python: Python of the environment with the packages.
        folder: Where the user works.
        temp: The temporary folder of all commands.
        env: Environment of all commands.
    """

    def __init__(
        self, python: Path, folder: Path, temp: Path, env: Mapping[str, str]
    ) -> None:
        self._python, self._folder, self._temp, self._env = python, folder, temp, env
        # Once to warm the disk cache, then to measure.
        self._empty_s = [self._import_s() for _ in range(2)][-1]
        sys.stdout.write(f"import torch, ray: {self._empty_s:.1f} s\n")

    def doctor(self) -> None:
        seen = self._rl("doctor").end(START_S)
        for word in ("Python", "torch", "Ray", "temporary folder"):
            assert word in seen.words, seen.text
        assert "failed" not in seen.words, seen.text

    def make_files(self) -> None:
        """Write a model, a reward, prompts, a chat and pairs."""
        self._write("reward.py", REWARD)
        self._write("make_model.py", MODEL)
        numbers = range(100, 164)
        self._rows("rows", [{"prompt": f"{n} "} for n in numbers])
        chats = [
            [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "7"}]
            for n in numbers
        ]
        self._rows("chat", [{"messages": chat} for chat in chats])
        pairs = [{"prompt": f"{n} ", "chosen": "7", "rejected": "1"} for n in numbers]
        self._rows("pairs", pairs)
        self._run(str(self._python), "make_model.py").end(START_S)
        assert (self._folder / "model" / "config.json").is_file()

    def typo(self) -> None:
        """Misspell a key, then do what the message suggests."""
        seen = self._grpo("config", "validate", "grpo.num_promts_per_step=8").end(
            START_S, code=2
        )
        self._ratio("misspelled key", seen.took_s, ERROR_RATIO)
        meant = re.search(r"did you mean '([^']+)'", seen.words)
        assert meant, seen.text
        seen = self._grpo("config", "validate", f"{meant[1]}=8").end(START_S)
        assert "is valid" in seen.words, seen.text
        assert not (self._folder / "runs").exists()

    def train(self) -> None:
        """Train on a custom reward, and press Ctrl-C after some steps."""
        run = self._grpo("train", "grpo.max_num_steps=2000", "output_dir=runs/mine")
        first_s = run.wait_for(r"\b[1-9]\d*/2000", RUN_S)
        self._ratio("first step", first_s, FIRST_STEP_RATIO)
        run.press_ctrl_c()
        run.end(START_S, code=130)
        assert "--resume" in run.words, run.text
        assert self._steps("mine"), "Ctrl-C kept no checkpoint"

    def resume(self) -> None:
        """Resume it, and stop it again later."""
        before = max(self._steps("mine"))
        run = self._rl("train", "grpo", "--resume", "runs/mine")
        run.wait_for(rf"\b(?!{before}/)[1-9]\d*/2000", RUN_S)
        run.press_ctrl_c()
        run.end(START_S, code=130)
        assert max(self._steps("mine")) > before, run.text

    def second_run(self) -> None:
        """Be denied the same folder, with three ways out, and take one."""
        again = ("train", "grpo.max_num_steps=4", "output_dir=runs/mine")
        refused = self._grpo(*again).end(START_S, code=2)
        for way in ("--resume", "--overwrite", "another"):
            assert way in refused.words, refused.text
        assert len(self._steps("mine")), "the refusal has deleted something"
        done = self._grpo(*again, "--overwrite").end(RUN_S)
        assert "max_num_steps (4) reached" in done.words, done.text
        assert self._steps("mine") == [4]
        self._check_run("mine", done)

    def evaluate(self) -> None:
        seen = self._rl(
            "eval", "runs/mine", "--data", "rows.jsonl", "--max-samples", "8"
        ).end(RUN_S)
        assert "reward" in seen.words, seen.text

    def generate(self) -> None:
        seen = self._rl("generate", "runs/mine", "123 ", "--max-new-tokens", "6")
        seen.end(START_S)
        self._ratio("generate", seen.took_s, GENERATE_RATIO)

    def start(self) -> None:
        """Start a custom run as in the README, and look at its page."""
        wrote = self._rl("init", "my-run", "--yes").end(START_S)
        assert "cd my-run && rl train run.yaml" in wrote.words, wrote.text
        checked = self._rl("envs", "check", "reward.py:reward", "--data", "rows.jsonl",
                           inside="my-run").end(START_S)  # fmt: skip
        assert "0 failed" in checked.words, checked.text
        for number, seed in enumerate((0, 1), start=1):
            done = self._rl("train", "run.yaml", "stages.grpo.grpo.max_num_steps=4",
                            f"seed={seed}", inside="my-run").end(RUN_S)  # fmt: skip
            run = self._folder / "my-run" / "runs" / f"run-00{number}"
            # The next command suggested at the end, verbatim.
            shown = re.search(r"See it: rl (report \S+)", done.words)
            assert shown, done.text
            assert shown[1] == f"report {run}", done.text
            self._rl(*shown[1].split()).end(START_S)
            page = (run / "report.html").read_text()
            assert "val:accuracy" in page, "the page has no held-out accuracy"

    def compare(self) -> None:
        """Compare both runs: listed, on one page, and by their first difference."""
        runs = [f"runs/run-00{number}" for number in (1, 2)]
        listed = self._rl("runs", inside="my-run").end(START_S)
        for name in ("run-001", "run-002", "finished"):
            assert name in listed.words, listed.text
        written = self._rl("report", *runs, "-o", "compared.html", inside="my-run")
        written.end(START_S)
        page = (self._folder / "my-run" / "compared.html").read_text()
        for name in ("run-001", "run-002"):
            assert name in page, f"the page lacks {name}"
        found = self._rl("diff", *runs, inside="my-run").end(START_S, code=1)
        assert "The runs part at" in found.words, found.text
        assert "seed" in found.words, found.text

    def sft(self) -> None:
        self._train_on("sft", "chat.jsonl")

    def dpo(self) -> None:
        self._train_on("dpo", "pairs.jsonl")

    def serve(self) -> None:
        """Serve the model, and send it three requests with OpenAI's client."""
        if "--engine" not in self._rl("serve", "--help").end(START_S).words:
            sys.stdout.write("serve: left out, there is no engine without vLLM\n")
            return
        has_client = self._run(str(self._python), "-c", "import openai")
        try:
            has_client.end(START_S)
        except AssertionError:
            sys.stdout.write("serve: left out, openai is not installed\n")
            return
        self._write("client.py", CLIENT)
        server = self._rl("serve", "model", "--engine", "huggingface", "--port", "0")
        server.wait_for(r"http://127\.0\.0\.1:\d+/v1", RUN_S)
        address = re.search(r"http://127\.0\.0\.1:\d+/v1", server.words)
        assert address
        asked = self._run(str(self._python), "client.py", address[0]).end(START_S)
        for word in ("models: ", "tokens: ", "parts: "):
            assert word in asked.words, asked.text
        server.press_ctrl_c()
        server.end(START_S)

    def check_nothing_is_left(self, step: str) -> None:
        """Check that a step left no process, and nothing outside its folder.

        Raises:
            AssertionError: It did.
        """
        mark = self._env[MARK]
        _, alive = psutil.wait_procs(processes_with(MARK, mark), 60)
        names = [" ".join(process.cmdline())[:80] for process in alive]
        assert not names, f"{step} has left processes: {names}"
        # Ray keeps its sessions' logs there; the size is printed at the end. The ports
        # taken are locks of empty files. Building a model creates the cache folder of
        # torch.compile.
        kept = {f"ray-{os.getuid()}", f"rl-ports-{os.getuid()}"}
        kept.add(f"torchinductor_{getpass.getuser()}")
        left = sorted({path.name for path in self._temp.iterdir()} - kept)
        assert not left, f"{step} has left in the temporary folder: {left}"

    def kept_by_ray(self) -> str:
        """Return the size of Ray's sessions in the temporary folder, in MB."""
        folder = self._temp / f"ray-{os.getuid()}" / "ray"
        sessions = list(folder.glob("session_2*"))
        files = [path for session in sessions for path in session.rglob("*")]
        size = sum(path.lstat().st_size for path in files if path.is_file()) / 1e6
        return f"{len(sessions)} sessions of Ray kept in its folder, {size:.1f} MB"

    def _train_on(self, algorithm: str, data: str) -> None:
        done = self._rl(
            "train", algorithm, *COMMON, f"data.train={data}",
            f"{algorithm}.max_num_steps=4", "policy.train_global_batch_size=8",
            f"output_dir=runs/{algorithm}",
        ).end(RUN_S)  # fmt: skip
        assert "max_num_steps (4) reached" in done.words, done.text
        self._check_run(algorithm, done)

    def _check_run(self, name: str, done: Command) -> None:
        """Check the contents of a run folder, and that the end of the run names it."""
        run = self._folder / "runs" / name
        for file in ("run.json", "config.yaml", "result.json", "metrics.jsonl"):
            assert (run / file).is_file(), file
        picture = (run / "curve.png").read_bytes()
        assert picture.startswith(b"\x89PNG"), "curve.png is no picture"
        figures = json.loads((run / "result.json").read_text())
        assert figures["steps"] == 4, figures
        assert "curve.png" in done.words, done.text

    def _grpo(self, *arguments: str) -> Command:
        verbs = 2 if arguments[0] == "config" else 1
        return self._rl(
            *arguments[:verbs], "grpo", *COMMON, "data.train=rows.jsonl",
            "env.name=reward", "env.settings.file=reward.py",
            "policy.generation.max_new_tokens=8", "grpo.num_generations_per_prompt=4",
            *(("grpo.num_prompts_per_step=8",) if verbs == 1 else ()),
            *arguments[verbs:],
        )  # fmt: skip

    def _rl(self, *arguments: str, inside: str = "") -> Command:
        program = str(self._python.parent / "rl")
        return self._run(program, *arguments, inside=inside)

    def _run(self, *arguments: str, inside: str = "") -> Command:
        return Command(arguments, self._folder / inside, self._env)

    def _import_s(self) -> float:
        began_s = time.monotonic()
        self._run(str(self._python), "-c", "import torch, ray").end(START_S)
        return time.monotonic() - began_s

    def _ratio(self, what: str, took_s: float, most: float) -> None:
        ratio = took_s / self._empty_s
        sys.stdout.write(f"{what}: {took_s:.1f} s, {ratio:.1f} x import torch, ray\n")
        assert ratio <= most, f"{what} takes {ratio:.1f} x, at most {most:g}"

    def _steps(self, name: str) -> list[int]:
        folders = (self._folder / "runs" / name / "checkpoints").glob("step_*")
        return sorted(int(folder.name.removeprefix("step_")) for folder in folders)

    def _write(self, name: str, text: str) -> None:
        (self._folder / name).write_text(text)

    def _rows(self, name: str, rows: list[dict[str, object]]) -> None:
        self._write(f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
