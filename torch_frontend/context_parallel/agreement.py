"""Prepares a call on all ranks together: compares what they plan, and tells all ranks if one refuses its call.

Calls are compared through the key-value store of torch.distributed, without a collective.

Every rank numbers its exchanges. A rank meets the others at a number if its call is new, or if it refuses the call: it
writes an answer into the store and reads the answers of the others. A call that was compared before only counts. If
some rank does not come to a meeting, its **watcher**, a thread, answers for it:

- if the rank has not reached the number yet, it will meet there, whatever call it makes;
- if it has begun the exchange already, the watcher says so. Then every rank takes part in the exchanges that any rank
  has begun, a rank without a valid call with NaN as its numbers (``play``), and then every rank raises one error.

So no rank waits for a rank that refused. A rank that has returned from the exchange is **late**: where the others
raised, it did not, so the calls of the ranks no longer belong together, and every rank raises the error in every later
call of the mesh. It is the same if watchers find that ranks made different calls that all knew: each rank keeps a
running digest of its exchanges, and its watcher compares it with that of the next rank.
"""

from __future__ import annotations

import atexit
import json
import os
import time
import zlib
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from threading import Event, Lock, Thread
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from attn_core.call.after_fork import free_in_children
from attn_core.context_parallel.request import Request, describe_request
from attn_core.errors import ShapeError, SpecError
from torch_frontend.context_parallel import backward, forward
from torch_frontend.context_parallel.mesh import RankAxis, find_axis, group_names
from torch_frontend.context_parallel.prepare import RankPlan, prepare


class SharedCall(NamedTuple):
    """A call that all ranks make.

    Attributes:
        plan: what this rank runs.
        meeting: of the ranks; None for a single one.
        forward, backward: the exchanges to begin.
    """

    request: Request
    plan: RankPlan
    meeting: Meeting | None
    forward: Exchange
    backward: Exchange

    def begin(self, exchange: Exchange) -> None:
        """Counts an exchange that begins now; compares each kind of call once between all ranks.

        Raises:
            SpecError: if another rank makes another call, refused this one, or one from which some rank had returned.
        """
        if self.meeting is not None:
            self.meeting.begin(exchange, self.request)

    def end(self) -> None:
        """Ends the exchange that began last. Raises SpecError if another rank refused it."""
        if self.meeting is not None:
            self.meeting.end()


def prepare_together(request: Request, *, compiled: bool = False) -> SharedCall:
    """Plans a call. If this rank raises an error, every rank does: the others would wait for it."""
    axes = tuple(map(find_axis, request.axes))
    return _share(request, compiled, find_meeting(*axes), axes)


# A small cache, because a plan holds tensors on the device. Process groups may be made again with the same names.
@lru_cache(maxsize=64)
def _share(request: Request, compiled: bool, meeting: Meeting | None, axes: tuple[RankAxis, ...]) -> SharedCall:
    """Plans a call once, and writes down by which text the ranks compare it."""
    try:
        plan = prepare(request)
    except Exception as error:
        if meeting is not None:
            meeting.refuse(error)
        raise
    # Sorted, because the order of a set of strings differs between processes, and ranks compare this text.
    names = ", ".join(sorted({name for _, name in plan.call.backends}))
    text = f"{describe_request(request)}: {plan.call.plan.strategy} on {names}"
    kinds = ("compiled forward", "compiled backward") if compiled else ("forward", "backward")
    return SharedCall(request, plan, meeting, *(Exchange.of(kind, text) for kind in kinds))


def announce_error(error: Exception, mesh: DeviceMesh) -> None:
    """Tells the other ranks of a mesh that this rank raises, so that they raise too; does nothing without a mesh.

    Raises:
        SpecError: on every rank, unless all ranks refuse with one error; the message lists each rank's call.
    """
    try:
        names = group_names(mesh)
    except (TypeError, ShapeError):
        return
    meeting = find_meeting(*map(find_axis, names))
    if meeting is not None:
        meeting.refuse(error)


_meetings: WeakKeyDictionary[Any, dict[tuple[RankAxis, ...], Meeting | None]] = WeakKeyDictionary()
"""The meetings of a store, which ends with its process groups."""


def find_meeting(*axes: RankAxis) -> Meeting | None:
    """Returns the meeting of the ranks along one or two axes; None for a single rank."""
    store = dist.distributed_c10d._get_default_store()
    if store is None:
        return None
    opened, shared = _meetings.setdefault(store, {}), tuple([axis for axis in axes if axis.size > 1])
    if shared not in opened:
        opened[shared] = _open(store, shared)
    return opened[shared]


def _open(base: Any, axes: tuple[RankAxis, ...]) -> Meeting | None:
    """Opens the meeting of all ranks of a mesh; returns None for groups that only pretend to communicate.

    The ranks of a mesh of two axes find each other by the ranks of their first column.
    """
    groups = [dist.distributed_c10d._resolve_process_group(axis.name) for axis in axes]  # type: ignore[arg-type, unused-ignore]
    if not groups or any(dist.get_backend(group) == "fake" for group in groups):
        return None
    timeout = base.timeout if isinstance(base.timeout, timedelta) else timedelta(seconds=300)
    own, watched = _connection(base), _connection(base)
    members = [dist.get_process_group_ranks(group) for group in groups]
    rank, size, name = axes[-1].rank, axes[-1].size, str(members[-1])
    if len(axes) == 2:
        outer, inner = axes
        rank, size = outer.rank * inner.size + inner.rank, outer.size * inner.size
        # Rank 0 of a row knows the first column, and tells its row.
        key = f"attn_core/column of {members[1]}"
        if inner.rank == 0:
            own.set(key, str(members[0]))
        own.wait([key], timeout)
        name = f"{own.get(key).decode()} x {inner.size}"
    # A mesh that is opened again begins at 0, so it needs other keys.
    opened = own.add(f"attn_core/{name}/opened by {rank}", 1)
    own, watched = (dist.PrefixStore(f"attn_core/{name}/{opened}", each) for each in (own, watched))
    return Meeting(own, watched, rank=rank, size=size, timeout=timeout.total_seconds(), play=stand_in)


def _connection(store: Any) -> Any:
    """Returns a connection to a store for one thread; the store itself if it is a caller's own kind, without clones."""
    try:
        return store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):
        return store


@torch.no_grad()
def stand_in(kind: str, request: Request) -> None:
    """Sends and receives what this rank would in an exchange that the other ranks have begun, so that they do not wait.

    The numbers are NaN. Every rank raises an error afterwards; a rank that reads its results before it learns of the
    error must not take them for right ones.
    """
    plan, compiled = prepare(request), kind.startswith("compiled")
    q, k, v, sinks = (
        None if each is None else torch.full(tuple(each[0]), torch.nan, dtype=each[1], device=request.device)
        for each in request.shards
    )
    assert q is not None and k is not None and v is not None
    if kind.endswith("forward"):
        forward.forward(plan, q, k, v, sinks, with_lse=compiled or request.options.return_lse, keep=False)
        return
    dout = q.new_full((*q.shape[:3], v.shape[3]), torch.nan)
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), torch.nan, dtype=plan.lse_dtype)
    if compiled:
        residuals = forward.recompute_residuals(plan, q, k, v, dout, lse)
    else:
        residuals = [forward.nan_residuals(plan, q, k, v)] * plan.call.head_groups
    sends_lse = request.options.return_lse and plan.inner.size > 1
    backward.backward(plan, residuals, sinks, dout, lse if sends_lse else None)


POLL = 0.05
"""Seconds between two looks of a watcher, for each rank of the mesh: so many ranks do not flood the store."""
PATIENCE = 0.05
"""Seconds that a rank waits before it asks the watchers of ranks that have not come."""
LONGEST_REFUSAL = 10.0
"""Seconds that a rank with an invalid call waits for the others before it raises alone."""
REMEMBERED = 4096
"""Calls that a mesh knows to be the same on all ranks."""
AHEAD = 2048
"""Exchanges that a rank can still compare with those of others; a GPU queues about 1000 launches."""
SHOWN = 64
"""The newest exchanges that a rank shows to the others, so that an error can name the first one that differs."""
FOR_EVER = "every later call on this mesh raises this error. To go on, make a mesh of new process groups on all ranks"


class Exchange(NamedTuple):
    """An exchange that ranks begin together.

    Attributes:
        kind: "forward", "backward", one of these with "compiled" before it, or "unshard_sequence".
        call: the text by which all ranks know the call.
        text: of the exchange; the same on a rank that compiles the call and on one that does not.
        mark: a checksum of this text.
    """

    kind: str
    call: str
    text: str
    mark: bytes

    @classmethod
    def of(cls, kind: str, call: str) -> Exchange:
        """Returns an exchange of a call."""
        text = f"{kind.rpartition(' ')[2]} of {call}"
        return cls(kind, call, text, b"%08x" % zlib.crc32(text.encode()))


class Answer(NamedTuple):
    """What a rank writes at a number: its call or its error.

    Attributes:
        begun: (kind, call) of the exchanges that it has begun from this number on.
        late: whether it had returned from the first of them when it heard that another rank refuses it.
        final: whether ``text`` is the error of all later calls.
    """

    text: str
    begun: list[list[str]] = []  # noqa: RUF012
    late: bool = False
    final: bool = False


class Meeting:
    """The meetings of one mesh.

    Args:
        store, watched: two connections to the store of all ranks, with a prefix of the mesh's own. The watcher has the
            second one, because a store serves one request at a time, and this thread may wait.
        rank, size: this rank's number on the mesh, and the number of ranks.
        timeout: the seconds that ranks wait for each other.
        play: takes part in an exchange of a kind, of a call that all know, without a valid call of this rank.

    Attributes:
        known: what ``play`` needs of each call that all ranks made before, by its text.
        unsettled: the errors of exchanges that this rank has begun and another rank refused, and of calls that this
            rank refused before all others came to them, by their numbers.
    """

    def __init__(
        self,
        store: dist.Store,
        watched: dist.Store,
        *,
        rank: int,
        size: int,
        timeout: float,
        play: Callable[[str, Any], object],
    ) -> None:
        self._store, self._rank, self._size, self._timeout, self._play = store, rank, size, timeout, play
        self._lock = free_in_children(Lock())
        self._count = self._ended = self._digest = 0
        """The exchanges that began, and the calls that were refused; the last exchange that has come to its end; and
        the digest of all exchanges since the ranks last settled a refusal."""
        self._begun: deque[tuple[int, int, Exchange]] = deque(maxlen=AHEAD)  # (number, digest, exchange)
        self._answered: deque[int] = deque(maxlen=256)
        self._asked: set[int] = set()
        self._agreed = 0  # the number of the last meeting in which all ranks made the same call
        self.known: dict[str, Any] = {}
        self.unsettled: dict[int, str] = {}
        self._apart = self._final = ""
        """The difference that the watcher found, and the error of all later calls."""
        _start_watcher(self, watched, min(POLL * size, 2.0))

    def begin(self, exchange: Exchange, known: Any = None) -> None:
        """Counts an exchange that this rank begins. Sends nothing, unless its call is new or a rank refused one.

        Args:
            known: what ``play`` needs of the call; None for one that is new each time.

        Raises:
            SpecError: if another rank refused this call or an earlier one, or makes another one. The message lists each
                rank's call.
            TimeoutError: if the call is new and a rank does not come.
        """
        agreed = exchange.call in self.known
        while True:
            with self._lock:
                number = self._count + 1
                if not (self.unsettled or self._apart or self._final) and agreed and number not in self._asked:
                    self._count, self._digest = number, zlib.crc32(exchange.mark, self._digest)
                    self._begun.append((number, self._digest, exchange))
                    return
            self._settle_earlier()
            if not agreed or self._count + 1 in self._asked:
                self._meet(exchange, known)
                agreed = True

    def end(self) -> None:
        """Ends the exchange that this rank began last; raises SpecError if another rank refused it."""
        with self._lock:
            self._ended, refused = self._count, bool(self.unsettled)
        if refused:
            self._settle_earlier(raises=True)

    def _meet(self, exchange: Exchange, known: Any) -> None:
        """Compares this rank's exchange with those of all ranks at the next number, and remembers the call."""
        number, answers = self._answer(Answer(_shown(exchange)))
        if any(each.text != _shown(exchange) for each in answers if each):
            self._settle(number, answers)
        # Every rank has read the answers of the last one, because it came to this one. Answers to refusals stay: a rank
        # that gave up waiting for the others reads them later.
        if self._agreed:
            self._store.delete_key(f"{self._agreed}/{self._rank}")
        self._agreed = number
        if known is not None:
            self.known[exchange.call] = known
            if len(self.known) > REMEMBERED:
                del self.known[next(iter(self.known))]

    def refuse(self, error: Exception) -> None:
        """Tells the other ranks that this rank refuses the call, or the backward, that it was about to begin.

        Raises:
            SpecError: on every rank, unless all ranks refuse with one error; the message lists each rank's call. If
                others do not come for long, it returns, so that this rank raises its own error.
        """
        self._settle_earlier(LONGEST_REFUSAL)
        first_line = "".join(str(error).splitlines()[:1])
        self._settle(*self._answer(Answer(f"{type(error).__name__}: {first_line}"), LONGEST_REFUSAL))

    def _answer(self, answer: Answer, seconds: float | None = None) -> tuple[int, list[Answer | None]]:
        """Writes this rank's answer at the next number; returns the number, and the answers of all ranks."""
        with self._lock:
            number = self._count + 1
            self._answered.append(number)
            self._asked.discard(number)
        self._store.set(f"{number}/{self._rank}", json.dumps(answer))
        return number, self._collect(number, seconds)

    def _collect(self, number: int, seconds: float | None = None) -> list[Answer | None]:
        """Waits for every rank's answer at a number.

        Args:
            seconds: after which it returns None for ranks that did not come; None raises an error after the timeout.
        """
        began, asked = time.monotonic(), False
        answers: list[Answer | None] = [None] * self._size
        while True:
            for rank in range(self._size):
                if answers[rank] is None and self._store.check([f"{number}/{rank}"]):
                    answers[rank] = Answer(*json.loads(self._store.get(f"{number}/{rank}")))
            if None not in answers:
                return answers
            earlier = self._first_unsettled()
            if earlier is not None and earlier < number:  # the others come out of that first
                self._settle_earlier(seconds)
            waited, own = time.monotonic() - began, answers[self._rank]
            if waited > PATIENCE and own and not asked:
                asked = True
                self._ask(number, own.text)
            # A rank that is in the exchange waits for this one.
            patient = seconds is None or any(each and each.begun for each in answers)
            if waited > (self._timeout if patient or seconds is None else seconds):
                break
            time.sleep(min(1e-4 + waited, 0.02))
        if seconds is not None:
            return answers
        absent = ", ".join(str(rank) for rank, answer in enumerate(answers) if answer is None)
        raise TimeoutError(
            f"context_parallel_attention: rank {absent} of the mesh did not make this call within {self._timeout:g} s, "
            "the timeout of torch.distributed"
        )

    def _ask(self, number: int, text: str) -> None:
        """Asks the watchers of all ranks to answer for ranks that have not come to a meeting."""
        self._store.set(f"question {self._store.add('questions', 1)}", json.dumps([number, self._rank, text]))

    def _settle_earlier(self, seconds: float | None = None, *, raises: bool = False) -> None:
        """Settles refusals of earlier calls. Raises SpecError if the ranks no longer agree on where they are.

        Args:
            seconds: how long to wait for ranks that have not come to calls that this rank refused; None: the timeout.
            raises: whether every refusal is an error.
        """
        while (number := self._first_unsettled()) is not None and not self._final:
            try:
                answers = self._collect(number, seconds)
            except RuntimeError as error:  # the process that has the store ended, perhaps with its own error
                self._final = self.unsettled[number]
                raise SpecError(self._final) from error
            if None in answers:
                return
            self._settle(number, answers, raises=raises)
        if self._apart and not self._final:
            # The others may be in their next exchange already.
            self._settle(*self._answer(Answer(self._apart, final=True), LONGEST_REFUSAL))
            self._final = self._apart
        if self._final:
            raise SpecError(self._final)

    def _first_unsettled(self) -> int | None:
        with self._lock:
            return min(self.unsettled, default=None)

    def _settle(self, number: int, answers: list[Answer | None], *, raises: bool = True) -> None:
        """Ends an attempt: takes part in all that any rank has begun from ``number`` on and this rank has not.

        Raises an error if the answers differ, without ``raises`` only if it is one of all later calls.
        """
        given = {rank: answer for rank, answer in enumerate(answers) if answer}
        calls = {rank: answer.text if answer else "did not come" for rank, answer in enumerate(answers)}
        if given[self._rank].begun and len(set(calls.values())) == 1:  # new to another rank alone, so it goes on
            self.unsettled.pop(number, None)
            return
        longest = max((answer.begun for answer in given.values()), key=len)
        try:
            for kind, call in longest[len(given[self._rank].begun) :]:
                if call in self.known:
                    self._play(kind, self.known[call])
        finally:
            with self._lock:
                self._count = max(self._count, number, number - 1 + len(longest))
                if None in answers:
                    self.unsettled[number] = _listed(calls)
                else:
                    self.unsettled.pop(number, None)
                    self._begun.clear()
                    self._digest = 0
        late = ", ".join(str(rank) for rank, answer in given.items() if answer.late)
        self._final = self._final or next((answer.text for answer in given.values() if answer.final), "")
        if late and not self._final:
            self._final = (
                f"{_listed(calls)}\nRank {late} had returned from this call before it could know. So the ranks may be "
                f"at different calls now, and {FOR_EVER}"
            )
        if None not in answers and (self._final or (raises and len(set(calls.values())) > 1)):
            raise SpecError(self._final or _listed(calls))

    def _hear(self, store: dist.Store, number: int, asker: int, text: str) -> None:
        """Answers a rank that waits for this one at a number. The watcher calls it, in its own thread."""
        with self._lock:
            if number in self._answered:  # a second answer might differ, and other ranks have read the first
                return
            if number > self._count:
                self._asked.add(number)
                return
            begun = [exchange for at, _, exchange in self._begun if at >= number]
            if not begun:
                return  # answered long ago
            self._answered.append(number)
            self.unsettled[number] = _listed({asker: text})
            late = max(self._count - 1, self._ended) >= number
        answer = Answer(_shown(begun[0]), [[each.kind, each.call] for each in begun], late)
        store.set(f"{number}/{self._rank}", json.dumps(answer))

    def _compare(self, store: dist.Store) -> None:
        """Shows this rank's newest exchanges, and compares them with those of the next rank. The watcher calls it."""
        with self._lock:
            begun = [] if self.unsettled or self._final else list(self._begun)
        if not begun:
            return
        newest = [(number, digest, exchange.mark.decode()) for number, digest, exchange in begun[-SHOWN:]]
        store.set(f"exchanges/{self._rank}", json.dumps(newest))
        after = (self._rank + 1) % self._size
        if not store.check([f"exchanges/{after}"]):
            return
        theirs = json.loads(store.get(f"exchanges/{after}"))
        own = {number: (digest, exchange.mark.decode()) for number, digest, exchange in begun if number >= theirs[0][0]}
        for number, digest, mark in theirs:
            if number in own and own[number][0] != digest:
                marks = {self._rank: own[number][1], after: mark}
                # With equal marks, an earlier exchange was another one.
                named = begun if len(set(marks.values())) > 1 else []
                texts = {exchange.mark.decode(): exchange.text for _, _, exchange in named}
                calls = {rank: texts.get(mark, "another call") for rank, mark in marks.items()}
                self._apart = (
                    f"{_listed(calls, number)}\nAll ranks had made these calls before, so they were compared only "
                    f"afterwards. Results since then may be wrong, and {FOR_EVER}"
                )
                return


def _shown(exchange: Exchange) -> str:
    """Returns how errors show what a rank has begun: a forward as its call."""
    return exchange.call if exchange.text.startswith("forward") else exchange.text


def _listed(calls: dict[int, str], number: int | None = None) -> str:
    """Returns an error that lists the calls of ranks."""
    where = "" if number is None else f" as exchange {number} of the mesh"
    lines = "\n".join(f"  rank {rank}: {call}" for rank, call in sorted(calls.items()))
    return f"context_parallel_attention: expected the same call on every rank, got{where}\n{lines}"


def _start_watcher(meeting: Meeting, store: dist.Store, seconds: float) -> None:
    """Starts a thread that looks into a store until the process, its groups or the meeting end."""
    ended, process = Event(), os.getpid()
    thread = Thread(target=_watch, args=(ref(meeting), store, seconds, ended), name="attn_core watcher", daemon=True)
    thread.start()

    def end() -> None:
        """Ends it before the interpreter: a thread that wakes up later could not take the interpreter's lock."""
        if os.getpid() == process:  # a forked child has no watcher, and may find the event locked
            ended.set()
            thread.join(1.0)

    atexit.register(end)


def _watch(meeting: ref[Meeting], store: dist.Store, seconds: float, ended: Event) -> None:
    """Answers other ranks' questions until the group of processes or the meeting ends, which it does not keep alive."""
    question = 1
    while not ended.wait(seconds) and dist.is_initialized():
        found = meeting()
        if found is None:
            return
        try:
            while store.check([f"question {question}"]):
                found._hear(store, *json.loads(store.get(f"question {question}")))
                question += 1
            found._compare(store)
        except Exception:  # the store is gone: the process that has it ended
            return
        del found
