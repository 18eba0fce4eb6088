"""Runs a backend's forward or backward on one device's JAX arrays: a whole call, or that device's part of one.

A call is planned while JAX traces, for the device at hand. JAX may lower the program for another platform:
``jax.export`` for the platforms in its arguments, ``jax.jit`` for the devices of the arrays. The primitive
``attn_bridged`` decides while it is lowered: on the kernel's platform it becomes the kernel, on any other the same call
of ``jax_xla``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import mlir

from attn_core import backends
from attn_core.call.checks import result_error
from attn_core.call.observe import range_name
from attn_core.call.tensors import Gradients, Inputs, PagedInputs
from attn_core.errors import SpecError, note_call
from attn_core.selection import Target, refusals, row_maximum
from jax_frontend.bridge import targets
from jax_frontend.bridge.bridged_call import BridgedCall, BridgedStep
from jax_frontend.dispatch import primitive_rules
from jax_frontend.dispatch.plan import Plan

Names = tuple[str, ...] | None


def result_types(call: BridgedCall, *operands: jax.Array) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the types of a call's results, varying over the same mesh axes of ``shard_map`` as its first operand.

    Otherwise JAX would take the results to be equal on every device. The first operand stands for all of them, because
    ``attention.run`` makes all operands vary over the same axes.
    """
    spec, like = call.spec, jax.typeof(operands[0])
    if call.direction == "backward":
        by_name = dict(zip(call.names, operands, strict=True))
        types: list[Any] = [(by_name[name[1:]].shape, by_name[name[1:]].dtype) for name in call.results]
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
    record = backends.load(call.backend, backends.kind_of(call.device))
    return record.framework == "jax"


def has_lse(plan: Plan) -> bool:
    """Returns whether the backend's forward returns the log-sum-exp."""
    record = backends.load(plan.backend, backends.kind_of(plan.device))
    return record.forward_claims.lse


def has_maximum(plan: Plan) -> bool:
    """Returns whether the backend's forward also has the row maxima."""
    record = backends.load(plan.backend, backends.kind_of(plan.device))
    return record.forward_with_maximum(plan.spec) is not None


def run(call: BridgedCall, *operands: jax.Array) -> list[jax.Array]:
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


def _run(call: BridgedCall, *operands: jax.Array) -> list[jax.Array]:
    """Runs a call on the arrays of one device, by a backend of JAX or through the bridge; checks what it returns."""
    if not speaks_jax(call):
        return list(targets.run(call, result_types(call, *operands), *operands))
    record: Any = backends.load(call.backend, backends.kind_of(call.device))
    named = dict(zip(call.names, operands, strict=True))
    saved = [named.pop(name, None) for name in ("out", "lse", "dout", "dlse")]
    moved = {name[1:]: named.pop(name) for name in call.extras} if call.direction == "jvp" else {}
    inputs = to_inputs(named)
    if call.direction == "forward":
        results = _forward(call, record, inputs)
    elif call.direction == "jvp":
        results = _tangents(call, inputs, moved)
    elif call.direction == "row_maximum":
        results = [record.row_maximum.function(call.spec, inputs)]
    else:
        gradients: Gradients = record.backward(call.spec, inputs, *saved)
        by_name = gradients._asdict() | ({"dqkv": jnp.stack(gradients[:3], -3)} if "qkv" in named else {})
        results = [by_name[name] for name in call.results]
    for name, result, expected in zip(call.results, results, result_types(call, *operands), strict=True):
        if result.shape != expected.shape or result.dtype != expected.dtype:
            raise result_error(name, result, expected.shape, str(expected.dtype))
    return results


def _forward(call: BridgedCall, record: Any, inputs: Inputs) -> list[jax.Array]:
    """Returns the results of a forward: out, and if the call wants them lse and the largest logits."""
    if not call.with_maximum:
        return list(record.forward(call.spec, inputs)[: 1 + call.with_lse])
    with_maximum = record.forward_with_maximum(call.spec)
    if with_maximum is not None:
        *results, top = with_maximum(call.spec, inputs)
    else:  # planned for another backend, on another platform
        results = record.forward(call.spec, inputs)
        # A pass over q and k. Its spec has no values, for which the keys stand.
        alone = inputs._replace(v=inputs.k, sinks=None, rng=None)
        top = record.row_maximum.function(row_maximum.spec_of(call.spec), alone)
    return [*results[: 1 + call.with_lse], top]


def _tangents(call: BridgedCall, inputs: Inputs, moved: dict[str, jax.Array]) -> list[jax.Array]:
    """Returns the tangents of a JAX backend's results, by JAX's derivative of its operations."""
    record = backends.load(call.backend, backends.kind_of(call.device))

    def forward(moving: dict[str, jax.Array]) -> list[jax.Array]:
        return list(record.forward(call.spec, inputs._replace(**moving))[: 1 + call.with_lse])

    primals = {name: getattr(inputs, name) for name in moved}
    return jax.jvp(forward, (primals,), (moved,))[1]  # type: ignore[no-any-return]


def empty_results(call: BridgedCall, *operands: jax.Array) -> list[jax.Array]:
    """Returns the results of a call without queries or keys: out is 0; a log-sum-exp or a row's maximum is -inf."""
    values = [0.0 if name == "out" else -jnp.inf for name in call.results]
    types = result_types(call, *operands)
    return [
        varying_as(operands, jnp.full(each.shape, value, each.dtype)) for each, value in zip(types, values, strict=True)
    ]


def varying_as(operands: Sequence[jax.Array], constant: jax.Array) -> jax.Array:
    """Types a constant, inside ``jax.shard_map``, as varying over every mesh axis that an operand varies over."""
    return vary_over(varying_axes(*operands), constant)


def varying_axes(*arrays: jax.Array) -> frozenset[str]:
    """Returns the mesh axes of ``jax.shard_map`` that some array varies over."""
    return frozenset().union(*(jax.typeof(array).manual_axis_type.varying for array in arrays))  # type: ignore[attr-defined]


def vary_over(axes: frozenset[str], array: jax.Array) -> jax.Array:
    """Types an array, inside ``jax.shard_map``, as varying over these axes as well."""
    # Sorted, because the order of a set of strings differs between processes, which must trace one program.
    missing = tuple(sorted(axes - varying_axes(array)))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


def to_inputs(named: Mapping[str, jax.Array]) -> Any:
    """Returns named operands as Inputs with q, k and v as three arrays, or as PagedInputs for a paged call."""
    rest = {name: array for name, array in named.items() if name != "qkv"}
    if "block_table" in named:
        return PagedInputs(**named)
    if "qkv" not in named:
        return Inputs(**rest)
    return Inputs(*(named["qkv"][..., which, :, :] for which in range(3)), **rest)  # [..., tokens, 3, heads, head_dim]


def present_operands(inputs: Inputs | PagedInputs, as_one: bool) -> tuple[tuple[str, ...], Sequence[jax.Array]]:
    """Returns the names of the operands that a call has, and the operands."""
    present = [(name, array) for name, array in zip(inputs._fields, inputs, strict=True) if array is not None]
    names, operands = zip(*present, strict=True)
    return ("qkv", *names[1:]) if as_one else names, operands


def run_anywhere(call: BridgedCall, requested: Names, *operands: jax.Array) -> list[jax.Array]:
    """Returns the results of a call, for any platform that it is lowered for; traceable.

    Args:
        requested: the backends that the caller named, if any: no other may run. None for automatic choice.
    """
    if speaks_jax(call):
        return run(call, *operands)
    # The program goes along as a parameter of the primitive, because only lowering knows the platform.
    program = _bridged(call).trace(*operands).jaxpr
    return bridged_p.bind(*operands, call=call, requested=requested, program=program)  # type: ignore[no-any-return]


def runs_on(call: BridgedCall | BridgedStep, platform: str) -> bool:
    """Returns whether the kernels of a call run on a platform, by JAX's name for it."""
    return backends.kind_of(call.device) == platform


@lru_cache(maxsize=4096)
def _bridged(call: BridgedCall) -> Any:
    return jax.jit(partial(run, call))


def _xla_function(call: BridgedCall, requested: Names, platform: str) -> Callable[..., list[jax.Array]]:
    """Returns a function that runs the call by XLA's operations.

    Raises:
        SpecError: if the caller named other backends, or XLA's operations cannot run the call.
    """
    plain = backends.plain_backend("jax")
    if requested is not None and plain not in requested:
        raise SpecError(
            f"backend={', '.join(requested)!r}: expected a program for {call.device}, because its kernels run there "
            f'only, got one for the platform {platform!r}; backend=None and backend="{plain}" run on every platform'
        )
    reasons = refusals(plain, call.spec, Target("jax", "cpu"))
    if reasons:
        raise SpecError(
            f"platform {platform!r}: expected a call that {plain} can run, as {call.backend} runs on {call.device} "
            f"alone, got {call.spec}, refused: {'; '.join(reasons)}"
        )
    return partial(run, call._replace(backend=plain))


def is_exported_over_a_mesh(ctx: Any) -> bool:
    """Returns whether ``jax.export`` lowers a program for several devices that leaves to XLA how to split it."""
    if not ctx.module_context.lowering_parameters.for_export:
        return False
    context = ctx.module_context.axis_context
    mesh = getattr(context, "mesh", None)  # None outside jax.shard_map
    if mesh is None:
        return getattr(context, "num_devices", 1) > 1
    return mesh.size > 1 and set(context.manual_axes) != set(mesh.axis_names)


def splittable(whole: Any) -> Any:
    """Returns a ``MappedCall`` in XLA's operations, which XLA splits over a mesh in another process, too.

    Raises:
        SpecError: if the caller named other backends, or XLA's operations cannot run the call.
    """
    call, requested, plain = whole.call, whole.requested, backends.plain_backend("jax")
    reasons: tuple[str, ...] = ()
    if requested is not None and plain not in requested:
        reasons = (f"backend={', '.join(requested)!r}",)
    elif call.direction != "row_maximum":
        reasons = refusals(plain, call.spec, Target("jax", "cpu"))
    if reasons:
        raise SpecError(
            f"jax.export over a mesh: expected a call that {plain} can run, or one inside jax.shard_map, because only "
            f"this process can split calls of kernels, got {'; '.join(reasons)}"
        )
    return whole._replace(call=call._replace(backend=plain))


def _lower(
    platform: str,
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    call: BridgedCall,
    requested: Names,
    program: ClosedJaxpr,
) -> Any:
    if runs_on(call, platform):
        function: Callable[..., Any] = jaxpr_as_fun(program)
    else:  # planned for a GPU, say, and lowered for a CPU
        # The lowering for all other platforms has no name of its own; the context has it.
        function = _xla_function(call, requested, platform or "/".join(ctx.platforms or ctx.module_context.platforms))
    return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)


bridged_p = primitive_rules.program_primitive("attn_bridged")
mlir.register_lowering(bridged_p, partial(_lower, ""))
for _platform in ("cpu", "cuda"):
    mlir.register_lowering(bridged_p, partial(_lower, _platform), platform=_platform)
