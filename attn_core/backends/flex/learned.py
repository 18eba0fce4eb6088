"""Gradients of the arrays that a score function reads, by FlexAttention's own backward.

That backward adds to an element where a lookup reads it, atomically and in float32. It allows one lookup for each
array, and indices that are tensors. So each lookup gets an array of its own, and a constant index becomes an
expression. An element that all pairs of a head read gets a copy for each key, because additions to one place take
turns.
Upstream: ``zeros_and_scatter`` of ``torch.nn.attention.flex_attention``, torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_core.call.functions import DAUX, listed, lookup_slopes
from attn_core.call.spec import AttentionSpec
from attn_core.expressions.properties import uses
from attn_core.expressions.tree import Expression, nodes

if TYPE_CHECKING:
    from torch import Tensor

_KEY = Expression("k", "int")
_VARYING_ZERO = Expression("minimum", "int", (_KEY, Expression("constant", "int", (), 0)))
"""0, as a tensor of the keys: the compiler turns ``b * 0`` into a constant, at which the kernel cannot add."""


def refusals(spec: AttentionSpec, name: str) -> tuple[str, ...]:
    """Refuses equal bits, because the order of atomic additions is not fixed. name: of the kernel."""
    if not (spec.aux_gradients and spec.deterministic):
        return ()
    return (f"gradient of {listed(spec.aux_gradients)} with deterministic=True: {name} adds in any order",)


class ReadAlone(NamedTuple):
    """A score function with an array for each lookup that has a gradient.

    Attributes:
        tree: the function. Its new arrays follow the call's own.
        numbers: of which array of the call each new one has the values.
        by_key: whether each new array has one more axis, for the keys.
    """

    tree: Expression
    numbers: tuple[int, ...]
    by_key: tuple[bool, ...]


MOST_COPIES = 2**24
"""The most elements of an array with a copy of each for each key."""


@lru_cache(maxsize=256)
def read_alone(spec: AttentionSpec) -> ReadAlone:
    """Returns the score function of a call with ``aux_gradients``, changed so that its backward can add to arrays."""
    tree: Any = spec.score_mod
    learned = {node for node, _ in lookup_slopes(tree, spec.aux_gradients)}
    numbers: list[int] = []
    by_key: list[bool] = []
    changed: dict[Expression, Expression] = {}
    for node in nodes(tree):
        operands, value = tuple([changed[operand] for operand in node.operands]), node.value
        if node in learned and prod(spec.aux[int(node.value or 0)].shape) > 0:  # an empty array gives 0
            numbers.append(int(node.value or 0))
            few = prod(spec.aux[numbers[-1]].shape) * spec.kv_len <= MOST_COPIES
            by_key.append(few and not any({"q", "k"} & uses(operand) for operand in node.operands))
            varying = tuple(map(_varying, operands))
            operands = (*varying, _KEY) if by_key[-1] else varying or (_VARYING_ZERO,)
            value = len(spec.aux) + len(numbers) - 1
        changed[node] = Expression(node.op, node.kind, operands, value)
    return ReadAlone(changed[tree], tuple(numbers), tuple(by_key))


def _varying(index: Expression) -> Expression:
    """An index of the same value that is no constant."""
    return Expression("add", "int", (index, _VARYING_ZERO)) if index.op == "constant" else index


def leaves(spec: AttentionSpec, arrays: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns the new arrays of a backward, float32, which require gradients. arrays: the call's, on the GPU."""
    import torch

    if not spec.aux_gradients:
        return ()
    new, how = [], read_alone(spec)
    for number, by_key in zip(how.numbers, how.by_key, strict=True):
        array = arrays[number].detach().to(torch.float32)
        copies = array[..., None].expand(*array.shape, spec.kv_len) if by_key else torch.atleast_1d(array)
        new.append(copies.contiguous().detach().requires_grad_())
    return tuple(new)


def summed(
    spec: AttentionSpec, arrays: Sequence[Tensor], parts: Sequence[Tensor], bad: Tensor | None
) -> dict[str, Tensor]:
    """Returns the gradients of the call's arrays, by their fields in ``Gradients``, from those of the new arrays.

    Args:
        arrays: the call's. parts: the gradient of each new array.
        bad: a bool tensor without axes, whether a number was replaced because it was not finite; None if none can be.
    """
    import torch

    if not spec.aux_gradients:
        return {}
    like: dict[str, Any] = {"dtype": torch.float32, "device": arrays[0].device}
    totals = {number: torch.zeros(arrays[number].shape, **like) for number in spec.aux_gradients}
    how = read_alone(spec)
    for number, by_key, part in zip(how.numbers, how.by_key, parts, strict=True):
        totals[number] += part.detach().sum(-1) if by_key else part.detach().reshape(totals[number].shape)
    if bad is not None:
        totals = {number: torch.where(bad, torch.nan, total) for number, total in totals.items()}
    return {DAUX[number]: total.to(arrays[number].dtype) for number, total in totals.items()}
