"""Mask and score functions of drawn calls, with the shapes and dtypes of their aux arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from attn_core.call.functions import trace
from attn_core.expressions import exp, exp2, expm1, log, log1p, sigmoid, tanh, to_float, where
from attn_core.expressions.tracing import Aux

Sizes = tuple[int, int, int, int]
"""batch, heads, q_len, kv_len."""
Family = tuple[Callable[[Sizes], tuple[Aux, ...]], Callable[..., Any]]
"""The aux arrays of a call's sizes, and the function."""


def _ints(*shape: int) -> Aux:
    return Aux(shape, "int32")


MASKS: dict[str, Family] = {
    "documents": (lambda s: (_ints(max(s[2:])),), lambda b, h, q, k, ids: ids[q] == ids[k]),
    "by row and head": (lambda s: (), lambda b, h, q, k: ((q + k) % 3 != h % 2) | (b == 1)),
    "first key of each query": (lambda s: (_ints(s[0], s[2]),), lambda b, h, q, k, first: k >= first[b, q]),
    "keys of heads": (lambda s: (Aux((s[1], s[3]), "bool"),), lambda b, h, q, k, shown: shown[h, k] | (k == 2 * q)),
    "bits": (lambda s: (_ints(s[3]),), lambda b, h, q, k, bits: (bits[k] >> (h + q) % 2) % 2 == 1),
    "nothing": (lambda s: (), lambda b, h, q, k: k < 0),
}
SCORES: dict[str, Family] = {
    "slopes": (lambda s: (Aux((s[1],), "float32"),), lambda s, b, h, q, k, by: s - by[h] * to_float(abs(q - k))),
    "bent": (lambda s: (), lambda s, b, h, q, k: 3.0 * tanh(s / 3.0) + 0.5 * exp(-s * s)),
    "gated": (
        lambda s: (),
        lambda s, b, h, q, k: 2.0 * sigmoid(s) * log1p(s * s) + expm1(-s * s) - exp2(-abs(s)) * log(2.0 + s * s),
    ),
    "hides": (lambda s: (), lambda s, b, h, q, k: where((k + h) % 4 == 1, -float("inf"), s * 0.5)),
    "per row": (
        lambda s: (Aux((s[0], s[3]), "float32"), Aux((s[1], s[2]), "float32")),
        lambda s, b, h, q, k, weights, added: s * weights[b, k] + added[h, q],
    ),
}


@lru_cache(maxsize=1024)
def fields_of(mask: str | None, score: str | None, sizes: Sizes) -> dict[str, Any]:
    """Returns the fields of a spec with these functions."""
    of_mask, masked = MASKS[mask] if mask else (lambda s: (), None)
    of_score, scored = SCORES[score] if score else (lambda s: (), None)
    first, second = of_mask(sizes), of_score(sizes)
    # Both get all arrays; each reads its own.
    mask_mod = masked and (lambda b, h, q, k, *aux: masked(b, h, q, k, *aux[: len(first)]))
    score_mod = scored and (lambda s, b, h, q, k, *aux: scored(s, b, h, q, k, *aux[len(first) :]))
    trees = trace(mask_mod, score_mod, (*first, *second))
    return {"mask_mod": trees[0], "score_mod": trees[1], "aux": (*first, *second)}
