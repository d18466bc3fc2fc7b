"""The tokenizer of a checkpoint: the files it was loaded from, byte for byte.

A tokenizer that is loaded and saved again may change: for some models transformers
chooses the class by the model's type, and that class keeps the vocabulary and replaces
the rest. So files are copied, and no loaded object is written.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

from rl_distributed.errors import CheckpointError
from rl_models.checkpoint.hub import check_hub_name
from rl_models.checkpoint.tokenizer_copy import TOKENIZER_FILES, copy_tokenizer_files
from rl_models.tokens.difference import tokenizer_difference
from rl_models.tokens.tokenizer import (
    check_tokenizer_folder,
    holds_tokenizer,
    load_tokenizer,
    read_chat_template,
)

__all__ = ["save_tokenizer"]

logger = logging.getLogger(__name__)

_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
_SETTINGS = "tokenizer_config.json"
# Compared once per process and not at every checkpoint, as it loads both tokenizers.
_compared: set[tuple[str, str | None]] = set()


def save_tokenizer(source: str, chat_template: str | None, folder: Path) -> bool:
    """Copy the tokenizer of a folder or hub name.

    Args:
        source: A model folder, a folder with tokenizer files, or a hub name.
        chat_template: Jinja text, or a file that holds it, in place of the tokenizer's
            own template.
        folder: Target folder, created if missing.

    Returns:
        False where the source is a folder without a tokenizer.

    Raises:
        CheckpointError: The folder cannot be written.
        ModelLoadError: The source is neither a folder nor known to the hub.
    """
    given = Path(source).expanduser()
    if given.is_dir() and not holds_tokenizer(given):
        return False
    local = check_tokenizer_folder(source) or _from_hub(source)
    template = None if chat_template is None else read_chat_template(chat_template)
    try:
        copy_tokenizer_files(local, folder)
        if template is not None:
            _replace_template(folder, template)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the tokenizer to {folder}: {error}; free disk space or "
            "choose another checkpoint_dir"
        ) from error
    if (source, chat_template) not in _compared:
        _compared.add((source, chat_template))
        _compare(str(local), template, folder)
    return True


def _from_hub(name: str) -> Path:
    check_hub_name(name)
    from huggingface_hub import snapshot_download  # noqa: PLC0415

    return Path(snapshot_download(name, allow_patterns=list(TOKENIZER_FILES)))


def _replace_template(folder: Path, template: str) -> None:
    """Write the one template that counts, and drop all others."""
    for name in _TEMPLATES:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    file = folder / _SETTINGS
    if file.is_file():
        settings = json.loads(file.read_text(encoding="utf-8"))
        if settings.pop("chat_template", None) is not None:
            text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
            file.write_text(text, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _compare(source: str, template: str | None, folder: Path) -> None:
    """Warn if the copy is read differently from its source."""
    saved = load_tokenizer(folder)
    found = tokenizer_difference(load_tokenizer(source, template), saved)
    if found is not None:
        logger.warning(
            "the tokenizer saved in %s is read as %s, and not as in %s: %s. The type "
            "of the model beside it decides that; load the tokenizer from %s when you "
            "use the checkpoint.",
            folder,
            type(saved).__name__,
            source,
            found,
            source,
        )
