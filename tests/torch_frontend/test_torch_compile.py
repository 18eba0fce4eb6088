"""Tests torch.compile, export, checkpointing and op checks: compilers see two opaque ops that equal the eager call."""

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch._functorch import config
from torch.utils.checkpoint import checkpoint

from attn_core.call.options import Options
from attn_core.call.tensors import Inputs
from attn_core.expressions import causal, softcap, trace_mask, trace_score
from torch_frontend import SeqInfo, attention, attention_qkvpacked, use_backend
from torch_frontend.dispatch.op_arguments import OpOptions, to_call
from torch_frontend.flash_attn import flash_attn_func

pytestmark = pytest.mark.sampled

HEADS, KV_HEADS, DIM = 6, 3, 8


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def tensors(q_len=5, kv_len=7, *, grad=True):
    shapes = ((2, q_len, HEADS, DIM), (2, kv_len, KV_HEADS, DIM), (2, kv_len, KV_HEADS, DIM))
    return [torch.randn(shape, requires_grad=grad) for shape in shapes]


CASES = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": 3},
    "softcap": {"softcap": 7.0, "scale": 0.2},
    "lse": {"return_lse": True, "causal": True},
    "mask": {"mask": torch.rand(1, 1, 5, 7) > 0.3},
    "key_ranges": {"key_ranges": torch.randint(0, 6, (2, KV_HEADS, 7, 2, 2)).sort(-1).values.int()},
    "sinks": {"sinks": torch.randn(HEADS), "alibi_slopes": torch.rand(HEADS)},
    "backend": {"backend": "math", "deterministic": True},
}


def run(function, qkv):
    actual = function(*qkv)
    outputs = actual if isinstance(actual, tuple) else (actual,)
    total = sum((o * torch.cos(torch.arange(o.numel()).reshape(o.shape))).sum() for o in outputs)
    return outputs, torch.autograd.grad(total, qkv)


@pytest.mark.parametrize("name", CASES)
def test_fullgraph_dynamic_is_bitwise_eager(name):
    call = lambda q, k, v: attention(q * 1, k, v, **CASES[name])  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    qkv = tensors()
    for got, expected in zip(run(compiled, qkv), run(call, qkv), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    with torch.no_grad():
        got, expected = compiled(*qkv), call(*qkv)
    got, expected = (x if isinstance(x, tuple) else (x,) for x in (got, expected))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.slow
@pytest.mark.usefixtures("scalar_inductor")
def test_the_default_compiler_compiles_it():
    call = lambda q, k, v: torch.relu(attention(q, k, v, causal=True)) + 1  # noqa: E731
    compiled, qkv = torch.compile(call, fullgraph=True, dynamic=True), tensors()
    for got, expected in zip(run(compiled, qkv), run(call, qkv), strict=True):
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(got, expected, strict=True))


def test_other_lengths_do_not_recompile():
    counter = CompileCounter()
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, causal=True), fullgraph=True, dynamic=True, backend=counter
    )
    for q_len, kv_len in ((5, 7), (4, 9), (11, 13)):
        qkv = tensors(q_len, kv_len, grad=False)
        assert torch.equal(compiled(*qkv), attention(*qkv, causal=True))
    assert counter.frame_count == 1


@pytest.mark.parametrize("array", [torch.from_numpy, None], ids=["tensor offsets", "numpy offsets"])
def test_packed_calls_with_one_tensor_for_q_k_and_v(array):
    call = lambda x, info: attention(x * 1, x, x, causal=True, seq_info=info)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    x = torch.randn(7, HEADS, DIM, requires_grad=True)
    for lengths in ([3, 4], [2, 5]):
        info = SeqInfo.from_lengths(lengths, array=array)
        assert torch.equal(compiled(x, info), call(x, info))
        got, expected = (torch.autograd.grad(f(x, info).sum(), x)[0] for f in (compiled, call))
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dynamic", [False, True, None])
@pytest.mark.parametrize("array", [torch.from_numpy, None], ids=["tensor offsets", "numpy offsets"])
def test_other_documents_do_not_recompile_between_limits(array, dynamic):
    """Without limits, the longest document and the number of documents differ from batch to batch."""
    counter = CompileCounterWithBackend("aot_eager")
    call = lambda x, info: attention(x, x, x, causal=True, seq_info=info)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend=counter)
    x, results = torch.randn(7, HEADS, DIM), []
    for lengths in ([3, 4], [7], [1, 2, 1, 3], [0, 6, 1]):
        info = SeqInfo.from_lengths(lengths, array=array, max_len=7, max_documents=5)
        assert torch.equal(compiled(x, info), call(x, SeqInfo.from_lengths(lengths, array=array)))
        results.append(counter.frame_count)
    assert results == results[:1] * len(results)  # with dynamic=True torch counts the first call twice


def test_a_backward_uses_the_backend_of_its_forward():
    qkv = tensors()
    compiled = torch.compile(lambda *a: attention(*a, causal=True), fullgraph=True, backend="aot_eager")
    for name, later in (("math", "sdpa_flash"), ("sdpa_flash", "math"), ("math", "flex")):
        results = []
        for function in (compiled, lambda *a: attention(*a, causal=True)):
            with use_backend(name):
                out = function(*qkv)
            with use_backend(later):
                results.append(torch.autograd.grad(out.square().sum(), qkv))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


DOCUMENTS = SeqInfo.from_lengths([2, 3], array=torch.from_numpy)
DROPPING = {
    "attention": lambda q, k, v: attention(q, k, v, dropout=0.5),
    "documents": lambda q, k, v: attention(q, k, v, dropout=0.5, seq_info=DOCUMENTS),
    "packed": lambda q, k, v: attention_qkvpacked(torch.stack((q, k, v), 2), dropout=0.5),
    "heads first": lambda *qkv: attention(*(t.transpose(1, 2) for t in qkv), dropout=0.5, layout="bhsd").transpose(
        1, 2
    ),
    "flash_attn": lambda q, k, v: flash_attn_func(q, k, v, dropout_p=0.5),
    "checkpoint": lambda *qkv: checkpoint(partial(attention, dropout=0.5), *qkv, use_reentrant=False),
}


def error_of_dropped_weights(function):
    """v is the identity, so the output shows which weights the forward dropped; dv shows it of the backward."""
    q, k = torch.randn(2, 1, 5, 3, 5, requires_grad=True)
    v = torch.eye(5).reshape(1, 5, 1, 5).repeat(1, 1, 3, 1).requires_grad_()
    out = function(q, k, v)
    dout = torch.randn_like(out)
    (dv,) = torch.autograd.grad(out, v, dout)
    assert bool((out == 0).any())  # weights were dropped
    return (dv - torch.einsum("bihj,bihc->bjhc", out.detach(), dout)).abs().max()


@pytest.mark.parametrize("budget", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("name", DROPPING)
def test_dropout_of_a_budget_of_memory_drops_the_same_weights_in_the_backward(name, budget):
    call = lambda q, k, v: DROPPING[name](torch.sin(q), k, v)  # noqa: E731
    with config.patch(activation_memory_budget=budget):
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        assert error_of_dropped_weights(compiled) < 1e-5


@pytest.mark.sampled
@pytest.mark.usefixtures("scalar_inductor")
@pytest.mark.parametrize("budget", [pytest.param(0.5, marks=pytest.mark.slow), 0.0])
def test_the_default_compiler_drops_the_same_weights_in_the_backward(budget):
    with config.patch(activation_memory_budget=budget):
        compiled = torch.compile(lambda q, k, v: attention(torch.sin(q), k, v, dropout=0.5), fullgraph=True)
        assert error_of_dropped_weights(compiled) < 1e-5


def test_dropout_of_compiled_calls_without_a_backward():
    call = lambda q: attention(q, q, q, dropout=0.5)  # noqa: E731
    compiled, x = torch.compile(call, backend="aot_eager", fullgraph=True), torch.randn(1, 5, 3, 8)
    torch.manual_seed(1)
    expected = call(x)
    torch.manual_seed(1)
    assert torch.equal(compiled(x), expected)
    assert not torch.equal(compiled(x), expected)
    mapped = lambda x: torch.func.vmap(call, randomness="same")(x)  # noqa: E731
    compiled = torch.compile(mapped, backend="aot_eager", fullgraph=True)
    first, second = compiled(x.expand(2, 1, 5, 3, 8))
    assert torch.equal(first, second)
    torch._dynamo.reset()
    with config.patch(activation_memory_budget=0.5), pytest.raises(Exception, match=r"dropout: .*budget = 1.*got 0\.5"):
        compiled(x.expand(2, 1, 5, 3, 8))


@pytest.mark.parametrize("softcap", [None, 3.0], ids=["double of sdpa_flash", "double of math"])
def test_a_second_derivative_is_an_error(softcap):
    q, k, v = tensors()
    call = lambda q: attention(q, k, v, softcap=softcap)  # noqa: E731
    for function in (call, torch.compile(call, backend="aot_eager")):
        with pytest.raises(RuntimeError):
            (first,) = torch.autograd.grad(function(q).sum(), q, create_graph=True)
            torch.autograd.grad(first.sum(), q)


def test_an_input_changed_before_the_backward_is_an_error():
    q, k, v = tensors()
    doubled = q * 2
    out = attention(doubled, k, v, softcap=3.0)
    doubled.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_the_options_of_an_op_equal_those_of_a_call():
    """A compiler's cache stores programs by this schema."""
    options = Options(True, "top_left", (3, None), 4.0, 0.5, 7, 9, 0.1, True, True, invariant="batch")
    how = OpOptions(options, True, False, "math")
    numbers = (4.0, 0.5, 7, 9, 0.1, True, True)
    assert how.arguments == (True, "top_left", 3, None, *numbers, None, None, None, "batch", True, False, "math")
    assert OpOptions.of(how.arguments) == how
    functions = options._replace(mask_mod=trace_mask(causal()).tree, score_mod=trace_score(softcap(2.0)).tree)
    functions = functions._replace(aux_gradients=(0, 2))
    how = OpOptions(functions, True, False, None)
    assert "0,2" in how.arguments and OpOptions.of(how.arguments) == how
    assert str(torch.ops.attn.forward.default._schema) == (
        "attn::forward(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, "
        "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? key_ranges, Tensor? aux0, Tensor? aux1, Tensor? aux2, "
        "Tensor? aux3, Tensor? rng, bool causal, str alignment, SymInt? window_left, SymInt? window_right, "
        "float? softcap, float? scale, SymInt? max_len_q, SymInt? max_len_k, float dropout, bool deterministic, "
        "bool return_lse, str? mask_mod, str? score_mod, str? aux_gradients, str? invariant, bool needs_backward, "
        "bool bias_gradient, str? backend) -> (Tensor, Tensor, Tensor)"
    )


def op_arguments(q, k, v, needs_backward):
    """The arguments of ``attn::forward`` of a causal call with a softcap and the log-sum-exp."""
    options = Options(causal=True, window=(None, None), softcap=4.0, return_lse=True)
    return to_call(Inputs(q, k, v), OpOptions(options, needs_backward, False, None))


@pytest.mark.parametrize("needs_backward", [False, True])
def test_opcheck(needs_backward):
    qkv = [t.detach().requires_grad_(needs_backward) for t in tensors(grad=False)]
    call = op_arguments(*qkv, needs_backward)
    torch.library.opcheck(torch.ops.attn.forward, call)
    if needs_backward:
        with torch.no_grad():
            out, lse, chosen = torch.ops.attn.forward(*call)
            detached = op_arguments(*(t.detach() for t in qkv), needs_backward)
            torch.library.opcheck(
                torch.ops.attn.backward,
                (torch.randn_like(out), torch.randn_like(lse), out, lse, chosen, *detached),
            )


def test_opcheck_of_forward_mode():
    q, k, v = tensors(grad=False)
    for tangents in ((q, k, v, None, None), (None, k, None, None, None)):
        torch.library.opcheck(torch.ops.attn.jvp, (*tangents, *op_arguments(q, k, v, False)))


@pytest.mark.parametrize("strict", [False, True])
def test_a_symbolic_length_may_be_the_number_of_heads(strict: bool) -> None:
    """No check of segment ids or of a mask compares a length with the heads, which would guard against it."""

    class Called(torch.nn.Module):
        def forward(self, q: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            segments = attention(q, q, q, causal=True, q_segment_ids=ids)
            return segments + attention(q, q, q, mask=mask)

    def inputs(length: int) -> tuple[torch.Tensor, ...]:
        q = torch.randn(2, length, 8, 16, generator=torch.Generator().manual_seed(length))
        return q, torch.arange(length).expand(2, length).int() // 5, torch.ones(2, 1, 1, length, dtype=torch.bool)

    length = torch.export.Dim("length", min=4, max=64)
    shapes = {"q": {1: length}, "ids": {1: length}, "mask": {3: length}}
    program = torch.export.export(Called(), inputs(16), dynamic_shapes=shapes, strict=strict).module()
    for size in (8, 16, 33):
        torch.testing.assert_close(program(*inputs(size)), Called()(*inputs(size)))
