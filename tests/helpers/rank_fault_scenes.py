"""Faults of one rank among two, for ``tests/faults/test_ranks.py``; each runs in a world of its own.

Every scene returns (what the rank got, seconds): the text of its error, or by how much its output differs from the
whole row's on one device.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from context_torch_scenes import LENGTH, error_of, row
from context_torch_worker import mesh_of

from torch_frontend import attention
from torch_frontend.context_parallel import exchange
from torch_frontend.context_parallel.attention import context_parallel_attention, shard_sequence

TIMEOUT, GRACE = 10.0, 20.0
"""Seconds until a process group gives up, and how much longer a faulty rank keeps its peers waiting at most."""
PATIENT = 60.0
"""The same limit where no rank is lost: a busy machine must not end the group."""
LATE = 2.0
"""Seconds."""


def fault(how: str) -> tuple[Any, float]:
    """Makes a right call, then one in which rank 1 has the fault. Rank 0 ends a lost rank once it has noticed."""
    mesh, faulty = mesh_of((2,)), dist.get_rank() == 1
    processes = [0, 0]
    dist.all_gather_object(processes, os.getpid())
    whole = row()[:3]
    learned = [shard_sequence(each, mesh).requires_grad_() for each in whole]

    def call(**options: Any) -> torch.Tensor:
        given = {"strategy": "ring", "length": LENGTH, "causal": True, **options}
        return context_parallel_attention(*learned, mesh=mesh, **given)

    if how == "sends NaN":  # in a contiguous layout rank 0 sees no key of rank 1
        near = {"mesh": mesh, "layout": "contiguous"}
        whole[2][:, LENGTH - 3] = torch.nan
        shards = [shard_sequence(each, **near) for each in whole]
        actual = context_parallel_attention(*shards, **near, length=LENGTH, causal=True)
        whole[2][:, LENGTH - 3] = 0.0  # the reference may multiply a hidden NaN by 0
        right = shard_sequence(attention(*whole, causal=True), **near)
        return float((actual - right).abs().max()), 0.0
    out = call()
    started = time.monotonic()
    if faulty:
        start(how)
        if how == "refuses alone":  # this call has other options than the one before, so the other rank compares it
            assert error_of(lambda: call(window=3, softcap=-1.0))
            time.sleep(TIMEOUT + GRACE)
            return "the other rank has not noticed", TIMEOUT + GRACE
    if how in ("dies in forward", "stops in forward", "is late", "refuses alone"):
        result: dict[str, torch.Tensor] = {}
        more = {"window": 3} if how == "refuses alone" else {}
        text = error_of(lambda: result.update(out=call(**more)))
        if "out" in result:
            right = shard_sequence(attention(*whole, causal=True), mesh)
            return float((result["out"] - right).abs().max().detach()), time.monotonic() - started
    else:
        text = error_of(lambda: out.sum().backward())
    seconds = time.monotonic() - started
    if text and not faulty:
        with suppress(ProcessLookupError):  # one that died may have been waited for
            os.kill(processes[1], signal.SIGKILL)
    return text, seconds


MESSAGES = ("all_to_all_single", "all_gather_into_tensor_coalesced")
"""The functions of ``exchanges`` that send."""


def start(how: str) -> None:
    """Prepares the fault of this rank, which happens at its next message."""

    def faulty(send: Any) -> Any:
        def run(*arguments: Any) -> Any:
            if how.startswith("dies"):
                os._exit(1)
            if how.startswith("stops"):
                _end_later(os.getpid())
                os.kill(os.getpid(), signal.SIGSTOP)
            if how == "is late":
                time.sleep(LATE)
            return send(*arguments)

        return run

    for name in MESSAGES:
        setattr(exchange, name, faulty(getattr(exchange, name)))


def _end_later(rank: int) -> None:
    """Ends a stopped rank that the other has not ended, when it must have noticed."""
    if os.fork() == 0:
        until = time.monotonic() + TIMEOUT + GRACE
        while os.getppid() == rank and time.monotonic() < until:
            time.sleep(0.1)
        if os.getppid() == rank:
            os.kill(rank, signal.SIGKILL)
        os._exit(0)
