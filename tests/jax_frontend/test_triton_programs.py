"""Tests programs of Triton's kernels, which XLA launches: their steps, buffers and numbers."""

from __future__ import annotations

import zlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax_tvm_ffi")
import jax.numpy as jnp
import torch

from attn_core import AttentionSpec, PagedKV
from attn_core.backends import triton_jvp
from attn_core.backends import triton_splitkv as splitkv
from attn_core.backends.shared import kernel_programs
from attn_core.backends.shared.kernel_programs import SCRATCH, Unrecordable
from attn_core.backends.triton_jvp import launches
from attn_core.selection import row_maximum
from jax_frontend.bridge import compiled_lane
from jax_frontend.bridge.bridged_call import BridgedCall

SPEC = AttentionSpec(
    batch=2, q_len=5, kv_len=7, num_heads=4, num_kv_heads=2, head_dim=64, value_dim=64, dtype="bfloat16", scale=0.5
)


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
    monkeypatch.setattr(kernel_programs, "_jaxlib", lambda: Library)

    class Kernel:
        warmup = staticmethod(lambda *given, **more: compiled())

    step = kernel_programs.step(
        Kernel(), (0,), (3,), (torch.bfloat16, torch.float32), ((7, 1, 1), (1, 9, 0.5), {"SIZE": 4})
    )
    assert (step.target, step.reads, step.writes) == (
        kernel_programs.TARGET,
        (0,),
        (3,),
    ) and step.attributes is not None
    attributes = step.attributes()
    assert attributes["name"] == "kernel"
    expected = "('kernel', 4, 1, 1024, 'code', '', 90) (7, 1, 1) ['*16', '*16', 'i32:9', 'fp32:0.5', 'i64:0']"
    assert zlib.decompress(attributes["opaque"]).decode() == expected
    kernel_programs._attributes.cache_clear()


@pytest.mark.parametrize("about", [{"global_scratch_size": 8}, {"launch_cooperative_grid": True}, {"num_ctas": 2}])
def test_triton_code_that_needs_more_than_pointers_and_numbers_is_refused(
    about: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_programs, "_jaxlib", lambda: Library)
    with pytest.raises(Unrecordable, match=next(iter(about))):
        kernel_programs._call(compiled(**about), (1, 1, 1), (1, 9, 0.5), 2)


@pytest.mark.parametrize(("sinks", "dtype"), [(False, None), (True, None), (True, "int4")])
@pytest.mark.parametrize("sequences", [3, 400])
def test_a_paged_program_splits_the_keys_of_few_sequences(
    sequences: int, sinks: bool, dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(kernel_programs, "_jaxlib", lambda: Library)
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

    monkeypatch.setattr(kernel_programs, "_jaxlib", lambda: Library)
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
