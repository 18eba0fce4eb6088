"""Tests the journal of a rank's exchanges, on plain data."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

from hypothesis import given
from hypothesis import strategies as st

from torch_frontend.context_parallel.agreement.journal import AHEAD, SHOWN, Exchange, Journal, LateComparison


def journal_of(texts: list[str], since: int = 0) -> Journal:
    journal = Journal()
    journal.restart(since)
    for number, text in enumerate(texts, since + 1):
        journal.add(number, text, text)
    return journal


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=SHOWN + 40), st.data())
def test_the_first_exchange_that_differs_is_named(texts: list[str], data: Any) -> None:
    mine = journal_of(texts)
    behind = data.draw(st.integers(1, len(texts)))
    assert mine.first_difference(journal_of(texts[:behind]).written()) is None
    changed = data.draw(st.integers(max(0, len(texts) - SHOWN), len(texts) - 1))
    others = [*texts[:changed], "another", *texts[changed + 1 :]]
    # This rank has never made the other call.
    assert mine.first_difference(journal_of(others).written()) == (changed + 1, texts[changed], None)


def test_an_exchange_that_differed_long_ago_is_noticed_but_not_named() -> None:
    mine = journal_of(["a", *"b" * (SHOWN + 1)])
    theirs = journal_of(["c", *"b" * (SHOWN + 1)]).written()
    assert mine.first_difference(theirs) == (SHOWN + 2, None, None)


def test_ranks_that_do_not_know_the_same_exchanges_say_nothing() -> None:
    theirs = journal_of(list("abd")).written()
    assert journal_of(list("ab")).first_difference(theirs) is None  # this rank is behind
    assert journal_of(list("abc"), since=1).first_difference(theirs) is None  # it has agreed with others since
    long = journal_of(["a"] * (AHEAD + 5))
    assert long.first_difference(journal_of(["c"]).written()) is None  # so long ago that it is forgotten
    assert long.first_difference(journal_of(["a"] * (AHEAD + 1)).written()) is None
    assert long.first_difference(journal_of(["c"] * (AHEAD + 1)).written()) is not None


class Store(dict[str, bytes]):
    """The store of two ranks, without a server."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def test_compiled_calls_are_the_same_calls_and_every_rank_finds_a_difference() -> None:
    store: Any = Store()
    ranks = [LateComparison(rank, 3, str) for rank in range(3)]
    begun: list[list[Any]] = [
        [(1, Exchange("forward", "one")), (2, Exchange("backward", "one"))],  # type: ignore[arg-type]
        [(1, Exchange("compiled forward", "one")), (2, Exchange("compiled backward", "one"))],  # type: ignore[arg-type]
        [(1, Exchange("forward", "one")), (2, Exchange("backward", "one"))],  # type: ignore[arg-type]
    ]
    for _ in range(2):
        for rank, late in enumerate(ranks):
            late.look(store, begun[rank])
    assert [late.error for late in ranks] == [""] * 3
    for rank, what in enumerate(("one", "one", "two")):
        begun[rank].append((3, Exchange("forward", what)))  # type: ignore[arg-type]
    for _ in range(2):
        for rank, late in enumerate(ranks):
            late.look(store, begun[rank])
    (found,) = {late.error for late in ranks}
    assert "expected the same call on every rank, got as exchange 3 of the mesh" in found
    assert "rank 2: " in found and found.count("forward of one") == 1


def test_ranks_that_agreed_again_begin_anew() -> None:
    store: Any = Store()
    first, second = (LateComparison(rank, 2, str) for rank in range(2))
    # Rank 1 refused exchange 2, which rank 0 had begun.
    first.look(store, [(1, Exchange("forward", "a")), (2, Exchange("forward", "b"))])  # type: ignore[arg-type]
    second.look(store, [(1, Exchange("forward", "a"))])  # type: ignore[arg-type]
    first.since = second.since = 2
    for late in (first, second):
        late.look(store, [(1, Exchange("forward", "a")), (3, Exchange("forward", "c"))])  # type: ignore[arg-type]
    for late in (first, second):
        late.look(store, [(3, Exchange("forward", "c"))])  # type: ignore[arg-type]
    assert (first.error, second.error) == ("", "")


def test_a_rank_that_looked_too_late_to_see_all_its_exchanges_accuses_nobody() -> None:
    store: Any = Store()
    ranks = [LateComparison(rank, 2, str) for rank in range(2)]
    every = [(number, Exchange("forward", "a")) for number in range(1, 5001)]  # type: ignore[arg-type]
    for stop in range(500, 5001, 500):
        ranks[1].look(store, every[max(0, stop - AHEAD) : stop])
    for stop in (1000, 5000):
        ranks[0].look(store, every[max(0, stop - AHEAD) : stop])
    ranks[1].look(store, every[-AHEAD:])
    assert [each.error for each in ranks] == ["", ""]
    for each in ranks:
        each.since = 5000  # they agree again
    later = [*every[-5:], (5001, Exchange("forward", "b"))]  # type: ignore[arg-type]
    ranks[0].look(store, later)
    ranks[1].look(store, [*every[-5:], (5001, Exchange("forward", "c"))])  # type: ignore[arg-type]
    ranks[0].look(store, later)
    assert all("exchange 5001" in each.error for each in ranks)
