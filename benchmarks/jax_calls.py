"""Measures what JAX's users run on a GPU: each call beside the same kernel in torch, and how XLA reaches the kernel.

python -m benchmarks.jax_calls --json jax-first.json      # minutes; needs a GPU. Kernels that are missing are skipped
python -m benchmarks.jax_calls --json jax-first.json --only "head_dim 96"     # measures one call anew

A turn makes calls for TURN seconds in a row and then waits, as a model does. The two frameworks take turns in one
process, and so do attentions of other JAX packages (benchmarks/jax_peers.py) that are installed and take the call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import jax_frontend
import torch_frontend
from attn_core import SeqInfo
from benchmarks.jax_peers import PEERS, programs
from benchmarks.measure import Calls, Jobs, Row, measure, run
from benchmarks.tables import jax_calls

ROUNDS = 5
TURN = 0.15
"""Seconds of a turn. An H200 runs the first 20 ms after a wait at a higher clock."""
in_turns = partial(measure, turn=TURN, rounds=ROUNDS)
TOKENS = 8192
HEADS, KV_HEADS = 32, 8
_CUTS = np.sort(np.random.default_rng(1).choice(np.arange(64, TOKENS - 64), 23, replace=False))
LENGTHS = np.diff([0, *_CUTS, TOKENS]).tolist()
"""The lengths of 24 documents in a row of TOKENS tokens."""
IDS = np.tile(np.repeat(np.arange(1, 25, dtype=np.int32), LENGTHS), (4, 1))


class Case:
    """A call of attention in both frameworks on equal bytes.

    Args:
        shape: batch, tokens, heads, kv heads, head_dim, value_dim; a batch of 0 is a packed row.
        options: for both frameworks; an array of numpy becomes an array on the device.
        peers: names of other packages' attentions that run the call, too. Some compile for minutes.
    """

    def __init__(
        self, shape: tuple[int, ...], options: dict[str, Any], training: bool, backend: str | None, peers: Any
    ) -> None:
        batch, tokens, heads, kv_heads, dim, wide = shape
        rows = (batch, tokens) if batch else (tokens,)
        sizes = ((*rows, heads, dim), (*rows, kv_heads, dim), (*rows, kv_heads, wide), (*rows, heads, wide))
        self.tensors = [torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes]
        self.arrays = [jax.dlpack.from_dlpack(tensor) for tensor in self.tensors]
        self.training, self.backend, self.peers = training, backend, peers
        to_gpu = partial(torch.as_tensor, device="cuda")
        self.in_torch = {name: self._moved(value, to_gpu) for name, value in options.items()}
        self.in_jax = {name: self._moved(value, jnp.asarray) for name, value in options.items()}

    @staticmethod
    def _moved(value: Any, move: Callable[[np.ndarray], Any]) -> Any:
        if isinstance(value, SeqInfo):
            return SeqInfo(*(move(offsets) for offsets in (value.cu_seqlens_q,) * 2), value.max_len_q, value.max_len_k)
        return move(value) if isinstance(value, np.ndarray) else value

    def row(self) -> Row:
        """Times both frameworks and the peers."""
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
        facts: Row = {"lane": _lane(program.lower(*self.arrays, moving).compile().as_text())}
        calls: Calls = {"torch": torch_call, "jax": partial(program, *self.arrays, moving)}
        if self.peers:
            ran = programs(self.in_jax, self.arrays, self.training, calls["jax"](), self.peers)
            peers, facts["left_out"], facts["differences"] = ran
            calls |= peers
        return facts | in_turns(calls)


def _lane(text: str) -> str:
    """Returns how a compiled program reaches kernels of torch: "callback" or "XLA"."""
    return "callback" if "attn_core.callback" in text else "XLA"


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
BESIDE: dict[tuple[str, str], tuple[str, ...]] = {
    ("causal, 4 x 4096", "forward"): tuple(PEERS),
    ("causal, 4 x 4096", "training"): tuple(PEERS),
    ("4 rows of 24 documents, segment ids", "forward"): tuple(PEERS),
    # cuDNN prepares the gradient with a mask of queries and keys for minutes
    ("4 rows of 24 documents, segment ids", "training"): ("tokamax, Mosaic GPU", "tokamax, Triton"),
}
DECODING = {
    "64 sequences of 4096": (64, 4096, 32, 8),
    "8 sequences of 8192, heads 64/8": (8, 8192, 64, 8),
    "1 sequence of 32768": (1, 32768, 32, 8),
}


def decoding(sequences: int, length: int, heads: int, kv_heads: int) -> Row:
    """Times one step of decoding from pages of 16 tokens in both frameworks."""
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
    in_torch = partial(torch_frontend.paged_attention, q, *pool, block_table=table, seq_lens=lengths)
    return {"lane": lane, **in_turns({"torch": in_torch, "jax": partial(program, *arrays)})}


def jobs() -> Jobs:
    """Returns the name and the direction of every call, and what measures it."""
    found: Jobs = {}
    for name, (shape, options, backend) in CASES.items():
        for what in ("forward", "training") if backend != "flash3" else ("forward",):
            case = partial(Case, shape, options, what == "training", backend, BESIDE.get((name, what), ()))
            found[name, what] = lambda case=case: case().row()  # type: ignore[misc]
    return found | {(name, "decoding"): partial(decoding, *sizes) for name, sizes in DECODING.items()}


if __name__ == "__main__":
    sys.exit(run(__doc__, jobs(), jax_calls))
