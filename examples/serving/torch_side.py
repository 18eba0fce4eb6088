"""The transformers Llama with keys and values in pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from attn_core import Step
from torch_frontend import PagedKVCache

NAME = "attn_core_serving"
"""The name for ``set_attn_implementation``."""


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    pages: PagedKVCache,
    step: Step,
    query_dtype: torch.dtype,
    invariant: str | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention hook: q ``[1, heads, tokens, head_dim]`` in, out ``[1, tokens, heads, head_dim]``."""
    if attention_mask is not None or dropout:
        raise NotImplementedError("the tables say what each token sees; an attention mask or dropout is not supported")
    # [tokens, heads, head_dim], in a dtype that may be narrower than the model's
    q, k, v = (x[0].transpose(0, 1).to(query_dtype) for x in (query, key, value))
    pages.update(module.layer_idx, k, v, step)
    out = pages.attend(module.layer_idx, q, step, scale=scaling, invariant=invariant)
    return out[None].to(query.dtype), None


def sizes_of(config: Any) -> dict[str, int]:
    """Returns what a model's configuration says about its keys and values, as ``PagedKVCache`` takes it."""
    heads, dim = config.num_key_value_heads, config.head_dim
    return {"num_layers": config.num_hidden_layers, "kv_heads": heads, "head_dim": dim}


class TorchForward:
    """Runs steps of a LlamaForCausalLM with keys and values in the pages of a cache.

    Args:
        num_pages, page_size, dtype, kv_dtype: of the cache.
        invariant: of attention.

    Attributes:
        cache: the pages.
        query_dtype: of queries, and of keys and values before they are stored.
    """

    def __init__(
        self,
        model: Any,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype = torch.float32,
        kv_dtype: str | None = None,
        invariant: str | None = None,
    ) -> None:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

        AttentionInterface.register(NAME, attention)
        AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
        model.set_attn_implementation(NAME)
        self.model, self.query_dtype, self.invariant = model, dtype, invariant
        options: dict[str, Any] = {"dtype": dtype, **({} if kv_dtype is None else {"kv_dtype": kv_dtype})}
        self.cache = PagedKVCache(**sizes_of(model.config), num_pages=num_pages, page_size=page_size, **options)

    @torch.inference_mode()
    def __call__(self, tokens: np.ndarray, places: np.ndarray, step: Step) -> np.ndarray:
        """Returns float32 logits ``[tokens, vocabulary]`` of the new tokens."""
        ids, positions = (torch.from_numpy(np.asarray(x, np.int64))[None] for x in (tokens, places))  # [1, tokens]
        inputs: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "use_cache": False}
        inputs |= {"pages": self.cache, "step": step, "query_dtype": self.query_dtype, "invariant": self.invariant}
        return self.model(**inputs).logits[0].numpy()
