"""Attention for flax.nnx: a layer, and the ``attention_fn`` for ``flax.nnx.MultiHeadAttention``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer, zeros
from jax.typing import DTypeLike

from attn_core.call.hints import SharedOptions
from attn_core.call.keywords import LayerKeywords
from attn_core.call.kinds import check_size, is_host_int
from attn_core.call.layers import check_features, check_layer_options, head_sizes
from attn_core.call.options import Door, check_flag, check_number, names_at
from attn_core.errors import ShapeError, SpecError, needs_extra, shown
from attn_core.paged.step import Pages
from jax_frontend.attention import attention
from jax_frontend.flax.attend import attend
from jax_frontend.flax.hook import AttentionFn, attention_fn
from jax_frontend.flax.layer import (
    KERNEL_INIT,
    Cache,
    LayerCall,
    LayerFields,
    Projections,
    Rotary,  # noqa: F401  get_type_hints looks for it here
    check_inputs,
    then,
)

with needs_extra(__name__, "jax", "flax"):
    from flax import nnx

__all__ = ["Attention", "AttentionFn", "attention_fn"]

_shared = SharedOptions(attention, names_at(Door.LAYER_CALL))


@dataclass(eq=False, repr=False)
class Attention(LayerFields, nnx.Module):
    """Multi-head attention, optionally with grouped key/value heads, on ``jax_frontend.attention``.

    Parameters are those of ``flax.nnx.MultiHeadAttention``, by the same names and in the same shapes as in
    ``jax_frontend.linen.Attention``. So are the options, except:

    Args:
        in_features, in_kv_features: features of x, and of context (default: in_features). head_dim and out_features
            default to in_features, too (head_dim to ``in_features // num_heads``).
        decode: keeps keys and values in a cache, as Flax's layer does; set here or in the call. ``init_cache`` creates
            it. Each call appends its 1 or more tokens, and a token sees the keys up to its own.
        deterministic: no dropout, as everywhere in Flax (``train()`` and ``eval()`` set it); set here or in the call,
            and needed only with dropout_rate.
        rngs: initialises the parameters. With keep_rngs and a dropout_rate, the layer stores a fork of its dropout
            stream.
        keep_rngs: whether to store that stream, so that calls need no rngs.
    """

    in_features: int
    _: KW_ONLY
    in_kv_features: int | None = None
    rngs: nnx.Rngs
    keep_rngs: bool = True
    # No attributes: a function among them would make two layers differ.
    kernel_init: InitVar[Initializer] = KERNEL_INIT
    bias_init: InitVar[Initializer] = zeros
    out_kernel_init: InitVar[Initializer | None] = None
    out_bias_init: InitVar[Initializer | None] = None
    sinks_init: InitVar[Initializer] = zeros

    def __post_init__(
        self,
        kernel_init: Initializer,
        bias_init: Initializer,
        out_kernel_init: Initializer | None,
        out_bias_init: Initializer | None,
        sinks_init: Initializer,
    ) -> None:
        for name in ("keep_rngs", "normalize_qk", "decode"):
            check_flag(name, getattr(self, name))
        source, target = self.in_kv_features, self.out_features
        check_layer_options(self.use_bias, self.sinks, in_kv_features=source, out_features=target)
        check_number("dropout_rate", self.dropout_rate)
        sizes = head_sizes(self.in_features, self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim)
        self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim = sizes
        self.in_kv_features = source = self.in_features if source is None else source
        rngs: Any = self.rngs
        kinds: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype, "rngs": rngs}
        linear: Any = partial(nnx.LinearGeneral, use_bias=self.use_bias, precision=self.precision, **kinds)
        heads = partial(linear, kernel_init=kernel_init, bias_init=bias_init)
        self.query = heads(self.in_features, (sizes.num_heads, sizes.head_dim))
        self.key = heads(source, (sizes.num_kv_heads, sizes.head_dim))
        self.value = heads(source, (sizes.num_kv_heads, sizes.value_dim))
        norm = partial(nnx.LayerNorm, sizes.head_dim, use_bias=False, **kinds)
        # Before out, as in Flax's layer, so that equal seeds give equal parameters.
        self.query_ln = norm() if self.normalize_qk else nnx.data(None)
        self.key_ln = norm() if self.normalize_qk else nnx.data(None)
        self.out = linear(
            (sizes.num_heads, sizes.value_dim),
            self.in_features if target is None else target,
            axis=(-2, -1),
            kernel_init=out_kernel_init or kernel_init,
            bias_init=out_bias_init or bias_init,
        )
        logits = sinks_init(rngs.params(), (self.num_heads,), self.param_dtype) if self.sinks else None
        self.sink_logits = nnx.data(None) if logits is None else nnx.Param(logits)
        # A fork, so that calls of the layer do not advance the caller's stream.
        self.rngs = rngs.dropout.fork() if self.keep_rngs and self.dropout_rate != 0 else None  # type: ignore[assignment]
        self.cached_key: nnx.Cache[jax.Array] | None = nnx.data(None)
        self.cached_value: nnx.Cache[jax.Array] | None = nnx.data(None)
        self.cache_index: nnx.Cache[jax.Array] | None = nnx.data(None)

    @_shared
    def __call__(
        self,
        x: jax.Array,
        context: jax.Array | None = None,
        *,
        positions: jax.Array | None = None,
        pages: Pages | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        decode: bool | None = None,
        **options: Unpack[LayerKeywords[jax.Array]],
    ) -> jax.Array | tuple[jax.Array, tuple[jax.Array, ...]]:
        """Applies the layer. Arguments, results and errors are those of ``jax_frontend.linen.Attention``, except:

        Args:
            deterministic, decode: override the layer's settings.
            rngs: the source of the dropout key; overrides the layer's stream.
        """
        given = _shared.given(Attention.__call__, {**options})
        check_inputs(x, context, pages)
        check_features(
            x.shape,
            None if context is None else context.shape,
            self.in_features,
            self.in_kv_features or self.in_features,
        )
        dropout, dropout_rng = dropout_of_call(self, deterministic, rngs)
        decoding = check_flag("decode", self.decode if decode is None else decode)
        call = LayerCall(
            given,
            sinks=None if self.sink_logits is None else self.sink_logits[...],
            positions=positions,
            dropout=dropout,
            dropout_rng=dropout_rng,
            pages=pages,
            store=CacheVariables(self) if decoding else None,
        )
        query, key = then(self.query, self.query_ln), then(self.key, self.key_ln)
        return attend(self, Projections(query, key, self.value, self.out), x, context, call)

    def init_cache(self, input_shape: Sequence[int], dtype: DTypeLike | None = None) -> None:
        """Creates an empty cache for decode mode, or replaces it: ``cached_key``, ``cached_value`` and ``cache_index``.

        Args:
            input_shape: ``[batch..., max_length, in_features]``, the shape of the longest x.
            dtype: of the cached keys and values; the layer's dtype if None, or else float32.

        Raises:
            ShapeError: naming the size that does not fit.
        """
        features = self.in_features
        if not isinstance(input_shape, Sequence) or len(input_shape) < 2 or input_shape[-1] != features:
            raise ShapeError(
                f"input_shape={shown(input_shape)}: expected (batch..., max_length, in_features), with the layer's "
                f"{features} features last"
            )
        for size in input_shape[:-1]:
            check_size("input_shape", size, 0)
        kind = dtype or self.dtype or jnp.float32
        heads = (*input_shape[:-1], self.num_kv_heads)
        self.cached_key = nnx.Cache(jnp.zeros((*heads, self.head_dim), kind))
        self.cached_value = nnx.Cache(jnp.zeros((*heads, self.value_dim), kind))
        self.cache_index = nnx.Cache(jnp.array(0, jnp.int32))

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | Sequence[int] | None = None,
        max_length: int | None = None,
    ) -> None:
        """Sets the layer up for ``flax.nnx.view``.

        Args:
            deterministic, decode: the settings of these names, unless None.
            batch_size, max_length: create a cache of this size for a layer in decode mode; both, or neither.

        Raises:
            SpecError, ShapeError: naming the argument.
        """
        decodes = self.decode if decode is None else check_flag("decode", decode)
        if (batch_size is None) != (max_length is None):
            raise SpecError(
                f"batch_size={batch_size}, max_length={max_length}: expected both for a new cache, or neither"
            )
        if batch_size is not None and not decodes:
            raise SpecError(f"batch_size={shown(batch_size)}: expected decode=True with it, because it sizes a cache")
        if deterministic is not None:
            self.deterministic = deterministic
        self.decode = decodes
        if batch_size is not None and max_length is not None:
            sizes: Any = (batch_size,) if is_host_int(batch_size) else batch_size
            self.init_cache((*sizes, max_length, self.in_features))


def dropout_of_call(
    layer: Any, deterministic: bool | None, rngs: nnx.Rngs | nnx.RngStream | None
) -> tuple[float, jax.Array | None]:
    """Returns the dropout rate and key of this call."""
    if layer.dropout_rate == 0:
        return 0.0, None
    off = layer.deterministic if deterministic is None else deterministic
    if off is None:
        raise SpecError(
            f"deterministic=None with dropout_rate={layer.dropout_rate}: expected True or False, in the layer, the "
            "call, or by train() and eval()"
        )
    if off:
        return 0.0, None
    stream = layer.rngs if rngs is None else rngs.dropout if isinstance(rngs, nnx.Rngs) else rngs
    if stream is None:
        raise SpecError("rngs=None: expected nnx.Rngs in the call, because the layer has keep_rngs=False")
    return layer.dropout_rate, stream()


class CacheVariables(NamedTuple):
    """An NNX layer's access to its cache."""

    layer: Any

    def read(self, key: jax.ShapeDtypeStruct, value: jax.ShapeDtypeStruct) -> Cache | None:
        layer = self.layer
        if layer.cached_key is None or layer.cached_value is None or layer.cache_index is None:
            raise SpecError("decode=True: expected a cache, got none; call init_cache(input_shape) first")
        return Cache(layer.cached_key[...], layer.cached_value[...], layer.cache_index[...])

    def write(self, cache: Cache) -> None:
        for name, array in cache._asdict().items():
            getattr(self.layer, name)[...] = array
