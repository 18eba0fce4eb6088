"""Runs a backend's call on torch tensors that share the memory of XLA's buffers.

Apart from ``targets``, which has XLA's side of it: registered functions, tokens and threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jax
from jax.profiler import TraceAnnotation

from attn_core import backends
from attn_core.backends.contract import Backend
from attn_core.call.checks import result_error
from attn_core.call.observe import range_name
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, PagedInputs, Tangents, dtype_name
from attn_core.errors import BridgeError, note_call
from attn_core.paged.tables import SCALES, TABLES, check_read
from jax_frontend.bridge.bridged_call import BridgedCall, BridgedStep, inputs_builder

if TYPE_CHECKING:  # few programs have ranks
    from attn_core.context_parallel.on_torch import step

Run = Callable[[tuple[Any, ...]], None]
"""Runs a call on XLA's values: operands, then the buffers of the results, then attributes."""


def run_of(call: BridgedCall | BridgedStep) -> Run:
    """Returns the function that runs a call."""
    if isinstance(call, BridgedStep):
        return _named(_StepRunner(call).run)
    makers = {"forward": _forward, "backward": _backward, "jvp": _jvp, "row_maximum": _row_maximum}
    run = makers[call.direction](call, backends.load(call.backend, backends.kind_of(call.device)))
    name = range_name(call.backend, call.spec, call.direction)
    run = _in_range(_named(run, name), name)
    return _with_head_start(run) if call.overlaps_exchange else run


def _named(run_call: Run, name: str | None = None) -> Run:
    """Puts the notes of a kernel's error into its message, because XLA keeps nothing but the message of an error.

    Args:
        name: the call's; None if the errors have their notes already.
    """

    def run(values: tuple[Any, ...]) -> None:
        try:
            run_call(values)
        except Exception as error:
            if name is not None:
                note_call(error, name)
            lines = f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())
            raise BridgeError("\n".join(lines)) from error

    return run


def _in_range(run_call: Run, name: str) -> Run:
    """Names the call on the host's timeline while ``jax.profiler`` records; XLA's own event has no name of ours."""
    is_recorded = TraceAnnotation.is_enabled

    def run(values: tuple[Any, ...]) -> None:
        if not is_recorded():
            run_call(values)
            return
        with TraceAnnotation(name):
            run_call(values)

    return run


def _with_head_start(run_call: Run) -> Run:
    """Delays the call by a few us, so that an exchange starts before the call's kernel fills the GPU."""
    from attn_core.context_parallel.on_torch.tiles import head_start

    def run(values: tuple[Any, ...]) -> None:
        head_start(values[0].device)
        run_call(values)

    return run


def _forward(call: BridgedCall, record: Backend) -> Run:
    """Returns what runs a forward on XLA's buffers; ``values`` are the operands, then the results in their order."""
    spec, count, gather = call.spec, len(call.operands), inputs_builder(call.operands)
    kernel, with_lse, writes, checked = record.forward, call.with_lse, bool(record.writes_into), call.checked
    # On a GPU kernels clamp the tables, because reading them here would wait for it.
    unchecked = spec.paged is not None and call.device == "cpu" and not call.tables_checked

    with_maximum = record.forward_with_maximum(spec) if call.with_maximum else None

    def forward(values: tuple[Any, ...]) -> None:
        out_buffer, lse_buffer = values[count], values[count + 1] if with_lse else None
        inputs = gather(values)
        if unchecked:
            _check_tables(spec, inputs)
        if checked:
            _fill(out_buffer, lse_buffer)
        if with_maximum is not None:
            out, lse, top = with_maximum(spec, inputs)
            # Behind out, and behind lse if that is a result.
            _copy("row_maximum", top, values[count + 1 + with_lse])
        else:
            out, lse = kernel(spec, inputs, (out_buffer, lse_buffer)) if writes else kernel(spec, inputs)
        _copy("out", out, out_buffer)
        if with_lse:
            _copy("lse", lse, lse_buffer)

    return forward


def _fill(*buffers: Any) -> None:
    """Fills the buffers of results with NaN, so that a value which the kernel does not write shows."""
    for buffer in buffers:
        if buffer is not None:
            buffer.fill_(math.nan)


def _copy(name: str, result: Any, buffer: Any) -> None:
    """Copies a result into XLA's buffer, unless the backend wrote it there.

    ``copy_`` alone would convert or repeat a result that is wrong.

    Raises:
        ResultError: for a result of another shape, dtype or device.
    """
    if result is buffer:
        return
    if not (
        getattr(result, "shape", None) == buffer.shape
        and result.dtype is buffer.dtype
        and result.device == buffer.device
    ):
        raise result_error(name, result, tuple(buffer.shape), dtype_name(buffer), buffer.device)
    buffer.copy_(result)


def _check_tables(spec: AttentionSpec, inputs: PagedInputs) -> None:
    """Checks the tables and scales of a paged call on the CPU, which a trace had no values of."""
    names = (*TABLES, *SCALES, "kv_starts")
    values = {name: None if (tensor := getattr(inputs, name)) is None else tensor.numpy() for name in names}
    check_read(spec, spec.max_len_q, values)


def _backward(call: BridgedCall, record: Any) -> Run:
    """Returns what runs a backward; ``values`` are the operands, what the forward saved, and the gradients."""
    count, results = len(call.operands), len(call.names)
    gather, writes, as_one = inputs_builder(call.operands), bool(record.writes_into), call.operands[0] == "qkv"
    names = call.gradients

    def backward(values: tuple[Any, ...]) -> None:
        saved = dict(zip(call.extras, values[count:results], strict=True))
        # With q, k and v in one array there is one buffer for dq, dk and dv: three views of it serve as buffers.
        first, *rest = values[results : results + len(names) - 2 * as_one]
        qkv = first.unbind(-3) if as_one else (first, *rest[:2])
        buffers = Gradients(**dict(zip(names, (*qkv, *(rest if as_one else rest[2:])), strict=True)))
        arguments = (call.spec, gather(values), saved["out"], saved["lse"], saved["dout"], saved.get("dlse"))
        if call.checked:
            _fill(*buffers)
        gradients = record.backward(*arguments, buffers) if writes else record.backward(*arguments)
        for name, buffer, gradient in zip(Gradients._fields, buffers, gradients, strict=True):
            if buffer is not None:
                _copy(name, gradient, buffer)

    return backward


def _jvp(call: BridgedCall, record: Any) -> Run:
    """Returns what computes tangents; ``values`` are the operands, their tangents, and the tangents of the results."""
    count, results = len(call.operands), len(call.names)
    jvp, gather, writes = record.forward_mode.jvp, inputs_builder(call.operands), bool(record.writes_into)

    def run(values: tuple[Any, ...]) -> None:
        tangents = Tangents(**dict(zip(call.extras, values[count:results], strict=True)))
        buffers = values[results], values[results + 1]
        if call.checked:
            _fill(*buffers)
        _, _, *moved = jvp(call.spec, gather(values), tangents, *([buffers] if writes else []))
        for name, buffer, result in zip(("dout", "dlse"), buffers, moved, strict=True):
            _copy(name, result, buffer)

    return run


def _row_maximum(call: BridgedCall, record: Any) -> Run:
    function, count, gather = record.row_maximum.function, len(call.operands), inputs_builder(call.operands)

    def run(values: tuple[Any, ...]) -> None:
        _copy("row_maximum", function(call.spec, gather(values)), values[count])

    return run


class _StepRunner:
    """Runs a step of context parallelism: finds out which part a device is, and runs the part's tiles.

    A JAX program is identical on every device, so the part is known only when the callback runs.
    """

    def __init__(self, call: BridgedStep) -> None:
        from attn_core.context_parallel.on_torch import step, tiles

        self.on_torch, self._head_start = step, tiles.head_start
        self.step, self._overlaps_exchange = call.step, call.overlaps_exchange
        # Positions among the values: q, the keys, any results so far, the part unless call.parts says it, the results.
        self._keys_end = 1 + call.step.key_arrays
        self._part_at = self._keys_end + 2 * call.step.has_earlier_results
        self._results_at = self._part_at + (not call.parts)
        self._parts = parts_by_device(call.parts, jax.local_devices(backend="gpu")) if call.parts else None

    def run(self, values: tuple[Any, ...]) -> None:
        """Runs the step on XLA's values; see ``Run``."""
        q = values[0]
        part_step = _prepare_part(self, self._part(values), q.device)
        if self._overlaps_exchange and part_step.tiles:
            self._head_start(q.device)
        out, lse, *scratch = values[self._results_at : self._results_at + 4]
        self.on_torch.attend(part_step, q, values[1 : self._keys_end], (out, lse), scratch)

    def _part(self, values: tuple[Any, ...]) -> int:
        """Returns the part of a row that the device of XLA's values computes."""
        if self.step.call.plan.outer == 1:
            return 0
        if self._parts is None:
            return int(values[self._part_at])
        device = values[0].get_device()
        if device not in self._parts:
            raise BridgeError(
                f"GPU {device}: expected one of {sorted(self._parts)}, the GPUs of the mesh that this program with "
                "context parallelism was compiled for; compile it for the devices that it runs on"
            )
        return self._parts[device]


# A small cache, because a prepared part holds tensors on the device.
@lru_cache(maxsize=64)
def _prepare_part(runner: _StepRunner, part: int, device: Any) -> step.PartStep:
    return runner.on_torch.prepare_part(runner.step, part, device)


def parts_by_device(parts: tuple[tuple[int, int], ...], local_devices: Sequence[jax.Device]) -> dict[int, int]:
    """Returns the part of each of this process's devices, by torch's index of the device."""
    ids = dict(parts)
    return {device.local_hardware_id: ids[device.id] for device in local_devices if device.id in ids}
