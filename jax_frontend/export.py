"""export_checks: lets ``jax.export`` accept programs with bridged calls."""

from __future__ import annotations

import warnings
from contextvars import ContextVar

from jax.export import DisabledSafetyCheck

from attn_core.backends import jax_cudnn
from jax_frontend.bridge import compiled_lane
from jax_frontend.bridge import targets as bridge

_asked: ContextVar[bool] = ContextVar("attn_core_export_checks", default=False)


def warn_unasked() -> None:
    """Warns while ``jax.export`` lowers a bridged call, unless this context has called ``export_checks``."""
    if not _asked.get():
        warnings.warn(
            "jax.export refuses custom calls such as those of this program's attention: pass "
            "disabled_checks=jax_frontend.export_checks()",
            stacklevel=2,
        )


def export_checks() -> list[DisabledSafetyCheck]:
    """Returns the checks for ``jax.export.export(..., disabled_checks=export_checks())``: our kernels' custom calls,
    and jax.nn's calls of cuDNN, because automatic choice may select them.

    ``jax.export`` refuses custom calls that it does not know to be portable. A call of the callback lane runs in any
    process with the same version of this package, once a function with the same call has been traced there
    (``jax.eval_shape`` of the exported function is enough). In other processes the exported program raises a
    BridgeError, or XLA reports that it has no such FFI handler. A kernel of the compiled lane joins the list when it
    is compiled: when a function that runs it is traced.

    A program for several devices can be exported if its calls are inside ``jax.shard_map``. If XLA must split a call
    by itself, ``jax.export`` raises an error.
    """
    _asked.set(True)
    # Not "step": exported programs run steps of context parallelism by branches.
    targets = [bridge._target(direction) for direction in ("forward", "backward")]
    names = (*targets, *compiled_lane.compile_seconds(), *jax_cudnn.CUSTOM_CALLS)
    return [DisabledSafetyCheck.custom_call(name) for name in names]
