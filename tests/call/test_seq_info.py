"""Tests SeqInfo: the arguments that it accepts, those that it refuses by name, and the offsets that it builds."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_core import DTypeError, SeqInfo, ShapeError, SpecError
from attn_core.call.seq_info import check_cu_seqlens


def offsets(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_from_lengths_of_queries_serves_keys_too() -> None:
    info = SeqInfo.from_lengths([3, 0, 2])
    assert info.cu_seqlens_q.tolist() == [0, 3, 3, 5]
    assert info.cu_seqlens_k is info.cu_seqlens_q
    assert (info.max_len_q, info.max_len_k, info.cu_seqlens_q.dtype) == (3, 3, np.int32)


def test_from_lengths_of_queries_and_keys() -> None:
    info = SeqInfo.from_lengths([3, 2], [0, 7])
    assert (info.cu_seqlens_q.tolist(), info.cu_seqlens_k.tolist()) == ([0, 3, 5], [0, 0, 7])
    assert (info.max_len_q, info.max_len_k) == (3, 7)


def test_from_lengths_builds_arrays_of_the_requested_kind() -> None:
    info = SeqInfo.from_lengths([3, 2], array=lambda array: array.tolist())
    assert (info.cu_seqlens_q, info.max_len_k) == ([0, 3, 5], 3)
    assert info.cu_seqlens_k is info.cu_seqlens_q
    two = SeqInfo.from_lengths([3, 2], [1, 1], array=tuple)
    assert (two.cu_seqlens_q, two.cu_seqlens_k) == ((0, 3, 5), (0, 1, 2))


def test_from_lengths_takes_any_iterable_of_host_ints() -> None:
    assert SeqInfo.from_lengths(iter((np.int64(3), 2))).cu_seqlens_q.tolist() == [0, 3, 5]
    assert SeqInfo.from_lengths(np.array([3, 2])).max_len_q == 3
    assert SeqInfo.from_lengths([0, 0]).max_len_q == 0


@pytest.mark.parametrize("array", (None, tuple))
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 7)), min_size=1, max_size=6), more=st.integers(0, 3)
)
def test_from_lengths_with_limits_has_the_same_static_fields_for_every_batch(
    array: Any, lengths: Any, more: int
) -> None:
    """The missing documents are at the end and have no tokens."""
    queries, keys = ([pair[side] for pair in lengths] for side in (0, 1))
    most = len(lengths) + more
    info = SeqInfo.from_lengths(queries, keys, max_len=(9, 7), max_documents=most, array=array)
    assert (info.max_len_q, info.max_len_k) == (9, 7)
    for side, own in (("q", queries), ("k", keys)):
        actual = getattr(info, f"cu_seqlens_{side}")
        assert len(actual) == most + 1 and np.diff(actual).tolist() == own + [0] * more
        assert array is tuple or actual.dtype == np.int32
    alone = SeqInfo.from_lengths(queries, max_len=9, max_documents=most, array=array)
    assert alone.cu_seqlens_k is alone.cu_seqlens_q and (alone.max_len_q, alone.max_len_k) == (9, 9)
    assert len(SeqInfo.from_lengths(queries, max_documents=most).cu_seqlens_q) == most + 1
    assert SeqInfo.from_lengths(queries, max_len=np.int64(9)).max_len_q == 9


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"max_len": 2}, "^max_len=2: expected at least the longest of lengths_q, 3 tokens"),
        ({"max_len": (3, 4)}, r"^max_len=\(3, 4\): expected at least the longest of lengths_k, 5 tokens"),
        ({"max_len": (3, 5, 6)}, "^max_len=.*: expected a host int, or a pair"),
        ({"max_len": 5.0}, "^max_len=5.0: expected a host int"),
        ({"max_len": True}, "^max_len=True: expected a host int"),
        ({"max_documents": 1}, "^max_documents=1: expected a host int, at least the 2 documents"),
        ({"max_documents": 2.0}, "^max_documents=2.0: expected a host int"),
        ({"max_documents": np.zeros(1, int)}, "^max_documents=.*: expected a host int"),
    ],
    ids=str,
)
def test_from_lengths_refuses_lengths_beyond_the_limits(limits: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        SeqInfo.from_lengths([3, 2], [5, 1], array=tuple, **limits)


@pytest.mark.parametrize(
    ("lengths", "error", "says"),
    [
        (([],), ShapeError, "^lengths_q: expected at least one document, got none"),
        (([3], []), ShapeError, "^lengths_k: expected at least one document"),
        (([3, -1],), SpecError, "^lengths_q: .*non-negative ints, got -1"),
        (([3, 2.0],), SpecError, "^lengths_q: .*got 2.0"),
        (([True],), SpecError, "^lengths_q: .*got True"),
        ((["3"],), SpecError, "^lengths_q: .*got '3'"),
        (([3, 2], [5]), ShapeError, "^lengths_k: expected one length for each of the 2 query documents, got 1"),
        (([2**31 - 1, 1],), SpecError, "^lengths_q: 2147483648 tokens in all, more than int32"),
    ],
)
def test_from_lengths_refuses(lengths: tuple[Any, ...], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        SeqInfo.from_lengths(*lengths)
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("cu_seqlens", "error", "says"),
    [
        (np.array([0, 5], np.int16), DTypeError, "^seq_info.cu_seqlens_q: expected dtype int32, got int16; .*astype"),
        (np.array([0, 2**32 + 5]), SpecError, "^seq_info.cu_seqlens_q: expected offsets of at most 2147483647, .*"),
        (np.array([0.0, 5.0]), DTypeError, "got float64"),
        (offsets(1, 5), SpecError, "^seq_info.cu_seqlens_q: expected to start at 0, got 1; prepend"),
        (offsets(-1, 5), SpecError, "expected to start at 0, got -1"),
        (offsets(0, 5, 4), SpecError, "got 5 then 4 at position 2; pass cumulative lengths"),
        (offsets(0), ShapeError, r"at least one document, got \[1\]"),
        (offsets(), ShapeError, r"at least one document, got \[0\]"),
        (offsets(0, 5)[None], ShapeError, r"expected shape \[documents \+ 1\] .* got \[1, 2\]"),
        (offsets(0, 6), SpecError, "^seq_info.max_len_q=5: expected at least the longest document, 6 tokens"),
    ],
)
def test_wrong_host_offsets_are_refused_at_once(cu_seqlens: np.ndarray, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        SeqInfo(cu_seqlens, offsets(0, 5), 5, 5)
    assert type(caught.value) is error
    with pytest.raises(error, match=re.sub("_q", "_k", says)):
        SeqInfo(offsets(0, 5), cu_seqlens, 5, 5)


@pytest.mark.parametrize("value", [5.0, True, None, "5", np.array(5), np.array([5]), np.float32(5), 1j])
def test_longest_lengths_are_host_ints(value: Any) -> None:
    with pytest.raises(SpecError, match=r"^seq_info.max_len_q=.*: expected a host int .*synchronisation"):
        SeqInfo(offsets(0, 5), offsets(0, 5), value, 5)
    with pytest.raises(SpecError, match=r"^seq_info.max_len_k=.*: expected a host int"):
        SeqInfo(offsets(0, 5), offsets(0, 5), 5, value)


def test_numpy_integers_become_ints() -> None:
    info = SeqInfo(offsets(0, 5), offsets(0, 5), np.int64(7), np.int32(5))
    assert [type(info.max_len_q), type(info.max_len_k)] == [int, int]
    assert info.max_len_q == 7


def test_a_negative_longest_length_is_refused_for_every_kind_of_offsets() -> None:
    with pytest.raises(SpecError, match=r"^seq_info.max_len_k=-1: expected the longest document in tokens, 0 or more"):
        SeqInfo(object(), object(), 0, -1)


def test_a_bound_may_be_larger_than_the_longest_document() -> None:
    assert SeqInfo(offsets(0, 3, 5), offsets(0, 3, 5), 128, 128).max_len_q == 128


def test_device_arrays_are_stored_unchanged() -> None:
    held = object()
    info = SeqInfo(held, held, 5, 5)
    assert info.cu_seqlens_q is held


def test_coerce_accepts_every_form() -> None:
    info = SeqInfo.from_lengths([3, 2])
    assert SeqInfo.coerce(None) is None
    assert SeqInfo.coerce(info) is info
    lengths, cu_seqlens = offsets(3, 2), offsets(0, 3, 5)
    for sequence in ((lengths, cu_seqlens, 3), [lengths, cu_seqlens, 3]):
        made = SeqInfo.coerce(sequence)
        assert made is not None
        assert made.cu_seqlens_q is made.cu_seqlens_k and made.cu_seqlens_q.tolist() == [0, 3, 5]
        assert (made.max_len_q, made.max_len_k) == (3, 3)


@pytest.mark.parametrize("value", [(1.0, 2), ["3"], [], "3,2", {"lengths": [3]}, 5, offsets(0, 3, 5)])
def test_coerce_refuses_other_values(value: Any) -> None:
    says = f"^seq_info: expected a SeqInfo or the triple .* got {type(value).__name__}; build one"
    with pytest.raises(SpecError, match=says):
        SeqInfo.coerce(value)


def test_offsets_are_converted_once_for_each_device() -> None:
    info, calls = SeqInfo.from_lengths([3, 2]), []

    def convert(info: SeqInfo) -> list[int]:
        calls.append(1)
        return info.cu_seqlens_q.tolist()

    first = info.converted("here", convert)
    assert info.converted("here", convert) is first
    assert first == [0, 3, 5] and len(calls) == 1
    info.converted("there", convert)
    assert len(calls) == 2


def test_offsets_end_at_the_tokens_or_before() -> None:
    for tokens in (5, 6):
        check_cu_seqlens(offsets(0, 3, 5), 3, side="q", tokens=tokens)
    says = r"^seq_info.cu_seqlens_k: expected to end at the token count 4 or before it, got 5; .*padding"
    with pytest.raises(SpecError, match=says):
        check_cu_seqlens(offsets(0, 3, 5), 3, side="k", tokens=4)


def test_differences_beyond_int32_are_detected() -> None:
    """The difference of two int32 offsets may not fit int32: -2^31 after 2^31 - 1 would look like growth."""
    with pytest.raises(SpecError, match="non-decreasing"):
        check_cu_seqlens(offsets(0, 2**31 - 1, -(2**31)), 2**31 - 1, side="q")


@given(st.lists(st.integers(0, 99), min_size=1, max_size=9))
def test_offsets_are_running_sums(lengths: list[int]) -> None:
    info = SeqInfo.from_lengths(lengths)
    assert np.diff(info.cu_seqlens_q).tolist() == lengths
    assert info.cu_seqlens_q[-1] == sum(lengths)
    assert info.max_len_q == max(lengths)


@given(st.lists(st.integers(-3, 99), min_size=1, max_size=6), st.integers(0, 99))
def test_offsets_are_accepted_if_and_only_if_they_describe_documents(values: list[int], longest: int) -> None:
    steps = [later - earlier for earlier, later in itertools.pairwise(values)]
    right = len(values) > 1 and values[0] == 0 and min(steps) >= 0 and max(steps) <= longest
    if right:
        SeqInfo(offsets(*values), offsets(*values), longest, longest)
    else:
        with pytest.raises(SpecError):
            SeqInfo(offsets(*values), offsets(*values), longest, longest)


def test_a_triple_that_contradicts_itself_is_refused():
    offsets = np.array([0, 3, 5], np.int32)
    assert SeqInfo.coerce(([3, 2], offsets, 3)).max_len_q == 3
    with pytest.raises(
        SpecError, match=r"^seq_info: expected seq_lens \[3, 2\], the steps of cu_seqlens, got \[1, 4\]"
    ):
        SeqInfo.coerce(([1, 4], offsets, 4))


def test_int64_offsets_of_numpy_become_int32_and_stay_one() -> None:
    """numpy's ``cumsum`` gives int64. A traced or a torch array keeps its dtype, and is refused by the call."""
    wide = np.cumsum([0, 2, 3])
    both = SeqInfo(wide, wide, 3, 3)
    assert wide.dtype == np.int64 and both.cu_seqlens_q.dtype == np.int32
    assert both.cu_seqlens_q is both.cu_seqlens_k
    np.testing.assert_array_equal(both.cu_seqlens_q, [0, 2, 5])
    other = SeqInfo(offsets(0, 2, 5), wide, 3, 3)
    assert other.cu_seqlens_k.dtype == np.int32 and other.cu_seqlens_k.tolist() == [0, 2, 5]
