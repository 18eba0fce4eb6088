"""One rank alone makes a bad call: every rank's error names the rank, the argument and its value, and none hangs."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

from context_late_scenes import TRIES, Late
from context_torch_worker import Failed, World, in_ranks

from attn_core import SpecError
from torch_frontend.context_parallel.agreement import Answer, Exchange, Meeting

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
            "known": ("context_told_scenes", "documents_that_all_know", ((ranks,),)),
        },
        TIMEOUT,
    )
    for ranks in (2, 3)
]
ONE = ((1, 1, "softcap"),)
"""Rank 1 refuses call 1."""
AGAIN = (*ONE, (1, 2, "window"))
TURN = (*ONE, (0, 2, "window"))
LATE = {
    "in the call": ("rerrr rerrr", Late("forwards", ONE, ((0, 1, "inside"),))),
    "after the call": ("rnsss rssss", Late("forwards", ONE, ((0, 1, "after"),))),
    "in the next call": ("rnsss rssss", Late("forwards", ONE, ((0, 2, "inside"),))),
    "two calls later": ("rnnns rssss", Late("forwards", ONE, ((0, 3, "after"),))),
    "after its last call": ("rnnnn rssss", Late("forwards", ONE, ((0, 4, "after"),))),
    "rank 0 refuses": ("rssss rnsss", Late("forwards", ((0, 1, "softcap"),), ((1, 1, "after"),))),
    "training, in the forward": ("rerrr rerrr", Late("training", ONE, ((0, 2, "inside"),))),
    "training, after the forward": ("rssss rssss", Late("training", ONE, ((0, 2, "after"),))),
    "training, in the backward": ("rssss rssss", Late("training", ONE, ((0, 3, "inside"),))),
    "training, after the backward": ("rnsss rssss", Late("training", ONE, ((0, 3, "after"),))),
    "layers, in the call": ("rerrr rerrr", Late("layers", ((1, 4, "softcap"),), ((0, 4, "inside"),))),
    "layers, in the next layer": ("rssss rssss", Late("layers", ((1, 4, "softcap"),), ((0, 4, "after"),))),
    "layers, in the next step": ("rnsss rssss", Late("layers", ((1, 4, "softcap"),), ((0, 5, "after"),))),
    "again, in the call": ("reerr reerr", Late("forwards", AGAIN, ((0, 1, "inside"), (0, 2, "inside")))),
    "again, the second late": ("renss resss", Late("forwards", AGAIN, ((0, 1, "inside"), (0, 2, "after")))),
    "again, after the call": ("rnsss rssss", Late("forwards", AGAIN, ((0, 1, "after"),))),
    "again, before the other comes": ("reerr reerr", Late("forwards", AGAIN, slow=(0, 1), patience=0.1)),
    "gave up, then in the call": ("rerrr rerrr", Late("forwards", ONE, ((0, 1, "inside"),), slow=(0, 1), patience=0.1)),
    "gave up, then after the call": (
        "rnsss resss",
        Late("forwards", ONE, ((0, 1, "after"),), slow=(0, 1), patience=0.1),
    ),
    "both in one call": ("rerrr rerrr", Late("forwards", (*ONE, (0, 1, "window")))),
    "in turn, in the call": ("reerr reerr", Late("forwards", TURN, ((0, 1, "inside"), (1, 1, "inside")))),
    "in turn, after the call": ("rnsss rssss", Late("forwards", TURN, ((0, 1, "after"),))),
    "in turn, while waiting": ("rnsss rssss", Late("forwards", TURN, ((0, 2, "waiting"),))),
    "before a new call": ("rnsss rssss", Late("forwards", ONE, ((0, 1, "after"),), fresh=2)),
    "while a new call waits": ("rnsss rssss", Late("forwards", ONE, ((0, 2, "waiting"),), fresh=2)),
    "first call of a mesh": ("errrr errrr", Late("forwards", ((1, 0, "softcap"),), new=True)),
    "three, in the call": ("rerrr rerrr rerrr", Late("forwards", ONE, ((0, 1, "inside"), (2, 1, "inside")))),
    "three, one late": ("rssss rssss rnsss", Late("forwards", ONE, ((0, 1, "inside"), (2, 2, "inside")))),
    "three, two late": ("rnsss rssss rnnss", Late("forwards", ONE, ((0, 1, "after"), (2, 3, "inside")))),
    "three, one slow, one late": ("rssss rssss rnsss", Late("forwards", ONE, ((2, 1, "after"),), slow=(0, 1))),
    "three, training": ("rssss rssss rnsss", Late("training", ONE, ((0, 2, "inside"), (2, 3, "after")))),
    "three, two refuse one call": (
        "rerrr rerrr rerrr",
        Late("forwards", (*ONE, (2, 1, "window")), ((0, 1, "inside"),)),
    ),
    "three, two refuse in turn": (
        "rnnss rssss rnsss",
        Late("forwards", (*ONE, (2, 2, "window")), ((0, 2, "after"), (2, 2, "waiting"))),
    ),
    "three, a slow rank refuses an earlier call": (
        "rnnss rnsss rssss",
        Late("forwards", ((1, 2, "softcap"), (2, 1, "window")), ((0, 2, "after"),), slow=(2, 1)),
    ),
}
"""What each rank gets in five tries if calls return at once, as over NCCL; by where they hear of a refusal.

r: right numbers. n: NaN, or right numbers. e: an error. s: an error that every later call raises, too.
"""
FORGOTTEN = {
    "forgotten": LATE["after the call"][1]._replace(fault=True),
    "forgotten while training": LATE["training, after the backward"][1]._replace(fault=True),
}
"""Planted faults: the ranks forget that one of them was late."""
WORLDS += [
    World(
        f"late {ranks}",
        ranks,
        {
            name: ("context_late_scenes", "late", (case,))
            for name, (texts, case) in LATE.items()
            if texts.count(" ") + 1 == ranks
        },
        TIMEOUT,
    )
    for ranks in (2, 3)
]
WORLDS += [World(name, 2, {"late": ("context_late_scenes", "late", (case,))}, 5.0) for name, case in FORGOTTEN.items()]
VALUES = {
    "softcap": "SpecError: softcap=-1.0",
    "window": "SpecError: window=(-3, 0)",
    "length": "SpecError: length=2.5",
    "dropout": "SpecError: dropout=0.5",
    "strategy": "SpecError: strategy='rings'",
    "layout": "SpecError: layout='zebra'",
    "k": "DTypeError: k: expected the dtype of q (torch.float64), got torch.float16",
    "unknown": "TypeError: softmax_scale: expected scale=",
    "v": "ShapeError: ",
    "layer": "SpecError: mask_mod, score_mod: expected None in context parallelism",
    "layer's positions": "SpecError: positions: expected None",
    "block": "SpecError: layout='window:0'",
    "unshard": "ShapeError: x: expected a shard of",
    "unshard another dtype": "torch.float64 on cpu, dim 1, length 23",
    "backward": "scale='1'",
    "second derivative": "RuntimeError: attention has no second derivative",
    "freed": "RuntimeError: Trying to backward through the graph a second time",
}


def results_of(**jobs: tuple[str, str]) -> Any:
    """Runs a test for each job with its ``name`` and ``found``, what every rank returned."""
    return pytest.mark.parametrize(("name", "found"), jobs.items(), indirect=["found"], ids=jobs)


of_every_world = results_of(**{world: (world, "told") for world in TOLD})


@pytest.mark.parametrize("argument", VALUES)
@of_every_world
def test_every_rank_is_told_of_a_bad_argument_of_one(found: Any, name: str, argument: str) -> None:
    bad = TOLD[name][4]
    for rank, results in enumerate(found):
        text, seconds = results[argument]
        assert text.startswith("SpecError: context_parallel_attention: expected the same call on every rank"), text
        lines = text.split("\n")[1:]
        assert VALUES[argument] in lines[bad] and lines[bad].startswith(f"  rank {bad}: "), (rank, text)
        assert all("Error" not in line for at, line in enumerate(lines) if at != bad), text
        assert seconds < SOON


@of_every_world
def test_ranks_agree_again_after_errors(found: Any, name: str) -> None:
    for results in found:
        assert float(results["afterwards"][0]) < 1e-9


@pytest.mark.parametrize("found", [(f"rows {count}", "known") for count in (2, 3)], indirect=True, ids=" ".join)
def test_ranks_with_other_documents_that_all_know_are_told_afterwards(found: Any) -> None:
    for results in found:
        *before, (calls, _), (text, seconds), again, last = results
        assert [each for each, _ in before] == [""] * 7
        assert int(calls) < 60
        assert text.startswith("SpecError: context_parallel_attention: expected the same call on every rank, got as ")
        assert re.search(r"exchange \d+ of the mesh\n", text)
        # Each rank is compared with the next one.
        assert text.count("documents (0, 3, 23)") == text.count("documents (0, 11, 23)") == 1, text
        assert "  rank 1: forward of q [1, " in text
        assert "make a mesh of new process groups" in text
        assert again[0] == last[0] == text
        assert seconds < SOON


@pytest.mark.parametrize("found", [(f"rows {count}", "documents") for count in (2, 3)], indirect=True, ids=" ".join)
def test_ranks_with_other_documents_are_told(found: Any) -> None:
    for results in found:
        assert results["before"][0] == results["afterwards"][0] == ""
        for name in ("known to the others", "new to all", "longer than the row", "longer than the shards, dealt"):
            text, seconds = results[name]
            assert text.startswith("SpecError: context_parallel_attention: expected the same call on every rank"), text
            assert "rank 1: " in text and seconds < SOON, text
        assert (
            "documents (0, 5, 23)" in results["new to all"][0] and "documents (0, 11, 23)" in results["new to all"][0]
        )
        assert "SpecError: length=23: expected the 40 positions of seq_info" in results["longer than the row"][0]
        dealt = results["longer than the shards, dealt"][0]
        assert re.search(
            r"rank 1: ShapeError: q: expected shards of \d+ positions, 40 over \d ranks in a documents", dealt
        )
        for name in ("longer than all shards", "longer than all shards, dealt"):
            text, seconds = results[name]
            assert re.match(
                rf"ShapeError: q: expected shards of \d+ positions, 40 over {len(found)} ranks in a ", text
            ), text
            assert seconds < SOON


@pytest.mark.parametrize("found", [(f"rows {count}", "odd") for count in (2, 3)], indirect=True, ids=" ".join)
def test_rows_below_the_number_of_ranks_and_windows_above_the_row(found: Any) -> None:
    """They are valid: every rank has at least one place, which may be empty, and the window sees the whole row."""
    for results in found:
        assert max(results.values()) < 1e-9, results


@results_of(**{name: (f"late {texts.count(' ') + 1}", name) for name, (texts, _) in LATE.items()})
def test_ranks_whose_calls_return_at_once_are_told(found: Any, name: str) -> None:
    """A refusal is an error on every rank in one call, or, if a rank had returned from it, in all later calls."""
    patterns, case = LATE[name]
    refused = [f"  rank {rank}: {VALUES[argument]}" for rank, _, argument in case.refused]
    if case.patience < 1:  # a rank that does not wait for the others raises its own error
        refused = [VALUES[argument] for _, _, argument in case.refused]
    for rank, (results, pattern) in enumerate(zip(found, patterns.split(), strict=True)):
        for (kind, text), expected in zip(results, pattern, strict=True):
            assert kind[0] == expected or (kind, expected) == ("right", "n"), f"rank {rank}: {results}"
            assert not text or any(line in text for line in refused), text


@results_of(**{name: (name, "late") for name in FORGOTTEN})
def test_ranks_that_forget_a_late_rank_are_found(found: Any, name: str) -> None:
    """Their calls are shifted by one: numbers are wrong, and the last calls wait for calls that nobody makes."""
    first, second = ({kind for kind, _ in results} for results in found)
    assert "wrong" in first and "hangs" in second


@pytest.mark.cuda
@pytest.mark.two_gpus
def test_no_rank_hangs_or_goes_wrong_over_nccl(tmp_path: Any) -> None:
    """The host is ahead of the GPU here, so where a rank hears of a refusal depends on the time."""
    cases = {
        "forwards": Late("forwards", ONE),
        "the other rank is slow": Late("forwards", ONE, slow=(0, 1)),
        "training": Late("training", ONE),
        "layers": Late("layers", ((0, 4, "window"),)),
        "again": Late("forwards", AGAIN),
        "both": Late("forwards", (*ONE, (0, 1, "window"))),
        "in turn": Late("training", TURN),
        "first call": Late("forwards", ((1, 0, "softcap"),), new=True),
    }
    jobs = {name: ("context_late_scenes", "late", (case._replace(device="cuda"),)) for name, case in cases.items()}
    (actual,) = in_ranks([World("gpus", 2, jobs, 100.0, "cuda")], tmp_path, 180).values()
    for name, case in cases.items():
        both = [rank.get(name) for rank in actual]
        assert not any(one is None or isinstance(one, Failed) for one in both), both
        kinds = [[kind for kind, _ in one] for one in both]
        assert not {"wrong", "hangs"} & {*kinds[0], *kinds[1]}, f"{name}: {kinds}"
        for at in range(1, TRIES):  # once a try has stopped a rank, no rank runs a later call
            assert all(each[at] == "stopped" for each in kinds if "stopped" in each[:at]), f"{name}: {kinds}"
        if not any("stopped" in each for each in kinds):
            assert [kind == "error" for kind in kinds[0]] == [kind == "error" for kind in kinds[1]], f"{name}: {kinds}"
        for who, _, argument in case.refused[:1]:
            assert f"  rank {who}: {VALUES[argument]}" in next(text for _, text in both[who] if text)


def test_a_late_question_about_a_meeting_that_is_over_is_ignored() -> None:
    """Its answers are deleted by then. A watcher that waited for them would block the store for ever."""
    store = torch.distributed.HashStore()
    alone = Meeting(store, store, rank=0, size=1, timeout=5.0, play=lambda kind, call: None)
    for text in ("first", "second", "third"):
        alone.begin(Exchange.of("forward", text))
    assert not store.check(["1/0"]) and store.check(["3/0"])
    for number in (1, 2, 3):
        alone._hear(store, number, 0, "other")
    assert not alone.unsettled


REFUSAL = "SpecError: softcap=-1.0: expected more"


def meeting_of_two(store: Any, ours: Any) -> tuple[Meeting, Exchange]:
    """Rank 0 of two in an exchange that rank 1 refuses."""
    exchange = Exchange.of("forward", "softcap=None")
    meeting = Meeting(ours, store, rank=0, size=2, timeout=5.0, play=lambda kind, call: None)
    meeting.known[exchange.call] = None  # all ranks made it before
    meeting.begin(exchange)
    store.set("1/1", json.dumps([REFUSAL]))
    return meeting, exchange


def test_a_rank_says_once_whether_it_is_late() -> None:
    """Several ranks ask, and one may have read the first answer before the rank leaves its call."""
    store = torch.distributed.HashStore()
    meeting, _ = meeting_of_two(store, store)
    meeting._hear(store, 1, 1, REFUSAL)
    first = store.get("1/0")
    assert not Answer(*json.loads(first)).late
    meeting._ended = 1  # the end of the call, which then reads the answers
    meeting._hear(store, 1, 1, REFUSAL)
    assert store.get("1/0") == first
    with pytest.raises(SpecError, match=r"rank 1: SpecError: softcap=-1\.0: expected more$"):
        meeting.end()
    meeting, _ = meeting_of_two(store, store)
    meeting._ended = 1
    meeting._hear(store, 1, 1, REFUSAL)
    assert Answer(*json.loads(store.get("1/0"))).late


def test_a_rank_says_what_it_heard_if_the_store_is_gone() -> None:
    """The process that has the store may end with the error of its call before another rank reads it."""

    class Store:
        gone = False

        def __getattr__(self, name: str) -> Any:
            if self.gone:
                raise torch.distributed.DistNetworkError("the connection was closed")
            return getattr(store, name)

    store, ours = torch.distributed.HashStore(), Store()
    meeting, call = meeting_of_two(store, ours)
    meeting.end()
    meeting._hear(store, 1, 1, REFUSAL)
    ours.gone = True
    for _ in range(2):
        with pytest.raises(SpecError, match=r"rank 1: SpecError: softcap=-1\.0: expected more"):
            meeting.begin(call)
