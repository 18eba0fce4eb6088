"""Tests each constructor of key ranges against its definition, written here as a loop over pairs or as other arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_core import ShapeError, SpecError, masks
from attn_core.call.key_ranges import check_shape, check_values, visible_in_ranges


def assert_is(ranges: np.ndarray, q_len: int, *rows: Callable[[int, int], bool]) -> None:
    """Checks that the ranges are valid and show, in each row of the batch, exactly the pairs (q, k) of its rule."""
    kv_len = ranges.shape[2]
    assert ranges.dtype == np.int32
    assert ranges.flags.c_contiguous
    check_shape(ranges.shape, len(rows), 1, kv_len)
    check_values(ranges, q_len)
    seen = visible_in_ranges(ranges, q_len, 1)
    for row, sees in zip(np.broadcast_to(seen, (len(rows), *seen.shape[1:])), rows, strict=True):
        assert row[0].tolist() == [[bool(sees(q, k)) for k in range(kv_len)] for q in range(q_len)]


def test_prefix_lm():
    for lengths in (0, 3, 7, [2, 0, 7]):
        rules = [lambda q, k, n=n: k < n or k <= q for n in np.atleast_1d(lengths).tolist()]
        ranges = masks.prefix_lm(lengths, 7)
        assert ranges.shape == (len(rules), 1, 7, 1, 2)
        assert_is(ranges, 7, *rules)


@given(st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 3), max_size=3)), max_size=3), st.booleans())
@settings(max_examples=40, deadline=None)
def test_shared_prefix(groups: list[tuple[int, list[int]]], one: bool):
    group, completion = [], []  # of each token; -1 is the prompt
    for number, (prompt, lengths) in enumerate(groups):
        group += [number] * (prompt + sum(lengths))
        completion += [-1] * prompt + [which for which, length in enumerate(lengths) for _ in range(length)]

    def sees(q: int, k: int) -> bool:
        return k <= q and group[k] == group[q] and completion[k] in (-1, completion[q])

    if one and len(groups) == 1:
        ranges = masks.shared_prefix(*groups[0])
    else:
        ranges = masks.shared_prefix([prompt for prompt, _ in groups], [lengths for _, lengths in groups])
    assert_is(ranges, len(group), sees)


def ancestors(parents: list[int], token: int) -> set[int]:
    """A token and all above it."""
    return {token} | (ancestors(parents, parents[token]) if parents[token] >= 0 else set())


@st.composite
def forests(draw: Any) -> list[int]:
    """Parents in depth-first order."""
    parents: list[int] = []
    path: list[int] = []
    for token in range(draw(st.integers(0, 9))):
        path = path[: draw(st.integers(0, len(path)))]
        parents.append(path[-1] if path else -1)
        path.append(token)
    return parents


@given(forests())
@settings(max_examples=60, deadline=None)
def test_tree_of_parents(parents: list[int]):
    assert_is(masks.tree(parents), len(parents), lambda q, k: k in ancestors(parents, q))


@given(forests())
@settings(max_examples=60, deadline=None)
def test_tree_of_entries_and_exits(parents: list[int]):
    """Entries count in steps of 3, so that they are not places in the row."""
    tin = [3 * token + 1 for token in range(len(parents))]
    below = [[q for q in range(len(parents)) if k in ancestors(parents, q)] for k in range(len(parents))]
    tout = [3 * max(tokens) + 2 for tokens in below]
    ranges = masks.tree(tin=tin, tout=tout)
    assert_is(ranges, len(parents), lambda q, k: tin[k] <= tin[q] < tout[k])
    assert np.array_equal(ranges, masks.tree(parents))


def test_tree_of_nodes_with_several_tokens():
    tin, tout = [0, 0, 1, 1, 1, 2], [9, 9, 2, 2, 2, 9]
    assert_is(masks.tree(tin=tin, tout=tout), 6, lambda q, k: tin[k] <= tin[q] < tout[k])


def test_tree_of_a_batch():
    rows = [[-1, 0, 0, 2], [-1, 0, 1, -1]]
    assert_is(masks.tree(rows), 4, *(lambda q, k, row=row: k in ancestors(row, q) for row in rows))


@pytest.mark.parametrize("parents", [[0], [-1, 2, 0], [-1, 0, -1, 0], [-1, -2], [-1, 1]])
def test_tree_refuses_other_orders(parents: list[int]):
    with pytest.raises(SpecError, match=r"parents\[\d\]=.*depth-first"):
        masks.tree(parents)


@pytest.mark.parametrize("flags", [True, False, [True, False, True, False]])
def test_blocks(flags: Any):
    starts, tokens = [0, 2, 3, 7], 9
    block = [0, 0, 1, 2, 2, 2, 2, 3, 3]
    whole = [flags] * 4 if isinstance(flags, bool) else flags
    assert_is(
        masks.blocks(starts, flags, tokens), tokens, lambda q, k: k <= q or (block[q] == block[k] and whole[block[q]])
    )


@given(st.integers(0, 11), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_block_diffusion(tokens: int, block: int):
    def sees(q: int, k: int) -> bool:
        of_q, of_k = q % tokens // block, k % tokens // block
        if k < tokens:
            return q < tokens and of_q == of_k
        return of_q > of_k if q < tokens else of_q >= of_k

    assert_is(masks.block_diffusion(tokens, block), 2 * tokens, sees)


SIDES = st.none() | st.integers(0, 5)


@given(st.integers(0, 11), st.integers(0, 4), SIDES, SIDES, st.booleans())
@settings(max_examples=80, deadline=None)
def test_global_and_window(tokens: int, first: int, left: int | None, right: int | None, causal: bool):
    first = min(first, tokens)

    def sees(q: int, k: int) -> bool:
        near = (left is None or q - k <= left) and (right is None or k - q <= right)
        return (q < first or k < first or near) and (k <= q or not causal)

    assert_is(masks.global_and_window(first, (left, right), tokens, causal=causal), tokens, sees)


def test_a_window_of_an_int_counts_keys():
    usual = masks.global_and_window(2, 3, 9, causal=True)
    assert np.array_equal(usual, masks.global_and_window(2, (2, 0), 9, causal=True))


@pytest.mark.parametrize("keys", [None, [4, 0, 1, 2]])
def test_documents(keys: list[int] | None):
    queries = [3, 1, 0, 2]
    of_query, of_key = np.repeat(range(4), queries), np.repeat(range(4), keys or queries)
    assert_is(masks.documents(queries, keys), 6, lambda q, k: of_query[q] == of_key[k])


def hidden_by_flashmask(indices: np.ndarray, causal: bool) -> np.ndarray:
    """The pairs that FlashMask hides, by its own reference: bool ``[batch, heads, q, k]``."""
    batch, heads, tokens, last = indices.shape
    hidden = np.zeros((batch, heads, tokens, tokens), bool)
    for b, h, k in np.ndindex(batch, heads, tokens):
        down = indices[b, h, k]
        if causal:
            hidden[b, h, down[0] : (down[1] if last == 2 else None), k] = True
            hidden[b, h, :k, k] = True
        elif last == 2:
            hidden[b, h, down[0] :, k] = True
            hidden[b, h, : down[1], k] = True
        else:
            hidden[b, h, down[0] : down[1], k] = True
            hidden[b, h, down[2] : down[3], k] = True
    return hidden


@given(st.sampled_from([(True, 1), (True, 2), (False, 2), (False, 4)]), st.integers(0, 2**16))
@settings(max_examples=150, deadline=None)
def test_from_flashmask(kind: tuple[bool, int], seed: int):
    (causal, last), tokens = kind, 6
    indices = np.random.default_rng(seed).integers(0, tokens + 1, (2, 3, tokens, last), np.int32)
    shown = ~hidden_by_flashmask(indices, causal)
    # The number of runs of queries that see a key: a run begins where a query sees it and the one before does not.
    begins = shown & ~np.pad(shown, ((0, 0), (0, 0), (1, 0), (0, 0)))[:, :, :-1]
    if (begins.sum(2) > 2).any():
        with pytest.raises(SpecError, match="at most 2 ranges of queries that see a key, got 3 for key"):
            masks.from_flashmask(indices, causal)
        return
    ranges = masks.from_flashmask(indices, causal)
    check_shape(ranges.shape, 2, 3, tokens)
    check_values(ranges, tokens)
    assert np.array_equal(visible_in_ranges(ranges, tokens, 3), shown)


BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "prefix beyond the row": (lambda: masks.prefix_lm([3, 8], 7), ShapeError, "lengths: .* tokens=7, got 8"),
    "negative prefix": (lambda: masks.prefix_lm([3, -1], 7), ShapeError, r"lengths\[1\]=-1"),
    "fractions": (lambda: masks.prefix_lm([0.5], 7), SpecError, "lengths=.*whole numbers"),
    "two axes": (lambda: masks.prefix_lm([[1]], 7), ShapeError, "lengths: expected 1 axes"),
    "no length": (lambda: masks.prefix_lm(1, "7"), ShapeError, "tokens='7'"),
    "groups": (lambda: masks.shared_prefix([1, 2], [[1]]), ShapeError, "completions: .* each of 2 prompts, got 1"),
    "no tree": (lambda: masks.tree(), SpecError, "tree: expected parents, or tin and tout"),
    "half a tree": (lambda: masks.tree(tin=[0]), SpecError, "tree: expected"),
    "two trees": (lambda: masks.tree([-1], tin=[0], tout=[1]), SpecError, "tree: expected"),
    "tin descends": (lambda: masks.tree(tin=[0, 2, 1], tout=[3, 3, 3]), SpecError, "tin: .* got 2 then 1 at token 2"),
    "tout": (lambda: masks.tree(tin=[0, 2], tout=[3]), ShapeError, "tout: expected the shape of tin"),
    "starts": (lambda: masks.blocks([1, 2], True, 5), SpecError, "starts=.*from 0"),
    "starts beyond": (lambda: masks.blocks([0, 5], True, 5), SpecError, "starts=.*below tokens=5"),
    "flags": (lambda: masks.blocks([0, 2], [1, 0], 5), SpecError, "bidirectional=.*bool"),
    "number of flags": (lambda: masks.blocks([0, 2], [True], 5), SpecError, "bidirectional=.*each of 2"),
    "global": (lambda: masks.global_and_window(6, (1, 1), 5), ShapeError, "global_tokens=6: expected at most 5"),
    "window": (lambda: masks.global_and_window(1, (-1, 1), 5), SpecError, "window="),
    "window of an int": (lambda: masks.global_and_window(1, 3, 5), SpecError, "causal=True with an int"),
    "documents": (lambda: masks.documents([1, 2], [3]), ShapeError, "key_lengths: .* as lengths"),
    "block": (lambda: masks.block_diffusion(4, 0), ShapeError, "block=0"),
    "flashmask": (lambda: masks.from_flashmask(np.zeros((1, 1, 4, 4), int), True), ShapeError, "indices: .*1 or 2"),
    **{
        f"flashmask {end}": (
            lambda end=end: masks.from_flashmask(np.array([[[[3, 0], [3, end], [3, 0]]]], np.int32), False),
            SpecError,
            rf"indices\[0, 0, 1, 1\]={end}: expected a query from 0 to 3, the number of tokens",
        )
        for end in (-1, 4, 2**31 - 1)
    },
    "queries beyond int32": (
        lambda: masks.documents([2**31 - 1, 1], [1, 1]),
        ShapeError,
        "lengths: expected at most 2147483647 queries in a row, got 2147483648",
    ),
    "flashmask causal": (lambda: masks.from_flashmask(np.zeros((1, 1, 4, 2), int), 1), SpecError, "causal=1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name: str):
    call, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        call()
