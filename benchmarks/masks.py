"""Measures masks as ranges and as functions on a GPU, beside FlexAttention, a dense mask, and kernels without a mask.

python -m benchmarks.masks --json masks.json     # minutes; needs a GPU. flash3 and flash4 are compared if installed

Speeds count visible pairs alone: a kernel that computes hidden pairs is slower by this measure. The candidates of a
call take turns in one process, and each call ends with a synchronisation, so the host's time counts. Candidates
named "many" make 50 calls before they wait (10 with gradients), as a model does, so the host's time hides behind the
device's. "many, causal" is the fastest kernel without a mask, on 8192 tokens; "many beside it" takes turns with it
alone, because a GPU's clock follows the load.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from attn_core import masks
from attn_core.expressions import tanh, trace_score
from benchmarks import torch_peers
from benchmarks.measure import Calls, Jobs, Row, Seconds, measure, run
from benchmarks.tables import IN_A_ROW
from benchmarks.tables import masks as table
from torch_frontend import attention, explain

HEADS, KV_HEADS, DIM = 32, 8, 128
ROUNDS = 5
TURN = 0.01
"""Seconds of a turn of calls that wait one by one."""
PLAIN_TOKENS = 8192


def tree_of_depth_4() -> np.ndarray:
    """A segment of 1024 tokens with 3 children of 512, each with 3 of 256, each with 3 of 128."""
    parents: list[int] = []

    def grow(parent: int, length: int, depth: int) -> None:
        for _ in range(length):
            parents.append(parent)
            parent = len(parents) - 1
        for _ in range(3 if depth < 4 else 0):
            grow(parent, length // 2, depth + 1)

    grow(-1, 1024, 1)
    return masks.tree(np.array(parents))


GALLERY: dict[str, Callable[[], np.ndarray]] = {
    "16 completions of 512 on a prompt of 4096": lambda: masks.shared_prefix(4096, [512] * 16),
    "tree of depth 4, 8320 tokens": tree_of_depth_4,
    "prefix-LM, half of 8192": lambda: masks.prefix_lm([4096], 8192),
    "16 images of 256 in 8192": lambda: masks.blocks(np.arange(0, 8192, 256), [False, True] * 16, 8192),
    "block diffusion, 32 of 4096": lambda: masks.block_diffusion(4096, 32),
    "64 global tokens and a window of 1024": lambda: masks.global_and_window(64, (1024, 1024), 8192),
}


def tensors(batch: int, tokens: int, training: bool) -> list[torch.Tensor]:
    """q, k and v in bfloat16."""
    place: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    shapes = [(batch, tokens, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, **place, requires_grad=training) for shape in shapes]


def synchronized(call: Callable[[], Any], leaves: list[torch.Tensor] | None) -> Callable[[], None]:
    """A call, with the gradients of ``leaves`` if there are any, and the wait for the device."""
    once = many(call, leaves, 1)

    def run() -> None:
        once()
        torch.cuda.synchronize()

    return run


def many(call: Callable[[], Any], leaves: list[torch.Tensor] | None = None, count: int = 0) -> Callable[[], Any]:
    """Calls in a row: forwards without gradients, or with the gradients of ``leaves``; IN_A_ROW of them by default."""

    def forwards() -> Any:
        with torch.no_grad():
            for _ in range(count or IN_A_ROW["forward"]):
                last = call()
        return last

    def trainings() -> Any:
        for _ in range(count or IN_A_ROW["training"]):
            out = call()
            gradients = torch.autograd.grad(out, leaves, torch.ones_like(out))  # type: ignore[arg-type]
        return gradients

    return forwards if leaves is None else trainings


def plain_calls(training: bool) -> dict[str, Callable[[], Any]]:
    """The fastest causal kernels, by name; only those that can run here."""
    qkv, calls = tensors(1, PLAIN_TOKENS, training), {}
    for name in ("flash4",) if training else ("flash3", "flash4"):
        call = lambda name=name: attention(*qkv, causal=True, backend=name)  # noqa: E731
        try:
            call()
        except RuntimeError:  # not installed here
            continue
        calls[name] = many(call, qkv if training else None)
    return calls


def of_ranges(ranges: torch.Tensor) -> Callable[..., Any]:
    """A FlexAttention mask function of key ranges."""
    ends = [ranges[0, 0, :, which, end].contiguous() for which in range(ranges.shape[3]) for end in (0, 1)]

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        seen = (q >= ends[0][k]) & (q < ends[1][k])
        return seen if len(ends) == 2 else seen | ((q >= ends[2][k]) & (q < ends[3][k]))

    return mask_mod


def mask_row(name: str, training: bool) -> Row:
    """Times one mask of the gallery: its ranges in numpy, which may run in parts, and on the device."""
    on_host = GALLERY[name]()
    ranges = torch.from_numpy(on_host).cuda()
    tokens = ranges.shape[2]
    qkv = tensors(1, tokens, training)
    leaves = qkv if training else None
    rows = torch.arange(tokens, device="cuda")[:, None]
    dense = torch.zeros(tokens, tokens, dtype=torch.bool, device="cuda")
    for which in range(ranges.shape[3]):
        dense |= (rows >= ranges[0, 0, :, which, 0]) & (rows < ranges[0, 0, :, which, 1])
    calls: Calls = {
        "attention": synchronized(lambda: attention(*qkv, key_ranges=on_host), leaves),
        "ranges on the device": synchronized(lambda: attention(*qkv, key_ranges=ranges), leaves),
        "FlexAttention": synchronized(partial(torch_peers.flex(tokens, of_ranges(ranges)), *qkv), leaves),
        "a dense mask": synchronized(lambda: attention(*qkv, mask=dense[None, None]), leaves),
    }
    selection, whole = explain(*qkv, key_ranges=on_host), explain(*qkv, key_ranges=ranges)
    row: Row = {"pairs": int(dense.sum()), "tokens": tokens, "batch": 1}
    row |= {"backend": selection.backend, "dense backend": explain(*qkv, mask=dense[None, None]).backend}
    row |= {"parts": selection.parts, "backend on the device": whole.backend}
    groups = [beside_plain(lambda: attention(*qkv, key_ranges=on_host), leaves)]
    if not training:
        in_a_row = {
            "many": many(lambda: attention(*qkv, key_ranges=on_host)),
            "many, ranges on the device": many(lambda: attention(*qkv, key_ranges=ranges)),
        }
        groups += jax_calls(qkv, in_a_row, dense[None, None], key_ranges=on_host)
    return row | {"seconds": timed(calls, *groups)}


def beside_plain(call: Callable[[], Any], leaves: list[torch.Tensor] | None) -> Calls:
    """Many calls, and as many of the fastest kernel without a mask."""
    calls = {"many beside it": many(call, leaves)}
    for each in list(plain_calls(leaves is not None).values())[:1]:
        calls["many, causal"] = each
    return calls


def timed(*groups: Calls) -> Seconds:
    """The seconds of each call; those of a group take turns. A GPU's clock suffers for a while from a heavy rival."""
    seconds: Seconds = {}
    for group in groups:
        seconds |= measure(group, turn=TURN, rounds=ROUNDS)["seconds"]
    return seconds


def jax_calls(
    qkv: list[torch.Tensor], in_a_row: Calls, dense: torch.Tensor | None, **options: Any
) -> tuple[Calls, ...]:
    """Two groups: torch's calls in a row with JAX's, and a jitted program with ``jax.nn``'s on a dense mask.

    Without a GPU for JAX it returns torch's calls alone.
    """
    import jax

    import jax_frontend

    if jax.default_backend() != "gpu":
        return (in_a_row,)
    q, k, v, *others = [jax.dlpack.from_dlpack(tensor.detach()) for tensor in (*qkv, *options.pop("aux", ()))]
    program = jax.jit(lambda q, k, v, *aux: jax_frontend.attention(q, k, v, aux=aux, **options))
    calls: Calls = {"jax": lambda: program(q, k, v, *others).block_until_ready()}
    if dense is not None:
        mask = jax.dlpack.from_dlpack(dense)
        of_jax = jax.jit(lambda q, k, v, mask: jax.nn.dot_product_attention(q, k, v, mask=mask))
        calls["jax.nn, a dense mask"] = lambda: of_jax(q, k, v, mask).block_until_ready()

    def many_in_jax() -> Any:
        for _ in range(IN_A_ROW["forward"]):
            last = program(q, k, v, *others)
        return last

    return in_a_row | {"many in jax": many_in_jax}, calls


def slopes(s: Any, b: Any, h: Any, q: Any, k: Any, by_head: Any) -> Any:
    return s - by_head[h] * abs(q - k)


def capped_bias(s: Any, b: Any, h: Any, q: Any, k: Any, table: Any) -> Any:
    return 20.0 * tanh((s + table[h, q - k + 4095]) / 20.0)


SCORES = {"ALiBi": (slopes, (HEADS,)), "softcap of a relative bias": (capped_bias, (HEADS, 8191))}


def score_row(name: str, training: bool) -> Row:
    """Times one score function at 4 x 4096, causal."""
    function, shape = SCORES[name]
    qkv, array = tensors(4, 4096, training), torch.rand(shape, device="cuda")
    leaves, traced = qkv if training else None, trace_score(function, (array,))

    def of_torch(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        if function is slopes:
            return slopes(s, b, h, q, k, array)
        return 20.0 * torch.tanh((s + array[h, q - k + 4095]) / 20.0)

    own = partial(torch_peers.flex(4096, torch_peers.causal, of_torch), *qkv)
    options: dict[str, Any] = {"causal": True, "score_mod": traced, "aux": (array,)}
    calls: Calls = {
        "attention": synchronized(lambda: attention(*qkv, **options), leaves),
        "FlexAttention": synchronized(own, leaves),
    }
    row: Row = {"pairs": 4 * 4096 * 4097 // 2, "tokens": 4096, "batch": 4}
    row["backend"] = explain(*qkv, **options).backend
    groups = [beside_plain(lambda: attention(*qkv, **options), leaves)]
    if not training:
        in_a_row = {"many": many(lambda: attention(*qkv, **options))}
        groups += jax_calls(qkv, in_a_row, None, **options)
    return row | {"seconds": timed(calls, *groups)}


def plain_row(training: bool) -> Row:
    """Times the fastest kernels without a mask, and attention: causal, PLAIN_TOKENS tokens, in a row."""
    qkv = tensors(1, PLAIN_TOKENS, training)
    calls = {f"many {name}": each for name, each in plain_calls(training).items()}
    calls["many"] = many(lambda: attention(*qkv, causal=True), qkv if training else None)
    row: Row = {"pairs": PLAIN_TOKENS * (PLAIN_TOKENS + 1) // 2}
    row |= {"tokens": PLAIN_TOKENS, "batch": 1, "backend": explain(*qkv, causal=True).backend}
    return row | {"seconds": timed(calls)}


JOBS: Jobs = {}
for _what in ("forward", "training"):
    JOBS[f"causal, {PLAIN_TOKENS}", _what] = partial(plain_row, _what == "training")
    JOBS |= {(name, _what): partial(mask_row, name, _what == "training") for name in GALLERY}
    JOBS |= {(name, _what): partial(score_row, name, _what == "training") for name in SCORES}

if __name__ == "__main__":
    sys.exit(run(__doc__, JOBS, table, dtype="bfloat16"))
