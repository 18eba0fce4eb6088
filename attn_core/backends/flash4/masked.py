"""FlashAttention-4 on calls with key ranges, a mask function or a score function: refusals and the kernels' arguments.

Ranges and mask functions run through block tables: the kernel skips the blocks that nothing shows, and calls the mask
function in blocks that are partly visible. Its mask functions replace causal and window, so the band of such a call is
cut into its ranges. The tables of the queries serve the forward, those of the keys the backward.
Upstream: flash-attn-4 4.0.0b36, ``flash_attn.cute``: block_sparsity.py, block_sparse_utils.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from attn_core.backends.flash4 import function_blocks, functions
from attn_core.backends.shared import block_tables
from attn_core.backends.shared.constant_tensors import made_from
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs

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
    ends = by_blocks(spec) and block_tables.has_ends(spec)
    arrays = functions.arrays_of(spec)
    score = functions.score_functions(spec.score_mod, spec.softcap, ends, arrays, spec.packed, spec.group_size)
    if half == "forward":
        # With the query heads of a kv head in one tile, the kernel would divide the index of every pair.
        apart = {"pack_gqa": False} if (spec.max_len_q or spec.q_len) >= block_tables.BLOCK else {}
        return {"score_mod": score.forward, **apart}
    return {"score_mod": score.recompute, "score_mod_bwd": score.gradient}


def operands(spec: AttentionSpec, inputs: Inputs, half: str) -> tuple[Any, ...]:
    """Returns the further tensors of a call in a direction: its block table, the ends of its ranges, its aux arrays.

    A plain call has none.
    """
    if is_plain(spec):
        return ()
    arrays = functions.aux_tensors(inputs)
    if not by_blocks(spec):
        return tuple(arrays)

    def make() -> tuple[Any, ...]:
        shown = None if spec.mask_mod is None else function_blocks.states(spec, arrays, inputs.q.device)
        table, ends = block_tables.table(spec, inputs, shown, half == "forward")
        return (*table, *arrays) if ends is None else (*table, ends, *arrays)

    if arrays or inputs.key_ranges is None:
        return make()
    return made_from(inputs.key_ranges, (spec, half), make)  # type: ignore[no-any-return]


IN_PROGRAMS = ("partial_count", "partial", "full_count", "full", "ends")
"""The names of ``operands`` in a program of XLA."""


def program_shapes(spec: AttentionSpec, direction: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns the shapes and dtypes of a program's further operands, by their names; empty for a call without."""
    if not by_blocks(spec):
        return {}
    length, others = block_tables.blocks(spec.q_len), block_tables.blocks(spec.kv_len)
    length, others = (length, others) if direction == "forward" else (others, length)
    counts, (rows, heads, _, ranges, _) = (spec.batch, spec.num_heads, length), spec.key_ranges_shape or (0,) * 5
    ends = rows, heads, block_tables.blocks(spec.kv_len) * block_tables.BLOCK, 2 * ranges
    shapes = (counts, (*counts, others), counts, (*counts, others), ends)
    return {name: (shape, "int32") for name, shape in zip(IN_PROGRAMS, shapes, strict=True)}


def program_operands(spec: AttentionSpec, direction: str, arrays: dict[str, Any], xp: Any) -> dict[str, Any]:
    """Returns a program's further operands by name, from the call's own, by operations of ``xp`` (``jax.numpy``)."""
    if not by_blocks(spec):
        return {}
    table, ends = block_tables.table_arrays(spec, arrays["key_ranges"], direction == "forward", xp)
    return dict(zip(IN_PROGRAMS, (*table, ends), strict=True))


def tensor_keywords(spec: AttentionSpec, tensors: tuple[Any, ...], by_address: bool = True) -> dict[str, Any]:
    """Returns the keywords of flash-attn-4's entry points that pass ``operands``.

    Args:
        by_address: False for a program of XLA, which passes no addresses.
    """
    if is_plain(spec):
        return {}
    if not by_blocks(spec):
        return {"aux_scalars": functions.scalars_of(tensors) or None}
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch  # type: ignore[import-not-found]

    blocks = BlockSparseTensorsTorch(*tensors[:4], block_size=(block_tables.BLOCK, block_tables.BLOCK))
    how = {"block_sparse_tensors": blocks, "mask_mod": _mask_function(spec)}
    if not by_address:
        return {**how, "aux_tensors": list(tensors[4:])}
    return {**how, "aux_scalars": functions.scalars_of(tensors[4:]) or None}


def _mask_function(spec: AttentionSpec) -> Any:
    ends = None
    if block_tables.has_ends(spec):
        rows, heads, _, ranges, _ = spec.key_ranges_shape or (1, 1, 0, 1, 0)
        ends = functions.Ends(ranges, rows > 1, heads > 1, spec.group_size)
    return functions.mask_function(spec.mask_mod, ends, functions.arrays_of(spec))
