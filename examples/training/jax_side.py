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
    """A model and its optimizer. Each batch is one step. The arguments are those of ``TorchTrainer``, and one more.

    Args:
        attention: creates the attention of each layer; takes the arguments of ``jax_frontend.nnx.Attention``.

    Attributes:
        traces: how often JAX has traced the step; 1 if all batches have the same shapes.
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
        self.graph, state = nnx.split(shapes)  # only the structure, without numbers
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
        """Updates the weights with one batch; returns the loss before the update, in nats per counted token."""
        # By default, JAX multiplies float32 in TensorFloat-32 (10 bits) on a GPU; torch does not.
        with jax.default_device(self.device), jax.default_matmul_precision("float32"):
            self.state, loss = self._step(self.state, self._placed(batch))
        return float(loss)

    def _placed(self, batch: Batch) -> Batch:
        """Returns the batch as JAX arrays."""
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
        """Returns the sum of the losses of all counted tokens."""
        logits = nnx.merge(self.graph, weights)(batch.tokens, batch.seq_info)  # [rows, length, vocabulary]
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
        return (each * batch.counted).sum()

    def moment(self) -> float:
        """Returns the norm of AdamW's running mean of gradients, over all parameters."""
        return float(optax.global_norm(optax.tree_utils.tree_get(self.state[1], "mu")))

    def selection(self, batch: Batch, layer: int) -> Selection:
        """Returns the backend of a layer's attention, with the reasons against the others."""
        with jax.default_device(self.device):
            q, k, v = self._heads(*batch.tokens.shape)
            return explain(q, k, v, seq_info=batch.seq_info, needs_backward=True, **self._options(layer))

    def _heads(self, rows: int, length: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the shapes of q, k and v of a layer."""
        q, k = (
            jax.ShapeDtypeStruct((rows, length, heads, self.config.head_dim), self.dtype)
            for heads in (self.config.num_heads, self.config.num_kv_heads)
        )
        return q, k, k

    def _options(self, layer: int) -> dict[str, Any]:
        """Returns a layer's options of attention."""
        return {**self.config.attention(layer), "backend": self.backend}
