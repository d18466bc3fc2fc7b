"""`python -m rl_algorithms.compat.nemo_rl script.py [args]`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from rl_algorithms.compat.nemo_rl.finder import install
from rl_algorithms.compat.nemo_rl.name_map import read_name_map

_USAGE = """\
usage: python -m rl_algorithms.compat.nemo_rl SCRIPT [ARGUMENT ...]
       python -m rl_algorithms.compat.nemo_rl --table

Runs a script that imports nemo_rl with the names of this project in its place.
--table writes the map of all names, as Markdown.
"""


def main() -> None:
    """Run the script named on the command line as `__main__`."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(_USAGE)
        sys.exit(0 if arguments else 2)
    if arguments == ["--table"]:
        sys.stdout.write(read_name_map().to_markdown())
        return
    script = Path(arguments[0])
    if not script.is_file():
        sys.stderr.write(f"there is no script {script}; check the path\n")
        sys.exit(2)
    install()
    sys.argv = arguments
    # As Python does for scripts: the script's folder replaces the current one.
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
