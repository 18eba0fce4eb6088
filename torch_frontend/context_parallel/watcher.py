"""Looks for questions of other ranks in a key-value store: a thread for each mesh, the watcher, answers them."""

from __future__ import annotations

import atexit
import json
import os
from threading import Event, Thread
from typing import Any
from weakref import WeakMethod

import torch.distributed as dist


def ask(store: Any, number: int, rank: int) -> None:
    """Asks the watchers of all ranks to answer for ranks that have not come to a meeting."""
    question = store.add("questions", 1)
    store.set(f"question {question}", json.dumps([number, rank]))


def start(store: Any, seconds: float, hear: WeakMethod[Any]) -> None:
    """Starts a thread that calls ``hear(store, number, rank)`` for each question, until the process or its groups end.

    Args:
        store: used by this thread alone, because a store serves one request at a time.
        seconds: between two looks.
        hear: a weak reference, so that the thread keeps no meeting alive.
    """
    ended = Event()
    thread = Thread(target=_watch, args=(store, seconds, hear, ended), name="attn_core watcher", daemon=True)
    thread.start()
    atexit.register(_end, thread, ended, os.getpid())


def _watch(store: Any, seconds: float, hear: WeakMethod[Any], ended: Event) -> None:
    question = 1
    while not ended.wait(min(seconds, 2.0)) and dist.is_initialized():
        listener = hear()
        if listener is None:
            return
        try:
            while store.check([f"question {question}"]):
                number, rank = json.loads(store.get(f"question {question}"))
                question += 1
                listener(store, number, rank)
        except Exception:  # the store is gone: the process that has it ended
            return
        del listener


def _end(thread: Thread, ended: Event, process: int) -> None:
    """Ends a watcher before the interpreter: a thread that wakes up later could not take the interpreter's lock."""
    if os.getpid() == process:  # a forked child has no watcher, and may find the event locked
        ended.set()
        thread.join(1.0)
