"""Evaluates expressions on torch tensors, in eager, under torch.compile, and as FlexAttention's functions.

Ints are int32. Floats are of the score's dtype; in a mask float32 unless the caller says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attn_core.expressions.operations import OF_FLOATS
from attn_core.expressions.rendering import ARITHMETIC, Step, Vocabulary, places_read, run, steps_of
from attn_core.expressions.tree import Expression


def vocabulary(device: Any, dtype: Any) -> Vocabulary:
    """Returns the operations on torch tensors of bool, int32 and a dtype of floats."""
    import torch

    dtypes = {"bool": torch.bool, "int": torch.int32, "float": dtype}
    names = ("where", "minimum", "maximum", "abs", *OF_FLOATS)
    return Vocabulary(
        functions={**ARITHMETIC, **{name: getattr(torch, name) for name in names}},
        # A tensor, because where and minimum would give two Python numbers torch's default dtype.
        constant=lambda value, kind: torch.full((), value, dtype=dtypes[kind], device=device),
        cast=lambda value, kind: value.to(dtypes[kind]),
        # FlexAttention refuses to index an array without axes.
        read=lambda array, indices: array[tuple(indices)] if indices else array,
    )


def evaluate_torch(
    tree: Expression, indices: Sequence[Any], score: Any = None, aux: Sequence[Any] = (), dtype: Any = None
) -> Any:
    """Returns the value of an expression as a tensor. It has gradients by the score and by aux arrays of floats.

    Inside ``torch.compile``, call what ``torch_mask_mod`` or ``torch_score_mod`` returned outside.

    Args:
        tree: a mask or score expression.
        indices: b, h, q and k: int tensors that broadcast to ``[b, h, q, k]``. In FlexAttention they have no axes;
            elsewhere they have some, because torch reads an index without axes on the host.
        score: a float tensor that broadcasts to ``[b, h, q, k]``.
        aux: tensors of the lookups, by their numbers, on the device of the indices.
        dtype: in which floats are computed; None is the score's, or float32 without a score.

    Returns:
        A tensor of bool, int32 or ``dtype``. It has only the axes that the expression uses; it broadcasts to all.

    Raises:
        ExpressionError: if the expression needs a score and there is none, or aux arrays do not fit.
    """
    return _run(steps_of(tree), indices, score, aux, dtype)


def _run(steps: Sequence[Step], indices: Sequence[Any], score: Any, aux: Sequence[Any], dtype: Any = None) -> Any:
    import torch

    floats = dtype or (torch.float32 if score is None else score.dtype)
    places = [index.to(torch.int32) for index in indices]
    scores = None if score is None else score.to(floats)
    return run(steps, vocabulary(places[0].device, floats), places, scores, aux)


def add_at_lookup(
    total: Any, node: Expression, summand: Any, indices: Sequence[Any], score: Any, aux: Sequence[Any]
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


def torch_mask_mod(tree: Expression, aux: Sequence[Any] = ()) -> Callable[[Any, Any, Any, Any], Any]:
    """Returns ``mask_mod(b, h, q_idx, kv_idx)`` for ``torch.nn.attention.flex_attention`` from a mask expression.

    Args:
        tree: a bool expression.
        aux: tensors of its lookups, by their numbers.
    """

    steps = steps_of(tree)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return _run(steps, (b, h, q_idx, kv_idx), None, aux)

    return mask_mod


def torch_score_mod(tree: Expression, aux: Sequence[Any] = ()) -> Callable[[Any, Any, Any, Any, Any], Any]:
    """Returns ``score_mod(score, b, h, q_idx, kv_idx)`` for FlexAttention from a score expression.

    Args:
        tree: a float expression.
        aux: tensors of its lookups, by their numbers.
    """

    steps = steps_of(tree)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return _run(steps, (b, h, q_idx, kv_idx), score, aux)

    return score_mod
