"""The version of the package, as it is installed."""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("rl-models")
