"""Whether a name can be a model on the hub, found out quickly.

The hub's own client tries each of several files again and again where there is no
network, for about a minute in all. One question before that, with a deadline, tells a
wrong name and a missing network from a model that is there.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from rl_models.errors import ModelLoadError

__all__ = ["check_hub_name"]

_DEADLINE_S = 10.0
_REMEDY = (
    "give the path of a folder that save_pretrained has written, or a name on the hub "
    "such as 'organisation/model'"
)


def check_hub_name(name: str) -> None:
    """Check that the hub, or the cache of what came from it, knows a model.

    What the cache has is not asked for. The hub's own variables count: `HF_ENDPOINT`,
    `HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE`.

    Args:
        name: What is no folder.

    Raises:
        ModelLoadError: There is no such model, it may not be read, or the hub gives no
            answer.
    """
    hub = import_module("huggingface_hub")
    constants = import_module("huggingface_hub.constants")
    errors = import_module("huggingface_hub.errors")
    cache = Path(constants.HF_HUB_CACHE)
    snapshots = cache / f"models--{name.replace('/', '--')}" / "snapshots"
    if snapshots.is_dir() and any(snapshots.iterdir()):
        return
    start = f"the model {name!r} is neither a folder here nor in the cache ({cache})"
    try:
        hub.HfApi().model_info(name, timeout=_DEADLINE_S)
    except errors.OfflineModeIsEnabled:
        raise ModelLoadError(
            f"{start}, and HF_HUB_OFFLINE forbids to ask the hub for it: {_REMEDY} "
            "that the cache has, or unset the variable"
        ) from None
    except errors.GatedRepoError as error:
        raise ModelLoadError(
            f"the model {name!r} may be read only by those whom its owner lets: ask "
            f"for access at {constants.ENDPOINT}/{name} and set HF_TOKEN"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ModelLoadError(
            f"{start}, and {constants.ENDPOINT} knows no such name: correct it, set "
            f"HF_TOKEN if the model is private, or {_REMEDY}"
        ) from error
    except Exception as error:
        # Which exceptions come depends on the versions of the HTTP client.
        raise ModelLoadError(
            f"{start}, and {constants.ENDPOINT} cannot be asked for it "
            f"({type(error).__name__}: {error}): {_REMEDY}; without a network, "
            "download the model elsewhere and bring its folder here"
        ) from error
