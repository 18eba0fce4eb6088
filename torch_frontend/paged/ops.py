"""Registers the ops of paged calls that compilers trace: ``attn::paged_forward`` and ``attn::append_kv`` (in place).

Inside an op everything is as in an eager call: shapes are ints, and ``use_backend`` has its value of that moment.
"""

from __future__ import annotations

from typing import Any

import torch

from attn_core.call.tensors import PagedInputs
from torch_frontend.paged.append import append
from torch_frontend.paged.plan import gather_arguments, options_of, run

Tensor = torch.Tensor

# FRAGMENT, because dispatch.ops defines the namespace.
_library = torch.library.Library("attn", "FRAGMENT")
_library.define(
    "paged_forward(Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor seq_lens, "
    "Tensor? cu_seqlens_q, Tensor? sinks, SymInt? max_len_q, bool causal, SymInt? window_left, SymInt? window_right, "
    "float? softcap, float? scale, bool deterministic, bool return_lse, str? backend, Tensor? key_ranges=None, "
    "Tensor? alibi_slopes=None, Tensor? kv_starts=None, Tensor? k_scales=None, Tensor? v_scales=None, "
    "str? invariant=None) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    # The marks (a!) to (d!) tell compilers that the op writes the pools and their scales, so they keep its order among
    # the reads. Scales by page are only read.
    "append_kv(Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor k, Tensor v, Tensor? block_table, Tensor? seq_lens, "
    "Tensor? cu_seqlens_q, Tensor? slot_mapping=None, Tensor? cos=None, Tensor? sin=None, Tensor? positions=None, "
    "bool interleaved=False, Tensor(c!)? k_scales=None, Tensor(d!)? v_scales=None) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _forward_op(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None,
    sinks: Tensor | None,
    max_len_q: int | None,
    causal: bool,
    left: int | None,
    right: int | None,
    softcap: float | None,
    scale: float | None,
    deterministic: bool,
    return_lse: bool,
    backend: str | None,
    key_ranges: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    kv_starts: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    invariant: str | None = None,
) -> tuple[Tensor, Tensor]:
    options = options_of(causal, (left, right), softcap, scale, deterministic, return_lse, max_len_q, invariant)
    tables, scales = (block_table, seq_lens, cu_seqlens_q), (k_scales, v_scales)
    given = PagedInputs(q, k_pages, v_pages, *tables, sinks, key_ranges, alibi_slopes, kv_starts, *scales)
    inputs = gather_arguments(given, max_len_q)
    out, lse = run(inputs, options, None if backend is None else tuple(backend.split("\n")))
    # Compilers plan memory with the strides that _forward_fake promises.
    return out.contiguous(), lse.contiguous()


def _forward_fake(q: Tensor, k_pages: Tensor, v_pages: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    channels = v_pages.shape[3] * (2 if v_pages.dtype == torch.uint8 else 1)  # two int4 numbers a byte
    return q.new_empty((*q.shape[:2], channels)), q.new_empty((q.shape[1], q.shape[0]), dtype=lse_dtype)


_library.impl("paged_forward", _forward_op, "CompositeExplicitAutograd")
_library.impl("append_kv", append, "CompositeExplicitAutograd")
torch.library.register_fake("attn::paged_forward", _forward_fake, lib=_library)
# No results: the op only writes to its arguments.
torch.library.register_fake("attn::append_kv", lambda *_: None, lib=_library)
