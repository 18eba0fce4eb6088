"""A step that every device makes by the same call, on offsets and keys of its own: no branch to wait for."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attn_core.backends import Inputs
from attn_core.context_parallel.alike import Alike, alike
from attn_core.context_parallel.call import ContextCall
from attn_core.context_parallel.plan import Step
from attn_core.selection import Target, refusals
from jax_frontend import compiled_lane, local_call, ops
from jax_frontend.bridged_call import calls_of
from jax_frontend.context_exchange import Axes, Pair
from jax_frontend.context_tiles import Runner, merged
from jax_frontend.differentiable import varying_alike
from jax_frontend.partitioning import partly_manual
from jax_frontend.plan import Plan

Array = jax.Array
ONE_BY_ONE = 8
"""Ranges of keys up to which each is an operation of its own."""
MOST_WORK = 1.5e12
"""Floating-point operations of a part's step from which branches are faster: about 2 ms of an H200, where a packed call
of FA3 takes some percent longer than the dense ones that it stands for, and a branch 0.15 to 0.2 ms of waiting."""


@lru_cache(maxsize=256)
def one_call(call: ContextCall, device: str, step: Step) -> Alike | None:
    """The step as one call, where that is better than branches and its backend can run it; else None.

    The host chooses a branch once all before it is done, and the GPU waits. That is long where the host then calls back
    into Python; kernels that XLA launches itself, and XLA's own operations, take branches.
    """
    if len(set(step.tiles)) == 1 or _work(call, step) > MOST_WORK:
        return None
    kinds = {call.backend_of(tile) for mine in step.tiles for tile in mine}
    spec, name = next(iter(kinds))
    made = Plan(spec, name, device, one_row=False)
    if len({name for _, name in kinds}) > 1 or local_call.speaks_jax(made):
        return None
    if compiled_lane.lane_of(calls_of(name, spec, device)[0]).program is not None:
        return None
    found = alike(call, step)
    if found is None or refusals(name, found.spec, Target.here("jax", device)):
        return None
    return found


def _work(call: ContextCall, step: Step) -> float:
    """The floating-point operations of the busiest part in a step's forward."""
    heads, _ = call.heads
    return 2.0 * call.spec.batch * heads * max(step.pairs) * (call.spec.head_dim + call.spec.value_dim)


def attend(
    runner: Runner,
    step: Step,
    made: Alike,
    part: Any,
    q: Array,
    keys: tuple[Array, ...],
    so_far: tuple[Array, Array] | None,
    *,
    picked: bool,
) -> tuple[Array, Array]:
    """``context_tiles.attend`` of a step as one call of this part; ``picked`` where its keys are from ``picked``."""
    name = next(runner.call.backend_of(tile)[1] for mine in step.tiles for tile in mine)
    # Not before the step before this one: XLA would copy the keys as soon as they have come, and wait for them.
    after: Any = lax.optimization_barrier((keys, so_far))
    keys, before = after
    k, v = (keys[0], None) if picked else _rows(keys, _index(made, part), gathered=step.gathered)
    cu_q, cu_k = jnp.asarray(made.cu_q, jnp.int32), jnp.asarray(made.cu_k, jnp.int32)[part]
    inputs = varying_alike(Inputs(q[0], k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k))
    out, lse = ops.forward(Plan(made.spec, name, runner.device, one_row=False, beside=runner.beside), inputs)
    # Kernels differ in what they give of rows whose document has no keys.
    sees = jnp.asarray(_seeing(made))[part]  # [rows]
    out, lse = jnp.where(sees[:, None, None], out, 0)[None], jnp.where(sees, lse, -jnp.inf)[None]
    out = out.astype(runner.accumulator("q"))
    return (out, lse) if before is None else merged(before[0], before[1], out, lse)


def swap_of(call: ContextCall, axes: Axes, device: str, keys: tuple[Array, Array]) -> Alike | None:
    """The step of two parts with each other's keys, where these are not needed but for one call: see ``picked``."""
    k, v = keys
    if not axes.swap or call.spec.needs_backward or k.shape != v.shape or partly_manual():
        return None
    step = next((step for step in call.plan.steps if not step.own), None)
    made = None if step is None else one_call(call, device, step)
    return made if made is not None and made.spec.kv_len <= k.shape[1] else None  # keys that several read count twice


def picked(made: Alike, axes: Axes, keys: tuple[Array, Array]) -> Array:
    """Sends the other of two parts what it reads, as it reads it: each gets ``[2, keys, kv_heads, dim]``, k and v."""
    index = _index(made, 1 - axes.part)
    k, v = (_taken(array[0], index) for array in keys)
    (found,) = Pair.of(k, v).hop(axes, 1).arrays
    return found


def _index(made: Alike, part: Any) -> Array:
    """int32 ``[kv_len]``: the place of every key, from a part's ranges.

    It rises by one, but for a leap at the start of each range. A few are added one by one, which becomes a part of the
    copy.
    """
    starts, stops = np.moveaxis(np.array(made.keys, np.int32), -1, 0)  # [parts, ranges]
    ends = np.cumsum(stops - starts, axis=1)
    begins = np.concatenate([np.zeros_like(ends[:, :1]), ends[:, :-1]], axis=1)
    leaps = np.diff(starts - begins, axis=1, prepend=0)
    key = jnp.arange(made.spec.kv_len, dtype=jnp.int32)
    begin, leap = (jnp.asarray(table, jnp.int32)[part] for table in (begins, leaps))
    if len(begin) > ONE_BY_ONE:
        return key + jnp.where(key[:, None] >= begin, leap, 0).sum(1, dtype=jnp.int32)
    return sum((jnp.where(key >= begin[at], leap[at], 0) for at in range(len(begin))), key)


def _rows(keys: tuple[Array, ...], index: Array, *, gathered: bool) -> tuple[Array, Array]:
    """k and v at places, ``[places, kv_heads, dim]``; of what was gathered without putting it in order before."""
    if len(keys) == 1:  # [parts, or 1 where two swap, 2, 1, places, kv_heads, dim]
        size = keys[0].shape[3]
        rows = keys[0].reshape(-1, *keys[0].shape[4:])
        first = index // size * (2 * size) + index % size
        return _taken(rows, first), _taken(rows, first + size)
    k, v = (array.reshape(-1, *array.shape[3 if gathered else 2 :]) for array in keys)
    return _taken(k, index), _taken(v, index)


def _taken(rows: Array, index: Array) -> Array:
    return jnp.take(rows, index, axis=0, mode="clip")


def _seeing(made: Alike) -> np.ndarray:
    """bool ``[parts, rows]``: whether a row's document has keys."""
    return np.repeat(np.diff(np.array(made.cu_k)) > 0, np.diff(made.cu_q), axis=1)
