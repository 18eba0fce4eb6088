"""From a request for context parallelism to what this rank does in it, compared between ranks."""

from __future__ import annotations

from functools import lru_cache

from attn_core.context_parallel import request as requests
from attn_core.context_parallel.cost.choose import Explanation
from attn_core.context_parallel.request import Request
from attn_core.selection import Target
from torch_frontend.context_parallel.agreement import agree
from torch_frontend.context_parallel.exchange import Axis, axis
from torch_frontend.context_parallel.program import Work, program
from torch_frontend.dispatch.plan import device_name


def prepared(request: Request) -> Work:
    """What this rank does in a call: planned and compared between ranks, once for every call of its kind.

    An error, or a different plan, on some ranks is an error on every rank: the others would wait for them.
    """
    return _prepared(request, *map(axis, request.axes))


@lru_cache(maxsize=64)
def _prepared(request: Request, *axes: Axis) -> Work:
    try:
        choice, call = explain_request(request)
    except Exception as error:
        agree(request, f"{type(error).__name__}: {str(error).splitlines()[0]}", *axes)
        raise
    names = sorted({name for _, name in call.backends})
    agree(request, f"{choice.strategy} on {', '.join(names)}", *axes)
    alone = Axis("", 1, 0)
    outer, inner = axes if len(axes) == 2 else (alone, *axes) if choice.strategy == "ulysses" else (*axes, alone)
    return Work(program(call, outer.rank, request.device), outer, inner)


def explain_request(request: Request) -> Explanation:
    """The plan of a call and why it was chosen. Sends nothing."""
    return requests.explain_request(request, Target.here("torch", device_name(request.device)))
