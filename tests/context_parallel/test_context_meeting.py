"""Tests how the watchers of ranks compare calls that all ranks had made before, with a store and no processes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

from hypothesis import given
from hypothesis import strategies as st

from attn_core import SpecError
from torch_frontend.context_parallel import agreement
from torch_frontend.context_parallel.agreement import AHEAD, SHOWN, Exchange, Meeting


class Store(dict[str, bytes]):
    """The store of some ranks, without a server."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self[key]

    def add(self, key: str, more: int) -> int:
        self.set(key, str(int(super().get(key, b"0")) + more))
        return int(self[key])

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def ranks_of(count: int) -> list[Meeting]:
    """Ranks that have no watchers: a test calls what these would."""
    store: Any = Store()
    with mock.patch.object(agreement, "_start_watcher"):
        return [Meeting(store, store, rank=rank, size=count, timeout=5.0, play=mock.Mock()) for rank in range(count)]


def begin(rank: Meeting, calls: str | list[str], kind: str = "forward") -> None:
    """Begins exchanges of calls that all ranks made before."""
    for call in calls:
        rank.known[call] = None
        rank.begin(Exchange.of(kind, call))
        rank.end()


def look(*ranks: Meeting) -> list[str]:
    """What the ranks' watchers find."""
    for _ in range(2):
        for rank in ranks:
            rank._compare(rank._store)
    return [rank._apart for rank in ranks]


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=SHOWN + 40), st.data())
def test_the_first_exchange_that_differs_is_named(texts: list[str], data: Any) -> None:
    mine, behind = ranks_of(2)
    begin(mine, texts)
    begin(behind, texts[: data.draw(st.integers(1, len(texts)))])
    assert look(mine, behind) == ["", ""]
    mine, theirs = ranks_of(2)
    begin(mine, texts)
    changed = data.draw(st.integers(max(0, len(texts) - SHOWN), len(texts) - 1))
    begin(theirs, [*texts[:changed], "another", *texts[changed + 1 :]])
    found, others = look(mine, theirs)
    assert f"got as exchange {changed + 1} of the mesh\n" in found and f"got as exchange {changed + 1} of" in others
    # This rank has never made the other call.
    assert f"\n  rank 0: forward of {texts[changed]}\n  rank 1: another call\n" in found
    assert "\n  rank 1: forward of another\n" in others


def test_an_exchange_that_differed_long_ago_is_noticed_but_not_named() -> None:
    mine, theirs = ranks_of(2)
    begin(mine, ["a", *"b" * (SHOWN + 1)])
    begin(theirs, ["c", *"b" * (SHOWN + 1)])
    for found in look(mine, theirs):
        assert "\n  rank 0: another call\n  rank 1: another call\n" in found


def test_ranks_that_do_not_know_the_same_exchanges_say_nothing() -> None:
    def found(mine: list[str], theirs: list[str]) -> str:
        ranks = ranks_of(2)
        for rank, calls in zip(ranks, (mine, theirs), strict=True):
            begin(rank, calls)
        ranks[1]._compare(ranks[1]._store)
        ranks[0]._compare(ranks[0]._store)
        return ranks[0]._apart

    assert not found(["a"] * (AHEAD + 5), ["c"])  # so long ago that it is forgotten
    assert not found(["a"] * (AHEAD + 5), ["a"] * (AHEAD + 1))
    assert found(["a"] * (AHEAD + 5), ["c"] * (AHEAD + 1))
    assert not found(["a"], ["a", *"b" * (SHOWN + 1)])  # this rank is far behind


def test_compiled_calls_are_the_same_calls_and_every_rank_finds_a_difference() -> None:
    ranks = ranks_of(3)
    for rank, compiled in zip(ranks, ("", "compiled ", ""), strict=True):
        begin(rank, ["one"], f"{compiled}forward")
        begin(rank, ["one"], f"{compiled}backward")
    assert look(*ranks) == [""] * 3
    for rank, what in zip(ranks, ("one", "one", "two"), strict=True):
        begin(rank, [what])
    found = look(*ranks)
    assert found[0] == ""  # it is compared with rank 1 alone, and hears it from the others
    for text in found[1:]:
        assert "expected the same call on every rank, got as exchange 3 of the mesh" in text
        assert "rank 2: " in text and text.count("forward of one") == 1


def test_ranks_that_agreed_again_begin_anew() -> None:
    first, second = ranks_of(2)
    begin(first, "a")
    begin(second, "a")
    first.known["b"] = None
    first.begin(Exchange.of("forward", "b"))
    # Rank 1 refuses exchange 2, which rank 0 has begun.
    with (
        mock.patch.object(Meeting, "_ask", lambda self, number, text: first._hear(first._store, number, 1, text)),
        pytest.raises(SpecError, match=r"rank 0: b\n  rank 1: ValueError: no$"),
    ):
        second.refuse(ValueError("no"))
    assert look(first, second) == ["", ""]
    with pytest.raises(SpecError, match=r"rank 0: b\n  rank 1: ValueError: no$"):
        first.end()
    begin(first, "c")
    assert look(first, second) == ["", ""]
    begin(second, "c")
    assert look(first, second) == ["", ""]
    begin(first, "d")
    begin(second, "e")
    assert all("got as exchange 4 of the mesh" in found for found in look(first, second))


def test_a_rank_whose_watcher_looks_late_accuses_nobody() -> None:
    first, second = ranks_of(2)
    for stop in range(500, 5001, 500):
        begin(second, "a" * 500)
        second._compare(second._store)
        if stop == 1000:
            begin(first, "a" * 1000)
            first._compare(first._store)
    begin(first, "a" * 4000)
    assert look(first, second) == ["", ""]
    begin(first, "b")
    begin(second, "c")
    assert all("exchange 5001" in found for found in look(first, second))
