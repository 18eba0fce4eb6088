"""Tests programs that call torch's operators or Triton's kernels: their steps, and the compiled library on a CPU."""

from __future__ import annotations

import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("jax_tvm_ffi")
import jax
import jax.numpy as jnp
import torch

import jax_frontend
from attn_core import AttentionSpec, PagedKV
from attn_core.backends.flash3 import backend as flash3
from attn_core.backends.flash4 import program as flash4_program
from attn_core.backends.sdpa_cudnn import backend as sdpa_cudnn
from attn_core.backends.sdpa_efficient import backend as sdpa_efficient
from attn_core.backends.shared import rewrites
from attn_core.backends.shared.programs import operator_library, operator_program, operator_recorder, triton_programs
from attn_core.backends.shared.programs.kernel_programs import OPERATOR, SCRATCH, KernelStep, Unrecordable
from attn_core.backends.triton_jvp import backend as triton_jvp
from attn_core.backends.triton_jvp import launches
from attn_core.backends.triton_splitkv import backend as splitkv
from attn_core.call.tensors import Gradients, Inputs
from attn_core.selection import row_maximum
from jax_frontend.bridge import compiled_lane
from jax_frontend.bridge.bridged_call import BridgedCall

FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def recorded(run: Callable[..., None], *shapes: tuple[int, ...]) -> list[str]:
    """Returns the lines of the text of a function of float32 tensors on the CPU."""
    with operator_recorder.without_memory():
        tensors = [torch.empty(shape) for shape in shapes]
        return operator_recorder.record(lambda: run(*tensors), tensors).splitlines()


def test_a_text_has_the_operators_whose_results_are_read() -> None:
    def run(x: torch.Tensor, into: torch.Tensor) -> None:
        (x * 3).exp()  # nothing reads it
        half = x.view(2, 2).t() * 0.5
        half.add_(x[:2, None])
        into.copy_(torch.cat((half, half.sum((0, 1), keepdim=True).expand(2, 2)), dim=0))

    assert recorded(run, (4,), (4, 2)) == [
        "12",
        "aten::view - t0 I2,2 > 4 ~",
        "aten::t - t4 > 5 ~ 4",
        "aten::mul Tensor t5 wf0.5 > 6:2,2:1,2 ~ 5",
        "aten::slice Tensor t0 i0 i0 i2 i1 > 7 ~",
        "aten::unsqueeze - t7 i1 > 8 ~ 7",
        "aten::add_ Tensor t6 t8 i1 > -1 ~ 8",
        "aten::sum dim_IntList t6 I0,1 b1 n > 9:1,1:1,1 ~",
        "aten::expand - t9 I2,2 b0 > 10 ~ 9",
        "aten::cat - T6,10 i0 > 11:4,2:2,1 ~ 6 10",
        "aten::copy_ - t1 t11 b0 > -1 ~ 11",
    ]


def test_a_function_that_reads_values_is_not_recorded() -> None:
    outside = torch.ones(2)
    refused: dict[str, Callable[[torch.Tensor], Any]] = {
        "depend on values": lambda x: x.sum().item(),
        "from outside": lambda x: x.copy_(outside) if False else x.add_(outside),
        "needs 500 operators": lambda x: [x.add_(1.0) for _ in range(500)],
        "the device meta": lambda x: x.to("meta"),
    }
    for message, run in refused.items():
        with pytest.raises(Unrecordable, match=message):
            recorded(run, (2,))


def test_exported_programs_may_run_operators() -> None:
    assert jax.export.DisabledSafetyCheck.custom_call(OPERATOR) in list(jax_frontend.export_checks())


def test_the_library_is_named_by_what_it_depends_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = operator_library.library_path()
    assert path.is_relative_to(tmp_path) and path.parent.stat().st_mode & 0o77 == 0
    assert "compile_operator_lane()" in str(operator_library.missing())
    version = operator_library.metadata.version
    with monkeypatch.context() as patch:
        patch.setattr(operator_library.metadata, "version", lambda name: version(name) + "x")
        assert operator_library.library_path() == path  # versions of a process do not change, and reading takes long
        operator_library._file_name.cache_clear()
        assert operator_library.library_path() != path
    operator_library._file_name.cache_clear()
    changed = tmp_path / "changed.cc"
    changed.write_text(operator_library.SOURCE.read_text() + "// changed")
    with monkeypatch.context() as patch:
        patch.setattr(operator_library, "SOURCE", changed)
        assert operator_library.library_path() != path
    path.write_bytes(b"")
    assert operator_library.missing() is None  # compiled in this process, after it was missing
    path.unlink()
    assert "compile_operator_lane()" in str(operator_library.missing())
    path.parent.chmod(0o777)
    assert "others may write into" in str(operator_library.missing())
    path.parent.chmod(0o700)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match="no-such-compiler: not found"):
        operator_library.compile_library("headers")
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(RuntimeError, match="false -shared"):
        operator_library.compile_library("headers")
    assert not list(path.parent.glob("*"))


COMPILES = """
import sys
from attn_core.backends.shared.programs import operator_library
operator_library._command = lambda headers: [sys.argv[1]]
print(operator_library.compile_library(""))
"""
HOLDS = """
import sys, time
from pathlib import Path
from attn_core.backends.shared.programs import operator_library
with operator_library._alone_in(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""
COMPILER = """#!/bin/sh
echo compiled >> "$COMPILED"
sleep 2
echo library > "$2"
"""
"""Stands in for the compiler, and takes as long as another process needs to start."""


def test_of_several_processes_one_compiles_and_a_dead_one_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler, compiled = tmp_path / "compiler", tmp_path / "compiled"
    compiler.write_text(COMPILER)
    compiler.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COMPILED", str(compiled))
    path = operator_library.library_path()

    def started(code: str, argument: Path) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", code, str(argument)], stdout=subprocess.PIPE, text=True)

    with started(HOLDS, path.parent) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        waiting = [started(COMPILES, compiler) for _ in range(2)]
        holder.kill()
    assert [each.communicate(timeout=300)[0] for each in waiting] == [f"{path}\n"] * 2
    assert compiled.read_text() == "compiled\n" and path.read_text() == "library\n"
    assert list(path.parent.iterdir()) == [path]


SMALL = AttentionSpec(
    batch=2, q_len=9, kv_len=9, num_heads=4, num_kv_heads=2, head_dim=12, value_dim=12, dtype="float32", scale=0.25
)


def _forward(spec: AttentionSpec, inputs: Inputs, into: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = (tensor.transpose(1, 2) for tensor in inputs[:3])
    k, v = (torch.index_select(each, 1, torch.arange(4) // 2) for each in (k, v))
    out, lse = getattr(torch.ops.aten, FLASH)(q, k, v, 0.0, spec.causal, scale=spec.scale)
    return out.transpose(1, 2), lse


def _backward(
    spec: AttentionSpec, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, into: Any
) -> Gradients:
    q, k, v, out, dout = (tensor.transpose(1, 2) for tensor in (*inputs[:3], out, dout))
    k, v = (each.repeat_interleave(2, 1) for each in (k, v))
    backward = getattr(torch.ops.aten, f"{FLASH}_backward")
    dq, dk, dv = backward(dout, q, k, v, out, lse, 0.0, spec.causal, scale=spec.scale)
    dk, dv = (each.unflatten(1, (2, 2)).sum(2) for each in (dk, dv))
    return Gradients(*(each.transpose(1, 2) for each in (dq, dk, dv)))


KERNEL = rewrites.Kernel(_forward, _backward, rewrites.whole_eights)
"""torch's own kernel on the CPU, completed as the kernels on a GPU are: widths, sinks, the gradient of lse."""
FUNCTIONS = operator_recorder.Functions(partial(rewrites.forward, KERNEL), partial(rewrites.backward, KERNEL))


def in_xla(step: Any, results: Any, *operands: Any) -> Any:
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return jax.jit(lambda *x: jax.ffi.ffi_call(step.target, results)(*x, **step.attributes()))(*operands)


def test_sinks_and_their_gradient_are_not_rounded_to_the_dtype_of_q() -> None:
    spec = replace(SMALL, dtype="bfloat16", sinks=True, return_lse=True, needs_backward=True)
    program = operator_program.program(FUNCTIONS, spec, "backward", device="cpu")
    kinds = {buffer.name: buffer.dtype for buffer in program.buffers}
    assert kinds["dq"] == "bfloat16" and kinds["sinks"] == kinds["dsinks"] == "float32"
    (step,) = program.steps
    text = step.attributes()["operators"]
    assert (
        "aten::neg" in text and "_to_copy" not in text[text.index("aten::masked_fill Scalar") :]
    )  # the last operators


@pytest.mark.slow
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_xla_runs_operators_without_python(library: Path, sinks: bool, direction: str) -> None:
    assert jax_frontend.compile_operator_lane() == library and operator_library.missing() is None
    spec = replace(SMALL, causal=True, sinks=sinks, return_lse=True, needs_backward=direction == "backward")
    program = operator_program.program(FUNCTIONS, spec, direction, with_dlse=True, device="cpu")
    (step,) = program.steps
    draw = np.random.default_rng(0)
    arrays = {name: draw.normal(size=shape).astype(dtype) for name, shape, dtype, _ in program.buffers}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    inputs = Inputs(*(tensors.get(name) for name in Inputs._fields))
    out, lse = FUNCTIONS.forward(spec, inputs)
    expected: Any = (out, lse)
    if direction == "backward":
        arrays |= {"out": out.numpy(), "lse": lse.numpy()}
        expected = FUNCTIONS.backward(spec, inputs, out, lse, tensors["dout"], tensors["dlse"])
    results = [jax.ShapeDtypeStruct(program.buffers[at].shape, program.buffers[at].dtype) for at in step.writes]
    got = in_xla(step, results, *(arrays[program.buffers[at].name] for at in step.reads))
    assert len(got) == (2 if direction == "forward" else 3 + sinks)
    for one, other in zip(got, (each for each in expected if each is not None), strict=True):
        np.testing.assert_array_equal(one, other.numpy())


@pytest.mark.slow
def test_operators_take_every_kind_of_argument(library: Path) -> None:
    """Lists of tensors and of bools, None among indices, text, a device, a dtype; results in other layouts."""

    def run(x: torch.Tensor, at: torch.Tensor, into: torch.Tensor) -> None:
        picked = x[:, at]
        divided = torch.div(picked, 0.5, rounding_mode="floor")
        steps = torch.arange(3, device=x.device, dtype=torch.float32) + torch.zeros(2).sum()
        halves = torch.stack((divided, -picked)).to(torch.float64).unbind(0)
        into.copy_(torch.where(picked > 0, (halves[0] + steps).float(), float("-inf")))

    x, at = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32), np.array([4, 0, 2], np.int64)
    into = torch.empty(4, 3)
    run(torch.from_numpy(x), torch.from_numpy(at), into)
    with operator_recorder.without_memory():
        tensors = [torch.empty(4, 5), torch.empty(3, dtype=torch.int64), torch.empty(4, 3)]
        text = operator_recorder.record(lambda: run(*tensors), tensors)
    with jax.enable_x64(True):
        step = KernelStep(OPERATOR, (0, 1), (2,), lambda: None, lambda: {"operators": text})
        (got,) = in_xla(step, [jax.ShapeDtypeStruct((4, 3), jnp.float32)], x, at)
    np.testing.assert_array_equal(got, into.numpy())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2\naten::no_such_operator - t0 > -1 ~", "no_such_operator"),
        ("2\naten::neg - > -1 ~", "neg takes another number"),
        ("3\naten::neg - t0 > 2:2:1 ~", "another shape"),
    ],
)
def test_an_operator_that_fails_is_an_error_with_its_name(library: Path, text: str, message: str) -> None:
    step = KernelStep(OPERATOR, (0,), (1,), lambda: None, lambda: {"operators": text})
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(in_xla(step, [jax.ShapeDtypeStruct((3,), jnp.float32)], np.ones(3, np.float32)))


SPEC = AttentionSpec(
    batch=2, q_len=5, kv_len=7, num_heads=4, num_kv_heads=2, head_dim=64, value_dim=64, dtype="bfloat16", scale=0.5
)


def words_of(program: Any, operator: str) -> list[str]:
    """Returns the words of an operator's arguments in a program's text."""
    (step,) = program.steps
    (line,) = [line for line in step.attributes()["operators"].splitlines() if line.startswith(operator)]
    return line.split(" > ")[0].split()[2:]  # type: ignore[no-any-return]


def test_flash3s_program_fills_the_operators_arguments_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    library = torch.library.Library("attn_core_tests", "FRAGMENT")
    library.define(
        "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor(out!)? out, Tensor? cu_seqlens_q, "
        "Tensor? cu_seqlens_k, float? softmax_scale, int num_splits=1) -> (Tensor(out!), Tensor, Tensor, Tensor)"
    )
    operator = torch.ops.attn_core_tests.fwd.default
    monkeypatch.setattr(flash3, "operators", lambda: SimpleNamespace(forward=operator))
    monkeypatch.setattr(flash3, "lower", lambda spec: {"softmax_scale": spec.scale})
    monkeypatch.setattr(flash3, "build", lambda: SimpleNamespace(head_dims=()))
    monkeypatch.setattr(flash3.operator_program.program, "__defaults__", (False, False, "cpu"))
    packed = replace(SPEC, batch=1, documents=3, max_len_q=4, max_len_k=5)
    for spec, words in ((SPEC, "t0 t1 t2 n t3 n n f0.5 i1"), (packed, "t0 t1 t2 n t5 t3 t4 f0.5 i1")):
        assert words_of(flash3.program(spec, "forward"), "attn_core_tests::fwd") == words.split()
    sinks = flash3.program(replace(SPEC, sinks=True, return_lse=True, head_dim=60), "forward")
    assert words_of(sinks, "attn_core_tests::fwd")[4] == "n"  # sinks change the kernel's output
    assert [buffer.shape[-1] for buffer in sinks.buffers[:2]] == [64, 64]
    assert [sinks.buffers[place].name for place in sinks.steps[0].writes] == ["out", "lse"]


@pytest.mark.parametrize("module", [sdpa_efficient, sdpa_cudnn])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": True, "kv_len": 5},
        {"mask_shape": (2, 1, 5, 7)},
        {"bias_shape": (1, 4, 5, 7)},
        {"sinks": True},
        {"head_dim": 60, "value_dim": 60},
    ],
    ids=str,
)
def test_torchs_kernels_are_recorded_in_both_directions(
    module: Any, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.operator_program.program, "__defaults__", (False, False, "cpu"))
    monkeypatch.setattr(sdpa_cudnn, "build", lambda: SimpleNamespace(version=(9, 19)))
    monkeypatch.setattr("attn_core.backends.sdpa_cudnn.backend.zero_for_empty_rows", lambda: True)
    spec = replace(SPEC, **changes)
    for direction in ("forward", "backward"):
        program = module.BACKEND.program.make(replace(spec, needs_backward=direction == "backward"), direction)
        kernel, backward = (op.name() for op in module._kernels())
        words_of(program, backward if direction == "backward" else kernel)
        names = [program.buffers[at].name for at in program.steps[0].writes]
        expected = ["out"] if direction == "forward" else ["dq", "dk", "dv", *["dsinks"] * spec.sinks]
        assert names == expected


def test_tensors_without_memory_are_on_one_device_if_there_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    spec, devices = replace(SPEC, needs_backward=True), set()
    for current in (0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        with operator_recorder.without_memory():
            inputs = operator_program._inputs(spec, as_one=False, device=operator_recorder.FAKE_DEVICE)
            others = flash4_program._tensors(spec, ("forward", "backward")[current], with_dlse=False)
        devices |= {str(tensor.device) for tensor in (*inputs.values(), *others.values())}
    assert devices == {"cuda:0"}


def test_calls_that_no_operator_expresses_are_refused_from_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_library, "missing", lambda: None)
    assert operator_program.refuses(SPEC, "sm90") == ()
    for device, changes, word in (("gfx942", {}, "gfx942"), ("sm90", {"dropout": 0.1}, "dropout")):
        assert word in str(operator_program.refuses(replace(SPEC, **changes), device))


class Library:
    """A stand-in for ``jaxlib.gpu_triton``, whose descriptions are text."""

    create_array_parameter = staticmethod(lambda zero, alignment: f"*{alignment}")
    create_scalar_parameter = staticmethod(lambda value, kind: f"{kind}:{value}")
    TritonKernel = staticmethod(lambda *about: about)

    class TritonKernelCall:
        def __init__(self, kernel: Any, x: int, y: int, z: int, parameters: list[str]) -> None:
            self.text = f"{kernel} {(x, y, z)} {parameters}"

        def to_proto(self, name: str, metadata: bytes) -> bytes:
            return self.text.encode()


def compiled(**about: Any) -> SimpleNamespace:
    signature = {"x": "*bf16", "out": "*fp32", "one": "constexpr", "n": "i32", "scale": "fp32", "SIZE": "constexpr"}
    target = SimpleNamespace(arch=90)
    usual = {"name": "kernel", "num_warps": 4, "shared": 1024, "num_ctas": 1, "target": target, **about}
    return SimpleNamespace(
        src=SimpleNamespace(signature=signature), metadata=SimpleNamespace(**usual), asm={"ptx": "code"}
    )


def test_a_step_of_triton_passes_pointers_then_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_programs, "_jaxlib", lambda: Library)

    class Kernel:
        warmup = staticmethod(lambda *given, **more: compiled())

    step = triton_programs.step(
        Kernel(), (0,), (3,), (torch.bfloat16, torch.float32), ((7, 1, 1), (1, 9, 0.5), {"SIZE": 4})
    )
    assert (step.target, step.reads, step.writes) == (
        triton_programs.TARGET,
        (0,),
        (3,),
    ) and step.attributes is not None
    attributes = step.attributes()
    assert attributes["name"] == "kernel"
    expected = "('kernel', 4, 1, 1024, 'code', '', 90) (7, 1, 1) ['*16', '*16', 'i32:9', 'fp32:0.5', 'i64:0']"
    assert zlib.decompress(attributes["opaque"]).decode() == expected
    triton_programs._attributes.cache_clear()


@pytest.mark.parametrize("about", [{"global_scratch_size": 8}, {"launch_cooperative_grid": True}, {"num_ctas": 2}])
def test_triton_code_that_needs_more_than_pointers_and_numbers_is_refused(
    about: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_programs, "_jaxlib", lambda: Library)
    with pytest.raises(Unrecordable, match=next(iter(about))):
        triton_programs._call(compiled(**about), (1, 1, 1), (1, 9, 0.5), 2)


@pytest.mark.parametrize(("sinks", "dtype"), [(False, None), (True, None), (True, "int4")])
@pytest.mark.parametrize("sequences", [3, 400])
def test_a_paged_program_splits_the_keys_of_few_sequences(
    sequences: int, sinks: bool, dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(triton_programs, "_jaxlib", lambda: Library)
    monkeypatch.setattr(splitkv, "multiprocessors", lambda device: 132)
    splitkv._settings.cache_clear()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    paged = PagedKV(num_pages=900, page_size=16, width=64)
    if dtype is not None:
        paged = replace(paged, dtype=dtype, scales="token")
    spec = replace(
        SPEC,
        batch=1,
        q_len=sequences,
        kv_len=1024,
        documents=sequences,
        max_len_q=1,
        max_len_k=1024,
        paged=paged,
        sinks=sinks,
    )
    program = splitkv.program.__wrapped__(spec, "forward")
    splitkv._settings.cache_clear()
    names = [buffer.name for buffer in program.buffers]
    assert names[:5] == ["q", "k", "v", "block_table", "seq_lens"] and ("sinks" in names) is sinks
    read = [[program.buffers[place].name for place in step.reads] for step in program.steps]
    written = [[program.buffers[place].name for place in step.writes] for step in program.steps]
    last = "sinks" if sinks else "q"
    # q or the lengths stand for absent offsets, ranges, slopes, starts and scales
    scales = ["q", "q"] if dtype is None else ["k_scales", "v_scales"]
    assert read[0] == ["q", "k", "v", "block_table", "seq_lens", "seq_lens", last, "q", "q", "seq_lens", *scales]
    if sequences == 3:
        assert written == [[SCRATCH, SCRATCH], ["out", "lse"]] and read[1] == [SCRATCH, SCRATCH, last]
    else:
        assert written == [["out", "lse"]]


def test_a_paged_program_gets_sinks_in_float32() -> None:
    arrays = {"k_scales": jnp.zeros((4, 16, 1)), "sinks": jnp.zeros(4, jnp.bfloat16)}
    operands = splitkv.BACKEND.program.operands(SPEC, arrays)
    assert operands.keys() == {"sinks"} and operands["sinks"].dtype == "float32"


def test_xla_launches_the_pass_for_largest_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's arguments are the pointers and numbers of its program, in order."""
    kernel = pytest.importorskip("attn_core.backends.triton_jvp.kernels").row_maximum
    launched: list[tuple[Any, ...]] = []

    class Kernel:
        @staticmethod
        def warmup(*given: Any, grid: Any, **constants: Any) -> Any:
            launched.append((given, grid, constants))
            return compiled()

    monkeypatch.setattr(triton_programs, "_jaxlib", lambda: Library)
    monkeypatch.setattr(launches, "_maximum_kernel", Kernel)
    monkeypatch.setattr(triton_jvp, "_shared_memory", lambda device: 2**17)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    tables: dict[str, Any] = {"mask_shape": (1, 4, 1000, 1000), "alibi_shape": (4,), "bias_shape": (1, 1, 1, 1000)}
    packed = {"documents": 4, "max_len_q": 300, "max_len_k": 300, "q_len": 1000, "kv_len": 1000, "batch": 1}
    spec = row_maximum.spec_of(replace(SPEC, **packed, **tables, bias_dtype="float32"))
    names = ("q", "k", "v", "mask", "bias", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k")
    call = BridgedCall("row_maximum", "triton_jvp", "sm90", spec, names)
    lane = compiled_lane.lane_of.__wrapped__(call)
    triton_jvp._maximum_settings.cache_clear()
    assert lane.why == ()
    (step,) = lane.program.steps
    buffers = lane.program.buffers
    assert [buffers[place].name for place in step.reads] == [
        *("q", "k", "mask", "bias", "alibi_slopes", "q", "cu_seqlens_q", "cu_seqlens_k")
    ]
    assert buffers[step.writes[0]] == ("row_maximum", (spec.num_heads, 1000), "float32", False)
    ((given, grid, constants),) = launched
    parameters = [each.name for each in kernel.params]
    numbers = dict(zip(parameters, given, strict=False))
    assert set(parameters[len(given) :]) == set(constants) - {"num_warps", "num_stages"}
    assert grid == (4 * spec.num_heads * -(-300 // constants["QUERIES"]), 1, 1)
    assert (numbers["mask"], numbers["bias"]) == (torch.uint8, torch.float32)
    strides = {name: tuple(numbers[f"{name}_{axis}"] for axis in ("row", "head", "query", "key")) for name in MASKS}
    assert strides == {"mask": (0, 10**6, 1000, 1), "bias": (0, 0, 0, 1)}
    assert (numbers["q_row"], numbers["k_token"]) == (0, spec.num_kv_heads * spec.head_dim)
    other = compiled_lane.lane_of.__wrapped__(call._replace(backend="math", device="cpu"))
    assert other.program is None and other.why == ("math hands out no compiled kernels",)


MASKS = ("mask", "bias")
