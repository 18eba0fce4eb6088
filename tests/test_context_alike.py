"""A step as one packed call of all parts: the same visible pairs as its tiles, counted one by one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_core import AttentionSpec
from attn_core.context_parallel.alike import alike
from attn_core.context_parallel.call import ContextCall, spread
from attn_core.context_parallel.places import positions


def call_of(strategy: str, layout: str, outer: int, inner: int, length: int, **options: Any) -> ContextCall:
    fields = {"batch": 1, "q_len": length, "kv_len": length, "num_heads": 4, "num_kv_heads": 4, "head_dim": 8}
    spec = AttentionSpec(**{**fields, "value_dim": 8, "dtype": "float32", "causal": True, **options})  # type: ignore[arg-type]
    return ContextCall(spec, spread(spec, None, strategy, layout, outer, inner), 1, 1, ())


def pairs_of(call: ContextCall, step: int, part: int) -> np.ndarray:
    """int ``[q_len, kv_len]``: how often the tiles of a step of a part compute each pair, none of which is masked."""
    plan = call.plan
    found = np.zeros((plan.q_layout.length, plan.k_layout.length), np.int64)
    rows, keys = (positions(block.runs) for block in (plan.q_blocks[part], plan.keys(plan.steps[step], part)))
    for tile in plan.steps[step].tiles[part]:
        for segment in tile.segments:
            index = np.ix_(rows[segment.q_start : segment.q_stop], keys[segment.k_start : segment.k_stop])
            found[index] += 1
    return found


def packed_pairs(call: ContextCall, step: int, part: int) -> np.ndarray:
    """The same of the packed call."""
    plan, made = call.plan, alike(call, call.plan.steps[step])
    assert made is not None
    found = np.zeros((plan.q_layout.length, plan.k_layout.length), np.int64)
    rows = positions(plan.q_blocks[part].runs)
    # places of what a part gets: of gathered keys all parts' blocks end to end, or of two parts the other's alone
    size = plan.inner * plan.k_layout.shard
    if plan.steps[step].gathered:
        came = [at for at in range(plan.outer) if plan.outer > 2 or at != part]
        held = np.full(len(came) * size, -1)
        for at, block in enumerate(plan.k_blocks[each] for each in came):
            held[at * size : at * size + block.count] = positions(block.runs)
    else:
        held = positions(plan.keys(plan.steps[step], part).runs)
    assert len({len(ranges) for ranges in made.keys}) == 1
    places = np.concatenate([np.arange(start, stop) for start, stop in made.keys[part]])
    assert len(places) == made.spec.kv_len == made.cu_k[part][-1] and made.cu_q[-1] == made.spec.q_len
    for (start, stop), (first, last) in zip(pairwise(made.cu_q), pairwise(made.cu_k[part]), strict=True):
        assert stop - start <= made.spec.max_len_q and last - first <= made.spec.max_len_k
        for row in rows[start:stop]:  # places past those that hold a position have none
            np.add.at(found[row], held[places[first:last]], 1)
    return found


@given(
    st.sampled_from(["ring", "all_gather"]),
    st.sampled_from(["zigzag", "contiguous"]),
    st.integers(2, 5),
    st.integers(1, 2),
    st.integers(1, 6),
    st.booleans(),
)
def test_a_packed_call_computes_what_tiles_do(
    strategy: str, layout: str, outer: int, inner: int, size: int, causal: bool
) -> None:
    length = 2 * outer * inner * size
    call = call_of(strategy, layout, outer, inner, length, causal=causal)
    for at, step in enumerate(call.plan.steps):
        if alike(call, step) is None:
            continue
        for part in range(outer):
            assert np.array_equal(pairs_of(call, at, part), packed_pairs(call, at, part))


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
@pytest.mark.parametrize("outer", [2, 3, 4, 8])
def test_zigzag_under_a_causal_mask_is_alike_after_the_first_step(strategy: str, outer: int) -> None:
    call = call_of(strategy, "zigzag", outer, 1, 64 * outer)
    first, *rest = call.plan.steps
    assert first.own and alike(call, first) is None, "the own block is masked"
    for step in rest:
        made = alike(call, step)
        assert made is not None and made.spec.documents == 2
        assert made.spec.kv_len == (64 if strategy == "ring" else 64 * (outer - 1))  # of 2 x 32 rows each


@pytest.mark.parametrize("changed", [{"window": (40, None)}, {"batch": 2}])
def test_masks_and_batches_are_not(changed: dict[str, Any]) -> None:
    call = call_of("ring", "striped" if "window" in changed else "zigzag", 4, 1, 256, **changed)
    assert all(alike(call, step) is None for step in call.plan.steps)
