"""Jobs of ``context_torch_worker`` for ``test_huggingface_context``: transformers' models on shards."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from context_torch_scenes import error_of
from context_torch_worker import mesh_of
from transformers import masking_utils
from transformers_models import ALTERNATING, DECODER, DECODERS, VOCABULARY, build

from attn_core import SeqInfo
from torch_frontend import huggingface
from torch_frontend.context_parallel.layers import use_context_parallel
from torch_frontend.context_parallel.shards import shard_sequence, unshard_sequence
from torch_frontend.huggingface import attention, masks

LENGTH = 13
DOCUMENTS = (4, 7, 2)
huggingface.register()


def family(name: str, **changed: Any) -> Any:
    """(the model with transformers' eager attention, the same model with ours), with equal weights."""
    config = DECODERS[name]()
    for key, value in changed.items():
        setattr(config, key, value)
    return build(config, "eager"), build(config)


def inputs(documents: tuple[int, ...] | None) -> dict[str, torch.Tensor]:
    """Token ids and positions of whole rows; positions restart in every document."""
    rows = 1 if documents else 2
    ids = torch.randint(2, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in documents or (LENGTH,)])[None]
    return {"input_ids": ids, "position_ids": positions.expand(rows, -1)}


def trained(name: str, options: dict[str, Any], documents: tuple[int, ...] | None, how: str) -> dict[str, float]:
    """By how much the logits and the gradient of every parameter differ from one process's, relative to the largest.

    ``how``: "plain"; "masked", with a mask that hides nothing; or "recomputed", where the backward runs behind the
    block and in another thread.
    """
    mesh = mesh_of((2,))
    eager, ours = family(name)
    given = inputs(documents)
    info = SeqInfo.from_lengths(documents) if documents else None
    places = {"layout": options.get("layout", "zigzag"), "seq_info": info}
    right = eager(**given, use_cache=False).logits
    cotangent = torch.randn(right.shape, generator=torch.Generator().manual_seed(2))
    (right * cotangent).sum().backward()
    if how == "recomputed":
        ours.train()
        ours.gradient_checkpointing_enable()
    shards = {key: shard_sequence(value, mesh, **places) for key, value in given.items()}
    if how == "masked":
        shards["attention_mask"] = shard_sequence(torch.ones_like(given["input_ids"]), mesh, **places)
    with use_context_parallel(mesh, **options, length=LENGTH, seq_info=info):
        logits = ours(**shards, use_cache=False).logits
        loss = (logits * shard_sequence(cotangent, mesh, **places)).sum()
        if how != "recomputed":
            loss.backward()
    if how == "recomputed":
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    whole = unshard_sequence(logits.detach(), mesh, length=LENGTH, **places)
    errors = {"logits": relative(whole, right.detach())}
    for (key, one), (_, other) in zip(ours.named_parameters(), eager.named_parameters(), strict=True):
        if other.grad is not None:
            gradient = torch.zeros_like(one) if one.grad is None else one.grad.clone()
            dist.all_reduce(gradient)
            errors[key] = relative(gradient, other.grad)
    return errors


def relative(actual: torch.Tensor, right: torch.Tensor) -> float:
    return float((actual - right).abs().max() / (right.abs().max() + 1e-6))


def refusals() -> dict[str, str]:
    mesh, given = mesh_of((2,)), inputs(None)
    _, llama = family("llama")
    _, mistral = family("mistral")
    shards = {key: shard_sequence(value, mesh) for key, value in given.items()}
    ids, ones = shards["input_ids"], torch.ones_like(shards["input_ids"])
    padding = ones.clone()
    padding[0, 0] = 0
    width = ids.shape[1]
    table = torch.zeros(1, 1, width, width)
    causal = {"mask_function": masking_utils.causal_mask_function}
    outside = masks.mask(1, width, width, **causal)
    q = torch.zeros(1, 2, width, 8)

    def attend(*operands: torch.Tensor, mask: Any = None, **options: Any) -> str:
        return error_of(lambda: attention.attend(SimpleNamespace(), *operands, mask, **options))

    with use_context_parallel(mesh, length=LENGTH):
        first = llama(**shards, use_cache=True)
        bounds = torch.tensor([0, width], dtype=torch.int32)
        chunked = masking_utils.chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.long))
        made = masks.mask(1, width, width, **causal)
        return {
            "padding": error_of(lambda: llama(**shards, attention_mask=padding)),
            "a row's mask": error_of(lambda: llama(**shards, attention_mask=torch.ones_like(given["input_ids"]))),
            "a row's mask, no cache": error_of(
                lambda: llama(**shards, attention_mask=torch.ones_like(given["input_ids"]), use_cache=False)
            ),
            "table": error_of(lambda: llama(**shards, attention_mask=table)),
            "cache": error_of(lambda: llama(ids[:, :1], past_key_values=first.past_key_values)),
            "static cache": error_of(
                lambda: llama(**shards, past_key_values=transformers.StaticCache(llama.config, max_cache_len=20))
            ),
            "generate": error_of(lambda: mistral.generate(ids, max_new_tokens=2, do_sample=False)),
            "offsets": attend(q, q, q, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=7, max_length_k=7),
            "position_bias": attend(q, q, q, position_bias=table),
            "dropout": attend(q, q, q, dropout=0.1),
            "chunks": error_of(lambda: masks.mask(1, width, width, mask_function=chunked)),
            "a mask from outside": attend(q, q, q, mask=outside),
            "the window of a layer": attend(q, q, q, mask=made, sliding_window=9),
            "the mask as a table": error_of(lambda: made[:, :, :, :3]),
        }


def padding_on_one_rank() -> tuple[str, float]:
    """The error of a padded row whose last positions are on rank 0, and the largest error of a row after it."""
    mesh, given = mesh_of((2,)), inputs(None)
    _, llama = family("llama")
    shards = {key: shard_sequence(value, mesh) for key, value in given.items()}
    ones = torch.ones_like(given["input_ids"])
    padded = ones.clone()
    padded[:, -1] = 0

    def logits(mask: torch.Tensor) -> torch.Tensor:
        with use_context_parallel(mesh, length=LENGTH):
            return llama(**shards, attention_mask=shard_sequence(mask, mesh), use_cache=False).logits.detach()

    right = logits(ones)
    return error_of(lambda: logits(padded)), float((logits(ones) - right).abs().max())


def compiled() -> float:
    """By how much a compiled model's logits in a block differ from an uncompiled one's; it was compiled outside
    before."""
    mesh = mesh_of((2,))
    config = transformers.LlamaConfig(**DECODER | {"num_hidden_layers": 1})
    model = build(config)
    shards = {key: shard_sequence(value, mesh) for key, value in inputs(None).items()}
    faster = torch.compile(model, backend="eager")
    with torch.no_grad():
        faster(**shards, use_cache=False)
        with use_context_parallel(mesh, length=LENGTH):
            right = model(**shards, use_cache=False).logits
            return relative(faster(**shards, use_cache=False).logits, right)


assert ALTERNATING["sliding_window"] < LENGTH // 2, "a window that shards and rows are both longer than"
