"""The two forms of a backend: the whole protocol, and the plain one.

| | whole (`rl_models.interfaces`) | plain |
|---|---|---|
| training | shards, micro-batches, ranks | six methods, one process |
| generation | columns of tokens, seeds, versions | four methods, lists |

The form of a class is inferred from the signatures of its methods.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, cast

from rl_distributed.errors import RegistryError
from rl_models.interfaces import GenerationBackend, TrainingBackend

__all__ = [
    "Form",
    "generation_form",
    "own_method",
    "training_form",
    "with_defaults",
]

Form = Literal["whole", "plain"]
Defaults = TypeVar("Defaults")
Call = tuple[tuple[str, ...], tuple[str, ...]]
"""Names of positional and of keyword arguments of a call."""

_PATHS = ("weights_path", "optimizer_path")
_WHOLE_TRAINING: dict[str, Call] = {
    "setup": (("config",), ("init_reference_model", *_PATHS)),
    "train_step": (
        ("data", "loss_fn"),
        ("eval_mode", "global_batch_size", "micro_batch_size"),
    ),
    "get_logprobs": (("data",), ("micro_batch_size", "reference")),
    "save_checkpoint": ((*_PATHS, "tokenizer_path"), ()),
    "load_checkpoint": (_PATHS, ()),
    "weight_specs": ((), ()),
    "export_weights": (("precision",), ()),
    "shutdown": ((), ()),
}
_PLAIN_TRAINING: dict[str, Call] = {
    "setup": (("config",), ()),
    "train_step": (("batch", "loss_fn"), ()),
    "get_logprobs": (("batch",), ()),
    "save_checkpoint": (("path",), ()),
    "load_checkpoint": (("path",), ()),
    "shutdown": ((), ()),
}
_CONTEXT = ("model_name", "tokenizer_name", "load_weights", "hf_config_overrides")
_WHOLE_GENERATION: dict[str, Call] = {
    "setup": (("config",), (*_CONTEXT, "replica")),
    "generate": (("data",), ("greedy", "sampling")),
    "load_weights": (("tensors", "version"), ()),
    "shutdown": ((), ()),
}
_PLAIN_GENERATION: dict[str, Call] = {
    "setup": (("config",), ()),
    "generate": (("prompts", "sampling_params"), ()),
    "update_weights": (("state_dict",), ()),
    "shutdown": ((), ()),
}


def own_method(backend: type[Any], name: str) -> Any:
    """Return a method that a class defines; None if it has only the protocol's body."""
    # A class that inherits from the protocol has all its methods, with empty bodies.
    for base in backend.__mro__:
        if name in vars(base):
            is_protocol = base in (TrainingBackend, GenerationBackend)
            return None if is_protocol else getattr(backend, name)
    return None


def training_form(name: str, backend: type[Any]) -> Form:
    """Return the form of a training backend.

    Args:
        name: The name that it is registered under.
        backend: Its class.

    Raises:
        RegistryError: It has neither form; the message names the missing methods.
    """
    return _form("training", name, backend, _WHOLE_TRAINING, _PLAIN_TRAINING)


def generation_form(name: str, backend: type[Any]) -> Form:
    """Return the form of a generation backend; see `training_form`."""
    return _form("generation", name, backend, _WHOLE_GENERATION, _PLAIN_GENERATION)


def _form(
    kind: str,
    name: str,
    backend: type[Any],
    whole: Mapping[str, Call],
    plain: Mapping[str, Call],
) -> Form:
    if not isinstance(backend, type):
        raise RegistryError(
            f"{kind} backend {name!r} must be a class: got {backend!r}; decorate the "
            "class, not an object of it"
        )
    if not _problems(backend, whole):
        return "whole"
    problems = _problems(backend, plain)
    if not problems:
        return "plain"
    protocol = f"{kind.capitalize()}Backend"
    raise RegistryError(
        f"{kind} backend {name!r} ({backend.__module__}.{backend.__qualname__}) has "
        f"neither form of a backend: {'; '.join(problems)}; give it "
        f"{', '.join(_shown(method, call) for method, call in plain.items())}, or all "
        f"methods of rl_models.{protocol}"
    )


def _problems(backend: type[Any], calls: Mapping[str, Call]) -> list[str]:
    """Return the parts of a form that a class lacks."""
    found = []
    for name, call in calls.items():
        method = own_method(backend, name)
        if method is None:
            found.append(f"{name} is missing")
        elif not callable(method):
            found.append(f"{name} is no method")
        elif not _takes(backend, name, method, call):
            signature = inspect.signature(method)
            found.append(f"{name}{signature} cannot be called as {_shown(name, call)}")
    return found


def _takes(backend: type[Any], name: str, method: Any, call: Call) -> bool:
    positional, keywords = call
    # Static and class methods have no first argument when taken from the class.
    is_plain = inspect.isfunction(inspect.getattr_static(backend, name))
    first = (None,) if is_plain else ()
    try:
        inspect.signature(method).bind(*first, *positional, **dict.fromkeys(keywords))
    except TypeError:
        return False
    except ValueError:  # made in C, without a signature
        return True
    return True


def _shown(name: str, call: Call) -> str:
    positional, keywords = call
    return f"{name}({', '.join((*positional, *(f'{k}=' for k in keywords)))})"


def with_defaults(told: type[Any], defaults: type[Defaults]) -> type[Defaults]:
    """Complete a class with the defaults that it leaves out.

    Args:
        told: A backend, or its class `Traits`.
        defaults: `TrainingTraits` or `GenerationTraits`.
    """
    if issubclass(told, defaults):
        return told
    completed = types.new_class(told.__name__, (told, defaults))
    return cast("type[Defaults]", completed)
