"""Tests which masks are recognised as an option, with every option read back as the mask that it means."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attn_core import AttentionSpec, SeqInfo
from attn_core.call.mask_patterns import option_of
from attn_core.call.masks import visible
from attn_core.call.options import Options, check_options

Q, KV = 7, 11


def shown(text: str, queries: int, keys: int) -> np.ndarray:
    """The mask that an option, as code, means."""
    given: dict[str, Any] = eval(f"dict({text})", {"SeqInfo": SeqInfo})
    info = given.pop("seq_info", None)
    sizes: dict[str, Any] = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 8, "value_dim": 8, "dtype": "float32"}
    window = given.pop("window", None)
    options = check_options(
        Options(given.pop("causal", False), given.pop("alignment", "bottom_right"), window, *(None,) * 4, 0.0)
    )
    assert not given
    if info is not None:
        longest = {"documents": len(info.cu_seqlens_q) - 1, "max_len_q": info.max_len_q, "max_len_k": info.max_len_k}
        sizes |= longest
    spec = AttentionSpec(
        batch=1,
        q_len=queries,
        kv_len=keys,
        causal=options.causal,
        alignment=options.alignment,
        window=options.window,  # type: ignore[arg-type]
        **sizes,
    )
    offsets = (None, None) if info is None else (info.cu_seqlens_q, info.cu_seqlens_k)
    return np.broadcast_to(visible(spec, None, *offsets), (1, 1, queries, keys))


OPTIONS = [
    ("causal=True", Q, Q),
    ("causal=True", Q, KV),
    ('causal=True, alignment="top_left"', Q, KV),
    ("causal=True, window=3", Q, Q),
    ("causal=True, window=4", Q, KV),
    ('causal=True, alignment="top_left", window=3', Q, KV),
    ("window=(2, 1)", Q, Q),
    ("window=(None, 2)", Q, Q),
    ("window=(2, None)", Q, Q),
    ("window=(1, 2)", Q, KV),
    ("seq_info=SeqInfo.from_lengths([3, 4])", Q, Q),
    ("seq_info=SeqInfo.from_lengths([2, 4, 1]), causal=True", Q, Q),
]


@pytest.mark.parametrize(("text", "queries", "keys"), OPTIONS)
def test_a_mask_of_an_option_is_read_as_that_option(text: str, queries: int, keys: int) -> None:
    assert option_of(shown(text, queries, keys)) == text


@pytest.mark.parametrize("seed", range(60))
def test_an_answer_means_the_same_mask(seed: int) -> None:
    rng = np.random.default_rng(seed)
    queries, keys = rng.integers(2, 9, 2)
    distance = np.arange(keys) - np.arange(queries)[:, None]
    low, high = keys - queries - rng.integers(0, 6), keys - queries + rng.integers(0, 6)  # around the diagonal
    table = (distance >= low) & (distance <= high)
    text = option_of(table)
    if text is None:
        assert table.all() or not table.any()
    else:
        np.testing.assert_array_equal(shown(text, int(queries), int(keys))[0, 0], table)


def prefix() -> np.ndarray:
    table = np.tril(np.ones((Q, Q), bool))
    table[:, :3] = True
    return table


def per_head() -> np.ndarray:
    return np.stack([np.tril(np.ones((Q, Q), bool)), np.ones((Q, Q), bool)])[None]


def padded() -> np.ndarray:
    table = np.tril(np.ones((Q, Q), bool))
    table[:, :2] = False
    return table


OTHERS = {
    "all keys": np.ones((Q, Q), bool),
    "no key": np.zeros((Q, Q), bool),
    "a prefix": prefix(),
    "two kinds of heads": per_head(),
    "causal with padding": padded(),
    "random": np.random.default_rng(0).random((Q, KV)) > 0.5,
    "a block of other keys": np.kron(np.eye(2, k=1, dtype=bool), np.ones((3, 3), bool)),
}


@pytest.mark.parametrize("table", OTHERS.values(), ids=OTHERS)
def test_other_masks_are_not_read_as_an_option(table: np.ndarray) -> None:
    assert option_of(table) is None


@pytest.mark.parametrize(("text", "queries", "keys"), OPTIONS)
def test_one_flipped_key_is_another_mask(text: str, queries: int, keys: int) -> None:
    table = shown(text, queries, keys)[0, 0].copy()
    table[queries // 2, 0] ^= True
    answer = option_of(table)
    assert answer is None or np.array_equal(shown(answer, queries, keys)[0, 0], table)
