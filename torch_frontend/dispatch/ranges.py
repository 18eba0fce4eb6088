"""Plans whose kernels run in ranges, for profilers. Only calls that somebody profiles use them.

The same functions run in the same order as without a profiler, so a profile shows what really happens.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any

import torch
from torch.autograd import profiler

from attn_core.backends.shared.torch_ranges import Range, in_range
from attn_core.call.observe import range_name, ranges_enabled
from torch_frontend.dispatch.plan import Plan

Tensor = torch.Tensor


def in_ranges(call_plan: Plan) -> Plan:
    """Returns the plan with its functions in ranges if somebody listens, else the plan itself.

    The callers on the fast path repeat the condition, because a function call costs more than both of its reads.
    """
    if profiler._is_profiler_enabled or ranges_enabled():
        return _wrapped(call_plan, ranges_enabled())
    return call_plan


# NVTX is decided in the forward, because the backward may run on a thread of autograd, which has another
# context.
@lru_cache(maxsize=4096)
def _wrapped(call_plan: Plan, nvtx: bool) -> Plan:
    spec, backend = call_plan.spec, call_plan.backend
    if spec.empty:  # runs no kernel
        return call_plan
    names = range_name(backend, spec, "forward"), range_name(backend, spec, "backward")
    forward, backward = in_range(call_plan.forward, names[0], nvtx), in_range(call_plan.backward, names[1], nvtx)
    shortcut = _shortcut_in_ranges(call_plan.shortcut, *names, nvtx)
    return call_plan._replace(forward=forward, backward=backward, shortcut=shortcut)


def _shortcut_in_ranges(shortcut: Any, forward: str, backward: str, nvtx: bool) -> Any:
    """Wraps a backend's shortcut, and the same function for heads-first tensors: torch runs its backward by itself."""
    if shortcut is None:
        return None

    def run(*tensors: Tensor | None) -> Any:
        with Range(forward, nvtx):
            results = shortcut(*tensors)
        if results is not None:
            _mark_backward(results[0], backward, nvtx)
        return results

    heads_first = getattr(shortcut, "heads_first", None)
    if heads_first is not None:
        run.heads_first = _shortcut_in_ranges(heads_first, forward, backward, nvtx)  # type: ignore[attr-defined]
    return run


def _mark_backward(out: Tensor, name: str, nvtx: bool) -> None:
    """Puts the backward that torch recorded for a kernel's output in a range."""
    node = out.grad_fn
    # Views of the kernel's output have one input, the kernel has q, k and v.
    while node is not None and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    if node is not None:
        node.register_prehook(lambda _: _switch_to(Range(name, nvtx)))
        node.register_hook(lambda *_: _switch_to(None))


_running = threading.local()


def _switch_to(following: Range | None) -> None:
    """Ends the range of this thread's backward kernel, if there is one, and starts the following one.

    Torch calls no hook after a kernel that raised. Its range then ends when the next one starts.
    """
    before = getattr(_running, "range", None)
    _running.range = None
    if before is not None:
        before.stop()
    if following is not None:
        following.start()
        _running.range = following
