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
from typing import TYPE_CHECKING, Any

from attn_core.backends.contract import Backend, Buffers, ForwardModePass, RowMaximumPass, Timing
from attn_core.backends.math import fixed_tiles
from attn_core.backends.shared import kernel_limits
from attn_core.backends.shared.pages import dense_rows, in_pages, packed_documents, query_offsets
from attn_core.backends.shared.plain import attention as plain_attention
from attn_core.backends.shared.plain import tangents as plain_tangents
from attn_core.backends.shared.row_blocks import documents_between
from attn_core.backends.support import ANY, Build, Support
from attn_core.call.key_ranges import contains
from attn_core.call.masks import band
from attn_core.call.spec import BITS, DTYPES, AttentionSpec
from attn_core.call.tensors import Gradients, Inputs, PagedInputs, Tangents

if TYPE_CHECKING:
    from torch import Tensor

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
    return kernel_limits.fixed_tiles(spec, device, FORWARD.kernel)


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


def forward(spec: AttentionSpec, inputs: Any) -> tuple[Tensor, Tensor]:
    """See ``Backend.forward``. The log-sum-exp is float32, or float64 for float64 inputs."""
    if spec.paged is not None:
        return _paged_forward(spec, inputs)
    if spec.invariant is not None:
        return fixed_tiles.forward(spec, inputs)
    out, lse, _ = plain_attention.results(spec, inputs)
    return out, lse


def backward(
    spec: AttentionSpec, inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Gradients:
    """See ``Backend.backward``."""
    if spec.invariant is not None:
        return fixed_tiles.backward(spec, inputs, out, lse, dout, dlse)
    return plain_attention.backward(spec, inputs, out, lse, dout, dlse)


def jvp(
    spec: AttentionSpec, inputs: Inputs, tangents: Tangents, into: Buffers | None = None, *, primals: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ``ForwardModePass``. It always computes out and lse."""
    return plain_tangents.jvp(spec, inputs, tangents)


def forward_with_maximum(spec: AttentionSpec) -> Callable[..., tuple[Tensor, Tensor, Tensor]] | None:
    """See ``Backend.forward_with_maximum``. Tiles of one size take another pass."""
    return plain_attention.forward_with_maximum if spec.invariant is None else None


def _paged_forward(spec: AttentionSpec, inputs: PagedInputs) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of a paged call.

    On the CPU the sequences become packed documents of their own lengths. On a GPU reading the lengths would
    synchronise: each row is as long as the table is wide, and a mask hides the rest. So do rows with slopes of their
    own.
    """
    if spec.invariant is not None:
        packed, documents = packed_documents(spec, inputs)
        out, lse = fixed_tiles.forward(packed, documents)
        return out.to(inputs.q.dtype), lse
    if inputs.q.device.type != "cpu" or len(spec.alibi_shape or ()) == 2:  # documents have one slope per head
        return _as_dense_rows(spec, inputs)
    packed, documents = packed_documents(spec, inputs)
    valid_documents = documents_between(documents.cu_seqlens_q, documents.cu_seqlens_k)  # the tables are checked
    out, lse = plain_attention.forward(packed, documents, valid_documents)
    return out.to(inputs.q.dtype), lse


def _as_dense_rows(spec: AttentionSpec, inputs: PagedInputs) -> tuple[Tensor, Tensor]:
    """Runs the call as one dense row per sequence, for tables on a device. Clamps page numbers and lengths."""
    import torch

    paged = spec.paged
    assert paged is not None
    rows, device = min(spec.max_len_q or spec.q_len, spec.q_len), inputs.q.device
    lengths = inputs.seq_lens.clamp(0, paged.capacity)
    pages = inputs.block_table.clamp(0, paged.num_pages - 1).long()
    key = torch.arange(paged.capacity, device=device)
    valid = key < lengths[:, None]  # [batch, capacity]
    if inputs.kv_starts is not None:
        valid = valid & (key >= inputs.kv_starts[:, None])
    # [batch, width, page_size, kv_heads, dim] -> [batch, capacity, kv_heads, dim], 0 after the end
    k, v = (wide.masked_fill(~valid[:, :, None, None], 0.0) for wide in in_pages(spec, inputs, pages))
    cu_q = query_offsets(spec, inputs).clamp(0, spec.q_len)
    count = (cu_q[1:] - cu_q[:-1]).clamp(0, rows)
    query = torch.arange(rows, device=device)
    # Rows after a sequence's last query read any token in range; their results are dropped below.
    token = (cu_q[:-1, None] + query).clamp(max=max(spec.q_len - 1, 0))  # [batch, rows]
    diagonal = query + (lengths - count)[:, None]
    distance = key - diagonal[..., None]  # [batch, rows, capacity]
    seen = valid[:, None] & (query < count[:, None])[..., None]
    edge = band(spec)
    if edge.left is not None:
        seen &= distance >= -edge.left
    if edge.right is not None:
        seen &= distance <= edge.right
    seen = seen[:, None]  # [batch, 1, rows, capacity]
    if inputs.key_ranges is not None:
        place = key - (lengths - count)[:, None]  # among the sequence's new tokens; old ones: negative
        of_key = (cu_q[:-1, None] + place).clamp(0, max(spec.q_len - 1, 0))  # [batch, capacity]
        ranges = inputs.key_ranges[0][:, of_key].transpose(0, 1)  # [batch, kv_heads or 1, capacity, ranges, 2]
        shown = contains(ranges, token[:, None]) | (place < 0)[:, None, None]
        seen = seen & (shown if shown.shape[1] == 1 else shown.repeat_interleave(spec.group_size, 1))
    dense = dense_rows(spec, rows)
    bias = None
    if inputs.alibi_slopes is not None:  # [batch or 1, heads, 1, 1] * [batch, 1, rows, capacity]
        slopes = inputs.alibi_slopes.to(getattr(torch, spec.lse_dtype)).reshape(-1, spec.num_heads, 1, 1)
        bias = -slopes * distance.abs()[:, None]
    rows_of_q = inputs.q.detach()[token].to(k.dtype)
    out, lse = plain_attention.forward(dense, Inputs(rows_of_q, k, v, mask=seen, bias=bias, sinks=inputs.sinks))
    # Surplus rows of short sequences are written to an extra token at the end, which is cut off.
    out = out.to(inputs.q.dtype)
    flat_out = out.new_zeros((spec.q_len + 1, *out.shape[2:]))
    flat_lse = lse.new_full((lse.shape[1], spec.q_len + 1), -torch.inf)
    target = torch.where(query < count[:, None], token, spec.q_len).flatten()
    flat_out[target] = out.flatten(0, 1)
    flat_lse[:, target] = lse.transpose(0, 1).flatten(1)
    return flat_out[: spec.q_len], flat_lse[:, : spec.q_len]


BACKEND = Backend(
    name="math",
    framework="torch",
    requires="torch>=2.11",
    forward_claims=FORWARD,
    backward_claims=BACKWARD,
    refuses=refuses,
    probe=probe,
    lower=lower,
    forward=forward,
    backward=backward,
    forward_mode=ForwardModePass(claims=FORWARD_MODE, jvp=jvp, preference={"cpu": 20, "cuda": 30, ANY: 20}),
    row_maximum=RowMaximumPass(
        claims=ROW_MAXIMUM,
        function=plain_attention.row_maximum,
        with_forward=forward_with_maximum,
        preference={"cpu": 20, "cuda": 30, ANY: 20},
    ),
    # Plain operations run what no kernel does; on a CPU they read only the keys that the band shows.
    preference={"cpu": 20, "cuda": 110, ANY: 20},
    paged_preference={"cuda": 60},
    also_called={"eager": 10, "sdpa": 40, "native": 40, "torch": 40},
    timing=Timing(caution=1.6),  # it is rarely the fastest if another one runs the call
    torch_flag="math",
)
