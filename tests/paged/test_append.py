"""Appends of both frontends: by tables and by slots, with rotated keys, against a loop over tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from append_cases import Append, appends, make_append
from both_frontends import _numpy
from frameworks import BOTH, EVERYWHERE, JAX, TORCH, Framework, jax_on
from hypothesis import given, settings
from hypothesis import strategies as st
from xla_compiler import as_users_have_it

import jax_frontend
import torch_frontend
from attn_core.paged.tables import check_slot_values, pages_and_offsets

pytestmark = pytest.mark.sampled


def arrays(f: Framework, call: Append) -> tuple[list[Any], tuple[Any, Any]]:
    """The pools, k and v, then cos and sin, as arrays of a framework that share no memory with those of the call."""
    tensors = call.k_pages, call.v_pages, call.k, call.v, call.cos, call.sin
    own = [f.array(_numpy(tensor.float()), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors]
    return own[:4], (own[4], own[5])


def bits(array: Any) -> np.ndarray:
    """Any float array in float32, which every number here is."""
    return _numpy(array.float()) if isinstance(array, torch.Tensor) else np.asarray(array.astype(jnp.float32))


def options_of(f: Framework, call: Append, rotates: bool, by_slots: bool, kind: str, on_host: bool) -> dict[str, Any]:
    """The keywords of a call without cos and sin; kind: the dtype of tables."""
    where = {"slot_mapping": call.slots} if by_slots else call.tables
    if rotates and by_slots:
        where = {**where, "positions": call.positions}
    where = {name: None if each is None else each.astype(kind) for name, each in where.items()}
    if not on_host:
        where = {name: None if each is None else f.array(each) for name, each in where.items()}
    return {**where, "rotary_interleaved": call.interleaved} if rotates else where


def appended(f: Framework, call: Append, rotates: bool, **how: Any) -> list[np.ndarray]:
    own, angles = arrays(f, call)
    rotary = {"rotary": angles} if rotates else {}
    pools = f.frontend.append_kv(*own, **options_of(f, call, rotates, **how), **rotary)
    assert all(pool.dtype == before.dtype for pool, before in zip(pools, own[:2]))
    return [bits(pool) for pool in pools]


@pytest.mark.parametrize("f", EVERYWHERE, ids=str)
def test_any_append(f: Framework) -> None:
    """On a GPU the bits are those of a CPU."""

    @settings(max_examples=12 if f.name == "jax" else 60, deadline=None)
    @given(appends(), st.booleans(), st.booleans(), st.sampled_from(("int32", "int64")), st.booleans())
    def every(call: Append, rotates: bool, by_slots: bool, kind: str, on_host: bool) -> None:
        pools = appended(f, call, rotates, by_slots=by_slots, kind=kind, on_host=on_host)
        for pool, expected in zip(pools, call.expected(rotates), strict=True):
            assert np.array_equal(pool, bits(expected))

    with jax_on(f.device):
        every()


CALLS = {
    "decode": make_append([5, 9, 1], None),
    "prefill": make_append([5, 9, 7], [5, 2, 0], left_out=2),
    "interleaved": make_append([5, 9, 7], [5, 2, 0], rotary_dim=6, interleaved=True),
    "half": make_append([5, 9, 1], None, dtype="bfloat16", table="bfloat16"),
}


@pytest.mark.parametrize("by_slots", [False, True], ids=["tables", "slots"])
@pytest.mark.parametrize("name", CALLS)
def test_torch_compiles_it(name: str, by_slots: bool) -> None:
    """One graph, and the op sees the arguments as an eager call does."""
    torch._dynamo.reset()  # it remembers frames of compiled calls that another test had refused
    call = CALLS[name]
    own, angles = arrays(TORCH, call)
    options = options_of(TORCH, call, True, by_slots, "int64", False)
    compiled = torch.compile(torch_frontend.append_kv, fullgraph=True, backend="aot_eager")
    pools = compiled(*own, **options, rotary=angles)
    for pool, expected in zip(pools, call.expected(True), strict=True):
        assert torch.equal(pool, expected)


@pytest.mark.parametrize("by_slots", [False, True], ids=["tables", "slots"])
@pytest.mark.parametrize("name", CALLS)
def test_jit_has_the_same_bits(name: str, by_slots: bool) -> None:
    """With the compiler that users have, which would fuse products and sums."""
    call = CALLS[name]
    own, angles = arrays(JAX, call)
    options = options_of(JAX, call, True, by_slots, "int32", False)
    flag = options.pop("rotary_interleaved")
    append = partial(jax_frontend.append_kv, rotary_interleaved=flag)
    compiled = jax.jit(
        lambda own, where, angles: append(*own, **where, rotary=angles), compiler_options=as_users_have_it()
    )
    for pool, expected in zip(compiled(own, options, angles), call.expected(True), strict=True):
        assert np.array_equal(bits(pool), bits(expected))


@pytest.mark.parametrize("f", BOTH, ids=str)
def test_positions_take_the_place_of_the_tables(f: Framework) -> None:
    """Left padding moves positions, and tables do not know it."""
    call = CALLS["prefill"]
    own, angles = arrays(f, call)
    places = np.where(call.positions < 0, 99, 0).astype(np.int32)  # tokens without a place may have any position
    places[:3] = 4, 2, 0
    pools = f.frontend.append_kv(*own, **call.tables, rotary=angles, positions=places)
    moved = [None if at is None else (*at[:2], int(place)) for at, place in zip(call.places, places)]
    expected = Append(**{**vars(call), "places": moved}).expected(True)
    assert np.array_equal(bits(pools[0]), bits(expected[0])) and np.array_equal(bits(pools[1]), bits(expected[1]))


@pytest.mark.parametrize("f", BOTH, ids=str)
def test_planted_faults_are_found(f: Framework) -> None:
    call = CALLS["interleaved"]
    right = [bits(pool) for pool in call.expected(True)]
    usual = {"by_slots": True, "kind": "int32", "on_host": True}
    assert all(map(np.array_equal, appended(f, call, True, **usual), right))
    later = [None if at is None else (*at[:2], at[2] + 1) for at in call.places]
    beside = [None if at is None else (at[0], (at[1] + 1) % 4, at[2]) for at in call.places]
    for change in ({"places": later}, {"places": beside}, {"interleaved": False}, {"sin": -call.sin}):
        wrong = Append(**{**vars(call), **change})
        assert not np.array_equal(appended(f, wrong, True, **usual)[0], right[0])
    assert not np.array_equal(appended(f, call, False, **usual)[0], right[0]), "not rotated at all"


def test_torch_takes_strided_angles() -> None:
    call = make_append([5, 3], [5, 3], dtype="float32")
    wide = [torch.stack([each, each], -1).flatten(-2)[:, ::2] for each in (call.cos, call.sin)]
    pools = torch_frontend.append_kv(
        call.k_pages.clone(), call.v_pages.clone(), call.k, call.v, **call.tables, rotary=tuple(wide)
    )
    assert all(map(torch.equal, pools, call.expected(True)))


@pytest.mark.parametrize("f", BOTH, ids=str)
def test_a_cache_rotates_what_it_writes(f: Framework) -> None:
    call = make_append([5, 3], [5, 3])
    cache = f.frontend.PagedKVCache(num_layers=1, num_pages=8, page_size=4, kv_heads=2, head_dim=10, value_dim=6)
    own, angles = arrays(f, call)
    for name in "ab":
        cache.add(name)
    step = cache.step(["a", "b"], [5, 3])
    cache.update(0, *own[2:], step, rotary=angles, rotary_interleaved=True)
    empty = f.zeros(8, 4, 2, 10), f.zeros(8, 4, 2, 6)
    expected = f.frontend.append_kv(*empty, *own[2:], **step.tables, rotary=angles, rotary_interleaved=True)
    assert np.array_equal(bits(cache.k_pages[0]), bits(expected[0]))
    assert np.array_equal(bits(cache.v_pages[0]), bits(expected[1]))


def test_traced_slots_without_a_place_are_not_written() -> None:
    """Inside jit nothing can raise, and nothing may be written elsewhere."""
    pool, new = jnp.zeros((3, 2, 1, 1)), jnp.arange(1.0, 8.0).reshape(7, 1, 1)
    append = jax.jit(lambda slots: jax_frontend.append_kv(pool, pool, new, new, slot_mapping=slots)[0])
    slots = np.array([3, -1, 6, -(2**31), 2**31 - 1, 0, -2], np.int32)
    expected = np.zeros(6)
    expected[[3, 0]] = 1, 6
    assert np.array_equal(np.asarray(append(jnp.asarray(slots))).ravel(), expected)
    with jax.enable_x64(True):
        wide = jnp.asarray(np.array([3, -1, 2**33, -(2**40), 2**62, 0, 6]))
        assert np.array_equal(np.asarray(append(wide)).ravel(), expected)


def test_a_pool_has_more_slots_than_int32() -> None:
    """JAX may have no int64, so it gets pages and offsets."""
    slots = np.array([2**33 + 5, -1, 7])
    check_slot_values(slots, 2**30, 16)
    page, offset = pages_and_offsets(slots, 16)
    assert page.tolist() == [2**29, -1, 0] and offset.tolist()[::2] == [5, 7]
