"""FlashAttention 2 on AMD's GPUs: the kernels of flash-attn's builds for ROCm, by CK or Triton. We have never run them.

The builds take the arguments of the CUDA build, so everything but the claims is that of ``backend.py``. They silently
ignore some arguments: ``ROCM_CK`` and ``ROCM_TRITON`` name what each lacks, and ``rocm_refusals`` refuses it.
"""

from __future__ import annotations

from dataclasses import replace

from attn_core.backends.flash2 import backend
from attn_core.backends.flash2.limits import rocm_refusals
from attn_core.backends.support import Build
from attn_core.call.spec import AttentionSpec

FRAMEWORK, REQUIRES, WRITES_INTO = backend.FRAMEWORK, backend.REQUIRES, backend.WRITES_INTO
FORWARD = replace(backend.FORWARD, devices=("gfx90a", "gfx942", "gfx950"), unproven=True)
BACKWARD = replace(backend.BACKWARD, devices=FORWARD.devices, unproven=True)


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Refuses what the CUDA build cannot do either, and what builds for ROCm ignore."""
    return (*backend.refuses(spec, device, build), *rocm_refusals(spec, build))


probe, build, lower = backend.probe, backend.build, backend.lower
forward, backward, shortcut = backend.forward, backend.backward, backend.shortcut
