"""What XLA needs to know to run FlashAttention 3's forward operator without Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attn_core.backends.shared.flash3_operators import operators
from attn_core.backends.shared.programs import operator_program
from attn_core.call.spec import AttentionSpec


def refusals(spec: AttentionSpec, device: str) -> Iterator[str]:
    """Yields why a supported call has no program."""
    if spec.needs_backward:
        yield "gradients: only the forward has been proven, as no installed build has a backward"
    yield from operator_program.refusals(spec, device)


def forward_without_memory(op: Any, arguments: dict[str, Any]) -> Any:
    """Returns the forward operator's results without memory; see ``operator_recorder``. None for other operators."""
    if op is not operators().forward:
        return None
    import torch

    q, v, out = arguments["q"], arguments["v"], arguments.get("out")
    # [batch, len, heads, dim] -> [batch, heads, len]; packed [tokens, heads, dim] -> [heads, tokens]
    lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)
    return q.new_empty((*q.shape[:-1], v.shape[-1])) if out is None else out, lse
