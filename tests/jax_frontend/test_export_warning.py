"""Tests that an export of a call on torch's kernels names ``export_checks`` before JAX refuses it."""

from __future__ import annotations

import warnings
from contextvars import Context

import jax
import jax.export
import jax.numpy as jnp
import pytest

from jax_frontend import attention, export_checks
from jax_frontend.bridge import compiled_lane

# Each test has an empty context, because other tests of the process have called ``export_checks`` in its own.


def exported(backend: str, checks: bool) -> None:
    program = jax.jit(lambda q: attention(q, q, q, backend=backend))
    jax.export.export(program, disabled_checks=export_checks() if checks else ())(jnp.zeros((1, 3, 2, 8)))


def test_an_export_without_the_checks_warns() -> None:
    def run() -> None:
        with pytest.warns(UserWarning, match=r"^jax.export refuses .*disabled_checks=jax_frontend.export_checks\(\)"):
            exported("math", checks=False)

    with pytest.raises(ValueError, match="Cannot serialize code with custom calls"):
        Context().run(run)


@pytest.mark.parametrize(("backend", "checks"), [("math", True), ("jax_xla", False)])
def test_an_export_that_succeeds_does_not_warn(backend: str, checks: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Context().run(exported, backend, checks)


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
