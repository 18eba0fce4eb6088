"""The drop-ins of JAX that a campaign calls, as their hosts call them. The twin of torch_hosts."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from attn_core.call.spec import AttentionSpec
from attn_core.cli.trial import Trial
from tests.campaign import host_words
from tests.campaign.case import is_banded
from tests.campaign.entries import Arrays, Entry, without
from tests.campaign.host_words import Ops, one_table
from tests.campaign.jax_entries import run, words

HostCall = Callable[[AttentionSpec, Arrays, dict[str, Any]], Any]
"""(spec, arrays, options of ``attention``) -> the results of ``attention``."""


def _run(call: HostCall, trial: Trial, backend: str | None, device: str) -> Arrays:
    import jax

    with jax.default_matmul_precision("highest"):  # a GPU would round the layers' own float32 products to TF32
        return run(_with_spec(call, trial.spec), True, trial, backend, device)


@lru_cache(maxsize=1)  # one object for the cases of a block, so that they share its program
def _with_spec(call: HostCall, spec: AttentionSpec) -> Callable[..., Any]:
    return partial(call, spec)


def _draw(spec: AttentionSpec) -> int:
    """Returns a number that chooses among the ways to write a call: the same for all cases that share a program."""
    return int(spec.digest()[:8], 16)


def _ops() -> Ops:
    import jax.numpy as jnp

    return Ops(jnp.asarray, lambda bias, seen: jnp.where(seen, bias, -jnp.inf))


# Unsloth


def _unsloth(spec: AttentionSpec, arrays: Arrays, options: dict[str, Any]) -> Any:
    from jax_frontend import use_backend
    from jax_frontend.unsloth import AttentionConfig, AttentionContext, run_attention

    call = host_words.unsloth_call(spec, arrays, options["seq_info"], _draw(spec), _ops())
    config, context = AttentionConfig(**call.pop("config")), AttentionContext(**call.pop("context"))
    with use_backend(*() if options["backend"] is None else (options["backend"],)):
        out = run_attention(config=config, context=context, **call)
    return out[0] if spec.packed else out


# Flax and equinox. Their projections select channels: exact, so heads are q, k and v.


def _unit(key: Any, shape: Any, dtype: Any = "float32", *others: Any) -> Any:
    import jax.numpy as jnp

    return jnp.eye(shape[0], shape[1], dtype=dtype)


def _hook(spec: AttentionSpec, arrays: Arrays, options: dict[str, Any], draw: int) -> tuple[Any, Any]:
    """Returns ``attention_fn`` with the options that no Flax layer has, and the layer's mask of floats.

    Flax's mask functions give float32, 1 for visible; the band goes into the mask or into the hook's options.
    """
    from jax_frontend.linen import attention_fn

    in_mask = not spec.packed and is_banded(spec) and bool(draw & 1)
    banded: dict[str, Any] = {} if in_mask else {"causal": spec.causal, "window": spec.window}
    hook = attention_fn(
        alignment=spec.alignment,
        softcap=spec.softcap,
        scale=spec.scale,
        alibi_slopes=arrays["alibi_slopes"],
        sinks=arrays["sinks"],
        seq_info=options["seq_info"],
        bitwise_deterministic=spec.deterministic,
        backend=options["backend"],
        **banded,
    )
    seen = one_table(spec, arrays | {"bias": None}, _ops(), with_band=in_mask)
    return hook, None if seen is None else seen.astype("float32")


def _features(arrays: Arrays) -> list[Any]:
    """Returns q, k and v as ``[batch, len, features]``; packed rows as a batch of 1."""
    rows = (arrays[name] if arrays[name].ndim == 4 else arrays[name][None] for name in "qkv")
    return [_flat(array) for array in rows]


def _flat(array: Any) -> Any:
    """Returns ``[..., heads, channels]`` as ``[..., features]``, also of no rows."""
    return array.reshape(*array.shape[:-2], array.shape[-2] * array.shape[-1])


def _linen(spec: AttentionSpec, arrays: Arrays, options: dict[str, Any]) -> Any:
    import jax
    from flax import linen

    hook, mask = _hook(spec, arrays, options, _draw(spec))
    layer = linen.MultiHeadDotProductAttention(
        num_heads=spec.num_heads,
        attention_fn=hook,
        use_bias=False,
        kernel_init=_unit,
        dtype=spec.dtype,
        param_dtype=spec.dtype,
    )
    out, _ = layer.init_with_output(jax.random.key(0), *_features(arrays), mask=mask)
    return _heads(spec, out)


def _nnx(spec: AttentionSpec, arrays: Arrays, options: dict[str, Any]) -> Any:
    from flax import nnx

    draw = _draw(spec)
    hook, mask = _hook(spec, arrays, options, draw)
    features = _features(arrays)
    layer = nnx.MultiHeadAttention(
        num_heads=spec.num_heads,
        in_features=features[0].shape[-1],
        num_kv_heads=spec.num_kv_heads,
        in_kv_features=features[1].shape[-1],
        attention_fn=hook,
        use_bias=False,
        kernel_init=_unit,
        dtype=spec.dtype,
        param_dtype=spec.dtype,
        decode=False,
        rngs=nnx.Rngs(0),
    )
    # NNX says causal in the layer's call as well: at the first key, so the hook's alignment must agree.
    return _heads(spec, layer(*features, mask=mask, is_causal=spec.causal and bool(draw & 2)))


def _heads(spec: AttentionSpec, out: Any) -> Any:
    out = out.reshape(*out.shape[:2], spec.num_heads, spec.value_dim)
    return out[0] if spec.packed else out


def _attention_fn(spec: AttentionSpec, arrays: Arrays, options: dict[str, Any]) -> Any:
    """The hook with the keywords of Flax's own ``dot_product_attention``, a bias and any number of batch axes too."""
    draw = _draw(spec)
    hook, mask = _hook(spec, arrays, options, draw)
    rows, bias = [arrays[name] for name in "qkv"], arrays["bias"]
    if draw & 4 and not spec.packed:  # [batch, 1, len, heads, dim]
        rows = [array[:, None] for array in rows]
        mask, bias = (None if table is None else table[:, None] for table in (mask, bias))
    elif draw & 4:  # [1, tokens, heads, dim]
        rows = [array[None] for array in rows]
    elif spec.packed:  # no batch axis, in tables neither
        mask, bias = (None if table is None else table[0] for table in (mask, bias))
    out = hook(
        *rows,
        bias=bias,
        mask=mask,
        broadcast_dropout=False,
        dropout_rng=options["dropout_rng"],
        dropout_rate=spec.dropout,
        deterministic=not spec.dropout,
        dtype=spec.dtype if draw & 8 else None,
        precision=None,
    )
    return out.reshape(spec.out_shape)


def _linen_refuses(spec: AttentionSpec) -> str | None:
    return "as many kv heads as heads" if spec.group_size > 1 else _layer_refuses(spec)


def _layer_refuses(spec: AttentionSpec) -> str | None:
    if spec.value_dim != spec.head_dim:
        return "values as wide as keys"
    return without("bias", "dropout", "lse")(spec)


def _equinox(spec: AttentionSpec, arrays: Arrays, options: dict[str, Any]) -> Any:
    """``attend`` in the place of the layer's own call; a batch goes through ``jax.vmap``, as with the layer."""
    import equinox
    import jax
    import jax.numpy as jnp

    from jax_frontend.equinox import attend

    rows = [_flat(arrays[name]) for name in "qkv"]
    widths = dict(zip(("query_size", "key_size", "value_size"), (array.shape[-1] for array in rows)))
    sizes: dict[str, Any] = {
        "qk_size": spec.head_dim,
        "vo_size": spec.value_dim,
        "output_size": spec.num_heads * spec.value_dim,
    }
    layer = equinox.nn.MultiheadAttention(spec.num_heads, **widths, **sizes, key=jax.random.key(0))
    layer = jax.tree.map(lambda leaf: _unit(None, leaf.shape, spec.dtype) if equinox.is_array(leaf) else leaf, layer)
    names = ("causal", "alignment", "window", "softcap", "scale", "backend", "seq_info")
    keywords = {name: options[name] for name in names} | {"bitwise_deterministic": spec.deterministic}
    full = (spec.batch, spec.num_heads, spec.q_len, spec.kv_len)

    def table(array: Any) -> Any:
        """``[batch, heads, q, kv]``, or ``[batch, q, kv]`` if all heads share it."""
        if array is None:
            return None
        heads = array.shape[1]
        array = jnp.broadcast_to(array, (full[0], heads, *full[2:]))
        return array[:, 0] if heads == 1 else array

    mask, bias, slopes = table(arrays["mask"]), table(arrays["bias"]), arrays["alibi_slopes"]
    mask = mask if mask is None or _draw(spec) & 1 else mask.astype("float32")  # nonzero is visible

    def call(rows: Any, mask: Any, bias: Any, slopes: Any) -> Any:
        tables = {"bias": bias, "alibi_slopes": slopes, "sinks": arrays["sinks"]}
        return attend(layer, rows[0], rows[1], rows[2], mask, inference=True, **tables, **keywords)

    if spec.packed:
        mask, bias = (None if each is None else each[0] for each in (mask, bias))
        slopes = slopes[0] if slopes is not None and slopes.ndim == 2 else slopes
        return call(rows, mask, bias, slopes).reshape(spec.out_shape)
    by_row = 0 if slopes is not None and slopes.ndim == 2 else None
    axes = (0, None if mask is None else 0, None if bias is None else 0, by_row)
    return jax.vmap(call, in_axes=axes)(rows, mask, bias, slopes).reshape(spec.out_shape)


def _equinox_refuses(spec: AttentionSpec) -> str | None:
    return "as many kv heads as heads" if spec.group_size > 1 else without("dropout", "lse")(spec)


def _unsloth_refuses(spec: AttentionSpec) -> str | None:
    # Unsloth's call has no argument for the key that dropout needs in JAX.
    return without("dropout")(spec) or host_words.unsloth_refuses(spec)


_shared: dict[str, Any] = {"shared": True, "share": 0.5, "masks": True}

ENTRIES = (
    Entry("jax unsloth", partial(_run, _unsloth), _unsloth_refuses, **_shared),
    Entry("jax linen layer", partial(_run, _linen), _linen_refuses, needs=("flax",), **_shared),
    Entry("jax nnx layer", partial(_run, _nnx), _layer_refuses, needs=("flax",), **_shared),
    Entry(
        "jax flax attention_fn", partial(_run, _attention_fn), without("lse"), needs=("flax",), words=words, **_shared
    ),
    Entry("jax equinox", partial(_run, _equinox), _equinox_refuses, needs=("equinox",), **_shared),
)
