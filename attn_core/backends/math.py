"""Plain attention in torch operations: every feature, any float dtype, CPU and CUDA. Correct first, quick second.

Blocked over queries: a block of QUERY_BLOCK rows meets only the keys that its band lets it see, so memory grows with
``QUERY_BLOCK * kv_len`` and never with ``q_len * kv_len``. Everything but inputs and outputs is float32 (float64 for
float64 inputs). The backward recomputes the weights from the saved log-sum-exp; no autograd graph is ever built.

Packed documents: on the CPU the offsets are read and checked, and each document runs in blocks of its own. On CUDA
reading them would synchronise, so every block meets all keys and the documents are told apart by token ids; offsets
that lie can then hide keys, but read nothing outside a buffer. Either way a NaN or Inf in a hidden key or value goes
nowhere; one that a row sees makes that row NaN (or Inf).
Upstream: torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from attn_core.backends import Gradients, Inputs
from attn_core.blocks import blocks
from attn_core.masks import band
from attn_core.paged import gathered_torch
from attn_core.spec import DTYPES, AttentionSpec
from attn_core.support import Build, Support
from attn_core.torch_attention import (
    Saved,
    Sums,
    backward_block,
    empty_sums,
    forward_block,
    operands_of,
    rows_first,
)

FRAMEWORK = "torch"
REQUIRES = "torch>=2.11"

FORWARD = Support(
    kernel="the torch math kernel",
    devices=("cpu", "cuda"),
    dtypes=DTYPES,
    value_dim=True,
    grouped_heads=True,
    alignments=("bottom_right", "top_left"),
    causal=True,
    window=True,
    softcap=True,
    mask=True,
    bias=True,
    bias_gradient=True,
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
)
BACKWARD = replace(FORWARD, paged=False)

QUERY_BLOCK = 128
"""Query rows computed at once: the scores in memory are ``[batch, heads, QUERY_BLOCK, kv_len]``."""


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Nothing: no two facts exclude each other here."""
    return ()


def probe() -> str:
    """torch's version, once it imports."""
    import torch

    return torch.__version__


def lower(spec: AttentionSpec) -> dict[str, Any]:
    """The scale, the softcap, and the band (of the whole row, or None where each document has its own)."""
    return {
        "scale": spec.scale,
        "softcap": spec.softcap,
        "band": None if spec.packed else band(spec),
        "query_block": QUERY_BLOCK,
    }


def forward(spec: AttentionSpec, inputs: Any) -> tuple[Any, Any]:
    """See ``Backend.forward``. The log-sum-exp is float32, or float64 for float64 inputs."""
    if spec.paged is not None:
        return gathered_torch.forward(spec, inputs, forward)
    with _plainly(inputs.q):
        operands = operands_of(spec, inputs)
        out = inputs.q.new_zeros((spec.batch, spec.q_len, spec.num_heads, spec.value_dim))
        lse = operands.k.new_full((spec.batch, spec.num_heads, spec.q_len), float("-inf"))
        for block in blocks(spec, inputs, QUERY_BLOCK):
            part, part_lse = forward_block(spec, operands, block)
            out[:, block.rows] = rows_first(part)
            lse[:, :, block.rows] = part_lse.flatten(1, 2)  # [batch, kv_heads, group, rows] -> [batch, heads, rows]
    return (out[0], lse[0]) if spec.packed else (out, lse)


def backward(spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any, dlse: Any) -> Gradients:
    """See ``Backend.backward``."""
    with _plainly(inputs.q):
        operands = operands_of(spec, inputs)
        out, lse, dout, dlse = (t[None] if spec.packed and t is not None else t for t in (out, lse, dout, dlse))
        saved = Saved(out, lse, dout, dlse)
        sums = empty_sums(spec, operands)
        for block in blocks(spec, inputs, QUERY_BLOCK):
            backward_block(spec, operands, saved, sums, block)
        return _gradients(spec, inputs, sums)


@contextmanager
def _plainly(q: Any) -> Iterator[None]:
    """No autograd graph, and no autocast to round the float32 products."""
    import torch

    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        yield


def _gradients(spec: AttentionSpec, inputs: Inputs, sums: Sums) -> Gradients:
    # [batch, kv_heads, kv_len, dim] -> [batch, kv_len, kv_heads, dim]
    dk, dv = (total.transpose(1, 2).to(inputs.k.dtype).contiguous() for total in (sums.dk, sums.dv))
    dq = sums.dq
    return Gradients(
        *((dq[0], dk[0], dv[0]) if spec.packed else (dq, dk, dv)),
        dbias=None if sums.dbias is None else sums.dbias.view(inputs.bias.shape).to(inputs.bias.dtype),
        dsinks=None if sums.dsinks is None else sums.dsinks.view(spec.num_heads).to(inputs.sinks.dtype),
    )
