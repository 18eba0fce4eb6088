"""Estimates the cost of a plan in seconds and bytes, from its counts and the constants of a machine.

Pure arithmetic, apart from ``choose``, which compares plans.

A kernel with n (query, key) pairs per head takes ``2 n heads (head_dim + value_dim) / tflops``, plus the time to move
its operands and results through memory, plus its launch. Its backward takes 2.5 times the arithmetic
(``attn_core.call.arithmetic``). With S positions per rank, P parts, U ranks that share heads, H and Hk heads,
width D and e bytes per element, a rank receives in a forward

    ring        S Hk 2D e in every step but the last, while it computes; of a border only its share
    all_gather  (P - 1) S Hk 2D e, while it computes with its own keys
    ulysses     (U - 1) / U  S (2H + 2Hk) D e, partly before and partly after it computes

These are the counts of Ring Attention (arXiv:2310.01889), of the all-gather in Llama 3's training (arXiv:2407.21783,
3.3.2) and of DeepSpeed-Ulysses (arXiv:2309.14509). A backward exchanges the same amount again, and the gradients of k
and v: in the inputs' dtype if each comes from one tile, in the accumulators' dtype if they are sums. Gathered keys and
borders that the forward kept are not sent again, and the gradients travel while a rank computes with its own keys. If
blocks move on from rank to rank in a ring, all ranks wait for the busiest part in every step. Borders come straight
from the ranks that hold them, so no rank waits for another one's kernels. The model assumes one group of heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from attn_core.call.arithmetic import BACKWARD_WORK
from attn_core.call.spec import AttentionSpec
from attn_core.context_parallel.call import keeps_borders, keeps_gathered, kv_repeats
from attn_core.context_parallel.cost.directions import DirectionCost, Estimate
from attn_core.context_parallel.cost.machine import WIDE, Constants
from attn_core.context_parallel.plan import ROUNDED_ONCE, ContextPlan
from attn_core.context_parallel.tiles import Tile

ELEMENT = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""The bytes of an element of each dtype."""

Steps = Sequence[Sequence[float]]
"""For each step, the seconds that each part computes."""


class Sizes(NamedTuple):
    """The sizes of a rank's tensors.

    Attributes:
        q, out, kv: the number of elements; kv counts k and v, and the copies of kv heads.
        element, accumulator: the bytes of an element of the tensors, and of sums.
    """

    q: int
    out: int
    kv: int
    element: int
    accumulator: int

    @classmethod
    def from_plan(cls, spec: AttentionSpec, plan: ContextPlan) -> Sizes:
        """Returns the sizes of a call, which an exchange of heads for positions does not change."""
        queries, keys = spec.batch * plan.q_layout.shard, spec.batch * plan.k_layout.shard
        copies = kv_repeats(spec.num_heads, spec.num_kv_heads, plan.inner)
        element = ELEMENT[spec.dtype]
        return cls(
            queries * spec.num_heads * spec.head_dim,
            queries * spec.num_heads * spec.value_dim,
            keys * spec.num_kv_heads * copies * (spec.head_dim + spec.value_dim),
            element,
            max(4, element),
        )


def estimate(spec: AttentionSpec, plan: ContextPlan, constants: Constants) -> Estimate:
    """Estimates the cost of a plan on the rank that waits longest.

    Args:
        spec: the whole call, as on one device.

    Raises:
        ShapeError: for heads that the plan's inner ranks cannot share.
    """
    sizes = Sizes.from_plan(spec, plan)
    return Estimate(
        _forward(spec, plan, sizes, constants), _backward(spec, plan, sizes, constants), spec.needs_backward
    )


def _forward(spec: AttentionSpec, plan: ContextPlan, sizes: Sizes, constants: Constants) -> DirectionCost:
    steps = kernel_seconds(spec, plan, constants, backward=False)
    block = sizes.kv * sizes.element
    heads = _exchange_heads(plan, (sizes.q + sizes.kv) * sizes.element, constants)
    # The output travels back to its positions after the kernels.
    heads += _exchange_heads(plan, sizes.out * sizes.element, constants)
    if plan.strategy == "ring":
        sent = [block * share for share in _shares(plan)]
        # The keys of the next step travel during each step.
        busy, seconds = _ring_seconds(
            plan, steps, [_hop(plan, size, constants) for size in (*sent[1:], 0.0)], constants
        )
        # If no rank sees its own keys, the first step waits for a hop that nothing hides.
        seconds += sum(_hop(plan, size, constants) for size in sent[:1])
        buffers = _ring_buffers(plan, block)
    else:
        gathering = _exchange_parts(plan, _gather_link(plan), block, constants)
        busy, seconds = _gathered_seconds(steps, plan, gathering, block, constants)
        buffers = block * _received_blocks(plan) * plan.gathers
    buffers += sizes.out * sizes.accumulator * _sums_rows(plan)
    own = (sizes.q + sizes.out + sizes.kv) * sizes.element
    exchanged = own if plan.inner > 1 else 0
    launching = launch_seconds(plan, constants, backward=False)
    return DirectionCost(heads + seconds, heads + seconds - busy, own + exchanged + buffers, launching)


def _backward(spec: AttentionSpec, plan: ContextPlan, sizes: Sizes, constants: Constants) -> DirectionCost:
    steps = kernel_seconds(spec, plan, constants, backward=True)
    block = sizes.kv * sizes.element
    gradient = sizes.kv * (sizes.element if plan.sends_single_gradients else sizes.accumulator)
    # q, k, v, out and dout travel before the kernels; dq, dk and dv after them.
    heads = _exchange_heads(plan, (sizes.q + sizes.kv + 2 * sizes.out) * sizes.element, constants)
    heads += _exchange_heads(plan, (sizes.q + sizes.kv) * sizes.element, constants)
    if plan.strategy == "ring":
        # The gradients of a block travel one step behind it: from the first other rank that sees the block to the
        # last one, and then home; those of a border straight home. A rank's own step sends none.
        keys = [block * share for share in _shares(plan)]
        behind = [gradient * share for share in _shares(plan)]
        if keeps_borders(spec, plan):  # the gradients of borders come first, and travel during the own step, the last
            keys, behind = [0.0] * len(keys), [*behind[1:], 0.0]
            steps = [*steps[1:], steps[0]]
        sent = [later + before for later, before in zip((*keys[1:], 0.0), (0.0, *behind), strict=False)]
        busy, seconds = _ring_seconds(plan, steps, [_hop(plan, size, constants) for size in sent], constants)
        seconds += sum(_hop(plan, size, constants) for size in (*keys[:1], *behind[-1:]))
        buffers = _ring_buffers(plan, block + gradient)
    else:
        gathering = _exchange_parts(plan, _gather_link(plan), block, constants)
        sending = _exchange_parts(plan, "all_to_all", gradient, constants)
        # If keys are kept, the gradients travel during the own step; else gathering takes that time, and they follow.
        overlapped, after = (sending, 0.0) if keeps_gathered(spec, plan) else (gathering, sending)
        busy, seconds = _gathered_seconds(steps, plan, overlapped, block, constants)
        seconds += after * plan.gathers
        # Gradients are in memory twice: as sent and as received.
        buffers = (block * _received_blocks(plan) + 2 * gradient * (plan.outer - 1)) * plan.gathers
    buffers += sizes.q * sizes.accumulator * _sums_rows(plan)
    own = 2 * (sizes.q + sizes.out + sizes.kv) * sizes.element  # with dq, dout, dk and dv
    exchanged = own if plan.inner > 1 else 0
    launching = launch_seconds(plan, constants, backward=True)
    return DirectionCost(heads + seconds, heads + seconds - busy, own + exchanged + buffers, launching)


def _shares(plan: ContextPlan) -> list[float]:
    """Returns the share of a block that travels for each step of a ring; 0 for a rank's own step."""
    return [0.0 if step.own else plan.share_sent(step) for step in plan.steps]


def _ring_buffers(plan: ContextPlan, block: float) -> float:
    """Returns the bytes of the block in use and of the next one on its way: of the largest two."""
    return block * sum(sorted(1.0 if step.own else plan.share_sent(step) for step in plan.steps)[-2:])


def _ring_seconds(
    plan: ContextPlan, steps: Steps, exchanges: Sequence[float], constants: Constants
) -> tuple[float, float]:
    """Returns (seconds that the busiest part computes, seconds in all), if the next keys travel during each step."""
    if any(step.moves for step in plan.steps):  # a block moves on once the slowest part has it
        steps = [(max(step),) for step in steps]
    times = []
    for of_part in zip(*steps, strict=True):
        times.append((sum(of_part), sum(map(constants.overlapped_seconds, of_part, exchanges))))
    return max(times, key=lambda each: each[1], default=(0.0, 0.0))


def _gathered_seconds(
    steps: Steps, plan: ContextPlan, overlapped: float, block: float, constants: Constants
) -> tuple[float, float]:
    """Returns (seconds that the busiest part computes, seconds in all), if an exchange of ``overlapped`` seconds runs
    during the step on the own block."""
    overlapped = overlapped if plan.gathers else 0.0
    # Reordering reads and writes all gathered keys once.
    ordering = constants.memory_seconds(2 * plan.outer * block) * (plan.gathers and _copies(plan) > 1)
    times = []
    for of_part in zip(*steps, strict=True):
        own = of_part[0] if plan.steps[0].own else 0.0
        times.append((sum(of_part), constants.overlapped_seconds(own, overlapped) + ordering + sum(of_part) - own))
    return max(times, key=lambda each: each[1], default=(0.0, 0.0))


def _sums_rows(plan: ContextPlan) -> bool:
    """Returns whether some part adds up the results of a query in a wider dtype."""
    return any(plan.max_tiles_per_query(part) > ROUNDED_ONCE for part in range(plan.outer))


def _copies(plan: ContextPlan) -> int:
    """Returns how many copies of the gathered keys are in memory at once: two if they must be reordered."""
    # Contiguous blocks arrive in the order of positions. Of two parts, each receives one block, already in its order.
    return 1 if plan.q_layout.kind == "contiguous" or plan.outer == 2 else 2


def _received_blocks(plan: ContextPlan) -> int:
    """Returns how many blocks of gathered keys are in memory at once. Two parts swap theirs."""
    return 1 if plan.outer == 2 else plan.outer * _copies(plan)


def _gather_link(plan: ContextPlan) -> str:
    """Returns by which of LINKS keys are gathered. Two parts swap theirs by a hop, as in a ring."""
    return "ring" if plan.outer == 2 else "all_gather"


def _hop(plan: ContextPlan, size: float, constants: Constants) -> float:
    """Returns the seconds of one hop of a ring; 0 if nothing is sent."""
    if not size:
        return 0.0
    return constants.link_seconds("ring", size, size if plan.world > constants.ranks_per_host else 0.0)


def _exchange_parts(plan: ContextPlan, kind: str, size: float, constants: Constants) -> float:
    """Returns the seconds in which each part receives ``size`` bytes (keys or gradients) from every other part.

    The parts on one host divide the bytes from other hosts among themselves.
    """
    near = min(plan.outer, max(1, constants.ranks_per_host // plan.inner))  # parts on one host
    return constants.link_seconds(kind, (plan.outer - 1) * size, (plan.outer - near) * size / near)


def _exchange_heads(plan: ContextPlan, size: float, constants: Constants) -> float:
    """Returns the seconds in which a part's ranks exchange heads for positions and reorder them by a copy."""
    if plan.inner == 1:
        return 0.0
    near = min(plan.inner, constants.ranks_per_host)
    # Each of the ``inner`` members keeps its own share.
    share = size / plan.inner
    received = constants.link_seconds("all_to_all", (plan.inner - 1) * share, (plan.inner - near) * share)
    return received + constants.memory_seconds(2 * size)


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
