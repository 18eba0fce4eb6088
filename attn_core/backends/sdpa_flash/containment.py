"""Recomputes the rows that the kernel computes wrongly, by plain attention. Other batch rows keep the kernel's bits.

- Keys or values contain NaN or Inf: the kernel gives a hidden key the weight 0 and adds ``0 * NaN`` for it, and a NaN
  score stays NaN under an additive mask. Plain attention leaves hidden keys out of all sums.
- In a backward, a bias makes a log-sum-exp large: the kernel's weights exp(score - lse) do not sum to 1. With an lse of
  +inf, the kernel's weights of these queries are 0, and plain attention adds their share.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from attn_core.backends.sdpa_flash.cpu_kernel import FEWEST_ROWS, MASK_ELEMENTS
from attn_core.backends.shared.plain import attention as plain_attention
from attn_core.call.arithmetic import LARGE_LSE, may_be_large
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs

if TYPE_CHECKING:
    from torch import Tensor


def contain(spec: AttentionSpec, inputs: Inputs, out: Tensor, lse: Tensor, by_results: bool) -> None:
    """Recomputes the affected rows of a dense forward and writes them into ``out`` and ``lse``.

    Args:
        by_results: the value of ``shows_in_results``.
    """
    if by_results and not isinstance(out, valueless()) and are_results_finite(out, lse):
        return
    for row in _broken_rows(inputs.k, inputs.v):
        part, part_lse = plain_attention.forward(_row_spec(spec), _row_inputs(inputs, row))
        out[row], lse[row] = part[0], part_lse[0]


def contain_gradients(
    spec: AttentionSpec,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor],
    large: Tensor | None,
) -> None:
    """Recomputes dq, dk and dv of the affected rows and writes them into ``gradients``.

    Args:
        large: ``large_queries``; the kernel gave them no weights.
    """
    broken = _broken_rows(inputs.k, inputs.v)
    for row in broken:
        saved = [tensor[row : row + 1] for tensor in (out, lse, dout)]
        part = plain_attention.backward(_row_spec(spec), _row_inputs(inputs, row), saved[0], saved[1], saved[2], None)
        for gradient, recomputed in zip(gradients, part[:3], strict=True):
            gradient[row] = recomputed[0]
    for row in [] if large is None else large.any(1).nonzero().flatten().tolist():
        if row not in broken:
            _add_queries(spec, inputs, row, large[row].nonzero().flatten(), (out, lse, dout), gradients)  # type: ignore[index]


def _add_queries(
    spec: AttentionSpec,
    inputs: Inputs,
    row: int,
    large: Tensor,
    saved: tuple[Tensor, Tensor, Tensor],
    gradients: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Adds the share of some queries of a batch row, int64 ``[queries]``, to the gradients."""
    one, (out, lse, dout), (dq, dk, dv) = _row_inputs(inputs, row), saved, gradients
    for queries in large.split(max(FEWEST_ROWS, MASK_ELEMENTS // (spec.num_heads * spec.kv_len))):
        bias = _bias_of(spec, one, queries)
        some = Inputs(one.q[:, queries], one.k, one.v, bias=bias, sinks=one.sinks)
        results = out[row, queries][None], lse[row, :, queries][None], dout[row, queries][None]
        part = plain_attention.backward(_spec_of_queries(spec, tuple(bias.shape)), some, *results, None)
        dq[row, queries] = part.dq[0]
        dk[row] += part.dk[0]
        dv[row] += part.dv[0]


def _bias_of(spec: AttentionSpec, one: Inputs, queries: Tensor) -> Tensor:
    """Returns bias, ALiBi, mask and band of some queries of a batch row, ``[1, heads or 1, queries, kv_len]``."""
    import torch

    wide, edge, device = getattr(torch, spec.lse_dtype), band(spec), queries.device
    rows, keys = queries[:, None], torch.arange(spec.kv_len, device=device)
    bias, mask = (None if t is None else t if t.shape[2] == 1 else t[:, :, queries] for t in (one.bias, one.mask))
    added = torch.zeros(1, 1, 1, 1, dtype=wide, device=device) if bias is None else bias.to(wide)
    if one.alibi_slopes is not None:
        slopes = one.alibi_slopes.to(wide).reshape(1, -1, 1, 1)
        added = torch.addcmul(added, slopes, (rows + edge.offset - keys).abs().neg().to(wide))
    seen = torch.as_tensor(edge.contains(rows, keys), device=device)
    added = torch.where(seen if mask is None else seen & mask, added, -torch.inf)
    return added.expand(1, -1, len(queries), spec.kv_len)


def _spec_of_queries(spec: AttentionSpec, bias_shape: tuple[int, ...]) -> AttentionSpec:
    tables = {"mask_shape": None, "alibi_shape": None, "bias_shape": bias_shape, "bias_dtype": None}
    return replace(spec, batch=1, q_len=bias_shape[2], causal=False, window=(None, None), **tables)  # type: ignore[arg-type]


def _broken_rows(k: Tensor, v: Tensor) -> list[int]:
    """Returns the rows of ``[batch, kv_len, kv_heads, dim]`` in which k or v may contain NaN or Inf. It misses none.

    A sum is NaN or Inf if one of its terms is. A sum of large finite numbers may also be Inf; then plain attention runs
    needlessly.
    """
    import torch

    # One test of everything first, because it costs a fraction of a test per row.
    if isinstance(k, valueless()) or are_finite(k, v):
        return []
    wide = torch.float64 if k.dtype == torch.float64 else torch.float32
    sums = k.sum(dim=(1, 2, 3), dtype=wide) + v.sum(dim=(1, 2, 3), dtype=wide)
    return torch.nonzero(~sums.isfinite()).flatten().tolist()


def large_queries(spec: AttentionSpec, lse: Tensor) -> Tensor | None:
    """Returns which queries of a log-sum-exp have large logits in any head, bool ``[batch, q_len]``; None for none.

    The rest of a partial row is elsewhere, so its weights need not sum to 1.
    """
    import torch

    if spec.partial or not may_be_large(spec) or isinstance(lse, valueless()):
        return None
    if torch.linalg.vector_norm(lse, math.inf).item() < LARGE_LSE:  # False if a row sees no key
        return None
    large = ((lse.abs() >= LARGE_LSE) & lse.isfinite()).any(1)
    return large if large.any() else None


def are_finite(k: Tensor, v: Tensor) -> bool:
    """Returns whether k and v certainly hold neither NaN nor Inf. False for large finite numbers, too.

    Sums and products that contain NaN or Inf are NaN or Inf, so no broken value is missed.
    """
    import torch

    k, v = k.data, v.data  # starts no operation, as detach does
    if k.dtype != torch.float32 and k.dtype != torch.float64:
        return math.isfinite(k.sum(dtype=torch.float32) + v.sum(dtype=torch.float32))
    if k.shape == v.shape:  # one operation instead of three, if all of both is dense in one order
        if not (k.is_contiguous() and v.is_contiguous()):
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        if k.is_contiguous() and v.is_contiguous():
            return math.isfinite(torch.dot(k.view(-1), v.view(-1)).item())
    return math.isfinite(k.sum() + v.sum())


def shows_in_results(spec: AttentionSpec) -> bool:
    """Returns whether ``are_results_finite`` is enough for a dense call, and reads less than ``are_finite`` does.

    It is not enough before a backward: an infinite key whose score is hidden leaves the results finite, but 0 times
    that key is added to dq.
    """
    results, keys = spec.num_heads * spec.q_len, spec.num_kv_heads * spec.kv_len
    return not spec.needs_backward and 2 * results <= keys


def are_results_finite(out: Tensor, lse: Tensor) -> bool:
    """Returns whether no hidden NaN or Inf reached the kernel's results. False for large finite results, too.

    A hidden value that is not finite is multiplied by the weight 0, so it makes ``out`` NaN. A hidden key that is not
    finite has the score NaN or -inf. -inf is a hidden score's right value; NaN makes the row's log-sum-exp NaN.
    """
    import torch

    if not math.isfinite(out.sum() if out.dtype in (torch.float32, torch.float64) else out.sum(dtype=torch.float32)):
        return False
    return lse.amax().item() < math.inf  # -inf for a row that sees no key; False for NaN


@cache
def valueless() -> type:
    """Returns the class of tensors that have shapes but no values."""
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor


@lru_cache(maxsize=4096)
def _row_spec(spec: AttentionSpec) -> AttentionSpec:
    def cut(shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return shape and (1, *shape[1:])

    slopes = spec.alibi_shape if spec.alibi_shape is None or len(spec.alibi_shape) == 1 else cut(spec.alibi_shape)
    tables: dict[str, Any] = {
        "mask_shape": cut(spec.mask_shape),
        "bias_shape": cut(spec.bias_shape),
        "alibi_shape": slopes,
    }
    return replace(spec, batch=1, **tables)


def _row_inputs(inputs: Inputs, row: int) -> Inputs:
    """Returns the inputs of one batch row; tables with a single row serve every row."""

    def cut(table: Tensor | None) -> Tensor | None:
        return table if table is None or table.shape[0] == 1 else table[row : row + 1]

    q, k, v = (tensor[row : row + 1] for tensor in inputs[:3])
    slopes = inputs.alibi_slopes  # [heads] or [batch, heads]
    if slopes is not None and slopes.dim() == 2:
        slopes = cut(slopes)
    return inputs._replace(q=q, k=k, v=v, mask=cut(inputs.mask), bias=cut(inputs.bias), alibi_slopes=slopes)
