"""Counts the seconds that XLA compiles for eager calls; the programs of a caller's own ``jax.jit`` are not ours."""

from __future__ import annotations

from typing import Any

import jax

from attn_core.call.compiles import compiled

EVENT = "/jax/core/compile/backend_compile_duration"
PROGRAMS = {
    "jit(differentiable_attention)": "an eager call of attention",
    "jit(attention_program)": "the gradient of an eager call of attention",
}
"""The names that JAX gives to our own jitted functions, and what they are."""


def _count(event: str, duration_secs: float, **more: Any) -> None:
    what = PROGRAMS.get(more.get("fun_name", "")) if event == EVENT else None
    if what is not None:
        compiled("xla", what, duration_secs)


jax.monitoring.register_event_duration_secs_listener(_count)
