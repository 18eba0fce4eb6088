"""The primitives ``attn_forward``, ``attn_backward`` and ``attn_jvp``: what a backend computes, as JAX sees it.

The parameters of each are one call (``local_call``) and the program that the call lowers to, which XLA splits over a
mesh by batch and heads (``partitioning``). vmap folds the mapped axis into the batch, or runs the elements separately
if folding would change the meaning (packed documents, mapped sinks).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from attn_core import backends
from attn_core.backends.shared.in_jax import safe_offsets
from attn_core.call.functions import AUX, DAUX
from attn_core.call.observe import compiled
from attn_core.call.tensors import Gradients, Inputs, PagedInputs, Tangents
from attn_core.errors import SpecError
from attn_core.selection import Target, forward_mode
from jax_frontend.bridge.bridged_call import BridgedCall
from jax_frontend.dispatch import (
    export,
    local_call,
    partitioning,
    primitive_rules,
    tangent,
    value_checks,
)
from jax_frontend.dispatch.plan import Plan
from jax_frontend.dispatch.vmap import MappedCall, batch_call

Array = jax.Array


class Results(NamedTuple):
    """The results of a forward; None for those that are not wanted, or that the backend does not have."""

    out: Any
    lse: Any
    row_maximum: Any


def backend_inputs(plan: Plan, inputs: Inputs) -> Inputs:
    """Returns the inputs as backends take them: packed rows without the row axis, masks and biases with four axes.

    The values of offsets on a GPU cannot be checked here, so they are clamped into range. XLA computes the clamp once
    in a program, although the forward and the backward each ask for it.
    """
    spec = plan.spec
    if plan.one_row:  # [1, tokens, heads, dim] -> [tokens, heads, dim]
        q, k, v = (None if array is None else array[0] for array in (inputs.q, inputs.k, inputs.v))
        inputs = inputs._replace(q=q, k=k, v=v)
    if spec.packed and plan.device != "cpu":
        queries = safe_offsets(inputs.cu_seqlens_q, spec.q_len)
        keys = safe_offsets(inputs.cu_seqlens_k, spec.kv_len)
        inputs = inputs._replace(cu_seqlens_q=queries, cu_seqlens_k=keys)
    shapes = {"mask": spec.mask_shape, "bias": spec.bias_shape}
    return inputs._replace(**{name: getattr(inputs, name).reshape(shape) for name, shape in shapes.items() if shape})


def forward(plan: Plan, inputs: Inputs | PagedInputs, *, with_lse: bool = True, with_maximum: bool = False) -> Results:
    """Returns the results of a planned call; traceable.

    lse is None without ``with_lse``, or if the backend has none. The row maxima are None without ``with_maximum``,
    which needs ``local_call.has_maximum``.

    If ``plan.as_one``, ``inputs.q`` is q, k and v in one array, and ``inputs.k`` and ``inputs.v`` are None.
    """
    with_lse = with_lse and local_call.has_lse(plan)
    flags = {"with_lse": with_lse, "with_maximum": with_maximum, "overlaps_exchange": plan.overlaps_exchange}
    whole, operands = _planned_call("forward", plan, inputs, {}, **flags, tables_checked=plan.tables_checked)
    if plan.spec.empty:
        empty = partial(local_call.empty_results, whole.call)
        out, *others = partitioning.run_under_auto_axes(empty, whole, operands)
    else:
        out, *others = run_call(forward_p, whole, operands)
    return Results(out, others[0] if with_lse else None, others[-1] if with_maximum else None)


def backward(plan: Plan, inputs: Inputs, out: Array, lse: Array | None, dout: Array, dlse: Array | None) -> Gradients:
    """Returns the gradients of a planned call; traceable. dlse is None if nothing depends on the log-sum-exp.

    lse is None if ``forward`` returned None. If ``plan.as_one``, dq is the gradient of the one array, and dk and dv
    are None.
    """
    spec = plan.spec
    if spec.empty:
        zeros = Inputs(*(None if array is None else jnp.zeros_like(array) for array in inputs))
        dbias, dsinks = zeros.bias if spec.bias_gradient else None, zeros.sinks
        daux = {DAUX[number]: getattr(zeros, AUX[number]) for number in spec.aux_gradients}
        return Gradients(zeros.q, zeros.k, zeros.v, dbias, dsinks, **daux)
    extras = {"out": out, "lse": lse, "dout": dout, "dlse": dlse}
    saved = {name: array for name, array in extras.items() if array is not None}
    whole, operands = _planned_call("backward", plan, inputs, saved, overlaps_exchange=plan.overlaps_exchange)
    named = dict(zip(whole.call.results, run_call(backward_p, whole, operands), strict=True))
    if plan.as_one:
        return Gradients(named.pop("dqkv"), None, None, **named)
    return Gradients(**named)


def jvp(plan: Plan, inputs: Inputs, tangents: Mapping[str, Array]) -> tuple[Array, Array]:
    """Returns the tangents of out and lse of a planned call; traceable.

    Args:
        plan: of a torch backend with forward mode.
        tangents: by the names of their arrays, in the shapes and dtypes of these.
    """
    extras = {f"d{name}": array for name, array in tangents.items()}
    assert set(extras) <= set(Tangents._fields)
    dout, dlse = run_call(jvp_p, *_planned_call("jvp", plan, inputs, extras))
    return dout, dlse


def _planned_call(
    direction: str, plan: Plan, inputs: Inputs | PagedInputs, extras: Mapping[str, Array], **flags: bool
) -> tuple[MappedCall, tuple[Array, ...]]:
    """Returns a planned call, and its operands: the inputs that it has, then the extras.

    flags: fields of ``BridgedCall``.
    """
    names, operands = local_call.present_operands(inputs, plan.as_one)
    call = BridgedCall(
        direction, plan.backend, plan.device, plan.spec, names, tuple(extras), checked=plan.checked, **flags
    )
    return MappedCall(call, requested=plan.requested), (*operands, *extras.values())


def run_call(primitive: Primitive, whole: MappedCall, operands: Sequence[Array]) -> list[Array]:
    """Runs a call as its primitive, or as a JAX backend's plain operations if XLA must split those itself.

    XLA must split the operations itself in two cases. With dropout, the dropped weights depend on indices in the whole
    call, which neither a device's part nor rows folded into a batch know. And inside a ``jax.shard_map`` over some axes
    of a mesh, XLA cannot split the primitive.
    """
    call = whole.call
    inside = partitioning.partly_manual()
    # JAX backends stay plain operations in these cases; a bridged call cannot, and has no dropout.
    plain = call.spec.dropout or (inside and local_call.speaks_jax(call))
    run = (whole.run if inside else _jit_operations(whole)) if plain else partial(_bind, primitive, whole)
    results = partitioning.run_under_auto_axes(run, whole, operands)
    if call.checked:
        value_checks.report_results(call, operands, results)
    return results


@lru_cache(maxsize=4096)
def _jit_operations(call: MappedCall) -> Callable[..., list[Array]]:
    """Jits the operations of a call; otherwise the backward of an eager call would run them one by one."""
    return jax.jit(call.run)


def _bind(primitive: Primitive, call: MappedCall, *operands: Array) -> list[Array]:
    # The program is traced here and passed as a parameter, because abstract evaluation, eager runs and lowering all
    # need it, and tracing is slow. Under ``jax.disable_jit``, tracing would unroll loops.
    with jax.disable_jit(False):
        program = partitioning.jit_partitionable(call, partitioning.partly_manual()).trace(*operands).jaxpr
    return primitive.bind(*operands, call=call, program=to_low_jaxpr(program))  # type: ignore[no-any-return]


def to_low_jaxpr(program: ClosedJaxpr) -> ClosedJaxpr:
    """Returns the program in operations that JAX can lower. Some jnp functions need it (searchsorted, in jax 0.12)."""
    # Not in the cache, which would keep a program, 0.1 MiB, after ``jax.clear_caches()``.
    return _lowered(program) if program.is_high else program


# Cached, so that a program always gives the same object: the primitive has it as a parameter, and so JAX's cache keys.
@lru_cache(maxsize=4096)
def _lowered(program: ClosedJaxpr) -> ClosedJaxpr:
    types = [
        jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=kind.sharding, manual_axis_type=kind.manual_axis_type)
        for kind in program.in_avals
    ]
    return jax.jit(jaxpr_as_fun(program)).trace(*types).lojax.jaxpr


def _lower(ctx: mlir.LoweringRuleContext, *operands: Any, call: MappedCall, program: ClosedJaxpr) -> Any:
    if local_call.is_exported_over_a_mesh(ctx):
        return mlir.lower_fun(local_call.splittable(call).run, multiple_results=True)(ctx, *operands)
    if ctx.module_context.lowering_parameters.for_export and not local_call.speaks_jax(call.call):
        export.warn_unasked()
    return primitive_rules.lower_program(ctx, *operands, call=call, program=program)


def _derivative(
    primals: Sequence[Array], tangents: Sequence[Any], *, call: MappedCall, program: ClosedJaxpr
) -> tuple[Sequence[Array], Sequence[Array]]:
    """Forward mode of a forward or a backward: differentiates the operations of a JAX backend that has forward mode.

    The tangents of a kernel's results are those of ``jax_xla``, if the caller named no other backend.
    """
    differentiated = backend_with_derivatives(call)
    moving = tuple(not isinstance(tangent, ad.Zero) for tangent in tangents)
    tangents_in = [tangent for tangent, moves in zip(tangents, moving, strict=True) if moves]
    derivative = OperationsDerivative(differentiated, moving)
    is_forward = call.call.direction == "forward"
    if is_forward and differentiated == call:
        return derivative.jvp(primals, tangents_in)
    results = (forward_p if is_forward else backward_p).bind(*primals, call=call, program=program)
    return results, tangent.bind(derivative, [*primals, *results], tangents_in)


@lru_cache(maxsize=1024)
def backend_with_derivatives(call: MappedCall) -> MappedCall:
    """Returns the call of a JAX backend whose operations JAX differentiates in the place of a forward or backward.

    Raises:
        SpecError: if the caller named backends without ``jax_xla``, or ``jax_xla`` cannot run the call; with reasons.
    """
    record = backends.load(call.call.backend, backends.kind_of(call.call.device))
    if record.framework == "jax" and record.forward_mode is not None:
        return call
    spec, requested, plain = call.call.spec, call.requested, backends.plain_backend("jax")
    names = (plain,) if requested is None or plain in requested else requested
    choice = forward_mode.choose(spec, Target("jax", call.call.device), names, spec.aux_gradients, over_reverse=True)
    if choice.backend != plain:
        raise choice.error()
    return call._replace(call=call.call._replace(backend=plain))


class OperationsDerivative(NamedTuple):
    """The derivative of a JAX backend's forward or backward, a ``tangent.Linear``: JAX differentiates its operations.

    Attributes:
        moving: for each operand, whether it has a tangent.
    """

    call: MappedCall
    moving: tuple[bool, ...]

    @property
    def results(self) -> tuple[int, ...]:
        """The indices of the call's results among the residuals, which are the operands and then the results."""
        count = len(self.call.call.results)
        return tuple(range(len(self.moving), len(self.moving) + count))

    def jvp(self, primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[Sequence[Array], Sequence[Array]]:
        """Returns the results and their tangents."""

        def run(*moved: Array) -> list[Array]:
            rest = iter(moved)
            return self.call.run(*(next(rest) if moves else x for x, moves in zip(primals, self.moving, strict=True)))

        moved = [array for array, moves in zip(primals, self.moving, strict=True) if moves]
        return jax.jvp(run, moved, list(tangents))  # type: ignore[no-any-return]

    def tangent(self, *arrays: Array) -> Sequence[Array]:
        """Forward mode: returns the tangents of the results."""
        residuals = len(self.moving) + len(self.results)
        return self.jvp(arrays[: len(self.moving)], arrays[residuals:])[1]  # type: ignore[no-any-return]

    def differentiable(self, *arrays: Array) -> Sequence[Array]:
        """Forward mode of forward mode: the operations are JAX's."""
        return self.tangent(*arrays)

    def transpose(self, *arrays: object) -> Sequence[Array]:
        """Always raises: a backward's operations contain loops that JAX cannot differentiate in reverse mode."""
        raise SpecError(
            f"backend={self.call.call.backend!r}: expected second derivatives in forward over reverse mode "
            "(jax.hessian, jax.jvp of jax.grad), its gradients have no reverse mode"
        )


def make_primitive(name: str) -> Primitive:
    """Creates a primitive with JAX's rules for running, typing, lowering, differentiating and mapping it."""
    primitive = primitive_rules.program_primitive(name)
    mlir.register_lowering(primitive, _lower)
    # Reverse mode never reaches the primitive: ``differentiable`` gives the forward a derivative of its own. The rule
    # here serves forward mode and second derivatives.
    ad.primitive_jvps[primitive] = _derivative
    batching.primitive_batchers[primitive] = partial(batch_call, partial(_bind, primitive))
    return primitive


forward_p = make_primitive("attn_forward")
backward_p = make_primitive("attn_backward")
jvp_p = make_primitive("attn_jvp")


_COMPILATION = "/jax/core/compile/backend_compile_duration"
_PROGRAMS = {
    "jit(differentiable_attention)": "an eager call of attention",
    "jit(attention_program)": "the gradient of an eager call of attention",
}
"""The names that JAX gives to our own jitted functions, and what they are."""


def _count_compilation(event: str, duration_secs: float, **more: Any) -> None:
    what = _PROGRAMS.get(more.get("fun_name", "")) if event == _COMPILATION else None
    if what is not None:
        compiled("xla", what, duration_secs)


jax.monitoring.register_event_duration_secs_listener(_count_compilation)
