"""The `rl` command: recipes, runs and run reports.

`rl --help` lists the commands. From Python, use `rl_algorithms`; this package is only
its command line.
"""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("rl-cli")
