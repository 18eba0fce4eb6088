"""The drop-ins of torch that a campaign calls, as their hosts call them. The twin of jax_hosts."""

from __future__ import annotations

from functools import partial
from typing import Any

from attn_core.call.spec import AttentionSpec
from attn_core.cli.campaign import host_words, torch_transformers
from attn_core.cli.campaign.entries import Entry, without
from attn_core.cli.campaign.host_words import is_aligned, is_banded, one_table
from attn_core.cli.campaign.torch_entries import no_gradient_as_in_torch, run, words
from attn_core.cli.campaign.torch_words import (
    has_same_documents,
    offsets_on,
    ops_on,
    requested,
    seeded,
    without_batch,
)
from attn_core.cli.drawn_functions import functions_of
from attn_core.cli.trial import Trial

Tensors = dict[str, Any]


# Unsloth, Finetrainers and diffusers


def _unsloth(tensors: Tensors, trial: Trial, backend: str | None) -> Any:
    from torch_frontend.unsloth import AttentionConfig, AttentionContext, run_attention

    spec, where = trial.spec, tensors["q"].device
    documents: Any = offsets_on(trial, where)
    if documents is not None and has_same_documents(trial) and trial.seed & 1:
        lengths = documents.cu_seqlens_q.diff()
        documents = (lengths, documents.cu_seqlens_q, documents.max_len_q)  # the host's own triple
    call = host_words.unsloth_call(spec, tensors, documents, trial.seed // 2, ops_on(where))
    config, context = AttentionConfig(**call.pop("config")), AttentionContext(**call.pop("context"))
    with seeded(trial), requested(backend):
        out = run_attention(config=config, context=context, **call)
    return without_batch(out, spec)


def _finetrainers(tensors: Tensors, trial: Trial, backend: str | None) -> Any:
    from torch_frontend.finetrainers import attention_dispatch, attention_provider

    spec, where = trial.spec, tensors["q"].device
    word, call = host_words.finetrainers_call(
        spec, tensors, offsets_on(trial, where), backend, trial.seed, ops_on(where)
    )
    with seeded(trial), attention_provider(word):
        results = attention_dispatch(**call)
    out, *lse = results if spec.return_lse else (results,)
    out = without_batch(out.transpose(1, 2), spec)
    return (out, lse[0][0] if spec.packed else lse[0]) if lse else out


def _finetrainers_refuses(spec: AttentionSpec) -> str | None:
    return no_gradient_as_in_torch(spec) or host_words.finetrainers_refuses(spec)


def _diffusers(tensors: Tensors, trial: Trial, backend: str | None) -> Any:
    """diffusers' own dispatcher: its heads are behind the sequence, and ``is_causal`` counts from the first key."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    from torch_frontend.diffusers import installed

    spec, ops = trial.spec, ops_on(tensors["q"].device)
    causal = spec.causal and spec.window == (None, None) and is_aligned(spec, "top_left")
    causal = causal and spec.mask_shape is None and spec.bias_shape is None
    if host_words.is_of_keys(spec) and not is_banded(spec) and trial.seed & 1:
        table = host_words.key_mask(spec, tensors, ops)
    else:
        table = one_table(spec, tensors, ops, with_band=is_banded(spec) and not causal)
    options: dict[str, Any] = {"dropout_p": spec.dropout, "scale": spec.scale, "backend": "native"}
    with installed(), requested(backend), seeded(trial):
        q, k, v = (tensors[name] for name in "qkv")
        return dispatch_attention_fn(q, k, v, table, is_causal=causal, enable_gqa=spec.group_size > 1, **options)


def _diffusers_refuses(spec: AttentionSpec) -> str | None:
    lacks = without("softcap", "alibi", "packed", "sinks", "lse", "deterministic")
    return no_gradient_as_in_torch(spec) or lacks(spec)


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
    with seeded(trial):
        out = torch.func.functional_call(layer, weights, inputs, tables)
    return out.unflatten(-1, (spec.num_heads, spec.value_dim))


ENTRIES = (
    Entry(
        "torch transformers",
        partial(run, torch_transformers.layer_call),
        torch_transformers.refuses,
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
