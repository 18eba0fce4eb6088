"""Tests Ctrl-C at many moments: the next call is right, and no lock, override, plan or page is left behind.

KeyboardInterrupt is raised at lines of our code that are spread over a call (``interruptions``); a real SIGINT at
random moments; and inside commands of ``attn``. ``tests/jax_frontend/test_interrupts.py`` has those inside a callback.
"""

from __future__ import annotations

import _thread
import itertools
import json
import signal
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from frameworks import BOTH, JAX, TORCH, Framework, as_numpy
from interruptions import count_lines, held_locks, interrupt_at_moment, interrupted_at, scene

import torch_frontend.diffusers
import torch_frontend.flash_attn
from attn_core import SeqInfo, cli
from attn_core.cli import tune
from attn_core.paged.allocator import PageAllocator
from attn_core.selection import tables
from attn_core.selection.override import requested, use_backend
from attn_core.selection.whole_file import write_whole
from torch_frontend.context_parallel import layers
from torch_frontend.finetrainers import providers

pytestmark = pytest.mark.sampled

lengths = itertools.count(20)
"""Every call has a new length, so that it is planned anew."""


@pytest.fixture(autouse=True)
def interrupts_arrive() -> Iterator[None]:
    """Handles SIGINT as Python does. A process that a shell starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def spread(total: int, points: int) -> list[int]:
    """Line numbers from 1 to total, evenly spread."""
    return sorted({1 + at * (total - 1) // max(points - 1, 1) for at in range(points)})


def run(framework: Framework, length: int, trained: bool, kind: str) -> list[np.ndarray]:
    """A call's output, and its gradient if trained, under names of a block."""
    x, options = framework.array(numbers(length)), {"causal": True, "window": 3}
    if kind == "documents":
        cut = np.array([0, 5, length], np.int32)
        options["seq_info"] = SeqInfo(framework.array(cut), framework.array(cut), length, length)
    with framework.frontend.use_backend("sdpa_flash", "math", "jax_xla"):
        if framework is TORCH:
            x.requires_grad_(trained)
            out = framework.frontend.attention(x, x, x, **options)
            if trained:
                out.square().sum().backward()
            return [as_numpy(out), *([as_numpy(x.grad)] if trained else [])]

        def loss(x: Any) -> Any:
            out = framework.frontend.attention(x, x, x, **options)
            return (out**2).sum(), out

        if not trained:
            return [as_numpy(loss(x)[1])]
        gradient, out = jax.grad(loss, has_aux=True)(x)
        return [as_numpy(out), as_numpy(gradient)]


def numbers(length: int) -> np.ndarray:
    return np.random.default_rng(length).standard_normal((1, length, 2, 8), np.float32)


def expected(length: int, trained: bool, kind: str) -> list[np.ndarray]:
    """``run`` by torch's own operations."""
    x = torch.from_numpy(numbers(length)).double().requires_grad_()
    row, column = torch.arange(length)[:, None], torch.arange(length)
    seen = (column <= row) & (column > row - 3)
    if kind == "documents":
        seen &= (row < 5) == (column < 5)
    scores = torch.einsum("bqhd,bkhd->bhqk", x, x) * 8**-0.5
    out = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), x)
    out.square().sum().backward()
    return [as_numpy(out), *([as_numpy(x.grad)] if trained else [])]


@pytest.mark.parametrize("kind", ["plain", "documents"])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_a_call_after_an_interrupted_one_is_right(framework: Framework, trained: bool, kind: str) -> None:
    """Selection, plan, forward and backward. The interrupted call and the next one have one shape, new to caches."""
    total = count_lines(lambda: run(framework, next(lengths), trained, kind))
    for at in spread(total, 8 if framework is JAX else 40):
        length = next(lengths)
        with interrupted_at(at):
            run(framework, length, trained, kind)
        assert requested() is None and not held_locks(), at
        for one, right in zip(run(framework, length, trained, kind), expected(length, trained, kind), strict=True):
            np.testing.assert_allclose(one, right, rtol=1e-3, atol=1e-4, err_msg=f"line {at} of {total}")


@pytest.mark.parametrize("dropped", [True, False])
def test_an_error_of_xla_counts_as_interrupted_if_python_dropped_the_interruption(dropped: bool) -> None:
    def remove(_: Any) -> None:
        if dropped:
            raise KeyboardInterrupt

    with nullcontext() if dropped else pytest.raises(RuntimeError), interrupted_at(10**9):
        held = {1}
        watching = weakref.ref(held, remove)
        del held
        assert watching() is None
        raise RuntimeError("INTERNAL")


def calls_without_gradients() -> dict[str, Callable[[], Any]]:
    """Calls in which autograd is switched off for a part, by name.

    flex is not here: torch's ``vmap``, which it calls on a CPU, does not survive every interruption.
    """
    x, pool = torch.from_numpy(numbers(6)), torch.zeros(3, 4, 2, 8)
    table, lengths, one = torch.tensor([[0, 1]]).int(), torch.tensor([6]).int(), torch.zeros(1, 2, 8)
    leaf, cache = x.clone().requires_grad_(), torch.zeros(1, 9, 2, 8)

    def gradient_of_a_gradient() -> None:
        out = torch_frontend.attention(leaf, leaf, leaf, backend="math")
        torch.autograd.grad(out.square().sum(), leaf, create_graph=True)

    def cached() -> None:
        torch_frontend.flash_attn.flash_attn_with_kvcache(leaf, cache, cache.clone(), x, x, cache_seqlens=2)

    def paged() -> None:
        torch_frontend.paged_attention(one, pool, pool, block_table=table, seq_lens=lengths, out=torch.empty_like(one))

    def appended() -> None:
        torch_frontend.append_kv(pool, pool.clone(), x[0], x[0], slot_mapping=torch.arange(6))

    calls = {"create_graph": gradient_of_a_gradient, "kvcache": cached, "out": paged, "append_kv": appended}
    for name in ("math", "sdpa_flash"):
        calls[name] = partial(torch_frontend.attention, x, x, x, causal=True, backend=name)
    return calls


@pytest.mark.parametrize("name", calls_without_gradients())
def test_ctrl_c_at_any_moment_of_a_call_leaves_autograd_on(name: str) -> None:
    """Also in the middle of torch's own Python code, such as the end of a ``torch.no_grad()`` block."""
    call = calls_without_gradients()[name]
    call()
    total = interrupt_at_moment(10**9, call)
    for at in spread(total, 200):
        interrupt_at_moment(at, call)
        assert torch.is_grad_enabled(), f"moment {at} of {total}"


# Blocks


def blocks() -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """By name: (what opens a block, what shows its state)."""
    mesh = type("Mesh", (), {"size": lambda self, at=None: 1, "ndim": 1})
    return {
        "use_backend": (lambda: use_backend("math"), requested),
        "jax use_backend": (lambda: JAX.frontend.use_backend("math"), requested),
        "attention_provider": (lambda: providers.provided("flash"), providers.stated_provider),
        "diffusers": (torch_frontend.diffusers.installed, torch_frontend.diffusers.is_installed),
        "use_context_parallel": (
            lambda: layers.use_context_parallel(mesh(), length=4),
            lambda: (layers.active_mesh(), layers._entered, layers._blocks),
        ),
    }


@pytest.mark.parametrize("name", blocks())
def test_an_interrupted_block_leaves_nothing_behind(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "use_context_parallel":
        monkeypatch.setattr(layers.ActiveMesh, "row_layout", lambda *_: None)
    opened, state = blocks()[name]

    with opened():  # imports what it needs
        pass
    before = str(state())
    with interrupted_at(10**9) as lines, opened():
        total = lines.seen
    for at in range(1, total + 1):
        with interrupted_at(at), opened():
            pytest.fail(f"line {at} of {total} came later")
        assert str(state()) == before and not held_locks(), f"line {at} of {total}"


# Pages


def check_pages(allocator: PageAllocator) -> None:
    """Each page is free, or held by as many sequences as the allocator counts; lengths fit the pages."""
    holders = [0] * allocator.num_pages
    for name in allocator.sequences:
        pages = allocator.pages(name)
        assert len(pages) == -(-allocator.length(name) // allocator.page_size), name
        for page in pages:
            holders[page] += 1
    assert allocator._holders == holders
    assert not set(allocator.swapped) & set(allocator.sequences)
    for page, chain in allocator._contents._chain_of.items():
        assert page in chain.pages
    assert sorted(allocator._free) == [page for page, count in enumerate(holders) if not count]


OPERATIONS: dict[str, Callable[[PageAllocator], Any]] = {
    "allocate": lambda pages: pages.allocate("new", 6),
    "fork": lambda pages: pages.fork("a", "new"),
    "extend": lambda pages: pages.extend("a", 7),
    "extend a fork": lambda pages: pages.extend("fork", 7),
    "free": lambda pages: pages.free("a"),
    "free a fork": lambda pages: pages.free("fork"),
    "free one with known content": lambda pages: pages.free("known"),
    "allocate pages that are cached": lambda pages: pages.allocate("new", 28),
    "extend into pages that are cached": lambda pages: pages.extend("b", 26),
    "allocate pages with known content": lambda pages: pages.allocate_matching("new", range(6)),
    "allocate cached pages with known content": lambda pages: pages.allocate_matching("new", range(50, 59)),
    "record": lambda pages: pages.record("long", range(70, 79)),
    "swap out": lambda pages: pages.swap_out("known"),
    "swap in": lambda pages: pages.swap_in("elsewhere"),
    "swap in to pages that are cached": lambda pages: (pages.allocate("c", 16), pages.swap_in("elsewhere")),
    "free one that is swapped out": lambda pages: pages.free("elsewhere"),
}


def pages_of(allocator: PageAllocator) -> Any:
    there = {name: (allocator.pages(name), allocator.length(name)) for name in allocator.sequences}
    return there, allocator.swapped


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupted_change_of_pages_is_undone(name: str) -> None:
    def pool() -> PageAllocator:
        allocator = PageAllocator(16, 4)
        allocator.allocate("gone", 11)
        allocator.record("gone", range(50, 61))
        allocator.free("gone")
        allocator.allocate("a", 6)
        allocator.fork("a", "fork")
        allocator.allocate("b", 3)
        allocator.allocate("known", 5)
        allocator.record("known", range(5))
        allocator.allocate("long", 9)
        allocator.allocate("elsewhere", 7)
        allocator.swap_out("elsewhere")
        return allocator

    operation, done, there = OPERATIONS[name], pool(), pool()
    before, total = pages_of(done), count_lines(lambda: operation(there))
    operation(done)
    for at in range(1, total + 1):
        allocator = pool()
        with interrupted_at(at):
            operation(allocator)
        check_pages(allocator)
        if name.startswith("swap in to") and "c" in allocator and "elsewhere" in allocator.swapped:
            allocator.free("c")  # the first of two changes was complete
        assert pages_of(allocator) in (before, pages_of(done)), f"line {at} of {total}"
        if pages_of(allocator) == before:
            operation(allocator)  # nothing of the first attempt is in the way
            check_pages(allocator)


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_an_interrupted_step_of_a_cache_keeps_what_it_held(framework: Framework) -> None:
    """A step copies a shared page, writes and reads. Afterwards the other sequence still has its keys."""

    def token(value: float, count: int = 1) -> Any:
        return framework.array(np.full((count, 1, 8), value, np.float32))

    def cache_with_two() -> Any:
        cache = framework.frontend.PagedKVCache(num_layers=2, num_pages=6, page_size=4, kv_heads=1, head_dim=8)
        cache.add("a")
        step = cache.step(["a"], 3)
        for layer in range(2):
            cache.update(layer, token(1.0, 3), token(1.0, 3), step)
        cache.fork("a", "b")
        return cache

    def work(cache: Any, name: str, value: float) -> list[np.ndarray]:
        step = cache.step([name])
        outs = []
        for layer in range(2):
            cache.update(layer, token(value), token(value), step)
            outs.append(as_numpy(cache.attend(layer, token(0.0), step)))
        return outs

    expected = work(cache_with_two(), "b", 5.0)
    total, lost = count_lines(lambda: work(cache_with_two(), "a", 3.0)), 0
    for at in spread(total, 24):
        cache = cache_with_two()
        # A callback of JAX may deliver the interruption at the very end of the inner block.
        with suppress(KeyboardInterrupt), interrupted_at(at):
            work(cache, "a", 3.0)
        check_pages(cache.allocator)
        try:
            actual = work(cache, "b", 5.0)
        except RuntimeError as error:
            assert framework is JAX and "its pages are lost" in str(error), at
            lost += 1
            continue
        np.testing.assert_allclose(actual, expected, rtol=1e-6, err_msg=f"line {at}")
    assert lost <= 2  # between JAX's call and the line that stores its result


# Tables


@pytest.fixture
def no_tables() -> Iterator[None]:
    yield
    tables.table_in_force.cache_clear()
    tables.shipped_table.cache_clear()


@pytest.mark.usefixtures("no_tables")
def test_an_interrupted_reading_of_a_table_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    shipped = tables.shipped_table("torch", "sm90")
    assert shipped is not None
    models = {
        direction: {name: tables.plain_model(model) for name, model in shipped.models[training].items()}
        for direction, training in tables.DIRECTIONS.items()
    }
    plain = {"format": tables.FORMAT, "date": "", "calls": 7, "tile": 1, "processors": 1, "models": models}
    path = tables.user_path("torch", "sm90")
    path.parent.mkdir(parents=True)
    content = plain | {"versions": tables.versions(), "device_name": "any GPU"}
    path.write_text(json.dumps(content), encoding="utf-8")
    total = count_lines(lambda: tables.user_table("torch", "sm90"))
    for at in spread(total, 40):
        tables.table_in_force.cache_clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with interrupted_at(at):
                tables.table_in_force("torch", "sm90")
            found = tables.table_in_force("torch", "sm90")
        assert found is not None and found.source.startswith(f"{path}: 7 calls"), at


def test_an_interrupted_write_keeps_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    total = count_lines(lambda: write_whole("x" * 99, path))
    for at in range(1, total + 1):
        path.write_text("before", encoding="utf-8")
        with interrupted_at(at):
            write_whole("x" * 99, path)
        assert path.read_text(encoding="utf-8") in ("before", "x" * 99)
    write_whole("after", path)
    assert path.read_text(encoding="utf-8") == "after"


# A real SIGINT


def test_calls_between_interruptions_at_random_moments_are_right() -> None:
    """JAX and torch keep what they trace and record in Python, too, and do not survive Ctrl-C at each of their lines:
    about one process in fifty is left inside a trace. So one process of three must be right in everything.
    """
    outcomes: list[Any] = []
    for _ in range(3):
        try:
            outcomes.append(scene("random"))
        except AssertionError as error:  # the process ended with an error
            outcomes.append(str(error)[-2000:])
        if outcomes[-1] == {"interrupted": 24, "wrong": []}:
            return
    pytest.fail("\n".join(map(str, outcomes)))


@pytest.mark.parametrize("by", ["a weak reference", "other code"])
def test_ctrl_c_that_other_code_drops_comes_again(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python drops it in a weak reference's callback, such as torch's compiler and JAX have; torch's guards drop it."""
    dropped: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda each: dropped.append(each.exc_type))

    def drop() -> None:
        if by == "other code":
            with suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            dropped.append(KeyboardInterrupt)
            return
        watched = Watched()
        reference = weakref.ref(watched, lambda _: signal.raise_signal(signal.SIGINT))
        del watched
        assert reference() is None

    def block() -> None:
        with cli.insistent_ctrl_c():
            drop()
            drop()
            began.append(time.monotonic())
            time.sleep(20.0)

    began: list[float] = []
    with pytest.raises(KeyboardInterrupt):
        block()
    assert len(dropped) == 2 and issubclass(dropped[0], KeyboardInterrupt) and time.monotonic() - began[0] < 10
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_on_its_way_is_left_alone() -> None:
    """However long the ``finally`` blocks take that it passes."""
    finished = []

    def block() -> None:
        with cli.insistent_ctrl_c():
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                time.sleep(10 * cli.EVERY)
                finished.append(True)

    with pytest.raises(KeyboardInterrupt):
        block()
    time.sleep(5 * cli.EVERY)
    assert finished == [True]


def test_a_handler_of_somebody_else_stays() -> None:
    for handler in (signal.SIG_IGN, lambda *_: None):
        signal.signal(signal.SIGINT, handler)
        with cli.insistent_ctrl_c():
            assert signal.getsignal(signal.SIGINT) is handler
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is handler


class Watched:
    """An object that can have a weak reference."""


def test_an_interrupted_tune_writes_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["attn", "tune", "--device", "cpu", "--minutes", "1"])
    monkeypatch.setattr(tune, "_measure", lambda *_: _thread.interrupt_main())
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 130 and list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize("framework", BOTH, ids=str)
@pytest.mark.parametrize("way", ["out", "in"])
def test_an_interrupted_swap_loses_no_key(framework: Framework, way: str) -> None:
    values = np.random.default_rng(0).standard_normal((7, 1, 8)).astype(np.float32)

    def cache_with_one() -> Any:
        cache = framework.frontend.PagedKVCache(num_layers=2, num_pages=3, page_size=4, kv_heads=1, head_dim=8)
        cache.add("a")
        step = cache.step(["a"], 7)
        for layer in range(2):
            cache.update(layer, framework.array(values), framework.array(values), step)
        cache.record("a", range(7))
        if way == "in":
            cache.swap_out("a")
            cache.allocator.allocate("long", 12)  # the cached pages are taken
            cache.free("long")
        return cache

    def swap(cache: Any) -> None:
        (cache.swap_out if way == "out" else cache.swap_in)("a")

    there, lost = cache_with_one(), 0
    total = count_lines(lambda: swap(there))
    for at in spread(total, 60):
        cache = cache_with_one()
        with suppress(KeyboardInterrupt), interrupted_at(at):
            swap(cache)
        check_pages(cache.allocator)
        if framework is JAX and any(pool.is_deleted() for pool in (*cache.k_pages, *cache.v_pages)):
            lost += 1  # as in a step
            continue
        if "a" not in cache.allocator:
            cache.swap_in("a")
        pages = list(cache.allocator.pages("a"))
        for pool in (*cache.k_pages, *cache.v_pages):
            np.testing.assert_array_equal(as_numpy(pool)[pages].reshape(-1, 1, 8)[:7], values, err_msg=f"line {at}")
        assert cache.allocator.match(range(7)).tokens == 4
    assert lost <= 2
