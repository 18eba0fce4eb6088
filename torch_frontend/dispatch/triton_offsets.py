"""``offsets.safe_by_torch`` as one Triton kernel. This module imports triton, so it is imported only when it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from attn_core.backends.shared.triton import relaunch
from attn_core.call import observe
from attn_core.call.seq_info import Tail

Tensor = torch.Tensor
BLOCK = 1024
"""How many offsets the kernel reads at once."""


NO_TAIL = Tail(np.empty(0, np.int32), np.empty(0, np.int32), 1, 1, 0)
"""The tail of offsets to which no documents are added."""


@triton.jit
def _larger(one, other):
    return tl.maximum(one, other)


# No argument is specialised, so the kernel is compiled once, and the sizes may change from call to call.
@triton.jit(
    do_not_specialize=[
        "queries",
        "keys",
        "safe_q",
        "safe_k",
        "given",
        "extra_q",
        "extra_k",
        "tokens_q",
        "tokens_k",
        "first_q",
        "first_k",
        "step_q",
        "step_k",
    ]
)
def _complete(
    queries,
    keys,
    safe_q,
    safe_k,
    given,
    extra_q,
    extra_k,
    tokens_q,
    tokens_k,
    first_q,
    first_k,
    step_q,
    step_k,
    BLOCK: tl.constexpr,
):
    """Writes the safe offsets of one side: the given ones, then the ends of extra documents.

    The extra documents with queries come before those with keys. On the other side they repeat the last given offset.
    The extra ends of a side are ``first + n * step``.
    """
    # Program 0 is the side of queries, program 1 that of keys.
    offsets = queries
    safe = safe_q
    tokens = tokens_q
    first = first_q
    step = step_q
    ends_from = given
    ends_to = given + extra_q
    if tl.program_id(0) == 1:
        offsets = keys
        safe = safe_k
        tokens = tokens_k
        first = first_k
        step = step_k
        ends_from = given + extra_q
        ends_to = given + extra_q + extra_k
    largest = tl.program_id(0) * 0  # a 0 that is no constant, because the loop changes it
    last = tl.load(offsets + given - 1)
    for begin in range(0, given + extra_q + extra_k, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        value = tl.load(offsets + at, mask=at < given, other=0)
        is_end = (at >= ends_from) & (at < ends_to)
        # By place: a given offset, the end of an extra document of this side, or the last offset again.
        value = tl.where(at < given, value, tl.where(is_end, first + (at - ends_from) * step, last))
        value = tl.where(at == 0, 0, tl.minimum(tl.maximum(value, 0), tokens))
        # Documents never decrease: each offset is at least the largest before it.
        value = tl.maximum(tl.associative_scan(value, 0, _larger), largest)
        largest = tl.max(value, 0)
        tl.store(safe + at, value, mask=at < given + extra_q + extra_k)


_launchers: dict[int, Callable[..., Any] | None] = {}
"""By the index of the device, the compiled kernel's launch; None if Triton cannot compile it there."""


def safe(queries: Tensor, keys: Tensor, tail: Tail, tokens: tuple[int, int]) -> tuple[Tensor, Tensor] | None:
    """Returns the result of ``offsets.safe_by_torch``, or None if Triton cannot run here.

    Triton needs a C compiler on its first run, and not every machine has one.
    """
    device = queries.get_device()
    launch = _launchers.get(device)
    if launch is None and (device in _launchers or _is_capturing()):  # compiling would break a capture
        return None
    extra_q, extra_k = tail.queries, len(tail.ends_k) - tail.queries
    queries, keys = queries.contiguous(), keys.contiguous()
    size = queries.shape[0] + extra_q + extra_k
    safe_q = torch.empty(size, dtype=torch.int32, device=queries.device)
    safe_k = torch.empty(size, dtype=torch.int32, device=queries.device)
    step_q, step_k = max(1, min(tail.max_len_q, tokens[0])), max(1, min(tail.max_len_k, tokens[1]))
    firsts = tokens[0] - (extra_q - 1) * step_q, tokens[1] - (extra_k - 1) * step_k
    arguments = (
        queries,
        keys,
        safe_q,
        safe_k,
        queries.shape[0],
        extra_q,
        extra_k,
        *tokens,
        *firsts,
        step_q,
        step_k,
    )
    if device < 0 or device == torch.cuda.current_device():
        _run(device, launch, arguments)
    else:
        with torch.cuda.device(device):  # Triton launches on the current device
            _run(device, launch, arguments)
    return None if _launchers[device] is None else (safe_q, safe_k)


def _run(device: int, launch: Callable[..., object] | None, arguments: tuple[object, ...]) -> None:
    """Launches the kernel. The first launch on a device compiles it; if that fails, torch serves the device forever."""
    if launch is not None:
        launch(*arguments)
        return
    try:
        _launchers[device] = relaunch(_complete, (2, 1, 1), arguments, BLOCK=BLOCK, num_warps=4)
    except Exception as error:
        observe.count("fallback", "triton")
        reason = f"{type(error).__name__}: {error}"
        message = f"torch operations complete the offsets of documents on GPU {device}, because Triton raised {reason}"
        observe.emit("fallback", message, what="triton", framework="torch", device=device, missing=reason)
        _launchers[device] = None


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
