import sys

import rl_algorithms

result = rl_algorithms.train(
    model=sys.argv[1],
    dataset="nvidia/OpenMathInstruct-2",
    reward_fn=lambda p, r: 1.0 if "correct" in r else 0.0,
)
