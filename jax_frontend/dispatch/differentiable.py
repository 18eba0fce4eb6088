"""A planned call as JAX differentiates it: forward and reverse mode, remat, and types inside ``jax.shard_map``."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from attn_core.backends.shared.jax_offsets import safe_offsets
from attn_core.call.options import Options
from attn_core.call.tensors import Inputs
from attn_core.errors import SpecError
from jax_frontend.dispatch import lone_sinks, ops, plan, tangent
from jax_frontend.dispatch.local_call import speaks_jax

Array = jax.Array
OUT_NAME, LSE_NAME = "attention_out", "attention_lse"
"""The names under which ``jax.checkpoint`` policies find what a backward needs of its forward."""


class Call(NamedTuple):
    """What is static of a call: its options and where it runs."""

    options: Options
    requested: str | tuple[str, ...] | None
    device: str
    documents: int | None = None
    """How many documents the caller's offsets have; those for nobody's tokens are behind them."""


def varying_alike(inputs: Inputs) -> Inputs:
    """Inside ``jax.shard_map``: every input typed as varying over all the mesh axes that any of them varies over.

    A kernel's results vary where any operand does. The gradient of an input that was equal on every device is then
    summed over those axes, as JAX does for its own operations.
    """
    axes: dict[str, frozenset[str]] = {
        name: jax.typeof(array).manual_axis_type.varying  # type: ignore[attr-defined]
        for name, array in _given(inputs).items()
    }
    every = frozenset().union(*axes.values())
    lacking = {name: tuple(sorted(every - found)) for name, found in axes.items() if every - found}
    return inputs._replace(
        **{name: jax.lax.pcast(getattr(inputs, name), lacking[name], to="varying") for name in lacking}
    )


class Derivative(NamedTuple):
    """The derivative of one call, as ``tangent.Linear`` has it; the residuals are its inputs, out and any lse."""

    made: plan.Plan
    with_lse: bool
    """Whether the log-sum-exp is a result of the call."""
    names: tuple[str, ...]
    """What the residuals are."""
    moving: tuple[str, ...]
    """The inputs with a tangent."""

    @property
    def results(self) -> tuple[int, ...]:
        """Which residuals have the types of the tangents out: out, and lse where it is a result."""
        return tuple(self.names.index(name) for name in ("out", "lse")[: 1 + self.with_lse])

    def tangent(self, *arrays: Array) -> tuple[Array, ...]:
        """Forward mode: of the operations of a JAX backend's forward."""
        if not self.made.spec.empty and not speaks_jax(self.made):
            raise SpecError(
                f"backend={self.made.backend!r}: expected reverse mode (jax.grad, jax.vjp), its kernels have no "
                'forward mode (jax.jvp, jax.linearize, jax.jacfwd); backend="jax_xla" has both'
            )
        inputs, _, _ = self._split(arrays)

        def forward(moved: dict[str, Array]) -> tuple[Array, ...]:
            return _run(self.made, inputs._replace(**moved), with_lse=True)[: 1 + self.with_lse]

        primals = {name: getattr(inputs, name) for name in self.moving}
        moving = dict(zip(self.moving, arrays[len(self.names) :], strict=True))
        return jax.jvp(forward, (primals,), (moving,))[1]  # type: ignore[no-any-return]

    def transpose(self, *arrays: Any) -> list[Array]:
        """Reverse mode: the backend's backward."""
        made, (inputs, out, lse) = self.made, self._split(arrays)
        dout, *dlse = arrays[len(self.names) :]
        dout = jnp.zeros_like(out) if dout is None else dout
        if made.one_row:
            out, dout = out[0], dout[0]
        found = ops.backward(made, _rows(made, inputs), out, lse, dout, dlse[0] if dlse else None)
        return [getattr(found, f"d{name}").reshape(getattr(inputs, name).shape) for name in self.moving]

    def _split(self, arrays: tuple[Any, ...]) -> tuple[Inputs, Any, Any]:
        residuals = dict(zip(self.names, arrays, strict=False))
        out, lse = residuals.pop("out"), residuals.pop("lse", None)
        return Inputs(**{"k": None, "v": None, **residuals}), out, lse


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attention(call: Call, inputs: Inputs) -> Any:
    out, lse = _run(_planned(call, inputs, False, False), inputs, with_lse=call.options.return_lse)
    return (out, lse) if call.options.return_lse else out


@partial(_attention.defjvp, symbolic_zeros=True)
def _derivative(call: Call, primals: tuple[Inputs], tangents: tuple[Inputs]) -> tuple[Any, Any]:
    """The results and their tangents. Which inputs are differentiated decides what a backend must be able to do."""
    (inputs,) = primals
    moving = {name: found for name, found in _given(tangents[0]).items() if not _is_zero(found)}
    if "alibi_slopes" in moving:
        raise SpecError("alibi_slopes: expected no gradient, it is not defined here; use jax.lax.stop_gradient")
    made, with_lse = _planned(call, inputs, True, "bias" in moving), call.options.return_lse
    out, lse = _run(made, inputs, with_lse=True)
    out = checkpoint_name(out, OUT_NAME)
    residuals = {**_given(inputs), "out": out}
    if lse is not None:
        residuals["lse"] = lse = checkpoint_name(lse, LSE_NAME)
    derivative = Derivative(made, with_lse, tuple(residuals), tuple(moving))
    found = tangent.of(derivative, list(residuals.values()), list(moving.values()))
    return ((out, lse), tuple(found)) if with_lse else (out, found[0])


@partial(jax.jit, static_argnums=0, inline=True)
def compiled(call: Call, inputs: Inputs) -> Any:
    """The output of a call, or ``(out, lse)``."""
    found = _attention(call, inputs)
    if inputs.sinks is None or not call.options.return_lse:
        return found
    end = None if call.documents is None else inputs.cu_seqlens_q[call.documents]
    return found[0], lone_sinks.in_lse(found[1], inputs.sinks, end)


def _planned(call: Call, inputs: Inputs, needs_backward: bool, bias_gradient: bool) -> plan.Plan:
    metadata = plan.metadata(inputs)
    made = plan.plan(metadata, call.device, call.options, needs_backward, bias_gradient, call.requested)
    return made._replace(as_one=inputs.k is None)


def _run(made: plan.Plan, inputs: Inputs, *, with_lse: bool) -> tuple[Any, Any]:
    out, lse = ops.forward(made, _rows(made, inputs), with_lse=with_lse)
    return (out[None] if made.one_row else out), lse


def _rows(made: plan.Plan, inputs: Inputs) -> Inputs:
    """The inputs as backends take them: packed rows without the row axis, masks and biases with four axes.

    Offsets on a GPU cannot be looked at, so they are made safe; equal computations in one program are done once.
    """
    if made.one_row:  # [1, tokens, heads, dim] -> [tokens, heads, dim]
        q, k, v = (None if array is None else array[0] for array in inputs[:3])
        inputs = inputs._replace(q=q, k=k, v=v)
    if made.spec.packed and made.device != "cpu":
        queries = safe_offsets(inputs.cu_seqlens_q, made.spec.q_len)
        keys = safe_offsets(inputs.cu_seqlens_k, made.spec.kv_len)
        inputs = inputs._replace(cu_seqlens_q=queries, cu_seqlens_k=keys)
    shapes = {"mask": made.spec.mask_shape, "bias": made.spec.bias_shape}
    return inputs._replace(**{name: getattr(inputs, name).reshape(shape) for name, shape in shapes.items() if shape})


def _given(inputs: Inputs) -> dict[str, Any]:
    return {name: array for name, array in inputs._asdict().items() if array is not None}


def _is_zero(found: Any) -> bool:
    return isinstance(found, jax.custom_derivatives.SymbolicZero)
