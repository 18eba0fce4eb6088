"""Attention of a layer that may be computed twice: re-entrant checkpointing must run the same kernel in both passes.

The first pass of ``torch.utils.checkpoint`` with ``use_reentrant=True`` runs without gradients, and the second with
them. By its tensors alone the first would take kernels that have no backward, and drop other weights than the second.
Who calls knows whether the layer trains, and says so.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from attn_core.call.options import Options, requested_names
from attn_core.selection import override
from torch_frontend.attention import attention, check_offsets, gathered
from torch_frontend.dispatch import autocast, lone_sinks, plan, transforms

Tensor = torch.Tensor


def attention_of_layer(q: Tensor, k: Tensor, v: Tensor, *, trains: bool, **options: Any) -> Any:
    """``attention`` with the same arguments, on a kernel that can be trained wherever the layer ``trains``.

    Where no backend asked for has a backward, and no gradient is wanted, on one that has none. Under compilers, modes
    and transforms the tensors decide, as they do in ``attention``.
    """
    if not trains or transforms.is_one_op(q):
        return attention(q, k, v, **options)
    learned = (q, k, v, options.get("bias"), options.get("sinks"))
    if torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in learned):
        return attention(q, k, v, **options)
    tables = (options.pop(name, None) for name in ("mask", "bias", "alibi_slopes", "sinks"))
    seq_info, backend, generator = (options.pop(name, None) for name in ("seq_info", "backend", "dropout_rng"))
    inputs, asked = gathered((q, k, v, *tables), seq_info, Options(**options), generator)
    requested = requested_names(backend) or override.requested()
    learns = inputs.bias is not None and inputs.bias.requires_grad
    question = (plan.metadata(inputs), asked, True, learns, requested)
    if not _has_answer(*question):
        question = (*question[:2], False, False, requested)
    made = plan.plan(*question)
    check_offsets(made.spec, inputs)
    with autocast.switched_off(inputs.q.device):
        out, lse = plan.run_forward(made, inputs)
    return lone_sinks.for_caller((out, lse) if asked.return_lse else out, inputs, seq_info)


@lru_cache(maxsize=4096)
def _has_answer(*question: Any) -> bool:
    return plan.explanation(*question).backend is not None
