"""`python -m benchmarks.math_judge [--answers N] [--rounds N]`: mathematical answers.

Prints one JSON line: answers that the environment `math` judges per second with a
process per core. Of the answers, drawn with a seed, half are correct but written
differently from the solution: fractions, decimals, roots, products, sets, intervals,
equations, units, texts. It is compared with sympy alone, which parses both sides of as
many Python expressions and simplifies their difference, on as many cores. A second line
has the seconds that a non-terminating comparison costs the other answers of its batch.
`load` is the load average of the last minute.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from rl_envs.worlds.math import MathConfig, MathEnvironment

TARGET_PER_S = 400.0
TIMEOUT_S = 2.0
# Its factorial of a factorial has more digits than fit in memory.
HOSTILE = r"\boxed{((10!)!)!}"


def answers(count: int) -> list[tuple[str, str]]:
    """Return responses and solutions."""
    rng = random.Random(0)
    makers: list[Callable[[int, int], tuple[str, str, str]]] = [
        lambda a, b: (rf"\frac{{{a}}}{{{b}}}", f"{a}/{b}", f"{a}/{b + 1}"),
        lambda a, b: (str(a / 4), rf"\frac{{{a}}}{{4}}", rf"\frac{{{a}}}{{5}}"),
        lambda a, b: (rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{a * a * b}}}", rf"\sqrt{{{b}}}"),
        lambda a, b: (f"(x+{a})(x-{b})", f"x^2+{a - b}x-{a * b}", f"x^2-{a * b}"),
        lambda a, b: (rf"\{{{a},{b}\}}", rf"\{{{b},{a}\}}", rf"\{{{a}\}}"),
        lambda a, b: (f"[{a},{a + b})", f"[{a}, {a + b})", f"[{a},{a + b}]"),
        lambda a, b: (f"x={a * b}", str(a * b), str(a * b + 1)),
        lambda a, b: (rf"{a} \text{{ cm}}", str(a), str(a + 1)),
        lambda a, b: (f"{a},{b:03d}", str(1000 * a + b), str(1000 * a)),
        lambda a, b: (rf"2^{{{a % 20}}}", str(2 ** (a % 20)), str(2 ** (a % 20) + 1)),
    ]
    found = []
    for index in range(count):
        a, b = rng.randint(2, 99), rng.randint(2, 99)
        said, gold, other = makers[index % len(makers)](a, b)
        text = f"We compute this step by step. The answer is \\boxed{{{said}}}."
        found.append((text, gold if rng.random() < 0.5 else other))
    return found


def judge(environment: MathEnvironment, pairs: list[tuple[str, str]]) -> list[float]:
    """Return the reward of each response."""
    logs = [[{"role": "assistant", "content": said}] for said, _ in pairs]
    result = environment.step(logs, [{"ground_truth": gold} for _, gold in pairs])
    return [float(reward) for reward in result.rewards]


def sympy_alone(size: int) -> int:
    """Parse and compare expressions with sympy; return the number of equal ones."""
    import sympy

    rng, equal = random.Random(size), 0
    for _ in range(size):
        a, b = rng.randint(2, 99), rng.randint(2, 99)
        left = sympy.parse_expr(f"(x+{a})*(x-{b})")
        right = sympy.parse_expr(f"x**2+{a - b}*x-{a * b}")
        equal += sympy.simplify(left - right) == 0
    return equal


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=2000, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    before = os.getloadavg()[0]
    pairs = answers(options.answers)
    config = MathConfig(num_workers=cores, timeout_s=TIMEOUT_S)
    environment = MathEnvironment(config)
    rates, alone = [], []
    try:
        rewards = judge(environment, pairs)
        right = sum(rewards) / len(rewards)
        with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as pool:
            list(pool.map(sympy_alone, [8] * cores))
            for _ in range(options.rounds):
                began_s = time.perf_counter()
                assert judge(environment, pairs) == rewards
                rates.append(len(pairs) / (time.perf_counter() - began_s))
                size = len(pairs) // cores
                began_s = time.perf_counter()
                assert list(pool.map(sympy_alone, [size] * cores)) == [size] * cores
                alone.append(size * cores / (time.perf_counter() - began_s))
        batch = pairs[:200]
        began_s = time.perf_counter()
        judge(environment, batch)
        plain_s = time.perf_counter() - began_s
        began_s = time.perf_counter()
        judge(environment, [*batch, (HOSTILE, "1")])
        hostile_s = time.perf_counter() - began_s
    finally:
        environment.shutdown()
    load = [round(before, 2), round(os.getloadavg()[0], 2)]
    rate, limit = statistics.median(rates), statistics.median(alone)
    say(bench="math_judge", workers=cores, load=load, per_s=round(rate, 1),
        slowest_per_s=round(min(rates), 1), fastest_per_s=round(max(rates), 1),
        right=round(right, 3), sympy_alone_per_s=round(limit, 1),
        ratio=round(rate / limit, 2), target=TARGET_PER_S)  # fmt: skip
    say(bench="math_judge_hostile", time_limit_s=TIMEOUT_S, plain_s=round(plain_s, 3),
        with_hostile_s=round(hostile_s, 3))  # fmt: skip


def say(**line: object) -> None:
    """Print one JSON line."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
