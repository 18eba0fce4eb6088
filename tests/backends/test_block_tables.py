"""Tests block tables against the definition of visible pairs, on a GPU; and what is kept of constant tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attn_core import AttentionSpec, masks
from attn_core.backends import flash4
from attn_core.backends.flash4 import block_tables, masked, own_kernels
from attn_core.backends.shared import caches
from attn_core.call.masks import visible
from attn_core.call.tensors import Inputs
from tests.campaign.functions import fields_of


class WholeTensors:
    """A lane that launches as torch's does, into tensors with memory of their own, as in a program of XLA."""

    TAKES_VIEWS = False
    launch, address = staticmethod(own_kernels.launch), staticmethod(own_kernels.address)


LANES = {"views": own_kernels, "whole tensors": WholeTensors}


@pytest.fixture
def flash4_here() -> None:
    """Skips the test if flash-attn-4 is not installed."""
    try:
        flash4.probe()
    except (ImportError, RuntimeError) as error:
        pytest.skip(str(error))


SIZES: dict[str, Any] = {
    **{"batch": 2, "q_len": 300, "kv_len": 500, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "value_dim": 8},
    "dtype": "bfloat16",
}


@st.composite
def calls(draw: Any) -> tuple[AttentionSpec, np.ndarray | None, np.ndarray | None]:
    """A spec, its ranges with any values, and how much a mask function shows of each block."""
    q_len, kv_len = draw(st.integers(1, 700)), draw(st.integers(1, 700))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    band = draw(st.sampled_from([{}, {"causal": True}, {"window": (90, 20)}, {"window": (300, None), "causal": True}]))
    kind = draw(st.sampled_from(["ranges", "function", "both"]))
    fields = {**SIZES, **band, "q_len": q_len, "kv_len": kv_len}
    key_ranges = shown = None
    if kind != "function":
        shape = draw(st.sampled_from((1, 2))), draw(st.sampled_from((1, 2))), kv_len, draw(st.sampled_from((1, 2))), 2
        key_ranges = random.integers(-50, q_len + 300, shape)
        step = draw(st.sampled_from((1, 128, 200)))  # equal ranges of neighbours make full blocks
        key_ranges = np.repeat(key_ranges[:, :, ::step], step, axis=2)[:, :, :kv_len]
        if draw(st.booleans()):
            key_ranges[..., draw(st.sampled_from((0, 1)))] = draw(st.sampled_from((-(2**31), 2**31 - 1)))
        key_ranges = key_ranges.astype(np.int32)
        fields["key_ranges_shape"] = shape
    if kind != "ranges":
        counts = block_tables.blocks(q_len), block_tables.blocks(kv_len)
        axes = draw(st.sampled_from((1, 2))), draw(st.sampled_from((1, 4)))
        shown = random.integers(0, 3, (*axes, *counts)).astype(np.int8)
        fields |= fields_of("nothing", None, (2, 4, q_len, kv_len))
    return AttentionSpec(**fields), key_ranges, shown


@pytest.mark.cuda
@pytest.mark.parametrize("lane", LANES)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=calls())
def test_tables_and_spans(
    drawn: tuple[AttentionSpec, np.ndarray | None, np.ndarray | None], lane: str, flash4_here: None
) -> None:
    spec, key_ranges, shown = drawn
    for of_queries in (True, False):
        table, spans = table_of(spec, key_ranges, shown, of_queries, lane)
        check_spans(spec, key_ranges, spans)
        check_table(spec, key_ranges, shown, table, of_queries)


def table_of(spec: AttentionSpec, key_ranges: Any, shown: Any, of_queries: bool, lane: str) -> tuple[Any, Any]:
    """The table and the spans, on the CPU."""
    tensors = [None if array is None else torch.from_numpy(array).cuda() for array in (key_ranges, shown)]
    inputs = Inputs(*(torch.zeros(1, device="cuda") for _ in range(3)), key_ranges=tensors[0])
    table, spans = block_tables.table(spec, inputs, tensors[1], of_queries, LANES[lane])
    return block_tables.Table(*[tensor.cpu() for tensor in table]), None if spans is None else spans.cpu()


def seen(spec: AttentionSpec, key_ranges: Any) -> np.ndarray:
    """The pairs that ranges and band show, ``[batch, heads, q_len, kv_len]``."""
    fields = {name: getattr(spec, name) for name in (*SIZES, "causal", "window", "key_ranges_shape")}
    ranges = None if key_ranges is None else np.clip(key_ranges, 0, spec.q_len)
    return np.broadcast_to(visible(AttentionSpec(**fields), key_ranges=ranges), (2, 4, spec.q_len, spec.kv_len))


def check_spans(spec: AttentionSpec, key_ranges: Any, spans: Any) -> None:
    if spans is None:
        assert not block_tables.has_spans(spec)
        return
    rows = torch.arange(spec.q_len)[:, None]
    starts = spans[..., ::2]  # [rows, heads, keys, ranges]
    stops = starts + spans[..., 1::2]
    inside = (rows >= starts[..., None, :, :].movedim(-1, 0)) & (rows < stops[..., None, :, :].movedim(-1, 0))
    actual = inside.any(0).repeat_interleave(4 // spans.shape[1], 1).expand(2, 4, -1, -1)
    assert not actual[..., spec.kv_len :].any()  # a kernel reads whole blocks of keys
    np.testing.assert_array_equal(actual[..., : spec.kv_len].numpy(), seen(spec, key_ranges))


def check_table(spec: AttentionSpec, key_ranges: Any, shown: Any, table: Any, of_queries: bool) -> None:
    """Each block is listed once, as full only if everything is visible, and in ascending order."""
    pairs, size = seen(spec, key_ranges), block_tables.BLOCK
    counts = block_tables.blocks(spec.q_len), block_tables.blocks(spec.kv_len)
    length, others = counts if of_queries else counts[::-1]
    assert table.full.shape == (2, 4, length, others) == table.partial.shape
    for row, head, block in np.ndindex(2, 4, length):
        lists = [
            numbers[row, head, block, : count[row, head, block]].tolist()
            for count, numbers in ((table.partial_count, table.partial), (table.full_count, table.full))
        ]
        assert lists == [sorted(set(numbers)) for numbers in lists] and not set(lists[0]) & set(lists[1])
        for other in range(others):
            q, k = (block, other) if of_queries else (other, block)
            tile = pairs[row, head, q * size : (q + 1) * size, k * size : (k + 1) * size]
            most = 2 if shown is None else shown[row % shown.shape[0], head % shown.shape[1], q, k]
            if not tile.any() or most == 0:
                assert other not in lists[0] and other not in lists[1]
            elif tile.all() and most == 2 and (spec.key_ranges_shape or (0,) * 4)[3] < 2:
                assert other in lists[1]  # two ranges may cover a block together, which stays partial
            else:
                assert other in lists[0] or (tile.all() and most == 2 and other in lists[1])


@pytest.mark.cuda
def test_full_blocks_of_a_shared_prefix(flash4_here: None) -> None:
    key_ranges = masks.shared_prefix(256, [128, 128])
    spec = AttentionSpec(**{**SIZES, "q_len": 512, "kv_len": 512, "key_ranges_shape": key_ranges.shape})
    inputs = Inputs(*(torch.zeros(1, device="cuda") for _ in range(3)), key_ranges=torch.from_numpy(key_ranges).cuda())
    table, _ = block_tables.table(spec, inputs, None, True, own_kernels)
    assert table.partial_count[0, 0].tolist() == [1, 1, 1, 1] and table.full_count[0, 0].tolist() == [0, 1, 2, 2]
    assert table.full.stride()[:2] == (0, 0)  # all heads share one table


def test_results_of_constants_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = iter([0, 0, 1, 0, 0])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: next(streams), raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    made: list[int] = []

    def make() -> int:
        made.append(1)
        return len(made)

    device = torch.device("cuda", 0)
    tensor = caches.declare(torch.zeros(3))
    assert [caches.made_from(tensor, "a", make, device) for _ in range(3)] == [1, 1, 2]  # the third on a stream
    assert caches.made_from(tensor, "b", make, device) == 3
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert caches.made_from(tensor, "a", make, device) == 4
    other = torch.zeros(3)
    assert [caches.made_from(other, "a", make, device) for _ in range(2)] == [5, 6]
    address = tensor.data_ptr()
    del tensor
    assert address not in caches._results


def test_results_of_no_tensor_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(caches, "_of_no_tensor", {})
    made: list[int] = []

    def make() -> int:
        made.append(1)
        return len(made)

    devices = [torch.device("cuda", index) for index in (0, 1, 0, 1)]
    assert [caches.made_from(None, "a", make, device) for device in devices] == [1, 2, 1, 2]
    with caches.keeping_nothing():
        assert caches.made_from(None, "a", make, devices[0]) == 3
    for key in range(caches.MOST_RESULTS):
        caches.made_from(None, key, make, devices[0])
    assert len(caches._of_no_tensor) <= caches.MOST_RESULTS


def test_layers_share_the_table_of_a_mask_without_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that reads an array is made in each call, because the array may have changed."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(caches, "_of_no_tensor", {})
    made: list[str] = []
    monkeypatch.setattr(block_tables, "states", lambda *_: made.append("states"))
    monkeypatch.setattr(block_tables, "table", lambda *_: (block_tables.Table(*map(torch.tensor, range(4))), None))
    plain, reading = (
        AttentionSpec(**SIZES, **fields_of(name, None, (2, 4, 300, 500))) for name in ("nothing", "documents")
    )
    assert not plain.aux and reading.aux
    arrays = {f"aux{number}": torch.zeros(entry.shape, dtype=torch.int32) for number, entry in enumerate(reading.aux)}
    for spec, inputs, count in ((plain, {}, 1), (reading, arrays, 3)):
        made.clear()
        calls = [masked.operands(spec, Inputs(*torch.zeros(3, 1), **inputs), "forward") for _ in range(3)]
        assert len(made) == count and len(calls[0]) == 4 + len(spec.aux)
        masked.operands(spec, Inputs(*torch.zeros(3, 1), **inputs), "backward")
        assert len(made) == count + 1


@pytest.mark.cuda
def test_more_blocks_than_shared_memory_holds(flash4_here: None) -> None:
    """2048 blocks of keys are examined at once; here are 2100."""
    tokens = 2100 * block_tables.BLOCK - 5
    key_ranges = np.zeros((1, 1, tokens, 1, 2), np.int32)
    key_ranges[0, 0, ::1000] = (3, 130)
    key_ranges[0, 0, -200:] = (0, 200)
    fields = {**SIZES, "batch": 1, "q_len": 200, "kv_len": tokens, "key_ranges_shape": key_ranges.shape}
    table, _ = table_of(AttentionSpec(**fields), key_ranges, None, True, "views")
    touched = np.pad(key_ranges[0, 0, :, 0, 1] > 0, (0, 5)).reshape(-1, block_tables.BLOCK).any(1)
    full = [tokens // block_tables.BLOCK]
    partial = [block for block in np.flatnonzero(touched).tolist() if block not in full]
    for block, expected in ((0, partial), (1, partial)):
        count, full_count = table.partial_count[0, 0, block], table.full_count[0, 0, block]
        assert table.full[0, 0, block, :full_count].tolist() == full
        assert table.partial[0, 0, block, :count].tolist() == expected
