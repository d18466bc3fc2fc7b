"""rl-distributed where torch is not installed, and where it is but unused."""

from __future__ import annotations

import subprocess
import sys

import pytest
from rl_distributed_scripts import SCRIPTS, run_script

from rl_distributed.batch.arrays import as_array, is_tensor, to_numpy
from rl_distributed.errors import MissingExtraError, RegistryError
from rl_distributed.extras import import_extra, require_torch

DEADLINE_S = 240.0


def test_all_that_needs_no_torch_works_without_it() -> None:
    assert run_script("numpy_or_torch.py", PYTHONPATH=str(SCRIPTS / "no_torch")) == {
        "torch": False
    }


def test_importing_every_module_does_not_import_torch() -> None:
    code = (
        "import json, pkgutil, sys, rl_distributed\n"
        "path = rl_distributed.__path__\n"
        "for found in pkgutil.walk_packages(path, 'rl_distributed.'):\n"
        "    __import__(found.name)\n"
        "[getattr(rl_distributed, name) for name in rl_distributed.__all__]\n"
        "print(json.dumps('torch' in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.stdout.strip() == "false", done.stderr


def test_a_missing_extra_is_named() -> None:
    with pytest.raises(MissingExtraError) as caught:
        import_extra("no_such_module", "wandb", "nothing", "the sink")
    assert str(caught.value) == (
        "the sink needs the package nothing, which cannot be imported (No module named "
        "'no_such_module'); pip install 'rl-distributed[wandb]'"
    )
    assert isinstance(caught.value, RegistryError)
    assert isinstance(caught.value, ImportError)


def test_a_tensor_is_one_only_with_torch() -> None:
    torch = require_torch("this test")
    assert is_tensor(torch.zeros(2))
    assert not is_tensor([0.0])
    given = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    assert as_array(given, "float32") is given
    assert to_numpy(given).tolist() == [0.0, 0.0]
    assert as_array([1, 0], "bool").dtype == torch.bool
