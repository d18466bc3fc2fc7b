"""Whether a name is on the hub, found out quickly, and what a process needs to load it.

The hub's own client tries each of several files again and again where there is no
network, for a minute and more in all. One question before that, with a deadline, tells
a wrong name and a missing network from something that is there.
"""

from __future__ import annotations

import os
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Literal

from rl_models.checkpoint.model_folder import check_model_folder
from rl_models.errors import ModelLoadError

__all__ = ["check_hub_name", "check_model", "hub_secrets", "why_not_on_hub"]

_DEADLINE_S = 10.0
# As the hub's client looks for it; the file of `hf auth login` is found by HF_HOME.
_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_REMEDIES = {
    "model": "give the path of a folder that save_pretrained has written, or a name on "
    "the hub such as 'organisation/model'",
    "dataset": "give the path of a file or folder, or a name on the hub such as "
    "'organisation/dataset'",
}


def check_hub_name(name: str) -> None:
    """Check that the hub, or the cache of what came from it, knows a model.

    Args:
        name: What is no folder.

    Raises:
        ModelLoadError: There is no such model, it may not be read, or the hub gives no
            answer.
    """
    reason = why_not_on_hub(name, "model")
    if reason is not None:
        raise ModelLoadError(reason)


def check_model(name_or_path: str | PathLike[str]) -> Path | None:
    """Check that a model is there: a folder, or a name that the hub knows.

    It needs neither torch nor transformers, which take seconds to import.

    Returns:
        The folder; None for a hub name.

    Raises:
        ModelLoadError: See `check_model_folder` and `check_hub_name`.
    """
    folder = check_model_folder(os.fspath(name_or_path))
    if folder is None:
        check_hub_name(str(name_or_path))
    return folder


def hub_secrets(*names: str | PathLike[str] | None) -> dict[str, str]:
    """Return the variables that a worker needs to load models or tokenizers.

    Workers get no secret of the program unless it is handed to them.

    Args:
        names: Folders or hub names; None: nothing to load.

    Returns:
        The hub's token where this process has one and a name is no folder; else {}.
    """
    if all(name is None or Path(name).is_dir() for name in names):
        return {}
    return {name: os.environ[name] for name in _TOKENS if os.environ.get(name)}


def why_not_on_hub(name: str, kind: Literal["model", "dataset"]) -> str | None:
    """Return why the hub does not give a model or data set; None: it does.

    What the cache has is not asked for. The hub's own variables count: `HF_ENDPOINT`,
    `HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE`.

    Args:
        name: What is no file or folder.
        kind: Which of the two.
    """
    hub = import_module("huggingface_hub")
    constants = import_module("huggingface_hub.constants")
    errors = import_module("huggingface_hub.errors")
    cache, remedy = Path(constants.HF_HUB_CACHE), _REMEDIES[kind]
    snapshots = cache / f"{kind}s--{name.replace('/', '--')}" / "snapshots"
    if snapshots.is_dir() and any(snapshots.iterdir()):
        return None
    start = f"the {kind} {name!r} is neither a folder here nor in the cache ({cache})"
    try:
        hub.HfApi().repo_info(name, repo_type=kind, timeout=_DEADLINE_S)
    except errors.OfflineModeIsEnabled:
        return (
            f"{start}, and HF_HUB_OFFLINE forbids to ask the hub for it: {remedy} that "
            "the cache has, or unset the variable"
        )
    except errors.GatedRepoError:
        return (
            f"the {kind} {name!r} may be read only by those whom its owner lets: ask "
            f"for access at {constants.ENDPOINT}/{name} and set HF_TOKEN"
        )
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        return (
            f"{start}, and {constants.ENDPOINT} knows no such name: correct it, set "
            f"HF_TOKEN if it is private, or {remedy}"
        )
    except Exception as error:
        # Which exceptions come depends on the versions of the HTTP client.
        return (
            f"{start}, and {constants.ENDPOINT} cannot be asked for it "
            f"({type(error).__name__}: {error}): {remedy}; without a network, download "
            "it elsewhere and bring its folder here"
        )
    return None
