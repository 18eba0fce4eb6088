"""export_checks: lets ``jax.export`` accept programs with bridged calls."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from jax.export import DisabledSafetyCheck

from attn_core.backends import flash3_xla, jax_cudnn
from attn_core.backends.shared import kernel_programs
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


class _Checks(Sequence[DisabledSafetyCheck]):
    """The custom calls that this process knows at the moment at which somebody reads the sequence."""

    def __len__(self) -> int:
        return len(_targets())

    def __getitem__(self, index: Any) -> Any:
        checks = [DisabledSafetyCheck.custom_call(name) for name in _targets()]
        return checks[index]

    def __add__(self, others: Sequence[DisabledSafetyCheck]) -> list[DisabledSafetyCheck]:
        return [*self, *others]

    def __radd__(self, others: Sequence[DisabledSafetyCheck]) -> list[DisabledSafetyCheck]:
        return [*others, *self]

    def __iter__(self) -> Iterator[DisabledSafetyCheck]:  # one list, although tracing may add calls meanwhile
        return iter(self[:])

    def __repr__(self) -> str:
        return "jax_frontend.export_checks()"


def _targets() -> tuple[str, ...]:
    # Not "step": exported programs run steps of context parallelism by branches.
    targets = [bridge._target(direction) for direction in ("forward", "backward", "jvp", "row_maximum")]
    of_backends = (*jax_cudnn.CUSTOM_CALLS, *flash3_xla.CUSTOM_CALLS)
    return (*targets, *compiled_lane.compile_seconds(), kernel_programs.TARGET, *of_backends)


def export_checks() -> Sequence[DisabledSafetyCheck]:
    """Returns the checks for ``jax.export.export(..., disabled_checks=export_checks())``: our kernels' custom calls,
    jax.nn's calls of cuDNN and those of ``flash3_xla``, because automatic choice may select them.

    ``jax.export`` refuses custom calls that it does not know to be portable. A call of the callback lane runs in any
    process with the same version of this package, once a function with the same call has been traced there
    (``jax.eval_shape`` of the exported function is enough). In other processes the exported program raises a
    BridgeError, or XLA reports that it has no such FFI handler.

    A kernel of the compiled lane gets its name when it is compiled: when a function that runs it is traced. The
    sequence is read after that, so it has the kernels of the exported function. A list that is made from it, such as
    ``export_checks() + [other]``, has only those of functions that were traced before, and so has the gradient of an
    exported function (``vjp_order=1``): trace the gradient once before, with ``jax.eval_shape(jax.grad(...), ...)``.

    A program over a mesh has kernels if its calls are inside ``jax.shard_map``. Calls that XLA must split become XLA's
    operations, whatever the platform, and a backend named by the caller is an error unless it is ``"jax_xla"``.
    """
    _asked.set(True)
    return _Checks()
