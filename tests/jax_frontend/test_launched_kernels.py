"""Tests kernels that a text of operators launches: functions of TVM, here in Python and on a CPU."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("jax_tvm_ffi")
import jax
import torch
import tvm_ffi

from attn_core import AttentionSpec
from attn_core.backends.shared.programs import launched_kernels, operator_recorder
from attn_core.backends.shared.programs.kernel_programs import (
    OPERATOR,
    SCRATCH,
    Buffer,
    KernelProgram,
    KernelStep,
    Unrecordable,
)
from attn_core.call.tensors import Inputs
from jax_frontend.bridge import operator_lane

pytestmark = pytest.mark.slow
SPEC = AttentionSpec(
    **{"batch": 1, "q_len": 6, "kv_len": 6, "num_heads": 2, "num_kv_heads": 2, "head_dim": 4, "value_dim": 4},
    dtype="float32",
    needs_backward=True,
)
SHAPE = (1, 6, 2, 4)
ROWS = (1, 2, 6)


def step(name: str, reads: tuple[int, ...], writes: tuple[int, ...]) -> KernelStep:
    return KernelStep(f"test.{name}", reads, writes, lambda: None)


def program(spec: AttentionSpec, direction: str, with_dlse: bool = False, as_one: bool = False) -> KernelProgram:
    """Two kernels with scratch between them, that add up instead of attending; out has more channels than the call."""
    operands = [Buffer(name, SHAPE, "float32") for name in "qkv"]
    if direction == "forward":
        assert spec.return_lse
        wide = Buffer("out", (*SHAPE[:-1], 8), "float32")
        buffers = [*operands, Buffer(SCRATCH, SHAPE, "float32", zeros=True), wide, Buffer("lse", ROWS, "float32")]
        return KernelProgram(tuple(buffers), (step("sum", (0, 1, 3), (3,)), step("out", (3, 2), (4, 5))))
    saved = [Buffer("out", SHAPE, "float32"), Buffer("lse", ROWS, "float32"), Buffer("dout", SHAPE, "float32")]
    saved += [Buffer("dlse", ROWS, "float32")] if with_dlse else []
    gradients = [Buffer(name, SHAPE, "float32") for name in ("dq", "dk", "dv")]
    first = 3 + len(saved)
    reads = tuple(range(first))
    return KernelProgram((*operands, *saved, *gradients), (step("back", reads, (first, first + 1, first + 2)),))


def tensor_of(value: Any) -> torch.Tensor:
    """A float32 tensor in the memory of a kernel's argument, which says where it is and no more."""
    size = 4 * int(np.prod(value.shape))
    return torch.frombuffer((ctypes.c_char * size).from_address(value.data_ptr()), dtype=torch.float32).view(
        value.shape
    )


def add_q_and_k(*values: Any) -> None:
    q, k, _, total = map(tensor_of, values)
    total += q + k


def write_out(*values: Any) -> None:
    total, v, out, lse = map(tensor_of, values)
    out[..., :4], out[..., 4:] = total + v, 7.0
    lse.copy_(total.sum(-1).transpose(1, 2))


def write_gradients(*values: Any) -> None:
    *reads, dq, dk, dv = map(tensor_of, values)
    dout = reads[5]
    dq.copy_(2 * dout)
    dk.copy_(3 * dout)
    dv.copy_(dout if len(reads) == 6 else dout + reads[6].transpose(1, 2)[..., None])


KERNELS = {"test.sum": add_q_and_k, "test.out": write_out, "test.back": write_gradients}


@pytest.fixture
def functions(library: Path) -> Any:
    """The launches of ``program``'s kernels, which the library knows."""
    operator_lane.register()
    kept = {name: tvm_ffi.convert(kernel) for name, kernel in KERNELS.items()}
    operator_lane.keep_kernels(kept)
    yield launched_kernels.functions_of(program)
    operator_lane._kept.clear()


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def run(text: str, given: list[np.ndarray], results: list[tuple[int, ...]]) -> list[np.ndarray]:
    types = [jax.ShapeDtypeStruct(shape, np.float32) for shape in results]
    call = jax.jit(lambda *operands: jax.ffi.ffi_call(OPERATOR, types)(*operands, operators=text))
    return [np.asarray(each) for each in call(*given)]


def test_xla_launches_a_programs_kernels_among_operators(functions: Any) -> None:
    with operator_recorder.without_memory():
        q, k, v, out = (torch.empty(SHAPE) for _ in range(4))
        lse = torch.empty(ROWS)

        def record() -> None:
            result, of_rows = functions.forward(SPEC, Inputs(q * 2, k, v), (out, lse))
            assert of_rows is lse and result is not out  # the kernel's output is wider
            out.copy_(result)

        text = operator_recorder.record(record, [q, k, v, out, lse])
    assert text.count("attn_core_kernels::launch") == 2
    given = [draw(*SHAPE) + number for number in range(3)]
    actual, of_rows = run(text, given, [SHAPE, ROWS])
    total = 2 * given[0] + given[1]
    np.testing.assert_array_equal(actual, total + given[2])
    np.testing.assert_allclose(of_rows, total.sum(-1).swapaxes(1, 2), rtol=1e-6)


@pytest.mark.parametrize("with_dlse", [False, True])
def test_gradients_go_into_the_buffers_and_rows_without_keys_have_no_dlse(functions: Any, with_dlse: bool) -> None:
    with operator_recorder.without_memory():
        q, k, v, out, dout, dq, dk, dv = (torch.empty(SHAPE) for _ in range(8))
        lse, dlse = torch.empty(ROWS), torch.empty(ROWS)
        given, results = [q, k, v, out, lse, dout, *([dlse] if with_dlse else [])], [dq, dk, dv]

        def record() -> None:
            last = dlse if with_dlse else None
            found = functions.backward(SPEC, Inputs(q, k, v), out, lse, dout, last, [None, dk, dv])
            assert found.dk is dk and found.dv is dv and found.dq is not dq
            dq.copy_(found.dq)

        text = operator_recorder.record(record, [*given, *results])
    numbers = [draw(*each.shape) for each in given]
    numbers[4][:, :, 2] = -np.inf
    if with_dlse:
        numbers[6][:, :, 2] = np.nan
    actual = run(text, numbers, [SHAPE] * 3)
    of_rows = np.nan_to_num(numbers[6]).swapaxes(1, 2)[..., None] if with_dlse else 0
    for found, right in zip(actual, (2 * numbers[5], 3 * numbers[5], numbers[5] + of_rows), strict=True):
        np.testing.assert_array_equal(found, right.astype(np.float32))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"attributes": lambda: {}}, "a kernel that only XLA can launch"),
        ({"reads": (0, 1, 5)}, "a kernel that reads lse"),
    ],
)
def test_a_kernel_that_cannot_be_launched_is_refused(functions: Any, changed: dict[str, Any], why: str) -> None:
    def other(*about: Any) -> KernelProgram:
        buffers, (first, *rest) = program(*about)
        return KernelProgram(buffers, (first._replace(**changed), *rest))

    with operator_recorder.without_memory():
        q, k, v = (torch.empty(SHAPE) for _ in range(3))
        with pytest.raises(Unrecordable, match=why):
            launched_kernels.functions_of(other).forward(SPEC, Inputs(q, k, v))
        with pytest.raises(Unrecordable, match=r"q: a kernel for \[1, 6, 2, 4\] on \[1, 5, 2, 4\]"):
            functions.forward(SPEC, Inputs(q[:, :5], k, v))


def test_a_kernel_that_is_unknown_or_fails_is_named(functions: Any) -> None:
    text = "2\nattn_core_kernels::launch - stest.{} T0 T1 > -1 ~"
    for name, why in (
        ("nothing", "test.nothing is unknown in this process"),
        ("out", "test.out could not be launched"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=why):
            run(text.format(name), [draw(3)], [(3,)])
