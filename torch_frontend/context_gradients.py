"""The backward of one rank's part of a context-parallel call: explicit, from whole rows' output and log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from attn_core.torch_rewrites import sink_gradient
from torch_frontend import context_engine as engine
from torch_frontend import context_exchange as exchange
from torch_frontend.context_engine import Saved, Work
from torch_frontend.context_program import Run

Tensor = torch.Tensor


class Sums(NamedTuple):
    """Gradients that tiles add to, in float32 (float64 for float64)."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


def backward(
    work: Work, saved: Sequence[Saved], sinks: Tensor | None, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, dsinks) of a shard from those of its output; dsinks is this rank's share of the sum over ranks."""
    call, dsinks = work.program.call, None if sinks is None else torch.zeros_like(sinks)
    arriving = (_arriving(work, dout, dlse, group) for group in range(call.head_groups))
    returns = []
    for group, (mine, of_lse) in engine.one_ahead(arriving):
        kept = saved[group]
        if dsinks is not None and sinks is not None:
            own = sink_gradient(engine.of_heads(work, sinks, group), kept.out, kept.lse, mine, of_lse)
            engine.of_heads(work, dsinks, group).copy_(own)
        returns.append(_group(work, kept, mine, of_lse))
    found = [wait() for wait in returns]
    dq, dk, dv = (engine.of_all_heads([group[at] for group in found]) for at in range(3))
    if call.repeats > 1:  # every kv head's copies lie side by side
        dk, dv = (each.unflatten(2, (-1, call.repeats)).sum(3).to(dq.dtype) for each in (dk, dv))
    return dq, dk, dv, dsinks


def _arriving(work: Work, dout: Tensor, dlse: Tensor | None, group: int) -> Callable[[], tuple[Tensor, Tensor | None]]:
    """Starts the exchange of a group's dout and dlse; what waits for them as the kernels want them."""
    parts = [dout] if dlse is None else [dout, dlse.transpose(1, 2)[..., None]]
    parts = [engine.group_of(work, part, group, kv=False) for part in parts]
    if work.inner.size == 1:
        return lambda: _pair(parts)
    waits = [exchange.heads_to_positions(work.inner, [part], [work.program.q_held]) for part in parts]
    return lambda: _pair([part for received in waits for part in received()])


def _pair(parts: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    return parts[0], None if len(parts) == 1 else parts[1][..., 0].transpose(1, 2)


def _group(work: Work, saved: Saved, dout: Tensor, dlse: Tensor | None) -> Callable[[], list[Tensor]]:
    """A group's gradients; what waits for them as ``[batch, shard, ranks, heads, dim]``."""
    keys = engine.keys_of(work, [saved.k, saved.v])
    if keys.shapes:
        waiting = _in_a_ring(work, saved, dout, dlse, keys, keys.shapes)
    else:
        waiting = _of_one(work, saved, dout, dlse, keys)
    if work.outer.size == 1:
        return _home(work, waiting(), saved.q.dtype)
    return lambda: _home(work, waiting(), saved.q.dtype)()


def _of_one(work: Work, saved: Saved, dout: Tensor, dlse: Tensor | None, keys: engine.Keys) -> Callable[[], Sums]:
    """Of a row whose keys are all here, or were gathered: their gradients are summed over the ranks that saw them."""
    program, (k, v), wide = work.program, keys.wait(), saved.lse.dtype
    if program.keys_alone:
        ((run,),) = (runs for _, runs in program.steps)
        found = _tile(run, saved, k, v, dout, dlse)
        return lambda: Sums(run.q.spread(found.dq, program.q_size), found.dk, found.dv)
    dq = _dq(work, saved)
    start: Callable[[], exchange.Waiting] | None = None
    if work.outer.size == 1:
        sums = [torch.zeros_like(each, dtype=wide) for each in (k, v)]
    else:
        sums, start = exchange.sums_like(work.outer, (saved.k, saved.v), program.k_size, wide)
    for _, runs in program.steps:
        for run in runs:
            found = _tile(run, saved, k, v, dout, dlse)
            _add_rows(run, dq, found.dq)
            run.k.add(sums[0], found.dk)
            run.k.add(sums[1], found.dv)
    if start is None:
        return lambda: Sums(dq, *sums)
    received, count = start(), saved.k.shape[1]
    return lambda: Sums(dq, *(each[:, :count] for each in received()))


def _in_a_ring(
    work: Work, saved: Saved, dout: Tensor, dlse: Tensor | None, keys: engine.Keys, shapes: Sequence[torch.Size]
) -> Callable[[], Sums]:
    """The gradients of keys travel with their block, a step behind it, and go home from the last of its ranks."""
    dq, wide, count = _dq(work, saved), saved.lse.dtype, saved.k.shape[1]
    waiting: Callable[[], Tensor] | None = None
    for shift, runs, (k, v) in engine.blocks(work, keys):
        tiles = [_tile(run, saved, k, v, dout, dlse) for run in runs]
        for at, run in enumerate(runs):
            _add_rows(run, dq, tiles[at].dq)
        sums = k.new_zeros(k.numel() + v.numel(), dtype=wide) if waiting is None else waiting()
        dk, dv = exchange.parts_of(sums, shapes)
        for at, run in enumerate(runs):
            run.k.add(dk, tiles[at].dk)
            run.k.add(dv, tiles[at].dv)
        waiting = exchange.hop(work.outer, sums, _to_next(work, shift))
        del k, v
        tiles.clear()  # a step's tensors are not held while the next one's are made

    def wait() -> Sums:
        assert waiting is not None  # keys travel where there are steps
        dk, dv = exchange.parts_of(waiting(), shapes)
        return Sums(dq, dk[:, :count], dv[:, :count])

    return wait


def _to_next(work: Work, shift: int) -> int:
    """How far the sums of a block go after a step: on to the next step's rank, or home after the last."""
    shifts = [step for step, _ in work.program.steps]
    at = shifts.index(shift)
    return shifts[at + 1] - shift if at + 1 < len(shifts) else work.outer.size - shift


def _dq(work: Work, saved: Saved) -> Tensor:
    return torch.zeros_like(saved.q, dtype=None if work.program.most < 2 else saved.lse.dtype)


def _add_rows(run: Run, dq: Tensor, found: Tensor) -> None:
    if run.first:
        run.q.put(dq, found)
    else:
        run.q.add(dq, found)


class Tile(NamedTuple):
    """One tile's gradients, with a batch axis."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


def _tile(run: Run, saved: Saved, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None) -> Tile:
    inputs = engine.inputs_of(run, saved.q, k, v)
    rows, lse = (
        [run.q.of(saved.out), run.q.of(dout)],
        [run.q.of(each, 2) for each in (saved.lse, dlse) if each is not None],
    )
    packed = run.made.spec.packed
    if packed:
        rows, lse = [each[0] for each in rows], [each[0] for each in lse]
    found = run.made.backward(
        run.made.spec, inputs, rows[0], lse[0].contiguous(), rows[1], lse[1] if len(lse) > 1 else None
    )
    return Tile(*(each[None] if packed else each for each in found[:3]))


def _home(work: Work, sums: Sums, dtype: torch.dtype) -> Callable[[], list[Tensor]]:
    """Starts the way of dq, dk, dv back to shards; copies of kv heads are still apart, and then in the sums' dtype."""
    call, inner = work.program.call, work.inner.size
    dq, pair = sums.dq.to(dtype), [each if call.repeats > 1 else each.to(dtype) for each in sums[1:]]
    if inner == 1:
        return lambda: [each[:, :, None] for each in (dq, *pair)]
    held = engine.held(work)
    shards = call.plan.q_layout.shard, *(call.plan.k_layout.shard,) * 2
    return exchange.positions_to_heads(work.inner, [dq, *pair], held, shards)
