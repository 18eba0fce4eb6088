"""Measures other than time on a GPU: the error of softcapped calls, and the memory of packed and windowed calls."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

import torch_frontend
from attn_core import SeqInfo, backends
from attn_core.call.tensors import Gradients, Inputs
from attn_core.correctness import accuracy
from benchmarks import hopper_kernels as kernels
from benchmarks.hopper_group import Group, Shape, reason
from benchmarks.hopper_torch import FORWARD, SOFTCAP, TRAINING

ACCURACY = Shape(1, 512, 32, 8, 128)
LENGTHS = (16 * 1024, 64 * 1024)
QUANTITIES = ("out", "dq", "dk", "dv")
Results = dict[str, np.ndarray]
FLAT = "<= 1.25"
FLOOR = 16.0
"""Bytes per token that count as none: the log-sum-exp of four heads. A quadratic term would be thousands."""


def softcap_error() -> list[Group]:
    """Compares the errors of softcapped calls against float64: ours on FlashAttention-4, and FlashAttention-2."""
    return [_softcap_error(deviation) for deviation in (1.0, 30.0)]


def _softcap_error(deviation: float) -> Group:
    note = (
        f"{ACCURACY}. Errors are ||result - reference|| / ||reference|| against float64. Brackets show the largest "
        "error of an element, and the largest share of its bound (docs/explanation/numerics.md)"
    )
    group = Group(f"Error at softcap {SOFTCAP:g}, logits of standard deviation {deviation:g}", note)
    q, k, v, dout = _inputs(deviation)
    spec = torch_frontend.explain(q, k, v, causal=True, softcap=SOFTCAP).spec
    expected = accuracy.expect(spec, Inputs(*map(_numpy, (q, k, v))), dout=_numpy(dout))
    ours = partial(torch_frontend.attention, causal=True, softcap=SOFTCAP)
    candidates: dict[str, Callable[[], Callable[..., Any]]] = {
        "attention flash4": lambda: partial(ours, backend="flash4"),
        "attention flash2": lambda: partial(ours, backend="flash2"),
        "flash4 as shipped": lambda: kernels.flash4(SOFTCAP),
    }
    by_candidate: dict[str, Results] = {}
    for name, make in candidates.items():
        try:
            out = make()(q, k, v)
            by_candidate[name] = dict(zip(QUANTITIES, map(_numpy, (out, *torch.autograd.grad(out, (q, k, v), dout)))))
        except Exception as error:  # any error of a candidate becomes the reason why it did not run
            group.not_run[name] = reason(name, error)
    for quantity in QUANTITIES:
        _compare_errors(group, quantity, by_candidate, expected)
    return group


def _compare_errors(group: Group, quantity: str, by_candidate: dict[str, Results], expected: accuracy.Expected) -> None:
    """Adds our error on FlashAttention-4 divided by FlashAttention-2's, to two digits, and the share of the bounds."""
    name, goal = f"{quantity}: flash4 beside flash2", "<= 1 (to two digits)"
    for needed in ("attention flash4", "attention flash2"):
        if needed not in by_candidate:
            return group.missing(name, group.not_run[needed], goal)
    truth, errors, parts = expected.truth[quantity], {}, []
    for one, results in by_candidate.items():
        judged = expected.judge(out=results["out"], gradients=Gradients(*(results[x] for x in QUANTITIES[1:])))
        errors[one] = float(np.linalg.norm(results[quantity] - truth) / np.linalg.norm(truth))
        largest = f"largest {judged[quantity].error:.2e}, {judged[quantity].use:.2f} of the bound"
        parts.append(f"{one}: {errors[one]:.3e} ({largest})")
    ratio = round(errors["attention flash4"] / errors["attention flash2"], 2)
    group.value(name, ratio, "times the error of flash2", goal, "; ".join(parts))


def _inputs(deviation: float) -> tuple[torch.Tensor, ...]:
    """Returns q, k, v and dout; q is scaled so that the logits before the cap have this standard deviation."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (
        torch.randn(size, generator=generator, device="cuda")
        for size in (ACCURACY.query, ACCURACY.key, ACCURACY.key, ACCURACY.query)
    )
    learned = (tensor.bfloat16().requires_grad_() for tensor in (q * deviation, k, v))
    return *learned, dout.bfloat16()


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()


def memory() -> list[Group]:
    """Measures the peak memory of packed and windowed calls beyond inputs and results, per token, at two lengths."""
    return [_memory(kind, what) for kind in ("packed", "windowed") for what in (FORWARD, TRAINING)]


def _memory(kind: str, what: str) -> Group:
    heads = "heads 8/2, head_dim 128, bfloat16, causal"
    note = {
        "packed": f"{heads}; four documents of a half, a quarter and twice an eighth of the tokens",
        "windowed": f"{heads}; one row, a window of 1024 keys",
    }[kind]
    lengths = " and ".join(f"{length // 1024}K" for length in LENGTHS)
    group = Group(
        f"Peak memory, {kind}, {what}",
        f"{note}. Bytes per token beyond inputs and results at {lengths} tokens; less than {FLOOR:g} is {FLOOR:g}",
    )
    for name in backends.names():
        _memory_of(group, name, kind, what)
    return group


def _memory_of(group: Group, backend: str, kind: str, what: str) -> None:
    try:
        per_token = [extra_bytes(backend, kind, what, length) / length for length in LENGTHS]
    except Exception as error:  # running out of memory is a failure, too
        why = reason(f"attention {backend}", error)
        if why.startswith("failed"):
            group.missing(f"backend={backend!r}", why, FLAT)
        else:
            group.not_run[f"attention {backend}"] = why
        return
    growth = max(per_token[1], FLOOR) / max(per_token[0], FLOOR)
    detail = ", ".join(f"{value:,.0f} B/token" for value in per_token)
    group.value(f"backend={backend!r}", growth, "times the bytes per token at the shorter length", FLAT, detail)


def extra_bytes(backend: str, kind: str, what: str, length: int) -> int:
    """Returns the bytes that a warm call allocated at its peak, beyond earlier allocations and its results."""
    generator = torch.Generator("cuda").manual_seed(0)
    lead = () if kind == "packed" else (1,)
    q, k, v, dout = (
        torch.randn((*lead, length, heads, 128), generator=generator, device="cuda", dtype=torch.bfloat16)
        for heads in (8, 2, 2, 8)
    )
    options: dict[str, Any] = {"causal": True, "backend": backend}
    if kind == "packed":
        lengths = [length // 2, length // 4, length // 8, length // 8]
        options["seq_info"] = SeqInfo.from_lengths(lengths, array=lambda offsets: torch.from_numpy(offsets).cuda())
    else:
        options["window"] = 1024
    learned = tuple(tensor.requires_grad_(what == TRAINING) for tensor in (q, k, v))

    def run() -> Any:
        out = torch_frontend.attention(*learned, **options)
        return (out.detach(), *torch.autograd.grad(out, learned, dout)) if what == TRAINING else out

    run()
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = run()
    torch.cuda.synchronize()
    result_bytes = torch.cuda.memory_allocated() - before
    del results
    return torch.cuda.max_memory_allocated() - before - result_bytes
