"""Estimates the kernels of a plan: seconds of each step on each part, from counts and the constants of a machine.

A kernel of n (query, key) pairs a head takes ``2 n heads (head_dim + value_dim) / tflops``, plus the time to move its
operands and results through memory, plus its launch; its backward takes 2.5 times the arithmetic
(``attn_core.call.arithmetic``).
"""

from __future__ import annotations

from collections.abc import Sequence

from attn_core.call.arithmetic import BACKWARD_WORK
from attn_core.call.spec import AttentionSpec
from attn_core.context_parallel.call import kv_repeats
from attn_core.context_parallel.cost.machine import Constants
from attn_core.context_parallel.plan import ROUNDED_ONCE, Plan
from attn_core.context_parallel.tiles import Tile

ELEMENT = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element."""

Steps = Sequence[Sequence[float]]
"""For each step, the seconds that each part computes."""


def computing(spec: AttentionSpec, plan: Plan, constants: Constants, *, backward: bool) -> Steps:
    """Seconds that each part computes in each step, sums of results included."""
    alone = not backward or plan.gradients_travel_alone
    widths = [_width_of_sums(spec, plan, part, backward=backward, alone=alone) for part in range(plan.outer)]
    return [
        [
            sum(
                _tile(spec, plan.inner, tile, constants, backward=backward, summed=0 if step.own and narrow else width)
                for tile in mine
            )
            for mine, (width, narrow) in zip(step.tiles, widths, strict=True)
        ]
        for step in plan.steps
    ]


def _width_of_sums(spec: AttentionSpec, plan: Plan, part: int, *, backward: bool, alone: bool) -> tuple[int, bool]:
    """(bytes per accumulator element, 0 if there is no accumulation; whether the first result is used unconverted,
    because at most one more is added). ``alone``: whether no sums of keys' gradients travel."""
    element, calls = ELEMENT[spec.dtype], plan.calls_of_a_query(part)
    several = calls > 1 or (backward and sum(len(step.tiles[part]) for step in plan.steps) > 1)
    narrow = calls <= ROUNDED_ONCE and alone
    return (0, True) if not several else (element, True) if narrow else (max(4, element), False)


def _tile(spec: AttentionSpec, inner: int, tile: Tile, constants: Constants, *, backward: bool, summed: int) -> float:
    """Seconds of one call of a kernel on one rank.

    If several calls add to one result, each also reads and writes sums of ``summed`` bytes an element.
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
        traffic, results = 2 * traffic * constants.backward_traffic, operands - results
    if summed:
        traffic += results * (2 * summed + element)
    return products / (rate * 1e12) + constants.moved(traffic) + constants.call_us * 1e-6
