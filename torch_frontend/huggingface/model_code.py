"""Refuses classes of transformers' models whose source shows that they cannot use our attention."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from typing import Any

from attn_core.errors import SpecError, shown

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

    known = [base for base in kind.__mro__ if issubclass(base, PreTrainedModel) and _has_source(base)]
    checked: Any = known[0] if known else PreTrainedModel
    partly = any(base.__name__ in _PARTLY_MODEL_CODE or _looks_up_a_class(base) for base in known)
    if partly or checked is PreTrainedModel or not checked._can_set_attn_implementation():
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
