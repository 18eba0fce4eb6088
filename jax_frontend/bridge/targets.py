"""The bridge: runs torch's kernels inside JAX programs. The only module that imports JAX and torch.

XLA launches the calls of the compiled lane (``compiled_lane``) itself. The callback lane takes every call: XLA calls
one registered function per direction through its foreign function interface (jax-tvm-ffi), with its own buffers as
DLPack tensors and, on a GPU, its own stream. No operand is copied. A backend that can writes its results directly into
XLA's buffers; the results of other backends are copied into them. One attribute, the call's token, says which call to
run. A token is a string of 7 characters, the longest that tvm-ffi stores inside the value itself (jax-tvm-ffi 0.1.3
does not keep longer strings alive, and numbers cost 16 bytes on every call).
"""

from __future__ import annotations

import _thread
import atexit
import base64
import ctypes
import gc
import hashlib
import pickle
import threading
import time
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from attn_core import backends
from attn_core.backends.shared import first_calls
from attn_core.backends.shared.caches import cached_once
from attn_core.call import observe
from attn_core.call.after_fork import free_in_children
from attn_core.call.spec import AttentionSpec
from attn_core.errors import BridgeError
from attn_core.selection import new_plans
from jax_frontend.bridge import compiled_lane
from jax_frontend.bridge.bridged_call import BridgedCall, BridgedStep, calls_of
from jax_frontend.bridge.bridged_run import run_of
from jax_frontend.bridge.forked import has_lost_threads

if TYPE_CHECKING:
    import torch


TOKEN_LENGTH = 7
_calls: dict[str, bytes] = {}
"""token -> digest and description of the call. Content-addressed: a token means the same in every process.

Entries never change and are never removed, because a program with the token may exist anywhere, even as a file. An
entry takes half a kilobyte; the entry of a step of context parallelism takes one to a few kilobytes.
"""
_callbacks: dict[str, Callable[[tuple[Any, ...]], None]] = {}
"""token -> function that runs the call on (operands, result buffers), built from ``_calls``; at most CALLBACKS."""
CALLBACKS = 1024
_making_room = free_in_children(threading.Lock())


class Interrupted(BridgeError):
    """The error that a callback raises instead of KeyboardInterrupt, which XLA would turn into an ordinary error.

    XLA reads the message and drops the error object. Its ``__del__`` then interrupts the main thread, which raises
    KeyboardInterrupt as soon as it runs Python code again: after the program that called back has failed. The
    interruption cannot come sooner, because the Python code that builds the message would raise it, and it would be
    lost.
    """

    def __init__(self) -> None:
        super().__init__("interrupted by Ctrl-C inside attention; KeyboardInterrupt follows")

    # Written in C and called without self. A function in Python would raise KeyboardInterrupt itself.
    __del__ = _thread.interrupt_main


def run(call: BridgedCall, results: tuple[jax.ShapeDtypeStruct, ...], *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the results of a backend's forward or backward on JAX arrays; traceable, as one or a few custom calls."""
    # A compiled program has neither a head start for exchanges nor buffers of NaN, so calls that differ in these alone
    # share one.
    lane = compiled_lane.lane_of(call._replace(overlaps_exchange=False, checked=False))
    if lane.program is not None:
        return compiled_lane.run(lane.program, call, results, operands)
    observe.count("callback")
    _register_targets()
    return tuple(jax.ffi.ffi_call(_target(call.direction), results)(*operands, call=token_of(call)))


def run_step(
    call: BridgedStep, results: tuple[jax.ShapeDtypeStruct, ...], *operands: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns (out, lse) of a step of context parallelism on JAX arrays; traceable, one callback.

    Args:
        results: the types of out, lse and the scratch for both. out and lse so far, if they are operands, are updated
            in place.
    """
    at = 1 + call.step.key_arrays
    aliases = {at: 0, at + 1: 1} if call.step.has_earlier_results else {}
    observe.count("callback")
    _register_targets()
    launch = jax.ffi.ffi_call(_target("step"), results, input_output_aliases=aliases)
    return tuple(launch(*operands, call=token_of(call))[:2])


def warm_up(name: str, spec: AttentionSpec, device: str, index: int) -> None:
    """Does on a GPU what a torch backend's call does only on its first run: loads libraries and compiles kernels."""
    kind = backends.kind_of(device)
    record = backends.load(name, kind)
    if kind != "cuda" or record.framework != "torch" or spec.empty:
        return
    if all(compiled_lane.lane_of(call).program for call in calls_of(name, spec, device)):
        return
    import torch

    with torch.cuda.device(index), torch.no_grad():
        first_calls.warm_up(record, spec)


def token_of(call: BridgedCall | BridgedStep) -> str:
    """Returns the token of a call, and records the call under it for the callbacks."""
    rest = tuple(value for value in call if value is not call.spec)
    # 7 characters of base64 are 42 bits, so the tokens of two calls may collide. The entry has the full digest to tell
    # them apart, and the second call tries another salt.
    for salt in range(100):
        digest = hashlib.sha256(f"{salt}|{rest!r}|{call.spec.key}".encode()).digest()
        token = base64.b64encode(digest).decode()[:TOKEN_LENGTH]
        # setdefault, because two threads may trace equal calls at once. Compressed, because entries are never removed.
        known = _calls.get(token) or _calls.setdefault(token, digest + zlib.compress(pickle.dumps(call)))
        if known.startswith(digest):
            return token
    raise BridgeError("no free token for a new attention call after 100 tries")


def call_of(token: str) -> BridgedCall | BridgedStep:
    """Returns the call that a token stands for."""
    known = _calls.get(token)
    if known is None:
        raise BridgeError(
            f"no attention call {token!r} in this process: a compiled program from another process was run "
            "before the function with this call was traced here"
        )
    return pickle.loads(zlib.decompress(known[hashlib.sha256().digest_size :]))  # type: ignore[no-any-return]


def _target(direction: str) -> str:
    return f"attn_core.callback.{direction}.v1"


@cached_once
def _register_targets() -> None:
    """Registers the callback lane with XLA: a target for each direction and platform. A token says which call it is."""
    import jax_tvm_ffi
    import torch
    import tvm_ffi

    stay = _thread_state_keeper()

    # XLA's buffers never require a gradient, so torch builds no graph here, whatever the thread's grad mode is.
    def on_host(*values: Any) -> None:
        try:
            stay()
            # XLA flushes subnormal numbers to 0 in its threads; torch's kernels compute with them.
            torch.set_flush_denormal(False)
            (_callbacks.get(values[-1]) or _callback(values[-1]))(values)
            _wait_until_released(values[:-1])
        except KeyboardInterrupt as error:
            raise Interrupted from error
        finally:
            # The thread is XLA's, which goes on with its own setting.
            torch.set_flush_denormal(True)

    on_stream = _gpu_callback(stay)

    platforms = {
        "cpu": (on_host, ["args", "rets", "attrs.call"]),
        "gpu": (on_stream, ["args", "rets", "attrs.call", "ctx.stream"]),
    }
    for direction in ("forward", "backward", "jvp", "row_maximum", "step"):
        for platform, (function, arguments) in platforms.items():
            jax_tvm_ffi.register_ffi_target(
                _target(direction),
                tvm_ffi.convert_func(function, tensor_cls=torch.Tensor),
                arguments,
                platform=platform,
                pass_owned_tensor=True,
            )

    atexit.register(_drain)


def _wait_until_released(tensors: tuple[torch.Tensor, ...]) -> None:
    """Returns when nobody but the callback holds XLA's buffers, or after a tenth of a second.

    XLA fails a call if one of its buffers is still held when the callback returns. A compiler may leave a cycle of
    references behind, which only a garbage collection frees, and another thread may let go of a tensor a little later.
    """
    if not _held(tensors):
        return
    gc.collect()
    for _ in range(100):
        if not _held(tensors):
            return
        time.sleep(0.001)


def _held(tensors: tuple[torch.Tensor, ...]) -> bool:
    """Returns whether a storage has more owners than its tensor and the object that is made here."""
    import torch

    count = torch._C._storage_Use_Count
    return any(count(tensor.untyped_storage()._cdata) > 2 for tensor in tensors)


def _drain() -> None:
    """Waits at exit for calls that XLA has yet to run; a callback into a finalising interpreter aborts the process.

    A device runs one thread's computations in order, so waiting for a last computation waits for all of this thread's.
    Another thread's calls are waited for through their results, as long as these are alive.
    """
    if has_lost_threads():  # nothing runs in a forked child, and waiting would hang
        return
    for array in jax.live_arrays():
        if not array.is_deleted():
            array.block_until_ready()
    for device in jax.local_devices():
        (jax.device_put(np.float32(0), device) + 1).block_until_ready()


def _thread_state_keeper() -> Callable[[], bool]:
    """Returns a function that keeps the calling thread's Python state, and says whether XLA started the thread.

    Python creates a thread state whenever a foreign thread calls in and destroys it on return, which costs microseconds
    each time. One PyGILState_Ensure without a Release keeps the state: a few kilobytes for each of XLA's threads.
    """
    local, ensure = threading.local(), ctypes.pythonapi.PyGILState_Ensure

    def stay() -> bool:
        try:
            return local.foreign  # type: ignore[no-any-return]
        except AttributeError:
            local.foreign = threading.get_ident() not in {thread.ident for thread in threading.enumerate()}
            local.gil_state = ensure()
            return local.foreign  # type: ignore[no-any-return]

    return stay


def _gpu_callback(stay: Callable[[], bool]) -> Callable[..., None]:
    """Returns the GPU's callback, which runs a call on XLA's device and stream.

    It calls the functions underneath torch's context managers, which would build a stream object on every call. In a
    thread that Python started, it restores torch's device and stream; in XLA's threads they stay from call to call.
    """
    import torch

    # torch without CUDA lacks these functions; the callback never runs then.
    functions = ("_cuda_getCurrentStream", "_cuda_setStream", "_cuda_getDevice", "_cuda_setDevice")
    current_stream, set_stream, current_device, set_device = (getattr(torch._C, name, None) for name in functions)

    @lru_cache(maxsize=64)
    def identity(pointer: int, device: int) -> tuple[int, int, int]:
        stream = torch.cuda.ExternalStream(pointer, device)
        return stream.stream_id, stream.device_index, stream.device_type

    def on_stream(*values: Any) -> None:
        try:
            foreign, device = stay(), values[0].get_device()
            device_before = current_device()  # type: ignore[misc]
            if device_before != device:
                set_device(device)  # type: ignore[misc]
            before, stream = current_stream(device), identity(values[-1], device)  # type: ignore[misc]
            try:
                if before != stream:
                    set_stream(*stream)  # type: ignore[misc]
                (_callbacks.get(values[-2]) or _callback(values[-2]))(values)
                _wait_until_released(values[:-2])
            finally:
                if not foreign:
                    if before != stream:
                        set_stream(*before)  # type: ignore[misc]
                    if device_before != device:
                        set_device(device_before)  # type: ignore[misc]
        except KeyboardInterrupt as error:
            raise Interrupted from error

    return on_stream


def _callback(token: str) -> Callable[[tuple[Any, ...]], None]:
    """Returns the function that runs a token's call, and remembers it in ``_callbacks``."""
    run_call = run_of(call_of(token))
    # Another thread may build the same callback meanwhile; setdefault lets all threads use the first one. The oldest
    # callbacks make room: they are rebuilt from ``_calls`` if they run again.
    with _making_room:
        while len(_callbacks) >= CALLBACKS:
            del _callbacks[next(iter(_callbacks))]
            new_plans.dropped("callbacks", CALLBACKS)
        return _callbacks.setdefault(token, run_call)
