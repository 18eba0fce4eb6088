"""Helpers for torch's own CUDA kernels: the band of a call, mask and bias as one additive tensor, and limits.

No function here synchronises: empty rows are found on the device, and the result stays there.
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
    """Returns the band of a spec, with None for each side that hides nothing.

    Packed calls keep both sides because each document has its own lengths. If the left side hides something and the
    right side hides nothing, the right side becomes 0 if that hides nothing either: more kernels have a causal window
    than a one-sided one.
    """
    edge = band(spec)
    if spec.packed:
        return edge
    lengths = spec.q_len, spec.kv_len
    # Each side by itself: a side that hides nothing is dropped, because fewer options fit more kernels.
    left = None if edge._replace(right=None).hides_nothing(*lengths) else edge.left
    right = None if edge._replace(left=None).hides_nothing(*lengths) else edge.right
    if left is not None and right is None and Band(None, 0, edge.offset).hides_nothing(*lengths):
        right = 0
    return Band(left, right, edge.offset)


def compute_capability(device: str) -> int:
    """Returns 90 for ``"sm90"``, and 0 for a device that is no NVIDIA GPU."""
    return int(device[2:]) if device.startswith("sm") and device[2:].isdigit() else 0


def limits(spec: AttentionSpec, device: str, kernel: str, sequences: int | None = None) -> tuple[str, ...]:
    """Returns refusals of GPUs older than sm80 (nobody tests the kernels there), and of calls beyond the launch grid.

    Args:
        sequences: the number of sequences that the kernel sees; by default the batch rows or documents.
    """
    reasons = []
    if 0 < compute_capability(device) < 80:
        reasons.append(f"device {device}: {kernel} needs sm80 or newer")
    return (*reasons, *kernel_limits.grid(spec, kernel, sequences))


def additive(inputs: Inputs, dtype: Any) -> Any:
    """Returns bias and mask as one tensor of ``dtype``, -inf where the mask hides. Axes that are 1 in both stay 1."""
    import torch

    if inputs.mask is None:
        return inputs.bias.detach().to(dtype)
    added = inputs.q.new_zeros((), dtype=dtype) if inputs.bias is None else inputs.bias.detach().to(dtype)
    return torch.where(inputs.mask, added, -torch.inf)


def in_rows(added: Any, rows: slice) -> Any:
    """Slices the query rows out of an additive tensor or a mask ``[batch, heads, q_len or 1, keys]``."""
    return added if added.shape[2] == 1 else added[:, :, rows]


def align_rows(added: Any, kv_len: int) -> Any:
    """Expands an additive tensor ``[batch, heads, rows, kv_len or 1]`` to ``[..., kv_len]`` with aligned rows.

    Each row's storage is padded with zeros to a multiple of ROW_MULTIPLE elements, because kernels load whole vectors.
    """
    width = -(-kv_len // ROW_MULTIPLE) * ROW_MULTIPLE
    if added.shape[3] == kv_len == width:
        return readable(added)
    storage = added.new_zeros((*added.shape[:3], width))  # zeros, because a vector load may read the padding
    storage[..., :kv_len] = added
    return storage[..., :kv_len]


def empty_rows(added: Any, edge: Band | None, rows: slice, kv_len: int) -> Any:
    """Returns which of the query rows in ``rows`` see no key: bool ``[batch or 1, heads or 1, rows or 1]``.

    A mask that all queries share is summed once along the keys; each row then compares the sums at the two ends of its
    band, which takes no memory of the size of the scores.

    Args:
        added: additive, ``[batch or 1, heads or 1, rows or 1, kv_len or 1]``; -inf is hidden.
        edge: the band of the call, or None if it hides nothing; the band of every row in ``rows`` contains a key.
    """
    import torch

    seen = (added != -torch.inf).expand(*added.shape[:3], kv_len)
    if edge is None or (edge.left is None and edge.right is None):
        return ~seen.any(-1)
    positions = torch.arange(rows.start, rows.stop, device=added.device)
    if seen.shape[2] > 1:
        columns = torch.arange(kv_len, device=added.device)
        return ~(seen & edge.contains(positions[:, None], columns)).any(-1)
    # before[j] counts the visible keys before key j, so equal counts at both ends of a band mean that it shows none.
    before = torch.nn.functional.pad(seen[:, :, 0].cumsum(-1), (1, 0))  # [batch, heads, kv_len + 1]
    stop = torch.full_like(positions, kv_len) if edge.right is None else positions + (edge.offset + edge.right + 1)
    start = torch.zeros_like(positions) if edge.left is None else positions + (edge.offset - edge.left)
    return before[..., stop.clamp(0, kv_len)] == before[..., start.clamp(0, kv_len)]
