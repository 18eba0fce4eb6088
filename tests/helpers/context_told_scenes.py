"""Jobs of ``context_torch_worker`` in which one rank alone makes a bad call, after calls that all ranks made."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from context_torch_scenes import LENGTH, error_of, row
from context_torch_worker import mesh_of

from attn_core import SeqInfo
from torch_frontend import attention
from torch_frontend.context_parallel.attention import context_parallel_attention
from torch_frontend.context_parallel.layers import use_context_parallel
from torch_frontend.context_parallel.shards import shard_sequence, unshard_sequence
from torch_frontend.module import Attention

BAD: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": -1.0},
    "window": {"window": (-3, 0)},
    "length": {"length": 2.5},
    "dropout": {"dropout": 0.5},
    "strategy": {"strategy": "rings"},
    "layout": {"layout": "zebra"},
    "unknown": {"softmax_scale": 1.0},
}
"""Arguments that are invalid on the rank that passes them."""


def told(axes: tuple[int, ...], strategy: str, options: dict[str, Any], bad: int) -> dict[str, tuple[str, float]]:
    """The error of this rank, and after how many seconds, for each bad argument of rank ``bad``.

    All ranks make the right call first, so that the others do not compare it again: they exchange keys. The results
    of the right call afterwards show that the ranks agree again.
    """
    mesh = mesh_of(axes)
    whole = row(heads=8, kv_heads=4)
    q, k, v, dout = (shard_sequence(each, mesh) for each in whole)
    learned = [each.requires_grad_() for each in (q, k, v)]
    right = {"mesh": mesh, "strategy": strategy, "length": LENGTH, "causal": True, **options}

    def call(**more: Any) -> torch.Tensor:
        return context_parallel_attention(*learned, **right | more)

    call().backward(dout)
    results = {}
    for name, wrong in BAD.items():
        results[name] = _timed(lambda given=wrong: call(**given if dist.get_rank() == bad else {}))
    halves = (q, k.half() if dist.get_rank() == bad else k, v)
    results["k"] = _timed(lambda: context_parallel_attention(*halves, **right))
    narrow = (q, k[:, :-1] if dist.get_rank() == bad else k, v)
    results["v"] = _timed(lambda: context_parallel_attention(*narrow, **right))
    results |= _told_by_layers(mesh, bad)
    results["unshard"] = _timed(lambda: unshard_sequence(q, mesh, length=LENGTH + 40 * (dist.get_rank() == bad)))
    wide = q.detach().double() if dist.get_rank() == bad else q.detach().float()
    results["unshard another dtype"] = _timed(lambda: unshard_sequence(wide, mesh, length=LENGTH))
    out = call()
    results["backward"] = _timed(lambda: call(scale="1") if dist.get_rank() == bad else out.backward(dout))
    out = call()
    again = {"create_graph": dist.get_rank() == bad}
    results["second derivative"] = _timed(lambda: torch.autograd.grad(out, q, dout, **again))
    out = call()
    torch.autograd.grad(out, q, dout, retain_graph=dist.get_rank() != bad)
    results["freed"] = _timed(lambda: torch.autograd.grad(out, q, dout))
    result = unshard_sequence(call().detach(), mesh, length=LENGTH)
    expected = attention(*whole[:3], causal=True, **options)
    results["afterwards"] = (f"{float((result - expected).abs().max()):.1e}", 0.0)
    return results


def _told_by_layers(mesh: Any, bad: int) -> dict[str, tuple[str, float]]:
    """The errors of layers and blocks of which one rank has an argument that ranks cannot share."""
    torch.manual_seed(0)
    layer = Attention(4, 8, causal=True)
    x, here = shard_sequence(torch.randn(1, LENGTH, 8), mesh), dist.get_rank() == bad

    def run(block: dict[str, Any], **given: Any) -> None:
        with use_context_parallel(mesh, **{"length": LENGTH, **block}):
            layer(x, **given)

    run({})
    return {
        "layer": _timed(lambda: run({}, **({"mask_mod": lambda *_: True} if here else {}))),
        "layer's positions": _timed(lambda: run({}, **({"positions": torch.zeros(3)} if here else {}))),
        "block": _timed(lambda: run({"layout": "window:0"} if here else {})),
    }


def documents_that_all_know(axes: tuple[int, ...]) -> list[tuple[str, float]]:
    """The errors of calls until one is raised, if ranks take turns of two packings, and one is a turn behind."""
    mesh = mesh_of(axes)
    one = [each[:1] for each in row()[:3]]
    infos = [SeqInfo.from_lengths(each) for each in ((3, 20), (11, 12))]

    def call(turn: int) -> Any:
        shards = [shard_sequence(each, mesh, seq_info=infos[turn % 2]) for each in one]
        return context_parallel_attention(*shards, mesh=mesh, seq_info=infos[turn % 2], causal=True)

    before = [_timed(lambda turn=turn: call(turn)) for turn in range(6)]
    time.sleep(1.0)  # the watchers look
    before.append(_timed(lambda: call(0)))
    after = []
    for turn in range(100):
        after.append(_timed(lambda turn=turn: call(turn + (dist.get_rank() == 1))))
        if after[-1][0]:
            break
        time.sleep(0.05)
    again = [_timed(lambda: call(0)) for _ in range(2)]
    return [*before, (str(len(after)), 0.0), after[-1], *again]


def _timed(call: Callable[[], Any]) -> tuple[str, float]:
    started = time.monotonic()
    return error_of(call), time.monotonic() - started


def other_documents(axes: tuple[int, ...]) -> dict[str, tuple[str, float]]:
    """Rank 1 has other documents than the others, who made this call before, and who see theirs for the first time."""
    mesh, last = mesh_of(axes), dist.get_rank() == 1
    one = [each[:1] for each in row()[:3]]
    lengths = {"old": (3, 20), "new": (11, 12), "other": (5, 18), "longer": (3, 37)}
    infos = {name: SeqInfo.from_lengths(each) for name, each in lengths.items()}

    def call(name: str, layout: str = "zigzag", **more: Any) -> Any:
        # Every document list gives shards of one size here, or the shard's size would give the fault away.
        shards = [shard_sequence(each, mesh, seq_info=infos["old"], layout=layout) for each in one]
        return context_parallel_attention(*shards, mesh=mesh, seq_info=infos[name], causal=True, layout=layout, **more)

    before = error_of(lambda: call("old", strategy="ring"))
    return {
        "before": (before, 0.0),
        "known to the others": _timed(lambda: call("other" if last else "old", strategy="ring")),
        "new to all": _timed(lambda: call("other" if last else "new", strategy="ring")),
        "longer than the row": _timed(lambda: call("longer" if last else "old", strategy="ring", length=LENGTH)),
        "longer than the shards, dealt": _timed(lambda: call("longer" if last else "old", "documents")),
        "longer than all shards": _timed(lambda: call("longer")),
        "longer than all shards, dealt": _timed(lambda: call("longer", "documents")),
        "afterwards": (error_of(lambda: call("old", strategy="ring")), 0.0),
    }


def odd_rows(axes: tuple[int, ...]) -> dict[str, float]:
    """By how much rows that are odd, but valid, differ from one device: out, and the gradients of k."""
    mesh, results = mesh_of(axes), {}
    wide, wider = {"window": (500, 0)}, {"window": (2**70, 7)}
    for strategy in ("ring", "all_gather", "ulysses")[: 3 if axes == (2,) else 2]:  # two kv heads
        for layout in ("zigzag", "contiguous", "striped"):
            for length, options in ((LENGTH, wide), (LENGTH, wider), (0, {}), (1, wide), (2, {})):
                results[f"{strategy} {layout} {length} {options}"] = _apart(
                    mesh, strategy, layout, length, {"causal": True, **options}
                )
    return results


def _apart(mesh: Any, strategy: str, layout: str, length: int, options: dict[str, Any]) -> float:
    whole = row(length=length)
    dout = whole[3]
    q, k, v = (each.requires_grad_() for each in whole[:3])
    right = attention(q, k, v, **options)
    (dk,) = torch.autograd.grad(right, k, dout)
    shards = [shard_sequence(each.detach(), mesh, layout=layout).requires_grad_() for each in (q, k, v)]
    out = context_parallel_attention(*shards, mesh=mesh, strategy=strategy, layout=layout, length=length, **options)
    (dk_shard,) = torch.autograd.grad(out, shards[1], shard_sequence(dout, mesh, layout=layout))
    pairs = ((out, right), (dk_shard, dk))
    parts = (unshard_sequence(mine.detach(), mesh, length=length, layout=layout) for mine, _ in pairs)
    apart = ((part - theirs.detach()).abs() for part, (_, theirs) in zip(parts, pairs, strict=True))
    return max(float(each.max()) if each.numel() else 0.0 for each in apart)
