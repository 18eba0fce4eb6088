"""Counts what a campaign ran, by entry, backend and feature, and shows the holes: what no call had."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from attn_core import backends
from attn_core.call.spec import AttentionSpec
from attn_core.errors import SpecError
from tests.campaign.entries import Entry
from tests.campaign.functions import fields_of

FEATURES = (
    "causal",
    "window",
    "softcap",
    "mask",
    "key_ranges",
    "mask_mod",
    "score_mod",
    "bias",
    "bias gradient",
    "alibi",
    "sinks",
    "packed",
    "dropout",
    "lse",
    "gradients",
    "grouped heads",
    "value_dim",
    "empty",
    "float64",
    "float32",
    "bfloat16",
    "float16",
)

CLAIMS = {"bias gradient": "bias_gradient", "grouped heads": "grouped_heads"}
"""The claim of Support that covers a feature, if its name is another one."""

Counts = dict[str, dict[str, int]]
"""By backend in framework: calls, and calls with each feature."""


def features_of(spec: AttentionSpec) -> list[str]:
    """Returns the features of a call, some of FEATURES."""
    present = {
        "causal": spec.causal,
        "window": spec.window != (None, None),
        "softcap": spec.softcap is not None,
        "mask": spec.mask_shape is not None,
        "key_ranges": spec.key_ranges_shape is not None,
        "mask_mod": spec.mask_mod is not None,
        "score_mod": spec.score_mod is not None,
        "bias": spec.bias_shape is not None,
        "bias gradient": spec.bias_gradient,
        "alibi": spec.alibi_shape is not None,
        "sinks": spec.sinks,
        "packed": spec.packed,
        "dropout": spec.dropout > 0,
        "lse": spec.return_lse,
        "gradients": spec.needs_backward,
        "grouped heads": spec.group_size > 1,
        "value_dim": spec.value_dim != spec.head_dim,
        "empty": spec.empty,
        spec.dtype: True,
    }
    return [name for name, there in present.items() if there]


def add(counts: Counts, key: str, spec: AttentionSpec) -> None:
    """Counts one call."""
    row = counts.setdefault(key, {"calls": 0})
    row["calls"] += 1
    for feature in features_of(spec):
        row[feature] = row.get(feature, 0) + 1


BITS = ("calls", "other results", "with gradients", "other gradients")


def add_bits(counts: Counts, key: str, spec: AttentionSpec, differing: tuple[str, ...]) -> None:
    """Counts one call that ran both ways.

    Args:
        differing: the names of the results and gradients whose bits differ.
    """
    row = counts.setdefault(key, dict.fromkeys(BITS, 0))
    results = {"out", "lse"} & set(differing)
    for name, there in zip(BITS, (True, results, spec.needs_backward, set(differing) - results)):
        row[name] += bool(there)


def table_of_bits(counts: Counts) -> str:
    """Returns the counts of ``add_bits`` as a Markdown table."""
    lines = ["| both ways, backend | " + " | ".join(BITS) + " |", "|---" * (len(BITS) + 1) + "|"]
    lines += [f"| {key} | " + " | ".join(str(row[name]) for name in BITS) + " |" for key, row in sorted(counts.items())]
    return "\n".join(lines)


def table(counts: Counts, title: str) -> str:
    """Returns counts as a Markdown table with a row for each key."""
    lines = [f"| {title} | calls | " + " | ".join(FEATURES) + " |", "|---" * (len(FEATURES) + 2) + "|"]
    for key, row in sorted(counts.items()):
        lines.append(f"| {key} | {row['calls']} | " + " | ".join(str(row.get(name, 0)) for name in FEATURES) + " |")
    return "\n".join(lines)


def holes_of_backends(counts: Counts, kind: str) -> list[str]:
    """Returns, for each backend that ran, the features that it claims and no call had: ``"math in jax: sinks"``."""
    result = []
    for key, row in sorted(counts.items()):
        name, _, framework = key.partition(" in ")
        if name not in backends.names():
            continue
        module = backends.load(name, kind)
        missing = [feature for feature in FEATURES if not row.get(feature) and _claims(module, feature)]
        if missing:
            result.append(f"{name} in {framework}: {', '.join(missing)}")
    return result


def _claims(module: Any, feature: str) -> bool:
    forward, backward = module.forward_claims, module.backward_claims
    if feature in ("float64", "float32", "bfloat16", "float16"):
        return feature in forward.dtypes
    if feature == "gradients":
        return backward is not None
    if feature == "empty":
        return True
    claims = backward if feature == "bias gradient" else forward
    return bool(claims is not None and getattr(claims, CLAIMS.get(feature, feature)))


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


def holes_of_entries(counts: Counts, entries: dict[str, Entry], kind: str) -> list[str]:
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
