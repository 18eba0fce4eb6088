"""The initial weights, drawn once in numpy, by the names and layouts of torch and of Flax."""

from __future__ import annotations

from typing import Any

import numpy as np

from examples.training.config import GemmaConfig

Weights = dict[str, np.ndarray]
"""float32 arrays by the names of the torch model's ``state_dict``; projections are ``[out, in]``."""

NORMS = ("before_attention", "after_attention", "before_mlp", "after_mlp")
EMBEDDING_DEVIATION = 0.02


def initial(config: GemmaConfig, seed: int) -> Weights:
    """Returns normal weights with deviation ``1 / sqrt(in)``. Norms are zeros: Gemma scales by ``1 + weight``."""
    generator = np.random.default_rng(seed)

    def normal(rows: int, columns: int, deviation: float | None = None) -> np.ndarray:
        drawn = generator.standard_normal((rows, columns))
        return (drawn * (columns**-0.5 if deviation is None else deviation)).astype(np.float32)

    hidden, inner = config.hidden_size, config.mlp_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    weights = {"embed.weight": normal(config.vocab_size, hidden, EMBEDDING_DEVIATION)}
    for layer in range(config.num_layers):
        arrays = {f"{name}.weight": np.zeros(hidden, np.float32) for name in NORMS}
        arrays |= {
            "attention.q_proj.weight": normal(queries, hidden),
            "attention.k_proj.weight": normal(keys, hidden),
            "attention.v_proj.weight": normal(keys, hidden),
            "attention.o_proj.weight": normal(hidden, queries),
            "mlp.gate.weight": normal(inner, hidden),
            "mlp.up.weight": normal(inner, hidden),
            "mlp.down.weight": normal(hidden, inner),
        }
        weights |= {f"layers.{layer}.{name}": array for name, array in arrays.items()}
    return weights | {"norm.weight": np.zeros(hidden, np.float32)}


def one_rounding_away(weights: Weights, seed: int) -> Weights:
    """Moves every weight to a neighbouring float32, up or down at random. No other weights are nearer."""
    generator = np.random.default_rng(seed)

    def moved(array: np.ndarray) -> np.ndarray:
        target = np.where(generator.random(array.shape) < 0.5, -np.inf, np.inf).astype(np.float32)
        return np.where(array == 0, array, np.nextafter(array, target))  # the neighbours of 0 are subnormal numbers

    return {name: moved(array) for name, array in weights.items()}


def for_flax(weights: Weights, config: GemmaConfig) -> dict[str, Any]:
    """Returns the same numbers by Flax's names: projections ``[in, out]``, attention's with an axis for heads."""
    layers = {index: _flax_layer(weights, f"layers.{index}.", config) for index in range(config.num_layers)}
    return {"embed": weights["embed.weight"], "layers": layers, "norm": {"weight": weights["norm.weight"]}}


def _flax_layer(weights: Weights, prefix: str, config: GemmaConfig) -> dict[str, Any]:
    def kernel(name: str, *shape: int) -> dict[str, np.ndarray]:
        transposed = weights[f"{prefix}{name}.weight"].T  # [in, out]
        return {"kernel": transposed.reshape(shape or transposed.shape)}

    hidden, heads, kv_heads, head_dim = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    return {
        **{name: {"weight": weights[f"{prefix}{name}.weight"]} for name in NORMS},
        "attention": {
            "query": kernel("attention.q_proj", hidden, heads, head_dim),
            "key": kernel("attention.k_proj", hidden, kv_heads, head_dim),
            "value": kernel("attention.v_proj", hidden, kv_heads, head_dim),
            "out": kernel("attention.o_proj", heads, head_dim, hidden),
        },
        "mlp": {name: kernel(f"mlp.{name}") for name in ("gate", "up", "down")},
    }
