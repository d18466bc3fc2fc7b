"""Parts of the package that need an extra, and torch, which is one of them.

torch is large, and much works without it: clusters, worker groups, queues, batches with
numpy columns. So it is an extra, and modules that use it say

```python
if TYPE_CHECKING:
    import torch
else:
    from rl_distributed.extras import torch
```

They can then be imported without it, and import it when they first use it.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

from rl_distributed.errors import MissingExtraError

__all__ = [
    "import_extra",
    "installed_torch",
    "leave_torch_out",
    "require_torch",
    "torch",
]


def import_extra(module: str, extra: str, package: str, needed_by: str) -> Any:
    """Import a module that comes with an extra of rl-distributed.

    Args:
        module: What to import.
        extra: Name of the extra.
        package: What the message calls the missing package.
        needed_by: What cannot be had without it.

    Raises:
        MissingExtraError: It cannot be imported; the message says what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{needed_by} needs the package {package}, which cannot be imported "
            f"({error}); pip install 'rl-distributed[{extra}]'"
        ) from error


def require_torch(needed_by: str) -> Any:
    """Import torch.

    Args:
        needed_by: What cannot be had without it, for the message.

    Raises:
        MissingExtraError: It is not installed.
    """
    return import_extra("torch", "torch", "torch", needed_by)


@functools.cache
def installed_torch() -> Any:
    """Import torch; None where it is not installed, or was left out."""
    if _left_out and "torch" not in sys.modules:
        return None
    try:
        return importlib.import_module("torch")
    except ImportError:
        return None


_left_out: list[bool] = []


def leave_torch_out() -> None:
    """Let the batches of this process hold numpy arrays, though torch may be installed.

    For programs that only judge texts: torch takes seconds to import. It has no effect
    where torch has been imported already; what needs torch itself still imports it.
    """
    if "torch" not in sys.modules:
        _left_out.append(True)
        installed_torch.cache_clear()


class _LazyTorch:
    """Stands for the module torch, which it imports when an attribute is read."""

    def __getattribute__(self, name: str) -> Any:
        # Not `__getattr__`: a lookup that fails first takes longer than all of this.
        if name[:2] == "__":
            # Inspection asks every global for these; it is no use of torch.
            return object.__getattribute__(self, name)
        module = installed_torch() or require_torch(f"torch.{name}")
        return getattr(module, name)

    def __reduce__(self) -> str:
        return "torch"


torch: Any = _LazyTorch()
