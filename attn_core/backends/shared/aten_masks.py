"""What torch's own CUDA kernels share: which band they are asked for, mask and bias as one additive tensor, and limits.

Nothing here synchronises: which rows are empty is known on the device alone, and stays there.
"""

from __future__ import annotations

from typing import Any

from attn_core.backends.shared import kernel_limits
from attn_core.backends.shared.rewrites import readable
from attn_core.call.masks import Band, band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs

ROW_MULTIPLE = 8
"""Rows of an additive tensor begin at multiples of 8 elements: 16 bytes in the smallest dtype."""


def needed_band(spec: AttentionSpec) -> Band:
    """The band of a spec without a side that hides nothing; packed documents keep both, for each has its own lengths.

    Beside a left side that hides something, a right side that hides nothing is 0 where 0 hides nothing either: a causal
    window, which more kernels have.
    """
    edge = band(spec)
    if spec.packed:
        return edge
    lengths = spec.q_len, spec.kv_len
    left = None if edge._replace(right=None).hides_nothing(*lengths) else edge.left
    right = None if edge._replace(left=None).hides_nothing(*lengths) else edge.right
    if left is not None and right is None and Band(None, 0, edge.offset).hides_nothing(*lengths):
        right = 0
    return Band(left, right, edge.offset)


def compute_capability(device: str) -> int:
    """90 for ``"sm90"``; 0 for what is no NVIDIA GPU."""
    return int(device[2:]) if device.startswith("sm") and device[2:].isdigit() else 0


def limits(spec: AttentionSpec, device: str, kernel: str, sequences: int | None = None) -> tuple[str, ...]:
    """Refusals of GPUs older than the kernels' tests, and of more batch rows or heads than a grid has room for.

    sequences: how many the kernel sees; the batch rows or documents where it is not given.
    """
    reasons = []
    if 0 < compute_capability(device) < 80:
        reasons.append(f"device {device}: {kernel} needs sm80 or newer")
    return (*reasons, *kernel_limits.grid(spec, kernel, sequences))


def additive(inputs: Inputs, dtype: Any) -> Any:
    """Bias and mask as one tensor of ``dtype``, -inf where the mask hides; axes of 1 stay where both have them."""
    import torch

    if inputs.mask is None:
        return inputs.bias.detach().to(dtype)
    added = inputs.q.new_zeros((), dtype=dtype) if inputs.bias is None else inputs.bias.detach().to(dtype)
    return torch.where(inputs.mask, added, -torch.inf)


def in_rows(added: Any, rows: slice) -> Any:
    """An additive tensor (or a mask) ``[batch, heads, q_len or 1, keys]`` of some query rows."""
    return added if added.shape[2] == 1 else added[:, :, rows]


def aligned(added: Any, kv_len: int) -> Any:
    """An additive tensor ``[batch, heads, rows, kv_len or 1]`` as ``[..., kv_len]``, with rows that kernels can load.

    The storage behind a row's end is zero up to a multiple of ROW_MULTIPLE elements.
    """
    width = -(-kv_len // ROW_MULTIPLE) * ROW_MULTIPLE
    if added.shape[3] == kv_len == width:
        return readable(added)
    storage = added.new_zeros((*added.shape[:3], width))
    storage[..., :kv_len] = added
    return storage[..., :kv_len]


def empty_rows(added: Any, edge: Band | None, rows: slice, kv_len: int) -> Any:
    """Which of the query rows in ``rows`` see no key: bool ``[batch or 1, heads or 1, rows or 1]``.

    Args:
        added: additive, ``[batch or 1, heads or 1, rows or 1, kv_len or 1]``; -inf is hidden.
        edge: the band of the call, or None where it hides nothing; every row of ``rows`` meets it somewhere.

    A mask that is the same for all queries is counted once, and each row looks up the two ends of its keys.
    """
    import torch

    seen = (added != -torch.inf).expand(*added.shape[:3], kv_len)
    if edge is None or (edge.left is None and edge.right is None):
        return ~seen.any(-1)
    positions = torch.arange(rows.start, rows.stop, device=added.device)
    if seen.shape[2] > 1:
        columns = torch.arange(kv_len, device=added.device)
        return ~(seen & edge.contains(positions[:, None], columns)).any(-1)
    before = torch.nn.functional.pad(seen[:, :, 0].cumsum(-1), (1, 0))  # [batch, heads, kv_len + 1]
    stop = torch.full_like(positions, kv_len) if edge.right is None else positions + (edge.offset + edge.right + 1)
    start = torch.zeros_like(positions) if edge.left is None else positions + (edge.offset - edge.left)
    return before[..., stop.clamp(0, kv_len)] == before[..., start.clamp(0, kv_len)]
