"""A Llama in Flax NNX, written on ``jax_frontend.nnx.Attention``, for packed documents with a packed key/value cache.

Architecture: "LLaMA: Open and Efficient Foundation Language Models" (arXiv:2302.13971): RMSNorm before each block,
SwiGLU, RoPE (arXiv:2104.09864) in the rotate-half convention of Hugging Face checkpoints, grouped kv heads, tied
embeddings.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import jax_frontend
from attn_core import SeqInfo
from jax_frontend.nnx import Attention

KeysValues = tuple[jax.Array, jax.Array]
Cache = list[KeysValues]
"""(k, v) of each layer, ``[capacity, kv_heads, head_dim]``: the keys and values of all documents end to end."""


class StepArrays(NamedTuple):
    """A ``packing.PackedStep`` on the device: fields with the same names, and the offsets of the documents."""

    tokens: jax.Array
    positions: jax.Array
    source: jax.Array
    seq_info: SeqInfo


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama; the names follow the transformers configuration of the same model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float


def rotary(q: jax.Array, k: jax.Array, positions: jax.Array, *, theta: float) -> tuple[jax.Array, jax.Array]:
    """Applies RoPE for ``nnx.Attention``: q, k ``[..., tokens, heads, head_dim]``, positions int ``[..., tokens]``.

    Channels ``c`` and ``c + head_dim / 2`` form a pair that turns by ``position * theta ** (-2 c / head_dim)``.
    """
    head_dim = q.shape[-1]
    frequencies = theta ** -(jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions[..., None, None] * frequencies  # [..., tokens, 1, head_dim / 2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)

    def turned(x: jax.Array) -> jax.Array:
        low, high = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    return turned(q), turned(k)


class Mlp(nnx.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate = nnx.Linear(hidden, inner, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(hidden, inner, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(inner, hidden, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    """One decoder layer over tokens of packed documents, ``[tokens, hidden_size]``."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, rngs=rngs)
        self.rotary = partial(rotary, theta=config.rope_theta)
        self.attention = Attention(
            num_heads=config.num_attention_heads,
            in_features=config.hidden_size,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            use_bias=False,
            causal=True,
            rotary=self.rotary,
            rngs=rngs,
        )
        self.mlp_norm = nnx.RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, rngs=rngs)
        self.mlp = Mlp(config, rngs=rngs)

    def __call__(self, x: jax.Array, seq_info: SeqInfo) -> jax.Array:
        """Runs the layer on whole documents; the attention layer counts positions from the start of each document."""
        x = x + self.attention(self.attention_norm(x), seq_info=seq_info)
        return x + self.mlp(self.mlp_norm(x))

    def heads(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns q, k and v, ``[tokens, heads, head_dim]``, as attention takes them; each token's are its own."""
        layer, normed = self.attention, self.attention_norm(x)
        return *self.rotary(layer.query(normed), layer.key(normed), positions), layer.value(normed)

    def join(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """Returns the layer's result from its input and the heads of attention; each token's is its own."""
        x = x + self.attention.out(attended)
        return x + self.mlp(self.mlp_norm(x))

    def step(self, x: jax.Array, plan: StepArrays, cached: KeysValues) -> tuple[jax.Array, KeysValues]:
        """Runs the layer on new tokens, which see the cached keys of their document and the new ones."""
        q, *fresh = self.heads(x, plan.positions)
        k, v = (jnp.concatenate([old, new])[plan.source] for old, new in zip(cached, fresh, strict=True))
        return self.join(x, jax_frontend.attention(q, k, v, causal=True, seq_info=plan.seq_info)), (k, v)


class Llama(nnx.Module):
    """The language model; the embedding table is also the output projection."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = nnx.Embed(config.vocab_size, config.hidden_size, rngs=rngs)
        self.layers = nnx.List([Layer(config, rngs=rngs) for _ in range(config.num_hidden_layers)])
        self.norm = nnx.RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, rngs=rngs)

    def __call__(self, tokens: jax.Array, seq_info: SeqInfo) -> jax.Array:
        """Returns float32 logits ``[tokens, vocab_size]`` of whole packed documents (int32 ``[tokens]``), uncached."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, seq_info)
        return self.embed.attend(self.norm(x))

    def step(self, plan: StepArrays, cache: Cache) -> tuple[jax.Array, Cache]:
        """Returns float32 logits ``[tokens, vocab_size]`` of new tokens, and the cache with their keys and values."""
        x, grown = self.embed(plan.tokens), []
        for layer, cached in zip(self.layers, cache, strict=True):
            x, updated = layer.step(x, plan, cached)
            grown.append(updated)
        return self.embed.attend(self.norm(x)), grown
