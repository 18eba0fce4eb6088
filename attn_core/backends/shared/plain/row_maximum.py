"""The largest logit of each row in plain torch operations, block by block: attention without its values."""

from __future__ import annotations

from typing import Any

from attn_core.backends.shared.autograd import without_gradient
from attn_core.backends.shared.parts.row_blocks import blocks
from attn_core.backends.shared.plain.attention import block_sizes, with_scratch, without_autocast
from attn_core.backends.shared.plain.block_attention import LN2, hidden_in, scores_of
from attn_core.backends.shared.plain.block_operands import operands_of
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs


@without_gradient
def row_maximum(spec: AttentionSpec, inputs: Inputs) -> Any:
    """See ``contract.row_maximum_of``."""
    with without_autocast(inputs.q):
        height, parts, scores = block_sizes(spec, inputs.q.is_cpu)
        operands = with_scratch(operands_of(spec, inputs), scores)
        # Rows in no block see no key.
        result = operands.k.new_full((spec.batch, spec.num_heads, spec.q_len), float("-inf"))
        for block in blocks(spec, inputs, height):
            for chunk in parts:
                some = operands if chunk.whole else chunk.of_operands(operands)
                logits, _, _ = scores_of(chunk.spec, some, block, hidden_in(chunk.spec, some, block))
                # [batch, kv_heads, group, rows]. scores_of multiplies by log2(e).
                result[chunk.batch, chunk.heads, block.rows] = logits.amax(-1).mul_(LN2).flatten(1, 2)
    return result[0] if spec.packed else result
