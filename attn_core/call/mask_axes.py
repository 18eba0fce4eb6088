"""Masks and biases of two or three axes: the usual mistakes about which axes they have."""

from __future__ import annotations

from attn_core.call.seq_info import is_number
from attn_core.errors import ShapeError

_READINGS = {2: ("[batch, kv]", "[:, None, None, :]", "[q, kv]"), 3: ("[batch, q, kv]", "[:, None]", "[heads, q, kv]")}
"""By the number of axes: what the caller may mean, how to write it, and what broadcasting reads."""


def check_axes(name: str, shape: tuple[int, ...], full: tuple[int, int, int, int]) -> None:
    """Checks a mask or bias whose first axis may be meant as the batch, but which broadcasting reads otherwise.

    A mask that fits both readings is refused. A bias is not, because a bias of all rows, ``[heads, q, kv]``, is usual,
    and one of each row is not.

    Args:
        full: ``(batch, heads, q_len, kv_len)``. Nothing is checked if one of the sizes is a symbol.

    Raises:
        ShapeError: naming the spelling with four axes.
    """
    if len(shape) not in _READINGS or not all(map(is_number, (*shape, *full))):
        return
    batch, rest = full[0], full[5 - len(shape) :]
    if batch == 1 or shape[0] != batch or any(n not in (1, m) for n, m in zip(shape[1:], rest, strict=True)):
        return
    meant, spelling, read = _READINGS[len(shape)]
    if full[4 - len(shape)] != batch:
        raise ShapeError(
            f"{name}: expected a shape broadcastable to [batch, heads, q, kv] = {list(full)}, got {list(shape)}; "
            f"a {name} of {meant} is {name}{spelling}"
        )
    if name == "mask":
        raise ShapeError(
            f"mask: expected four axes, got {list(shape)}, which fits both {meant} and {read}; write "
            f"mask{spelling} for {meant}, mask[{', '.join(['None'] * (4 - len(shape)))}] for {read}"
        )
