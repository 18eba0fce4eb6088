"""Tests places as indices of torch tensors, and which gathered keys a step takes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attn_core import AttentionSpec, Target
from attn_core.context_parallel.call import build_call
from attn_core.context_parallel.index_arrays import MAX_RANGES
from attn_core.context_parallel.on_torch import step as step_torch
from attn_core.context_parallel.on_torch.positions import GatheredPlaces, Places
from torch_frontend.context_parallel import backward, exchange, forward
from torch_frontend.context_parallel.mesh import SINGLE_RANK, RankAxis
from torch_frontend.context_parallel.prepare import build_rank_plan

CPU = torch.device("cpu")


def indices(size):
    """Index arrays: ranges of neighbours, and scattered places, which need a stored index."""
    ranges = st.lists(st.tuples(st.integers(0, size - 1), st.integers(1, 9)), min_size=1, max_size=MAX_RANGES)
    neighbours = ranges.map(lambda actual: np.concatenate([np.arange(a, min(a + n, size)) for a, n in actual]))
    apart = st.lists(st.integers(0, size - 1), min_size=1, max_size=3 * MAX_RANGES).map(np.asarray)
    return neighbours | apart


@given(index=indices(40), axis=st.sampled_from([1, 2]))
def test_places_read_and_write_like_an_index(index, axis):
    whole = torch.randn(2, 40, 40, 3)
    places, right = Places(index, CPU), whole.index_select(axis, torch.from_numpy(index))
    assert torch.equal(places.take(whole, axis), right)
    if places.distinct:
        wiped = whole.clone()
        places.put(wiped, torch.zeros_like(right), axis)
        assert torch.equal(wiped, whole.index_fill(axis, torch.from_numpy(index), 0.0))


@given(index=indices(4 * 10), pairs=st.booleans())
def test_places_of_parts_index_the_concatenated_blocks(index, pairs):
    whole = torch.randn(4, *([2] if pairs else []), 3, 10, 2, 5)  # [parts, (k and v,) batch, size, heads, dim]
    end_to_end = torch.cat(whole.unbind(0), -3)
    actual = GatheredPlaces(index, 10, CPU).take(whole)
    assert torch.equal(actual, end_to_end.index_select(-3, torch.from_numpy(index)))


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("part", range(4))
def test_a_part_takes_each_gathered_key_once_for_all_its_tiles(part, window):
    """On a zigzag row over four parts, whose two pieces of queries see almost the same keys of other parts."""
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "value_dim": 8}
    window = {} if window is None else {"window": (window, 0)}
    spec = AttentionSpec(
        batch=1, q_len=160, kv_len=160, dtype="float32", causal=True, return_lse=True, **sizes, **window
    )
    call = build_call(spec, None, "all_gather", "zigzag", (4,), 1, Target("torch", "cpu"), ("math",))
    (at,) = (at for at, step in enumerate(call.plan.steps) if step.gathered)
    runs = step_torch.prepare_part(step_torch.StepCall(call, at, stacked=True), part, CPU)
    used = np.concatenate([run.keys.take(torch.arange(runs.keys.count)[None]).ravel() for run in runs.tiles])
    assert np.array_equal(np.unique(used), np.arange(runs.keys.count))  # every taken key is used by a tile
    assert all(run.keys.is_one_range for run in runs.tiles)  # and no tile copies its keys again


@pytest.mark.parametrize(("window", "sent"), [((6, 0), [6]), ((6, 2), [6, 2]), (None, [16])])
def test_a_rank_sends_only_a_window_s_border(window, sent, monkeypatch):
    """k and v of the border, which are kept; in a backward their gradients travel back. A ring without a window sends
    whole blocks, and sends them again."""
    messages = []

    def hop(pair, axis, distance):
        messages.append((sum(each.numel() for each in pair), distance % axis.size))
        return exchange.PendingExchange.ready(pair)

    monkeypatch.setattr(exchange.KVPair, "hop", hop)
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "value_dim": 8}
    mask = {"causal": True} if window is None else {"window": window}
    spec = AttentionSpec(batch=1, q_len=64, kv_len=64, dtype="float32", needs_backward=True, **sizes, **mask)
    ranks = 2 if window is None else 4
    spec = spec if window else replace(spec, q_len=32, kv_len=32)
    call = build_call(spec, None, "ring", "contiguous", (ranks,), 1, Target("torch", "cpu"), ("math",))
    plan = build_rank_plan(call, RankAxis("", ranks, 1), SINGLE_RANK, CPU)
    q, k, v = (torch.randn(1, 16, heads, 8) for heads in (4, 2, 2))
    (out,), residuals = forward.forward(plan, q, k, v, None, with_lse=False, keep=True)
    numbers = [2 * 8 * 2 * count for count in sent]  # heads, width, k and v
    away = [1, ranks - 1][: len(sent)]
    assert messages == list(zip(numbers, away, strict=True))
    messages.clear()
    backward.backward(plan, residuals, None, torch.ones_like(out), None)
    again = [] if window else [*zip(numbers, away, strict=True)]
    back = zip(numbers, ((ranks - far) % ranks for far in away), strict=True)
    assert sorted(messages) == sorted([*again, *back])


def writing(function, shapes):
    """A backend's forward that writes its results into the last argument, as kernels on a GPU do."""

    def run(spec, *arguments):
        *arguments, into = arguments
        results = function(spec, *arguments)
        for buffer, result in zip(into, results):
            assert buffer.is_contiguous() and buffer.shape == result.shape
            buffer.copy_(result)
        shapes.append(len(into))
        return tuple(into)

    return run


def test_kernels_write_a_rank_s_documents_into_its_shard():
    """The shards of 20 documents of 128 tokens and one of 8 have 1288 places, of which rank 0 uses 1280. Its kernel
    writes the output there, and leaves nothing to copy. The places that it does not use are 0, in gradients, too."""
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "value_dim": 8}
    documents = (*range(0, 2561, 128), 2568)
    packed = {"documents": 21, "max_len_q": 128, "max_len_k": 128, "causal": True}
    spec = AttentionSpec(batch=1, q_len=2568, kv_len=2568, dtype="float32", needs_backward=True, **sizes, **packed)
    call = build_call(spec, documents, "ring", "documents", (2,), 1, Target("torch", "cpu"), ("math",))
    plan = build_rank_plan(call, RankAxis("", 2, 0), SINGLE_RANK, CPU)
    assert (plan.query_count, call.plan.q_layout.shard) == (1280, 1288)
    ((step, (tile,)),), wrote = plan.steps, []
    direct = tile._replace(writes=True, forward=writing(tile.forward, wrote))
    q, k, v = (torch.randn(1, 1288, heads, 8) for heads in (2, 1, 1))
    results = []
    for run in (tile, direct):
        of_run = plan._replace(steps=((step, (run,)),))
        (out,), residuals = forward.forward(of_run, q, k, v, None, with_lse=False, keep=True)
        assert not out[:, 1280:].any() and (residuals[0].lse[..., 1280:] == -torch.inf).all()
        gradients = backward.backward(of_run, residuals, None, torch.ones_like(out), None)[:3]
        assert not any(each[:, 1280:].any() for each in gradients)
        results.append((out, residuals[0].lse, *gradients))
    assert all(map(torch.equal, *results)) and wrote == [2]
