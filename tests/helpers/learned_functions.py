"""Score functions that read arrays which have gradients, and calls with them."""

from __future__ import annotations

from typing import Any

from spec_strategies import Call, make_call

from attn_core.expressions import exp, maximum, tanh, to_float, trace_score, where
from attn_core.expressions.tracing import Aux

SIZES = {"batch": 2, "q_len": 7, "kv_len": 7, "num_heads": 4, "num_kv_heads": 2, "head_dim": 5, "value_dim": 5}
SIZES |= {"dtype": "float64", "needs_backward": True, "return_lse": True}
FUNCTIONS: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "relative bias": (lambda s, b, h, q, k, t: s + t[h, q - k + 6], ((4, 13),)),
    "beyond the array": (lambda s, b, h, q, k, t: s + t[h, q - k - 1], ((4, 3),)),
    "learned slopes": (lambda s, b, h, q, k, m: s - m[h] * to_float(abs(q - k)), ((4,),)),
    "a temperature": (lambda s, b, h, q, k, t: s / t[0], ((1,),)),
    "one number": (lambda s, b, h, q, k, t: s * exp(-t * t), ((),)),
    "a learned cap": (lambda s, b, h, q, k, c: c[h] * tanh(s / c[h]), ((4,),)),
    "two arrays": (lambda s, b, h, q, k, w, t: s * w[b, k] + t[q] * w[b, q], ((2, 7), (7,))),
    "a kink": (lambda s, b, h, q, k, t: maximum(s, t[k]), ((7,),)),
    "hides": (lambda s, b, h, q, k, t: where((k + h) % 3 == 0, -float("inf"), s + t[k]), ((7,),)),
    "not read": (lambda s, b, h, q, k, t: s + 0.0 * to_float(q), ((3,),)),
}


def call_of(name: str, seed: int = 3, **fields: Any) -> Call:
    function, shapes = FUNCTIONS[name]
    aux = tuple(Aux(shape, fields.pop("aux_dtype", "float64")) for shape in shapes)
    tree = trace_score(function, aux).tree
    numbers = tuple(sorted({row.value for row in tree.rows if row.op == "lookup"}))
    return make_call(seed, **{**SIZES, **fields}, score_mod=tree, aux=aux, aux_gradients=numbers)
