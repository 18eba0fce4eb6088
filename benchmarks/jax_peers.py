"""Attentions of other JAX packages, which ``benchmarks.jax_calls`` measures beside ours on the same arrays.

tokamax is optional. A call is left out if a package lacks one of its arguments, and the result has the reason. Only one
thing is added to a call: jax's Pallas Triton kernel has no grouped heads, so k and v are repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from attn_core import SeqInfo
from benchmarks.measure import reason

Attend = Callable[..., Any]
"""(q, k, v, ids) -> out; arrays are [batch, length, heads, head_dim], ids int32 [batch, length] or None."""


class Unfit(Exception):
    """Says why an attention cannot run a call."""


def _only(options: dict[str, Any], *known: str) -> None:
    for name, value in options.items():
        if name not in known:
            raise Unfit(f"takes no {'offsets' if isinstance(value, SeqInfo) else name}")


def _window(options: dict[str, Any]) -> tuple[int, int] | None:
    return None if "window" not in options else (options["window"] - 1, 0)


def _document_starts(ids: Any) -> Any:
    """Returns the first position of each token's document, int32 [batch, length]; documents have unequal neighbours."""
    begins = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))
    return jax.lax.cummax(jnp.where(begins, jnp.arange(ids.shape[1], dtype=jnp.int32), 0), axis=1)


def jax_nn(options: dict[str, Any], implementation: str) -> Attend:
    """Returns jax.nn.dot_product_attention; segment ids become its mask of queries and keys."""
    _only(options, "causal", "window", "q_segment_ids")
    call = partial(jax.nn.dot_product_attention, is_causal=options["causal"], implementation=implementation)

    def attend(q: Any, k: Any, v: Any, ids: Any = None) -> Any:
        if q.shape[-1] != v.shape[-1]:
            raise Unfit(f"takes no value_dim {v.shape[-1]} beside head_dim {q.shape[-1]}")
        mask = None if ids is None else (ids[:, None, :, None] == ids[:, None, None, :])
        return call(q, k, v, mask=mask, local_window_size=_window(options))

    return attend


def tokamax(options: dict[str, Any], implementation: str) -> Attend:
    """Returns tokamax.dot_product_attention; segment ids become ranges of keys, as tokamax's op takes them."""
    import tokamax as package

    _only(options, "causal", "window", "q_segment_ids")
    call = partial(package.dot_product_attention, implementation=implementation)

    def attend(q: Any, k: Any, v: Any, ids: Any = None) -> Any:
        if ids is None:
            return call(q, k, v, is_causal=options["causal"], local_window_size=_window(options))
        from tokamax._src.ops.attention import api, base

        name = "mosaic_gpu" if implementation == "mosaic" else implementation
        mask = base.Mask(is_causal=options["causal"], k_start=_document_starts(ids)[:, None])
        return api.IMPLEMENTATIONS[name](q, k, v, mask=mask)

    if "q_segment_ids" in options and "window" in options:
        raise Unfit("measured without a window on segment ids")
    return attend


def pallas_triton(options: dict[str, Any], interpret: bool = False) -> Attend:
    """Returns jax.experimental.pallas.ops.gpu.attention.mha, with k and v repeated for grouped heads."""
    from jax.experimental.pallas.ops.gpu.attention import mha

    _only(options, "causal", "q_segment_ids")

    def attend(q: Any, k: Any, v: Any, ids: Any = None) -> Any:
        groups = q.shape[2] // k.shape[2]
        k, v = (jnp.repeat(array, groups, axis=2) for array in (k, v))
        return mha(q, k, v, ids, sm_scale=q.shape[-1] ** -0.5, causal=options["causal"], interpret=interpret)

    return attend


PEERS: dict[str, Callable[[dict[str, Any]], Attend]] = {
    "jax.nn, cuDNN": partial(jax_nn, implementation="cudnn"),
    "tokamax, Mosaic GPU": partial(tokamax, implementation="mosaic"),
    "tokamax, Triton": partial(tokamax, implementation="triton"),
    "jax Pallas, Triton": pallas_triton,
}


def programs(
    options: dict[str, Any], arrays: list[Any], training: bool, expected: Any, names: Iterable[str] = ()
) -> tuple[dict[str, Callable[[], Any]], dict[str, str], dict[str, float]]:
    """Compiles and runs every peer once on a call.

    Args:
        options: of ``jax_frontend.attention``, with arrays on the device.
        arrays: q, k, v and the gradient of out.
        expected: our result of the call: out, or the gradients of q, k and v.
        names: of the peers that run; all of them if there are none.

    Returns:
        The peers that ran, as functions without arguments; the reasons of the others; and the largest difference of
        each from ours, beside the largest value of ours.
    """
    ran: dict[str, Callable[[], Any]] = {}
    reasons: dict[str, str] = {}
    differences: dict[str, float] = {}
    for name in names or PEERS:
        try:
            program = jax.jit(_traced(PEERS[name](options), training))
            result = jax.block_until_ready(program(*arrays, options.get("q_segment_ids")))
        except Exception as error:  # the package is missing, refuses the call, or fails in its compiler
            reasons[name] = reason(error)
            continue
        ran[name] = partial(program, *arrays, options.get("q_segment_ids"))
        differences[name] = _difference(result, expected)
    return ran, reasons, differences


def _traced(attend: Attend, training: bool) -> Callable[..., Any]:
    def forward(q: Any, k: Any, v: Any, dout: Any, ids: Any) -> Any:
        return attend(q, k, v, ids)

    def gradients(q: Any, k: Any, v: Any, dout: Any, ids: Any) -> Any:
        return jax.vjp(lambda *leaves: attend(*leaves, ids), q, k, v)[1](dout)

    return gradients if training else forward


def _difference(result: Any, expected: Any) -> float:
    pairs = zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True)
    wide = [(a.astype(jnp.float32), b.astype(jnp.float32)) for a, b in pairs]
    return max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in wide)
