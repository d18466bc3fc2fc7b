"""Records which configuration keys a process reads; on `PYTHONPATH` of traced runs.

Each first read of a key, outside of the validation of its section, by code of the five
packages appends a line `module.Class.key` to `reads.txt` beside this file: workers get
`PYTHONPATH` from the driver, and hardly any other variable. Nothing is imported that
the process would not import itself: `Config` is patched when its module loads.
"""

import importlib.machinery
import os
import sys

_READS = os.path.join(os.path.dirname(__file__), "reads.txt")
_HOME = "rl_distributed.config.base"
_PACKAGES = ("rl_distributed", "rl_models", "rl_envs", "rl_algorithms", "rl_cli")
# Copying, comparing, checking or showing whole sections reads all of their keys.
_WHOLESALE = ("rl_distributed.config.", "rl_algorithms.trainers.settings.unused_keys")


def _watch(module):
    config, validating = module.Config, module._validating
    plain = config.__getattribute__
    known = set()

    def watched(self, name):
        value = plain(self, name)
        cls = type(self)
        if (
            name in cls.model_fields
            and (cls, name) not in known
            and not validating.get()
        ):
            reader = sys._getframe(1).f_globals.get("__name__", "")
            if reader.startswith(_PACKAGES) and not reader.startswith(_WHOLESALE):
                known.add((cls, name))
                _write(cls, name)
        return value

    config.__getattribute__ = watched


def _write(cls, name):
    owner = next(c for c in cls.__mro__ if name in vars(c).get("__annotations__", {}))
    line = f"{owner.__module__}.{owner.__name__}.{name}\n"
    handle = os.open(_READS, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(handle, line.encode())
    finally:
        os.close(handle)


class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != _HOME:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            _watch(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
