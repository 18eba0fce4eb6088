"""The cost of a plan in seconds and bytes, from its counts and the constants of a machine. Pure arithmetic.

``attn_core.context_parallel.cost.kernels`` estimates the kernels. With S positions a rank, P parts, U ranks that share
heads, H and Hk heads, width D and e bytes an element, a rank receives in a forward

    ring        S Hk 2D e at every step but the last, while it computes
    all_gather  (P - 1) S Hk 2D e, while it computes with its own keys
    ulysses     (U - 1) / U  S (2H + 2Hk) D e, partly before and partly after it computes

which are the counts of Ring Attention (arXiv:2310.01889), of the all-gather in Llama 3's training (arXiv:2407.21783,
3.3.2) and of DeepSpeed-Ulysses (arXiv:2309.14509). A backward exchanges the same again, and the gradients of k and v:
in the inputs' dtype if they come from one tile each, in the accumulators' dtype if they are sums. Gathered keys that
are kept are not sent again, and the gradients travel while a rank computes with its own keys. In every step of a ring,
all ranks wait for the busiest part. The model assumes one group of heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from attn_core.call.spec import AttentionSpec
from attn_core.context_parallel.call import keeps_gathered, kv_repeats
from attn_core.context_parallel.cost.kernels import ELEMENT, Steps, computing
from attn_core.context_parallel.cost.machine import GIB, Constants
from attn_core.context_parallel.plan import ROUNDED_ONCE, Plan


class Half(NamedTuple):
    """The cost of one direction on a rank: seconds in all, seconds in which it computes nothing, and peak bytes."""

    seconds: float
    exposed: float
    peak: float


@dataclass(frozen=True)
class Estimate:
    """The cost of a call on a rank.

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
        """Seconds of the call, its backward included if it has one."""
        return self.both if self.training else self.forward.seconds

    @property
    def exposed(self) -> float:
        """Seconds of the call in which the rank computes nothing."""
        return self.forward.exposed + (self.backward.exposed if self.training else 0.0)

    @property
    def peak(self) -> float:
        """The peak bytes of the call on a rank, inputs and results included."""
        return max(self.forward.peak, self.backward.peak) if self.training else self.forward.peak

    def __str__(self) -> str:
        what = "forward + backward" if self.training else "forward"
        waiting = f"{self.exposed * 1e3:.2f} ms of it exchanging"
        return f"{self.seconds * 1e3:.2f} ms {what}, {waiting}, {self.peak / GIB:.2f} GiB a rank"


class Sizes(NamedTuple):
    """Elements of a rank's tensors, kv heads with their copies; and bytes of an element."""

    q: int
    out: int
    kv: int
    element: int
    accumulator: int

    @classmethod
    def of(cls, spec: AttentionSpec, plan: Plan) -> Sizes:
        """The sizes of a call. Exchanging heads for positions does not change a rank's number of elements."""
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
    """The cost of a plan on the rank that waits longest.

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
    steps = computing(spec, plan, constants, backward=False)
    block = sizes.kv * sizes.element
    heads = _heads_exchange(plan, (sizes.q + sizes.kv) * sizes.element, constants)
    heads += _heads_exchange(plan, sizes.out * sizes.element, constants)
    if plan.strategy == "ring":
        hop = _hop(plan, block, constants)
        busy, seconds = _in_turn(steps, [hop if at < len(steps) - 1 else 0.0 for at in range(len(steps))], constants)
        seconds += hop * any(not step.own for step in plan.steps[:1])
        buffers = block * min(2, len(steps))
    else:
        busy, seconds = _gathered(steps, plan, _spread(plan, "all_gather", block, constants), block, constants)
        buffers = block * plan.outer * _copies(plan) * plan.gathers
    buffers += sizes.out * sizes.accumulator * _sums_rows(plan)
    own = (sizes.q + sizes.out + sizes.kv) * sizes.element
    exchanged = own if plan.inner > 1 else 0
    return Half(heads + seconds, heads + seconds - busy, own + exchanged + buffers)


def _backward(spec: AttentionSpec, plan: Plan, sizes: Sizes, constants: Constants) -> Half:
    steps = computing(spec, plan, constants, backward=True)
    block = sizes.kv * sizes.element
    gradient = sizes.kv * (sizes.element if plan.gradients_travel_alone else sizes.accumulator)
    heads = _heads_exchange(plan, (sizes.q + sizes.kv + 2 * sizes.out) * sizes.element, constants)
    heads += _heads_exchange(plan, (sizes.q + sizes.kv) * sizes.element, constants)
    if plan.strategy == "ring":
        # The gradients of a block travel a step behind it, from the first other rank on, and home after the last step.
        # Gradients of the own step are not sent.
        away = [not step.own for step in plan.steps]
        sent = [block * (at < len(steps) - 1) + gradient * any(away[:at]) for at in range(len(steps))]
        busy, seconds = _in_turn(steps, [_hop(plan, size, constants) for size in sent], constants)
        seconds += _hop(plan, block, constants) * any(away[:1]) + _hop(plan, gradient, constants) * any(away)
        buffers = (block + gradient) * min(2, len(steps))
    else:
        travels = [_spread(plan, "all_gather", block, constants), _spread(plan, "all_to_all", gradient, constants)]
        beside, after = (travels[1], 0.0) if keeps_gathered(spec, plan) else travels
        busy, seconds = _gathered(steps, plan, beside, block, constants)
        seconds += after * plan.gathers
        buffers = (block * plan.outer * _copies(plan) + 2 * gradient * (plan.outer - 1)) * plan.gathers
    buffers += sizes.q * sizes.accumulator * _sums_rows(plan)
    own = 2 * (sizes.q + sizes.out + sizes.kv) * sizes.element  # with dq, dout, dk and dv
    exchanged = own if plan.inner > 1 else 0
    return Half(heads + seconds, heads + seconds - busy, own + exchanged + buffers)


def _in_turn(steps: Steps, exchanges: Sequence[float], constants: Constants) -> tuple[float, float]:
    """(seconds that the busiest parts compute, seconds in all), if the next block travels during each step."""
    busiest = [max(step) for step in steps]
    together = map(constants.together, busiest, exchanges)
    return sum(busiest), sum(together)


def _gathered(steps: Steps, plan: Plan, beside: float, block: float, constants: Constants) -> tuple[float, float]:
    """(seconds that the busiest part computes, seconds in all); ``beside`` overlaps the step on the own block."""
    beside = beside if plan.gathers else 0.0
    ordering = constants.moved(2 * plan.outer * block) * (plan.gathers and _copies(plan) > 1)
    times = []
    for of_part in zip(*steps, strict=True):
        own = of_part[0] if plan.steps[0].own else 0.0
        times.append((sum(of_part), constants.together(own, beside) + ordering + sum(of_part) - own))
    return max(times, key=lambda each: each[1], default=(0.0, 0.0))


def _sums_rows(plan: Plan) -> bool:
    """Whether a part adds up the results of a query in a wider dtype."""
    return any(plan.calls_of_a_query(part) > ROUNDED_ONCE for part in range(plan.outer))


def _copies(plan: Plan) -> int:
    """Copies of the gathered keys in memory at once: as received, and reordered if the order differs."""
    return 1 if plan.q_layout.kind == "contiguous" or plan.outer == 2 else 2


def _hop(plan: Plan, size: float, constants: Constants) -> float:
    return constants.received("ring", size, size if plan.world > constants.ranks_per_host else 0.0)


def _spread(plan: Plan, kind: str, size: float, constants: Constants) -> float:
    """Seconds in which each part receives ``size`` bytes from every other part: keys, or gradients.

    The parts on one host divide the bytes from other hosts among them.
    """
    near = min(plan.outer, max(1, constants.ranks_per_host // plan.inner))  # parts on one host
    return constants.received(kind, (plan.outer - 1) * size, (plan.outer - near) * size / near)


def _heads_exchange(plan: Plan, size: float, constants: Constants) -> float:
    """Seconds of exchanging heads for positions among a part's ranks, and of the copy that reorders them."""
    if plan.inner == 1:
        return 0.0
    near = min(plan.inner, constants.ranks_per_host)
    share = size / plan.inner
    return constants.received("all_to_all", (plan.inner - 1) * share, (plan.inner - near) * share) + constants.moved(
        2 * size
    )
