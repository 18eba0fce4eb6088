"""Limits how many shapes automatic choice gives to cuDNN, because each costs memory and time that never come back.

torch prepares a plan in cuDNN for every new shape of a call, and keeps it until the process ends. A program with ever
new lengths would spend most of its time on plans and grow without end. So after MOST_SHAPES shapes, automatic choice
takes another kernel for a new one. The shapes that have a plan stay with cuDNN, and so do calls that name it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from attn_core.call.spec import AttentionSpec
from attn_core.selection import Target

MOST_SHAPES = 64
"""A plan takes 1.9 MB of the host's memory and 40 ms; with the gradient 3.0 MB and 104 ms (H100, torch 2.11, cuDNN
9.19, measured on 2026-11-26)."""
NAME = "sdpa_cudnn"
WHY = (
    f"{MOST_SHAPES} shapes of this process have a plan in cuDNN, which it never frees; automatic choice makes no "
    f"more. Pad lengths to a few sizes, or name it: backend={NAME!r}"
)

_shapes: dict[AttentionSpec, None] = {}
"""The calls that automatic choice gave to cuDNN."""


def limited(target: Target, spec: AttentionSpec) -> Target:
    """Returns the target for the automatic choice of a call: without cuDNN if a new shape would exceed the limit."""
    return target if len(_shapes) < MOST_SHAPES or spec in _shapes else _without(target)


@lru_cache(maxsize=64)
def _without(target: Target) -> Target:
    return replace(target, unavailable=(*target.unavailable, (NAME, WHY)))


def chosen(spec: AttentionSpec, name: str) -> None:
    """Notes the automatic choice of a call."""
    if name == NAME:
        _shapes.setdefault(spec)
