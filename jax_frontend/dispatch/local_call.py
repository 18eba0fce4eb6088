"""Runs a backend's forward or backward on one device's JAX arrays: a whole call, or that device's part of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from attn_core import backends
from attn_core.call.failed_calls import note_call
from attn_core.call.ranges import range_name
from attn_core.call.results import result_error
from attn_core.call.tensors import Gradients, Inputs, PagedInputs
from attn_core.selection import row_maximum
from jax_frontend.bridge import targets
from jax_frontend.bridge.bridged_call import BridgedCall
from jax_frontend.dispatch.plan import Plan


def result_types(call: BridgedCall, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the types of a call's results, varying over the same mesh axes of ``shard_map`` as its first operand.

    Otherwise JAX would take the results to be equal on every device. The first operand stands for all of them, because
    ``attention.run`` makes all operands vary over the same axes.
    """
    spec, like = call.spec, jax.typeof(operands[0])
    if call.direction == "backward":
        by_name = dict(zip(call.names, operands, strict=True))
        types = [(by_name[name[1:]].shape, by_name[name[1:]].dtype) for name in call.results]
    else:
        rows = spec.lse_shape, spec.lse_dtype
        types = [(spec.out_shape, spec.dtype) if name in ("out", "dout") else rows for name in call.results]
    return types_like(like, types)


def types_like(like: Any, types: Sequence[tuple[tuple[int, ...], Any]]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the types of arrays of each (shape, dtype), varying over the same mesh axes as the type ``like``."""
    whole = jax.sharding.NamedSharding(like.sharding.mesh, jax.sharding.PartitionSpec())
    varying = like.manual_axis_type
    return tuple(
        jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=whole, manual_axis_type=varying)
        for shape, dtype in types
    )


def speaks_jax(call: BridgedCall | Plan) -> bool:
    """Returns whether the backend's forward and backward are JAX functions, which JAX can trace and differentiate."""
    module = backends.load(call.backend, backends.kind_of(call.device))
    return module.FRAMEWORK == "jax"


def has_lse(plan: Plan) -> bool:
    """Returns whether the backend's forward returns the log-sum-exp."""
    module = backends.load(plan.backend, backends.kind_of(plan.device))
    return module.FORWARD.lse


def has_maximum(plan: Plan) -> bool:
    """Returns whether the backend's forward also has the row maxima."""
    module = backends.load(plan.backend, backends.kind_of(plan.device))
    return backends.forward_with_maximum(module, plan.spec) is not None


def run(call: BridgedCall, *operands: Any) -> list[Any]:
    """Returns a call's results, by the bridge or by the backend's own JAX functions; traceable.

    XLA knows the call's operations by the name of its range; the name costs nothing when the program runs.
    """
    name = range_name(call.backend, call.spec, call.direction)
    try:
        with jax.named_scope(name):
            return _run(call, *operands)
    except Exception as error:
        note_call(error, name)
        raise


def _run(call: BridgedCall, *operands: Any) -> list[Any]:
    if not speaks_jax(call):
        return list(targets.run(call, result_types(call, *operands), *operands))
    module = backends.load(call.backend, backends.kind_of(call.device))
    named = dict(zip(call.names, operands, strict=True))
    saved = [named.pop(name, None) for name in ("out", "lse", "dout", "dlse")]
    moved = {name[1:]: named.pop(name) for name in call.extras} if call.direction == "jvp" else {}
    inputs = to_inputs(named)
    if call.direction == "forward":
        results = _forward(call, module, inputs)
    elif call.direction == "jvp":
        results = _tangents(call, inputs, moved)
    elif call.direction == "row_maximum":
        results = [module.row_maximum(call.spec, inputs)]
    else:
        gradients: Gradients = module.backward(call.spec, inputs, *saved)
        by_name = gradients._asdict() | ({"dqkv": jnp.stack(gradients[:3], -3)} if "qkv" in named else {})
        results = [by_name[name] for name in call.results]
    for name, result, expected in zip(call.results, results, result_types(call, *operands), strict=True):
        if result.shape != expected.shape or result.dtype != expected.dtype:
            raise result_error(name, result, expected.shape, str(expected.dtype))
    return results


def _forward(call: BridgedCall, module: Any, inputs: Inputs) -> list[Any]:
    if not call.with_maximum:
        return list(module.forward(call.spec, inputs)[: 1 + call.with_lse])
    with_maximum = backends.forward_with_maximum(module, call.spec)
    if with_maximum is not None:
        *results, top = with_maximum(call.spec, inputs)
    else:  # planned for another backend, on another platform
        results = module.forward(call.spec, inputs)
        alone = inputs._replace(v=inputs.k, sinks=None, rng=None)
        top = module.row_maximum(row_maximum.spec_of(call.spec), alone)
    return [*results[: 1 + call.with_lse], top]


def _tangents(call: BridgedCall, inputs: Inputs, moved: dict[str, Any]) -> list[Any]:
    """Returns the tangents of a JAX backend's results, by JAX's derivative of its operations."""
    module = backends.load(call.backend, backends.kind_of(call.device))

    def forward(moving: dict[str, Any]) -> list[Any]:
        return list(module.forward(call.spec, inputs._replace(**moving))[: 1 + call.with_lse])

    primals = {name: getattr(inputs, name) for name in moved}
    return jax.jvp(forward, (primals,), (moved,))[1]  # type: ignore[no-any-return]


def empty_results(call: BridgedCall, *operands: Any) -> list[Any]:
    """Returns the results of a call without queries or keys: out is 0; a log-sum-exp or a row's maximum is -inf."""
    values = [0.0 if name == "out" else -jnp.inf for name in call.results]
    types = result_types(call, *operands)
    return [
        varying_as(operands, jnp.full(each.shape, value, each.dtype)) for each, value in zip(types, values, strict=True)
    ]


def varying_as(operands: Sequence[Any], constant: Any) -> Any:
    """Types a constant, inside ``jax.shard_map``, as varying over every mesh axis that an operand varies over."""
    return vary_over(varying_axes(*operands), constant)


def varying_axes(*arrays: Any) -> frozenset[str]:
    """Returns the mesh axes of ``jax.shard_map`` that some array varies over."""
    return frozenset().union(*(jax.typeof(array).manual_axis_type.varying for array in arrays))  # type: ignore[attr-defined]


def vary_over(axes: frozenset[str], array: Any) -> Any:
    """Types an array, inside ``jax.shard_map``, as varying over these axes as well."""
    # Sorted, because the order of a set of strings differs between processes, which must trace one program.
    missing = tuple(sorted(axes - varying_axes(array)))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


def to_inputs(named: dict[str, Any]) -> Any:
    """Returns named operands as Inputs with q, k and v as three arrays, or as PagedInputs for a paged call."""
    rest = {name: array for name, array in named.items() if name != "qkv"}
    if "block_table" in named:
        return PagedInputs(**named)
    if "qkv" not in named:
        return Inputs(**rest)
    return Inputs(*(named["qkv"][..., which, :, :] for which in range(3)), **rest)  # [..., tokens, 3, heads, head_dim]


def present_operands(inputs: Any, as_one: bool) -> tuple[tuple[str, ...], Sequence[Any]]:
    """Returns the names of the operands that a call has, and the operands."""
    present = [(name, array) for name, array in zip(inputs._fields, inputs, strict=True) if array is not None]
    names, operands = zip(*present, strict=True)
    return ("qkv", *names[1:]) if as_one else names, operands
