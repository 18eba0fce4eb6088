"""Attention as a differentiable JAX function: forward and reverse mode, remat, and types inside ``jax.shard_map``.

For a row that sees no key, backends return a log-sum-exp of -inf with or without sinks, because their backwards
recognise the row by that and ignore its dout. The caller gets the sink, the only term of such a row's sum: JAX
operations after the kernel put it there, so that JAX computes its gradient.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attn_core.call.functions import AUX
from attn_core.call.tensors import Inputs
from attn_core.errors import SpecError
from attn_core.expressions.properties import aux_numbers
from attn_core.selection import NoBackendError, Target, explain
from jax_frontend.dispatch import max_logit, ops, plan, tangent
from jax_frontend.dispatch.local_call import has_maximum, speaks_jax, vary_over, varying_as, varying_axes

Array = jax.Array


def fill_with_sinks(lse: Array, sinks: Array, end: Array | int | None = None) -> Array:
    """Returns the log-sum-exp ``[..., heads, rows]`` with the sinks ``[heads]`` in place of -inf.

    Args:
        end: the first row that belongs to no document, a number or an array of one; None if all rows belong to one.
            Rows from ``end`` on stay -inf.
    """
    # Adding to zeros gives the sinks lse's sharding and varying mesh axes, which ``where`` requires.
    sinks = jnp.zeros_like(lse) + jnp.expand_dims(_split_as_heads(sinks, lse), (*range(lse.ndim - 2), lse.ndim - 1))
    alone = (lse == -jnp.inf) & (sinks != -jnp.inf)
    if end is not None:
        alone &= jnp.expand_dims(jnp.arange(lse.shape[-1], dtype=jnp.int32) < end, tuple(range(lse.ndim - 1)))
    return jnp.where(alone, sinks, lse)


def _split_as_heads(sinks: Array, lse: Array) -> Array:
    """Returns the sinks in lse's dtype; on a mesh with Explicit axes also split as lse's heads are."""
    sinks, source, target = sinks.astype(lse.dtype), jax.typeof(sinks).sharding, jax.typeof(lse).sharding  # type: ignore[attr-defined]
    if any(source.spec) and AxisType.Explicit in source.mesh.axis_types:
        return jax.sharding.reshard(sinks, NamedSharding(target.mesh, PartitionSpec(target.spec[-2])))  # type: ignore[no-any-return]
    return sinks


OUT_NAME, LSE_NAME = "attention_out", "attention_lse"
"""The names by which ``jax.checkpoint`` policies select the forward's results that the backward needs."""


def varying_alike(inputs: Inputs) -> Inputs:
    """Inside ``jax.shard_map``: types every input as varying over all the mesh axes that any input varies over.

    A kernel's results vary wherever an operand varies. JAX then sums the gradient of an input that was equal on every
    device over those axes, as it does for its own operations.
    """
    present = _present(inputs)
    every = varying_axes(*present.values())
    if not every:  # outside ``jax.shard_map``
        return inputs
    return inputs._replace(**{name: vary_over(every, array) for name, array in present.items()})


class Derivative(NamedTuple):
    """The derivative of one call, a ``tangent.Linear``. The residuals are the call's inputs, out and lse, if any."""

    call_plan: plan.Plan
    with_lse: bool
    """Whether the log-sum-exp is a result of the call."""
    names: tuple[str, ...]
    """The names of the residuals."""
    moving: tuple[str, ...]
    """The inputs with a tangent."""

    @property
    def results(self) -> tuple[int, ...]:
        """The indices of the residuals out and, if it is a result, lse: the output tangents have their types."""
        return tuple(self.names.index(name) for name in ("out", "lse")[: 1 + self.with_lse])

    def tangent(self, *arrays: Array) -> tuple[Array, ...]:
        """Forward mode: by a kernel that computes tangents, or by JAX's derivative of a JAX backend's operations.

        Raises:
            SpecError: if no backend, or not the requested one, has forward mode for the call.
        """
        return self._tangent(plan.with_tangents(self.call_plan), arrays)

    def differentiable(self, *arrays: Array) -> tuple[Array, ...]:
        """Forward mode by a JAX backend alone, whose operations JAX differentiates again."""
        return self._tangent(plan.with_tangents(self.call_plan, again=True), arrays)

    def _tangent(self, call_plan: plan.Plan, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        """Returns the tangents of the results: by JAX, or for a kernel of torch by its own forward mode."""
        inputs, _, _ = self._split(arrays)
        moving = dict(zip(self.moving, arrays[len(self.names) :], strict=True))
        if not speaks_jax(call_plan):
            return self._by_kernel(call_plan, inputs, moving)

        def forward(moved: dict[str, Array]) -> tuple[Array, ...]:
            return _run(call_plan, inputs._replace(**moved), with_lse=True)[: 1 + self.with_lse]

        primals = {name: getattr(inputs, name) for name in self.moving}
        return jax.jvp(forward, (primals,), (moving,))[1]  # type: ignore[no-any-return]

    def _by_kernel(self, call_plan: plan.Plan, inputs: Inputs, moving: dict[str, Array]) -> tuple[Array, ...]:
        """Returns the tangents of the results by the primitive ``attn_jvp``."""
        if call_plan.as_one:  # [..., tokens, 3, heads, head_dim] -> three arrays
            call_plan = call_plan._replace(as_one=False)
            inputs = inputs._replace(**_apart(inputs.q))
            moving = moving | (_apart(moving["q"]) if "q" in moving else {})
        operands = ops.backend_inputs(call_plan, inputs)
        # The tangents take the shapes that ``ops.backend_inputs`` gives to their arrays.
        tangents = {name: array.reshape(getattr(operands, name).shape) for name, array in moving.items()}
        dout, dlse = ops.jvp(call_plan, operands, tangents)
        return (dout[None] if call_plan.one_row else dout, dlse)[: 1 + self.with_lse]

    def transpose(self, *arrays: Array | None) -> list[Array]:
        """Reverse mode: runs the backend's backward. Raises NoBackendError if it has none."""
        spec = self.call_plan.spec
        if not spec.needs_backward:  # see _derivative_plan
            target = Target.here("jax", self.call_plan.device)
            raise NoBackendError(explain(replace(spec, needs_backward=True), target, self.call_plan.requested))
        inputs, out, lse = self._split(arrays)
        dout, *dlse = arrays[len(self.names) :]  # None for a cotangent that is zero
        dout = jnp.zeros_like(out) if dout is None else dout
        if self.call_plan.one_row:
            out, dout = out[0], dout[0]
        operands = ops.backend_inputs(self.call_plan, inputs)
        gradients = ops.backward(self.call_plan, operands, out, lse, dout, dlse[0] if dlse else None)
        # Undoes the shapes of ``ops.backend_inputs``.
        return [getattr(gradients, f"d{name}").reshape(getattr(inputs, name).shape) for name in self.moving]

    def _split(self, arrays: tuple[Array | None, ...]) -> tuple[Inputs, Any, Any]:
        """Returns (inputs, out, lse) from the residuals, which come first among the arrays."""
        residuals = dict(zip(self.names, arrays, strict=False))
        out, lse = residuals.pop("out"), residuals.pop("lse", None)
        # Without k and v among the residuals, q is q, k and v in one array.
        return Inputs(**{"k": None, "v": None, **residuals}), out, lse


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attention(call: plan.Plan, inputs: Inputs) -> tuple[Array, ...]:
    # JAX runs this if nothing is differentiated, so kernels without a backward may run.
    with_lse = call.spec.return_lse
    out, lse, top = _run(call, inputs, with_lse=with_lse, with_maximum=call.with_maximum)
    return (out, *([lse] if with_lse else []), *([top] if call.with_maximum else []))


# Symbolic zeros tell which inputs have a gradient, so that the backend needs no gradient of the others.
@partial(_attention.defjvp, symbolic_zeros=True)
def _derivative(
    call: plan.Plan, primals: tuple[Inputs], tangents: tuple[Inputs]
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Returns the results and their tangents. The inputs with a tangent decide what the backend must support."""
    (inputs,) = primals
    moving = {name: moved for name, moved in _present(tangents[0]).items() if not _is_zero(moved)}
    if "alibi_slopes" in moving:
        raise SpecError("alibi_slopes: expected no gradient, it is not defined here; use jax.lax.stop_gradient")
    score_mod = call.spec.score_mod
    read = () if score_mod is None else aux_numbers(score_mod)  # a mask function has no gradient
    numbers = tuple(number for number in read if AUX[number] in moving)
    unread = {AUX[number] for number in range(len(AUX)) if number not in read}
    moving = {name: moved for name, moved in moving.items() if name not in unread}
    # Planned again, because a backend without a backward may have run the forward if no gradient was needed.
    call, with_lse = _derivative_plan(call, "bias" in moving, numbers), call.spec.return_lse
    out, lse, top = _run(call, inputs, with_lse=True, with_maximum=call.with_maximum)
    last = [top] if call.with_maximum else []
    if call.spec.empty:
        # No value depends on an input. Under vmap the results are then constants without the mapped axis, and so must
        # be their tangents.
        results = (out, *([lse] if with_lse else []), *last)
        return results, tuple(varying_as([array], jnp.zeros_like(array)) for array in results)
    out = checkpoint_name(out, OUT_NAME)
    residuals = {**_present(inputs), "out": out}
    if lse is not None:
        residuals["lse"] = lse = checkpoint_name(lse, LSE_NAME)
    derivative = Derivative(call, with_lse, tuple(residuals), tuple(moving))
    tangents_out = tangent.bind(derivative, list(residuals.values()), list(moving.values()))
    return (out, *([lse] if with_lse else []), *last), (*tangents_out, *map(jnp.zeros_like, last))


@partial(jax.jit, static_argnums=0, inline=True)
def differentiable_attention(call: plan.Plan, inputs: Inputs) -> Array | tuple[Array, ...]:
    """Returns the output of a call, or a tuple of out and, as far as the call returns them, lse and max_logit."""
    out, *others = _attention(call, inputs)
    if inputs.sinks is not None and call.spec.return_lse:
        end = None if call.documents is None else inputs.cu_seqlens_q[call.documents]
        others[0] = fill_with_sinks(others[0], inputs.sinks, end)
    return (out, *others) if others else out


def _derivative_plan(call: plan.Plan, bias_gradient: bool, aux_gradients: tuple[int, ...]) -> plan.Plan:
    """Returns a plan with a backward; for backends that the caller named, one with forward mode alone will do.

    Forward and reverse mode begin alike, and JAX does not say which one follows.
    """
    try:
        return plan.with_gradient(call, bias_gradient, aux_gradients)
    except NoBackendError as error:
        try:
            plan.with_tangents(call)
        except (NoBackendError, SpecError):
            raise error from None
        return call


def _run(call: plan.Plan, inputs: Inputs, *, with_lse: bool, with_maximum: bool = False) -> tuple[Any, Any, Any]:
    """Returns out, lse and max_logit; None for those that are not wanted, or that the backend does not have."""
    operands, own = ops.backend_inputs(call, inputs), with_maximum and has_maximum(call)
    out, lse, rows = ops.forward(call, operands, with_lse=with_lse, with_maximum=own)
    top = max_logit.of_rows(rows) if own else max_logit.by_a_pass(call, operands) if with_maximum else None
    return (out[None] if call.one_row else out), lse, top


def _apart(qkv: Array) -> dict[str, Array]:
    """Returns q, k and v of one array ``[..., tokens, 3, heads, head_dim]``."""
    return {name: qkv[..., at, :, :] for at, name in enumerate("qkv")}


def _present(inputs: Inputs) -> dict[str, Array]:
    return {name: array for name, array in inputs._asdict().items() if array is not None}


def _is_zero(moved: object) -> bool:
    return isinstance(moved, jax.custom_derivatives.SymbolicZero)
