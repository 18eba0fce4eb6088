"""Tests the layout for a causal window: equal tokens and equal work, and what ranks send each other."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_core import AttentionSpec, SpecError
from attn_core.context_parallel.bands import VisibleBand
from attn_core.context_parallel.borders import size
from attn_core.context_parallel.call import plan_spec
from attn_core.context_parallel.dealing import cut_for_window
from attn_core.context_parallel.layout import Run, build_layout, check_layout, layout_for_window
from attn_core.context_parallel.plan import ContextPlan, build_plan


def ring(length: int, ranks: int, window: int, layout: str | None = None) -> ContextPlan:
    visible = VisibleBand(window - 1, 0)
    return build_plan("ring", layout or layout_for_window(window), ranks, 1, length, length, visible)


@given(st.integers(0, 90), st.integers(1, 7), st.integers(1, 200))
def test_every_token_is_on_one_rank_and_ranks_have_equal_tokens(length: int, ranks: int, window: int) -> None:
    cut = cut_for_window(length, ranks, window)
    assert sorted(place for rank in cut for piece in rank for place in range(*piece)) == list(range(length))
    counts = [sum(stop - start for start, stop in rank) for rank in cut]
    assert max(counts) - min(counts) <= 1
    assert all(start <= stop for rank in cut for start, stop in rank)
    assert all(len(runs) <= 2 for runs in build_layout(layout_for_window(window), length, ranks).runs)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("share", [0.05, 0.3, 1.0])
def test_work_is_even_if_the_window_fits_into_a_shard(ranks: int, share: float) -> None:
    window = int(1024 * share)
    assert ring(1024 * ranks, ranks, window).balance > 0.998
    # Contiguous pieces lose half of a window's square of pairs on the first rank.
    lost = ring(1024 * ranks, ranks, window, "contiguous").balance
    assert lost == pytest.approx(1 - window / (2 * 1024 * ranks), abs=0.002)


def test_the_pieces_of_two_ranks() -> None:
    """1200 = 4096 (1 - sqrt(1/2)): behind them as many pairs are missing as in front."""
    plan = ring(32768, 2, 4096)
    assert plan.q_layout.runs == ((Run(0, 1200), Run(17584, 15184)), (Run(1200, 16384),))
    assert sum(4095 - place for place in range(1200)) == pytest.approx(4095 * 4096 / 4, rel=0.001)


def test_two_ranks_send_the_window_and_the_first_tokens() -> None:
    plan = ring(32768, 2, 4096)
    assert [(step.shift, step.border) for step in plan.steps] == [(0, None), (1, ((0, 1200), (12289, 16384)))]
    assert size(plan.steps[1].border or ()) < 1.3 * 4096


@pytest.mark.parametrize(("batch", "calls"), [(1, [1, 1]), (2, [2, 1])])
def test_both_pieces_of_a_rank_share_a_call_if_there_is_one_row(batch: int, calls: list[int]) -> None:
    """Rows of a batch cannot be packed, because each would need offsets of its own."""
    sizes: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "value_dim": 64}
    spec = AttentionSpec(
        batch=batch, q_len=64, kv_len=64, dtype="float32", causal=True, window=(15, None), needs_backward=True, **sizes
    )
    plan = plan_spec(spec, None, "ring", "window:16", (2,))
    assert [len(tiles) for tiles in plan.steps[0].tiles] == calls


@pytest.mark.parametrize("layout", ["window", "window:", "window:0", "window:07", "window:-1", "window:4k", "window:٣"])
def test_a_layout_without_a_number_of_keys_is_refused(layout: str) -> None:
    expected = f"layout={layout!r}: expected one of contiguous, zigzag, striped, documents, or 'window:W' with"
    with pytest.raises(SpecError, match=f"^{re.escape(expected)}"):
        build_layout(layout, 16, 2)


@pytest.mark.parametrize("number", [str(2**63), "1" * 5000], ids=["2^63", "5000 digits"])
def test_a_window_that_no_int64_holds_is_refused(number: str) -> None:
    with pytest.raises(SpecError, match=r"^layout='window:[\d.]+': expected at most 2\^63 - 1 keys in 'window:W'$"):
        build_layout(f"window:{number}", 16, 2)
    assert check_layout(f"window:{2**63 - 1}") == 2**63 - 1


def test_one_layout_has_one_name() -> None:
    assert layout_for_window(4096) == "window:4096"
    assert check_layout("window:4096") == 4096
    assert check_layout("zigzag") is None
