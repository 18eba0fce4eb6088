"""transformers' models on our kernels: ``register()``, then ``attn_implementation="attn_core"``.

``"attn_core:flash3"`` requests one backend, which runs or raises with its reasons. ``set_layer_backends`` chooses layer
by layer. Results equal those of transformers' own ``eager`` attention: see attention.py and masks.py.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from typing import Any

import torch

from attn_core import backends
from attn_core.call.kinds import check_kind
from attn_core.errors import SpecError, needs_extra, shown
from torch_frontend.huggingface import continuous_batching
from torch_frontend.huggingface.attention import LAYER_BACKEND, attend


def set_layer_backends(model: torch.nn.Module, choice: Mapping[int, str | None]) -> None:
    """Sets the backend of single layers: ``{layer_idx: name}``; None removes a layer's setting.

    The named backend runs or raises, like ``backend=``, and overrides the name in ``attn_implementation``.

    Raises:
        SpecError: for an unknown backend, a layer index that no attention module of the model has, or a layer whose
            attention is not ours.
    """
    check_kind("model", model, torch.nn.Module, "a torch.nn.Module")
    check_kind("choice", choice, Mapping, "a dict of backends by layer index")
    for name in choice.values():
        if name is not None:
            check_kind("choice", name, str, "a backend's name for each layer, or None")
            backends.check_name(name)
    layers: dict[int, list[torch.nn.Module]] = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        # Other modules have a layer_idx too, such as a Mamba mixer; only attention has is_causal.
        if isinstance(index, int) and hasattr(module, "is_causal"):
            layers.setdefault(index, []).append(module)
    for index in choice:
        if index not in layers:
            raise SpecError(f"layer {index}: expected one of {sorted(layers)}, the model's attention layers")
        for module in layers[index]:
            _check_ours(module, index)
    for index, name in choice.items():
        for module in layers[index]:
            setattr(module, LAYER_BACKEND, name)


def _check_ours(module: torch.nn.Module, index: int) -> None:
    """Raises SpecError for a layer whose config names another implementation, which ignores our setting."""
    config = getattr(module, "config", None)
    used = getattr(config, "_attn_implementation", NAME)
    if used != NAME and not str(used).startswith(f"{NAME}:"):
        raise SpecError(
            f"layer {index}: expected attn_implementation={NAME!r}, got {used!r}, which would ignore the backend; "
            f"call register(), then model.set_attn_implementation({NAME!r})"
        )


def alias_of(backend: str) -> str:
    """Returns a backend's name without the words that transformers takes for its own kernels: ``flash3`` is ``fa3``."""
    return backend.replace("flash", "fa").replace("sdpa", "torch")


def implementations() -> dict[str, str | None]:
    """Returns every name that ``register`` adds, and the backend that it requests."""
    names: dict[str, str | None] = {NAME: None}
    for backend in backends.names():
        names |= {f"{NAME}:{alias_of(backend)}": backend, f"{NAME}:{backend}": backend}
    return names


def check_implementation(requested: str) -> None:
    """Raises SpecError for ``attn_implementation="attn_core:<name>"`` with a name that no backend has."""
    try:
        backends.check_name(requested.removeprefix(f"{NAME}:"))
    except SpecError as error:
        raise SpecError(f"attn_implementation={shown(requested)}: {error}") from None


def register() -> None:
    """Adds ``attn_implementation="attn_core"`` and ``"attn_core:<backend>"`` to transformers. Idempotent.

    transformers takes any name with "flash" in it for a kernel of its own and loads that instead. So we wrap two
    methods of ``PreTrainedModel``. For our names alone they return an alias of the backend (a model stores
    "attn_core:flash3" as "attn_core:fa3"), and raise for a model that computes attention in its own code.
    ``unregister`` removes the wrappers.

    Raises:
        MissingExtraError: if transformers is not installed.
    """
    with needs_extra("torch_frontend.huggingface", "hf", "transformers"):
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

    from torch_frontend.huggingface import masks

    for name, backend in implementations().items():
        AttentionInterface.register(name, partial(attend, backend=backend) if backend else attend)
        AttentionMaskInterface.register(name, masks.mask)
    for owner, method, wrapper in _methods():
        current = getattr(owner, method, None)  # some versions lack it
        # Another library may have wrapped our wrapper, so look through all of them before adding one.
        if current is not None and not any(map(_is_ours, _unwrap(current))):
            setattr(owner, method, wrapper(current))


def unregister() -> None:
    """Undoes ``register``. If another library wrapped our wrapper, both stay, and ours only passes calls on."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for name in implementations():
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)
    for owner, method, _ in _methods():
        current: Any = getattr(owner, method, None)
        if _is_ours(current):
            setattr(owner, method, current.__wrapped__)


_WRAPPED_METHODS = ("_check_and_adjust_attn_implementation", "get_correct_attn_implementation")


def _methods() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Returns the methods of transformers' classes that ``register`` wraps, each with its wrapper."""
    from transformers import PreTrainedModel

    models = [(PreTrainedModel, method, _resolving) for method in _WRAPPED_METHODS]
    return [*models, (continuous_batching.manager(), continuous_batching.METHOD, _keeping_ours)]


def _unwrap(method: Callable[..., Any] | None) -> Iterator[Callable[..., Any]]:
    """Yields a method and every function that it wraps, from the outside in."""
    while method is not None:
        yield method
        method = getattr(method, "__wrapped__", None)


def _is_ours(method: Callable[..., Any]) -> bool:
    """Returns whether this is our wrapper. Compares code, because ``wraps`` copies names and attributes to others."""
    return getattr(method, "__code__", None) in _OUR_CODE


def _registered() -> bool:
    from transformers import AttentionInterface

    return NAME in AttentionInterface._global_mapping


def _resolving(original: Callable[..., str]) -> Callable[..., Any]:
    """Wraps a method of ``PreTrainedModel`` so that our names resolve to their aliases."""

    @wraps(original)
    def resolve(self: Any, requested: Any, *arguments: Any, **keywords: Any) -> str:
        names = implementations() if _registered() else {}
        if not isinstance(requested, str) or requested not in names:
            if names and isinstance(requested, str) and requested.startswith(f"{NAME}:"):
                check_implementation(requested)
            if names and isinstance(requested, str) and requested.removeprefix("paged|") in names:
                continuous_batching.refuse_prefix(requested, requested.removeprefix("paged|"))
            return original(self, requested, *arguments, **keywords)
        refuse_model_code(type(self), requested)
        backend = names[requested]
        return f"{NAME}:{alias_of(backend)}" if backend else original(self, requested, *arguments, **keywords)

    return resolve


def _keeping_ours(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the manager's check of a model's attention, so that our names stay on the model."""

    @wraps(original)
    def switch(self: Any, model: Any, *arguments: Any, **keywords: Any) -> None:
        name = getattr(model.config, "_attn_implementation", None)
        ours = isinstance(name, str) and (name == NAME or name.startswith(f"{NAME}:"))
        if not (ours and _registered()):
            original(self, model, *arguments, **keywords)

    return switch


_OUR_CODE = {wrapper(lambda *_: "").__code__ for wrapper in (_resolving, _keeping_ours)}


NAME = "attn_core"
"""The value of ``attn_implementation=``; ``NAME:backend`` requests one backend."""

_PARTLY_MODEL_CODE = {"BigBirdPegasusEncoder", "InformerPreTrainedModel"}
"""Classes that add our mask to scores of their own, in a file whose other layers call the attention function."""

_LOOKED_UP = re.compile(r"\b(?!ALL_)(\w+)\[[\w.]*attn_implementation\]")


def refuse_model_code(kind: type, requested: str) -> None:
    """Raises SpecError for a model class that computes attention in its own code.

    Such a model would use our mask in its own arithmetic, or look our name up in a table of its own classes.
    transformers reads the source of a class to find the first kind. For a class without source (written in a notebook)
    we check the class that it extends.
    """
    from transformers import PreTrainedModel

    models: Any = (base for base in kind.__mro__ if issubclass(base, PreTrainedModel) and base is not PreTrainedModel)
    known = [base for base in models if _has_source(base)]
    partly = any(base.__name__ in _PARTLY_MODEL_CODE or _looks_up_a_class(base) for base in known)
    if partly or not known or not known[0]._can_set_attn_implementation():
        raise SpecError(
            f"attn_implementation={shown(requested)}: {kind.__name__} computes attention in its own code and does not "
            "call the function that transformers' AttentionInterface names; load it with attn_implementation='eager'. "
            "If it is part of a larger model, name every part, such as "
            'attn_implementation={"": "attn_core", "text_config": "attn_core", "vision_config": "eager"}'
        )


def _has_source(kind: type) -> bool:
    try:
        return bool(inspect.getsource(sys.modules[kind.__module__]))
    except (OSError, TypeError, KeyError):
        return False


def _looks_up_a_class(kind: type) -> bool:
    """Returns whether building a model looks up its attention by implementation in a table without our name.

    SAM's vision encoder does, and would raise a bare KeyError. We follow names from the constructor to other classes of
    the file. A model in it is left out, because it is checked when it is built.
    """
    from transformers import PreTrainedModel

    module = sys.modules[kind.__module__]
    source = inspect.getsource(module)
    tables = {name for name in _LOOKED_UP.findall(source) if NAME not in getattr(module, name, {NAME})}
    if not tables:
        return False
    parts = {node.name: node for node in ast.parse(source).body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    methods = getattr(parts.get(kind.__name__), "body", ())
    waiting: list[ast.AST] = [node for node in methods if getattr(node, "name", None) == "__init__"]
    models = {
        name for name, value in vars(module).items() if isinstance(value, type) and issubclass(value, PreTrainedModel)
    }
    while waiting:
        for node in ast.walk(waiting.pop()):
            is_lookup = isinstance(node, ast.Subscript) and getattr(node.value, "id", None) in tables
            if is_lookup and _LOOKED_UP.fullmatch(ast.unparse(node)):
                return True
            if isinstance(node, ast.Name) and node.id not in models and node.id in parts:
                waiting.append(parts.pop(node.id))
    return False
