"""Tests messages through outboxes: the bits of collectives, slots that are taken again, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

from context_torch_worker import Case, Failed, World, in_ranks, once

from torch_frontend.context_parallel.exchange.outbox import MAX_VIEWS, SLOTS, SMALLEST, Outbox, Part

pytestmark = pytest.mark.rotates

CAUSAL = ("causal", True)
BASE = Case((2,), "ring", "zigzag", (67, 67), (4, 2), None, (CAUSAL,))
FOUR = BASE._replace(axes=(4,))
DOCUMENTS = {"documents": (30, 20, 10, 36), "length": (96, 96)}
COPIED = [
    *(BASE._replace(strategy=strategy) for strategy in ("ring", "all_gather", "ulysses")),
    *(BASE._replace(layout=kind, options=(CAUSAL, ("window", 9))) for kind in ("contiguous", "zigzag", "window:9")),
    *(BASE._replace(layout="documents", strategy=strategy, **DOCUMENTS) for strategy in ("ring", "all_gather")),
    *(BASE._replace(how=how) for how in ("kept", "checkpoint", "compile")),
    BASE._replace(strategy="ulysses", heads=(8, 8), head_groups=2),
    BASE._replace(strategy="ulysses", dims=(5, 5), lse_gradient=False),
    BASE._replace(strategy="all_gather", heads=(8, 1)),  # gathered keys are kept for the backward
    BASE._replace(dtype="bfloat16", dims=(16, 16), options=(CAUSAL, ("backend", "math"))),
    BASE._replace(sinks=True, length=(40, 96)),
    *(FOUR._replace(strategy=strategy) for strategy in ("ring", "all_gather")),
    FOUR._replace(strategy="ulysses", heads=(4, 4)),
    FOUR._replace(layout="contiguous", options=(CAUSAL, ("window", 5))),
    FOUR._replace(layout="striped", dtype="float32", options=(CAUSAL, ("backend", "math"))),
    FOUR._replace(axes=(2, 2)),
    FOUR._replace(axes=(2, 2), strategy="all_gather"),
]
THREE = [BASE._replace(axes=(3,), strategy=strategy, layout="striped") for strategy in ("ring", "all_gather")]
SCENES = "shared_outboxes"
WORLDS = [
    World(
        str(ranks),
        ranks,
        {
            "refused": (SCENES, "refusals", ()),
            **{
                case.name: (SCENES, "both_ways", (case,))
                for case in COPIED + THREE
                if np.prod(case.axes, dtype=int) == ranks
            },
            "many": (SCENES, "many_messages", ()),
        },
    )
    for ranks in (2, 3, 4)
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The results of every rank: ``ranks(number of ranks, job)``."""
    _, actual = once(WORLDS, "copies", tmp_path_factory, seconds=300)

    def results_of(world: int, job: str) -> list[Any]:
        given = [rank.get(job) for rank in actual[str(world)]]
        for rank, one in enumerate(given):
            assert not isinstance(one, Failed), f"rank {rank}: {one.text}"
            assert one is not None, f"rank {rank} did not come to {job}: {list(actual[str(world)][rank].values())[-1]}"
        return given

    return results_of


@pytest.mark.parametrize("case", COPIED + THREE, ids=lambda case: case.name)
def test_copies_have_the_bits_of_collectives(ranks: Any, case: Case) -> None:
    for by_collectives, by_copies, messages in ranks(int(np.prod(case.axes)), case.name):
        assert messages > 0
        assert by_collectives.keys() == by_copies.keys()
        for name, array in by_collectives.items():
            np.testing.assert_array_equal(by_copies[name], array, err_msg=name)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_slots_that_are_taken_again_keep_their_messages_until_they_are_copied(ranks: Any, world: int) -> None:
    for wrong, messages, size in ranks(world, "many"):
        assert wrong == []
        assert messages >= 80
        assert size > SMALLEST  # it has grown


def test_refusals_name_the_rank_and_are_raised_on_every_rank(ranks: Any) -> None:
    for actual in ranks(3, "refused"):
        assert actual["no GPUs"] == "mesh: expected GPUs, which have copy engines, got a mesh of 'cpu'"
        assert actual["one rank"] == (
            "mesh: expected GPUs that can read each other's memory, got\n"
            "  rank 0: can copy\n  rank 1: OSError: libcuda.so.1: not found\n  rank 2: can copy"
        )
        hosts = "DeviceError: expected ranks of one host, got ranks on the hosts 0, 0, 1; pass an axis within a host"
        assert actual["two hosts"].count(hosts) == 3
        assert actual["no memory"].count("DeviceError: cannot share 12 MiB (rank 0: ") == 3
        assert actual["outboxes"] == 0
        assert "expected a torch DeviceMesh" in actual["no mesh"]


# One rank, whose memory writes down what it is asked


class WrittenDown:
    """``PeerMemory`` of two ranks that both have this memory; ``log`` has what the outbox asked of it."""

    def __init__(self, slot_size: int, log: list[Any]) -> None:
        self.slot_size, self.log = slot_size, log
        self.data = torch.zeros(SLOTS, slot_size, dtype=torch.uint8)
        log.append(("size", slot_size))

    def bytes_of(self, rank: int, slot: int) -> Any:
        return self.data[slot]

    def reuse(self, slot: int) -> None:
        self.log.append(("reuse", slot))

    def announce(self, slot: int, readers: tuple[int, ...]) -> None:
        self.log.append(("announce", slot, readers))

    def copy(self, slot: int, result: Any, pieces: Any) -> Any:
        self.log.append(("copy", slot, *map(tuple, pieces)))
        return lambda: self.log.append("arrived")

    def keep(self, tensor: Any) -> None:
        self.log.append("kept")

    def finish(self) -> None:
        self.log.append("finish")


def outbox_with_log(rank: int = 0) -> tuple[Outbox, list[Any]]:
    log: list[Any] = []
    return Outbox(lambda size: WrittenDown(size, log), rank), log


def test_a_message_is_written_once_the_readers_of_the_one_before_have_copied_it() -> None:
    outbox, log = outbox_with_log()
    for slot in (0, 1, 2, 0, 1):
        log.clear()
        outbox.reserve(10, torch.int32).send((1,), [Part(1, 2, 5)]).wait()
        assert log[-4:] == [("reuse", slot), ("announce", slot, (1,)), ("copy", slot, (1, 8, 12, 0)), "arrived"]


def test_an_outbox_grows_once_every_message_was_copied() -> None:
    outbox, log = outbox_with_log()
    outbox.reserve(10, torch.float32).send((1,), [])
    kept = outbox.reserve(5, torch.float32)
    log.clear()
    grown = outbox.reserve(SMALLEST, torch.float32)
    assert sorted(log[:3]) == [("reuse", slot) for slot in range(SLOTS)]
    assert log[3:] == ["finish", ("size", 4 * SMALLEST), ("reuse", 0)]
    kept.numbers.fill_(3.0)
    grown.send((1,), [])
    log.clear()
    kept.send((1,), [])  # of the smaller memory, where it is the second message
    assert log == [("announce", 1, (1,)), ("copy", 1), "kept"]


def test_a_message_that_is_not_sent_yet_keeps_its_slot() -> None:
    outbox, log = outbox_with_log()
    early = outbox.reserve(10, torch.int32)
    early.numbers.fill_(7)
    for number in range(5):
        log.clear()
        outbox.reserve(10, torch.int32).send((1,), [])
        assert log[0] == ("reuse", 1 + number % 2)
    assert early.send((1,), [Part(0, 0, 10)]).wait().tolist() == [7] * 10


def test_messages_that_were_never_sent_leave_their_slots_to_later_ones() -> None:
    outbox, log = outbox_with_log()
    lost = [outbox.reserve(10, torch.int32) for _ in range(SLOTS)]
    for _ in range(2):
        outbox.reserve(10, torch.int32).send((1,), [])
        assert ("reuse", 0) in log[-4:]  # the oldest lost one's
    with pytest.raises(AssertionError, match="a later message lies in the slot"):
        lost[0].send((1,), [])


def test_ranks_copy_in_another_order_so_that_none_is_read_by_all() -> None:
    outbox, log = outbox_with_log(rank=1)
    outbox.reserve(8, torch.int32).send((0, 2, 3), [Part(rank, 0, 2) for rank in range(4)]).wait()
    assert log[-2] == ("copy", 0, (2, 0, 8, 16), (3, 0, 8, 24), (0, 0, 8, 0))


def test_memory_of_a_message_that_is_dropped_is_kept() -> None:
    outbox, log = outbox_with_log()
    arriving = outbox.reserve(4, torch.int32).send((1,), [Part(1, 0, 4)])
    assert log[-1][0] == "copy"
    del arriving
    assert log[-1] == "kept"


@pytest.mark.parametrize("numbers", [3_000_001, 8_000_003])
def test_slots_are_aligned(numbers: int) -> None:
    outbox, log = outbox_with_log()
    outbox.reserve(numbers, torch.bool)
    assert log[0][1] % 512 == 0


def test_views_of_slots_are_bounded_and_written_outside_inference() -> None:
    outbox, _ = outbox_with_log()
    with torch.inference_mode():
        outbox.reserve(5, torch.float32).send((1,), [])
    for count in range(2 * MAX_VIEWS):
        outbox.reserve(count, torch.float32).send((1,), [])
    for _ in range(SLOTS):
        outbox.reserve(5, torch.float32).numbers.fill_(1.0)
    assert outbox._area is not None
    assert 0 < len(outbox._area._views) <= MAX_VIEWS


def test_a_captured_outbox_keeps_its_memory_when_it_grows() -> None:
    outbox, _ = outbox_with_log()
    assert not outbox.holds(1, torch.float32)
    outbox.reserve(1, torch.float32)
    assert outbox.holds(SMALLEST // 4, torch.float32) and not outbox.holds(SMALLEST // 4 + 1, torch.float32)
    for _ in range(2):
        outbox.capture()
    outbox.reserve(SMALLEST, torch.float32)
    assert [memory.slot_size for memory in outbox._captured] == [SMALLEST]


# On GPUs


@pytest.mark.cuda
def test_copy_engines_have_the_bits_of_nccl(tmp_path: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    options = (CAUSAL, ("deterministic", True))
    base = BASE._replace(
        device="cuda", options=options, length=(2061, 2061), heads=(8, 2), dims=(64, 64), dtype="bfloat16"
    )
    base = base._replace(lse_gradient=False)
    cases = [
        *(base._replace(strategy=strategy) for strategy in ("ring", "all_gather", "ulysses")),
        base._replace(layout="contiguous", options=(*options, ("window", 300))),
        base._replace(layout="documents", documents=(1000, 500, 61, 500)),
        base._replace(strategy="all_gather", heads=(8, 1)),
    ]
    jobs = {case.name: (SCENES, "both_ways", (case,)) for case in cases}
    jobs["many"] = (SCENES, "many_messages", ("cuda",))
    jobs["captured"] = (SCENES, "captured", (base._replace(options=(CAUSAL,)),))
    (actual,) = in_ranks([World("gpus", 2, jobs, 120.0, "cuda")], tmp_path, 500).values()
    for case in cases:
        for rank in actual:
            given = rank.get(case.name)
            assert isinstance(given, tuple) and not isinstance(given, Failed), given
            for name, array in given[0].items():
                np.testing.assert_array_equal(given[1][name], array, err_msg=f"{case.name} {name}")
    assert [rank.get("many")[0] for rank in actual] == [[], []]
    assert [rank.get("captured") for rank in actual] == [(True, True)] * 2
