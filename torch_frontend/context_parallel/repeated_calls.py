"""Finds what is known of a repeated eager call by one lookup of its metadata, instead of checks and planning.

The checks that depend on metadata alone run in the first call of a kind. Types, storages, ``requires_grad``, the values
of documents' offsets, and the process groups are checked on every call. Whatever this path does not know, it leaves to
the general one, which accepts it or names it in an error.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from attn_core.call import counters
from attn_core.call.options import Options, is_plain_window
from attn_core.call.seq_info import SeqInfo
from attn_core.selection import override
from torch_frontend.context_parallel.agreement.calls import SharedCall, find_meeting
from torch_frontend.context_parallel.mesh import group_names
from torch_frontend.dispatch import autocast, tensor_kinds
from torch_frontend.dispatch.after_import import after_import

Tensor = torch.Tensor
_KINDS = frozenset((Tensor, torch.nn.Parameter))
_transforms = torch._C._functorch


class RepeatedCall:
    """What the first call of a kind found out.

    Attributes:
        known: the call; None until ranks have compared it.
    """

    known: SharedCall | None = None

    def remember(self, call: SharedCall) -> None:
        """Keeps what a call found out."""
        if call.meeting is not None:  # without a meeting, nothing would show that the process groups were replaced
            self.known = call

    def is_current(self) -> bool:
        """Returns whether a call is known whose process groups still exist."""
        if self.known is None:
            return False
        plan = self.known.plan
        return find_meeting(plan.outer, plan.inner) is self.known.meeting


# A small cache, because a plan holds tensors on the device. Typed, because True and 1.0 are not 1.
@lru_cache(maxsize=64, typed=True)
def _repeated_call(*key: Any) -> RepeatedCall:
    return RepeatedCall()


def find(
    tensors: tuple[Any, ...], mesh: Any, seq_info: Any, backend: Any, options: Options, how: dict[str, Any]
) -> RepeatedCall | None:
    """Returns what is known of calls like this one; None for a call that is always checked as a whole.

    Args:
        tensors: q, k, v and sinks, and the mask, the bias and the slopes, which are not supported.
        options, how: as the caller passed them, not checked yet.
    """
    q, k, v, sinks, *refused = tensors
    length = how["length"]
    if (
        how["key_ranges"] is not None
        or any(each is not None for each in refused)
        or not is_plain_window(options.window)
    ):
        return None
    if type(length) is tuple and not all(type(each) is int for each in length):  # (96.0, 96) is equal to (96, 96)
        return None
    try:
        if not (_is_unobserved() and all(map(_is_usual, (q, k, v)))):
            return None
        sink = None
        if sinks is not None:
            if not _is_usual(sinks):
                return None
            sink = sinks.shape, sinks.dtype, sinks.device
        differentiated = q.requires_grad or k.requires_grad or v.requires_grad
        call = _repeated_call(
            *(q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, sink),
            torch.is_grad_enabled() and (differentiated or (sinks is not None and sinks.requires_grad)),
            *_documents(seq_info),
            *(group_names(mesh), override.requested() if backend is None else backend),
            *options,
            *how.values(),
        )
        if not call.is_current():
            call.known = None
    except Exception:  # the general path raises the error again, or the one that comes before it
        return None
    return call


def _is_unobserved() -> bool:
    """Returns whether nothing records, transforms or casts the calls of this thread."""
    return (
        not tensor_kinds.are_modes_active()
        and tensor_kinds.are_jit_traces_active() is None
        and _transforms.peek_interpreter_stack() is None
        and not autocast.is_on()
    )


def _is_usual(tensor: Any) -> bool:
    """Returns whether a tensor is plain strided data within its storage."""
    if type(tensor) not in _KINDS or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    if _transforms.is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor):
        return False
    return tensor.untyped_storage().nbytes() >= tensor.nbytes or tensor_kinds.fits_its_storage(tensor)


def _documents(seq_info: Any) -> tuple[Any, ...]:
    """Returns what a plan depends on of ``seq_info``. Reads the values, which the caller may have changed.

    Raises:
        TypeError: for anything but a SeqInfo with offsets on the host.
    """
    if seq_info is None:
        return ()
    if type(seq_info) is not SeqInfo:
        raise TypeError("no SeqInfo")
    of_queries, of_keys = seq_info.cu_seqlens_q, seq_info.cu_seqlens_k
    queries = _values(of_queries)
    keys = queries if of_keys is of_queries else _values(of_keys)
    return *queries, *keys, seq_info.max_len_q, seq_info.max_len_k


def _values(offsets: Any) -> tuple[Any, Any]:
    if type(offsets) is not np.ndarray and not (type(offsets) is Tensor and offsets.is_cpu):
        raise TypeError("offsets that are not on the host")
    return tuple(offsets.tolist()), offsets.dtype


def _leave_to_python() -> None:
    """Makes Dynamo call ``find`` instead of tracing it, as ``differentiable.run``."""
    globals()["find"] = torch.compiler.disable(find)


after_import("torch._dynamo", _leave_to_python)  # torch.compiler.disable itself would import Dynamo
counters.watch("torch", _repeated_call)
