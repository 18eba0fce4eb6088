"""Measures calls of real models beside torch's own F.scaled_dot_product_attention on the same tensors.

python -m benchmarks.real_calls                                  # prints a table; needs an NVIDIA GPU
python -m benchmarks.real_calls --json benchmarks/results/real-calls-h200.json   # also writes every round's times

The two sides take turns. A turn is a queue of calls; it takes as long as the host or the device needs, whichever is
longer. Forward runs without gradients; training is the forward and the gradients of q, k and v.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional

from benchmarks.measure import environment, median_ratio, medians
from torch_frontend import attention, explain

Tensor = torch.Tensor
TURN, MOST_CALLS = 0.01, 100
"""Seconds that a turn should take, and the most calls in it."""


class RealCall(NamedTuple):
    """A call of a model: ``table`` is "", "mask", "padding" or "bias", with the shape of the mask or bias."""

    name: str
    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    causal: bool = False
    table: str = ""
    shape: tuple[int, int, int, int] | None = None
    training: bool = True


CALLS = (
    RealCall(
        "T5-like bias, 8 x 512, 12 heads x 64", 8, 512, 512, 12, 12, 64, 64, table="bias", shape=(1, 12, 512, 512)
    ),
    RealCall("mask, 16 x 700, 4/1 heads x 72", 16, 700, 700, 4, 1, 72, 72, table="mask", shape=(16, 1, 700, 700)),
    RealCall("padding, 16 x 700, 16 heads x 64", 16, 700, 700, 16, 16, 64, 64, table="padding", shape=(16, 1, 1, 700)),
    RealCall("bias, 8 x 700, 40 heads x 72", 8, 700, 700, 40, 40, 72, 72, table="bias", shape=(8, 1, 700, 700)),
    RealCall(
        "mask, 4 x 2048, 32/8 heads x 128", 4, 2048, 2048, 32, 8, 128, 128, table="mask", shape=(4, 1, 2048, 2048)
    ),
    RealCall(
        *("padding, decode 16 x 1:1024, 32/8 heads x 128", 16, 1, 1024, 32, 8, 128, 128),
        table="padding",
        shape=(16, 1, 1, 1024),
        training=False,
    ),
    RealCall("causal, 2 x 512, 16 heads x 128", 2, 512, 512, 16, 16, 128, 128, causal=True),
    RealCall("causal, 2 x 64, 8 heads x 64", 2, 64, 64, 8, 8, 64, 64, causal=True),
    RealCall("cross, 4 x 4096:77, 10 heads x 64", 4, 4096, 77, 10, 10, 64, 64),
    RealCall("decode, 4 x 1:4000, 12 heads x 80", 4, 1, 4000, 12, 12, 80, 80, training=False),
    RealCall("decode, 1 x 1:12000, 16 heads x 96", 1, 1, 12000, 16, 16, 96, 96, training=False),
    RealCall("causal, 1 x 2048, 24 heads x 160", 1, 2048, 2048, 24, 24, 160, 160, causal=True),
    RealCall("MLA, 2 x 4096, 16 heads x 192/128, causal", 2, 4096, 4096, 16, 16, 192, 128, causal=True),
    RealCall("ViT, 16 x 729, 16 heads x 72", 16, 729, 729, 16, 16, 72, 72),
    RealCall("causal, 4 x 4096, 32/8 heads x 128", 4, 4096, 4096, 32, 8, 128, 128, causal=True),
)


def sides(call: RealCall, training: bool, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Returns both sides as functions without arguments: the output, with a backward ``(out, dq, dk, dv)``."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    q = normal(call.batch, call.q_len, call.heads, call.dim)
    k = normal(call.batch, call.kv_len, call.kv_heads, call.dim)
    v = normal(call.batch, call.kv_len, call.kv_heads, call.value_dim)
    dout = normal(call.batch, call.q_len, call.heads, call.value_dim)
    table = _table(call, normal, device)
    options: dict[str, Any] = {"causal": call.causal}
    if table is not None:
        options["bias" if call.table == "bias" else "mask"] = table
    grouped = call.heads != call.kv_heads

    def ours() -> Tensor:
        result: Tensor = attention(q, k, v, **options)
        return result

    def torchs() -> Tensor:
        rows = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out = functional.scaled_dot_product_attention(*rows, attn_mask=table, is_causal=call.causal, enable_gqa=grouped)
        return out.transpose(1, 2)

    if not training:
        return {"attention": torch.no_grad()(ours), "F.sdpa": torch.no_grad()(torchs)}
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]

    def trained(forward: Callable[[], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        def run() -> tuple[Tensor, ...]:
            out = forward()
            return (out.detach(), *torch.autograd.grad(out, leaves, dout))

        return run

    return {"attention": trained(ours), "F.sdpa": trained(torchs)}


def chosen(call: RealCall, training: bool) -> str:
    """Returns the backend of automatic choice on the GPU."""
    device = "cuda"
    place: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    q, k, v = (
        torch.empty(call.batch, length, heads, dim, **place)
        for length, heads, dim in (
            (call.q_len, call.heads, call.dim),
            (call.kv_len, call.kv_heads, call.dim),
            (call.kv_len, call.kv_heads, call.value_dim),
        )
    )
    table = _table(call, lambda *shape: torch.empty(*shape, **place), device)
    options = {} if table is None else {"bias" if call.table == "bias" else "mask": table}
    return str(explain(q, k, v, causal=call.causal, needs_backward=training, **options).backend)


def _table(call: RealCall, normal: Callable[..., Tensor], device: str) -> Tensor | None:
    """Returns the mask or bias; each query sees its own key, and padding leaves at least half of the keys."""
    if call.shape is None:
        return None
    if call.table == "bias":
        return normal(*call.shape)
    batch, _, rows, keys = call.shape
    if call.table == "padding":
        lengths = torch.linspace(keys // 2, keys, batch, device=device).long()
        return torch.arange(keys, device=device) < lengths[:, None, None, None]
    seen = torch.rand(call.shape, generator=torch.Generator(device).manual_seed(1), device=device) > 0.2
    return seen | torch.eye(rows, keys, dtype=torch.bool, device=device)


def measured(candidates: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds per call of both sides in each round."""

    def turn(run: Callable[[], Any], calls: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / calls

    for run in candidates.values():
        turn(run, 5)
    calls = min(MOST_CALLS, max(1, round(TURN / min(turn(run, 3) for run in candidates.values()))))
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds):
        for name in list(candidates) if number % 2 else reversed(candidates):
            run = candidates[name]
            run()
            seconds[name].append(turn(run, calls))
    return seconds


def main() -> int:
    """Runs every call in both directions, prints the table and writes the raw times if --json is given.

    Returns 2 if there is no GPU.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path, default=None)
    parsed = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"benchmarks.real_calls needs an NVIDIA GPU: torch {torch.__version__} sees none", file=sys.stderr)
        return 2
    entries = []
    print(f"{'call':50}{'direction':10}{'backend':16}{'ours us':>9}{'F.sdpa us':>10}{'speed':>7}")
    for call in CALLS:
        for training in (False, True) if call.training else (False,):
            backend, seconds = chosen(call, training), measured(sides(call, training), parsed.rounds)
            direction = "training" if training else "forward"
            entries.append({"call": call.name, "direction": direction, "backend": backend, "seconds": seconds})
            ours, torchs = (medians(seconds)[name] * 1e6 for name in ("attention", "F.sdpa"))
            speed = median_ratio(seconds, "attention", "F.sdpa")
            print(f"{call.name:50}{direction:10}{backend:16}{ours:9.1f}{torchs:10.1f}{speed:7.2f}", flush=True)
    if parsed.json is not None:
        place = {"environment": environment(), "device": torch.cuda.get_device_name(), "dtype": "bfloat16"}
        parsed.json.write_text(json.dumps({**place, "calls": entries}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
