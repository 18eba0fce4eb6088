"""Compares calls between ranks through the key-value store of torch.distributed, without a collective.

Every rank numbers its exchanges. A rank meets the others at a number if its call is new, or if it refuses the call: it
writes a text into the store and reads the texts of the others. A call that was compared before only counts. If some
rank does not come to a meeting, its **watcher**, a thread, answers for it:

- if the rank has not reached the number yet, it will meet there, whatever call it makes;
- if it has begun the exchange already, the watcher says so. Then every rank takes part in the exchanges that any rank
  has begun, a rank without a valid call with NaN as its numbers (``stand_in``), and then every rank raises one error.

So no rank waits for a rank that refused. A rank that has returned from the exchange is **late**: where the others
raised, it did not, so the calls of the ranks no longer belong together, and every rank raises the error in every later
call of the mesh. It is the same if watchers find that ranks made different calls that all knew (``journal``).
"""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Callable
from threading import Lock
from typing import Any
from weakref import WeakMethod

from attn_core.call.after_fork import free_in_children
from attn_core.context_parallel.request import Request
from attn_core.errors import SpecError
from torch_frontend.context_parallel.agreement import watcher
from torch_frontend.context_parallel.agreement.answers import (
    APART,
    TEXT,
    Answers,
    Overtaken,
    describe_lost,
    describe_ranks,
    exchanges_to_join,
    list_ranks,
)
from torch_frontend.context_parallel.agreement.journal import AHEAD, Exchange, LateComparison

LONGEST_REFUSAL = 10.0
"""Seconds that a rank with an invalid call waits for the others before it raises alone."""
REMEMBERED = 4096
"""Calls that a mesh knows to be the same on all ranks."""


class Meeting:
    """The meetings of one mesh.

    Args:
        store, watched: two connections to the store of all ranks, with a prefix of the mesh's own. The watcher has the
            second one.
        rank, size: this rank's number on the mesh, and the number of ranks.
        timeout: the seconds that ranks wait for each other.
        play: takes part in an exchange without a valid call.
        describe: returns what all ranks must share of a request.

    Attributes:
        stopped: the number of an exchange that this rank has begun and another rank refused; else None.
    """

    def __init__(
        self,
        store: Any,
        watched: Any,
        *,
        rank: int,
        size: int,
        timeout: float,
        play: Callable[[Exchange], None],
        describe: Callable[[Request], str],
    ) -> None:
        self._store, self._rank, self._play, self._describe = store, rank, play, describe
        self._answers = Answers(store, rank, size, timeout)
        self._lock = free_in_children(Lock())
        self._count = self._ended = 0
        """The exchanges that began, and the calls that were refused; the last exchange that has come to its end."""
        self._begun: deque[tuple[int, Exchange]] = deque(maxlen=AHEAD)
        self._met: deque[int] = deque(maxlen=256)
        self._asked: set[int] = set()
        self.stopped: int | None = None
        self._owed: list[int] = []  # calls that this rank refused before all others came to them
        self._heard = self._lost = ""
        """The error of the last rank that asked; and the error of all later calls."""
        self._agreed: OrderedDict[Request, str] = OrderedDict()
        self._late = LateComparison(rank, size, describe)
        watcher.start(watched, size, WeakMethod(self._hear), WeakMethod(self._compare))

    def agreed(self, request: Request) -> bool:
        """Returns whether all ranks made this call before."""
        return request in self._agreed

    def begin(self, exchange: Exchange) -> None:
        """Counts an exchange that this rank begins. Sends nothing, unless a rank refused a call or asked for a meeting.

        Raises:
            SpecError: if another rank refused this call or an earlier one, or makes another one.
        """
        with self._lock:
            number, unsettled = self._count + 1, self._owed or self._late.error or self._lost
            if self.stopped is None and not unsettled and (number not in self._asked or number in self._met):
                self._count = number
                self._begun.append((number, exchange))
                return
        self._stop_if_apart()
        self._catch_up()
        if self._count + 1 in self._asked:
            self.meet(self._text(exchange))
        self.begin(exchange)

    def end(self) -> None:
        """Ends the exchange that this rank began last; raises SpecError if another rank refused it."""
        with self._lock:
            self._ended = self._count
            if self.stopped is None:
                return
        self._end_stopped(raises=True)

    def meet(self, text: str, request: Request | None = None, *, refused: bool = False, kind: str = TEXT) -> None:
        """Compares this rank's text with the texts of all ranks at the next number; ``request`` is then known to all.

        Raises:
            SpecError: on every rank, if the texts differ; the message lists each rank's.
            TimeoutError: if a rank does not come. A rank that refused returns instead, to raise its own error.
        """
        seconds = LONGEST_REFUSAL if refused else None
        if kind == TEXT:
            self._stop_if_apart()
        self._catch_up(seconds)
        with self._lock:
            number = self._count + 1
            self._met.append(number)
        self._store.set(f"{number}/{self._rank}", json.dumps([kind, text]))
        while True:
            try:
                answers = self._answers.collect(number, self._stopped_before, seconds)
                break
            except Overtaken:
                self._catch_up(seconds)
        if refused or any(answer != [kind, text] for answer in answers):
            self._settle(number, answers, number - 1)
            return
        self._answers.forget_before(number)
        if request is not None:
            self._agreed[request] = text
            if len(self._agreed) > REMEMBERED:
                self._agreed.popitem(last=False)

    def compare(self, text: str) -> None:
        """Meets before an exchange that ``begin`` does not count, and counts it. Raises as ``meet``."""
        self.meet(text)
        with self._lock:
            self._count = self._ended = self._count + 1

    def _stop_if_apart(self) -> None:
        """Meets the others with the error that the watchers found: some ranks may be in their next exchange already."""
        if self._late.error and not self._lost:
            self.meet(self._late.error, refused=True, kind=APART)
            self._lost = self._late.error
            raise SpecError(self._lost)

    def _catch_up(self, seconds: float | None = None) -> None:
        """Raises SpecError if a rank was late, now or before.

        Args:
            seconds: how long to wait for ranks that have not come to calls that this rank refused; None: the timeout.
        """
        while True:
            if self._lost:
                raise SpecError(self._lost)
            if self.stopped is not None:  # and this rank is not late, so its call ended with another error
                self._end_stopped(raises=False)
            elif not self._owed:
                return
            else:
                number = self._owed[0]
                try:
                    answers = self._answers.collect(number, self._stopped_before, seconds)
                except Overtaken:
                    continue
                if None in answers:
                    return
                self._owed.pop(0)
                self._settle(number, answers, number - 1, raises=False)

    def _end_stopped(self, *, raises: bool) -> None:
        """Settles the first exchange that another rank refused."""
        while (number := self.stopped) is not None:
            try:
                answers = self._answers.collect(number, self._stopped_before)
            except Overtaken:  # by an earlier one
                continue
            except RuntimeError as error:  # the process that has the store ended, perhaps with its own error
                self._lost = self._heard
                raise SpecError(self._lost) from error
            self._settle(number, answers, self._count, raises=raises)

    def _settle(self, number: int, answers: list[Any], began: int, *, raises: bool = True) -> None:
        """Ends an attempt: takes part in all that a rank has begun after ``began``, where this rank does already.

        Raises an error if the ranks' texts differ, without ``raises`` only if a rank was late.
        """
        last, begun = exchanges_to_join(answers, number)
        known = {text: request for request, text in self._agreed.items()}
        try:
            for kind, text in begun[max(0, began + 1 - number) :]:
                if text in known:
                    self._play(Exchange(kind, known[text]))
        finally:
            with self._lock:
                self._count, self.stopped = max(last, self._count, number), None
                self._met.append(number)
                self._late.since = self._count
                self._asked = {each for each in self._asked if each > self._count}
        error, self._lost = describe_ranks(answers), self._lost or describe_lost(answers)
        if None in answers:
            self._owed.append(number)
        elif self._lost or (error and raises):
            raise SpecError(self._lost or error)

    def _stopped_before(self, number: int) -> bool:
        return self.stopped is not None and self.stopped < number

    def _hear(self, store: Any, number: int, asker: int) -> None:
        """Answers a rank that waits for this one at a number. The watcher calls it, in its own thread and with its own
        connection: a store serves one request at a time, and the other thread may wait."""
        with self._lock:
            if number in self._met:
                return
            if number > self._count:
                self._asked.add(number)
                return
            begun = [exchange for at, exchange in self._begun if at >= number]
        if not begun:
            return  # answered long ago
        # It is there: the asker deletes it only after this rank has answered.
        theirs = json.loads(store.get(f"{number}/{asker}"))
        self._heard = list_ranks({asker: theirs})
        with self._lock:
            begun = [exchange for at, exchange in self._begun if at >= number]
            texts = [self._text(exchange, lambda request: str(request.options)) for exchange in begun]
            if begun[0].kind.endswith("forward") and theirs == [TEXT, texts[0]]:
                answer: list[Any] = theirs  # the same call, which is new to the other rank alone
            else:
                self.stopped = number if self.stopped is None else min(self.stopped, number)
                named = [[each.kind, text] for each, text in zip(begun, texts, strict=True)]
                late = max(self._count - 1, self._ended) >= number
                answer = ["running", {"count": self._count, "begun": named, "late": late}]
            self._met.append(number)  # a second answer might differ, and other ranks have read the first
        store.set(f"{number}/{self._rank}", json.dumps(answer))

    def _compare(self, store: Any) -> None:
        """Compares afterwards what this rank and the next one have exchanged. The watcher calls it."""
        with self._lock:
            begun = [] if self.stopped is not None or self._lost else list(self._begun)
        if begun:
            self._late.look(store, begun)

    def _text(self, exchange: Exchange, describe: Callable[[Request], str] | None = None) -> str:
        return self._agreed.get(exchange.request) or (describe or self._describe)(exchange.request)
