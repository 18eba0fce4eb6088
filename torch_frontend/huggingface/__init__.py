"""Attention for models of transformers: ``register()`` adds ``attn_implementation="attn_core"``."""

from torch_frontend.huggingface.registration import NAME, register, set_layer_backends, unregister

__all__ = ["NAME", "register", "set_layer_backends", "unregister"]
