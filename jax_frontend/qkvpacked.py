"""attention_qkvpacked: queries, keys and values in one array, as one projection writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Never, Unpack, overload

import jax

from attn_core.call.arguments import ArrayFacts, check_qkv_as_one
from attn_core.call.functions import are_given
from attn_core.call.hints import hide_unknown, refuse_keywords
from attn_core.call.keywords import QkvPackedKeywords
from attn_core.call.options import Options, Window, requested_names
from attn_core.call.segments import given_segments
from attn_core.call.seq_info import SeqInfo
from attn_core.call.traced_options import is_traced
from attn_core.expressions.tracing import TracedFunction
from attn_core.selection import override
from jax_frontend.attention import attention, gather_arguments, run
from jax_frontend.dispatch import plan
from jax_frontend.dispatch.differentiable import AttentionCall

Array = jax.Array
Keywords = QkvPackedKeywords[Array, Array]


@overload
def attention_qkvpacked(qkv: Array, *, return_lse: Literal[False] = False, **options: Unpack[Keywords]) -> Array: ...
@overload
def attention_qkvpacked(
    qkv: Array, *, return_lse: Literal[True], **options: Unpack[Keywords]
) -> tuple[Array, Array]: ...
@overload
def attention_qkvpacked(
    qkv: Array, *, return_lse: bool, **options: Unpack[Keywords]
) -> Array | tuple[Array, Array]: ...
@hide_unknown
def attention_qkvpacked(
    qkv: Array,
    *,
    causal: bool = False,
    alignment: str = "bottom_right",
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    mask: Array | None = None,
    key_ranges: Any = None,
    mask_mod: Callable[..., Any] | TracedFunction | None = None,
    score_mod: Callable[..., Any] | TracedFunction | None = None,
    aux: Sequence[Any] = (),
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    q_positions: Any = None,
    kv_positions: Any = None,
    bias: Array | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    seq_info: Any = None,
    dropout: float = 0.0,
    deterministic: bool = False,
    backend: str | tuple[str, ...] | None = None,
    return_lse: bool = False,
    dropout_rng: Array | None = None,
    invariant: str | None = None,
    **unknown: Never,
) -> Array | tuple[Array, Array]:
    """Computes ``attention`` of q, k and v in one array; torch's kernels read it in place and write one gradient.

    With key_ranges, functions, segment ids and traced windows or scales, the array is cut and the gradient is
    concatenated.

    Args:
        qkv: ``[batch, seq, 3, heads, head_dim]``; packed ``[tokens, 3, heads, head_dim]``, alone or as one row
            ``[1, ...]``. There are as many kv heads as heads.

    The other arguments, the result and the errors are the same as in ``attention``.
    """
    if unknown:
        refuse_keywords(attention_qkvpacked, unknown)
    plan.check_array("qkv", qkv)
    check_qkv_as_one(ArrayFacts(tuple(qkv.shape), str(qkv.dtype), ""), seq_info is not None)
    segments = given_segments(q_segment_ids, kv_segment_ids, q_positions, kv_positions)
    in_parts = segments or is_traced(window, scale) or key_ranges is not None
    if in_parts or are_given((mask_mod, score_mod, aux)):
        visible = {"causal": causal, "alignment": alignment, "window": window, "mask": mask, "key_ranges": key_ranges}
        scores = {"softcap": softcap, "scale": scale, "bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks}
        functions = {"mask_mod": mask_mod, "score_mod": score_mod, "aux": aux}
        how: dict[str, Any] = {
            "dropout": dropout,
            "dropout_rng": dropout_rng,
            "deterministic": deterministic,
            "backend": backend,
        }
        how |= {"seq_info": seq_info, "return_lse": return_lse, "invariant": invariant}
        rest: Any = {**visible, **scores, **functions, **segments, **how}
        return attention(*(qkv[..., at, :, :] for at in range(3)), **rest)
    options = Options(causal, alignment, window, softcap, scale, None, None, dropout, deterministic, return_lse)
    options = options._replace(invariant=invariant)
    info = SeqInfo.coerce(seq_info)
    # One array three times for the checks; the primitive gets it once, as ``inputs.q``.
    arrays = (qkv, qkv, qkv, mask, bias, alibi_slopes, sinks)
    # The tokens are at -4, because qkv has the axis of 3 behind them.
    inputs, options = gather_arguments(arrays, info, options, dropout_rng, token_axis=-4)
    call = AttentionCall(options, requested_names(backend) or override.requested(), plan.device_name(qkv))
    return run(call, inputs._replace(k=None, v=None), info)
