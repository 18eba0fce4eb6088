"""Measures tiny calls of torch_frontend.attention, where host time dominates, beside torch's own or what replaces it.

python -m benchmarks.small_calls                     # on the GPU; without one on this machine's CPU, on one thread
python -m benchmarks.small_calls --json small.json   # also writes every round's times
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional

from benchmarks.measure import Jobs, Row, measure, run
from benchmarks.tables import small_calls
from torch_frontend import SeqInfo, append_kv, attention, paged_attention

Tensor = torch.Tensor
Call = Callable[[], Any]
SHAPES = {"1x8 4/4 d16": (1, 8, 4, 4, 16), "2x64 8/8 d64": (2, 64, 8, 8, 64), "1x64 8/2 d64": (1, 64, 8, 2, 64)}
"""(batch, tokens, heads, kv_heads, head_dim) of the calls of ``dense_cases`` and ``packed_cases``."""
PAGED = {
    "4 sequences of 17 to 64 tokens, 4/4 d16": (4, 4, 16, [64, 17, 33, 50]),
    "4 sequences of 64 tokens, 4/4 d16": (4, 4, 16, [64] * 4),
    "8 sequences of 1024 tokens, 32/8 d64": (32, 8, 64, [1024] * 8),
}
"""(heads, kv_heads, head_dim, lengths) of the calls of ``paged_cases``."""
PAGE = 16
TURN, ROUNDS = 0.001, 40
"""Seconds of a turn, some tens of calls."""


class Rival:
    """F.scaled_dot_product_attention on tensors in its own layout, with the same values as ours."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
        self.leaves = [tensor.detach().transpose(1, 2).contiguous() for tensor in (q, k, v)]
        self.options = {**options, "enable_gqa": q.shape[2] != k.shape[2]}

    def __call__(self) -> Tensor:
        return functional.scaled_dot_product_attention(*self.leaves, **self.options)


def dense_cases(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> dict[str, tuple[Call, Call, str]]:
    """Returns name -> (our call, its rival, what the rival is) of calls without gradients."""
    batch, tokens, heads, kv_heads, dim = shape
    place: dict[str, Any] = {"device": device, "dtype": dtype}
    q, k, v = (torch.randn(batch, tokens, number, dim, **place) for number in (heads, kv_heads, kv_heads))
    mask = torch.rand(batch, 1, tokens, tokens, device=device) > 0.3
    mask[..., 0] = True
    padding = torch.arange(tokens, device=device) < torch.arange(batch, device=device)[:, None] % 3 + tokens - 3
    padding = padding[:, None, None]
    bias = torch.randn(1, heads, tokens, tokens, **place)
    slopes, sinks = torch.rand(heads, device=device), torch.randn(heads, device=device)
    position = torch.arange(tokens, device=device)
    distance = position[:, None] - position
    band = (distance >= 0) & (distance < max(2, tokens // 3))
    alibi = (-slopes[:, None, None] * distance.abs()).masked_fill(distance < 0, -torch.inf)[None].to(dtype)
    sdpa = "F.sdpa"
    return {
        "plain": (lambda: attention(q, k, v), Rival(q, k, v), sdpa),
        "causal": (lambda: attention(q, k, v, causal=True), Rival(q, k, v, is_causal=True), sdpa),
        "mask": (lambda: attention(q, k, v, mask=mask), Rival(q, k, v, attn_mask=mask), sdpa),
        "mask of padding": (lambda: attention(q, k, v, mask=padding), Rival(q, k, v, attn_mask=padding), sdpa),
        "bias": (lambda: attention(q, k, v, bias=bias), Rival(q, k, v, attn_mask=bias), sdpa),
        "window": (
            lambda: attention(q, k, v, causal=True, window=max(2, tokens // 3)),
            Rival(q, k, v, attn_mask=band),
            "F.sdpa with the mask made before",
        ),
        "ALiBi": (
            lambda: attention(q, k, v, alibi_slopes=slopes, causal=True),
            Rival(q, k, v, attn_mask=alibi),
            "F.sdpa with the bias made before",
        ),
        "sinks": (lambda: attention(q, k, v, sinks=sinks), Rival(q, k, v), "F.sdpa without sinks"),
        "softcap": (lambda: attention(q, k, v, softcap=30.0), Rival(q, k, v), "F.sdpa without softcap"),
    }


def training_cases(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> dict[str, tuple[Call, Call, str]]:
    """Returns forward + backward of a plain, a masked and a biased call."""
    batch, tokens, heads, kv_heads, dim = shape
    place: dict[str, Any] = {"device": device, "dtype": dtype}
    leaves = [
        torch.randn(batch, tokens, number, dim, requires_grad=True, **place) for number in (heads, kv_heads, kv_heads)
    ]
    mask = torch.rand(batch, 1, tokens, tokens, device=device) > 0.3
    mask[..., 0] = True
    bias = torch.randn(1, heads, tokens, tokens, **place)
    dout = torch.randn(batch, tokens, heads, dim, **place)
    cases = {}
    for name, table in (("plain", None), ("mask", mask), ("bias", bias)):
        ours = {} if table is None else {name: table}
        rival = Rival(*leaves, attn_mask=table)
        for leaf in rival.leaves:
            leaf.requires_grad_()
        upstream = dout.transpose(1, 2).contiguous()

        def run(options: dict[str, Any] = ours) -> Any:
            return torch.autograd.grad(attention(*leaves, **options), leaves, dout)

        def run_rival(rival: Rival = rival, upstream: Tensor = upstream) -> Any:
            return torch.autograd.grad(rival(), rival.leaves, upstream)

        cases[f"{name}, training"] = (run, run_rival, "F.sdpa")
    return cases


def packed_cases(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> dict[str, tuple[Call, Call, str]]:
    """Returns two causal documents in one row, of equal and of unequal lengths."""
    tokens, heads, kv_heads, dim = shape[1:]
    q, k, v = (torch.randn(1, tokens, n, dim, device=device, dtype=dtype) for n in (heads, kv_heads, kv_heads))
    cases = {}
    for name, first in (("equal", tokens // 2), ("unequal", tokens // 2 - 1)):
        info = SeqInfo.from_lengths([first, tokens - first])
        document = (torch.arange(tokens, device=device) >= first).long()
        seen = (document[:, None] == document).tril()

        def run(info: SeqInfo = info) -> Any:
            return attention(q, k, v, seq_info=info, causal=True)

        rival = Rival(q, k, v, attn_mask=seen)
        cases[f"two documents of {name} lengths"] = (run, rival, "F.sdpa with the mask made before")
    return cases


def paged_cases(sizes: tuple[int, int, int, list[int]], device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Returns decoding with pages beside a gather and F.sdpa, and appending beside an indexed assignment."""
    heads, kv_heads, dim, lengths = sizes
    batch, width, longest = len(lengths), -(-max(lengths) // PAGE), max(lengths)
    place: dict[str, Any] = {"device": device, "dtype": dtype}
    pools = [torch.randn(batch * width + 3, PAGE, kv_heads, dim, **place) for _ in range(2)]
    table = torch.randperm(batch * width + 3)[: batch * width].view(batch, width)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    q, new = torch.randn(batch, heads, dim, **place), torch.randn(batch, kv_heads, dim, **place)
    pages: dict[str, Any] = {"block_table": table.int().to(device), "seq_lens": seq_lens}
    gathered, last = table.to(device), seq_lens.long() - 1
    seen = (torch.arange(longest, device=device) < seq_lens[:, None])[:, None, None]
    mask = None if min(lengths) == longest else seen

    def gather() -> Any:
        k, v = (pool[gathered].flatten(1, 2)[:, :longest].transpose(1, 2) for pool in pools)
        options: dict[str, Any] = {"attn_mask": mask, "enable_gqa": heads != kv_heads}
        return functional.scaled_dot_product_attention(q[:, :, None], k, v, **options)

    def assign() -> None:
        page, offset = gathered.gather(1, (last // PAGE)[:, None])[:, 0], last % PAGE
        for pool in pools:
            pool[page, offset] = new

    return {
        "paged decode": (lambda: paged_attention(q, *pools, **pages), gather, "gather + F.sdpa"),
        "append": (lambda: append_kv(*pools, new, new, **pages), assign, "indexed assignment"),
    }


def timed(cases: Callable[[], dict[str, tuple[Call, Call, str]]], case: str) -> Row:
    """Times a case beside its rival."""
    ours, rival, words = cases()[case]
    with torch.set_grad_enabled("training" in case):
        return {"rival": words, **measure({"attention": ours, "rival": rival}, turn=TURN, rounds=ROUNDS)}


def jobs(device: str, dtype: torch.dtype) -> Jobs:
    """Returns every case of every shape."""
    found: Jobs = {}
    for title, shape in SHAPES.items():
        for cases in (dense_cases, packed_cases, training_cases):
            made = partial(cases, shape, device, dtype)
            found |= {(case, title): partial(timed, made, case) for case in made()}
    for title, sizes in PAGED.items():
        made = partial(paged_cases, sizes, device, dtype)
        found |= {(case, title): partial(timed, made, case) for case in made()}
    return found


def main(arguments: list[str] | None = None) -> int:
    """Runs every case, prints the table and writes the raw times if --json is given."""
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    torch.manual_seed(0)
    if device == "cpu":
        torch.set_num_threads(1)  # waking a second thread takes unpredictable time on a busy machine
    return run(__doc__, jobs(device, dtype), small_calls, arguments, device=device, dtype=str(dtype))


if __name__ == "__main__":
    sys.exit(main())
