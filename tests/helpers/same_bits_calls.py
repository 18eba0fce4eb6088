"""Calls whose results must have the same bits: a document among drawn neighbours, in a batch, in chunks, and in pages.

All packed calls have arrays of one size, so that JAX compiles one program for all drawn lengths and offsets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from frameworks import ALL, Framework, as_numpy
from hypothesis import strategies as st

import jax_frontend
import torch_frontend
from attn_core import AttentionSpec, SeqInfo
from attn_core.call.spec import PagedKV
from attn_core.call.tensors import Inputs, PagedInputs

TOKENS, DOCUMENTS, PAGE = 256, 4, 16
"""Tokens of a packed row, documents in it (some may be empty), and tokens of a page."""
Arrays = dict[str, np.ndarray]
RESULTS = ("out", "lse", "dq", "dk", "dv")
Run = Callable[[AttentionSpec, PagedInputs], tuple[np.ndarray, np.ndarray]]
"""Computes (out, lse) of numpy arrays."""


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

    @property
    def on(self) -> Framework:
        """The frontend, and its arrays on the device."""
        return next(each for each in ALL if (each.name, each.device) == (self.framework, self.device))


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
    """The options of a kind as keywords, with slopes or sinks as the framework's arrays."""
    plain = {name: value for name, value in kind.options if name not in ("alibi_slopes", "sinks")}
    heads = {name: kind.on.array(array) for name, array in per_head(kind).items()}
    return {**plain, **heads, "backend": kind.backend, "invariant": kind.invariant}


def _in_torch(kind: Kind, arrays: Arrays, info: Any, mask: np.ndarray | None) -> Arrays:
    q, k, v = (kind.on.array(arrays[name], kind.dtype).requires_grad_() for name in "qkv")
    keywords = _keywords(kind) | ({} if mask is None else {"mask": kind.on.array(mask)})
    trained = torch_frontend.attention(q, k, v, seq_info=info, **keywords)
    gradients = torch.autograd.grad(trained, (q, k, v), kind.on.array(arrays["dout"], kind.dtype))
    with torch.no_grad():
        out, lse = torch_frontend.attention(q, k, v, seq_info=info, return_lse=True, **keywords)
    assert not differing({"out": as_numpy(trained)}, {"out": as_numpy(out)}), "training and inference differ"
    return dict(zip(RESULTS, map(as_numpy, (out, lse, *gradients)), strict=True))


@lru_cache(maxsize=64)
def _jax_program(kind: Kind, packs: bool, has_mask: bool) -> Any:
    def program(arrays: dict[str, Any], offsets: Any, mask: Any) -> Any:
        info = SeqInfo(*offsets, TOKENS, TOKENS) if packs else None
        keywords = _keywords(kind) | ({"mask": mask} if has_mask else {})
        q, k, v, dout = (arrays[name].astype(kind.dtype) for name in ("q", "k", "v", "dout"))

        def attend(q: Any, k: Any, v: Any) -> Any:
            return jax_frontend.attention(q, k, v, seq_info=info, return_lse=True, **keywords)

        (out, lse), back = jax.vjp(attend, q, k, v)
        return out, lse, *back((dout, jnp.zeros_like(lse)))

    return jax.jit(program)


def _in_jax(kind: Kind, arrays: Arrays, info: Any, mask: np.ndarray | None) -> Arrays:
    offsets = None if info is None else (info.cu_seqlens_q, info.cu_seqlens_k)
    results = _jax_program(kind, info is not None, mask is not None)(arrays, offsets, mask)
    return dict(zip(RESULTS, map(as_numpy, results), strict=True))


def _paged(kind: Kind, arrays: Arrays, tables: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    q, k, v = (kind.on.array(arrays[name], kind.dtype) for name in "qkv")
    keywords = _keywords(kind) | {name: kind.on.array(array) for name, array in tables.items()}
    keywords |= {"max_len_q": TOKENS, "return_lse": True, "causal": True}
    out, lse = kind.on.frontend.paged_attention(q, k, v, **keywords)
    return as_numpy(out), as_numpy(lse)


# A sequence in pages: drawn cuts, neighbours, pages and padding


@dataclass(frozen=True)
class Scene:
    """Where a sequence lies.

    Attributes:
        neighbours: (queries, keys) of other sequences. place: of the sequence among them.
        page: tokens of a page. spare: columns of the table that no sequence fills.
        padded: whether sequences have padding on the left.
        more: by how many queries the declared maximum exceeds the longest sequence's.
        offsets: whether the call has offsets, if it may lack them. seed: of numbers, pages and padding.
    """

    neighbours: tuple[tuple[int, int], ...] = ()
    place: int = 0
    page: int = 16
    spare: int = 0
    padded: bool = False
    more: int = 0
    offsets: bool = True
    seed: int = 0


@st.composite
def scenes(draw: Any, longest: int, pages: tuple[int, ...]) -> Scene:
    keys = st.integers(1, longest)
    lengths = draw(st.lists(st.tuples(st.sampled_from((0, 1, 1, 5, longest // 3)), keys), max_size=3))
    neighbours = tuple((min(queries, keys), keys) for queries, keys in lengths)
    return Scene(
        neighbours,
        draw(st.integers(0, len(neighbours))),
        draw(st.sampled_from(pages)),
        draw(st.sampled_from((0, 1, 2 * longest // 16))),
        draw(st.booleans()),
        draw(st.sampled_from((0, 1, 3 * longest))),
        draw(st.booleans()),
        draw(st.integers(0, 2**31)),
    )


def call(kind: Kind, subject: Arrays, scene: Scene) -> tuple[AttentionSpec, PagedInputs, slice]:
    """Returns a call with the subject's queries among the scene's neighbours, and where its queries are."""
    random = np.random.default_rng(scene.seed)
    sequences = [document(kind, int(random.integers(2**31)), *lengths) for lengths in scene.neighbours]
    sequences.insert(scene.place, subject)
    counts, lengths = ([len(each[name]) for each in sequences] for name in "qk")
    starts = [int(random.integers(0, 40)) if scene.padded else 0 for _ in sequences]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    width = max(-(-end // scene.page) for end in ends) + scene.spare
    order = random.permutation(len(sequences) * width)
    table = np.full((len(sequences), width), -1, np.int32)
    pools = [np.full((len(order), scene.page, kind.heads[1], kind.dim), np.nan, np.float32) for _ in "kv"]
    for number, each in enumerate(sequences):
        used = table[number, : -(-ends[number] // scene.page)]
        used[:] = order[number * width : number * width + len(used)]
        for pool, name in zip(pools, "kv", strict=True):
            slots = np.full((len(used) * scene.page, *pool.shape[2:]), np.nan, np.float32)
            slots[starts[number] : ends[number]] = each[name]
            pool[used] = slots.reshape(-1, *pool.shape[1:])
    tokens, cu = sum(counts), np.cumsum([0, *counts]).astype(np.int32)
    alone = set(counts) == {1} and not scene.offsets
    longest = 1 if alone else min(tokens, max(counts) + scene.more)
    options = dict(kind.options)
    numbers = np.linspace(0.1, 0.7, kind.heads[0], dtype=np.float32)
    window = options.get("window")
    spec = AttentionSpec(
        **{"batch": 1, "q_len": tokens, "kv_len": width * scene.page, "num_heads": kind.heads[0]},
        **{"num_kv_heads": kind.heads[1], "head_dim": kind.dim, "value_dim": kind.dim, "dtype": kind.dtype},
        **{"causal": True, "window": (None, None) if window is None else (window - 1, 0)},
        **{"softcap": options.get("softcap"), "sinks": "sinks" in options, "return_lse": True},
        alibi_shape=(kind.heads[0],) if "alibi_slopes" in options else None,
        documents=len(sequences),
        max_len_q=longest if alone or tokens != len(sequences) else max(longest, 2),
        max_len_k=width * scene.page,
        paged=PagedKV(num_pages=len(order), page_size=scene.page, width=width, starts=scene.padded),
        invariant=kind.invariant,  # type: ignore[arg-type]
    )
    inputs = PagedInputs(
        np.concatenate([each["q"] for each in sequences]),
        *pools,
        table,
        np.asarray(ends, np.int32),
        None if alone else cu,
        numbers if spec.sinks else None,
        alibi_slopes=numbers if spec.alibi_shape else None,
        kv_starts=np.asarray(starts, np.int32) if scene.padded else None,
    )
    return spec, inputs, slice(int(cu[scene.place]), int(cu[scene.place + 1]))


def check(kind: Kind, run: Run, draw: Any, lengths: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    """Draws a prompt, its cuts and a scene for each, and compares each chunk with the prompt alone.

    Args:
        lengths: of the prompt. sizes: of pages; a GPU compiles a kernel for each.
    """
    length = draw(st.sampled_from(lengths))
    whole = document(kind, draw(st.integers(0, 2**31)), length, length)
    out, lse = _of_subject(kind, run, whole, Scene())
    cuts = sorted({0, length, length - 1, *draw(st.lists(st.integers(1, length - 1), max_size=2))})
    for start, stop in pairwise(cuts):
        chunk = {name: array[:stop] if name in "kv" else array[start:stop] for name, array in whole.items()}
        scene = draw(scenes(length, sizes))
        part = dict(zip(("out", "lse"), _of_subject(kind, run, chunk, scene), strict=True))
        expected = {"out": out[start:stop], "lse": lse[:, start:stop]}
        assert not differing(expected, part), f"queries {start} to {stop} of {length} in {scene}"
    position = draw(st.integers(0, length - 1))  # decoded
    token = {name: array[: position + 1] if name in "kv" else array[position:][:1] for name, array in whole.items()}
    scene = draw(scenes(length, sizes))
    scene = replace(scene, neighbours=tuple((1, keys) for _, keys in scene.neighbours), offsets=False)
    part = dict(zip(("out", "lse"), _of_subject(kind, run, token, scene), strict=True))
    expected = {"out": out[position:][:1], "lse": lse[:, position:][:, :1]}
    assert not differing(expected, part), f"token {position} of {length} decoded in {scene}"


def _of_subject(kind: Kind, run: Run, subject: Arrays, scene: Scene) -> tuple[np.ndarray, np.ndarray]:
    spec, inputs, here = call(kind, subject, scene)
    out, lse = run(spec, inputs)
    assert np.isfinite(out).all(), "a row that sees keys is finite"
    return out[here], lse[:, here]


def as_tensors(spec: AttentionSpec, inputs: PagedInputs, device: str) -> PagedInputs:
    """Returns torch's tensors of a call; queries and pools in the call's dtype."""
    kinds = {name: getattr(torch, spec.dtype) for name in ("q", "k", "v")}
    return PagedInputs(
        *(
            None if array is None else torch.from_numpy(array).to(device, kinds.get(name))
            for name, array in inputs._asdict().items()
        )
    )


def on_a_gpu(spec: AttentionSpec, inputs: PagedInputs) -> tuple[np.ndarray, np.ndarray]:
    """Runs a call through torch's public function, on the backend for pages."""
    tensors = as_tensors(spec, inputs, "cuda")._asdict()
    named = {name: tensor for name, tensor in list(tensors.items())[3:] if tensor is not None}
    out, lse = torch_frontend.paged_attention(
        *(tensors[name] for name in "qkv"),
        **named,
        **{"causal": True, "window": spec.window, "softcap": spec.softcap, "max_len_q": spec.max_len_q},
        **{"return_lse": True, "backend": "triton_splitkv", "invariant": spec.invariant},
    )
    return out.float().cpu().numpy(), lse.cpu().numpy()


def as_packed_and_in_pages(spec: AttentionSpec, inputs: PagedInputs) -> tuple[np.ndarray, np.ndarray]:
    """The results of a call on pages, which are those of the same keys as packed documents on ``triton_ordered``."""
    out, lse = on_a_gpu(spec, inputs)
    _, packed = packed_of(spec, inputs)
    q, k, v = (torch.from_numpy(each).to("cuda", getattr(torch, spec.dtype)) for each in packed[:3])
    lengths = (np.diff(each).tolist() for each in (packed.cu_seqlens_q, packed.cu_seqlens_k))
    others = {name: getattr(packed, name) for name in ("sinks", "alibi_slopes")}
    found = torch_frontend.attention(
        *(q, k, v),
        seq_info=torch_frontend.SeqInfo.from_lengths(*lengths),
        **{name: torch.from_numpy(each).cuda() for name, each in others.items() if each is not None},
        **{"causal": True, "window": spec.window, "softcap": spec.softcap, "return_lse": True},
        **{"backend": "triton_ordered", "invariant": spec.invariant},
    )
    results = dict(zip(("out", "lse"), (each.float().cpu().numpy() for each in found), strict=True))
    differences = differing({"out": out, "lse": lse}, results)
    assert not differences, f"pages and packed: {differences}"
    return out, lse


def packed_of(spec: AttentionSpec, inputs: PagedInputs) -> tuple[AttentionSpec, Inputs]:
    """Returns a call on pages as one of packed documents, with the keys that its sequences see; arrays of numpy."""
    sequences = range(len(inputs.seq_lens))
    starts = np.zeros(len(sequences), int) if inputs.kv_starts is None else inputs.kv_starts
    packed = []
    for pool in (inputs.k, inputs.v):
        rows = [pool[inputs.block_table[at]].reshape(-1, *pool.shape[2:]) for at in sequences]
        packed.append(np.concatenate([rows[at][starts[at] : inputs.seq_lens[at]] for at in sequences]))
    ends = np.cumsum([0, *(inputs.seq_lens - starts)]).astype(np.int32)
    cu = np.arange(len(sequences) + 1, dtype=np.int32) if inputs.cu_seqlens_q is None else inputs.cu_seqlens_q
    longest = {"max_len_q": spec.max_len_q, "max_len_k": max(int(np.diff(ends).max()), 1)}
    spec = replace(spec, paged=None, kv_len=int(ends[-1]), **longest)
    others = {"sinks": inputs.sinks, "alibi_slopes": inputs.alibi_slopes}
    return spec, Inputs(inputs.q, *packed, cu_seqlens_q=cu, cu_seqlens_k=ends, **others)
