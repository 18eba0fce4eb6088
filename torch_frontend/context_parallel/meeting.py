"""Meetings of ranks through the key-value store of torch.distributed, without a collective.

Every rank numbers its exchanges. A rank meets the others at a number if its call is new, or if it refuses the call: it
writes a text into the store and reads the texts of the others. A call that was compared before only counts. If some
rank does not come to a meeting, its **watcher**, a thread, answers for it:

- if the rank has not reached the number yet, it will meet there, whatever call it makes;
- if it is in the exchange already, the watcher says so. Then every rank takes part in the exchanges that any rank has
  begun, a rank without a valid call with NaN as its numbers (``stand_in``), and then every rank raises the same error.

So no rank waits for a rank that refused, and the process groups stay usable. A watcher looks into the store every
``POLL`` seconds times the number of ranks, which takes about 25 microseconds each time.
"""

from __future__ import annotations

import json
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from threading import Lock
from typing import Any, NamedTuple

from attn_core.call.after_fork import free_in_children
from attn_core.context_parallel.request import Request
from attn_core.errors import SpecError
from torch_frontend.context_parallel import watcher

POLL = 0.05
"""Seconds between two looks of a watcher, for each rank of the mesh: so many ranks do not flood the store."""
PATIENCE = 0.05
"""Seconds that a rank waits before it asks the watchers of ranks that have not come."""
LONGEST_REFUSAL = 10.0
"""Seconds that a rank with an invalid call waits for the others before it raises alone."""
REMEMBERED = 4096


class Exchange(NamedTuple):
    """An exchange that a rank begins: "forward", "backward", or one of these with "compiled" before it."""

    kind: str
    request: Request


Play = Callable[[Exchange], None]
"""Takes part in an exchange without a valid call."""


class Meeting:
    """The meetings of one mesh.

    Args:
        store: of all ranks, with a prefix of the mesh's own; and a second connection to it for the watcher.
        rank, size: this rank's number on the mesh, and the number of ranks.
        timeout: the seconds that ranks wait for each other.

    Attributes:
        stopped: the number of an exchange that this rank has begun and another rank refused; else None.
    """

    def __init__(self, store: Any, watched: Any, rank: int, size: int, timeout: float) -> None:
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._lock = free_in_children(Lock())
        self._count = 0
        """The exchanges that began, and the calls that were refused."""
        self._begun: deque[tuple[int, Exchange]] = deque(maxlen=256)
        self._met: deque[int] = deque(maxlen=256)
        self._asked: set[int] = set()
        self.stopped: int | None = None
        self._agreed: OrderedDict[Request, str] = OrderedDict()
        self._answered: deque[int] = deque()
        watcher.start(watched, POLL * size, weakref.WeakMethod(self._hear))

    def agreed(self, request: Request) -> bool:
        """Returns whether all ranks made this call before."""
        return request in self._agreed

    def begin(self, exchange: Exchange, play: Play, describe: Callable[[Request], str]) -> None:
        """Counts an exchange that this rank begins. Sends nothing, unless another rank asked for a meeting here.

        Raises:
            SpecError: if another rank refused this call, or makes another one.
        """
        with self._lock:
            number = self._count + 1
            if self.stopped is None and (number not in self._asked or number in self._met):
                self._count = number
                self._begun.append((number, exchange))
                return
        self.check(play, describe)
        self.meet(self._text(exchange, describe), play, describe)
        self.begin(exchange, play, describe)

    def check(self, play: Play, describe: Callable[[Request], str]) -> None:
        """Raises SpecError if another rank refused an exchange that this rank has begun."""
        if self.stopped is not None:
            self._settle(self.stopped, self._collect(self.stopped, self._timeout), play, describe)

    def meet(
        self,
        text: str,
        play: Play,
        describe: Callable[[Request], str],
        request: Request | None = None,
        *,
        refused: bool = False,
    ) -> None:
        """Compares this rank's text with the texts of all ranks at the next number; ``request`` is then known to all.

        Raises:
            SpecError: on every rank, if the texts differ; the message lists each rank's.
            TimeoutError: if a rank does not come. A rank that refused returns instead, to raise its own error.
        """
        with self._lock:
            number = self._count + 1
            self._met.append(number)
        self._store.set(f"{number}/{self._rank}", json.dumps(["text", text]))
        answers = self._collect(number, LONGEST_REFUSAL if refused else self._timeout, alone=refused)
        if refused or any(answer != ["text", text] for answer in answers):
            self._settle(number, answers, play, describe)
            return
        if request is not None:
            self._agreed[request] = text
            if len(self._agreed) > REMEMBERED:
                self._agreed.popitem(last=False)

    def _settle(self, number: int, answers: list[Any], play: Play, describe: Callable[[Request], str]) -> None:
        """Ends an attempt: takes part in everything that a rank has begun, and raises if the ranks' texts differ."""
        running = [answer[1] for answer in answers if answer is not None and answer[0] == "running"]
        last = max((each["count"] for each in running), default=number)
        with self._lock:
            began = self._count
        try:
            for kind, text in next((each["begun"] for each in running if each["count"] == last), [])[
                max(0, began + 1 - number) :
            ]:
                request = next((known for known, words in self._agreed.items() if words == text), None)
                if request is not None:
                    play(Exchange(kind, request))
        finally:
            with self._lock:
                self._count, self.stopped = max(last, began), None
                self._met.append(number)  # a second question about it is answered already
                self._asked = {each for each in self._asked if each > self._count}
        texts = [_text_of(answer) for answer in answers]
        if len(set(texts)) > 1 and None not in answers:
            lines = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))
            raise SpecError(f"context_parallel_attention: expected the same call on every rank, got\n{lines}")

    def _collect(self, number: int, seconds: float, *, alone: bool = False) -> list[Any]:
        """Returns every rank's answer at a number; None for a rank that did not come, if ``alone``."""
        keys = [f"{number}/{rank}" for rank in range(self._size)]
        began, pause, asked = time.monotonic(), 1e-4, False
        answers: list[Any] = [None] * self._size
        while True:
            for rank, key in enumerate(keys):
                if answers[rank] is None and self._store.check([key]):
                    answers[rank] = json.loads(self._store.get(key))
            if None not in answers:
                self._forget(number)
                return answers
            waited = time.monotonic() - began
            if not asked and waited > PATIENCE:
                asked = True
                watcher.ask(self._store, number, self._rank)
            # A rank that is in the exchange waits for this one.
            if waited > (self._timeout if any(each and each[0] == "running" for each in answers) else seconds):
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        if alone:
            return answers
        absent = ", ".join(str(rank) for rank, answer in enumerate(answers) if answer is None)
        raise TimeoutError(
            f"context_parallel_attention: rank {absent} of the mesh did not make this call within {seconds:g} s, the "
            "timeout of torch.distributed"
        )

    def _hear(self, store: Any, number: int, asker: int) -> None:
        """Answers a rank that waits for this one at a number. The watcher calls it, in its own thread.

        Args:
            store: the watcher's own connection: a store serves one request at a time, and the other thread may wait.
        """
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
        with self._lock:
            begun = [exchange for at, exchange in self._begun if at >= number]
            texts = [self._text(exchange, lambda request: str(request.options)) for exchange in begun]
            if begun[0].kind.endswith("forward") and theirs == ["text", texts[0]]:
                answer: list[Any] = theirs  # the same call, which is new to the other rank alone
            else:
                self.stopped = number if self.stopped is None else self.stopped
                named = [[each.kind, text] for each, text in zip(begun, texts, strict=True)]
                answer = ["running", {"count": self._count, "begun": named}]
        store.set(f"{number}/{self._rank}", json.dumps(answer))

    def _text(self, exchange: Exchange, describe: Callable[[Request], str]) -> str:
        return self._agreed.get(exchange.request) or describe(exchange.request)

    def _forget(self, number: int) -> None:
        """Deletes this rank's old answers, which every rank has read, because all came to a later meeting."""
        while self._answered and self._answered[0] != number:
            self._store.delete_key(f"{self._answered.popleft()}/{self._rank}")
        if not self._answered:
            self._answered.append(number)


def _text_of(answer: Any) -> str:
    if answer is None:
        return "did not come"
    kind, value = answer
    return str(value) if kind == "text" else str(value["begun"][0][1] if value["begun"] else "another call")
