"""Prepares a call on all ranks together: compares what they plan, and tells all ranks if one refuses its call."""

from __future__ import annotations

import weakref
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from attn_core.context_parallel import borders
from attn_core.context_parallel.call import keeps_borders, keeps_gathered
from attn_core.context_parallel.request import Request
from attn_core.errors import ShapeError
from torch_frontend.context_parallel import backward, forward
from torch_frontend.context_parallel.agreement.meeting import Exchange, Meeting
from torch_frontend.context_parallel.forward import Residuals
from torch_frontend.context_parallel.mesh import RankAxis, find_axis, group_names
from torch_frontend.context_parallel.prepare import RankPlan, explain_request, prepare

Tensor = torch.Tensor
Prepared = tuple[RankPlan, Meeting | None]


def prepare_together(request: Request, kind: str = "forward") -> Prepared:
    """Plans a call; returns what this rank runs, and the meeting of its ranks. Compares each kind of call once.

    If some rank raises an error, or plans something else, every rank raises an error. Otherwise the other ranks would
    wait for it.

    Args:
        kind: of the exchange that begins now, as in ``begin_exchange``.
    """
    axes = tuple(map(find_axis, request.axes))
    plan, meeting = _prepare(request, *axes), find_meeting(*axes)
    begin_exchange(meeting, kind, request)
    return plan, meeting


# A small cache, because a plan holds tensors on the device.
@lru_cache(maxsize=64)
def _prepare(request: Request, *axes: RankAxis) -> RankPlan:
    """Plans a call, and compares it between all ranks, unless they compared it before."""
    try:
        choice, call = explain_request(request)[:2]
        plan = prepare(request)
    except Exception as error:
        announce_refusal(error, *axes)
        raise
    meeting = find_meeting(*axes)
    if meeting is not None and not meeting.agreed(request):
        # Sorted, because the order of a set of strings differs between processes, and ranks compare this text.
        names = ", ".join(sorted({name for _, name in call.backends}))
        meeting.meet(f"{describe(request)}: {choice.strategy} on {names}", request)
    return plan


def announce_refusal(error: Exception, *axes: RankAxis) -> None:
    """Tells the other ranks that this rank refuses a call, whether they compare theirs or exchange keys already.

    Raises:
        SpecError: on every rank, unless all ranks refuse with one error; the message lists each rank's call.
    """
    refuse_exchange(find_meeting(*axes), error)


def announce_error(error: Exception, mesh: Any) -> None:
    """Tells the other ranks of a mesh that this rank raises, so that they raise too; does nothing without a mesh.

    Raises:
        SpecError: as ``announce_refusal``.
    """
    try:
        names = group_names(mesh)
    except (TypeError, ShapeError):
        return
    announce_refusal(error, *map(find_axis, names))


def compare(text: str, *axes: RankAxis) -> None:
    """Compares a text with the texts of all ranks; raises SpecError on every rank if they differ."""
    meeting = find_meeting(*axes)
    if meeting is not None:
        meeting.compare(text)


def refuse_exchange(meeting: Meeting | None, error: Exception) -> None:
    """Tells the other ranks that this rank refuses the call or the backward that it was about to begin.

    Raises:
        SpecError: as ``announce_refusal``; or that of an earlier refusal, if some rank heard of it too late.
    """
    if meeting is not None:
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        meeting.meet(text, refused=True)


def begin_exchange(meeting: Meeting | None, kind: str, request: Request) -> None:
    """Counts an exchange that begins now: "forward" or "backward", or "compiled forward" or "compiled backward".

    Raises:
        SpecError: if another rank refused this exchange, or one from which some rank had returned already.
    """
    if meeting is not None:
        meeting.begin(Exchange(kind, request))


def end_exchange(meeting: Meeting | None) -> None:
    """Ends the exchange that began last. Raises SpecError if another rank refused it."""
    if meeting is not None:
        meeting.end()


def describe(request: Request) -> str:
    """Returns the properties of a request that all ranks must share. Names of process groups differ between ranks."""
    arrays = [array for array in request.shards[:3] if array is not None]
    shapes = " ".join(f"{name} {list(shape)}" for name, (shape, _) in zip("qkv", arrays, strict=True))
    documents = "" if request.documents is None else f" documents {request.documents}"
    sinks = "" if request.shards[3] is None else " sinks"
    bands = "" if request.bands is None else f" key_ranges {[tuple(each) for each in request.bands]}"
    return (
        f"{shapes}{sinks} {arrays[0][1]}, length {request.lengths[0]}/{request.lengths[1]}, strategy "
        f"{request.strategy}, layout {request.layout}, head_groups {request.head_groups}, {request.options}"
        f"{documents}{bands}, gradients {request.needs_backward}, backend {request.requested}"
    )


def find_meeting(*axes: RankAxis) -> Meeting | None:
    """Returns the meeting of the ranks along one or two axes; None for a single rank."""
    shared = tuple([axis for axis in axes if axis.size > 1])
    if not shared:
        return None
    base = dist.distributed_c10d._get_default_store()
    found, store = _open(shared, 0)
    if store is not None and store() is not base:  # the process groups were destroyed and made again
        _open.cache_clear()
        found, _ = _open(shared, 0)
    return found


def _connection(store: Any) -> Any:
    """Returns a connection to a store for one thread; the store itself if it is a caller's own kind, without clones."""
    try:
        return store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):
        return store


@lru_cache(maxsize=256)
def _open(axes: tuple[RankAxis, ...], _: int) -> tuple[Meeting | None, Any]:
    """Returns (the meeting, a weak reference to the store), (None, None) for groups that only pretend to communicate.

    The ranks of a mesh of two axes find each other by the ranks of their first column.
    """
    base: Any = dist.distributed_c10d._get_default_store()
    groups = [dist.distributed_c10d._resolve_process_group(axis.name) for axis in axes]  # type: ignore[arg-type, unused-ignore]
    if base is None or any(dist.get_backend(group) == "fake" for group in groups):
        return None, None
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
    prefix = f"attn_core/{name}/{opened}"
    own, watched = (dist.PrefixStore(prefix, each) for each in (own, watched))
    known: dict[str, Any] = {"rank": rank, "size": size, "timeout": timeout.total_seconds()}
    return Meeting(own, watched, **known, play=stand_in, describe=describe), weakref.ref(base)


@torch.no_grad()
def stand_in(exchange: Exchange) -> None:
    """Sends and receives what this rank would in an exchange that the other ranks have begun, so that they do not wait.

    The numbers are NaN. Every rank raises an error afterwards; a rank that reads its results before it learns of the
    error must not take them for right ones.
    """
    request = exchange.request
    plan, compiled = prepare(request), exchange.kind.startswith("compiled")
    q, k, v, sinks = (
        None if each is None else torch.full(tuple(each[0]), torch.nan, dtype=each[1], device=request.device)
        for each in request.shards
    )
    assert q is not None and k is not None and v is not None
    if exchange.kind.endswith("forward"):
        with_lse = compiled or request.options.return_lse
        forward.forward(plan, q, k, v, sinks, with_lse=with_lse, keep=False)
        return
    dout = q.new_full((*q.shape[:3], v.shape[3]), torch.nan)
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), torch.nan, dtype=plan.lse_dtype)
    if compiled:
        residuals = forward.recompute_residuals(plan, q, k, v, dout, lse)
    else:
        residuals = [_residuals(plan, q, k, v)] * plan.call.head_groups
    sends_lse = request.options.return_lse and plan.inner.size > 1
    backward.backward(plan, residuals, sinks, dout, lse if sends_lse else None)


def _residuals(plan: RankPlan, q: Tensor, k: Tensor, v: Tensor) -> Residuals:
    """Returns residuals of one head group, as an eager forward saves them."""
    parts, part, (heads, kv_heads) = plan.call.plan, plan.outer.rank, plan.call.heads
    shared = plan.inner.size > 1
    rows = parts.q_blocks[part].count if shared else q.shape[1]
    keys = parts.k_blocks[part].count if shared else k.shape[1]

    def nan(places: int, heads: int, width: int) -> Tensor:
        return q.new_full((q.shape[0], places, heads, width), torch.nan)

    lse = q.new_full((q.shape[0], heads, rows), torch.nan, dtype=plan.lse_dtype)
    out, widths = nan(rows, heads, v.shape[3]), (k.shape[3], v.shape[3])
    gathered = [None, None]
    if keeps_gathered(plan.call.spec, parts):
        gathered = [nan(plan.outer.size * plan.k_size, kv_heads, width) for width in widths]  # type: ignore[misc]
    elif keeps_borders(plan.call.spec, parts):
        places = sum(borders.size(step.border) for step, _ in plan.steps if step.border is not None)
        gathered = [nan(places, kv_heads, width) for width in widths]  # type: ignore[misc]
    own = (nan(keys, kv_heads, width) for width in widths)
    return Residuals(nan(rows, heads, q.shape[3]), *own, out, lse, *gathered)  # type: ignore[call-arg]
