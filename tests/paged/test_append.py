"""Appends of both frontends against a loop over tokens, bit for bit: by tables and by slots, with rotated keys, and to
quantised pages."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from append_cases import Append, appends, make_append
from frameworks import BOTH, EVERYWHERE, JAX, TORCH, Framework
from hypothesis import given, settings
from hypothesis import strategies as st
from quantised_appends import Kind, Pools, assert_written, bits, expected, pools_of, tensors_of
from quantised_cases import KINDS
from xla_compiler import as_users_have_it

import jax_frontend
import torch_frontend
from attn_core import SpecError
from attn_core.paged.tables import check_slot_values, pages_and_offsets

pytestmark = pytest.mark.sampled


def array_of(f: Framework, tensor: torch.Tensor) -> Any:
    """The same bits in memory of its own."""
    if f.name == "torch":
        return tensor.clone().to(f.device)
    dtype = np.dtype(jnp.dtype(str(tensor.dtype).removeprefix("torch.")))
    return f.array(bits(tensor).view(dtype).reshape(tensor.shape))


def arguments(
    f: Framework,
    call: Append,
    rotates: bool,
    by_slots: bool,
    *,
    pools: Pools | None = None,
    tables: str = "int32",
    on_host: bool = False,
) -> tuple[list[Any], dict[str, Any]]:
    """The positional arguments and the array keywords of ``append_kv``. tables: the dtype of tables."""
    *pages, k, v = (array_of(f, each) for each in (*tensors_of(call, pools)[:2], call.k, call.v))
    where = {"slot_mapping": call.slots} if by_slots else call.tables
    if rotates and by_slots:
        where = {**where, "positions": call.positions}
    keywords = {name: each.astype(tables) for name, each in where.items() if each is not None}
    if not on_host:
        keywords = {name: f.array(each) for name, each in keywords.items()}
    scales = (array_of(f, each) for each in tensors_of(call, pools)[2:])
    keywords |= dict(zip(("k_scales", "v_scales"), scales, strict=False))
    return [*pages, k, v], keywords | ({"rotary": (array_of(f, call.cos), array_of(f, call.sin))} if rotates else {})


def appended(f: Framework, call: Append, rotates: bool, by_slots: bool, **how: Any) -> Any:
    arrays, keywords = arguments(f, call, rotates, by_slots, **how)
    flag = {"rotary_interleaved": call.interleaved} if rotates else {}
    results = f.frontend.append_kv(*arrays, **keywords, **flag)
    assert [pool.dtype for pool in results[:2]] == [pool.dtype for pool in arrays[:2]]
    return results


def check_any(f: Framework, kinds: list[Kind]) -> None:
    @settings(max_examples=12 if f.name == "jax" else 60, deadline=None)
    @given(
        *(appends(), st.sampled_from(kinds), st.booleans(), st.booleans()),
        *(st.sampled_from(("int32", "int64")), st.booleans()),
    )
    def every(call: Append, kind: Kind, rotates: bool, by_slots: bool, tables: str, on_host: bool) -> None:
        pools = pools_of(call, kind)
        results = appended(f, call, rotates, by_slots, pools=pools, tables=tables, on_host=on_host)
        assert_written(results, expected(call, pools, rotates), str(kind))

    with f.as_default():
        every()


@pytest.mark.parametrize("f", EVERYWHERE, ids=str)
def test_any_append(f: Framework) -> None:
    """On a GPU the bits are those of a CPU."""
    check_any(f, [None])


@pytest.mark.sampled
@pytest.mark.parametrize("f", [TORCH, pytest.param(JAX, marks=pytest.mark.slow)], ids=str)
def test_any_append_to_quantised_pages(f: Framework) -> None:
    check_any(f, KINDS)


CALLS = {
    "decode": make_append([5, 9, 1], None, rotary_dim=6),
    "prefill": make_append([5, 9, 7], [5, 2, 0], left_out=2),
    "interleaved": make_append([5, 9, 7], [5, 2, 0], rotary_dim=6, interleaved=True),
    "half": make_append([5, 9, 7], [5, 2, 7], dtype="bfloat16", table="bfloat16"),
}
by_tables_and_slots = pytest.mark.parametrize("by_slots", [False, True], ids=["tables", "slots"])


@by_tables_and_slots
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, None) for name in CALLS),
        *(("half", kind) for kind in KINDS if kind[1] == "token"),
        ("half", ("float8_e4m3fn", "page")),
    ],
)
def test_torch_compiles_it(name: str, kind: Kind, by_slots: bool) -> None:
    """One graph, and the op sees the arguments as an eager call does."""
    torch._dynamo.reset()  # it remembers frames of compiled calls that another test had refused
    call = CALLS[name]
    pools = pools_of(call, kind)
    arrays, keywords = arguments(TORCH, call, True, by_slots, pools=pools, tables="int64")
    compiled = torch.compile(torch_frontend.append_kv, fullgraph=True, backend="aot_eager")
    results = compiled(*arrays, rotary_interleaved=call.interleaved, **keywords)
    assert_written(results, expected(call, pools, True))


@by_tables_and_slots
@pytest.mark.parametrize("kind", [None, *KINDS], ids=lambda kind: " ".join(kind or ("plain",)))
@pytest.mark.parametrize("name", CALLS)
def test_jit_has_the_same_bits(name: str, kind: Kind, by_slots: bool) -> None:
    """With the compiler that users have, which would fuse products and sums."""
    call = CALLS[name]
    pools = pools_of(call, kind)
    arrays, keywords = arguments(JAX, call, True, by_slots, pools=pools)
    append = partial(jax_frontend.append_kv, rotary_interleaved=call.interleaved)
    compiled = jax.jit(lambda arrays, keywords: append(*arrays, **keywords), compiler_options=as_users_have_it())
    assert_written(compiled(arrays, keywords), expected(call, pools, True))


@pytest.mark.parametrize("f", BOTH, ids=str)
def test_positions_take_the_place_of_the_tables(f: Framework) -> None:
    """Left padding moves positions, and tables do not know it."""
    call = CALLS["prefill"]
    arrays, keywords = arguments(f, call, True, False, on_host=True)
    places = np.where(call.positions < 0, 99, 0).astype(np.int32)  # tokens without a place may have any position
    places[:3] = 4, 2, 0
    pools = f.frontend.append_kv(*arrays, **keywords, positions=places)
    moved = [None if at is None else (*at[:2], int(place)) for at, place in zip(call.places, places)]
    assert_written(pools, Append(**{**vars(call), "places": moved}).expected(True))


@pytest.mark.parametrize("f", BOTH, ids=str)
def test_planted_faults_are_found(f: Framework) -> None:
    call = CALLS["interleaved"]
    right = call.expected(True)
    assert_written(appended(f, call, True, True, on_host=True), right)
    later = [None if at is None else (*at[:2], at[2] + 1) for at in call.places]
    beside = [None if at is None else (at[0], (at[1] + 1) % 4, at[2]) for at in call.places]
    wrong = [
        (Append(**{**vars(call), **change}), True)
        for change in ({"places": later}, {"places": beside}, {"interleaved": False}, {"sin": -call.sin})
    ]
    for other, rotates in (*wrong, (call, False)):
        with pytest.raises(AssertionError, match="k_pages"):
            assert_written(appended(f, other, rotates, True, on_host=True), right)


def test_a_rounded_key_has_other_bits() -> None:
    """The expectation finds a rotated key that is rounded to bfloat16 before it is quantised."""
    call = CALLS["half"]
    for dtype in ("int8", "float8_e4m3fn"):
        pools = pools_of(call, (dtype, "token"))
        right, wrong = (expected(call, pools, True, rounds=rounds) for rounds in (False, True))
        assert not np.array_equal(bits(right[0]), bits(wrong[0]))
        np.testing.assert_array_equal(bits(right[1]), bits(wrong[1]))


@pytest.mark.parametrize("f", BOTH, ids=str)
def test_slots_name_the_page_scale_that_is_wrong(f: Framework) -> None:
    """A scale of a page that no slot names may be anything."""
    call = CALLS["decode"]
    pools = pools_of(call, ("int8", "page"))
    assert pools is not None
    used = [place[0] for place in call.places if place is not None]
    unused = next(page for page in range(len(call.k_pages)) if page not in used)
    pools.scales[1][unused] = np.nan
    appended(f, call, True, True, pools=pools)
    pools.scales[1][used[1], 1] = 0.0
    arrays, keywords = arguments(f, call, True, True, pools=pools)
    says = rf"^v_scales\[{used[1]}, 1\]=0.0: expected a positive, finite scale"
    with pytest.raises(SpecError, match=says):
        f.frontend.append_kv(*arrays, **keywords)
    if f.name == "torch":
        np.testing.assert_array_equal(bits(arrays[0]), bits(pools.pages[0]), err_msg="nothing is written")


def test_torch_takes_strided_angles() -> None:
    call = make_append([5, 3], [5, 3], dtype="float32")
    wide = [torch.stack([each, each], -1).flatten(-2)[:, ::2] for each in (call.cos, call.sin)]
    pools = torch_frontend.append_kv(
        call.k_pages.clone(), call.v_pages.clone(), call.k, call.v, **call.tables, rotary=tuple(wide)
    )
    assert_written(pools, call.expected(True))


@pytest.mark.parametrize("f", BOTH, ids=str)
def test_a_cache_rotates_what_it_writes(f: Framework) -> None:
    call = make_append([5, 3], [5, 3])
    cache = f.frontend.PagedKVCache(num_layers=1, num_pages=8, page_size=4, kv_heads=2, head_dim=10, value_dim=6)
    (_, _, *rows), keywords = arguments(f, call, True, False)
    for name in "ab":
        cache.add(name)
    step = cache.step(["a", "b"], [5, 3])
    cache.update(0, *rows, step, rotary=keywords["rotary"], rotary_interleaved=True)
    empty, how = (f.zeros(8, 4, 2, 10), f.zeros(8, 4, 2, 6)), {"rotary": keywords["rotary"], "rotary_interleaved": True}
    written = f.frontend.append_kv(*empty, *rows, **step.tables, **how)
    assert_written((cache.k_pages[0], cache.v_pages[0]), written)


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
