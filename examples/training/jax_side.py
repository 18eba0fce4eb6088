"""Training steps in JAX: one jitted function of parameters, optimizer state and batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from flax import nnx

from attn_core import Selection
from examples.training.config import ADAMW, AdamW, GemmaConfig
from examples.training.data import Batch
from examples.training.flax_gemma import AttentionLayer, Gemma
from examples.training.weights import Weights, for_flax
from jax_frontend import explain
from jax_frontend.nnx import Attention


class JaxTrainer:
    """A model and its optimizer, moved one step by each batch. The arguments are those of ``TorchTrainer``.

    Args:
        attention: what makes each layer's attention, called with the arguments of ``jax_frontend.nnx.Attention``.

    Attributes:
        traces: how often JAX has traced the step, which is once for as long as batches keep their shapes.
    """

    def __init__(
        self,
        config: GemmaConfig,
        weights: Weights,
        *,
        steps: int,
        optimizer: AdamW = ADAMW,
        device: str = "cpu",
        dtype: str = "float32",
        backend: str | None = None,
        attention: AttentionLayer = Attention,
    ) -> None:
        self.config, self.dtype, self.backend = config, jnp.dtype(dtype), backend
        self.device = jax.devices(device)[0]
        self.traces = 0
        layer = partial(attention, backend=backend)
        shapes = nnx.eval_shape(lambda: Gemma(config, dtype=self.dtype, attention=layer, rngs=nnx.Rngs(0)))
        self.graph, state = nnx.split(shapes)  # the structure alone: nothing has been drawn
        rates = optimizer.rates(steps)
        self.optimizer = optax.adamw(
            lambda count: jnp.asarray(rates)[count],
            b1=optimizer.beta1,
            b2=optimizer.beta2,
            eps=optimizer.epsilon,
            weight_decay=optimizer.weight_decay,
        )
        with jax.default_device(self.device):
            nnx.replace_by_pure_dict(state, jax.tree.map(jnp.array, for_flax(weights, config)))
            self.state = (state, self.optimizer.init(state))
        self._step = jax.jit(self._traced, donate_argnums=0)

    def step(self, batch: Batch) -> float:
        """Moves the weights by one batch; returns the loss before it, in nats per counted token."""
        # A GPU would otherwise compute float32 matrix products in TensorFloat-32, with 10 bits, where torch does not.
        with jax.default_device(self.device), jax.default_matmul_precision("float32"):
            self.state, loss = self._step(self.state, self._placed(batch))
        return float(loss)

    def _placed(self, batch: Batch) -> Batch:
        """The batch as the step takes it."""
        return jax.tree.map(jnp.asarray, batch)  # type: ignore[no-any-return]

    def _traced(self, state: tuple[Any, Any], batch: Batch) -> tuple[tuple[Any, Any], jax.Array]:
        self.traces += 1
        weights, moments = state
        loss, gradients = jax.value_and_grad(self._loss)(weights, batch)
        updates, moments = self.optimizer.update(gradients, moments, weights)
        return (optax.apply_updates(weights, updates), moments), loss

    def _loss(self, weights: Any, batch: Batch) -> jax.Array:
        return self._sum(weights, batch) / batch.counted.sum()

    def _sum(self, weights: Any, batch: Batch) -> jax.Array:
        """The losses of all counted tokens, summed."""
        logits = nnx.merge(self.graph, weights)(batch.tokens, batch.seq_info)  # [rows, length, vocabulary]
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
        return (each * batch.counted).sum()

    def moment(self) -> float:
        """The norm of AdamW's running mean of gradients, over all parameters."""
        return float(optax.global_norm(optax.tree_utils.tree_get(self.state[1], "mu")))

    def selection(self, batch: Batch, layer: int) -> Selection:
        """Which backend runs a layer's attention, and why not the others."""
        with jax.default_device(self.device):
            q, k, v = self._heads(*batch.tokens.shape)
            return explain(q, k, v, seq_info=batch.seq_info, needs_backward=True, **self._asked(layer))

    def _heads(self, rows: int, length: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The shapes of q, k and v of a layer."""
        q, k = (
            jax.ShapeDtypeStruct((rows, length, heads, self.config.head_dim), self.dtype)
            for heads in (self.config.num_heads, self.config.num_kv_heads)
        )
        return q, k, k

    def _asked(self, layer: int) -> dict[str, Any]:
        """What a layer asks of attention."""
        return {**self.config.attention(layer), "backend": self.backend}
