"""A tiny random Llama of transformers, for the tests of the examples."""

from __future__ import annotations

from typing import Any


def tiny_llama(implementation: str) -> Any:
    """A Llama with the same weights for every implementation, so large that its logits are not flat."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
    )
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model
