"""Jobs of ``context_torch_worker`` for ``test_context_torch_ranks``, other than cases."""

from __future__ import annotations

import inspect
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from context_torch_worker import Case, mesh_of, run
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

from attn_core import SeqInfo, masks
from attn_core.context_parallel import index_arrays
from attn_core.context_parallel.layout import LAYOUTS
from torch_frontend import Pages, diffusers_parallel
from torch_frontend.context_parallel.attention import context_parallel_attention, explain_context_parallel
from torch_frontend.context_parallel.layers import active_mesh, use_context_parallel
from torch_frontend.context_parallel.mesh import rank_of, row_layout
from torch_frontend.context_parallel.shards import shard_lengths, shard_sequence, unshard_sequence
from torch_frontend.finetrainers import attention_dispatch, attention_provider, providers
from torch_frontend.module import Attention

Tensor = torch.Tensor
LENGTH = 23


def counted(case: Case) -> dict[str, int]:
    """The number of collectives of each kind in the second run of a case; the first run also compares the ranks'
    calls."""
    run(case)
    with CommDebugMode() as mode:
        run(case)
    return {str(kind).rpartition(".")[2]: number for kind, number in mode.get_comm_counts().items() if number}


def error_of(call: Callable[[], Any]) -> str:
    """The type and the text of the error that a call raises; "" if it raises none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def tensors(*shapes: tuple[int, ...], dtype: Any = torch.float64) -> list[Tensor]:
    """The same numbers in every process."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def row(heads: int = 4, kv_heads: int = 2, length: int = LENGTH, batch: int = 2) -> list[Tensor]:
    """q, k, v and the output's gradient, of whole rows."""
    kv = (batch, length, kv_heads, 5)
    return tensors((batch, length, heads, 5), kv, kv, (batch, length, heads, 5))


# DTensor


def dtensors(strategy: str, length: int) -> dict[str, Any]:
    """A call on DTensors, batch over "dp" and positions over "cp": the whole results in the order of positions."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    made = row_layout(mesh["cp"], "zigzag", length, None)
    order, back = (
        torch.from_numpy(each.ravel())
        for each in (index_arrays.positions_by_shard(made), index_arrays.places_by_position(made))
    )
    placed = [
        distribute_tensor(torch.nn.functional.pad(each, (0, 0, 0, 0, 0, 1))[:, order], mesh, [Shard(0), Shard(1)])
        for each in row(length=length)
    ]
    q, k, v = (each.detach().requires_grad_() for each in placed[:3])
    out = context_parallel_attention(q, k, v, mesh=mesh["cp"], strategy=strategy, length=length, causal=True)
    out.backward(placed[3])
    actual = {"out": out, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    alike = all(isinstance(each, DTensor) and each.placements == q.placements for each in actual.values())
    whole = {name: each.full_tensor()[:, back].detach().numpy() for name, each in actual.items()}

    def refused(*placements: Any, others: Any = None) -> str:
        local = placed[0].to_local()
        one = DTensor.from_local(local, mesh, placements, run_check=False)
        rest = [local, local] if others else [one, one]
        return error_of(lambda: context_parallel_attention(one, *rest, mesh=mesh["cp"], strategy=strategy))

    refusals = {
        "replicated": refused(Replicate(), Replicate()),
        "other axis": refused(Shard(1), Shard(1)),
        "partial": refused(Partial(), Shard(1)),
        "mixed": refused(Shard(0), Shard(1), others="plain"),
    }
    return {"alike": alike, "same shape": out.shape == q.shape, "refusals": refusals, **whole}


def dtensors_on_two_axes() -> dict[str, Any]:
    """The positions are split over both axes of a mesh without names."""
    mesh = init_device_mesh("cpu", (2, 2))
    made = row_layout(mesh, "zigzag", LENGTH, None)
    order, back = (
        torch.from_numpy(each.ravel())
        for each in (index_arrays.positions_by_shard(made), index_arrays.places_by_position(made))
    )
    q, k, v, _ = (
        distribute_tensor(torch.nn.functional.pad(each, (0, 0, 0, 0, 0, 1))[:, order], mesh, [Shard(1), Shard(1)])
        for each in row()
    )
    out = context_parallel_attention(q, k, v, mesh=mesh, strategy="ring", length=LENGTH, causal=True)
    return {"out": out.full_tensor()[:, back].numpy()}


# Shards


def round_trips(axes: tuple[int, ...]) -> list[str]:
    """The rows that differ after sharding and unsharding, or whose shards' gradients are wrong."""
    mesh, wrong = mesh_of(axes), []
    for kind in (*LAYOUTS, "window:9"):
        for length, documents in ((LENGTH, None), (24, None), (1, None), (LENGTH, (3, 0, 11, 1, 8))):
            if kind == "documents" and documents is None:
                continue
            info = SeqInfo.from_lengths(documents) if documents else None
            given = {"layout": kind, "seq_info": info}
            for dim, dtype in ((1, torch.float32), (0, torch.int64), (-1, torch.bfloat16)):
                shape = [2, 3, 2]
                shape[dim] = length
                x = torch.arange(np.prod(shape)).reshape(shape).to(dtype)
                shard = shard_sequence(x, mesh, dim=dim, **given)
                if not torch.equal(unshard_sequence(shard, mesh, length=length, dim=dim, **given), x):
                    wrong.append(f"{kind} {length} {documents} dim {dim}")
            if not _lengths_are_those_of_shards(mesh, length, given):
                wrong.append(f"{kind} {length} {documents}: lengths")
            x = torch.ones(1, length, requires_grad=True)
            (shard_sequence(x, mesh, **given) * (1 + rank_of(mesh))).sum().backward()
            dist.all_reduce(x.grad)
            shares = [
                unshard_sequence(
                    torch.full_like(shard_sequence(x, mesh, **given), 1.0 + rank_of(mesh)).detach(),
                    mesh,
                    length=length,
                    **given,
                )
            ]
            if not torch.equal(x.grad, shares[0]):
                wrong.append(f"{kind} {length} {documents}: gradient")
    return wrong


def _lengths_are_those_of_shards(mesh: DeviceMesh, length: int, given: dict[str, Any]) -> bool:
    """Whether every rank's positions are at the first places of its shard, as many as shard_lengths says."""
    held = shard_sequence(torch.ones(length), mesh, dim=0, **given)
    every: list[Any] = [None] * mesh.size()
    dist.all_gather_object(every, int(held.sum()))
    by_rank = [every[rank] for rank in mesh.mesh.flatten().tolist()]
    lengths = shard_lengths(mesh, length=length, **given)
    first = torch.arange(len(held)) < lengths[rank_of(mesh)]
    return list(lengths) == by_rank and torch.equal(held, first.float()) and len(held) == max(lengths)


# Ranks that call differently, and ranks that die


def disagreeing(sizes: tuple[int, ...]) -> dict[str, Any]:
    """The error of every rank when rank 1 calls differently; and whether the ranks agree again afterwards."""
    mesh, rank, whole = mesh_of(sizes), dist.get_rank(), {"strategy": "ring", "length": LENGTH}
    q, k, v, _ = (shard_sequence(each, mesh) for each in row())
    narrow = [each[..., :3] for each in (q, k, v)] if rank == 1 else [q, k, v]
    shapes = error_of(lambda: context_parallel_attention(*narrow, mesh=mesh, **whole))
    window = error_of(lambda: context_parallel_attention(q, k, v, mesh=mesh, window=(rank, 0), **whole))
    alone = {}
    for name, (wrong, right) in {
        "softcap": (-1.0, None),
        "scale": ("1", 0.5),
        "dropout": (0.5, 0.0),
        "head_groups": (2.0, 1),
        "backend": (7, None),
    }.items():
        given = {name: wrong if rank == 1 else right}
        alone[name] = error_of(lambda g=given: context_parallel_attention(q, k, v, mesh=mesh, length=LENGTH, **g))
    halves = (q, k.half() if rank == 1 else k, v)
    alone["dtype"] = error_of(lambda: context_parallel_attention(*halves, mesh=mesh, length=LENGTH))
    moved = (q.to("meta") if rank == 1 else q, k, v)  # ranks cannot communicate here
    alone["device"] = error_of(lambda: context_parallel_attention(*moved, mesh=mesh, length=LENGTH, scale=0.25))
    fine = context_parallel_attention(q, k, v, mesh=mesh, **whole)
    info, one = SeqInfo.from_lengths((3, 19) if rank == 1 else (3, 20)), [each[:1] for each in (q, k, v)]
    alone["seq_info"] = error_of(lambda: context_parallel_attention(*one, mesh=mesh, length=LENGTH, seq_info=info))
    dealt = {"layout": "documents", "seq_info": SeqInfo.from_lengths((11, 1, 11) if rank == 1 else (11, 11, 1))}
    packed = [shard_sequence(each[:1], mesh, **dealt) for each in row()[:3]]
    documents = error_of(lambda: context_parallel_attention(*packed, mesh=mesh, causal=True, **dealt))
    right, other = masks.documents([3, 20]), masks.documents([4, 19])
    ranges = right + np.array([0, 1], np.int32) if rank == 1 else right
    alone["key_ranges"] = error_of(lambda: context_parallel_attention(q, k, v, mesh=mesh, key_ranges=ranges, **whole))
    theirs = other if rank == 1 else right
    others = error_of(lambda: context_parallel_attention(q, k, v, mesh=mesh, key_ranges=theirs, **whole))
    same = {"shapes": shapes, "window": window, "ranges": others, "documents": documents}
    return {"same": same, "alone": alone, "fine": bool(fine.isfinite().all())}


def without_one(how: str) -> tuple[str, float]:
    """(the error of a rank when the last one dies or does not come, after a call that all made; after how many
    seconds)."""
    mesh, last = mesh_of((3,)), dist.get_rank() == 2
    q, k, v, _ = (shard_sequence(each, mesh) for each in row())

    def call() -> Any:
        return context_parallel_attention(q, k, v, mesh=mesh, strategy="ring", length=LENGTH, causal=True)

    call()
    if last and how == "dies":
        os._exit(1)
    started = time.monotonic()
    if last:
        time.sleep(20)
        return "", 0.0
    return error_of(call), time.monotonic() - started


# Refusals


def refusals() -> dict[str, str]:
    mesh = mesh_of((2,))
    q, k, v, _ = (shard_sequence(each, mesh) for each in row())
    info, five = SeqInfo.from_lengths((3, 20)), SeqInfo.from_lengths((5,))
    elsewhere = SeqInfo.from_lengths((3, 20), array=lambda offsets: torch.tensor(offsets, device="meta"))
    one = [each[:1] for each in (q, k, v)]
    cube = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c"))
    square = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ring", "ulysses"))
    table = torch.zeros(1, 1, LENGTH, LENGTH)
    few = {"layout": "documents", "seq_info": SeqInfo.from_lengths((1,)), "length": 1}

    def refusal(*given: Tensor, call: Any = context_parallel_attention, **options: Any) -> str:
        options = {"mesh": mesh, "length": LENGTH, "strategy": "ring", **options}
        return error_of(lambda: call(*(given or (q, k, v)), **options))

    explained = partial(refusal, call=explain_context_parallel)

    return {
        "dropout": refusal(dropout=0.1),
        "mask": refusal(mask=table.bool()),
        "bias": refusal(bias=table),
        "alibi_slopes": refusal(alibi_slopes=torch.ones(4)),
        "device offsets": refusal(*one, seq_info=elsewhere),
        "documents that differ": refusal(*one, seq_info=SeqInfo.from_lengths((3, 20), (4, 19))),
        "length of documents": refusal(*one, seq_info=info, length=24),
        "documents in a batch": refusal(seq_info=info, length=None),
        "shard": refusal(length=25),
        "shard of keys": refusal(q, k[:, :-1], v[:, :-1]),
        "length": refusal(length=2.5),
        "three axes": refusal(mesh=cube),
        "no mesh": refusal(mesh="cp"),
        "heads": refusal(q[:, :, :3], k[:, :, :1], v[:, :, :1], strategy="ulysses"),
        "kv heads": refusal(q[:, :, :3], k, v),
        "head_groups": refusal(head_groups=3),
        "head_groups of no number": refusal(head_groups=2.0),
        "no head_groups": refusal(head_groups=0),
        "strategy": refusal(strategy="rings"),
        "strategy of no name": refusal(strategy=""),
        "ulysses outside": refusal(mesh=square, strategy="ulysses"),
        "layout": refusal(layout="zebra"),
        "layout without documents": refusal(layout="documents"),
        "layout of few tokens": refusal(*(each[:1, :1] for each in one), **few),
        "layout of key_ranges": refusal(layout="documents", key_ranges=masks.documents([3, 20])),
        "layout of key_ranges and documents": refusal(
            *one, layout="documents", key_ranges=masks.documents([3, 20]), seq_info=info
        ),
        "shard of documents": refusal(*(each[:, :-1] for each in one), layout="documents", seq_info=info),
        "shards without documents": error_of(lambda: shard_sequence(q, mesh, layout="documents")),
        "rows without documents": error_of(lambda: unshard_sequence(q, mesh, layout="documents", length=LENGTH)),
        "shards of few tokens": error_of(
            lambda: shard_sequence(q[:, :1], mesh, layout="documents", seq_info=few["seq_info"])
        ),
        "backend": refusal(backend="flash9"),
        "a backend that cannot": refusal(backend="sage"),
        "window": refusal(window=3),
        "dtype": refusal(q, k.float(), v),
        "rank of tensors": refusal(q[0], k[0], v[0]),
        "sinks": refusal(sinks=torch.zeros(3, dtype=torch.float64)),
        "sinks elsewhere": refusal(sinks=torch.zeros(4, device="meta")),
        "explained dtype": explained(q, k.float(), v),
        "explained rank": explained(q[0], k[0], v[0]),
        "explained dropout": explained(dropout=0.1),
        "explained mask": explained(mask=table.bool()),
        "explained bias": explained(bias=table),
        "explained alibi_slopes": explained(alibi_slopes=torch.ones(4)),
        "explained length": explained(length=[LENGTH, 2.5]),
        "axis": error_of(lambda: shard_sequence(q, mesh, dim=7)),
        "axis of shards": error_of(lambda: unshard_sequence(q, mesh, dim=7, length=LENGTH)),
        "length of shards": error_of(lambda: unshard_sequence(q, mesh, length=None)),
        "lengths of documents": error_of(lambda: shard_lengths(mesh, length=24, seq_info=info)),
        "lengths without documents": error_of(lambda: shard_lengths(mesh, length=LENGTH, layout="documents")),
        "lengths of no mesh": error_of(lambda: shard_lengths("cp", length=LENGTH)),
        "lengths of no layout": error_of(lambda: shard_lengths(mesh, length=LENGTH, layout="zebra")),
        "lengths of a long row": error_of(lambda: shard_lengths(mesh, length=2**63)),
        "other documents": error_of(lambda: shard_sequence(row()[0], mesh, layout="striped", seq_info=five)),
        "context length": error_of(lambda: use_context_parallel(mesh, length=True).__enter__()),
        "context layout": error_of(lambda: use_context_parallel(mesh, layout="zebra").__enter__()),
        "context mesh": error_of(lambda: use_context_parallel(cube).__enter__()),
        "context documents": error_of(lambda: use_context_parallel(mesh, length=24, seq_info=info).__enter__()),
    }


def explained() -> dict[str, Any]:
    """Whether explain_context_parallel takes the call's arguments, and the specs that it explains."""
    mesh = mesh_of((2,))
    q, k, v, _ = (shard_sequence(each, mesh) for each in row())
    call, explain = (inspect.signature(each) for each in (context_parallel_attention, explain_context_parallel))
    lengths = [
        context_parallel_attention(q, k, v, mesh=mesh, strategy="ring", length=length)
        for length in (LENGTH, [LENGTH] * 2)
    ]
    trained = q.requires_grad_()
    explained = partial(explain_context_parallel, k=k, v=v, mesh=mesh, length=[LENGTH, LENGTH])
    given = (q.detach(), None), (q.detach(), True), (trained, None), (trained, False)
    specs = [explained(array, needs_backward=needs).call.spec for array, needs in given]
    *rows, _ = row(length=320, batch=1)
    dealt = {"mesh": mesh, "causal": True, "seq_info": SeqInfo.from_lengths((200, 60, 60))}
    chosen = explain_context_parallel(*rows, layout=None, **dealt)
    shards = [shard_sequence(each, mesh, layout=chosen.choice.layout, seq_info=dealt["seq_info"]) for each in rows]
    named = explain_context_parallel(*shards, layout=chosen.choice.layout, **dealt)
    unknown = error_of(lambda: context_parallel_attention(*shards, layout=None, **dealt))
    short = error_of(lambda: explain_context_parallel(*shards, layout=None, **dealt))
    return {
        "layouts": sorted(each.layout for each in chosen.layouts),
        "same call": chosen.call == named.call and chosen.choice == named.choice,
        "refused": (unknown, short),
        "same parameters": list(explain.parameters) == [*call.parameters, "needs_backward"],
        "list of lengths": torch.equal(*lengths),
        "needs backward": [spec.needs_backward for spec in specs],
    }


# Layers


def rotary(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates halves by the position; ``[batch, seq, heads, head_dim]``."""
    half = q.shape[-1] // 2
    turn = positions[..., None, None] * 0.3 ** torch.arange(half, dtype=q.dtype)
    cos, sin = turn.cos(), turn.sin()

    def turned(x: Tensor) -> Tensor:
        one, other = x[..., :half], x[..., half:]
        return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)

    return turned(q), turned(k)


def layer_of(window: Any = 7) -> Attention:
    torch.manual_seed(0)
    options = {"causal": True, "window": window, "softcap": 3.0, "sinks": True, "rotary": rotary}
    return Attention(4, 24, num_kv_heads=2, head_dim=6, dtype=torch.float64, **options)


def layers(documents: tuple[int, ...] | None, recomputed: bool, layout: str = "zigzag") -> dict[str, float]:
    """By how much two layers on shards differ from the same layers on whole rows: output, and every gradient.

    Recomputed layers run their backward behind the block, in another thread.
    """
    mesh = mesh_of((2,))
    info = SeqInfo.from_lengths(documents) if documents else None
    x, dout = tensors(*((1 if documents else 2, LENGTH, 24),) * 2)
    alone, shared = (nn.ModuleList([layer_of(), layer_of(None)]) for _ in range(2))
    right = x.requires_grad_()
    for layer in alone:
        right = layer(right, seq_info=info)
    right.backward(dout)
    given = {"seq_info": info, "layout": layout}
    part, dpart = (shard_sequence(each.detach(), mesh, **given) for each in (x, dout))
    actual = part.requires_grad_()
    of_call = layout == "documents"  # the documents come with the call or with the block
    with use_context_parallel(mesh, length=LENGTH, layout=layout, seq_info=None if of_call else info):
        for layer in shared:
            if of_call:
                layer = partial(layer, seq_info=info)
            actual = checkpoint(layer, actual, use_reentrant=False) if recomputed else layer(actual)
    thread = threading.Thread(target=lambda: actual.backward(dpart))
    thread.start()
    thread.join()

    def off(one: Tensor, other: Tensor) -> float:
        return float((one - other).detach().abs().max())

    whole = {"length": LENGTH, **given}
    errors = {"out": off(unshard_sequence(actual, mesh, **whole), right)}
    errors["dx"] = off(unshard_sequence(part.grad, mesh, **whole), x.grad)
    for (name, one), (_, other) in zip(shared.named_parameters(), alone.named_parameters(), strict=True):
        dist.all_reduce(one.grad)
        errors[name] = off(one.grad, other.grad)
    return errors


def scopes() -> dict[str, Any]:
    """Which calls a block covers, and what its layers refuse."""
    mesh, layer = mesh_of((2,)), layer_of()
    x = tensors((2, LENGTH, 24))[0]
    shard, seen = shard_sequence(x, mesh), []
    with use_context_parallel(mesh, layout="striped"):
        with use_context_parallel(mesh, length=LENGTH):
            inner = active_mesh()
            thread = threading.Thread(target=lambda: seen.append(active_mesh()))
            thread.start()
            thread.join()
            mask = error_of(lambda: layer(shard, mask=torch.ones(1, 1, 12, 12, dtype=torch.bool)))
            pages = error_of(lambda: layer(shard[0], pages=Pages(None, None, None)))
            twice = replace(SeqInfo.from_lengths((LENGTH,)))
            with use_context_parallel(mesh, seq_info=twice):
                documents = error_of(lambda: layer(shard[:1], seq_info=twice))
        outer = active_mesh()
    return {
        **{"inner": inner.layout, "outer": outer.layout, "after": active_mesh(), "thread": seen},
        **{"mask": mask, "pages": pages, "documents": documents},
    }


def compiled_layer() -> tuple[str, float]:
    """(the error of a graph that must be whole, how much a compiled layer in a block differs from an uncompiled
    one)."""
    mesh, layer = mesh_of((2,)), layer_of()
    shard = shard_sequence(tensors((2, LENGTH, 24))[0], mesh)
    whole = torch.compile(layer, backend="aot_eager", fullgraph=True)
    parts = torch.compile(layer, backend="aot_eager")
    before = parts(shard)
    assert torch.equal(whole(shard), before)
    with use_context_parallel(mesh, length=LENGTH):
        says = error_of(lambda: whole(shard))
        right, actual = layer(shard), parts(shard)
    after = parts(shard)
    assert torch.equal(after, before) and not torch.allclose(right, before)
    return says, float((actual - right).detach().abs().max())


# Drop-ins


def heads_first() -> tuple[list[Tensor], list[Tensor]]:
    """q, k, v and dout ``[batch, heads, 24, dim]`` of a whole row, and this rank's part of the positions."""
    whole = [each.transpose(1, 2).contiguous() for each in row(length=24)]
    return whole, [part_of(each).clone().requires_grad_() for each in whole]


def part_of(whole: Tensor) -> Tensor:
    """This rank's part of ``[batch, heads, length, ...]``."""
    return whole.chunk(dist.get_world_size(), 2)[dist.get_rank()]


def finetrainers_rows() -> dict[str, Any]:
    """Calls of ``attention_dispatch`` on a mesh: the largest difference from one process, and what is refused."""
    mesh = init_device_mesh("cpu", (2,))
    (*whole, dout), (*parts, of_out) = heads_first()
    found: dict[str, Any] = {}
    windowed = {"window_size": (5, 2), "softcap": 2.0, "return_lse": True}
    for method, kwargs in (("allgather", None), ("alltoall", windowed)):
        leaves = [each.clone().requires_grad_() for each in whole]
        right = attention_dispatch(*leaves, enable_gqa=True, scale=0.4, attention_kwargs=kwargs)
        alone = attention_dispatch(*[parts[0].detach()] * 3)
        with attention_provider("_native_math", mesh=mesh, rotate_method=method):
            assert providers.may_share
            out = attention_dispatch(*parts, enable_gqa=True, scale=0.4, attention_kwargs=kwargs)
            with attention_provider():  # an inner block without a mesh shares nothing
                assert torch.equal(alone, attention_dispatch(*[parts[0].detach()] * 3))
        assert not providers.may_share and providers.active_rows() is None
        pairs = list(zip(out, right)) if kwargs else [(out, right)]
        gradients = torch.autograd.grad(pairs[0][0], parts, of_out.detach())
        truth = torch.autograd.grad(pairs[0][1], leaves, dout)
        pairs += list(zip(gradients, truth, strict=True))
        half = [part_of(each) for _, each in pairs]
        found[method] = max(float((one - other).abs().max()) for (one, _), other in zip(pairs, half))
    # A function that was compiled outside of the block must not compute this rank's part alone inside.
    compiled = torch.compile(partial(attention_dispatch, enable_gqa=True, scale=0.4), backend="eager")
    before = compiled(*(each.detach() for each in parts))
    with attention_provider(mesh=mesh):
        shared = compiled(*(each.detach() for each in parts))
        right = attention_dispatch(*(each.detach() for each in parts), enable_gqa=True, scale=0.4)
    assert torch.equal(compiled(*(each.detach() for each in parts)), before)
    found["compiled"] = float((shared - right).abs().max()), float((before - right).abs().max())
    with attention_provider(mesh=mesh):
        for name, changes in {
            "attn_mask": {"attn_mask": torch.ones(12, 12, dtype=torch.bool)},
            "is_causal": {"is_causal": True},
            "dropout": {"dropout_p": 0.5},
            "alibi_slopes": {"attention_kwargs": {"alibi_slopes": torch.ones(4)}},
        }.items():
            found[name] = error_of(partial(attention_dispatch, *parts, enable_gqa=True, **changes))
    return found


def diffusers_calls(degrees: tuple[tuple[int, int], ...]) -> dict[tuple[int, int], Any]:
    """Calls of diffusers' dispatcher on our context parallelism, compared with one process, by (ring, ulysses)."""
    from diffusers import ContextParallelConfig
    from diffusers.models import attention_dispatch as host
    from diffusers.models._modeling_parallel import ParallelConfig

    found: dict[tuple[int, int], Any] = {}
    for degree in degrees:
        mesh = init_device_mesh("cpu", degree, mesh_dim_names=("ring", "ulysses"))
        config = ContextParallelConfig(ring_degree=degree[0], ulysses_degree=degree[1])
        config.setup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), mesh)
        parallel = ParallelConfig(context_parallel_config=config)
        (*whole, dout), (*parts, of_out) = heads_first()
        given = [each.detach().transpose(1, 2).clone().requires_grad_() for each in parts]
        leaves = [each.clone().requires_grad_() for each in whole]
        call = partial(host.dispatch_attention_fn, parallel_config=parallel)
        before = error_of(partial(call, *given, enable_gqa=True))
        with diffusers_parallel.installed():
            out = call(*given, enable_gqa=True, is_causal=True, scale=0.4)
            gradients = torch.autograd.grad(out, given, of_out.detach().transpose(1, 2))
            mask = torch.ones(2, 24, dtype=torch.bool)
            masked = error_of(partial(call, *given[:1], *given[:1], *given[:1], attn_mask=mask[:, None, None]))
            config.convert_to_fp32 = False
            rounded = error_of(partial(call, *given, enable_gqa=True))
        assert not diffusers_parallel.is_installed() and error_of(partial(call, *given, enable_gqa=True)) == before
        right = torch.nn.functional.scaled_dot_product_attention(*leaves, enable_gqa=True, is_causal=True, scale=0.4)
        truth = [right, *torch.autograd.grad(right, leaves, dout)]
        halves = [part_of(each).transpose(1, 2) for each in truth]
        worst = max(float((one - other).abs().max()) for one, other in zip((out, *gradients), halves, strict=True))
        found[degree] = {"worst": worst, "before": before, "masked": masked, "rounded": rounded}
    return found
