"""A measured call as data, and a few tiny ones that test ``attn bench`` itself."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from attn_core.call.spec import AttentionSpec
from attn_core.expressions.tracing import Aux
from attn_core.expressions.tree import from_text


@dataclass(frozen=True)
class SweepCase:
    """One call to measure.

    Attributes:
        name: unique in a sweep; describes the call.
        spec: the call, without a backward.
        lengths: the tokens of each packed document, queries and keys alike; None when not packed.
        training: whether its gradients are measured as well.
        number: of the call among the calls of its seed.
    """

    name: str
    spec: AttentionSpec
    lengths: tuple[int, ...] | None = None
    training: bool = True
    number: int = 0


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


def _quick(name: str, q_len: int = 64, lengths: tuple[int, ...] | None = None, **options: Any) -> SweepCase:
    settings: dict[str, Any] = {"batch": 2, "kv_len": 64, "num_heads": 4, "num_kv_heads": 2} | options
    if lengths is not None:
        settings |= {"batch": 1, "documents": len(lengths), "max_len_q": max(lengths), "max_len_k": max(lengths)}
    spec = AttentionSpec(q_len=q_len, head_dim=16, value_dim=16, dtype="float32", **settings)
    return SweepCase(f"quick {name}", spec, lengths, training=q_len > 1)


QUICK: tuple[SweepCase, ...] = (
    _quick("full", num_kv_heads=4),
    _quick("causal", causal=True),
    _quick("window 16", causal=True, window=(15, 0)),
    _quick("softcap", softcap=50.0),
    _quick("packed", causal=True, lengths=(17, 5, 42)),
    _quick("mask", mask_shape=(2, 1, 1, 64)),
    _quick("decode", 1, causal=True),
)
"""A few tiny cases that a CPU runs in seconds. They test ``attn bench`` itself; their times mean nothing."""
