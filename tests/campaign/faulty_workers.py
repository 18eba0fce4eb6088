"""Workers of a campaign with planted faults. Each process that runs one imports it by name."""

from __future__ import annotations

import os
import time
from functools import wraps
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.campaign import jax_context, torch_context
from tests.campaign.workers import serve


def see_one_key_more() -> None:
    """Lets every rank see the key behind the diagonal."""
    from attn_core.context_parallel import call

    right = call.VisibleBand

    @wraps(right)
    def wrong(left: Any, ahead: Any, *others: Any) -> Any:
        return right(left, None if ahead is None else ahead + 1, *others)

    call.VisibleBand = wrong  # type: ignore[assignment, misc]


def torch_ranks(*arguments: Any) -> None:
    see_one_key_more()
    torch_context.work(*arguments)


def jax_devices(*arguments: Any) -> None:
    see_one_key_more()
    jax_context.work(*arguments)


def answers(rank: int, count: int, folder: Path, connection: Connection) -> None:
    """Does what the job says, on the ranks that it names."""

    def run(job: tuple[str, int]) -> int:
        fault, at = job
        if at == rank:
            if fault == "die":
                os._exit(3)
            if fault == "hang":
                time.sleep(600)
            if fault == "raise":
                raise ValueError("no such tile")
        return os.getpid()

    serve(connection, run)
