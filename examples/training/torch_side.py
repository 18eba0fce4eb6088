"""Training steps in torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from attn_core import Selection, SeqInfo
from examples.training.config import ADAMW, AdamW, GemmaConfig
from examples.training.data import Batch
from examples.training.torch_gemma import Gemma
from examples.training.weights import Weights
from torch_frontend import explain


class TorchTrainer:
    """A model and its optimizer. Each batch is one step.

    Args:
        steps: the number of all steps, which the learning rate depends on.
        device: "cpu" or "cuda".
        dtype: "float32", or "bfloat16" for the matrix products and attention; parameters are always float32.
        backend: attention's backend by name; None for automatic choice.
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
    ) -> None:
        self.config, self.device, self.dtype = config, device, getattr(torch, dtype)
        self.backend = backend
        self.model = Gemma(config, backend)
        self.model.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
        self.model.to(device)
        self.rates, self.taken = optimizer.rates(steps), 0
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=float(self.rates[0]),
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.epsilon,
            weight_decay=optimizer.weight_decay,
        )

    def step(self, batch: Batch) -> float:
        """Updates the weights with one batch; returns the loss before the update, in nats per counted token."""
        for group in self.optimizer.param_groups:
            group["lr"] = float(self.rates[min(self.taken, len(self.rates) - 1)])
        self.taken += 1
        self.optimizer.zero_grad()
        loss = self._gradients(batch)
        self.optimizer.step()
        return loss.item()

    def _gradients(self, batch: Batch) -> Tensor:
        """Returns the loss of a batch, and writes its gradients to the parameters."""
        loss = self._sum(self._tensors(batch), batch.seq_info) / float(batch.counted.sum())
        loss.backward()
        return loss

    def _tensors(self, batch: Batch) -> list[Tensor]:
        """Returns tokens, targets and counted on the device."""
        return [torch.from_numpy(x).to(self.device) for x in batch[:3]]

    def _sum(self, rows: list[Tensor], seq_info: SeqInfo | None) -> Tensor:
        """Returns the sum of the losses of all counted tokens; rows: tokens, targets and counted."""
        tokens, targets, counted = rows
        with torch.autocast(torch.device(self.device).type, self.dtype, enabled=self.dtype != torch.float32):
            logits = self.model(tokens, seq_info)  # [rows, length, vocabulary]
        each = functional.cross_entropy(logits.flatten(0, 1), targets.flatten().long(), reduction="none")
        return (each * counted.flatten()).sum()

    def moment(self) -> float:
        """Returns the norm of AdamW's running mean of gradients, over all parameters."""
        return float(torch.stack([state["exp_avg"].norm() for state in self.optimizer.state.values()]).norm())

    def selection(self, batch: Batch, layer: int) -> Selection:
        """Returns the backend of a layer's attention, with the reasons against the others."""
        q, k, v = self._heads(*batch.tokens.shape)
        return explain(q, k, v, seq_info=batch.seq_info, needs_backward=True, **self._options(layer))

    def _heads(self, rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns empty q, k and v with the shapes of a layer."""
        q, k = (
            torch.empty(rows, length, heads, self.config.head_dim, dtype=self.dtype, device=self.device)
            for heads in (self.config.num_heads, self.config.num_kv_heads)
        )
        return q, k, k

    def _options(self, layer: int) -> dict[str, Any]:
        """Returns a layer's options of attention."""
        return {**self.config.attention(layer), "backend": self.backend}
