"""Measures keys and values in pages on a GPU: decoding, prefill in chunks, CUDA graphs, and JAX next to torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

import torch_frontend
from benchmarks.hopper_group import Group, Turn, event_turn, host_turn, jax_turn
from benchmarks.measure import medians
from torch_frontend.paged import explain_paged, paged_attention

HEADS, KV_HEADS, DIM = 32, 8, 128
IN_A_GRAPH = 20


class Decoding(NamedTuple):
    """Sequences with ``tokens`` tokens each, of which ``queries`` are new."""

    sequences: int
    tokens: int
    page_size: int
    queries: int = 1

    @property
    def bytes_read(self) -> int:
        """The bytes of all keys and values in bfloat16."""
        return 2 * self.sequences * self.tokens * KV_HEADS * DIM * 2

    def __str__(self) -> str:
        new = "one query" if self.queries == 1 else f"{self.queries} queries"
        shape = f"{self.sequences} x {self.tokens} tokens, {new} each, heads {HEADS}/{KV_HEADS}, head_dim {DIM}"
        return f"{shape}, bfloat16, pages of {self.page_size}"


def paged() -> list[Group]:
    """Measures every group of this file."""
    groups = [
        _decoding(Decoding(64, 8192, 16), 4.0, triton=3.2, softcap=3.0),
        _decoding(Decoding(64, 8192, 64), 3.8),
        _decoding(Decoding(64, 8192, 256), None),
        _decoding(Decoding(1, 131072, 16), 2.5),
        _short(Decoding(8, 1024, 16)),
        *(_prefill(Decoding(4, 8192, page, queries)) for page in (16, 256) for queries in (16, 64, 512)),
    ]
    torch.cuda.empty_cache()
    return [*groups, _in_jax(Decoding(64, 8192, 16))]


def arguments(call: Decoding) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Returns (q, k_pages, v_pages) and the tables: sequences on scattered pages of a pool that is exactly full."""
    generator = torch.Generator("cuda").manual_seed(0)
    width = call.tokens // call.page_size
    pages = call.sequences * width

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    pool = (pages, call.page_size, KV_HEADS, DIM)
    tables: dict[str, Any] = {
        "block_table": torch.randperm(pages, generator=generator, device="cuda").int().view(call.sequences, width),
        "seq_lens": torch.full((call.sequences,), call.tokens, dtype=torch.int32, device="cuda"),
    }
    if call.queries > 1:
        offsets = torch.arange(call.sequences + 1, dtype=torch.int32, device="cuda") * call.queries
        tables |= {"cu_seqlens_q": offsets, "max_len_q": call.queries}
    return (normal(call.sequences * call.queries, HEADS, DIM), normal(*pool), normal(*pool)), tables


def _turn(call: Decoding, **options: Any) -> Callable[[], Turn]:
    def make() -> Turn:
        tensors, tables = arguments(call)
        return event_turn(partial(paged_attention, *tensors, **tables, **options))

    return make


def _contiguous(call: Decoding) -> Turn:
    """Times the same attention on contiguous keys and values."""
    (q, _, _), _ = arguments(call)
    k, v = (torch.randn(call.sequences, call.tokens, KV_HEADS, DIM, device="cuda", dtype=q.dtype) for _ in range(2))
    rows = q.view(call.sequences, call.queries, HEADS, DIM)
    return event_turn(partial(torch_frontend.attention, rows, k, v, causal=True))


def _decoding(call: Decoding, goal: float | None, triton: float | None = None, softcap: float | None = None) -> Group:
    tensors, tables = arguments(call)
    chosen = explain_paged(*tensors, **tables).backend
    del tensors, tables
    group = Group("Decoding", f"{call}; automatic choice: {chosen}")
    makers: dict[str, Callable[[], Turn]] = {"attention": _turn(call)}
    makers |= {f"attention {name}": _turn(call, backend=name) for name in ("flash3", "triton_splitkv", "flash2")}
    makers["attention triton_splitkv, softcap"] = _turn(call, backend="triton_splitkv", softcap=50.0)
    makers["attention, contiguous"] = partial(_contiguous, call)
    group.measure(makers, calls=20, rounds=9)
    for candidate, least in (
        ("attention", goal),
        ("attention flash3", None),
        ("attention triton_splitkv", triton),
        ("attention triton_splitkv, softcap", softcap),
        ("attention flash2", None),
    ):
        if candidate in group.seconds:
            _bandwidth(group, call, candidate, least)
    if call.sequences > 1:
        group.speed("in pages beside contiguous", "attention", "attention, contiguous", 0.9)
    return group


def _bandwidth(group: Group, call: Decoding, candidate: str, goal: float | None) -> None:
    seconds = medians(group.seconds)[candidate]
    text = None if goal is None else f">= {goal:g}"
    group.value(candidate, call.bytes_read / seconds / 1e12, "TB/s of keys and values read", text)


def _short(call: Decoding) -> Group:
    group = Group("Decoding, short", f"{call}; {IN_A_GRAPH} calls in a CUDA graph; time per call")
    makers = {"attention": partial(_graphed, call, None)}
    makers |= {f"attention {name}": partial(_graphed, call, name) for name in ("flash3", "triton_splitkv")}
    makers |= {"attention without a graph": partial(_by_host, call)}
    group.measure(makers, calls=20, rounds=9)
    if "attention" in group.seconds:
        group.value("a call in a graph", medians(group.seconds)["attention"] * 1e6, "µs", "<= 25")
    return group


def _graphed(call: Decoding, backend: str | None) -> Turn:
    tensors, tables = arguments(call)
    run = partial(paged_attention, *tensors, **tables, backend=backend)
    for _ in range(3):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(IN_A_GRAPH):
            run()
    turn = event_turn(graph.replay)
    return lambda calls: turn(calls) / IN_A_GRAPH


def _by_host(call: Decoding) -> Turn:
    tensors, tables = arguments(call)
    return host_turn(partial(paged_attention, *tensors, **tables))


def _prefill(call: Decoding) -> Group:
    tensors, tables = arguments(call)
    chosen = explain_paged(*tensors, **tables).backend
    del tensors, tables
    group = Group("A chunk of a prompt", f"{call}; automatic choice: {chosen}")
    makers = {"attention": _turn(call)}
    makers |= {
        f"attention {name}": _turn(call, backend=name) for name in ("flash3", "flash2", "flash4", "triton_splitkv")
    }
    makers["attention, contiguous"] = partial(_contiguous, call)
    group.measure(makers, calls=10, rounds=5)
    group.speed("in pages beside contiguous", "attention", "attention, contiguous")
    return group


def _in_jax(call: Decoding) -> Group:
    import jax

    import jax_frontend.paged

    group = Group("JAX under jit beside torch, decoding", f"{call}; the host's clock times a queue of 20 calls in both")
    makers: dict[str, Callable[[], Turn]] = {}

    def torch_turn(name: str) -> Turn:
        tensors, tables = arguments(call)
        return host_turn(partial(paged_attention, *tensors, **tables, backend=name))

    def turn(name: str) -> Turn:
        tensors, tables = arguments(call)
        arrays = [jax.dlpack.from_dlpack(tensor) for tensor in tensors]
        given = {key: jax.dlpack.from_dlpack(tensor) for key, tensor in tables.items()}
        run = jax.jit(partial(jax_frontend.paged.paged_attention, backend=name))
        return jax_turn(lambda: run(*arrays, **given))

    for name in ("flash3", "triton_splitkv"):
        makers[f"attention in torch {name}"] = partial(torch_turn, name)
        makers[f"attention in JAX {name}"] = partial(turn, name)
    group.measure(makers, calls=20, rounds=9)
    for name in ("flash3", "triton_splitkv"):
        group.speed(f"backend={name!r} beside torch", f"attention in JAX {name}", f"attention in torch {name}", 0.95)
    return group
