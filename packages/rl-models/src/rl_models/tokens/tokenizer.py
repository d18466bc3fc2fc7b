"""Load a tokenizer, and get the few ids that generation needs."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Protocol

from rl_models.checkpoint.hub import check_hub_name
from rl_models.checkpoint.model_folder import read_model_config
from rl_models.errors import ModelLoadError
from rl_models.tokens.difference import tokenizer_difference

__all__ = [
    "SpecialTokens",
    "check_tokenizer_folder",
    "decode_rows",
    "holds_tokenizer",
    "load_tokenizer",
    "pad_token_id",
    "read_chat_template",
    "stop_token_ids",
]

logger = logging.getLogger(__name__)

# AutoTokenizer would choose the same class, after a second and a half of imports.
_MODEL_TYPES = {"Qwen2Tokenizer": ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


class SpecialTokens(Protocol):
    """The tokens of a tokenizer that rows can be padded with."""

    @property
    def pad_token_id(self) -> int | None:
        """The padding token, if there is one."""
        ...

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-text token, if there is one."""
        ...


def load_tokenizer(name_or_path: str | Path, chat_template: str | None = None) -> Any:
    """Load the tokenizer of a folder or of a hub name.

    Args:
        name_or_path: A folder with tokenizer files, or a name on the hub.
        chat_template: Jinja text that replaces the tokenizer's own template, or the
            path of a file that holds it.

    Raises:
        ModelLoadError: The folder or its tokenizer files are missing, or the name is
            not known.
    """
    local = check_tokenizer_folder(name_or_path)
    name = str(name_or_path if local is None else local)
    if local is None:
        check_hub_name(name)
    # Imported here: it takes seconds, and the checks above need none of it.
    import transformers  # noqa: PLC0415

    class_name = _class_name(local) if local is not None else "AutoTokenizer"
    is_generic = class_name == "PreTrainedTokenizerFast"
    tokenizer = _load(getattr(transformers, class_name), name)
    if local is not None and is_generic and (local / "config.json").is_file():
        _warn_if_read_otherwise(local, tokenizer)
    if chat_template is not None:
        tokenizer.chat_template = read_chat_template(chat_template)
    return tokenizer


def check_tokenizer_folder(name_or_path: str | Path) -> Path | None:
    """Check that a tokenizer folder exists; return None if it must be a hub name.

    Raises:
        ModelLoadError: The folder does not exist or holds no tokenizer.
    """
    name = str(name_or_path)
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not holds_tokenizer(folder):
            raise ModelLoadError(
                f"The folder {folder} holds no tokenizer: none of "
                f"{', '.join(_TOKENIZER_FILES)} is in it. Save one there with "
                "tokenizer.save_pretrained(...), or set policy.tokenizer.name."
            )
        return folder
    if _looks_like_path(name):
        raise ModelLoadError(
            f"The folder {str(folder)!r}, where the tokenizer shall come from, does "
            "not exist. Correct the path, or give a name on the hub such as "
            "'organisation/model'."
        )
    return None


def _load(loader: Any, name: str) -> Any:
    try:
        # Rows are right-padded everywhere; some models' tokenizers default to the left.
        return loader.from_pretrained(name, padding_side="right")
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"Cannot load the tokenizer {name!r}: {error}") from error


def _warn_if_read_otherwise(folder: Path, tokenizer: Any) -> None:
    """Warn if others read a folder differently from its `tokenizer.json`.

    AutoTokenizer chooses by the model type for some models, and then takes a class that
    keeps the vocabulary of a tokenizer and replaces the rest.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415

    try:
        plain = _load(AutoTokenizer, str(folder))
    except ModelLoadError:
        return
    found = tokenizer_difference(tokenizer, plain)
    if found is not None:
        model_type = (read_model_config(folder) or {}).get("model_type")
        logger.warning(
            "%s: transformers' AutoTokenizer, and with it vLLM's server, reads the "
            "tokenizer of this folder as %s because its model is a %s, and not as "
            "tokenizer.json says: %s. This program goes by tokenizer.json. For the "
            "same tokens everywhere, keep the tokenizer in a folder without "
            "config.json.",
            folder,
            type(plain).__name__,
            model_type,
            found,
        )


def holds_tokenizer(folder: Path) -> bool:
    """Return whether a folder has the files of a tokenizer."""
    return any((folder / file).is_file() for file in _TOKENIZER_FILES)


def _class_name(folder: Path) -> str:
    """Return the class of transformers that reads the tokenizer of a folder.

    It is `PreTrainedTokenizerFast` if the folder declares that its `tokenizer.json` is
    complete.
    """
    file = folder / "tokenizer_config.json"
    if not file.is_file() or not (folder / "tokenizer.json").is_file():
        return "AutoTokenizer"
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{file} is not valid JSON: {error}") from error
    name = settings.get("tokenizer_class")
    if name in ("TokenizersBackend", "PreTrainedTokenizerFast"):
        return "PreTrainedTokenizerFast"
    if name in _MODEL_TYPES and "auto_map" not in settings:
        config = folder / "config.json"
        model = read_model_config(folder) if config.is_file() else None
        if (model or {}).get("model_type") in _MODEL_TYPES[name]:
            return str(name)
    return "AutoTokenizer"


def _looks_like_path(name: str) -> bool:
    """Return whether a name that is no folder was meant as one."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def read_chat_template(text: str) -> str:
    """Return the Jinja text of a setting: the setting itself, or the file it names.

    Raises:
        ModelLoadError: It is neither.
    """
    if "{" in text:
        return text
    path = Path(text).expanduser()
    if not path.is_file():
        raise ModelLoadError(
            f"policy.tokenizer.chat_template is neither Jinja text nor a file: {text!r}"
        )
    return path.read_text(encoding="utf-8")


def pad_token_id(tokenizer: SpecialTokens) -> int:
    """Return the id that pads rows: the pad token, else the end-of-text token, else 0.

    Lengths and masks decide what counts, so an id that is also a real token is safe.
    """
    for value in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if value is not None:
            return int(value)
    return 0


def stop_token_ids(tokenizer: Any, generation_config: Any = None) -> list[int]:
    """Return the ids that end a text: the tokenizer's and those saved with the model.

    Args:
        tokenizer: Its end-of-text token comes first.
        generation_config: The model's `generation_config`; chat models list the end of
            a turn there.
    """
    saved = getattr(generation_config, "eos_token_id", None)
    more = saved if isinstance(saved, list) else [saved]
    candidates = [tokenizer.eos_token_id, *more]
    return list(dict.fromkeys(int(value) for value in candidates if value is not None))


def decode_rows(
    tokenizer: Any, token_ids: Any, starts: Any, ends: Any, *, skip_special: bool = True
) -> list[str]:
    """Return the text of one span of each row.

    Args:
        tokenizer: The tokenizer.
        token_ids: [B, S] tensor of token ids.
        starts: [B] first position of each span.
        ends: [B] position after the last one.
        skip_special: Leave special tokens out of the text.
    """
    spans = [
        row[start:end]
        for row, start, end in zip(
            token_ids.tolist(), _as_list(starts), _as_list(ends), strict=True
        )
    ]
    texts: list[str] = tokenizer.batch_decode(spans, skip_special_tokens=skip_special)
    return texts


def _as_list(values: Any) -> list[int]:
    return values.tolist() if hasattr(values, "tolist") else list(values)
