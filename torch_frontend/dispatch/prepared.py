"""The table of prepared calls, and the one list of what may observe a call.

An eager call whose tensors have the metadata of an earlier call, with the same options, runs what that call prepared:
its checks and its plan are not made again. Every form of a call has a function that prepares it from metadata, and that
function is a part of the key. A call that is not in the table and cannot be prepared, or that something observes, takes
the general path of its form, which accepts the call or names the wrong argument in an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

import torch
from torch.autograd import forward_ad, profiler

from attn_core.backends.shared.caches import from_records
from attn_core.call import checks, observe
from attn_core.call.tensors import Inputs
from attn_core.selection import new_plans, override
from torch_frontend.dispatch import autocast, sdpa_flags, tensor_kinds, transforms
from torch_frontend.dispatch.plan import Metadata

Tensor = torch.Tensor
Requested = str | tuple[str, ...] | None
Run = Callable[..., Any]


class Request(NamedTuple):
    """What the key of a call says."""

    entries: tuple[Metadata | None, ...]
    """(shape, dtype, device) of each tensor, None for an absent one."""
    needs: int
    """Bit i is set if autograd needs the gradient of tensor i; in a layer that trains, if it will."""
    trains: bool
    """Whether the call belongs to a layer that trains, see ``training_layer``."""
    requested: Requested
    """The backends that the call's ``backend=`` or ``use_backend`` names."""
    options: tuple[Any, ...]

    def learns(self, name: str) -> bool:
        """Returns whether autograd needs the gradient of a field of ``Inputs``, if the tensors are its first fields."""
        return bool(self.needs >> Inputs._fields.index(name) & 1)


class Prepared(NamedTuple):
    """A checked call: what runs it.

    Attributes:
        run: takes the tensors of the key and returns the call's results, or None if the general path must run these.
        in_ranges: returns a ``run`` that marks its kernels with ranges for profilers.
        reads: which tensors must have their memory, because a kernel would read beyond it without a word; operations
            of torch raise an error. Each call checks "all", or the "others" behind the first three. None: no tensor.
    """

    run: Run
    in_ranges: Callable[[], Run]
    reads: Literal["all", "others"] | None = None


Prepare = Callable[[Request], Prepared | None]

_KINDS = frozenset((Tensor, torch.nn.Parameter))
# Aliases, because every call looks each of them up.
_is_compiling, _is_grad_enabled, _is_functional = (
    torch.compiler.is_compiling,
    torch.is_grad_enabled,
    torch._is_functional_tensor,
)
_is_autocast_on, _is_transformed, _modes = autocast.is_on, transforms.are_active, tensor_kinds.are_modes_active
_traces, _checks, _ranges = tensor_kinds.are_jit_traces_active, checks.enabled, observe.ranges_enabled
_flash_on, _efficient_on, _cudnn_on = sdpa_flags.is_flash_on, sdpa_flags.is_efficient_on, sdpa_flags.is_cudnn_on
_math_on, _others_on, _strided = sdpa_flags.is_math_on, sdpa_flags.are_others_on, torch.strided
_requested, _fits = override.requested, tensor_kinds.fits_its_storage

_layer_trains: ContextVar[bool] = ContextVar("attn_layer_trains", default=False)
layer_trains = _layer_trains.get
"""Returns whether this is the call of a ``training_layer``."""


@contextmanager
def training_layer() -> Iterator[None]:
    """Plans the calls of the block for training, also if no gradient is recorded.

    Re-entrant checkpointing runs a layer's first pass without gradients and its second with them. If the tensors alone
    decided, the first pass could choose a kernel without a backward and drop other weights than the second. If no
    requested backend has a backward, and no gradient is recorded, one without a backward runs.
    """
    before = layer_trains()
    try:  # around the change as well, because Ctrl-C may raise right after it
        _layer_trains.set(True)
        yield
    finally:
        _layer_trains.set(before)


def is_observed() -> bool:
    """Returns whether something records, transforms, casts, checks or limits the calls of this thread.

    A compiler, autocast, a transform of torch.func, a dispatch mode, forward-mode differentiation, ``torch.jit.trace``,
    ``checks``, or torch's flags for the kernels of attention. Profilers observe a prepared call in ranges.
    """
    return (
        _is_compiling()
        or _is_autocast_on()
        or _is_transformed()
        or _modes() > 0
        or forward_ad._current_level >= 0
        or _traces() is not None
        or _checks()
        or not (_flash_on() and _efficient_on() and _cudnn_on() and _math_on() and _others_on())
    )


def find(  # noqa: C901  one function without calls of others, because it decides how long a small call takes
    prepare: Prepare,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    others: tuple[Any, ...],
    options: tuple[object, ...],
    backend: Requested,
) -> Run | None:
    """Returns what runs a call; None if its general path must run it.

    Args:
        prepare: prepares a call of this form. It raises for a call that is not valid, and returns None for one that
            the general path must run every time.
        q, k, v: the first three tensors of the form, as the caller passed them.
        others: all other arguments of the form that may be tensors.
        options: the other arguments; those that are equal and of one type must mean the same.
        backend: as the caller passed it.
    """
    if is_observed():
        return None
    try:
        # A subclass may change what an operation means, so it takes the general path.
        if not (type(q) is type(k) is type(v) is Tensor or {type(q), type(k), type(v)} <= _KINDS):
            return None
        trains, needs = layer_trains(), 0
        entries: Any = ()
        recorded = trains or _is_grad_enabled()
        if recorded:  # without a loop, because this decides how long a small call takes
            needs = (1 if q.requires_grad else 0) | (2 if k.requires_grad else 0) | (4 if v.requires_grad else 0)
        if others:  # a call on q, k and v alone finds out from the kernel, which refuses other layouts
            if not (q.layout is k.layout is v.layout is _strided):
                return None
            entries = []
            for tensor in others:
                if tensor is None:
                    entries.append(None)
                elif (type(tensor) is Tensor or type(tensor) in _KINDS) and tensor.layout is _strided:
                    if recorded and tensor.requires_grad:
                        needs |= 8 << len(entries)
                    entries.append((tensor.shape, tensor.dtype, tensor.device))
                else:
                    return None
            entries = tuple(entries)
        prepared = _prepared(
            prepare,
            q.shape,
            k.shape,
            v.shape,
            q.dtype,
            k.dtype,
            v.dtype,
            q.device,
            k.device,
            v.device,
            entries,
            needs,
            trains,
            _requested() if backend is None else backend,
            *options,
        )
        if prepared is None:
            return None
        if prepared.reads is not None and not _are_readable((q, k, v, *others) if prepared.reads == "all" else others):
            return None
    except Exception:  # the general path raises the error again, or the one that comes before it
        return None
    if profiler._is_profiler_enabled or _ranges():  # no part of the key: one preparation serves both ways to run
        return prepared.in_ranges()
    return prepared.run


def _are_readable(tensors: tuple[Tensor | None, ...]) -> bool:
    """Returns whether tensors have their memory: no wrapper of a transform, no storage that ends before them."""
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.untyped_storage().nbytes() < tensor.nbytes and not _fits(tensor):
            return False
        if _is_functional(tensor):
            return False
    return True


@from_records(maxsize=4096, typed=True)  # True and 1.0 are not 1
def _prepared(
    prepare: Prepare,
    q_shape: torch.Size,
    k_shape: torch.Size,
    v_shape: torch.Size,
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
    v_dtype: torch.dtype,
    q_device: torch.device,
    k_device: torch.device,
    v_device: torch.device,
    others: tuple[Metadata | None, ...],
    needs: int,
    trains: bool,
    requested: Requested,
    *options: object,
) -> Prepared | None:
    """Prepares a call. A flat key is compared faster."""
    if q_device.type == "meta":
        return None
    new_plans.evicted(_prepared)
    entries = ((q_shape, q_dtype, q_device), (k_shape, k_dtype, k_device), (v_shape, v_dtype, v_device))
    return prepare(Request((*entries, *others), needs, trains, requested, options))


observe.watch("torch", _prepared)
