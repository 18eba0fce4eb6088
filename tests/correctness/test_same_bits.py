"""Tests of every claim of ``invariant``: drawn neighbours, places, padding, cuts and pages change no bit.

``--hypothesis-profile=thorough`` draws 2000 times for each backend and test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")
import jax
import jax.numpy as jnp
import same_bits_calls
import torch
from both_frontends import module_on
from frameworks import BOTH, JAX, Framework
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from same_bits_calls import DOCUMENTS, PAGE, TOKENS, Kind, batch, differing, document, packed, pages

import jax_frontend
import torch_frontend
from attn_core import NoBackendError, SpecError, backends
from attn_core.backends.math import fixed_tiles

pytestmark = [pytest.mark.timeout(7200), pytest.mark.sampled]  # hours for the thorough profile

LENGTHS = (1, 5, 37, 64, 96)
OPTIONS: dict[str, tuple[tuple[str, Any], ...]] = {
    "plain": (),
    "causal": (("causal", True),),
    "window": (("causal", True), ("window", 40)),
    "window that hides nothing": (("causal", True), ("window", 500)),
    "alibi": (("causal", True), ("alibi_slopes", True)),
    "softcap": (("causal", True), ("softcap", 5.0)),
    "sinks": (("causal", True), ("sinks", True)),
}
NEEDS = {
    "window": "window",
    "window that hides nothing": "window",
    "alibi": "alibi",
    "softcap": "softcap",
    "sinks": "sinks",
}
CPU_BACKENDS = [
    (backends.load(name, "cpu").framework, name)
    for name in backends.names()
    if "cpu" in backends.records(name) or "" in backends.records(name)
    if module_on(name, "cpu").forward_claims.runs_on("cpu") and module_on(name, "cpu").forward_claims.invariant
]
PREFIX_BACKENDS = [pair for pair in CPU_BACKENDS if "prefix" in module_on(pair[1], "cpu").forward_claims.invariant]
CUDA_BACKENDS = [("torch", name) for name in ("flash2", "flash4", "triton_ordered")]
WIDTHS = {"torch": (1, 2, 16, 33, 40), "jax": (1, 16)}
"""Of heads on a CPU, in each framework. One channel, and 40 of a lone head, have kernels of their own in MKL."""
PAGED = {"triton_ordered": "triton_splitkv"}
"""The backend that reads pages in the order of another backend, if it is not the same."""


def few() -> settings:
    """Returns the number of draws: 12 in the default profile, 4 in a sample and on a GPU, 2000 in the thorough."""
    return settings(max_examples={"thorough": 2000, "gpu": 4, "sample": 4}.get(settings.get_current_profile_name(), 12))


@st.composite
def kinds(draw: Any, framework: str, backend: str, invariant: str, device: str = "cpu") -> Kind:
    claims = module_on(backend, device).forward_claims
    names = [name for name in OPTIONS if getattr(claims, NEEDS.get(name, "causal"))]
    if invariant == "prefix":
        names.remove("plain")
    dtypes = [dtype for dtype in ("float32", "float64", "bfloat16", "float16") if dtype in claims.dtypes]
    heads = [(4, 2), (1, 1), (3, 1)]
    if framework == "jax":  # each kind is a program to compile
        names, dtypes, heads = ["causal", *(["window"] if invariant == "batch" else [])], dtypes[:1], heads[:1]
    dim = draw(st.sampled_from(WIDTHS[framework])) if device == "cpu" else 64
    drawn = (draw(st.sampled_from(each)) for each in (heads, dtypes))
    return Kind(framework, backend, invariant, *drawn, OPTIONS[draw(st.sampled_from(names))], device, dim)  # type: ignore[arg-type]


@st.composite
def scenes(draw: Any, kind: Kind) -> tuple[list[Any], int]:
    """Documents of at most TOKENS tokens in all, one of which is in every scene of a draw, and its number."""
    numbers = st.integers(0, 2**31)
    return [
        document(kind, draw(numbers), *(draw(st.sampled_from((0, 1, 9, 40))),) * 2)
        for _ in range(draw(st.integers(0, DOCUMENTS - 1)))
    ], draw(numbers)


def among(kind: Kind, subject: Any, scene: tuple[list[Any], int]) -> Any:
    """The results of a document among the neighbours of a scene, at the place that the scene says."""
    neighbours, seed = scene
    place = seed % (len(neighbours) + 1)
    documents = [*neighbours[:place], subject, *neighbours[place:]]
    return packed(kind, documents, noise=float(seed % 7 - 3))[place]


def check_batch(framework: str, backend: str, device: str = "cpu", **how: Any) -> None:
    @settings(few(), **how)
    @given(st.data())
    def draws(data: st.DataObject) -> None:
        kind = data.draw(kinds(framework, backend, "batch", device))
        lengths = LENGTHS if framework == "torch" else (37,)
        queries = data.draw(st.sampled_from(lengths))
        subject = document(kind, data.draw(st.integers(0, 2**31)), queries, queries)
        alone = among(kind, subject, ([], 0))
        assert not differing(alone, among(kind, subject, data.draw(scenes(kind)))), "packing"
        rows = data.draw(st.integers(1, 3)) if framework == "torch" else 3
        place = data.draw(st.integers(0, rows - 1))
        others = [document(kind, data.draw(st.integers(0, 2**31)), queries, queries) for _ in range(rows)]
        others[place] = subject
        assert not differing(alone, batch(kind, others)[place]), "batch"

    draws()


@pytest.mark.parametrize(("framework", "backend"), CPU_BACKENDS)
def test_a_document_has_the_same_bits_in_every_batch(framework: str, backend: str) -> None:
    check_batch(framework, backend)


@pytest.mark.cuda
@pytest.mark.parametrize("backend", ["flash4", "triton_ordered"])
def test_long_rows_and_many_documents_share_their_bits_on_a_gpu(backend: str) -> None:
    """flash-attn-4 chooses tiles by the longest row, and work by the number of rows and documents."""
    kind = Kind("torch", backend, "batch", (8, 2), "bfloat16", OPTIONS["causal"], "cuda", 128)
    many = [document(kind, 3 + n % 5, 1 + 7 * n % 300, 1 + 7 * n % 300) for n in range(300)]
    for tokens in (1, 257, 1500):  # with the same kernels, which compile once
        subject = document(kind, 1, tokens, tokens)
        alone = packed(kind, [subject], room=(tokens, 1))[0]
        for rows in (1, 40):
            row = [subject] + [document(kind, 2, tokens, tokens)] * (rows - 1)
            assert not differing(alone, batch(kind, row)[0]), (tokens, rows)
        for others in (3, 300):
            documents = [*many[:others], subject, many[0]]
            total = sum(len(each["q"]) for each in documents)
            row = packed(kind, documents, room=(total, len(documents)))
            assert not differing(alone, row[others]), (tokens, others)


@pytest.mark.cuda
@pytest.mark.parametrize(("framework", "backend"), CUDA_BACKENDS)
def test_a_document_has_the_same_bits_in_every_batch_on_a_gpu(framework: str, backend: str) -> None:
    """flash2 refuses gradients of packed documents, so there dense rows alone are compared."""
    if backend == "flash2":
        check_rows(backend, "cuda")
    else:
        check_batch(framework, backend, "cuda")


def check_rows(backend: str, device: str) -> None:
    @few()
    @given(st.data())
    def draws(data: st.DataObject) -> None:
        kind = data.draw(kinds("torch", backend, "batch", device))
        queries, number = data.draw(st.sampled_from((1, 37, 128, 500))), st.integers(0, 2**31)
        subject = document(kind, data.draw(number), queries, queries)
        alone = batch(kind, [subject])[0]
        others = [document(kind, data.draw(number), queries, queries) for _ in range(data.draw(st.integers(1, 40)))]
        place = data.draw(number) % len(others)
        others[place] = subject
        assert not differing(alone, batch(kind, others)[place])

    draws()


def check_padding(backend: str, **how: Any) -> None:
    """The padding's queries and keys hold other numbers; a mask hides it, or on the right the diagonal alone."""
    framework = module_on(backend, "cpu").framework

    @settings(few(), **how)
    @given(st.data())
    def draws(data: st.DataObject) -> None:
        dim = data.draw(st.sampled_from(WIDTHS["torch"])) if framework == "torch" else 16
        promise = data.draw(st.sampled_from(("batch", "prefix"))) if framework == "torch" else "batch"
        kind = Kind(framework, backend, promise, (4, 2), "float32", OPTIONS["causal"], dim=dim)
        number, count = st.integers(0, 2**31), 37
        length = 80  # of the padded rows
        subject = document(kind, data.draw(number), count, count)
        rows, mask, masked = [], np.zeros((3, 1, length, length), bool), data.draw(st.booleans())
        place = data.draw(st.integers(0, 2))
        starts = [data.draw(st.integers(0, length - count)) if masked else 0 for _ in range(3)]
        for row, start in enumerate(starts):
            padded = document(kind, data.draw(number), length, length)
            if row == place:
                for name, array in padded.items():
                    array[start : start + count] = subject[name]
                padded["dout"][:start] = padded["dout"][start + count :] = 0
            rows.append(padded)
            mask[row, :, start : start + count, start : start + count] = True
        alone = batch(kind, [subject])[0]
        here = slice(starts[place], starts[place] + count)
        result = batch(kind, rows, mask if masked else None)[place]
        cut = {name: array[:, here] if name == "lse" else array[here] for name, array in result.items()}
        assert not differing(alone, cut), "padding"

    draws()


@pytest.mark.parametrize("backend", ["math", "jax_xla"])
def test_padding_on_either_side_changes_no_bit(backend: str) -> None:
    check_padding(backend)


@pytest.mark.cuda
def test_a_query_has_the_same_bits_in_every_cut_and_in_pages_of_another_backend_on_a_gpu() -> None:
    check_cuts("torch", "triton_ordered", "cuda")


def check_cuts(framework: str, backend: str, device: str = "cpu", **how: Any) -> None:
    @settings(few(), **how)
    @given(st.data())
    def draws(data: st.DataObject) -> None:
        kind = data.draw(kinds(framework, backend, "prefix", device))
        in_pages = replace(kind, backend=PAGED.get(backend, backend))
        length = data.draw(st.integers(2, TOKENS - 60))
        whole = document(kind, data.draw(st.integers(0, 2**31)), length, length)
        expected = among(kind, whole, ([], 0))
        cuts = sorted({0, length, *data.draw(st.lists(st.integers(1, length), max_size=3))})
        neighbours, seed = data.draw(scenes(kind))
        small = [each for each in neighbours if len(each["q"]) <= 9][:2]
        order = np.random.default_rng(seed).permutation(DOCUMENTS * TOKENS // PAGE)
        for start, stop in pairwise(cuts):
            begun = {name: array[:stop] if name in "kv" else array[start:stop] for name, array in whole.items()}
            part = {"out": expected["out"][start:stop], "lse": expected["lse"][:, start:stop]}
            chunk = among(kind, begun, (small, seed))
            assert not differing(part, {name: chunk[name] for name in part}), "chunks"
            if (
                "alibi_slopes" not in dict(kind.options)
                or module_on(in_pages.backend, device).forward_claims.paged_alibi
            ):
                assert not differing(part, pages(in_pages, [begun, *small], order)[0]), "pages"

    draws()


@pytest.mark.parametrize(("framework", "backend"), PREFIX_BACKENDS)
def test_a_query_has_the_same_bits_in_every_cut_and_in_pages(framework: str, backend: str) -> None:
    check_cuts(framework, backend)


PAGED_KINDS = (
    *(((32, 8), "bfloat16", "causal", 128), ((4, 2), "float16", "softcap", 128)),
    *(((3, 1), "float16", "window", 64), ((1, 1), "bfloat16", "alibi", 64), ((4, 2), "bfloat16", "sinks", 16)),
)
"""Heads, dtype, options and width. Few, because each takes several kernels to compile."""


def check_pages(run: same_bits_calls.Run, **how: Any) -> None:
    """Cuts, neighbours, pages, padding on the left, declared maxima and decoding, on a GPU; shares have 1024 keys."""

    @settings(few(), **how)
    @given(st.data())
    def draws(data: st.DataObject) -> None:
        heads, dtype, options, dim = data.draw(st.sampled_from(PAGED_KINDS))
        kind = Kind("torch", "triton_splitkv", "prefix", heads, dtype, OPTIONS[options], "cuda", dim)
        same_bits_calls.check(kind, run, data.draw, (2, 65, 300, 1500, 3000), (1, 16))

    draws()


@pytest.mark.cuda
def test_a_query_has_the_same_bits_in_every_cut_and_in_pages_on_a_gpu() -> None:
    check_pages(same_bits_calls.on_a_gpu)


@pytest.mark.cuda
def test_packed_documents_have_the_bits_of_pages_on_a_gpu() -> None:
    """In every cut and scene of a draw, the same call on pages and as packed documents; shares have 1024 keys."""
    check_pages(same_bits_calls.as_packed_and_in_pages)


@pytest.mark.cuda
def test_a_share_that_the_shapes_choose_is_caught_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: the keys of a share depend on the declared maximum of queries, as a heuristic's would."""
    from attn_core.backends.shared.in_order import order

    by_shape = {True: order.NARROW._replace(share=512), False: order.NARROW}
    monkeypatch.setattr(order, "order", lambda spec: by_shape[spec.max_len_q > 9])
    order.how.cache_clear()
    try:
        with pytest.raises(AssertionError, match=r"queries \d+ to|token \d+"):
            check_pages(same_bits_calls.on_a_gpu, phases=[Phase.generate])
    finally:
        order.how.cache_clear()


@pytest.mark.parametrize("number", [np.nan, np.inf, 3e38])
def test_a_number_that_is_not_finite_reaches_who_sees_it(number: float) -> None:
    """A key's value, or a key whose scores overflow: rows before it keep their bits, in every result."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 150, heads, 16) for heads in (4, 2, 2))
    broken = (k if number == 3e38 else v).clone()
    broken[0, 140, 0, :2] = torch.tensor([number, -number])
    dout = torch.randn(1, 150, 4, 16)
    dout[:, 140:] = 0.0

    def results(k: Any, v: Any) -> list[Any]:
        tensors = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = torch_frontend.attention(*tensors, causal=True, invariant="prefix", backend="math", return_lse=True)
        dq, dk, dv = torch.autograd.grad(out, tensors, dout)
        return [out, lse.transpose(1, 2), dq, dk, dv]

    with_it = results(broken, v) if number == 3e38 else results(k, broken)
    for one, other in zip(results(k, v)[:3], with_it, strict=False):
        assert torch.equal(one[:, :140], other[:, :140])
        assert torch.equal(one[:, :, 2:], other[:, :, 2:])  # the other kv head
    if number != 3e38:
        assert not with_it[0][0, 140:, :2, :2].isfinite().any()


def test_jax_with_64_bit_numbers() -> None:
    """JAX then reads host integers as int64, and a slice takes no mixture of integers."""
    with jax.enable_x64(True):
        random = np.random.default_rng(0)
        q, k, v = (jnp.asarray(random.standard_normal((2, 150, heads, 16))) for heads in (4, 2, 2))

        def total(q: Any, rows: int) -> Any:
            return jax_frontend.attention(
                q[:rows], k[:rows], v[:rows], causal=True, invariant="prefix", backend="jax_xla"
            )[0].sum()

        both, alone = (jax.grad(total)(q, rows)[0] for rows in (2, 1))
        assert both.dtype == jnp.float64
        np.testing.assert_array_equal(both, alone)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_weight_below_the_normal_numbers_is_0(dtype: str) -> None:
    """All others are exp's, and NaN stays NaN. A weight of 0 hides a key."""
    lowest = np.log(torch.finfo(getattr(torch, dtype)).tiny)
    x = torch.linspace(0, 1.3 * lowest, 1000, dtype=getattr(torch, dtype))
    x[-3:] = torch.tensor([-np.inf, -1e30, np.nan])
    weights, expected = fixed_tiles._exp(x.clone()), x.exp()
    normal = x > lowest + 1
    assert torch.equal(weights[normal], expected[normal]) and weights[-1].isnan()
    assert not weights[:-1][x[:-1] < lowest].any() and weights[:-1].ge(0).all() and normal.sum() > 700
    both = x.clone().repeat(2, 1).t().contiguous()
    assert torch.equal(fixed_tiles._exp(both)[:-1, 0], weights[:-1]), "the bits depend on the place"


TILES: dict[str, tuple[Callable[[Any, Any, Any], int], Callable[..., None], str]] = {
    "by the padding": (lambda spec, *_: 16 if spec.kv_len > 40 else 128, partial(check_padding, "math"), "padding"),
    "by the tokens of all documents": (
        lambda spec, inputs, _: 16 if spec.documents and inputs.cu_seqlens_k[2] > 40 else 128,
        partial(check_batch, "torch", "math"),
        r"packing|batch",
    ),
    "by the queries": (
        lambda spec, inputs, part: 64 if part.rows.stop - part.rows.start > 40 else 32,
        partial(check_cuts, "torch", "math"),
        r"chunks|pages",
    ),
}
"""Planted faults, as a heuristic's would be: the keys of a tile, and the check that catches them in these words."""


@pytest.mark.parametrize("chosen", TILES)
def test_a_tile_that_the_call_chooses_is_caught(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, check, words = TILES[chosen]
    honest = fixed_tiles.tiles_of

    def faulty(spec: Any, inputs: Any, part: Any, finite: bool = True) -> Any:
        monkeypatch.setattr(fixed_tiles, "KEY_TILE", keys(spec, inputs, part))
        return honest(spec, inputs, part, finite)

    monkeypatch.setattr("attn_core.backends.math.fixed_tiles.tiles_of", faulty)
    with pytest.raises(AssertionError, match=words):
        check(phases=[Phase.generate])


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("dim", [1, 24, 40, 64])
def test_a_lone_head_has_the_bits_of_a_head_among_others(dim: int, threads: int) -> None:
    """A library may split one product among threads, and multiply by one column in a loop of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        q, k, v, dout = (torch.randn(3, 300, heads, dim) for heads in (8, 1, 1, 8))
        rows = []
        for here in (slice(0, 3), slice(1, 2)):
            tensors = [tensor[here].clone().requires_grad_() for tensor in (q, k, v)]
            out = torch_frontend.attention(*tensors, causal=True, invariant="prefix")
            rows.append([out, *torch.autograd.grad(out, tensors, dout[here])])
        assert all(torch.equal(several[1], one[0]) for several, one in zip(*rows, strict=True))
    finally:
        torch.set_num_threads(before)


def beside(tensor: Any, elements: int) -> Any:
    """A contiguous copy that begins so many elements beside a multiple of 64 bytes."""
    room = tensor.new_empty(tensor.numel() + elements)
    return room[elements:].view(tensor.shape).copy_(tensor)


LAYOUTS: dict[str, Any] = {
    "contiguous": lambda x: x.contiguous(),
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "channels first": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    "every other channel": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "one element beside": lambda x: beside(x, 1),
    "three elements beside": lambda x: beside(x, 3),
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("invariant", ["batch", "prefix"])
def test_strides_and_addresses_change_no_bit(invariant: str, dtype: str) -> None:
    """q, k, v and dout as slices of one tensor, in other layouts, and at odd addresses."""
    torch.manual_seed(0)
    together = torch.randn(2, 96, 10, 33).to(getattr(torch, dtype))
    sliced = together.split((6, 2, 2), 2)
    results = []
    for layout in (lambda x: x, *LAYOUTS.values()):
        tensors = [layout(tensor).detach().requires_grad_() for tensor in sliced]
        out = torch_frontend.attention(*tensors, causal=True, invariant=invariant)
        results.append([out, *torch.autograd.grad(out, tensors, layout(together[:, :, :6]))])
    for name, other in zip(LAYOUTS, results[1:], strict=True):
        assert all(torch.equal(*pair) for pair in zip(results[0], other, strict=True)), name


def test_without_invariant_bits_differ() -> None:
    """``math`` has other bits in some chunks without a promise; else these tests would prove nothing."""
    torch.manual_seed(0)
    equal = []
    for length, first in ((150, 100), (150, 149), (600, 40), (600, 599), (1100, 700)):
        q, k, v = (torch.randn(1, length, heads, 16) for heads in (4, 2, 2))
        whole = torch_frontend.attention(q, k, v, causal=True, backend="math")
        chunk = torch_frontend.attention(q[:, first:], k, v, causal=True, backend="math")
        equal.append(torch.equal(whole[:, first:], chunk))
    assert not all(equal)


@pytest.mark.parametrize("framework", BOTH, ids=str)
@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"invariant": "yes"}, "invariant='yes': expected one of batch, prefix, or None"),
        ({"invariant": True}, "invariant=True: expected one of batch, prefix, or None"),
        ({"invariant": "batch", "dropout": 0.5}, "expected no dropout=0.5, because which weights drop"),
        ({"invariant": "prefix"}, "expected no keys behind a query"),
    ],
)
def test_what_cannot_hold_is_an_error(framework: Framework, keywords: dict[str, Any], words: str) -> None:
    q = framework.zeros(1, 3, 2, 8)
    keywords = keywords | ({"dropout_rng": jax.random.key(0)} if framework is JAX else {})
    with pytest.raises(SpecError, match=words):
        framework.frontend.attention(q, q, q, **keywords)


def test_a_backend_without_the_claim_refuses() -> None:
    q = torch.zeros(1, 3, 2, 8)
    with pytest.raises(NoBackendError, match=r"invariant='batch': .* promises no equal bits there"):
        torch_frontend.attention(q, q, q, backend="flex", invariant="batch")
    with pytest.raises(NoBackendError, match=r"invariant='prefix': the aten CPU flash kernel promises no equal bits"):
        torch_frontend.attention(q, q, q, causal=True, backend="sdpa_flash", invariant="prefix")


@pytest.mark.parametrize("framework", BOTH, ids=str)
@pytest.mark.parametrize("invariant", ["batch", "prefix"])
def test_key_ranges_are_refused_in_parts_too(invariant: str, framework: Framework) -> None:
    """Parts of a row run without ranges, so a backend that has none could run them."""
    q = framework.zeros(1, 3, 2, 8)
    ranges = np.stack([np.arange(3), np.full(3, 3)], -1).astype(np.int32)[None, None, :, None]
    for backend in ("math", "sdpa_flash"):
        with pytest.raises(NoBackendError, match="parts take no invariant"):
            framework.frontend.attention(q, q, q, key_ranges=ranges, invariant=invariant, backend=backend)
