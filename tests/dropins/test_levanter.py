"""Tests examples/hosts/levanter_attention.py against float64: named arrays in any order, masks, refusals by name.

Levanter is not installed here. Named arrays are haliax's if it is installed, and else a stand-in with the same fields.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
import jax
import jax.numpy as jnp
from reference_calls import attended

from attn_core.errors import ShapeError, SpecError
from examples.hosts.levanter_attention import dot_product_attention, dot_product_attention_with_sink


@dataclass(frozen=True)
class Axis:
    name: str
    size: int


@dataclass(frozen=True)
class Named:
    array: Any
    axes: Any


with suppress(ImportError):  # haliax 1.3 imports a name that jax 0.10 does not have
    haliax = import_module("haliax")
    Axis, Named = haliax.Axis, haliax.NamedArray  # type: ignore[misc]

SIZES = {"batch": 2, "position": 6, "key_position": 9, "kv_head": 2, "group": 3, "head_size": 8, "value_size": 5}
CALL = ("position", "key_position", "head_size")


def named(names, seed=0, array=None):
    axes = tuple(Axis(name, SIZES[name]) for name in names.split())
    shape = [axis.size for axis in axes]
    drawn = np.random.default_rng(seed).normal(size=shape).astype(np.float32) if array is None else array
    return Named(jnp.asarray(drawn).reshape(shape), axes)


def rows(
    query="batch kv_head group position head_size",
    key="batch kv_head key_position head_size",
    value="batch kv_head key_position value_size",
):
    return tuple(named(names, seed) for seed, names in enumerate((query, key, value)))


def mask_of(**fields):
    names = ("causal_offset", "explicit_mask", "segment_ids", "sliding_window")
    return SimpleNamespace(**{"is_causal": False, **dict.fromkeys(names), **fields})


def ordered(array, names):
    """The array as float64 with these axes, in this order; size 1 for those that it lacks."""
    own = [axis.name for axis in array.axes]
    present = [name for name in names.split() if name in own]
    moved = np.transpose(np.float64(array.array), [own.index(name) for name in present])
    return moved.reshape([SIZES[name] if name in own else 1 for name in names.split()])


def reference(query, key, value, seen=True, bias=None, cap=None, scale=None, sink=None):
    """Returns ``[batch, kv_head, group, position, value_size]``."""
    rows = (
        ordered(query, "batch position kv_head group head_size").reshape(2, -1, 6, 8),
        ordered(key, "batch key_position kv_head head_size"),
        ordered(value, "batch key_position kv_head value_size"),
    )
    table = (2, 2, 3, *(len(array[0]) for array in rows[:2]))  # [batch, kv_head, group, position, key_position]
    seen = np.broadcast_to(seen, table).reshape(2, 6, *table[3:])
    if bias is not None:
        bias = np.broadcast_to(ordered(bias, "batch kv_head group position key_position"), table).reshape(seen.shape)
    sinks = None if sink is None else ordered(sink, "kv_head group").reshape(-1)
    out = attended(*rows, mask=seen, bias=bias, sinks=sinks, softcap=cap, scale=scale)
    return np.moveaxis(out.reshape(*out.shape[:2], 2, 3, -1), 1, 3)


def check(out, expected, order):
    assert [axis.name for axis in out.axes] == order.split()
    np.testing.assert_allclose(ordered(out, "batch kv_head group position value_size"), expected, rtol=1e-4, atol=1e-5)


AT, J = np.arange(6)[:, None], np.arange(9)
IDS = (np.array([[1, 1, 2, 2, 0, 0], [5, 3, 3, 5, 5, 5]]), np.array([[1, 2, 2, 1, 1, 0, 0, 7, 7], [3] * 4 + [5] * 5]))
SAME = IDS[0][:, None, None, :, None] == IDS[1][:, None, None, None, :]
TABLE = np.random.default_rng(5).random((6, 9)) < 0.5
SEGMENTS = (named("batch position", array=IDS[0]), named("batch key_position", array=IDS[1]))
OFFSETS = named("batch", array=np.array([3, -1]))
SHIFTED = AT + np.array([3, -1])[:, None, None, None, None] >= J
MASKS = {
    "none": (None, True),
    "causal": (mask_of(is_causal=True), AT >= J),
    "window": (mask_of(is_causal=True, sliding_window=3), (AT >= J) & (AT - J < 3)),
    "window without causal": (mask_of(sliding_window=3), (AT >= J) & (AT - J < 3)),
    "segments": (mask_of(is_causal=True, segment_ids=SEGMENTS), SAME & (AT >= J)),
    "explicit": (mask_of(explicit_mask=named("key_position position", array=TABLE.T)), TABLE),
    "named array": (named("position key_position", array=TABLE), TABLE),
    "offset": (mask_of(is_causal=True, causal_offset=OFFSETS), SHIFTED),
    "offset of all": (mask_of(is_causal=True, causal_offset=Named(jnp.asarray(3), ())), AT + 3 >= J),
    "all": (
        mask_of(is_causal=True, causal_offset=OFFSETS, segment_ids=SEGMENTS, sliding_window=4,
                explicit_mask=named("position key_position", array=TABLE)),
        SHIFTED & SAME & (AT >= J) & (AT - J < 4) & TABLE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    mask, seen = MASKS[name]
    out = dot_product_attention(*CALL, *rows(), mask)
    check(out, reference(*rows(), seen), "batch kv_head group position value_size")


def test_axes_in_another_order():
    arrays = rows(
        "head_size position group batch kv_head",
        "key_position batch head_size kv_head",
        "value_size batch kv_head key_position",
    )
    out = dot_product_attention(*CALL, *arrays, MASKS["segments"][0])
    check(out, reference(*arrays, MASKS["segments"][1]), "value_size position group batch kv_head")


def test_segments_on_the_axis_of_queries():
    """Levanter gives the ids of keys the name of the axis of queries, too."""
    SIZES["key_position"] = 6
    try:
        ids = named("batch position", array=IDS[0])
        out = dot_product_attention(*CALL, *rows(), mask_of(segment_ids=(ids, ids)))
        check(out, reference(*rows(), IDS[0][:, None, None, :, None] == IDS[0][:, None, None, None, :]),
              "batch kv_head group position value_size")  # fmt: skip
    finally:
        SIZES["key_position"] = 9


def test_scores_and_gradients():
    bias = named("kv_head group position key_position", 7)
    order = "batch kv_head group position value_size"
    check(dot_product_attention(*CALL, *rows(), bias=bias), reference(*rows(), bias=bias), order)
    options = {"logits_soft_cap": 0.8, "scaling_factor": 0.5, "attention_dtype": jnp.float32, "flash_block_size": 128}
    check(dot_product_attention(*CALL, *rows(), **options), reference(*rows(), cap=0.8, scale=0.5), order)
    for attn_backend, use_flash in ((SimpleNamespace(name="VANILLA"), None), (None, False), ("DEFAULT", True)):
        out = dot_product_attention(*CALL, *rows(), attn_backend=attn_backend, use_flash=use_flash)
        check(out, reference(*rows()), order)
    query, key, value = rows()
    gradient = jax.grad(lambda array: jnp.sum(dot_product_attention(*CALL, query, key, Named(array, value.axes)).array))
    np.testing.assert_allclose(jnp.sum(gradient(value.array)), 2 * 2 * 3 * 6 * 5, rtol=1e-4)


@pytest.mark.parametrize("cap", [None, 0.8])
def test_sinks(cap):
    sink = named("group kv_head", 9)
    out = dot_product_attention_with_sink(*CALL, *rows(), sink, MASKS["window"][0], logits_soft_cap=cap)
    capped = sink if cap is None else Named(cap * jnp.tanh(sink.array / cap), sink.axes)
    check(out, reference(*rows(), MASKS["window"][1], cap=cap, sink=capped), "batch kv_head group position value_size")
    same = dot_product_attention(*CALL, *rows(), MASKS["window"][0], logits_soft_cap=cap, attn_sink=sink)
    np.testing.assert_array_equal(same.array, out.array)


def test_dropout_in_training_only():
    plain = dot_product_attention(*CALL, *rows(), dropout=0.5).array
    dropped = dot_product_attention(*CALL, *rows(), dropout=0.5, inference=False, prng=jax.random.key(0)).array
    np.testing.assert_allclose(plain, dot_product_attention(*CALL, *rows()).array)
    assert not np.allclose(plain, dropped)


REFUSED = {
    "attn_backend='SPLASH'": {"attn_backend": SimpleNamespace(name="SPLASH")},
    "attention_dtype=bfloat16": {"attention_dtype": jnp.bfloat16},
    "bias: expected None with logits_soft_cap": {"bias": named("position key_position"), "logits_soft_cap": 1.0},
    "bias: expected no axis value_size": {"bias": named("position value_size")},
    "prng=None": {"dropout": 0.1, "inference": False},
    "mask.sliding_window=0": {"mask": mask_of(sliding_window=0)},
    "mask.prefix: expected None": {"mask": mask_of(prefix=3)},
    "precision=": {"precision": "TF32_TF32_F32"},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_not_honoured_is_refused_by_name(words):
    with pytest.raises((SpecError, ShapeError)) as raised:
        dot_product_attention(*CALL, *rows(), **REFUSED[words])
    assert words in str(raised.value)


def test_axes_that_do_not_fit_are_refused():
    q, k, v = rows()
    with pytest.raises(ShapeError, match="key: expected its axis group in query and in value"):
        dot_product_attention(*CALL, q, named("batch kv_head group key_position head_size"), v)
    with pytest.raises(ShapeError, match="value: expected the axes key_position"):
        dot_product_attention(*CALL, q, k, q)
    with pytest.raises(SpecError, match="KPos=position"):
        dot_product_attention("position", "position", "head_size", q, k, v)
    with pytest.raises(SpecError, match="QPos="):
        dot_product_attention(("position", "kv_head"), "key_position", "head_size", q, k, v)


def test_signatures():
    """The parameters in Levanter's main branch of September 2025; attn_sink at the end is of 1.2.dev1644."""
    shared = [
        "mask", "bias", "attention_dtype", "precision", "use_flash", "attn_backend", "flash_block_size", "dropout",
        "logits_soft_cap", "scaling_factor", "inference", "prng",
    ]  # fmt: skip
    first = ["QPos", "KPos", "Key", "query", "key", "value"]
    assert list(inspect.signature(dot_product_attention).parameters) == [*first, *shared, "attn_sink"]
    assert list(inspect.signature(dot_product_attention_with_sink).parameters) == [*first, "attn_sink", *shared]
