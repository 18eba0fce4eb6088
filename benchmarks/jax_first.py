"""Measures what JAX's users run on a GPU: each call beside the same kernel in torch, and how XLA reaches the kernel.

python -m benchmarks.jax_first --json jax-first.json      # minutes; needs a GPU. Kernels that are missing are skipped
python -m benchmarks.jax_first --json jax-first.json --only layer     # measures the layer anew, and keeps other rows

A turn makes calls for TURN seconds in a row and then waits, as a model does. Short turns would compare the clocks of a
GPU that was idle. The two frameworks take turns in one process, and so do attentions of other JAX packages
(benchmarks/jax_anchors.py) that are installed and take the call.
The layer is a decoder layer of an 8B model (4096 features, 32/8 heads of 128, 14336 in the MLP), forward and gradients,
with our attention and some of the other packages.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import jax_frontend
import torch_frontend
from attn_core import SeqInfo
from benchmarks.jax_anchors import ANCHORS, jax_nn, programs
from benchmarks.jax_first_report import LAYER_CALLS, table
from benchmarks.measure import environment, side_by_side
from benchmarks.stored_rows import continued, key, put

ROUNDS = 5
TURN = 0.15
"""Seconds of a turn. An H200 runs the first 20 ms after a wait at a higher clock."""
TOKENS = 8192
HEADS, KV_HEADS = 32, 8
WIDTH, MLP = 4096, 14336
LAYER = "layer"
"""The name of the layer's training step in --only."""
Calls = dict[str, Callable[[], Any]]
_CUTS = np.sort(np.random.default_rng(1).choice(np.arange(64, TOKENS - 64), 23, replace=False))
LENGTHS = np.diff([0, *_CUTS, TOKENS]).tolist()
"""The lengths of 24 documents in a row of TOKENS tokens."""
IDS = np.tile(np.repeat(np.arange(1, 25, dtype=np.int32), LENGTHS), (4, 1))


class Case:
    """A call of attention in both frameworks on equal bytes.

    Args:
        shape: batch, tokens, heads, kv heads, head_dim, value_dim; a batch of 0 is a packed row.
        options: for both frameworks; an array of numpy becomes an array on the device.
        anchors: names of other packages' attentions that run the call, too. Some compile for minutes.
    """

    def __init__(
        self, shape: tuple[int, ...], options: dict[str, Any], training: bool, backend: str | None, anchors: Any
    ) -> None:
        batch, tokens, heads, kv_heads, dim, wide = shape
        rows = (batch, tokens) if batch else (tokens,)
        sizes = ((*rows, heads, dim), (*rows, kv_heads, dim), (*rows, kv_heads, wide), (*rows, heads, wide))
        self.tensors = [torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes]
        self.arrays = [jax.dlpack.from_dlpack(tensor) for tensor in self.tensors]
        self.training, self.backend, self.anchors = training, backend, anchors
        self.in_torch = {name: self._moved(value, _to_torch) for name, value in options.items()}
        self.in_jax = {name: self._moved(value, jnp.asarray) for name, value in options.items()}

    @staticmethod
    def _moved(value: Any, move: Callable[[np.ndarray], Any]) -> Any:
        if isinstance(value, SeqInfo):
            return SeqInfo(*(move(offsets) for offsets in (value.cu_seqlens_q,) * 2), value.max_len_q, value.max_len_k)
        return move(value) if isinstance(value, np.ndarray) else value

    def calls(self) -> tuple[Calls, dict[str, Any]]:
        """Returns the calls of both frameworks and of the anchors, and what to record beside their times."""
        q, k, v, dout = self.tensors
        leaves = [tensor.requires_grad_(self.training) for tensor in (q, k, v)]
        call = partial(torch_frontend.attention, backend=self.backend, **self.in_torch)

        def torch_call() -> Any:
            out = call(*leaves)
            return torch.autograd.grad(out, leaves, dout) if self.training else out

        static = {name: value for name, value in self.in_jax.items() if not isinstance(value, (jax.Array, SeqInfo))}
        moving = {name: value for name, value in self.in_jax.items() if name not in static}

        def function(q: Any, k: Any, v: Any, dout: Any, moving: Any) -> Any:
            attend = partial(jax_frontend.attention, backend=self.backend, **static, **moving)
            if not self.training:
                return attend(q, k, v)
            _, pull = jax.vjp(attend, q, k, v)
            return pull(dout)

        program = jax.jit(function)  # not compiled ahead: such a program's calls go through Python
        facts: dict[str, Any] = {"lane": _lane(program.lower(*self.arrays, moving).compile().as_text())}
        facts["calls"] = count = _count(torch_call)
        turns = {"torch": _torch_turn(count, torch_call), "jax": _turn(count, partial(program, *self.arrays, moving))}
        if self.anchors:
            ours = program(*self.arrays, moving)
            ran = programs(self.in_jax, self.arrays, self.training, ours, self.anchors)
            anchors, facts["left_out"], facts["differences"] = ran
            turns |= {name: _turn(count, anchor) for name, anchor in anchors.items()}
        return turns, facts


def _to_torch(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).cuda()


def _count(call: Callable[[], Any]) -> int:
    """Returns how many calls of torch take TURN seconds."""
    seconds = side_by_side({"call": _torch_turn(5, call)}, calls=1, rounds=2)["call"]
    return max(5, round(TURN / (min(seconds) / 5)))


def _torch_turn(calls: int, call: Callable[[], Any]) -> Callable[[], None]:
    def turn() -> None:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()

    return turn


def _turn(calls: int, call: Callable[[], Any]) -> Callable[[], None]:
    def turn() -> None:
        for _ in range(calls):
            result = call()
        jax.block_until_ready(result)

    return turn


def _lane(text: str) -> str:
    """Returns how a compiled program reaches kernels of torch: "callback", "operator" or "XLA"."""
    return "callback" if "attn_core.callback" in text else "operator" if "attn_core.operator" in text else "XLA"


DENSE = (4, 4096, HEADS, KV_HEADS, 128, 128)
PACKED = SeqInfo.from_lengths(LENGTHS * 4)
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any], str | None]] = {
    "causal, 4 x 4096": (DENSE, {"causal": True}, None),
    "causal, 4 x 4096, flash3": (DENSE, {"causal": True}, "flash3"),
    "causal, 4 x 4096, flash4": (DENSE, {"causal": True}, "flash4"),
    "sinks and a window of 128": (DENSE, {"causal": True, "window": 128, "sinks": np.zeros(HEADS, np.float32)}, None),
    "a mask, 4 x 4096": (DENSE, {"mask": np.random.default_rng(0).random((4, 1, 4096, 4096)) < 0.9}, None),
    "head_dim 96": ((*DENSE[:4], 96, 96), {"causal": True}, None),
    "widths 192/128, 2 x 4096, 32/32 heads": ((2, 4096, 32, 32, 192, 128), {"causal": True}, None),
    "4 rows of 24 documents, offsets": ((0, 4 * TOKENS, *DENSE[2:]), {"causal": True, "seq_info": PACKED}, None),
    "4 rows of 24 documents, segment ids": ((4, TOKENS, *DENSE[2:]), {"causal": True, "q_segment_ids": IDS}, None),
}
ANCHORED: dict[tuple[str, str], tuple[str, ...]] = {
    ("causal, 4 x 4096", "forward"): tuple(ANCHORS),
    ("causal, 4 x 4096", "training"): tuple(ANCHORS),
    ("4 rows of 24 documents, segment ids", "forward"): tuple(ANCHORS),
    # cuDNN prepares the gradient with a mask of queries and keys for minutes
    ("4 rows of 24 documents, segment ids", "training"): ("tokamax, Mosaic GPU", "tokamax, Triton"),
}
DECODING = {
    "64 sequences of 4096": (64, 4096, 32, 8),
    "8 sequences of 8192, heads 64/8": (8, 8192, 64, 8),
    "1 sequence of 32768": (1, 32768, 32, 8),
}


def decoding(sequences: int, length: int, heads: int, kv_heads: int) -> tuple[Calls, dict[str, Any]]:
    """Returns one step of decoding from pages of 16 tokens, in both frameworks, and what to record."""
    width = length // 16
    pool = [torch.randn(sequences * width, 16, kv_heads, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    q = torch.randn(sequences, heads, 128, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(sequences * width, device="cuda").to(torch.int32).view(sequences, width)
    lengths = torch.full((sequences,), length, dtype=torch.int32, device="cuda")
    arrays = [jax.dlpack.from_dlpack(each) for each in (q, *pool, table, lengths)]

    def function(q: Any, k: Any, v: Any, table: Any, lengths: Any) -> Any:
        return jax_frontend.paged_attention(q, k, v, block_table=table, seq_lens=lengths)

    program = jax.jit(function)
    lane = _lane(program.lower(*arrays).compile().as_text())
    tables = {"block_table": table, "seq_lens": lengths}
    in_torch = partial(torch_frontend.paged_attention, q, *pool, **tables)
    count = _count(in_torch)
    turns = {"torch": _torch_turn(count, in_torch), "jax": _turn(count, partial(program, *arrays))}
    return turns, {"lane": lane, "calls": count}


ATTENTIONS: dict[str, Callable[[dict[str, Any]], Callable[..., Any]]] = {
    "attention": lambda options: partial(jax_frontend.attention, **options),
    **{name: ANCHORS[name] for name in ("jax.nn, cuDNN", "tokamax, Mosaic GPU")},
    "jax.nn, XLA": partial(jax_nn, implementation="xla"),
}


def layer_steps() -> Calls:
    """Returns a training step of one decoder layer on 2 rows of 4096 tokens, by attention."""
    keys = jax.random.split(jax.random.key(0), 8)
    sizes = [(WIDTH, HEADS, 128), (WIDTH, KV_HEADS, 128), (WIDTH, KV_HEADS, 128), (HEADS, 128, WIDTH)]
    sizes += [(WIDTH, MLP), (WIDTH, MLP), (MLP, WIDTH)]
    weights = [jax.random.normal(key, size, jnp.bfloat16) * 0.02 for key, size in zip(keys, sizes, strict=False)]
    x = jax.random.normal(keys[7], (2, 4096, WIDTH), jnp.bfloat16)

    def normalised(x: Any) -> Any:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype)

    def loss(attend: Callable[..., Any], weights: Any, x: Any) -> Any:
        wq, wk, wv, wo, gate, up, down = weights
        h = normalised(x)
        q, k, v = (jnp.einsum("btw,whd->bthd", h, w) for w in (wq, wk, wv))
        x = x + jnp.einsum("bthd,hdw->btw", attend(q, k, v), wo)
        h = normalised(x)
        x = x + (jax.nn.silu(h @ gate) * (h @ up)) @ down
        return jnp.mean(x.astype(jnp.float32) ** 2)

    turns: Calls = {}
    for name, make in ATTENTIONS.items():
        try:
            step = jax.jit(jax.grad(partial(loss, make({"causal": True})), argnums=(0, 1)))
            jax.block_until_ready(step(weights, x))
        except Exception as error:  # an attention that this machine lacks is left out of the table
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}")
            continue
        turns[name] = _turn(LAYER_CALLS, partial(step, weights, x))
    return turns


def main() -> None:
    """Measures the calls, writes the raw times if --json is given, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--resume", action="store_true", help="measures what the file of --json lacks")
    parser.add_argument(
        "--only",
        action="append",
        metavar="CALL",
        help=f'measures this call (or "{LAYER}") anew, and keeps other rows of --json; repeatable',
    )
    parsed = parser.parse_args()
    chosen = parsed.only or [*CASES, *DECODING, LAYER]
    if unknown := [name for name in chosen if name not in (*CASES, *DECODING, LAYER)]:
        parser.error(f"--only {unknown[0]!r}: calls are {', '.join((*CASES, *DECODING, LAYER))}")
    if parsed.resume and parsed.json is None:
        parser.error("--resume: needs --json, the file to continue")
    try:
        jax_frontend.compile_operator_lane()
    except RuntimeError as error:
        print(f"no operator lane: {error}")
    now = environment()
    result: dict[str, Any] = {"environment": now, "device": torch.cuda.get_device_name(), "calls": []}
    if parsed.json is not None and (parsed.resume or (parsed.only and parsed.json.exists())):
        result = continued(parsed.json, result)
    done = {key(row) for row in result["calls"]} if parsed.resume else set()
    for name, what, make in makers():
        if name not in chosen or (name, what) in done:
            continue
        row = measured(name, what, make)
        if row is not None:
            put(result, row, now["date"])
            _write(parsed.json, result)
    if LAYER in chosen and not (parsed.resume and "layer" in result):
        steps = side_by_side(layer_steps(), calls=1, rounds=ROUNDS)
        result["layer"] = {name: [s / LAYER_CALLS for s in each] for name, each in steps.items()}
        result.pop("layer_date", None)
        if now["date"] != result["environment"]["date"]:
            result["layer_date"] = now["date"]
        _write(parsed.json, result)
    print(table(result))


Maker = Callable[[], tuple[Calls, dict[str, Any]]]


def makers() -> list[tuple[str, str, Maker]]:
    """Returns the name and the direction of every call, and a function that makes it."""
    found: list[tuple[str, str, Maker]] = []
    for name, (shape, options, backend) in CASES.items():
        for training in (False, True) if backend != "flash3" else (False,):
            what = "training" if training else "forward"
            case = partial(Case, shape, options, training, backend, ANCHORED.get((name, what), ()))
            found.append((name, what, lambda case=case: case().calls()))  # type: ignore[misc]
    return found + [(name, "decoding", partial(decoding, *sizes)) for name, sizes in DECODING.items()]


def measured(name: str, what: str, make: Maker) -> dict[str, Any] | None:
    """Returns a call's row, or None if its backend is not installed."""
    try:
        calls, facts = make()
    except RuntimeError as error:
        print(f"{name}, {what}: {str(error)[:200]}")
        return None
    times = side_by_side(calls, calls=1, rounds=ROUNDS)
    seconds = {key: [s / facts["calls"] for s in each] for key, each in times.items()}
    best = {key: f"{1e3 * min(each):.3f} ms" for key, each in seconds.items()}
    print(name, what, facts["lane"], best, facts.get("differences", ""), facts.get("left_out", ""), flush=True)
    return {"call": name, "what": what, **facts, "seconds": seconds}


def _write(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
