"""Looks into a key-value store: a thread for each mesh, the watcher, answers questions and compares what ranks did."""

from __future__ import annotations

import atexit
import json
import os
from threading import Event, Thread
from typing import Any
from weakref import WeakMethod

import torch.distributed as dist

POLL = 0.05
"""Seconds between two looks of a watcher, for each rank of the mesh: so many ranks do not flood the store."""


def ask(store: Any, number: int, rank: int) -> None:
    """Asks the watchers of all ranks to answer for ranks that have not come to a meeting."""
    question = store.add("questions", 1)
    store.set(f"question {question}", json.dumps([number, rank]))


def start(store: Any, ranks: int, hear: WeakMethod[Any], compare: WeakMethod[Any]) -> None:
    """Starts a thread that looks into a store until the process or its groups end.

    Args:
        store: used by this thread alone, because a store serves one request at a time.
        ranks: the number of ranks of the mesh.
        hear: called with (store, number, rank) for each question. A weak reference, so that the thread keeps no meeting
            alive.
        compare: called with the store after each look.
    """
    ended = Event()
    arguments = (store, min(POLL * ranks, 2.0), hear, compare, ended)
    thread = Thread(target=_watch, args=arguments, name="attn_core watcher", daemon=True)
    thread.start()
    atexit.register(_end, thread, ended, os.getpid())


def _watch(store: Any, seconds: float, hear: WeakMethod[Any], compare: WeakMethod[Any], ended: Event) -> None:
    question = 1
    while not ended.wait(seconds) and dist.is_initialized():
        listener, comparer = hear(), compare()
        if listener is None or comparer is None:
            return
        try:
            while store.check([f"question {question}"]):
                number, rank = json.loads(store.get(f"question {question}"))
                question += 1
                listener(store, number, rank)
            comparer(store)
        except Exception:  # the store is gone: the process that has it ended
            return
        del listener, comparer


def _end(thread: Thread, ended: Event, process: int) -> None:
    """Ends a watcher before the interpreter: a thread that wakes up later could not take the interpreter's lock."""
    if os.getpid() == process:  # a forked child has no watcher, and may find the event locked
        ended.set()
        thread.join(1.0)
