"""A sequence in pages whose queries must have equal bits in every call: drawn cuts, neighbours, pages and padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st
from in_order import packed_of
from same_bits_calls import Arrays, Kind, differing, document

from attn_core import AttentionSpec
from attn_core.call.pages import PagedKV
from attn_core.call.tensors import PagedInputs

Run = Callable[[AttentionSpec, PagedInputs], tuple[np.ndarray, np.ndarray]]
"""Computes (out, lse) of numpy arrays."""


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
    import torch

    kinds = {name: getattr(torch, spec.dtype) for name in ("q", "k", "v")}
    return PagedInputs(
        *(
            None if array is None else torch.from_numpy(array).to(device, kinds.get(name))
            for name, array in inputs._asdict().items()
        )
    )


def on_a_gpu(spec: AttentionSpec, inputs: PagedInputs) -> tuple[np.ndarray, np.ndarray]:
    """Runs a call through torch's public function, on the backend for pages."""
    import torch_frontend

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
    import torch

    import torch_frontend

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
