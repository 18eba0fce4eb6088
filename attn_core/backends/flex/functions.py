"""Builds FlexAttention's score and mask functions from a call's tensors, and locates packed tokens.

The functions work on scalar tensors, as FlexAttention calls them: ``score(score, batch, head, row, column)`` and
``visible(batch, head, row, column)``. They consist of arithmetic and table lookups only, so that FlexAttention can
trace them into a kernel and run them under vmap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_core.call.masks import FAR, band
from attn_core.call.spec import AttentionSpec
from attn_core.expressions.properties import uses
from attn_core.expressions.tree import Expression, nodes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Reader = Callable[["Tensor", "Tensor", "Tensor", "Tensor"], "Tensor"]
Distance = Callable[["Tensor", "Tensor"], "Tensor"]
"""(batch, head, row, column) -> a value."""


class Edges(NamedTuple):
    """A band for devices: ``-left <= distance <= right``, and the offset of the diagonal; int32 scalar tensors or ints.

    The offset is 0 for packed documents, because the positions of packed queries already include their document's.
    """

    left: Any
    right: Any
    offset: Any


class Softcap(NamedTuple):
    """A softcap on scores that are not scaled yet, ``limit * tanh(score * share)``; float32 scalar tensors.

    share: the scale over the cap; limit: the cap. As tensors they are no part of a compiled program.
    """

    share: Tensor
    limit: Tensor


class PackedTokens(NamedTuple):
    """The document of each packed token and its position in the document, int32.

    Outside all documents a query has document -1 and a key the number of documents, so they never match. A query's
    position counts along the keys' diagonal.
    """

    of_query: Tensor
    at_query: Tensor
    of_key: Tensor
    at_key: Tensor


def edges(spec: AttentionSpec) -> Edges:
    """Returns the band of a spec, with FAR for unbounded sides and offset 0 if packed."""
    left, right, offset = band(spec)
    return Edges(FAR if left is None else left, FAR if right is None else right, 0 if spec.packed else offset)


def kernel_options(spec: AttentionSpec) -> dict[str, int | str]:
    """Returns the options of torch's kernels that follow from dtype and functions."""
    options: dict[str, Any] = {"FLOAT32_PRECISION": "'ieee'"} if spec.dtype == "float32" else {}
    if any(tree is not None and _reads_tiles(tree) for tree in (spec.score_mod, spec.mask_mod)):
        # Triton loads the tile of an array ahead, as those of keys and values, and three stages of all do not fit in
        # shared memory.
        options |= {"fwd_num_stages": 2, "bwd_num_stages": 2 if max(spec.head_dim, spec.value_dim) <= 128 else 1}
    return options


def _reads_tiles(tree: Expression) -> bool:
    """Returns whether a lookup's place depends on both query and key."""
    lookups = (node for node in nodes(tree) if node.op == "lookup")
    return any({"q", "k"} <= frozenset().union(*map(uses, node.operands)) for node in lookups)


def distance_function(offset: int | Tensor | None, places: PackedTokens | None = None) -> Distance:
    """Returns ``(row, column) -> distance``: how far right of the diagonal the key lies."""
    if places is None:
        return lambda row, column: column - (row + offset)  # type: ignore[operator]
    return lambda row, column: places.at_key[column] - places.at_query[row]


def reader(table: Tensor | None, dtype: torch.dtype | None = None) -> Reader | None:
    """Returns a function that reads a mask or bias ``[batch, heads, q_len, kv_len]``, any axis may be 1; None for None.

    Axes of length 1 are dropped, not expanded, so that the captured table is no larger than the caller's.
    dtype: of the value that is read, by default the table's.
    """
    if table is None:
        return None
    axes = tuple(axis for axis, length in enumerate(table.shape) if length != 1)  # axes to index
    small = table.reshape([table.shape[axis] for axis in axes] or [1])

    def read(*index: Tensor) -> Tensor:
        # A table with one element still needs an index that vmap can trace: 0 made from one of the indices.
        value = small[tuple(index[axis] for axis in axes) or (index[0] * 0,)]
        return value if dtype is None else value.to(dtype)

    return read


def range_reader(ends: tuple[Tensor, ...] | None, group: int, first_row: int = 0) -> Reader | None:
    """Returns a function that says whether a key range shows a pair; None for None.

    Args:
        ends: starts and stops of the ranges in turn, int32 ``[batch or 1, kv_heads or 1, 1, kv_len]``.
        group: query heads per kv head. first_row: the place of row 0 in the ranges.
    """
    if ends is None:
        return None
    readers: list[Any] = [reader(end) for end in ends]

    def visible(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        place, values = row + first_row, [read(batch, head // group, row, column) for read in readers]
        seen = (place >= values[0]) & (place < values[1])
        return seen if len(values) == 2 else seen | ((place >= values[2]) & (place < values[3]))

    return visible


def slope_reader(slopes: Tensor | None, dtype: torch.dtype) -> Reader | None:
    """Returns a function that reads ALiBi slopes ``[heads]`` or ``[batch, heads]``; None for None."""
    if slopes is None:
        return None
    if slopes.dim() == 1:
        return lambda batch, head, row, column: slopes[head].to(dtype)
    return lambda batch, head, row, column: slopes[batch, head].to(dtype)


def score_function(
    softcap: float | Softcap | None,
    bias: Reader | None,
    slope: Reader | None,
    distance: Distance,
    score_mod: Callable[..., Tensor] | None = None,
) -> Callable[..., Tensor] | None:
    """Returns ``(score, batch, head, row, column) -> score``: softcap, the call's function, bias, ALiBi; None if
    there is none of them."""
    import torch

    if softcap is None and bias is None and slope is None and score_mod is None:
        return None

    def change(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        if isinstance(softcap, Softcap):
            score = softcap.limit * torch.tanh(score * softcap.share)
        elif softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if score_mod is not None:
            score = score_mod(score, batch, head, row, column)
        if bias is not None:
            score = score + bias(batch, head, row, column)
        if slope is not None:
            score = score - slope(batch, head, row, column) * distance(row, column).abs()
        return score

    return change


def mask_function(
    mask: Reader | None,
    left: int | Tensor | None,
    right: int | Tensor | None,
    distance: Distance,
    places: PackedTokens | None = None,
    others: tuple[Reader | None, ...] = (),
) -> Reader | None:
    """Returns ``(batch, head, row, column) -> visible`` by documents, band, mask and others; None if nothing is hidden.

    left, right: the distances that bound the band; None is unbounded. others: ``range_reader``, the call's function.
    """
    readers = [reader for reader in (mask, *others) if reader is not None]
    if not readers and left is None and right is None and places is None:
        return None

    def visible(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        tests = []
        if places is not None:
            tests.append(places.of_query[row] == places.of_key[column])
        if left is not None or right is not None:
            away = distance(row, column)
            tests += [] if left is None else [away >= -left]
            tests += [] if right is None else [away <= right]
        for read in readers:
            tests.append(read(batch, head, row, column))
        seen = tests[0]
        for test in tests[1:]:
            seen = seen & test
        return seen

    return visible


def places(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, q_len: int, kv_len: int, bottom_right: bool) -> PackedTokens:
    """Computes the documents and positions of all tokens from the offsets ``[documents + 1]``, int32, on their device.

    Nothing is copied to the host. Wrong offsets may hide or show wrong keys, but every resulting index is in range.
    """
    import torch

    documents = cu_seqlens_q.shape[0] - 1
    of_query, at_query = _of_tokens(cu_seqlens_q, q_len)
    of_key, at_key = _of_tokens(cu_seqlens_k, kv_len)
    if bottom_right:  # move each query to the key on its diagonal, so that distances need no offset later
        offsets = cu_seqlens_k.diff() - cu_seqlens_q.diff()
        at_query = at_query + offsets[of_query.clamp(max=documents - 1)]
    of_query = torch.where(of_query < documents, of_query, -1)
    return PackedTokens(*(values.to(torch.int32) for values in (of_query, at_query, of_key, at_key)))


def _of_tokens(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Returns each token's document (the number of documents for a token in none), int64, and its position, int32."""
    import torch

    token = torch.arange(tokens, device=cu_seqlens.device, dtype=torch.int32)
    # Search all offsets, not a view from the second on: a compiled searchsorted may ignore the view's storage offset.
    document = torch.searchsorted(cu_seqlens, token, right=True) - 1
    return document, token - cu_seqlens[document]


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Adds sinks ``[heads]`` to a kernel's out ``[batch, heads, q_len, dim]`` and lse ``[batch, heads, q_len]``.

    The kernels have none. A row that sees no key keeps 0 and -inf.
    """
    import torch

    sinks = sinks.detach().to(lse.dtype)[:, None]  # [heads, 1] against [batch, heads, q_len]
    empty = lse == -torch.inf
    gate = torch.sigmoid(lse - sinks)[..., None]
    joined = torch.logaddexp(lse, sinks).masked_fill(empty, -torch.inf)
    return (out.to(lse.dtype) * gate).masked_fill(empty[..., None], 0.0).to(out.dtype), joined
