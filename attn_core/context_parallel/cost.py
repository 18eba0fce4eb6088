"""What a plan costs: seconds and bytes, from its counts and the constants of a machine. Pure arithmetic.

A kernel of n (query, key) pairs a head takes ``2 n heads (head_dim + value_dim) / tflops``, and besides the time that
its operands and results take through memory, and its launch; its backward takes 2.5 times the arithmetic
(``attn_core.work``). With S positions a rank, P parts, U ranks that share heads, H and Hk heads, width D and e bytes an
element, a rank receives in a forward

    ring        S Hk 2D e at every step but the last, while it computes
    all_gather  (P - 1) S Hk 2D e, before it computes
    ulysses     (U - 1) / U  S (2H + 2Hk) D e, partly before and partly after it computes

which are the counts of Ring Attention (arXiv:2310.01889), of the all-gather in Llama 3's training (arXiv:2407.21783,
3.3.2) and of DeepSpeed-Ulysses (arXiv:2309.14509). A backward exchanges the same again, and the gradients of k and v in
accumulators' precision. In every step all wait for the busiest part. One group of heads is taken; nothing but a ring's
hops goes on while something is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from attn_core.context_parallel.call import kv_repeats
from attn_core.context_parallel.machine import GIB, Constants
from attn_core.context_parallel.plan import Plan
from attn_core.context_parallel.tiles import Tile
from attn_core.spec import AttentionSpec
from attn_core.work import BACKWARD_WORK

ELEMENT = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element."""


class Half(NamedTuple):
    """What one direction costs a rank: seconds, those of them in which it computes nothing, and bytes at its peak."""

    seconds: float
    exposed: float
    peak: float


@dataclass(frozen=True)
class Estimate:
    """What a call costs a rank.

    Attributes:
        forward, backward: the two directions.
        training: whether the call has a backward.
    """

    forward: Half
    backward: Half
    training: bool

    @property
    def both(self) -> float:
        """Seconds of a forward and a backward."""
        return self.forward.seconds + self.backward.seconds

    @property
    def seconds(self) -> float:
        """Seconds of the call: with its backward where it has one."""
        return self.both if self.training else self.forward.seconds

    @property
    def exposed(self) -> float:
        """Seconds of the call in which nothing is computed."""
        return self.forward.exposed + (self.backward.exposed if self.training else 0.0)

    @property
    def peak(self) -> float:
        """The most bytes that the call needs on a rank at once, its inputs and results included."""
        return max(self.forward.peak, self.backward.peak) if self.training else self.forward.peak

    def __str__(self) -> str:
        what = "forward + backward" if self.training else "forward"
        waiting = f"{self.exposed * 1e3:.2f} ms of it exchanging"
        return f"{self.seconds * 1e3:.2f} ms {what}, {waiting}, {self.peak / GIB:.2f} GiB a rank"


class Sizes(NamedTuple):
    """Elements of a rank's tensors, its kv heads copied as often as they must be; and bytes of an element."""

    q: int
    out: int
    kv: int
    element: int
    accumulator: int

    @classmethod
    def of(cls, spec: AttentionSpec, plan: Plan) -> Sizes:
        """Those of a call; a rank has as many elements after heads were exchanged for positions as before."""
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


def estimate(spec: AttentionSpec, plan: Plan, constants: Constants) -> Estimate:
    """What a plan of a call costs the rank that waits longest.

    Args:
        spec: the whole call, as on one device.

    Raises:
        ShapeError: for heads that the plan's inner ranks cannot share.
    """
    sizes = Sizes.of(spec, plan)
    return Estimate(
        _forward(spec, plan, sizes, constants), _backward(spec, plan, sizes, constants), spec.needs_backward
    )


def _forward(spec: AttentionSpec, plan: Plan, sizes: Sizes, constants: Constants) -> Half:
    steps = _computing(spec, plan, constants, backward=False)
    block = sizes.kv * sizes.element
    heads = _heads_exchange(plan, (sizes.q + sizes.kv) * sizes.element, constants)
    heads += _heads_exchange(plan, sizes.out * sizes.element, constants)
    if plan.strategy == "ring":
        hop = _hop(plan, block, constants)
        seconds = _in_turn(steps, [hop if at < len(steps) - 1 else 0.0 for at in range(len(steps))], constants)
        buffers = block * min(2, len(steps)) + sizes.out * sizes.accumulator * (len(steps) > 1)
    else:
        seconds = _gather(plan, block, constants) + sum(steps)
        buffers = block * plan.outer * _copies(plan) * (plan.outer > 1)
    own = (sizes.q + sizes.out + sizes.kv) * sizes.element
    exchanged = own if plan.inner > 1 else 0
    return Half(heads + seconds, heads + seconds - sum(steps), own + exchanged + buffers)


def _backward(spec: AttentionSpec, plan: Plan, sizes: Sizes, constants: Constants) -> Half:
    steps = _computing(spec, plan, constants, backward=True)
    block, gradient = sizes.kv * sizes.element, sizes.kv * sizes.accumulator
    heads = _heads_exchange(plan, (sizes.q + sizes.kv + 2 * sizes.out) * sizes.element, constants)
    heads += _heads_exchange(plan, sizes.q * sizes.element + gradient, constants)
    if plan.strategy == "ring":
        # The gradients of a block follow it one step behind, and come home after the last.
        sent = [(block if at < len(steps) - 1 else 0) + (gradient if at else 0) for at in range(len(steps))]
        home = _hop(plan, gradient, constants) if len(steps) > 1 else 0.0
        seconds = _in_turn(steps, [_hop(plan, size, constants) for size in sent], constants) + home
        buffers = (block + gradient) * min(2, len(steps))
    else:
        seconds = _gather(plan, block, constants) + sum(steps) + _gather(plan, gradient, constants)
        buffers = (block * _copies(plan) + gradient) * plan.outer * (plan.outer > 1)
    buffers += sizes.q * sizes.accumulator
    own = 2 * (sizes.q + sizes.out + sizes.kv) * sizes.element  # with dq, dout, dk and dv
    exchanged = own if plan.inner > 1 else 0
    return Half(heads + seconds, heads + seconds - sum(steps), own + exchanged + buffers)


def _in_turn(steps: Sequence[float], exchanges: Sequence[float], constants: Constants) -> float:
    """Seconds of steps that compute while the next one's block is on its way."""
    return sum(constants.together(step, exchange) for step, exchange in zip(steps, exchanges, strict=True))


def _computing(spec: AttentionSpec, plan: Plan, constants: Constants, *, backward: bool) -> list[float]:
    """Seconds that the busiest part computes in each step, and adds up what it computed."""
    added = _adds_up(plan, backward=backward)
    return [
        max(
            sum(_tile(spec, plan.inner, tile, constants, backward=backward, added=adds) for tile in mine)
            for mine, adds in zip(step.tiles, added, strict=True)
        )
        for step in plan.steps
    ]


def _adds_up(plan: Plan, *, backward: bool) -> list[bool]:
    """For each part whether several of its calls add to one result: rows of queries forward, any gradient backward."""
    mine = [[tile for step in plan.steps for tile in step.tiles[part]] for part in range(plan.outer)]
    if backward:
        return [len(tiles) > 1 for tiles in mine]
    rows = [sum(tile.q_len for tile in tiles) for tiles in mine]
    return [count > block.count for count, block in zip(rows, plan.q_blocks, strict=True)]


def _tile(spec: AttentionSpec, inner: int, tile: Tile, constants: Constants, *, backward: bool, added: bool) -> float:
    """Seconds of one call of a kernel on one rank.

    Where several calls add to one result, they read and write accumulators besides what the kernel writes.
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
    if added:
        traffic += results * (2 * max(4, element) + element)
    return products / (rate * 1e12) + constants.moved(traffic) + constants.call_us * 1e-6


def _copies(plan: Plan) -> int:
    """How often gathered keys are in memory at once: as they came and, where that is another, in order."""
    return 1 if plan.q_layout.kind == "contiguous" else 2


def _hop(plan: Plan, size: float, constants: Constants) -> float:
    return constants.received("ring", size, size if plan.world > constants.ranks_per_host else 0.0)


def _gather(plan: Plan, size: float, constants: Constants) -> float:
    """Everybody gets every part's ``size`` bytes and puts them in order; or the way back, where they are added up.

    The ranks of a host share what comes from other hosts.
    """
    near = min(plan.outer, max(1, constants.ranks_per_host // plan.inner))  # parts on one host
    seconds = constants.received("all_gather", (plan.outer - 1) * size, (plan.outer - near) * size / near)
    ordered = plan.outer > 1 and _copies(plan) > 1
    return seconds + (constants.moved(2 * plan.outer * size) if ordered else 0.0)


def _heads_exchange(plan: Plan, size: float, constants: Constants) -> float:
    """Heads for positions among the ranks of a part, and the copy that puts them in order."""
    if plan.inner == 1:
        return 0.0
    near = min(plan.inner, constants.ranks_per_host)
    share = size / plan.inner
    return constants.received("all_to_all", (plan.inner - 1) * share, (plan.inner - near) * share) + constants.moved(
        2 * size
    )
