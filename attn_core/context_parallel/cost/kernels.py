"""Estimates the kernels of a plan: the seconds of each step on each part, from counts and the constants of a machine.

A kernel with n (query, key) pairs per head takes ``2 n heads (head_dim + value_dim) / tflops``, plus the time to move
its operands and results through memory, plus its launch. Its backward takes 2.5 times the arithmetic
(``attn_core.call.arithmetic``).
"""

from __future__ import annotations

from collections.abc import Sequence

from attn_core.call.arithmetic import BACKWARD_WORK
from attn_core.call.spec import AttentionSpec
from attn_core.context_parallel.call import kv_repeats
from attn_core.context_parallel.cost.machine import WIDE, Constants
from attn_core.context_parallel.plan import ROUNDED_ONCE, ContextPlan
from attn_core.context_parallel.tiles import Tile

ELEMENT = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""The bytes of an element of each dtype."""

Steps = Sequence[Sequence[float]]
"""For each step, the seconds that each part computes."""


def kernel_seconds(spec: AttentionSpec, plan: ContextPlan, constants: Constants, *, backward: bool) -> Steps:
    """Returns the seconds that each part computes in each step, sums of results included."""
    single = not backward or plan.sends_single_gradients
    sums = [_accumulator_bytes(spec, plan, part, backward=backward, single=single) for part in range(plan.outer)]
    return [
        [
            sum(
                _tile_seconds(spec, plan.inner, tile, constants, backward, summed=0 if step.own and narrow else width)
                for tile in tiles
            )
            for tiles, (width, narrow) in zip(step.tiles, sums, strict=True)
        ]
        for step in plan.steps
    ]


def launch_seconds(plan: ContextPlan, constants: Constants, *, backward: bool) -> float:
    """Returns the seconds in which the busiest rank's host launches a plan; 0 for one rank, which needs no plan."""
    return 0.0 if plan.world == 1 else constants.host_seconds(*launches(plan), backward=backward)


def launches(plan: ContextPlan) -> tuple[int, int]:
    """Returns what the busiest rank's host launches in a forward: (tiles, exchanges). Exchanges count in gathers."""
    tiles = [sum(map(len, of_part)) for of_part in zip(*(step.tiles for step in plan.steps), strict=True)]
    others = sum(not step.own for step in plan.steps)
    # A hop packs its keys first, also if two parts swap theirs. An exchange of heads sends q, k and v, and then the
    # results.
    packs = not plan.gathers or plan.outer == 2
    return max(tiles, default=0), (2 if packs else 1) * others + 5 * (plan.inner > 1)


def _accumulator_bytes(
    spec: AttentionSpec, plan: ContextPlan, part: int, *, backward: bool, single: bool
) -> tuple[int, bool]:
    """Returns (bytes per accumulator element, 0 if there is no accumulation; whether the first result is used
    unconverted, because at most one more is added). ``single``: no sums of keys' gradients are sent."""
    element, calls = ELEMENT[spec.dtype], plan.max_tiles_per_query(part)
    # In a backward, two tiles may also share keys, whose gradients are then sums.
    several = calls > 1 or (backward and sum(len(step.tiles[part]) for step in plan.steps) > 1)
    narrow = calls <= ROUNDED_ONCE and single
    # Wide sums are float32 at least, and float64 for float64 inputs.
    return (0, True) if not several else (element, True) if narrow else (max(4, element), False)


def _tile_seconds(
    spec: AttentionSpec, inner: int, tile: Tile, constants: Constants, backward: bool, *, summed: int
) -> float:
    """Returns the seconds of one kernel call on one rank.

    If several calls add to one result, each also reads and writes sums of ``summed`` bytes per element.
    """
    heads = spec.num_heads / inner
    kv_heads = spec.num_kv_heads * kv_repeats(spec.num_heads, spec.num_kv_heads, inner) / inner
    width, element = spec.head_dim + spec.value_dim, ELEMENT[spec.dtype]
    queries = spec.batch * heads * tile.q_len  # rows of all heads
    operands = (queries + spec.batch * kv_heads * tile.k_len) * width  # q and out, k and v
    products = 2.0 * spec.batch * heads * tile.pairs * width * (element / 2)  # wider types are as much slower
    results = queries * spec.value_dim
    rate, traffic = constants.forward_tflops, operands * element
    if backward:
        products, rate = products * BACKWARD_WORK, constants.backward_tflops
        # Each operand comes with its gradient. The operands less out have as many elements as dq, dk and dv.
        traffic, results = 2 * traffic * constants.backward_traffic, operands - results
    if summed:
        # The sum is read and written, the kernel's own result read.
        traffic += results * (2 * summed + element)
    for slower, applies in ((constants.softcap, spec.softcap is not None), (constants.wide, width > 2 * WIDE)):
        products *= slower[backward] if applies else 1.0
    return products / (rate * 1e12) + constants.memory_seconds(traffic) + constants.call_us * 1e-6
