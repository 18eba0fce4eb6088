"""attention_qkvpacked: queries, keys and values in one array, as one projection writes them."""

from __future__ import annotations

from typing import Literal, Unpack, overload

import jax

from attn_core.call.arguments import ArrayFacts, check_qkv_as_one
from attn_core.call.functions import are_given
from attn_core.call.hints import SharedOptions
from attn_core.call.keywords import QkvPackedKeywords
from attn_core.call.options import Door, Options, names_at, requested_names
from attn_core.call.segments import Segments, is_traced
from attn_core.call.seq_info import SeqInfo
from attn_core.call.tensors import Inputs
from attn_core.selection import override
from jax_frontend.attention import attention, gather_arguments, run
from jax_frontend.dispatch import plan

Array = jax.Array
Keywords = QkvPackedKeywords[Array, Array]

_shared = SharedOptions(attention, names_at(Door.QKVPACKED))


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
@_shared
def attention_qkvpacked(
    qkv: Array, *, return_lse: bool = False, **options: Unpack[Keywords]
) -> Array | tuple[Array, Array]:
    """Computes ``attention`` of q, k and v in one array; torch's kernels read it in place and write one gradient.

    With key_ranges, functions, segment ids and traced windows or scales, the array is cut and the gradient is
    concatenated.

    Args:
        qkv: ``[batch, seq, 3, heads, head_dim]``; packed ``[tokens, 3, heads, head_dim]``, alone or as one row
            ``[1, ...]``. There are as many kv heads as heads.

    The other arguments, the result and the errors are the same as in ``attention``.
    """
    said = _shared.complete(attention_qkvpacked, {**options, "return_lse": return_lse})
    plan.check_array("qkv", qkv)
    check_qkv_as_one(ArrayFacts(tuple(qkv.shape), str(qkv.dtype), ""), said["seq_info"] is not None)
    in_parts = any([said[name] is not None for name in ("key_ranges", *Segments._fields)])
    in_parts = in_parts or is_traced(said["window"], said["scale"])
    if in_parts or are_given((said["mask_mod"], said["score_mod"], said["aux"])):
        return attention(*(qkv[..., at, :, :] for at in range(3)), **said)
    plain, info = Options.of(said), SeqInfo.coerce(said["seq_info"])
    # One array three times for the checks; the primitive gets it once, as ``inputs.q``.
    inputs = Inputs(qkv, qkv, qkv, *(said[name] for name in ("mask", "bias", "alibi_slopes", "sinks")))
    # The tokens are at -4, because qkv has the axis of 3 behind them.
    inputs, plain = gather_arguments(inputs, info, plain, said["dropout_rng"], token_axis=-4)
    requested = requested_names(said["backend"]) or override.requested()
    return run(inputs._replace(k=None, v=None), info, plain, requested)
