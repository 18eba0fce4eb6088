"""The compiled lane: XLA launches a backend's kernels itself, without Python, and may put them in a CUDA graph.

A backend takes part by its ``program``: ``refuses(spec, device)`` returns the reasons that follow from data, and
``make(spec, direction, with_dlse)`` returns the kernels of a call as functions of buffers. With ``operands(spec,
arrays)`` XLA converts operands first. Each kernel becomes one custom call, whose name is derived from everything that
the kernel was compiled from; XLA allocates all scratch. The callback lane (``targets``) runs every other call, and
``Lane.why`` has the reasons. An upstream interface that changed is such a reason, never an error.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attn_core import backends
from attn_core.backends.contract import Program
from attn_core.backends.shared.caches import from_records
from attn_core.call import observe
from attn_core.call.after_fork import free_in_children
from attn_core.call.observe import compiled, words_of
from attn_core.call.spec import AttentionSpec
from attn_core.selection import Selection, choice
from jax_frontend.bridge.bridged_call import BridgedCall

if TYPE_CHECKING:  # few programs need it at run time
    from attn_core.context_parallel.choose import Explanation

log = logging.getLogger("attn_core.compiled_lane")
MOST_TARGETS = 1000
"""The compiled lane's share of jax-tvm-ffi's 1024 functions in a process; the callback lane needs a few of them."""

_compile_seconds: dict[str, float] = {}
"""Seconds that each registered kernel took to compile, by its name in XLA. Guarded by ``_registering``."""
_registering = free_in_children(threading.Lock())
"""Held while a kernel is compiled and registered, so that each is registered once, whichever threads need it."""


class Lane(NamedTuple):
    """How XLA runs a call.

    Attributes:
        program: the kernels that XLA launches itself, or None if a callback runs the call.
        why: the reasons for a callback.
    """

    program: Any
    why: tuple[str, ...] = ()


@from_records(maxsize=4096)
def lane_of(call: BridgedCall) -> Lane:
    """Returns the lane of a call on this machine, after compiling every kernel that it needs; cached by call."""
    kind = backends.kind_of(call.device)
    why = static_reasons(call)
    if why:
        return _callback_lane(call, why)
    try:
        program = _program(call)
        for step in program.steps:
            _register(step, "cpu" if kind == "cpu" else "gpu")
    except Exception as error:  # an interface that changed upstream can raise anything, and a callback still works
        reason = f"{call.backend}: {type(error).__name__}: {error}"
        log.warning("%s of (%s) runs by callback: %s", call.direction, call.spec, reason)
        return _callback_lane(call, (reason,))
    return Lane(program)


def _of_backend(call: BridgedCall) -> Program | None:
    """Returns the kernels that the backend has for XLA and for the call's direction, or None."""
    backend = backends.load(call.backend, backends.kind_of(call.device))
    if call.direction == "row_maximum":
        return None if backend.row_maximum is None else backend.row_maximum.program
    return backend.program


def _program(call: BridgedCall) -> Any:
    """Returns the kernels that the backend recorded for a call."""
    kernels = _of_backend(call)
    assert kernels is not None, "a call without static reasons has a program"
    if call.direction == "row_maximum":
        return kernels.make(call.spec)
    as_one = {"as_one": True} if call.operands[0] == "qkv" else {}
    # A forward before a backward has the log-sum-exp as a result, whether or not the caller wants it.
    spec = replace(call.spec, return_lse=call.with_lse) if call.direction == "forward" else call.spec
    return kernels.make(spec, call.direction, "dlse" in call.extras, **as_one)


def _callback_lane(call: BridgedCall, why: tuple[str, ...]) -> Lane:
    observe.count("fallback", "lane")
    about = {"backend": call.backend, "direction": call.direction, "device": call.device, "call": words_of(call.spec)}
    message = f"{call.backend} {call.direction} runs by callback, because {why[0]}: {about['call']}"
    observe.emit("fallback", message, what="lane", **about, framework="jax", missing=why[0])
    return Lane(None, why)


def with_program_reasons(selection: Selection) -> Selection:
    """Returns the Selection, with "callback" as its lane and the reason, if the backend fails to build its program.

    ``explain`` decides the lane from data alone. Only building the program shows whether the installed version can.
    """
    if selection.backend is None or selection.lane is None or selection.lane[0] != "compiled":
        return selection
    fault = _program_fault(selection.backend, selection.spec, selection.target.kind)
    return selection if fault is None else replace(selection, program_faults=(fault,))


def with_step_reasons(explanation: Explanation) -> Explanation:
    """Returns the explanation of a context-parallel call with the faults of its tiles' programs.

    See ``with_program_reasons``.
    """
    compiled_tiles = (
        (spec, name)
        for spec, name in explanation.call.backends
        if (found := choice.lane_of(name, spec, explanation.target)) is not None and found[0] == "compiled"
    )
    faults = ((name, _program_fault(name, spec, explanation.target.kind)) for spec, name in compiled_tiles)
    return explanation._replace(program_faults=tuple(dict.fromkeys((name, why) for name, why in faults if why)))


def _program_fault(name: str, spec: AttentionSpec, kind: str) -> str | None:
    """Returns why a backend fails to build the programs of a spec; None if it can."""
    program = backends.load(name, kind).program
    assert program is not None, "the compiled lane has a program"
    try:
        for direction in ("forward", *["backward"] * spec.needs_backward):
            program.make(spec, direction)
    except Exception as error:
        # As in lane_of: the callback lane runs the call then.
        return f"{name}: {type(error).__name__}: {error}"
    return None


def static_reasons(call: BridgedCall) -> tuple[str, ...]:
    """Returns the reasons for the callback lane that follow from data alone."""
    program = _of_backend(call)
    if program is None:
        return (f"{call.backend} hands out no compiled kernels",)
    return program.refuses(call.spec, call.device)


def run(
    program: Any, call: BridgedCall, results: tuple[jax.ShapeDtypeStruct, ...], operands: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """Returns the results of a program on JAX arrays; traceable, one custom call for each kernel."""
    by_name = dict(zip(call.names, operands, strict=True))
    if "dlse" in by_name:
        # A row that sees no key has softmax weight 0, so its dlse must not count; the kernels do not check for it.
        by_name["dlse"] = jnp.where(by_name["lse"] == -jnp.inf, 0.0, by_name["dlse"])
    kernels = _of_backend(call)
    by_name |= {} if kernels is None else kernels.operands(call.spec, by_name)
    like = results[0]
    # Buffer index -> array. Operands come first; each step adds the buffers that it writes.
    arrays = {
        at: _padded(by_name[buffer.name], buffer) for at, buffer in enumerate(program.buffers) if buffer.name in by_name
    }
    if any(buffer.zeros for buffer in program.buffers):
        arrays |= _zeros(program.buffers, operands[0])
    for step in program.steps:
        types = [_type(program.buffers[at], like) for at in step.writes]
        # A buffer that a kernel reads and writes is updated in place.
        aliases = {step.reads.index(buffer): at for at, buffer in enumerate(step.writes) if buffer in step.reads}
        launch = jax.ffi.ffi_call(step.target, types, input_output_aliases=aliases)
        attributes = step.attributes() if step.attributes else {}
        arrays |= dict(zip(step.writes, launch(*(arrays[at] for at in step.reads), **attributes), strict=True))
    named = {buffer.name: arrays[at] for at, buffer in enumerate(program.buffers) if at in arrays}
    # A kernel may be wider than the call, and sums some gradients in float32.
    pairs = zip(call.results, results, strict=True)
    return tuple(named[name][..., : result.shape[-1]].astype(result.dtype) for name, result in pairs)


def _padded(array: jax.Array, buffer: Any) -> jax.Array:
    """Returns an operand with zeros behind its last axis, up to the width of its buffer."""
    missing = buffer.shape[-1] - array.shape[-1] if array.ndim else 0
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, missing)]) if missing else array


def _zeros(buffers: tuple[Any, ...], operand: jax.Array) -> dict[int, jax.Array]:
    """Returns zeros for the buffers that a kernel adds to, by buffer index. Each is a distinct value to XLA.

    In a branch, XLA merged the identical zeros for dk and dv and let both sums use one buffer (jax 0.11.2 on GPUs,
    flash4). So each is computed from an operand, in a way that XLA cannot fold to 0: the number of set bits of one
    element, at most 64, shifted right by 7 or more, a different shift for each buffer.
    """
    element = lax.slice(operand, (0,) * operand.ndim, (1,) * operand.ndim).reshape(())
    whole = jnp.dtype(f"uint{8 * operand.dtype.itemsize}")
    bits = lax.population_count(lax.bitcast_convert_type(element, whole)).astype(jnp.int32)
    indices = [at for at, buffer in enumerate(buffers) if buffer.zeros]
    return {
        at: jnp.broadcast_to((bits >> 7 + number).astype(buffers[at].dtype), buffers[at].shape)
        for number, at in enumerate(indices)
    }


def _type(buffer: Any, like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns a buffer's type, varying over the same mesh axes as ``like``."""
    return like.update(shape=buffer.shape, dtype=jnp.dtype(buffer.dtype))


def _register(step: Any, platform: str) -> None:
    """Compiles a kernel and registers it with XLA, once in a process."""
    with _registering:
        if step.attributes is not None:  # XLA has the target already; it gets the compiled kernel as an attribute
            step.attributes()  # compiles, and caches what it returns
            return
        if step.target in _compile_seconds:
            return
        import jax_tvm_ffi

        if jax_tvm_ffi.registered_count() >= MOST_TARGETS:
            raise RuntimeError(f"this process has {MOST_TARGETS} compiled kernels, and jax-tvm-ffi keeps few more")
        began = time.perf_counter()
        function = step.compile()
        seconds = time.perf_counter() - began
        jax_tvm_ffi.register_ffi_target(step.target, function, ["args", "rets"], platform, allow_cuda_graph=True)
        _compile_seconds[step.target] = seconds
        compiled("compiled_lane", step.target, seconds)


def compile_seconds() -> dict[str, float]:
    """Returns the seconds that each kernel of the compiled lane took to compile in this process, by its XLA name."""
    return dict(_compile_seconds)
