"""Other libraries' attention on torch tensors, called directly: the baselines of this project's calls.

Each function imports its package, which may be missing, and returns a function of q, k and v ``[batch, seq, heads,
dim]`` that is causal, bottom-right, and returns only the output. The docstring says whether it records a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

Attention = Callable[[Any, Any, Any], Any]


def flash3_op() -> Attention:
    """FlashAttention-3's forward op. No gradient."""
    import flash_attn_interface  # noqa: F401, registers the op
    import torch

    forward = torch.ops.flash_attn_3.fwd.default

    def run(q: Any, k: Any, v: Any) -> Any:
        scale = 1.0 / math.sqrt(q.shape[-1])
        return forward(q, k, v, softmax_scale=scale, is_causal=True, num_splits=1)[0]

    return run


def flash4(softcap: float = 0.0) -> Attention:
    """FlashAttention-4 as shipped, with its own gradient."""
    from flash_attn.cute.interface import flash_attn_func

    def run(q: Any, k: Any, v: Any) -> Any:
        return flash_attn_func(q, k, v, causal=True, softcap=softcap)[0]

    return run


def flash2(softcap: float = 0.0) -> Attention:
    """FlashAttention-2 as shipped, with its own gradient."""
    from flash_attn import flash_attn_func

    return partial(flash_attn_func, causal=True, softcap=softcap)


def aten_flash() -> Attention:
    """``aten::_flash_attention_forward``, with its own gradient."""
    import torch

    forward = torch.ops.aten._flash_attention_forward.default

    def run(q: Any, k: Any, v: Any) -> Any:
        return forward(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, True, False)[0]

    return run


def aten_cudnn() -> Attention:
    """``aten::_scaled_dot_product_cudnn_attention``, with its own gradient."""
    import torch

    forward = torch.ops.aten._scaled_dot_product_cudnn_attention.default

    def run(q: Any, k: Any, v: Any) -> Any:
        # [batch, seq, heads, dim] -> [batch, heads, seq, dim] and back, as views
        returned = forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, True, 0.0, True, False)
        return returned[0].transpose(1, 2)

    return run


def flex(seq: int, mask_mod: Any, score_mod: Any = None) -> Attention:
    """torch's FlexAttention, compiled, with its own gradient; its block mask for the length ``seq`` is made here.

    ``mask_mod`` and ``score_mod`` are FlexAttention's functions; None hides nothing and changes no score.
    """
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    # Not compiled: for 8320 tokens Triton takes longer than five minutes.
    blocks = None if mask_mod is None else create_block_mask(mask_mod, None, None, seq, seq, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)

    def run(q: Any, k: Any, v: Any) -> Any:
        # [batch, seq, heads, dim] -> [batch, heads, seq, dim] and back, as views
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out: Any = compiled(q, k, v, score_mod=score_mod, block_mask=blocks, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2)

    return run


def causal(batch: Any, head: Any, row: Any, column: Any) -> Any:
    """FlexAttention's mask function of a causal call."""
    return row >= column


def softcapped(softcap: float) -> Callable[..., Any]:
    """Returns FlexAttention's score function of a softcap."""
    import torch

    def capped(score: Any, batch: Any, head: Any, row: Any, column: Any) -> Any:
        return softcap * torch.tanh(score / softcap)

    return capped
