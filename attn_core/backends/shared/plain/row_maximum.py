"""The largest logit of each row in plain torch operations, block by block: attention without its values."""

from __future__ import annotations

from typing import Any

from attn_core.backends.shared.autograd import without_gradient
from attn_core.backends.shared.parts.row_blocks import blocks
from attn_core.backends.shared.plain.attention import block_sizes, with_scratch, without_autocast
from attn_core.backends.shared.plain.block_operands import operands_of
from attn_core.backends.shared.plain.block_scores import (
    scores_and_top,
)
from attn_core.backends.shared.plain.block_weights import without_unit
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs


@without_gradient
def row_maximum(spec: AttentionSpec, inputs: Inputs) -> Any:
    """See ``contract.row_maximum_of``."""
    import torch

    with without_autocast(inputs.q):
        height, parts, scores = block_sizes(spec, inputs.q.is_cpu)
        operands = with_scratch(operands_of(spec, inputs), scores)
        # Rows in no block see no key.
        result = operands.k.new_full((spec.batch, spec.num_heads, spec.q_len), float("-inf"))
        for block in blocks(spec, inputs, height):
            for chunk in parts:
                some = operands if chunk.whole else chunk.of_operands(operands)
                # [batch, kv_heads, group, rows, 1]
                *_, top, _, overflowed = scores_and_top(chunk.spec, some, block)
                top = without_unit(top, some.unit)
                if overflowed is not None:
                    exact = scores_and_top(chunk.spec, some._replace(unit=1.0), block)[3]
                    top = torch.where(overflowed, exact, top)
                result[chunk.batch, chunk.heads, block.rows] = top.flatten(1, 2).squeeze(-1)
    return result[0] if spec.packed else result
