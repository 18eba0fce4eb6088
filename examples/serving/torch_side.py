"""The transformers Llama with keys and values in pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from attn_core import Step, bytes_per_token
from torch_frontend import PagedKVCache, pages_that_fit

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
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention hook: q ``[1, heads, tokens, head_dim]`` in, out ``[1, tokens, heads, head_dim]``."""
    if attention_mask is not None or dropout:
        raise NotImplementedError("the tables say what each token sees; an attention mask or dropout is not supported")
    # [tokens, heads, head_dim], in the dtype of the pages, which may be narrower than the model's
    q, k, v = (x[0].transpose(0, 1).to(pages.k_pages[0].dtype) for x in (query, key, value))
    pages.update(module.layer_idx, k, v, step)
    return pages.attend(module.layer_idx, q, step, scale=scaling)[None].to(query.dtype), None


class TorchForward:
    """Runs steps of a LlamaForCausalLM with keys and values in the pages of a cache.

    Args:
        memory: bytes of the pool. On a GPU, leave it out of ``pages_that_fit``: it then takes the free memory.
        dtype: of the pages.

    Attributes:
        cache: the pages. token_bytes: the bytes of a token in all layers.
    """

    def __init__(self, model: Any, *, memory: int, page_size: int, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

        AttentionInterface.register(NAME, attention)
        AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
        model.set_attn_implementation(NAME)
        config, self.model = model.config, model
        sizes = {
            "num_layers": config.num_hidden_layers,
            "kv_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
        }
        num_pages = pages_that_fit(memory, **sizes, page_size=page_size, dtype=dtype)
        self.cache = PagedKVCache(**sizes, num_pages=num_pages, page_size=page_size, dtype=dtype)
        self.token_bytes = bytes_per_token(**sizes, dtype=str(dtype).removeprefix("torch."))

    @torch.inference_mode()
    def __call__(self, tokens: np.ndarray, places: np.ndarray, step: Step) -> np.ndarray:
        """Returns float32 logits ``[tokens, vocabulary]`` of the new tokens."""
        ids, positions = (torch.from_numpy(np.asarray(x, np.int64))[None] for x in (tokens, places))  # [1, tokens]
        inputs = {"input_ids": ids, "position_ids": positions, "use_cache": False}
        return self.model(**inputs, pages=self.cache, step=step).logits[0].numpy()
