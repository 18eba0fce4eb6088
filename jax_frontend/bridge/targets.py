"""The bridge: torch's kernels inside JAX programs. The only file of the project that imports JAX and torch.

What the compiled lane (``compiled_lane``) takes, XLA launches itself. In the callback lane, which takes every call, XLA
calls one registered function for each direction through its foreign function interface (jax-tvm-ffi), with its own
buffers as DLPack tensors and, on a GPU, its own stream. Nothing is copied on the way in; a backend that can writes its
results into XLA's buffers, and the results of others are copied there. Which call it is travels as one attribute, the
token of a plan: a text of 7 characters, the longest that tvm-ffi keeps inside the value itself (jax-tvm-ffi 0.1.3 does
not keep longer ones alive, and numbers cost 16 bytes on every call).
"""

from __future__ import annotations

import atexit
import base64
import ctypes
import hashlib
import pickle
import threading
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import numpy as np

from attn_core import backends
from attn_core.backends.shared import dry_run
from attn_core.backends.shared.cached_once import cached_once
from attn_core.call.spec import AttentionSpec
from attn_core.errors import BridgeError
from jax_frontend.bridge import compiled_lane
from jax_frontend.bridge.bridged_call import BridgedCall, BridgedStep, calls_of
from jax_frontend.bridge.bridged_run import run_of
from jax_frontend.bridge.interrupted import Interrupted

TOKEN_LENGTH = 7
_calls: dict[str, bytes] = {}
"""token -> digest and description of the call. Content-addressed: a token means the same in every process.

Entries are never changed and stay as long as the process: nothing tells when the last program that has the token is
gone, for it may be a file. One takes half a kilobyte, that of a step of context parallelism one to some kilobytes.
"""
_callbacks: dict[str, Callable[[tuple[Any, ...]], None]] = {}
"""token -> what runs the call on (operands, result buffers), made from ``_calls`` when it runs; CALLBACKS at most."""
CALLBACKS = 1024
_making_room = threading.Lock()


def run(call: BridgedCall, results: tuple[jax.ShapeDtypeStruct, ...], *operands: Any) -> tuple[Any, ...]:
    """The results of a backend's forward or backward on JAX arrays; traceable, a few custom calls in the program."""
    lane = compiled_lane.lane_of(call._replace(beside=False))  # one program for both: it gives no head start
    if lane.program is not None:
        return compiled_lane.run(lane.program, call, results, operands)
    _register_targets()
    return tuple(jax.ffi.ffi_call(_target(call.direction), results)(*operands, call=token_of(call)))


def run_step(call: BridgedStep, results: tuple[jax.ShapeDtypeStruct, ...], *operands: Any) -> tuple[Any, ...]:
    """(out, lse) of a step of context parallelism on JAX arrays; traceable, one callback.

    Args:
        results: their types, and those of the scratch for both. Results so far, which are operands, become these.
    """
    at = 1 + call.step.arrays
    becomes = {at: 0, at + 1: 1} if call.step.after else {}
    _register_targets()
    launch = jax.ffi.ffi_call(_target("step"), results, input_output_aliases=becomes)
    return tuple(launch(*operands, call=token_of(call))[:2])


def warm_up(name: str, spec: AttentionSpec, device: str, index: int) -> None:
    """Does what a torch backend's call would do when it first runs, on a GPU of this process."""
    kind = backends.kind_of(device)
    module = backends.load(name, kind)
    if module is None or kind != "cuda" or module.FRAMEWORK != "torch" or spec.empty:
        return
    if all(compiled_lane.lane_of(call).program for call in calls_of(name, spec, device)):
        return
    import torch

    with torch.cuda.device(index), torch.no_grad():
        dry_run.warm_up(module, spec)


def token_of(call: BridgedCall | BridgedStep) -> str:
    """The token of a call, known to the callbacks from now on."""
    rest = tuple(value for value in call if value is not call.spec)
    for salt in range(100):
        digest = hashlib.sha256(f"{salt}|{rest!r}|{call.spec.key}".encode()).digest()
        token = base64.b64encode(digest).decode()[:TOKEN_LENGTH]
        known = _calls.get(token) or _calls.setdefault(token, digest + zlib.compress(pickle.dumps(call)))
        if known.startswith(digest):
            return token
    raise BridgeError("no free token for a new attention call after 100 tries")


def call_of(token: str) -> BridgedCall | BridgedStep:
    """The call of a token."""
    known = _calls.get(token)
    if known is None:
        raise BridgeError(
            f"no attention call {token!r} in this process: a compiled program from another process was run "
            "before the function that holds the call was traced here"
        )
    return pickle.loads(zlib.decompress(known[hashlib.sha256().digest_size :]))  # type: ignore[no-any-return]


def _target(direction: str) -> str:
    return f"attn_core.callback.{direction}.v1"


@cached_once
def _register_targets() -> None:
    import jax_tvm_ffi
    import torch
    import tvm_ffi

    stay = _staying()

    # XLA's buffers never require a gradient, so nothing here builds a graph, whatever the thread's grad mode is.
    def on_host(*values: Any) -> None:
        try:
            stay()
            torch.set_flush_denormal(False)  # XLA runs its programs with subnormal numbers flushed to 0; torch does not
            (_callbacks.get(values[-1]) or _callback(values[-1]))(values)
        except KeyboardInterrupt as error:
            raise Interrupted from error
        finally:
            torch.set_flush_denormal(True)

    on_stream = _on_stream(stay)

    platforms = {
        "cpu": (on_host, ["args", "rets", "attrs.call"]),
        "gpu": (on_stream, ["args", "rets", "attrs.call", "ctx.stream"]),
    }
    for direction in ("forward", "backward", "step"):
        for platform, (function, arguments) in platforms.items():
            jax_tvm_ffi.register_ffi_target(
                _target(direction),
                tvm_ffi.convert_func(function, tensor_cls=torch.Tensor),
                arguments,
                platform=platform,
                pass_owned_tensor=True,
            )

    atexit.register(_drain)


def _drain() -> None:
    """Waits for the calls that XLA has yet to run: one that met a finalising interpreter would abort the process.

    Each device runs what one thread gives it in order, so a computation put last comes back last. Calls that another
    thread left behind are waited for as long as somebody holds their results.
    """
    for array in jax.live_arrays():
        if not array.is_deleted():
            array.block_until_ready()
    for device in jax.local_devices():
        (jax.device_put(np.float32(0), device) + 1).block_until_ready()


def _staying() -> Callable[[], bool]:
    """What lets one of XLA's threads stay known to Python after its first callback; says whether this is such a thread.

    A thread that Python did not start gets a thread state when it calls in and loses it when it returns, which costs
    microseconds each time. Holding it once keeps it: some kilobytes for each of XLA's threads.
    """
    here, hold = threading.local(), ctypes.pythonapi.PyGILState_Ensure

    def stay() -> bool:
        try:
            return here.foreign  # type: ignore[no-any-return]
        except AttributeError:
            here.foreign = threading.get_ident() not in {thread.ident for thread in threading.enumerate()}
            here.held = hold()
            return here.foreign  # type: ignore[no-any-return]

    return stay


def _on_stream(stay: Callable[[], bool]) -> Callable[..., None]:
    """The GPU's callback: runs a call on XLA's device and stream.

    By the functions under torch's context managers, which would build a stream object for every call. A thread of
    Python's gets torch's device and stream back as they were; one of XLA's keeps them from call to call.
    """
    import torch

    # compiled without CUDA, torch has none of them, and nothing here runs
    functions = ("_cuda_getCurrentStream", "_cuda_setStream", "_cuda_getDevice", "_cuda_setDevice")
    current, enter, device_now, to_device = (getattr(torch._C, name, None) for name in functions)

    @cache
    def identity(pointer: int, device: int) -> tuple[int, int, int]:
        stream = torch.cuda.ExternalStream(pointer, device)
        return stream.stream_id, stream.device_index, stream.device_type

    def on_stream(*values: Any) -> None:
        try:
            keeps, device = stay(), values[0].get_device()
            device_before = device_now()  # type: ignore[misc]
            if device_before != device:
                to_device(device)  # type: ignore[misc]
            before, wanted = current(device), identity(values[-1], device)  # type: ignore[misc]
            if before != wanted:
                _enter(enter, wanted)
            try:
                (_callbacks.get(values[-2]) or _callback(values[-2]))(values)
            finally:
                if not keeps:
                    _enter(enter, before)
                    if device_before != device:
                        to_device(device_before)  # type: ignore[misc]
        except KeyboardInterrupt as error:
            raise Interrupted from error

    return on_stream


def _enter(enter: Any, stream: tuple[int, int, int]) -> None:
    enter(stream_id=stream[0], device_index=stream[1], device_type=stream[2])


def _callback(token: str) -> Callable[[tuple[Any, ...]], None]:
    """What runs a call on XLA's values: operands, then the buffers of the results, then attributes."""
    run_call = run_of(call_of(token))
    with _making_room:
        while len(_callbacks) >= CALLBACKS:
            del _callbacks[next(iter(_callbacks))]
        return _callbacks.setdefault(token, run_call)
