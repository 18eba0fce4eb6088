"""Tests every torch entry point compiled, exported, checkpointed, mapped, under autocast and in several processes."""

from __future__ import annotations

import copy
import itertools
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
import two_processes
from frameworks import spied
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.export import Dim
from torch.utils.checkpoint import checkpoint
from unsloth_rows import attend_as_unsloth

import torch_frontend
from attn_core import NoBackendError
from torch_frontend import (
    SeqInfo,
    attention,
    attention_qkvpacked,
    use_backend,
)
from torch_frontend.finetrainers import attention_dispatch, attention_provider
from torch_frontend.huggingface.attention import attend as transformers_attention
from torch_frontend.module import Attention
from torch_frontend.unsloth import (
    create_flex_attention_causal_mask,
    slow_attention_softcapping,
    slow_inference_attention_softcapping,
)

pytestmark = pytest.mark.sampled

HEADS, KV_HEADS, DIM = 4, 2, 8
GEMMA = SimpleNamespace(config=SimpleNamespace(query_pre_attn_scalar=float(DIM), attn_logit_softcapping=5.0))
UNSLOTH = partial(attend_as_unsloth, torch_frontend)
CAUSAL = create_flex_attention_causal_mask(512)
torch.manual_seed(0)
LAYER = Attention(HEADS, HEADS * DIM, num_kv_heads=KV_HEADS, causal=True, sinks=True)


class Host(nn.Module):
    """The module that transformers passes."""

    is_causal = True


HOST = Host()


def heads_first(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2)  # [batch, len, heads, dim] <-> [batch, heads, len, dim]


def ours_packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """With as many kv heads as heads; only q has so many here."""
    return attention_qkvpacked(torch.stack((q, 2 * q, -q), -3), causal=True) + 0 * (k.sum() + v.sum())


def softcapped(function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return function(heads_first(q), heads_first(k), heads_first(v), CAUSAL, GEMMA, q.shape[0], q.shape[1])


def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return LAYER(q.flatten(2)) + 0 * (k.sum() + v.sum())


def dispatched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention_dispatch(heads_first(q), heads_first(k), heads_first(v), is_causal=True, enable_gqa=True)


def in_torchs_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Calls torch's function, which the fixture replaces by attention_dispatch."""
    return F.scaled_dot_product_attention(*map(heads_first, (q, k, v)), is_causal=True, enable_gqa=True)


def transformers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return transformers_attention(HOST, heads_first(q), heads_first(k), heads_first(v), None)[0]


class Entry(NamedTuple):
    """An entry point as a function of q ``[batch, len, 4, 8]`` and k, v ``[batch, kv_len, 2, 8]``; causal."""

    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    self_only: bool = False
    """Whether it needs q_len = kv_len."""
    learns: bool = True
    provider: str = "native"
    torchs: bool = False
    """Whether its transforms are those of torch's own function."""
    keeps_dtype: bool = False
    """Whether the result has q's dtype if autocast computes in another one."""


ENTRIES = {
    "attention": Entry(partial(attention, causal=True)),
    "attention, softcap": Entry(partial(attention, causal=True, softcap=5.0)),
    "attention_qkvpacked": Entry(ours_packed, self_only=True),
    "module": Entry(layer, self_only=True),
    "run_attention": Entry(UNSLOTH, keeps_dtype=True),
    "slow_attention": Entry(partial(softcapped, slow_attention_softcapping)),
    "slow_inference": Entry(partial(softcapped, slow_inference_attention_softcapping), learns=False),
    "dispatch": Entry(dispatched, torchs=True),
    "dispatch, math": Entry(dispatched, provider="_native_math"),
    "torch's place": Entry(in_torchs_place, torchs=True),
    "transformers": Entry(transformers),
}
every_entry = pytest.mark.parametrize("name", ENTRIES)
ON_GPUS = ENTRIES.keys() - {"slow_attention", "slow_inference"}
"""Those of a GPU's suite. The others are "attention, softcap" in the arguments of a host, and compile for as long."""
on_gpus = pytest.mark.on_gpus(only=lambda name, **_: name in ON_GPUS)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention_dispatch)


@pytest.fixture
def entry(name: str, device: str) -> Iterator[Entry]:
    LAYER.to(device)
    with attention_provider(ENTRIES[name].provider):
        yield ENTRIES[name]


def qkv(device: str, batch: int, q_len: int, kv_len: int, *, dtype: Any = None) -> list[Tensor]:
    shapes = ((batch, q_len, HEADS, DIM), (batch, kv_len, KV_HEADS, DIM), (batch, kv_len, KV_HEADS, DIM))
    return [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]


def lengths(entry: Entry) -> list[tuple[int, int, int]]:
    """(batch, q_len, kv_len), all different."""
    actual = [(3, 5, 9), (7, 6, 11), (5, 10, 13)]
    return [(batch, q_len, q_len) for batch, q_len, _ in actual] if entry.self_only else actual


def trained(call: Callable[..., Tensor], tensors: list[Tensor], learns: bool = True) -> list[Tensor]:
    """The output, and the gradients of the tensors."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = call(*leaves)
    weights = torch.cos(torch.arange(out.numel(), device=out.device)).reshape(out.shape).to(out.dtype)
    if learns:
        (out * weights).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def equal(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return all(map(torch.equal, actual, expected)) and len(actual) == len(expected)


def close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@every_entry
@on_gpus
def test_one_graph_for_all_lengths_and_batches(entry: Entry, device: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(entry.call, fullgraph=True, dynamic=True, backend=counter)
    results = []
    for sizes in lengths(entry):
        tensors = qkv(device, *sizes)
        assert equal(trained(compiled, tensors, entry.learns), trained(entry.call, tensors, entry.learns))
        results.append(counter.frame_count)
    assert results == results[:1] * len(results) and results[0] <= 2  # torch counts the first call twice


@every_entry
@on_gpus
def test_lengths_not_marked_dynamic_compile_once_more(entry: Entry, device: str) -> None:
    counter = CompileCounter()
    compiled = torch.compile(entry.call, fullgraph=True, backend=counter)
    for sizes in [*lengths(entry), (9, 17, 17 if entry.self_only else 19)]:
        tensors = qkv(device, *sizes)
        with torch.no_grad():
            assert torch.equal(compiled(*tensors), entry.call(*tensors))
    assert counter.frame_count == 2  # the first lengths, then any lengths


@pytest.mark.parametrize("more_documents", [False, True])
@pytest.mark.parametrize("host", ["attention", "run_attention"])
def test_packed_lengths_do_not_recompile(host: str, more_documents: bool, device: str) -> None:
    def call(x: Tensor, info: SeqInfo) -> Tensor:
        if host == "attention":
            return attention(x, x, x, causal=True, seq_info=info)
        return UNSLOTH(x[None], x[None], x[None], seq_info=info)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    results = []
    for documents in ([3, 6, 2, 7], [5, 4, 7, 1], [9, 2, 6, 11, 3, 1] if more_documents else [1, 10, 2, 8]):
        x = torch.randn(sum(documents), HEADS, DIM, device=device)
        info = SeqInfo.from_lengths(documents, array=lambda offsets: torch.from_numpy(offsets).to(device))
        assert equal(trained(lambda x, i=info: compiled(x, i), [x]), trained(lambda x, i=info: call(x, i), [x]))
        results.append(counter.frame_count)
    assert results == results[:1] * len(results)


class Called(nn.Module):
    """A function as a module, as torch.export requires."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.call = call
        self.layer = LAYER

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.call(q, k, v)


@every_entry
@on_gpus
def test_export(name: str, entry: Entry, device: str) -> None:
    strict = name in ("attention", "run_attention", "module")  # through Dynamo, which the tests above are about
    first, second, *_ = lengths(entry)
    batch, length = Dim("batch", min=2, max=64), Dim("length", min=2, max=512)
    keys = length if entry.self_only else Dim("keys", min=2, max=512)
    dynamic = ({0: batch, 1: length}, {0: batch, 1: keys}, {0: batch, 1: keys})
    tensors, other = qkv(device, *first), qkv(device, *second)
    with torch.no_grad():
        program = torch.export.export(Called(entry.call), tuple(tensors), strict=strict)
        assert torch.equal(program.module()(*tensors), entry.call(*tensors))
        program = torch.export.export(Called(entry.call), tuple(tensors), dynamic_shapes=dynamic, strict=strict)
        for given in (tensors, other):
            close(program.module()(*given), entry.call(*given))
    assert any("attn.forward" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize("use_reentrant", [False, True])
@every_entry
@on_gpus
def test_checkpointing_runs_the_same_backend_twice(
    entry: Entry,
    device: str,
    use_reentrant: bool,
) -> None:
    def call(*tensors: Tensor) -> Tensor:
        return checkpoint(entry.call, *tensors, use_reentrant=use_reentrant, **blocks)

    blocks: dict[str, Any] = {}
    tensors = qkv(device, *lengths(entry)[0])
    expected = trained(entry.call, tensors, entry.learns)
    if device == "cuda" and use_reentrant:  # the first pass runs without gradients, so it prefers other kernels
        close(trained(call, tensors, entry.learns), expected, 1e-4)
        return
    if device == "cuda" and entry.provider != "native":  # the second pass runs in autograd's own thread
        blocks["context_fn"] = lambda: (attention_provider(entry.provider), attention_provider(entry.provider))
    with spied() as ran:
        assert equal(trained(call, tensors, entry.learns), expected)
    assert len(ran) == 1 + entry.learns and len(set(ran)) == 1
    if not blocks:  # compiled code cannot enter hooks
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        assert equal(trained(compiled, tensors, entry.learns), expected)


@pytest.mark.on_gpus(only=lambda name, dtype, **_: name in ON_GPUS and (dtype == torch.bfloat16 or name == "attention"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_entry
def test_autocast_is_that_of_torchs_own_attention(entry: Entry, device: str, dtype: Any) -> None:
    tensors = qkv(device, *lengths(entry)[0])
    halves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
    with torch.autocast(device, dtype):
        theirs = torch._C._nn.scaled_dot_product_attention(*map(heads_first, tensors), is_causal=True, enable_gqa=True)
        got = trained(entry.call, tensors, entry.learns)
        if dtype == torch.bfloat16:
            compiled = torch.compile(entry.call, fullgraph=True, backend="aot_eager")
            assert equal(trained(compiled, tensors, entry.learns), got)
        mixed = entry.call(tensors[0].to(dtype), *tensors[1:])
    assert theirs.dtype == dtype
    assert got[0].dtype == (torch.float32 if entry.keeps_dtype else dtype)
    assert {gradient.dtype for gradient in got[1:]} <= {torch.float32}
    if entry.call is layer:
        return  # its projections are cast as well
    expected = trained(entry.call, halves, entry.learns)  # as if the caller had cast them
    close(got[0].float(), expected[0].float(), 0)
    close(mixed.float(), expected[0].float(), 0)
    tolerance = 2e-2 if entry.call is ours_packed else 0  # the gradients of q, k and v are summed outside
    for gradient, half in zip(got[1:], expected[1:], strict=True):
        close(gradient, half.float(), tolerance)


@pytest.mark.parametrize("backend", ["math", None])
def test_a_kernels_own_arithmetic_is_not_cast(device: str, backend: str | None) -> None:
    tensors = qkv(device, 3, 5, 9)
    call = partial(attention, causal=True, backend=backend, sinks=torch.randn(HEADS, device=device), return_lse=True)
    halves = [tensor.bfloat16() for tensor in tensors]
    doubles = [tensor.double() for tensor in tensors]
    expected, exact = trained(lambda *a: call(*a)[0], halves), trained(lambda *a: call(*a)[0], doubles)
    with torch.autocast(device, torch.bfloat16):  # includes backward()
        got = trained(lambda *a: call(*a)[0], tensors)
        assert equal([part.bfloat16() for part in got], expected)
        assert equal(trained(lambda *a: call(*a)[0], doubles), exact)  # autocast never casts float64
        compiled = torch.compile(lambda *a: call(*a)[0], fullgraph=True, backend="eager")
        assert equal([part.bfloat16() for part in trained(compiled, tensors)], expected)
        assert call(*tensors)[1].dtype == torch.float32
        with torch.autocast(device, enabled=False):
            assert call(*tensors)[0].dtype == torch.float32


def test_autocast_casts_a_bias_and_no_mask(device: str) -> None:
    tensors = qkv(device, 3, 5, 9)
    bias = torch.randn(1, HEADS, 5, 9, device=device)
    for extra in ({"bias": bias}, {"mask": bias > 0}):
        with torch.autocast(device, torch.bfloat16):
            got = attention(*tensors, **extra)
        cast = {name: table.bfloat16() if name == "bias" else table for name, table in extra.items()}
        assert torch.equal(got, attention(*(tensor.bfloat16() for tensor in tensors), **cast))


@every_entry
@on_gpus
def test_transforms_of_torch_func(entry: Entry, device: str) -> None:
    sizes = lengths(entry)[0]
    rows = [torch.stack(parts) for parts in zip(*(qkv(device, *sizes) for _ in range(2)))]
    one_by_one = [[tensor[at] for tensor in rows] for at in range(2)]
    outputs = torch.stack([entry.call(*tensors) for tensors in one_by_one])
    close(torch.func.vmap(entry.call)(*rows), outputs)
    shared = torch.func.vmap(entry.call, (0, None, None))(rows[0], rows[1][0], rows[2][0])
    close(shared, torch.stack([entry.call(q, rows[1][0], rows[2][0]) for q in rows[0]]))
    if not entry.learns:
        return

    def loss(*tensors: Tensor) -> Tensor:
        out = entry.call(*tensors)
        return (out * torch.cos(torch.arange(out.numel(), device=device)).reshape(out.shape)).sum()

    expected = [trained(entry.call, tensors)[1:] for tensors in one_by_one]
    close(list(torch.func.grad(loss, (0, 1, 2))(*one_by_one[0])), expected[0])
    mapped = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))(*rows)
    summed = torch.func.grad(lambda *a: torch.func.vmap(loss)(*a).sum(), (0, 1, 2))(*rows)
    for actual in (mapped, summed):
        for at in range(2):
            close([gradient[at] for gradient in actual], expected[at])
    table = torch.func.jacrev(lambda q: entry.call(q, *one_by_one[0][1:]).flatten()[-3:])(one_by_one[0][0])
    assert table.shape == (3, *one_by_one[0][0].shape) and bool(table.any())


@every_entry
@on_gpus
def test_forward_mode(entry: Entry, device: str) -> None:
    """Against reverse mode: <cotangent, J tangent> = <J' cotangent, tangent>."""
    primals = tuple(qkv(device, *lengths(entry)[0]))
    tangents = tuple(torch.cos(7 * tensor) for tensor in primals)
    if entry.torchs:  # torch's own function raises torch's messages, or has forward mode as plain operations
        if device == "cpu":
            with pytest.raises((RuntimeError, NotImplementedError)):
                torch.func.jvp(entry.call, primals, tangents)
        return
    out, moved = torch.func.jvp(entry.call, primals, tangents)
    close(out, entry.call(*primals))
    with forward_ad.dual_level():
        dual = entry.call(*map(forward_ad.make_dual, primals, tangents))
        close(forward_ad.unpack_dual(dual).tangent, moved)
    rows = tuple(torch.stack((tensor, -2 * tensor)) for tensor in tangents)
    mapped = torch.func.vmap(lambda *ways: torch.func.jvp(entry.call, primals, ways)[1])(*rows)
    close(mapped, torch.stack((moved, -2 * moved)))
    both = torch.func.jvp(torch.func.vmap(entry.call), tuple(torch.stack((x, x)) for x in primals), rows)[1]
    close(both, mapped)
    if entry.learns:
        cotangent = torch.sin(torch.arange(out.numel(), device=device)).reshape(out.shape)
        pulled_back = torch.func.vjp(entry.call, *primals)[1](cotangent)
        expected = sum((one * other).sum() for one, other in zip(pulled_back, tangents, strict=True))
        close(
            (cotangent * moved).sum(), expected, 1e-5 if device == "cpu" else 1e-4
        )  # two kernels, each with its error


@every_entry
@on_gpus
def test_an_output_beside_its_tangent_has_a_gradient(entry: Entry, device: str) -> None:
    """As a loss that compares an output with a constant that its tangent gives."""
    if not entry.learns or entry.torchs:
        return
    q, k, v = qkv(device, *lengths(entry)[0])
    factor = torch.ones(DIM, device=device, requires_grad=True)
    out, moved = torch.func.jvp(lambda q: entry.call(q * factor, k, v), (q,), (q,))
    (gradient,) = torch.autograd.grad((out - moved.detach()).square().sum(), factor, retain_graph=True)
    alone = factor.detach().requires_grad_()
    (expected,) = torch.autograd.grad((entry.call(q * alone, k, v) - moved.detach()).square().sum(), alone)
    close(gradient, expected)
    with pytest.raises(RuntimeError, match="attention has no second derivative"):
        moved.sum().backward()


@every_entry
@on_gpus
def test_second_derivatives_are_refused_in_words(entry: Entry, device: str) -> None:
    if not entry.learns or (entry.torchs and device == "cuda"):
        return  # torch's own function has second derivatives as plain operations
    q, k, v = qkv(device, *lengths(entry)[0])
    call = lambda q: entry.call(q, k, v).sum()  # noqa: E731
    words = None if entry.torchs else "attention has no second derivative"
    with pytest.raises(RuntimeError, match=words):
        torch.func.grad(lambda q: torch.func.grad(call)(q).sum())(q)
    along = lambda q: torch.func.jvp(call, (q,), (q,))[1]  # noqa: E731
    seconds = (
        lambda: torch.func.jvp(along, (q,), (q,)),
        lambda: torch.func.grad(along)(q),
        lambda: torch.func.jvp(torch.func.grad(call), (q,), (q,)),
    )
    for second in seconds if words else ():
        with pytest.raises(RuntimeError, match=words):
            second()


@every_entry
@on_gpus
def test_second_derivatives_of_a_sum_are_refused_if_one_term_has_none(entry: Entry, device: str) -> None:
    """The other term must not be returned alone, whichever term contains the attention."""
    if not entry.learns or entry.torchs:
        return
    words = "attention has no second derivative|attention_.*backward is not implemented"  # or torch's own
    tensors = [tensor.requires_grad_() for tensor in qkv(device, *lengths(entry)[0])]
    losses = (torch.square, torch.clone)  # one has a gradient that depends on the attention, the other one has not
    for moving, loss in itertools.product(tensors[: 1 if entry.self_only else 3], losses):
        with pytest.raises(RuntimeError, match=words):  # an error of the first gradient if a compiler traced it
            (first,) = torch.autograd.grad(loss(entry.call(*tensors)).sum(), moving, create_graph=True)
            torch.autograd.grad(first.square().sum() + moving.pow(3).sum(), moving)


@every_entry
@on_gpus
def test_a_graph_can_be_kept(entry: Entry, device: str) -> None:
    """``retain_graph=True``: two losses of one forward, one after the other."""
    if not entry.learns:
        return
    tensors = [tensor.requires_grad_() for tensor in qkv(device, *lengths(entry)[0])]
    moving = tensors[: 1 if entry.self_only else 3]
    out = entry.call(*tensors)
    parts = [torch.autograd.grad(loss, moving, retain_graph=True) for loss in (out.sum(), out.square().sum())]
    whole = torch.autograd.grad(out.sum() + out.square().sum(), moving)
    for one, other, expected in zip(*parts, whole, strict=True):
        close(one + other, expected)


def test_forward_mode_in_compiled_code(device: str) -> None:
    q, k, v = qkv(device, 3, 5, 9)
    call = partial(attention, causal=True)
    for function in (call, partial(call, softcap=5.0, return_lse=True)):
        along = lambda q, f=function: torch.func.jvp(lambda q: f(q, k, v), (q,), (q,))  # noqa: E731
        for backend in ("eager", "aot_eager"):
            compiled = torch.compile(along, backend=backend, fullgraph=True)
            for actual, expected in zip(compiled(q), along(q), strict=True):
                close(actual, expected)


def test_transforms_in_compiled_code(device: str) -> None:
    rows = [torch.stack(parts) for parts in zip(*(qkv(device, 3, 5, 9) for _ in range(2)))]
    backend = "math" if device == "cuda" else None  # FlexAttention cannot be compiled in there
    loss = lambda *tensors: attention(*tensors, causal=True, softcap=5.0, backend=backend).square().sum()  # noqa: E731
    functions = (
        torch.func.vmap(torch.func.grad(loss, (0, 1, 2))),
        torch.func.grad(lambda *a: torch.func.vmap(loss)(*a).sum(), (0, 1, 2)),
    )
    for function in functions:
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        for actual, expected in zip(compiled(*rows), function(*rows), strict=True):
            close(actual, expected)


EXTRAS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {  # options, and which of them are mapped
    "mask": ({"mask": (2, 3, 1, 5, 9)}, ("mask",)),
    "mask of one row": ({"mask": (2, 1, HEADS, 1, 9)}, ("mask",)),
    "mask of two axes": ({"mask": (2, 5, 9)}, ("mask",)),
    "shared mask": ({"mask": (3, 1, 5, 9)}, ()),
    "bias": ({"bias": (2, 1, HEADS, 5, 9)}, ("bias",)),
    "shared bias": ({"bias": (1, HEADS, 5, 9)}, ()),
    "slopes": ({"alibi_slopes": (2, HEADS)}, ("alibi_slopes",)),
    "slopes of rows": ({"alibi_slopes": (2, 3, HEADS)}, ("alibi_slopes",)),
    "shared slopes of rows": ({"alibi_slopes": (3, HEADS)}, ()),
    "sinks": ({"sinks": (2, HEADS)}, ("sinks",)),
    "shared sinks": ({"sinks": (HEADS,)}, ()),
}


@pytest.mark.parametrize("name", EXTRAS)
def test_every_operand_may_be_mapped_or_shared(name: str, device: str) -> None:
    shapes, mapped = EXTRAS[name]
    extras = {key: torch.randn(shape, device=device) for key, shape in shapes.items()}
    extras = {key: value > -0.5 if key == "mask" else value for key, value in extras.items()}
    rows = [torch.stack(parts) for parts in zip(*(qkv(device, 3, 5, 9) for _ in range(2)))]
    key = next(iter(extras))

    def output_and_gradients(q: Tensor, k: Tensor, v: Tensor, extra: Tensor) -> Any:
        call = lambda q, k, v, e: attention(q, k, v, causal=True, return_lse=True, **{key: e})  # noqa: E731
        weighted = lambda *a: sum((part * torch.cos(part.detach())).sum() for part in call(*a))  # noqa: E731
        learned = (0, 1, 2, 3) if key in ("bias", "sinks") else (0, 1, 2)
        return call(q, k, v, extra), torch.func.grad(weighted, learned)(q, k, v, extra)

    actual = torch.func.vmap(output_and_gradients, (0, 0, 0, 0 if key in mapped else None))(*rows, extras[key])
    single = [
        output_and_gradients(*(part[at] for part in rows), extras[key][at] if key in mapped else extras[key])
        for at in range(2)
    ]
    for part, expected in zip(actual, zip(*single), strict=True):
        for tensor, rowwise in zip(part, zip(*expected), strict=True):
            close(tensor, torch.stack(rowwise))


def test_packed_calls_dropout_and_two_maps(device: str) -> None:
    x = torch.randn(2, 3, 9, HEADS, DIM, device=device)
    info = SeqInfo.from_lengths([4, 5])
    packed = lambda x: attention(x, x, x, seq_info=info, causal=True)  # noqa: E731
    dense = lambda x: attention(x[None], x[None], x[None], causal=True)[0]  # noqa: E731
    for call in (packed, dense):
        expected = torch.stack([torch.stack([call(row) for row in rows]) for rows in x])
        close(torch.func.vmap(torch.func.vmap(call))(x), expected)
        turned = (2, 1, 0, 3, 4)  # [tokens, 3, 2, heads, dim]
        close(torch.func.vmap(torch.func.vmap(call, 1, 1), 2, 2)(x.permute(turned)), expected.permute(turned))
    drops = lambda x: attention(x, x, x, dropout=0.5, backend="math")  # noqa: E731
    same = torch.func.vmap(drops, randomness="same")(x[:1].expand(2, *x.shape[1:]))
    other = torch.func.vmap(drops, randomness="different")(x[:1].expand(2, *x.shape[1:]))
    assert torch.equal(same[0], same[1]) and not torch.equal(other[0], other[1])
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(drops)(x)


def test_mapped_backwards(device: str) -> None:
    q, k, v = (tensor.requires_grad_() for tensor in qkv(device, 3, 5, 9))
    backend = "math" if device == "cuda" else None  # torch refuses this for compiled backwards, also for flex
    for call in (partial(attention, softcap=5.0, backend=backend), ours_packed):
        out = call(q, k, v)
        gradient = lambda d, out=out: torch.autograd.grad(out, q, d, retain_graph=True)[0]  # noqa: E731
        many = torch.randn(2, *out.shape, device=device)
        close(torch.func.vmap(gradient)(many), torch.stack([gradient(one) for one in many]))
        with pytest.raises(RuntimeError, match=r"is_grads_batched=True .* torch\.func\.jacrev"):
            torch.autograd.grad(out, q, many, is_grads_batched=True)


@every_entry
@on_gpus
def test_without_gradients(entry: Entry, device: str) -> None:
    tensors = qkv(device, *lengths(entry)[0])
    expected = entry.call(*tensors).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            actual = entry.call(*(tensor.requires_grad_() if mode is torch.no_grad else tensor for tensor in tensors))
        assert torch.equal(actual, expected) and not actual.requires_grad
        assert actual.is_inference() is (mode is torch.inference_mode)


def test_a_layer_is_a_module_like_any_other(device: str) -> None:
    made = Attention(HEADS, HEADS * DIM, causal=True, window=3, sinks=True, dropout_rate=0.1).to(device).eval()
    x = torch.randn(2, 5, HEADS * DIM, device=device)
    expected = made(x)
    for twin in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(twin(x), expected)
    parameters = dict(made.named_parameters())
    assert torch.equal(torch.func.functional_call(made, parameters, (x,)), expected)
    actual = torch.func.grad(lambda p: torch.func.functional_call(made, p, (x,)).square().sum())(parameters)
    made(x).square().sum().backward()
    for name, parameter in parameters.items():
        close(actual[name], parameter.grad)
    stacked = {name: torch.stack((parameter, parameter * 2)) for name, parameter in parameters.items()}
    ensemble = torch.func.vmap(lambda p: torch.func.functional_call(made, p, (x,)))(stacked)
    doubled = {name: parameter * 2 for name, parameter in parameters.items()}
    close(ensemble, torch.stack((expected, torch.func.functional_call(made, doubled, (x,)))))


@pytest.mark.parametrize("call", [attention, UNSLOTH], ids=["attention", "run_attention"])
def test_compiled_calls_ask_use_backend_when_they_run(call: Callable[..., Tensor], device: str) -> None:
    tensors = qkv(device, 3, 5, 9)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    compiled(*tensors)
    with use_backend("flash3_fp8"), pytest.raises(NoBackendError, match="flash3_fp8"):
        compiled(*tensors)
    with use_backend("math"):
        assert torch.equal(compiled(*tensors), call(*tensors))


@pytest.mark.slow
def test_two_processes_share_a_step(tmp_path: Path) -> None:
    worker = Path(two_processes.__file__)
    paths = ":".join(path for path in sys.path if path)
    env = {"PATH": "", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(worker), str(tmp_path / "store")]
    actual = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert actual.returncode == 0, actual.stderr[-4000:]
