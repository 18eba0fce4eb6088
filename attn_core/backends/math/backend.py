"""Plain attention in torch operations: every feature, any float dtype, any device. Correct first, fast second.

Blocked over queries: a block of QUERY_BLOCK rows reads only the keys that its band shows, so memory grows with
``QUERY_BLOCK * kv_len`` and never with ``q_len * kv_len``. Everything but inputs and outputs is float32 (float64 for
float64 inputs). The backward recomputes the weights from the saved log-sum-exp; no autograd graph is ever built.

Packed documents: on the CPU the offsets are read and checked, and each document runs in blocks of its own. Elsewhere
reading them would synchronise, so every block spans all keys, and document numbers hide the other documents. Wrong
offsets can then hide keys, but never read outside a buffer. A NaN or Inf in a hidden key or value affects no row; one
in a visible key or value makes the row NaN (or Inf).
With ``invariant``, on a CPU, all of it runs in tiles of one size (``fixed_tiles.py``).
Upstream: torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from attn_core.backends.math import fixed_tiles, paged
from attn_core.backends.shared import tile_limits
from attn_core.backends.shared.device_kinds import ANY
from attn_core.backends.shared.plain import attention as plain_attention
from attn_core.backends.shared.plain import row_maximum as plain_row_maximum
from attn_core.backends.shared.plain import tangents as plain_tangents
from attn_core.backends.support import Build, Support
from attn_core.call.masks import band
from attn_core.call.pages import BITS
from attn_core.call.spec import DTYPES, AttentionSpec
from attn_core.call.tensors import Gradients, Inputs, Tangents

FRAMEWORK = "torch"
REQUIRES = "torch>=2.11"

FORWARD = Support(
    kernel="the torch math kernel",
    devices=(ANY,),
    dtypes=DTYPES,
    value_dim=True,
    grouped_heads=True,
    alignments=("bottom_right", "top_left"),
    causal=True,
    window=True,
    softcap=True,
    mask=True,
    key_ranges=True,
    mask_mod=True,
    score_mod=True,
    bias=True,
    bias_gradient=True,
    aux_gradients=True,
    alibi=True,
    sinks=True,
    packed=True,
    dropout=True,
    portable_dropout=True,
    deterministic=True,
    lse=True,
    partial=True,
    lse_gradient=True,
    paged=True,
    paged_alibi=True,
    paged_starts=True,
    page_dtypes=tuple(BITS),
    invariant=("batch", "prefix"),
)
BACKWARD = replace(FORWARD, paged=False, paged_alibi=False, paged_starts=False, page_dtypes=())
FORWARD_MODE = replace(BACKWARD, aux_gradients=False, invariant=())
ROW_MAXIMUM = replace(BACKWARD, invariant=())


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Refuses what the tiles of ``fixed_tiles`` lack; without ``invariant`` every combination of claims works."""
    return tile_limits.refusals(spec, device, FORWARD.kernel)


def probe() -> str:
    """Returns torch's version."""
    import torch

    return torch.__version__


def lower(spec: AttentionSpec) -> dict[str, Any]:
    """Returns the scale, the softcap, the band (None if packed: each document has its own) and the block size."""
    tiles = {"query_tile": fixed_tiles.QUERY_TILE, "key_tile": fixed_tiles.KEY_TILE}
    return {
        **({} if spec.invariant is None else tiles),
        "scale": spec.scale,
        "softcap": spec.softcap,
        "band": None if spec.packed else band(spec),
        "query_block": plain_attention.QUERY_BLOCK,
    }


def forward(spec: AttentionSpec, inputs: Any) -> tuple[Any, Any]:
    """See ``Backend.forward``. The log-sum-exp is float32, or float64 for float64 inputs."""
    if spec.paged is not None:
        return paged.forward(spec, inputs)
    if spec.invariant is not None:
        return fixed_tiles.forward(spec, inputs)
    out, lse, _ = plain_attention.results(spec, inputs)
    return out, lse


def backward(spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any, dlse: Any) -> Gradients:
    """See ``Backend.backward``."""
    if spec.invariant is not None:
        return fixed_tiles.backward(spec, inputs, out, lse, dout, dlse)
    return plain_attention.backward(spec, inputs, out, lse, dout, dlse)


def jvp(
    spec: AttentionSpec, inputs: Inputs, tangents: Tangents, into: Any = None, *, primals: bool = False
) -> tuple[Any, Any, Any, Any]:
    """See ``contract.jvp_of``. It always computes out and lse."""
    return plain_tangents.jvp(spec, inputs, tangents)


def row_maximum(spec: AttentionSpec, inputs: Inputs) -> Any:
    """See ``contract.row_maximum_of``."""
    return plain_row_maximum.row_maximum(spec, inputs)


def forward_with_maximum(spec: AttentionSpec) -> Callable[..., tuple[Any, Any, Any]] | None:
    """See ``contract.forward_with_maximum``. Tiles of one size take another pass."""
    return plain_attention.forward_with_maximum if spec.invariant is None else None
