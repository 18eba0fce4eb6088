"""A tiny random Llama of transformers, for the tests of the examples."""

from __future__ import annotations

from typing import Any


def tiny_llama(implementation: str) -> Any:
    """A Llama with the same weights for every implementation, so large that its logits are not flat."""
    import transformers
    from transformers_models import build

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
    return build(config, implementation, factor=8.0, noise=0.0, seed=7)
