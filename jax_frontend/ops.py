"""The primitives ``attn_forward`` and ``attn_backward``: a torch backend's two halves as JAX sees them.

Each holds one bridged call. They lower to a custom call; vmap folds the mapped axis into the batch, or runs one row
after another where folding would change the meaning (packed documents, mapped sinks).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from attn_core import backends
from attn_core.backends import Gradients, Inputs
from attn_core.selection import Target, refusals
from attn_core.spec import AttentionSpec
from jax_frontend import bridge
from jax_frontend.plan import Plan

Shape = jax.ShapeDtypeStruct
_BATCHED = ("q", "k", "v", "qkv", "out", "lse", "dout", "dlse")  # operands whose leading axis is the batch


def forward(made: Plan, inputs: Inputs, *, with_lse: bool = True) -> tuple[Any, Any]:
    """(out, lse) of a planned call, traceable; lse may be None unless it is asked for.

    Where ``made.as_one``, ``inputs.q`` is q, k and v in one array and ``inputs.k`` and ``inputs.v`` are None.
    """
    spec = made.spec
    if spec.empty:
        return jnp.zeros(spec.out_shape, spec.dtype), jnp.full(spec.lse_shape, -jnp.inf, spec.lse_dtype)
    module: Any = backends.load(made.backend, backends.kind_of(made.device))
    if module.FRAMEWORK == "jax":
        return module.forward(spec, apart(made, inputs))
    names, given = _present(made, inputs)
    call = bridge.BridgedCall("forward", made.backend, made.device, spec, names, with_lse=with_lse)
    out, *lse = forward_p.bind(*given, call=call)
    return out, lse[0] if with_lse else None


def backward(made: Plan, inputs: Inputs, out: Any, lse: Any, dout: Any, dlse: Any) -> Gradients:
    """The gradients of a planned call, traceable; dlse is None when nothing depends on the log-sum-exp.

    Where ``made.as_one``, dq is the gradient of the one array, and dk and dv are None.
    """
    spec = made.spec
    if spec.empty:
        zeros = Inputs(*(None if array is None else jnp.zeros_like(array) for array in inputs))
        dbias, dsinks = zeros.bias if spec.bias_gradient else None, zeros.sinks
        return Gradients(zeros.q, zeros.k, zeros.v, dbias, dsinks)
    module: Any = backends.load(made.backend, backends.kind_of(made.device))
    if module.FRAMEWORK == "jax":
        found = module.backward(spec, apart(made, inputs), out, lse, dout, dlse)
        return _together(found) if made.as_one else found
    names, given = _present(made, inputs)
    saved = {"out": out, "lse": lse, "dout": dout, **({} if dlse is None else {"dlse": dlse})}
    call = bridge.BridgedCall("backward", made.backend, made.device, spec, names, tuple(saved))
    results = backward_p.bind(*given, *saved.values(), call=call)
    if made.as_one:
        rest = dict(zip(call.gradients[3:], results[1:], strict=True))
        return Gradients(results[0], None, None, **rest)
    return Gradients(**dict(zip(call.gradients, results, strict=True)))


def apart(made: Plan, inputs: Inputs) -> Inputs:
    """The inputs with q, k and v as three arrays."""
    if not made.as_one:
        return inputs
    q, k, v = (inputs.q[..., which, :, :] for which in range(3))  # [..., tokens, 3, heads, head_dim]
    return inputs._replace(q=q, k=k, v=v)


def _together(found: Gradients) -> Gradients:
    return found._replace(dq=jnp.stack(found[:3], -3), dk=None, dv=None)


def _present(made: Plan, inputs: Inputs) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    found = [(name, array) for name, array in zip(Inputs._fields, inputs, strict=True) if array is not None]
    names, given = zip(*found, strict=True)
    return ("qkv", *names[1:]) if made.as_one else names, given


def _result_shapes(call: bridge.BridgedCall, *operands: Any) -> list[Shape]:
    spec = call.spec
    if call.direction == "forward":
        lse = [Shape(spec.lse_shape, jnp.dtype(spec.lse_dtype))] if call.with_lse else []
        return [Shape(spec.out_shape, jnp.dtype(spec.dtype)), *lse]
    by_name = dict(zip(call.operands, operands, strict=False))
    names = ("qkv", *(name[1:] for name in call.gradients[3:])) if "qkv" in by_name else None
    like = [by_name[name] for name in names or (name[1:] for name in call.gradients)]
    return [Shape(array.shape, array.dtype) for array in like]


def _abstract(*operands: Any, call: bridge.BridgedCall) -> list[Any]:
    return [jax.core.ShapedArray(s.shape, s.dtype) for s in _result_shapes(call, *operands)]


def _custom_call(*operands: Any, call: bridge.BridgedCall) -> list[Any]:
    return list(bridge.run(call, tuple(_result_shapes(call, *operands)), *operands))


@lru_cache(maxsize=4096)
def _compiled(call: bridge.BridgedCall) -> Any:
    return jax.jit(partial(_custom_call, call=call))


def _eager(*operands: Any, call: bridge.BridgedCall) -> list[Any]:
    return _compiled(call)(*operands)


def _batched(
    primitive: Primitive, operands: tuple[Any, ...], axes: tuple[int | None, ...], *, call: bridge.BridgedCall
) -> tuple[list[Any], list[int]]:
    """vmap: one call on a batch n times as large, or n calls one after another."""
    names = (*call.operands, *call.extras)
    size = next(array.shape[axis] for array, axis in zip(operands, axes, strict=True) if axis is not None)
    front = [
        array if axis is None else jnp.moveaxis(array, axis, 0) for array, axis in zip(operands, axes, strict=True)
    ]
    mapped = [axis is not None for axis in axes]
    if size == 0:
        return _no_results(call, front, mapped)
    spec = _folded_spec(call, size, dict(zip(names, mapped, strict=True)))
    if spec is None or refusals(call.backend, spec, Target.here("jax", call.device)):
        return _one_by_one(primitive, front, mapped, call)
    folded = [
        _fold(name, array, was, call.spec.batch, size) for name, array, was in zip(names, front, mapped, strict=True)
    ]
    results = primitive.bind(*folded, call=call._replace(spec=spec))
    split = [array.reshape(size, array.shape[0] // size, *array.shape[1:]) for array in results]
    return split, [0] * len(split)


def _no_results(call: bridge.BridgedCall, front: list[Any], mapped: list[bool]) -> tuple[list[Any], list[int]]:
    """What a vmap over nothing gives: results with a leading axis of 0."""
    one = [Shape(array.shape[was:], array.dtype) for array, was in zip(front, mapped, strict=True)]
    shapes = _result_shapes(call, *one)
    return [jnp.zeros((0, *shape.shape), shape.dtype) for shape in shapes], [0] * len(shapes)


def _folded_spec(call: bridge.BridgedCall, size: int, mapped: dict[str, bool]) -> AttentionSpec | None:
    """The spec with the mapped axis folded into its batch; None where the result would not be the same call."""
    spec, shared_gradient = call.spec, call.spec.sinks or call.spec.bias_gradient
    if spec.packed or mapped.get("sinks") or mapped.get("rng"):
        return None
    if call.direction == "backward" and shared_gradient:
        return None  # each mapped element has a gradient of the sinks or the bias; one call would sum them
    batch = spec.batch * size
    changes: dict[str, Any] = {"batch": batch}
    for name in ("mask", "bias"):
        shape = getattr(spec, f"{name}_shape")
        if shape is not None and (mapped[name] or shape[0] != 1):
            changes[f"{name}_shape"] = (batch, *shape[1:])
    if spec.alibi_shape is not None and (mapped["alibi_slopes"] or len(spec.alibi_shape) == 2):
        changes["alibi_shape"] = (batch, spec.num_heads)
    return replace(spec, **changes)


def _fold(name: str, array: Any, mapped: bool, batch: int, size: int) -> Any:
    """An operand with the mapped axis (leading, if mapped) folded into its batch axis."""
    if name in _BATCHED:
        if not mapped:
            array = jnp.broadcast_to(array, (size, *array.shape))
        return array.reshape(size * batch, *array.shape[2:])
    if name == "sinks":  # [heads], of every batch row alike; mapped ones never get here
        return array
    if name == "alibi_slopes":
        if not mapped and array.ndim == 1:
            return array
        if not mapped:
            array = jnp.broadcast_to(array, (size, *array.shape))
        rows = array if array.ndim == 3 else array[:, None]
        return jnp.broadcast_to(rows, (size, batch, rows.shape[2])).reshape(size * batch, -1)
    if not mapped and array.shape[0] == 1:  # mask or bias shared by the whole batch
        return array
    if not mapped:
        array = jnp.broadcast_to(array, (size, *array.shape))
    return jnp.broadcast_to(array, (size, batch, *array.shape[2:])).reshape(size * batch, *array.shape[2:])


def _one_by_one(
    primitive: Primitive, front: list[Any], mapped: list[bool], call: bridge.BridgedCall
) -> tuple[list[Any], list[int]]:
    def one(rows: list[Any]) -> list[Any]:
        moving = iter(rows)
        return primitive.bind(
            *(next(moving) if was else fixed for fixed, was in zip(front, mapped, strict=True)), call=call
        )

    results = jax.lax.map(one, [array for array, was in zip(front, mapped, strict=True) if was])
    return list(results), [0] * len(results)


def _primitive(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(_eager)
    primitive.def_abstract_eval(_abstract)
    mlir.register_lowering(primitive, mlir.lower_fun(_custom_call, multiple_results=True))
    batching.primitive_batchers[primitive] = partial(_batched, primitive)
    return primitive


forward_p = _primitive("attn_forward")
backward_p = _primitive("attn_backward")
