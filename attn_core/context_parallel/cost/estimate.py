"""What a plan costs: seconds and bytes, from its counts and the constants of a machine. Pure arithmetic.

``attn_core.context_parallel.cost.kernels`` has what kernels take. With S positions a rank, P parts, U ranks that share
heads, H and Hk heads, width D and e bytes an element, a rank receives in a forward

    ring        S Hk 2D e at every step but the last, while it computes
    all_gather  (P - 1) S Hk 2D e, while it computes with its own keys
    ulysses     (U - 1) / U  S (2H + 2Hk) D e, partly before and partly after it computes

which are the counts of Ring Attention (arXiv:2310.01889), of the all-gather in Llama 3's training (arXiv:2407.21783,
3.3.2) and of DeepSpeed-Ulysses (arXiv:2309.14509). A backward exchanges the same again, and the gradients of k and v:
as a tile made them, or in accumulators' precision where they are sums of several tiles'. What was gathered and kept is
not sent again, and the gradients travel while a rank computes with its own keys. In every step of a ring all
wait for the busiest part. One group of heads is taken.
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
        # The gradients of a block follow it one step behind, from the first rank that is not its own on, and come home
        # after the last; those of the own step stay.
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
    """(seconds that the busiest part of each step computes, seconds in all): the next block is then on its way."""
    busiest = [max(step) for step in steps]
    together = map(constants.together, busiest, exchanges)
    return sum(busiest), sum(together)


def _gathered(steps: Steps, plan: Plan, beside: float, block: float, constants: Constants) -> tuple[float, float]:
    """(seconds that the busiest part computes, seconds in all): what goes ``beside`` does while a part has its own."""
    beside = beside if plan.gathers else 0.0
    ordering = constants.moved(2 * plan.outer * block) * (plan.gathers and _copies(plan) > 1)
    found = []
    for of_part in zip(*steps, strict=True):
        own = of_part[0] if plan.steps[0].own else 0.0
        found.append((sum(of_part), constants.together(own, beside) + ordering + sum(of_part) - own))
    return max(found, key=lambda each: each[1], default=(0.0, 0.0))


def _sums_rows(plan: Plan) -> bool:
    """Whether some part adds up more results of a query than are rounded once."""
    return any(plan.calls_of_a_query(part) > ROUNDED_ONCE for part in range(plan.outer))


def _copies(plan: Plan) -> int:
    """How often gathered keys are in memory at once: as they came and, where that is another, in order."""
    return 1 if plan.q_layout.kind == "contiguous" or plan.outer == 2 else 2


def _hop(plan: Plan, size: float, constants: Constants) -> float:
    return constants.received("ring", size, size if plan.world > constants.ranks_per_host else 0.0)


def _spread(plan: Plan, kind: str, size: float, constants: Constants) -> float:
    """Everybody gets ``size`` bytes of every other part: its keys, or the gradients that it has for them.

    The ranks of a host share what comes from other hosts.
    """
    near = min(plan.outer, max(1, constants.ranks_per_host // plan.inner))  # parts on one host
    return constants.received(kind, (plan.outer - 1) * size, (plan.outer - near) * size / near)


def _heads_exchange(plan: Plan, size: float, constants: Constants) -> float:
    """Heads for positions among the ranks of a part, and the copy that puts them in order."""
    if plan.inner == 1:
        return 0.0
    near = min(plan.inner, constants.ranks_per_host)
    share = size / plan.inner
    return constants.received("all_to_all", (plan.inner - 1) * share, (plan.inner - near) * share) + constants.moved(
        2 * size
    )
