"""This package, plain transformers and vLLM read saved tokenizers alike."""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rl_distributed.errors import CheckpointError, ConfigError
from rl_models import PolicyConfig
from rl_models.build.model import (
    ModelBuildConfig,
    TokenizerBuildConfig,
    build_model,
    build_tokenizer,
)
from rl_models.environments import VLLM
from rl_models.errors import ModelLoadError
from rl_models.policy.preflight import check_policy
from rl_models.testing import build_tiny_model
from rl_models.tokens import tokenizer_files
from rl_models.tokens.chat import DEFAULT_CHAT_TEMPLATE
from rl_models.tokens.difference import tokenizer_difference
from rl_models.tokens.tokenizer import load_tokenizer
from rl_models.tokens.tokenizer_files import save_tokenizer

TURN = "<|turn|>"
KINDS = {
    "characters": {"characters": "0123456789=+ab \n"},
    "vocabulary": {"kind": "vocabulary", "vocabulary": ["ab", "abc", "1", "+", " "]},
    "byte_bpe": {
        "kind": "byte_bpe",
        "training_texts": ["low lower lowest 1 + 2 = 3\n"] * 9,
        "vocab_size": 300,
    },
}
FAMILIES = [
    (architecture, kind)
    for architecture in ("qwen2", "qwen3", "llama")
    for kind in KINDS
    if (architecture, kind) != ("qwen2", "vocabulary")
]
CHAT = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3é"}]
# Known and unknown characters, whole and broken special tokens, composed letters.
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.text("0123456789=+abcxyz \n\t", max_size=8),
        st.sampled_from([TURN, "<eos>", "<pad>", "<unk>", "<|turn", "low", "e\u0301"]),
    ),
    max_size=6,
).map("".join)


def _config(architecture: str, kind: str, template: str | None) -> ModelBuildConfig:
    return ModelBuildConfig.from_dict(
        {
            "architecture": architecture,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": 64,
            "tokenizer": {
                **KINDS[kind],
                "special_tokens": [TURN],
                "chat_template": template,
            },
        }
    )


def _checkpoint(source: Path, folder: Path, template: str | None = None) -> Path:
    """Write a folder as a training run leaves it, without its weights."""
    folder.mkdir(parents=True)
    shutil.copy(source / "config.json", folder)
    assert save_tokenizer(str(source), template, folder)
    return folder


class Family:
    """A built tokenizer, and every way to load its saved files."""

    def __init__(self, architecture: str, kind: str, folder: Path) -> None:
        template = DEFAULT_CHAT_TEMPLATE if kind == "characters" else None
        config = _config(architecture, kind, template)
        self.built = build_tokenizer(config.tokenizer, 64, config.architecture)
        self.model = build_model(config, folder / "model")
        self.first = _checkpoint(self.model, folder / "first")
        # A run that starts from another run's checkpoint.
        self.second = _checkpoint(self.first, folder / "second")
        folders = self.model, self.first, self.second
        self.readings = {
            f"{reader.__name__} of {path.name}": reader(path)
            for path in folders
            for reader in (load_tokenizer, AutoTokenizer.from_pretrained)
        }


@pytest.fixture(scope="module", params=FAMILIES, ids="-".join)
def family(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(*request.param, tmp_path_factory.mktemp("family"))


def _seen(tokenizer: Any, text: str) -> list[Any]:
    ids = tokenizer(text)["input_ids"]
    bare = tokenizer(text, add_special_tokens=False)["input_ids"]
    shown = [tokenizer.decode(ids, skip_special_tokens=skip) for skip in (True, False)]
    return [ids, bare, shown]


@given(text=TEXTS)
@settings(max_examples=60, deadline=None)
def test_every_reader_gives_what_was_built(family: Family, text: str) -> None:
    expected = _seen(family.built, text)
    for name, tokenizer in family.readings.items():
        assert _seen(tokenizer, text) == expected, name


def test_templates_and_special_tokens_are_those_that_were_built(
    family: Family,
) -> None:
    for tokenizer in family.readings.values():
        assert tokenizer_difference(family.built, tokenizer) is None
        assert tokenizer.all_special_tokens == family.built.all_special_tokens
        assert len(tokenizer) == len(family.built)
        if family.built.chat_template is not None:
            shown = [
                reader.apply_chat_template(CHAT, tokenize=False)
                for reader in (family.built, tokenizer)
            ]
            assert shown[0] == shown[1]


def test_files_are_copied_byte_for_byte(family: Family) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (family.second / name).read_bytes() == (family.model / name).read_bytes()


def test_the_file_itself_says_the_same(family: Family) -> None:
    """Readers of `tokenizer.json` alone get the same tokens."""
    bare = Tokenizer.from_file(str(family.second / "tokenizer.json"))
    for text in ("1+2=3", "x9y2z1=", f"a{TURN}é low"):
        ids = family.built(text, add_special_tokens=False)["input_ids"]
        assert bare.encode(text, add_special_tokens=False).ids == ids


IN_VLLM = """
import json, sys
from vllm.tokenizers import get_tokenizer
folders, texts = json.loads(sys.argv[1])
seen = []
for folder in folders:
    reader = get_tokenizer(folder)
    rows = [reader(text)["input_ids"] for text in texts]
    seen.append([rows, [reader.decode(row) for row in rows]])
print(json.dumps(seen))
"""


@pytest.mark.slow
def test_vllm_reads_them_alike(tmp_path: Path) -> None:
    texts = ["1+2=3", "x9y2z1=", f"a{TURN}é low<eos>", " e\u0301 \n\t", "ab abc \u4f60"]
    families = [Family(*names, tmp_path / "-".join(names)) for names in FAMILIES]
    folders = [str(family.second) for family in families]
    python = VLLM.prepare().runtime_env["py_executable"]
    done = subprocess.run(
        [*shlex.split(python), "-c", IN_VLLM, json.dumps([folders, texts])],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    for family, (rows, shown) in zip(families, seen, strict=True):
        assert rows == [family.built(text)["input_ids"] for text in texts]
        assert shown == [family.built.decode(row) for row in rows]


# --- tokenizers that were not built here ------------------------------------------


def _as_before(folder: Path) -> Path:
    """Write a Qwen2 folder with a tokenizer that its own class does not reproduce."""
    model = build_tiny_model(folder)
    generic = build_tokenizer(TokenizerBuildConfig(characters="0123456789 >="))
    generic.save_pretrained(model)
    return model


def test_old_folders_are_read_as_they_say_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _as_before(tmp_path / "old")
    with caplog.at_level(logging.WARNING):
        assert load_tokenizer(folder)("x9")["input_ids"] == [2, 12]
    assert "Qwen2Tokenizer" in caplog.text
    assert str(folder) in caplog.text
    caplog.clear()
    # Only the tokenizer itself is read alike by all.
    alone = tmp_path / "alone"
    assert save_tokenizer(str(folder), None, alone)
    assert load_tokenizer(alone)("x9")["input_ids"] == [2, 12]
    assert AutoTokenizer.from_pretrained(alone)("x9")["input_ids"] == [2, 12]
    assert str(alone) not in caplog.text


def test_a_copy_that_is_read_otherwise_is_told(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizer_files, "_compared", set())
    source = tmp_path / "source"
    PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(TokenizerBuildConfig())._tokenizer,
        unk_token="<unk>",
    ).save_pretrained(source)
    settings_file = source / "tokenizer_config.json"
    record = json.loads(settings_file.read_text())
    # AutoTokenizer does not know the class, and takes the generic one.
    settings_file.write_text(json.dumps({**record, "tokenizer_class": "OwnTokenizer"}))
    target = tmp_path / "target"
    build_tiny_model(target)
    with caplog.at_level(logging.WARNING):
        save_tokenizer(str(source), None, target)
    assert f"saved in {target} is read as Qwen2Tokenizer" in caplog.text


@pytest.mark.parametrize("as_file", [True, False])
def test_another_template_replaces_all_that_the_source_has(
    tmp_path: Path, as_file: bool
) -> None:
    model = build_model(_config("llama", "characters", "{{ 'old' }}"), tmp_path / "m")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("{{ 'tool' }}")
    record = json.loads((model / "tokenizer_config.json").read_text())
    record["chat_template"] = "{{ 'older' }}"
    (model / "tokenizer_config.json").write_text(json.dumps(record))
    template = "{{ messages[0].content }}"
    if as_file:
        (tmp_path / "t.jinja").write_text(template)
    given_template = str(tmp_path / "t.jinja") if as_file else template
    saved = _checkpoint(model, tmp_path / "saved", given_template)
    for reader in (load_tokenizer, AutoTokenizer.from_pretrained):
        assert reader(saved).chat_template == template
    assert load_tokenizer(model).chat_template != template
    again = _checkpoint(saved, tmp_path / "again")
    assert load_tokenizer(again).chat_template == template


def test_a_folder_without_a_tokenizer_has_none_to_save(
    tmp_path: Path, tiny_model: Path
) -> None:
    assert not save_tokenizer(str(tiny_model), None, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    with pytest.raises(ModelLoadError, match="not exist"):
        save_tokenizer("./nowhere", None, tmp_path / "saved")


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, tiny_folder: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write the tokenizer to"):
        save_tokenizer(str(tiny_folder), None, tmp_path / "file" / "saved")


def test_a_tokenizer_needs_no_model_beside_it(
    tmp_path: Path, tiny_folder: Path
) -> None:
    alone = tmp_path / "alone"
    save_tokenizer(str(tiny_folder), None, alone)
    config = PolicyConfig.from_dict(
        {
            "model_name": str(tiny_folder),
            "max_total_sequence_length": 32,
            "tokenizer": {"name": str(alone)},
        }
    )
    check_policy(config, 1)
    (alone / "tokenizer.json").unlink()
    (alone / "tokenizer_config.json").unlink()
    with pytest.raises((ConfigError, ModelLoadError), match="holds no tokenizer"):
        check_policy(config, 1)


def test_differences_are_shown() -> None:
    digits, more = (
        build_tokenizer(TokenizerBuildConfig(characters=text)) for text in ("01", "012")
    )
    assert tokenizer_difference(digits, digits) is None
    assert tokenizer_difference(digits, more) == "there are 5 and 6 tokens"
    other = build_tokenizer(TokenizerBuildConfig(characters="10"))
    found = tokenizer_difference(digits, other)
    assert found == "the text '0' becomes the tokens [3] and [4]"
