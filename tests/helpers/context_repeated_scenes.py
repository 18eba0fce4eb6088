"""Jobs of ``context_torch_worker`` on repeated calls: what they run in Python, and what they notice of changes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from context_torch_scenes import error_of, row
from context_torch_worker import mesh_of

import attn_core
import torch_frontend
from attn_core import SeqInfo
from torch_frontend import attention, use_backend
from torch_frontend.context_parallel.attention import context_parallel_attention
from torch_frontend.context_parallel.shards import shard_sequence, unshard_sequence

Tensor = torch.Tensor
LENGTHS = (19, 4, 13, 12)
FOLDERS = {package.__name__: Path(package.__file__).parent for package in (attn_core, torch_frontend)}  # type: ignore[arg-type]


def entered(call: Callable[[], Any]) -> dict[str, int]:
    """How often a call enters each Python function of our packages, by ``module:function``."""
    count: Counter[str] = Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            code = frame.f_code
            for name, folder in FOLDERS.items():
                if Path(code.co_filename).is_relative_to(folder):
                    module = ".".join(Path(code.co_filename).relative_to(folder).with_suffix("").parts)
                    count[f"{name}.{module}:{code.co_name}"] += 1

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return dict(count)


def repeated(strategy: str, layout: str, window: int | None, packed: bool) -> tuple[dict[str, int], dict[str, int]]:
    """What a repeated forward enters, and a repeated forward and backward."""
    mesh, info = mesh_of((2,)), SeqInfo.from_lengths(LENGTHS) if packed else None
    length = sum(LENGTHS)
    whole = row(heads=4, kv_heads=2, length=length, batch=1)
    q, k, v, dout = (shard_sequence(each, mesh, layout=layout, seq_info=info) for each in whole)
    how = {"strategy": strategy, "layout": layout, "window": window, "seq_info": info, "length": length}

    def call() -> Tensor:
        return context_parallel_attention(q, k, v, mesh=mesh, causal=True, **how)

    def train() -> None:
        torch.autograd.grad(call(), learned, dout)

    for _ in range(3):
        call()
    forward = entered(call)
    learned = [each.requires_grad_() for each in (q, k, v)]
    for _ in range(3):
        train()
    return forward, entered(train)


def changed() -> dict[str, Any]:
    """What calls notice that differ from a repeated one in a value, a type or a state alone."""
    mesh, length = mesh_of((2,)), sum(LENGTHS)
    whole = row(length=length, batch=1)[:3]
    q, k, v = (shard_sequence(each, mesh, layout="contiguous") for each in whole)
    offsets = torch.tensor([0, 19, 23, 36, 48], dtype=torch.int32)
    packed = {"layout": "contiguous", "seq_info": SeqInfo(offsets, offsets, 30, 30)}

    def call(*tensors: Tensor, **options: Any) -> Tensor:
        tensors = tensors or (q, k, v)
        return context_parallel_attention(*tensors, **{"mesh": mesh, "layout": "contiguous", "causal": True, **options})

    def difference(out: Tensor, **options: Any) -> float:
        actual = unshard_sequence(out.detach(), mesh, length=length, layout="contiguous")
        return float((actual - attention(*whole, causal=True, **options)).abs().max())

    for _ in range(3):
        call(), call(window=3), call(window=(3, 0)), call(**packed)
    results: dict[str, Any] = {
        "causal": error_of(lambda: call(causal=1)),
        "window": error_of(lambda: call(window=3.0)),
        "pair": error_of(lambda: call(window=(3.0, 0))),
        "dropout": error_of(lambda: call(dropout=0.5)),
        "mask": error_of(lambda: call(mask=torch.ones(1, 1, 48, 48, dtype=torch.bool))),
        "length": error_of(lambda: call(length=48.0)),
    }
    offsets.copy_(torch.tensor([0, 7, 30, 31, 48], dtype=torch.int32))
    documents = SeqInfo.from_lengths((7, 23, 1, 17))
    actual = unshard_sequence(call(**packed), mesh, length=length, layout="contiguous")
    expected = attention(*[each[0] for each in whole], causal=True, seq_info=documents)
    results["documents"] = float((actual[0] - expected).abs().max())
    offsets.copy_(torch.tensor([0, 40, 41, 45, 48], dtype=torch.int32))  # longer than max_len allows
    results["longest"] = error_of(lambda: call(**packed))
    learned = [each.clone().requires_grad_() for each in (q, k, v)]
    out = call(*learned)
    results["gradients"] = [each is not None for each in torch.autograd.grad(out.sum(), learned)]
    with use_backend("math"):
        results["use_backend"] = difference(call())
    with use_backend("flash3"):
        results["absent"] = error_of(call)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results["autocast"] = str(call(*(each.float() for each in (q, k, v))).dtype)
    freed = q.clone()
    call(freed, k, v)
    freed.untyped_storage().resize_(0)
    results["freed"] = error_of(lambda: call(freed, k, v))
    results["afterwards"] = difference(call())
    return results
