"""Measures on one thread of a CPU what ``invariant`` costs, in torch and in JAX; ``benchmarks.same_bits`` runs it.

The candidates of a call take turns in one process, and a figure is the median over the turns of the ratio of two
neighbours. The size of the tiles was chosen by other calls: rows of 48, 96, 200, 333, 640, 768 and 2100 tokens.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from benchmarks.measure import side_by_side

ROUNDS = 5
DECODED = 5
"""Times as many rounds, and calls in each, for a call that takes a millisecond."""
SHAPES: dict[str, tuple[int, ...] | tuple[int, int, str]] = {
    "1 row of 1024": (1024,),
    "2 rows of 512": (512, 512),
    "5 documents of 472 to 1024": (1024, 472, 900, 580, 731),
    "9 documents of 65 to 417": (300, 65, 417, 129, 250, 384, 91, 211, 160),
    "2 documents of 1800 and 248": (1800, 248),
}
"""The lengths of rows of a batch, or of packed documents, in one row."""
HEADS = {64: (8, 2), 128: (4, 2)}
"""Query heads and kv heads for each width."""
IN_JAX = ("1 row of 1024", "5 documents of 472 to 1024")
PAGE, SEQUENCES, TOKENS = 16, 8, 1000
CHUNKS = {"decoding of 8 x 1000 from pages": 1, "8 chunks of 100 after 900 tokens, from pages": 100}
Calls = dict[str, Callable[[], Any]]


class Shape(NamedTuple):
    """A call: a name in SHAPES, the channels of a head, and the dtype."""

    name: str
    width: int
    dtype: str
    training: bool

    @property
    def packed(self) -> bool:
        """Whether the lengths are those of documents."""
        return "documents" in self.name

    def sizes(self) -> list[tuple[int, int, int, int]]:
        """Returns the shapes of q, k, v and dout."""
        lengths, heads = SHAPES[self.name], HEADS[self.width]
        rows = (1, sum(lengths)) if self.packed else (len(lengths), lengths[0])
        return [(*rows, count, self.width) for count in (heads[0], heads[1], heads[1], heads[0])]

    def facts(self) -> dict[str, Any]:
        """Returns what the stored result says of the call."""
        return {**self._asdict(), "heads": HEADS[self.width]}


def shapes(names: tuple[str, ...] = tuple(SHAPES)) -> Iterator[Shape]:
    """Yields all calls on rows and documents."""
    for name, width, dtype, training in product(names, HEADS, ("float32", "bfloat16"), (False, True)):
        yield Shape(name, width, dtype, training)


def one_thread() -> None:
    """Lets torch and XLA compute with one thread. Call it before JAX is imported."""
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    import torch

    torch.set_num_threads(1)


def _info(shape: Shape, array: Any) -> dict[str, Any]:
    from attn_core import SeqInfo

    return {"seq_info": SeqInfo.from_lengths(SHAPES[shape.name], array=array)} if shape.packed else {}


def in_torch(shape: Shape) -> dict[str, Any]:
    """The automatic choices of torch's frontend, and ``math`` with "prefix"."""
    import torch

    from torch_frontend import attention, explain

    torch.manual_seed(0)
    dtype = getattr(torch, shape.dtype)
    q, k, v, dout = (torch.randn(size).to(dtype).requires_grad_(shape.training) for size in shape.sizes())
    options = {"causal": True, **_info(shape, torch.from_numpy)}

    def call(**how: Any) -> Callable[[], Any]:
        if not shape.training:
            return partial(attention, q, k, v, **options, **how)
        return lambda: torch.autograd.grad(attention(q, k, v, **options, **how), (q, k, v), dout.detach())

    kinds = _kinds()
    chosen = {name: explain(q, k, v, **options, **how).backend for name, how in kinds.items()}
    return _row(shape.facts(), "torch", chosen, {name: call(**how) for name, how in kinds.items()})


def in_jax(shape: Shape, backend: str | None) -> dict[str, Any]:
    """The automatic choices of JAX's frontend, or a backend by name, under ``jax.jit``."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jax_frontend import attention, explain

    random = np.random.default_rng(0)
    q, k, v, dout = (jnp.asarray(random.standard_normal(size), shape.dtype) for size in shape.sizes())
    options = {"causal": True, **_info(shape, jnp.asarray)}
    chosen, calls = {}, {}
    for kind in (None, "batch", "prefix"):
        how = {**options, "invariant": kind, "backend": backend}
        chosen[str(kind)] = explain(q, k, v, **how).backend

        def run(q: Any, k: Any, v: Any, dout: Any, how: dict[str, Any] = how) -> Any:
            if not shape.training:
                return attention(q, k, v, **how)
            out, back = jax.vjp(partial(attention, **how), q, k, v)
            return out, back(dout)

        compiled = jax.jit(run).lower(q, k, v, dout).compile()
        calls[str(kind)] = lambda compiled=compiled: jax.block_until_ready(compiled(q, k, v, dout))
    return _row(shape.facts(), "JAX", chosen, calls)


def decoding(width: int, dtype: str) -> dict[str, Any]:
    """One query of each row, with dense keys, in torch."""
    import torch

    from torch_frontend import attention, explain

    torch.manual_seed(0)
    heads, kv_heads = HEADS[width]
    q = torch.randn(SEQUENCES, 1, heads, width).to(getattr(torch, dtype))
    k, v = (torch.randn(SEQUENCES, TOKENS, kv_heads, width).to(q.dtype) for _ in "kv")
    kinds = _kinds()
    chosen = {kind: explain(q, k, v, causal=True, **how).backend for kind, how in kinds.items()}
    calls: Calls = {kind: partial(attention, q, k, v, causal=True, **how) for kind, how in kinds.items()}
    name = f"decoding of {SEQUENCES} x {TOKENS}, dense"
    facts = {"name": name, "width": width, "dtype": dtype, "training": False, "heads": (heads, kv_heads)}
    return _row(facts, "torch", chosen, calls, DECODED)


def _kinds() -> dict[str, dict[str, Any]]:
    """The promises, and ``math`` with "prefix"."""
    kinds: dict[str, dict[str, Any]] = {str(kind): {"invariant": kind} for kind in (None, "batch", "prefix")}
    return kinds | {"math": {"invariant": "prefix", "backend": "math"}}


def from_pages(name: str, width: int, dtype: str) -> dict[str, Any]:
    """Decoding, and chunks of prompts, from pages in torch."""
    import torch

    from torch_frontend import explain_paged, paged_attention

    torch.manual_seed(0)
    heads, kv_heads = HEADS[width]
    columns, chunk = -(-TOKENS // PAGE), CHUNKS[name]
    q = torch.randn(SEQUENCES * chunk, heads, width).to(getattr(torch, dtype))
    k, v = (torch.randn(SEQUENCES * columns, PAGE, kv_heads, width).to(q.dtype) for _ in "kv")
    options: dict[str, Any] = {
        "block_table": torch.randperm(SEQUENCES * columns).view(SEQUENCES, columns).int(),
        "seq_lens": torch.full((SEQUENCES,), TOKENS, dtype=torch.int32),
        "causal": True,
    }
    if chunk > 1:
        options |= {"cu_seqlens_q": chunk * torch.arange(SEQUENCES + 1, dtype=torch.int32), "max_len_q": chunk}
    kinds = _kinds()
    chosen = {kind: explain_paged(q, k, v, **options, **how).backend for kind, how in kinds.items()}
    calls: Calls = {kind: partial(paged_attention, q, k, v, **options, **how) for kind, how in kinds.items()}
    facts = {"name": name, "width": width, "dtype": dtype, "training": False, "heads": (heads, kv_heads)}
    return _row(facts, "torch", chosen, calls, DECODED if chunk == 1 else 1)


def _row(
    facts: dict[str, Any], framework: str, chosen: dict[str, Any], calls: Calls, number: int = 1
) -> dict[str, Any]:
    seconds = side_by_side(calls, calls=number, rounds=ROUNDS * number)
    return {**facts, "framework": framework, "chosen": chosen, "seconds": seconds}


def steps() -> Iterator[Callable[[], dict[str, Any]]]:
    """Yields the measurements."""
    for shape in shapes():
        yield partial(in_torch, shape)
    for width, dtype in product(HEADS, ("float32", "bfloat16")):
        yield partial(decoding, width, dtype)
    for name, width, dtype in product(CHUNKS, HEADS, ("float32", "bfloat16")):
        yield partial(from_pages, name, width, dtype)
    for backend, shape in product((None, "jax_xla"), shapes(IN_JAX)):
        yield partial(in_jax, shape, backend)


def tables(result: dict[str, Any]) -> str:
    """Returns a stored result as Markdown."""
    facts = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    text = [f"Measured on {facts['date']}: one thread of {facts['processor']}, {versions}.", ""]
    text += ['| torch, causal | heads | width | dtype | | without | "batch" | "prefix" | "prefix" of `math` |']
    text += ["|---|---|---:|---|---|---|---:|---:|---:|"]
    text += [_line(row, ("batch", "prefix", "math")) for row in result["rows"] if row["framework"] == "torch"]
    text += ["", '| JAX under `jit`, causal | heads | width | dtype | | without | "batch" | "prefix" |']
    text += ["|---|---|---:|---|---|---|---:|---:|"]
    text += [_line(row, ("batch", "prefix")) for row in result["rows"] if row["framework"] == "JAX"]
    return "\n".join(text) + "\n"


def _line(row: dict[str, Any], kinds: tuple[str, ...]) -> str:
    chosen, seconds = row["chosen"], row["seconds"]
    cells = [row["name"], "/".join(str(count) for count in row["heads"]), str(row["width"]), row["dtype"]]
    cells += ["training" if row["training"] else "forward", f"`{chosen['None']}`"]
    for kind in kinds:
        ratio = statistics.median(one / other for one, other in zip(seconds[kind], seconds["None"], strict=True))
        same = chosen[kind] == chosen["None"] or kind == "math"
        cells.append(f"{ratio:.2f}" if same else f"`{chosen[kind]}` {ratio:.2f}")
    return f"| {' | '.join(cells)} |"
