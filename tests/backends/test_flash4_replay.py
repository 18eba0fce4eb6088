"""Tests recordings of FlashAttention-4's launches, and their replay, with a stand-in whose kernels run on the CPU."""

from __future__ import annotations

import gc
import importlib.util
import sys
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

from attn_core import AttentionSpec
from attn_core.backends import flash4
from attn_core.backends.flash4 import own_kernels, recorded_program, recording, replay
from attn_core.backends.flash4.recording import Launch, Operand, Recorder, Uncompiled
from attn_core.backends.shared import first_calls
from attn_core.backends.shared.kernel_programs import Unrecordable
from attn_core.call.tensors import Gradients, Inputs
from tests.campaign.functions import fields_of

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import _disable_current_modes

SPEC = AttentionSpec(
    batch=2, q_len=5, kv_len=5, num_heads=6, num_kv_heads=3, head_dim=64, value_dim=64, dtype="float16", scale=0.25
)
PACKED = AttentionSpec(
    **{"batch": 1, "q_len": 10, "kv_len": 10, "num_heads": 6, "num_kv_heads": 3, "head_dim": 64, "value_dim": 64},
    **{"dtype": "float16", "documents": 2, "max_len_q": 6, "max_len_k": 6},
)

# As flash-attn-4's interface: a cache of compiled kernels per entry point, scratch, and zeros that a kernel adds to.
INTERFACE = """
import torch
from types import SimpleNamespace
from torch.utils._python_dispatch import _disable_current_modes

calls, extra, SCRATCH = [], [], True
cute = SimpleNamespace(compile=lambda kernel, *described, options=None: kernel)

def forward_kernel(q, k, v, out, lse, sums, scale, starts, nothing):
    with _disable_current_modes():
        sums += q.float().sum((-1, -2)) * scale
        total = k.float().sum() - v.float().sum() + (0 if starts is None else int(starts[1]))
        out.copy_(q * 2 + total + sums[..., None, None])
        lse.fill_(total)

def prepare_kernel(out, dout, delta, dlse):
    with _disable_current_modes():
        delta.copy_((out * dout).float().sum((-1, -2)))
        if dlse is not None:
            delta -= dlse.sum()

def backward_kernel(q, k, v, dout, lse, delta, dq, dk, dv, scale):
    with _disable_current_modes():
        dq.copy_(q * scale + delta[..., None, None])
        dk.copy_(k - lse.float().mean())
        dv.copy_(v + dout.float().mean())

def cached(entry, key, kernel):
    if key not in entry.compile_cache:
        entry.compile_cache[key] = cute.compile(kernel)
    return entry.compile_cache[key]

def _flash_attn_fwd(q, k, v, *, cu_seqlens_q, cu_seqlens_k, return_lse, out, lse, softmax_scale, **how):
    calls.append("forward")
    out = torch.empty_like(q) if out is None else out
    shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
    lse = torch.empty(shape, dtype=torch.float32) if lse is None else lse
    kernel = cached(_flash_attn_fwd, (q.dtype, softmax_scale), forward_kernel)
    if not SCRATCH:
        kernel(q.detach(), k.detach(), v.detach(), out, lse, softmax_scale, cu_seqlens_q, None)
        return out, lse, None, None, None
    sums = torch.zeros(q.shape[:-2], dtype=torch.float32)
    for operation in extra:
        sums = operation(sums)
    kernel(q.detach(), k.detach(), v.detach(), out, lse, sums, softmax_scale, cu_seqlens_q, None)
    return out, lse, None, None, None

def _flash_attn_bwd(q, k, v, out, dout, lse, *, dq, dk, dv, dlse, softmax_scale, **how):
    calls.append("backward")
    dq, dk, dv = (torch.empty_like(x) if d is None else d for x, d in ((q, dq), (k, dk), (v, dv)))
    delta = torch.empty(q.shape[:-2], dtype=torch.float32)
    _prepare(out, dout, delta, dlse)
    kernel = cached(_flash_attn_bwd, (q.dtype,), backward_kernel)
    kernel(q.detach(), k.detach(), v.detach(), dout, lse, delta, dq, dk, dv, softmax_scale)
    return dq, dk, dv

def _prepare(out, dout, delta, dlse):
    cached(_prepare, dlse is None, prepare_kernel)(out, dout, delta, dlse)

_flash_attn_fwd.compile_cache, _flash_attn_bwd.compile_cache, _prepare.compile_cache = {}, {}, {}
"""


@pytest.fixture
def interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The stand-in, installed as ``flash_attn.cute.interface``."""
    path = tmp_path / "interface.py"
    path.write_text(INTERFACE)
    spec = importlib.util.spec_from_file_location("flash_attn.cute.interface", path)
    assert spec is not None and spec.loader is not None
    module, cute = importlib.util.module_from_spec(spec), ModuleType("flash_attn.cute")
    spec.loader.exec_module(module)
    cute.interface = module  # type: ignore[attr-defined]
    for name, value in (("flash_attn", ModuleType("flash_attn")), ("flash_attn.cute", cute), (spec.name, module)):
        monkeypatch.setitem(sys.modules, name, value)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(replay, "FIRST_GPU", -1)
    forget()
    yield module
    forget()


def forget() -> None:
    for cached in (own_kernels.entry_points, recording._private_copy, recording.is_possible):
        cached.cache_clear()
    for known in (replay._seen, replay._recorded, first_calls._compiled):
        known.clear()


def calls_of(interface: ModuleType) -> list[str]:
    """The calls of the entry points, the usual ones and the recorded ones."""
    copy = recording._private_copy() if recording._private_copy.cache_info().currsize else interface
    return [*interface.calls, *(copy.calls if copy is not interface else [])]


def inputs_of(spec: AttentionSpec, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    rows = () if spec.packed else (spec.batch,)
    tensors = [
        torch.randint(-3, 4, (*rows, 10 if spec.packed else 5, heads, 64), generator=generator).half() / 64
        for heads in (6, 3, 3)
    ]
    offsets = torch.tensor([0, 4 + seed % 3, 10], dtype=torch.int32) if spec.packed else None
    return Inputs(*tensors, cu_seqlens_q=offsets, cu_seqlens_k=offsets)


def by_entry_points(interface: ModuleType, spec: AttentionSpec, inputs: Inputs) -> tuple[Any, Any]:
    how = {**flash4.keywords(spec, "forward"), "out": None, "lse": None, "return_lse": True}
    offsets = {"cu_seqlens_q": inputs.cu_seqlens_q, "cu_seqlens_k": inputs.cu_seqlens_k}
    return interface._flash_attn_fwd(*inputs[:3], **offsets, **how)[:2]


def assert_equal(actual: Any, expected: Any) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.parametrize("spec", [SPEC, PACKED], ids=["dense", "packed"])
def test_the_third_call_launches_the_kernels_of_the_second(spec: AttentionSpec, interface: ModuleType) -> None:
    expected = [by_entry_points(interface, spec, inputs_of(spec, seed)) for seed in range(5)]
    interface.calls.clear()
    for seed in range(5):
        assert_equal(flash4.forward(spec, inputs_of(spec, seed)), expected[seed])
    assert calls_of(interface) == ["forward", "forward"]


def test_another_scale_is_another_call(interface: ModuleType) -> None:
    for spec in (SPEC, replace(SPEC, scale=0.5)) * 4:
        inputs = inputs_of(SPEC, 1)
        assert_equal(flash4.forward(spec, inputs), by_entry_points(interface, spec, inputs))
    assert len(replay._recorded) == 2


@pytest.mark.parametrize("layout", ["strided", "unaligned", "expanded", "alike"])
def test_any_layout_gives_the_same_results(layout: str, interface: ModuleType) -> None:
    for seed in range(4):
        inputs = inputs_of(SPEC, seed)
        q, k, v = inputs[:3]
        if layout == "strided":
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        elif layout == "unaligned":
            q, k, v = (torch.cat((x.new_zeros(1), x.reshape(-1)))[1:].view(x.shape) for x in (q, k, v))
        elif layout == "expanded":
            k, v = (x[:1].expand(2, -1, -1, -1) for x in (k, v))
        elif seed == 1:  # the recorded call alone
            v = k
        inputs = inputs._replace(q=q, k=k, v=v)
        plain = Inputs(*(x.clone(memory_format=torch.contiguous_format) for x in (q, k, v)))
        assert_equal(flash4.forward(SPEC, inputs), by_entry_points(interface, SPEC, plain))


LENGTHS = ((5, 5), (5, 5), (7, 7), (9, 20), (1, 30), (1, 31), (1, 31), (2, 33), (9, 21), (40, 40))
"""q_len and kv_len of causal calls; the group is 2, so from 33 queries on the rows need a second tile of 64."""


def test_other_lengths_launch_the_recorded_kernel(interface: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_chooses_by_family", lambda device: True)
    for module in (interface, recording._private_copy()):
        without_scratch = module._flash_attn_fwd.__globals__
        monkeypatch.setitem(without_scratch, "forward_kernel", forward_without_scratch)
        monkeypatch.setitem(without_scratch, "SCRATCH", False)
    calls = []
    for q_len, kv_len in LENGTHS:
        spec = replace(SPEC, q_len=q_len, kv_len=kv_len, causal=True)
        inputs = Inputs(torch.randn(2, q_len, 6, 64).half(), *torch.randn(2, 2, kv_len, 3, 64).half())
        assert_equal(flash4.forward(spec, inputs), by_entry_points(interface, spec, inputs))
        interface.calls.pop()
        calls.append(len(calls_of(interface)))
    # Three families: a band; one query, for which causal hides nothing; and more rows than one tile.
    assert calls == [1, 2, 2, 2, 3, 4, 4, 4, 4, 5]


def forward_without_scratch(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, *_: Any) -> None:
    """Takes the place of the stand-in's kernel: it needs no memory besides the results."""
    with _disable_current_modes():
        total = (k.float().sum() - v.float().sum()) * scale
        out.copy_(q * 2 + total)
        lse.fill_(total)


def test_no_tensor_outlives_its_call(interface: ModuleType) -> None:
    """Without a garbage collection, because XLA fails a call of which a tensor is still alive when it returns."""
    gc.collect()
    gc.disable()
    try:
        for seed in range(4):
            inputs = inputs_of(SPEC, seed)
            results = flash4.forward(SPEC, inputs)
            alive = [weakref.ref(tensor) for tensor in (*inputs[:3], *results)]
            del inputs, results
            assert [tensor() for tensor in alive] == [None] * 5, f"after call {seed}"
    finally:
        gc.enable()


def test_results_go_into_the_callers_buffers(interface: ModuleType) -> None:
    for seed in range(4):
        inputs = inputs_of(SPEC, seed)
        buffers = torch.empty(SPEC.out_shape, dtype=torch.float16), torch.empty(SPEC.lse_shape)
        out, lse = flash4.forward(SPEC, inputs, buffers)
        assert out is buffers[0] and lse is buffers[1]
        assert_equal(buffers, by_entry_points(interface, SPEC, inputs))


@pytest.mark.parametrize("with_dlse", [False, True], ids=["out", "out and lse"])
def test_backwards_are_replayed_too(with_dlse: bool, interface: ModuleType) -> None:
    for seed in range(5):
        inputs = inputs_of(SPEC, seed)
        inputs = inputs._replace(q=inputs.q.requires_grad_())  # as autograd saves it
        out, lse = (x.detach() for x in by_entry_points(interface, SPEC, inputs))
        dout = out if seed == 1 else out[:1].expand_as(out)
        dlse = torch.full_like(lse, seed) if with_dlse else None
        buffers = Gradients(*map(torch.empty_like, inputs[:3])) if seed == 3 else None
        with torch.no_grad():
            how = {**flash4.keywords(SPEC, "backward"), "dq": None, "dk": None, "dv": None, "dlse": dlse}
            expected = interface._flash_attn_bwd(*inputs[:3], out, dout.clone(), lse, **how)
            actual = flash4.backward(SPEC, inputs, out, lse, dout, dlse, buffers)
        assert_equal(actual[:3], expected)
        assert buffers is None or actual.dq is buffers.dq
    key = (SPEC, "backward of out and lse" if with_dlse else "backward", -1)
    recorded = replay._recorded[key]
    assert recorded is not None and len(recorded.kernels) == 2 and len(recorded.scratch) == 1


def test_a_torch_operation_between_the_kernels_prevents_replay(interface: ModuleType) -> None:
    for module in (interface, recording._private_copy()):
        module.extra.append(lambda sums: sums + 1)
    for seed in range(4):
        inputs = inputs_of(SPEC, seed)
        assert_equal(flash4.forward(SPEC, inputs), by_entry_points(interface, SPEC, inputs))
    assert list(replay._recorded.values()) == [None]


def test_a_package_without_a_readable_source_uses_the_entry_points(
    interface: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording.util, "spec_from_file_location", lambda *about: None)
    for seed in range(4):
        inputs = inputs_of(SPEC, seed)
        assert_equal(flash4.forward(SPEC, inputs), by_entry_points(interface, SPEC, inputs))
    assert replay._recorded == {}


def test_the_memory_of_calls_is_bounded(interface: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST_CALLS", 2)
    for documents in range(2, 8):
        assert not replay._is_due((SPEC, str(documents), -1))
    assert len(replay._seen) <= 2


def test_the_python_calls_of_a_warm_call(interface: ModuleType) -> None:
    """A replay is short: the functions of Python that run, besides those of the kernels."""
    inputs = inputs_of(SPEC, 0)
    out, lse = flash4.forward(SPEC, inputs)
    for _ in range(2):
        flash4.forward(SPEC, inputs)
        flash4.backward(SPEC, inputs, out, lse, out, None)
    forward = python_calls(lambda: flash4.forward(SPEC, inputs))
    backward = python_calls(lambda: flash4.backward(SPEC, inputs, out, lse, out, None))
    assert len(forward) <= 13 and len(backward) <= 17, (forward, backward)


def python_calls(call: Any) -> list[str]:
    """The names of this project's Python functions that a call runs."""
    names = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and "attn_core" in frame.f_code.co_filename:
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names


def test_calls_with_functions_or_ranges_have_no_family() -> None:
    """Whether heads share a tile follows from q_len there, and tables have the sizes of the call."""
    lengths = {"q_len": 200, "kv_len": 200, "causal": True}
    plain, longer = replace(SPEC, **lengths), replace(SPEC, **{**lengths, "q_len": 300, "kv_len": 300})
    assert replay.family(plain) == replay.family(longer)
    score = fields_of(None, "bent", (2, 6, 200, 200))
    for fields in (score, fields_of("nothing", None, (2, 6, 200, 200)), {"key_ranges_shape": (1, 1, 200, 1, 2)}):
        spec = replace(plain, **fields)
        assert replay.family(spec) == spec


class Number:
    """A number of the CuTe DSL, as flash-attn-4 passes aux scalars."""

    def __init__(self, value: int) -> None:
        self.value = value


class AuxData(NamedTuple):
    """The arrays and numbers of flash-attn-4's functions."""

    tensors: Any = None
    scalars: Any = None


def recorder_of(*arguments: Any) -> Recorder:
    """A recorder of one launch."""
    recorder = Recorder(with_memory=True)
    recorder.note(lambda *_: None, "kernel", arguments)
    return recorder


def test_arguments_in_tuples_are_picked_again() -> None:
    """Block tables are a tuple of tensors; aux scalars hold addresses, which differ in each call."""
    known = [torch.zeros(2), torch.zeros(3), torch.zeros(4)]
    tables = (known[0], known[1], None)
    aux = AuxData(None, (Number(known[2].data_ptr()), Number(4), Number(7)))
    recorder = recorder_of(known[1], tables, aux, AuxData(), 0.5)
    recorder._addressed[known[2].data_ptr()] = known[2]
    launches = replay._launches(recorder.recorded(known), True)
    ((_, picker),) = launches.kernels
    others = [torch.ones(2), torch.ones(3), torch.ones(4)]
    first, table, numbers, empty, scale = picker((*others, *launches.constants))
    assert first is others[1] and table[0] is others[0] and table[1] is others[1] and table[2] is None
    assert type(numbers) is AuxData and numbers == (None, (others[2].data_ptr(), 4, 7))
    assert type(empty) is AuxData and empty == (None, None) and scale == 0.5


def test_arrays_that_share_memory_when_they_are_recorded_may_differ_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA passes one array twice as two tensors; a kernel knows both by the same address."""
    monkeypatch.setitem(sys.modules, "cutlass", SimpleNamespace(Int64=Number))
    monkeypatch.setattr(replay, "FIRST_GPU", -1)
    monkeypatch.setattr(recording, "is_possible", lambda: True)
    recorder, launched = Recorder(with_memory=True), list[Any]()
    monkeypatch.setattr(recording, "recording", lambda with_memory: nullcontext(recorder))
    monkeypatch.setattr(replay, "_seen", set())
    monkeypatch.setattr(replay, "_recorded", {})

    def by_entry_points(spec: Any, operands: Any, tables: Any, lane: Any) -> Any:
        if lane is recorder:
            recorder.note(lambda *seen: launched.append(seen), "kernel", (tuple(map(lane.address, tables)),))
        return operands.out, operands.lse

    memory = torch.zeros(4).numpy()
    out, lse = torch.zeros(1), torch.zeros(1)
    operands = replay.ForwardOperands(torch.zeros(1), torch.zeros(1), torch.zeros(1), out, lse, None, None)
    for _ in range(2):
        tables = torch.from_numpy(memory), torch.from_numpy(memory)
        assert tables[0].data_ptr() == tables[1].data_ptr()
        replay._by_python(SPEC, "forward", operands, tables, (out, lse), by_entry_points)
    (launches,) = replay._recorded.values()
    assert launches is not None
    others = torch.zeros(4), torch.zeros(4)
    launches.run(operands, others)
    assert launched[-1] == (tuple(each.data_ptr() for each in others),)


def test_a_view_in_a_tuple_prevents_a_replay() -> None:
    known = [torch.zeros(2, 3)]
    for view in (known[0].expand(4, 2, 3), known[0][:, 1:], known[0].T, torch.zeros(2, 3)):
        with pytest.raises(Unrecordable, match="takes a view, or a tensor that is not the call's"):
            recorder_of((view, None)).recorded(known)
    with pytest.raises(Unrecordable, match="takes object"):
        recorder_of((object(),)).recorded(known)


@pytest.mark.parametrize("spec", [SPEC, PACKED], ids=["dense", "packed"])
def test_a_call_without_memory_has_the_launches_of_a_call_with_it(spec: AttentionSpec, interface: ModuleType) -> None:
    """So XLA's programs, and torch's replays, are the kernels that flash-attn-4 launches."""
    recordings = []
    for with_memory in (True, False):
        with nullcontext() if with_memory else recorded_program.without_memory():
            inputs = first_calls.zeros(spec, "cpu")
            out, lse, dout = torch.zeros(spec.out_shape), torch.zeros(spec.lse_shape), torch.zeros(spec.out_shape)
            offsets = inputs.cu_seqlens_q, None if inputs.cu_seqlens_k is None else inputs.cu_seqlens_k.clone()
            forward = replay.ForwardOperands(*inputs[:3], out, lse, *offsets)
            gradients = [torch.empty_like(each) for each in inputs[:3]]
            backward = replay.BackwardOperands(*inputs[:3], out, dout, lse, *gradients, None, *offsets)
            for operands, make in (
                (forward, flash4._forward_by_entry_points),
                (backward, flash4._backward_by_entry_points),
            ):
                with recording.recording(with_memory) as recorder:
                    make(spec, operands, (), recorder)
                recordings.append(recorder.recorded(operands))
    for real, fake in zip(recordings[:2], recordings[2:], strict=True):
        assert [launch[1:] for launch in real.launches] == [launch[1:] for launch in fake.launches]
        assert [type(launch.kernel) for launch in fake.launches] == [Uncompiled] * len(real.launches)
        assert real.scratch == fake.scratch
    assert [len(call.launches) for call in recordings] == [1, 2, 1, 2]
    assert recordings[0].launches[0].arguments[:5] == tuple(map(Operand, range(5)))


def test_tensors_without_memory_are_on_one_device_if_there_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    devices = set()
    for current, direction in enumerate(("forward", "backward")):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        with recorded_program.without_memory():
            tensors = recorded_program._tensors(replace(SPEC, needs_backward=True), direction, with_dlse=False)
        devices |= {str(tensor.device) for tensor in tensors.values()}
    assert devices == {"cuda:0"}


def test_a_program_rebuilds_arguments_in_tuples() -> None:
    arguments = (Operand(0), (Operand(1), None), AuxData([Operand(2)], None), 3)
    described = ("q", Table("count", None), AuxData(["ends"], None), "number")
    launch = Launch(Uncompiled(None, described, None), "key", arguments)
    assert [about for _, about in recorded_program.leaves(launch)] == ["q", "count", None, "ends", None, "number"]
    leaves = iter(["a", "b", None, "c", None, 3])
    rebuilt = [recording.with_leaves(lambda *_: next(leaves), *pair) for pair in zip(arguments, described)]
    assert rebuilt == ["a", Table("b", None), AuxData(["c"], None), 3]
    assert type(rebuilt[1]) is Table and type(rebuilt[2]) is AuxData


class Table(NamedTuple):
    """A block table as the kernel takes it."""

    count: Any
    list: Any
