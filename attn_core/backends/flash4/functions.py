"""Mask and score functions of a call as functions of FlashAttention-4's kernels.

A kernel passes one pair of a query and a key to a mask function, and a few pairs of one query to a score function.
Arrays go in as ``aux_scalars``: the address of each, then its sizes. With ``aux_tensors`` a kernel would divide every
index by the length of its row, which costs more than most functions; ours stay inside their arrays themselves. The
first array holds the spans of the call's ranges if there are any (see ``block_tables.py``), the others are the call's
aux arrays.

The kernel identifies compiled code by each function's ``__cute_hash__``. Ours names all that the code depends on.
Upstream: flash-attn-4 4.0.0b36, ``flash_attn.cute``: mask.py, softmax.py, flash_bwd_sm90.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from attn_core.backends.flash4.own_kernels import Lane
from attn_core.backends.shared.caches import cached_once
from attn_core.call.functions import aux_of, slope
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs
from attn_core.expressions.on_cute import CuteArray, evaluate_cute, tanh_approx
from attn_core.expressions.properties import kind_of_dtype
from attn_core.expressions.rendering import lookups_inside
from attn_core.expressions.tree import Expression, Kind

if TYPE_CHECKING:
    from torch import Tensor

Result = TypeVar("Result")
Arrays = tuple[tuple[str, Kind, int], ...]
"""The dtype in the kernel, the kind, and the number of axes of each aux array."""
NARROWER = {"int64": "int32", "float64": "float32", "bool": "uint8"}
"""Dtypes that a kernel reads in another one."""
ELEMENTS = {
    **{"int8": "Int8", "int16": "Int16", "int32": "Int32", "uint8": "Uint8", "uint16": "Uint16"},
    **{"float16": "Float16", "bfloat16": "BFloat16", "float32": "Float32"},
}
"""The names of dtypes in the CuTe DSL."""


class Spans(NamedTuple):
    """How the spans of ranges are read: how many ranges a key has, and which axes of the spans are longer than 1."""

    ranges: int
    by_batch: bool
    by_head: bool
    group: int


def arrays_of(spec: AttentionSpec) -> Arrays:
    """Returns the dtypes, kinds and axes of a call's aux arrays."""
    arrays = []
    for shape, dtype in spec.aux:
        kind = kind_of_dtype(dtype)
        assert kind is not None  # a spec allows no other dtypes
        arrays.append((NARROWER.get(str(dtype), str(dtype)), kind, len(shape)))
    return tuple(arrays)


def inside_of(tree: Expression, spec: AttentionSpec) -> tuple[int, ...]:
    """Returns the lookups of a function that stay inside the call's arrays, see ``rendering.lookups_inside``."""
    sizes = spec.batch, spec.num_heads, spec.q_len, spec.kv_len
    return lookups_inside(tree, sizes, tuple([entry.shape for entry in spec.aux]))


def aux_tensors(inputs: Inputs) -> list[Tensor]:
    """Returns the call's aux arrays as tensors that a kernel reads: dense, at most 32 bits, no bools.

    Of an int64 the low 32 bits count, a float64 is rounded, as an expression defines it.
    """
    import torch

    smaller = {getattr(torch, wide): getattr(torch, narrow) for wide, narrow in NARROWER.items()}
    return [array.detach().to(smaller.get(array.dtype, array.dtype)).contiguous() for array in aux_of(inputs)]


def scalars_of(
    spec: AttentionSpec, tensors: Sequence[Tensor], lane: Lane, spans: bool = False
) -> tuple[object, ...] | None:
    """Returns the addresses and sizes of a call's arrays as a kernel takes them; None if there are none.

    Args:
        tensors: the aux arrays, which may be flat, behind the spans of ranges if there are ``spans``.
        lane: returns the address of a tensor, see ``own_kernels``.
    """
    if not tensors:
        return None
    from cutlass import Int32

    shapes = [*([tensors[0].shape] if spans else []), *(entry.shape for entry in spec.aux)]
    pairs = zip(tensors, shapes, strict=True)
    return tuple(scalar for tensor, shape in pairs for scalar in (lane.address(tensor), *map(Int32, shape)))


@lru_cache(maxsize=256)
def mask_function(
    tree: Expression | None, spans: Spans | None, arrays: Arrays, inside: tuple[int, ...] = ()
) -> Callable[..., Any]:
    """Returns ``mask_mod`` of the kernels: a key is visible if its ranges and the call's function show it.

    Args:
        tree: the call's mask function, or None.
        spans: of the ranges, or None; one of both is needed.
        arrays: of the call's aux arrays.
        inside: ``inside_of`` the tree.
    """

    def mask_mod(b: Any, h: Any, q: Any, k: Any, seqlen_info: Any, aux_tensors: Any, aux_scalars: Any = ()) -> Any:
        from cutlass import Boolean, cute

        index, shown = (b[0], h[0], q[0], k[0]), None
        if spans is not None:
            shown = _in_ranges(spans, aux_scalars, index)
        if tree is not None:
            by_function = evaluate_cute(tree, index, None, read(arrays, aux_scalars, spans is not None), inside)
            shown = by_function if shown is None else shown & by_function
        cell = cute.make_rmem_tensor(1, Boolean)
        cell[0] = shown
        return cell.load()

    about = (tree and tree.digest, spans, arrays, inside)
    mask_mod.__cute_hash__ = f"attn_core.mask{about}"  # type: ignore[attr-defined]
    return mask_mod


def _in_ranges(spans: Spans, scalars: Sequence[Any], index: tuple[Any, ...]) -> Any:
    """Returns whether a range of the key shows the pair.

    Args:
        scalars: the address and the sizes of the ranges' starts and lengths, see ``block_tables``.
    """
    from cutlass import Int32, Uint32, cute

    b, h, q, k = index
    address, _, heads, keys, _ = scalars[:5]
    row = b * heads if spans.by_batch else 0
    row = row + h // spans.group if spans.by_head else row
    width = 2 * spans.ranges
    # All numbers of a key in one instruction: of four loads for a key, each is as slow as one. The layout says that
    # they are aligned.
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4 * width)
    by_key = cute.make_tensor(pointer, cute.make_layout((width, cute.assume(keys, 128)), stride=(1, width)))
    values = by_key[None, row * keys + k].load()
    shown = None
    for which in range(spans.ranges):
        inside = Uint32(q - values[2 * which]) < Uint32(values[2 * which + 1])  # one comparison instead of two
        shown = inside if shown is None else shown | inside
    return shown


@lru_cache(maxsize=256)
def score_functions(
    tree: Expression,
    cap: float | None,
    behind_spans: bool,
    arrays: Arrays,
    packed: bool,
    inside: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
) -> ScoreFunctions:
    """Returns the score functions of a call: its softcap, then its own.

    Args:
        tree: the call's score function.
        cap: its softcap.
        behind_spans: whether the first of the kernel's arrays holds the spans of ranges.
        arrays: of the call's aux arrays.
        packed: whether rows hold documents. The kernel counts tokens in a document, and functions in the whole row.
        inside: ``inside_of`` the tree and of its slope.
    """

    def index_of(pair: int, b: Any, h: Any, q_idx: Any, kv_idx: Any, info: Any) -> Any:
        """Returns (b, h, q, k) of one of the pairs that the kernel passes at once, counted as the caller counts."""
        row, head, query, key = b[pair], h[pair], q_idx[pair], kv_idx[pair]
        if packed:
            from cutlass import Int32

            row, query, key = Int32(0), query + info.offset_q, key + info.offset_k
        return row, head, query, key

    def value(of: Expression, score: Any, index: tuple[Any, ...], aux: Any) -> Any:
        return evaluate_cute(of, index, score, read(arrays, aux, behind_spans), inside[of is not tree])

    # The kernels pass the arguments from q_idx on by these names.
    def forward(
        scores: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any, aux_scalars: Any = ()
    ) -> Any:
        def each(pair: int, score: Any) -> Any:
            whole = score if cap is None else capped_share(score, cap, tanh_approx)
            return value(tree, whole, index_of(pair, b, h, q_idx, kv_idx, seqlen_info), aux_scalars)

        return each_pair(each, scores)

    # In the backward scores are whole: the forward's scale is over the cap, see below.
    def recompute(
        scores: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any, aux_scalars: Any = ()
    ) -> Any:
        def each(pair: int, score: Any) -> Any:
            whole = score if cap is None else capped(score, cap, tanh_approx)
            return value(tree, whole, index_of(pair, b, h, q_idx, kv_idx, seqlen_info), aux_scalars)

        return each_pair(each, scores)

    def gradient(
        gradients: Any,
        scores: Any,
        b: Any,
        h: Any,
        q_idx: Any,
        kv_idx: Any,
        seqlen_info: Any,
        aux_tensors: Any,
        aux_scalars: Any = (),
    ) -> Any:
        def each(pair: int, dscore: Any, score: Any) -> Any:
            whole = score if cap is None else capped(score, cap, tanh_approx)
            index = index_of(pair, b, h, q_idx, kv_idx, seqlen_info)
            dscore = dscore * value(slope(tree), whole, index, aux_scalars)
            return dscore if cap is None else capped_gradient(dscore, score, cap, tanh_approx)

        return each_pair(each, gradients, scores)

    functions = ScoreFunctions(forward, recompute, gradient)
    for name, function in functions._asdict().items():
        key = (name, tree.digest, cap, behind_spans, arrays, packed, inside)
        # Everything that the code depends on, in the key of flash-attn-4's compiled kernels.
        function.__cute_hash__ = f"attn_core.score{key}"
        setattr(function, TRUE_INDICES, True)
    return functions


# Softcap by score functions of our own, faster than upstream's. The kernel passes the scaled scores of a few pairs to a
# score function and masks the result; its backward passes the gradients of the capped scores and the scaled scores to a
# second function. Upstream's functions divide by the cap, which is a subroutine call per score. Ours divide nothing:
# the forward runs with ``scale / cap`` as its scale, the backward multiplies by the reciprocal, and the hyperbolic
# tangent is one instruction, PTX ``tanh.approx.f32``: its relative error is up to 2**-11, as in FlashAttention-2 and 3.
# A name holds the cap, so that two caps never share a kernel and equal caps always do.

Tanh = Callable[[Any], Any]


class ScoreFunctions(NamedTuple):
    """The score functions of a call: its softcap, and perhaps a function of its own.

    Attributes:
        forward: ``score_mod`` of the forward; with a softcap the scores arrive divided by it.
        recompute: ``score_mod`` of the backward, whose scores are whole.
        gradient: ``score_mod_bwd`` of the backward.
    """

    forward: Callable[..., Any]
    recompute: Callable[..., Any]
    gradient: Callable[..., Any]


def capped_share(share: Any, cap: float, tanh: Tanh) -> Any:
    """``cap * tanh(s / cap)`` from ``share = s / cap``."""
    return tanh(share) * cap


def capped(score: Any, cap: float, tanh: Tanh) -> Any:
    """``cap * tanh(s / cap)`` from ``s``."""
    return capped_share(score * (1.0 / cap), cap, tanh)


def capped_gradient(gradient: Any, score: Any, cap: float, tanh: Tanh) -> Any:
    """Returns the gradient of ``s`` from the gradient of the capped score; the factor is ``1 - tanh(s / cap) ** 2``."""
    bent = tanh(score * (1.0 / cap))
    return gradient * (1.0 - bent * bent)


@lru_cache(maxsize=64)  # a cap that comes back after 64 others gets equal functions, so nothing compiles again
def softcap_functions(cap: float) -> ScoreFunctions:
    """Returns the score functions of a cap. Needs the CuTe DSL.

    A softcap ignores the kernel's other arguments (batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors).
    """

    def forward(scores: Any, *places: Any, **more: Any) -> Any:
        return each_pair(lambda _, score: capped_share(score, cap, tanh_approx), scores)

    def recompute(scores: Any, *places: Any, **more: Any) -> Any:
        return each_pair(lambda _, score: capped(score, cap, tanh_approx), scores)

    def gradient(gradients: Any, scores: Any, *places: Any, **more: Any) -> Any:
        return each_pair(lambda _, dscore, score: capped_gradient(dscore, score, cap, tanh_approx), gradients, scores)

    functions = ScoreFunctions(forward, recompute, gradient)
    for name, function in functions._asdict().items():
        function.__cute_hash__ = f"attn_core.softcap.{name}({cap!r})"
    return functions


def each_pair(function: Callable[..., Any], *vectors: Any) -> Any:
    """Applies ``function(pair, *elements)`` to every pair of a query and a key in the kernel's vectors.

    Args:
        vectors: ``cute.TensorSSA`` of float32, all of one shape.
    """
    from cutlass import Float32, cute

    shape = vectors[0].shape
    cells = [cute.make_rmem_tensor(shape, Float32) for _ in vectors]
    for cell, vector in zip(cells, vectors, strict=True):
        cell.store(vector)
    for pair in range(cute.size(shape)):  # unrolled while the kernel is traced
        cells[0][pair] = function(pair, *(cell[pair] for cell in cells))
    return cells[0].load()


# The backward of 4.0.0b36 does not pack the query heads of a kv head into one tile, but it passes indices to score
# functions as if it did: ``q // group`` for q, and ``h * group + q % group`` for h. Ours get the true ones, which also
# saves the divisions. Other callers' functions get what they got before.

TRUE_INDICES = "_attn_core_true_indices"
"""The attribute of a score function that gets true indices."""


@cached_once
def correct_indices() -> None:
    """Corrects the indices for functions with the attribute; once in a process."""
    from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90 as Kernel

    for name in ("apply_score_mod", "apply_score_mod_bwd"):
        setattr(Kernel, name, _with_true_indices(getattr(Kernel, name)))


def _with_true_indices(method: Callable[..., Result]) -> Callable[..., Result]:
    def apply(self: Any, *arguments: object, **keywords: object) -> Result:
        if getattr(self.score_mod, TRUE_INDICES, False):
            self = copy.copy(self)
            self.qhead_per_kvhead = 1
        return method(self, *arguments, **keywords)

    return apply


def read(arrays: Arrays, scalars: Sequence[Any], behind_spans: bool = False) -> tuple[CuteArray, ...]:
    """Returns the arrays that a kernel's scalars describe, without the first one if it holds the spans of ranges."""
    import cutlass
    from cutlass import cute

    result, place = [], 5 if behind_spans else 0
    for dtype, kind, axes in arrays:
        element = getattr(cutlass, ELEMENTS[dtype])
        pointer = cute.make_ptr(element, scalars[place], cute.AddressSpace.gmem, assumed_align=element.width // 8)
        result.append(CuteArray(pointer, tuple(scalars[place + 1 : place + 1 + axes]), kind))
        place += 1 + axes
    return tuple(result)
