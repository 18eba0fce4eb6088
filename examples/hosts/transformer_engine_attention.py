"""fused_attn: the function of ``transformer_engine.jax.attention``, with the same arguments, on our attention.

Copy this file into your project. Enumerations are read by the names of their members, and a ``SequenceDescriptor`` by
its fields, so Transformer Engine need not be installed. docs/how_to/migrate/transformer_engine.md lists every argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from attn_core.errors import ShapeError, SpecError, shown
from jax_frontend import attention

__all__ = ["fused_attn"]

Array = jax.Array

_LAYOUTS = ("BS3HD", "BSHD_BS2HD", "BSHD_BSHD_BSHD", "T3HD", "THD_T2HD", "THD_THD_THD")
_MASKS = ("NO_MASK", "PADDING_MASK", "CAUSAL_MASK", "PADDING_CAUSAL_MASK", "CAUSAL_BOTTOM_RIGHT_MASK",
          "PADDING_CAUSAL_BOTTOM_RIGHT_MASK")  # fmt: skip
_BIASES = ("NO_BIAS", "PRE_SCALE_BIAS", "POST_SCALE_BIAS")
_SOFTMAXES = ("VANILLA_SOFTMAX", "OFF_BY_ONE_SOFTMAX", "LEARNABLE_SOFTMAX")


class _Tokens(NamedTuple):
    """The segment of each token, int32 ``[batch, length]``, 0 if it is padding; and its place in the segment."""

    ids: Array
    places: Array


def fused_attn(
    qkv: tuple[Array, ...],
    bias: Array | None,
    sequence_descriptor: Any,
    seed: Array | None,
    attn_bias_type: Any,
    attn_mask_type: Any,
    qkv_layout: Any,
    softmax_type: Any,
    scaling_factor: float,
    dropout_probability: float,
    is_training: bool,
    max_segments_per_seq: int = 1,
    window_size: tuple[int, int] | None = None,
    context_parallel_strategy: Any = "DEFAULT",
    context_parallel_causal_load_balanced: bool = False,
    context_parallel_axis: str = "",
    context_checkpoint_name: str = "context",
    softmax_offset: Array | None = None,
    stripe_size: int | None = None,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bprop: Callable[..., Any] | None = None,
    score_mod_tensors: Mapping[str, Any] | None = None,
    score_mod_bprop_tensors: Mapping[str, Any] | None = None,
) -> Array:
    """Computes ``transformer_engine.jax.attention.fused_attn(...)`` with the attention of ``jax_frontend``.

    Args:
        qkv: ``(qkv,)``, ``(query, kv)`` or ``(query, key, value)``, by qkv_layout: ``[batch, length, heads, dim]``,
            with an axis of 3 or 2 before the heads if packed.
        bias: added to the scaled scores, or to the scores before the scale; broadcastable to four axes.
        sequence_descriptor: a ``SequenceDescriptor``: with lengths; with lengths and offsets, which may leave gaps;
            or with segment ids, 0 for padding, and positions in each segment, ``segment_pos``, which only THD layouts
            read: in BSHD a token's position is its place in the row. A mask type without PADDING reads none.
        seed: uint32 ``[..., 2]``, of which the first pair counts, or a PRNG key; for dropout.
        attn_bias_type, attn_mask_type, qkv_layout, softmax_type: members of Transformer Engine's enumerations, or their
            names. A THD layout needs a mask type with PADDING.
        scaling_factor: factor on ``q . k``.
        dropout_probability, is_training: weights are dropped in training only; other ones than in Transformer Engine.
        max_segments_per_seq: the highest segment id.
        window_size: inclusive distances ``(left, right)``, -1 without limit; they count places in the segment.
        context_parallel_strategy, context_parallel_causal_load_balanced, context_parallel_axis, stripe_size: raise an
            error unless they have their defaults. If JAX has one device, load balancing may be True.
        context_checkpoint_name: the name of the output for ``jax.checkpoint``'s policies.
        softmax_offset: ``[1, heads, 1, 1]``, the logits of the learnable softmax.
        score_mod, score_mod_bprop, score_mod_tensors, score_mod_bprop_tensors: raise an error: they build a graph of
            cuDNN; ``attention(score_mod=...)`` takes a function of the score.

    Returns:
        ``[batch, q_len, heads, value_dim]``: 0 for padding and for queries that see no key.

    Raises:
        SpecError, ShapeError, DTypeError: naming the argument.
        NoBackendError: if no backend can run the call; the message has every reason.
    """
    names = ("score_mod", "score_mod_bprop", "score_mod_tensors", "score_mod_bprop_tensors", "stripe_size")
    values = (score_mod, score_mod_bprop, score_mod_tensors, score_mod_bprop_tensors, stripe_size)
    for name, value in zip(names, values, strict=True):
        if value is not None:
            raise SpecError(f"{name}: expected None; kernels build no graph of cuDNN and stripe no sequence")
    _check_one_device(context_parallel_strategy, context_parallel_causal_load_balanced, context_parallel_axis)
    layout = _member("qkv_layout", qkv_layout, _LAYOUTS)
    mask_type = _member("attn_mask_type", attn_mask_type, _MASKS)
    q, k, v = _separate(qkv, layout)
    scores = _scores(bias, _member("attn_bias_type", attn_bias_type, _BIASES), scaling_factor)
    dropping = _flag("is_training", is_training) and dropout_probability != 0
    out: Any = attention(
        q,
        k,
        v,
        **_visible(q, k, sequence_descriptor, (layout, mask_type), window_size, max_segments_per_seq),
        **scores,
        sinks=_sinks(softmax_offset, _member("softmax_type", softmax_type, _SOFTMAXES), q.shape[2]),
        dropout=dropout_probability if dropping else 0.0,
        dropout_rng=_key(seed, dropout_probability) if dropping else None,
    )
    return checkpoint_name(out, context_checkpoint_name)


def _array(name: str, value: Any) -> jax.Array:
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected an array, got {type(value).__name__}") from None


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise SpecError(f"{name}={shown(value)}: expected True or False")
    return value


def _member(argument: str, value: Any, members: tuple[str, ...]) -> str:
    name = getattr(value, "name", value)
    if name not in members:
        raise SpecError(f"{argument}={shown(value)}: expected one of {', '.join(members)}")
    return str(name)


def _check_one_device(strategy: Any, balanced: Any, axis: Any) -> None:
    remedy = "a row on several devices is jax_frontend.context_parallel_attention"
    _member("context_parallel_strategy", strategy, ("DEFAULT",))
    if balanced and jax.device_count() > 1:  # one device has whole rows in their order
        raise SpecError(
            f"context_parallel_causal_load_balanced={shown(balanced)}: expected False on several devices; {remedy}"
        )
    if axis:
        raise SpecError(f"context_parallel_axis={shown(axis)}: expected ''; {remedy}")


def _separate(qkv: Any, layout: str) -> tuple[Array, Array, Array]:
    """Returns query, key and value, ``[batch, length, heads, dim]`` each."""
    packed = 3 if "3HD" in layout else 2 if "2HD" in layout else 1
    arrays = [_array(f"qkv[{at}]", array) for at, array in enumerate(qkv)]
    ranks = {3: (5,), 2: (4, 5), 1: (4, 4, 4)}[packed]
    shapes = [list(array.shape) for array in arrays]
    last = arrays[-1] if arrays else None
    if tuple(array.ndim for array in arrays) != ranks or (packed > 1 and last is not None and last.shape[2] != packed):
        raise ShapeError(f"qkv: expected {len(ranks)} arrays as in {layout}, [batch, length, ...], got shapes {shapes}")
    if packed > 1:
        *first, last = arrays
        arrays = [*first, *(last[:, :, at] for at in range(packed))]
    return arrays[0], arrays[1], arrays[2]


def _scores(bias: Any, kind: str, scale: Any) -> dict[str, Any]:
    if (bias is None) != (kind == "NO_BIAS"):
        raise SpecError(f"bias: expected {'None' if kind == 'NO_BIAS' else 'an array'} with attn_bias_type={kind}")
    if bias is None:
        return {"scale": scale}
    bias = _array("bias", bias)
    return {"scale": scale, "bias": bias * scale if kind == "PRE_SCALE_BIAS" else bias}


def _sinks(offset: Any, kind: str, heads: int) -> Array | None:
    if (offset is not None) != (kind == "LEARNABLE_SOFTMAX"):
        wanted = "[1, heads, 1, 1]" if kind == "LEARNABLE_SOFTMAX" else "None"
        raise SpecError(f"softmax_offset: expected {wanted} with softmax_type={kind}")
    if offset is None:
        return None if kind == "VANILLA_SOFTMAX" else jnp.zeros(heads, jnp.float32)  # exp(0) = 1 is the one
    offset = _array("softmax_offset", offset)
    if offset.shape != (1, heads, 1, 1):
        raise ShapeError(f"softmax_offset: expected [1, heads, 1, 1] = [1, {heads}, 1, 1], got {list(offset.shape)}")
    return offset.reshape(heads)


def _key(seed: Any, rate: float) -> Array:
    if seed is None:
        raise SpecError(f"seed=None: expected uint32 [..., 2] or a PRNG key for dropout_probability={rate}")
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        return seed.reshape(-1)[0]
    if seed.dtype != jnp.uint32 or seed.shape[-1:] != (2,):
        raise SpecError(f"seed: expected uint32 [..., 2] or a PRNG key, got {seed.dtype} {list(seed.shape)}")
    return jax.random.wrap_key_data(seed.reshape(-1, 2)[0], impl="threefry2x32")


def _visible(q: Array, k: Array, descriptor: Any, kinds: tuple[str, str], window: Any, segments: int) -> dict[str, Any]:
    """Returns the keywords of ``attention`` that say which keys each query sees."""
    layout, mask_type = kinds
    causal, bottom_right = "CAUSAL" in mask_type, "BOTTOM_RIGHT" in mask_type
    options: dict[str, Any] = {"causal": causal, "window": _window(window)}
    if "PADDING" not in mask_type:
        if "THD" in layout or layout == "T3HD":
            raise SpecError(f"attn_mask_type={mask_type}: expected a type with PADDING for qkv_layout={layout}")
        return options | {"alignment": "bottom_right" if bottom_right else "top_left"}
    if not hasattr(descriptor, "seqlens"):
        raise SpecError(
            f"sequence_descriptor: expected a SequenceDescriptor with attn_mask_type={mask_type}, got "
            f"{type(descriptor).__name__}"
        )
    lengths = (q.shape[:2], k.shape[:2])
    packed = "THD" in layout or layout == "T3HD"
    queries, keys = (_tokens(descriptor, side, shape, packed) for side, shape in enumerate(lengths))
    # Padding sees nothing, not even padding.
    options |= {"q_segment_ids": queries.ids, "kv_segment_ids": jnp.where(keys.ids == 0, -1, keys.ids)}
    if not causal and options["window"] is None:
        return options
    places = queries.places
    if bottom_right:
        highest = max(segments, jnp.shape(descriptor.seqlens[0])[-1]) if packed else 1
        ahead = _counts(keys.ids, highest) - _counts(queries.ids, highest)
        places = places + jnp.take_along_axis(ahead, queries.ids, axis=1)
    return options | {"q_positions": places, "kv_positions": keys.places}


def _window(size: Any) -> tuple[int | None, int | None] | None:
    if size is None or tuple(size) == (-1, -1):
        return None
    left, right = (None if side == -1 else side for side in size)
    return left, right


def _counts(ids: Array, highest: int) -> Array:
    """Returns the number of tokens of each segment, ``[batch, highest + 1]``."""
    return jnp.sum(ids[:, :, None] == jnp.arange(highest + 1), axis=1, dtype=jnp.int32)


def _tokens(descriptor: Any, side: int, shape: tuple[int, ...], packed: bool) -> _Tokens:
    """Returns the segments of queries (side 0) or keys (side 1) of ``shape``, ``[batch, length]``."""
    batch, length = shape
    at = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    ids, places, lengths, starts = (
        jnp.asarray(getattr(descriptor, name)[side])
        for name in ("segment_ids", "segment_pos", "seqlens", "seq_offsets")
    )
    if ids.size:
        for name, array in (("segment_ids", ids), ("segment_pos", places)):
            if array.shape != shape:
                raise ShapeError(f"sequence_descriptor.{name}[{side}]: expected {list(shape)}, got {list(array.shape)}")
        return _Tokens(ids.astype(jnp.int32), places.astype(jnp.int32) if packed else at)
    if not packed:
        if lengths.shape != (batch,):
            raise ShapeError(f"sequence_descriptor.seqlens[{side}]: expected [{batch}], got {list(lengths.shape)}")
        return _Tokens((at < lengths[:, None]).astype(jnp.int32), at)
    if lengths.ndim != 2 or starts.ndim != 2 or len(lengths) != batch or starts.shape[1] < lengths.shape[1]:
        raise ShapeError(
            f"sequence_descriptor.seqlens[{side}], seq_offsets[{side}]: expected [{batch}, segments] and [{batch}, "
            f"segments + 1], got {list(lengths.shape)} and {list(starts.shape)}"
        )
    starts = starts[:, : lengths.shape[1]].astype(jnp.int32)
    since = at[:, :, None] - starts[:, None, :]  # [batch, length, segments]
    inside = (since >= 0) & (since < lengths[:, None, :]) & (starts >= 0)[:, None, :]
    numbers = jnp.arange(1, lengths.shape[1] + 1, dtype=jnp.int32)
    return _Tokens(jnp.sum(inside * numbers, axis=2), jnp.sum(jnp.where(inside, since, 0), axis=2))
