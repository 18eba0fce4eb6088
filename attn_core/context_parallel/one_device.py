"""Calls with key ranges in parts: tiles on kernels that have no key ranges, merged by their log-sum-exps.

It is context parallelism over one rank, which has the whole row. The values of the ranges must be on the host, because
they decide which kernels run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attn_core import backends
from attn_core.backends.shared.caches import from_records
from attn_core.call.functions import reads
from attn_core.call.key_ranges import visible_blocks
from attn_core.call.masks import visible
from attn_core.call.spec import AttentionSpec
from attn_core.context_parallel import ranges
from attn_core.context_parallel.call import ContextCall, build_call
from attn_core.selection import NoBackendError, Selection, Target, explain, refusals

FEWEST_PAIRS = {"cpu": 2**15, "cuda": 2**21}
"""By the kind of device, visible pairs of all rows, for one head. With fewer, automatic choice takes one kernel that
has key ranges, because each tile costs a launch. On an H200 parts of flash3 were faster than flex from 2**15 pairs on,
but parts of sdpa_efficient were slower for images and for half of the shared prefixes; measured on 2026-11-26."""
MATH_PAIRS, HIDDEN = 2**18, 0.2
"""``math`` runs more pairs than these in parts if a call as a whole would compute more pairs, by this share for each
kernel call but the first. Measured on a CPU: 2.6 times as fast on a shared prefix (1.7 times as many pairs as a whole,
2 calls), 0.9 times on block diffusion (1.6 times, 5 calls), 0.8 times on images (1.0 times, 2 calls)."""


def described(selection: Selection, key_ranges: np.ndarray | None, aux: Sequence[Any] = ()) -> Selection:
    """Returns the explanation of a call: how much its mask leaves, and whether its key ranges run in parts.

    Args:
        selection: of the call as a whole.
        key_ranges: valid ranges of ``spec.key_ranges_shape`` on the host, or None.
        aux: the arrays of the call's functions, on the host, or none.
    """
    spec, target = selection.spec, selection.target
    if spec.symbolic or spec.empty:
        return selection
    is_masked = key_ranges is not None or spec.mask_mod is not None or selection.mask_mod is not None
    blocks = _blocks(spec, key_ranges, aux) if is_masked else None
    if blocks is not None:
        share = f"{blocks[0]} of {blocks[1]} blocks of 128 queries and keys have a visible pair"
        selection = replace(selection, mask=f"{share} ({blocks[0] / blocks[1]:.0%})")
    if key_ranges is None:
        return selection
    found = find(spec, key_ranges, target, selection.requested)
    if found is None:
        if selection.backend is not None or not selection.requested:
            return selection
        why = tiled(spec, key_ranges, target, selection.requested[:1])
        return replace(selection, parts=f"none, because {why}")
    return replace(selection, backend=found.backends[0], parts=str(found))


@dataclass(frozen=True, eq=False)
class Tiled:
    """A call as tiles. Equal only to itself: ``choose`` returns the same object for the same call.

    Attributes:
        call: over one rank. Its row holds the batch rows end to end if there are several.
        rows: the number of batch rows.
    """

    call: ContextCall
    rows: int

    @property
    def kernel_calls(self) -> int:
        """The number of kernel calls."""
        return sum(len(of_part) for step in self.call.plan.steps for of_part in step.tiles)

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends of the tiles; the requested ones if there are none, because no key is visible."""
        return tuple(sorted({name for _, name in self.call.backends})) or self.call.requested or ()

    @property
    def pairs_between_keys(self) -> int:
        """The pairs of queries and keys from the first to the last key that a block of 128 queries sees."""
        blocks: dict[int, tuple[int, int]] = {}
        for tile in (tile for step in self.call.plan.steps for tile in step.tiles[0]):
            for segment in tile.segments:
                for block in range(segment.q_start // 128, -(-segment.q_stop // 128)):
                    start, stop = tile.keys_of(segment, 128 * block, 128 * (block + 1))
                    before, behind = blocks.get(block, (start, stop))
                    blocks[block] = min(start, before), max(stop, behind)
        return sum(128 * (stop - start) for start, stop in blocks.values())

    def __str__(self) -> str:
        if self.kernel_calls < 2:
            return f"1 kernel call of {self.backends[0]}" if self.kernel_calls else "no kernel call: no key is visible"
        return f"{self.kernel_calls} kernel calls of {' and '.join(self.backends)}, merged by their log-sum-exps"


MOST_VALUES = 2**24
"""The most values of a mask function that an explanation computes."""


def _blocks(spec: AttentionSpec, key_ranges: np.ndarray | None, aux: Sequence[Any]) -> tuple[int, int] | None:
    """Returns how many blocks of the scores a mask leaves, and how many there are; None if that is not known here."""
    if spec.packed or spec.mask_shape is not None:  # they hide further blocks
        return None
    if spec.mask_mod is None and key_ranges is not None:
        return visible_blocks(key_ranges, spec.q_len, ranges.edges_of(spec))
    heads = spec.num_heads if reads(spec, "h") or key_ranges is not None else 1
    batch = spec.batch if reads(spec, "b") or key_ranges is not None else 1
    if batch * heads * spec.q_len * spec.kv_len > MOST_VALUES or len(aux) != len(spec.aux):
        return None
    # A bias and slopes hide nothing, and may have more batch rows and heads than the mask.
    bare = replace(spec, bias_shape=None, bias_dtype=None, bias_gradient=False, alibi_shape=None)
    fewer = replace(bare, batch=batch, num_heads=heads, num_kv_heads=min(heads, spec.num_kv_heads))
    seen = visible(fewer, key_ranges=key_ranges, aux=aux)
    missing = [(0, -length % 128) for length in seen.shape[2:]]
    padded = np.pad(seen, [(0, 0), (0, 0), *missing])
    tiles = padded.reshape(*padded.shape[:2], padded.shape[2] // 128, 128, -1, 128).any((3, 5))
    return int(tiles.sum()), tiles.size


def choose(
    spec: AttentionSpec, key_ranges: np.ndarray, target: Target, requested: tuple[str, ...] | None
) -> Tiled | None:
    """Returns the call as tiles if that is the best way to run it; None if a backend runs it as a whole.

    Args:
        spec: the call, with ``key_ranges_shape``.
        key_ranges: valid ranges of that shape.
        requested: a backend that has key ranges runs them itself; any other one runs tiles. None for automatic choice:
            tiles run on kernels that have no key ranges, if there is enough to compute.

    Raises:
        NoBackendError: if no requested backend can run the call, as a whole or as tiles.
    """
    found = find(spec, key_ranges, target, requested)
    if found is None and requested is not None and all(refusals(name, spec, target) for name in requested):
        raise NoBackendError(described(explain(spec, target, requested), key_ranges))
    return found


def find(
    spec: AttentionSpec, key_ranges: np.ndarray, target: Target, requested: tuple[str, ...] | None
) -> Tiled | None:
    """As ``choose``, but returns None if no requested backend can run the call."""
    if unsupported(spec) is not None:
        return None
    return _chosen(spec, _content(key_ranges), key_ranges.shape[3], target, requested)


@from_records(maxsize=64)
def _chosen(
    spec: AttentionSpec, content: tuple[bytes, ...], count: int, target: Target, requested: tuple[str, ...] | None
) -> Tiled | None:
    """``choose``, by the values of the ranges."""
    for names in [None] if requested is None else [(name,) for name in requested]:
        if names is not None and not refusals(names[0], spec, target):
            return None
        found = _tiled(spec, content, count, target, names)
        if isinstance(found, Tiled) and (names is not None or _is_worth_it(found, spec, target)):
            return found
    return None


def _content(key_ranges: np.ndarray) -> tuple[bytes, ...]:
    """Returns the ranges of each batch row as a key of caches: an array may change between two calls."""
    return tuple([np.ascontiguousarray(row[0]).tobytes() for row in key_ranges])


def _is_worth_it(found: Tiled, spec: AttentionSpec, target: Target) -> bool:
    """Returns whether parts pay for their kernel calls: on kernels without key ranges, or by pairs that math leaves."""
    pairs = sum(found.call.plan.pairs)
    if pairs < FEWEST_PAIRS.get(target.kind, 1):
        return False
    alone = explain(spec, target).backend
    if alone is not None and backends.load(alone, target.kind).timing.skips_blocks:
        return False
    if all(refusals(name, spec, target) for name in found.backends):
        return True
    # ``math`` computes all keys from the first to the last that a block of queries sees; in parts, the visible ones.
    most = 1 + HIDDEN * (found.kernel_calls - 1)
    return found.backends == ("math",) == (alone,) and pairs > MATH_PAIRS and found.pairs_between_keys > most * pairs


def tiled(
    spec: AttentionSpec, key_ranges: np.ndarray, target: Target, requested: tuple[str, ...] | None
) -> Tiled | str:
    """Returns the call as tiles, or why it cannot run as tiles; the arguments are those of ``choose``."""
    why = unsupported(spec)
    return why or _tiled(spec, _content(key_ranges), key_ranges.shape[3], target, requested)


@from_records(maxsize=64)
def _tiled(
    spec: AttentionSpec, content: tuple[bytes, ...], count: int, target: Target, requested: tuple[str, ...] | None
) -> Tiled | str:
    """Returns the call in tiles, each with a band instead of key ranges; or why there is none.

    Args:
        content: of ``_content``; one entry if all batch rows have the same ranges.
        count: the ranges of each key.
    """
    edges = ranges.edges_of(spec)
    why = f"its key_ranges are not a few bands: they would take more than {ranges.MOST_TILES} kernel calls"
    best: Tiled | None = None
    for windows in (True, False):  # not every kernel has windows
        of_rows = [ranges.bands_of(row, count, spec.q_len, edges, windows) for row in content]
        if any(bands is None for bands in of_rows):
            continue
        whole: ranges.Bands = of_rows[0]  # type: ignore[assignment]
        if spec.batch > 1:
            rows = of_rows if len(of_rows) > 1 else of_rows * spec.batch
            whole = ranges.of_rows(rows, spec.q_len, spec.kv_len)  # type: ignore[arg-type]
        if len(whole) > ranges.MOST_BANDS:
            continue
        try:
            call = build_call(_one_row(spec), None, "ring", "contiguous", (1,), 1, target, requested, whole)
        except NoBackendError as error:
            name = requested[0] if requested else error.selection.considered[0]
            why = f"{name} cannot run a part ({error.selection.spec}): {'; '.join(error.selection.reasons(name))}"
            continue
        found = Tiled(call, spec.batch)
        # Tiles without windows run on more kernels. They are worth it only if those with windows run on none.
        if requested is not None or all(refusals(name, spec, target) for name in found.backends):
            return found
        best = best or found
    return best or why


def _one_row(spec: AttentionSpec) -> AttentionSpec:
    """Returns the call on its batch rows end to end, without what the bands say."""
    return replace(
        spec,
        batch=1,
        q_len=spec.batch * spec.q_len,
        kv_len=spec.batch * spec.kv_len,
        causal=False,
        window=(None, None),
        key_ranges_shape=None,
    )


def unsupported(spec: AttentionSpec) -> str | None:
    """Returns why a call cannot run as tiles, whatever its ranges are."""
    assert spec.key_ranges_shape is not None
    if spec.symbolic or spec.empty:
        return "it has no keys, or sizes that are symbols"
    if spec.packed:
        return "parts take no seq_info; attn_core.masks.documents has documents as ranges"
    if spec.key_ranges_shape[1] > 1:
        return "its key_ranges differ between kv heads"
    for name, value in (
        ("mask", spec.mask_shape),
        ("bias", spec.bias_shape),
        ("alibi_slopes", spec.alibi_shape),
        ("mask_mod", spec.mask_mod),
        ("score_mod", spec.score_mod),
        ("dropout", spec.dropout),
        ("invariant", spec.invariant),
    ):
        if value:
            return f"parts take no {name}"
    return None
