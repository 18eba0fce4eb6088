"""Tests block tables: the Triton kernel, in its interpreter on the CPU, against the definition of visible pairs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton.runtime.interpreter")
import triton_interpreter
from hypothesis import given, settings
from hypothesis import strategies as st
from other_process import OtherProcess

from attn_core import AttentionSpec, masks
from attn_core.backends.shared import block_tables, constant_tensors
from attn_core.call.masks import visible
from attn_core.call.tensors import Inputs
from attn_core.cli.drawn_functions import fields_of

pytestmark = pytest.mark.rotates


@pytest.fixture(autouse=True, scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[OtherProcess | None]:
    """The process that runs these tests; None if this process does."""
    yield from triton_interpreter.process(__file__, tmp_path_factory, pytestconfig)


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


@settings(max_examples=25)
@given(calls())
def test_tables_and_ends(drawn: tuple[AttentionSpec, np.ndarray | None, np.ndarray | None]) -> None:
    spec, key_ranges, shown = drawn
    for of_queries in (True, False):
        table, ends = table_of(spec, key_ranges, shown, of_queries)
        check_ends(spec, key_ranges, ends)
        check_table(spec, key_ranges, shown, table, of_queries)
        if key_ranges is not None and shown is None:
            check_arrays(spec, key_ranges, table, ends, of_queries)


def check_arrays(spec: AttentionSpec, key_ranges: np.ndarray, table: Any, ends: Any, of_queries: bool) -> None:
    """Plain operations, which XLA runs, make the same table."""
    arrays, same_ends = block_tables.table_arrays(spec, key_ranges, of_queries, np)
    np.testing.assert_array_equal(same_ends, ends.numpy())
    for count, numbers in ((0, 1), (2, 3)):
        np.testing.assert_array_equal(arrays[count], table[count].numpy())
        for place in np.ndindex(*arrays[count].shape):
            first = slice(0, arrays[count][place])
            np.testing.assert_array_equal(arrays[numbers][place][first], table[numbers][place][first].numpy())
    assert all(array.dtype == np.int32 for array in (*arrays, same_ends))


def table_of(spec: AttentionSpec, key_ranges: Any, shown: Any, of_queries: bool) -> tuple[Any, Any]:
    tensors = [None if array is None else torch.from_numpy(array) for array in (key_ranges, shown)]
    inputs = Inputs(torch.zeros(1), torch.zeros(1), torch.zeros(1), key_ranges=tensors[0])
    return block_tables.table(spec, inputs, tensors[1], of_queries)


def seen(spec: AttentionSpec, key_ranges: Any) -> np.ndarray:
    """The pairs that ranges and band show, ``[batch, heads, q_len, kv_len]``."""
    fields = {name: getattr(spec, name) for name in (*SIZES, "causal", "window", "key_ranges_shape")}
    ranges = None if key_ranges is None else np.clip(key_ranges, 0, spec.q_len)
    return np.broadcast_to(visible(AttentionSpec(**fields), key_ranges=ranges), (2, 4, spec.q_len, spec.kv_len))


def check_ends(spec: AttentionSpec, key_ranges: Any, ends: Any) -> None:
    if ends is None:
        assert not block_tables.has_ends(spec)
        return
    rows = torch.arange(spec.q_len)[:, None]
    starts, stops = ends[..., ::2], ends[..., 1::2]  # [rows, heads, keys, ranges]
    inside = (rows >= starts[..., None, :, :].movedim(-1, 0)) & (rows < stops[..., None, :, :].movedim(-1, 0))
    actual = inside.any(0).repeat_interleave(4 // ends.shape[1], 1).expand(2, 4, -1, -1)
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


def test_full_blocks_of_a_shared_prefix() -> None:
    key_ranges = masks.shared_prefix(256, [128, 128])
    spec = AttentionSpec(**{**SIZES, "q_len": 512, "kv_len": 512, "key_ranges_shape": key_ranges.shape})
    table, _ = table_of(spec, key_ranges, None, True)
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

    tensor = constant_tensors.declare(torch.zeros(3))
    assert [constant_tensors.made_from(tensor, "a", make) for _ in range(3)] == [1, 1, 2]  # the third on a stream
    assert constant_tensors.made_from(tensor, "b", make) == 3
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert constant_tensors.made_from(tensor, "a", make) == 4
    other = torch.zeros(3)
    assert [constant_tensors.made_from(other, "a", make) for _ in range(2)] == [5, 6]
    address = tensor.data_ptr()
    del tensor
    assert address not in constant_tensors._results
