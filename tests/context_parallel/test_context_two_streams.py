"""Tests two steps on two streams: which one waits for the other, and, on a GPU, equal bits if one of them is late."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

from attn_core import AttentionSpec, Target
from attn_core.context_parallel.call import build_call
from attn_core.context_parallel.on_torch import two_streams
from attn_core.context_parallel.on_torch.two_streams import TwoStreams
from torch_frontend.context_parallel import backward, forward
from torch_frontend.context_parallel.exchange import exchanges
from torch_frontend.context_parallel.exchange.exchanges import Outgoing
from torch_frontend.context_parallel.mesh import SINGLE_RANK, RankAxis
from torch_frontend.context_parallel.prepare import RankPlan, build_rank_plan
from torch_frontend.dispatch.plan import device_name

GPU = torch.device("cuda", 0)


class Stream:
    """A stream that logs what waits in it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.cuda_stream = name, log, 7

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for {event.of}")


class Event:
    of = ""

    def record(self, stream: Stream) -> None:
        self.of = f"{stream.name} after {len(stream.log)}"


class Played:
    """torch's streams, played: ``log`` has what happened, with the stream that was current."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.first, self.second = Stream("first", self.log), Stream("second", self.log)
        self.now = self.first
        patch.setattr(torch.cuda, "current_stream", lambda device: self.now)
        patch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "now", stream))
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(two_streams, "_second_stream", lambda device, current: self.second)
        patch.setattr(two_streams, "with_current", lambda device: nullcontext())

    def note(self, what: str) -> None:
        self.log.append(f"{what} on {self.now.name}")

    def blocks(self, count: int, tiles: Any = ("tile",)) -> Iterator[tuple[Any, ...]]:
        for number in range(count):
            self.note(f"keys {number}")
            yield number, tiles, (f"k{number}", f"v{number}")

    def launch(self, number: int) -> tuple[str, ...]:
        self.note(f"kernel {number}")
        return (f"out{number}",)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(monkeypatch)


def test_the_second_step_waits_for_what_was_before_the_first_one(played: Played) -> None:
    streams = TwoStreams(GPU, 2)
    for number, _, _ in streams.blocks(played.blocks(2)):
        streams.results(played.launch, number)
        played.note(f"sum {number}")
    assert played.log == [
        *("keys 0 on first", "kernel 0 on first", "sum 0 on first"),
        *("second waits for first after 0", "keys 1 on second", "kernel 1 on second"),
        *("first waits for second after 6", "sum 1 on first", "first waits for second after 8"),
    ]


def test_a_second_tile_waits_until_the_results_of_the_first_one_were_used(played: Played) -> None:
    """Its memory may be that of a result, which was freed when its use was queued."""
    streams = TwoStreams(GPU, 2)
    for number, _, _ in streams.blocks(played.blocks(2)):
        for tile in range(2):
            streams.results(played.launch, 10 * number + tile)
            played.note(f"sum {10 * number + tile}")
    between = played.log[played.log.index("kernel 10 on second") + 1 : played.log.index("kernel 11 on second")]
    assert between == ["first waits for second after 8", "sum 10 on first", "second waits for first after 10"]


@pytest.mark.parametrize(("device", "count"), [("cuda", 1), ("cuda", 3), ("cpu", 2)])
def test_other_passes_have_one_stream(played: Played, device: str, count: int) -> None:
    streams = TwoStreams(torch.device(device, 0), count)
    for number, _, _ in streams.blocks(played.blocks(count)):
        streams.results(played.launch, number)
        assert not streams.on_second
    assert played.log == [f"{what} {number} on first" for number in range(count) for what in ("keys", "kernel")]


@pytest.mark.parametrize("captures", [False, True])
def test_a_pass_that_waits_for_the_host_has_two_streams_only_in_a_graph(
    played: Played, monkeypatch: pytest.MonkeyPatch, captures: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    for _ in TwoStreams(GPU, 2, waits_for_host=True).blocks(played.blocks(2)):
        pass
    assert ("keys 1 on second" in played.log) == captures


def test_after_join_the_rest_runs_on_the_current_stream(played: Played) -> None:
    streams = TwoStreams(GPU, 2)
    for number, _, _ in streams.blocks(played.blocks(2)):
        streams.join()
        streams.results(played.launch, number)
    assert played.log[-2:] == ["first waits for second after 4", "kernel 1 on first"]


def test_a_second_step_without_tiles_is_joined_before_it_is_yielded(played: Played) -> None:
    """What was received is free for the current stream then, which must not write there before it has arrived."""
    streams = TwoStreams(GPU, 2)
    for number, _, _ in streams.blocks(played.blocks(2, tiles=())):
        played.note(f"sum {number}")
    assert played.log[-2:] == ["first waits for second after 4", "sum 1 on first"]


def test_keys_of_the_second_step_are_freed_when_they_were_used(played: Played) -> None:
    class Keys: ...

    def blocks() -> Iterator[tuple[Any, ...]]:
        yield 0, (), ()
        yield 1, ("tile",), (Keys(),)

    for number, _, keys in TwoStreams(GPU, 2).blocks(blocks()):
        freed = weakref.ref(*keys) if number else None
        del keys
        assert freed is None or freed() is None


def test_a_driver_that_makes_no_stream_leaves_one(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_streams, "_second_stream", lambda device, current: None)
    streams = TwoStreams(GPU, 2)
    for number, _, _ in streams.blocks(played.blocks(2)):
        streams.results(played.launch, number)
    assert played.log == [f"{what} {number} on first" for number in range(2) for what in ("keys", "kernel")]


def test_an_error_leaves_the_current_stream(played: Played) -> None:
    def fail(number: int) -> tuple[str, ...]:
        raise ValueError(f"step {number}")

    streams = TwoStreams(GPU, 2)
    with pytest.raises(ValueError, match="step 1"):
        for number, _, _ in streams.blocks(played.blocks(2)):
            streams.results(fail if number else played.launch, number)
    assert played.now is played.first
    assert played.log[-1].startswith("first waits for second")  # a caller may catch it and try again


# On a GPU

CASES = {
    "ring": ("ring", "zigzag", None),
    "gathered": ("all_gather", "zigzag", None),
    "border": ("ring", "window:300", 300),
    "one rank sees nothing of the other": ("ring", "contiguous", None),
}


DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.cuda)]
"""A CPU has one stream, so it tests the tests."""


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

    def send(self, outgoing: Outgoing, *_: Any) -> torch.Tensor:
        numbers = outgoing.numbers
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
        monkeypatch.setattr(Outgoing, name, lambda outgoing, *_: network.send(outgoing))
    monkeypatch.setattr(exchanges, "receive", network.receive)
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


def on_one_stream(plan: RankPlan, device: str, monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """The results of three seeds without a second stream."""
    with monkeypatch.context() as patch:
        patch.setattr(TwoStreams, "blocks", lambda streams, blocks: blocks)
        return [results_of(plan, inputs_of(plan, device, seed)) for seed in range(3)]


def on_two_streams(
    plan: RankPlan, device: str, late: str, network: Network, monkeypatch: pytest.MonkeyPatch
) -> list[list[Any]]:
    """The results of three seeds if one stream is late; memory that was freed is used again meanwhile."""
    results = TwoStreams.results

    def delayed(streams: Any, launch: Any, *arguments: Any) -> Any:
        def start() -> Any:
            if late == "second" and streams.on_second:
                torch.cuda._sleep(LATE)
            return launch(*arguments)

        if late == "first" and not streams.on_second and device == "cuda":
            torch.cuda._sleep(LATE)
        return results(streams, start)

    with monkeypatch.context() as patch:
        patch.setattr(TwoStreams, "results", delayed)
        patch.setattr(network, "late", late == "message")
        return [results_of(plan, inputs_of(plan, device, seed)) for seed in range(3)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_two_streams_have_the_bits_of_one(
    network: Network, monkeypatch: pytest.MonkeyPatch, name: str, rank: int, device: str
) -> None:
    plan = plan_of(name, rank, device)
    right = on_one_stream(plan, device, monkeypatch)
    assert all(torch.isfinite(tensor).all() for results in right for tensor in results)
    for late in ("none", "first", "second", "message"):
        assert not bits_differ(right, on_two_streams(plan, device, late, network, monkeypatch)), late


@pytest.mark.cuda
@pytest.mark.parametrize("fault", ["the message is not waited for", "the second stream is not waited for"])
def test_a_missing_wait_is_found(network: Network, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """The test above can fail: it finds a planted fault."""
    plan = plan_of("ring", 1, "cuda")
    right = on_one_stream(plan, "cuda", monkeypatch)
    if fault == "the message is not waited for":
        late, network.forgets_to_wait = "message", True
    else:
        late = "second"
        monkeypatch.setattr(TwoStreams, "_wait", lambda streams: None)
    assert bits_differ(right, on_two_streams(plan, "cuda", late, network, monkeypatch))
    torch.cuda.synchronize()  # the late stream still uses memory that is free


@pytest.mark.cuda
@pytest.mark.parametrize("name", CASES)
def test_a_graph_captures_both_streams(network: Network, name: str) -> None:
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
