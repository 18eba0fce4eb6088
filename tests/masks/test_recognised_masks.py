"""Tests calls whose mask function says a band, chunks or documents: they show and compute what the function says."""

from __future__ import annotations

from itertools import groupby
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("jax")
from expression_trees import LEAVES
from frameworks import BOTH, TORCH, Framework, as_numpy
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_frontend
from attn_core import AttentionSpec, log, masks, selection
from attn_core.call import grouped_rows
from attn_core.call.arguments import ArrayFacts, Arrays, build_spec
from attn_core.call.masks import visible
from attn_core.call.options import Options, check_options
from attn_core.expressions import block_indices, documents, evaluate_numpy, lookup, trace_mask
from attn_core.expressions.building import build, constant
from attn_core.expressions.tracing import Aux
from torch_frontend.dispatch import in_parts, plan

HEADS, DIM = 2, 8


@st.composite
def banded_calls(draw: Any) -> dict[str, Any]:
    """Lengths, options and a mask function with terms about distances and others."""
    terms = []
    for _ in range(draw(st.integers(1, 3))):
        distance = build("subtract", LEAVES["q"], LEAVES["k"])
        distance = build("abs", distance) if draw(st.integers(0, 3)) == 0 else distance
        sides = [distance, constant(draw(st.integers(-4, 6)))]
        terms.append(build(draw(st.sampled_from(["less", "less_equal"])), *draw(st.permutations(sides))))
    if draw(st.booleans()):
        terms.append(build("less", LEAVES["k"], constant(4)))
    tree = terms[0]
    for term in terms[1:]:
        tree = build("and", tree, term)
    causal = draw(st.booleans())
    return {
        "lengths": (draw(st.integers(1, 7)), draw(st.integers(1, 7))),
        "mask_mod": tree,
        "causal": causal,
        "window": draw(st.sampled_from([(None, None), (None, None), (2, None), (1, 1), (None, 3)])),
        "alignment": draw(st.sampled_from(["bottom_right", "top_left"])),
        "slopes": draw(st.booleans()),
    }


@given(banded_calls())
def test_a_recognised_band_shows_the_pairs_of_the_function(call: dict[str, Any]) -> None:
    (q_len, kv_len), slopes = call.pop("lengths"), call.pop("slopes")
    q, k = (ArrayFacts((2, length, HEADS, DIM), "float32", "cpu") for length in (q_len, kv_len))
    arrays = Arrays(q, k, k, alibi_slopes=ArrayFacts((HEADS,), "float32", "cpu") if slopes else None)
    spec = build_spec(arrays, check_options(Options(**call)))
    fields: dict[str, Any] = {"batch": 2, "q_len": q_len, "kv_len": kv_len, "num_heads": HEADS, "num_kv_heads": HEADS}
    asked = AttentionSpec(**fields, head_dim=DIM, value_dim=DIM, dtype="float32", **call)
    pairs = visible(asked)
    np.testing.assert_array_equal(np.broadcast_to(visible(spec), pairs.shape), pairs, f"{asked} became {spec}")
    if slopes or call["causal"] or call["window"] != (None, None):
        assert spec.alignment == call["alignment"]  # the diagonal of slopes and of the caller's own band


CALLS: dict[str, tuple[Any, tuple[int, int], str]] = {
    "causal": (lambda b, h, q, k: q >= k, (7, 7), "a band, which runs as causal"),
    "causal from the first key": (lambda b, h, q, k: q >= k, (5, 7), "a band, which runs as causal"),
    "causal to the last key": (lambda b, h, q, k: q + 2 >= k, (5, 7), "a band, which runs as causal"),
    "a window": (lambda b, h, q, k: (q >= k) & (q - k < 3), (7, 7), "a band, which runs as window=(2, 0)"),
    "both sides": (lambda b, h, q, k: abs(q - k) <= 2, (7, 7), "a band, which runs as window=(2, 2)"),
    "a window that hides nothing": (lambda b, h, q, k: abs(q - k) <= 6, (7, 7), "a band, which runs as no mask"),
    "rows without a key": (lambda b, h, q, k: abs(q - k) <= 1, (7, 3), "a band, which runs as window=(1, 1)"),
    "causal and a prefix": (
        lambda b, h, q, k: (q >= k) & (k < 3),
        (7, 7),
        "a band, which runs as causal, and other terms, which stay a function",
    ),
    "earlier keys alone": (lambda b, h, q, k: k < q, (7, 7), ""),
    "an or": (lambda b, h, q, k: (q >= k) | (k < 3), (7, 7), ""),
}


def judged(
    framework: Framework,
    lengths: tuple[int, int],
    mask_mod: Any,
    dense: np.ndarray,
    lse_gradient: bool = True,
    **options: Any,
) -> None:
    """Compares out, lse and the gradients of a call with those of the plain kernel on the dense mask.

    Args:
        lse_gradient: whether the loss reads lse, whose gradient few kernels have.
        options: of both calls.
    """
    numbers = np.random.default_rng(3)
    shapes = {"q": (2, lengths[0], 4, DIM), "k": (2, lengths[1], 2, DIM), "v": (2, lengths[1], 2, DIM)}
    arrays = {each: numbers.standard_normal(shape).astype(np.float32) for each, shape in shapes.items()}
    downstream = [numbers.standard_normal(shape).astype(np.float32) for shape in (shapes["q"], (2, 4, lengths[0]))]

    def results(**mask: Any) -> list[np.ndarray]:
        def call(**given: Any) -> Any:
            return framework.frontend.attention(**given, return_lse=lse_gradient, **mask, **options)

        found = framework.gradients(call, arrays, *downstream[: 1 + lse_gradient])
        given = {name: framework.array(each) for name, each in arrays.items()}
        return [*found, *map(as_numpy, framework.frontend.attention(**given, return_lse=True, **mask, **options))]

    plain = "math" if framework.name == "torch" else "jax_xla"
    expected = results(mask=framework.array(dense), backend=plain)
    for one, other in zip(results(mask_mod=mask_mod), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.parametrize("framework", BOTH, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_calls_compute_what_the_function_says(name: str, framework: Framework) -> None:
    mask_mod, lengths, words = CALLS[name]
    dense = np.broadcast_to(mask_mod(0, 0, np.arange(lengths[0])[:, None], np.arange(lengths[1])), lengths)
    judged(framework, lengths, mask_mod, dense)
    q, k = (framework.zeros(2, length, 4, DIM) for length in lengths)
    found = framework.frontend.explain(q, k, k, mask_mod=mask_mod)
    assert (found.mask_mod or "") == words
    assert not words or f"mask_mod: {words[:30]}" in str(found)


# Chunks and documents


@st.composite
def grouped_calls(draw: Any) -> tuple[AttentionSpec, tuple[np.ndarray, ...]]:
    """A spec whose mask function shows chunks or equal ids, and its arrays. Some ids come back behind another one."""
    batch, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    fields: dict[str, Any] = {"batch": batch, "q_len": tokens, "kv_len": tokens, "num_heads": 2, "num_kv_heads": 1}
    fields |= {"head_dim": DIM, "value_dim": DIM, "dtype": "float32", "causal": draw(st.booleans())}
    fields["window"] = draw(st.sampled_from([(None, None), (1, 1), (2, None)]))
    fields["alignment"] = draw(st.sampled_from(["bottom_right", "top_left"]))
    if draw(st.booleans()):
        size = draw(st.integers(2, 10))
        return AttentionSpec(**fields, mask_mod=trace_mask(lambda b, h, q, k: q // size == k // size).tree), ()
    shape = draw(st.sampled_from([(tokens,), (batch, tokens)]))
    steps = np.array(draw(st.lists(st.integers(0, 1), min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))))
    ids = (np.cumsum(steps.reshape(shape), -1) % draw(st.sampled_from([2, 3, 10]))).astype(np.int32)
    traced = trace_mask(documents(ids))
    return AttentionSpec(**fields, mask_mod=traced.tree, aux=(Aux(shape, "int32"),)), (ids,)


@given(grouped_calls())
def test_documents_show_the_pairs_of_the_function(drawn: tuple[AttentionSpec, tuple[np.ndarray, ...]]) -> None:
    spec, arrays = drawn
    with patch.object(grouped_rows, "FEW_DOCUMENTS", 99):
        rows = grouped_rows.by_ids(spec, *arrays) if arrays else grouped_rows.by_chunks.__wrapped__(spec)
    if rows is None:
        runs = [[key for key, _ in groupby(row)] for row in np.atleast_2d(*arrays)]
        several = [len(run) != len(set(run)) for run in runs]
        assert any(several)  # an id comes back, which documents cannot say
        return
    pairs = np.broadcast_to(visible(spec, aux=arrays), (spec.batch, 2, spec.q_len, spec.q_len))
    seen = np.broadcast_to(visible(rows.spec, None, rows.offsets, rows.offsets), (1, 2, *[rows.spec.q_len] * 2))[0]
    tokens = spec.q_len
    for row, other in np.ndindex(spec.batch, spec.batch):
        block = seen[:, row * tokens : (row + 1) * tokens, other * tokens : (other + 1) * tokens]
        np.testing.assert_array_equal(block, pairs[row] if row == other else np.zeros_like(block))


TOKENS = 24
IDS = np.repeat(np.int32([4, 0, 7]), (10, 3, 11))
OF_ROWS = np.stack((IDS, np.repeat(np.int32([1, 0]), (4, 20))))
BACK = np.repeat(np.int32([4, 0, 4]), (10, 3, 11))
INT64 = IDS.astype(np.int64)


def of(ids: Any) -> Any:
    return lambda b, h, q, k: lookup(ids, q) == lookup(ids, k)


GROUPED: dict[str, tuple[Any, str]] = {
    "chunks": (lambda b, h, q, k: (q // 8 == k // 8) & (k <= q), "chunks of 8, which run as 6 packed documents"),
    "the last is shorter": (lambda b, h, q, k: q // 7 == k // 7, "chunks of 7, which run as 8 packed documents"),
    "a window": (
        lambda b, h, q, k: (q // 12 == k // 12) & (abs(q - k) < 3),
        "chunks of 12, which run as 4 packed documents",
    ),
    "documents": (of(IDS), "equal ids, which run as 6 packed documents"),
    "documents of rows": (documents(OF_ROWS), "equal ids, which run as 5 packed documents"),
    "long ids": (of(INT64), "equal ids, which run as 6 packed documents"),
    "an id that comes back": (of(BACK), ""),
    "many short chunks": (lambda b, h, q, k: q // 2 == k // 2, ""),
    "a prefix beside": (
        lambda b, h, q, k: (q // 8 == k // 8) & (k < 20) & (k <= q),
        "a band, which runs as causal, and other terms, which stay a function",
    ),
}


def shown_by(mask_mod: Any) -> np.ndarray:
    traced = trace_mask(mask_mod)
    return np.array(evaluate_numpy(traced.tree, block_indices(2, 1, TOKENS, TOKENS), aux=traced.captured))


@pytest.mark.parametrize("name", GROUPED)
def test_groups_run_as_documents(name: str) -> None:
    mask_mod, words = GROUPED[name]
    judged(TORCH, (TOKENS, TOKENS), mask_mod, shown_by(mask_mod), lse_gradient=False)
    judged(TORCH, (TOKENS, TOKENS), mask_mod, shown_by(mask_mod))
    q = torch.zeros(2, TOKENS, 4, DIM)
    found = torch_frontend.explain(q, q, q, mask_mod=mask_mod)
    assert (found.mask_mod or "") == words
    assert found.spec.packed == ("documents" in words) and (found.backend == "sdpa_flash") == found.spec.packed
    out = torch_frontend.attention(q.requires_grad_(), q, q, mask_mod=mask_mod)
    assert out.grad_fn.plan.backend == found.backend


def test_sinks_and_any_layout_of_groups() -> None:
    q, k, v = torch.randn(3, 2, 4, TOKENS, DIM)
    sinks = torch.randn(4)
    for mask_mod in (GROUPED["chunks"][0], GROUPED["documents of rows"][0]):
        dense = torch.from_numpy(shown_by(mask_mod))
        for options in ({"layout": "bhsd"}, {"layout": "bhsd", "sinks": sinks}):
            expected = torch_frontend.attention(q, k, v, mask=dense, backend="math", return_lse=True, **options)
            actual = torch_frontend.attention(q, k, v, mask_mod=mask_mod, return_lse=True, **options)
            torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)
        *_, top = torch_frontend.attention(q, k, v, mask_mod=mask_mod, return_max_logit=True, layout="bhsd")
        *_, expected = torch_frontend.attention(q, k, v, mask=dense, return_max_logit=True, layout="bhsd")
        torch.testing.assert_close(top, expected)


KEEPERS: dict[str, dict[str, Any]] = {
    "bias": {"bias": torch.randn(TOKENS, TOKENS)},
    "mask": {"mask": torch.rand(2, 1, TOKENS, TOKENS) < 0.7},
    "slopes": {"alibi_slopes": torch.rand(4)},
    "key ranges": {"key_ranges": masks.prefix_lm(5, TOKENS)},
    "a score function": {"score_mod": lambda s, b, h, q, k: s + 0.125 * q + b},
    "dropout": {"dropout": 0.5},
    "the plain kernel": {"backend": "math"},
}


@pytest.mark.parametrize("name", KEEPERS)
def test_options_that_count_in_rows_keep_the_function(name: str) -> None:
    q, k, v = torch.randn(3, 2, TOKENS, 4, DIM)
    for mask_mod in (GROUPED["chunks"][0], GROUPED["documents"][0]):
        assert not torch_frontend.explain(q, k, v, mask_mod=mask_mod, **KEEPERS[name]).spec.packed
        if name == "dropout":
            continue
        both = KEEPERS[name].get("mask", True) & torch.from_numpy(shown_by(mask_mod))
        expected = torch_frontend.attention(q, k, v, **{**KEEPERS[name], "mask": both})
        actual = torch_frontend.attention(q, k, v, mask_mod=mask_mod, **KEEPERS[name])
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)


def test_ids_are_read_in_plain_eager_calls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    q, ids = torch.randn(2, TOKENS, 4, DIM), torch.from_numpy(IDS)
    traced = trace_mask(lambda b, h, q, k, ids: ids[q] == ids[k], (ids,))
    options: dict[str, Any] = {"mask_mod": traced, "aux": (ids,)}
    whole = torch_frontend.attention(q, q, q, **options)
    gradient = torch.autograd.functional.jacobian(
        lambda q: torch_frontend.attention(q, q, q, **options).sum((1, 2, 3)), q, vectorize=False
    )
    monkeypatch.setattr(in_parts, "_ids_on_host", lambda *_: pytest.fail("ids were read"))

    def attend(q: Any) -> Any:
        return torch_frontend.attention(q, q, q, **options)

    torch.testing.assert_close(torch.compile(attend, backend="eager", fullgraph=True)(q), whole)
    torch.testing.assert_close(torch.func.vmap(attend)(q[:, None])[:, 0], whole)
    torch.testing.assert_close(torch.func.jacrev(lambda q: attend(q).sum((1, 2, 3)))(q), gradient)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert attend(mode.from_tensor(q)).shape == q.shape
    with pytest.raises(pytest.fail.Exception, match="ids were read"):
        attend(q)


def test_the_gradients_of_documents_under_a_vmap() -> None:
    """vmap over cotangents runs the op, which reads no ids."""
    q, ids = torch.randn(2, TOKENS, 4, DIM, requires_grad=True), torch.from_numpy(IDS)
    for mask_mod in (of(ids), GROUPED["chunks"][0]):
        out = torch_frontend.attention(q, q, q, mask_mod=mask_mod)
        several = torch.randn(3, *out.shape)
        batched = torch.func.vmap(lambda dout, out=out: torch.autograd.grad(out, q, dout, retain_graph=True)[0])(
            several
        )
        each = [torch.autograd.grad(out, q, dout, retain_graph=True)[0] for dout in several]
        torch.testing.assert_close(batched, torch.stack(each), rtol=0, atol=2e-5)


def test_chunks_run_as_documents_in_compiled_programs_and_under_transforms() -> None:
    q = torch.randn(2, TOKENS, 4, DIM, requires_grad=True)
    traced = trace_mask(GROUPED["chunks"][0])

    def loss(q: Any) -> Any:
        return torch_frontend.attention(q, q, q, mask_mod=traced).square().sum()

    whole = loss(q)
    (gradient,) = torch.autograd.grad(whole, q)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)(q)
    torch.testing.assert_close(compiled, whole, rtol=0, atol=0)
    torch.testing.assert_close(torch.autograd.grad(compiled, q)[0], gradient, rtol=0, atol=0)
    torch.testing.assert_close(torch.func.grad(loss)(q.detach()), gradient, rtol=0, atol=0)


def test_changed_ids_are_read_again() -> None:
    q, shared = torch.randn(2, TOKENS, 4, DIM), IDS.copy()
    ids = torch.from_numpy(shared)  # numpy's writes leave the version as it is
    for change in (lambda: None, lambda: ids.add_(3), lambda: shared.__setitem__(slice(2, 5), 9), lambda: ids.fill_(0)):
        change()
        expected = torch_frontend.attention(q, q, q, mask=ids[:, None] == ids, backend="math")
        torch.testing.assert_close(torch_frontend.attention(q, q, q, mask_mod=of(ids)), expected, rtol=0, atol=2e-5)


def test_a_call_with_ids_makes_one_plan_and_its_explanation_none(caplog: pytest.LogCaptureFixture) -> None:
    """The kernel that would run the function instead is no fallback."""
    plan.plan.cache_clear()
    in_parts._plan_by_ids.cache_clear()
    q, ids = torch.randn(2, TOKENS, 4, DIM), torch.from_numpy(IDS)
    with log(True), caplog.at_level("INFO", "attn_core"):
        assert torch_frontend.explain(q, q, q, mask_mod=of(ids)).backend == "sdpa_flash"
        assert not caplog.messages
        torch_frontend.attention(q, q, q, mask_mod=of(ids))
    assert [message.partition(":")[0] for message in caplog.messages] == ["plan"]


def test_ids_on_a_gpu_are_not_read() -> None:
    """Those of a numpy array are known, because the call copied them itself."""

    class OnGPU:
        """A tensor on a GPU, of which nothing can be read."""

        is_cpu, is_cuda = False, True

    ids: Any = OnGPU()
    assert in_parts._ids_on_host(ids) is None
    in_parts.keep_ids(ids, INT64)
    assert in_parts._ids_on_host(ids) == IDS.tobytes()


def test_the_record_of_a_plan_names_the_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    plan.plan.cache_clear()
    chosen: list[Any] = []
    monkeypatch.setattr(selection.new_plans, "selected", chosen.append)
    q = torch.zeros(2, TOKENS, 4, DIM)
    torch_frontend.attention(q, q, q, mask_mod=GROUPED["chunks"][0])
    assert [(each.spec.documents, each.backend) for each in chosen] == [(6, "sdpa_flash")]
    torch_frontend.warm_up(q, q, q, mask_mod=GROUPED["documents"][0])
