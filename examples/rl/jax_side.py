"""The JAX side: the Flax Llama, sampled from pages and trained on packed documents.

The parts of a layer before and after attention are compiled by themselves, for one block of rows. So one program
computes a token in sampling and in training. Inside a larger program XLA may fuse, and round, otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attn_core import SeqInfo, Step
from examples.rl.rows import Batch, Rows, as_they_are, in_blocks
from examples.smollm2.flax_llama import Llama
from jax_frontend import PagedKVCache
from jax_frontend import attention as attn

Array = jax.Array
Blocks = list[Array]
"""Rows ``[rows, ...]`` in arrays of one size, end to end."""
Part = Callable[..., Any]
"""(state, rows...) -> rows: a compiled part of the model, each of whose rows depends on one token."""
Attend = Callable[..., Array]
"""(layer, q, k, v) -> out, each ``[tokens, heads, dim]``."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def by_blocks(part: Part, state: Any, *rows: Blocks) -> Any:
    """Runs a part of the model on each block of rows; returns blocks, or a tuple of blocks if it returns a tuple."""
    results = [part(state, *block) for block in zip(*rows, strict=True)]
    return jax.tree.map(lambda *blocks: list(blocks), *results)


def _forward(part: Part, state: Any, *rows: Blocks) -> tuple[Any, Any]:
    return by_blocks(part, state, *rows), (state, rows)


@partial(jax.jit, static_argnums=0)
def _backward(part: Part, saved: Any, gradients: Any) -> Any:
    """Computes the gradient for all rows at once. That of a weight is a sum over all rows in any case."""
    state, rows = saved
    pullback = jax.vjp(part, state, *map(jnp.concatenate, rows))[1]
    of_state, *of_rows = pullback(jax.tree.map(jnp.concatenate, gradients, is_leaf=lambda x: isinstance(x, list)))
    cut = (None if each.dtype == jax.dtypes.float0 else jnp.split(each, len(rows[0])) for each in of_rows)
    return of_state, *cut


by_blocks.defvjp(_forward, _backward)


@jax.jit
def _tokens_of(slots: Array, *rows: Blocks) -> list[Array]:
    return [jnp.concatenate(blocks)[slots] for blocks in rows]


@partial(jax.jit, static_argnums=(0, 1))
def _blocks_of(blocks: int, size: int, slots: Array, tokens: Array) -> Blocks:
    rows = jnp.zeros((blocks * size, *tokens.shape[1:]), tokens.dtype).at[slots].set(tokens)
    return jnp.split(rows, blocks)


def tokens_of(rows: Rows, *arrays: Blocks) -> list[Array]:
    """Returns the rows of the tokens alone, without those that fill blocks."""
    return [block for (block,) in arrays] if rows.whole else _tokens_of(rows.slots, *arrays)


def blocks_of(rows: Rows, tokens: Array) -> Blocks:
    """Returns blocks with the tokens in their rows and 0 elsewhere: the opposite of ``tokens_of``."""
    return [tokens] if rows.whole else _blocks_of(rows.blocks, rows.size, rows.slots, tokens)


class Parts(NamedTuple):
    """The parts of a Llama, compiled when they first run, and its weights: those of each layer, and those at the ends.

    embed: ids to the first rows; heads and join: a layer before and after attention; end: rows to log-probabilities.
    """

    embed: Part
    heads: Part
    join: Part
    end: Part
    weights: tuple[list[Any], Any]


def parts_of(model: Llama) -> Parts:
    """Returns the parts of a model; every layer runs the same programs with its own weights."""
    layer, ends = nnx.graphdef(model.layers[0]), nnx.graphdef((model.embed, model.norm))

    def end(state: Any, x: Array) -> Array:
        embed, norm = nnx.merge(ends, state)
        return jax.nn.log_softmax(embed.attend(norm(x)))

    return Parts(
        jax.jit(lambda state, tokens: nnx.merge(ends, state)[0](tokens)),
        jax.jit(lambda state, x, positions: nnx.merge(layer, state).heads(x, positions)),
        jax.jit(lambda state, x, attended: nnx.merge(layer, state).join(x, attended)),
        jax.jit(end),
        ([nnx.state(each) for each in model.layers], nnx.state((model.embed, model.norm))),
    )


@jax.jit
def moved(weights: Any, gradient: Any, length: float) -> tuple[Any, Array]:
    """Returns the weights after a step of this length against the gradient, and the gradient's norm."""
    norm = jnp.sqrt(sum(jnp.sum(each**2) for each in jax.tree.leaves(gradient)))
    return jax.tree.map(lambda weight, each: weight - each * (length / norm), weights, gradient), norm


class JaxPolicy:
    """A Llama that is sampled from pages and trained on packed documents.

    Args:
        num_pages, page_size: of the cache.
        invariant: of attention, in sampling and in training; with it the other layers run in blocks of rows.
        backend: of attention; None for automatic choice.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        num_pages: int,
        page_size: int,
        invariant: str | None = None,
        backend: str | None = None,
    ) -> None:
        layers, ends = parts.weights
        kv_heads, head_dim = layers[0]["attention"]["key"]["kernel"].shape[1:]
        sizes = {"num_layers": len(layers), "kv_heads": kv_heads, "head_dim": head_dim}
        self.cache = PagedKVCache(**sizes, num_pages=num_pages, page_size=page_size)
        self.options: dict[str, Any] = {"causal": True, "invariant": invariant, "backend": backend}
        self.plan = as_they_are if invariant is None else in_blocks
        self.parts, self.weights = parts, (layers, ends)
        self._packed = jax.jit(partial(attn, **self.options))

    def __call__(self, tokens: np.ndarray, places: np.ndarray, step: Step) -> np.ndarray:
        """See ``sampling.Policy``."""

        def from_pages(layer: int, q: Array, k: Array, v: Array) -> Array:
            self.cache.update(layer, k, v, step)
            return self.cache.attend(layer, q, step, **self.options)

        rows = self.plan(places)
        blocks = self._log_probabilities(self.weights, tokens, rows, places, from_pages)
        return np.concatenate(blocks)[rows.slots]

    def score(self, batch: Batch) -> tuple[np.ndarray, Callable[[np.ndarray, float], float]]:
        """See ``sampling.Policy``."""
        seq_info = SeqInfo.from_lengths(batch.lengths, array=jnp.asarray)

        def packed(layer: int, q: Array, k: Array, v: Array) -> Array:
            return self._packed(q, k, v, seq_info=seq_info)

        def chosen(weights: Any) -> Array:
            rows = self.plan(batch.positions)
            blocks = self._log_probabilities(weights, batch.tokens, rows, batch.positions, packed)
            return jnp.concatenate(blocks)[rows.slots[batch.scored], batch.targets]

        scored, pullback = jax.vjp(chosen, self.weights)

        def update(gradient: np.ndarray, length: float) -> float:
            (of_weights,) = pullback(jnp.asarray(gradient))
            self.weights, norm = moved(self.weights, of_weights, length)
            return float(norm)

        return np.asarray(scored), update

    def _log_probabilities(
        self, weights: Any, tokens: np.ndarray, rows: Rows, positions: np.ndarray, attend: Attend
    ) -> Blocks:
        """Returns ``[rows, vocabulary]`` in blocks."""
        layers, ends = weights
        ids, places = (list(rows.spread(np.asarray(x, np.int32)).reshape(-1, rows.size)) for x in (tokens, positions))
        x = by_blocks(self.parts.embed, ends, ids)
        for number, state in enumerate(layers):
            out = attend(number, *tokens_of(rows, *by_blocks(self.parts.heads, state, x, places)))
            x = by_blocks(self.parts.join, state, x, blocks_of(rows, out))
        blocks: Blocks = by_blocks(self.parts.end, ends, x)
        return blocks
