"""FlashAttention 2 on AMD's GPUs: the kernels of flash-attn's builds for ROCm, by CK or Triton. We have never run them.

The builds take the arguments of the CUDA build, so everything but the claims is that of the package. They silently
ignore some arguments: ``ROCM_CK`` and ``ROCM_TRITON`` name what each lacks, and ``_ignored`` refuses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attn_core.backends import flash2
from attn_core.backends.support import Build
from attn_core.call.spec import AttentionSpec

FORWARD = replace(flash2.FORWARD, devices=("gfx90a", "gfx942", "gfx950"), unproven=True)
BACKWARD = replace(flash2.BACKWARD, devices=FORWARD.devices, unproven=True)


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Refuses what the CUDA build cannot do either, and what builds for ROCm ignore."""
    return (*flash2.refuses(spec, device, build), *_ignored(spec, build))


def _ignored(spec: AttentionSpec, build: Build | None) -> Iterator[str]:
    """Refuses what ROCm builds ignore silently, or may ignore."""
    nameless = build is None and "ROCm builds ignore it silently, and it is not known which build this is"
    ignored = spec.deterministic and spec.needs_backward and build != flash2.ROCM_CK
    why = {
        f"softcap={spec.softcap}": spec.softcap is not None and nameless,
        f"window={spec.window}": spec.window != (None, None) and nameless,
        "alibi_slopes": spec.alibi_shape and "it is not known how ROCm builds define the log-sum-exp",
        f"dropout={spec.dropout}": spec.dropout and "ROCm builds do not all draw it from the call's own seed",
        "backward: deterministic=True": ignored and "the ROCm Triton build ignores it",
    }
    return (f"{feature}: {reason}" for feature, reason in why.items() if reason)


BACKEND = replace(flash2.BACKEND, forward_claims=FORWARD, backward_claims=BACKWARD, refuses=refuses)
