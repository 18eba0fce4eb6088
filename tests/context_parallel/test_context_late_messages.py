"""Tests that a rank waits for its messages: equal bits if they are late, also from a CUDA graph. For one rank alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

from attn_core import AttentionSpec, Target
from attn_core.context_parallel.call import build_call
from torch_frontend.context_parallel import backward, exchange, forward
from torch_frontend.context_parallel.mesh import SINGLE_RANK, RankAxis
from torch_frontend.context_parallel.prepare import RankPlan, build_rank_plan
from torch_frontend.dispatch.plan import device_name

CASES = {
    "ring": ("ring", "zigzag", None),
    "gathered": ("all_gather", "zigzag", None),
    "border": ("ring", "window:300", 300),
    "one rank sees nothing of the other": ("ring", "contiguous", None),
}


DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.cuda)]
"""Messages are never late on a CPU, so it tests the tests."""


def plan_of(name: str, rank: int, device: str) -> RankPlan:
    strategy, layout, window = CASES[name]
    sizes = {"batch": 1, "q_len": 2061, "kv_len": 2061, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
    spec = AttentionSpec(
        **sizes,
        **{"value_dim": 64, "dtype": "bfloat16", "causal": True, "deterministic": True, "needs_backward": True},
        **({} if window is None else {"window": (window - 1, 0)}),  # type: ignore[arg-type]
    )
    target = Target.here("torch", device_name(torch.device(device)))
    call = build_call(spec, None, strategy, layout, (2,), 1, target, None)
    return build_rank_plan(
        call, RankAxis("", 2, rank), SINGLE_RANK, torch.device(device, 0 if device == "cuda" else None)
    )


class Network:
    """What a collective does, for one rank alone: a message arrives at its sender, on a stream of its own.

    Until then the receiver's memory is NaN, so whoever reads a message without waiting for it has NaN in its results.

    Attributes:
        late: whether messages take about 1.5 ms.
        forgets_to_wait: a planted fault: the receiver reads at once.
    """

    def __init__(self) -> None:
        self.late = self.forgets_to_wait = False
        self._arrivals: dict[int, Any] = {}

    def send(self, axis: Any, numbers: torch.Tensor, *_: Any) -> torch.Tensor:
        received = torch.full_like(numbers, torch.nan)
        if received.is_cuda:
            self._arrivals[received.data_ptr()] = self._start(numbers, received)
        else:
            received.copy_(numbers)
        return received

    def receive(self, sent: torch.Tensor) -> torch.Tensor:
        if sent.is_cuda:
            arrived = self._arrivals.pop(sent.data_ptr())
            if not self.forgets_to_wait:
                torch.cuda.current_stream().wait_event(arrived)
        return sent

    def _start(self, numbers: torch.Tensor, received: torch.Tensor) -> Any:
        arrived, stream = torch.cuda.Event(), _network_stream()
        stream.wait_stream(torch.cuda.current_stream())
        numbers.record_stream(stream)  # the sender may free its message at once
        with torch.cuda.stream(stream):
            if self.late:
                torch.cuda._sleep(LATE)
            received.copy_(numbers)
            arrived.record(stream)
        return arrived


LATE = 3_000_000
"""Cycles of the GPU, about 1.5 ms: longer than any kernel of these calls."""


@cache
def _network_stream() -> Any:
    return torch.cuda.Stream()


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    network = Network()
    for name in ("hop", "deal_to_others"):
        monkeypatch.setattr(exchange, name, network.send)
    monkeypatch.setattr(exchange, "receive", network.receive)
    return network


def inputs_of(plan: RankPlan, device: str, seed: int) -> list[Any]:
    """q, k, v and the gradient of the output."""
    random, shard = torch.Generator(device).manual_seed(seed), plan.call.plan.q_layout.shard
    return [torch.randn(1, shard, heads, 64, generator=random, device=device).bfloat16() for heads in (8, 2, 2, 8)]


def results_of(plan: RankPlan, inputs: list[Any]) -> list[Any]:
    """out, dq, dk and dv."""
    *qkv, dout = inputs
    (out,), residuals = forward.forward(plan, *qkv, None, with_lse=False, keep=True)
    return [out, *backward.backward(plan, residuals, None, dout, None)[:3]]


def bits_differ(one: list[list[Any]], other: list[list[Any]]) -> bool:
    """Whether any result of any seed differs."""
    pairs = ((*each,) for results in zip(one, other, strict=True) for each in zip(*results, strict=True))
    return not all(torch.equal(*pair) for pair in pairs)


def of_three_seeds(plan: RankPlan, device: str) -> list[list[Any]]:
    return [results_of(plan, inputs_of(plan, device, seed)) for seed in range(3)]


@pytest.mark.sampled
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_late_messages_leave_the_bits(network: Network, name: str, rank: int, device: str) -> None:
    """Memory that was freed is used again while a message is under way."""
    plan = plan_of(name, rank, device)
    right = of_three_seeds(plan, device)
    assert all(torch.isfinite(tensor).all() for results in right for tensor in results)
    network.late = True
    assert not bits_differ(right, of_three_seeds(plan, device))


@pytest.mark.cuda
def test_a_missing_wait_is_found(network: Network) -> None:
    """The test above can fail: it finds a planted fault."""
    plan = plan_of("ring", 1, "cuda")
    right = of_three_seeds(plan, "cuda")
    network.late = network.forgets_to_wait = True
    assert bits_differ(right, of_three_seeds(plan, "cuda"))
    torch.cuda.synchronize()  # the late message still uses memory that is free


@pytest.mark.cuda
@pytest.mark.parametrize("name", CASES)
def test_a_graph_captures_messages(network: Network, name: str) -> None:
    plan = plan_of(name, 1, "cuda")
    inputs = inputs_of(plan, "cuda", 0)
    for _ in range(2):
        right = results_of(plan, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results_of(plan, inputs)
    for _ in range(3):
        graph.replay()
        assert [torch.equal(*pair) for pair in zip(right, found, strict=True)] == [True] * 4
