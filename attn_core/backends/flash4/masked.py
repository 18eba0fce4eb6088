"""FlashAttention-4 on calls with key ranges, a mask function or a score function: refusals and the kernels' arguments.

Ranges and mask functions run through block tables: the kernel skips the blocks that nothing shows, and calls the mask
function in blocks that are partly visible. Its mask functions replace causal and window, so the band of such a call is
cut into its ranges, or becomes a part of its function. The tables of the queries serve the forward, those of the keys
the backward.
Upstream: flash-attn-4 4.0.0b36, ``flash_attn.cute``: block_sparsity.py, block_sparse_utils.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

from attn_core.backends.flash4 import block_tables, functions, own_kernels
from attn_core.backends.flash4.own_kernels import Lane
from attn_core.backends.shared.caches import made_from
from attn_core.call.functions import named, slope
from attn_core.call.masks import FAR
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs
from attn_core.expressions.building import build, constant
from attn_core.expressions.properties import aux_numbers
from attn_core.expressions.tree import Expression

if TYPE_CHECKING:
    import jax
    from torch import Tensor

WIDEST = 128
"""The largest head dim whose tiles are blocks of 128 keys, in both directions."""
MOST_ELEMENTS = 2**31
"""Of an aux array, and of all ranges: their places are ints of 32 bits."""


def by_blocks(spec: AttentionSpec) -> bool:
    """Returns whether the call runs through block tables."""
    return spec.key_ranges_shape is not None or spec.mask_mod is not None


def is_plain(spec: AttentionSpec) -> bool:
    """Returns whether the call has neither ranges nor functions, so that nothing of this module concerns it."""
    return spec.key_ranges_shape is None and spec.mask_mod is None and spec.score_mod is None


@lru_cache(maxsize=256)
def with_band_in_function(spec: AttentionSpec) -> AttentionSpec:
    """Returns a call with its band as a part of the mask function: a comparison, where spans are read from memory.

    A band that depends on the lengths stays, because a function with other numbers is another kernel.
    """
    moves = spec.alignment == "bottom_right" and spec.q_len != spec.kv_len
    left, right = spec.window[0], 0 if spec.causal else spec.window[1]
    if spec.mask_mod is None or spec.key_ranges_shape is not None or moves or left is right is None:
        return spec
    tree, q, k = spec.mask_mod, Expression("q", "int"), Expression("k", "int")
    # Distances beyond every row hide nothing, and would not fit in 32 bits.
    if right is not None:
        tree = build("and", build("less_equal", k, build("add", q, constant(min(right, FAR)))), tree)
    if left is not None:
        tree = build("and", build("less_equal", q, build("add", k, constant(min(left, FAR)))), tree)
    return replace(spec, causal=False, window=(None, None), mask_mod=tree, invariant=None)


def refusals(spec: AttentionSpec, device: str, name: str) -> Iterator[str]:
    """Yields refusals of sm100, and of what block tables exclude: documents, wide heads, paged keys, equal bits."""
    if is_plain(spec):
        return
    if device != "sm90":
        yield f"key_ranges, mask_mod, score_mod: {name} is claimed for them on sm90 alone"
    if any(not 0 < prod(entry.shape) < MOST_ELEMENTS for entry in spec.aux):
        yield f"aux: {name} takes arrays of 1 to {MOST_ELEMENTS - 1} elements"
    if not by_blocks(spec):
        return
    what = "key_ranges" if spec.mask_mod is None else "mask_mod"
    widest = max(spec.head_dim, spec.value_dim)
    if spec.key_ranges_shape is not None and prod(spec.key_ranges_shape) >= MOST_ELEMENTS // 2:  # they are padded
        yield f"key_ranges of shape {list(spec.key_ranges_shape)}: {name} takes fewer than {MOST_ELEMENTS // 2} numbers"
    if spec.packed:
        yield f"{what} with packed documents: {name} has block tables for dense rows alone"
    if spec.paged is not None:
        yield f"{what} with keys and values in pages: {name} has none"
    if widest > WIDEST:
        yield f"{what} with head_dim={widest}: {name} has block tables up to {WIDEST}"
    if spec.deterministic and spec.needs_backward:
        yield f"{what} with deterministic=True and gradients: {name} promises no equal bits there"


def score_keywords(spec: AttentionSpec, half: str) -> dict[str, Any]:
    """Returns the keywords of a call's score function in a direction; of its softcap, too."""
    if spec.score_mod is None:
        return {}
    spans = by_blocks(spec) and block_tables.has_spans(with_band_in_function(spec))
    arrays = functions.arrays_of(spec)
    inside = tuple(functions.inside_of(tree, spec) for tree in (spec.score_mod, slope(spec.score_mod)))
    score = functions.score_functions(spec.score_mod, spec.softcap, spans, arrays, spec.packed, inside)
    if half == "forward":
        # With the query heads of a kv head in one tile, the kernel would divide the index of every pair.
        apart = {"pack_gqa": False} if (spec.max_len_q or spec.q_len) >= block_tables.BLOCK else {}
        return {"score_mod": score.forward, **apart}
    functions.correct_indices()
    return {"score_mod": score.recompute, "score_mod_bwd": score.gradient}


def operands(spec: AttentionSpec, inputs: Inputs, half: str, lane: Lane = own_kernels) -> tuple[Tensor, ...]:
    """Returns the further tensors of a call in a direction: its block table, the spans of its ranges, its aux arrays.

    A plain call has none.

    Args:
        lane: launches the kernels that make tables, see ``own_kernels``.
    """
    if is_plain(spec):
        return ()
    arrays = functions.aux_tensors(inputs) if spec.aux else []
    if not by_blocks(spec):
        return tuple(arrays)
    spec = with_band_in_function(spec)

    device = inputs.q.device

    def make() -> tuple[Tensor, ...]:
        states = None if spec.mask_mod is None else block_tables.states(spec, arrays, device, lane)
        table, spans = block_tables.table(spec, inputs, states, half == "forward", lane)
        return tuple(table) if spans is None else (*table, spans)

    # A caller may change an array at any time. What reads none is the same for all layers of a model.
    reads_arrays = spec.mask_mod is not None and aux_numbers(spec.mask_mod)
    kept = lane is own_kernels and not reads_arrays
    return (*(made_from(inputs.key_ranges, (spec, half), make, device) if kept else make()), *arrays)


def program_inputs(inputs: Inputs) -> Inputs:
    """Returns the inputs of a program: aux arrays flat, and they and sinks of the dtypes that a kernel reads."""
    arrays = named([array.reshape(-1) for array in functions.aux_tensors(inputs)])
    return inputs._replace(**arrays, sinks=None if inputs.sinks is None else inputs.sinks.float())


def program_operands(spec: AttentionSpec, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the operands of a program that are not the call's own arrays, by name: its aux arrays for a kernel."""
    dtypes = {name: dtype for name, (dtype, _, _) in named(functions.arrays_of(spec)).items()}
    return {name: arrays[name].astype(dtype).reshape(-1) for name, dtype in dtypes.items()}


def tensor_keywords(spec: AttentionSpec, tensors: tuple[Tensor, ...], lane: Lane = own_kernels) -> dict[str, Any]:
    """Returns the keywords of flash-attn-4's entry points that pass ``operands``. lane: see ``own_kernels``."""
    if is_plain(spec):
        return {}
    if not by_blocks(spec):
        return {"aux_scalars": functions.scalars_of(spec, tensors, lane)}
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    spec = with_band_in_function(spec)
    blocks = BlockSparseTensorsTorch(*tensors[:4], block_size=(block_tables.BLOCK, block_tables.BLOCK))
    scalars = functions.scalars_of(spec, tensors[4:], lane, block_tables.has_spans(spec))
    return {"block_sparse_tensors": blocks, "mask_mod": _mask_function(spec), "aux_scalars": scalars}


def _mask_function(spec: AttentionSpec) -> Callable[..., Any]:
    spans = None
    if block_tables.has_spans(spec):
        rows, heads, _, ranges, _ = spec.key_ranges_shape or (1, 1, 0, 1, 0)
        spans = functions.Spans(ranges, rows > 1, heads > 1, spec.group_size)
    inside = () if spec.mask_mod is None else functions.inside_of(spec.mask_mod, spec)
    return functions.mask_function(spec.mask_mod, spans, functions.arrays_of(spec), inside)
