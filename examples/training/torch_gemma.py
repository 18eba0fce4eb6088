"""A Gemma-2-like decoder in torch, on ``torch_frontend.module.Attention``. flax_gemma.py is the same, line by line."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from attn_core import SeqInfo
from examples.training.config import GemmaConfig
from torch_frontend.module import Attention


class RMSNorm(nn.Module):
    """``x / rms(x) * (1 + weight)`` over the channels, in float32."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.hidden_size))
        self.epsilon = config.norm_epsilon

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon) * (1 + self.weight)


class Rotary(nn.Module):
    """RoPE: channels ``c`` and ``c + head_dim / 2`` form a pair that turns with the position."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        for name, table in zip(("cos", "sin"), config.rotary_table()):
            self.register_buffer(name, torch.from_numpy(table), persistent=False)

    def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q and k ``[batch, seq, heads, head_dim]``, positions ``[batch, seq]``, counted within each document."""
        cos, sin = self.cos[positions][:, :, None], self.sin[positions][:, :, None]  # [batch, seq, 1, head_dim / 2]

        def turned(x: Tensor) -> Tensor:
            low, high = x.float().chunk(2, dim=-1)
            return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

        return turned(q), turned(k)


class Mlp(nn.Module):
    """GeGLU: ``down(gelu(gate(x)) * up(x))``, gelu by its tanh formula."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.mlp_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.mlp_size, bias=False)
        self.down = nn.Linear(config.mlp_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.gate(x), approximate="tanh") * self.up(x))


class Layer(nn.Module):
    """Attention and MLP, each between two norms."""

    def __init__(self, config: GemmaConfig, window: int | None, backend: str | None) -> None:
        super().__init__()
        self.before_attention, self.after_attention = RMSNorm(config), RMSNorm(config)
        self.attention = Attention(
            num_heads=config.num_heads,
            in_features=config.hidden_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            use_bias=False,
            causal=True,
            window=window,
            softcap=config.attention_softcap,
            rotary=Rotary(config),
            backend=backend,
        )
        self.before_mlp, self.after_mlp = RMSNorm(config), RMSNorm(config)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, seq_info: SeqInfo | None, **shared: Any) -> Tensor:
        x = x + self.after_attention(self.attention(self.before_attention(x), seq_info=seq_info, **shared))
        return x + self.after_mlp(self.mlp(self.before_mlp(x)))


class Gemma(nn.Module):
    """The language model; the embedding table is also the output projection."""

    def __init__(self, config: GemmaConfig, backend: str | None = None) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        windows = map(config.layer_window, range(config.num_layers))
        self.layers = nn.ModuleList([Layer(config, window, backend) for window in windows])
        self.norm = RMSNorm(config)

    def forward(self, tokens: Tensor, seq_info: SeqInfo | None, **shared: Any) -> Tensor:
        """float32 logits ``[rows, length, vocab_size]`` for int32 tokens ``[rows, length]``.

        shared: ``key_ranges`` and ``positions`` of completions that share a prompt, as the attention layer takes them.
        """
        x = self.embed(tokens) * self.config.hidden_size**0.5
        for layer in self.layers:
            x = layer(x, seq_info, **shared)
        logits = functional.linear(self.norm(x), self.embed.weight).float()
        cap = self.config.final_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)
