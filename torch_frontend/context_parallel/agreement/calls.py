"""Prepares a call on all ranks together: compares what they plan, and tells all ranks if one refuses its call."""

from __future__ import annotations

from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from attn_core.context_parallel.request import Request, describe_request
from attn_core.errors import ShapeError
from torch_frontend.context_parallel import backward, forward
from torch_frontend.context_parallel.agreement.meeting import Exchange, Meeting
from torch_frontend.context_parallel.mesh import RankAxis, find_axis, group_names
from torch_frontend.context_parallel.prepare import RankPlan, prepare


class SharedCall(NamedTuple):
    """A call that all ranks make.

    Attributes:
        plan: what this rank runs.
        meeting: of the ranks; None for a single one.
        forward, backward: the exchanges to begin.
    """

    request: Request
    plan: RankPlan
    meeting: Meeting | None
    forward: Exchange
    backward: Exchange

    def begin(self, exchange: Exchange) -> None:
        """Counts an exchange that begins now; compares each kind of call once between all ranks.

        Raises:
            SpecError: if another rank makes another call, refused this one, or one from which some rank had returned.
        """
        if self.meeting is not None:
            self.meeting.begin(exchange, self.request)

    def end(self) -> None:
        """Ends the exchange that began last. Raises SpecError if another rank refused it."""
        if self.meeting is not None:
            self.meeting.end()


def prepare_together(request: Request, *, compiled: bool = False) -> SharedCall:
    """Plans a call. If this rank raises an error, every rank does: the others would wait for it."""
    axes = tuple(map(find_axis, request.axes))
    return _share(request, compiled, find_meeting(*axes), axes)


# A small cache, because a plan holds tensors on the device. Process groups may be made again with the same names.
@lru_cache(maxsize=64)
def _share(request: Request, compiled: bool, meeting: Meeting | None, axes: tuple[RankAxis, ...]) -> SharedCall:
    try:
        plan = prepare(request)
    except Exception as error:
        if meeting is not None:
            meeting.refuse(error)
        raise
    # Sorted, because the order of a set of strings differs between processes, and ranks compare this text.
    names = ", ".join(sorted({name for _, name in plan.call.backends}))
    text = f"{describe_request(request)}: {plan.call.plan.strategy} on {names}"
    kinds = ("compiled forward", "compiled backward") if compiled else ("forward", "backward")
    return SharedCall(request, plan, meeting, *(Exchange.of(kind, text) for kind in kinds))


def announce_error(error: Exception, mesh: Any) -> None:
    """Tells the other ranks of a mesh that this rank raises, so that they raise too; does nothing without a mesh.

    Raises:
        SpecError: on every rank, unless all ranks refuse with one error; the message lists each rank's call.
    """
    try:
        names = group_names(mesh)
    except (TypeError, ShapeError):
        return
    meeting = find_meeting(*map(find_axis, names))
    if meeting is not None:
        meeting.refuse(error)


_meetings: WeakKeyDictionary[Any, dict[tuple[RankAxis, ...], Meeting | None]] = WeakKeyDictionary()
"""The meetings of a store, which ends with its process groups."""


def find_meeting(*axes: RankAxis) -> Meeting | None:
    """Returns the meeting of the ranks along one or two axes; None for a single rank."""
    store = dist.distributed_c10d._get_default_store()
    if store is None:
        return None
    opened, shared = _meetings.setdefault(store, {}), tuple([axis for axis in axes if axis.size > 1])
    if shared not in opened:
        opened[shared] = _open(store, shared)
    return opened[shared]


def _open(base: Any, axes: tuple[RankAxis, ...]) -> Meeting | None:
    """Opens the meeting of all ranks of a mesh; returns None for groups that only pretend to communicate.

    The ranks of a mesh of two axes find each other by the ranks of their first column.
    """
    groups = [dist.distributed_c10d._resolve_process_group(axis.name) for axis in axes]  # type: ignore[arg-type, unused-ignore]
    if not groups or any(dist.get_backend(group) == "fake" for group in groups):
        return None
    timeout = base.timeout if isinstance(base.timeout, timedelta) else timedelta(seconds=300)
    own, watched = _connection(base), _connection(base)
    members = [dist.get_process_group_ranks(group) for group in groups]
    rank, size, name = axes[-1].rank, axes[-1].size, str(members[-1])
    if len(axes) == 2:
        outer, inner = axes
        rank, size = outer.rank * inner.size + inner.rank, outer.size * inner.size
        # Rank 0 of a row knows the first column, and tells its row.
        key = f"attn_core/column of {members[1]}"
        if inner.rank == 0:
            own.set(key, str(members[0]))
        own.wait([key], timeout)
        name = f"{own.get(key).decode()} x {inner.size}"
    # A mesh that is opened again begins at 0, so it needs other keys.
    opened = own.add(f"attn_core/{name}/opened by {rank}", 1)
    own, watched = (dist.PrefixStore(f"attn_core/{name}/{opened}", each) for each in (own, watched))
    return Meeting(own, watched, rank=rank, size=size, timeout=timeout.total_seconds(), play=stand_in)


def _connection(store: Any) -> Any:
    """Returns a connection to a store for one thread; the store itself if it is a caller's own kind, without clones."""
    try:
        return store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):
        return store


@torch.no_grad()
def stand_in(kind: str, request: Request) -> None:
    """Sends and receives what this rank would in an exchange that the other ranks have begun, so that they do not wait.

    The numbers are NaN. Every rank raises an error afterwards; a rank that reads its results before it learns of the
    error must not take them for right ones.
    """
    plan, compiled = prepare(request), kind.startswith("compiled")
    q, k, v, sinks = (
        None if each is None else torch.full(tuple(each[0]), torch.nan, dtype=each[1], device=request.device)
        for each in request.shards
    )
    assert q is not None and k is not None and v is not None
    if kind.endswith("forward"):
        forward.forward(plan, q, k, v, sinks, with_lse=compiled or request.options.return_lse, keep=False)
        return
    dout = q.new_full((*q.shape[:3], v.shape[3]), torch.nan)
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), torch.nan, dtype=plan.lse_dtype)
    if compiled:
        residuals = forward.recompute_residuals(plan, q, k, v, dout, lse)
    else:
        residuals = [forward.nan_residuals(plan, q, k, v)] * plan.call.head_groups
    sends_lse = request.options.return_lse and plan.inner.size > 1
    backward.backward(plan, residuals, sinks, dout, lse if sends_lse else None)
