"""Evaluates expressions on torch tensors, in eager, under torch.compile, and as FlexAttention's functions.

Ints are int32. Floats are of the score's dtype; in a mask float32 unless the caller says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_core.expressions.rendering import Step, Vocabulary, array_functions, in_base_2, places_read, run, steps_of
from attn_core.expressions.tree import Expression, Kind

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def vocabulary(device: torch.device, dtype: torch.dtype) -> Vocabulary:
    """Returns the operations on torch tensors of bool, int32 and a dtype of floats."""
    import torch

    dtypes = {"bool": torch.bool, "int": torch.int32, "float": dtype}
    return Vocabulary(
        functions=array_functions(torch),
        # A tensor, because where and minimum would give two Python numbers torch's default dtype.
        constant=lambda value, kind: torch.full((), value, dtype=dtypes[kind], device=device),
        cast=lambda value, kind: value.to(dtypes[kind]),
        # FlexAttention refuses to index an array without axes.
        read=lambda array, indices: array[tuple(indices)] if indices else array,
    )


def evaluate_torch(
    tree: Expression,
    indices: Sequence[Tensor],
    score: Tensor | None = None,
    aux: Sequence[Tensor] = (),
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns ``evaluate`` of an expression as a tensor. It has gradients by the score and by aux arrays of floats.

    Inside ``torch.compile``, call what ``torch_mask_mod`` or ``torch_score_mod`` returned outside.

    Args:
        indices: b, h, q and k: int tensors that broadcast to ``[b, h, q, k]``. In FlexAttention they have no axes;
            elsewhere they have some, because torch reads an index without axes on the host.
        score: a float tensor that broadcasts to ``[b, h, q, k]``.
        aux: tensors of the lookups, by their numbers, on the device of the indices.
        dtype: in which floats are computed; None is the score's, or float32 without a score.

    Returns:
        A tensor of bool, int32 or ``dtype``. It has only the axes that the expression uses; it broadcasts to all.
    """
    return _run(steps_of(tree), indices, score, aux, dtype)


def _run(
    steps: Sequence[Step],
    indices: Sequence[Tensor],
    score: Tensor | None,
    aux: Sequence[Tensor],
    dtype: torch.dtype | None = None,
) -> Tensor:
    import torch

    floats = dtype or (torch.float32 if score is None else score.dtype)
    places = [index.to(torch.int32) for index in indices]
    scores = None if score is None else score.to(floats)
    return run(steps, vocabulary(places[0].device, floats), places, scores, aux)


def add_at_lookup(
    total: Tensor, node: Expression, summand: Tensor, indices: Sequence[Tensor], score: Tensor, aux: Sequence[Tensor]
) -> None:
    """Adds a summand of every pair to the elements of an array that a lookup reads there, in place.

    Args:
        total: of the shape of the lookup's array.
        node: the lookup.
        summand: a tensor of the score's shape and of the dtype of ``total``.
        indices, score, aux: as in ``evaluate_torch``; the indices have as many axes as the score.
    """
    import torch

    places = places_read(node, vocabulary(score.device, score.dtype), indices, score, aux)
    if places is None:
        return
    read = [torch.as_tensor(place, device=total.device) for place in places]
    shape = torch.broadcast_shapes((1,) * summand.dim(), *(place.shape for place in read))
    summand = summand.sum_to_size(shape)  # pairs that all read one element
    if not read:
        total.add_(summand.reshape(()))
        return
    total.index_put_(tuple(place.expand(shape).reshape(-1).long() for place in read), summand.reshape(-1), True)


def torch_mask_mod(tree: Expression, aux: Sequence[Tensor] = ()) -> Callable[..., Tensor]:
    """Returns ``mask_mod(b, h, q_idx, kv_idx)`` for ``torch.nn.attention.flex_attention`` from a mask expression.

    Args:
        tree: a bool expression.
        aux: tensors of its lookups, by their numbers.
    """
    steps = steps_of(tree)
    return lambda b, h, q_idx, kv_idx: _run(steps, (b, h, q_idx, kv_idx), None, aux)


def torch_score_mod(tree: Expression, aux: Sequence[Tensor] = ()) -> Callable[..., Tensor]:
    """Returns ``score_mod(score, b, h, q_idx, kv_idx)`` for FlexAttention from a score expression.

    Args:
        tree: a float expression.
        aux: tensors of its lookups, by their numbers.
    """
    steps = steps_of(tree)
    return lambda score, b, h, q_idx, kv_idx: _run(steps, (b, h, q_idx, kv_idx), score, aux)


class TorchFunction(NamedTuple):
    """The function of an expression, which torch's compiler takes without making symbols of its numbers.

    The compiler makes symbols of numbers that it finds in data, and FlexAttention's kernels take none. So the function
    keeps its numbers as text, which the compiler reads as constants.

    Attributes:
        digest: of the expression; a compiled program is known by it.
        function: ``(score, b, h, q, k, aux) -> value``, as ``evaluate_torch``; a mask function gets None as score.
    """

    digest: str
    function: Callable[..., Any]

    def __repr__(self) -> str:  # without the function's address: names of programs are made of it
        return f"TorchFunction({self.digest})"


class _TextStep(NamedTuple):
    """A ``Step`` with its numbers as text."""

    op: str
    kind: Kind
    value: str
    operands: tuple[str, ...]
    constants: tuple[str, ...]
    negative: tuple[bool, ...]


@lru_cache(maxsize=256)
def torch_function(tree: Expression, base_2: bool = False) -> TorchFunction:
    """Returns the function of an expression; cached. base_2: whether its constants are those ``in_base_2``."""
    rows = tuple(_as_text(step, base_2) for step in steps_of(tree))

    def function(score: Tensor | None, b: Tensor, h: Tensor, q: Tensor, k: Tensor, aux: Sequence[Tensor]) -> Tensor:
        import torch

        # In float32 at least: FlexAttention on a CPU has scores of half precision.
        floats = torch.float64 if score is not None and score.dtype == torch.float64 else torch.float32
        score, words = None if score is None else score.to(floats), vocabulary(b.device, floats)
        places = [index.to(torch.int32) for index in (b, h, q, k)]
        return run([_as_step(row) for row in rows], words, places, score, aux)

    return TorchFunction(tree.digest, function)


def _as_text(step: Step, base_2: bool) -> _TextStep:
    value = "" if step.value is None else str(in_base_2(step.value) if base_2 else step.value)
    # Those of a lookup are ints; of other operations nobody reads them.
    constants = tuple("" if each is None or step.op != "lookup" else str(each) for each in step.constants)
    return _TextStep(step.op, step.kind, value, tuple(map(str, step.operands)), constants, step.negative)


def _as_step(row: _TextStep) -> Step:
    """Returns the step that ``_as_text`` wrote."""
    value: Any = None
    if row.op == "lookup" or (row.op == "constant" and row.kind == "int"):
        value = int(row.value)
    elif row.op == "constant":
        value = float(row.value) if row.kind == "float" else row.value == "True"
    operands = tuple([int(operand) for operand in row.operands])
    constants = tuple([int(each) if each else None for each in row.constants])
    return Step(row.op, row.kind, value, operands, constants, row.negative)
