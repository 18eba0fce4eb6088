"""Tests the cost of a plan, the choice of a strategy and its explanation, and the pictures of plans."""

from __future__ import annotations

import json
import pickle
import re
import statistics
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_context_plan import requests, visible_set
from typer.testing import CliRunner

from attn_core import AttentionSpec, SpecError, Target
from attn_core.call.options import Options, check_options
from attn_core.cli.app import app
from attn_core.context_parallel import choose as choosing
from attn_core.context_parallel import cost as costs
from attn_core.context_parallel.bands import VisibleBand
from attn_core.context_parallel.call import keeps_borders, keeps_gathered, plan_spec
from attn_core.context_parallel.choose import Choice, NoStrategyError, choose, choose_layout
from attn_core.context_parallel.cost import (
    GIB,
    LAUNCH,
    LAUNCHES,
    MEMORY,
    Cost,
    DirectionCost,
    cost_of,
)
from attn_core.context_parallel.picture import LIMIT, draw, ranks_of, step_of_pairs
from attn_core.context_parallel.plan import AxisSizes, build_plan
from attn_core.context_parallel.request import Request, explain_request
from tools.pages.plans import svg

ROOT = Path(__file__).resolve().parents[2]


def call(length: int, heads: tuple[int, int] = (32, 8), **options: Any) -> AttentionSpec:
    """A causal bfloat16 call of head_dim 128."""
    shape = {"batch": 1, "q_len": length, "kv_len": length, "num_heads": heads[0], "num_kv_heads": heads[1]}
    shape |= {"head_dim": 128, "value_dim": 128}
    return AttentionSpec(**{**shape, "dtype": "bfloat16", "causal": True, **options})


def cost(spec: AttentionSpec, strategy: str, axes: AxisSizes, layout: str = "zigzag", *, launched: bool = True) -> Cost:
    return cost_of(spec, plan_spec(spec, None, strategy, layout, axes), launched=launched)


# Measured rows

RUNS = [
    json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))
    for name in ("context-rows-h200", "context-ways-h200")
]
"""Two runs of the rows over two H200s, with rows of two seeds."""
HOST_BOUND = 1.5e-3, 3.3e-3
"""A forward, or a training call, that took less than so many seconds waited for the host, whose speed changes by half
during a run."""


def ways_of_rows() -> list[Any]:
    """For each row and direction that was measured in several ways: its spec, its documents, and the seconds of each
    way."""
    cases = []
    for run in RUNS:
        for row in run["rows"]:
            for direction, entry in row["torch"].items():
                ways = {"chosen": entry["seconds"]["chosen"], **entry["others"]}
                seconds = {
                    entry["chosen"] if name == "chosen" else name: statistics.median(times)
                    for name, times in ways.items()
                }
                if len(seconds) > 1:
                    name = f"seed {run['seed']} {row['name']} {direction}"
                    cases.append(pytest.param(*spec_of(row, direction), seconds, id=name))
    return cases


def spec_of(row: dict[str, Any], direction: str) -> tuple[AttentionSpec, tuple[int, ...] | None]:
    documents, more = None, {}
    if row["lengths"]:
        documents, longest = (0, *accumulate(row["lengths"])), max(row["lengths"])
        more = {"documents": len(row["lengths"]), "max_len_q": longest, "max_len_k": longest}
    spec = call(
        row["tokens"],
        (row["heads"], row["kv_heads"]),
        head_dim=row["head_dim"],
        value_dim=row["head_dim"],
        window=(None, None) if row["window"] is None else (row["window"] - 1, 0),
        softcap=row["softcap"],
        needs_backward=direction == "training",
        **more,
    )
    return spec, documents


@pytest.mark.parametrize(("spec", "documents", "seconds"), ways_of_rows())
def test_the_chosen_way_of_a_row_over_two_gpus_was_measured_fast(
    spec: AttentionSpec, documents: tuple[int, ...] | None, seconds: dict[str, float]
) -> None:
    """Within 5 % of the fastest way, or if the host decides, within 15 %. Stripes are never chosen."""

    def order(way: str) -> tuple[float, float]:
        strategy, layout = way.split(", ")
        found = choose(spec, documents, layout, (2,), None, strategy).cost
        assert found is not None
        return found.order

    best = min((way for way in seconds if "striped" not in way), key=order)
    waits = seconds[best] < HOST_BOUND[spec.needs_backward]
    assert seconds[best] <= (1.15 if waits else 1.05) * min(seconds.values())


def test_40_measured_rows_are_compared() -> None:
    assert len(ways_of_rows()) >= 40


def measured_on_ranks() -> list[Any]:
    """For every shape that was measured on several GPUs, the seconds of each strategy with its heads in one group."""
    actual = json.loads((ROOT / "benchmarks/results/context-parallel.json").read_text(encoding="utf-8"))
    shapes = [
        (int(ranks), row["tokens"], word, seconds)
        for ranks, measures in actual.items()
        for row in measures["torch"]["speed"]
        for word, seconds in row["seconds"].items()
    ]
    return [
        pytest.param(
            ranks,
            call(tokens, needs_backward="backward" in word),
            {name: np.median(times) for name, times in seconds.items() if name.count(", ") == 1},
            id=f"{ranks} {tokens} {word}",
        )
        for ranks, tokens, word, seconds in shapes
    ]


@pytest.mark.parametrize(("ranks", "spec", "seconds"), measured_on_ranks())
def test_the_chosen_strategy_was_measured_fastest(ranks: int, spec: AttentionSpec, seconds: Any) -> None:
    """Within 2 %, because two runs of one strategy differ by as much."""
    assert set(seconds) == {"ring, zigzag", "all_gather, zigzag", "ulysses, contiguous"}

    def order(name: str) -> tuple[float, float]:
        strategy, kind = name.split(", ")
        return cost(spec, strategy, (ranks,), kind).order

    assert seconds[min(seconds, key=order)] <= 1.02 * min(seconds.values())


def test_measurements_on_two_and_four_gpus_are_compared() -> None:
    assert len(measured_on_ranks()) >= 10


# Bytes that every rank receives, and bytes that it holds


@pytest.mark.parametrize("heads", [(32, 8), (32, 32), (24, 3)])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_bytes_of_a_forward(heads: tuple[int, int], ranks: int) -> None:
    """With S positions on a rank and 2 bytes each: all-gather and ring 4 (P-1) S Hk D, Ulysses 4 (P-1)/P S (H + Hk)
    D."""
    shard, (num, kv) = 4096, heads
    spec, width = call(shard * ranks, heads), 128
    gathered = 4 * (ranks - 1) * shard * kv * width
    assert cost(spec, "all_gather", (ranks,)).received == pytest.approx(gathered, rel=1e-3)
    assert cost(spec, "ring", (ranks,)).received == pytest.approx(gathered, rel=1e-3)
    if num % ranks == kv % ranks == 0:
        exchanged = 4 * (ranks - 1) / ranks * shard * (num + kv) * width
        assert cost(spec, "ulysses", (ranks,)).received == pytest.approx(exchanged, rel=1e-3)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_bytes_of_a_backward(ranks: int) -> None:
    """k and v again in 2 bytes each, and their gradients: in 2 bytes if a single tile computed each, else in 4.

    With 32 heads over 8 kv heads, the keys of two ranks are no larger than a rank's queries, so they are kept.
    """
    shard = 4096
    spec, block = call(shard * ranks, needs_backward=True), 2 * shard * 8 * 128
    for name in ("ring", "all_gather"):
        actual = cost(spec, name, (ranks,)).backward.received
        again = 0 if ranks == 2 and name == "all_gather" else 2
        assert actual == pytest.approx((again + (2 if ranks == 2 else 4)) * (ranks - 1) * block, rel=1e-3)


@pytest.mark.parametrize(("heads", "ranks", "kept"), [((32, 8), 2, True), ((32, 8), 3, False), ((32, 32), 2, False)])
def test_gathered_keys_are_kept_if_they_are_no_larger_than_the_queries(
    heads: tuple[int, int], ranks: int, kept: bool
) -> None:
    spec = call(1024 * ranks, heads, needs_backward=True)
    assert keeps_gathered(spec, plan_spec(spec, None, "all_gather", "zigzag", (ranks,))) == kept
    assert not keeps_gathered(spec, plan_spec(spec, None, "ring", "zigzag", (ranks,)))


@pytest.mark.parametrize(
    ("heads", "window", "kept"),
    [((32, 8), 1023, True), ((32, 32), 1023, True), ((8, 8), 9000, False), ((8, 8), None, False)],
)
def test_borders_are_kept_if_they_are_no_larger_than_the_queries(heads: Any, window: Any, kept: bool) -> None:
    """The gradients of kept borders travel during the own step of a backward, and the keys are not sent again."""
    spec = call(65536, heads, window=(window, None), needs_backward=True)
    plan = plan_spec(spec, None, "ring", "contiguous", (4,))
    assert keeps_borders(spec, plan) == kept
    if kept:
        found = cost(spec, "ring", (4,), "contiguous")
        assert found.backward.received == found.forward.received


def test_copied_kv_heads_count_as_sent_bytes() -> None:
    """Over 4 ranks 2 kv heads become 4; queries and output do not change."""
    spec = call(16384, (32, 2))
    exchanged = 4 * 3 / 4 * 4096 * (32 + 4) * 128
    assert cost(spec, "ulysses", (4,)).received == pytest.approx(exchanged, rel=1e-3)


def test_the_bytes_of_two_mesh_axes() -> None:
    """In 2 x 4, the inner 4 exchange heads; a rank then has a quarter of the heads of half the row."""
    spec, shard = call(32768), 4096
    inside = 4 * 3 / 4 * shard * (32 + 8) * 128
    outside = 4 * shard * 8 * 128
    for strategy in ("ring", "all_gather"):
        actual = cost(spec, strategy, (2, 4)).received
        assert actual == pytest.approx(inside + outside, rel=1e-3)


def test_a_ring_holds_no_more_than_shards() -> None:
    def peaks(strategy: str, training: bool) -> list[float]:
        specs = [call(8192 * ranks, needs_backward=training) for ranks in (2, 4, 8)]
        return [cost(spec, strategy, (ranks,)).held for spec, ranks in zip(specs, (2, 4, 8), strict=True)]

    for training in (False, True):
        ring, gather, ulysses = (peaks(name, training) for name in ("ring", "all_gather", "ulysses"))
        assert ring[0] <= ring[1] == ring[2] and len(set(ulysses)) == 1  # two ranks need no accumulators
        keys = 8192 * 8 * 2 * 128 * 2  # bytes of a shard's k and v
        # As received and in order; gradients have twice as many bytes, as sent and as received.
        assert gather[2] - gather[1] == 4 * (2 + 4 * training) * keys and gather[0] < gather[1]
        assert ring[0] >= (2 if training else 1) * (8192 * 32 * 2 * 128 * 2) + 2 * keys
    assert peaks("ring", True)[2] <= peaks("ulysses", True)[2] < peaks("all_gather", True)[2]


# Seconds


def test_the_busiest_rank_decides_the_time() -> None:
    """A contiguous causal ring takes 2 - 1/P times its share of the work; see Striped Attention, arXiv:2311.09431."""
    contiguous, zigzag = (
        cost(call(1 << 20), "ring", (4,), layout).forward.device for layout in ("contiguous", "zigzag")
    )
    assert contiguous / zigzag == pytest.approx(2 - 1 / 4, rel=0.02)


def test_a_dropped_hop_costs_nothing() -> None:
    windowed = call(65536, window=(16383, None))
    everything, near = (cost(spec, "ring", (4,), "contiguous") for spec in (call(65536), windowed))
    assert near.received == pytest.approx(everything.received / 3)  # one hop instead of three


@pytest.mark.parametrize(("window", "borders"), [((1023, None), (1023,)), ((1023, 511), (1023, 511))])
def test_a_border_costs_its_own_bytes(window: tuple[int, int | None], borders: tuple[int, ...]) -> None:
    """2 bytes of k and v for each key of a border, which is kept, and in a backward its gradients."""
    spec, key = call(65536, window=window, causal=len(borders) == 1, needs_backward=True), 4 * 8 * 128
    found = cost(spec, "ring", (4,), "contiguous")
    assert found.forward.received == found.backward.received == pytest.approx(sum(borders) * key, rel=1e-3)
    whole = cost(replace(spec, window=(16383, window[1])), "ring", (4,), "contiguous")
    assert found.forward.held < whole.forward.held and found.backward.held < whole.backward.held


def test_wider_types_are_slower() -> None:
    """Half the products per second for twice the bytes: an assumption, because only 16-bit types were measured."""
    halves, floats, doubles = (
        cost(call(8192, dtype=dtype), "all_gather", (1,)).forward.device for dtype in ("bfloat16", "float32", "float64")
    )
    assert (floats, doubles) == (pytest.approx(2 * halves), pytest.approx(4 * halves))


def test_reordering_and_accumulators_cost_memory_traffic() -> None:
    spec, shard = call(32768, causal=False), 8192
    gathered = [cost(spec, "all_gather", (4,), layout).forward.device for layout in ("zigzag", "contiguous")]
    keys = 4 * shard * 8 * 256 * 2  # bytes of the row's k and v, read and written
    assert gathered[0] - gathered[1] == pytest.approx(2 * keys / MEMORY)
    # A ring merges the results of three steps, and not of one.
    assert cost(spec, "ring", (4,), "contiguous").forward.device > gathered[1]


def test_a_short_row_takes_as_long_as_the_host_launches_it() -> None:
    short = call(4096)
    gather, ring = (cost(short, name, (2,)) for name in ("all_gather", "ring"))
    host = LAUNCH * (1 + 2 + 1 + LAUNCHES["run"])  # the call, two tiles, a gather, and a rank has two pieces
    assert gather.order[0] == pytest.approx(host)
    assert ring.order[0] == pytest.approx(host + LAUNCH * (LAUNCHES["hop"] - 1))
    assert gather.order[0] > 2 * gather.forward.device
    assert str(gather).endswith("held by a rank, waits for the host")
    trained = cost(replace(short, needs_backward=True), "all_gather", (2,))
    assert trained.order[0] == pytest.approx(2 * host)
    program = cost(short, "all_gather", (2,), launched=False)
    assert program.order == (program.forward.device,) * 2 and "host" not in str(program)
    long = cost(call(65536), "all_gather", (2,))
    assert long.order[0] == long.forward.device > long.forward.host and "host" not in str(long)
    assert cost(short, "all_gather", (1,)).forward.host == 0


def test_only_torch_waits_for_the_host() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    shards = tuple(((1, 2048, heads, 64), "float32") for heads in (8, 8, 8))
    where = {"axes": ("cp",), "sizes": (2,), "device": "cpu", "needs_backward": False, "requested": None}
    request = Request(
        (*shards, None), (4096, 4096), None, check_options(Options(causal=True)), "", "zigzag", 1, **where
    )
    torch, jax = (explain_request(request, Target.here(name, "cpu")).choice.cost for name in ("torch", "jax"))
    assert torch is not None and torch.forward.host > 0
    assert jax is not None and jax.forward.host == jax.backward.host == 0


def test_the_device_decides_between_ways_that_the_host_makes_equal() -> None:
    slow, fast = (Cost(DirectionCost(device, 1e-3, 0, 0), DirectionCost(0, 0, 0, 0), False) for device in (9e-4, 1e-4))
    assert slow.order[0] == fast.order[0] and fast.order < slow.order


def test_an_exchange_hides_behind_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds() -> float:
        return cost(call(1 << 18), "ring", (4,)).forward.device

    prolonged = seconds()
    monkeypatch.setattr(costs, "PROLONGS", 0.0)
    hidden = seconds()
    monkeypatch.setattr(costs, "LINK", 1e20)
    assert prolonged > hidden == pytest.approx(seconds())


def test_another_host_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    for strategy in ("all_gather", "ulysses", "ring"):
        seconds = []
        for ranks in (16, 8, 4):
            monkeypatch.setattr(costs, "RANKS_PER_HOST", ranks)
            seconds.append(cost(call(1 << 19), strategy, (16,)).forward.device)
        assert seconds == sorted(seconds) and seconds[0] < seconds[2]


# Choosing


def chosen(spec: AttentionSpec, axes: AxisSizes, layout: str = "zigzag", **options: Any) -> str | None:
    return choose(spec, None, layout, axes, **options).strategy


def test_all_gather_moves_less_on_few_ranks() -> None:
    """On fewer ranks than (H + Hk) / Hk: 5 for heads 32/8, 2 for 32/32, 33 for 32/1."""
    assert chosen(call(32768), (4,)) == "all_gather"
    assert chosen(call(65536), (8,)) == "ulysses"
    assert chosen(call(16384, (32, 32)), (4,)) == "ulysses"
    assert chosen(call(65536, (32, 1)), (8,)) == "all_gather"


def test_a_small_window_chooses_a_ring_of_few_hops() -> None:
    assert chosen(call(65536, window=(1023, None)), (4,), "contiguous") == "ring"


def test_a_strategy_that_does_not_fit_in_memory_is_not_chosen() -> None:
    spec = call(262144, (32, 2), needs_backward=True)
    actual = {name: cost(spec, name, (8,)) for name in ("ring", "ulysses", "all_gather")}
    most, middle, least = sorted(actual, key=lambda name: -actual[name].held)
    assert least == "ring"
    assert chosen(spec, (8,), memory=actual[most].held) == chosen(spec, (8,))
    assert chosen(spec, (8,), memory=actual[most].held - 1) == min(middle, least, key=lambda name: actual[name].order)
    assert chosen(spec, (8,), memory=actual[middle].held - 1) == least
    with pytest.raises(NoStrategyError):
        chosen(spec, (8,), memory=actual[least].held - 1)


def test_equal_times_choose_the_earlier_strategy() -> None:
    choice = choose(call(4096), None, "zigzag", (1,))
    assert len({one.cost.order for one in choice.candidates if one.cost}) == 1
    assert choice.strategy == "all_gather"


def test_two_axes_choose_among_the_strategies_of_two_axes() -> None:
    choice = choose(call(65536), None, "zigzag", (4, 2))
    assert [one.strategy for one in choice.candidates] == ["all_gather", "ring"]
    assert "all_gather x ulysses  selected: " in str(choice)
    with pytest.raises(NoStrategyError) as caught:
        choose(call(65536, (6, 2)), None, "zigzag", (2, 4))
    assert all("4 ranks can share" in one.refusals[0] for one in caught.value.choice.candidates)


def test_packed_documents_cost_only_their_visible_pairs() -> None:
    documents = tuple(range(0, 65537, 4096))
    spec = call(65536, documents=16, max_len_q=4096, max_len_k=4096)
    packed, whole = choose(spec, documents, "zigzag", (4,)), choose(call(65536), None, "zigzag", (4,))
    assert packed.cost is not None and whole.cost is not None
    assert packed.cost.order[0] < whole.cost.order[0] / 4


def test_the_explanation_lists_every_strategy() -> None:
    choice = choose(call(131072, (6, 2)), None, "zigzag", (4,), 0.35 * GIB)
    ring = cost(call(131072, (6, 2)), "ring", (4,))
    assert str(choice).splitlines() == [
        f"context parallelism over 4 ranks, zigzag: {call(131072, (6, 2))}",
        "  all_gather  refused: memory: 0.38 GiB a rank, more than the 0.35 GiB it may use",
        "  ulysses     refused: q: expected heads that 4 ranks can share, got 6 heads over 2 kv heads; take another "
        "number of ranks for heads, or strategy='ring' or 'all_gather'",
        f"  ring        selected: 1.00 of the shortest time, {ring.received / GIB:.2f} GiB received and "
        f"{ring.held / GIB:.2f} GiB held by a rank",
        "  (compared by times measured on NVIDIA H200; 0.35 GiB may be used on a rank)",
    ]
    assert choice.reasons("ulysses")[0].startswith("q: expected heads") and choice.reasons("ring") == ()


def test_an_error_lists_every_strategy_if_none_fits() -> None:
    with pytest.raises(NoStrategyError, match=r"^no strategy can share this call\n") as caught:
        choose(call(65536, (6, 2)), None, "zigzag", (4,), memory=1.0)
    choice = caught.value.choice
    assert choice.strategy is None and choice.cost is None
    assert [bool(one.refusals) for one in choice.candidates] == [True] * 3
    for one in choice.candidates:
        assert one.refusals[0] in str(caught.value)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.choice == choice


def test_a_named_strategy_never_falls_back() -> None:
    slower = choose(call(16384), None, "zigzag", (2,), strategy="ring")
    assert slower.strategy == "ring" and slower.candidates == choose(call(16384), None, "zigzag", (2,)).candidates
    message = r"^strategy='ulysses' cannot share this call, and one asked for by name never falls back\n"
    with pytest.raises(NoStrategyError, match=message):
        choose(call(16384, (6, 2)), None, "zigzag", (4,), strategy="ulysses")


def test_a_named_strategy_is_the_only_one_that_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed row differs in every batch, and planning it takes time."""
    planned = []
    monkeypatch.setattr(
        choosing,
        "plan_spec",
        lambda spec, of, strategy, *rest: planned.append(strategy) or plan_spec(spec, of, strategy, *rest),
    )
    spec, documents = call(4099, documents=2, max_len_q=4000, max_len_k=4000), (0, 99, 4099)
    choice = choose(spec, documents, "zigzag", (2,), strategy="all_gather")
    assert planned == ["all_gather"]
    assert len(str(choice).splitlines()) == 5 and planned == ["all_gather", "ulysses", "ring"]


def test_equal_requests_share_one_answer() -> None:
    def request() -> Choice:
        return choose(call(16384), None, "zigzag", (4,))

    assert request() is request()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"axes": (2, 2, 2)}, "axes=(2, 2, 2): expected (ranks,) or (outer, inner), each of at least one rank"),
        ({"axes": (0,)}, "axes=(0,): expected (ranks,) or (outer, inner), each of at least one rank"),
        ({"layout": "snake"}, "layout='snake': expected one of contiguous, zigzag, striped, documents, or 'window:W'"),
        ({"strategy": "rings"}, "strategy='rings': expected one of all_gather, ulysses, ring on 1 axis, or None"),
        ({"axes": (2, 2), "strategy": "ulysses"}, "strategy='ulysses': expected one of all_gather, ring on 2 axes"),
        ({"spec": call(64, dropout=0.5)}, "dropout=0.5: expected 0 in context parallelism"),
        ({"spec": call(64, mask_shape=(1, 1, 64, 64))}, "mask: expected None in context parallelism"),
    ],
)
def test_bad_requests_are_refused_by_name(changed: dict[str, Any], message: str) -> None:
    requested = {"spec": call(64), "documents": None, "layout": "zigzag", "axes": (2,), **changed}
    with pytest.raises(SpecError, match=f"^{re.escape(message)}"):
        choose(**requested)


@given(requests(), st.booleans())
def test_any_plan_has_a_cost(question: tuple[Any, ...], training: bool) -> None:
    strategy, _, _, inner, q_len, kv_len, _ = question
    spec = call(0, (12 * inner, 6 * inner), q_len=q_len, kv_len=kv_len, causal=False, needs_backward=training)
    actual = cost_of(spec, build_plan(*question))
    assert actual.held >= 0 and actual.received >= 0 and (inner > 1 or strategy != "ulysses" or actual.received == 0)
    assert actual.order[0] >= actual.order[1] >= actual.forward.device >= 0


# Pictures


def attn(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["context-plan", *arguments], env={"COLUMNS": "100"})


@given(requests())
def test_a_picture_shows_every_visible_pair(question: tuple[Any, ...]) -> None:
    made, (q_len, kv_len, visible) = build_plan(*question), question[-3:]
    assert np.array_equal(step_of_pairs(made) >= 0, visible_set(q_len, kv_len, visible))
    if max(q_len, kv_len) <= LIMIT:
        ElementTree.fromstring(svg(made))
        assert len(draw(made).splitlines()) > q_len


def test_a_picture_shows_ranks_and_steps() -> None:
    made = build_plan("ring", "contiguous", 2, 1, 4, 4, VisibleBand(None, 0))
    assert ranks_of(made.q_layout).tolist() == [0, 0, 1, 1]
    assert step_of_pairs(made).tolist() == [[0, -1, -1, -1], [0, 0, -1, -1], [1, 1, 0, -1], [1, 1, 0, 0]]
    text = draw(made)
    assert "rank 0 holds 0-1\nrank 1 holds 2-3" in text
    assert "    1   2 1 1 0 ·\n    1   3 1 1 0 0\n" in text
    assert "step 1         0      4   rank r has the keys of r - 1" in text
    squares = ElementTree.fromstring(svg(made)).findall("{http://www.w3.org/2000/svg}rect")
    assert len(squares) == 1 + 4 + 4 + 6  # the background, two strips, and the pieces of the rows: 1, 1, 2 and 2


def test_a_long_row_is_refused_by_the_picture() -> None:
    made = build_plan("ring", "zigzag", 2, 1, LIMIT + 1, LIMIT + 1, VisibleBand(None, 0))
    for picture in (draw, svg):
        with pytest.raises(SpecError, match=r"^length 65 over 2 ranks: at most 64 positions and ranks can be drawn$"):
            picture(made)
    done = attn("--q-len", str(LIMIT + 1), "--causal")
    assert done.exit_code == 0 and done.output.startswith("(no picture: a row or the number of ranks is above 64)\n")


def test_the_command_exits_with_the_refusal() -> None:
    none = attn("--q-len", "32", "--heads", "6", "--kv-heads", "2", "--strategy", "ulysses")
    assert none.exit_code == 1 and "refused: q: expected heads that 4 ranks can share" in none.output
    for options, message in (
        *(
            (["--ranks", text], f"attn: --ranks='{text}': expected a number of 1 or more, or OUTER,INNER such as 2,4\n")
            for text in ("two", "2,2,2", "0", "-2", "2,0", "")
        ),
        (
            ["--lengths", "3,4", "--kv-lengths", "4,3"],
            "attn: --kv-lengths: expected none, because each document has as many queries as keys",
        ),
    ):
        done = attn(*options)
        assert done.exit_code == 2 and " ".join(done.output.split()).startswith(message.strip())


# Layouts


def test_the_layout_with_the_shortest_time_is_chosen() -> None:
    """Documents are dealt, a window shares the first tokens or takes contiguous pieces, and a causal row a zigzag."""
    documents = (0, 9000, 17168, 23168, 27568, 30568, 32568, 32768)
    packed = call(32768, documents=7, max_len_q=9000, max_len_k=9000, needs_backward=True)
    window, causal = call(32768, window=(4095, 0), needs_backward=True), call(32768, needs_backward=True)
    for spec, offsets, layout, strategy in (
        (packed, documents, "documents", "ring"),
        (window, None, "window:4096", "ring"),
        (causal, None, "zigzag", "all_gather"),
    ):
        fastest, *others = choose_layout(spec, offsets, (2,))
        assert (fastest.layout, fastest.strategy) == (layout, strategy)
        assert fastest == choose(spec, offsets, layout, (2,))
        seconds = [choice.cost.order for choice in (fastest, *others) if choice.cost]
        assert seconds == sorted(seconds) and len(seconds) == (2 if spec is causal else 3)
    fastest, *_ = choose_layout(window, None, (8,))  # more ranks would exchange more pieces than they save
    assert (fastest.layout, fastest.strategy) == ("contiguous", "ring")


def test_a_row_that_cannot_be_dealt_has_other_layouts() -> None:
    spec = call(3, documents=2, max_len_q=2, max_len_k=2)
    assert {choice.layout for choice in choose_layout(spec, (0, 1, 3), (4,))} == {"zigzag", "contiguous"}


def test_no_layout_is_chosen_beyond_the_memory() -> None:
    with pytest.raises(NoStrategyError, match=r"refused: memory: .* GiB a rank, more than the 0\.00 GiB it may use"):
        choose_layout(call(65536, documents=1, max_len_q=65536, max_len_k=65536), (0, 65536), (4,), memory=1.0)


def test_the_command_compares_layouts() -> None:
    heads = ["--heads", "32", "--kv-heads", "8", "--head-dim", "128", "--dtype", "bfloat16"]
    lengths = ["--lengths", "9000,8168,6000,4400,3000,2000,200"]
    done = attn(*lengths, *heads, "--causal", "--layout", "auto", "--ranks", "2")
    assert done.exit_code == 0 and "context parallelism over 2 ranks, documents: " in done.output
    assert re.search(r"\n  layouts: documents 1\.00 \(ring\); .*zigzag 1\.\d+ ", done.output)
