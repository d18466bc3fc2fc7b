import json

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from rl_distributed.errors import ConfigError
from rl_models.build.model import TokenizerBuildConfig, build_tokenizer
from rl_models.errors import ModelLoadError
from rl_models.tokens.chat import DEFAULT_CHAT_TEMPLATE, encode_messages, render_chat
from rl_models.tokens.difference import tokenizer_difference
from rl_models.tokens.tokenizer import (
    _MODEL_TYPES,
    _class_name,
    decode_rows,
    load_tokenizer,
    pad_token_id,
    stop_token_ids,
)

MESSAGES = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]


@pytest.fixture
def tokenizer():
    letters = "abcdefghijklmnopqrstuvwxyz0123456789+|<>\n "
    return build_tokenizer(TokenizerBuildConfig(characters=letters))


def test_missing_folders_are_named(tmp_path):
    with pytest.raises(ModelLoadError, match=r"no/such.* does not exist"):
        load_tokenizer("./no/such")
    with pytest.raises(ModelLoadError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="not valid JSON"):
        load_tokenizer(tmp_path)


def test_chat_template_comes_from_text_or_file(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0].content }}")
    for template in ("{{ messages[0].content }}", str(file)):
        loaded = load_tokenizer(tmp_path, template)
        assert render_chat(loaded, MESSAGES) == "1+1"
    with pytest.raises(ModelLoadError, match="neither Jinja text nor a file"):
        load_tokenizer(tmp_path, "nowhere.jinja")


@pytest.mark.parametrize(
    ("name", "model_type"),
    [(name, kind) for name, kinds in _MODEL_TYPES.items() for kind in kinds],
)
def test_a_class_that_is_known_is_the_one_that_transformers_finds(
    tmp_path, name, model_type
):
    tokenizer = build_tokenizer(TokenizerBuildConfig(), architecture="qwen2")
    assert type(tokenizer).__name__ == name
    tokenizer.save_pretrained(tmp_path)
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    loaded, found = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert type(loaded) is type(found)
    assert tokenizer_difference(loaded, found) is None


def test_another_model_than_the_known_ones_is_left_to_transformers(tmp_path):
    tokenizer = build_tokenizer(TokenizerBuildConfig(), architecture="qwen2")
    tokenizer.save_pretrained(tmp_path)
    assert _class_name(tmp_path) == "AutoTokenizer"
    AutoConfig.for_model("gpt2").save_pretrained(tmp_path)
    assert _class_name(tmp_path) == "AutoTokenizer"
    AutoConfig.for_model("qwen2").save_pretrained(tmp_path)
    assert _class_name(tmp_path) == "Qwen2Tokenizer"
    file = tmp_path / "tokenizer_config.json"
    own = json.loads(file.read_text()) | {"auto_map": {"AutoTokenizer": [None, "x.Y"]}}
    file.write_text(json.dumps(own))
    assert _class_name(tmp_path) == "AutoTokenizer"


def test_conversations_become_text_and_tokens(tokenizer):
    tokenizer.chat_template = DEFAULT_CHAT_TEMPLATE
    text = render_chat(tokenizer, MESSAGES)
    assert text == "<|user|>\n1+1\n<|assistant|>\n2\n<|assistant|>\n"
    ids = encode_messages(tokenizer, MESSAGES, add_generation_prompt=False)
    assert tokenizer.decode(ids) == text.removesuffix("<|assistant|>\n")


def test_conversations_that_cannot_be_rendered(tokenizer):
    with pytest.raises(ConfigError, match="no chat template"):
        render_chat(tokenizer, MESSAGES)
    with pytest.raises(ConfigError, match=r"Message 1 .* lacks content"):
        render_chat(tokenizer, [MESSAGES[0], {"role": "user"}], template="x")
    strict = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ConfigError, match=r"\['user', 'assistant'\]: roles must"):
        render_chat(tokenizer, MESSAGES, template=strict)


def test_ids_that_generation_needs(tokenizer):
    assert pad_token_id(tokenizer) == 0
    tokenizer.pad_token = None
    assert pad_token_id(tokenizer) == 1
    assert stop_token_ids(tokenizer) == [1]

    class Saved:
        eos_token_id = 1

    assert stop_token_ids(tokenizer, Saved) == [1]
    Saved.eos_token_id = [7, 1]
    assert stop_token_ids(tokenizer, Saved) == [1, 7]


def test_spans_of_rows_are_decoded(tokenizer):
    ids = torch.tensor(
        [tokenizer("abc+12")["input_ids"], tokenizer("xyz+45")["input_ids"]]
    )
    assert decode_rows(tokenizer, ids, [0, 4], torch.tensor([3, 6])) == ["abc", "45"]
