"""The JAX side: the Flax Llama with the torch model's weights, compiled once per shape by ``jax.jit``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attn_core import SeqInfo
from examples.smollm2.flax_llama import Cache, Llama, LlamaConfig, StepArrays
from examples.smollm2.packing import PackedStep


def convert(model: Any) -> Llama:
    """Converts a transformers LlamaForCausalLM to Flax, with the same float32 weights.

    torch stores a projection as ``[out, in]``, Flax as ``[in, out]``. Flax's attention has an axis for the heads.
    """
    config = _config(model.config)
    twin = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))  # only the structure, without numbers
    graph, state = nnx.split(twin)
    weights = {name: tensor.detach().numpy() for name, tensor in model.named_parameters()}
    layers = {i: _layer(weights, f"model.layers.{i}.", config) for i in range(config.num_hidden_layers)}
    pure = {
        "embed": {"embedding": weights["model.embed_tokens.weight"]},
        "layers": layers,
        "norm": {"scale": weights["model.norm.weight"]},
    }
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, pure))
    return nnx.merge(graph, state)


def _config(source: Any) -> LlamaConfig:
    if not source.tie_word_embeddings or source.attention_bias or source.rope_parameters["rope_type"] != "default":
        raise NotImplementedError("this example's Llama has tied embeddings, no biases and plain RoPE")
    names = [name for name in LlamaConfig.__dataclass_fields__ if name != "rope_theta"]
    return LlamaConfig(**{n: getattr(source, n) for n in names}, rope_theta=source.rope_parameters["rope_theta"])


def _layer(weights: dict[str, np.ndarray], prefix: str, config: LlamaConfig) -> dict[str, Any]:
    """Returns the parameters of a layer by Flax's names."""
    hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads

    def scale(name: str) -> dict[str, np.ndarray]:
        return {"scale": weights[f"{prefix}{name}.weight"]}

    def kernel(name: str, *shape: int) -> dict[str, np.ndarray]:
        transposed = weights[f"{prefix}{name}.weight"].T  # [in, out]
        return {"kernel": transposed.reshape(shape or transposed.shape)}

    return {
        "attention_norm": scale("input_layernorm"),
        "attention": {
            "query": kernel("self_attn.q_proj", hidden, heads, config.head_dim),
            "key": kernel("self_attn.k_proj", hidden, kv_heads, config.head_dim),
            "value": kernel("self_attn.v_proj", hidden, kv_heads, config.head_dim),
            "out": kernel("self_attn.o_proj", heads, config.head_dim, hidden),
        },
        "mlp_norm": scale("post_attention_layernorm"),
        "mlp": {name: kernel(f"mlp.{name}_proj") for name in ("gate", "up", "down")},
    }


class JaxForward:
    """Runs steps of the model, compiled in advance for each shape; keeps the cache between steps."""

    def __init__(self, model: Llama, capacity: int) -> None:
        config = model.config
        graph, self.state = nnx.split(model)
        empty = jnp.zeros((capacity, config.num_key_value_heads, config.head_dim))
        self.cache: Cache = [(empty, empty)] * config.num_hidden_layers
        self._step = jax.jit(lambda state, plan, cache: nnx.merge(graph, state).step(plan, cache))
        self._compiled: dict[int, Any] = {}

    def __call__(self, step: PackedStep) -> np.ndarray:
        """Returns the logits of a step's tokens, float32 ``[tokens, vocabulary]``."""
        compiled = self._compiled[len(step.tokens)]
        logits, self.cache = compiled(self.state, _plan(step), self.cache)
        return np.asarray(logits)

    def compile(self, step: PackedStep) -> None:
        """Compiles for the shapes of a step. Must be called before the first step of these shapes."""
        self._compiled[len(step.tokens)] = self._step.lower(self.state, _plan(step), self.cache).compile()


def reread(model: Llama, documents: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns the logits of whole documents in one packed row, uncached: float32 ``[tokens, vocabulary]``."""
    graph, state = nnx.split(model)
    run = jax.jit(lambda state, tokens, seq_info: nnx.merge(graph, state)(tokens, seq_info))
    seq_info = SeqInfo.from_lengths([len(document) for document in documents], array=jnp.asarray)
    return np.asarray(run(state, np.concatenate(documents).astype(np.int32), seq_info))


def _plan(step: PackedStep) -> StepArrays:
    """Puts a step on the device. The longest length is part of the compiled program, so it bounds all later steps."""
    seq_info = replace(step.seq_info(jnp.asarray), max_len_k=len(step.source))
    tokens, positions, source = (jnp.asarray(x) for x in (step.tokens, step.positions, step.source))
    return StepArrays(tokens, positions, source, seq_info)
