"""The Flax model with ``jax.nn.dot_product_attention``, to compare step times.

jax.nn has neither softcap nor packed documents. So the comparison uses another model: in both variants, scores have no
softcap, and each row is one document.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax

from attn_core.errors import SpecError
from examples.training.config import GemmaConfig
from examples.training.jax_side import JaxTrainer
from examples.training.weights import Weights
from jax_frontend.flax.layer import Rotary, token_positions
from jax_frontend.nnx import Attention

OURS, JAX_NN = "ours", "jax.nn"


class JaxNNAttention(Attention):
    """``jax_frontend.nnx.Attention`` with the same projections, around ``jax.nn.dot_product_attention``."""

    def __init__(
        self, *args: Any, window: int | None, rotary: Rotary, implementation: Any = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        if self.softcap is not None:
            raise SpecError(f"softcap={self.softcap}: jax.nn.dot_product_attention has none")
        self.turn, self.implementation = rotary, implementation
        # jax.nn takes inclusive distances; our window counts keys, self included
        self.distances = None if window is None else (window - 1, 0)

    def __call__(self, x: jax.Array, *args: Any, seq_info: Any = None, **options: Any) -> jax.Array:
        """Attends within each row of x ``[rows, length, features]``."""
        if args or options or seq_info is not None:
            raise SpecError("this layer only takes x: jax.nn.dot_product_attention has no packed documents")
        q, k, v = self.query(x), self.key(x), self.value(x)
        q, k = (y.astype(v.dtype) for y in self.turn(q, k, token_positions(None, None, *q.shape[:2])))
        distances, implementation = self.distances, self.implementation
        out = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, local_window_size=distances, implementation=implementation
        )
        return self.out(out)


def with_attention(
    name: str,
    config: GemmaConfig,
    weights: Weights,
    *,
    implementation: str | None = None,
    backend: str | None = None,
    **options: Any,
) -> JaxTrainer:
    """Returns a trainer for batches of ``data.dense_batches``, with the named attention and no softcap on scores.

    Args:
        name: "ours" or "jax.nn".
        implementation: jax.nn's: "xla", "cudnn" or None.
        backend: ours, by name; None for automatic choice.
        options: those of ``JaxTrainer``: steps, optimizer, device, dtype.
    """
    config = replace(config, attention_softcap=None)
    if name == OURS:
        return JaxTrainer(config, weights, backend=backend, **options)
    if name == JAX_NN:
        attention = partial(JaxNNAttention, implementation=implementation)
        return JaxTrainer(config, weights, attention=attention, **options)
    raise SpecError(f"name={name!r}: expected {OURS!r} or {JAX_NN!r}")
