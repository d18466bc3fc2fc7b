"""A subset of the parity matrix; `nox -s parity` runs all of it.

Every layout of one family runs with every loss, every family with the most sharded
layouts; in CI a covering half of both.
"""

from __future__ import annotations

import re
from itertools import product

import pytest
import torch
from matrix_cells import cells
from parity.cells import (
    LAYOUTS,
    LOSSES,
    MIXTURES,
    Layout,
    held_by_stages,
    layouts_of,
    reference_with_routers,
    refusal_of,
    refusal_of_context,
    refusal_of_experts,
    refusal_of_stages,
    run_ends,
    run_rank,
    run_resumed,
    run_saving,
    saved_bytes,
)
from parity.families import FAMILIES, build_family
from parity.measure import Difference, Matrix
from parity.ranks import RankProcesses
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    GraniteConfig,
    Phi3Config,
)

_CUT_MOST = (
    "one rank",
    "FSDP 2 x TP 2, sequence",
    "TP 2, packed",
    "CP 2, packed",
    "CP 2 x TP 2, sequence",
    "FSDP 2 x PP 2",
)


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


def _with_losses(layouts):
    """Return each layout with each loss; in CI with GRPO's and an alternating one."""
    others = [loss for loss in LOSSES if loss != "GRPO"]
    covering = [
        (layout, loss)
        for number, layout in enumerate(layouts)
        for loss in ("GRPO", others[number % len(others)])
    ]
    return cells(product(layouts, LOSSES), covering)


def _with_families(families):
    """Return each family with each layout; in CI with alternate layouts."""
    covering = [
        (family, layout)
        for number, family in enumerate(families)
        for layout in _CUT_MOST[number % 2 :: 2]
    ]
    return cells(product(families, _CUT_MOST), covering)


@pytest.mark.parametrize(("layout", "loss"), _with_losses(layouts_of("qwen3")))
def test_every_layout_computes_what_one_process_computes(matrix, layout, loss):
    assert matrix("qwen3").difference(layout, loss).complaint() is None


@pytest.mark.parametrize(
    ("family", "layout"), _with_families([f for f in FAMILIES if f != "qwen3"])
)
def test_every_family_computes_what_transformers_computes(matrix, family, layout):
    assert matrix(family).difference(layout, "SFT").complaint() is None


@pytest.mark.parametrize(
    ("layout", "loss"),
    _with_losses([name for name in LAYOUTS if name not in layouts_of("qwen3")]),
)
def test_experts_compute_what_one_process_computes(matrix, layout, loss):
    assert matrix("qwen3_moe").difference(layout, loss).complaint() is None


def test_ranks_that_share_tokens_keep_their_part_of_the_activations(matrix, ranks):
    folder = matrix("qwen3").folder
    whole, half = (
        ranks.run(number, saved_bytes, folder, Layout(number, {"parallelism": axes}))
        for number, axes in ((1, {}), (2, {"context": 2}))
    )
    assert half < 0.55 * whole


def test_stages_keep_their_own_layers(matrix, ranks):
    first, last = ranks.run(2, held_by_stages, matrix("llama").folder)
    whole = AutoModelForCausalLM.from_pretrained(matrix("llama").folder)
    assert first + last == [name for name, _ in whole.named_parameters()]
    assert {name.split(".")[2] for name in first if ".layers." in name} == {"0"}
    # A tied embedding is needed at both ends.
    first, last = ranks.run(2, held_by_stages, matrix("qwen3").folder)
    assert set(first) & set(last) == {"model.embed_tokens.weight"}


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_ranks_without_a_trained_token_take_part(matrix, ranks, chunk_size):
    folder = matrix("qwen3").folder
    wanted = ranks.run(1, run_ends, folder, Layout(1))
    settings = {"parallelism": {"context": 4}}
    settings["dtensor"] = {"shard_layers": True, "logprob_chunk_size": chunk_size}
    found = ranks.run(4, run_ends, folder, Layout(4, settings))
    torch.testing.assert_close(
        torch.tensor(found), torch.tensor(wanted), atol=1e-6, rtol=1e-6
    )


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_adapters_see_all_tokens_that_are_shared(matrix, ranks, family):
    folder = matrix(family).folder
    one, shared = (
        ranks.run(
            number,
            run_rank,
            folder,
            Layout(number, {"parallelism": axes, "lora": {"r": 2}}),
            "SFT",
        )
        for number, axes in ((1, {}), (4, {"context": 2}))
    )
    assert Difference.of(shared, one).complaint() is None


@pytest.mark.parametrize("layout", ["LoRA, PP 2", "LoRA, TP 2 x PP 2, sequence"])
def test_adapters_of_stages_are_saved_sent_and_resumed(matrix, ranks, tmp_path, layout):
    matrix("qwen3").difference("LoRA", "SFT")  # writes the initial adapter
    folder, chosen = matrix("qwen3").folder, LAYOUTS[layout]
    found = ranks.run(chosen.num_ranks, run_saving, folder, chosen, str(tmp_path))
    adapter = load_file(tmp_path / "weights" / "adapter" / "adapter_model.safetensors")
    assert adapter.keys() == found["sent"].keys() == found["specs"].keys()
    for name, value in adapter.items():
        assert torch.equal(found["sent"][name], value)
        assert tuple(value.shape) == found["specs"][name]
    assert {".0." in name for name in adapter} == {True, False}, "of both stages"
    for target, number in ((LAYOUTS["LoRA"], 1), (chosen, chosen.num_ranks)):
        resumed = ranks.run(number, run_resumed, folder, target, str(tmp_path))
        assert resumed.keys() == found["weights"].keys()
        for name, value in found["weights"].items():
            # The sum with the base is rounded as the ranks add it up.
            torch.testing.assert_close(resumed[name], value, atol=1e-6, rtol=0)


def test_layers_that_peft_takes_for_experts_are_refused(matrix, ranks):
    folder = matrix("qwen3_moe").folder
    layout = Layout(1, {"lora": {"r": 2}})
    with pytest.raises(RuntimeError, match="name no layers that peft takes for"):
        ranks.run(1, run_rank, folder, layout, "SFT")


@pytest.mark.parametrize(
    ("num_ranks", "axes"), [(1, {}), (2, {"tensor": 2, "sequence": True})]
)
@pytest.mark.parametrize("family", MIXTURES)
def test_routers_are_balanced_as_transformers_does_it(
    matrix, ranks, family, num_ranks, axes
):
    folder = matrix(family).folder
    settings = {"router_loss_weight": 0.5, "activation_checkpointing": num_ranks == 2}
    layout = Layout(num_ranks, {"parallelism": axes, "dtensor": settings})
    found = ranks.run(num_ranks, run_rank, folder, layout, "SFT", 1)
    wanted = reference_with_routers(folder, 0.5)
    assert Difference.of(found, wanted).complaint() is None
    plain = reference_with_routers(folder, 0.0)
    assert Difference.of(found, plain).gradients > 1e-3


def test_rows_that_reach_another_expert_are_found_at_the_start(matrix, ranks):
    folder = matrix("mixtral").folder
    told = ranks.run(2, refusal_of_experts, folder, True)
    assert "expert cannot share the experts of" in told
    assert "in a check of" in told
    assert ranks.run(2, refusal_of_experts, folder) == "it was not refused"
    told = ranks.run(2, refusal_of_experts, matrix("qwen3").folder)
    assert "Qwen3ForCausalLM has none as transformers keeps those" in told


def test_a_gradient_that_is_not_added_up_is_found_at_the_start(matrix, ranks):
    # Head norms see one rank's heads: left out of the plan, they train wrongly.
    folder = matrix("qwen3").folder
    told = ranks.run(2, refusal_of, folder, "_is_head_norm")
    assert re.search(
        r"check of its first layer, the gradient of \S*_norm\.weight", told
    )
    assert ranks.run(2, refusal_of, folder) == "it was not refused"


def test_tokens_that_are_not_put_together_rightly_are_found_at_the_start(matrix, ranks):
    folder = matrix("qwen3").folder
    told = ranks.run(2, refusal_of_context, folder, "part_of")
    assert "context cannot share the rows of" in told
    assert "in a check of its first layer" in told
    assert ranks.run(2, refusal_of_context, folder) == "it was not refused"


def test_a_model_whose_attention_is_out_of_reach_shares_no_tokens(ranks, tmp_path):
    shape = {"vocab_size": 24, "hidden_size": 32, "num_attention_heads": 4}
    bloom = BloomConfig(**shape, n_layer=1, pad_token_id=0)
    AutoModelForCausalLM.from_config(bloom).save_pretrained(tmp_path / "bloom")
    told = ranks.run(2, refusal_of_context, str(tmp_path / "bloom"))
    assert "BloomForCausalLM does not look its attention up; set it to 1" in told


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


def test_models_that_have_no_stages_are_refused(ranks, tmp_path):
    other = GPT2Config(vocab_size=24, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    AutoModelForCausalLM.from_config(other).save_pretrained(tmp_path / "gpt2")
    told = ranks.run(2, refusal_of_stages, str(tmp_path / "gpt2"))
    assert "GPT2Model has no embed_tokens, layers, norm" in told
    shape = {"vocab_size": 24, "hidden_size": 32, "num_attention_heads": 4}
    small = {"intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
    scaled = GraniteConfig(**shape, **small, embedding_multiplier=2.0)
    AutoModelForCausalLM.from_config(scaled).save_pretrained(tmp_path / "granite")
    told = ranks.run(2, refusal_of_stages, str(tmp_path / "granite"))
    assert "GraniteModel changes embeddings before its first layer" in told


def test_a_difference_is_found():
    one = Difference(0.0, 0.0, 2e-5, 0.0)
    assert one.complaint() == "gradients 2.0e-05 (limit 1e-05)"
    assert Difference(float("nan"), 0.0, 0.0, 0.0).complaint() is not None
    worst = Difference.worst([one, Difference(1e-7, 0.0, 0.0, 0.0)])
    assert worst == Difference(1e-7, 0.0, 2e-5, 0.0)
