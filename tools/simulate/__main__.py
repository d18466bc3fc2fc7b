"""`nox -s simulate`: run the schedule of asynchronous training in simulated worlds.

First seeded worlds with all kinds of faults, in which every invariant must hold at
every event. Then the known defects, one by one: each must be found within a number of
seeds. A failing world is shrunk and narrated.

Usage: `nox -s simulate`, `nox -s simulate -- --schedules 100000`,
`nox -s simulate -- --seed 17`, `nox -s simulate -- --defect NAME`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence

from tools.simulate.defects import DEFECTS, Defect
from tools.simulate.scenario import draw_scenario
from tools.simulate.search import first_failure
from tools.simulate.shrink import shrink
from tools.simulate.world import Outcome, simulate

MAX_SEEDS = 3_000


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="nox -s simulate --",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add = parser.add_argument
    add("--schedules", type=int, default=10_000, help="how many worlds (10000)")
    add("--first", type=int, default=0, help="seed of the first one (0)")
    add("--seed", type=int, help="tell the story of this one")
    add("--defect", metavar="NAME", help="find this defect and tell how")
    return parser.parse_args(arguments)


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)  # noqa: T201


def tell(outcome: Outcome) -> None:
    """Print the story of a run."""
    told = simulate(outcome.scenario, tells=True)
    say(f"{told.scenario}\n" + "\n".join(told.story))


def tell_smallest(outcome: Outcome) -> None:
    """Print the story of the smallest run that fails in the same way."""
    say(f"seed {outcome.scenario.seed}: {outcome.violation}; making it smaller")
    tell(shrink(outcome))


def explore(first: int, count: int) -> int:
    """Run worlds with the schedule as it is; return the exit code."""
    begin_s, num_events = time.process_time(), 0
    ends: Counter[str] = Counter()
    for seed in range(first, first + count):
        outcome = simulate(draw_scenario(seed))
        if outcome.violation is not None:
            tell_smallest(outcome)
            return 1
        num_events += outcome.num_events
        ends[type(outcome.end).__name__] += 1
    cpu_s = time.process_time() - begin_s
    say(
        f"{count} schedules, {num_events} events, {cpu_s:.0f} s of one core: "
        f"{60 * count / cpu_s:.0f} schedules a minute; every invariant held; "
        f"{ends['Finish']} finished, {ends['Fail']} ended for lack of workers"
    )
    return 0


def find(defect: Defect, *, tells: bool) -> bool:
    """Look for a defect; return whether it was found."""
    with defect.planted():
        outcome = first_failure(range(MAX_SEEDS))
        if outcome is None:
            say(f"{defect.name:<40} SURVIVED {MAX_SEEDS} seeds: {defect.story}")
            return False
        assert outcome.violation is not None
        seed = outcome.scenario.seed
        say(f"{defect.name:<40} seed {seed:<5} {outcome.violation.rule}")
        if tells:
            tell_smallest(outcome)
    return True


def main(arguments: Sequence[str]) -> int:
    """Run the command line's request; return the exit code."""
    options = parse(arguments)
    chosen = [d for d in DEFECTS if d.name == options.defect]
    if options.defect is not None and not chosen:
        say(f"no defect {options.defect}: there are {[d.name for d in DEFECTS]}")
        return 2
    if chosen:
        return 0 if find(chosen[0], tells=True) else 1
    if options.seed is not None:
        outcome = simulate(draw_scenario(options.seed))
        tell(outcome)
        return 0 if outcome.violation is None else 1
    if explore(options.first, options.schedules):
        return 1
    missed = [defect.name for defect in DEFECTS if not find(defect, tells=False)]
    say(f"{len(DEFECTS) - len(missed)} of {len(DEFECTS)} defects found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
