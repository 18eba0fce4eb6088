"""Runs calls of ``attention_dispatch`` whose rows are spread over the ranks of a mesh, by our context parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_core.dropins.finetrainers import KERNELS, AttentionProvider, SharedRows
from attn_core.dropins.finetrainers_call import DispatchCall, attention_with, interpret, with_positive_scale
from attn_core.errors import SpecError
from attn_core.selection import override
from torch_frontend.finetrainers.call import check_tensors


def check_mesh(mesh: Any) -> None:
    """Raises TypeError or ShapeError unless the ranks of a mesh can share a row."""
    from torch_frontend.context_parallel.mesh import group_names  # few programs have a mesh

    group_names(mesh)


def run(shared: SharedRows, provider: AttentionProvider, call: DispatchCall, kwargs: Mapping[str, Any] | None) -> Any:
    """Returns the result of a call on this rank's consecutive part of the positions.

    Raises:
        SpecError and its subclasses: for arguments that are invalid, or that ranks cannot share.
        NoBackendError: if no backend, or not the provider's, can run a part of the call.
    """
    from torch_frontend.context_parallel.attention import context_parallel_attention

    check_tensors(call)
    options = interpret(provider, kwargs)
    if call.attn_mask is not None:
        raise SpecError("attn_mask: expected None with a mesh, because every rank would need another part of it")
    if options.documents is not None:
        raise SpecError(
            "attention_kwargs['cu_seqlens_q']: expected none with a mesh, because the host's ranks hold parts of every "
            "row; torch_frontend.context_parallel_attention takes seq_info= of whole rows"
        )
    if call.is_causal:
        raise SpecError(
            "is_causal=True: expected False with a mesh; the host cuts rows into consecutive parts, but its causal "
            "ring reads them in torch's head-and-tail order. torch_frontend.context_parallel_attention has layout="
        )
    call = with_positive_scale(call)
    names = override.requested() or KERNELS[provider] or None
    over_ranks = {"mesh": shared.mesh, "strategy": shared.strategy, "layout": "contiguous"}
    rows = [tensor.transpose(1, 2) for tensor in call[:3]]  # [batch, heads, shard, dim] -> [batch, shard, heads, dim]
    out, lse = attention_with(context_parallel_attention, call, options, names, **over_ranks)(*rows)
    out = out.transpose(1, 2)
    return (out, lse) if options.return_lse else out
