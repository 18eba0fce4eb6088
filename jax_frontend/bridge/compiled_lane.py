"""The compiled lane: XLA launches a backend's kernels itself, without Python, and may put them in a CUDA graph.

A backend takes part by two functions: ``program_refuses(spec, device)``, the reasons that follow from data, and
``program(spec, direction, with_dlse)``, the kernels of a call as functions of buffers. Each kernel becomes one custom
call, under a name made of what it was compiled from; all scratch is XLA's. What the lane cannot take, the callback lane
does (``bridge``), and ``why_not`` says why: an interface that changed upstream is such a reason, never an error.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attn_core import backends
from attn_core.backends.shared.cached_once import cached_once
from attn_core.selection import Selection
from jax_frontend.bridge.bridged_call import BridgedCall

log = logging.getLogger("attn_core.compiled_lane")
MOST_TARGETS = 1000
"""jax-tvm-ffi keeps 1024 functions in a process; the callback lane needs one for each direction."""


class Lane(NamedTuple):
    """How XLA runs a call.

    Attributes:
        program: what it launches itself, or None where a callback does it.
        why: the reasons for a callback.
    """

    program: Any
    why: tuple[str, ...] = ()


@lru_cache(maxsize=4096)
def lane_of(call: BridgedCall) -> Lane:
    """The lane of a call on this machine, with every kernel compiled that it needs; once for each call."""
    kind = backends.kind_of(call.device)
    backend: Any = backends.load(call.backend, kind)
    why = static_reasons(call, backend)
    if why:
        return Lane(None, why)
    try:
        program = backend.program(call.spec, call.direction, "dlse" in call.extras)
        for step in program.steps:
            _register(step, "cpu" if kind == "cpu" else "gpu")
    except Exception as error:  # whatever an interface that changed makes of it is the reason
        reason = f"{call.backend}: {type(error).__name__}: {error}"
        log.warning("%s of (%s) runs by callback: %s", call.direction, call.spec, reason)
        return Lane(None, (reason,))
    return Lane(program)


def told(selection: Selection) -> Selection:
    """The Selection with what only the installed backend can say of its lane."""
    if selection.backend is None or selection.lane is None or selection.lane[0] != "compiled":
        return selection
    backend: Any = backends.load(selection.backend, selection.target.kind)
    try:
        backend.program(selection.spec, "forward")
    except Exception as error:
        why = (f"{selection.backend}: {type(error).__name__}: {error}",)
        return replace(selection, lane=("callback", why))
    return selection


def static_reasons(call: BridgedCall, backend: Any) -> tuple[str, ...]:
    """Why a call takes the callback lane, as far as data tell."""
    why = backends.program_refusals(backend, call.spec, call.device)
    if why is None:
        return (f"{call.backend} hands out no compiled kernels",)
    apart = () if call.operands[0] != "qkv" else ("q, k and v in one array: a callback reads them in place",)
    return (*apart, *why)


def run(program: Any, call: BridgedCall, results: tuple[Any, ...], operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """The results of a program on JAX arrays; traceable, a custom call for each kernel."""
    given = dict(zip((*call.operands, *call.extras), operands, strict=True))
    if "dlse" in given:  # rows that see no key have weight 0, whatever their gradient is
        given["dlse"] = jnp.where(given["lse"] == -jnp.inf, 0.0, given["dlse"])
    like = results[0]
    held = {place: given[buffer.name] for place, buffer in enumerate(program.buffers) if buffer.name in given}
    if any(buffer.zeros for buffer in program.buffers):
        held |= _zeros(program.buffers, operands[0])
    for step in program.steps:
        types = [_type(program.buffers[place], like) for place in step.writes]
        updated = {step.reads.index(place): at for at, place in enumerate(step.writes) if place in step.reads}
        launch = jax.ffi.ffi_call(step.target, types, input_output_aliases=updated)
        held |= dict(zip(step.writes, launch(*(held[place] for place in step.reads)), strict=True))
    named = {buffer.name: held[place] for place, buffer in enumerate(program.buffers) if place in held}
    names = ("out", "lse") if call.direction == "forward" else call.gradients
    return tuple(named[name] for name, _ in zip(names, results, strict=False))


def _zeros(buffers: tuple[Any, ...], operand: Any) -> dict[int, Any]:
    """Zeros for the buffers, by their places, that a kernel adds to: no two of one call are one value to XLA.

    In a branch XLA gave one kernel the same memory for two of them, which it had found to be the same zeros (jax 0.11.2
    on GPUs, the sums of dk and dv of flash4). Each is therefore another number of which XLA cannot know that it is 0:
    how many bits of an element are set, which are at most 64, divided by a larger power of 2.
    """
    element = lax.slice(operand, (0,) * operand.ndim, (1,) * operand.ndim).reshape(())
    whole = jnp.dtype(f"uint{8 * operand.dtype.itemsize}")
    bits = lax.population_count(lax.bitcast_convert_type(element, whole)).astype(jnp.int32)
    places = [place for place, buffer in enumerate(buffers) if buffer.zeros]
    return {
        place: jnp.broadcast_to((bits >> 7 + at).astype(buffers[place].dtype), buffers[place].shape)
        for at, place in enumerate(places)
    }


def _type(buffer: Any, like: Any) -> Any:
    """A buffer's type, varying over the mesh axes that ``like`` varies over."""
    return like.update(shape=buffer.shape, dtype=jnp.dtype(buffer.dtype))


def _register(step: Any, platform: str) -> None:
    """Compiles a kernel and makes it known to XLA, once in a process."""
    with _registering():
        if step.target in _targets():
            return
        import jax_tvm_ffi

        if jax_tvm_ffi.registered_count() >= MOST_TARGETS:
            raise RuntimeError(f"this process has {MOST_TARGETS} compiled kernels, and jax-tvm-ffi keeps few more")
        began = time.perf_counter()
        function = step.compile()
        seconds = time.perf_counter() - began
        jax_tvm_ffi.register_ffi_target(step.target, function, ["args", "rets"], platform, allow_cuda_graph=True)
        _targets()[step.target] = seconds
        log.info("compiled %s in %.1f s", step.target, seconds)


def compile_seconds() -> dict[str, float]:
    """Seconds that each kernel of the compiled lane took to compile in this process, by the name XLA has for it."""
    return dict(_targets())


@cached_once
def _targets() -> dict[str, float]:
    return {}


@cached_once
def _registering() -> threading.Lock:
    return threading.Lock()
