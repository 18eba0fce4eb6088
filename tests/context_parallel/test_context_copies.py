"""Tests messages through outboxes between ranks: the bits of collectives, slots that are taken again, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

from context_torch_worker import Case, Failed, World, in_ranks, once

from torch_frontend.context_parallel.exchange.outbox import SMALLEST

pytestmark = pytest.mark.sampled

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
    _, actual = once(WORLDS, "copies", tmp_path_factory, seconds=550)

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


# On GPUs


@pytest.mark.cuda
@pytest.mark.two_gpus
def test_copy_engines_have_the_bits_of_nccl(tmp_path: Any) -> None:
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
