"""The drop-ins of torch that a campaign calls, as their hosts call them. The twin of jax_hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from attn_core import SeqInfo
from attn_core.call.spec import AttentionSpec
from attn_core.cli.trial import Trial, functions_of
from tests.campaign import host_words
from tests.campaign.case import is_banded, same_documents
from tests.campaign.entries import Entry, without
from tests.campaign.host_words import Ops, ends_at_diagonal, is_aligned, keys_seen, one_table
from tests.campaign.torch_entries import no_gradient_as_in_torch, run, words

Tensors = dict[str, Any]


# what the hosts share: tables, documents, the generator and the requested backend


def _ops_on(where: Any) -> Ops:
    """Returns the operations of ``host_words`` for tensors on a device."""
    import torch

    def hide(bias: Any, seen: Any) -> Any:
        return torch.where(seen, bias, -torch.inf)

    return Ops(lambda array: torch.from_numpy(array).to(where), hide)


@contextmanager
def _seeded(trial: Trial) -> Iterator[None]:
    """Seeds torch's own generator, from which a host's dropout draws."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(trial.seed)
        yield


def _requested(backend: str | None) -> Any:
    """Requests a backend for hosts whose calls cannot name one."""
    from torch_frontend import use_backend

    return use_backend(*() if backend is None else (backend,))


def _offsets_on(trial: Trial, where: Any) -> Any:
    """Returns the documents with int32 offsets on the device, as loaders make them."""
    import torch

    info = trial.seq_info
    if info is None:
        return None
    queries, keys = (torch.from_numpy(each).to(where) for each in (info.cu_seqlens_q, info.cu_seqlens_k))
    return SeqInfo(queries, keys, info.max_len_q, info.max_len_k)


def _has_same_documents(trial: Trial) -> bool:
    """Returns whether the call is packed, and queries and keys have the same documents."""
    return trial.seq_info is not None and same_documents(trial.spec, trial.seq_info)


def _without_batch(out: Any, spec: AttentionSpec) -> Any:
    """Returns ``[batch, len, heads, dim]`` without the batch of a packed call."""
    return out[0] if spec.packed else out


# Unsloth, Finetrainers and diffusers


def _unsloth(tensors: Tensors, trial: Trial, backend: str | None) -> Any:
    from torch_frontend.unsloth import AttentionConfig, AttentionContext, run_attention

    spec, where = trial.spec, tensors["q"].device
    documents: Any = _offsets_on(trial, where)
    if documents is not None and _has_same_documents(trial) and trial.seed & 1:
        lengths = documents.cu_seqlens_q.diff()
        documents = (lengths, documents.cu_seqlens_q, documents.max_len_q)  # the host's own triple
    call = host_words.unsloth_call(spec, tensors, documents, trial.seed // 2, _ops_on(where))
    config, context = AttentionConfig(**call.pop("config")), AttentionContext(**call.pop("context"))
    with _seeded(trial), _requested(backend):
        out = run_attention(config=config, context=context, **call)
    return _without_batch(out, spec)


def _finetrainers(tensors: Tensors, trial: Trial, backend: str | None) -> Any:
    from torch_frontend.finetrainers import attention_dispatch, attention_provider

    spec, where = trial.spec, tensors["q"].device
    word, call = host_words.finetrainers_call(spec, tensors, backend, trial.seed, _ops_on(where))
    with _seeded(trial), attention_provider(word):
        results = attention_dispatch(**call)
    return (results[0].transpose(1, 2), results[1]) if spec.return_lse else results.transpose(1, 2)


def _finetrainers_refuses(spec: AttentionSpec) -> str | None:
    return no_gradient_as_in_torch(spec) or host_words.finetrainers_refuses(spec)


def _diffusers(tensors: Tensors, trial: Trial, backend: str | None) -> Any:
    """diffusers' own dispatcher: its heads are behind the sequence, and ``is_causal`` counts from the first key."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    from torch_frontend.diffusers import installed

    spec, ops = trial.spec, _ops_on(tensors["q"].device)
    causal = spec.causal and spec.window == (None, None) and is_aligned(spec, "top_left")
    causal = causal and spec.mask_shape is None and spec.bias_shape is None
    if host_words.is_of_keys(spec) and not is_banded(spec) and trial.seed & 1:
        table = host_words.key_mask(spec, tensors, ops)
    else:
        table = one_table(spec, tensors, ops, with_band=is_banded(spec) and not causal)
    options: dict[str, Any] = {"dropout_p": spec.dropout, "scale": spec.scale, "backend": "native"}
    with installed(), _requested(backend), _seeded(trial):
        q, k, v = (tensors[name] for name in "qkv")
        return dispatch_attention_fn(q, k, v, table, is_causal=causal, enable_gqa=spec.group_size > 1, **options)


def _diffusers_refuses(spec: AttentionSpec) -> str | None:
    lacks = without("softcap", "alibi", "packed", "sinks", "lse", "deterministic")
    return no_gradient_as_in_torch(spec) or lacks(spec)


# transformers: every way in which a model says what is visible


def _transformers(tensors: Tensors, trial: Trial, backend: str | None) -> Any:
    """An attention layer as models of transformers write it: Gemma's keywords, and the sinks of GPT-OSS."""
    import torch
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from torch_frontend import huggingface

    huggingface.register()
    spec = trial.spec
    layer: Any = torch.nn.Module()
    layer.is_causal, layer.layer_idx, layer.num_key_value_groups = ends_at_diagonal(spec), 0, spec.group_size
    layer.train(spec.needs_backward or spec.dropout > 0)
    ways = [way for fits, way in _WAYS if fits(trial)]
    way = ways[trial.seed % len(ways)]
    q, k, v = (host_words.heads_first(tensors[name]) for name in "qkv")
    options = {"attention_mask": None, "position_bias": None} | way(trial, tensors)
    attend = ALL_ATTENTION_FUNCTIONS["attn_core" if backend is None else f"attn_core:{backend}"]
    with _seeded(trial):
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
    return _without_batch(out, spec)


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
    padding = None if spec.mask_shape is None else host_words.key_mask(spec, tensors, _ops_on(where))
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
    if spec.packed and not (ends_at_diagonal(spec) and _has_same_documents(trial)):
        return False
    return of_keys and _slides(spec) and not spec.empty and _first_query(spec) >= 0


def _table(trial: Trial, tensors: Tensors) -> dict[str, Any]:
    """A complete mask of four axes, bool, or float with the bias in it."""
    table = one_table(trial.spec, tensors, _ops_on(tensors["q"].device), with_band=is_banded(trial.spec))
    return {"attention_mask": table} | ({"is_causal": False} if table is None else {})


def _flash_offsets(trial: Trial, tensors: Tensors) -> dict[str, Any]:
    """Documents in the keywords of FlashAttention, as padding-free collators make them."""
    info = _offsets_on(trial, tensors["q"].device)
    offsets = {"cu_seq_lens_q": info.cu_seqlens_q, "cu_seq_lens_k": info.cu_seqlens_k}
    return offsets | {"max_length_q": info.max_len_q, "max_length_k": info.max_len_k} | _layer_words(trial.spec)


def _positions(trial: Trial, tensors: Tensors) -> dict[str, Any]:
    """Documents whose positions restart at 0."""
    import torch

    lengths = np.diff(trial.inputs.cu_seqlens_q)
    positions = np.concatenate([np.arange(length) for length in lengths])
    return {"position_ids": torch.from_numpy(positions)[None].to(tensors["q"].device)} | _layer_words(trial.spec)


_WAYS: tuple[tuple[Callable[[Trial], bool], Callable[[Trial, Tensors], dict[str, Any]]], ...] = (
    (_fits_no_mask, _no_mask),
    (_fits_description, _described),
    (lambda trial: not trial.spec.packed, _table),
    (lambda trial: trial.spec.packed, _flash_offsets),
    (lambda trial: ends_at_diagonal(trial.spec) and trial.spec.q_len > 0 and _has_same_documents(trial), _positions),
)
"""The ways in which models of transformers say what is visible: (whether it fits, the keywords)."""


def _transformers_refuses(spec: AttentionSpec) -> str | None:
    """Returns why a layer of transformers cannot write a call, or None."""
    if spec.packed:
        if not _slides(spec) or not is_aligned(spec, "bottom_right"):
            return "a band that ends at the last key of each document"
        if spec.mask_shape is not None or spec.bias_shape is not None:
            return "documents or a mask"
    return without("alibi", "lse")(spec)


# the layer of this project


def _module(tensors: Tensors, trial: Trial, backend: str | None) -> Any:
    """``torch_frontend.module.Attention`` whose projections select their channels: exact, so heads are q, k and v."""
    import torch

    from torch_frontend.module import Attention

    spec, q = trial.spec, tensors["q"]
    itself = spec.q_len == spec.kv_len and trial.seed & 1  # q, k and v from one input
    rows = [tensors[name].flatten(-2) for name in "qkv"]
    parts = rows if itself else rows[1:]
    widths = [part.shape[-1] for part in parts]
    source = torch.cat(parts, -1)
    query_width = rows[0].shape[-1]
    layer = Attention(
        spec.num_heads,
        source.shape[-1] if itself else query_width,
        num_kv_heads=spec.num_kv_heads,
        in_kv_features=source.shape[-1],
        head_dim=spec.head_dim,
        value_dim=spec.value_dim,
        out_features=spec.num_heads * spec.value_dim,
        use_bias=False,
        sinks=spec.sinks,
        dropout_rate=spec.dropout,
        bitwise_deterministic=spec.deterministic,
        backend=backend,
        device="meta",
        **{name: getattr(spec, name) for name in ("causal", "alignment", "window", "softcap", "scale")},
    ).train(spec.needs_backward or spec.dropout > 0)

    def unit(size: int) -> Any:
        return torch.eye(size, dtype=q.dtype, device=q.device)

    selections = unit(sum(widths)).split(widths)
    selections = selections if itself else (unit(query_width), *selections)
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    weights = dict(zip((f"{name}.weight" for name in names), (*selections, unit(spec.num_heads * spec.value_dim))))
    if spec.sinks:
        weights["sink_logits"] = tensors["sinks"]
    inputs = (source,) if itself else (rows[0], source)
    tables = {name: tensors[name] for name in ("mask", "bias", "alibi_slopes")} | {"seq_info": trial.seq_info}
    tables |= {name: tensors[name] for name in ("key_ranges", "aux") if name in tensors} | functions_of(spec)
    with _seeded(trial):
        out = torch.func.functional_call(layer, weights, inputs, tables)
    return out.unflatten(-1, (spec.num_heads, spec.value_dim))


ENTRIES = (
    Entry(
        "torch transformers",
        partial(run, _transformers),
        _transformers_refuses,
        words=words,
        needs=("transformers",),
        masks=True,
    ),
    Entry("torch unsloth", partial(run, _unsloth), host_words.unsloth_refuses, words=words, masks=True),
    Entry("torch finetrainers", partial(run, _finetrainers), _finetrainers_refuses, words=words, masks=True),
    Entry(
        "torch diffusers",
        partial(run, _diffusers),
        _diffusers_refuses,
        words=words,
        needs=("diffusers",),
        masks=True,
    ),
    Entry("torch layer", partial(run, _module), without("lse", key_ranges=True, functions=True), words=words),
)
