"""Jobs of ``context_torch_worker`` in which a rank hears of a refusal late, as over NCCL: its calls return at once.

A thread stands for the GPU: it runs forwards and backwards in the order of the calls, which return before. A gate in
front of a rank's watcher decides where in its program the rank hears of a refusal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from threading import Event
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from context_torch_scenes import error_of, row, tensors
from torch.distributed.device_mesh import DeviceMesh

from torch_frontend import attention
from torch_frontend.context_parallel import agreement, backward, forward
from torch_frontend.context_parallel.attention import context_parallel_attention, shard_sequence

PATIENCE = 6.0
"""Seconds after which a call that was started counts as hanging."""
GPU_SHAPES = [(1, 512, heads, 64) for heads in (8, 4, 4, 8)]
BAD: dict[str, dict[str, Any]] = {"softcap": {"softcap": -1.0}, "window": {"window": (-3, 0)}}


TRIES = 5


class Late(NamedTuple):
    """A program of all ranks, the calls that ranks refuse, and where the others hear of it.

    Attributes:
        program: "forwards": each call in a try of its own. "training": a forward and a backward in each. "layers":
            three calls in each.
        refused: (rank, call, name of the bad argument) of each refusal; calls are numbered from 0 in the program.
        heard: at which points of the program a rank's watcher is let through: (rank, exchange that the rank began,
            "inside", "after" or "waiting"). "waiting" means as soon as the rank waits for answers of other ranks. A
            rank without a point hears at once.
        fresh: the call that is of a new kind, if any.
        new: whether the first call is the first one of the mesh.
        slow: (rank, call): the rank comes half a second later than the others to this call.
        patience: the seconds after which a rank that refuses gives up waiting for the others.
        fault: whether ranks forget that a rank was late.
        device: of the world that runs it. On "cuda" there are no gates.
    """

    program: str
    refused: tuple[tuple[int, int, str], ...]
    heard: tuple[tuple[int, int, str], ...] = ()
    fresh: int | None = None
    new: bool = False
    slow: tuple[int, int] | None = None
    patience: float = agreement.LONGEST_REFUSAL
    fault: bool = False
    device: str = "cpu"


class Stream:
    """Runs work in the order in which it was submitted, in one thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    def submit(self, work: Callable[[], None]) -> None:
        self._last = self._pool.submit(_without_gradient, work)

    def wait(self) -> str:
        """Waits for all work; returns an error's text."""
        try:
            if self._last is not None:
                self._last.result(PATIENCE)
            elif torch.cuda.is_available():
                torch.cuda.synchronize()
        except Exception as error:
            return f"hangs: {type(error).__name__}: {error}"
        return ""


def _without_gradient(work: Callable[[], None]) -> None:
    torch.set_num_threads(1)
    with torch.no_grad():
        work()


class Gate:
    """Lets a rank's watcher through at points of its program."""

    def __init__(self) -> None:
        self._points: list[tuple[int, str]] = []
        self._exchange = -1
        self.open, self.heard = Event(), Event()
        self.open.set()

    def close(self, points: list[tuple[int, str]]) -> None:
        """Closes the gate until the rank comes to the first of ``points`` from now on; open if there are none."""
        self._points, self._exchange = points, -1
        self._close()

    def _close(self) -> None:
        self.heard.clear()
        if self._points:
            self.open.clear()

    def inside(self) -> None:
        """Called in each exchange, after it has started."""
        self._exchange += 1
        self._reach("inside")

    def after(self) -> None:
        """Called after each exchange of the program."""
        self._reach("after")

    def waiting(self) -> None:
        if self._points and self._points[0][1] == "waiting":
            self.open.set()

    def _reach(self, where: str) -> None:
        if self._points[:1] == [(self._exchange, where)]:
            self._points.pop(0)
            self.open.set()
            assert self.heard.wait(PATIENCE), "the watcher heard nothing"
            self._close()


@contextmanager
def asynchronous(stream: Stream, gate: Gate, case: Late) -> Iterator[None]:  # noqa: C901
    """Runs exchanges on ``stream``, and watchers behind ``gate``."""
    real_forward, real_backward, hear, ask = (
        forward.forward,
        backward.backward,
        agreement.Meeting._hear,
        agreement.Meeting._ask,
    )
    settle, playing = agreement.Meeting._settle, []

    def start_forward(plan: Any, q: Any, k: Any, v: Any, sinks: Any, *, with_lse: bool, keep: bool) -> Any:
        out = q.new_full((*q.shape[:3], v.shape[3]), 7.0)
        saved = forward.nan_residuals(plan, q, k, v) if keep else None

        def work() -> None:
            (actual,), residuals = real_forward(plan, q, k, v, sinks, with_lse=with_lse, keep=keep)
            out.data.copy_(actual)
            for mine, theirs in zip(saved or (), residuals[0] if keep else (), strict=True):
                if mine is not None:
                    mine.data.copy_(theirs)

        stream.submit(work)
        if not playing:
            gate.inside()
        return [out], [saved]

    def start_backward(plan: Any, residuals: Any, sinks: Any, dout: Any, dlse: Any) -> Any:
        gradients = [torch.full_like(each, 7.0) for each in residuals[0][:3]]

        def work() -> None:
            for mine, theirs in zip(gradients, real_backward(plan, residuals, sinks, dout, dlse)[:3], strict=True):
                mine.data.copy_(theirs)

        stream.submit(work)
        if not playing:
            gate.inside()
        return *gradients, None

    def hear_behind_the_gate(self: Any, *question: Any) -> None:
        assert gate.open.wait(3 * PATIENCE)
        hear(self, *question)
        if self.unsettled:
            gate.heard.set()

    def ask_and_open(*arguments: Any) -> None:
        ask(*arguments)
        gate.waiting()

    def settle_and_forget(self: Any, *arguments: Any, **options: Any) -> None:
        playing.append(1)
        try:
            settle(self, *arguments, **options)
        finally:
            playing.pop()
            if case.fault:
                self._final = ""

    with (
        mock.patch.object(forward, "forward", start_forward),
        mock.patch.object(backward, "backward", start_backward),
        mock.patch.object(agreement.Meeting, "_hear", hear_behind_the_gate),
        mock.patch.object(agreement.Meeting, "_settle", settle_and_forget),
        mock.patch.object(agreement.Meeting, "_ask", ask_and_open),
        mock.patch.object(agreement, "POLL", 0.01),
        mock.patch.object(agreement, "LONGEST_REFUSAL", case.patience),
    ):
        yield


def late(case: Late) -> list[tuple[str, str]]:
    """What this rank got in each try: ("right", "nan", "wrong", "hangs", "error" or "stopped"; the error's text).

    "nan" means that some numbers are NaN and all others are right, and "stopped" an error that later calls raise, too.
    """
    rank, stream, gate = dist.get_rank(), Stream(), Gate()
    on_gpu = case.device == "cuda"
    whole = [each.to("cuda", torch.bfloat16) for each in tensors(*GPU_SHAPES)] if on_gpu else row()
    calls = 3 if case.program == "layers" else 1
    started: list[list[tuple[int, int, Any]]] = []
    results = []
    with nullcontext() if on_gpu else asynchronous(stream, gate, case):
        mesh = DeviceMesh.from_group(dist.new_group(), case.device, mesh_dim_names=("cp",))
        *shards, dout = (shard_sequence(each, mesh) for each in whole)

        def call(number: int) -> None:
            """Starts a call whose numbers differ from those of all other calls."""
            bad = next((BAD[name] for who, at, name in case.refused if (who, at) == (rank, number)), {})
            more = {"window": (6, 0)} if number == case.fresh else {}
            learned = [each.clone() for each in shards[:2]] + [shards[2] * (1 + number)]
            if case.program == "training":
                learned = [each.requires_grad_() for each in learned]
            if case.slow == (rank, number):
                time.sleep(0.5)
            keywords = {"mesh": mesh, "strategy": "ring", "length": whole[0].shape[1], "causal": True, **more, **bad}
            out = context_parallel_attention(*learned, **keywords)
            started[-1].append((number, 0, out.detach()))
            gate.after()
            if case.program == "training":
                started[-1].append((number, 1, torch.autograd.grad(out, learned, dout)[1]))
                gate.after()

        if not case.new:
            started.append([])
            call(-1)
            started.clear()
            assert not stream.wait()
            dist.barrier()
        gate.close([tuple(point) for who, *point in case.heard if who == rank])
        for step in range(TRIES):
            started.append([])
            results.append(error_of(lambda s=step: [call(calls * s + at) for at in range(calls)]))
        hangs = stream.wait()
        gate.open.set()
    kinds = [_judge(mesh, whole, each, case.fresh) for each in started]
    for at, text in enumerate(results):
        if kinds[at] == "wrong":
            kinds[at] = "hangs" if hangs else "wrong"
        elif text:
            kinds[at] = "stopped" if "every later call on this mesh raises this error" in text else "error"
    return list(zip(kinds, results, strict=True))


def _judge(mesh: Any, whole: list[Any], started: list[tuple[int, int, Any]], fresh: int | None) -> str:
    """Compares the numbers of calls with one device: "nan" if some are NaN and all others are right."""
    worst = "right"
    for number, which, actual in started:
        q, k, v = (each.clone().requires_grad_() for each in (*whole[:2], whole[2] * (1 + number)))
        right = attention(q, k, v, causal=True, window=(6, 0) if number == fresh else None)
        if which:
            (right,) = torch.autograd.grad(right, k, whole[3])
        right = shard_sequence(right.detach(), mesh).double()
        apart, limit = (actual - right).abs(), 0.05 * right.abs().max() if right.is_cuda else 1e-9
        if not bool((apart.isnan() | (apart <= limit)).all()):
            return "wrong"
        if bool(apart.isnan().any()):
            worst = "nan"
    return worst
