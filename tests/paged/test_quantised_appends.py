"""Appends that rotate and quantise at once, in both frontends: the bits of a loop over tokens in numpy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from append_cases import Append, appends, make_append
from both_frontends import _numpy
from frameworks import BOTH, JAX, TORCH, Framework, jax_on
from hypothesis import given, settings
from hypothesis import strategies as st
from quantised_appends import Pools, bits, expected, pools_of
from quantised_cases import KINDS
from xla_compiler import as_users_have_it

import jax_frontend
import torch_frontend
from attn_core import SpecError

pytestmark = pytest.mark.sampled

CALLS = {
    "decode": make_append([5, 9, 1], None, rotary_dim=6),
    "interleaved": make_append([5, 9, 7], [5, 2, 0], interleaved=True, dtype="bfloat16", left_out=2),
    "half": make_append([5, 9, 7], [5, 2, 7], dtype="bfloat16", table="bfloat16"),
}


def arguments(f: Framework, call: Append, pools: Pools, rotates: bool, by_slots: bool) -> tuple[list[Any], dict]:
    """(pools, k and v), and the arrays among the keywords, of a framework."""
    rows = call.k, call.v, call.cos, call.sin
    k, v, cos, sin = (f.array(_numpy(each.float()), str(each.dtype).removeprefix("torch.")) for each in rows)
    own = pools.tensors if f.name == "torch" else [jnp.array(each) for each in (*pools.pages, *pools.scales)]
    where = {"slot_mapping": call.slots} if by_slots else call.tables
    if rotates and by_slots:
        where = {**where, "positions": call.positions}
    keywords = {name: f.array(each.astype(np.int32)) for name, each in where.items() if each is not None}
    keywords |= {"k_scales": own[2], "v_scales": own[3]}
    return [*own[:2], k, v], keywords | ({"rotary": (cos, sin)} if rotates else {})


def assert_written(results: Any, right: list[np.ndarray], says: str = "") -> None:
    for name, found, wanted in zip(("k_pages", "v_pages", "k_scales", "v_scales"), results, right, strict=True):
        np.testing.assert_array_equal(bits(found), bits(wanted), err_msg=f"{name} {says}")


@pytest.mark.slow
@pytest.mark.parametrize("f", BOTH, ids=str)
def test_any_append(f: Framework) -> None:
    @settings(max_examples=12 if f.name == "jax" else 60, deadline=None)
    @given(appends(), st.sampled_from(KINDS), st.booleans(), st.booleans())
    def every(call: Append, kind: tuple[str, str], rotates: bool, by_slots: bool) -> None:
        if kind[0] == "int4" and (call.k.shape[2] % 2 or call.v.shape[2] % 2):
            kind = ("int8", kind[1])
        pools = pools_of(call, *kind)
        arrays, keywords = arguments(f, call, pools, rotates, by_slots)
        flag = {"rotary_interleaved": call.interleaved} if rotates else {}
        results = f.frontend.append_kv(*arrays, **keywords, **flag)
        assert_written(results, expected(call, pools, kind[0], rotates), str(kind))

    with jax_on(f.device):
        every()


@pytest.mark.parametrize("by_slots", [False, True], ids=["tables", "slots"])
@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
@pytest.mark.parametrize("name", CALLS)
def test_jit_has_the_same_bits(name: str, kind: tuple[str, str], by_slots: bool) -> None:
    """With the compiler that users have, which would fuse products and sums."""
    call = CALLS[name]
    pools = pools_of(call, *kind)
    arrays, keywords = arguments(JAX, call, pools, True, by_slots)
    compiled = jax.jit(
        lambda arrays, keywords: jax_frontend.append_kv(*arrays, rotary_interleaved=call.interleaved, **keywords),
        compiler_options=as_users_have_it(),
    )
    assert_written(compiled(arrays, keywords), expected(call, pools, kind[0], True))


@pytest.mark.parametrize("by_slots", [False, True], ids=["tables", "slots"])
@pytest.mark.parametrize("kind", [("int8", "token"), ("int4", "token"), ("float8_e4m3fn", "page")], ids=" ".join)
def test_torch_compiles_it(kind: tuple[str, str], by_slots: bool) -> None:
    torch.compiler.reset()  # other tests compile the same code for other calls, and torch limits their number
    call = CALLS["half"]
    pools = pools_of(call, *kind)
    arrays, keywords = arguments(TORCH, call, pools, True, by_slots)
    compiled = torch.compile(torch_frontend.append_kv, fullgraph=True, backend="aot_eager")
    results = compiled(*arrays, rotary_interleaved=call.interleaved, **keywords)
    assert_written(results, expected(call, pools, kind[0], True))


def test_a_rounded_key_has_other_bits() -> None:
    """The expectation finds a rotated key that is rounded to bfloat16 before it is quantised."""
    call = CALLS["half"]
    for dtype in ("int8", "float8_e4m3fn"):
        pools = pools_of(call, dtype, "token")
        right, wrong = (expected(call, pools, dtype, True, rounds=rounds) for rounds in (False, True))
        assert not np.array_equal(bits(right[0]), bits(wrong[0]))
        np.testing.assert_array_equal(bits(right[1]), bits(wrong[1]))


@pytest.mark.parametrize("f", BOTH, ids=str)
def test_slots_name_the_page_scale_that_is_wrong(f: Framework) -> None:
    """A scale of a page that no slot names may be anything."""
    call = CALLS["decode"]
    pools = pools_of(call, "int8", "page")
    used = [place[0] for place in call.places if place is not None]
    unused = next(page for page in range(len(call.k_pages)) if page not in used)
    pools.scales[1][unused] = np.nan
    arrays, keywords = arguments(f, call, pools, True, True)
    f.frontend.append_kv(*arrays, **keywords)
    pools.scales[1][used[1], 1] = 0.0
    arrays, keywords = arguments(f, call, pools, True, True)
    says = rf"^v_scales\[{used[1]}, 1\]=0.0: expected a positive, finite scale"
    with pytest.raises(SpecError, match=says):
        f.frontend.append_kv(*arrays, **keywords)
    if f.name == "torch":
        np.testing.assert_array_equal(bits(arrays[0]), bits(pools.pages[0]), err_msg="nothing is written")
