"""The bridge: torch's kernels inside JAX programs. The only file of the project where JAX and torch meet.

XLA calls one registered function for each direction through its foreign function interface (jax-tvm-ffi), with its own
buffers as DLPack tensors and, on a GPU, its own stream. Nothing is copied on the way in; the backend's results are
copied once, into XLA's buffers. Which call it is travels as one attribute, the token of a plan: a text of 7 characters,
the longest that tvm-ffi keeps inside the value itself (jax-tvm-ffi 0.1.3 does not keep longer ones alive, and numbers
cost 16 bytes on every call).
"""

from __future__ import annotations

import atexit
import base64
import hashlib
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np

from attn_core import backends
from attn_core.backends import Inputs
from attn_core.errors import BridgeError
from attn_core.spec import AttentionSpec

TOKEN_LENGTH = 7


class BridgedCall(NamedTuple):
    """What a callback needs to know of a call; the operands come with every run."""

    direction: str
    backend: str
    device: str
    spec: AttentionSpec
    operands: tuple[str, ...]
    """Which fields of ``Inputs`` the leading operands are."""
    extras: tuple[str, ...] = ()
    """What the operands after those are: out, lse, dout, dlse in a backward."""
    with_lse: bool = True
    """Whether a forward has the log-sum-exp as its second result."""


_calls: dict[str, BridgedCall] = {}
"""token -> call. Content-addressed: a token means the same in every process, and entries are never changed."""
_callbacks: dict[str, Callable[[tuple[Any, ...]], None]] = {}
"""token -> what runs the call on (operands, result buffers), derived from ``_calls`` when it first runs."""


def run(call: BridgedCall, results: tuple[jax.ShapeDtypeStruct, ...], *operands: Any) -> tuple[Any, ...]:
    """The results of a backend's forward or backward on JAX arrays; traceable, one custom call in the program."""
    _register_targets()
    return tuple(jax.ffi.ffi_call(_target(call.direction), results)(*operands, call=token_of(call)))


def token_of(call: BridgedCall) -> str:
    """The token of a call, known to the callbacks from now on."""
    rest = tuple(value for value in call if value is not call.spec)
    for salt in range(100):
        digest = hashlib.sha256(f"{salt}|{rest!r}|{call.spec.key}".encode()).digest()
        token = base64.b64encode(digest).decode()[:TOKEN_LENGTH]
        if _calls.setdefault(token, call) == call:
            return token
    raise BridgeError("no free token for a new attention call after 100 tries")


def _target(direction: str) -> str:
    return f"attn_core.callback.{direction}.v1"


@cache
def _register_targets() -> None:
    import jax_tvm_ffi
    import torch
    import tvm_ffi

    # XLA's buffers never require a gradient, so nothing here builds a graph, whatever the thread's grad mode is.
    def on_host(*values: Any) -> None:
        run_call = _callbacks.get(values[-1]) or _callback(values[-1])
        torch.set_flush_denormal(False)  # XLA runs its programs with subnormal numbers flushed to 0; torch does not
        try:
            run_call(values)
        finally:
            torch.set_flush_denormal(True)

    def on_stream(*values: Any) -> None:
        device, token = values[0].device, values[-2]
        with torch.cuda.device(device), torch.cuda.stream(_stream(values[-1], device.index)):
            (_callbacks.get(token) or _callback(token))(values)

    platforms = {
        "cpu": (on_host, ["args", "rets", "attrs.call"]),
        "gpu": (on_stream, ["args", "rets", "attrs.call", "ctx.stream"]),
    }
    for direction in ("forward", "backward"):
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


@cache
def _stream(pointer: int, device: int) -> Any:
    import torch

    return torch.cuda.ExternalStream(pointer, device)


def _callback(token: str) -> Callable[[tuple[Any, ...]], None]:
    """What runs a registered call on XLA's values: operands, then the buffers of the results, then attributes."""
    call = _calls.get(token)
    if call is None:
        raise BridgeError(
            f"no attention call {token!r} in this process: a compiled program from another process was run "
            "before the function that holds the call was traced here"
        )
    run_call = _forward(call) if call.direction == "forward" else _backward(call)
    return _callbacks.setdefault(token, run_call)


def _forward(call: BridgedCall) -> Callable[[tuple[Any, ...]], None]:
    module: Any = backends.load(call.backend)
    spec, count = call.spec, len(call.operands)
    if call.operands != Inputs._fields[:count]:
        names = call.operands

        def gather(values: tuple[Any, ...]) -> Inputs:
            return Inputs(**dict(zip(names, values, strict=False)))
    else:

        def gather(values: tuple[Any, ...]) -> Inputs:
            return Inputs(*values[:count])

    kernel, with_lse = module.forward, call.with_lse

    def forward(values: tuple[Any, ...]) -> None:
        out, lse = kernel(spec, gather(values))
        values[count].copy_(out)
        if with_lse:
            values[count + 1].copy_(lse)

    return forward


def _backward(call: BridgedCall) -> Callable[[tuple[Any, ...]], None]:
    module: Any = backends.load(call.backend)
    count, results = len(call.operands), len(call.operands) + len(call.extras)

    def backward(values: tuple[Any, ...]) -> None:
        inputs = Inputs(**dict(zip(call.operands, values, strict=False)))
        saved = dict(zip(call.extras, values[count:results], strict=True))
        gradients = module.backward(call.spec, inputs, saved["out"], saved["lse"], saved["dout"], saved.get("dlse"))
        found = [gradient for gradient in gradients if gradient is not None]
        for buffer, gradient in zip(values[results : results + len(found)], found, strict=True):
            buffer.copy_(gradient)

    return backward
