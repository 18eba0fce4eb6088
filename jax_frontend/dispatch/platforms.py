"""Lowers a call for a platform that its kernel does not run on: by XLA's operations, or with an error.

A call is planned while JAX traces, for the device at hand. JAX may lower the program for another platform:
``jax.export`` for the platforms in its arguments, ``jax.jit`` for the devices of the arrays. The primitive
``attn_bridged`` decides while it is lowered: on the kernel's platform it becomes the kernel, on any other the same call
of ``jax_xla``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import mlir

from attn_core import backends
from attn_core.errors import SpecError
from attn_core.selection import Target, refusals
from jax_frontend.bridge.bridged_call import BridgedCall
from jax_frontend.dispatch import local_call, primitive_rules

Names = tuple[str, ...] | None


def run(call: BridgedCall, requested: Names, *operands: Any) -> list[Any]:
    """Returns the results of a call, for any platform that it is lowered for; traceable.

    Args:
        requested: the backends that the caller named, if any: no other may run. None for automatic choice.
    """
    if local_call.speaks_jax(call):
        return local_call.run(call, *operands)
    program = _bridged(call).trace(*operands).jaxpr
    return bridged_p.bind(*operands, call=call, requested=requested, program=program)  # type: ignore[no-any-return]


def runs_on(call: Any, platform: str) -> bool:
    """Returns whether the kernels of a call run on a platform, by JAX's name for it."""
    return backends.kind_of(call.device) == platform


@lru_cache(maxsize=4096)
def _bridged(call: BridgedCall) -> Any:
    return jax.jit(partial(local_call.run, call))


def _xla_function(call: BridgedCall, requested: Names, platform: str) -> Callable[..., list[Any]]:
    """Returns a function that runs the call by XLA's operations.

    Raises:
        SpecError: if the caller named other backends, or XLA's operations cannot run the call.
    """
    if requested is not None and "jax_xla" not in requested:
        raise SpecError(
            f"backend={', '.join(requested)!r}: expected a program for {call.device}, because its kernels run there "
            f'only, got one for the platform {platform!r}; backend=None and backend="jax_xla" run on every platform'
        )
    reasons = refusals("jax_xla", call.spec, Target("jax", "cpu"))
    if reasons:
        raise SpecError(
            f"platform {platform!r}: expected a call that jax_xla can run, as {call.backend} runs on {call.device} "
            f"alone, got {call.spec}, refused: {'; '.join(reasons)}"
        )
    return partial(local_call.run, call._replace(backend="jax_xla"))


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
    call, requested = whole.call, whole.requested
    reasons: tuple[str, ...] = ()
    if requested is not None and "jax_xla" not in requested:
        reasons = (f"backend={', '.join(requested)!r}",)
    elif call.direction != "row_maximum":
        reasons = refusals("jax_xla", call.spec, Target("jax", "cpu"))
    if reasons:
        raise SpecError(
            "jax.export over a mesh: expected a call that jax_xla can run, or one inside jax.shard_map, because only "
            f"this process can split calls of kernels, got {'; '.join(reasons)}"
        )
    return whole._replace(call=call._replace(backend="jax_xla"))


def _lower(platform: str, ctx: Any, *operands: Any, call: BridgedCall, requested: Names, program: ClosedJaxpr) -> Any:
    if runs_on(call, platform):
        function: Callable[..., Any] = jaxpr_as_fun(program)
    else:
        # The lowering for all other platforms has no name of its own; the context has it.
        function = _xla_function(call, requested, platform or "/".join(ctx.platforms or ctx.module_context.platforms))
    return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)


bridged_p = primitive_rules.program_primitive("attn_bridged")
mlir.register_lowering(bridged_p, partial(_lower, ""))
for _platform in ("cpu", "cuda"):
    mlir.register_lowering(bridged_p, partial(_lower, _platform), platform=_platform)
