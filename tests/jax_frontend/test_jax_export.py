"""Tests programs for other platforms: jax.export and the checks that it needs, and arrays on another device than the
default."""

from __future__ import annotations

import re
import warnings
from contextvars import Context
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from own_process import in_its_own_process
from torch_first import torch_first  # noqa: F401 (a fixture)

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import AttentionSpec, SeqInfo
from attn_core.call.tensors import Inputs
from attn_core.errors import SpecError
from jax_frontend import append_kv, attention, paged_attention
from jax_frontend.bridge import compiled_lane
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


@pytest.mark.sampled
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


# The checks that an export of torch's kernels needs


@pytest.mark.parametrize("backend", (*BACKENDS, "jax_xla"))
def test_an_export_names_its_checks_and_keeps_the_bits(backend: str) -> None:
    """Without the checks a call on torch's kernels warns before JAX refuses it; with them, and on XLA, none does.

    Each export has an empty context, because other tests of the process have called ``export_checks`` in its own.
    """
    run, arrays = jax.jit(partial(step, causal=True, backend=backend)), dense()

    def exported(ask: bool) -> Any:
        return jax.export.export(run, disabled_checks=export_checks() if ask else ())(*arrays)

    def refused() -> None:
        with pytest.warns(UserWarning, match=r"^jax.export refuses .*disabled_checks=jax_frontend.export_checks\(\)"):
            exported(ask=False)

    if backend in BACKENDS:
        with pytest.raises(ValueError, match="Cannot serialize code with custom calls") as error:
            Context().run(refused)
        assert re.search(r"compatibility guarantees(.|\n)*attn_core\.callback", str(error.value))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = Context().run(exported, backend in BACKENDS)
    for actual, expected in zip(jax.tree.leaves(program.call(*arrays)), jax.tree.leaves(run(*arrays)), strict=True):
        assert np.array_equal(actual, expected)


def test_an_exported_program_needs_its_calls_registered(tmp_path: Path) -> None:
    pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
    step, arrays = jax.jit(partial(attention, causal=True, backend="math")), dense()
    exported = jax.export.export(step, disabled_checks=export_checks())(*arrays)
    (tmp_path / "program").write_bytes(exported.serialize())
    expected = np.asarray(step(*arrays))
    np.savez(tmp_path / "arrays.npz", *arrays, expected)
    again = jax.export.deserialize(bytearray((tmp_path / "program").read_bytes()))
    assert np.array_equal(again.call(*arrays), expected)
    script = f"""
import jax, numpy as np
from functools import partial
from jax_frontend import attention
*arrays, expected = np.load({str(tmp_path / "arrays.npz")!r}).values()
program = jax.export.deserialize(bytearray(open({str(tmp_path / "program")!r}, "rb").read()))
attention(*map(jax.numpy.asarray, arrays), softcap=2.0, backend="math")  # another call
try:
    program.call(*arrays).block_until_ready()
except Exception as error:
    print("no attention call" in str(error))
jax.eval_shape(partial(attention, causal=True, backend="math"), *map(jax.numpy.asarray, arrays))
print(np.array_equal(program.call(*arrays), expected))
"""
    actual = in_its_own_process(script)
    assert actual.stdout.split() == ["True", "True"], actual.stderr


def test_a_kernel_that_is_compiled_while_the_function_is_traced_is_in_the_checks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a kernel of the compiled lane is on a GPU. The checks are made before the function is traced."""
    name = "attn_core.flash4.0123"

    def run(q: jax.Array) -> jax.Array:
        monkeypatch.setitem(compiled_lane._compile_seconds, name, 1.0)
        return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(q.shape, q.dtype))(q)  # nothing runs it

    checks = export_checks()
    assert name not in [check.is_custom_call() for check in checks]
    exported = jax.export.export(jax.jit(run), disabled_checks=checks)(jnp.zeros((1, 3)))
    assert name in [check.is_custom_call() for check in exported.disabled_safety_checks]
    assert len(checks) == len(list(checks)) == len([*checks]) and checks[0] == next(iter(checks))


def test_the_checks_can_be_added_to_other_checks() -> None:
    other = jax.export.DisabledSafetyCheck.custom_call("other")
    assert export_checks() + [other] == [*export_checks(), other]
    assert [other] + export_checks() == [other, *export_checks()]


@pytest.mark.parametrize("traced_before", [True, False])
def test_the_gradient_of_an_exported_function_must_be_traced_before_the_export(
    monkeypatch: pytest.MonkeyPatch, traced_before: bool
) -> None:
    """Because JAX reads the checks when it exports the function, and traces its gradient after that."""

    def kernel(name: str, x: jax.Array) -> jax.Array:
        monkeypatch.setitem(compiled_lane._compile_seconds, name, 1.0)
        return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)  # nothing runs it

    @jax.custom_vjp
    def run(x: jax.Array) -> jax.Array:
        return kernel("attn_core.flash4.forward", x)

    run.defvjp(lambda x: (run(x), None), lambda _, cotangent: (kernel("attn_core.flash4.backward", cotangent),))
    x = jnp.zeros((1, 3))
    if traced_before:
        jax.eval_shape(jax.grad(lambda x: run(x).sum()), x)
    exported = jax.export.export(jax.jit(run), disabled_checks=export_checks())(x)
    if traced_before:
        assert exported.vjp().nr_devices == 1
    else:
        with pytest.raises(ValueError, match=r"attn_core\.flash4\.backward"):
            exported.vjp()
