"""Mask and score functions as data: traced to a small expression tree, evaluated by numpy, torch and JAX.

``trace_mask`` and ``trace_score`` make the tree of a function. The tree is frozen, hashable and picklable, and names no
array: lookups go by number. ``evaluate_numpy`` is the oracle of the other evaluations.
"""

from attn_core.expressions.derivatives import derivative
from attn_core.expressions.functions import (
    alibi,
    and_masks,
    causal,
    compose_scores,
    documents,
    exp,
    exp2,
    expm1,
    log,
    log1p,
    lookup,
    maximum,
    minimum,
    or_masks,
    prefix_lm,
    relative_bias,
    sigmoid,
    softcap,
    tanh,
    to_float,
    to_int,
    where,
    window,
)
from attn_core.expressions.on_jax import evaluate_jax
from attn_core.expressions.on_numpy import block_indices, evaluate_numpy
from attn_core.expressions.on_torch import evaluate_torch, torch_mask_mod, torch_score_mod
from attn_core.expressions.properties import aux_numbers, check_aux, interval, is_index_only, uses
from attn_core.expressions.rendering import Vocabulary, evaluate
from attn_core.expressions.tracing import Aux, TracedFunction, trace_mask, trace_score
from attn_core.expressions.tree import Expression, ExpressionError

__all__ = [
    "trace_mask",
    "trace_score",
    "Aux",
    "TracedFunction",
    "Expression",
    "ExpressionError",
    "where",
    "minimum",
    "maximum",
    "exp",
    "exp2",
    "expm1",
    "log",
    "log1p",
    "sigmoid",
    "tanh",
    "to_int",
    "to_float",
    "lookup",
    "causal",
    "window",
    "documents",
    "prefix_lm",
    "and_masks",
    "or_masks",
    "softcap",
    "alibi",
    "relative_bias",
    "compose_scores",
    "derivative",
    "uses",
    "is_index_only",
    "aux_numbers",
    "check_aux",
    "interval",
    "evaluate_numpy",
    "block_indices",
    "evaluate_torch",
    "torch_mask_mod",
    "torch_score_mod",
    "evaluate_jax",
    "evaluate",
    "Vocabulary",
]
