from __future__ import annotations

import subprocess
import sys

import pytest

import rl_models


def test_public_names_exist_and_are_all_listed():
    for name in rl_models.__all__:
        assert getattr(rl_models, name) is not None
    assert len(set(rl_models.__all__)) == len(rl_models.__all__)
    with pytest.raises(AttributeError, match="no_such"):
        rl_models.no_such  # noqa: B018


def test_import_loads_nothing_heavy():
    code = (
        "import sys, rl_models, rl_models.config, rl_models.interfaces;"
        "import rl_models.planning.phases, rl_models.planning.model_config;"
        "print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "[]"
