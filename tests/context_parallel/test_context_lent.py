"""Tests gradients that kernels write where they are sent from.

The ranks are simulated one at a time: a message that is sent arrives at its sender, so that results mean nothing. But
they have the same bits whether a kernel writes into the message or its gradients are copied there.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

from attn_core import AttentionSpec, Target
from attn_core.context_parallel.call import build_call
from attn_core.context_parallel.on_torch.places import Places
from attn_core.context_parallel.on_torch.rows import Total
from torch_frontend.context_parallel import backward, forward
from torch_frontend.context_parallel.exchange import exchanges
from torch_frontend.context_parallel.exchange.exchanges import GradientSend, KVPair
from torch_frontend.context_parallel.mesh import SINGLE_RANK, RankAxis
from torch_frontend.context_parallel.prepare import RankPlan, build_rank_plan

CPU = torch.device("cpu")
KEPT = (16, 1)


class Case(NamedTuple):
    """A call of 64 tokens, and what the kernel of each rank's first sent tile may write.

    Attributes:
        lent: for each rank "kv" if dk and dv go into the message, "qkv" if also dq goes into its sum, "" for nothing.
        heads: query and kv heads; with one kv head gathered keys are kept, and their step comes first.
    """

    strategy: str
    layout: str
    ranks: int
    lent: tuple[str, ...]
    window: tuple[int, int] | None = None
    documents: tuple[int, ...] | None = None
    batch: int = 1
    dtype: str = "float32"
    heads: tuple[int, int] = (4, 2)


CASES = [
    # A ring lends a whole block only: the memory of more places than the kernel writes would be needed too early.
    Case("ring", "contiguous", 2, ("", "kv")),
    Case("ring", "zigzag", 2, ("kv", "")),
    Case("ring", "contiguous", 4, ("", "kv", "kv", "kv")),  # sums that arrive are never lent
    Case("ring", "zigzag", 4, ("",) * 4, dtype="bfloat16"),  # sums in float32
    Case("ring", "zigzag", 2, ("kv", "kv"), (6, 0)),
    Case("ring", "zigzag", 2, ("kv", "kv"), (6, 0), dtype="bfloat16"),
    Case("ring", "zigzag", 2, ("", ""), (6, 0), batch=2),
    Case("ring", "contiguous", 4, ("", "kv", "kv", "kv"), (6, 0)),
    Case("ring", "contiguous", 2, ("", "kv"), documents=(0, 20, 36, 50, 64)),
    Case("ring", "zigzag", 2, ("", ""), (6, 0), (0, 20, 40, 64)),  # several ranges
    Case("ring", "zigzag", 2, ("kv", ""), (6, 0), (0, 20, 64)),  # two tiles, of which the first is lent memory
    Case("all_gather", "zigzag", 2, ("kv", "kv"), (20, 0), (0, 40, 64)),
    Case("all_gather", "zigzag", 2, ("kv", "kv")),
    Case("all_gather", "zigzag", 2, ("", ""), batch=2),
    Case("all_gather", "zigzag", 2, ("kv", ""), documents=(0, 10, 20, 36, 50, 64)),
    Case("all_gather", "zigzag", 2, ("qkv", "kv"), heads=KEPT),  # rank 1 has all rows: their sum is taken over
    Case("all_gather", "contiguous", 2, ("", "kv"), heads=KEPT),
    Case("all_gather", "contiguous", 4, ("", "", "", "")),  # sums that are copied into the message
]


def plan_of(case: Case, rank: int) -> RankPlan:
    documents, heads, kv_heads = case.documents, *case.heads
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": 8, "value_dim": 5}
    packed = {"documents": len(documents) - 1, "max_len_q": 24, "max_len_k": 24} if documents else {}
    window = {"window": case.window} if case.window else {}
    spec = AttentionSpec(
        **{"batch": case.batch, "q_len": 64, "kv_len": 64, "dtype": case.dtype, "causal": True},
        **{"needs_backward": True, **sizes, **packed, **window},  # type: ignore[arg-type]
    )
    call = build_call(spec, documents, case.strategy, case.layout, (case.ranks,), 1, Target("torch", "cpu"), ("math",))
    return build_rank_plan(call, RankAxis("", case.ranks, rank), SINGLE_RANK, CPU)


def writing(function: Any, step: Any, tile: Any, events: list[Any]) -> Any:
    """A backend's backward that writes into the buffers that it gets, as kernels on a GPU do, and notes its call."""

    def run(spec: AttentionSpec, *arguments: Any) -> Any:
        into = arguments[5] if len(arguments) > 5 else (None, None, None)
        results = function(spec, *arguments[:5])  # inputs, out, lse, dout, dlse
        for buffer, result in zip(into, results[:3], strict=True):
            if buffer is not None:
                assert buffer.is_contiguous() and (buffer.shape, buffer.dtype) == (result.shape, result.dtype)
                buffer.copy_(result)
        events.append(Kernel(step, tile, tuple(into)))
        written = (result if buffer is None else buffer for buffer, result in zip(into, results[:3], strict=True))
        return results._replace(**dict(zip(("dq", "dk", "dv"), written, strict=True)))

    return run


class Kernel(NamedTuple):
    """A kernel's call, with its buffers of dq, dk and dv."""

    step: Any
    tile: Any
    into: tuple[Any, ...]


class Sent(NamedTuple):
    """A message, when it was sent, with its address."""

    numbers: Any
    address: int


class Run(NamedTuple):
    """The gradients of a rank, and what happened: a Kernel that ran, "made" for a message, or a Sent."""

    gradients: list[Any]
    events: list[Any]

    def of(self, kind: type) -> list[Any]:
        return [each for each in self.events if isinstance(each, kind)]

    @property
    def order(self) -> list[str]:
        return [each if isinstance(each, str) else type(each).__name__ for each in self.events]

    @property
    def lent(self) -> str:
        """Which of q, k and v the first kernel of the first sent step had buffers for."""
        into = next((each.into for each in self.of(Kernel) if not each.step.own), ())
        return "".join(name for name, each in zip("qkv", into, strict=False) if each is not None)


def differences(one: Run, other: Run) -> list[str]:
    """What has other bits. NaN differs from itself: then something was not written."""
    pairs = {
        "gradients": list(zip(one.gradients, other.gradients, strict=True)),
        "messages": [(mine.numbers, their.numbers) for mine, their in zip(one.of(Sent), other.of(Sent), strict=True)],
    }
    return [name for name, each in pairs.items() if not all(itertools.starmap(torch.equal, each))]


@pytest.fixture
def run_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``(plan, into=False, **fields) -> Run`` runs a rank alone; into: with kernels that write into buffers, whose
    TileRun has other fields. The memory of a message is NaN until it is written."""
    events: list[Any] = []
    make_pair, make_message = KVPair.empty, GradientSend._new_message

    def made(message: Any) -> Any:
        message.fill_(float("nan"))
        events.append("made")
        return message

    def start_pair(*arguments: Any) -> Any:
        pair = make_pair(*arguments)
        made(pair._buffer)
        return pair

    def send(axis: Any, message: Any, *_: Any) -> Any:
        events.append(Sent(message.clone(), message.data_ptr()))
        return message.clone()

    monkeypatch.setattr(KVPair, "empty", start_pair)
    monkeypatch.setattr(GradientSend, "_new_message", lambda sender: made(make_message(sender)))
    monkeypatch.setattr(exchanges, "hop", send)
    monkeypatch.setattr(exchanges, "deal_to_others", send)
    monkeypatch.setattr(
        exchanges, "gather_flat", lambda axis, tensors: [each.repeat(axis.size, 1, 1, 1).view(-1) for each in tensors]
    )

    def run(plan: RankPlan, *, into: bool = False, **fields: Any) -> Run:
        fields = {"writes": into, "writes_gradients": into, **fields}

        def noted(step: Any, tile: Any) -> Any:
            return tile._replace(backward=writing(tile.backward, step, tile, events), **fields)

        steps = tuple((step, tuple(noted(step, tile) for tile in tiles)) for step, tiles in plan.steps)
        spec = plan.call.spec
        random, dtype = torch.Generator().manual_seed(5), getattr(torch, spec.dtype)
        q, k, v, dout = (
            torch.randn(spec.batch, plan.call.plan.q_layout.shard, heads, dim, generator=random).to(dtype)
            for heads, dim in ((spec.num_heads, 8), (spec.num_kv_heads, 8), (spec.num_kv_heads, 5), (spec.num_heads, 5))
        )
        _, residuals = forward.forward(plan, q, k, v, None, with_lse=False, keep=True)
        events.clear()
        gradients = backward.backward(plan._replace(steps=steps), residuals, None, dout, None)
        return Run(list(gradients[:3]), list(events))

    return run


CALLS = [
    pytest.param(case, rank, id=f"{at} {case.strategy} {case.layout} rank {rank}")
    for at, case in enumerate(CASES)
    for rank in range(case.ranks)
]


@pytest.mark.parametrize(("case", "rank"), CALLS)
def test_a_kernel_writes_gradients_into_the_message_with_the_bits_of_a_copy(
    case: Case, rank: int, run_rank: Any
) -> None:
    plan = plan_of(case, rank)
    copied, written = run_rank(plan), run_rank(plan, into=True)
    assert (copied.lent, written.lent) == ("", case.lent[rank])
    assert differences(copied, written) == []
    for kernel in written.of(Kernel):
        if kernel.into[1] is not None and not kernel.step.own:
            assert [address for _, address in written.of(Sent) if is_in_message(kernel, address, plan)]
    # Messages leave as early as before.
    orders = ([each for each in run.order if each != "made"] for run in (copied, written))
    assert next(orders) == next(orders)


def is_in_message(kernel: Kernel, address: int, plan: RankPlan) -> bool:
    """Whether the buffers of dk and dv are a tile's places of a message, which is all of dk and then all of dv."""
    _, dk, dv = kernel.into
    (start, _), border = kernel.tile.key_sums.ranges[0], kernel.step.border
    size = sum(stop - start for start, stop in border) if border else plan.k_size
    of_k, of_v = (each.shape[-2] * each.shape[-1] * each.itemsize for each in (dk, dv))
    return (dk.data_ptr(), dv.data_ptr()) == (address + start * of_k, address + size * of_k + start * of_v)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_message_is_made_early_only_if_a_kernel_writes_into_it(rank: int, run_rank: Any) -> None:
    """A kernel that computes its gradients elsewhere would need memory for both."""
    plan = plan_of(Case("ring", "zigzag", 2, (), (6, 0)), rank)
    early, late = ["made", "Kernel", "Sent"], ["Kernel", "made", "Sent"]
    # The step of the border comes first, because its keys are kept.
    assert run_rank(plan).order[:3] == late
    assert run_rank(plan, into=True).order[:3] == early
    assert run_rank(plan, into=True, writes_gradients=False).order[:3] == late
    plan = plan_of(Case("ring", "zigzag", 2, ()), rank)
    assert run_rank(plan, into=True).order[-3:] == (late if rank else early)  # rank 1 sees half of the block


def test_dq_of_gathered_keys_goes_into_its_sum(run_rank: Any) -> None:
    run = run_rank(plan_of(Case("all_gather", "zigzag", 2, (), heads=KEPT), 0), into=True)
    (dq, *_), (start, _) = run.of(Kernel)[0].into, run.of(Kernel)[0].tile.rows.ranges[0]
    assert start > 0 and dq.data_ptr() == run.gradients[0][:, start:].data_ptr()


FAULTS = {
    "other places are not zeroed": (Places, "zero_others", lambda *_: None),
    "other places are not those of the tile": (
        Total,
        "lend",
        lambda total, places: total._allocate(zeros=True)[:, : places.count],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, run_rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("ring", "zigzag", 2, ("kv", "kv"), (6, 0))
    plan = plan_of(case, 0)
    copied = run_rank(plan)
    assert differences(copied, run_rank(plan, into=True)) == []
    monkeypatch.setattr(*FAULTS[fault])
    assert "messages" in differences(copied, run_rank(plan, into=True))
