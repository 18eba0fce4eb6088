"""A spec as plain data: the fields that differ from their defaults, for JSON."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from attn_core.call.spec import AttentionSpec
from attn_core.expressions.tracing import Aux
from attn_core.expressions.tree import from_text

FUNCTIONS = "mask_mod", "score_mod"
"""The fields that are expressions; plain data has their rows."""


def plain_fields(spec: AttentionSpec) -> dict[str, Any]:
    """Returns the fields of a spec that differ from their defaults, for JSON."""
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    values |= {name: json.loads(values[name].text) for name in FUNCTIONS if values[name] is not None}
    return {field.name: values[field.name] for field in fields(spec) if values[field.name] != field.default}


def spec_of(plain: dict[str, Any]) -> AttentionSpec:
    """Inverts ``plain_fields``, also if JSON has turned tuples into lists."""
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}
    values |= {name: from_text(json.dumps(plain[name])) for name in FUNCTIONS if plain.get(name) is not None}
    if "aux" in values:
        values["aux"] = tuple(Aux(tuple(shape), dtype) for shape, dtype in values["aux"])
    return AttentionSpec(**values)
