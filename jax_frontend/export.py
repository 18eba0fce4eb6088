"""What ``jax.export`` must be told of programs with bridged calls."""

from __future__ import annotations

from jax.export import DisabledSafetyCheck

from jax_frontend.bridge import compiled_lane
from jax_frontend.bridge import targets as bridge


def export_checks() -> list[DisabledSafetyCheck]:
    """For ``jax.export.export(..., disabled_checks=export_checks())``: the custom calls of this process's kernels.

    ``jax.export`` refuses custom calls of which it does not know that they mean the same elsewhere. A call of the
    callback lane does where its description is known under the same name: in a process with the same version of this
    package, once a function with the same call has been traced there (``jax.eval_shape`` of the exported function is
    enough). Elsewhere the exported program raises a BridgeError, or says that there is no such FFI handler. Kernels of
    the compiled lane are in the list once they are compiled, that is when a function that runs them has been traced.

    A program for several devices can be exported if its calls are inside ``jax.shard_map``; what XLA is to split by
    itself cannot, and ``jax.export`` says so.
    """
    targets = [bridge._target(direction) for direction in ("forward", "backward")]
    return [DisabledSafetyCheck.custom_call(name) for name in (*targets, *compiled_lane.compile_seconds())]
