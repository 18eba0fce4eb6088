"""Tests NestedTensors of the layout torch.jagged: rows of any lengths as packed documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_core.errors import ShapeError, SpecError
from torch_frontend import SeqInfo, attention, explain
from torch_frontend.dispatch import layouts

Tensor = torch.Tensor
LENGTHS, LENGTHS_K = [3, 5, 2, 7], [4, 5, 6, 7]
HEADS, DIM = 4, 8


def jagged(
    lengths: list[int], heads: int = HEADS, *, dim: int = DIM, grad: bool = False, device: str = "cpu"
) -> Tensor:
    rows = [torch.randn(length, heads, dim, device=device) for length in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=grad)


def like(tensor: Tensor, heads: int, dim: int = DIM) -> Tensor:
    """Another tensor with the same offsets, as a projection of the same rows has."""
    values = torch.randn(tensor.values().shape[0], heads, dim, device=tensor.device, dtype=tensor.dtype)
    lengths: dict[str, Any] = {"min_seqlen": tensor._maybe_min_seqlen, "max_seqlen": tensor._maybe_max_seqlen}
    return torch.nested.nested_tensor_from_jagged(values, tensor.offsets(), **lengths)


DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.cuda))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"causal": True, "window": 3, "softcap": 4.0}], ids=["plain", "causal", "window"]
)
def test_rows_are_documents_with_their_gradients(options: dict[str, Any], device: str) -> None:
    q, keys = jagged(LENGTHS, grad=True, device=device), jagged(LENGTHS_K, 2, grad=True, device=device)
    v = like(keys, 2, 16).requires_grad_()
    out = attention(q, keys, v, **options)
    assert out.layout is torch.jagged
    assert out.shape[:3] == q.shape[:3] and out.shape[3] == 16  # equal ragged sizes: torch can combine both
    weight = torch.randn_like(out.values())
    (out.values() * weight).sum().backward()

    plain = [tensor.detach().values().clone().requires_grad_() for tensor in (q, keys, v)]
    expected = attention(*plain, **options, seq_info=SeqInfo.from_lengths(LENGTHS, LENGTHS_K))
    (expected * weight).sum().backward()
    assert torch.equal(out.values(), expected)
    for tensor, each in zip((q, keys, v), plain, strict=True):
        assert torch.equal(tensor.grad.values(), each.grad)


def test_rows_agree_with_a_call_for_each() -> None:
    q, k = jagged(LENGTHS), jagged(LENGTHS_K, 2)
    v = like(k, 2)
    rows = zip(q.unbind(), k.unbind(), v.unbind(), attention(q, k, v, causal=True).unbind(), strict=True)
    for *row, out in rows:
        torch.testing.assert_close(out, attention(*(each[None] for each in row), causal=True)[0])


def test_heads_first_as_torchs_own_attention() -> None:
    q = jagged(LENGTHS)
    heads_first = q.transpose(1, 2)  # [batch, heads, ragged, dim]
    out = attention(heads_first, heads_first, heads_first, layout="bhsd")
    # Not causal, because torch's own has no causal kernel for nested tensors on the CPU.
    expected = torch.nn.functional.scaled_dot_product_attention(heads_first, heads_first, heads_first)
    assert out.shape == heads_first.shape
    for one, other in zip(out.transpose(1, 2).unbind(), expected.transpose(1, 2).unbind(), strict=True):
        torch.testing.assert_close(one, other)
    assert explain(heads_first, heads_first, heads_first, layout="bhsd").spec.documents == len(LENGTHS)


def test_a_layer_of_torch_around_it_trains() -> None:
    project = torch.nn.Linear(HEADS * DIM, 3 * HEADS * DIM)
    rows = torch.nested.nested_tensor([torch.randn(n, HEADS * DIM) for n in LENGTHS], layout=torch.jagged)
    q, k, v = (each.unflatten(-1, [HEADS, DIM]) for each in project(rows).chunk(3, -1))
    out = attention(q, k, v, causal=True).flatten(-2) + rows
    out.values().sum().backward()
    assert project.weight.grad is not None and project.weight.grad.any()


def test_the_log_sum_exp_is_that_of_packed_documents() -> None:
    q = jagged(LENGTHS)
    out, lse = attention(q, q, q, return_lse=True)
    expected = attention(*[q.values()] * 3, return_lse=True, seq_info=SeqInfo.from_lengths(LENGTHS))
    assert torch.equal(out.values(), expected[0]) and torch.equal(lse, expected[1])


def test_compiled_calls_take_other_rows_without_recompilation() -> None:
    run = torch.compile(lambda q: attention(q, q, q, causal=True), fullgraph=True, backend="aot_eager", dynamic=True)
    for lengths in (LENGTHS, [9, 2, 4], [5, 6, 7, 8, 9]):
        q = jagged(lengths)
        with torch.no_grad():
            torch.testing.assert_close(run(q).values(), attention(q, q, q, causal=True).values())


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_compiled_call_need_not_know_the_longest_row(fullgraph: bool, backend: str) -> None:
    """``nested_tensor_from_jagged`` alone does not say it, and a compiler cannot compute it."""
    layers = torch.nn.Linear(3, HEADS * DIM), torch.nn.Linear(3, HEADS * DIM)

    def call(x: Tensor, y: Tensor) -> Tensor:
        q, k = (layer(each).unflatten(-1, [HEADS, DIM]) for layer, each in zip(layers, (x, y), strict=True))
        return attention(q, k, k * 2, causal=True)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=fullgraph, backend=backend)
    values, keys = torch.randn(17, 3), torch.randn(22, 3)
    for places, places_k in (([0, 3, 8, 10, 17], [0, 4, 9, 15, 22]), ([0, 0, 9, 10, 17], [0, 1, 9, 15, 22])):
        results = []
        for run in (compiled, call):
            x = torch.nested.nested_tensor_from_jagged(values, torch.tensor(places))
            y = torch.nested.nested_tensor_from_jagged(keys, torch.tensor(places_k))
            out = run(x, y)
            results.append((out.values(), *torch.autograd.grad(out.values().sum(), [each.weight for each in layers])))
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected)


def test_offsets_without_a_longest_row_are_read_on_the_cpu_alone() -> None:
    values, offsets = torch.randn(17, HEADS, DIM), torch.tensor([0, 3, 8, 10, 17])
    q = torch.nested.nested_tensor_from_jagged(values, offsets)
    assert torch.equal(
        attention(q, q, q).values(), attention(values, values, values, seq_info=SeqInfo.from_lengths(LENGTHS))
    )
    fake = torch.nested.nested_tensor_from_jagged(values.to("meta"), offsets.to("meta"))
    with pytest.raises(SpecError, match=r"q: expected a NestedTensor that knows its longest row.*max_seqlen="):
        layouts.jagged_as_documents((fake, fake, fake), {})


@pytest.mark.cuda
def test_a_gpu_is_never_waited_for() -> None:
    q = jagged(LENGTHS, device="cuda")
    attention(q, q, q, causal=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention(q, q, q, causal=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["mask", "bias", "seq_info"])
def test_arguments_that_describe_tokens_are_refused_by_name(name: str) -> None:
    q = jagged(LENGTHS)
    value = SeqInfo.from_lengths(LENGTHS) if name == "seq_info" else torch.ones(17, 17, dtype=torch.bool)
    with pytest.raises(SpecError, match=f"^{name}: expected None with nested q, k and v; "):
        attention(q, q, q, **{name: value})
    with pytest.raises(SpecError, match=f"^{name}: expected None with nested q, k and v; "):
        explain(q, q, q, **{name: value})


def test_other_structures_are_refused_by_name() -> None:
    q, plain = jagged(LENGTHS), torch.randn(4, 7, HEADS, DIM)
    with pytest.raises(SpecError, match=r"^q: expected a plain torch.Tensor, or q, k and v all NestedTensors"):
        attention(q, plain, plain)
    with pytest.raises(SpecError, match=r"^k and v: expected a plain torch.Tensor, or q, k and v all NestedTensors"):
        attention(plain, q, q)
    with pytest.raises(ShapeError, match=r"^q: expected four axes, .* layout='bhsd'"):
        attention(*[q.transpose(1, 2)] * 3)
    with pytest.raises(ShapeError, match=r"^q: expected four axes"):
        attention(q, q, q, layout="bhsd")
    with pytest.raises(ShapeError, match=r"^q: expected four axes"):
        attention(*[torch.nested.nested_tensor([torch.randn(3, 8)], layout=torch.jagged)] * 3)
    with pytest.raises(SpecError, match=r"^v: expected the offsets of k.*k\.offsets\(\)"):
        attention(q, jagged(LENGTHS_K), jagged([5, 4, 6, 7]))
    assert attention(q, jagged(LENGTHS), jagged(LENGTHS)).layout is torch.jagged  # equal offsets, made three times
    with pytest.raises(SpecError, match=r"^q: .*layout torch.strided; build it with layout=torch.jagged"):
        attention(*[torch.nested.nested_tensor([torch.randn(3, HEADS, DIM)] * 2)] * 3)


def test_rows_with_holes_are_refused_and_contiguous_closes_them() -> None:
    holes = torch.nested.nested_tensor_from_jagged(
        torch.randn(12, HEADS, DIM), torch.tensor([0, 4, 9, 12]), torch.tensor([3, 5, 2])
    )
    with pytest.raises(SpecError, match=r"^q: expected rows without holes between them; pass q\.contiguous\(\)"):
        attention(holes, holes, holes)
    closed = holes.contiguous()
    assert attention(closed, closed, closed).values().shape == (10, HEADS, DIM)
