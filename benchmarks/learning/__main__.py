"""Train small models by each method and draw what they learn.

    python -m benchmarks.learning grpo dapo --seeds 1 2 3

Each NAME is trained once per seed, in minutes on two cores. The curves of held-out data
go to `docs/assets/learning/NAME.json` and are drawn in `docs/assets/learning-NAME.png`;
`--draw-only` draws existing measurements. Seeds measured earlier stay in the file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.learning.methods import EXPERIMENTS
from benchmarks.learning.records import draw, measure

ASSETS = Path(__file__).parents[2] / "docs" / "assets"


def main() -> None:
    """Measure and draw the named experiments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=sorted(EXPERIMENTS), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--out", type=Path, help="file; default see above")
    parser.add_argument("--draw-only", action="store_true")
    options = parser.parse_args()
    for name in options.names:
        path = options.out or ASSETS / "learning" / f"{name}.json"
        if not options.draw_only:
            measure(name, options.seeds, path)
        picture = path.with_suffix(".png")
        if options.out is None:
            picture = ASSETS / f"learning-{name}.png"
        draw(json.loads(path.read_text()), picture)


if __name__ == "__main__":
    main()
