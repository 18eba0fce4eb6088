"""dot_product_attention: the function of ``levanter.layers.attention``, which takes haliax's named arrays.

Copy this file into your project. ``levanter.layers.attention.dot_product_attention = dot_product_attention`` is the one
line. Named arrays are read by ``axes`` and ``array``, and an ``AttentionMask`` by its fields, so neither package is
imported. docs/how_to/migrate/levanter.md lists every argument.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attn_core.errors import ShapeError, SpecError, shown
from jax_frontend import attention

__all__ = ["dot_product_attention", "dot_product_attention_with_sink"]

Array = jax.Array
Names = tuple[str, ...]

_BACKENDS = {"DEFAULT": None, "VANILLA": "jax_xla", "JAX_FLASH": "jax_xla"}
_FIELDS = ("is_causal", "causal_offset", "explicit_mask", "segment_ids", "sliding_window")
"""Of an ``AttentionMask``."""


def dot_product_attention(
    QPos: Any,
    KPos: Any,
    Key: Any,
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    bias: Any = None,
    attention_dtype: Any = None,
    precision: Any = None,
    use_flash: bool | None = None,
    attn_backend: Any = None,
    flash_block_size: int | None = None,
    dropout: float = 0.0,
    *,
    logits_soft_cap: float | None = None,
    scaling_factor: float | None = None,
    inference: bool = True,
    prng: Array | None = None,
    attn_sink: Any = None,
) -> Any:
    """Computes ``levanter.layers.attention.dot_product_attention(...)`` with the attention of ``jax_frontend``.

    Args:
        QPos, KPos, Key: the axes of queries, of keys and of the dot product, or their names; one axis each.
        query: a named array with QPos, Key, the axes that all three share, and axes of grouped heads.
        key, value: with KPos and the shared axes; key with Key, value with axes of its own. Of the shared axes the last
            one that the mask does not have becomes the heads, the others the batch.
        mask: None, an ``AttentionMask``, or a bool named array of any of the axes, True = visible.
        bias: a named array, added to the scaled scores; raises an error with logits_soft_cap.
        attention_dtype: float32 or the dtype of query: kernels add up scores in float32 or wider in any case.
        precision: as in ``jax_frontend.linen.attention_fn``.
        use_flash: False runs ``jax_xla``; None and True choose a kernel.
        attn_backend: None or DEFAULT choose a kernel, VANILLA and JAX_FLASH run ``jax_xla``; others raise an error.
        flash_block_size: has no effect on the numbers; kernels choose their blocks.
        dropout, inference, prng: weights are dropped unless inference, with the key prng.
        logits_soft_cap: ``s = cap * tanh(s / cap)``.
        scaling_factor: factor on ``query . key``; 1 / sqrt of the size of Key if None.
        attn_sink: None, or as in ``dot_product_attention_with_sink``.

    Returns:
        A named array with the axes of query, in which value's own axes replace Key. A query that sees no key gives 0.

    Raises:
        SpecError, ShapeError, DTypeError: naming the argument.
        NoBackendError: if no backend can run the call; the message has every reason.
    """
    requested = _requested(use_flash, attn_backend)
    call = (QPos, KPos, Key, query, key, value)
    named = {"mask": mask, "bias": bias, "attention_dtype": attention_dtype, "precision": precision}
    scores = {"softcap": logits_soft_cap, "scale": scaling_factor}
    drops = not _flag("inference", inference) and dropout != 0
    if drops and attn_sink is not None:
        raise SpecError(f"dropout={dropout}: expected 0 with attn_sink, or inference=True")
    if drops and prng is None:
        raise SpecError(f"prng=None: expected a PRNG key for dropout={dropout}; or pass inference=True")
    dropping = {"dropout": dropout, "dropout_rng": prng} if drops else {}
    return _attend(call, named, attn_sink, {**scores, **dropping, "backend": requested})


def dot_product_attention_with_sink(
    QPos: Any,
    KPos: Any,
    Key: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_sink: Any,
    mask: Any = None,
    bias: Any = None,
    attention_dtype: Any = None,
    precision: Any = None,
    use_flash: bool | None = None,
    attn_backend: Any = None,
    flash_block_size: int | None = None,
    dropout: float = 0.0,
    *,
    logits_soft_cap: float | None = None,
    scaling_factor: float | None = None,
    inference: bool = True,
    prng: Array | None = None,
) -> Any:
    """Computes ``dot_product_attention`` with a logit per head in the softmax, without a longer array of keys.

    Args:
        attn_sink: a named array of the heads' axes. The soft cap applies to it, too, as in Levanter.
        Others: as in ``dot_product_attention``; raises an error with dropout, which in Levanter drops the sink, too.
    """
    return dot_product_attention(
        *(QPos, KPos, Key, query, key, value, mask, bias, attention_dtype, precision),
        *(use_flash, attn_backend, flash_block_size, dropout),
        logits_soft_cap=logits_soft_cap,
        scaling_factor=scaling_factor,
        inference=inference,
        prng=prng,
        attn_sink=attn_sink,
    )


def _attend(call: tuple[Any, ...], named: dict[str, Any], attn_sink: Any, options: dict[str, Any]) -> Any:
    names = tuple(_axis_name(argument, axis) for argument, axis in zip(("QPos", "KPos", "Key"), call[:3], strict=True))
    query, key, value = call[3:]
    mask, bias, softcap = named["mask"], named["bias"], options["softcap"]
    axes = _axes_of(names, query, key, value, mask)
    rows, of_heads = (axes.queries,), (*axes.heads, *axes.groups)
    q = _grouped("query", query, (axes.batch, rows, of_heads, (axes.depth,)), axes)
    k = _grouped("key", key, (axes.batch, (axes.keys,), axes.heads, (axes.depth,)), axes)
    v = _grouped("value", value, (axes.batch, (axes.keys,), axes.heads, axes.values), axes)
    dtype = jnp.result_type(q, k, v)
    _check_dtype(named["attention_dtype"], dtype)
    _check_precision(named["precision"], dtype)
    if bias is not None:
        if softcap is not None:
            raise SpecError("bias: expected None with logits_soft_cap, because Levanter caps the bias, too")
        options["bias"] = _grouped("bias", bias, axes.scores, axes, broadcast=False)
    if attn_sink is not None:
        sinks = _grouped("attn_sink", attn_sink, (of_heads,), axes)
        options["sinks"] = sinks if softcap is None else softcap * jnp.tanh(sinks / softcap)
    if mask is not None:
        options |= _visible(mask, axes)
    out: Any = attention(q.astype(dtype), k.astype(dtype), v.astype(dtype), **options)
    return _named_like(query, value, out, axes)


def _requested(use_flash: Any, attn_backend: Any) -> str | None:
    name = "DEFAULT" if attn_backend is None else getattr(attn_backend, "name", attn_backend)
    if name not in _BACKENDS:
        raise SpecError(f"attn_backend={shown(name)}: expected one of {', '.join(_BACKENDS)} or None")
    if use_flash is None or _flag("use_flash", use_flash):
        return _BACKENDS[name]
    return "jax_xla"


def _check_dtype(attention_dtype: Any, dtype: Any) -> None:
    if attention_dtype is not None and jnp.dtype(attention_dtype) not in (dtype, jnp.float32):
        raise SpecError(
            f"attention_dtype={jnp.dtype(attention_dtype)}: expected float32 or the dtype of query ({dtype})"
        )


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise SpecError(f"{name}={shown(value)}: expected True or False")
    return value


def _check_precision(precision: Any, dtype: Any) -> None:
    """Raises SpecError for more precision than ``jax.default_matmul_precision``; unset, products are of HIGHEST."""
    try:
        level = max(lax.Precision(each).value for each in (precision if isinstance(precision, tuple) else (precision,)))
    except (ValueError, TypeError, NotImplementedError):
        raise SpecError(f"precision={shown(precision)}: expected None, a jax.lax.Precision or its name") from None
    setting = jax.config.jax_default_matmul_precision
    try:
        offered = lax.Precision("highest" if setting is None else setting).value
    except ValueError:  # the name of an algorithm
        offered = 0
    if dtype == jnp.float32 and level > offered:  # JAX uses a precision in float32 only
        raise SpecError(f"precision={shown(precision)}: expected at most jax.default_matmul_precision={setting!r}")


def _visible(mask: Any, axes: _Axes) -> dict[str, Any]:
    """Returns the keywords of ``attention`` for a mask: an ``AttentionMask``, or a named array."""
    if not hasattr(mask, "is_causal"):
        return {"mask": _grouped("mask", mask, axes.scores, axes, broadcast=False).astype(bool)}
    for name, value in vars(mask).items():
        if name not in _FIELDS and value is not None and value is not False:
            raise SpecError(f"mask.{name}: expected None, because the fields known here are {', '.join(_FIELDS)}")
    options: dict[str, Any] = {}
    if mask.explicit_mask is not None:
        table = _grouped("mask.explicit_mask", mask.explicit_mask, axes.scores, axes, broadcast=False)
        options["mask"] = table.astype(bool)
    if mask.segment_ids is not None:
        ids = mask.segment_ids if isinstance(mask.segment_ids, tuple) else (mask.segment_ids, mask.segment_ids)
        options["q_segment_ids"] = _of_tokens("mask.segment_ids", ids[0], axes, axes.queries)
        options["kv_segment_ids"] = _of_tokens("mask.segment_ids", ids[1], axes, axes.keys)
    window, offset = mask.sliding_window, mask.causal_offset if _flag("mask.is_causal", mask.is_causal) else None
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise SpecError(f"mask.sliding_window={shown(window)}: expected None or an int of 1 or more")
    if offset is not None:
        options |= _shifted(offset, axes)
        # Levanter's window ignores the offset: query i sees keys i - window + 1 to i.
        return options if window is None else options | {"mask_mod": _band(window)}
    if window is not None or mask.is_causal:
        options |= {"causal": True, "alignment": "top_left", "window": window}
    return options


def _band(window: int) -> Any:
    return lambda b, h, q, k, *aux: (k <= q) & (k >= q - (window - 1))


def _of_tokens(argument: str, named: Any, axes: _Axes, length: str) -> Array:
    """Returns numbers of tokens, int32 ``[batch, length]``. Levanter names both axes of tokens as that of queries."""
    own = _sizes_of(argument, named)
    stated = length if length in own else axes.queries
    names = (axes.batch, (stated,))
    if own.get(stated) != axes.sizes[length]:
        raise ShapeError(f"{argument}: expected size {axes.sizes[length]} of the axis {stated}, got {own.get(stated)}")
    sizes = axes.sizes | {stated: axes.sizes[length]}
    return _grouped(argument, named, names, axes._replace(sizes=sizes)).astype(jnp.int32)


def _shifted(offset: Any, axes: _Axes) -> dict[str, Any]:
    """Returns the causal mask ``k <= q + offset``, with an offset for each row of the batch."""
    if not hasattr(offset, "axes"):
        raise TypeError(f"mask.causal_offset: expected a named array, got {type(offset).__name__}")
    rows = _grouped("mask.causal_offset", offset, (axes.batch,), axes).astype(jnp.int32)  # [batch]
    queries, keys = (jnp.arange(axes.sizes[name], dtype=jnp.int32) for name in (axes.queries, axes.keys))
    places = jnp.broadcast_to(keys, (len(rows), len(keys)))
    return {"causal": True, "q_positions": queries + rows[:, None], "kv_positions": places}


class _Axes(NamedTuple):
    """The names of a call's axes, and the sizes of all but ``depth`` and ``values``."""

    batch: Names
    queries: str
    keys: str
    depth: str
    """Of the dot product."""
    heads: Names
    """Of keys and values: one axis, or none."""
    groups: Names
    """Of queries only."""
    values: Names
    """Of value only."""
    sizes: dict[str, int]

    @property
    def scores(self) -> tuple[Names, ...]:
        """The axes of a mask: batch, heads, queries and keys."""
        return self.batch, (*self.heads, *self.groups), (self.queries,), (self.keys,)


def _axis_name(argument: str, axis: Any) -> str:
    """Returns the name of an axis, which may be the axis or its name."""
    name = getattr(axis, "name", axis)
    if not isinstance(name, str):
        raise SpecError(f"{argument}={shown(axis)}: expected one axis or its name")
    return name


def _sizes_of(argument: str, named: Any) -> dict[str, int]:
    """Returns the size of each axis of a named array."""
    if not hasattr(named, "axes") or not hasattr(named, "array"):
        raise TypeError(f"{argument}: expected a named array of haliax, got {type(named).__name__}")
    return {axis.name: axis.size for axis in named.axes}


def _axes_of(names: Names, query: Any, key: Any, value: Any, mask: Any) -> _Axes:
    """Returns the axes of a call.

    Of the axes that query, key and value share, the last one is the heads, unless it tells apart the rows of the mask.

    Raises:
        ShapeError, SpecError: naming the argument and the axis.
    """
    queries, keys, depth = names
    of_q, of_k, of_v = _sizes_of("query", query), _sizes_of("key", key), _sizes_of("value", value)
    if queries == keys:
        raise SpecError(f"KPos={keys}: expected another name than QPos")
    for argument, sizes, wanted in (
        ("query", of_q, (queries, depth)),
        ("key", of_k, (keys, depth)),
        ("value", of_v, (keys,)),
    ):
        if any(name not in sizes for name in wanted):
            raise ShapeError(f"{argument}: expected the axes {', '.join(wanted)}, got {', '.join(sizes)}")
    shared = tuple(name for name in of_q if name in of_k and name != depth)
    groups = tuple(name for name in of_q if name not in (*shared, queries, depth))
    values = tuple(name for name in of_v if name not in (*shared, keys))
    for name in of_k:
        if name not in (keys, depth) and (name not in shared or name not in of_v):
            raise ShapeError(f"key: expected its axis {name} in query and in value")
    for name in (*groups, queries):
        if name in values:
            raise ShapeError(f"value: expected no axis {name} of query that key does not have")
    sizes = {name: of_q[name] for name in (*shared, *groups, queries)} | {keys: of_k[keys]}
    checked = [("key", of_k, name, sizes[name]) for name in shared] + [("key", of_k, depth, of_q[depth])]
    for argument, own, name, size in (*checked, *(("value", of_v, name, sizes[name]) for name in (*shared, keys))):
        if own[name] != size:
            raise ShapeError(f"{argument}: expected size {size} of the axis {name}, got {own[name]}")
    rows = _axes_of_rows(mask)
    heads = tuple(name for name in shared if name not in rows)[-1:]
    batch = tuple(name for name in shared if name not in heads)
    return _Axes(batch, queries, keys, depth, heads, groups, values, sizes)


def _axes_of_rows(mask: Any) -> set[str]:
    """Returns the axes of a mask's segment ids and offset, which exist once for each row of a batch."""
    ids, offset = getattr(mask, "segment_ids", None), getattr(mask, "causal_offset", None)
    arrays = [*(ids if isinstance(ids, tuple) else (ids,)), offset]
    return {axis.name for array in arrays for axis in getattr(array, "axes", ())}


def _grouped(argument: str, named: Any, groups: tuple[Names, ...], axes: _Axes, *, broadcast: bool = True) -> Array:
    """Returns a named array with one axis for each group of names, in this order.

    Args:
        broadcast: whether a group without any axis of the array is repeated; else it has size 1.

    Raises:
        ShapeError: if the array has an axis that is in no group, or one of another size.
    """
    own = _sizes_of(argument, named)
    order = [name for group in groups for name in group if name in own]
    for name, size in own.items():
        if name not in order:
            raise ShapeError(f"{argument}: expected no axis {name}, got axes {', '.join(own)}")
        if size != axes.sizes.get(name, size):
            raise ShapeError(f"{argument}: expected size {axes.sizes[name]} of the axis {name}, got {size}")
    names = list(own)
    array = jnp.transpose(named.array, [names.index(name) for name in order])
    full, shape = [], []
    for group in groups:
        repeats = broadcast or any(name in own for name in group)
        sizes = [own.get(name, axes.sizes.get(name, 1)) if repeats else 1 for name in group]
        full += sizes
        shape.append(math.prod(sizes))
    ones = [own.get(name, 1) for group in groups for name in group]
    return jnp.broadcast_to(array.reshape(ones), full).reshape(shape)


def _named_like(query: Any, value: Any, out: Array, axes: _Axes) -> Any:
    """Returns the output ``[batch, length, heads, dim]`` with the axes of query, value's own in the place of depth."""
    by_name = {axis.name: axis for axis in query.axes if axis.name != axes.depth}
    own = [axis for axis in value.axes if axis.name in axes.values]
    order = [*axes.batch, axes.queries, *axes.heads, *axes.groups]
    array = out.reshape([axes.sizes[name] for name in order] + [axis.size for axis in own])
    at: list[int] = []
    result: list[Any] = []
    for axis in query.axes:
        if axis.name == axes.depth:
            at += range(len(order), len(order) + len(own))
            result += own
        else:
            at.append(order.index(axis.name))
            result.append(by_name[axis.name])
    return type(query)(jnp.transpose(array, at), tuple(result))
