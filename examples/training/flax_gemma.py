"""A Gemma-2-like decoder in Flax NNX, on ``jax_frontend.nnx.Attention``. torch_gemma.py is the same, line by line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from attn_core import SeqInfo
from examples.training.config import GemmaConfig
from jax_frontend.flax.layer import Rotary
from jax_frontend.nnx import Attention

AttentionLayer = Callable[..., Any]
"""The class of a layer's attention: ``jax_frontend.nnx.Attention``, or another class with its arguments."""


class RMSNorm(nnx.Module):
    """``x / rms(x) * (1 + weight)`` over the channels, in float32."""

    def __init__(self, config: GemmaConfig) -> None:
        self.weight = nnx.Param(jnp.zeros(config.hidden_size))
        self.epsilon = config.norm_epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.epsilon) * (1 + self.weight[...])


def rotary(config: GemmaConfig) -> Rotary:
    """RoPE: channels ``c`` and ``c + head_dim / 2`` form a pair that turns with the position."""
    tables = config.rotary_table()

    def turn(q: jax.Array, k: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """q and k ``[batch, seq, heads, head_dim]``, positions ``[batch, seq]``, counted within each document."""
        cos, sin = (jnp.asarray(table)[positions][:, :, None] for table in tables)  # [batch, seq, 1, head_dim / 2]

        def turned(x: jax.Array) -> jax.Array:
            low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
            return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

        return turned(q), turned(k)

    return turn


class Mlp(nnx.Module):
    """GeGLU: ``down(gelu(gate(x)) * up(x))``, gelu by its tanh formula."""

    def __init__(self, config: GemmaConfig, *, dtype: Any, rngs: nnx.Rngs) -> None:
        hidden, inner = config.hidden_size, config.mlp_size
        self.gate = nnx.Linear(hidden, inner, use_bias=False, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(hidden, inner, use_bias=False, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(inner, hidden, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.gate(x), approximate=True) * self.up(x))


class Layer(nnx.Module):
    """Attention and MLP, each between two norms."""

    def __init__(
        self, config: GemmaConfig, window: int | None, attention: AttentionLayer, *, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        self.before_attention, self.after_attention = RMSNorm(config), RMSNorm(config)
        self.attention = attention(
            num_heads=config.num_heads,
            in_features=config.hidden_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            use_bias=False,
            causal=True,
            window=window,
            softcap=config.attention_softcap,
            rotary=rotary(config),
            dtype=dtype,
            rngs=rngs,
        )
        self.before_mlp, self.after_mlp = RMSNorm(config), RMSNorm(config)
        self.mlp = Mlp(config, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, seq_info: SeqInfo | None) -> jax.Array:
        x = x + self.after_attention(self.attention(self.before_attention(x), seq_info=seq_info))
        return x + self.after_mlp(self.mlp(self.before_mlp(x)))


class Gemma(nnx.Module):
    """The language model; the embedding table is also the output projection.

    Args:
        dtype: of the matrix products and of attention; parameters, norms and the residual stream are float32.
        attention: makes each layer's attention.
    """

    def __init__(
        self,
        config: GemmaConfig,
        *,
        dtype: Any = jnp.float32,
        attention: AttentionLayer = Attention,
        rngs: nnx.Rngs,
    ) -> None:
        self.config, self.dtype = config, dtype
        self.embed = nnx.Param(jnp.zeros((config.vocab_size, config.hidden_size)))
        windows = map(config.layer_window, range(config.num_layers))
        self.layers = nnx.List([Layer(config, window, attention, dtype=dtype, rngs=rngs) for window in windows])
        self.norm = RMSNorm(config)

    def __call__(self, tokens: jax.Array, seq_info: SeqInfo | None) -> jax.Array:
        """float32 logits ``[rows, length, vocab_size]`` for int32 tokens ``[rows, length]``."""
        embed = self.embed[...]
        x = embed[tokens] * self.config.hidden_size**0.5
        for layer in self.layers:
            x = layer(x, seq_info)
        logits = (self.norm(x).astype(self.dtype) @ embed.astype(self.dtype).T).astype(jnp.float32)
        cap = self.config.final_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)
