"""Journal: what a rank has exchanged, so that ranks find out later if they made different calls.

Calls that were compared before are not compared again, because that would cost time. The watchers of the ranks compare
afterwards instead: each writes a digest of all its exchanges into the store, and reads that of the next rank.
Apart from ``meeting``, which compares calls before they run.
"""

from __future__ import annotations

import json
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from attn_core.context_parallel.request import Request
from torch_frontend.context_parallel.agreement.answers import describe_apart

AHEAD = 2048
"""Exchanges that a rank may begin before its watcher looks, and that it can still compare; a GPU queues about 1000
launches."""
SHOWN = 64
"""The newest exchanges that a rank writes one by one, so that an error can name the first one that differs."""
PATIENT = 40
"""The looks without an exchange of this rank in which it still reads what the next rank has written."""


class Exchange(NamedTuple):
    """An exchange that a rank begins: "forward", "backward", or one of these with "compiled" before it."""

    kind: str
    request: Request


class Journal:
    """The exchanges of one rank since all ranks last agreed on where they are.

    Attributes:
        since: the number of the exchange at which they did.
        at: the number of the last exchange.
    """

    def __init__(self) -> None:
        self.since = self.at = 0
        self._digest = 0
        self._entries: deque[tuple[int, int, int, Any]] = deque(maxlen=AHEAD)
        """(number, checksum of the exchange, digest of all exchanges until then, the exchange)."""

    def restart(self, number: int) -> None:
        """Forgets everything; the next exchange comes after this number, on every rank."""
        self.since = self.at = number
        self._digest = 0
        self._entries.clear()

    def add(self, number: int, text: str, exchange: Any) -> None:
        """Adds an exchange. ``text`` is equal on all ranks that make the same call."""
        checksum = zlib.crc32(text.encode())
        self._digest = zlib.crc32(f"{number} {checksum}".encode(), self._digest)
        self.at = number
        self._entries.append((number, checksum, self._digest, exchange))

    def written(self) -> str:
        """Returns what other ranks read."""
        newest = [entry[:2] for entry in list(self._entries)[-SHOWN:]]
        return json.dumps([self.since, self.at, self._digest, newest])

    def first_difference(self, written: str) -> tuple[int, Any, Any] | None:
        """Compares with what another rank has written.

        Returns:
            (the number, this rank's exchange, the other's), each exchange None if this rank has none of its kind; or
            None if all are equal, or if this rank has not come so far, or has forgotten them.
        """
        since, at, digest, newest = json.loads(written)
        mine_there = next((entry for entry in reversed(self._entries) if entry[0] <= at), (0, 0, digest, None))
        if since != self.since or mine_there[0] != at or mine_there[2] == digest:
            return None
        checksums = {number: checksum for number, checksum, _, _ in self._entries}
        exchanges = {checksum: exchange for _, checksum, _, exchange in self._entries}
        for number, theirs in newest:
            mine = checksums.get(number, theirs)
            if mine != theirs:
                return number, exchanges[mine], exchanges.get(theirs)
        return at, None, None


class LateComparison:
    """Compares the exchanges of this rank with those of the next one. Used by the watcher's thread alone.

    Args:
        rank, size: this rank's number on the mesh, and the number of ranks.
        describe: returns what all ranks must share of a request.

    Attributes:
        since: set by any thread: ranks agree again after the exchange of this number.
        error: of all later calls if ranks made different calls; else "".
    """

    def __init__(self, rank: int, size: int, describe: Callable[[Request], str]) -> None:
        self._rank, self._next, self.since, self.error = rank, (rank + 1) % size, 0, ""
        self._describe, self._journal = lru_cache(maxsize=256)(describe), Journal()
        self._idle, self._blind = 0, False
        """Looks since this rank has begun something; and whether this rank has lost count of what it did."""

    def look(self, store: Any, begun: Sequence[tuple[int, Exchange]]) -> None:
        """Writes and compares what has begun since the last look."""
        if self.error:
            return
        journal = self._journal
        if journal.since != self.since:
            journal.restart(self.since)
            self._blind = False
        if len(begun) == AHEAD and begun[0][0] > journal.at + 1:  # exchanges were forgotten before this look
            self._blind = True
        if self._blind:
            return
        new = [each for each in begun if each[0] > journal.at]
        for number, exchange in new:
            journal.add(number, self._text(exchange), exchange)
        self._idle += 1
        if new:
            store.set(f"exchanged/{self._rank}", journal.written())
            self._idle = 0
        key = f"exchanged/{self._next}"
        if self._idle <= PATIENT and store.check([key]):
            difference = journal.first_difference(store.get(key).decode())
            if difference is not None and not store.check(["apart"]):
                number, mine, theirs = difference
                calls = {self._rank: self._text(mine), self._next: self._text(theirs)}
                store.set("apart", describe_apart(number, calls))
        if store.check(["apart"]):
            self.error = store.get("apart").decode()

    def _text(self, exchange: Exchange | None) -> str:
        """Returns a text that is equal on all ranks that make the same call, whether they compile it or not."""
        if exchange is None:
            return "another call"
        return f"{exchange.kind.rpartition(' ')[2]} of {self._describe(exchange.request)}"
