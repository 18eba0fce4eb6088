"""enable_copy_engines: lets the ranks of a mesh copy keys out of each other's memory, instead of collectives."""

from __future__ import annotations

import socket
import weakref
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from attn_core.context_parallel.on_torch.current_gpu import with_current
from attn_core.errors import DeviceError
from torch_frontend.context_parallel.exchange import collectives
from torch_frontend.context_parallel.exchange.outbox import SLOTS, Outbox, Part, PeerMemory
from torch_frontend.context_parallel.mesh import RankAxis, find_axis, group_names

T = TypeVar("T")
_outboxes: dict[str, tuple[weakref.ref[Any], torch.device, Outbox, bool]] = {}
"""By the name of a process group: the store of its ranks (groups that are made again have another one), the device of
this rank, its outbox, and whether a CUDA graph can capture messages."""
_captured: list[PeerMemory] = []
"""Memory that CUDA graphs use again. It is kept for good, also if the group gets another outbox or is destroyed."""


def enable_copy_engines(mesh: DeviceMesh) -> None:
    """Makes later calls over a mesh exchange keys and gradients by the copy engines of the GPUs.

    A collective of NCCL runs on multiprocessors, which the attention beside it then lacks; copy engines need none. The
    results have the same bits. Every rank holds three of the largest messages, and at least 12 MiB for each axis, in
    memory that the others read. This memory grows in the first call that needs more: all ranks then wait for their GPUs
    and for each other. A CUDA graph captures copies if a call before it was as large, else collectives. Replay it on
    the stream of the other calls, and between the same calls on every rank. Memory in graphs is never freed.

    Call it once on every rank of the mesh, like a collective. It is for GPUs of one host that read each other's memory,
    as NVLink lets them, all visible to every process. Of a mesh over several hosts, pass the axis within a host, such
    as ``mesh["ulysses"]``. Some versions of torch count the calls that share memory in a process and not in a group, so
    share it over one group of ranks in a program (https://github.com/pytorch/pytorch/issues/196082).

    Raises:
        DeviceError: on every rank, if several ranks have no GPUs, are on different hosts, or if one cannot copy.
        TypeError: for anything but a DeviceMesh.
        ShapeError: for a mesh of more than two axes.
    """
    axes = [axis for axis in map(find_axis, group_names(mesh)) if axis.size > 1]
    if axes and mesh.device_type != "cuda":  # one rank alone sends nothing
        raise DeviceError(f"mesh: expected GPUs, which have copy engines, got a mesh of {mesh.device_type!r}")
    opened, problem = [], ""
    for axis in axes:
        if any(_of_all_ranks(axis, problem)):  # of the axis before: these ranks must not wait for that one here
            continue
        device = torch.device("cuda", torch.cuda.current_device())
        try:
            opened.append((axis, device, _open_outbox(axis, device)))
        except Exception as error:  # other ranks must hear of it
            problem = _first_line(error)
    error_lines: list[str] = []
    for axis in axes:
        problems = _of_all_ranks(axis, problem)
        if any(problems):
            error_lines = [f"  rank {rank}: {each or 'can copy'}" for rank, each in enumerate(problems)]
            problem = problem or "a rank of its other axis cannot"
    if error_lines:
        raise DeviceError("\n".join(["mesh: expected GPUs that can read each other's memory, got", *error_lines]))
    for axis, device, outbox in opened:
        _warm_collectives(axis, device)
        set_outbox(axis, device, outbox, captures=all(_of_all_ranks(axis, _can_capture(device))))


def set_outbox(axis: RankAxis, device: torch.device, outbox: Outbox, *, captures: bool = False) -> None:
    """Makes the ranks of a group exchange through outboxes. Every rank must do so."""
    store = dist.distributed_c10d._get_default_store()
    for name in [name for name, (others, *_) in _outboxes.items() if others() is not store]:
        del _outboxes[name]
    _outboxes[axis.name] = weakref.ref(store), device, outbox, captures


def find_outbox(axis: RankAxis, device: torch.device, count: int, dtype: torch.dtype) -> Outbox | None:
    """Returns this rank's outbox in a group, for a message of ``count`` numbers.

    None if its ranks exchange by collectives, as they do in a CUDA graph that cannot hold this message.
    """
    if not _outboxes or axis.name not in _outboxes:
        return None
    store, known, outbox, captures = _outboxes[axis.name]
    if store() is not dist.distributed_c10d._get_default_store():
        del _outboxes[axis.name]
        return None
    if known != device:
        return None
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        if not captures or not outbox.holds(count, dtype):  # it cannot grow while a graph is captured
            return None
        if outbox.memory() not in _captured:
            _captured.append(outbox.memory())
    return outbox


def _open_outbox(axis: RankAxis, device: torch.device) -> Outbox:
    """Returns an outbox through which a message has gone from every rank to every other one.

    Raises:
        DeviceError: if the ranks are on several hosts, if one of them has no memory to share, or if the numbers that
            arrive are wrong.
    """
    hosts = _of_all_ranks(axis, _host())
    if len(set(hosts)) > 1:
        number = {host: at for at, host in enumerate(dict.fromkeys(hosts))}
        names = ", ".join(str(number[host]) for host in hosts)
        raise DeviceError(f"expected ranks of one host, got ranks on the hosts {names}; pass an axis within a host")
    outbox = Outbox(partial(_memory_of_all, axis, device), axis.rank)
    count = 1000
    message = outbox.reserve(count, torch.int32)
    message.numbers.fill_(axis.rank)
    others = [rank for rank in range(axis.size) if rank != axis.rank]
    arrived = message.send(others, [Part(rank, 0, count) for rank in others]).wait()
    if not torch.equal(arrived, torch.tensor(others, device=device, dtype=torch.int32).repeat_interleave(count)):
        raise DeviceError(f"expected the numbers of the ranks {others}, got others")
    return outbox


def _memory_of_all(axis: RankAxis, device: torch.device, slot_size: int) -> PeerMemory:
    """Returns memory that all ranks of a group share. Raises DeviceError on every rank if one of them has none."""
    memory, problem = None, ""
    with with_current(device):  # torch's collectives of objects use the current GPU
        try:
            from torch_frontend.context_parallel.exchange.gpu_memory import GpuMemory

            memory = GpuMemory(axis, device, slot_size)
        except Exception as error:  # the others would wait for this rank
            problem = _first_line(error)
        problems = _of_all_ranks(axis, problem)
        if memory is None or any(problems):
            lines = ", ".join(f"rank {rank}: {each}" for rank, each in enumerate(problems) if each)
            raise DeviceError(f"cannot share {SLOTS * slot_size / 2**20:.0f} MiB ({lines})")
        memory.share()
    return memory


def _can_capture(device: torch.device) -> bool:
    from torch_frontend.context_parallel.exchange.gpu_memory import can_capture

    return can_capture(device)


def _warm_collectives(axis: RankAxis, device: torch.device) -> None:
    """Lets NCCL connect the ranks, which it cannot while a CUDA graph captures a call."""
    numbers = torch.zeros(axis.size, device=device)
    collectives.wait_tensor(collectives.all_to_all_single(numbers, [1] * axis.size, [1] * axis.size, axis.name))
    for each in collectives.all_gather_into_tensor_coalesced([numbers], axis.size, axis.name):
        collectives.wait_tensor(each)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _of_all_ranks(axis: RankAxis, mine: T) -> list[T]:
    """Returns the object of each rank of a group."""
    group: Any = dist.distributed_c10d._resolve_process_group(axis.name)  # type: ignore[arg-type, unused-ignore]
    objects: list[Any] = [None] * axis.size
    dist.all_gather_object(objects, mine, group=group)
    return objects


def _host() -> str:
    """Returns what the processes of one machine have in common, containers included."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text(encoding="ascii") if boot.exists() else socket.gethostname()
