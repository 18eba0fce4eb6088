"""Shows each known fault of known_bad.json on the kernel itself, and tests what selection makes of the rows.

A test of a fault passes while the kernel is wrong. Once upstream has mended it, the test turns red and asks for a
shorter range of versions. It is skipped with a reason if the kernel, the device or a faulty version is missing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from attn_core import AttentionSpec, NoBackendError, ShapeError, Target, backends, explain, select
from attn_core.backends.shared import known_bad, rewrites
from attn_core.backends.shared.known_bad import Condition, Row, holds, includes, numbers_of, rows_of
from attn_core.backends.support import Build
from attn_core.call.tensors import Inputs
from attn_core.selection import choice

ROWS = {row.name: row for row in known_bad.rows()}
SPEC = AttentionSpec(
    **{"batch": 1, "q_len": 128, "kv_len": 128, "num_heads": 2, "num_kv_heads": 2, "head_dim": 64, "value_dim": 64},
    dtype="bfloat16",
)


# The rows as data


@pytest.mark.parametrize(
    ("versions", "inside", "outside"),
    [
        ("", ["0", "9.26"], []),
        ("<9.26", ["9.25.9", "9"], ["9.26", "9.26.0", "10"]),
        (">=9.19,<9.25.1,!=9.24.1", ["9.19", "9.25.0", "9.24.2"], ["9.18.9", "9.24.1", "9.25.1"]),
        ("==2.2.0", ["2.2", "2.2.0"], ["2.2.1", "2.1.1"]),
        (">2,<=3", ["2.0.1", "3.0.0"], ["2.0", "3.0.1"]),
    ],
)
def test_ranges_of_versions(versions: str, inside: list[str], outside: list[str]) -> None:
    from packaging.specifiers import SpecifierSet

    for numbers, expected in ((inside, True), (outside, False)):
        for version in numbers:
            assert includes(versions, numbers_of(version)) is expected
            assert SpecifierSet(versions).contains(version) is expected, "a specifier as pip reads it"


def test_versions_are_read_as_numbers() -> None:
    assert numbers_of("2.13.0+cu130") == (2, 13, 0)
    assert numbers_of("4.0.0b36") == (4, 0, 0)
    assert numbers_of("unknown") == ()


def test_rows_are_those_of_a_backend_a_device_and_a_version() -> None:
    names = {row.name for row in rows_of("sdpa_cudnn", "sm90", (9, 19, 0))}
    assert names == {"cudnn-nan-dq", "cudnn-nan-one-query"}
    assert {row.name for row in rows_of("sdpa_cudnn", "sm90", (9, 26))} == {"cudnn-nan-one-query"}
    assert {row.name for row in rows_of("sdpa_cudnn", "sm103", (9, 20))} == {"cudnn-decoding-sm100"}
    assert rows_of("sdpa_cudnn", "sm120", (9, 20)) == rows_of("sdpa_cudnn", "cpu") == rows_of("math", "cpu") == ()
    assert {row.name for row in rows_of("sdpa_cudnn", "sm90")} == {*names, "cudnn-partial-tiles"}, "unknown: all faults"


def test_rows_about_a_backend_include_those_of_its_operators() -> None:
    names = {row.name for row in known_bad.rows_about("xformers", "sm90")}
    assert names == {"flash2-copies-dq-overflow", "flash2-windows-through-xformers"}
    assert rows_of("xformers", "sm90") == (), "other operators may run the call"
    assert known_bad.rows_about("sdpa_cudnn", "sm90") == rows_of("sdpa_cudnn", "sm90")


@pytest.mark.parametrize(
    ("condition", "fields", "expected"),
    [
        (Condition("kv_len % 128", "==", 64), {"kv_len": 192}, True),
        (Condition("kv_len % 128", "==", 64), {"kv_len": 128}, False),
        (Condition("lengths % 128", "!=", 0), {"q_len": 5}, True),
        (Condition("lengths % 128", "!=", 0), {}, False),
        (Condition("causal alone", "==", True), {"causal": True}, True),
        (Condition("causal alone", "==", True), {"causal": True, "mask_shape": (1, 1, 1, 128)}, False),
        (Condition("window", "==", "two-sided"), {"window": (3, 2)}, True),
        (Condition("window", "==", "two-sided"), {"window": (3, None)}, True),
        (Condition("window", "==", "causal window"), {"window": (3, 0)}, True),
        (Condition("window", "==", "none"), {"window": (500, 500)}, True),
        (Condition("offset", ">", 0), {"kv_len": 129}, True),
        (Condition("offset", ">", 0), {"kv_len": 129, "alignment": "top_left"}, False),
        (Condition("surplus queries", ">", 1), {"q_len": 130}, True),
        (Condition("surplus queries", ">", 1), {"documents": 2, "max_len_q": 2, "max_len_k": 128}, True),
        (Condition("mask elements", ">=", 2**31), {"q_len": 2**16, "kv_len": 2**15}, False),
        (
            Condition("mask elements", ">=", 2**31),
            {"q_len": 2**16, "kv_len": 2**15, "mask_shape": (1, 1, 2**16, 2**15)},
            True,
        ),
        (Condition("mask elements", ">=", 2**31), {"kv_len": 2**31, "mask_shape": (1, 1, 1, 2**31)}, False),
    ],
)
def test_conditions(condition: Condition, fields: dict[str, Any], expected: bool) -> None:
    assert holds(condition, replace(SPEC, **fields)) is expected


def test_selection_names_symptom_version_and_link() -> None:
    spec = replace(SPEC, kv_len=192, needs_backward=True)
    builds = (("sdpa_cudnn", Build("cuDNN 9.19.0", version=(9, 19, 0))),)
    target = Target("torch", "sm90", builds=builds)
    (why,) = explain(spec, target).reasons("sdpa_cudnn")
    row = ROWS["cudnn-nan-dq"]
    assert why.startswith("backward: kv_len=192, causal=False") and row.symptom in why
    assert "cuDNN 9.19.0, known bad in <9.26" in why and row.link in why
    with pytest.raises(NoBackendError) as refused:
        select(spec, target, "sdpa_cudnn")
    assert row.link in str(refused.value).replace("\n", " "), "a request by name is refused with the link, too"
    assert explain(replace(spec, needs_backward=False), target, "sdpa_cudnn").backend == "sdpa_cudnn"
    newer = (("sdpa_cudnn", Build("cuDNN 9.26.0", version=(9, 26, 0))),)
    assert explain(spec, Target("torch", "sm90", builds=newer), "sdpa_cudnn").backend == "sdpa_cudnn"


def test_choices_for_other_lengths_know_the_rows() -> None:
    """``choose`` serves calls that differ from an earlier one in lengths alone."""
    target = Target("torch", "sm90", builds=(("sdpa_cudnn", Build("cuDNN 9.19.0", version=(9, 19, 0))),))
    claimed: dict[str, bool] = {}
    chosen = [
        choice.choose(replace(SPEC, kv_len=kv_len, needs_backward=True), target, ("sdpa_cudnn",), claimed)
        for kv_len in (128, 192, 256)
    ]
    assert [each and each[0] for each in chosen] == ["sdpa_cudnn", None, "sdpa_cudnn"]


def test_a_backend_without_a_build_gets_the_version_of_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS["cudnn-nan-one-query"]._replace(
        backends=("math",), package="torch", versions=">=2", devices=("cpu",), direction="forward"
    )
    monkeypatch.setattr(known_bad, "rows", lambda: (row,))
    rows_of.cache_clear()
    backends.installed_build.cache_clear()
    try:
        build = backends.installed_build("math", "cpu")
        assert build is not None and build.version == numbers_of(torch.__version__)
        target = Target("torch", "cpu", builds=(("math", build),))
        spec = replace(SPEC, q_len=1)
        (why,) = choice.refusals("math", spec, target)
        assert why.startswith(f"q_len=1: {row.symptom} (torch {torch.__version__.split('+')[0]}, known bad in >=2; ")
        assert choice.refusals("math", SPEC, target) == ()
    finally:
        rows_of.cache_clear()
        backends.installed_build.cache_clear()


# The faults


def here() -> str:
    return "sm{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else "cpu"


class Fault:
    """A row whose kernel runs here, with a faulty version of its package."""

    def __init__(self, name: str, backend: str | None = None) -> None:
        """Skips the test if the device, the kernel or a faulty version is missing here."""
        self.row: Row = ROWS[name]
        device = "cpu" if self.row.devices == ("cpu",) else here()
        self.backend, _, self.operator = (backend or self.row.backends[0]).partition(":")
        if not known_bad.concerns(self.row, device, ()):
            pytest.skip(f"a fault on {' or '.join(self.row.devices)}; here is {device}")
        version, reason = backends.availability(self.backend, backends.kind_of(device))
        if reason is not None:
            pytest.skip(reason)
        build = backends.installed_build(self.backend, device)
        numbers = build.version if build is not None and build.version else numbers_of(version or "")
        self.version = ".".join(map(str, numbers))
        if not known_bad.concerns(self.row, device, numbers):
            pytest.skip(f"a fault of {self.row.package} {self.row.versions}; here is {self.version}")
        self.module: Any = backends.load(self.backend, backends.kind_of(device))
        if self.operator:
            kernel = import_module("attn_core.backends.xformers")._kernel(self.operator)
            self.module = SimpleNamespace(
                forward=partial(rewrites.forward, kernel), backward=partial(rewrites.backward, kernel)
            )

    def is_there(self, wrong: bool) -> None:
        """Fails if the kernel is right."""
        if not wrong:
            self.is_mended()

    def is_mended(self) -> NoReturn:
        """Fails with what to do."""
        package = f"{self.row.package} {self.version}"
        pytest.fail(f"{self.row.name}: mended upstream in {package}: shorten the row's versions in known_bad.json")

    def out(self, spec: AttentionSpec, *tensors: Any, **others: Any) -> Any:
        """The output of the backend's own forward, without selection."""
        return self.module.forward(spec, Inputs(*tensors, **others))[0]


def draw(spec: AttentionSpec, device: str = "cuda") -> list[Any]:
    """Random q, k and v of a spec."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = (
        (spec.batch, spec.q_len, spec.num_heads, spec.head_dim),
        (spec.batch, spec.kv_len, spec.num_kv_heads, spec.head_dim),
        (spec.batch, spec.kv_len, spec.num_kv_heads, spec.value_dim),
    )
    dtype = getattr(torch, spec.dtype)
    return [torch.randn(shape, device=device, generator=generator).to(dtype) for shape in shapes]


def right(spec: AttentionSpec, *tensors: Any) -> Any:
    """The output of ``math`` in float64."""
    wide = Inputs(*(tensor.double() for tensor in tensors))
    return backends.load("math").forward(replace(spec, dtype="float64"), wide)[0]


def differs(actual: Any, expected: Any) -> bool:
    """Whether an output is wrong by more than any rounding, or not finite."""
    return not bool((actual.double() - expected.double()).abs().max() < 0.1)


def negative_scores(spec: AttentionSpec) -> list[Any]:
    """q, k and v of a spec, with every score at about -120."""
    q, k, v = draw(spec)
    q, k = 0.1 * q, 0.1 * k
    q[..., 0], k[..., 0] = 1.0, -120 * spec.head_dim**0.5
    return [q, k, v]


def gradients(fault: Fault, spec: AttentionSpec, *tensors: Any) -> Any:
    """The gradients of the backend's own backward, for a dout of ones."""
    inputs = Inputs(*tensors)
    if fault.module.framework == "torch":
        out, lse = fault.module.forward(spec, inputs)
        return fault.module.backward(spec, inputs, out, lse, torch.ones_like(out), None)
    jax = pytest.importorskip("jax")
    arrays = Inputs(*(jax.numpy.asarray(tensor.float().cpu().numpy(), spec.dtype) for tensor in tensors))
    found = fault.module.backward(spec, arrays, None, None, jax.numpy.ones(spec.out_shape, spec.dtype), None)
    return [torch.tensor(jax.device_get(part).astype("float32")) for part in found[:3]]


@pytest.mark.cuda
@pytest.mark.parametrize("backend", ["sdpa_cudnn", "jax_cudnn"])
def test_cudnn_gives_nan_in_dq(backend: str) -> None:
    fault = Fault("cudnn-nan-dq", backend)
    spec = replace(SPEC, q_len=704, kv_len=704, needs_backward=True)
    fault.is_there(bool(gradients(fault, spec, *negative_scores(spec))[0].isnan().any()))


@pytest.mark.cuda
def test_cudnn_gives_nan_for_a_single_query() -> None:
    fault = Fault("cudnn-nan-one-query")
    spec = replace(SPEC, q_len=1, needs_backward=True)
    _, dk, dv, *_ = gradients(fault, spec, *negative_scores(spec))
    fault.is_there(bool(dk.isnan().any() or dv.isnan().any()))


@pytest.mark.cuda
def test_cudnn_decodes_wrongly_on_sm100() -> None:
    fault = Fault("cudnn-decoding-sm100")
    wrong = False
    for kv_len in (130, 777, 1536):
        spec = replace(
            SPEC, batch=64, q_len=1, kv_len=kv_len, num_heads=28, num_kv_heads=4, head_dim=128, value_dim=128
        )
        tensors = draw(spec)
        wrong = wrong or differs(fault.out(spec, *tensors), right(spec, *tensors))
    fault.is_there(wrong)


PARTIAL_TILES = """
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
q, k = (torch.empty_strided((1, 24, 261, 64), (400896, 16704, 64, 1), device="cuda", dtype=torch.bfloat16,
                            requires_grad=True) for _ in range(2))
v = torch.empty_strided((1, 24, 261, 64), (1202688, 64, 4608, 1), device="cuda", dtype=torch.bfloat16,
                        requires_grad=True)
with torch.cuda.stream(torch.cuda.Stream()), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
    for _ in range(10):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        out.backward(torch.zeros_like(out))
torch.cuda.synchronize()
"""


@pytest.mark.cuda
def test_cudnn_leaves_its_buffers_for_partial_tiles() -> None:
    fault = Fault("cudnn-partial-tiles")
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer")
    command = [sanitizer, "--tool=memcheck", sys.executable, "-c", PARTIAL_TILES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    fault.is_there("ERROR SUMMARY: 0 errors" not in done.stdout)


@pytest.mark.cuda
def test_the_efficient_kernel_reads_wrong_rows_of_large_masks() -> None:
    fault = Fault("efficient-large-masks")
    length = 2**16 + 128
    if torch.cuda.mem_get_info()[0] < 4 * length**2 + 2**32:
        pytest.skip("needs 21 GiB of free GPU memory; XLA_PYTHON_CLIENT_PREALLOCATE=false leaves more of it")
    spec = replace(SPEC, q_len=length, kv_len=length, num_heads=1, num_kv_heads=1, head_dim=8, value_dim=8)
    spec = replace(spec, bias_shape=(1, 1, length, length))
    bias = torch.zeros(spec.bias_shape, dtype=torch.bfloat16, device="cuda")
    bias[:, :, -64:, : length // 2] = -torch.inf  # the last rows see the second half of the keys, whose values are 1
    q, k, v = draw(spec)
    v[:, : length // 2], v[:, length // 2 :] = 0.0, 1.0
    fault.is_there(differs(fault.out(spec, q, k, v, bias=bias)[:, -64:], torch.ones((), device="cuda")))


OVERFLOW = """
import torch
from dataclasses import replace
from attn_core import AttentionSpec, backends
from attn_core.backends import xformers
from attn_core.call.tensors import Inputs
kernel = backends.load({backend!r}, "cuda")
if {operator!r}:
    xformers._choose_operator = lambda spec: {operator!r}
spec = AttentionSpec(batch=8300, q_len=1, kv_len=1, num_heads=16, num_kv_heads=16, head_dim=128, value_dim=128,
                     dtype="bfloat16", needs_backward=True)
q = torch.randn(8300, 1, 16, 128, device="cuda", dtype=torch.bfloat16)
out, lse = kernel.forward(spec, Inputs(q, q, q))
dv = kernel.backward(spec, Inputs(q, q, q), out, lse, torch.ones_like(out), None).dv
torch.cuda.synchronize()
assert (dv == 1).all()  # one key has all the weight
print("right")
"""


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("flash2-dq-overflow", "flash2"),
        ("flash2-copies-dq-overflow", "sdpa_flash"),
        ("flash2-copies-dq-overflow", "xformers:flash"),
    ],
)
def test_flash_kernels_overflow_in_the_sums_of_dq(name: str, backend: str) -> None:
    """In a process of its own, because an illegal memory access ends all work on the GPU."""
    fault = Fault(name, backend)
    if backend == "xformers:flash" and backends.availability("flash2", "cuda")[1] is None:
        pytest.skip("xformers runs the kernels of flash-attn, which is installed, instead of torch's")
    command = [sys.executable, "-c", OVERFLOW.format(backend=fault.backend, operator=fault.operator)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if "OutOfMemoryError" in done.stderr:
        pytest.skip("needs about 10 GiB of free GPU memory")
    assert done.stdout.strip() == "right" or "illegal memory access" in done.stderr or "AssertionError" in done.stderr
    fault.is_there(done.stdout.strip() != "right")


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("flash2-copy-windows", "sdpa_flash"),
        ("flash2-windows", "flash2"),
        ("flash2-windows-through-xformers", "xformers:flash"),
    ],
)
def test_flash_kernels_misplace_windows_of_surplus_queries(name: str, backend: str) -> None:
    fault = Fault(name, backend)
    spec = replace(SPEC, q_len=200, kv_len=100, window=(None, 150))
    tensors = draw(spec)
    fault.is_there(differs(fault.out(spec, *tensors), right(spec, *tensors)))


@pytest.mark.cuda
def test_the_efficient_gradient_misplaces_windows() -> None:
    fault = Fault("efficient-window-gradient")
    spec = replace(SPEC, q_len=64, kv_len=256, causal=True, window=(31, 0), needs_backward=True)
    tensors = draw(spec)
    wide = replace(spec, dtype="float64")
    inputs, math = Inputs(*(tensor.double() for tensor in tensors)), backends.load("math")
    expected = math.backward(wide, inputs, *(found := math.forward(wide, inputs)), torch.ones_like(found[0]), None)
    found = gradients(fault, spec, *tensors)
    fault.is_there(any(differs(one, other) for one, other in zip(found[:3], expected[:3], strict=True)))


@pytest.mark.cuda
def test_the_efficient_kernel_is_wrong_for_surplus_queries() -> None:
    fault = Fault("efficient-surplus-queries")
    spec = replace(SPEC, q_len=200, kv_len=100, causal=True)
    q, k, v = draw(spec)
    assert not differs(fault.out(spec, q, k, v), right(spec, q, k, v)), "our own call is right"
    bottom_right = 2
    out, *_ = torch.ops.aten._efficient_attention_forward(
        *(q, k, v, None, None, None, None, None, 0.0, bottom_right, False), scale=spec.scale
    )
    fault.is_there(differs(out, right(spec, q, k, v)))


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("sage-padding-keys", "sage"),
        ("sage-padding-keys-sm86", "sage"),
        ("sage-padding-keys-by-name", "sage_fp16_triton"),
    ],
)
def test_sage_counts_padding_keys(name: str, backend: str) -> None:
    fault = Fault(name, backend)
    # One key has all the weight. Each of the 63 keys that pad it has as much.
    spec = replace(SPEC, kv_len=65)
    q, k, v = draw(spec)
    fault.is_there(differs(fault.out(spec, 0.01 * q, k, v.fill_(1.0)), torch.ones((), device="cuda")))


@pytest.mark.cuda
@pytest.mark.parametrize("backend", ["sage", "sage_fp8_cuda_sm90"])
def test_sage_fp8_is_wrong_on_hopper(backend: str) -> None:
    fault = Fault("sage-fp8-sm90", backend)
    wrong = False
    for length in (1024, 1560, 4680):
        spec = replace(SPEC, q_len=length, kv_len=length, head_dim=128, value_dim=128)
        tensors = draw(spec)
        wrong = wrong or differs(fault.out(spec, *tensors), right(spec, *tensors))
    fault.is_there(wrong)


@pytest.mark.cuda
def test_sage_writes_to_the_keys() -> None:
    fault = Fault("sage-writes-k")
    import sageattention  # type: ignore[import-not-found]

    spec = SPEC
    q, k, v = draw(spec)
    kept = k.clone()
    fault.out(spec, q, k, v)
    assert torch.equal(k, kept), "our own call leaves k as it is"
    sageattention.sageattn(*(tensor.transpose(1, 2) for tensor in (q, k, v)))
    fault.is_there(not torch.equal(k, kept))


@pytest.mark.cuda
def test_cudnn_misreads_float32_masks() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    fault = Fault("cudnn-float32-masks")
    q, k, v = (tensor.transpose(1, 2) for tensor in draw(SPEC))
    mask = torch.full((128, 128), -torch.inf, device="cuda").triu(1)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    expected = right(replace(SPEC, causal=True), *(tensor.transpose(1, 2) for tensor in (q, k, v)))
    fault.is_there(differs(out.transpose(1, 2), expected))


@pytest.mark.cuda
def test_flash4_takes_minus_one_for_a_distance() -> None:
    fault = Fault("flash4-minus-one")
    from flash_attn.cute.interface import _flash_attn_fwd  # type: ignore[import-not-found]

    spec = replace(SPEC, causal=True)
    q, k, v = draw(spec)
    assert not differs(fault.out(spec, q, k, v), right(spec, q, k, v)), "our own call is right"
    out = _flash_attn_fwd(q, k, v, causal=True, window_size_left=-1, window_size_right=0)[0]
    fault.is_there(bool((out == 0).all()))


@pytest.mark.cuda
def test_torchs_cache_serves_programs_of_other_lengths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Block tables of 100 and then of 197 queries, with torch's own cache key and with ours."""
    from attn_core.backends.flex import operands, program
    from attn_core.backends.flex.blocks import mask_blocks, tables_of_blocks

    fault = Fault("flex-cached-lengths")

    def counts_of_two_blocks() -> list[int]:
        program.program.cache_clear()
        for q_len in (100, 197):
            spec = replace(SPEC, q_len=q_len, kv_len=7, mask_shape=(1, 1, 1, 7))
            mask = torch.ones((1, 1, 1, 7), dtype=torch.bool, device="cuda")
            mask[..., -1] = False
            with torch.no_grad():
                tables = operands.operands(spec, Inputs(*draw(spec), mask)).tables
        assert tables is not None
        assert tables_of_blocks([mask_blocks(mask)], None, 197, 7)[1].partial_count.item() == 2
        return [int(tables[0].partial_count.sum()), int(tables[1].partial_count.sum())]

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "ours"))
    assert counts_of_two_blocks() == [2, 2]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch's"))
    monkeypatch.setattr(program.Compiler, "__call__", lambda self, graph, examples: program.inductor(graph, examples))
    found = counts_of_two_blocks()
    program.program.cache_clear()
    fault.is_there(found != [2, 2])


def test_the_cpu_kernel_reads_past_the_keys() -> None:
    """Here the memory past the keys is our own, so that the result shows what was read."""
    from torch_frontend import attention

    fault = Fault("flash-cpu-long-values")
    memory = torch.full((1, 1, 6, 8), 7.0)
    memory[:, :, :5] = torch.randn(1, 1, 5, 8)
    q, k, v = torch.rand(1, 1, 3, 8), memory[:, :, :5], torch.randn(1, 1, 6, 8)
    out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    next_row = torch.softmax(q @ memory.mT / 8**0.5, -1) @ v
    fault.is_there(torch.allclose(out, next_row, atol=1e-5))
    with pytest.raises(ShapeError, match="v: "):
        attention(*(tensor.transpose(1, 2) for tensor in (q, k, v)))
