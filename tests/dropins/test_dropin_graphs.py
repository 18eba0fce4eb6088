"""Tests the drop-ins inside a CUDA graph: captured once, replayed with other numbers, equal to direct calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch_frontend
from attn_core.dropins import unsloth
from torch_frontend import NoBackendError
from torch_frontend.finetrainers import attention_dispatch, attention_provider

pytestmark = pytest.mark.cuda

BATCH, LENGTH, HEADS, KV_HEADS, DIM = 2, 96, 4, 2, 64
Call = Callable[[Any, Any, Any], Any]
"""A call on q, k, v ``[batch, heads, length, head_dim]``."""


def dispatched(word: str, **arguments: Any) -> Call:
    def call(q: Any, k: Any, v: Any) -> Any:
        with attention_provider(word):
            return attention_dispatch(q, k, v, enable_gqa=True, **arguments)

    return call


def of_unsloth(word: str, **what: Any) -> Call:
    config = torch_frontend.unsloth.AttentionConfig(word, KV_HEADS, HEADS // KV_HEADS)
    context = torch_frontend.unsloth.AttentionContext(BATCH, LENGTH, LENGTH, HEADS, DIM, **what)
    return lambda q, k, v: torch_frontend.run_attention(config=config, context=context, Q=q, K=k, V=v)


def documents() -> Any:
    """Rows of documents whose offsets are on the GPU."""
    lengths = torch.tensor([40, 100, 52], dtype=torch.int32, device="cuda")
    return lengths, torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), 100


def of_attention(backend: str | None) -> Call:
    def call(q: Any, k: Any, v: Any) -> Any:
        rows = (tensor.transpose(1, 2) for tensor in (q, k, v))  # [batch, length, heads, head_dim]
        return torch_frontend.attention(*rows, causal=True, backend=backend)

    return call


def masked(word: str) -> Call:
    """A mask of keys on the GPU; a varlen provider packs its keys without reading it on the host."""
    keep = torch.ones(BATCH, LENGTH, dtype=torch.bool, device="cuda")
    keep[0, 70:] = False
    return dispatched(word, attn_mask=keep)


CALLS: dict[str, Callable[[], Call]] = {
    "attention, automatic": lambda: of_attention(None),
    "attention, flash2": lambda: of_attention("flash2"),
    "attention, sdpa_flash": lambda: of_attention("sdpa_flash"),
    "attention_dispatch, native": lambda: dispatched("native", is_causal=True),
    "attention_dispatch, flash": lambda: dispatched("flash", is_causal=True),
    "attention_dispatch, _native_flash": lambda: dispatched("_native_flash", is_causal=True),
    "attention_dispatch, flash_varlen": lambda: masked("flash_varlen"),
    "run_attention, flash_dense": lambda: of_unsloth(unsloth.FLASH_DENSE, sliding_window=17),
    "run_attention, sdpa": lambda: of_unsloth(unsloth.SDPA, sliding_window=17),
    "run_attention, packed": lambda: of_unsloth(unsloth.FLASH_VARLEN, seq_info=documents()),
}


def numbers(seed: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((BATCH, heads, LENGTH, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return [torch.randn(shape, generator=generator).to("cuda", torch.bfloat16) for shape in shapes]


@pytest.mark.parametrize("trained", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("name", CALLS)
def test_a_captured_drop_in_replays_other_numbers(name: str, trained: bool) -> None:
    call = CALLS[name]()

    def step(given: list[Any]) -> list[Any]:
        out = call(*given)
        return [out, *torch.autograd.grad(out, given, torch.ones_like(out))] if trained else [out]

    static = [tensor.requires_grad_(trained) for tensor in numbers(0)]
    try:
        warm_up(step, static)
    except NoBackendError as error:  # the package is not installed
        pytest.skip(str(error).partition("\n")[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(static)
    for seed in (1, 2):
        fresh = [tensor.requires_grad_(trained) for tensor in numbers(seed)]
        with torch.no_grad():
            for target, source in zip(static, fresh, strict=True):
                target.copy_(source)
        graph.replay()
        torch.cuda.synchronize()
        for actual, right in zip(captured, step(fresh), strict=True):  # a kernel may add gradients in any order
            torch.testing.assert_close(actual, right, atol=0.02 if trained else 0.0, rtol=0.02 if trained else 0.0)


def warm_up(step: Callable[[list[Any]], Any], given: list[Any]) -> None:
    """Runs a few steps on another stream, as torch requires before a capture: kernels compile and workspaces are
    allocated."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(given)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
