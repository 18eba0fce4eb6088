"""The cache of an NNX layer in decode mode: three variables, by the names of Flax's layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from attn_core.call.kinds import check_size
from attn_core.call.seq_info import is_host_int
from attn_core.errors import ShapeError, SpecError, shown
from jax_frontend.flax.layer import Cache


def init_cache(layer: Any, input_shape: Any, dtype: Any) -> None:
    """Gives a layer an empty cache; the arguments are those of ``jax_frontend.nnx.Attention.init_cache``."""
    features = layer.in_features
    if not isinstance(input_shape, Sequence) or len(input_shape) < 2 or input_shape[-1] != features:
        raise ShapeError(
            f"input_shape={shown(input_shape)}: expected (batch..., max_length, in_features), with the layer's "
            f"{features} features last"
        )
    for size in input_shape[:-1]:
        check_size("input_shape", size, 0)
    kind = dtype or layer.dtype or jnp.float32
    heads = (*input_shape[:-1], layer.num_kv_heads)
    layer.cached_key = nnx.Cache(jnp.zeros((*heads, layer.head_dim), kind))
    layer.cached_value = nnx.Cache(jnp.zeros((*heads, layer.value_dim), kind))
    layer.cache_index = nnx.Cache(jnp.array(0, jnp.int32))


def shape_of_view(batch_size: Any, max_length: Any, in_features: int) -> tuple[int, ...] | None:
    """Returns the ``input_shape`` of a view's cache; None if neither size is set.

    Raises:
        SpecError: if one of them is missing.
    """
    if batch_size is None and max_length is None:
        return None
    if batch_size is None or max_length is None:
        raise SpecError(f"batch_size={batch_size}, max_length={max_length}: expected both for a new cache, or neither")
    batch = (batch_size,) if is_host_int(batch_size) else tuple(batch_size)
    return (*batch, max_length, in_features)


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
