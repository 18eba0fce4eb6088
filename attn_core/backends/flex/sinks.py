"""Sinks around a compiled FlexAttention call, whose kernels have none.

With w the sink's share of a row's weight, out' = (1 - w) * out and lse' = log(exp(lse) + exp(sink)). The kernel's
backward gets (1 - w) * dout and (1 - w) * dlse + w * delta, with delta = sum(dout * out').
"""

from __future__ import annotations

from typing import Any


def with_sinks(out: Any, lse: Any, sinks: Any) -> tuple[Any, Any]:
    """Returns (out', lse') from the kernel's out ``[batch, q_len, heads, dim]`` and lse ``[batch, heads, q_len]``."""
    import torch

    sinks = sinks.detach().to(lse.dtype)[:, None]  # [heads, 1] against [batch, heads, q_len]
    empty = lse == -torch.inf
    gate = torch.sigmoid(lse - sinks).masked_fill(empty, 0.0).transpose(1, 2)[..., None]
    joined = torch.logaddexp(lse, sinks).masked_fill(empty, -torch.inf)
    return (out * gate).to(out.dtype), joined


class SinkShare:
    """The gradients through sinks. The module has the formulas.

    Attributes:
        dsinks: the gradient of the sinks, ``[heads]``.
    """

    def __init__(self, sinks: Any, out: Any, lse: Any, dout: Any, dlse: Any) -> None:
        import torch

        empty = lse == -torch.inf
        self._sinks = sinks.detach().to(lse.dtype)[:, None]
        share = torch.exp(self._sinks - lse).masked_fill(empty, 0.0)
        delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2)  # [batch, heads, q_len]
        self._outer = torch.zeros_like(delta) if dlse is None else dlse.masked_fill(empty, 0.0)
        self._share_delta = share * delta
        self.dsinks = -(share * (delta - self._outer)).sum((0, 2)).to(sinks.dtype)

    def inner(self, lse: Any, dout: Any) -> tuple[Any, Any]:
        """Returns dout and dlse for the kernel, from its own log-sum-exp without sinks.

        1 - w comes from that log-sum-exp, because ``1 - exp(sink - lse)`` has no correct digit if the sink has nearly
        all of a row's weight.
        """
        import torch

        rest = torch.sigmoid(lse - self._sinks).masked_fill(lse == -torch.inf, 0.0)
        return (dout * rest.transpose(1, 2)[..., None]).to(dout.dtype), rest * self._outer + self._share_delta
