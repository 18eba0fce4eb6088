"""Repeated eager calls over ranks by the table of prepared calls, see ``dispatch.prepared``.

The values of documents' offsets and the process groups are compared on every call.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from attn_core.call.options import Options, is_plain_window
from attn_core.call.seq_info import SeqInfo, SeqInfoLike
from torch_frontend.context_parallel.agreement import SharedCall, find_meeting
from torch_frontend.context_parallel.mesh import group_names
from torch_frontend.dispatch.after_import import after_import
from torch_frontend.dispatch.prepared import Prepared, Request, Requested
from torch_frontend.dispatch.prepared import find as find_prepared

Tensor = torch.Tensor
MOST_KNOWN = 64
"""Few, because a plan holds tensors on the device."""


class RepeatedCall:
    """What the first call of a kind found out.

    Attributes:
        known: the call; None until it is planned.
    """

    known: SharedCall | None = None

    def remember(self, call: SharedCall) -> None:
        """Keeps what a call found out, and forgets the oldest of too many."""
        if call.meeting is None:  # without a meeting, nothing would show that the process groups were replaced
            return
        if len(_known) == MOST_KNOWN:
            _known[0].known = None
        self.known = call
        _known.append(self)

    def current(self) -> RepeatedCall:
        """Returns itself, and knows nothing any more if the call's process groups were replaced."""
        if self.known is not None:
            plan = self.known.plan
            if find_meeting(plan.outer, plan.inner) is not self.known.meeting:
                self.known = None
        return self


_known: deque[RepeatedCall] = deque(maxlen=MOST_KNOWN)
"""Calls that know something, the oldest first."""


def find(
    tensors: tuple[Any, ...],
    mesh: DeviceMesh,
    seq_info: SeqInfoLike,
    backend: Requested,
    options: Options,
    how: dict[str, Any],
) -> RepeatedCall | None:
    """Returns what is known of calls like this one; None for a call that is always checked as a whole.

    Args:
        tensors: q, k, v and sinks, and the mask, the bias and the slopes, which are not supported.
        options, how: as the caller passed them, not checked yet.
    """
    q, k, v, sinks, mask, bias, slopes = tensors
    length = how["length"]
    if how["key_ranges"] is not None or not (mask is bias is slopes is None) or not is_plain_window(options.window):
        return None
    if type(length) is tuple and not all(type(each) is int for each in length):  # (96.0, 96) is equal to (96, 96)
        return None
    try:
        key = (group_names(mesh), *_documents(seq_info), *options, *how.values())
    except Exception:  # the general path raises the error again, or the one that comes before it
        return None
    current = find_prepared(_prepare, q, k, v, (sinks,), key, backend)
    return None if current is None else current()  # type: ignore[no-any-return]


def _prepare(request: Request) -> Prepared:
    call = RepeatedCall()
    return Prepared(call.current, lambda: call.current, "all")


def _documents(seq_info: SeqInfoLike) -> tuple[object, ...]:
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


def _values(offsets: object) -> tuple[tuple[int, ...], object]:
    if type(offsets) is not np.ndarray and not (type(offsets) is Tensor and offsets.is_cpu):
        raise TypeError("offsets that are not on the host")
    return tuple(offsets.tolist()), offsets.dtype


def _leave_to_python() -> None:
    """Makes Dynamo call ``find`` instead of tracing it, as ``differentiable.run``."""
    globals()["find"] = torch.compiler.disable(find)


after_import("torch._dynamo", _leave_to_python)  # torch.compiler.disable itself would import Dynamo
