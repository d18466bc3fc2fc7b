import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_distributed.errors import ConfigError
from rl_models.build.model import (
    ModelBuildConfig,
    TokenizerBuildConfig,
    build_model,
    build_tokenizer,
)
from rl_models.tokens.tokenizer import load_tokenizer

TOKENIZERS = {
    "characters": TokenizerBuildConfig(characters="0123456789 >\n."),
    "vocabulary": TokenizerBuildConfig(
        kind="vocabulary", vocabulary=["ab", "abc", "c", " ", "(", "["]
    ),
    "byte_bpe": TokenizerBuildConfig(
        kind="byte_bpe", training_texts=["low lower lowest"] * 5, vocab_size=280
    ),
}


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_plain_transformers_loads_what_is_built(tmp_path, architecture):
    config = ModelBuildConfig(architecture=architecture, num_key_value_heads=2)
    folder = build_model(config, tmp_path / "model", seed=3)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id == 1
    assert tokenizer.pad_token_id == 0
    assert tokenizer.padding_side == "right"
    ids = tokenizer("1 + 2 = 3", return_tensors="pt")["input_ids"]
    assert torch.isfinite(model(ids).logits).all()


TEXTS = {"characters": "12 > 3.\n", "vocabulary": "abcab ([c", "byte_bpe": "löw 12er"}


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_plain_transformers_gives_the_same_tokens(tmp_path, architecture, kind):
    settings = {"architecture": architecture, "tokenizer": TOKENIZERS[kind]}
    if architecture == "qwen2" and kind == "vocabulary":
        with pytest.raises(ValueError, match="take architecture llama or qwen3"):
            ModelBuildConfig(**settings)
        return
    folder = build_model(ModelBuildConfig(**settings), tmp_path)
    expected = build_tokenizer(TOKENIZERS[kind])(TEXTS[kind])["input_ids"]
    for tokenizer in (AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)):
        assert tokenizer(TEXTS[kind])["input_ids"] == expected
        assert tokenizer.decode(expected) == TEXTS[kind]


def test_the_longest_token_is_taken():
    tokenizer = build_tokenizer(TOKENIZERS["vocabulary"])
    assert tokenizer.tokenize("abcab[") == ["abc", "ab", "["]


def test_unknown_characters_and_special_tokens():
    config = TokenizerBuildConfig(characters="ab", special_tokens=["<|turn|>"])
    tokenizer = build_tokenizer(config)
    assert tokenizer("aXb<|turn|><eos>")["input_ids"] == [4, 2, 5, 3, 1]


def test_seed_decides_the_weights_and_the_global_state_is_kept(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    weights = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        folder = build_model(ModelBuildConfig(), tmp_path / name, seed)
        model = AutoModelForCausalLM.from_pretrained(folder)
        weights.append(model.model.layers[0].mlp.up_proj.weight)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"hidden_size": 30}, "even multiple"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"tokenizer": {"kind": "vocabulary"}}, "vocabulary must not be empty"),
        ({"tokenizer": {"kind": "byte_bpe"}}, "training_texts must not be empty"),
        ({"hiden_size": 64}, "hidden_size"),
    ],
)
def test_impossible_shapes_are_refused(data, message):
    with pytest.raises(ConfigError, match=message):
        ModelBuildConfig.from_dict(data)


def test_chat_template_is_saved(tmp_path):
    config = ModelBuildConfig(tokenizer=TokenizerBuildConfig(chat_template="{{ 1 }}"))
    tokenizer = AutoTokenizer.from_pretrained(build_model(config, tmp_path))
    assert tokenizer.chat_template == "{{ 1 }}"
