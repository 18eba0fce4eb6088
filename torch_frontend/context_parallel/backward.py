"""The backward of one rank's part of a context-parallel call: explicit, from whole rows' output and log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch

from attn_core.backends.shared.rewrites import sink_gradient
from attn_core.context_parallel.on_torch.places import Places
from attn_core.context_parallel.plan import Step
from torch_frontend.context_parallel import exchange, forward
from torch_frontend.context_parallel.forward import Residuals
from torch_frontend.context_parallel.keys import Keys, blocks, keys_of
from torch_frontend.context_parallel.program import TileCall, Work

Tensor = torch.Tensor


class BlockGradients(NamedTuple):
    """Gradients ``[batch, places, heads, dim]`` of a tile's queries and keys, or of a group's whole block."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


class Total:
    """Adds up tiles' gradients along ``size`` places; the other axes are those of a block.

    The sum is computed in ``home`` if that is a tensor; its initial values do not matter.
    """

    def __init__(self, block: Tensor, size: int, dtype: torch.dtype, home: Tensor | None = None) -> None:
        self.shape, self.dtype, self.device = (block.shape[0], size, *block.shape[2:]), dtype, block.device
        self.home = home
        self.so_far: Tensor | None = None

    @classmethod
    def in_place(cls, tensor: Tensor) -> Total:
        """A total that continues the sum in a tensor, in place."""
        total = cls(tensor, tensor.shape[1], tensor.dtype)
        total.so_far = tensor
        return total

    def add(self, places: Places, gradient: Tensor) -> None:
        """Adds a tile's gradients; takes the first tensor itself if its shape and place allow."""
        if self.so_far is not None:
            places.add(self.so_far, gradient)
        elif self.home is None and places.is_whole(self.shape[1]):
            self.so_far = gradient.to(self.dtype)
        elif places.distinct:
            self.so_far = self._begun(zeros=not places.is_whole(self.shape[1]))
            places.put(self.so_far, gradient)
        else:
            places.add(self.tensor(), gradient)

    def tensor(self) -> Tensor:
        """The sum; zeros if nothing was added."""
        if self.so_far is None:
            self.so_far = self._begun(zeros=True)
        return self.so_far

    def _begun(self, *, zeros: bool) -> Tensor:
        if self.home is not None:
            return self.home.zero_() if zeros else self.home
        return (torch.zeros if zeros else torch.empty)(self.shape, dtype=self.dtype, device=self.device)


Rows = list[tuple[Places, Tensor]]
"""Gradients of queries, each with its places."""


def _add_keys(runs: Sequence[TileCall], gradients: list[BlockGradients], keys: Sequence[Total]) -> Rows:
    """Adds the tiles' dk and dv to the totals and frees them; returns dq with its places, still to be added."""
    rows = []
    for run in runs:
        dq, *pair = gradients.pop(0)
        rows.append((run.q, dq))
        for total in keys:
            total.add(run.sums, pair.pop(0))
    return rows


def _add_rows(dq: Total, rows: Rows) -> None:
    """Adds gradients of queries and frees them."""
    while rows:
        dq.add(*rows.pop(0))


def backward(
    work: Work, saved: Sequence[Residuals], sinks: Tensor | None, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, dsinks) of a shard from dout and dlse; dsinks is this rank's share of the sum over ranks."""
    call, dsinks = work.program.call, None if sinks is None else torch.zeros_like(sinks)
    arriving = (_arriving(work, saved[group], dout, dlse, group) for group in range(call.head_groups))
    returns = []
    for group, (mine, of_lse, keys) in forward.one_ahead(arriving):
        kept = saved[group]
        if dsinks is not None and sinks is not None:
            own = sink_gradient(forward.of_heads(work, sinks, group), kept.out, kept.lse, mine, of_lse)
            forward.of_heads(work, dsinks, group).copy_(own)
        returns.append(_group(work, kept, _steps(work, kept, keys, mine, of_lse)))
        del mine, of_lse, keys
    groups = [wait() for wait in returns]
    dq, dk, dv = (forward.of_all_heads([group[at] for group in groups]) for at in range(3))
    if call.repeats > 1:  # every kv head's copies lie side by side
        dk, dv = (each.unflatten(2, (-1, call.repeats)).sum(3).to(dq.dtype) for each in (dk, dv))
    return dq, dk, dv, dsinks


def _arriving(
    work: Work, saved: Residuals, dout: Tensor, dlse: Tensor | None, group: int
) -> Callable[[], tuple[Tensor, Tensor | None, Keys]]:
    """Starts the exchange of a group's dout and dlse, and of its keys; the result waits for them."""
    parts = [dout] if dlse is None else [dout, dlse.transpose(1, 2)[..., None]]
    parts = [forward.group_of(work, part, group, kv=False) for part in parts]
    keys = _keys(work, saved)
    if work.inner.size == 1:
        return lambda: (*_pair(parts), keys)
    waits = [exchange.heads_to_positions(work.inner, [part], [work.program.q_held]) for part in parts]
    return lambda: (*_pair([part for received in waits for part in received()]), keys)


def _keys(work: Work, saved: Residuals) -> Keys:
    """A group's keys; starts their exchange again unless the forward kept them."""
    own, all_k, all_v = [saved.k, saved.v], saved.all_k, saved.all_v
    if all_k is None or all_v is None:
        return keys_of(work, own)
    return Keys(own, lambda: [all_k, all_v], here=True)


def _pair(parts: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    return parts[0], None if len(parts) == 1 else parts[1][..., 0].transpose(1, 2)


Steps = Iterator[tuple[Step, tuple[TileCall, ...], list[BlockGradients]]]
"""Each step with its tiles' gradients, computed when the iterator reaches it."""


def _steps(work: Work, saved: Residuals, keys: Keys, dout: Tensor, dlse: Tensor | None) -> Steps:
    for step, runs, (k, v) in blocks(work, keys):
        gradients = [_tile_gradients(run, saved, k, v, dout, dlse) for run in runs]
        del k, v  # free this block: the next two blocks will be in memory
        yield step, runs, gradients


def _group(work: Work, saved: Residuals, steps: Steps) -> Callable[[], list[Tensor]]:
    """Computes a group's gradients; the result waits for ``[batch, shard, ranks, heads, dim]`` of dq, dk and dv."""
    waiting = (_of_gathered_keys if work.program.call.plan.gathers else _of_blocks)(work, saved, steps)
    if work.outer.size == 1:
        return _home(work, waiting(), saved.q.dtype)
    return lambda: _home(work, waiting(), saved.q.dtype)()


def _of_gathered_keys(work: Work, saved: Residuals, steps: Steps) -> Callable[[], BlockGradients]:
    """If keys are gathered: each rank adds up the gradients of every other rank's keys and sends them to that rank."""
    program, count, wide = work.program, saved.k.shape[1], saved.lse.dtype
    dq, own = _totals(work, saved)
    others, dtype, pair = work.outer.size - 1, _sent_in(work, saved), (saved.k, saved.v)
    sender = exchange.GradientSend(work.outer, program.k_size, pair, dtype)
    sent = [Total(each, others * program.k_size, dtype, home) for each, home in zip(pair, sender.homes, strict=True)]
    received: exchange.Waiting | None = None
    for step, runs, gradients in steps:
        rows = _add_keys(runs, gradients, sent if step.gathered else own)
        if step.gathered:
            sums = [total.tensor() for total in sent]
            sent.clear()
            received = sender.send(sums)
        _add_rows(dq, rows)  # overlaps the message just sent

    def wait() -> BlockGradients:
        # Sums in the order of ranks, so that every run gives the same bits.
        assert received is not None
        parts = [each[0] if others == 1 else each.sum(0, dtype=wide) for each in received()]
        return BlockGradients(
            dq.tensor(), *(mine.tensor() + its[:, :count] for mine, its in zip(own, parts, strict=True))
        )

    return wait


def _of_blocks(work: Work, saved: Residuals, steps: Steps) -> Callable[[], BlockGradients]:
    """In a ring: the gradients of a block travel one step behind it, and home from the last rank that sees it. A rank's
    own share stays where it is."""
    count, size = saved.k.shape[1], work.program.k_size
    shapes = [(each.shape[0], size, *each.shape[2:]) for each in (saved.k, saved.v)]
    dq, own = _totals(work, saved)
    waiting: Callable[[], Tensor] | None = None
    for step, runs, gradients in steps:
        keys, buffer = own, None
        if not step.own:
            buffer = (
                saved.k.new_zeros(sum(map(prod, shapes)), dtype=_sent_in(work, saved)) if not waiting else waiting()
            )
            keys = [Total.in_place(part) for part in exchange.parts_of(buffer, shapes)]
        rows = _add_keys(runs, gradients, keys)
        if buffer is not None:
            waiting = exchange.hop(work.outer, buffer, _to_next(work, step))
        _add_rows(dq, rows)  # overlaps the message just sent

    def wait() -> BlockGradients:
        if waiting is None:
            return BlockGradients(dq.tensor(), own[0].tensor(), own[1].tensor())
        arrived = exchange.parts_of(waiting(), shapes)
        return BlockGradients(
            dq.tensor(), *(mine.tensor() + its[:, :count] for mine, its in zip(own, arrived, strict=True))
        )

    return wait


def _totals(work: Work, saved: Residuals) -> tuple[Total, list[Total]]:
    """Empty totals of dq, and of (dk, dv) of the own block."""
    wide = saved.lse.dtype
    dtype = wide if work.program.own_wide else saved.k.dtype
    dq = Total(saved.q, saved.q.shape[1], forward.summed_in(work, saved.q, wide))
    return dq, [Total(each, each.shape[1], dtype) for each in (saved.k, saved.v)]


def _sent_in(work: Work, saved: Residuals) -> torch.dtype:
    """The dtype of the gradients of keys that ranks send each other."""
    return saved.lse.dtype if work.program.sent_wide else saved.k.dtype


def _to_next(work: Work, step: Step) -> int:
    """How many ranks on a block's gradients go after a step: to the next step's rank, or home after the last step."""
    shifts = [each.shift for each, _ in work.program.steps]
    at = shifts.index(step.shift)
    return (shifts[at + 1] if at + 1 < len(shifts) else work.outer.size) - step.shift


def _tile_gradients(
    run: TileCall, saved: Residuals, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None
) -> BlockGradients:
    """The gradients of one tile."""
    inputs, packed = forward.inputs_of(run, saved.q, k, v), run.plan.spec.packed
    rows = [run.q.take(saved.out), run.q.take(dout)]
    lse = [run.q.take(each, 2) for each in (saved.lse, dlse) if each is not None]
    if packed:
        rows, lse = [each[0] for each in rows], [each[0] for each in lse]
    gradients = run.plan.backward(
        run.plan.spec, inputs, rows[0], lse[0].contiguous(), rows[1], lse[1] if len(lse) > 1 else None
    )
    return BlockGradients(*(each[None] if packed else each for each in gradients[:3]))


def _home(work: Work, sums: BlockGradients, dtype: torch.dtype) -> Callable[[], list[Tensor]]:
    """Starts the exchange of dq, dk, dv back to shards. Copies of kv heads stay apart, in the dtype of the sums."""
    call, inner = work.program.call, work.inner.size
    dq, pair = sums.dq.to(dtype), [each if call.repeats > 1 else each.to(dtype) for each in sums[1:]]
    if inner == 1:
        return lambda: [each[:, :, None] for each in (dq, *pair)]
    held = forward.held(work)
    shards = call.plan.q_layout.shard, *(call.plan.k_layout.shard,) * 2
    return exchange.positions_to_heads(work.inner, [dq, *pair], held, shards)
