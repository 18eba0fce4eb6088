"""Finds out what the installed cuDNN computes for rows that see no key. Versions differ.

cuDNN 9.19 gives them the output 0, the log-sum-exp -inf and no gradient, which is what we promise. Seen on an H200.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from attn_core.backends.shared.autograd import recording
from attn_core.backends.shared.cached_once import cached_once
from attn_core.backends.shared.programs.operator_recorder import outside

TRIALS = ((1, 64), (130, 128))
"""(queries, head_dim) of the calls that are tried. One query and many queries run on different kernels."""


@cache
def forward_binding() -> Any:
    """Returns torch's Python binding of the forward op. A call of it is shorter than a call of the op itself."""
    import torch

    return torch._scaled_dot_product_cudnn_attention


def zero_for_empty_rows() -> bool:
    """Returns whether the installed cuDNN gives rows that see no key the output 0, -inf and no gradient."""
    import torch

    # A trial reads its results on the host, which a capture forbids.
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return _trials.cache_info().currsize > 0 and _trials()
    return _trials()


@cached_once
def _trials() -> bool:
    import torch

    # The first call may be inside an operator, where autograd is off, and must not use up random numbers.
    with outside(), torch.inference_mode(False), recording():
        return all(_gives_zero(queries, head_dim) for queries, head_dim in TRIALS)


def _gives_zero(queries: int, head_dim: int, device: Any = "cuda") -> bool:
    """Returns whether the last query, which sees no key, has empty results, and its dout no effect on dk and dv."""
    import torch

    wave = torch.linspace(-2.0, 2.0, 2 * 72 * head_dim, device=device)
    key = wave.sin().to(torch.bfloat16).view(1, 2, 72, head_dim).requires_grad_()
    value = wave.cos().to(torch.bfloat16).view(1, 2, 72, head_dim).requires_grad_()
    query = torch.ones((1, 2, queries, head_dim), dtype=torch.bfloat16, device=device, requires_grad=True)
    bias = torch.zeros((1, 1, queries, 72), dtype=torch.bfloat16, device=device)
    bias[:, :, -1] = -torch.inf
    out, lse, *_ = forward_binding()(query, key, value, bias, True, 0.0, False, False, scale=0.1)
    empty = bool((out[:, :, -1] == 0).all() and (lse.reshape(1, 2, queries)[..., -1] == -torch.inf).all())
    if queries == 1:  # its gradient is NaN in every version (cudnn-frontend#1072), so ``known_bad.json`` refuses it
        return empty
    dout = torch.ones_like(out)
    gradients = torch.autograd.grad(out, (query, key, value), dout, retain_graph=True)
    dout[:, :, -1] = 100.0
    others = torch.autograd.grad(out, (query, key, value), dout)
    zero = all(bool((dq[:, :, -1] == 0).all()) for dq in (gradients[0], others[0]))
    alike = all(torch.allclose(one, two, rtol=0.02, atol=0.02) for one, two in zip(gradients[1:], others[1:]))
    return empty and zero and alike
