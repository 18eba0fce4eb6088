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
from attn_core.backends.shared.programs.kernel_programs import Unrecordable
from attn_core.call.after_fork import free_in_children

Tensors = tuple[Any, ...]


class Launches(NamedTuple):
    """The kernels of a recorded call.

    Attributes:
        scratch: functions that allocate the memory between the kernels.
        constants: the arguments that are no tensors.
        kernels: each compiled kernel with a function that picks its arguments from (*operands, *scratch, *constants).
        more: whether the call has the operands of ``masked.operands``.
    """

    scratch: tuple[Callable[[], Any], ...]
    constants: tuple[Any, ...]
    kernels: tuple[tuple[Callable[..., Any], Callable[[Tensors], Tensors]], ...]
    more: bool = False

    def run(self, operands: Tensors) -> None:
        """Launches the kernels on torch's current stream."""
        values = (*operands, *[allocate() for allocate in self.scratch], *self.constants)
        for kernel, pick in self.kernels:
            kernel(*pick(values))


def record(
    operands: Tensors, results: Tensors, call: Callable[[Any, Tensors], Any], has_more: bool = False
) -> tuple[Any, Launches | None]:
    """Makes a call; returns its results, and its launches or None if they cannot be repeated.

    Args:
        operands: every tensor of the call, contiguous results among them.
        results: the operands that the call should write into, None for a result that it has not.
        call: ``(entry_points, operands) -> results`` makes the call; entry_points is None for the usual ones.
        has_more: ``Launches.more``.
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
        launches = _repeatable(operands, results, written, launched, operations)
        return written, launches and launches._replace(more=has_more)
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
    constants: list[Any] = []
    picks = [(kernel, _picker([_place_of(value, known, constants) for value in values])) for kernel, values in launched]
    scratch = []
    for tensor in allocated:
        allocate = torch.zeros if tensor.untyped_storage()._cdata in zeros else torch.empty
        if not tensor.is_contiguous():
            raise Unrecordable(f"scratch of strides {tensor.stride()}")
        scratch.append(partial(allocate, tuple(tensor.shape), dtype=tensor.dtype, device=tensor.device))
    return Launches(tuple(scratch), tuple(constants), tuple(picks))


def _place_of(value: Any, known: list[Any], constants: list[Any]) -> Any:
    """Returns the place of a kernel's argument among all values, for a tuple of them a ``_Group``. Adds to constants.

    Args:
        known: the tensors of the call, operands first.
    """
    import torch

    if isinstance(value, torch.Tensor):
        address = value.data_ptr()
        place = next((place for place, tensor in reversed([*enumerate(known)]) if tensor.data_ptr() == address), None)
        if place is None or _layout(value) != _layout(known[place]):
            raise Unrecordable(f"a kernel takes a view, or a tensor that is not the call's: {list(value.shape)}")
        return place
    if isinstance(value, (tuple, list)) and any(part is not None for part in value):
        return _Group(type(value), [_place_of(part, known, constants) for part in value])
    if isinstance(getattr(value, "value", None), int):  # a number of the CuTe DSL, perhaps an operand's address
        value = value.value
        for place, tensor in enumerate(known):
            if tensor.data_ptr() == value:
                return _Address(place)
    check_constant(value)
    constants.append(value)
    return len(known) + len(constants) - 1


class _Address(NamedTuple):
    """An argument that is the address of a tensor."""

    place: int

    def of(self, values: Tensors) -> int:
        return values[self.place].data_ptr()  # type: ignore[no-any-return]


class _Group(NamedTuple):
    """An argument that is a tuple or a list: its type, and the places of its parts."""

    kind: type
    places: list[Any]

    def of(self, values: Tensors) -> Any:
        parts = [values[place] if isinstance(place, int) else place.of(values) for place in self.places]
        return self.kind(*parts) if hasattr(self.kind, "_fields") else self.kind(parts)


def _picker(places: list[Any]) -> Callable[[Tensors], Tensors]:
    """Returns a function that picks a kernel's arguments from all values."""
    if all(isinstance(place, int) for place in places):
        return itemgetter(*places)
    return lambda values: tuple([values[p] if isinstance(p, int) else p.of(values) for p in places])


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
