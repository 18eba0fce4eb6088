"""Tests programs for other platforms: jax.export, and arrays on another device than the default."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch_first import torch_first  # noqa: F401 (a fixture)

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import AttentionSpec, SeqInfo
from attn_core.call.tensors import Inputs
from attn_core.errors import SpecError
from jax_frontend import append_kv, attention, paged_attention
from jax_frontend.dispatch.export import export_checks
from jax_frontend.dispatch.ops import backward, forward
from jax_frontend.dispatch.plan import Plan

BACKENDS = ("sdpa_flash", "math")
CALLBACK = "attn_core.callback"


def rows(*shapes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    generator = np.random.default_rng(0)
    return tuple(jnp.asarray(generator.standard_normal(shape), jnp.float32) for shape in shapes)


def dense() -> tuple[jax.Array, ...]:
    return rows((2, 5, 6, 8), (2, 7, 3, 8), (2, 7, 3, 8))


def documents() -> tuple[jax.Array, ...]:
    return rows((9, 6, 8), (9, 3, 8), (9, 3, 8))


def step(q, k, v, **options):
    return jax.value_and_grad(lambda *qkv: attention(*qkv, **options).sum(), argnums=(0, 1, 2))(q, k, v)


CALLS = {
    "dense": (dense, {"causal": True, "softcap": 5.0}),
    "packed": (documents, {"causal": True, "seq_info": SeqInfo.from_lengths([4, 0, 5])}),
}


@pytest.mark.usefixtures("torch_first")
@pytest.mark.parametrize("platform", ("tpu", "cuda", "rocm"))
@pytest.mark.parametrize("name", CALLS)
def test_a_program_for_another_platform_contains_no_kernel_of_this_one(name: str, platform: str) -> None:
    """No check needs to be disabled, because the program contains only XLA's operations."""
    arrays, options = CALLS[name]
    exported = jax.export.export(jax.jit(partial(step, **options)), platforms=(platform,))(*arrays())
    assert CALLBACK not in exported.mlir_module() and "stablehlo.dot_general" in exported.mlir_module()
    mapped = jax.export.export(jax.jit(jax.vmap(partial(step, **options))), platforms=(platform,))
    assert CALLBACK not in mapped(*(array[None] for array in arrays())).mlir_module()


@pytest.mark.usefixtures("torch_first")
@pytest.mark.parametrize("name", CALLS)
def test_a_program_for_several_platforms_runs_the_kernel_on_this_one(name: str) -> None:
    arrays, options = CALLS[name]
    run = jax.jit(partial(step, **options))
    alone = jax.export.export(run, disabled_checks=export_checks())(*arrays())
    exported = jax.export.export(run, platforms=("cpu", "tpu"), disabled_checks=export_checks())(*arrays())
    text = exported.mlir_module()
    assert text.count(CALLBACK) == alone.mlir_module().count(CALLBACK) > 0 and "stablehlo.case" in text
    for actual, expected in zip(
        jax.tree.leaves(exported.call(*arrays())), jax.tree.leaves(run(*arrays())), strict=True
    ):
        assert np.array_equal(actual, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_named_backend_is_not_replaced_on_another_platform(backend: str) -> None:
    run = jax.jit(partial(step, backend=backend))
    with pytest.raises(SpecError, match=rf"backend='{backend}': expected a program for cpu, .* platform 'tpu'"):
        jax.export.export(run, platforms=("tpu",))(*dense())
    several = jax.jit(partial(step, backend=(backend, "jax_xla")))
    assert CALLBACK not in jax.export.export(several, platforms=("tpu",))(*dense()).mlir_module()


def test_paged_programs_for_another_platform() -> None:
    pool, new, q = rows((6, 4, 3, 8), (2, 3, 8), (2, 6, 8))
    tables = {"block_table": jnp.asarray([[0, 2], [5, 1]], jnp.int32), "seq_lens": jnp.asarray([5, 3], jnp.int32)}

    def decode(q, pool, new):
        k, v = append_kv(pool, pool, new, new, **tables)
        return paged_attention(q, k, v, **tables)

    exported = jax.export.export(jax.jit(decode), platforms=("tpu",))(q, pool, new)
    assert CALLBACK not in exported.mlir_module()


@pytest.mark.parametrize("documents", (None, 2))
def test_a_call_planned_for_a_gpu_runs_on_the_device_of_its_arrays(documents: int | None) -> None:
    """As under ``jax.jit`` on CPU arrays if the default device is a GPU: planned for the GPU, lowered for the CPU."""
    lengths = {} if documents is None else {"documents": documents, "max_len_q": 5, "max_len_k": 5}
    shape = {"batch": 1, "q_len": 9, "kv_len": 9, "num_heads": 6, "num_kv_heads": 3, "head_dim": 8, "value_dim": 8}
    spec = AttentionSpec(**shape, dtype="float32", causal=True, needs_backward=True, **lengths)
    q, k, v, dout = rows((9, 6, 8), (9, 3, 8), (9, 3, 8), (9, 6, 8))
    offsets = {} if documents is None else {f"cu_seqlens_{side}": jnp.asarray([0, 5, 9], jnp.int32) for side in "qk"}
    if documents is None:
        q, k, v, dout = (array[None] for array in (q, k, v, dout))
    inputs = Inputs(q, k, v, **offsets)

    def run(inputs: Inputs, dout: jax.Array, backend: str, device: str, **more: Any) -> Any:
        made = Plan(spec, backend, device, one_row=False, **more)
        out, lse, _ = forward(made, inputs)
        return out, lse, backward(made, inputs, out, lse, dout, None)

    planned = jax.jit(partial(run, backend="flash4", device="sm90"))
    expected = jax.jit(partial(run, backend="jax_xla", device="cpu"))(inputs, dout)
    for actual, right in zip(jax.tree.leaves(planned(inputs, dout)), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(actual, right)
    text = planned.trace(inputs, dout).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(CALLBACK) == 2  # on its own platform it runs the kernel
    named = jax.jit(partial(run, backend="flash4", device="sm90", requested=("flash4",)))
    with pytest.raises(SpecError, match=r"backend='flash4': expected a program for sm90, .* platform 'cpu'"):
        named(inputs, dout)
