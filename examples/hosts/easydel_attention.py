"""register: adds ``attn_mechanism="attn_core"`` to EasyDeL, whose models then run on our attention.

Copy this file into your project. ``register()`` once, and the name in the model's config, are the two lines. The
meaning is that of EasyDeL's ``attn_mechanism="vanilla"``, without its matrix of weights. EasyDeL is imported by
``register`` alone. docs/how_to/migrate/easydel.md lists every argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from attn_core.errors import ShapeError, SpecError, shown
from jax_frontend import attention

__all__ = ["NAME", "attend", "register"]

Array = jax.Array

NAME = "attn_core"
_NO_EFFECT = (
    *("prevent_cse", "fused_backward", "optimized", "mask_value", "vmem_limit_bytes", "policy"),
    *("cache_view", "cache_metadata"),
)
"""Keywords of EasyDeL's call that change no number: of other kernels, and of a cache whose keys are key and value."""


def register() -> None:
    """Adds the operation "attn_core" to EasyDeL's ``OperationRegistry``. Idempotent.

    Raises:
        ImportError: if EasyDeL is not installed.
    """
    from easydel.operations import AttentionOutput, OperationImpl, OperationRegistry

    if NAME in OperationRegistry.list_implementations():
        return
    vanilla = OperationRegistry.get("vanilla")

    class AttnCore(OperationImpl):
        """EasyDeL's operation on our attention, on every device."""

        @classmethod
        def get_impl_name(cls) -> str:
            return NAME

        @classmethod
        def get_requirements(cls, *mode: Any, **named: Any) -> Any:
            requirements = vanilla.get_requirements(*mode, **named)  # the caches whose keys are key and value
            return replace(requirements, name=NAME)

        def forward_native(self, *arrays: Any, **options: Any) -> Any:
            out = attend(self.metadata.runtime_dtype, *arrays, **options)
            return AttentionOutput(attention_weights=None, attention_outputs=out)

    OperationRegistry.register(AttnCore)


def attend(
    dtype: Any,
    query: Array,
    key: Array,
    value: Array,
    mask_info: Any = None,
    bias: Array | None = None,
    init_bias: Callable[[], Array] | None = None,
    deterministic: bool = True,
    dropout_rng: Array | None = None,
    softmax_aux: Array | None = None,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    dropout_prob: float = 0.0,
    causal: bool = False,
    sliding_window: int | tuple[int, int] | None = None,
    precision: Any = None,
    normalize_output: bool = True,
    compute_dtype: Any = None,
    cum_seqlens_q: Array | None = None,
    cum_seqlens_k: Array | None = None,
    **named: Any,
) -> Array:
    """Computes what ``VanillaAttn.forward_native`` of EasyDeL returns as ``attention_outputs``.

    Args:
        dtype: of the computation, and of the result: ``metadata.runtime_dtype``.
        query: ``[batch, q_len, heads, head_dim]``.
        key, value: ``[batch, kv_len, kv_heads, dim]``.
        mask_info: an ejkernel ``MaskInfo``: its mask, or else its segment ids, of which a negative one is padding. A
            causal mask or a window that it says it contains is not applied again.
        bias: ``[batch, heads, kv_heads or 1, q_len, kv_len]``, added to the scores, with the mask.
        init_bias: returns the bias, if neither mask_info nor bias is passed.
        deterministic, dropout_rng, dropout_prob: weights are dropped unless deterministic.
        softmax_aux: logits without a value in the softmax: ``[heads]`` or ``[kv_heads]``, ``[sinks]`` for all heads, or
            ``[heads, kv_heads or 1, sinks]``.
        softmax_scale: 1 / sqrt(head_dim) if None.
        logits_soft_cap: ``s = cap * tanh(s / cap)``, before the bias.
        causal: query i sees keys 0 to i, counted from the first key; of no effect for a single query.
        sliding_window: inclusive distances, ``W`` for ``(W, W)``.
        precision: as in ``jax_frontend.linen.attention_fn``.
        normalize_output, compute_dtype, cum_seqlens_q, cum_seqlens_k: raise an error unless True, None or dtype, None.
        named: keywords of EasyDeL's other kernels without an effect on numbers; raises an error for unknown ones.

    Returns:
        ``[batch, q_len, heads, value_dim]``. A query that sees no key gives 0.

    Raises:
        SpecError, ShapeError, DTypeError: naming the argument.
        NoBackendError: if no backend can run the call; the message has every reason.
    """
    _refuse(dtype, normalize_output, compute_dtype, {"cum_seqlens_q": cum_seqlens_q, "cum_seqlens_k": cum_seqlens_k})
    if unknown := [name for name in named if name not in _NO_EFFECT]:
        raise SpecError(f"{unknown[0]}: not an argument of EasyDeL's attention that attn-core knows")
    _check_precision(precision, jnp.dtype(dtype))
    q, k, v = (_array(name, array).astype(dtype) for name, array in zip(("query", "key", "value"), (query, key, value)))
    for name, array in (("query", q), ("key", k), ("value", v)):
        if array.ndim != 4:
            raise ShapeError(f"{name}: expected [batch, length, heads, head_dim], got {list(array.shape)}")
    options = _visible(mask_info, q, k, _flag("causal", causal), sliding_window)
    if mask_info is None and bias is None and init_bias is not None:
        bias = init_bias()
    if bias is not None:
        options["bias"] = _of_heads("bias", _array("bias", bias), q.shape[2], k.shape[2]).astype(dtype)
    if softmax_aux is not None:
        options["sinks"] = _sinks(_array("softmax_aux", softmax_aux), q.shape[2], k.shape[2])
    if not _flag("deterministic", deterministic) and dropout_prob != 0:
        if dropout_rng is None:
            raise SpecError(f"dropout_rng=None: expected a PRNG key for dropout_prob={dropout_prob}")
        options |= {"dropout": dropout_prob, "dropout_rng": dropout_rng}
    out: Any = attention(q, k, v, scale=softmax_scale, softcap=logits_soft_cap, **options)
    return out


def _array(name: str, value: Any) -> jax.Array:
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected an array, got {type(value).__name__}") from None


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


def _refuse(dtype: Any, normalize_output: Any, compute_dtype: Any, offsets: dict[str, Any]) -> None:
    if not _flag("normalize_output", normalize_output):
        raise SpecError("normalize_output=False: expected True, because kernels return weighted means of the values")
    if compute_dtype is not None and jnp.dtype(compute_dtype) not in (jnp.dtype(dtype), jnp.float32):
        raise SpecError(f"compute_dtype={jnp.dtype(compute_dtype)}: expected None, float32 or {jnp.dtype(dtype)}")
    for name, value in offsets.items():
        if value is not None:
            raise SpecError(f"{name}: expected None; EasyDeL's vanilla ignores it. Pass segment ids in mask_info")


def _visible(mask_info: Any, q: Array, k: Array, causal: bool, window: Any) -> dict[str, Any]:
    """Returns the keywords of ``attention`` that say which keys each query sees."""
    options: dict[str, Any] = {}
    single = q.shape[1] == 1
    causal = causal and not single and not getattr(mask_info, "causal_mask_baked_in", False)
    if window is not None and not getattr(mask_info, "sliding_window_baked_in", False):
        if single and k.shape[1] > 1:
            raise SpecError(
                f"sliding_window={shown(window)}: expected None, or a mask_info that contains it, for a single query, "
                "whose place among the keys is unknown"
            )
        options |= {"window": (window, window) if isinstance(window, int) else window, "alignment": "top_left"}
    if causal:
        options |= {"causal": True, "alignment": "top_left"}
    if mask_info is None:
        return options
    # The properties without an underscore would make a mask of queries and keys from ids, and ids from a mask.
    mask, q_ids, kv_ids = mask_info._attention_mask, mask_info._q_segment_ids, mask_info._kv_segment_ids
    if mask is not None:
        return options | {"mask": _mask(_array("mask_info.attention_mask", mask), q, k)}
    if q_ids is None or kv_ids is None:
        raise SpecError("mask_info: expected an attention mask or segment ids, got neither")
    q_ids, kv_ids = (_array("mask_info.segment_ids", ids).astype(jnp.int32) for ids in (q_ids, kv_ids))
    # A negative id is padding, which sees and is seen by nothing.
    return options | {"q_segment_ids": jnp.maximum(q_ids, -1), "kv_segment_ids": jnp.where(kv_ids < 0, -2, kv_ids)}


def _mask(mask: Array, q: Array, k: Array) -> Array:
    """Returns a mask of 2, 3 or 4 axes as bool ``[batch, heads or 1, q_len or 1, kv_len]``."""
    mask = mask.astype(bool)
    if mask.ndim == 2:  # [batch, kv_len]
        return mask[:, None, None, :]
    if mask.ndim == 3:  # [batch, q_len, kv_len]
        return mask[:, None]
    if mask.ndim != 4:
        raise ShapeError(f"mask_info: expected a mask of 2, 3 or 4 axes, got {list(mask.shape)}")
    mask = mask[..., : q.shape[1], : k.shape[1]]  # the mask of a cache may be longer, as in EasyDeL
    return _of_heads("mask_info", mask, q.shape[2], k.shape[2])


def _of_heads(name: str, array: Array, heads: int, kv_heads: int) -> Array:
    """Returns ``[batch, n, ...]`` with 1 or heads in place of n; kv_heads are repeated for their groups."""
    if array.ndim != 4 or array.shape[1] not in (1, kv_heads, heads):
        raise ShapeError(f"{name}: expected [batch, {heads}, {kv_heads} or 1, q_len, kv_len], got {list(array.shape)}")
    return array if array.shape[1] in (1, heads) else jnp.repeat(array, heads // kv_heads, axis=1)


def _sinks(logits: Array, heads: int, kv_heads: int) -> Array:
    """Returns one logit per head, [heads], that weighs as much as all logits of the head together."""
    if logits.ndim == 1:
        logits = logits[:, None] if logits.shape[0] in (heads, kv_heads) else logits[None]
    if logits.ndim != 2 or logits.shape[0] not in (1, kv_heads, heads):
        raise ShapeError(
            f"softmax_aux: expected [sinks], or [n, sinks] with n of 1, {kv_heads} or {heads}, got {list(logits.shape)}"
        )
    total = jax.nn.logsumexp(logits.astype(jnp.float32), axis=1)
    return jnp.repeat(total, heads // total.shape[0], total_repeat_length=heads)
