"""One rank alone makes a bad call: every rank's error names the rank, the argument and its value, and none hangs."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

from context_torch_worker import Failed, World, once

from torch_frontend.context_parallel.meeting import Exchange, Meeting

pytestmark = pytest.mark.timeout(200)

TIMEOUT = 40.0
"""Of the process groups. A test that hangs reaches it, and the time of an error must be far below."""
SOON = 20.0
TOLD = {
    "two ring": (2, (2,), "ring", {}, 1),
    "two all_gather, rank 0": (2, (2,), "all_gather", {"return_lse": False}, 0),
    "two ulysses": (2, (2,), "ulysses", {}, 1),
    "three ring, a window": (3, (3,), "ring", {"window": (4, 0)}, 1),
    "three all_gather": (3, (3,), "all_gather", {}, 2),
    "two axes": (4, (2, 2), "ring", {}, 3),
}
"""(ranks, axes, strategy, options, the rank with the bad call)."""
WORLDS = [
    World(name, ranks, {"told": ("context_told_scenes", "told", tuple(given))}, TIMEOUT)
    for name, (ranks, *given) in TOLD.items()
]
WORLDS += [
    World(
        f"rows {ranks}",
        ranks,
        {
            "documents": ("context_told_scenes", "other_documents", ((ranks,),)),
            "odd": ("context_told_scenes", "odd_rows", ((ranks,),)),
        },
        TIMEOUT,
    )
    for ranks in (2, 3)
]
VALUES = {
    "softcap": "SpecError: softcap=-1.0",
    "window": "SpecError: window=(-3, 0)",
    "length": "SpecError: length=2.5",
    "dropout": "SpecError: dropout=0.5",
    "strategy": "SpecError: strategy='rings'",
    "layout": "SpecError: layout='zebra'",
    "k": "DTypeError: k: expected the dtype of q (torch.float64), got torch.float16",
    "v": "ShapeError: ",
    "backward": "scale='1'",
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The results of every rank: ``ranks(world, job)``."""
    _, actual = once(WORLDS, "told", tmp_path_factory, seconds=180)

    def results_of(world: str, job: str) -> list[Any]:
        results = [rank.get(job) for rank in actual[world]]
        for rank, one in enumerate(results):
            assert one is not None and not isinstance(one, Failed), f"rank {rank}: {one}"
        return results

    return results_of


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("world", TOLD)
def test_every_rank_is_told_of_a_bad_argument_of_one(ranks: Any, world: str, name: str) -> None:
    bad = TOLD[world][4]
    for rank, results in enumerate(ranks(world, "told")):
        text, seconds = results[name]
        assert text.startswith("SpecError: context_parallel_attention: expected the same call on every rank"), text
        lines = text.split("\n")[1:]
        assert VALUES[name] in lines[bad] and lines[bad].startswith(f"  rank {bad}: "), (rank, text)
        assert all("Error" not in line for at, line in enumerate(lines) if at != bad), text
        assert seconds < SOON


@pytest.mark.parametrize("world", TOLD)
def test_ranks_agree_again_after_errors(ranks: Any, world: str) -> None:
    for results in ranks(world, "told"):
        assert float(results["afterwards"][0]) < 1e-9


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_with_other_documents_are_told(ranks: Any, count: int) -> None:
    for results in ranks(f"rows {count}", "documents"):
        assert results["before"][0] == results["afterwards"][0] == ""
        for name in ("known to the others", "new to all", "longer than the row"):
            text, seconds = results[name]
            assert text.startswith("SpecError: context_parallel_attention: expected the same call on every rank"), text
            assert "rank 1: " in text and seconds < SOON, text
        assert (
            "documents (0, 5, 23)" in results["new to all"][0] and "documents (0, 11, 23)" in results["new to all"][0]
        )
        assert "SpecError: length=23: expected the 28 positions of seq_info" in results["longer than the row"][0]


@pytest.mark.parametrize("count", [2, 3])
def test_rows_below_the_number_of_ranks_and_windows_above_the_row(ranks: Any, count: int) -> None:
    """They are valid: every rank has at least one place, and the window sees the whole row."""
    for results in ranks(f"rows {count}", "odd"):
        assert max(results.values()) < 1e-9, results


@pytest.mark.timeout(30)
def test_a_late_question_about_a_meeting_that_is_over_is_ignored() -> None:
    """Its answers are deleted by then. A watcher that waited for them would block the store for ever."""
    store = torch.distributed.HashStore()
    alone = Meeting(store, store, 0, 1, 5.0)
    for text in ("first", "second", "third"):
        alone.meet(text, lambda exchange: None, str)
        alone.begin(Exchange("forward", None), lambda exchange: None, str)
    assert not store.check(["1/0"]) and store.check(["3/0"])
    for number in (1, 2, 3):
        alone._hear(store, number, 0)
    assert alone.stopped is None
