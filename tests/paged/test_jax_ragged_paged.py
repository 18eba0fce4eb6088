"""Tests jax_ragged_paged in Pallas's interpret mode on a CPU, through the front door, and its lowering for a TPU.

The kernel never ran on a TPU. Pallas's newer interpreter of TPU kernels (``force_tpu_interpret_mode``) cannot reshape a
buffer, which this kernel does, so it runs with ``interpret=True``; see ``interpreted``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
jax = pytest.importorskip("jax")
import cpu_meshes
import jax.numpy as jnp
from jax._src import literals
from jax.experimental import pallas
from jax.experimental.pallas import tpu as pallas_tpu
from jax.sharding import NamedSharding, PartitionSpec
from paged_cases import PagedCall, judge, make_paged, run
from paged_specs import spec_of

import jax_frontend
from attn_core import NoBackendError, Target, explain, select
from attn_core.backends import jax_ragged_paged as backend
from attn_core.call.tensors import PagedInputs
from jax_frontend.dispatch import plan

NAME = "jax_ragged_paged"


def interpreted_call(compiled: Any, kernel: Any, *, grid_spec: Any, **named: Any) -> Any:
    """``pallas_call(..., interpret=True)`` whose step of the grid keeps what the last one wrote into the scalars.

    The kernel passes the next sequence and buffer from step to step in its fourth scalar. A TPU keeps scalars, and the
    interpreter forgets them, but keeps scratch memory; so they are in scratch memory here.
    """
    scalars = grid_spec.num_scalar_prefetch

    def with_memory(*refs: Any) -> None:
        *refs, memory = refs

        @pallas.when(pallas.program_id(0) + pallas.program_id(1) == 0)
        def first() -> None:
            for at in range(2):
                memory[at] = refs[3][at]

        kernel(*refs[:3], memory, *refs[4:])

    grid = pallas_tpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=scalars,
        grid=grid_spec.grid,
        in_specs=grid_spec.in_specs,
        out_specs=grid_spec.out_specs,
        scratch_shapes=[*grid_spec.scratch_shapes, pallas_tpu.SMEM((2,), jnp.int32)],
    )
    return compiled(with_memory, grid_spec=grid, **named, interpret=True)


@pytest.fixture
def interpreted() -> Iterator[None]:
    """Calls plan as on a TPU; the kernel is interpreted, in blocks of few keys and queries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "device_name", lambda array: "tpu")
        patch.setattr(pallas, "pallas_call", partial(interpreted_call, pallas.pallas_call))
        # The interpreter of jax 0.10 to 0.12 asks each index of a masked store for a shape, also an int.
        patch.setattr(literals.TypedInt, "shape", (), raising=False)
        patch.setattr(backend, "KEYS", 16)
        patch.setattr(backend, "QUERIES", 8)
        backend.lower.cache_clear()
        jax.clear_caches()  # kernels of other tests are compiled for other modes
        yield
    backend.lower.cache_clear()
    jax.clear_caches()


MIXED = ([37, 5, 0, 9, 33, 8], [20, 1, 0, 9, 0, 3])
"""A chunk, one new token, an empty sequence, a prompt, a sequence without new tokens, and new tokens at the end."""
CASES: dict[str, PagedCall] = {
    "decoding": make_paged([37, 5, 16, 40], page_size=16, causal=False),
    "decoding, window": make_paged([37, 5, 16, 3], page_size=8, window=6, num_heads=6, num_kv_heads=2),
    "mixed": make_paged(*MIXED, page_size=8, scale=0.31),
    "window, softcap, value_dim, shared pages": make_paged(
        *MIXED, page_size=4, window=7, softcap=0.7, head_dim=11, value_dim=13, num_heads=6, num_kv_heads=3, shared=1
    ),
    "bfloat16, one kv head": make_paged(*MIXED, page_size=8, dtype="bfloat16", num_heads=3, num_kv_heads=1),
    "bfloat16, five kv heads": make_paged(*MIXED, page_size=8, dtype="bfloat16", num_heads=5, num_kv_heads=5, bound=23),
    "blocks of heads, sequences without queries at the end": make_paged(
        [19, 9, 4, 7], [14, 2, 0, 0], page_size=8, num_heads=8, num_kv_heads=8
    ),
    "more queries than keys": make_paged([3, 6], [5, 4], page_size=4),
    "no queries at all": make_paged([3, 6], [0, 0], page_size=4),
}
pytestmark = pytest.mark.sampled


@pytest.mark.parametrize("name", CASES)
def test_it_is_right_in_interpret_mode(name: str, interpreted: None) -> None:
    """Everything outside the sequences is NaN, and rows that see no key are 0."""
    call = CASES[name]
    assert explain(call.spec, Target("jax", "tpu"), NAME).reasons(NAME) == ()
    verdict = judge(call, run("jax", call, NAME))
    assert verdict.ok, verdict


def test_wrong_tables_are_clamped_and_surplus_tokens_are_zero(interpreted: None) -> None:
    """Traced tables cannot be checked; jax_xla clamps the same values. The spare pages are no longer NaN here."""
    call = make_paged([9, 5, 7], [4, 0, 2], page_size=4, seed=5)
    q, k, v = (jnp.nan_to_num(jnp.asarray(array, "float32")) for array in call.inputs[:3])
    tables = {
        "block_table": jnp.asarray([[99, -3, 1, 0], [0, 0, 0, 0], [2, 1, 99, 0]], jnp.int32),
        "seq_lens": jnp.asarray([10_000, -5, 7], jnp.int32),
        "cu_seqlens_q": jnp.asarray([0, 3, 3, 4], jnp.int32),
    }
    attend = jax.jit(jax_frontend.paged_attention, static_argnames=("backend", "max_len_q"))
    out, expected = (attend(q, k, v, **tables, max_len_q=4, backend=name) for name in (NAME, "jax_xla"))
    np.testing.assert_allclose(out, expected, atol=2e-6)
    assert (np.asarray(out[4:]) == 0).all() and (np.asarray(out[:4]) != 0).all()


def test_a_scan_over_steps_and_remat(interpreted: None) -> None:
    """A program decodes several steps, as a loop of a server; names of kernels are those of the eager call."""
    call = make_paged([9, 5], page_size=4, seed=3)
    q, k, v = (jnp.nan_to_num(jnp.asarray(array, "float32")) for array in call.inputs[:3])
    table, lengths = jnp.asarray(call.inputs.block_table, jnp.int32), jnp.asarray([3, 1], jnp.int32)

    def step(lengths: Any, _: Any, name: str = NAME) -> Any:
        out = jax_frontend.paged_attention(q, k, v, block_table=table, seq_lens=lengths, backend=name)
        return lengths + 1, out

    _, outs = jax.jit(lambda lengths: jax.lax.scan(jax.checkpoint(step), lengths, length=4))(lengths)
    for at, out in enumerate(outs):
        np.testing.assert_allclose(out, step(lengths + at, None, "jax_xla")[1], atol=2e-6)


def test_kv_heads_stay_split_over_a_mesh(interpreted: None, four_devices: None) -> None:
    mesh = cpu_meshes.mesh((2, 2), ("data", "model"))
    call = make_paged([9, 5], [3, 2], page_size=4, num_heads=6, num_kv_heads=2, seed=3)
    q, k, v = (jnp.nan_to_num(jnp.asarray(array, "float32")) for array in call.inputs[:3])
    tables = {name: jnp.asarray(array, jnp.int32) for name, array in call.tables.items()}
    attend = jax.jit(partial(jax_frontend.paged_attention, **tables, max_len_q=3, backend=NAME))
    places = [NamedSharding(mesh, PartitionSpec(*axes, "model")) for axes in ((None,), (None, None), (None, None))]
    split = [jax.device_put(array, place) for array, place in zip((q, k, v), places, strict=True)]
    program = attend.lower(*split).compile()
    assert not re.search(r" (all-gather|all-reduce|all-to-all|collective-permute)", program.as_text())
    expected = jax_frontend.paged_attention(q, k, v, **tables, max_len_q=3, backend="jax_xla")
    np.testing.assert_allclose(program(*split), expected, atol=2e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_it_lowers_for_a_tpu(dtype: str) -> None:
    spec = spec_of(batch=4, tokens=1024, new=3, dtype=dtype, window=(127, 0), softcap=30.0)
    assert spec.paged is not None
    shapes = {
        "q": (spec.q_len, 32, 128),
        **dict.fromkeys(("k", "v"), (spec.paged.num_pages, 16, 8, 128)),
        **{"block_table": (4, spec.paged.width), "seq_lens": (4,), "cu_seqlens_q": (5,)},
    }
    inputs = PagedInputs(
        **{
            name: jax.ShapeDtypeStruct(shape, dtype if name in "qkv" else "int32")  # type: ignore[arg-type]
            for name, shape in shapes.items()
        }
    )
    device = jax.sharding.AbstractDevice("TPU v5 lite", 1, "tpu")  # the kernel's code depends on it
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)):
        program = jax.export.export(jax.jit(lambda inputs: backend.forward(spec, inputs)), platforms=["tpu"])(inputs)
    assert program.mlir_module().count("tpu_custom_call") == 1
    assert program.out_avals[0].shape == spec.out_shape


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"causal": False, "window": (7, 0)}, {"sliding_window": 8}),
        ({"softcap": 3.0, "scale": 0.5}, {"soft_cap": 3.0, "sm_scale": 0.5}),
        ({"q_len": 12, "max_len_q": 12}, {"num_queries_per_block": 12}),
        ({"num_heads": 512}, {"num_queries_per_block": 16}),
        ({"num_kv_heads": 2}, {"kv_heads": 2}),
        ({"num_heads": 36, "num_kv_heads": 9}, {"kv_heads": 16}),
        ({"num_heads": 36, "num_kv_heads": 9, "dtype": "float32"}, {"kv_heads": 12}),
        ({"head_dim": 64, "value_dim": 160, "scale": 1.0}, {"width": 256, "sm_scale": 1.0}),
    ],
    ids=str,
)
def test_lower(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    lowered = dict(backend.lower(replace(spec_of(), **changes)))
    usual = {
        **{"kv_heads": 8, "width": 128, "sm_scale": 1 / 128**0.5, "sliding_window": None, "soft_cap": None},
        **{"num_kv_pages_per_block": 32, "num_queries_per_block": 32},
    }
    assert lowered.pop("settings") | lowered == usual | expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"causal": False}, "causal=False, window=(None, None): JAX's ragged paged attention is causal if a sequence"),
        ({"causal": False, "window": (3, 1)}, "causal=False, window=(3, 1): JAX's ragged paged attention is causal if"),
        ({"return_lse": True}, "return_lse: JAX's ragged paged attention has no log-sum-exp"),
        ({"sinks": True}, "sinks: JAX's ragged paged attention has none"),
        ({"dtype": "float16"}, "dtype float16: JAX's ragged paged attention takes bfloat16, float32"),
        ({"head_dim": 320, "scale": 1.0}, "head_dim=320: JAX's ragged paged attention stops at 256"),
        ({"alibi_shape": (32,)}, "alibi_slopes with pages: JAX's ragged paged attention has none"),
        ({"deterministic": True}, "deterministic=True: JAX's ragged paged attention has none"),
    ],
    ids=str,
)
def test_what_the_kernel_lacks_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    spec, target = spec_of(batch=3, new=2), Target("jax", "tpu")
    assert explain(spec, target, NAME).reasons(NAME) == ()
    found = explain(replace(spec, **changes), target, NAME).reasons(NAME)
    assert any(why.startswith(words) for why in found), found
    with pytest.raises(NoBackendError):
        select(replace(spec, **changes), target, NAME)


def test_it_runs_by_name_on_a_tpu_alone() -> None:
    spec = spec_of()
    said = str(explain(spec, Target("jax", "tpu")))
    assert "selected: jax_xla" in said and f"by name only, never run on a TPU by this project: {NAME}" in said
    assert "requested by name; never run on a TPU by this project" in str(select(spec, Target("jax", "tpu"), NAME))
    assert explain(spec, Target("jax", "cpu"), NAME).reasons(NAME) == (
        "device cpu: JAX's ragged paged attention needs tpu",
    )
    dense = replace(spec, paged=None, documents=None, max_len_q=None, max_len_k=None)
    assert explain(dense, Target("jax", "tpu"), NAME).reasons(NAME) == (
        "keys and values not in pages: JAX's ragged paged attention reads only pages",
    )
