"""Rows of a dense cache as packed documents, for torch tensors: the form of calls with many queries."""

from __future__ import annotations

from typing import Any

import torch

from attn_core.call import cache_rows
from attn_core.call.arguments import Arrays
from attn_core.call.cache_rows import CacheRows
from attn_core.call.options import PLAIN, Options, check_options, requested_names
from attn_core.call.seq_info import SeqInfo
from attn_core.selection import Target, override
from attn_core.selection.dense_caches import runs_packed
from torch_frontend.dispatch import plan, tensor_kinds
from torch_frontend.paged import constant_tables

Tensor = torch.Tensor


def are_documents(qkv: tuple[Tensor, Tensor, Tensor], rows: CacheRows, options: dict[str, Any]) -> bool:
    """Returns whether a call in the form of pages runs as packed documents instead, see ``runs_packed``."""
    q, k, v = qkv
    if torch.compiler.is_compiling() or tensor_kinds.is_watched(q):
        return False
    if any([each.stride(0) != each.shape[1] * each.stride(1) for each in (k, v)]):  # packing would copy the cache
        return False
    tensors = (q, k, v, None, None, options["alibi_slopes"], options["sinks"])
    arrays = Arrays(*(None if t is None else plan.facts(t.shape, t.dtype, t.device) for t in tensors))  # type: ignore[arg-type]
    names = requested_names(options["backend"]) or override.requested()
    plain = Options(**{name: options[name] for name in PLAIN})
    return runs_packed(rows, arrays, check_options(plain), Target.here("torch", plan.device_name(q.device)), names)


def as_documents(
    q: Tensor, k: Tensor, v: Tensor, rows: CacheRows, options: dict[str, Any]
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Returns the tensors and the keywords of ``attention`` for the same call on documents, see ``cache_rows``."""
    (batch, count), kv_len, device = q.shape[:2], k.shape[1], q.device
    lengths, starts, _ = cache_rows.clamped(rows, kv_len, k.shape[0])
    first = torch.arange(0, batch * kv_len, kv_len, dtype=torch.int32, device=device)
    ends = first + (kv_len if lengths is None else lengths)
    edges = torch.stack((first if starts is None else first + starts, ends), 1).flatten()
    keys = torch.cat((first[:1], edges, first[-1:] + kv_len))
    queries = constant_tables.equal_offsets(batch, count, device).repeat_interleave(2)
    longest = kv_len if starts is None else 2 * kv_len
    dropped = ("layout", *cache_rows.EXCLUDED)
    others = {name: value for name, value in options.items() if name not in dropped}
    tensors = tuple([each.flatten(0, 1) for each in (q, k[:batch], v[:batch])])
    return tensors, others | {"seq_info": SeqInfo(queries, keys, count, longest)}
