"""Tests masks of splash attention: read into causal and a window, key ranges or a mask, exactly, or refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash

import jax_frontend
from attn_core import SeqInfo
from attn_core.call import splash_masks
from attn_core.call.foreign_masks import REMEDIES
from attn_core.call.key_ranges import check_values, visible_in_ranges
from attn_core.call.masks import Band
from attn_core.call.splash_masks import CLASSES, MODULES, SplashCall, SplashMeaning, is_splash_mask, read
from attn_core.errors import ShapeError, SpecError
from jax_frontend import attention, attention_qkvpacked, explain

Q, K, HEADS = 7, 11, 4
SHAPE = (Q, K)
RANDOM = np.random.default_rng(3).random(SHAPE) < 0.5
STRIPES = np.arange(Q)[:, None] // 2 % 2 == np.zeros(K, int)
CAUSAL, LOCAL = splash.CausalMask(SHAPE), splash.LocalMask(SHAPE, (2, None), 0)

Case = tuple[Any, str]
"""A mask, and the options that it becomes: "ranges" and "mask" are arrays."""
CASES: dict[str, Case] = {
    "full": (splash.FullMask(SHAPE), ""),
    "causal": (CAUSAL, "causal, top_left"),
    "causal, bottom right": (splash.CausalMask(SHAPE, K - Q), "causal, bottom_right"),
    "causal, further right": (splash.CausalMask(SHAPE, 2), "window=(None, 2), top_left"),
    "causal, before the diagonal": (splash.CausalMask(SHAPE, -2), "ranges"),
    "causal, everything": (splash.CausalMask(SHAPE, K), ""),
    "causal, nothing": (splash.CausalMask(SHAPE, -K), "ranges"),
    "local": (splash.LocalMask(SHAPE, (2, 1), 0), "window=(2, 1), top_left"),
    "local, one side": (LOCAL, "window=(2, None), top_left"),
    "local, no side": (splash.LocalMask(SHAPE, (None, None), 3), ""),
    "local, causal": (splash.LocalMask(SHAPE, (3, 0), 0), "causal, window=(3, 0), top_left"),
    "local, moved": (splash.LocalMask(SHAPE, (1, 1), 4), "window=(1, 1), bottom_right"),
    "local, moved between": (splash.LocalMask(SHAPE, (0, 0), 2), "ranges"),
    "local, moved away": (splash.LocalMask(SHAPE, (1, 1), -40), "ranges"),
    "causal and local": (CAUSAL & LOCAL, "causal, window=(2, 0), top_left"),
    "causal and local, and full": (splash.FullMask(SHAPE) & (LOCAL & CAUSAL), "causal, window=(2, 0), top_left"),
    "nothing in common": (splash.CausalMask(SHAPE, -3) & LOCAL, "ranges"),
    "chunks": (splash.ChunkedCausalMask(SHAPE, 3), "ranges"),
    "chunks and local": (splash.ChunkedCausalMask(SHAPE, 3) & LOCAL, "ranges"),
    "causal or the first keys": (CAUSAL | splash.NumpyMask(np.arange(K) < 2 + np.zeros((Q, 1), int)), "ranges"),
    "a band as a table": (splash.NumpyMask(np.tril(np.ones(SHAPE, bool), 2)), "window=(None, 2), top_left"),
    "stripes": (splash.NumpyMask(STRIPES), "ranges"),
    "any table": (splash.NumpyMask(RANDOM), "mask"),
    "an empty table": (splash.NumpyMask(np.zeros(SHAPE, bool)), "ranges"),
    "heads": (splash.MultiHeadMask([CAUSAL, splash.CausalMask(SHAPE), CAUSAL, CAUSAL]), "causal, top_left"),
    "heads of tables": (splash.MultiHeadMask([splash.NumpyMask(RANDOM.copy()) for _ in range(HEADS)]), "mask"),
    "heads of unions": (splash.MultiHeadMask([CAUSAL | LOCAL for _ in range(HEADS)]), ""),
}


def call_of(**changes: Any) -> SplashCall:
    usual = SplashCall(False, "bottom_right", None, None, None, False, Q, K, HEADS)
    return usual._replace(**changes)


def table_of(mask: Any) -> np.ndarray:
    one = mask.masks[0] if isinstance(mask, splash.MultiHeadMask) else mask
    return np.broadcast_to(np.asarray(one[:, :]) if isinstance(one, splash.NumpyMask) else one[0:Q, 0:K], SHAPE)


def shown(meaning: SplashMeaning) -> np.ndarray:
    """The pairs that the options show, by our own definitions."""
    left, right = meaning.window or (None, None)
    edge = Band(left, 0 if meaning.causal else right, K - Q if meaning.alignment == "bottom_right" else 0)
    seen = np.broadcast_to(edge.contains(np.arange(Q)[:, None], np.arange(K)), SHAPE)
    if meaning.key_ranges is not None:
        check_values(meaning.key_ranges, Q)
        assert meaning.key_ranges.dtype == np.int32
        seen = seen & visible_in_ranges(meaning.key_ranges, Q, HEADS)[0, 0]
    return seen if meaning.mask is None else seen & meaning.mask[0, 0]


def words_of(meaning: SplashMeaning) -> str:
    window = "" if meaning.window is None else f"window={meaning.window}"
    moved = meaning.alignment if meaning.causal or window else ""
    arrays = ["ranges"] * (meaning.key_ranges is not None) + ["mask"] * (meaning.mask is not None)
    return ", ".join(filter(None, ["causal" if meaning.causal else "", window, moved, *arrays]))


@pytest.mark.parametrize("name", CASES)
def test_a_mask_is_read_exactly(name: str) -> None:
    mask, expected = CASES[name]
    meaning = read(mask, call_of())
    assert words_of(meaning) == expected
    assert (shown(meaning) == table_of(mask)).all()


@pytest.mark.parametrize("name", CASES)
def test_documents_and_slopes_keep_their_own_diagonal(name: str) -> None:
    """splash counts in the whole row. With documents, or where slopes count from the corner, key ranges say that."""
    mask, _ = CASES[name]
    for changes in ({"seq_info": object()}, {"slopes": True}, {"slopes": True, "alignment": "top_left"}):
        meaning = read(mask, call_of(**changes))
        assert meaning.alignment == changes.get("alignment", "bottom_right")
        assert (shown(meaning) == table_of(mask)).all()
        assert "seq_info" not in changes or (meaning.causal, meaning.window) == (False, None)


@pytest.mark.parametrize("module", MODULES)
def test_classes_are_known_by_their_full_names(module: str) -> None:
    kinds = {name: type(name, (), {"__module__": module}) for name in CLASSES}
    assert all(is_splash_mask(kind()) for kind in kinds.values()) and REMEDIES.keys() >= kinds.keys()
    assert not is_splash_mask(type("CausalMask", (), {"__module__": "a_user"})())
    assert not is_splash_mask(type("Mine", (splash.CausalMask,), {})(SHAPE)) and not is_splash_mask(None)
    assert {type(mask).__name__ for mask, _ in CASES.values()} == {*CLASSES}
    # The classes of tokamax are dataclasses with slots, and have the same attributes.
    causal = kinds["CausalMask"]()
    vars(causal).update(offset=0, shape=SHAPE, q_sequence=np.arange(Q))
    assert words_of(read(causal, call_of())) == "causal, top_left"


def turned(mask: Any) -> Any:
    mask.q_sequence = mask.q_sequence[::-1]
    return mask


REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "lengths": (
        CAUSAL,
        {"q_len": 8},
        ShapeError,
        r"mask: CausalMask: expected one of 8 queries and 11 keys, got \[7, 11\]",
    ),
    "symbols": (CAUSAL, {"q_len": SimpleNamespace()}, SpecError, "mask: CausalMask: expected lengths that are numbers"),
    "heads": (
        splash.MultiHeadMask([CAUSAL] * 3),
        {},
        ShapeError,
        "mask: MultiHeadMask: expected one mask for each of 4 query heads, got 3",
    ),
    "other heads": (
        splash.MultiHeadMask([CAUSAL, CAUSAL, splash.CausalMask(SHAPE, 1), CAUSAL]),
        {},
        SpecError,
        "mask: MultiHeadMask: expected the same mask for every head, got another one for head 2 .*; pass mask= of",
    ),
    "heads of a subclass": (
        splash.MultiHeadMask([type("Mine", (splash.CausalMask,), {})(SHAPE)] * HEADS),
        {},
        SpecError,
        "mask: MultiHeadMask: expected splash masks, got .*Mine",
    ),
    "a part of a subclass": (
        CAUSAL & type("Mine", (splash.FullMask,), {})(SHAPE),
        {},
        SpecError,
        "mask: LogicalAnd: expected masks of splash as parts, got .*Mine",
    ),
    "order": (turned(splash.CausalMask(SHAPE)), {}, SpecError, "mask: CausalMask: expected queries in their order"),
    "order of a part": (LOCAL & turned(splash.CausalMask(SHAPE)), {}, SpecError, "mask: LogicalAnd: .* pass mask_mod="),
    "causal": (CAUSAL, {"causal": True}, SpecError, "mask: CausalMask with causal=True: expected one of the two"),
    "window": (CAUSAL, {"window": 3}, SpecError, "mask: CausalMask with window=: expected one of the two"),
    "key ranges": (CAUSAL, {"key_ranges": 3}, SpecError, "mask: CausalMask with key_ranges=: expected one of the two"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(name: str) -> None:
    mask, changes, kind, words = REFUSED[name]
    with pytest.raises(kind, match=f"^{words}"):
        read(mask, call_of(**changes))


def test_a_long_table_is_refused_with_what_to_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splash_masks, "MOST_PAIRS", 76)
    with pytest.raises(
        SpecError, match="expected at most 76 pairs of a mask that is no band, got 7 x 11; pass key_ran"
    ):
        read(splash.NumpyMask(RANDOM), call_of())
    assert words_of(read(splash.ChunkedCausalMask(SHAPE, 3), call_of())) == "ranges"  # these need no table


def arrays() -> list[jax.Array]:
    random = np.random.default_rng(0)
    return [jnp.asarray(random.normal(size=(2, *shape)), "float32") for shape in ((Q, HEADS, 8), (K, 2, 8), (K, 2, 8))]


@pytest.mark.parametrize("name", ["causal", "local, moved", "chunks", "any table"])
def test_every_entry_point_reads_them(name: str) -> None:
    mask, expected = CASES[name]
    right = attention(*arrays(), mask=jnp.asarray(table_of(mask))[None, None], backend="jax_xla")
    np.testing.assert_allclose(attention(*arrays(), mask=mask, backend="jax_xla"), right, atol=2e-6)
    heads_first = [array.swapaxes(1, 2) for array in arrays()]
    out = jax.jit(lambda *qkv: attention(*qkv, mask=mask, layout="bhsd", backend="jax_xla"))(*heads_first)
    np.testing.assert_allclose(out.swapaxes(1, 2), right, atol=2e-6)
    spec = explain(*arrays(), mask=mask).spec
    assert (spec.mask_shape is not None, spec.key_ranges_shape is not None) == (
        expected == "mask",
        expected == "ranges",
    )
    assert spec.causal == ("causal" in expected)


def test_one_array_of_queries_keys_and_values() -> None:
    qkv = jnp.asarray(np.random.default_rng(1).normal(size=(2, 9, 3, HEADS, 8)), "float32")
    actual = attention_qkvpacked(qkv, mask=splash.CausalMask((9, 9)))
    assert (actual == attention_qkvpacked(qkv, causal=True, alignment="top_left")).all()
    with pytest.raises(ShapeError, match=r"^mask: CausalMask: expected one of 9 queries and 9 keys"):
        attention_qkvpacked(qkv, mask=CAUSAL)


def test_segments_of_splash_are_documents_beside_its_mask() -> None:
    """As splash does with a mask and SegmentIds: the mask counts in the row, whatever the documents are."""
    q, k, v = (array[:1] for array in arrays())
    info = SeqInfo.from_lengths([3, 4], [6, 5])
    actual = attention(q, k, v, mask=CAUSAL, seq_info=info, backend="jax_xla")
    same = np.repeat([0, 1], [3, 4])[:, None] == np.repeat([0, 1], [6, 5])
    right = attention(q, k, v, mask=jnp.asarray(same & table_of(CAUSAL))[None, None], backend="jax_xla")
    np.testing.assert_allclose(actual, right, atol=2e-6)


def test_torch_is_told_what_to_pass() -> None:
    torch = pytest.importorskip("torch")
    import torch_frontend

    q = torch.zeros(1, Q, HEADS, 8)
    with pytest.raises(
        TypeError, match=r"^mask: expected a torch.Tensor, got .*CausalMask; pass causal=True, alignment"
    ):
        torch_frontend.attention(q, q, q, mask=CAUSAL)
    assert jax_frontend.attention is attention
