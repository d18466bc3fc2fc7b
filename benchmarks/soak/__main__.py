"""`python -m benchmarks.soak`: whether a long run grows, process by process.

Makes a real run with `rl train` for each kind, with the server of its page and a client
beside it, takes a sample every second, and compares the samples after step 300. A table
per kind is printed; the exit code is 1 if anything has grown by more than its limit, in
all and in the second half:

- a process: 1 % of its memory (at least 512 KiB), one open file or one thread per 1,000
  steps; the server of the page, which holds the metrics of all steps: 128 MiB in all,
- the object store and the shared memory: what they held at most in the first half,
- the parts of the run folder: 1 % per 1,000 steps; the time line and the kept answers:
  their own size; of files that keep a line per step, the bytes per step are reported,
- the run folder and the folder of Ray's session: one file per 1,000 steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.soak.growth import FIRST_STEP, findings, table
from benchmarks.soak.picture import draw
from benchmarks.soak.recipe import KINDS, PAGE_SERVER, soak_recipe
from benchmarks.soak.sampling import Sampler

RL = [sys.executable, "-m", "rl_cli"]
PERIOD_S = 1.0
DEADLINE_S = 3 * 3600.0
END_S = 120.0


class PageClient:
    """Asks the server of a page for news, like a browser.

    Args:
        url: Address that `rl watch` has printed.
    """

    def __init__(self, url: str) -> None:
        self._place, _, self._token = url.partition("?")
        self._version = 0
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(self) -> None:
        """Fetch the data of the page if they are new."""
        url = f"{self._place}data?{self._token}&seen={self._version}"
        with self._opener.open(url, timeout=END_S) as answer:
            text = answer.read()
        if text:
            self._version = json.loads(text)["version"]


def soak(kind: str, num_steps: int, folder: Path) -> list[dict[str, Any]]:
    """Make a run and return its samples, which are written beside it, too."""
    recipe, run = folder / f"{kind}.yaml", folder / kind
    recipe.write_text(yaml.safe_dump(soak_recipe(kind, num_steps), sort_keys=False))
    output = folder / f"{kind}.out"
    command = [*RL, "train", str(recipe), f"output_dir={run}"]
    samples: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        text = stack.enter_context(output.open("w"))
        lines = stack.enter_context(samples_file(folder, kind).open("w"))
        training = stack.enter_context(_ended(command, stdout=text, stderr=text))
        while training.poll() is None and not (run / "run.json").is_file():
            time.sleep(PERIOD_S)
        _check(training, kind, output)
        watch = [*RL, "watch", str(run), "--port", "0", "--json"]
        server = stack.enter_context(
            _ended(watch, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        )
        assert server.stdout is not None
        client = PageClient(json.loads(server.stdout.readline())["url"])
        driver, other = psutil.Process(training.pid), psutil.Process(server.pid)
        sampler = Sampler(run, driver, {PAGE_SERVER: other})
        end_s = time.monotonic() + DEADLINE_S
        while training.poll() is None:
            if time.monotonic() > end_s:
                raise TimeoutError(f"the {kind} run has not ended in {DEADLINE_S:g} s")
            client.ask()
            if (sample := sampler.sample()) is not None:
                samples.append(sample)
                lines.write(json.dumps(sample) + "\n")
            time.sleep(PERIOD_S)
    _check(training, kind, output)
    return samples


def _check(training: subprocess.Popen[bytes], kind: str, output: Path) -> None:
    """Raise an error if a run has failed."""
    if training.returncode:
        tail = output.read_text()[-3000:]
        raise RuntimeError(f"the {kind} run ended with {training.returncode}: {tail}")


@contextlib.contextmanager
def _ended(command: list[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process, and end it with the block."""
    process = subprocess.Popen(command, **options)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(END_S)


def samples_file(folder: Path, kind: str) -> Path:
    """Return the file with the samples of a run."""
    return folder / f"{kind}.samples.jsonl"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--kind", choices=[*KINDS, "both"], default="both")
    parser.add_argument("--folder", type=Path, help="of the runs, which are kept there")
    parser.add_argument(
        "--judge", action="store_true", help="only judge the samples in --folder"
    )
    parser.add_argument("--json", type=Path, help="file for the findings")
    parser.add_argument("--picture", type=Path, help="file for the curves")
    options = parser.parse_args()
    if options.steps < 2 * FIRST_STEP:
        parser.error(f"--steps must be at least {2 * FIRST_STEP}: got {options.steps}")
    if options.judge and options.folder is None:
        parser.error("--judge needs --folder")
    # By an exception, so that the run and the server end with this process.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as made:
        sys.exit(_measure(options, options.folder or Path(made)))


def _measure(options: argparse.Namespace, folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[dict[str, Any]]] = {}
    written: list[dict[str, Any]] = []
    for kind in KINDS if options.kind == "both" else (options.kind,):
        if options.judge:
            lines = samples_file(folder, kind).read_text().splitlines()
            runs[kind] = [json.loads(line) for line in lines]
        else:
            runs[kind] = soak(kind, options.steps, folder)
        found = findings(runs[kind], options.steps)
        written += [{"kind": kind, **finding.to_dict()} for finding in found]
        sys.stdout.write(f"{options.steps} {kind} steps\n\n{table(found)}\n\n")
        sys.stdout.flush()
    breaches = [one for one in written if one["verdict"] == "breach"]
    for one in breaches:
        sys.stdout.write(f"breach: {json.dumps(one)}\n")
    if options.json is not None:
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    if options.picture is not None:
        draw(options.picture, runs, options.steps)
    return 1 if breaches else 0


if __name__ == "__main__":
    main()
