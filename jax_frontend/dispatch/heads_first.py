"""Calls whose heads are before the sequence: their axes are exchanged."""

from __future__ import annotations

from typing import Any

import jax

from attn_core.call.layouts import Layout


def in_layout(results: Any, layout: Layout) -> Any:
    """Returns the output, or a tuple that begins with it, with the output in a layout."""
    if layout == "bshd":
        return results
    return (exchanged(results[0]), *results[1:]) if isinstance(results, tuple) else exchanged(results)


def exchanged(array: Any) -> Any:
    """Returns an array or its shape with the axes of the sequence and the heads exchanged; any other value as it is."""
    shape: Any = getattr(array, "shape", ())
    if len(shape) < 3:
        return array
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((*shape[:-3], shape[-2], shape[-3], shape[-1]), array.dtype)
    return array.swapaxes(-3, -2)
