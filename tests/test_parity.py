"""A part of the parity matrix; `nox -s parity` runs all of it.

Every layout runs with every loss of one family, every family with the layouts that cut
the most.
"""

from __future__ import annotations

import re

import pytest
from parity.cells import LAYOUTS, LOSSES, refusal_of
from parity.families import FAMILIES, build_family
from parity.measure import Difference, Matrix
from parity.ranks import RankProcesses
from transformers import AutoModelForCausalLM, GPT2Config, Phi3Config

_CUT_MOST = ("one rank", "FSDP 2 x TP 2, sequence", "TP 2, packed")


@pytest.fixture(scope="module")
def ranks():
    processes = RankProcesses(4)
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def matrix(ranks, tmp_path_factory):
    made = {}

    def of(family):
        if family not in made:
            folder = tmp_path_factory.mktemp("parity") / family
            made[family] = Matrix(build_family(family, folder), ranks)
        return made[family]

    return of


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_computes_what_one_process_computes(matrix, layout, loss):
    assert matrix("qwen3").difference(layout, loss).complaint() is None


@pytest.mark.parametrize("layout", _CUT_MOST)
@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "qwen3"])
def test_every_family_computes_what_transformers_computes(matrix, family, layout):
    assert matrix(family).difference(layout, "SFT").complaint() is None


def test_a_gradient_that_is_not_added_up_is_found_at_the_start(matrix, ranks):
    # Norms of heads see one rank's heads: left out of the plan, they train wrong.
    folder = matrix("qwen3").folder
    told = ranks.run(2, refusal_of, folder, "_is_head_norm")
    assert re.search(
        r"check of its first layer, the gradient of \S*_norm\.weight", told
    )
    assert ranks.run(2, refusal_of, folder) == "it was not refused"


def test_layers_that_the_plan_does_not_know_are_refused(ranks, tmp_path):
    shape = {"vocab_size": 24, "hidden_size": 32, "num_attention_heads": 4}
    small = {"intermediate_size": 48, "num_hidden_layers": 1, "pad_token_id": 0}
    fused = Phi3Config(**shape, **small, num_key_value_heads=2)
    AutoModelForCausalLM.from_config(fused).save_pretrained(tmp_path / "phi3")
    told = ranks.run(2, refusal_of, str(tmp_path / "phi3"))
    assert "its layers (Phi3DecoderLayer) have mlp.gate_up_proj.weight" in told
    other = GPT2Config(vocab_size=24, n_embd=32, n_layer=1, n_head=4, n_positions=64)
    AutoModelForCausalLM.from_config(other).save_pretrained(tmp_path / "gpt2")
    told = ranks.run(2, refusal_of, str(tmp_path / "gpt2"))
    assert "GPT2Model has no layers, norm, embed_tokens" in told


def test_a_difference_is_found():
    one = Difference(0.0, 0.0, 2e-5, 0.0)
    assert one.complaint() == "gradients 2.0e-05 (limit 1e-05)"
    assert Difference(float("nan"), 0.0, 0.0, 0.0).complaint() is not None
    worst = Difference.worst([one, Difference(1e-7, 0.0, 0.0, 0.0)])
    assert worst == Difference(1e-7, 0.0, 2e-5, 0.0)
