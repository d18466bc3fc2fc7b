"""`nox -s mutants`: change the sources in small ways; each change must fail a test.

The tests of each mutant are first run against the sources as they are, and must pass.
Then the mutants follow one by one. A mutant that passes its tests has survived: they
miss something. One whose tests could not be run has no verdict. Either fails the run.

Usage: `nox -s mutants`, `nox -s mutants -- --subset`, `nox -s mutants -- --only NAME`.
"""

from __future__ import annotations

import argparse
import fnmatch
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tools.mutants.catalog import Mutant, load_mutants, problems
from tools.mutants.runner import Outcome, Run, Slot, import_heavy, run_all

CHANGES = Path(__file__).parent / "changes"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="nox -s mutants --",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add = parser.add_argument
    add("--subset", action="store_true", help="only the mutants of the short run")
    add("--only", action="append", metavar="NAME", help="only these; * is a wildcard")
    add("--jobs", type=int, default=2, help="how many run at a time (2)")
    add("--timeout", type=float, default=180.0, help="seconds for one mutant (180)")
    add("--changes", type=Path, default=CHANGES, help="folder of the list")
    return parser.parse_args(arguments)


def chosen(mutants: Sequence[Mutant], options: argparse.Namespace) -> list[Mutant]:
    """Return what the command line selects."""
    return [
        mutant
        for mutant in mutants
        if (mutant.subset or not options.subset)
        and (
            options.only is None
            or any(fnmatch.fnmatch(mutant.name, name) for name in options.only)
        )
    ]


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)  # noqa: T201


def show(outcome: Outcome, name: str, verdict: str) -> None:
    """Print a line of the table."""
    test = outcome.failed_test.rpartition("/")[2] if verdict == "killed" else ""
    say(f"{name:<52} {verdict:<10} {outcome.seconds:6.1f} s  {test}")


def judge(mutants: Sequence[Mutant], options: argparse.Namespace, folder: Path) -> int:
    """Run the tests unchanged, then with every mutant; return the exit code."""
    root = Path.cwd()
    slots = [Slot(root, folder / f"slot{number}") for number in range(options.jobs)]
    limit_s = options.timeout
    selections = list(dict.fromkeys(mutant.tests for mutant in mutants))
    say(f"{len(selections)} selections of tests against the sources as they are")
    bad: list[tuple[str, Outcome]] = []
    broken = set()
    for outcome in run_all([Run(tests) for tests in selections], slots, limit_s):
        if outcome.verdict != "passed":
            broken.add(outcome.run.tests)
            bad.append((f"unchanged sources, {' '.join(outcome.run.tests)}", outcome))
    counts = Counter({"no verdict": sum(m.tests in broken for m in mutants)})
    say(f"{len(mutants)} mutants")
    runs = [Run(m.tests, m) for m in mutants if m.tests not in broken]
    for outcome in run_all(runs, slots, limit_s):
        assert outcome.run.mutant is not None
        name, verdict = outcome.run.mutant.name, outcome.verdict
        verdict = "SURVIVED" if verdict == "passed" else verdict
        show(outcome, name, verdict)
        counts[verdict.partition(":")[0]] += 1
        if verdict != "killed":
            bad.append((f"{name}: {verdict}", outcome))
    for title, outcome in bad:
        say(f"\n--- {title}\n{outcome.end_of_output}")
    parts = [f"{counts[name]} {name}" for name in ("killed", "SURVIVED", "no verdict")]
    say(f"\n{len(mutants)} mutants: {', '.join(parts)}")
    return 1 if bad else 0


def main(arguments: Sequence[str]) -> int:
    """Check the list, run its selection, and return the exit code."""
    begin = time.monotonic()
    options = parse(arguments)
    mutants = load_mutants(options.changes)
    if found := problems(mutants, Path.cwd()):
        say("\n".join(found))
        return 2
    mutants = chosen(mutants, options)
    if not mutants:
        say("no mutant has such a name")
        return 2
    # Ending the run also stops its child processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    import_heavy()
    with tempfile.TemporaryDirectory(
        prefix="mutants-", ignore_cleanup_errors=True
    ) as folder:
        code = judge(mutants, options, Path(folder))
    say(f"{time.monotonic() - begin:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
