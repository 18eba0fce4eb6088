"""Tests programs that call torch's operators or Triton's kernels: their steps, and the compiled library on a CPU."""

from __future__ import annotations

import zlib
from collections import namedtuple
from dataclasses import replace
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
from attn_core.backends.flash3 import program as flash3_program
from attn_core.backends.shared import operator_library, triton_programs
from attn_core.backends.shared.kernel_programs import OPERATOR, SCRATCH, Place, Unrecordable, operator_step
from attn_core.backends.triton_splitkv import backend as splitkv
from jax_frontend.bridge import operator_lane

FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


def test_a_step_says_the_operators_arguments_in_words() -> None:
    arguments = (Place(4), None, True, False, -3, 0.1, Place(7))
    step = operator_step("library::name.overload", arguments, (2, 4), (7, 9), {1: 9})
    assert (step.target, step.reads, step.writes) == (OPERATOR, (2, 4), (7, 9)) and step.attributes is not None
    assert step.attributes() == {
        **{"name": "library::name", "overload": "overload"},
        **{"arguments": "t1 n b1 b0 i-3 f0.1 t2", "copies": "1:3"},
    }
    with pytest.raises(Unrecordable, match="an operator takes list"):
        operator_step("library::name", ([1],), (), (0,), {})


def test_the_library_is_named_by_what_it_depends_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = operator_library.library_path()
    assert path.is_relative_to(tmp_path) and path.parent.stat().st_mode & 0o77 == 0
    assert "compile_operator_lane()" in str(operator_library.missing())
    version = operator_library.metadata.version
    monkeypatch.setattr(operator_library.metadata, "version", lambda name: version(name) + "x")
    assert operator_library.library_path() != path
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


@pytest.mark.slow
def test_xla_calls_an_operator_without_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compiles the library for this machine, as a user would."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = jax_frontend.compile_operator_lane()
    assert jax_frontend.compile_operator_lane() == path and operator_library.missing() is None
    operator_lane.register()
    q, k, v = (np.random.default_rng(seed).normal(size=(2, 4, 9, 16)).astype(np.float32) for seed in range(3))
    arguments = (Place(0), Place(1), Place(2), 0.0, True, None, 0.25)
    results = jax.ShapeDtypeStruct(q.shape, jnp.float32), jax.ShapeDtypeStruct((2, 4, 9), jnp.float32)

    def call(name: str, arguments: tuple[Any, ...] = arguments, copies: dict[int, int] | None = None) -> Any:
        step = operator_step(name, arguments, (0, 1, 2), (3, 4), {0: 3, 1: 4} if copies is None else copies)
        assert step.attributes is not None
        return jax.jit(lambda *qkv: jax.ffi.ffi_call(step.target, results)(*qkv, **step.attributes()))(q, k, v)  # type: ignore[misc]

    expected = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *map(torch.from_numpy, (q, k, v)), 0.0, True, scale=0.25
    )
    for one, other in zip(call(FLASH), expected, strict=True):
        np.testing.assert_array_equal(one, other.numpy())
    wrong: list[tuple[str, tuple[Any, ...], dict[int, int] | None, str]] = [
        ("aten::no_such_operator", arguments, None, "no_such_operator"),
        (FLASH, arguments[:2], None, "for_cpu"),
        (FLASH, arguments, {1: 3}, "another shape or dtype"),
    ]
    for name, given, copies, message in wrong:
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(call(name, given, copies))


SPEC = AttentionSpec(
    batch=2, q_len=5, kv_len=7, num_heads=4, num_kv_heads=2, head_dim=64, value_dim=64, dtype="bfloat16", scale=0.5
)
Argument = namedtuple("Argument", "name default_value")


def test_flash3s_program_fills_the_operators_arguments_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("q", "k", "v", "k_new", "out", "cu_seqlens_q", "cu_seqlens_k", "softmax_scale", "num_splits")
    schema = SimpleNamespace(
        name="flash_attn_3::fwd",
        overload_name="",
        arguments=[Argument(n, 1 if n == "num_splits" else None) for n in names],
    )
    operator = SimpleNamespace(_schema=schema)
    monkeypatch.setattr(flash3_program, "operators", lambda: SimpleNamespace(forward=operator))
    for spec, words in (
        (SPEC, "t0 t1 t2 n t3 n n f0.5 i1"),
        (replace(SPEC, batch=1, documents=3, max_len_q=4, max_len_k=5), "t0 t1 t2 n t5 t3 t4 f0.5 i1"),
    ):
        program = flash3_program.program(spec, {"softmax_scale": 0.5}, as_one=False)
        (step,) = program.steps
        assert step.attributes is not None and step.attributes()["arguments"] == words
        assert [program.buffers[place].name for place in step.writes] == ["out"]
        assert step.attributes()["copies"] == ""
        whole = flash3_program.program(replace(spec, return_lse=True), {"softmax_scale": 0.5}, as_one=False)
        (step,) = whole.steps
        assert [whole.buffers[place].name for place in step.writes] == ["out", "lse"]
        assert step.attributes is not None and step.attributes()["copies"] == f"1:{len(step.reads) + 1}"
    with pytest.raises(Unrecordable, match="one array"):
        flash3_program.program(SPEC, {}, as_one=True)


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


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("sequences", [3, 400])
def test_a_paged_program_splits_the_keys_of_few_sequences(
    sequences: int, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(triton_programs, "_jaxlib", lambda: Library)
    monkeypatch.setattr(splitkv, "_multiprocessors", lambda device: 132)
    splitkv._settings.cache_clear()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    paged = PagedKV(num_pages=900, page_size=16, width=64)
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
    assert read[0] == ["q", "k", "v", "block_table", "seq_lens", "seq_lens", last, "q"]
    if sequences == 3:
        assert written == [[SCRATCH, SCRATCH], ["out", "lse"]] and read[1] == [SCRATCH, SCRATCH, last]
    else:
        assert written == [["out", "lse"]]
