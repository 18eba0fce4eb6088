"""One half of a backend on JAX arrays: what a device runs, of a whole call or of its part of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from attn_core import backends
from attn_core.call.tensors import Gradients, Inputs, PagedInputs
from jax_frontend.bridge import targets
from jax_frontend.bridge.bridged_call import BridgedCall
from jax_frontend.dispatch.plan import Plan


def names_of(call: BridgedCall) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of a call's operands, and of its results; "qkv" and "dqkv" where q, k and v are one array."""
    operands = (*call.operands, *call.extras)
    if call.direction == "forward":
        return operands, ("out", "lse") if call.with_lse else ("out",)
    return operands, ("dqkv", *call.gradients[3:]) if call.operands[0] == "qkv" else call.gradients


def result_types(call: BridgedCall, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The types of a call's results, varying over the mesh axes of ``shard_map`` that its first operand varies over.

    Without this JAX would take the results for equal on every device. The operands vary alike (``attention.run``).
    """
    spec, like = call.spec, jax.typeof(operands[0])
    if call.direction == "forward":
        types = [(spec.out_shape, spec.dtype), (spec.lse_shape, spec.lse_dtype)][: 1 + call.with_lse]
    else:
        names, gradients = names_of(call)
        by_name = dict(zip(names, operands, strict=True))
        types = [(by_name[name[1:]].shape, by_name[name[1:]].dtype) for name in gradients]
    return types_like(like, types)


def types_like(like: Any, types: Sequence[tuple[tuple[int, ...], Any]]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Types of (shape, dtype) for arrays that vary over the mesh axes that one of the type ``like`` varies over."""
    whole = jax.sharding.NamedSharding(like.sharding.mesh, jax.sharding.PartitionSpec())
    varying = like.manual_axis_type
    return tuple(
        jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=whole, manual_axis_type=varying)
        for shape, dtype in types
    )


def speaks_jax(call: BridgedCall | Plan) -> bool:
    """Whether the backend's halves are JAX functions, which JAX can look into."""
    module: Any = backends.load(call.backend, backends.kind_of(call.device))
    return bool(module.FRAMEWORK == "jax")


def has_lse(made: Plan) -> bool:
    """Whether the backend's forward gives the log-sum-exp."""
    module: Any = backends.load(made.backend, backends.kind_of(made.device))
    return bool(module.FORWARD.lse)


def run(call: BridgedCall, *operands: Any) -> list[Any]:
    """The results of a call: of one bridged call, or of the backend's own JAX functions; traceable."""
    if not speaks_jax(call):
        return list(targets.run(call, result_types(call, *operands), *operands))
    module: Any = backends.load(call.backend, backends.kind_of(call.device))
    named = dict(zip(names_of(call)[0], operands, strict=True))
    saved = [named.pop(name, None) for name in ("out", "lse", "dout", "dlse")]
    inputs = apart(named)
    if call.direction == "forward":
        return list(module.forward(call.spec, inputs)[: 1 + call.with_lse])
    found: Gradients = module.backward(call.spec, inputs, *saved)
    gradients = found._asdict() | ({"dqkv": jnp.stack(found[:3], -3)} if "qkv" in named else {})
    return [gradients[name] for name in names_of(call)[1]]


def nothing(call: BridgedCall, *operands: Any) -> list[Any]:
    """The results of a forward without queries or keys: out is 0, and every log-sum-exp -inf."""
    values = (0.0, -jnp.inf)[: 1 + call.with_lse]
    types = result_types(call, *operands)
    return [
        varying_as(operands, jnp.full(each.shape, value, each.dtype)) for each, value in zip(types, values, strict=True)
    ]


def varying_as(operands: Sequence[Any], constant: Any) -> Any:
    """A constant typed, inside ``jax.shard_map``, as varying over every mesh axis that an operand varies over."""
    axes = frozenset().union(*(jax.typeof(array).manual_axis_type.varying for array in operands))  # type: ignore[attr-defined]
    return jax.lax.pcast(constant, tuple(sorted(axes)), to="varying") if axes else constant


def apart(named: dict[str, Any]) -> Any:
    """Named operands as Inputs, q, k and v as three arrays; as PagedInputs where they are of a paged call."""
    rest = {name: array for name, array in named.items() if name != "qkv"}
    if "block_table" in named:
        return PagedInputs(**named)
    if "qkv" not in named:
        return Inputs(**rest)
    return Inputs(*(named["qkv"][..., which, :, :] for which in range(3)), **rest)  # [..., tokens, 3, heads, head_dim]


def present(inputs: Any, as_one: bool) -> tuple[tuple[str, ...], Sequence[Any]]:
    """The names of the operands that a call has, and the operands."""
    found = [(name, array) for name, array in zip(inputs._fields, inputs, strict=True) if array is not None]
    names, given = zip(*found, strict=True)
    return ("qkv", *names[1:]) if as_one else names, given
