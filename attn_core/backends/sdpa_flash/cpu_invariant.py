"""Calls with ``invariant`` on torch's CPU flash kernel: what it refuses, and half precision, computed in float32."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from attn_core.backends.sdpa_flash.cpu_kernel import has_tiles
from attn_core.backends.sdpa_flash.cpu_rows import Shape, keeps_rows_apart
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs

HALF = ("bfloat16", "float16")


def refusals(spec: AttentionSpec, kernel: str) -> tuple[str, ...]:
    """Returns why the kernel cannot compute a call with ``invariant``.

    Args:
        kernel: its name in reasons.
    """
    lacks = {
        f"a mask or bias: {kernel} would sum over the padding": bool(spec.mask_shape or spec.bias_shape),
        "sinks: torch's sigmoid rounds the last elements of a tensor in another way": spec.sinks,
        "alibi_slopes of each row": len(spec.alibi_shape or ()) == 2,
        **(_no_tiles_for(spec, kernel) if spec.invariant == "prefix" else {}),
    }
    return tuple(f"invariant={spec.invariant!r} with {what}" for what in lacks if lacks[what])


def _no_tiles_for(spec: AttentionSpec, kernel: str) -> dict[str, bool]:
    window = tuple(spec.window) not in ((None, None), (None, 0))
    unequal = spec.alignment == "top_left" and (spec.packed or spec.q_len != spec.kv_len)
    return {
        f"window={spec.window}: the tiles of {kernel} have none": window,
        f"alibi_slopes: the tiles of {kernel} have none": spec.alibi_shape is not None,
        f"alignment='top_left': the tiles of {kernel} expect queries at the end of their keys": unequal,
        f"rings of newest tokens: the tiles of {kernel} have none": spec.paged is not None and bool(spec.paged.recent),
    }


def computed_in(spec: AttentionSpec) -> str:
    """Returns the dtype of the computation of a forward.

    On a processor with tiles (Intel AMX) torch packs keys in half precision by a rule that counts the batch. There, and
    where a row has other bits in a batch, a call with ``invariant`` is computed in float32.
    """
    import torch

    if spec.invariant is None or spec.dtype not in HALF:
        return spec.dtype
    shape = Shape(spec.dtype, spec.num_heads, spec.num_kv_heads, spec.head_dim, torch.get_num_threads())
    return "float32" if has_tiles() or not keeps_rows_apart(shape) else spec.dtype


def is_native(spec: AttentionSpec) -> bool:
    """Returns whether the dtype of the call is that of the computation."""
    return spec.dtype not in HALF or computed_in(spec) == spec.dtype


def in_float32(spec: AttentionSpec, inputs: Inputs) -> tuple[AttentionSpec, Inputs]:
    """Returns a call in half precision as one in float32."""
    q, k, v = (tensor.float() for tensor in inputs[:3])
    return _spec_in_float32(spec), inputs._replace(q=q, k=k, v=v)


@lru_cache(maxsize=4096)
def _spec_in_float32(spec: AttentionSpec) -> AttentionSpec:
    return replace(spec, dtype="float32")
