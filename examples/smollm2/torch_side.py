"""The torch side: the transformers Llama with ``torch_frontend.attention`` inside, over a packed key/value cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

import torch_frontend
from attn_core import SeqInfo
from examples.smollm2.packing import PackedStep

NAME = "attn_core_demo"
"""The name for ``attn_implementation=``. In transformers, names with "/", "flash" or "sdpa" have a special meaning."""


class Captured(NamedTuple):
    """The inputs of a layer's call: q ``[tokens, heads, head_dim]``, k and v ``[capacity, kv_heads, head_dim]``."""

    layer: int
    step: PackedStep
    scale: float
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


@dataclass
class PackedPass:
    """One forward pass through all layers: the step, the cache that it updates, and captured calls for the report.

    Attributes:
        cache: (k, v) of each layer, ``[capacity, kv_heads, head_dim]``; each layer replaces its entry.
        captured: a list to add each layer's call to, or None.
    """

    step: PackedStep
    seq_info: SeqInfo
    source: torch.Tensor
    cache: list[tuple[torch.Tensor, torch.Tensor]]
    captured: list[Captured] | None = None


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    packed: PackedPass,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention hook: q ``[1, heads, tokens, head_dim]`` in, out ``[1, tokens, heads, head_dim]``."""
    if attention_mask is not None or dropout:
        raise NotImplementedError("this example packs documents and runs without an attention mask and without dropout")
    layer = module.layer_idx
    q, fresh_k, fresh_v = (x[0].transpose(0, 1) for x in (query, key, value))  # [tokens, heads, head_dim]
    k, v = (
        torch.cat([old, fresh]).index_select(0, packed.source)
        for old, fresh in zip(packed.cache[layer], (fresh_k, fresh_v), strict=True)
    )
    packed.cache[layer] = (k, v)
    if packed.captured is not None:
        arrays = {name: x.contiguous().numpy() for name, x in (("q", q), ("k", k), ("v", v))}
        packed.captured.append(Captured(layer, packed.step, scale=scaling, **arrays))
    out = torch_frontend.attention(q, k, v, causal=True, seq_info=packed.seq_info, scale=scaling)
    return out[None], None


def no_mask(*args: Any, **kwargs: Any) -> None:
    """transformers' mask hook. It builds no mask, because the offsets of the documents say which keys are visible."""


def register() -> None:
    """Registers the attention hook and the mask hook with transformers as ``attn_implementation=NAME``."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, no_mask)


@dataclass
class TorchForward:
    """Runs steps of the model; keeps the cache between steps.

    Attributes:
        model: a transformers LlamaForCausalLM with ``attn_implementation=NAME``.
        capture_steps: the number of next steps to capture.
        captured: every layer's q, k and v of those steps.
    """

    model: Any
    capacity: int
    capture_steps: int = 0
    captured: list[Captured] = field(default_factory=list)
    cache: list[tuple[torch.Tensor, torch.Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        config = self.model.config
        empty = torch.zeros(self.capacity, config.num_key_value_heads, config.head_dim)
        self.cache = [(empty, empty)] * config.num_hidden_layers

    @torch.inference_mode()
    def __call__(self, step: PackedStep) -> np.ndarray:
        """Returns the logits of a step's tokens, float32 ``[tokens, vocabulary]``."""
        packed = PackedPass(
            step,
            step.seq_info(torch.from_numpy),
            torch.from_numpy(step.source),
            self.cache,
            self.captured if self.capture_steps > 0 else None,
        )
        self.capture_steps -= 1
        tokens, positions = (torch.from_numpy(x).long()[None] for x in (step.tokens, step.positions))  # [1, tokens]
        output = self.model(input_ids=tokens, position_ids=positions, use_cache=False, packed=packed)
        return output.logits[0].numpy()
