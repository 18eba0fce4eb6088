"""Tiny models of the types that Unsloth patches, and their eager results, for tests of its way of calling attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import transformers
from transformers_models import build as build_model

Tensor = torch.Tensor

WINDOW, TOKENS, DOCUMENTS = 4, 11, (5, 1, 4)  # documents shorter than the row, one of them longer than the window
_SIZES: dict[str, Any] = {
    **{"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2},
    **{"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64},
    **{"attention_dropout": 0.0, "pad_token_id": 0},
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "granite": ("Granite", {"attention_multiplier": 0.2}),
    "gemma2": (
        "Gemma2",
        {"sliding_window": WINDOW, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 1.5},
    ),
}
"""By type: the name of its classes, and the sizes of its own."""


def build(kind: str) -> Any:
    """Returns a model in float64 with weights so large that its attention is not flat.

    The results of eager attention have the accuracy of float32, because transformers computes its softmax so.
    """
    name, sizes = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**_SIZES, **sizes)
    if kind == "granite":
        del config.head_dim  # Granite takes hidden_size / heads, which is the same
    return build_model(config, "eager", factor=8.0, noise=0.0, seed=7).train().double()


class Batch(NamedTuple):
    """Tokens ``[batch, tokens]``, and which of them count ``[batch, tokens]``, 1 or 0."""

    ids: Tensor
    keep: Tensor


def batch(side: str | None = None) -> Batch:
    """Two rows; with a side, one of them has padding there."""
    ids = torch.randint(1, 97, (2, TOKENS), generator=torch.Generator().manual_seed(3))
    keep = torch.ones_like(ids)
    if side is not None:
        keep[1, -3:] = 0
    return Batch(ids, keep.flip(1) if side == "left" else keep)


def packed_row() -> Tensor:
    """The documents in one row, ``[1, tokens]``."""
    return batch().ids[:1, : sum(DOCUMENTS)]


def packed_positions() -> Tensor:
    return torch.cat([torch.arange(length) for length in DOCUMENTS])[None]


class Result(NamedTuple):
    """Logits of the tokens that count, ``[tokens, vocabulary]``, and the gradient of each parameter."""

    logits: Tensor
    gradients: dict[str, Tensor]


def result(model: Any, logits: Tensor) -> Result:
    """Returns the result, with the gradients of a loss that weights all logits differently."""
    names, parameters = zip(*model.named_parameters())
    weights = torch.cos(torch.arange(logits.numel(), dtype=logits.dtype)).view_as(logits)
    gradients = torch.autograd.grad((logits * weights).sum(), parameters)
    return Result(logits.detach(), dict(zip(names, gradients)))


def eager_rows(kind: str, side: str | None = None) -> Result:
    """transformers' eager result of each row of ``batch`` alone, without its padding.

    With padding, eager gives NaN in float64. Without, the positions begin elsewhere, which rotary embeddings ignore.
    """
    model, rows = build(kind), batch(side)
    parts = (ids[keep.bool()] for ids, keep in zip(*rows))
    return result(model, torch.cat([model(part[None], use_cache=False).logits[0] for part in parts]))


def eager_documents(kind: str) -> Result:
    """transformers' eager result of each document alone."""
    model = build(kind)
    logits = [model(part, use_cache=False).logits[0] for part in packed_row().split(DOCUMENTS, 1)]
    return result(model, torch.cat(logits))


def largest_difference(actual: Result, expected: Result) -> tuple[float, float]:
    """Returns the largest differences of logits and of gradients, relative to the largest number of each."""
    gradients = max(
        float((actual.gradients[name] - right).abs().max() / right.abs().max().clamp(min=1e-30))
        for name, right in expected.gradients.items()
    )
    logits = float((actual.logits - expected.logits).abs().max() / expected.logits.abs().max())
    return logits, gradients
