"""The backward of one rank's part of a context-parallel call: explicit, from whole rows' output and log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch

from attn_core.context_parallel.plan import Step
from attn_core.torch_rewrites import sink_gradient
from torch_frontend import context_engine as engine
from torch_frontend import context_exchange as exchange
from torch_frontend.context_engine import Saved, Work
from torch_frontend.context_places import Places
from torch_frontend.context_program import Run

Tensor = torch.Tensor


EVERY = slice(None)
"""All heads."""


class Found(NamedTuple):
    """Gradients of a group's block, ``[batch, places, heads, dim]`` each."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


class Total:
    """Gradients along ``size`` places, in other respects of a block's shape, to which runs add theirs."""

    def __init__(self, block: Tensor, size: int, dtype: torch.dtype) -> None:
        self.shape, self.dtype, self.device = (block.shape[0], size, *block.shape[2:]), dtype, block.device
        self.parts: list[tuple[Places, slice, Tensor]] = []
        self.so_far: Tensor | None = None

    def add(self, places: Places, found: Tensor, heads: slice = EVERY) -> None:
        """Adds a run's, of some of the heads."""
        self.parts.append((places, heads, found))

    def value(self, base: Tensor | None = None) -> Tensor:
        """What has been added, to ``base`` where there is one, which is changed.

        Else the first that reaches everything is taken as it is, and nothing where there is none.
        """
        parts, self.parts = self.parts, []
        if base is None:
            base = self.so_far
        if base is None:
            whole = (at for at, (places, heads, _) in enumerate(parts) if self._is_all(places, heads))
            at = next(whole, None)
            base = self._zeros() if at is None else parts.pop(at)[2]
        total = base.to(self.dtype)
        for places, heads, found in parts:
            places.add(total[:, :, heads], found)
        self.so_far = total
        return total

    def _is_all(self, places: Places, heads: slice) -> bool:
        return heads == EVERY and places.are_all_of(self.shape[1])

    def _zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


def backward(
    work: Work, saved: Sequence[Saved], sinks: Tensor | None, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, dsinks) of a shard from those of its output; dsinks is this rank's share of the sum over ranks."""
    call, dsinks = work.program.call, None if sinks is None else torch.zeros_like(sinks)
    arriving = (_arriving(work, saved[group], dout, dlse, group) for group in range(call.head_groups))
    returns = []
    for group, (mine, of_lse, keys) in engine.one_ahead(arriving):
        kept = saved[group]
        if dsinks is not None and sinks is not None:
            own = sink_gradient(engine.of_heads(work, sinks, group), kept.out, kept.lse, mine, of_lse)
            engine.of_heads(work, dsinks, group).copy_(own)
        returns.append(_group(work, Given(kept, mine, of_lse), keys))
        del mine, of_lse, keys
    found = [wait() for wait in returns]
    dq, dk, dv = (engine.of_all_heads([group[at] for group in found]) for at in range(3))
    if call.repeats > 1:  # every kv head's copies lie side by side
        dk, dv = (each.unflatten(2, (-1, call.repeats)).sum(3).to(dq.dtype) for each in (dk, dv))
    return dq, dk, dv, dsinks


def _arriving(
    work: Work, saved: Saved, dout: Tensor, dlse: Tensor | None, group: int
) -> Callable[[], tuple[Tensor, Tensor | None, engine.Keys]]:
    """Starts the exchange of a group's dout and dlse, and the way of its keys; what waits for them as the kernels want
    them."""
    parts = [dout] if dlse is None else [dout, dlse.transpose(1, 2)[..., None]]
    parts = [engine.group_of(work, part, group, kv=False) for part in parts]
    keys = engine.keys_of(work, [saved.k, saved.v])
    if work.inner.size == 1:
        return lambda: (*_pair(parts), keys)
    waits = [exchange.heads_to_positions(work.inner, [part], [work.program.q_held]) for part in parts]
    return lambda: (*_pair([part for received in waits for part in received()]), keys)


def _pair(parts: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    return parts[0], None if len(parts) == 1 else parts[1][..., 0].transpose(1, 2)


class Given(NamedTuple):
    """What a group's forward left, and the gradients of its out and lse."""

    saved: Saved
    dout: Tensor
    dlse: Tensor | None


def _group(work: Work, given: Given, keys: engine.Keys) -> Callable[[], list[Tensor]]:
    """A group's gradients; what waits for them as ``[batch, shard, ranks, heads, dim]``."""
    waiting = (_of_everybody if work.program.gathers else _of_blocks)(work, given, keys)
    if work.outer.size == 1:
        return _home(work, waiting(), given.dout.dtype)
    return lambda: _home(work, waiting(), given.dout.dtype)()


def _of_everybody(work: Work, given: Given, keys: engine.Keys) -> Callable[[], Found]:
    """Where keys were gathered: a rank adds up their gradients for every other, and each sends it those of its own.

    Half of the own step's heads come before, while keys are on their way, and half after, while gradients are.
    """
    program, others, saved = work.program, work.outer.size - 1, given.saved
    narrow, wide, (k, v) = saved.k.dtype, saved.lse.dtype, keys.own
    dtype = narrow if program.sent_alone else wide
    dq, own = _totals(work, saved, dtype if others == 1 and program.own_alone else wide)
    sent = [Total(each, others * program.k_size, dtype) for each in (saved.k, saved.v)]
    halves = (0, 1) if program.call.halved else (None,)

    def with_own(half: int | None) -> None:
        for step, runs in program.steps:
            for run in runs if step.own else ():
                heads, kv_heads, found = _run(run, given, k, v, half)
                dq.add(run.q, found.dq, heads)
                for total, part in zip(own, found[1:], strict=True):
                    total.add(run.sums, part, kv_heads)

    with_own(halves[0])
    everyones_k, everyones_v = keys.wait()
    for step, runs in program.steps:
        for run in runs if step.gathered else ():
            _, _, found = _run(run, given, everyones_k, everyones_v, None)
            dq.add(run.q, found.dq)
            for total, part in zip(sent, found[1:], strict=True):
                total.add(run.sums, part)
    received, count = exchange.to_their_ranks(work.outer, [total.value() for total in sent]), saved.k.shape[1]
    for half in halves[1:]:
        with_own(half)

    def wait() -> Found:
        # In the order of ranks, so that it is the same on every run.
        arrived = [each[0] if others == 1 else each.sum(0, dtype=wide) for each in received()]
        dk, dv = (total.value(base[:, :count]) for total, base in zip(own, arrived, strict=True))
        return Found(dq.value(), dk, dv)

    return wait


def _of_blocks(work: Work, given: Given, keys: engine.Keys) -> Callable[[], Found]:
    """The gradients of other ranks' blocks travel with them, a step behind, and go home from the last that sees them;
    those of the own one stay."""
    program, saved = work.program, given.saved
    shapes = [_padded_shape(each, program.k_size) for each in (saved.k, saved.v)]
    narrow, wide = saved.k.dtype, saved.lse.dtype
    dq, own = _totals(work, saved, narrow if program.own_alone else wide)
    waiting: Callable[[], Tensor] | None = None
    for step, runs, (k, v) in engine.blocks(work, keys):
        found = [_run(run, given, k, v, None)[2] for run in runs]
        del k, v  # a block is not held while the one after the next arrives
        sums: list[Tensor] = []
        if not step.own:
            buffer = _zeros(shapes, saved.k, narrow if program.sent_alone else wide) if waiting is None else waiting()
            sums = exchange.parts_of(buffer, shapes)
        for run, (its_dq, *pair) in zip(runs, found, strict=True):
            dq.add(run.q, its_dq)
            for at, part in enumerate(pair):
                run.sums.add(sums[at], part) if sums else own[at].add(run.sums, part)
        found.clear()  # a step's tensors are not held while the next one's are made
        for total in (dq, *own):
            total.value()
        if sums:
            waiting = exchange.hop(work.outer, buffer, _to_next(work, step))
    count = saved.k.shape[1]

    def wait() -> Found:
        if waiting is None:
            return Found(dq.value(), own[0].value(), own[1].value())
        arrived = exchange.parts_of(waiting(), shapes)
        return Found(dq.value(), *(mine.value() + its[:, :count] for mine, its in zip(own, arrived, strict=True)))

    return wait


def _totals(work: Work, saved: Saved, dtype: torch.dtype) -> tuple[Total, list[Total]]:
    """Nothing yet of dq, and of (dk, dv) of the own block in a dtype."""
    dq = Total(saved.q, saved.q.shape[1], engine.summed_in(work, saved.q, saved.lse.dtype))
    return dq, [Total(each, each.shape[1], dtype) for each in (saved.k, saved.v)]


def _padded_shape(tensor: Tensor, size: int) -> tuple[int, ...]:
    return (tensor.shape[0], size, *tensor.shape[2:])


def _zeros(shapes: Sequence[Sequence[int]], like: Tensor, dtype: torch.dtype) -> Tensor:
    return like.new_zeros(sum(map(prod, shapes)), dtype=dtype)


def _to_next(work: Work, step: Step) -> int:
    """How far the sums of a block go after a step: on to the next step's rank, or home after the last."""
    shifts = [each.shift for each, _ in work.program.steps]
    at = shifts.index(step.shift)
    return (shifts[at + 1] if at + 1 < len(shifts) else work.outer.size) - step.shift


def _run(run: Run, given: Given, k: Tensor, v: Tensor, half: int | None) -> tuple[slice, slice, Found]:
    """(heads, kv heads, the gradients of what one run computes of them): all heads, or the first or second half."""
    (q, _, _, out, lse), dout, dlse = given
    made, heads, kv_heads = run.made, EVERY, EVERY
    if half is not None and run.half is not None:
        made = run.half
        heads, kv_heads = (
            slice(half * count, (half + 1) * count) for count in (made.spec.num_heads, made.spec.num_kv_heads)
        )
    inputs = engine.inputs_of(run, q[:, :, heads], k[:, :, kv_heads], v[:, :, kv_heads])
    rows = [run.q.of(each[:, :, heads]) for each in (out, dout)]
    of_lse = [run.q.of(each[:, heads], 2) for each in (lse, dlse) if each is not None]
    if made.spec.packed:
        rows, of_lse = [each[0] for each in rows], [each[0] for each in of_lse]
    found = made.backward(
        made.spec, inputs, rows[0], of_lse[0].contiguous(), rows[1], of_lse[1] if len(of_lse) > 1 else None
    )
    return heads, kv_heads, Found(*(each[None] if made.spec.packed else each for each in found[:3]))


def _home(work: Work, sums: Found, dtype: torch.dtype) -> Callable[[], list[Tensor]]:
    """Starts the way of dq, dk, dv back to shards; copies of kv heads are still apart, and then in the sums' dtype."""
    call, inner = work.program.call, work.inner.size
    dq, pair = sums.dq.to(dtype), [each if call.repeats > 1 else each.to(dtype) for each in sums[1:]]
    if inner == 1:
        return lambda: [each[:, :, None] for each in (dq, *pair)]
    held = engine.held(work)
    shards = call.plan.q_layout.shard, *(call.plan.k_layout.shard,) * 2
    return exchange.positions_to_heads(work.inner, [dq, *pair], held, shards)
