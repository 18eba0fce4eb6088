"""Sinks by torch's operations: one logit per head joins the softmax of a finished forward, and its gradient.

The formulas and their source are in ``rewrites``.
"""

from __future__ import annotations

from typing import Any


def by_row(values: Any) -> Any:
    """``[batch, heads, q_len]`` -> ``[batch, q_len, heads, 1]``; packed ``[heads, tokens]`` likewise."""
    return values.transpose(-1, -2)[..., None]


def with_sinks(out: Any, lse: Any, sinks: Any, *, needs_lse: bool = True, into: Any = None) -> tuple[Any, Any]:
    """Adds one logit per head, ``[heads]``, to the softmax of (out, lse). Rows that see no key keep 0 and -inf.

    Without ``needs_lse`` the returned log-sum-exp is the given one. into: a buffer for the new out.
    """
    import torch

    sinks = sinks.detach().to(lse.dtype)[:, None]  # [heads, 1] against [..., heads, rows]
    gate = (lse - sinks).sigmoid_().nan_to_num_()  # NaN if both are -inf
    # Every operation here is a small kernel, so the product is rounded by the kernel that computes it.
    into = torch.empty_like(out) if into is None else into
    out = torch.mul(out, by_row(gate), out=into)
    if not needs_lse:
        return out, lse
    return out, torch.logaddexp(lse, sinks).masked_fill_(lse == -torch.inf, -torch.inf)


def sink_gradient(sinks: Any, out: Any, lse: Any, dout: Any, dlse: Any) -> Any:
    """Returns the gradient of the sinks, ``[heads]``, from out and lse with sinks.

    A sink's weight in a row is exp(sink - lse); its logit's gradient is -weight * (delta - dlse). A row that sees no
    key adds nothing, whatever its dout is.
    """
    import torch

    share = torch.exp(sinks.detach().to(lse.dtype)[:, None] - lse)  # [heads, 1] against [..., heads, rows]
    delta = (dout.to(lse.dtype) * out).sum(-1).transpose(-1, -2)  # [..., heads, rows]
    total = (share * (delta if dlse is None else delta - dlse)).masked_fill(lse == -torch.inf, 0.0)
    rows = (0, 2) if total.dim() == 3 else (1,)
    return -total.sum(rows).to(sinks.dtype)
