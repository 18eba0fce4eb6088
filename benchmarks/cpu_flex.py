"""Measures windows, packed documents and softcaps on a CPU beside compiled FlexAttention, forward.

python -m benchmarks.cpu_flex                       # prints a table: 256 to 8192 tokens, float32 and bfloat16
python -m benchmarks.cpu_flex --json flex.json      # also writes every round's times

``torch.compile(flex_attention)`` is compiled before the timing, its block masks are built before it, and its tensors
are in its own layout. The candidates of a case take turns in one process. The ratio is of the fastest rounds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.measure import environment, side_by_side
from torch_frontend import SeqInfo, attention

Tensor = torch.Tensor
Call = Callable[[], Any]
SIZES = ((8, 8, 64), (8, 2, 128))
"""(heads, kv_heads, head_dim); each call is one causal row."""
TOKENS = (256, 1024, 4096, 8192)
DTYPES = ("float32", "bfloat16")
SOFTCAP = 30.0


def documents(tokens: int) -> list[int]:
    """Returns the lengths of eight unequal documents that fill a row."""
    parts = [tokens * weight // 64 for weight in (3, 17, 5, 9, 2, 14, 6)]
    return [*parts, tokens - sum(parts)]


def causal(b: Any, h: Any, row: Any, column: Any) -> Any:
    """FlexAttention's mask function of a causal call."""
    return row >= column


def cases(tokens: int) -> dict[str, tuple[dict[str, Any], Callable[..., Any], Callable[..., Any] | None]]:
    """Returns name -> (options of attention, FlexAttention's mask function, its score function)."""
    lengths = documents(tokens)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def window_of(width: int) -> Callable[..., Any]:
        return lambda b, h, row, column: (row >= column) & (row - column < width)

    def same_document(b: Any, h: Any, row: Any, column: Any) -> Any:
        return (row >= column) & (document[row] == document[column])

    def capped(score: Any, b: Any, h: Any, row: Any, column: Any) -> Any:
        return SOFTCAP * torch.tanh(score / SOFTCAP)

    narrow, wide = max(16, tokens // 32), tokens // 4
    return {
        f"window {narrow}": ({"window": narrow}, window_of(narrow), None),
        f"window {wide}": ({"window": wide}, window_of(wide), None),
        "8 documents": ({"seq_info": SeqInfo.from_lengths(lengths)}, same_document, None),
        "softcap": ({"softcap": SOFTCAP}, causal, capped),
        f"softcap, window {wide}": ({"softcap": SOFTCAP, "window": wide}, window_of(wide), capped),
    }


def candidates(
    tokens: int,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    options: dict[str, Any],
    mask: Callable[..., Any],
    score: Callable[..., Any] | None,
    backends: tuple[str | None, ...],
) -> dict[str, Call]:
    """Returns attention, by backend (None: automatic choice), and compiled FlexAttention on the same values."""
    heads, kv_heads, dim = sizes
    q, k, v = (torch.randn(1, tokens, number, dim, dtype=dtype) for number in (heads, kv_heads, kv_heads))
    own = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    blocks = create_block_mask(mask, None, None, tokens, tokens, device="cpu")

    def flex() -> Any:
        return compiled(*own, score_mod=score, block_mask=blocks, enable_gqa=heads != kv_heads)

    calls: dict[str, Call] = {"compiled flex": flex}
    for backend in backends:

        def ours(backend: str | None = backend) -> Any:
            return attention(q, k, v, causal=True, backend=backend, **options)

        difference = (ours().transpose(1, 2).float() - flex().float()).abs().max()
        if difference > (2e-4 if dtype == torch.float32 else 6e-2):
            raise AssertionError(f"{backend}: the results differ by {difference}")
        calls[backend or "attention"] = ours
    return calls


def main() -> None:
    """Runs every case, prints the table and writes the raw times if --json is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--backends", nargs="+", default=[], help="backends beside automatic choice")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--json", type=Path, default=None)
    parsed = parser.parse_args()
    torch.manual_seed(0)
    entries = []
    with torch.no_grad():
        for sizes in SIZES:
            for tokens in parsed.tokens:
                for name, case in cases(tokens).items():
                    for dtype in parsed.dtypes if parsed.only in name else ():
                        title = f"1x{tokens} {sizes[0]}/{sizes[1]} d{sizes[2]} {dtype} causal, {name}"
                        calls = candidates(tokens, sizes, getattr(torch, dtype), *case, (None, *parsed.backends))
                        seconds = side_by_side(calls, calls=1, rounds=parsed.rounds)
                        best = {who: min(values) for who, values in seconds.items()}
                        flex = best["compiled flex"]
                        ratios = "".join(f"  {who} {flex / value:5.2f}" for who, value in best.items())
                        print(f"{title:66}{flex * 1e3:10.3f} ms{ratios}", flush=True)
                        entries.append({"case": title, "seconds": seconds})
    if parsed.json is not None:
        result = {"environment": environment(), "threads": torch.get_num_threads(), "calls": entries}
        parsed.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
