"""q, k and v in one array in a program of XLA: the kernels read and write parts of it in place.

XLA passes whole arrays alone. So a recorded call works on parts of one fake tensor, and the compiled step takes the
parts of the whole array itself.
"""

from __future__ import annotations

from typing import Any

PARTS = {"qkv": ("q", "k", "v"), "dqkv": ("dq", "dk", "dv")}
"""The arrays ``[..., tokens, 3, heads, head_dim]`` and their parts."""


def replaced(named: dict[str, Any], whole: str, parts: tuple[str, ...]) -> dict[str, Any]:
    """Returns one array and its three parts by name, for three tensors of equal shapes; nothing if they are absent."""
    import torch

    if parts[0] not in named:
        return {}
    one = named[parts[0]]
    *rows, heads, dim = one.shape
    array = torch.empty((*rows, len(parts), heads, dim), dtype=one.dtype, device=one.device)
    return {whole: array, **dict(zip(parts, array.unbind(-3), strict=True))}


def part_of(tensor: Any, whole: Any) -> int | None:
    """Returns which part of an array a tensor of the same memory is; None for the array itself and any other view."""
    for number, piece in enumerate(whole.unbind(-3) if whole.dim() > 3 else ()):
        if all(getattr(tensor, about)() == getattr(piece, about)() for about in ("size", "stride", "storage_offset")):
            return number
    return None


def in_kernel(tensor: Any, part: int | None) -> Any:
    """Returns a part of an array ``[..., tokens, 3, heads, head_dim]`` in a function of the CuTe DSL."""
    if part is None:
        return tensor
    from cutlass import cute

    rows = cute.rank(tensor) - 3
    piece = tensor[(*(None,) * rows, part, None, None)]
    # The array is aligned, and the rows of its parts are multiples of 16 bytes.
    return cute.make_tensor(piece.iterator.align(16), piece.layout)
