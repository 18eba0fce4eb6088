"""transformers' models on our kernels: ``register()``, then ``attn_implementation="attn_core"``.

``"attn_core:flash3"`` asks for one backend, which runs or raises with its reasons; ``set_layer_backends`` chooses layer
by layer. The meaning is that of transformers' own ``eager`` attention: see huggingface_attention and huggingface_masks.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from typing import Any

import torch

from attn_core import backends
from attn_core.errors import SpecError
from torch_frontend.huggingface.attention import LAYER_BACKEND, attend

__all__ = ["NAME", "register", "set_layer_backends", "unregister"]

NAME = "attn_core"
"""What ``attn_implementation=`` takes; ``NAME:backend`` asks for one backend."""


def set_layer_backends(model: torch.nn.Module, choice: Mapping[int, str | None]) -> None:
    """Asks for a backend in single layers: ``{layer_idx: name}``; None takes a layer's request back.

    A layer's name runs or raises, like ``backend=``, and wins over the name in ``attn_implementation``.

    Raises:
        SpecError: for an unknown backend, or a layer index that no attention module of the model has.
    """
    for name in choice.values():
        if name is not None:
            backends.check_name(name)
    layers: dict[int, list[torch.nn.Module]] = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and hasattr(module, "is_causal"):
            layers.setdefault(index, []).append(module)
    for index, name in choice.items():
        if index not in layers:
            raise SpecError(f"layer {index}: expected one of {sorted(layers)}, the model's attention layers")
        for module in layers[index]:
            setattr(module, LAYER_BACKEND, name)


def spoken(backend: str) -> str:
    """A backend's name without the words that transformers reads as its own kernels: ``flash3`` is ``fa3``."""
    return backend.replace("flash", "fa").replace("sdpa", "torch")


def implementations() -> dict[str, str | None]:
    """Every name that ``register`` makes known, and the backend that it asks for."""
    names: dict[str, str | None] = {NAME: None}
    for backend in backends.names():
        names |= {f"{NAME}:{spoken(backend)}": backend, f"{NAME}:{backend}": backend}
    return names


def register() -> None:
    """Makes ``attn_implementation="attn_core"`` and ``"attn_core:<backend>"`` known to transformers. Again is fine.

    transformers takes any name with "flash" in it for a kernel of its own and loads that instead. For our names alone,
    two methods of ``PreTrainedModel`` therefore answer with the same backend's name in other letters
    ("attn_core:flash3" is kept as "attn_core:fa3"), and refuse a model whose attention asks nobody for a function.
    ``unregister`` takes that back.
    """
    from transformers import AttentionInterface, PreTrainedModel
    from transformers.masking_utils import AttentionMaskInterface

    from torch_frontend.huggingface import masks

    for name, backend in implementations().items():
        AttentionInterface.register(name, partial(attend, backend=backend) if backend else attend)
        AttentionMaskInterface.register(name, masks.mask)
    for method in _ANSWERING:
        current = getattr(PreTrainedModel, method)
        if not any(map(_is_ours, _layers(current))):
            setattr(PreTrainedModel, method, _answering(current))


def unregister() -> None:
    """Takes back what ``register`` did. A wrapper of another library around ours stays, and ours in it passes on."""
    from transformers import AttentionInterface, PreTrainedModel
    from transformers.masking_utils import AttentionMaskInterface

    for name in implementations():
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)
    for method in _ANSWERING:
        current = getattr(PreTrainedModel, method)
        if _is_ours(current):
            setattr(PreTrainedModel, method, current.__wrapped__)


def refuse_own_attention(kind: type, requested: str) -> None:
    """Raises SpecError for a class of models whose code does not ask transformers for an attention function.

    Such a model would compute by itself, with a mask that was made for us. transformers finds that out from the source
    of the class; a class without one (written in a notebook) is judged by the class that it extends.
    """
    from transformers import PreTrainedModel

    known = (base for base in kind.__mro__ if issubclass(base, PreTrainedModel) and _has_source(base))
    judge: Any = next(known, PreTrainedModel)
    partly = getattr(getattr(kind, "config_class", None), "model_type", None) in _PARTLY_OWN
    if partly or judge is PreTrainedModel or not judge._can_set_attn_implementation():
        raise SpecError(
            f"attn_implementation={requested!r}: {kind.__name__} computes attention in its own code and does not call "
            "the function that transformers' AttentionInterface names; load it with attn_implementation='eager'. Where "
            'it is part of a larger model, name the other parts: attn_implementation={"text_config": "attn_core"}, say'
        )


def _has_source(kind: type) -> bool:
    try:
        return bool(inspect.getsource(sys.modules[kind.__module__]))
    except (OSError, TypeError, KeyError):
        return False


_PARTLY_OWN = {"informer"}
"""Types whose source asks for a function in some layers, and adds our mask in others (ProbSparse attention)."""

_ANSWERING = ("_check_and_adjust_attn_implementation", "get_correct_attn_implementation")


def _layers(method: Any) -> Iterator[Any]:
    """A method and what it wraps, from the outside in."""
    while method is not None:
        yield method
        method = getattr(method, "__wrapped__", None)


def _is_ours(method: Any) -> bool:
    """Whether this is one of our wrappers itself: ``wraps`` copies names and attributes to wrappers around it."""
    return getattr(method, "__code__", None) is _OUR_CODE


def _registered() -> bool:
    from transformers import AttentionInterface

    return NAME in AttentionInterface._global_mapping


def _answering(original: Callable[..., str]) -> Any:
    @wraps(original)
    def answer(self: Any, requested: Any, *arguments: Any, **keywords: Any) -> str:
        names = implementations() if _registered() else {}
        if not isinstance(requested, str) or requested not in names:
            return original(self, requested, *arguments, **keywords)
        refuse_own_attention(type(self), requested)
        backend = names[requested]
        return f"{NAME}:{spoken(backend)}" if backend else original(self, requested, *arguments, **keywords)

    return answer


_OUR_CODE = _answering(lambda *_: "").__code__
