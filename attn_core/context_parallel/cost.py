"""The cost of a plan on one rank: seconds of its device and of its host, and bytes that it receives and holds.

The seconds only order the ways in which one call can run. They are no prediction: kernels of other widths and dtypes,
and other hosts, have other rates. The bytes are counts. With S positions per rank, P parts, U ranks that share heads,
H and Hk heads, width D and e bytes per element, a rank receives in a forward

    ring        S Hk 2D e for every step but its own; of a border only its share
    all_gather  (P - 1) S Hk 2D e
    ulysses     (U - 1) / U  S (2H + 2Hk) D e

These are the counts of Ring Attention (arXiv:2310.01889), of the all-gather in Llama 3's training (arXiv:2407.21783,
3.3.2) and of DeepSpeed-Ulysses (arXiv:2309.14509). A backward receives the gradients of k and v as well, in the inputs'
dtype if each comes from one tile, else in the accumulators' dtype. Keys that the forward kept are not sent again.
"""

from __future__ import annotations

from typing import NamedTuple

from attn_core.call.arithmetic import BACKWARD_WORK
from attn_core.call.spec import AttentionSpec
from attn_core.context_parallel.call import keeps_borders, keeps_gathered, kv_repeats
from attn_core.context_parallel.plan import ROUNDED_ONCE, ContextPlan
from attn_core.context_parallel.tiles import Tile

# Measured on NVIDIA H200s of one host, in bfloat16. With 10 % more or less of one of them, the choice changes for at
# most one row of each measured run.
MEASURED_ON = "NVIDIA H200"
PRODUCTS = 700e12
"""Floating-point operations a second of kernels, for two bytes an element."""
MEMORY = 4.3e12
"""Bytes a second that the device's memory moves, reads and writes together."""
TRAFFIC = 1, 8
"""How often a kernel moves the bytes of its operands and results: in a backward also their gradients, several times."""
LINK = 300e9
"""Bytes a second that a rank receives over NVLink."""
RANKS_PER_HOST, NETWORK = 8, 48e9
"""Assumed, not measured: hosts of eight GPUs, and bytes a second from other hosts by a port of 400 Gb/s."""
PROLONGS = 0.5
"""The share of its time by which an exchange prolongs kernels that run beside it."""
LAUNCH = 185e-6
"""Seconds in which the host of torch launches a call, a tile, or a gather of keys."""
LAUNCHES = {"hop": 1.5, "heads": 3.0, "run": 0.25}
"""How many times as long it launches a hop of a ring, all exchanges of heads, and each run of positions in a shard
after the first one."""

GIB = 2.0**30
ELEMENT = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""The bytes of an element of each dtype."""


class DirectionCost(NamedTuple):
    """The cost of a forward or of a backward on the rank that takes longest.

    Attributes:
        device, host: the seconds of the device, and those in which the host launches the call.
        received: the bytes from other ranks.
        held: the peak number of bytes, with inputs and results.
    """

    device: float
    host: float
    received: float
    held: float

    @property
    def seconds(self) -> float:
        """The seconds in all: a short call takes as long as the host needs to launch it."""
        return max(self.device, self.host)

    @property
    def waits_for_host(self) -> bool:
        """Whether the host takes longer to launch the direction than the device to run it."""
        return self.host > self.device


class Cost(NamedTuple):
    """The cost of a call on one rank.

    Attributes:
        forward, backward: the cost of each direction.
        training: whether the call has a backward.
    """

    forward: DirectionCost
    backward: DirectionCost
    training: bool

    @property
    def directions(self) -> tuple[DirectionCost, ...]:
        """The directions that the call has."""
        return (self.forward, self.backward) if self.training else (self.forward,)

    @property
    def order(self) -> tuple[float, float]:
        """What is compared with other costs: the seconds, and if they are the host's, those of the device."""
        return sum(each.seconds for each in self.directions), sum(each.device for each in self.directions)

    @property
    def received(self) -> float:
        """The bytes that a rank receives."""
        return sum(each.received for each in self.directions)

    @property
    def held(self) -> float:
        """The peak number of bytes on a rank, with inputs and results."""
        return max(each.held for each in self.directions)

    def __str__(self) -> str:
        waits = ", waits for the host" if any(each.waits_for_host for each in self.directions) else ""
        return f"{self.received / GIB:.2f} GiB received and {self.held / GIB:.2f} GiB held by a rank{waits}"


def cost_of(spec: AttentionSpec, plan: ContextPlan, *, launched: bool = True) -> Cost:
    """Returns the cost of a plan.

    Args:
        spec: the whole call, as on one device.
        launched: whether a host launches every kernel and exchange, as torch does; XLA's programs launch themselves.

    Raises:
        ShapeError: for heads that the plan's inner ranks cannot share.
    """
    return Cost(
        _direction(spec, plan, launched=launched, backward=False),
        _direction(spec, plan, launched=launched, backward=True),
        spec.needs_backward,
    )


def _direction(spec: AttentionSpec, plan: ContextPlan, *, launched: bool, backward: bool) -> DirectionCost:
    """Returns the cost of one rank in one direction: seconds on the device and the host, bytes received and held."""
    element = ELEMENT[spec.dtype]
    accumulator = max(4, element)
    queries = spec.batch * plan.q_layout.shard * spec.num_heads
    kv_heads = spec.num_kv_heads * kv_repeats(spec.num_heads, spec.num_kv_heads, plan.inner)
    # Elements of k and v of a shard, with copies of kv heads.
    kv = spec.batch * plan.k_layout.shard * kv_heads * (spec.head_dim + spec.value_dim)
    # Bytes of q, out, k and v, and in a backward of their gradients.
    own = (queries * (spec.head_dim + spec.value_dim) + kv) * element * (2 if backward else 1)
    keys, gradients = kv * element, kv * (element if plan.sends_single_gradients else accumulator)

    shares = _shares(plan)
    kept = backward and (keeps_gathered(spec, plan) or keeps_borders(spec, plan))
    received = (0.0 if kept else keys * sum(shares)) + (gradients * sum(shares) if backward else 0.0)
    exposed = 0.0  # what no kernel hides: gathered keys' gradients come last, those of a ring follow their block
    if backward and not kept:
        exposed = gradients * sum(shares[-1:] if plan.strategy == "ring" else shares)
    held = own + _buffers(plan, keys, gradients if backward else 0.0)
    if any(plan.max_tiles_per_query(part) > ROUNDED_ONCE for part in range(plan.outer)):  # sums of a wider dtype
        held += queries * (spec.head_dim if backward else spec.value_dim) * accumulator
    kernels, hidden = _kernel_seconds(spec, plan, backward), _exchange(plan, received - exposed)
    device = max(kernels, hidden) + PROLONGS * min(kernels, hidden) + _exchange(plan, exposed)
    if plan.gathers and _is_reordered(plan):
        device += 2 * plan.outer * keys / MEMORY
    if plan.inner > 1:
        exchanged = own * (plan.inner - 1) / plan.inner
        far = (plan.inner - min(plan.inner, RANKS_PER_HOST)) / (plan.inner - 1)
        device += max(exchanged / LINK, exchanged * far / NETWORK) + 2 * own / MEMORY  # copied in order
        received += exchanged
        held += own  # as shards, and as heads of the part's positions
    return DirectionCost(device, _host_seconds(plan) if launched else 0.0, received, held)


def _shares(plan: ContextPlan) -> list[float]:
    """Returns the blocks of keys that a rank receives in each exchange: a share of one in a hop of a ring."""
    return [plan.outer - 1.0 if step.gathered else plan.share_sent(step) for step in plan.steps if not step.own]


def _exchange(plan: ContextPlan, size: float) -> float:
    """Returns the seconds in which a rank receives bytes from other parts."""
    far = 1.0 if plan.world > RANKS_PER_HOST else 0.0  # a hop is as slow as the one between hosts
    if plan.gathers:  # the parts on one host divide what comes from other hosts among themselves
        near = min(plan.outer, max(1, RANKS_PER_HOST // plan.inner))
        far = (plan.outer - near) / (near * (plan.outer - 1))
    return max(size / LINK, size * far / NETWORK)


def _kernel_seconds(spec: AttentionSpec, plan: ContextPlan, backward: bool) -> float:
    """Returns the seconds that the busiest part computes, sums of results included."""
    heads = spec.batch * spec.num_heads / plan.inner
    kv_heads = spec.batch * spec.num_kv_heads * kv_repeats(spec.num_heads, spec.num_kv_heads, plan.inner) / plan.inner
    width, element = spec.head_dim + spec.value_dim, ELEMENT[spec.dtype]
    work = 2.0 * heads * width * (BACKWARD_WORK if backward else 1) * element / 2  # wider types are as much slower

    def seconds(tile: Tile, *, merges: bool) -> float:
        operands = (tile.q_len * heads + tile.k_len * kv_heads) * width  # q and out, k and v
        traffic = operands * element * TRAFFIC[backward]
        if merges:  # the sum is read and written, the kernel's own result read
            traffic += tile.q_len * heads * spec.value_dim * 3 * element
        return tile.pairs * work / PRODUCTS + traffic / MEMORY

    steps = [[sum(seconds(tile, merges=not step.own) for tile in tiles) for tiles in step.tiles] for step in plan.steps]
    if any(step.moves for step in plan.steps):  # a block moves on once the slowest part has it
        return sum(map(max, steps))
    return max(map(sum, zip(*steps, strict=True)), default=0.0)


def _host_seconds(plan: ContextPlan) -> float:
    """Returns the seconds in which the busiest rank's host launches a forward, or a backward; 0 for a single rank."""
    if plan.world == 1:
        return 0.0
    tiles = max(
        (sum(map(len, of_part)) for of_part in zip(*(step.tiles for step in plan.steps), strict=True)), default=0
    )
    exchanges = sum(1 if step.gathered else LAUNCHES["hop"] for step in plan.steps if not step.own)
    heads = LAUNCHES["heads"] if plan.inner > 1 else 0
    runs = max(len(block.runs) for block in plan.q_blocks)
    return LAUNCH * (1 + tiles + exchanges + heads + LAUNCHES["run"] * max(0, runs - 1))


def _buffers(plan: ContextPlan, keys: float, gradients: float) -> float:
    """Returns the bytes of blocks of keys, and of their gradients, that a rank holds beside its own."""
    if plan.strategy == "ring":  # the block in use and the next one on its way: the largest two
        shares = sorted(1.0 if step.own else plan.share_sent(step) for step in plan.steps)[-2:]
        return (keys + gradients) * sum(shares)
    if not plan.gathers:
        return 0.0
    blocks = 1 if plan.outer == 2 else plan.outer * (2 if _is_reordered(plan) else 1)
    return keys * blocks + 2 * gradients * (plan.outer - 1)  # gradients as sent and as received


def _is_reordered(plan: ContextPlan) -> bool:
    """Returns whether gathered blocks are copied into the order of positions: not of two parts, which swap theirs."""
    return plan.outer > 2 and plan.q_layout.kind != "contiguous"
