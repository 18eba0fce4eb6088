"""The parts that the linen and the NNX attention layers share: their fields, a call's arguments, and attention.

Arrays with any number of batch axes, as Flax's layers take them, are folded into the one batch axis of attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.nn.initializers import Initializer, lecun_normal, zeros
from jax.typing import DTypeLike

from attn_core.backends.shared.in_jax import current_precision, current_precision_level, document_numbers
from attn_core.call.layers import ON_ROWS, OVER_RANKS, options_of, refuse_over_ranks
from attn_core.call.segments import Segments
from attn_core.call.seq_info import SeqInfo, SeqInfoLike
from attn_core.call.spec import DTYPES
from attn_core.context_parallel.request import row_lengths
from attn_core.errors import DTypeError, ShapeError, SpecError, shown
from attn_core.paged.step import Pages
from jax_frontend.attention import attention
from jax_frontend.context_parallel import shards
from jax_frontend.context_parallel.attention import context_parallel_attention
from jax_frontend.context_parallel.mesh import axes_in_scope, find_row_mesh
from jax_frontend.context_parallel.prepare import document_offsets
from jax_frontend.dispatch.plan import as_array, check_array

Rotary = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]

KERNEL_INIT = lecun_normal()  # one function, so that layers with the default are equal


@dataclass(eq=False, repr=False)
class LayerFields:
    """What a linen and an NNX layer are made of; ``jax_frontend.linen.Attention`` says what each field means."""

    num_heads: int
    _: KW_ONLY
    num_kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    out_features: int | None = None
    use_bias: bool = True
    causal: bool = False
    alignment: str = "bottom_right"
    window: int | tuple[int | None, int | None] | None = None
    softcap: float | None = None
    scale: float | None = None
    sinks: bool = False
    normalize_qk: bool = False
    rotary: Rotary | None = None
    decode: bool = False
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    bitwise_deterministic: bool = False
    backend: str | tuple[str, ...] | None = None
    context_axis: str | tuple[str, str] | None = None
    context_strategy: str | None = None
    context_layout: str | None = None
    context_length: int | tuple[int, int] | None = None
    precision: Any = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Initializer = KERNEL_INIT
    bias_init: Initializer = zeros
    out_kernel_init: Initializer | None = None
    out_bias_init: Initializer | None = None
    sinks_init: Initializer = zeros
    invariant: str | None = None


class Projections(NamedTuple):
    """query, key, value: ``[..., features] -> [..., heads, dim]``, normalised if the layer has normalize_qk; out:
    ``[..., heads, dim] -> [..., features]``."""

    query: Callable[[jax.Array], jax.Array]
    key: Callable[[jax.Array], jax.Array]
    value: Callable[[jax.Array], jax.Array]
    out: Callable[[jax.Array], jax.Array]


def then(
    project: Callable[[jax.Array], jax.Array], norm: Callable[[jax.Array], jax.Array] | None
) -> Callable[[jax.Array], jax.Array]:
    """Returns a projection whose heads are normalised, as normalize_qk wants them; the projection itself if norm is
    None."""
    return project if norm is None else lambda x: norm(project(x))


class Cache(NamedTuple):
    """The variables of a layer in decode mode, by their names in Flax's layers.

    Attributes:
        cached_key, cached_value: ``[batch..., max_length, kv_heads, dim]``; keys are rotated.
        cache_index: int ``[]``: how many tokens the cache has.
    """

    cached_key: jax.Array
    cached_value: jax.Array
    cache_index: jax.Array


class CacheStore(Protocol):
    """A layer's access to its cache."""

    def read(self, key: jax.ShapeDtypeStruct, value: jax.ShapeDtypeStruct) -> Cache | None:
        """Returns the cache; None if it was just initialised, with the shapes and dtypes of key and value.

        Raises:
            SpecError: if there is no cache, and this call cannot initialise one.
        """

    def write(self, cache: Cache) -> None:
        """Replaces the cache."""


class LayerCall(NamedTuple):
    """The arguments of one call of a layer; dropout is 0 if it is switched off.

    given: the keywords of ``attention`` that are not its defaults.
    store: access to the layer's cache in decode mode, else None.
    """

    given: Mapping[str, Any]
    sinks: jax.Array | None = None
    positions: Any = None
    dropout: float = 0.0
    dropout_rng: Any = None
    pages: Pages | None = None
    store: CacheStore | None = None


def check_inputs(x: Any, context: Any, pages: object) -> None:
    """Raises an error unless a layer's inputs are arrays; context may be None. ``check_paged_layer`` checks the rank of
    x with pages."""
    for name, array in (("x", x), ("context", context)):
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(f"{name}: expected an array without a mask, got a numpy.ma.MaskedArray")
        if not (isinstance(array, np.ndarray) or (array is None and name == "context")):
            check_array(name, array)
        if array is not None and array.ndim < 2 and pages is None:
            raise ShapeError(f"{name}: expected [..., seq, features], got {list(array.shape)}")
        if array is not None and str(array.dtype) not in DTYPES:
            raise DTypeError(f"{name}: expected one of {', '.join(DTYPES)}, got {array.dtype}")


def check_precision(precision: Any, dtype: DTypeLike | None) -> None:
    """Checks a ``jax.lax.Precision``, its name, or a pair of them. JAX uses a precision in float32 only.

    Every kernel multiplies float32 as precisely as HIGHEST, except ``jax_xla`` under a lower
    ``jax.default_matmul_precision``. A layer that requests more than that default raises an error.
    """
    # A pair has a precision for each operand of a product.
    for each in precision if isinstance(precision, tuple) else (precision,):
        try:
            level = lax.Precision(each).value
        except (ValueError, TypeError, NotImplementedError):  # for one that cannot be hashed or compared
            raise SpecError(
                f"precision={shown(precision)}: expected None, a jax.lax.Precision or its name; kernels choose the "
                "algorithm of their multiplications"
            ) from None
        if dtype == jnp.float32 and level > current_precision_level():
            raise SpecError(
                f"precision={shown(precision)}: jax.default_matmul_precision is {current_precision()!r} here, and a "
                "layer cannot ask for more; raise it, or leave it unset (then float32 is multiplied at HIGHEST)"
            )


def attend_to_heads(
    layer: LayerFields, q: jax.Array, k: jax.Array, v: jax.Array, call: LayerCall, **visibility: Any
) -> jax.Array:
    """Computes attention of projected heads, ``[rows, seq, heads, dim]`` each, with a layer's options.

    Args:
        visibility: replaces options of the layer that say what is visible.
    """
    # context_parallel_attention has no dropout, and so no dropout_rng.
    run, names = partial(attention, dropout_rng=call.dropout_rng), ON_ROWS
    if is_context_parallel(layer):
        refuse_over_ranks(call.given, layer.invariant)
        run, names = partial(_attend_over_devices, layer), OVER_RANKS
    options = {**call.given, **options_of(layer, names), **visibility}
    if "mask" in options:  # Flax's helpers make float32 masks
        options["mask"] = as_array("mask", options["mask"]).astype(bool)
    return run(q, k, v, **options, sinks=call.sinks, dropout=call.dropout)


def token_positions(positions: jax.Array | None, seq_info: SeqInfo | None, batch: int, seq: int) -> jax.Array:
    """Returns ``[batch, seq]`` int positions: the caller's, or else each token's index in its row or document.

    Args:
        positions: the caller's positions, ``[seq]`` or ``[batch, seq]``; or None.
    """
    if positions is None:
        positions = jnp.arange(seq, dtype=jnp.int32)
        if seq_info is not None:
            starts = as_array("seq_info.cu_seqlens_q", seq_info.cu_seqlens_q)
            # The inner offsets at or before a token count the documents in front of its own.
            positions = positions - starts[document_numbers(starts[1:-1], seq)]
    return jnp.broadcast_to(positions, (batch, seq))


def fold_tables(call: LayerCall, batch: tuple[int, ...], seq: int) -> LayerCall:
    """Returns a call whose tables have one batch axis. With one batch axis already, ``attention`` takes them as they
    are.

    Raises:
        ShapeError: naming the table.
    """
    if len(batch) == 1:
        return call
    folded = dict(call.given)
    for name, table in call.given.items():
        if name in ("mask", "bias"):
            folded[name] = four_axes(name, as_array(name, table), batch)
        elif name == "alibi_slopes":
            folded[name] = _fold_slopes(as_array(name, table), batch)
        elif name == "key_ranges" and isinstance(table, np.ndarray | jax.Array):
            folded[name] = _fold_ranges(table, batch)
        elif name in Segments._fields:
            folded[name] = _fold_tokens(name, table, batch)
    return call._replace(given=folded, positions=row_positions("positions", call.positions, batch, seq))


def four_axes(name: str, array: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """Returns a mask or bias of up to ``[batch..., heads, q, kv]`` with four axes, ``[batch or 1, heads, q, kv]``."""
    rank = len(batch) + 3
    if array.ndim > rank:
        raise ShapeError(f"{name}: expected at most {rank} axes [batch..., heads, q, kv], got {list(array.shape)}")
    return _fold(name, array.reshape((1,) * (rank - array.ndim) + array.shape), batch)


def row_positions(name: str, positions: jax.Array | None, batch: tuple[int, ...], length: int) -> jax.Array | None:
    """Returns positions that broadcast to ``[batch..., length]`` as ``[batch, length]``; None for None."""
    if positions is None:
        return None
    array = as_array("positions", positions)
    full = (*batch, length)
    missing = len(full) - array.ndim
    if missing < 0 or any(size not in (1, axis) for size, axis in zip(array.shape, full[missing:], strict=True)):
        raise ShapeError(f"{name}: expected [batch..., length] = {list(full)}, got {list(array.shape)}")
    return jnp.broadcast_to(array, full).reshape(math.prod(batch), length)


def _fold_slopes(slopes: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """Returns slopes with one batch axis in place of the layer's; slopes of heads alone stay."""
    if slopes.ndim == 1:
        return slopes
    if slopes.shape[:-1] != batch:
        raise ShapeError(
            f"alibi_slopes: expected [heads] or [batch..., heads] with the batch {list(batch)}, got "
            f"{list(slopes.shape)}"
        )
    return slopes.reshape(math.prod(batch), slopes.shape[-1])


def _fold_tokens(name: str, array: Any, batch: tuple[int, ...]) -> Any:
    """Folds segment ids or positions ``[batch..., length]``. ``attention`` checks length, dtype and type."""
    shape = getattr(array, "shape", None)
    if shape is None:
        return array
    if len(shape) != len(batch) + 1 or tuple(shape[:-1]) != batch:
        raise ShapeError(f"{name}: expected [batch..., length] with the batch {list(batch)}, got {list(shape)}")
    return array.reshape(math.prod(batch), shape[-1])


def _fold_ranges(ranges: jax.Array | np.ndarray, batch: tuple[int, ...]) -> jax.Array | np.ndarray:
    """Folds ``[batch..., kv_heads or 1, kv_len, ranges, 2]``; ``[1, kv_heads or 1, ...]`` is shared by all rows."""
    if ranges.ndim == 5 and ranges.shape[0] == 1:
        return ranges
    if ranges.ndim != len(batch) + 4:
        raise ShapeError(
            f"key_ranges: expected [batch..., kv_heads or 1, kv_len, ranges, 2] with the batch {list(batch)}, or "
            f"[1, kv_heads or 1, kv_len, ranges, 2], got {list(ranges.shape)}"
        )
    return _fold("key_ranges", ranges, batch)


def _fold(name: str, array: jax.Array | np.ndarray, batch: tuple[int, ...]) -> Any:
    """Folds the batch axes of an array of numpy or JAX, each of which may be 1; all of 1 become one axis of 1."""
    lead, tail = array.shape[: len(batch)], array.shape[len(batch) :]
    if all(size == 1 for size in lead):
        return array.reshape(1, *tail)  # the batch shares it, so no row needs a copy
    if any(size not in (1, full) for size, full in zip(lead, batch, strict=True)):
        raise ShapeError(f"{name}: expected batch axes broadcastable to {list(batch)}, got {list(lead)}")
    broadcast_to = np.broadcast_to if isinstance(array, np.ndarray) else jnp.broadcast_to
    return broadcast_to(array, (*batch, *tail)).reshape(math.prod(batch), *tail)


def is_context_parallel(layer: Any) -> bool:
    """Returns whether a layer's rows are spread over devices: whether it has a ``context_axis``.

    Linen initialises parameters by a call. If this call is outside the mesh, it runs plain attention on whole rows.
    """
    if layer.context_axis is None:
        return False
    initializing = getattr(layer, "is_initializing", None)
    return axes_in_scope(layer.context_axis) or initializing is None or not initializing()


def shard_positions(layer: Any, seq_info: SeqInfoLike, places: int) -> jax.Array:
    """Returns int32 ``[places]``: the position (in its row, or in its document) at each place of a spread row."""
    row_mesh, documents = find_row_mesh(None, layer.context_axis), document_offsets(seq_info)
    # Outside jax.shard_map an array has the shards of all devices, end to end.
    shard = places if row_mesh.inside else places // row_mesh.world
    length, _ = row_lengths(layer.context_length, documents, (shard, shard), row_mesh.world)
    layout = shards.cut_layout(row_mesh, layer.context_layout)
    return shards.position_ids(row_mesh, layout, length, documents)


def _attend_over_devices(layer: Any, q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
    """Runs ``context_parallel_attention`` with a layer's axis, strategy, layout and length."""
    return context_parallel_attention(  # type: ignore[no-any-return]
        q,
        k,
        v,
        axis_name=layer.context_axis,
        strategy=layer.context_strategy,
        layout=layer.context_layout,
        length=layer.context_length,
        **options,
    )
