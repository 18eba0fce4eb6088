"""Calls whose results must have the same bits: a document among drawn neighbours, in a batch, in chunks, and in pages.

All packed calls have arrays of one size, so that JAX compiles one program for all drawn lengths and offsets.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from attn_core import SeqInfo

TOKENS, DOCUMENTS, PAGE = 256, 4, 16
"""Tokens of a packed row, documents in it (some may be empty), and tokens of a page."""
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Kind:
    """What all calls of a draw have in common; options are keywords of ``attention``."""

    framework: str
    backend: str
    invariant: str | None
    heads: tuple[int, int]
    dtype: str
    options: tuple[tuple[str, Any], ...]
    device: str = "cpu"
    dim: int = 16


def document(kind: Kind, seed: int, queries: int, keys: int) -> Arrays:
    """Returns q, k, v and dout of a document, float32 ``[tokens, heads, dim]``."""
    rng = np.random.default_rng(seed)
    heads, kv_heads = kind.heads
    sizes = {"q": (queries, heads), "k": (keys, kv_heads), "v": (keys, kv_heads), "dout": (queries, heads)}
    return {name: rng.standard_normal((*size, kind.dim), dtype=np.float32) for name, size in sizes.items()}


def per_head(kind: Kind) -> dict[str, np.ndarray]:
    """Returns slopes or sinks if the options name them."""
    numbers = np.linspace(0.1, 0.7, kind.heads[0], dtype=np.float32)
    return {name: numbers for name, value in kind.options if name in ("alibi_slopes", "sinks") and value}


def packed(
    kind: Kind, documents: list[Arrays], noise: float = 0.0, room: tuple[int, int] = (TOKENS, DOCUMENTS)
) -> list[Arrays]:
    """Returns out, lse, dq, dk and dv of each document, all computed in one packed call; ``noise`` fills the rest.

    room: the tokens, and the most documents, of the call.
    """
    row = {}
    for name in ("q", "k", "v", "dout"):
        tokens = np.concatenate([each[name] for each in documents])
        row[name] = np.full((room[0], *tokens.shape[1:]), noise, np.float32)
        row[name][: len(tokens)] = tokens
    lengths = [[len(each[name]) for each in documents] for name in "qk"]
    info = SeqInfo.from_lengths(*lengths, max_len=room[0], max_documents=room[1])
    results = _run(kind, row, info)
    ends = {"q": np.cumsum([0, *lengths[0]]), "k": np.cumsum([0, *lengths[1]])}

    def part(name: str, number: int) -> np.ndarray:
        side = "k" if name in ("dk", "dv") else "q"
        here = slice(ends[side][number], ends[side][number + 1])
        return results[name][:, here] if name == "lse" else results[name][here]

    return [{name: part(name, number) for name in results} for number in range(len(documents))]


def batch(kind: Kind, rows: list[Arrays], mask: np.ndarray | None = None) -> list[Arrays]:
    """Returns the results of each row, all computed in one dense call."""
    stacked = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    results = _run(kind, stacked, None, mask)
    return [{name: array[number] for name, array in results.items()} for number in range(len(rows))]


def pages(kind: Kind, documents: list[Arrays], order: np.ndarray) -> list[Arrays]:
    """Returns out and lse of each document's queries, from keys in pages that lie in a drawn order; the rest is NaN."""
    width = TOKENS // PAGE
    pool = {name: np.full((DOCUMENTS * width, PAGE, kind.heads[1], kind.dim), np.nan, np.float32) for name in "kv"}
    table = np.full((DOCUMENTS, width), -1, np.int32)
    lengths = np.zeros(DOCUMENTS, np.int32)
    for number, each in enumerate(documents):
        lengths[number] = len(each["k"])
        used = order[number * width : number * width + -(-len(each["k"]) // PAGE)]
        table[number, : len(used)] = used
        for name in "kv":
            padded = np.full((len(used) * PAGE, *each[name].shape[1:]), np.nan, np.float32)
            padded[: len(each[name])] = each[name]
            pool[name][used] = padded.reshape(len(used), PAGE, *each[name].shape[1:])
    counts = [len(each["q"]) for each in documents] + [0] * (DOCUMENTS - len(documents))
    q = np.zeros((TOKENS, kind.heads[0], kind.dim), np.float32)
    q[: sum(counts)] = np.concatenate([each["q"] for each in documents])
    offsets = np.cumsum([0, *counts]).astype(np.int32)
    out, lse = _paged(kind, {"q": q, **pool}, {"block_table": table, "seq_lens": lengths, "cu_seqlens_q": offsets})
    return [{"out": out[start:stop], "lse": lse[:, start:stop]} for start, stop in pairwise(offsets)]


def differing(first: Arrays, second: Arrays) -> dict[str, int]:
    """Returns how many numbers of each result differ in any bit, for results that both have."""
    counts = {}
    for name in first.keys() & second.keys():
        assert first[name].shape == second[name].shape, name
        a, b = (np.ascontiguousarray(each[name]) for each in (first, second))
        kind = f"u{a.dtype.itemsize}"
        counts[name] = int((a.view(kind) != b.view(kind)).sum())
    return {name: count for name, count in counts.items() if count}


def _run(kind: Kind, arrays: Arrays, info: Any, mask: np.ndarray | None = None) -> Arrays:
    return (_in_torch if kind.framework == "torch" else _in_jax)(kind, arrays, info, mask)


def _keywords(kind: Kind) -> dict[str, Any]:
    plain = {name: value for name, value in kind.options if name not in ("alibi_slopes", "sinks")}
    return {**plain, "backend": kind.backend, "invariant": kind.invariant}


def _bits(tensor: Any) -> np.ndarray:
    import torch

    wide = {torch.bfloat16: torch.float32}.get(tensor.dtype, tensor.dtype)
    return tensor.detach().to(wide).cpu().contiguous().numpy()  # type: ignore[no-any-return]


def _in_torch(kind: Kind, arrays: Arrays, info: Any, mask: np.ndarray | None) -> Arrays:
    import torch

    import torch_frontend

    def tensor(array: np.ndarray) -> Any:
        return torch.from_numpy(array).to(kind.device, getattr(torch, kind.dtype))

    q, k, v = (tensor(arrays[name]).requires_grad_() for name in "qkv")
    keywords = _keywords(kind) | {name: torch.from_numpy(a).to(kind.device) for name, a in per_head(kind).items()}
    keywords |= {} if mask is None else {"mask": torch.from_numpy(mask).to(kind.device)}
    trained = torch_frontend.attention(q, k, v, seq_info=info, **keywords)
    gradients = torch.autograd.grad(trained, (q, k, v), tensor(arrays["dout"]))
    with torch.no_grad():
        out, lse = torch_frontend.attention(q, k, v, seq_info=info, return_lse=True, **keywords)
    assert not differing({"out": _bits(trained)}, {"out": _bits(out)}), "training and inference differ"
    named = zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True)
    return {name: _bits(result) for name, result in named}


@lru_cache(maxsize=64)
def _jax_program(kind: Kind, packs: bool, has_mask: bool) -> Any:
    import jax
    import jax.numpy as jnp

    import jax_frontend

    def program(arrays: dict[str, Any], offsets: Any, mask: Any) -> Any:
        info = SeqInfo(*offsets, TOKENS, TOKENS) if packs else None
        keywords = _keywords(kind) | {name: jnp.asarray(array) for name, array in per_head(kind).items()}
        keywords |= {"mask": mask} if has_mask else {}
        q, k, v, dout = (arrays[name].astype(kind.dtype) for name in ("q", "k", "v", "dout"))

        def attend(q: Any, k: Any, v: Any) -> Any:
            return jax_frontend.attention(q, k, v, seq_info=info, return_lse=True, **keywords)

        (out, lse), back = jax.vjp(attend, q, k, v)
        return out, lse, *back((dout, jnp.zeros_like(lse)))

    return jax.jit(program)


def _in_jax(kind: Kind, arrays: Arrays, info: Any, mask: np.ndarray | None) -> Arrays:
    offsets = None if info is None else (info.cu_seqlens_q, info.cu_seqlens_k)
    results = _jax_program(kind, info is not None, mask is not None)(arrays, offsets, mask)
    named = zip(("out", "lse", "dq", "dk", "dv"), results, strict=True)
    return {name: np.asarray(result.astype("float32")) for name, result in named}


def _paged(kind: Kind, arrays: Arrays, tables: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    keywords = _keywords(kind) | {"max_len_q": TOKENS, "return_lse": True, "causal": True}
    if kind.framework == "torch":
        import torch

        import torch_frontend

        q, k, v = (torch.from_numpy(arrays[name]).to(kind.device, getattr(torch, kind.dtype)) for name in "qkv")
        more = {name: torch.from_numpy(a).to(kind.device) for name, a in (*tables.items(), *per_head(kind).items())}
        out, lse = torch_frontend.paged_attention(q, k, v, **more, **keywords)
        return _bits(out), _bits(lse)
    import jax.numpy as jnp

    import jax_frontend

    q, k, v = (jnp.asarray(arrays[name], kind.dtype) for name in "qkv")
    more = {name: jnp.asarray(array) for name, array in (*tables.items(), *per_head(kind).items())}
    out, lse = jax_frontend.paged_attention(q, k, v, **more, **keywords)
    return np.asarray(out.astype("float32")), np.asarray(lse)
