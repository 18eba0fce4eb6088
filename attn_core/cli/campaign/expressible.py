"""Finds the features that an entry can express, to show those that no call of a campaign had."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from attn_core.call.spec import AttentionSpec
from attn_core.cli.campaign.coverage import FEATURES, Counts, features_of
from attn_core.cli.campaign.entries import Entry
from attn_core.cli.drawn_functions import fields_of
from attn_core.errors import SpecError

_SIZES: dict[str, Any] = {"batch": 2, "q_len": 5, "kv_len": 5, "num_heads": 4, "num_kv_heads": 4}
_DENSE = AttentionSpec(**_SIZES, head_dim=8, value_dim=8, dtype="float32")
_PACKED = replace(_DENSE, batch=1, documents=2, max_len_q=3, max_len_k=3)
SPECS = (_DENSE, _PACKED)
"""Calls without options, one of which every entry can express."""

OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": (1, 0)},
    "softcap": {"softcap": 5.0},
    "mask": {"mask_shape": (1, 1, 5, 5)},
    "key_ranges": {"key_ranges_shape": (1, 4, 5, 2, 2)},
    "mask_mod": fields_of("documents", None, (2, 4, 5, 5)),
    "score_mod": fields_of(None, "slopes", (2, 4, 5, 5)),
    "bias": {"bias_shape": (1, 1, 5, 5)},
    "bias gradient": {"bias_shape": (1, 1, 5, 5), "needs_backward": True, "bias_gradient": True},
    "alibi": {"alibi_shape": (4,)},
    "sinks": {"sinks": True},
    "packed": {},
    "dropout": {"dropout": 0.5},
    "lse": {"return_lse": True},
    "gradients": {"needs_backward": True},
    "grouped heads": {"num_kv_heads": 2},
    "value_dim": {"value_dim": 4},
    "empty": {"q_len": 0, "kv_len": 0},
    **{name: {"dtype": name} for name in ("float64", "float32", "bfloat16", "float16")},
}
"""For each feature, the fields of a call that has it."""


@cache
def expressible(entry: Entry, kind: str) -> tuple[str, ...]:
    """Returns the features that an entry can express and a campaign on a kind of device draws."""
    drawn = [name for name in FEATURES if name != "dropout" or (entry.words is not None and kind == "cpu")]
    return tuple(name for name in drawn if any(entry.refuses(spec) is None for spec in _specs(name)))


def holes(counts: Counts, entries: dict[str, Entry], kind: str) -> list[str]:
    """Returns, for each entry, the features that it can express and no call had: ``"torch layer: alibi"``."""
    result = []
    for name, entry in sorted(entries.items()):
        row = counts.get(name)
        if row is None:
            result.append(f"{name}: no call at all")
        elif missing := [feature for feature in expressible(entry, kind) if not row.get(feature)]:
            result.append(f"{name}: {', '.join(missing)}")
    return result


def _specs(feature: str) -> Iterator[AttentionSpec]:
    """Yields small calls with a feature."""
    for spec in SPECS:
        try:
            changed = replace(spec, **OPTIONS[feature])
        except SpecError:
            continue  # packed calls of no tokens have no documents
        if feature in features_of(changed):
            yield changed
