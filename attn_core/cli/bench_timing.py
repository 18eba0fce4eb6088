"""Times one call on several torch backends in turns, and compares their results."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

from attn_core.call.seq_info import SeqInfo
from attn_core.call.spec import AttentionSpec
from attn_core.selection.sweep import SweepCase

WARM_UPS = 2
"""Calls before the first timed call; the first of them compiles."""

TURN = 0.006
"""Seconds that one backend's queue of calls should take in each round."""

MOST_CALLS = 200
"""The longest queue of calls in a round."""

TOO_SLOW = 50.0
"""A backend whose first timed call takes this many times as long as the fastest's is not timed further."""

BEHIND, BEHIND_ROUNDS = 3.0, 2
"""A backend this many times slower than the fastest runs in two rounds only, because its exact time decides nothing."""

Entry = dict[str, Any]
Run = Callable[[str], tuple[Any, ...]]


class DeviceLostError(RuntimeError):
    """A kernel left the device unusable for this process. The message starts with the backend's name."""


class Timing(NamedTuple):
    """The timing of one case: an entry for each backend, and the backend whose results the others are compared with."""

    entries: dict[str, Entry]
    reference: str | None


def measure(run: Run, names: list[str], rounds: int, device: Any) -> Timing:
    """Measures microseconds per call of each backend in each round; the backends take turns within a round.

    Returns:
        Per backend ``{"microseconds": [...], "median": ..., "difference": ...}``, where the difference is the largest
        between its results and the first backend's, relative to the largest of each result; or ``{"failed": reason}``.
    """
    entries: dict[str, Entry] = {}
    alone: dict[str, float] = {}
    results: tuple[Any, ...] | None = None
    reference = None
    for name in names:
        try:
            outcome, alone[name] = _warm_up(run, name, device)
        except Exception as error:  # a backend that raises is a result to report
            entries[name] = {"failed": _one_line(error)}
            _check_device(device, name)
            continue
        if not all(bool(result.isfinite().all()) for result in outcome):
            entries[name] = {"failed": "its results are not finite"}
            del alone[name]
            continue
        if results is None:
            results, reference = outcome, name
        entries[name] = {"difference": _difference(outcome, results)}
        del outcome  # frees the results on the device before the next backend runs
    fastest = min(alone.values(), default=0.0)
    slow = {name: [alone.pop(name)] for name, seconds in list(alone.items()) if seconds > TOO_SLOW * fastest}
    timings, lost = _rounds(run, alone, rounds, device)
    for name, raised in lost.items():
        entries[name] = {"failed": _one_line(raised)}
    for name, timed in (timings | slow).items():
        micro = [round(1e6 * seconds, 3) for seconds in timed]
        entries[name] |= {"microseconds": micro, "median": round(statistics.median(micro), 3)}
    for name in slow:
        entries[name]["note"] = f"timed once: over {TOO_SLOW:.0f} times as slow as the fastest"
    return Timing({name: entries[name] for name in names}, reference)


def _warm_up(run: Run, name: str, device: Any) -> tuple[tuple[Any, ...], float]:
    """Calls a backend until it is compiled. Returns its results and the seconds of one call."""
    outcome = run(name)
    for _ in range(WARM_UPS - 1):
        outcome = run(name)
    return outcome, min(_queue(run, name, 1, device) for _ in range(2))


def _rounds(
    run: Run, alone: dict[str, float], rounds: int, device: Any
) -> tuple[dict[str, list[float]], dict[str, Exception]]:
    """Runs the rounds. Returns the seconds per call of each round, and the error of each backend that raised, by name.

    A backend that raises does not run in later rounds.
    """
    lost: dict[str, Exception] = {}
    calls = {name: min(MOST_CALLS, max(1, round(TURN / seconds))) for name, seconds in alone.items()}
    behind = {name for name in alone if alone[name] > BEHIND * min(alone.values())}
    seconds: dict[str, list[float]] = {name: [] for name in alone}
    # A collection during a round would count as the time of one backend.
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            # Alternate the order, so that no backend always runs after the same other one (caches, clocks).
            for name in list(calls) if number % 2 == 0 else reversed(calls):
                if name in lost or (name in behind and number >= BEHIND_ROUNDS):
                    continue
                try:
                    if calls[name] > 1:
                        run(name)
                    seconds[name].append(_queue(run, name, calls[name], device))
                except Exception as error:  # such as running out of memory
                    lost[name] = error
                    _check_device(device, name)
    finally:
        gc.enable()
    return {name: times for name, times in seconds.items() if name not in lost}, lost


def _queue(run: Run, name: str, calls: int, device: Any) -> float:
    """Returns the seconds per call of a queue of calls: the longer of the host's and the device's time."""
    if device.type != "cuda":
        began = perf_counter()
        for _ in range(calls):
            run(name)
        return (perf_counter() - began) / calls
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)  # an idle device records the first event at once, so the host's time counts too
    begin.record()
    for _ in range(calls):
        run(name)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def caller(case: SweepCase, spec: AttentionSpec, device: Any) -> Run:
    """Returns a function that runs the call on a backend by name: ``(out,)``, with a backward ``(out, dq, dk, dv)``."""
    import torch

    from torch_frontend import attention

    dtype = getattr(torch, spec.dtype)
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=of, generator=generator)

    row = () if spec.packed else (spec.batch,)
    q = normal(*row, spec.q_len, spec.num_heads, spec.head_dim)
    k = normal(*row, spec.kv_len, spec.num_kv_heads, spec.head_dim)
    v = normal(*row, spec.kv_len, spec.num_kv_heads, spec.value_dim)
    keywords = {name: getattr(spec, name) for name in ("causal", "alignment", "window", "softcap", "scale")}
    keywords |= {
        "mask": None if spec.mask_shape is None else _mask(spec.mask_shape, device),
        "bias": None if spec.bias_shape is None else normal(*spec.bias_shape),
        "alibi_slopes": None if spec.alibi_shape is None else _slopes(spec, device),
        "sinks": normal(spec.num_heads, of=torch.float32) if spec.sinks else None,
        "seq_info": None if case.lengths is None else _documents(case.lengths, device),
    }
    if not spec.needs_backward:
        return lambda backend: (attention(q, k, v, backend=backend, **keywords),)
    learned, dout = [tensor.requires_grad_() for tensor in (q, k, v)], normal(*spec.out_shape)

    def train(backend: str) -> tuple[Any, ...]:
        out = attention(q, k, v, backend=backend, **keywords)
        return (out.detach(), *torch.autograd.grad(out, learned, dout))

    return train


def _mask(shape: tuple[int, int, int, int], device: Any) -> Any:
    """Returns a mask that leaves each row a key: padding if all queries share one row of it, else a random fifth."""
    import torch

    batch, _, rows, keys = shape
    if rows == 1:
        lengths = torch.linspace(keys // 2, keys, batch, device=device).long()
        return torch.arange(keys, device=device) < lengths[:, None, None, None]  # [batch, 1, 1, keys]
    generator = torch.Generator(device=device).manual_seed(1)
    mask = torch.rand(shape, device=device, generator=generator) > 0.2
    return mask | torch.eye(rows, keys, dtype=torch.bool, device=device)  # the diagonal: no row without keys


def _slopes(spec: AttentionSpec, device: Any) -> Any:
    import torch

    return 2.0 ** (-8.0 * torch.arange(1, spec.num_heads + 1, device=device, dtype=torch.float32) / spec.num_heads)


def _documents(lengths: tuple[int, ...], device: Any) -> SeqInfo:
    import torch

    return SeqInfo.from_lengths(lengths, array=lambda offsets: torch.from_numpy(offsets).to(device))


def _difference(results: tuple[Any, ...], reference: tuple[Any, ...]) -> float:
    if results is reference:
        return 0.0
    gaps = (
        # 1e-30 guards a result that is 0 everywhere.
        float((one - other).abs().max()) / max(float(other.abs().max()), 1e-30)
        for one, other in zip(results, reference, strict=True)
    )
    return round(max(gaps), 8)


def _check_device(device: Any, name: str) -> None:
    if device.type != "cuda":
        return
    import torch

    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # one backend's cached memory must not make the next run out of memory
    except Exception as error:
        raise DeviceLostError(f"{name}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
