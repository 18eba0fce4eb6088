"""Tests every torch entry point under observation: tensors without numbers, tracers, counters of flops, hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from observed_calls import default_dtype
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from attn_core.errors import SpecError
from attn_core.paged.step import Step
from torch_frontend import (
    PagedKVCache,
    Pages,
    SeqInfo,
    append_kv,
    attention,
    attention_qkvpacked,
    paged_attention,
)
from torch_frontend.diffusers import installed
from torch_frontend.finetrainers import attention_dispatch, attention_provider
from torch_frontend.flash_attn import flash_attn_with_kvcache
from torch_frontend.huggingface.attention import attend
from torch_frontend.module import Attention
from torch_frontend.unsloth import AttentionConfig, AttentionContext, run_attention, slow_attention_softcapping

pytestmark = pytest.mark.sampled

Tensor = torch.Tensor
TORCHS_OWN = F.scaled_dot_product_attention
HEADS, DIM, TOKENS = 2, 8, 10
DOCUMENTS = SeqInfo.from_lengths([3, 5, 2])
TABLES = {
    "block_table": np.array([[2, 0], [1, -1]], np.int32),
    "seq_lens": np.array([6, 3], np.int32),
    "cu_seqlens_q": np.array([0, 2, 3], np.int32),
}


def _rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Reads ``[10, heads * dim]`` as ``[2, 5, heads, dim]``, three times."""
    rows = x.view(2, TOKENS // 2, HEADS, DIM)
    return rows, rows.sin(), rows.cos()


def _tokens(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    tokens = x.view(TOKENS, HEADS, DIM)
    return tokens, tokens.sin(), tokens.cos()


def _heads_first(x: Tensor) -> list[Tensor]:
    return [each.transpose(1, 2) for each in _rows(x)]


def _pools(x: Tensor) -> tuple[Tensor, Tensor]:
    pool = x.new_zeros(3, 4, HEADS, DIM)
    return pool, pool + 0.5


def _unsloth(x: Tensor, **context: Any) -> Tensor:
    q, k, v = _heads_first(x)
    made = AttentionContext(2, TOKENS // 2, TOKENS // 2, HEADS, DIM, **context)  # while traced, sizes of x are tensors
    return run_attention(config=AttentionConfig("sdpa", HEADS, 1), context=made, Q=q, K=k, V=v)


def _softcapping(x: Tensor) -> Tensor:
    layer = SimpleNamespace(config=SimpleNamespace(query_pre_attn_scalar=4, attn_logit_softcapping=5.0))
    mask = x.new_zeros(TOKENS // 2, TOKENS // 2)
    return slow_attention_softcapping(*_heads_first(x), mask, layer, 2, TOKENS // 2)


def _in_place(x: Tensor) -> Tensor:
    with installed():
        return F.scaled_dot_product_attention(*_heads_first(x), is_causal=True)


def _provider(x: Tensor) -> Tensor:
    with attention_provider("_native_math"):
        return attention_dispatch(*_heads_first(x), is_causal=True)


def _paged(x: Tensor, tables: dict[str, Any] = TABLES) -> Tensor:
    q = x.view(TOKENS, HEADS, DIM)[:3]
    return paged_attention(q, *_pools(x), **tables, window=4)


def _appended(x: Tensor) -> Tensor:
    k = x.view(TOKENS, HEADS, DIM)[:3]
    return append_kv(*_pools(x), k, k + 1, **TABLES)[0]


def _cache(x: Tensor) -> Tensor:
    cache = PagedKVCache(num_layers=1, num_pages=3, page_size=4, kv_heads=HEADS, head_dim=DIM, device=x.device)
    cache.add("one")
    step, tokens = cache.step(["one"], 3), x.view(TOKENS, HEADS, DIM)[:3]
    cache.update(0, tokens, tokens + 1, step)
    return cache.attend(0, tokens, step)


LAYER = Attention(HEADS, in_features=HEADS * DIM, causal=True, window=4).requires_grad_(False)


def _layer(x: Tensor, **call: Any) -> Tensor:
    """A layer with weights on the device of x."""
    weights = {name: x.new_ones(each.shape).cumsum(0).sin() for name, each in LAYER.named_parameters()}
    actual = torch.func.functional_call(LAYER, weights, (x,), call)
    return actual[0] if isinstance(actual, tuple) else actual


def _paged_layer(x: Tensor) -> Tensor:
    return _layer(x[:3], pages=Pages(*_pools(x), Step(*TABLES.values(), 2)))


ENTRIES: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": lambda x: attention(*_rows(x), causal=True),
    "attention, window on math": lambda x: attention(*_rows(x), causal=True, window=2, backend="math"),
    "attention, every tensor": lambda x: attention(
        *_rows(x),
        mask=x.new_ones(TOKENS // 2, TOKENS // 2, dtype=torch.bool),
        bias=x.new_ones(TOKENS // 2, TOKENS // 2),
        alibi_slopes=x.new_ones(HEADS),
        sinks=x.new_ones(HEADS),
    ),
    "attention, lse": lambda x: attention(*_rows(x), causal=True, return_lse=True)[1],
    "attention, lse of capped scores": lambda x: attention(*_rows(x), causal=True, softcap=5.0, return_lse=True)[1],
    "attention, dropout": lambda x: attention(*_rows(x), dropout=0.5),
    "attention, packed": lambda x: attention(*_tokens(x), causal=True, seq_info=DOCUMENTS),
    "attention_qkvpacked": lambda x: attention_qkvpacked(torch.stack(_rows(x), 2), causal=True),
    "run_attention": _unsloth,
    "run_attention, packed": lambda x: _unsloth(x, seq_info=DOCUMENTS),
    "slow_attention_softcapping": _softcapping,
    "torch's place": _in_place,
    "attention_dispatch": lambda x: attention_dispatch(*_heads_first(x), is_causal=True),
    "attention_dispatch, math": _provider,
    "transformers": lambda x: attend(torch.nn.Module(), *_heads_first(x), None)[0],
    "paged_attention": lambda x: _paged(x),
    "attention, cache": lambda x: attention(
        *_rows(x), kv_lengths=x.new_full((2,), TOKENS // 2, dtype=torch.int32), causal=True
    ),
    "flash_attn_with_kvcache": lambda x: flash_attn_with_kvcache(
        *_rows(x), cache_seqlens=x.new_full((2,), TOKENS // 2, dtype=torch.int32), causal=True
    ),
    "append_kv": _appended,
    "PagedKVCache": _cache,
    "module": lambda x: _layer(x.view(2, TOKENS // 2, -1)),
    "module, packed": lambda x: _layer(x, seq_info=DOCUMENTS),
    "module, pages": _paged_layer,
}
RANDOM = "attention, dropout"
EARLY = ("PagedKVCache", "module, pages", "paged_attention", "flash_attn_with_kvcache", "append_kv")  # inference alone
every_entry = pytest.mark.parametrize("entry", ENTRIES)


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(TOKENS, HEADS * DIM)


@pytest.fixture(autouse=True)
def no_gradients(request: pytest.FixtureRequest) -> Iterator[None]:
    entry = request.node.callspec.params.get("entry", "") if hasattr(request.node, "callspec") else ""
    with torch.set_grad_enabled(entry not in EARLY):
        yield


@every_entry
@pytest.mark.parametrize("inside", [True, False])
def test_fake_tensors(entry: str, inside: bool, x: Tensor) -> None:
    expected = ENTRIES[entry](x)
    mode = FakeTensorMode()
    fake = mode.from_tensor(x)
    if inside or entry == "PagedKVCache":  # this call allocates pools
        with mode:
            actual = ENTRIES[entry](fake)
    else:
        actual = ENTRIES[entry](fake)
    assert isinstance(actual, FakeTensor)
    assert (actual.shape, actual.dtype, actual.device) == (expected.shape, expected.dtype, expected.device)
    assert torch.equal(ENTRIES[entry](x), expected) or entry == RANDOM  # no fake tensor is left behind


@every_entry
def test_fake_tensors_have_gradients(entry: str) -> None:
    if entry in EARLY:
        pytest.skip("for inference")
    with FakeTensorMode():
        x = torch.randn(TOKENS, HEADS * DIM, requires_grad=True)
        ENTRIES[entry](x).sum().backward()
        assert isinstance(x.grad, FakeTensor) and x.grad.shape == x.shape


@every_entry
def test_meta_tensors(entry: str, x: Tensor) -> None:
    actual = ENTRIES[entry](x.to("meta"))
    assert actual.is_meta and actual.shape == ENTRIES[entry](x).shape
    if entry not in EARLY:
        learning = x.to("meta").requires_grad_()
        ENTRIES[entry](learning).sum().backward()
        assert learning.grad is not None and learning.grad.is_meta


@every_entry
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(entry: str, mode: str, x: Tensor) -> None:
    expected = ENTRIES[entry](x)
    program = make_fx(ENTRIES[entry], tracing_mode=mode)(x)
    actual = program(x)
    assert actual.shape == expected.shape
    if entry != RANDOM:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        other = -x
        torch.testing.assert_close(program(other), ENTRIES[entry](other), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_symbolic_programs_run_at_other_lengths(packed: bool) -> None:
    def call(q: Tensor, k: Tensor, offsets: Tensor) -> Tensor:
        info = SeqInfo(offsets, offsets, 7, 7) if packed else None
        return attention(q, k, k, causal=True, seq_info=info)

    def given(*lengths: int) -> tuple[Tensor, Tensor, Tensor]:
        tokens = sum(lengths)
        shape = (tokens, HEADS, DIM) if packed else (2, tokens, HEADS, DIM)
        return torch.randn(shape), torch.randn(shape), torch.tensor([0, *np.cumsum(lengths)]).int()

    program = make_fx(call, tracing_mode="symbolic")(*given(3, 5))
    for lengths in ((4, 2, 1), (6, 5)):
        tensors = given(*lengths)
        torch.testing.assert_close(program(*tensors), call(*tensors))


@every_entry
def test_torch_jit_trace(entry: str, x: Tensor) -> None:
    if entry in ("PagedKVCache", "append_kv") or entry.startswith("module"):
        pytest.skip("keeps state outside of what is traced")
    expected = ENTRIES[entry](x)
    program = torch.jit.trace(ENTRIES[entry], (x,), check_trace=entry != RANDOM)
    actual = program(x)
    assert actual.shape == expected.shape
    if entry == RANDOM:
        return
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(program(-x), ENTRIES[entry](-x), rtol=1e-5, atol=1e-5)
    if entry not in EARLY:
        grads = []
        for call in (program, ENTRIES[entry]):
            learning = x.clone().requires_grad_()
            call(learning).square().sum().backward()
            grads.append(learning.grad)
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", [None, "math"])
def test_torch_jit_trace_of_a_layer(backend: str | None, x: Tensor) -> None:
    layer = Attention(HEADS, in_features=HEADS * DIM, causal=True, window=4, backend=backend)
    rows = x.view(2, TOKENS // 2, -1)
    expected = layer(-rows)
    torch.testing.assert_close(torch.jit.trace(layer, (rows,))(-rows), expected)


@pytest.mark.parametrize("place", ["diffusers", "finetrainers"])
def test_torch_jit_script_finds_torchs_own_function(place: str, monkeypatch: pytest.MonkeyPatch, x: Tensor) -> None:
    def first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def second(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return first(q, k, v) + F.scaled_dot_product_attention(q, k, v)

    q, k, v = _heads_first(x)
    expected = [first(q, k, v), second(q, k, v)]
    if place == "finetrainers":
        monkeypatch.setattr(F, "scaled_dot_product_attention", attention_dispatch)
        inside = torch.jit.script(first), torch.jit.script(second)
        monkeypatch.undo()
    else:
        with installed():
            inside = torch.jit.script(first), torch.jit.script(second)
    outside = torch.jit.script(first), torch.jit.script(second)
    for scripted in (inside, outside):
        for program, desired in zip(scripted, expected, strict=True):
            assert "aten::scaled_dot_product_attention" in str(program.inlined_graph)
            torch.testing.assert_close(program(q, k, v), desired)


@every_entry
def test_saved_tensor_hooks_and_counters(entry: str, x: Tensor) -> None:
    torch.manual_seed(1)
    expected = ENTRIES[entry](x)
    torch.manual_seed(1)
    with torch.autograd.graph.save_on_cpu():
        torch.testing.assert_close(ENTRIES[entry](x), expected)
    torch.manual_seed(1)
    with FlopCounterMode(display=False) as counter:
        torch.testing.assert_close(ENTRIES[entry](x), expected)
    assert counter.get_total_flops() > 0 or entry == "append_kv"


@pytest.mark.parametrize("options", [{"causal": True, "window": 2}, {"softcap": 5.0}, {}])
@pytest.mark.parametrize("backend", ["sdpa_flash", "math", "flex"])
def test_every_cpu_kernel_runs_under_a_flop_counter(backend: str, options: dict[str, Any], x: Tensor) -> None:
    if backend == "sdpa_flash" and "softcap" in options:
        pytest.skip("it has no softcap")
    expected = attention(*_rows(x), backend=backend, **options)
    with FlopCounterMode(display=False):
        torch.testing.assert_close(attention(*_rows(x), backend=backend, **options), expected)
    with torch.autograd.graph.save_on_cpu():
        torch.testing.assert_close(attention(*_rows(x), backend=backend, **options), expected)
    program = make_fx(lambda *rows: attention(*rows, backend=backend, **options))(*_rows(x))
    torch.testing.assert_close(program(*_rows(x)), expected)


def test_flops_equal_those_of_torchs_own_attention() -> None:
    """On a device where torch counts its own: meta tensors of its CUDA kernels' ops, by its own formulas."""
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    q, k, v = (torch.randn(2, n, h, d, requires_grad=True) for n, h, d in ((5, 4, 8), (7, 2, 8), (7, 2, 6)))
    shapes = [tuple(each.transpose(1, 2).shape) for each in (q, k, v)]
    wide = [shapes[0], *((b, 4, n, d) for b, _, n, d in shapes[1:])]
    forward = sdpa_flop_count(*wide)
    for options in ({}, {"causal": True}):
        with FlopCounterMode(display=False) as counter:
            out = attention(q, k, v, **options)
        assert counter.get_total_flops() == forward == 2 * 2 * 4 * 5 * 7 * (8 + 6)
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
        assert counter.get_total_flops() == sdpa_backward_flop_count((2, 4, 5, 6), *wide)


def test_flops_of_forward_mode_count_each_product_with_a_tangent() -> None:
    primals = tuple(torch.randn(2, n, h, d) for n, h, d in ((5, 4, 8), (7, 2, 8), (7, 2, 6)))
    pairs = 2 * 2 * 4 * 5 * 7
    with FlopCounterMode(display=False) as counter:
        torch.func.jvp(attention, primals, primals)
    assert counter.get_total_flops() == pairs * (8 + 6) + pairs * (3 * 8 + 3 * 6)
    with FlopCounterMode(display=False) as counter:
        torch.func.jvp(lambda v: attention(*primals[:2], v), primals[2:], primals[2:])
    assert counter.get_total_flops() == pairs * (8 + 6) + pairs * (8 + 2 * 6)


def test_flops_of_documents_and_pages_depend_on_their_lengths(x: Tensor) -> None:
    with FlopCounterMode(display=False) as counter:
        ENTRIES["attention, packed"](x)
    assert counter.get_total_flops() == 2 * HEADS * (9 + 25 + 4) * (DIM + DIM)
    with FlopCounterMode(display=False) as counter:
        _paged(x)
    assert counter.get_total_flops() == 2 * HEADS * (2 * 6 + 1 * 3) * (DIM + DIM)


@pytest.mark.parametrize("place", ["meta", "fake"])
def test_bad_calls_are_refused_on_tensors_without_numbers(place: str, x: Tensor) -> None:
    watched = x.to("meta") if place == "meta" else FakeTensorMode().from_tensor(x)
    q, k, v = _rows(watched)
    with pytest.raises(SpecError, match="k: expected the head_dim of q"):
        attention(q, k[..., :4], v)
    with pytest.raises(SpecError, match="window"):
        attention(q, k, v, window=2)
    with pytest.raises(SpecError, match=r"seq_info\.cu_seqlens_q"):
        attention(*_tokens(watched), seq_info=SeqInfo.from_lengths([30, 4]))
    with pytest.raises(SpecError, match="seq_lens: expected shape"):
        _paged(watched, TABLES | {"block_table": np.zeros((3, 2), np.int32)})


DEFAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "meta": lambda: torch.device("meta"),
}


UNDER_DEFAULTS = [
    *((entry, default, "cpu") for entry in ENTRIES for default in DEFAULTS),
    *(
        pytest.param(entry, default, "cuda", marks=pytest.mark.cuda)
        for entry in ("attention", "attention, lse of capped scores")
        for default in ("float64", "bfloat16")
    ),
]


@pytest.mark.parametrize(("entry", "default", "place"), UNDER_DEFAULTS)
def test_torchs_defaults_change_nothing(entry: str, default: str, place: str, x: Tensor) -> None:
    """The default dtype and the default device, for results and gradients."""
    x = x.to(place)

    def results() -> list[Tensor]:
        torch.manual_seed(1)
        given = x.clone().requires_grad_(entry not in EARLY)
        out = ENTRIES[entry](given)
        return [out.detach(), *(torch.autograd.grad(out.sum(), given) if out.requires_grad else ())]

    with DEFAULTS[default]():
        if entry == "PagedKVCache":
            made = PagedKVCache(num_layers=1, num_pages=1, page_size=1, kv_heads=1, head_dim=8)
            assert made.k_pages[0].dtype == x.dtype
        actual = results()
    for one, other in zip(actual, results(), strict=True):
        assert one.dtype == other.dtype == torch.float32 and torch.equal(one, other)
