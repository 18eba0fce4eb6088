"""Attention for flax.linen: a layer, and the ``attention_fn`` for ``flax.linen.MultiHeadDotProductAttention``."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer  # noqa: F401  as Rotary
from jax.typing import DTypeLike  # noqa: F401  as Rotary

from attn_core.call.hints import SharedOptions
from attn_core.call.keywords import LayerKeywords
from attn_core.call.layers import head_sizes
from attn_core.call.options import Door, check_flag, names_at
from attn_core.errors import SpecError, needs_extra
from attn_core.paged.step import Pages
from jax_frontend.attention import attention
from jax_frontend.flax.attend import attend
from jax_frontend.flax.hook import AttentionFn, attention_fn
from jax_frontend.flax.layer import (
    Cache,
    LayerCall,
    LayerFields,
    Projections,
    Rotary,  # noqa: F401  get_type_hints looks for it here
    check_inputs,
    then,
)

with needs_extra(__name__, "jax", "flax"):
    from flax import linen as nn

__all__ = ["Attention", "AttentionFn", "attention_fn"]

_shared = SharedOptions(attention, names_at(Door.LAYER_CALL))


class Attention(LayerFields, nn.Module):
    """Multi-head attention, optionally with grouped key/value heads, on ``jax_frontend.attention``.

    Parameters are those of ``flax.linen.MultiHeadDotProductAttention``: ``query``, ``key`` and ``value`` with kernels
    ``[features, heads, head_dim]`` and biases ``[heads, head_dim]``, ``out`` with a kernel
    ``[heads, value_dim, features]``; ``sink_logits [heads]`` when sinks is True; and ``query_ln`` and ``key_ln`` with
    a scale ``[head_dim]`` when normalize_qk is True.

    Attributes:
        num_heads, num_kv_heads: query heads, and key/value heads (default: num_heads).
        head_dim, value_dim: channels of q and k (default: ``features // num_heads``), and of v (default: head_dim).
        out_features: features of the output (default: the features of x).
        use_bias: whether the four projections have biases.
        causal, alignment, window, softcap, scale, backend, invariant: as in ``jax_frontend.attention``.
        sinks: learns one extra logit per head in every row's softmax; it has no value.
        normalize_qk: normalises the channels of each head of q and k with a LayerNorm without bias, before rotary.
        rotary: ``(q, k, positions) -> (q, k)``, applied after the projections; q and k
            ``[batch, seq, heads, head_dim]``, positions int ``[batch, seq]``, counted within each document when packed.
            Several batch axes are folded into one. Its results are cast back to the dtype of the projections.
            Self-attention only.
        decode: keeps keys and values in the collection ``"cache"``, by the names of Flax's layer: ``cached_key`` and
            ``cached_value`` ``[batch..., max_length, kv_heads, dim]`` and ``cache_index``. ``init``, or an ``apply``
            without a cache, creates it with the length of x and leaves it empty. Then each ``apply`` appends its 1 or
            more tokens, and a token sees the keys up to its own. Needs ``mutable=["cache"]``.
        dropout_rate: probability of dropping a softmax weight; each weight is dropped independently.
        deterministic: no dropout, as everywhere in Flax; set here or in the call, and needed only with dropout_rate.
        bitwise_deterministic: the same bits on every run, gradients included: ``deterministic=`` of
            ``jax_frontend.attention``, because in Flax ``deterministic`` means "no dropout".
        context_axis: the mesh axis that rows are spread over, or two, ``(outer, inner)``. Inside ``jax.shard_map`` x is
            then this device's shard, from ``jax_frontend.shard_sequence``, and the layer calls
            ``jax_frontend.context_parallel_attention``. rotary then gets the positions of the shard's tokens.
        context_strategy, context_layout, context_length: ``strategy``, ``layout`` and ``length`` of that call.
        precision: of the projections, as in Flax's Dense. Attention multiplies float32 at HIGHEST, unless
            ``jax.default_matmul_precision`` is lower; a higher precision than that raises an error.
        dtype, param_dtype: of the computation (inferred from inputs and parameters when None), and of the parameters.
        kernel_init, bias_init, out_kernel_init, out_bias_init, sinks_init: initialisers; out_kernel_init and
            out_bias_init default to kernel_init and bias_init.
    """

    @nn.compact
    @_shared
    def __call__(
        self,
        x: jax.Array,
        context: jax.Array | None = None,
        *,
        positions: jax.Array | None = None,
        pages: Pages | None = None,
        deterministic: bool | None = None,
        dropout_rng: jax.Array | None = None,
        **options: Unpack[LayerKeywords[jax.Array]],
    ) -> jax.Array | tuple[jax.Array, tuple[jax.Array, ...]]:
        """Applies the layer.

        Args:
            x: ``[batch..., seq, features]`` with any number of batch axes, or none; with seq_info
                ``[tokens, features]`` or ``[1, tokens, features]``.
            context: the source of keys and values, with x's layout; None for self-attention.
            mask, key_ranges, mask_mod, score_mod, aux, bias, alibi_slopes, seq_info: as in ``attention``. Without
                seq_info they have the batch axes of x: mask and bias broadcast to ``[batch..., heads, seq, kv_len]``,
                and functions count the rows of all batch axes. In decode mode kv_len is the cache's length, and
                key_ranges and functions count queries in the whole row.
            q_segment_ids, kv_segment_ids, q_positions, kv_positions: as in ``attention``, int32 ``[batch..., length]``.
                Those of keys may be left out in self-attention. In decode mode kv_segment_ids has the cache's length,
                and positions are refused.
            positions: ``[seq]`` or ``[batch..., seq]`` for rotary; if omitted, q_positions, or else counted from each
                row's or document's start, or from the cache's index.
            pages: for decoding, the layer's pool and the step's tables. x then has the new tokens of all sequences,
                ``[tokens, features]``; the layer writes their keys and values into the pool.
            deterministic: no dropout.
            dropout_rng: a random key; the ``"dropout"`` stream when omitted.

        Returns:
            ``[batch..., seq, out_features]``; with pages ``(out, (k, v))``, with the updated pool and
            its scales if it is quantised.

        Raises:
            SpecError, ShapeError, NoBackendError: the message names the argument, its value and the remedy.
        """
        given = _shared.given(Attention.__call__, {**options})
        check_inputs(x, context, pages)
        check_flag("decode", self.decode)
        # merge_param raises an error if both or neither are set, so it must not run without a dropout rate.
        dropping = self.dropout_rate != 0 and not nn.merge_param("deterministic", self.deterministic, deterministic)
        if dropping and dropout_rng is None:
            # Only if weights drop, because Flax raises an error if the caller passed no such stream.
            dropout_rng = self.make_rng("dropout")
        logits = self.param("sink_logits", self.sinks_init, (self.num_heads,), self.param_dtype) if self.sinks else None
        call = LayerCall(
            given,
            sinks=logits,
            positions=positions,
            dropout=self.dropout_rate if dropping else 0.0,
            dropout_rng=dropout_rng if dropping else None,
            pages=pages,
            store=_CacheCollection(self) if self.decode else None,
        )
        return attend(self, self._projections(x.shape[-1]), x, context, call)

    def _projections(self, features: int) -> Projections:
        """Returns the layer's dense modules, under the names of Flax's own layer, so that parameters fit both."""
        sizes = head_sizes(features, self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim)
        kinds: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        dense: Any = partial(nn.DenseGeneral, use_bias=self.use_bias, precision=self.precision, **kinds)
        heads = partial(dense, axis=-1, kernel_init=self.kernel_init, bias_init=self.bias_init)
        norm = partial(nn.LayerNorm, use_bias=False, **kinds)
        normalised = check_flag("normalize_qk", self.normalize_qk)
        query = heads((sizes.num_heads, sizes.head_dim), name="query")
        key = heads((sizes.num_kv_heads, sizes.head_dim), name="key")
        return Projections(
            query=then(query, norm(name="query_ln")) if normalised else query,
            key=then(key, norm(name="key_ln")) if normalised else key,
            value=heads((sizes.num_kv_heads, sizes.value_dim), name="value"),
            out=dense(
                features if self.out_features is None else self.out_features,
                axis=(-2, -1),
                kernel_init=self.out_kernel_init or self.kernel_init,
                bias_init=self.out_bias_init or self.bias_init,
                name="out",
            ),
        )


class _CacheCollection(NamedTuple):
    """A linen layer's variables in the collection "cache"."""

    layer: nn.Module

    def read(self, key: jax.ShapeDtypeStruct, value: jax.ShapeDtypeStruct) -> Cache | None:
        """Returns the layer's cache. If it has none, creates an empty one for these shapes, and returns None."""
        layer = self.layer
        exists = layer.has_variable("cache", "cached_key")
        if not layer.is_mutable_collection("cache"):
            raise SpecError(
                "cache: expected apply(..., mutable=['cache']) with decode=True, because the layer "
                + ("appends keys and values to it" if exists else "has no cache yet; pass what init returned")
            )
        variable = partial(layer.variable, "cache")
        variables = (
            variable("cached_key", jnp.zeros, key.shape, key.dtype),
            variable("cached_value", jnp.zeros, value.shape, value.dtype),
            variable("cache_index", lambda: jnp.array(0, jnp.int32)),
        )
        return Cache(*(jnp.asarray(each.value) for each in variables)) if exists else None

    def write(self, cache: Cache) -> None:
        for name, array in cache._asdict().items():
            self.layer.put_variable("cache", name, array)
