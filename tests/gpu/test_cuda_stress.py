"""Tests how calls run on a GPU: constant memory, streams, threads, devices, graphs, and no synchronisation.

Their results are judged elsewhere. Here they are compared with other runs of the same call, bit for bit if the
backend promises equal bits.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import psutil
import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")
import jax
import jax.numpy as jnp
import torch
from both_frontends import jax_device, only
from small_calls import KINDS, SmallCall, most_it_can, small_call, torch_backends, why_not

import jax_frontend
import torch_frontend
from attn_core import SeqInfo, backends
from jax_frontend.bridge import targets

pytestmark = pytest.mark.cuda
BACKENDS = torch_backends()
MIB = 2**20
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_kind = pytest.mark.parametrize("kind", KINDS)
Results = tuple[Any, ...]


def trained_and_options(call: SmallCall, backend: str) -> tuple[bool, dict[str, Any]]:
    """(with gradients, options) for a backend; skips the test if the backend cannot run the call."""
    actual = most_it_can(call, backend)
    return pytest.skip(why_not(call, backend)) if actual is None else actual


def check_same(actual: Results, expected: Results, *, exact: bool = True) -> None:
    """Checks for equal bits. If gradients need not repeat: the output's bits, and gradients that agree closely."""
    assert torch.equal(actual[0], expected[0])
    for one, other in zip(actual[1:], expected[1:], strict=True):
        if exact:
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def busy(turns: int = 60) -> Any:
    """Queues milliseconds of matrix products on the current stream; the last product is a finite matrix."""
    matrix = torch.full((4096, 4096), 1 / 4096, device="cuda", dtype=torch.bfloat16)
    last = matrix
    for _ in range(turns):
        last = last @ matrix
    return last


@pytest.fixture
def jax_gpu() -> Iterator[Any]:
    """JAX's GPU as its default device; skips where it sees none."""
    device = jax_device("cuda")
    with jax.default_device(device):
        yield device


def to_jax(tensor: Any) -> Any:
    """The same values in JAX, through the host."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return jnp.asarray(tensor.float().cpu().numpy(), jnp.bfloat16)
    return jnp.asarray(tensor.cpu().numpy())


def as_numpy(results: Any) -> list[np.ndarray]:
    """Results of either framework as float32, which represents every bfloat16."""
    return [
        one.float().cpu().numpy() if isinstance(one, torch.Tensor) else np.asarray(one, np.float32) for one in results
    ]


class JaxCall:
    """A small call under ``jax.jit``: arrays, and a function of q, k, v that gives (out,) or (out, dq, dk, dv)."""

    def __init__(self, call: SmallCall, backend: str) -> None:
        info = call.options.get("seq_info")
        self.qkv = [to_jax(tensor) for tensor in (call.q, call.k, call.v)]
        self.dout, options = to_jax(call.dout), dict(call.options)
        if info is not None:
            offsets = to_jax(info.cu_seqlens_q)
            options["seq_info"] = SeqInfo(offsets, offsets, info.max_len_q, info.max_len_k)
        explain = partial(jax_frontend.explain, *self.qkv, **options, backend=backend)
        choices = [(trained, more) for trained in (True, False) for more in ({"deterministic": True}, {})]
        accepted = [
            (trained, more) for trained, more in choices if explain(**more, needs_backward=trained).backend is not None
        ]
        if not accepted:
            pytest.skip(f"{backend} in JAX: {'; '.join(explain().reasons(backend))}")
        self.trained, self.more = accepted[0]
        self.attention = partial(jax_frontend.attention, **options, **self.more, backend=backend)

    @property
    def exact(self) -> bool:
        return bool(self.more) or not self.trained

    def function(self, q: Any, k: Any, v: Any) -> Results:
        if not self.trained:
            return (self.attention(q, k, v),)
        out, pull = jax.vjp(self.attention, q, k, v)
        return (out, *pull(self.dout))

    def check(self, actual: Any, expected: Any) -> None:
        """As ``check_same``."""
        pairs = list(zip(as_numpy(actual), as_numpy(expected), strict=True))
        for index, (one, other) in enumerate(pairs):
            if self.exact or index == 0:
                assert np.array_equal(one, other)
            else:
                np.testing.assert_allclose(one, other, rtol=2e-2, atol=2e-2)


CALLS, GROWTH = 3000, 6 * MIB
"""A call may leave two KiB behind: the interpreter's own memory grows a little with the first thousands."""


@pytest.mark.slow
@every_backend
def test_thousands_of_calls_leave_no_memory_behind(backend: str) -> None:
    call = small_call("dense")
    trained, _ = trained_and_options(call, backend)
    process = psutil.Process()
    run_many(lambda: call.run(backend, trained), 500)
    allocated, resident = torch.cuda.memory_allocated(), process.memory_info().rss
    run_many(lambda: call.run(backend, trained), CALLS)
    # autograd's thread may still hold the tensors of the last call
    assert torch.cuda.memory_allocated() < allocated + MIB
    assert process.memory_info().rss - resident < GROWTH


def run_many(run: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        run()
    torch.cuda.synchronize()
    gc.collect()


@pytest.mark.slow
@pytest.mark.on_gpus(only=lambda backend: backend not in ("math", "flex"))  # called back as others are, and slower
@every_backend
def test_thousands_of_jitted_calls_leave_no_memory_behind(backend: str, jax_gpu: Any) -> None:
    call, process = JaxCall(small_call("dense"), backend), psutil.Process()
    function = jax.jit(call.function)

    def many(times: int) -> None:
        for index in range(times):
            last = function(*call.qkv)
            if index % 100 == 0:
                jax.block_until_ready(last)
        jax.block_until_ready(last)
        del last
        gc.collect()

    many(500)
    known, allocated, resident = len(targets._calls), torch.cuda.memory_allocated(), process.memory_info().rss
    in_use = jax_gpu.memory_stats()["bytes_in_use"]
    many(CALLS)
    assert len(targets._calls) == known
    # autograd's thread may still hold the tensors of the last call
    assert torch.cuda.memory_allocated() < allocated + MIB
    assert jax_gpu.memory_stats()["bytes_in_use"] == in_use
    assert process.memory_info().rss - resident < GROWTH


def in_threads(*works: Callable[[], None]) -> None:
    """Runs each function in its own thread, all at once; raises the first of their errors."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(works))

    def guarded(work: Callable[[], None]) -> None:
        try:
            barrier.wait()
            work()
        except BaseException as error:  # the main thread raises it
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def repeated(call: SmallCall, backend: str, trained: bool, more: dict[str, Any]) -> Callable[[], None]:
    """50 runs on a separate stream, each compared with this thread's result."""
    expected, exact = call.run(backend, trained, **more), bool(more) or not trained
    torch.cuda.synchronize()

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                actual = call.run(backend, trained, **more)
                torch.cuda.current_stream().synchronize()
                check_same(actual, expected, exact=exact)

    return work


@pytest.mark.parametrize("kind", ["dense", "packed"])  # each compiles the kernels of all backends
def test_two_threads_with_different_backends_do_not_interfere(kind: str) -> None:
    calls = {name: small_call(kind, seed=index) for index, name in enumerate(BACKENDS)}
    actual = {name: most_it_can(call, name) for name, call in calls.items()}
    names = [name for name, choice in actual.items() if choice is not None]
    if len(names) < 2:
        pytest.skip(f"needs two backends that can run this call, got {names}")
    works = {name: repeated(calls[name], name, *actual[name]) for name in names}  # type: ignore[misc]
    for one, other in pairwise([*names, names[0]]):
        in_threads(works[one], works[other])


@every_backend
def test_torch_and_jax_threads_do_not_interfere(backend: str, jax_gpu: Any) -> None:
    call = small_call("dense")
    in_torch, in_jax = (
        repeated(call, backend, *trained_and_options(call, backend)),
        JaxCall(small_call("dense", seed=1), backend),
    )
    function = jax.jit(in_jax.function)
    expected = as_numpy(function(*in_jax.qkv))

    def work() -> None:
        for _ in range(50):
            in_jax.check(function(*in_jax.qkv), expected)

    in_threads(in_torch, work)


@every_kind
@every_backend
def test_inputs_that_another_stream_still_computes(backend: str, kind: str) -> None:
    only(("packed",), kind, backend, "cuda")
    call = small_call(kind)
    trained, more = trained_and_options(call, backend)
    expected, exact = call.run(backend, trained, **more), bool(more) or not trained
    for consumer_waits in (False, True):
        late = call.laid_out(lambda tensor: torch.full_like(tensor, torch.nan))
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            busy()
            for name in ("q", "k", "v", "dout"):
                getattr(late, name).copy_(getattr(call, name))
            if not consumer_waits:
                actual = late.run(backend, trained, **more)
        if consumer_waits:
            torch.cuda.current_stream().wait_stream(side)
            actual = late.run(backend, trained, **more)
        torch.cuda.synchronize()
        check_same(actual, expected, exact=exact)


@every_backend
def test_jax_work_queued_before_a_bridged_call(backend: str, jax_gpu: Any) -> None:
    call = JaxCall(small_call("dense"), backend)
    function = jax.jit(call.function)

    @jax.jit
    def slowly(matrix: Any, q: Any, factor: Any) -> Any:
        # Untuned, as in these tests, each product takes a few ms.
        product = jax.lax.fori_loop(0, 4, lambda _, last: last @ matrix, matrix)
        return q * (factor + 0 * product[0, 0])

    matrix = jnp.full((4096, 4096), 1 / 4096, jnp.bfloat16)
    factors = [jnp.asarray(2.0 ** (index % 5), jnp.bfloat16) for index in range(8)]
    q, k, v = call.qkv
    expected = [as_numpy(function((q * factor).block_until_ready(), k, v)) for factor in factors]
    together = jax.jit(lambda q, factor: call.function(slowly(matrix, q, factor), k, v))
    queued = [function(slowly(matrix, q, factor), k, v) for factor in factors]
    queued += [together(q, factor) for factor in factors]
    for actual, desired in zip(queued, expected * 2, strict=True):
        call.check(actual, desired)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@every_kind
@every_backend
def test_donated_arguments(backend: str, kind: str, jax_gpu: Any) -> None:
    only(("packed",), kind, backend, "cuda")
    call = JaxCall(small_call(kind), backend)
    kept, donating = jax.jit(call.function), jax.jit(call.function, donate_argnums=(0, 1, 2))
    forward = jax.jit(lambda q, k, v: call.attention(q, k, v))
    chained = jax.jit(lambda q, k, v: call.attention(q, k, v), donate_argnums=0)
    expected, (q, k, v) = as_numpy(kept(*call.qkv)), call.qkv
    for _ in range(20):
        call.check(donating(*(array.copy() for array in call.qkv)), expected)
    one, other = q.copy(), q
    for _ in range(10):
        one, other = chained(one, k, v), forward(other, k, v)
        assert np.array_equal(np.asarray(one), np.asarray(other))


@every_backend
def test_a_device_that_is_not_the_current_one(backend: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.cuda.set_device(0)  # an earlier test may have left this thread on the device where JAX last ran
    here = small_call("dense")
    trained, more = trained_and_options(here, backend)
    there = here.laid_out(lambda tensor: tensor.to("cuda:1"))
    expected, actual = here.run(backend, trained, **more), there.run(backend, trained, **more)
    assert torch.cuda.current_device() == 0 and {tensor.device.index for tensor in actual} == {1}
    check_same(tuple(tensor.to("cuda:0") for tensor in actual), expected, exact=bool(more) or not trained)


@every_backend
def test_a_jax_device_that_is_not_the_default(backend: str, jax_gpu: Any) -> None:
    devices = jax.devices("gpu")
    if len(devices) < 2:
        pytest.skip("needs two GPUs")
    call = JaxCall(small_call("dense"), backend)
    function = jax.jit(call.attention)
    expected = as_numpy([function(*call.qkv)])
    there = function(*(jax.device_put(array, devices[1]) for array in call.qkv))
    assert there.devices() == {devices[1]}
    assert np.array_equal(as_numpy([there])[0], expected[0])


@every_backend
def test_grad_mode_in_threads_not_created_by_torch(backend: str, jax_gpu: Any, replace_fields: Any) -> None:
    """A bridged call builds no graph, whatever the grad mode of the calling thread."""
    call, record, graphs = JaxCall(small_call("dense"), backend), backends.load(backend, "cuda"), []
    original = record.forward

    def spy(*arguments: Any, **keywords: Any) -> Any:
        results = original(*arguments, **keywords)
        graphs.extend(tensor.requires_grad for tensor in results if tensor is not None)
        return results

    replace_fields(record, forward=spy)
    function = jax.jit(call.function)
    expected = as_numpy(function(*call.qkv))

    def work(mode: Any) -> None:
        with mode():
            call.check(function(*call.qkv), expected)

    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        in_threads(partial(work, mode))
    assert not any(graphs)


@every_backend
def test_a_backward_in_another_thread_than_its_forward(backend: str) -> None:
    call = small_call("dense")
    trained, more = trained_and_options(call, backend)
    if not trained:
        pytest.skip(f"{backend} has no gradient for this call")
    expected = call.run(backend, trained, **more)
    learned = [tensor.detach().requires_grad_() for tensor in (call.q, call.k, call.v)]
    out: list[Any] = []
    results: list[Any] = []
    attend = partial(torch_frontend.attention, *learned, **call.options, **more, backend=backend)
    in_threads(lambda: out.append(attend()))
    in_threads(lambda: results.extend(torch.autograd.grad(out[0], learned, call.dout)))
    torch.cuda.synchronize()
    check_same((out[0].detach(), *results), expected, exact=bool(more))


@every_kind
@every_backend
def test_cuda_graphs_replay_what_was_warmed_up(backend: str, kind: str) -> None:
    only(("packed",), kind, backend, "cuda")
    call = small_call(kind, batch=3, seq=192)  # a shape that no other test has, so that only warm_up has prepared it
    trained, more = trained_and_options(call, backend)
    learned = [tensor.detach().requires_grad_(trained) for tensor in (call.q, call.k, call.v)]
    options = {**call.options, **more, "backend": backend}
    torch_frontend.warm_up(*learned, **options, needs_backward=trained)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch_frontend.attention(*learned, **options)
        results = (out, *torch.autograd.grad(out, learned, call.dout)) if trained else (out,)
    for seed in (1, 2):
        other = small_call(kind, batch=3, seq=192, seed=seed)
        with torch.no_grad():
            for target, source in zip((*learned, call.dout), other[:4], strict=True):
                target.copy_(source)
        graph.replay()
        torch.cuda.synchronize()
        actual = tuple(tensor.detach().clone() for tensor in results)
        check_same(actual, other.run(backend, trained, **more), exact=bool(more) or not trained)


@contextmanager
def synchronising_is_an_error() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_synchronisation_is_detected() -> None:
    tensor = torch.ones(1, device="cuda")
    with pytest.raises(RuntimeError, match="synchroniz"), synchronising_is_an_error():
        tensor.item()


@every_kind
@every_backend
def test_nothing_synchronises_after_the_first_call(backend: str, kind: str) -> None:
    only(("packed",), kind, backend, "cuda")
    call = small_call(kind)
    trained, more = trained_and_options(call, backend)
    attempts: list[dict[str, Any]] = [more, {}] if more else [{}]
    for options in attempts:
        expected = call.run(backend, trained, **options)
        with synchronising_is_an_error():
            for _ in range(3):
                actual = call.run(backend, trained, **options)
        check_same(actual, expected, exact=bool(options) or not trained)


def surrounded(tensor: Any, filling: float, layout: str) -> Any:
    """The same values in the middle of a larger buffer: as one block, or in wider rows among other rows."""
    if layout == "block":
        zone = 4096
        buffer = torch.full((tensor.numel() + 2 * zone,), filling, device=tensor.device, dtype=tensor.dtype)
        view = buffer[zone : zone + tensor.numel()].view(tensor.shape)
    else:
        *lead, seq, heads, dim = tensor.shape
        sizes = ([lead[0] + 2] if lead else []) + [seq + 32, heads + 2, dim + 16]
        buffer = torch.full(sizes, filling, device=tensor.device, dtype=tensor.dtype)
        inner = buffer[1:-1] if lead else buffer
        view = inner[..., 16 : 16 + seq, 1 : 1 + heads, 8 : 8 + dim]
    view.copy_(tensor)
    return view


@pytest.mark.parametrize("layout", ["block", "rows"])
@every_kind
@every_backend
def test_memory_around_the_inputs_is_never_read(backend: str, kind: str, layout: str) -> None:
    """NaN around every tensor gives the same bits as zeros around it."""
    only((("packed", "block"),), (kind, layout), backend, "cuda")
    call = small_call(kind, seq=131)
    trained, more = trained_and_options(call, backend)
    clean, poisoned = (
        call.laid_out(partial(surrounded, filling=filling, layout=layout)) for filling in (0.0, torch.nan)
    )
    expected, actual = clean.run(backend, trained, **more), poisoned.run(backend, trained, **more)
    assert all(bool(tensor.isfinite().all()) for tensor in actual)
    check_same(actual, expected, exact=bool(more) or not trained)


FLOOR = 16.0
"""Bytes per token that count as none: the log-sum-exp of four heads. A quadratic term would be thousands."""


def extra_bytes(backend: str, kind: str, training: bool, length: int) -> int:
    """Returns the bytes that a warm call allocated at its peak, beyond earlier allocations and its results."""
    generator = torch.Generator("cuda").manual_seed(0)
    lead = () if kind == "packed" else (1,)
    q, k, v, dout = (
        torch.randn((*lead, length, heads, 128), generator=generator, device="cuda", dtype=torch.bfloat16)
        for heads in (8, 2, 2, 8)
    )
    options: dict[str, Any] = {"causal": True, "backend": backend}
    if kind == "packed":
        lengths = [length // 2, length // 4, length // 8, length // 8]
        options["seq_info"] = SeqInfo.from_lengths(lengths, array=lambda offsets: torch.from_numpy(offsets).cuda())
    else:
        options["window"] = 1024
    learned = tuple(tensor.requires_grad_(training) for tensor in (q, k, v))

    def run() -> Any:
        out = torch_frontend.attention(*learned, **options)
        return (out.detach(), *torch.autograd.grad(out, learned, dout)) if training else out

    run()
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = run()
    torch.cuda.synchronize()
    result_bytes = torch.cuda.memory_allocated() - before
    del results
    return torch.cuda.max_memory_allocated() - before - result_bytes


@pytest.mark.parametrize(
    ("kind", "training"),
    [("packed", False), ("packed", True), ("windowed", True)],
    ids=["packed, forward", "packed, forward + backward", "windowed, forward + backward"],
)
@every_backend
def test_peak_memory_is_linear_in_the_tokens(backend: str, kind: str, training: bool) -> None:
    """With four documents, or a window: a q × kv matrix would need four times the bytes per token."""
    only(("packed",), kind, backend, "cuda")
    lengths = (4096, 16384)
    try:
        per_token = [extra_bytes(backend, kind, training, length) / length for length in lengths]
    except torch_frontend.NoBackendError as error:
        pytest.skip(f"{backend}: {'; '.join(error.selection.reasons(backend))}")
    short, long = (max(value, FLOOR) for value in per_token)
    assert long / short <= 1.25, per_token
