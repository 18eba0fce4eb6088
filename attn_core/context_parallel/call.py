"""ContextCall: the spec of a whole call over ranks, its plan, and the backend of each tile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from attn_core.backends.shared.caches import from_records
from attn_core.call.functions import has_functions
from attn_core.call.kinds import check_kind
from attn_core.call.masks import band
from attn_core.call.options import check_number
from attn_core.call.spec import AttentionSpec
from attn_core.context_parallel import borders
from attn_core.context_parallel.bands import BandedSegment, VisibleBand
from attn_core.context_parallel.layout import check_layout
from attn_core.context_parallel.plan import ROUNDED_ONCE, AxisSizes, ContextPlan, build_plan, outer_and_inner
from attn_core.context_parallel.tiles import Tile
from attn_core.errors import ShapeError, SpecError
from attn_core.selection import Target, new_plans, preference, refusals, select

Bands = tuple[BandedSegment, ...] | None
"""The whole mask of a call with key ranges, see ``attn_core.context_parallel.ranges``; None without ranges."""


@dataclass(frozen=True)
class ContextCall:
    """One attention call over ranks, ready to run.

    Attributes:
        spec: the whole call, as on one device.
        plan: who computes what.
        repeats: the copies of each kv head that are made before heads are exchanged, so that ranks share them evenly.
        head_groups: the number of groups of heads; each group's exchange overlaps the computation of the group before.
        backends: ``((spec of a tile, backend), ...)`` for every distinct tile of every rank.
        requested: the backends that the caller named, or None for automatic choice.
    """

    spec: AttentionSpec
    plan: ContextPlan
    repeats: int
    head_groups: int
    backends: tuple[tuple[AttentionSpec, str], ...]
    requested: tuple[str, ...] | None = None

    def backend_of(self, tile: Tile) -> tuple[AttentionSpec, str]:
        """Returns (the spec of a tile, the backend that runs it)."""
        spec = tile_spec(self.spec, tile, *self.heads)
        return spec, dict(self.backends)[spec]

    def accumulator(self, of: str, part: int | None = None) -> str:
        """Returns the dtype in which several results are added up: the inputs' dtype, or the log-sum-exp's.

        Args:
            of: "q" for outputs and gradients of queries, where sinks count as one more result; "own" for gradients of
                a part's own keys, where copies of a kv head count; "sent" for gradients that parts send each other.
            part: None for a dtype that is wide enough for every part.
        """
        parts = range(self.plan.outer) if part is None else (part,)
        if of == "q":
            wide = any(self.plan.max_tiles_per_query(each) + bool(self.spec.sinks) > ROUNDED_ONCE for each in parts)
        elif of == "own":
            wide = self.repeats > 1 or not all(map(self.plan.own_gradients_are_single, parts))
        else:
            wide = not self.plan.sends_single_gradients
        return self.spec.lse_dtype if wide else self.spec.dtype

    @property
    def heads(self) -> tuple[int, int]:
        """(query heads, kv heads) of one group that a rank computes, after heads were exchanged."""
        shared = self.plan.inner * self.head_groups
        return self.spec.num_heads // shared, self.spec.num_kv_heads * self.repeats // shared


@from_records(maxsize=128)
def build_call(
    spec: AttentionSpec,
    documents: tuple[int, ...] | None,
    strategy: str,
    layout: str,
    axes: AxisSizes,
    head_groups: int,
    target: Target,
    requested: tuple[str, ...] | None,
    bands: Bands = None,
) -> ContextCall:
    """Plans a call and selects the backends of its tiles; cached.

    Args:
        spec: the whole call, as on one device.
        documents: the offsets of the whole row's packed documents.
        strategy, layout, axes: see ``attn_core.context_parallel.plan``.
        requested: ``backend=`` of the call, or of ``use_backend``.
        bands: the whole mask of a call with key ranges.

    Raises:
        SpecError: for arguments that context parallelism does not support, and for heads that ranks cannot share.
        NoBackendError: if no backend, or not the requested one, can run a tile; the message has every reason.
    """
    check_spec(spec, bands)
    plan = plan_spec(spec, documents, strategy, layout, axes, bands)
    repeats = kv_repeats(spec.num_heads, spec.num_kv_heads, plan.inner)
    heads = spec.num_kv_heads * repeats // plan.inner
    if head_groups < 1 or heads % head_groups:
        raise SpecError(f"head_groups={head_groups}: expected a divisor of the {heads} kv heads that a rank computes")
    call = ContextCall(spec, plan, repeats, head_groups, (), requested)
    tiles = (tile for step in plan.steps for of_part in step.tiles for tile in of_part)
    # Many tiles have the same spec, and each distinct spec is selected once. dict.fromkeys keeps their order.
    specs = tuple(dict.fromkeys(tile_spec(spec, tile, *call.heads) for tile in tiles))
    chosen = _select_backends(specs, target, requested)
    for tile, name in chosen:
        names = requested or preference.order(tile, target.framework, target.device)
        new_plans.planned(tile, target, requested, name, new_plans.is_fallback(names, name, target, requested))
    return replace(call, backends=chosen)


def plan_spec(
    spec: AttentionSpec,
    documents: tuple[int, ...] | None,
    strategy: str,
    layout: str,
    axes: AxisSizes,
    bands: Bands = None,
) -> ContextPlan:
    """Returns the plan of a spec's call; cached by ``build_plan``. Raises SpecError for a layout that cannot be."""
    if bands is not None and layout == "documents":
        raise SpecError(
            "layout='documents': expected another layout beside key_ranges, such as 'zigzag', because this one needs "
            "the row's documents, and key_ranges have none"
        )
    edge = band(spec)
    if check_layout(layout) is not None and documents is None and spec.batch == 1 and spec.q_len == spec.kv_len:
        documents = (0, spec.q_len)  # one document, so that both pieces of a rank share a kernel call
    visible = VisibleBand(edge.left, edge.right, edge.offset, documents)
    if bands is not None:  # causal, window and documents are in them
        visible = VisibleBand(None, None, parts=bands, packs=spec.batch == 1)
    return build_plan(strategy, layout, *outer_and_inner(axes, strategy, 1), spec.q_len, spec.kv_len, visible)


def check_spec(spec: AttentionSpec, bands: Bands = None) -> None:
    """Raises SpecError for an argument of ``attention`` that context parallelism does not support."""
    if spec.key_ranges_shape is not None and bands is None:
        raise SpecError("key_ranges: expected none in context parallelism, where every rank would need others")
    if has_functions(spec):
        raise SpecError(
            "mask_mod, score_mod, segment ids: expected none in context parallelism, where every rank would need "
            "others; use causal, window, seq_info and key_ranges"
        )
    check_supported(spec.mask_shape, spec.bias_shape, spec.alibi_shape, spec.dropout)


def check_supported(mask: object, bias: object, alibi_slopes: object, dropout: object) -> None:
    """Raises SpecError for a mask, a bias or slopes, and for dropout that is not 0."""
    for name, value in (("mask", mask), ("bias", bias), ("alibi_slopes", alibi_slopes)):
        if value is not None:
            raise SpecError(
                f"{name}: expected None in context parallelism, where it would have to be cut for every rank; use "
                "causal, window and seq_info"
            )
    if check_number("dropout", dropout):
        raise SpecError(
            f"dropout={dropout}: expected 0 in context parallelism; which weights drop would depend on the rank"
        )


def check_cut_layout(layout: object) -> None:
    """Raises SpecError unless ``layout`` may be the name of the layout in which a call's shards are cut."""
    if layout is None:
        raise SpecError(
            "layout=None: expected the layout that shard_sequence cut; explain_context_parallel(..., layout=None) "
            "chooses one for whole rows"
        )
    check_kind("layout", layout, str, "the layout that shard_sequence cut")


def kv_repeats(num_heads: int, num_kv_heads: int, inner: int) -> int:
    """Returns how many copies of each kv head let ``inner`` ranks share the heads evenly; 1 if they divide already.

    Raises:
        ShapeError: if no number of copies does.
    """
    # The smallest factor for which ``inner`` divides num_kv_heads * factor.
    repeats = inner // math.gcd(num_kv_heads, inner)
    # A kv head's query heads are divided among its copies, so the number of copies must divide the group.
    if num_heads % num_kv_heads == 0 and (num_heads // num_kv_heads) % repeats == 0:
        return repeats
    raise ShapeError(
        f"q: expected heads that {inner} ranks can share, got {num_heads} heads over {num_kv_heads} kv heads; "
        "take another number of ranks for heads, or strategy='ring' or 'all_gather'"
    )


def keeps_gathered(spec: AttentionSpec, plan: ContextPlan) -> bool:
    """Returns whether gathered keys and values are kept for the backward instead of gathered again.

    They are kept if they are no larger than a rank's queries, which the backward needs in any case.
    """
    kv_heads = spec.num_kv_heads * kv_repeats(spec.num_heads, spec.num_kv_heads, plan.inner)
    # The sizes of the whole row stand for those of a shard: both sides would be divided by the same number of ranks.
    gathered = plan.outer * spec.kv_len * kv_heads * (spec.head_dim + spec.value_dim)
    return plan.gathers and gathered <= spec.q_len * spec.num_heads * spec.head_dim


def keeps_borders(spec: AttentionSpec, plan: ContextPlan) -> bool:
    """Returns whether the keys and values of borders are kept for the backward instead of sent again.

    They are kept if nothing else is sent in the ring, and if they are no larger than a rank's queries. The backward
    then computes the gradients of the borders first, and they travel while it computes with its own keys.
    """
    others = [step for step in plan.steps if not step.own]
    places = sum(borders.size(step.border or ()) for step in others)
    kv_heads = spec.num_kv_heads * kv_repeats(spec.num_heads, spec.num_kv_heads, plan.inner) / plan.inner
    few = places * kv_heads * (spec.head_dim + spec.value_dim) <= plan.q_layout.shard * spec.num_heads * spec.head_dim
    alone = bool(others) and len(others) < len(plan.steps) and all(step.border is not None for step in others)
    return alone and few


def tile_spec(spec: AttentionSpec, tile: Tile, num_heads: int, num_kv_heads: int) -> AttentionSpec:
    """Returns the spec of a tile: dense if it has one segment, packed if it has several."""
    lengths = {
        "documents": len(tile.segments) if tile.packed else None,
        "max_len_q": max(segment.q_len for segment in tile.segments) if tile.packed else None,
        "max_len_k": max(segment.k_len for segment in tile.segments) if tile.packed else None,
    }
    # ``causal`` already says that the right side ends at the diagonal.
    window: tuple[int | None, int | None] = (tile.left, None if tile.causal else tile.right)
    # Sinks are left out: they join once, after the last merge. Each tile would count them again.
    return AttentionSpec(
        batch=spec.batch,
        q_len=tile.q_len,
        kv_len=tile.k_len,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=spec.head_dim,
        value_dim=spec.value_dim,
        dtype=spec.dtype,
        causal=tile.causal,
        window=window,
        softcap=spec.softcap,
        scale=spec.scale,
        deterministic=spec.deterministic,
        needs_backward=spec.needs_backward,
        return_lse=spec.return_lse,
        partial=True,
        **lengths,  # type: ignore[arg-type]
    )


def _select_backends(
    specs: Sequence[AttentionSpec], target: Target, requested: tuple[str, ...] | None
) -> tuple[tuple[AttentionSpec, str], ...]:
    """Returns the backend of each tile: one for all of them if one can run them all, so that they round alike; else the
    best for each."""
    if not specs:
        return ()
    # The preference depends on the lengths of a call, and the largest tile takes most of the time.
    largest = max(specs, key=lambda spec: spec.q_len * spec.kv_len)
    names = requested or preference.order(largest, target.framework, target.device)
    for name in names:
        if not any(refusals(name, spec, target) for spec in specs):
            return tuple((spec, name) for spec in specs)
    # No backend runs every tile. ``select`` raises if a tile has none, so ``or ""`` is for the type checker alone.
    return tuple((spec, select(spec, target, requested).backend or "") for spec in specs)
