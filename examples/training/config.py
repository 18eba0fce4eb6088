"""The model's shape and the optimizer's numbers: plain data that both frameworks read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class GemmaConfig:
    """The shape of a Gemma 2 decoder ("Gemma 2: Improving Open Language Models at a Practical Size", arXiv:2408.00118).

    Attributes:
        vocab_size: 256 bytes, and the token at the beginning of a document.
        window: keys that a query of an even layer sees, self included; odd layers see the whole document.
        attention_softcap, final_softcap: ``cap * tanh(x / cap)`` on the scores and on the logits; or None.
        rope_theta: the base of RoPE's wavelengths (arXiv:2104.09864).
        max_positions: the longest document or row, in tokens.
    """

    vocab_size: int = 257
    hidden_size: int = 128
    mlp_size: int = 512
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    window: int = 64
    attention_softcap: float | None = 50.0
    final_softcap: float | None = 30.0
    norm_epsilon: float = 1e-6
    rope_theta: float = 10000.0
    max_positions: int = 512

    def layer_window(self, layer: int) -> int | None:
        """Returns the window of a layer; every other layer has one, beginning with the first."""
        return self.window if layer % 2 == 0 else None

    def attention(self, layer: int) -> dict[str, Any]:
        """Returns a layer's options of attention, as keywords."""
        return {"causal": True, "window": self.layer_window(layer), "softcap": self.attention_softcap}

    def rotary_table(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns (cos, sin), float32 ``[max_positions, head_dim / 2]``, the same for both frameworks.

        The table is computed in float64. float32 powers may differ by one rounding between two libraries, and at
        position 500 the angle would differ by 500 times as much.
        """
        frequencies = self.rope_theta ** -(np.arange(0, self.head_dim, 2) / self.head_dim)
        angles = np.arange(self.max_positions)[:, None] * frequencies  # [max_positions, head_dim / 2]
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


@dataclass(frozen=True)
class AdamW:
    """AdamW (arXiv:1711.05101) as ``torch.optim.AdamW`` and ``optax.adamw`` both define it, with all its numbers.

    With m and v the running means of g and g², both corrected for their start at zero, both libraries compute
    ``p <- p - rate * (m / (sqrt(v) + epsilon) + weight_decay * p)``: torch as ``p *= 1 - rate * weight_decay`` and then
    the step, optax as one sum. In both, epsilon is outside the root (optax's ``eps_root`` is 0), and weight decay is
    multiplied by the rate. Only their defaults differ (weight_decay is 1e-2 in torch, 1e-4 in optax), so all numbers
    are passed. All parameters decay, also norms, whose weights are offsets from 1.

    torch computes the correction ``1 - beta ** t`` in float64, optax in float32, where 1 - 0.95 has a relative error of
    2e-7, the same for every weight. Betas with few bits have no such error; these are near 0.9 and 0.95.
    """

    peak_rate: float = 3e-3
    beta1: float = 29 / 32
    beta2: float = 15 / 16
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    warmup: int = 20

    def rates(self, steps: int) -> np.ndarray:
        """Returns float32 ``[steps]``: linear warmup, then a cosine down to a tenth. Both frameworks read it."""
        step = np.arange(steps)
        done = np.clip((step - self.warmup) / max(steps - self.warmup, 1), 0, 1)
        cosine = 0.55 + 0.45 * np.cos(np.pi * done)
        return (self.peak_rate * np.minimum((step + 1) / self.warmup, cosine)).astype(np.float32)


ADAMW = AdamW()
"""The default numbers."""


@dataclass(frozen=True)
class Options:
    """The options of a run: steps of ``length`` tokens in one packed row, with documents of at most ``longest``.

    Attributes:
        device: "cpu" or "cuda"; dtype: "float32", or "bfloat16" for matrix products and attention.
        backend: attention's backend in both frameworks; implementation: jax.nn's, if it replaces attention.
    """

    steps: int = 200
    length: int = 1024
    longest: int = 512
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    backend: str | None = None
    implementation: str = "xla"
    optimizer: AdamW = ADAMW

    @property
    def dense(self) -> dict[str, int]:
        """Rows and length of a dense batch with the same number of tokens."""
        return {"rows": max(1, self.length // self.longest), "length": min(self.length, self.longest)}

    @property
    def trainer(self) -> dict[str, Any]:
        """The arguments that every trainer takes, without those of attention."""
        return {"steps": self.steps, "optimizer": self.optimizer, "device": self.device, "dtype": self.dtype}
