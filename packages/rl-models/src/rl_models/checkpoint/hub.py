"""Quick checks that a name is on the hub, and the variables that loading it needs.

Without a network the hub's own client retries each of several files, for more than a
minute in all. A single request before that, with a deadline, detects a wrong name or a
missing network.
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
# Where the hub's client looks for it; the file of `hf auth login` is found by HF_HOME.
_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_REMEDIES = {
    "model": "give the path of a folder that save_pretrained has written, or a name on "
    "the hub such as 'organisation/model'",
    "dataset": "give the path of a file or folder, or a name on the hub such as "
    "'organisation/dataset'",
}


def check_hub_name(name: str) -> None:
    """Check that the hub, or its local cache, knows a model.

    Args:
        name: A name that is no folder.

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

    Workers get no secret of the program unless it is passed to them.

    Args:
        names: Folders or hub names; None: nothing to load.

    Returns:
        The hub's token if this process has one and a name is no folder; else {}.
    """
    if all(name is None or Path(name).is_dir() for name in names):
        return {}
    return {name: os.environ[name] for name in _TOKENS if os.environ.get(name)}


def why_not_on_hub(name: str, kind: Literal["model", "dataset"]) -> str | None:
    """Return why a model or data set cannot be had from the hub; None if it can.

    The hub is not asked for names in the cache. Its own variables apply: `HF_ENDPOINT`,
    `HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE`.

    Args:
        name: A name that is no file or folder.
        kind: Whether it is a model or a data set.
    """
    # Imported by name and late: checks of local folders must not pay for it.
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
        # The exceptions of a failed connection depend on the version of the client.
        return (
            f"{start}, and {constants.ENDPOINT} cannot be asked for it "
            f"({type(error).__name__}: {error}): {remedy}; without a network, download "
            "it elsewhere and bring its folder here"
        )
    return None
