"""enable_copy_engines: lets the ranks of a mesh copy keys out of each other's memory, instead of collectives."""

from __future__ import annotations

import weakref
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from attn_core.errors import DeviceError
from torch_frontend.context_parallel.exchange.outbox import Outbox, Part
from torch_frontend.context_parallel.mesh import RankAxis, find_axis, group_names

T = TypeVar("T")
_outboxes: dict[str, tuple[weakref.ref[Any], torch.device, Outbox]] = {}
"""By the name of a process group: the store of its ranks (groups that are made again have another one), the device of
this rank, and its outbox."""


def enable_copy_engines(mesh: DeviceMesh) -> None:
    """Makes later calls over a mesh exchange keys and gradients by the copy engines of the GPUs.

    A collective of NCCL runs on multiprocessors, which the attention beside it then lacks; copy engines need none. The
    results have the same bits. Every rank holds up to three of the largest messages in memory that the others read; it
    grows in the first call that needs more. Calls that a CUDA graph captures keep NCCL.

    Call it once on every rank of the mesh, like a collective. It is for GPUs of one host that read each other's memory,
    as NVLink lets them. Of a mesh over several hosts, pass the axis within a host, such as ``mesh["ulysses"]``.

    Raises:
        DeviceError: on every rank, if several ranks have no GPUs, are on different hosts, or if one cannot copy.
        TypeError: for anything but a DeviceMesh.
        ShapeError: for a mesh of more than two axes.
    """
    axes = [axis for axis in map(find_axis, group_names(mesh)) if axis.size > 1]
    if axes and mesh.device_type != "cuda":  # one rank alone sends nothing
        raise DeviceError(f"mesh: expected GPUs, which have copy engines, got a mesh of {mesh.device_type!r}")
    opened = []
    for axis in axes:
        device = torch.device("cuda", torch.cuda.current_device())
        hosts = _of_all_ranks(axis, _host())
        if len(set(hosts)) > 1:
            number = {host: at for at, host in enumerate(dict.fromkeys(hosts))}
            raise DeviceError(
                "mesh: expected ranks of one host, which can read each other's memory, got ranks on hosts "
                f"{', '.join(str(number[host]) for host in hosts)}; pass an axis of the mesh within a host"
            )
        outbox, problem = None, ""
        try:
            outbox = _open_outbox(axis, device)
        except Exception as error:  # other ranks must hear of it
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
        problems = _of_all_ranks(axis, problem)
        if outbox is None or any(problems):
            lines = [f"  rank {rank}: {each or 'can copy'}" for rank, each in enumerate(problems)]
            raise DeviceError("\n".join(["mesh: expected GPUs that can read each other's memory, got", *lines]))
        opened.append((axis, device, outbox))
    for each in opened:
        set_outbox(*each)


def set_outbox(axis: RankAxis, device: torch.device, outbox: Outbox) -> None:
    """Makes the ranks of a group exchange through outboxes. Every rank must do so."""
    store = dist.distributed_c10d._get_default_store()
    for name in [name for name, (others, *_) in _outboxes.items() if others() is not store]:
        del _outboxes[name]
    _outboxes[axis.name] = weakref.ref(store), device, outbox


def find_outbox(axis: RankAxis, device: torch.device) -> Outbox | None:
    """Returns this rank's outbox in a group; None if its ranks exchange by collectives, as they do in a CUDA graph."""
    if not _outboxes or axis.name not in _outboxes:
        return None
    store, known, outbox = _outboxes[axis.name]
    if store() is not dist.distributed_c10d._get_default_store():
        del _outboxes[axis.name]
        return None
    if known != device or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return None
    return outbox


def _open_outbox(axis: RankAxis, device: torch.device) -> Outbox:
    """Returns an outbox through which a message has gone from every rank to every other one.

    Raises:
        ImportError, RuntimeError: if this torch or the GPUs cannot.
        DeviceError: if the numbers that arrive are wrong.
    """
    from torch_frontend.context_parallel.exchange.gpu_memory import GpuMemory

    outbox = Outbox(partial(GpuMemory, axis, device), axis.rank)
    count = 1000
    message = outbox.reserve(count, torch.int32)
    message.numbers.fill_(axis.rank)
    others = [rank for rank in range(axis.size) if rank != axis.rank]
    arrived = message.send(others, [Part(rank, 0, count) for rank in others]).wait()
    if not torch.equal(arrived, torch.tensor(others, device=device, dtype=torch.int32).repeat_interleave(count)):
        raise DeviceError(f"expected the numbers of the ranks {others}, got others")
    return outbox


def _of_all_ranks(axis: RankAxis, mine: T) -> list[T]:
    """Returns the object of each rank of a group."""
    group: Any = dist.distributed_c10d._resolve_process_group(axis.name)  # type: ignore[arg-type, unused-ignore]
    objects: list[Any] = [None] * axis.size
    dist.all_gather_object(objects, mine, group=group)
    return objects


def _host() -> str:
    """Returns what the processes of one machine have in common, containers included."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
