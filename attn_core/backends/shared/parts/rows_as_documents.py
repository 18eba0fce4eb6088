"""Calls whose bits do not depend on the batch, on kernels that choose their work by the batch in dense calls only.

The rows of a dense call run as packed documents of equal lengths, which such kernels neither split nor choose tiles
for; or each row runs as a call of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs


def applies(spec: AttentionSpec) -> bool:
    """Returns whether a call must run as packed documents."""
    return spec.invariant is not None and not spec.packed and spec.paged is None


@lru_cache(maxsize=1024)
def packed_spec(spec: AttentionSpec) -> AttentionSpec:
    """Returns a dense call as one of packed documents."""
    lengths: dict[str, Any] = {"q_len": spec.batch * spec.q_len, "kv_len": spec.batch * spec.kv_len}
    return replace(spec, batch=1, documents=spec.batch, max_len_q=spec.q_len, max_len_k=spec.kv_len, **lengths)


def _packed_inputs(spec: AttentionSpec, inputs: Inputs) -> Inputs:
    import torch

    def offsets(length: int) -> Any:
        return torch.arange(0, spec.batch * length + 1, length, dtype=torch.int32, device=inputs.q.device)

    q, k, v = (tensor.flatten(0, 1) for tensor in inputs[:3])
    return inputs._replace(q=q, k=k, v=v, cu_seqlens_q=offsets(spec.q_len), cu_seqlens_k=offsets(spec.kv_len))


def forward(run: Callable[..., tuple[Any, Any]], spec: AttentionSpec, inputs: Inputs) -> tuple[Any, Any]:
    """Returns (out, lse) of a dense call. ``run(spec, inputs)`` is the forward of a packed one."""
    out, lse = run(packed_spec(spec), _packed_inputs(spec, inputs))
    # [batch * q_len, heads, dim] -> [batch, q_len, heads, dim]; [heads, batch * q_len] -> [batch, heads, q_len]
    rows = (spec.batch, spec.q_len)
    return out.unflatten(0, rows), lse.unflatten(1, rows).transpose(0, 1).contiguous()


def _packed_lse(lse: Any) -> Any:
    return None if lse is None else lse.transpose(0, 1).flatten(1)  # [batch, heads, q_len] -> [heads, batch * q_len]


def backward(
    run: Callable[..., Gradients], spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any, dlse: Any
) -> Gradients:
    """Returns the gradients of a dense call. ``run(spec, inputs, out, lse, dout, dlse)`` is that of a packed one."""
    saved = (out.flatten(0, 1), _packed_lse(lse), dout.flatten(0, 1), _packed_lse(dlse))
    gradients = run(packed_spec(spec), _packed_inputs(spec, inputs), *saved)
    dq, dk, dv = (part.unflatten(0, (spec.batch, -1)) for part in gradients[:3])
    return gradients._replace(dq=dq, dk=dk, dv=dv)


def backward_of_rows(
    run: Callable[..., Gradients], spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any
) -> Gradients:
    """Returns the gradients of a dense call, row by row. ``run(spec, inputs, out, lse, dout)`` is that of one row."""
    import torch

    one, parts = replace(spec, batch=1), []
    for row in range(spec.batch):
        here = slice(row, row + 1)
        q, k, v = (tensor[here] for tensor in inputs[:3])
        parts.append(run(one, inputs._replace(q=q, k=k, v=v), out[here], lse[here], dout[here])[:3])
    return Gradients(*(torch.cat(gradients) for gradients in zip(*parts, strict=True)))
