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


def flash3_function() -> Attention:
    """FlashAttention-3's Python function, with its gradient if the build has one."""
    from flash_attn_interface import flash_attn_func

    def run(q: Any, k: Any, v: Any) -> Any:
        returned = flash_attn_func(q, k, v, causal=True)
        return returned[0] if isinstance(returned, tuple) else returned

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


def flash2_op() -> Attention:
    """FlashAttention-2's extension without any wrapper. No gradient."""
    import flash_attn_2_cuda
    import torch  # noqa: F401, the extension needs it loaded

    def run(q: Any, k: Any, v: Any) -> Any:
        scale = 1.0 / math.sqrt(q.shape[-1])
        return flash_attn_2_cuda.fwd(q, k, v, None, None, 0.0, scale, True, -1, 0, 0.0, False, None)[0]

    return run


def aten_flash() -> Attention:
    """``aten::_flash_attention_forward``, with its own gradient."""
    import torch

    forward = torch.ops.aten._flash_attention_forward.default

    def run(q: Any, k: Any, v: Any) -> Any:
        return forward(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, True, False)[0]

    return run


def aten_efficient() -> Attention:
    """``aten::_scaled_dot_product_efficient_attention``, with its own gradient; needs as many kv heads as heads."""
    import torch

    forward = torch.ops.aten._scaled_dot_product_efficient_attention.default

    def run(q: Any, k: Any, v: Any) -> Any:
        # [batch, seq, heads, dim] -> [batch, heads, seq, dim] and back, as views
        returned = forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, True, 0.0, True)
        return returned[0].transpose(1, 2)

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


def flex(seq: int, softcap: float) -> Attention:
    """torch's FlexAttention, softcapped and compiled, with its own gradient; q and k have the length ``seq``."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(batch: Any, head: Any, row: Any, column: Any) -> Any:
        return row >= column

    def capped(score: Any, batch: Any, head: Any, row: Any, column: Any) -> Any:
        return softcap * torch.tanh(score / softcap)

    block_mask = create_block_mask(causal, None, None, seq, seq, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)

    def run(q: Any, k: Any, v: Any) -> Any:
        # [batch, seq, heads, dim] -> [batch, heads, seq, dim] and back, as views
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out: Any = compiled(q, k, v, score_mod=capped, block_mask=block_mask, enable_gqa=True)
        return out.transpose(1, 2)

    return run
