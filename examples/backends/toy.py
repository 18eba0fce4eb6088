"""A backend in one file: attention in plain operations of torch on a CPU. Copy it, and put your kernel in the place.

    import attn_core, toy
    attn_core.register_backend(toy.BACKEND)

It imports no torch at the top, so that the backend can be selected and explained without it. It imports no module of
attn_core but these two, whose names are stable.
"""

from __future__ import annotations

from typing import Any

from attn_core import AttentionSpec
from attn_core.backends import Backend, Build, Gradients, Inputs, Support, band

CLAIMS = Support(
    kernel="the toy kernel",
    devices=("cpu",),
    dtypes=("float64", "float32", "bfloat16", "float16"),
    value_dim=True,
    grouped_heads=True,
    alignments=("bottom_right", "top_left"),
    causal=True,
    window=True,
    lse=True,
    lse_gradient=True,
)
MOST_SCORES = 2**28


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Returns the reasons that no single claim expresses: here, that the scores are one tensor."""
    scores = spec.batch * spec.num_heads * spec.q_len * spec.kv_len
    if scores <= MOST_SCORES:
        return ()
    return (f"q_len {spec.q_len} and kv_len {spec.kv_len}: the toy kernel stops at {MOST_SCORES} scores, not {scores}",)


def probe() -> str:
    """Imports what the kernel needs, and returns its version."""
    import torch

    return torch.__version__


def lower(spec: AttentionSpec) -> dict[str, Any]:
    """Returns the kernel's own arguments, as plain data."""
    return {"scale": spec.scale, "band": band(spec), "group": spec.num_heads // spec.num_kv_heads}


def forward(spec: AttentionSpec, inputs: Inputs) -> tuple[Any, Any]:
    """Returns out ``[batch, q_len, heads, value_dim]`` and lse ``[batch, heads, q_len]``."""
    _, _, v = _heads_first(spec, *inputs[:3])
    scores = _scores(spec, inputs)
    lse = scores.logsumexp(-1)  # -inf for a row that sees no key
    out = _weights(scores, lse) @ v
    return out.transpose(1, 2).to(inputs.q.dtype), lse


def backward(spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any, dlse: Any) -> Gradients:
    """Returns the gradients from the saved out and lse. No autograd runs in here."""
    q, k, v = _heads_first(spec, *inputs[:3])
    out, dout = (array.transpose(1, 2).to(q.dtype) for array in (out, dout))  # [batch, heads, q_len, value_dim]
    weights = _weights(_scores(spec, inputs), lse)
    delta = (out * dout).sum(-1) - (0 if dlse is None else dlse)
    dscores = weights * (dout @ v.mT - delta[..., None]) * spec.scale
    dq, dk, dv = dscores @ k, dscores.mT @ q, weights.mT @ dout
    dk, dv = (array.unflatten(1, (spec.num_kv_heads, -1)).sum(2) for array in (dk, dv))  # the heads of each group
    return Gradients(*(array.transpose(1, 2).to(inputs.q.dtype) for array in (dq, dk, dv)))


def _heads_first(spec: AttentionSpec, *arrays: Any) -> tuple[Any, ...]:
    """``[batch, len, heads, dim]`` -> ``[batch, num_heads, len, dim]`` in the precision of the log-sum-exp."""
    import torch

    wide = (array.detach().to(getattr(torch, spec.lse_dtype)).transpose(1, 2) for array in arrays)
    return tuple(array.repeat_interleave(spec.num_heads // array.shape[1], dim=1) for array in wide)


def _scores(spec: AttentionSpec, inputs: Inputs) -> Any:
    """Returns the scores ``[batch, heads, q_len, kv_len]``, -inf where a query does not see a key."""
    import torch

    q, k = _heads_first(spec, inputs.q, inputs.k)
    scores = q @ k.mT * spec.scale
    queries, keys = (torch.arange(length, device=q.device) for length in (spec.q_len, spec.kv_len))
    seen = torch.as_tensor(lower(spec)["band"].contains(queries[:, None], keys), device=q.device)
    return scores.masked_fill(~seen, -torch.inf)


def _weights(scores: Any, lse: Any) -> Any:
    """Returns the softmax; rows that see no key are 0, where the difference of two infinities would be NaN."""
    return (scores - lse.masked_fill(lse.isinf(), 0)[..., None]).exp()


BACKEND = Backend(
    name="toy",
    framework="torch",
    requires="torch>=2.11",
    forward_claims=CLAIMS,
    backward_claims=CLAIMS,
    refuses=refuses,
    probe=probe,
    lower=lower,
    forward=forward,
    backward=backward,
)
