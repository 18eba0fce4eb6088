"""Runs the attention forwards of an installed Unsloth in models of transformers, and prints one line of JSON per call.

It is a process of its own, because importing unsloth changes transformers. Its first argument is a file with the eager
results, by (kind, case). On a CPU two things of Unsloth are replaced: its Triton kernel of rotary embeddings, and its
table of them for each GPU.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from importlib import import_module
from types import MethodType
from typing import Any

import unsloth  # noqa: F401  before transformers, which it changes

# isort: split
import torch
import unsloth_models
from unsloth_models import DOCUMENTS, TOKENS, Result, batch, largest_difference, packed_positions, packed_row, result

from torch_frontend.unsloth import (
    create_flex_attention_causal_mask,
    create_flex_attention_sliding_window_mask,
    installed,
)

Tensor = torch.Tensor
FORWARDS = {
    "llama": "LlamaAttention_fast_forward",
    "mistral": "MistralAttention_fast_forward",
    "granite": "GraniteAttention_fast_forward",
    "gemma2": "Gemma2Attention_fast_forward",
}
CASES = ("rows", "left", "right", "packed", "decoded")


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Stands for Unsloth's Triton kernel. cos, sin: ``[positions, head_dim]``."""
    positions = torch.arange(q.shape[2])[None] if positions is None else positions
    cos, sin = (table[positions.long()][:, None] for table in (cos, sin))  # [batch, 1, tokens, head_dim]

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    return turned(q), turned(k)


class Rotary:
    """Stands for Unsloth's tables of rotary embeddings, which exist for GPUs."""

    def __init__(self, tables: tuple[Tensor, Tensor]) -> None:
        self.tables = tables

    def extend_rope_embedding(self, *_: Any, **__: Any) -> None:
        """Has enough positions already."""

    def get_cached(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self.tables


def build(kind: str, caches: dict[int, Any] | None) -> Any:
    """Returns a model whose attention layers run Unsloth's forward, with ``caches`` by layer, or without a cache."""
    model = unsloth_models.build(kind)
    fast = getattr(import_module(f"unsloth.models.{kind}"), FORWARDS[kind])
    cos, sin = model.model.rotary_emb(torch.zeros(1, dtype=torch.float64), torch.arange(64)[None])
    for at, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        object.__setattr__(attention, "rotary_emb", Rotary((cos[0], sin[0])))

        def forward(self: Any, hidden_states: Tensor, *_: Any, at: int = at, masks: Any, **kwargs: Any) -> Any:
            options = {name: kwargs[name] for name in ("packed_seq_lengths", "position_ids") if name in kwargs}
            causal_mask, attention_mask = masks(self)
            cache = None if caches is None else caches.get(at)
            if kind == "gemma2":
                options["use_sliding_window"] = self.config.layer_types[at] == "sliding_attention"
            else:
                options["position_embeddings"] = self.rotary_emb.tables
            out, _, cache = fast(
                *(self, hidden_states, causal_mask, attention_mask),
                past_key_value=cache,
                use_cache=caches is not None,
                **options,
            )
            if caches is not None:
                caches[at] = cache
            return out, None

        attention.forward = MethodType(forward, attention)
    return model


def masks_of(kind: str, side: str | None, path: str) -> Any:
    """Returns a function from a layer to (causal_mask, attention_mask), as Unsloth's model forward makes them."""
    keep = batch(side).keep

    def masks(layer: Any) -> tuple[Any, Any]:
        window = unsloth_models.WINDOW if kind == "mistral" else None
        if kind == "gemma2":
            slides = layer.config.layer_types[layer.layer_idx] == "sliding_attention"
            window = layer.config.sliding_window if slides else None
        if side is None and kind != "gemma2":
            return None, None
        if side is None and path == "fused":
            return slides, None  # Gemma 2 with FlashAttention
        rows = TOKENS if side is not None else 64
        distance = torch.arange(rows)[:, None] - torch.arange(rows)
        hidden = (distance < 0) | (distance >= (window or rows))
        if side is None and path == "described":
            made = create_flex_attention_causal_mask(64)
            return create_flex_attention_sliding_window_mask(64, window) if window else made, None
        hidden = hidden if side is None else hidden | (keep[:, None, None] == 0)
        table = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, torch.finfo(torch.float64).min)
        return (table, keep) if kind == "gemma2" else (None, table)

    return masks


def run(kind: str, case: str, path: str) -> Result | Tensor:
    """Returns the result of one case; for "decoded" only its logits."""
    side = case if case in ("left", "right") else None
    masks = masks_of(kind, side, path)
    if case == "packed":
        lengths = torch.tensor(DOCUMENTS, dtype=torch.int32)
        options = {"packed_seq_lengths": lengths, "position_ids": packed_positions(), "masks": masks}
        model = build(kind, None)
        return result(model, model(packed_row(), **options, use_cache=False).logits[0])
    rows = batch(side)
    if case == "decoded":
        model, at, outs = build(kind, {}).eval(), 0, []
        with torch.no_grad():
            for part in rows.ids.split((5, 4, 1, 1), 1):
                positions = torch.arange(at, at + part.shape[1])[None].expand(len(part), -1)
                outs.append(model(part, masks=masks, position_ids=positions, use_cache=False).logits)
                at += part.shape[1]
        return torch.cat(outs, 1)
    model = build(kind, None)
    return result(model, model(rows.ids, masks=masks, use_cache=False).logits[rows.keep.bool()])


def main() -> None:
    expected = torch.load(sys.argv[1], weights_only=False)
    for kind in FORWARDS:
        module = import_module(f"unsloth.models.{kind}")
        module.fast_rope_embedding = rotate
        paths = ("static", "described", "fused") if kind == "gemma2" else ("static",)
        for place in ("unsloth", "ours"):
            for path in paths if place == "ours" else paths[:1]:
                if kind == "gemma2":
                    module.HAS_FLASH_ATTENTION_SOFTCAPPING = path == "fused"
                for case in CASES:
                    if kind == "gemma2" and case == "packed" and path != "fused":
                        continue  # its softcapped attention has no documents
                    report: dict[str, Any] = {"kind": kind, "place": place, "path": path, "case": case}
                    try:
                        with installed() if place == "ours" else nullcontext():
                            actual = run(kind, case, path)
                        right = expected[kind, case]
                        if isinstance(actual, Tensor):
                            report["logits"] = float((actual - right).abs().max() / right.abs().max())
                        else:
                            report["logits"], report["gradients"] = largest_difference(actual, Result(*right))
                    except Exception as error:
                        report["error"] = f"{type(error).__name__}: {error}"[:300]
                    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
