"""Records which compiled kernels FlashAttention-4's entry points launch for a call, so that later calls can repeat it.

A recorded call runs as usual, on the tensors of the call, from a private copy of the entry points' module. The copy's
caches of compiled kernels are flash-attn-4's own, and note each launch.
Upstream: flash-attn-4 4.0.0b36, ``flash_attn.cute.interface``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from attn_core.backends.flash4.operands import copied
from attn_core.backends.flash4.program import check_constant, zeroed_memory
from attn_core.backends.flash4.recorder import private_copy, watching
from attn_core.backends.shared.cached_once import cached_once
from attn_core.backends.shared.kernel_programs import Unrecordable
from attn_core.call.after_fork import free_in_children

Tensors = tuple[Any, ...]


class Launches(NamedTuple):
    """The kernels of a recorded call.

    Attributes:
        scratch: functions that allocate the memory between the kernels.
        constants: the arguments that are no tensors.
        kernels: each compiled kernel with a function that picks its arguments from (*operands, *scratch, *constants).
    """

    scratch: tuple[Callable[[], Any], ...]
    constants: tuple[Any, ...]
    kernels: tuple[tuple[Callable[..., Any], Callable[[Tensors], Tensors]], ...]

    def run(self, operands: Tensors) -> None:
        """Launches the kernels on torch's current stream."""
        values = (*operands, *[allocate() for allocate in self.scratch], *self.constants)
        for kernel, pick in self.kernels:
            kernel(*pick(values))


def record(operands: Tensors, results: Tensors, call: Callable[[Any, Tensors], Any]) -> tuple[Any, Launches | None]:
    """Makes a call; returns its results, and its launches or None if they cannot be repeated.

    Args:
        operands: every tensor of the call, contiguous results among them.
        results: the operands that the call should write into, None for a result that it has not.
        call: ``(entry_points, operands) -> results`` makes the call; entry_points is None for the usual ones.
    """
    entry_points = copied_entry_points()
    if entry_points is None:
        return call(None, operands), None
    # A kernel's argument is known by its address, so no two operands may have one: k may be v, and dout may be out.
    addresses = [tensor.data_ptr() for tensor in operands]
    operands = tuple(copied(one) if addresses.index(one.data_ptr()) < at else one for at, one in enumerate(operands))
    launched: list[tuple[Any, Tensors]] = []
    operations: list[tuple[str, Any]] = []
    try:
        with _noting(launched), watching(operations):
            written = call(entry_points, operands)
        return written, _repeatable(operands, results, written, launched, operations)
    finally:
        # Both lists outlive this function: the copy's caches hold one, and a class with a reference cycle the other.
        # XLA does not allow its tensors, which may be operands, to outlive the call.
        launched.clear()
        operations.clear()


def _repeatable(
    operands: Tensors,
    results: Tensors,
    written: Tensors,
    launched: list[tuple[Any, Tensors]],
    operations: list[tuple[str, Any]],
) -> Launches | None:
    """Returns the launches of a recorded call, or None if they cannot be repeated."""
    try:
        for buffer, result in zip(results, written, strict=True):
            if buffer is not None and buffer.data_ptr() != result.data_ptr():
                raise Unrecordable("the entry points write into buffers of their own")
        return _assemble(operands, launched, operations)
    except Unrecordable:
        return None


def _assemble(operands: Tensors, launched: list[tuple[Any, Tensors]], operations: list[tuple[str, Any]]) -> Launches:
    """Returns the launches of a recorded call."""
    import torch

    zeros = zeroed_memory(operations)  # raises an error for an operation that computes
    allocated = [result for name, result in operations if not name.startswith(("aten.detach", "prim."))]
    known = [*operands, *allocated]
    places = {tensor.data_ptr(): place for place, tensor in enumerate(known)}
    constants: list[Any] = []
    picks = []
    for kernel, arguments in launched:
        pick = []
        for value in arguments:
            if not isinstance(value, torch.Tensor):
                check_constant(value)
                pick.append(len(known) + len(constants))
                constants.append(value)
                continue
            place = places.get(value.data_ptr())
            if place is None or _layout(value) != _layout(known[place]):
                raise Unrecordable(f"a kernel takes a view, or a tensor that is not the call's: {list(value.shape)}")
            pick.append(place)
        picks.append((kernel, itemgetter(*pick)))
    scratch = []
    for tensor in allocated:
        allocate = torch.zeros if tensor.untyped_storage()._cdata in zeros else torch.empty
        if not tensor.is_contiguous():
            raise Unrecordable(f"scratch of strides {tensor.stride()}")
        scratch.append(partial(allocate, tuple(tensor.shape), dtype=tensor.dtype, device=tensor.device))
    return Launches(tuple(scratch), tuple(constants), tuple(picks))


def _layout(tensor: Any) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


_recording = free_in_children(threading.Lock())
"""Held during a recording, because all recordings share one copy of the entry points."""


@cached_once
def _module() -> tuple[Any, Any]:
    """Returns flash-attn-4's interface, and a copy whose caches can be replaced without effect on other callers."""
    from flash_attn.cute import interface  # type: ignore[import-not-found]

    return interface, private_copy("flash_attn.cute._attn_core_direct")


def copied_entry_points() -> tuple[Any, Any] | None:
    """Returns the entry points of the copy, or None if there can be none. The first call takes 30 ms."""
    try:
        copy = _module()[1]
        return copy._flash_attn_fwd, copy._flash_attn_bwd
    except Exception:  # an interface that changed upstream can raise anything, and the usual entry points still work
        return None


class _NotingCache:
    """A cache of compiled kernels, flash-attn-4's own, that notes each launch."""

    def __init__(self, compiled: Any, launched: list[tuple[Any, Tensors]]) -> None:
        self._compiled, self._launched = compiled, launched

    def __contains__(self, key: Any) -> bool:
        return key in self._compiled

    def __setitem__(self, key: Any, kernel: Any) -> None:
        self._compiled[key] = kernel

    def __getitem__(self, key: Any) -> Callable[..., None]:
        kernel = self._compiled[key]

        def launch(*arguments: Any) -> None:
            self._launched.append((kernel, arguments))
            kernel(*arguments)

        return launch


@contextmanager
def _noting(launched: list[tuple[Any, Tensors]]) -> Iterator[None]:
    """Notes each kernel that the copy of the entry points launches, with its arguments."""
    interface, copy = _module()
    with _recording:
        for name, function in vars(copy).items():
            if hasattr(function, "compile_cache") and function.__globals__ is vars(copy):
                function.compile_cache = _NotingCache(getattr(interface, name).compile_cache, launched)
        yield
