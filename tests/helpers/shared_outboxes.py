"""Outboxes in files that processes map, so that messages through outboxes run on gloo ranks of one machine."""

from __future__ import annotations

import copy
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import context_told_scenes
import context_torch_worker
import numpy as np
import pytest
import torch
import torch.distributed as dist
from context_torch_worker import Case, mesh_of, run

from attn_core.errors import DeviceError
from torch_frontend.context_parallel.exchange import copy_engines
from torch_frontend.context_parallel.exchange.messages import Outgoing, receive
from torch_frontend.context_parallel.exchange.outbox import SLOTS, Outbox, Piece
from torch_frontend.context_parallel.mesh import RankAxis, find_axis, group_names

CPU = torch.device("cpu")


class SharedMemory:
    """``PeerMemory`` of processes; a stream is the process itself, which waits by looking."""

    def __init__(self, axis: RankAxis, folder: Path, slot_size: int) -> None:
        self.slot_size, self._rank = slot_size, axis.rank
        group: Any = dist.distributed_c10d._resolve_process_group(axis.name)
        mine = folder / f"{os.getpid()} {axis.name} {slot_size}"
        names: list[Any] = [None] * axis.size
        shape, size = (2, SLOTS, axis.size), SLOTS * slot_size
        with mine.open("wb") as file:
            file.truncate(size + 4 * np.prod(shape, dtype=int))
        dist.all_gather_object(names, str(mine), group=group)
        sizes = {"shared": True, "size": mine.stat().st_size, "dtype": torch.uint8}
        self._all = [torch.from_file(name, **sizes) for name in names]
        self._copied, self._announced = zip(
            *(each[size:].view(torch.int32).view(shape).numpy() for each in self._all), strict=True
        )
        self._copied[self._rank].fill(1)
        dist.barrier(group)
        mine.unlink()

    def bytes_of(self, rank: int, slot: int) -> torch.Tensor:
        return self._all[rank][slot * self.slot_size : (slot + 1) * self.slot_size]

    def reuse(self, slot: int) -> None:
        for reader in range(len(self._all)):
            if reader != self._rank:
                self._look(self._copied, slot, reader)

    def announce(self, slot: int, readers: tuple[int, ...]) -> None:
        for reader in readers:
            self._copied[self._rank][slot, reader] = 0
            self._announced[reader][slot, self._rank] = 1

    def copy(self, slot: int, result: torch.Tensor, pieces: Sequence[Piece]) -> Callable[[], None]:
        into = result.view(torch.uint8)
        for rank, start, size, place in pieces:
            self._look(self._announced, slot, rank)
            self._announced[self._rank][slot, rank] = 0
            into[place : place + size].copy_(self.bytes_of(rank, slot)[start : start + size])
            self._copied[rank][slot, self._rank] = 1
        return lambda: None

    def keep(self, tensor: torch.Tensor) -> None:
        pass

    def finish(self) -> None:
        pass

    def _look(self, marks: Sequence[np.ndarray], slot: int, other: int) -> None:
        """Waits until another rank has set its mark in this rank's memory."""
        until = time.monotonic() + 60
        while marks[self._rank][slot, other] != 1:
            assert time.monotonic() < until, f"rank {other} never set its mark"
            time.sleep(2e-5)


def exchange_by_copies(axes: tuple[int, ...], device: str = "cpu") -> list[Outbox]:
    """Makes the ranks of the worker's mesh exchange through outboxes; returns this rank's."""
    mesh = mesh_of(axes, device)
    if device == "cuda":
        copy_engines.enable_copy_engines(mesh)
        return [outbox for _, _, outbox, _ in copy_engines._outboxes.values()]
    folder, outboxes = Path(tempfile.gettempdir()), []
    for name in group_names(mesh):
        axis = find_axis(name)
        if axis.size > 1:
            outboxes.append(Outbox(partial(SharedMemory, axis, folder), axis.rank))
            copy_engines.set_outbox(axis, CPU, outboxes[-1])
    return outboxes


def captured(case: Case) -> tuple[bool, bool]:
    """Whether ``context_torch_worker.captured`` holds on ranks with outboxes, and whether the graph holds copies."""
    exchange_by_copies(case.axes, case.device)
    try:
        return context_torch_worker.captured(case), bool(copy_engines._captured)
    finally:
        copy_engines._outboxes.clear()


def messages_of(outboxes: list[Outbox]) -> int:
    return sum(each._area.sent for each in outboxes if each._area is not None)


def both_ways(case: Case) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], int]:
    """This rank's shards by collectives and by copies, and the number of messages that were copied."""
    by_collectives = run(case)
    outboxes = exchange_by_copies(case.axes, case.device)
    before = messages_of(outboxes)
    try:
        return by_collectives, run(case), messages_of(outboxes) - before
    finally:
        copy_engines._outboxes.clear()


def told(axes: tuple[int, ...], *given: Any) -> Any:
    """``context_told_scenes.told``, by ranks that exchange through outboxes."""
    outboxes = exchange_by_copies(axes)
    try:
        return context_told_scenes.told(axes, *given)
    finally:
        assert messages_of(outboxes) > 0
        copy_engines._outboxes.clear()


WAYS = ("hop", "deal", "deal_to_others", "send_to_all")


def expected(way: str, axis: RankAxis, distance: int, written: torch.Tensor) -> torch.Tensor:
    """What a rank receives if every rank writes these numbers plus its own rank."""
    me, every = axis.rank, list(range(axis.size))
    if way == "hop":
        return written + (me - distance) % axis.size
    if way == "send_to_all":
        return torch.cat([written + rank for rank in every])
    if way == "deal":
        return torch.cat([written.view(axis.size, -1)[me] + rank for rank in every])
    rows = written.view(axis.size - 1, -1)
    return torch.cat([rows[me - (me > rank)] + rank for rank in every if rank != me])


def many_messages(device: str = "cpu") -> tuple[list[Any], int, int]:
    """Sends messages of many sizes in all ways, some of which are waited for late.

    Returns:
        (messages with wrong numbers, how many were sent since the outbox grew last, the bytes of a slot)
    """
    world = dist.get_world_size()
    outboxes = exchange_by_copies((world,), device)
    axis = find_axis(group_names(mesh_of((world,), device))[0])
    random, wrong, late = np.random.default_rng(0), [], []
    like = torch.zeros(0, device=device)
    try:
        for step in range(120):
            numbers = int(random.choice([1, 7, 1000, 100_000])) if step != 30 else 600_000
            count, dtype = numbers * world * (world - 1), [torch.float32, torch.bfloat16][step % 2]
            message = Outgoing(axis, count, like, dtype)
            written = torch.arange(count, device=device).remainder(97).to(dtype)
            message.numbers.copy_(written + axis.rank)
            way, distance = str(random.choice(WAYS)), int(random.integers(1, world))
            sent = message.hop(distance) if way == "hop" else getattr(message, way)()
            late.append((step, way, sent, expected(way, axis, distance, written)))
            while len(late) > int(random.integers(0, 3)):
                at, kind, each, right = late.pop(0)
                if not torch.equal(receive(each), right):
                    wrong.append((at, kind))
        while late:
            receive(late.pop()[2])
        return wrong, messages_of(outboxes), outboxes[0]._area.memory.slot_size  # type: ignore[union-attr]
    finally:
        copy_engines._outboxes.clear()


def refusals() -> dict[str, Any]:
    """The errors of ``enable_copy_engines`` on ranks that cannot copy, and how many outboxes it left."""
    mesh = mesh_of((dist.get_world_size(),), "cpu")

    def error_of(given: Any) -> str:
        try:
            copy_engines.enable_copy_engines(given)
        except (DeviceError, TypeError) as error:
            return str(error)
        return "no error"

    def refuse(*_: Any) -> Outbox:
        if dist.get_rank() == 1:
            raise OSError("libcuda.so.1: not found")
        return Outbox(lambda size: None, dist.get_rank())  # type: ignore[arg-type, return-value]

    found = {"no GPUs": error_of(mesh), "no mesh": error_of("cp")}
    gpus = copy.copy(mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpus, "_device_type", "cuda")
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        with pytest.MonkeyPatch.context() as hosts:
            hosts.setattr(copy_engines, "_host", lambda: "a" if dist.get_rank() < 2 else "b")
            found["two hosts"] = error_of(gpus)
        found["no memory"] = error_of(gpus)
        patch.setattr(copy_engines, "_open_outbox", refuse)
        found["one rank"] = error_of(gpus)
    return {**found, "outboxes": len(copy_engines._outboxes)}
