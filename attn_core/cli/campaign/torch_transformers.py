"""Attention layers of transformers as an entry: every way in which a model says what is visible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attn_core.call.spec import AttentionSpec
from attn_core.cli.campaign import host_words
from attn_core.cli.campaign.entries import without
from attn_core.cli.campaign.host_words import ends_at_diagonal, is_aligned, is_banded, keys_seen, one_table
from attn_core.cli.campaign.torch_words import has_same_documents, offsets_on, ops_on, seeded, without_batch
from attn_core.cli.trial import Trial

Tensors = dict[str, Any]


def layer_call(tensors: Tensors, trial: Trial, backend: str | None) -> Any:
    """An attention layer as models of transformers write it: Gemma's keywords, and the sinks of GPT-OSS."""
    import torch
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from torch_frontend import huggingface

    huggingface.register()
    spec = trial.spec
    layer: Any = torch.nn.Module()
    layer.is_causal, layer.layer_idx, layer.num_key_value_groups = ends_at_diagonal(spec), 0, spec.group_size
    layer.train(spec.needs_backward or spec.dropout > 0)
    ways = [way for fits, way in WAYS if fits(trial)]
    way = ways[trial.seed % len(ways)]
    q, k, v = (host_words.heads_first(tensors[name]) for name in "qkv")
    options = {"attention_mask": None, "position_bias": None} | way(trial, tensors)
    attend = ALL_ATTENTION_FUNCTIONS["attn_core" if backend is None else f"attn_core:{backend}"]
    with seeded(trial):
        out, _ = attend(
            layer,
            q,
            k,
            v,
            dropout=spec.dropout,
            scaling=spec.scale,
            softcap=spec.softcap,
            s_aux=tensors["sinks"],
            deterministic=spec.deterministic,
            **options,
        )
    return without_batch(out, spec)


def _slides(spec: AttentionSpec) -> bool:
    """Returns whether transformers' ``is_causal`` and ``sliding_window`` mean the band, apart from its diagonal."""
    return not is_banded(spec) or ends_at_diagonal(spec)


def _layer_words(spec: AttentionSpec) -> dict[str, Any]:
    """W keys, self included, as models state it beside every mask."""
    return {"sliding_window": keys_seen(spec)} if ends_at_diagonal(spec) else {}


def _no_mask(trial: Trial, tensors: Tensors) -> dict[str, Any]:
    return {"position_bias": tensors["bias"]} | _layer_words(trial.spec)


def _fits_no_mask(trial: Trial) -> bool:
    """Without a mask, transformers' SDPA puts the first query at the first key, and a single query at the last."""
    spec = trial.spec
    if spec.packed or spec.mask_shape is not None or not _slides(spec):
        return False
    return is_aligned(spec, "bottom_right" if spec.q_len == 1 else "top_left")


def _described(trial: Trial, tensors: Tensors) -> dict[str, Any]:
    """A mask that transformers' own functions make, from a padding mask and the position of the first query."""
    import torch
    from transformers import masking_utils

    spec, where = trial.spec, tensors["q"].device
    function: Any = masking_utils.bidirectional_mask_function
    keys = keys_seen(spec)
    if ends_at_diagonal(spec):
        causal = masking_utils.causal_mask_function
        function = causal if keys is None else masking_utils.sliding_window_causal_mask_function(keys)
    padding = None if spec.mask_shape is None else host_words.key_mask(spec, tensors, ops_on(where))
    if spec.packed:
        lengths = torch.from_numpy(np.diff(trial.inputs.cu_seqlens_q))
        numbers = torch.repeat_interleave(torch.arange(len(lengths), device="cpu"), lengths)[None].to(where)
        function = masking_utils.and_masks(function, masking_utils.packed_sequence_mask_function(numbers))
    first = _first_query(spec)
    mask = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["attn_core"](
        batch_size=spec.batch,
        q_length=spec.q_len,
        kv_length=spec.kv_len,
        q_offset=first,
        kv_offset=0,
        mask_function=function,
        attention_mask=padding,
        allow_is_causal_skip=not spec.packed,
        dtype=tensors["q"].dtype,
        device=where,
    )
    positions = torch.arange(first, first + spec.q_len, device=where)[None]
    return {"attention_mask": mask, "position_bias": tensors["bias"], "position_ids": positions} | _layer_words(spec)


def _first_query(spec: AttentionSpec) -> int:
    """Returns the number of keys that a cache holds before the first query."""
    return spec.kv_len - spec.q_len if spec.alignment == "bottom_right" and not spec.packed else 0


def _fits_description(trial: Trial) -> bool:
    spec = trial.spec
    of_keys = spec.mask_shape is None or spec.mask_shape[1:3] == (1, 1)
    if spec.packed and not (ends_at_diagonal(spec) and has_same_documents(trial)):
        return False
    return of_keys and _slides(spec) and not spec.empty and _first_query(spec) >= 0


def _table(trial: Trial, tensors: Tensors) -> dict[str, Any]:
    """A complete mask of four axes, bool, or float with the bias in it."""
    table = one_table(trial.spec, tensors, ops_on(tensors["q"].device), with_band=is_banded(trial.spec))
    return {"attention_mask": table} | ({"is_causal": False} if table is None else {})


def _flash_offsets(trial: Trial, tensors: Tensors) -> dict[str, Any]:
    """Documents in the keywords of FlashAttention, as padding-free collators make them."""
    info = offsets_on(trial, tensors["q"].device)
    offsets = {"cu_seq_lens_q": info.cu_seqlens_q, "cu_seq_lens_k": info.cu_seqlens_k}
    return offsets | {"max_length_q": info.max_len_q, "max_length_k": info.max_len_k} | _layer_words(trial.spec)


def _positions(trial: Trial, tensors: Tensors) -> dict[str, Any]:
    """Documents whose positions restart at 0."""
    import torch

    lengths = np.diff(trial.inputs.cu_seqlens_q)
    positions = np.concatenate([np.arange(length) for length in lengths])
    return {"position_ids": torch.from_numpy(positions)[None].to(tensors["q"].device)} | _layer_words(trial.spec)


WAYS: tuple[tuple[Callable[[Trial], bool], Callable[[Trial, Tensors], dict[str, Any]]], ...] = (
    (_fits_no_mask, _no_mask),
    (_fits_description, _described),
    (lambda trial: not trial.spec.packed, _table),
    (lambda trial: trial.spec.packed, _flash_offsets),
    (lambda trial: ends_at_diagonal(trial.spec) and trial.spec.q_len > 0 and has_same_documents(trial), _positions),
)
"""The ways in which models of transformers say what is visible: (whether it fits, the keywords)."""


def refuses(spec: AttentionSpec) -> str | None:
    """Returns why a layer of transformers cannot write a call, or None."""
    if spec.packed:
        if not _slides(spec) or not is_aligned(spec, "bottom_right"):
            return "a band that ends at the last key of each document"
        if spec.mask_shape is not None or spec.bias_shape is not None:
            return "documents or a mask"
    return without("alibi", "lse")(spec)
