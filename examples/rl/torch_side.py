"""The torch side: the transformers Llama, sampled from pages and trained on packed documents by one attention hook."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from attn_core import SeqInfo, Step
from examples.rl.rows import Batch, Rows, as_they_are, in_blocks
from examples.serving.torch_side import sizes_of
from examples.smollm2.torch_side import no_mask
from torch_frontend import PagedKVCache
from torch_frontend import attention as attn

NAME = "attn_core_rl"
"""The name for ``set_attn_implementation``."""

Tensor = torch.Tensor
Attend = Callable[..., Tensor]
"""(layer, q, k, v, scale) -> out, each ``[tokens, heads, dim]``."""


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    slots: Tensor,
    attend: Attend,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention hook: q ``[1, heads, rows, head_dim]`` in, out ``[1, rows, heads, head_dim]``.

    Attention gets the tokens alone, without the rows that fill blocks.
    """
    if attention_mask is not None or dropout:
        raise NotImplementedError("tables say what each token sees; an attention mask or dropout is not supported")
    q, k, v = (x[0].transpose(0, 1).index_select(0, slots) for x in (query, key, value))  # [tokens, heads, head_dim]
    out = attend(module.layer_idx, q, k, v, scaling)
    rows = out.new_zeros(query.shape[2], *out.shape[1:]).index_copy(0, slots, out)
    return rows[None], None


class _Blocks(torch.autograd.Function):
    """A row-wise function in blocks. Its gradient is computed for all rows at once, with the function run again.

    The gradient of a weight is a sum over all rows and so depends on all of them in any case.
    """

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], size: int, count: int, *tensors: Tensor) -> Any:
        ctx.run, ctx.count, ctx.parameters = run, count, tensors[count:]
        ctx.save_for_backward(*tensors[:count])
        return _by_blocks(run, size, tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        needed = ctx.needs_input_grad[3:]
        rows = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needed, strict=False)]
        with torch.enable_grad():
            out = ctx.run(*rows)
        if isinstance(out, tuple):
            return (None,) * (3 + len(needed))  # angles of positions, which have no gradient
        inputs = [x for x, need in zip((*rows, *ctx.parameters), needed, strict=True) if need]
        of_inputs = iter(torch.autograd.grad(out, inputs, gradients))
        return None, None, None, *(next(of_inputs) if need else None for need in needed)


def _by_blocks(run: Callable[..., Any], size: int, rows: tuple[Tensor, ...]) -> Any:
    """Runs a function on blocks of rows ``[1, size, ...]`` and returns its results end to end."""
    results = [run(*block) for block in zip(*(x.split(size, dim=1) for x in rows), strict=True)]
    if isinstance(results[0], tuple):
        return tuple(torch.cat(parts, dim=1) for parts in zip(*results, strict=True))
    return torch.cat(results, dim=1)


def by_blocks(
    run: Callable[..., Any], size: int, *rows: Tensor, parameters: tuple[Tensor, ...] = (), **named: Tensor
) -> Any:
    """Runs a row-wise function of ``[1, rows, ...]`` in blocks of ``size`` rows.

    Args:
        parameters: those that the function reads, which then have gradients.
        named: more rows, which the function takes behind the others.
    """
    rows = *rows, *named.values()
    return _Blocks.apply(run, size, len(rows), *rows, *parameters)


@contextmanager
def layers_in_blocks(model: torch.nn.Module, size: int) -> Iterator[None]:
    """Makes every layer without parts (linear, norm, activation, embedding, table of angles) run in blocks.

    What lies between them (residuals, the product of gate and up, rotation) is one rounding for each element, which is
    the same at each place.
    """
    with ExitStack() as stack:
        for layer in model.modules():
            if not list(layer.children()):
                run, parameters = layer.forward, tuple(layer.parameters())
                layer.forward = partial(by_blocks, run, size, parameters=parameters)  # type: ignore[method-assign]
                stack.callback(delattr, layer, "forward")
        yield


def _store_by_columns(model: torch.nn.Module) -> None:
    """Stores the weights of layers ``[out, in]`` with ``out`` as the last axis in memory, as Flax does.

    Otherwise each product of a block would first copy its weight into another order, which takes longer than the
    product. The table of embeddings stays as it is.
    """
    for layer in model.model.layers.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data = layer.weight.data.t().contiguous().t()


class TorchPolicy:
    """A LlamaForCausalLM that is sampled from pages and trained on packed documents.

    Args:
        num_pages, page_size: of the cache.
        invariant: of attention, in sampling and in training; with it the other layers run in blocks of rows.
        backend: of attention; None for automatic choice.
    """

    def __init__(
        self,
        model: Any,
        *,
        num_pages: int,
        page_size: int,
        invariant: str | None = None,
        backend: str | None = None,
        device: str = "cpu",
    ) -> None:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

        AttentionInterface.register(NAME, attention)
        AttentionMaskInterface.register(NAME, no_mask)
        model.set_attn_implementation(NAME)
        self.model, self.device = model.to(device), device
        _store_by_columns(model)
        self.options: dict[str, Any] = {"causal": True, "invariant": invariant, "backend": backend}
        self.plan = as_they_are if invariant is None else in_blocks
        self.cache = PagedKVCache(**sizes_of(model.config), num_pages=num_pages, page_size=page_size, device=device)

    @torch.inference_mode()
    def __call__(self, tokens: np.ndarray, places: np.ndarray, step: Step) -> np.ndarray:
        """See ``sampling.Policy``."""

        def from_pages(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            self.cache.update(layer, k, v, step)
            return self.cache.attend(layer, q, step, scale=scale, **self.options)

        return self._log_probabilities(tokens, self.plan(places), places, from_pages).cpu().numpy()

    def score(self, batch: Batch) -> tuple[np.ndarray, Callable[[np.ndarray, float], float]]:
        """See ``sampling.Policy``."""
        seq_info = SeqInfo.from_lengths(batch.lengths, array=lambda cu: torch.from_numpy(cu).to(self.device))

        def packed(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            return attn(q, k, v, seq_info=seq_info, scale=scale, **self.options)

        every = self._log_probabilities(batch.tokens, self.plan(batch.positions), batch.positions, packed)
        chosen = every[self._device(batch.scored), self._device(batch.targets)]

        def update(gradient: np.ndarray, length: float) -> float:
            parameters = list(self.model.parameters())
            of_parameters = torch.autograd.grad(chosen, parameters, torch.from_numpy(gradient).to(chosen))
            norm = torch.stack([each.norm() for each in of_parameters]).norm()
            with torch.no_grad():
                for parameter, each in zip(parameters, of_parameters, strict=True):
                    parameter.sub_(each * (length / norm))
            return float(norm)

        return chosen.detach().cpu().numpy(), update

    def _log_probabilities(self, tokens: np.ndarray, rows: Rows, positions: np.ndarray, attend: Attend) -> Tensor:
        """Returns ``[tokens, vocabulary]``."""
        ids, places = (self._device(rows.spread(np.asarray(x, np.int64)))[None] for x in (tokens, positions))
        slots = self._device(rows.slots)
        with layers_in_blocks(self.model, rows.size):
            inputs: dict[str, Any] = {"input_ids": ids, "position_ids": places, "use_cache": False}
            logits = self.model(**inputs, slots=slots, attend=attend).logits  # [1, rows, vocabulary]
        whole: Tensor = by_blocks(partial(torch.log_softmax, dim=-1), rows.size, logits)
        return whole[0].index_select(0, slots)

    def _device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
