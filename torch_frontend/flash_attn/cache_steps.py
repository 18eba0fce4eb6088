"""The steps of a call on a cache that both of its paths take: checks of values, positions, the append, the shape."""

from __future__ import annotations

from typing import Any

import torch

from attn_core.call.options import Options
from attn_core.call.tensors import PagedInputs
from attn_core.dropins.flash_attn_cache import Cached, check_positions, check_values
from attn_core.selection import override
from torch_frontend.flash_attn.probabilities import places_in_documents
from torch_frontend.paged import constant_tables
from torch_frontend.paged.attention import append_kv
from torch_frontend.paged.plan import gather_arguments, metadata, options_of, plan_call

Tensor = torch.Tensor


def check_host_values(call: Cached, seqlens: Tensor | None, capacity: int, new: int) -> None:
    """Checks the values of tables on the CPU; seqlens: cache_seqlens as a tensor. See ``check_values``."""
    tables = (seqlens, call.cache_batch_idx, call.cache_leftpad)
    on_host = [None if each is None else each.numpy() for each in tables]
    check_values((on_host[0], on_host[1], on_host[2]), capacity, call.k_cache.shape[0], new)
    if call.rotary_cos is not None:
        check_positions(on_host[0], new, call.rotary_cos.shape[0])


def positions_of(before: Tensor, tokens: int, banded: bool) -> Tensor:
    """Returns the rotary position of each query, int32 ``[batch, tokens]``."""
    first = before.unsqueeze(1)
    if tokens == 1:
        return first
    return first + constant_tables.places(tokens, before.device) if banded else first.expand(-1, tokens)


def positions_by_offsets(before: Tensor, tokens: int, offsets: Tensor, banded: bool) -> Tensor:
    """Returns the rotary position of each of so many packed queries, int32 ``[tokens]``."""
    documents, places = places_in_documents(offsets, tokens)
    first = before[documents.clamp(max=before.shape[0] - 1)]
    return (first + places).int() if banded else first


def append(call: Cached, pages: Tensor, seq_lens: Tensor, interleaved: bool) -> None:
    """Appends the new tokens; seq_lens count them."""
    batch, new = call.k.shape[:2]
    tables: dict[str, Any] = {"block_table": pages, "seq_lens": seq_lens}
    if new != 1:
        tables["cu_seqlens_q"] = constant_tables.equal_offsets(batch, new, pages.device)
    if call.rotary_cos is not None:
        tables |= {"rotary": (call.rotary_cos, call.rotary_sin), "rotary_interleaved": interleaved}
    append_kv(call.k_cache, call.v_cache, call.k.flatten(0, 1), call.v.flatten(0, 1), **tables)


def planned(tensors: tuple[Tensor, Tensor, Tensor], how: dict[str, Any]) -> tuple[PagedInputs, Options]:
    """Returns the arguments of a call of ``paged_attention`` in the form that ``paged.plan.run`` takes.

    Raises the errors of ``paged_attention``, also if no backend can run the call.

    Args:
        tensors: q, k_pages and v_pages. how: keywords.
    """
    names = ("causal", "window", "softcap", "scale", "deterministic", "return_lse", "max_len_q")
    tables = how["block_table"], how["seq_lens"], how.get("cu_seqlens_q")
    beside = how.get("sinks"), how.get("max_len_q"), None, how.get("alibi_slopes"), how.get("kv_starts")
    inputs, options = gather_arguments(*tensors, *tables, *beside), options_of(*[how.get(name) for name in names])
    plan_call(metadata(inputs), options, override.requested())
    return inputs, options
