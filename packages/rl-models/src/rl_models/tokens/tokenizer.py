"""Loading a tokenizer, and the few ids that generation needs from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rl_models.checkpoint.hub import check_hub_name
from rl_models.errors import ModelLoadError

__all__ = ["decode_rows", "load_tokenizer", "pad_token_id", "stop_token_ids"]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


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
    name = str(name_or_path)
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not any((folder / file).exists() for file in _TOKENIZER_FILES):
            raise ModelLoadError(
                f"The folder {folder} holds no tokenizer: none of "
                f"{', '.join(_TOKENIZER_FILES)} is in it. Save one there with "
                "tokenizer.save_pretrained(...), or set policy.tokenizer.name."
            )
        name = str(folder)
    elif _looks_like_path(name):
        raise ModelLoadError(
            f"The tokenizer folder {folder} does not exist. Correct the path, or give "
            "a name on the hub such as 'organisation/model'."
        )
    else:
        check_hub_name(name)
    # AutoTokenizer goes by the model type for some models, and would replace a
    # tokenizer that was saved with a folder by another with the same vocabulary.
    # (Imported here: it takes seconds, and what is wrong is found before.)
    import transformers  # noqa: PLC0415

    name_of_loader = (
        "PreTrainedTokenizerFast" if _is_generic(folder) else "AutoTokenizer"
    )
    loader = getattr(transformers, name_of_loader)
    try:
        tokenizer = loader.from_pretrained(name, padding_side="right")
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"Cannot load the tokenizer {name!r}: {error}") from error
    if chat_template is not None:
        tokenizer.chat_template = _read_template(chat_template)
    return tokenizer


def _is_generic(folder: Path) -> bool:
    """Whether a folder says that its `tokenizer.json` is all there is to know."""
    settings = folder / "tokenizer_config.json"
    if not settings.is_file() or not (folder / "tokenizer.json").is_file():
        return False
    try:
        name = json.loads(settings.read_text(encoding="utf-8")).get("tokenizer_class")
    except ValueError as error:
        raise ModelLoadError(f"{settings} is not valid JSON: {error}") from error
    return name in ("TokenizersBackend", "PreTrainedTokenizerFast")


def _looks_like_path(name: str) -> bool:
    """Whether a name that is no folder was meant as one."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def _read_template(text: str) -> str:
    if "{" in text:
        return text
    path = Path(text).expanduser()
    if not path.is_file():
        raise ModelLoadError(
            f"policy.tokenizer.chat_template is neither Jinja text nor a file: {text!r}"
        )
    return path.read_text()


def pad_token_id(tokenizer: Any) -> int:
    """The id that fills rows: the pad token, else the end-of-text token, else 0.

    Lengths and masks decide what counts, so an id that is also a real token is safe.
    """
    for value in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if value is not None:
            return int(value)
    return 0


def stop_token_ids(tokenizer: Any, generation_config: Any = None) -> list[int]:
    """Ids that end a text: the tokenizer's own and those that the model was saved with.

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
    """Text of one span of each row.

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
