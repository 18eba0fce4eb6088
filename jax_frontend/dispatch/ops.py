"""The primitives ``attn_forward`` and ``attn_backward``: a backend's two halves as JAX sees them.

Each holds one call (``local_call``), and the program it lowers to, which XLA splits over a mesh by batch
and heads (``partitioning``). vmap folds the mapped axis into the batch, or keeps the rows apart where
folding would change the meaning (packed documents, mapped sinks).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from attn_core.call.tensors import Gradients, Inputs
from attn_core.errors import SpecError
from jax_frontend.bridge.bridged_call import BridgedCall
from jax_frontend.dispatch import local_call, partitioning, primitive_rules, tangent
from jax_frontend.dispatch.plan import Plan
from jax_frontend.dispatch.vmap import Folded, batched


def forward(made: Plan, inputs: Any, *, with_lse: bool = True) -> tuple[Any, Any]:
    """(out, lse) of a planned call, traceable; lse is None unless it is asked for, and where the backend has none.

    Where ``made.as_one``, ``inputs.q`` is q, k and v in one array and ``inputs.k`` and ``inputs.v`` are None.
    """
    names, given = local_call.present(inputs, made.as_one)
    with_lse = with_lse and local_call.has_lse(made)
    call = BridgedCall("forward", made.backend, made.device, made.spec, names, with_lse=with_lse, beside=made.beside)
    if made.spec.empty:
        out, *lse = partitioning.under_auto_axes(partial(local_call.nothing, call), Folded(call), given)
    else:
        out, *lse = _run(forward_p, Folded(call, requested=made.requested), given)
    return out, lse[0] if with_lse else None


def backward(made: Plan, inputs: Inputs, out: Any, lse: Any, dout: Any, dlse: Any) -> Gradients:
    """The gradients of a planned call, traceable; dlse is None when nothing depends on the log-sum-exp, lse as above.

    Where ``made.as_one``, dq is the gradient of the one array, and dk and dv are None.
    """
    spec = made.spec
    if spec.empty:
        zeros = Inputs(*(None if array is None else jnp.zeros_like(array) for array in inputs))
        dbias, dsinks = zeros.bias if spec.bias_gradient else None, zeros.sinks
        return Gradients(zeros.q, zeros.k, zeros.v, dbias, dsinks)
    names, given = local_call.present(inputs, made.as_one)
    extras = {"out": out, "lse": lse, "dout": dout, "dlse": dlse}
    saved = {name: array for name, array in extras.items() if array is not None}
    call = BridgedCall("backward", made.backend, made.device, spec, names, tuple(saved), beside=made.beside)
    results = _run(backward_p, Folded(call, requested=made.requested), (*given, *saved.values()))
    if made.as_one:
        rest = dict(zip(call.gradients[3:], results[1:], strict=True))
        return Gradients(results[0], None, None, **rest)
    return Gradients(**dict(zip(call.gradients, results, strict=True)))


def _run(primitive: Primitive, whole: Folded, operands: Sequence[Any]) -> list[Any]:
    """A call by its primitive; or by the operations of a JAX backend, where XLA splits those and cannot split a call.

    With dropout: which weights are dropped depends on the indices of the whole call, which neither a part of it nor
    rows folded into a batch would have. And inside a ``jax.shard_map`` over some axes of a mesh.
    """
    call = whole.call
    inside = partitioning.partly_manual()
    plain = call.spec.dropout or (inside and local_call.speaks_jax(call))
    run = (whole.run if inside else _operations(whole)) if plain else partial(_bind, primitive, whole)
    return partitioning.under_auto_axes(run, whole, operands)


@lru_cache(maxsize=4096)
def _operations(call: Folded) -> Any:
    """The operations as one program: the backward of an eager call would else run them one by one."""
    return jax.jit(call.run)


def _bind(primitive: Primitive, call: Folded, *operands: Any) -> list[Any]:
    program = _traceable(call, partitioning.partly_manual()).trace(*operands).jaxpr
    return primitive.bind(*operands, call=call, program=low(program))  # type: ignore[no-any-return]


@lru_cache(maxsize=4096)
def _traceable(call: Folded, partly_manual: bool) -> Any:
    return jax.jit(partitioning.partitioned(call, partly_manual))


@lru_cache(maxsize=4096)
def low(program: ClosedJaxpr) -> ClosedJaxpr:
    """The program in operations that JAX can lower: those of jnp may be made of others (searchsorted, in jax 0.12)."""
    if not program.is_high:
        return program
    types = [
        jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=kind.sharding, manual_axis_type=kind.manual_axis_type)
        for kind in program.in_avals
    ]
    return jax.jit(jaxpr_as_fun(program)).trace(*types).lojax.jaxpr


@lru_cache(maxsize=4096)
def compiled(program: ClosedJaxpr) -> Any:
    """The program as a jitted function."""
    return jax.jit(jaxpr_as_fun(program))


def _eager(*operands: Any, call: Folded, program: ClosedJaxpr) -> list[Any]:
    return list(compiled(program)(*operands))


def _abstract(*operands: Any, call: Folded, program: ClosedJaxpr) -> list[Any]:
    return list(program.out_avals)


def _lowered(*operands: Any, call: Folded, program: ClosedJaxpr) -> list[Any]:
    return list(jaxpr_as_fun(program)(*operands))


def _derivative(primals: Any, tangents: Any, *, call: Folded, program: ClosedJaxpr) -> tuple[Any, Any]:
    """Forward mode of one half: of a JAX backend by its operations, of any other an error."""
    if not local_call.speaks_jax(call.call):
        raise SpecError(
            f"backend={call.call.backend!r}: expected first derivatives in reverse mode (jax.grad, jax.vjp), its "
            'kernels have no others; backend="jax_xla" has forward mode, also of its gradients'
        )
    moving = tuple(not isinstance(tangent, ad.Zero) for tangent in tangents)
    tangents_in = [tangent for tangent, moves in zip(tangents, moving, strict=True) if moves]
    derivative = OfOperations(call, moving)
    if call.call.direction == "forward":
        return derivative.jvp(primals, tangents_in)
    results = backward_p.bind(*primals, call=call, program=program)
    return results, tangent.of(derivative, [*primals, *results], tangents_in)


class OfOperations(NamedTuple):
    """The derivative of a JAX backend's half by the operations it is made of, as ``tangent.Linear`` has it.

    Attributes:
        moving: which operands have a tangent.
    """

    call: Folded
    moving: tuple[bool, ...]

    @property
    def results(self) -> tuple[int, ...]:
        """The residuals are the operands and the results."""
        count = len(local_call.names_of(self.call.call)[1])
        return tuple(range(len(self.moving), len(self.moving) + count))

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        """(results, their tangents)."""

        def run(*moved: Any) -> list[Any]:
            rest = iter(moved)
            return self.call.run(*(next(rest) if moves else x for x, moves in zip(primals, self.moving, strict=True)))

        moved = [array for array, moves in zip(primals, self.moving, strict=True) if moves]
        return jax.jvp(run, moved, list(tangents))  # type: ignore[no-any-return]

    def tangent(self, *arrays: Any) -> Sequence[Any]:
        """Forward mode."""
        residuals = len(self.moving) + len(self.results)
        return self.jvp(arrays[: len(self.moving)], arrays[residuals:])[1]  # type: ignore[no-any-return]

    def transpose(self, *arrays: Any) -> Sequence[Any]:
        """Reverse mode of a gradient, which has loops without one."""
        raise SpecError(
            f"backend={self.call.call.backend!r}: expected second derivatives in forward over reverse mode "
            "(jax.hessian, jax.jvp of jax.grad), its gradients have no reverse mode"
        )


def _primitive(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(_eager)
    primitive.def_abstract_eval(_abstract)
    mlir.register_lowering(primitive, mlir.lower_fun(_lowered, multiple_results=True))
    ad.primitive_jvps[primitive] = _derivative
    primitive_rules.has_no_transpose(primitive)
    primitive_rules.gives_nan(primitive)
    batching.primitive_batchers[primitive] = partial(batched, partial(_bind, primitive))
    return primitive


forward_p = _primitive("attn_forward")
backward_p = _primitive("attn_backward")
