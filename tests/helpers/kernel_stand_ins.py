"""Attention in float64, of which the stand-ins of kernels consist: any visible set, any score function.

Tensors are ``[..., length, heads, dim]`` with fewer heads of keys and values, if any; scores are ``[..., heads, rows,
keys]``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Score(NamedTuple):
    """How a score becomes a logit.

    Attributes:
        function: of the scaled scores.
        gradient: of the gradient of its result and the scaled scores.
    """

    scale: float
    function: Callable[[Any], Any] = lambda scaled: scaled
    gradient: Callable[[Any, Any], Any] = lambda dlogits, scaled: dlogits
    bias: Any = 0.0


def softcapped(scale: float, cap: float | None, bias: Any = 0.0) -> Score:
    if not cap:
        return Score(scale, bias=bias)
    return Score(
        scale,
        lambda scaled: cap * torch.tanh(scaled / cap),
        lambda dlogits, scaled: dlogits * (1 - torch.tanh(scaled / cap) ** 2),
        bias,
    )


def forward(q: Any, k: Any, v: Any, seen: Any, score: Score) -> tuple[Any, Any]:
    """(out, lse) in float64: 0 and -inf in rows that see nothing."""
    logits = _logits(q, k, seen, score)[1]
    lse = logits.logsumexp(-1)
    weights = torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return _heads(weights @ _heads(v, q)), lse


def backward(
    q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, seen: Any, score: Score, dlse: Any = 0.0
) -> tuple[Any, Any, Any, Any]:
    """(dq, dk, dv, dlogits) in float64 from the lse that is given: the weight of a hidden pair is exp(-inf - lse)."""
    scaled, logits = _logits(q, k, seen, score)
    weights = torch.exp(logits - lse.double()[..., None])
    upstream, delta = _heads(dout), (dout.double() * out.double()).sum(-1).transpose(-1, -2)
    dlogits = weights * (upstream @ _heads(v, q).mT - (delta - dlse)[..., None])
    dscores = score.scale * score.gradient(dlogits, scaled)
    dk, dv = (_of_groups(part, k) for part in (dscores.mT @ _heads(q), weights.mT @ upstream))
    return _heads(dscores @ _heads(k, q)), dk, dv, dlogits


def _logits(q: Any, k: Any, seen: Any, score: Score) -> tuple[Any, Any]:
    scaled = score.scale * _heads(q) @ _heads(k, q).mT
    return scaled, (score.function(scaled) + score.bias).masked_fill(~torch.as_tensor(seen), -torch.inf)


def _heads(tensor: Any, like: Any = None) -> Any:
    """float64 with heads and length exchanged, for each head of another tensor."""
    wide = tensor.double().transpose(-2, -3)
    return wide if like is None else wide.repeat_interleave(like.shape[-2] // wide.shape[-3], dim=-3)


def _of_groups(tensor: Any, like: Any) -> Any:
    """``[..., heads, length, dim]`` summed over the query heads of each head of keys."""
    return _heads(tensor.unflatten(-3, (like.shape[-2], -1)).sum(-3))


def spans(q: Any, k: Any, cu_q: Any, cu_k: Any) -> list[tuple[slice, slice]]:
    """The rows and keys of each document; without offsets, all of them as one."""
    if cu_q is None:
        return [(slice(0, q.shape[-3]), slice(0, k.shape[-3]))]
    ends = zip(cu_q.tolist(), cu_q.tolist()[1:], cu_k.tolist(), cu_k.tolist()[1:])
    return [(slice(a, b), slice(c, d)) for a, b, c, d in ends]
