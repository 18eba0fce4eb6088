"""Collects what the ranks of a mesh wrote into a key-value store at a number, and lists it in an error."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from torch_frontend.context_parallel.agreement import watcher

PATIENCE = 0.05
"""Seconds that a rank waits before it asks the watchers of ranks that have not come."""


TEXT, APART = "text", "apart"
"""Kinds of answers: a rank's call or its error, and what watchers found: an error of all later calls."""


class Overtaken(Exception):
    """Another rank refused an earlier exchange, so that the ranks will not come to this number."""


class Answers:
    """The answers of one mesh's ranks; ``Meeting`` has the arguments."""

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._agreed: list[int] = []

    def collect(self, number: int, overtaken: Callable[[int], bool], seconds: float | None = None) -> list[Any]:
        """Waits for every rank's answer at a number and returns the answers.

        Args:
            overtaken: returns whether another rank refused an exchange before this number.
            seconds: after which it returns None for ranks that did not come; None raises an error after the timeout.

        Raises:
            Overtaken: if ``overtaken(number)``.
            TimeoutError: if a rank does not come, and ``seconds`` is None.
        """
        keys = [f"{number}/{rank}" for rank in range(self._size)]
        began, pause, sent_question = time.monotonic(), 1e-4, False
        answers: list[Any] = [None] * self._size
        while True:
            for rank, key in enumerate(keys):
                if answers[rank] is None and self._store.check([key]):
                    answers[rank] = json.loads(self._store.get(key))
            if None not in answers:
                return answers
            if overtaken(number):
                raise Overtaken
            waited = time.monotonic() - began
            if not sent_question and waited > PATIENCE:
                sent_question = True
                watcher.ask(self._store, number, self._rank)
            # A rank that is in the exchange waits for this one.
            patient = any(each and each[0] == "running" for each in answers)
            if waited > (self._timeout if seconds is None or patient else seconds):
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        if seconds is not None:
            return answers
        absent = ", ".join(str(rank) for rank, answer in enumerate(answers) if answer is None)
        raise TimeoutError(
            f"context_parallel_attention: rank {absent} of the mesh did not make this call within {self._timeout:g} s, "
            "the timeout of torch.distributed"
        )

    def forget_before(self, number: int) -> None:
        """Deletes this rank's answers at which all ranks agreed before; ``number`` is the next such meeting.

        Every rank has read them, because it came to this one. Answers to refusals stay: a rank that gave up waiting for
        the others reads them later.
        """
        while self._agreed:
            self._store.delete_key(f"{self._agreed.pop()}/{self._rank}")
        self._agreed.append(number)


def describe_ranks(answers: list[Any]) -> str:
    """Returns an error that lists each rank's call; "" if they are equal."""
    named = dict(enumerate(answers))
    return list_ranks(named) if len(set(map(_text_of, answers))) > 1 else ""


def list_ranks(answers: dict[int, Any]) -> str:
    """Returns an error that lists the calls of some ranks."""
    lines = "\n".join(f"  rank {rank}: {_text_of(answer)}" for rank, answer in answers.items())
    return f"context_parallel_attention: expected the same call on every rank, got\n{lines}"


def describe_late(answers: list[Any]) -> str:
    """Returns the error of all later calls; "" unless a rank had returned when it heard that its call was refused."""
    running = [(rank, answer[1]) for rank, answer in enumerate(answers) if answer and answer[0] == "running"]
    late = ", ".join(str(rank) for rank, value in running if value["late"])
    if not late:
        return ""
    return (
        f"{describe_ranks(answers)}\nRank {late} had returned from this call before it could know. So the ranks may be "
        "at different calls now, and every later call on this mesh raises this error. To go on, make a mesh of new "
        "process groups on all ranks"
    )


def describe_apart(number: int, calls: dict[int, str]) -> str:
    """Returns the error of all later calls if ranks made different calls that all of them had made before."""
    lines = "\n".join(f"  rank {rank}: {call}" for rank, call in sorted(calls.items()))
    return (
        f"context_parallel_attention: expected the same call on every rank, got as exchange {number} of the mesh\n"
        f"{lines}\nAll ranks had made these calls before, so they were compared only afterwards. Results since then "
        "may be wrong, and every later call on this mesh raises this error. To go on, make a mesh of new process "
        "groups on all ranks"
    )


def exchanges_to_join(answers: list[Any], number: int) -> tuple[int, list[Any]]:
    """Returns (the last exchange that any rank has begun, what it has begun from ``number`` on)."""
    running: list[dict[str, Any]] = [answer[1] for answer in answers if answer is not None and answer[0] == "running"]
    nothing: dict[str, Any] = {"count": number, "begun": []}
    longest = max([*running, nothing], key=lambda each: len(each["begun"]))
    return longest["count"], longest["begun"]


def describe_lost(answers: list[Any]) -> str:
    """Returns the error of all later calls; "" if the ranks still agree on where they are."""
    return next((answer[1] for answer in answers if answer and answer[0] == APART), "") or describe_late(answers)


def _text_of(answer: Any) -> str:
    if answer is None:
        return "did not come"
    kind, value = answer
    if kind in (TEXT, APART):
        return str(value)
    exchange, text = value["begun"][0]
    return str(text) if exchange.endswith("forward") else f"{exchange} of {text}"
