"""The attention of Levanter, on named arrays: ``dot_product_attention`` and ``dot_product_attention_with_sink``."""

from jax_frontend.levanter.attention import dot_product_attention, dot_product_attention_with_sink

__all__ = ["dot_product_attention", "dot_product_attention_with_sink"]
