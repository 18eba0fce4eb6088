"""dot_product_attention: the function of ``levanter.layers.attention``, which takes haliax's named arrays.

``levanter.layers.attention.dot_product_attention = dot_product_attention`` is the one line. Named arrays are read by
``axes`` and ``array``, and an ``AttentionMask`` by its fields, so neither package is imported.
docs/how_to/migrate/levanter.md lists every argument.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from attn_core.call.options import check_flag, check_number
from attn_core.errors import SpecError, shown
from jax_frontend.attention import attention
from jax_frontend.flax.refusals import check_precision
from jax_frontend.levanter.mask import visible
from jax_frontend.levanter.named_axes import axes_of, axis_name, grouped, named_like

__all__ = ["dot_product_attention", "dot_product_attention_with_sink"]

Array = jax.Array
_BACKENDS = {"DEFAULT": None, "VANILLA": "jax_xla", "JAX_FLASH": "jax_xla"}


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
    drops = not check_flag("inference", inference) and dropout != 0
    if drops and attn_sink is not None:
        raise SpecError(f"dropout={dropout}: expected 0 with attn_sink, or inference=True")
    if drops and prng is None:
        raise SpecError(f"prng=None: expected a PRNG key for dropout={dropout}; or pass inference=True")
    if flash_block_size is not None:
        check_number("flash_block_size", flash_block_size)
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
    names = tuple(axis_name(argument, axis) for argument, axis in zip(("QPos", "KPos", "Key"), call[:3], strict=True))
    query, key, value = call[3:]
    mask, bias, softcap = named["mask"], named["bias"], options["softcap"]
    axes = axes_of(names, query, key, value, mask)
    rows, of_heads = (axes.queries,), (*axes.heads, *axes.groups)
    q = grouped("query", query, (axes.batch, rows, of_heads, (axes.depth,)), axes)
    k = grouped("key", key, (axes.batch, (axes.keys,), axes.heads, (axes.depth,)), axes)
    v = grouped("value", value, (axes.batch, (axes.keys,), axes.heads, axes.values), axes)
    dtype = jnp.result_type(q, k, v)
    _check_dtype(named["attention_dtype"], dtype)
    check_precision(named["precision"], dtype)
    if bias is not None:
        if softcap is not None:
            raise SpecError("bias: expected None with logits_soft_cap, because Levanter caps the bias, too")
        options["bias"] = grouped("bias", bias, axes.scores, axes, broadcast=False)
    if attn_sink is not None:
        sinks = grouped("attn_sink", attn_sink, (of_heads,), axes)
        options["sinks"] = sinks if softcap is None else softcap * jnp.tanh(sinks / softcap)
    if mask is not None:
        options |= visible(mask, axes)
    out: Any = attention(q.astype(dtype), k.astype(dtype), v.astype(dtype), **options)
    return named_like(query, value, out, axes)


def _requested(use_flash: Any, attn_backend: Any) -> str | None:
    name = "DEFAULT" if attn_backend is None else getattr(attn_backend, "name", attn_backend)
    if name not in _BACKENDS:
        raise SpecError(f"attn_backend={shown(name)}: expected one of {', '.join(_BACKENDS)} or None")
    if use_flash is None or check_flag("use_flash", use_flash):
        return _BACKENDS[name]
    return "jax_xla"


def _check_dtype(attention_dtype: Any, dtype: Any) -> None:
    if attention_dtype is not None and jnp.dtype(attention_dtype) not in (dtype, jnp.float32):
        raise SpecError(
            f"attention_dtype={jnp.dtype(attention_dtype)}: expected float32 or the dtype of query ({dtype})"
        )
