"""Whether a query has the same bits in a small call of torch's CPU flash kernel as in a prompt, found by trying.

A prompt's queries are computed in blocks of ROWS. The library behind torch may multiply a few rows by another kernel,
with another order of sums, which depends on its version, the processor and the shape. So one small call is compared
with the prompt's, once in a process for each shape, in every shape of product that may occur. The numbers are chosen so
that nothing but rounding remains of a sum: another order of it then has another result, in half precision, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

from attn_core.backends.sdpa_flash.cpu_kernel import kernels

TILE = 128
"""Positions of a tile; see ``cpu_tiles``. The kernel computes more queries at once in a call of 192 or more."""
ROWS = 32
"""Queries that the kernel computes at once in a call of fewer than 192."""
KEYS_AT_ONCE = 512
"""Keys that the kernel multiplies at once."""
HEADS = 2
"""Heads that are compared. A single one may be shared among threads."""
BATCH = 3
Result = TypeVar("Result")


class Shape(NamedTuple):
    """What may choose the library's kernel: dtype, query heads, kv heads and channels of a head, and the threads."""

    dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    threads: int

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.num_heads // self.num_kv_heads


class Trial(NamedTuple):
    """q ``[BATCH, heads, TILE, dim]``, k and v ``[BATCH, heads, keys, dim]``: equal rows, as parts of whole tensors."""

    q: Any
    k: Any
    v: Any


def without_modes(function: Callable[[Shape], Result]) -> Callable[[Shape], Result]:
    """Returns a function that computes with numbers in a mode for tensors that have none, too."""

    def run(shape: Shape) -> Result:
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes():
            return function(shape)

    return run


@lru_cache(maxsize=1024)
@without_modes
def rows_of(shape: Shape) -> int | None:
    """Returns how many rows a call needs so that each has the bits of a prompt: the group, or more. None if none do."""
    several = [number for number in (2, 3, 4, 6, 8, 12, 16, 24) if number > shape.group]
    blocks = -(-shape.group // ROWS) * ROWS
    every = list(trials(shape))
    for rows in (shape.group, *several, blocks):
        if all(_equals_a_prompt(rows, trial, alone) for trial in every for alone in _ways(shape)):
            return rows
    return None


@lru_cache(maxsize=1024)
@without_modes
def groups_a_prompt(shape: Shape) -> bool:
    """Returns whether the queries of a tile may be rows of one call for all heads of a group, on keys before the tile.

    The kernel then computes more rows at once, and so reads the keys less often.
    """
    import torch

    if shape.group == 1:
        return False
    for trial in trials(shape):
        for rows in range(ROWS, TILE + 1, ROWS):
            places = torch.arange(shape.group * rows, device="cpu")[None] % TILE
            if not all(_agrees_before(trial, places, alone) for alone in _ways(shape)):
                return False
    return True


@lru_cache(maxsize=1024)
@without_modes
def keeps_rows_apart(shape: Shape) -> bool:
    """Returns whether a row of a batch has the bits that it has alone. In half precision torch may pack the keys."""
    ways = [partial(kernels()[0], dropout_p=0.0, is_causal=is_causal, scale=1.0) for is_causal in (False, True)]
    for trial in trials(shape):
        for queries, keys in ((1, 300), (ROWS, 128), (TILE, 128), (TILE, 2 * KEYS_AT_ONCE)):
            rows = trial.q[:, :, :queries], trial.k[:, :, :keys], trial.v[:, :, :keys]
            if not all(same_in_a_batch(shape, forward, rows) for forward in ways):
                return False
    return True


def same_in_a_batch(shape: Shape, compute: Callable[..., tuple[Any, ...]], rows: tuple[Any, ...]) -> bool:
    """Returns whether results of the first of BATCH equal rows have the bits of every row of the batch.

    Args:
        compute: takes q, k and v.
        rows: q, k and v, ``[BATCH, heads, tokens, dim]``.
    """
    fewest = 1 if shape.num_kv_heads > 1 else 2  # a single head is computed twice, see ``cpu_same_bits.kernels_of``
    few, many = (compute(*(each[:batch] for each in rows)) for batch in (fewest, BATCH))
    return all(same(one[:1], other) for one, other in zip(few, many, strict=True))


def call(q: Any, k: Any, v: Any, scale: float | None, mask: Any, alone: bool) -> tuple[Any, Any]:
    """Returns (out, lse) of queries that see every key of ``[batch, heads, rows, dim]`` but those under the mask.

    Args:
        mask: additive, float32 (float64 for float64), ``[batch or 1, 1, 1, keys]``; None hides nothing.
        alone: whether there is one head alone, which several threads would share: then it is computed twice.
    """
    if alone:
        q, k, v = (each.expand(2, -1, -1, -1) for each in (q, k, v))
    out, lse = kernels()[0](q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    return (out[:1], lse[:1]) if alone else (out, lse)


def hides_behind(lengths: list[int], keys: int, dtype: str) -> Any:
    """Returns the additive mask ``[batch or 1, 1, 1, keys]`` of rows that see so many keys each."""
    import torch

    if min(lengths) == max(lengths):
        return _hides_behind(lengths[0], keys, dtype)
    places = torch.arange(keys, device="cpu") >= torch.tensor(lengths, device="cpu")[:, None]
    mask = torch.zeros(places.shape, dtype=getattr(torch, dtype), device="cpu")
    return mask.masked_fill_(places, -torch.inf)[:, None, None]


@lru_cache(maxsize=512)  # each layer of a model needs the same one, and an operation costs as much as a small call
def _hides_behind(length: int, keys: int, dtype: str) -> Any:
    import torch

    mask = torch.zeros((1, 1, 1, keys), dtype=getattr(torch, dtype), device="cpu")
    mask[..., length:] = -torch.inf
    return mask


@lru_cache(maxsize=16)
def zero(dtype: Any) -> Any:
    """Returns a tensor of one 0, which is never written."""
    import torch

    return torch.zeros((1, 1, 1, 1), dtype=dtype, device="cpu")


def _ways(shape: Shape) -> tuple[bool, ...]:
    """Returns the values of ``alone`` that occur."""
    return (False, True) if shape.num_kv_heads == 1 and shape.threads > 1 else (False,)


def trials(shape: Shape) -> Iterator[Trial]:
    """Yields two: scores are what rounding leaves of a sum, and then results are."""
    import torch

    random = torch.Generator("cpu").manual_seed(0)
    dtype = getattr(torch, shape.dtype)
    heads = min(HEADS, shape.num_kv_heads)

    def normal(tokens: int) -> Any:
        return torch.randn(1, tokens, heads, shape.head_dim, generator=random, dtype=torch.float64, device="cpu")

    def placed(numbers: Any, number: int) -> Any:
        """As a part of a tensor with all heads."""
        whole = torch.empty(BATCH, numbers.shape[1], number, shape.head_dim, dtype=dtype, device="cpu")
        whole[:, :, :heads] = numbers
        return whole[:, :, :heads].transpose(1, 2)

    def shuffled(length: int) -> Any:
        return torch.randperm(length, generator=random, device="cpu")

    size = (2.0**26) if shape.dtype == "float64" else 2.0**12  # squared, the last bit of the sum is worth about 1
    half, keys = shape.head_dim // 2, 2 * KEYS_AT_ONCE
    q, k = size * normal(TILE), size * normal(keys)
    channels = shuffled(shape.head_dim)  # in pairs that cancel; the last one of an odd number is 0
    one, other = channels[:half], channels[half : 2 * half]
    q[..., other], k[..., other] = q[..., one], -k[..., one]
    k[..., channels[2 * half :]] = 0.0
    yield Trial(placed(q, shape.num_heads), placed(k, shape.num_kv_heads), placed(normal(keys), shape.num_kv_heads))
    v = normal(keys).to(dtype)
    for start in range(0, keys, ROWS):
        tokens = start + shuffled(ROWS)
        v[:, tokens[: ROWS // 2]] = -v[:, tokens[ROWS // 2 :]]
    yield Trial(placed(0 * q, shape.num_heads), placed(k, shape.num_kv_heads), placed(v, shape.num_kv_heads))


def _equals_a_prompt(rows: int, trial: Trial, alone: bool) -> bool:
    """Returns whether calls of so many rows have the bits of a tile of queries, on its own keys and on earlier ones."""
    import torch

    steps = torch.arange(rows, device="cpu")
    whole = _of_a_prompt(trial.q[:, :, :TILE], trial.k[:, :, :TILE], trial.v[:, :, :TILE], True)
    for keys in range(ROWS, TILE + 1, ROWS):
        every = 7 if alone else 1  # alone each is a call, which takes longer
        place = torch.arange(0, keys, every, device="cpu")[:, None]
        mask = hides_behind((place[:, 0] + 1).tolist(), keys, str(whole[1].dtype).removeprefix("torch."))
        own = trial._replace(k=trial.k[:, :, :keys], v=trial.v[:, :, :keys])
        if not _agrees(own, (place - place % rows + steps) % TILE, place % rows, mask, whole, alone):
            return False
    places = (5 * torch.arange(8, device="cpu")[:, None] + steps) % ROWS
    return _agrees_before(trial, places, alone)


def _agrees_before(trial: Trial, places: Any, alone: bool) -> bool:
    """Returns whether calls of these queries ``[calls, rows]`` have the bits of blocks on all keys before a tile."""
    import torch

    everyone = torch.arange(places.shape[1], device="cpu").expand(places.shape)
    for keys in range(TILE, 2 * KEYS_AT_ONCE + 1, TILE):
        before = trial._replace(k=trial.k[:, :, :keys], v=trial.v[:, :, :keys])
        if not _agrees(before, places, everyone, None, _of_a_prompt(*before, False), alone):
            return False
    return True


def _of_a_prompt(q: Any, k: Any, v: Any, is_causal: bool) -> tuple[Any, Any]:
    out, lse = kernels()[0](q[:2], k[:2], v[:2], 0.0, is_causal, scale=1.0)
    return out[0], lse[0]


def _agrees(trial: Trial, places: Any, at: Any, mask: Any, expected: tuple[Any, Any], alone: bool) -> bool:
    """Returns whether calls have the expected bits. Each has the queries of ``places``; those ``at`` are compared."""
    import torch

    _, k, v = trial
    q = trial.q[0][:, places].transpose(0, 1)  # [calls, heads, rows, dim]
    if alone:
        results = [call(q[each : each + 1], k[:1], v[:1], 1.0, _row(mask, each), True) for each in range(len(q))]
        out, lse = (torch.cat(each) for each in zip(*results, strict=True))
    else:
        k, v = (each[:1].expand(len(q), -1, -1, -1) for each in (k, v))
        out, lse = call(q, k, v, 1.0, mask, False)
    number, query = torch.arange(len(q), device="cpu")[:, None], places.gather(1, at)
    return same(out[number, :, at], expected[0][:, query].permute(1, 2, 0, 3)) and same(
        lse[number, :, at], expected[1][:, query].permute(1, 2, 0)
    )


def _row(mask: Any, number: int) -> Any:
    return None if mask is None else mask[number : number + 1]


def same(first: Any, second: Any) -> bool:
    """Returns whether all numbers have equal bits, but for NaN."""
    return bool(((first == second) | (first.isnan() & second.isnan())).all())
