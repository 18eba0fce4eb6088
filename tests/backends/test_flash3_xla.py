"""Tests FlashAttention 3 as custom calls of XLA: arguments, refusals, choice, loading, and calls with a stand-in."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
jax = pytest.importorskip("jax")
import flash3_handlers
import jax.numpy as jnp
from both_frontends import judge, reachable, run
from frameworks import replaced
from jax.export import DisabledSafetyCheck
from jax.sharding import AxisType, PartitionSpec
from spec_strategies import Call, corners, make_call

import jax_frontend
from attn_core import AttentionSpec, NoBackendError, SpecError, Target, backends, explain
from attn_core.backends import flash3_xla
from attn_core.backends.shared.claims import unmet_claims
from attn_core.selection import preference

SPEC = AttentionSpec(
    batch=2, q_len=6, kv_len=10, num_heads=4, num_kv_heads=2, head_dim=16, value_dim=16, dtype="bfloat16"
)
PACKED = replace(SPEC, batch=1, documents=3, max_len_q=4, max_len_k=5)
TRAINED = replace(SPEC, needs_backward=True)
OPEN = {"softmax_scale": 0.25, "is_causal": False, "window_size_left": -1, "window_size_right": -1}


def reasons(spec: AttentionSpec, device: str = "sm90") -> tuple[str, ...]:
    """Every reason of the claims and of the module's own rules."""
    claims = flash3_xla.BACKWARD if spec.needs_backward else flash3_xla.FORWARD
    return (*unmet_claims(claims, spec, device), *flash3_xla.refuses(spec, device, None))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (SPEC, {}),
        (replace(SPEC, causal=True), {"is_causal": True, "window_size_right": 0}),
        (replace(SPEC, causal=True, window=(3, None)), {"window_size_left": 3, "window_size_right": 0}),
        (replace(SPEC, window=(3, 0)), {"window_size_left": 3, "window_size_right": 0}),
        (replace(SPEC, window=(None, 0)), {"is_causal": True, "window_size_right": 0}),
        (replace(SPEC, window=(None, 2)), {"window_size_right": 2}),
        (replace(SPEC, window=(0, None)), {"window_size_left": 0}),
        (replace(SPEC, window=(10**12, 0)), {"window_size_left": 16, "window_size_right": 0}),
        (replace(SPEC, scale=2.0, dtype="float16"), {"softmax_scale": 2.0}),
        (replace(SPEC, head_dim=11, value_dim=5), {}),
        (replace(SPEC, sinks=True, return_lse=True), {}),
        (replace(SPEC, deterministic=True), {}),
        (replace(SPEC, q_len=10, causal=True, alignment="top_left"), {"is_causal": True, "window_size_right": 0}),
        (PACKED, {"max_seqlen": 4, "max_seqlen_k": 5}),
    ],
)
def test_lower(spec: AttentionSpec, expected: dict[str, Any]) -> None:
    assert flash3_xla.lower(spec) == {**OPEN, **expected}
    assert reasons(spec) == reasons(replace(spec, needs_backward=True, return_lse=False, deterministic=False)) == ()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (replace(SPEC, softcap=2.0), "softcap=2.0: the FlashAttention 3 kernel for XLA has none"),
        (
            replace(SPEC, mask_shape=(2, 1, 6, 10)),
            "mask of shape [2, 1, 6, 10]: the FlashAttention 3 kernel for XLA has none",
        ),
        (replace(SPEC, dropout=0.5), "dropout=0.5: the FlashAttention 3 kernel for XLA has none"),
        (
            replace(SPEC, head_dim=264, value_dim=264),
            "head_dim=264: the FlashAttention 3 kernel for XLA stops at 256",
        ),
        (
            replace(SPEC, causal=True, alignment="top_left"),
            "alignment=top_left with q_len 6 and kv_len 10: the FlashAttention 3 kernel for XLA has bottom_right",
        ),
        (
            replace(TRAINED, deterministic=True),
            "deterministic=True: the FlashAttention 3 kernel for XLA has none",
        ),
        (
            replace(TRAINED, return_lse=True),
            "return_lse with gradients: the FlashAttention 3 kernel for XLA takes no gradient of the log-sum-exp",
        ),
        (
            replace(SPEC, batch=65536),
            "65536 batch rows or documents: the FlashAttention 3 kernel for XLA stops at 65535",
        ),
        (
            replace(TRAINED, num_heads=32, num_kv_heads=8, q_len=2**18, kv_len=2**18),
            "backward: q_len=262144: the FlashAttention 3 kernel for XLA counts the sums of a gradient in 32 bits",
        ),
        (
            replace(TRAINED, batch=1, kv_len=2**23),
            "backward: kv_len=8388608: the FlashAttention 3 kernel for XLA counts the sums of a gradient in 32 bits",
        ),
    ],
)
def test_refusals_name_the_value(spec: AttentionSpec, expected: str) -> None:
    assert reasons(spec) == (expected,)


def test_long_rows_that_the_kernel_counts_are_not_refused() -> None:
    long = replace(SPEC, num_heads=32, num_kv_heads=8, q_len=2**18, kv_len=2**18)
    assert reasons(long) == reasons(replace(long, batch=1, needs_backward=True)) == ()
    assert reasons(SPEC, "sm100") == ("device sm100: the FlashAttention 3 kernel for XLA needs sm90",)


# Automatic choice in JAX without torch

WITHOUT_TORCH = tuple(
    (name, "not available") for name in backends.names() if backends.load(name, "cuda").framework == "torch"
)
LAYER = replace(
    SPEC, batch=4, q_len=4096, kv_len=4096, num_heads=16, num_kv_heads=4, head_dim=128, value_dim=128, causal=True
)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ({}, "flash3_xla"),
        ({"dtype": "float16"}, "flash3_xla"),
        ({"head_dim": 256, "value_dim": 256}, "flash3_xla"),
        ({"head_dim": 64, "value_dim": 64}, "flash3_xla"),
        ({"sinks": True}, "flash3_xla"),
        ({"batch": 1, "documents": 9, "max_len_q": 1024, "max_len_k": 1024}, "flash3_xla"),
        ({"q_len": 1024}, "flash3_xla"),
        ({"mask_shape": (4, 1, 4096, 4096)}, "jax_cudnn"),
        ({"softcap": 30.0}, "jax_xla"),
        ({"dtype": "float32"}, "jax_xla"),
    ],
)
def test_the_choice_without_torch(changes: dict[str, Any], chosen: str, trained: bool) -> None:
    target = Target("jax", "sm90", WITHOUT_TORCH)
    assert explain(replace(LAYER, **changes, needs_backward=trained), target).backend == chosen


def test_the_choice_of_a_window_without_torch() -> None:
    """Of a forward: cuDNN's model, which saw no windows, predicts less time for training than cuDNN takes."""
    window = replace(LAYER, window=(1023, 0))
    assert explain(window, Target("jax", "sm90", WITHOUT_TORCH)).backend == "flash3_xla"
    long = replace(LAYER, q_len=8192, window=(1023, 0), needs_backward=True)  # which cuDNN refuses
    assert explain(long, Target("jax", "sm90", WITHOUT_TORCH)).backend == "flash3_xla"


def test_the_choice_without_torch_elsewhere() -> None:
    assert explain(LAYER, Target("jax", "sm80", WITHOUT_TORCH)).backend == "jax_cudnn"
    here = Target("jax", "sm90", (*WITHOUT_TORCH, ("flash3_xla", "not available")))
    assert explain(LAYER, here).backend == "jax_cudnn"
    assert "runs in JAX only" in explain(LAYER, Target("torch", "sm90"), "flash3_xla").reasons("flash3_xla")


def test_torchs_kernels_with_the_same_bits_come_first() -> None:
    assert preference.order(LAYER, "jax", "sm90")[:2] == ("flash3", "flash3_xla")
    trained = preference.order(replace(LAYER, needs_backward=True), "jax", "sm90")
    assert trained.index("flash4") < trained.index("flash3_xla") < trained.index("jax_cudnn")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"q_len": 1}, False),  # flash3 splits the keys
        ({"q_len": 64, "batch": 64}, False),  # flash3 packs the heads of a group
        ({"batch": 1, "q_len": 256}, False),
        ({"batch": 1, "q_len": 256, "kv_len": 512}, True),
        ({"batch": 1, "documents": 99, "max_len_q": 128, "max_len_k": 4096}, True),
        ({"batch": 1, "documents": 99, "max_len_q": 2, "max_len_k": 4096}, False),
    ],
)
def test_the_models_are_of_calls_with_the_same_tiles(changes: dict[str, Any], expected: bool) -> None:
    spec = replace(LAYER, **changes)
    assert flash3_xla.modelled(spec) is expected
    assert ("flash3_xla" in preference.predicted(spec, "jax", "sm90")) is expected


# The library


class Libraries:
    """Installed distributions, and the libraries that the loader finds, by their names."""

    def __init__(self, folder: Path, versions: dict[str, str]) -> None:
        self.folder, self.versions, self.loaded = folder, versions, []
        self.symbols = [f"dew_flash3_mha_{handler}" for handler in flash3_xla.HANDLERS]
        self.runtimes = ["libcudart.so.13"]
        (folder / flash3_xla.LIBRARY).touch()

    def find(self, name: str) -> ModuleSpec | None:
        if name.startswith("nvidia."):
            raise ModuleNotFoundError(name)
        module = ModuleSpec(name, None, is_package=True)
        module.submodule_search_locations = [str(self.folder)]
        return module if name == "dew_flash_attn" and self.versions else None

    def load(self, path: str) -> Any:
        name = Path(path).name
        if name.startswith("libcudart") and path not in self.runtimes:
            raise OSError(f"{name}: cannot open shared object file")
        self.loaded.append(name)
        return SimpleNamespace(_name=path, **dict.fromkeys(self.symbols, "function"))


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Libraries]:
    found = Libraries(tmp_path, {"dew-flash-attn-cu13": "0.3.6", "jax-cuda13-plugin": "0.11.2"})
    monkeypatch.setattr(flash3_xla, "_version", lambda name: found.versions.get(name))
    monkeypatch.setattr(flash3_xla, "find_spec", found.find)
    monkeypatch.setattr(flash3_xla.ctypes, "CDLL", found.load)
    monkeypatch.setattr(jax.ffi, "pycapsule", lambda symbol: symbol)
    registered: list[tuple[str, str]] = []
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda name, _, platform: registered.append((name, platform)))
    found.registered = registered
    flash3_xla.register.cache_clear()
    yield found
    flash3_xla.register.cache_clear()


def test_the_library_is_loaded_alone_and_its_handlers_registered_once(libraries: Libraries) -> None:
    assert [flash3_xla.probe(), flash3_xla.probe()] == ["dew-flash-attn-cu13 0.3.6"] * 2
    assert libraries.loaded == ["libcudart.so.13", "libdew_flash_attn3.so"]
    assert libraries.registered == [(name, "CUDA") for name in flash3_xla.CUSTOM_CALLS]
    assert flash3_xla.CUSTOM_CALLS[:2] == ("attn_core_flash3_fwd", "attn_core_flash3_bwd")
    checks = list(jax_frontend.export_checks())
    assert all(DisabledSafetyCheck.custom_call(name) in checks for name in flash3_xla.CUSTOM_CALLS)


def test_the_wheel_for_cuda_12(libraries: Libraries) -> None:
    libraries.versions = {"dew-flash-attn-cu12": "0.3.7", "jax-cuda12-plugin": "0.11.2"}
    libraries.runtimes = ["libcudart.so.12"]
    assert flash3_xla.probe() == "dew-flash-attn-cu12 0.3.7"


def test_the_runtime_of_nvidias_packages(libraries: Libraries, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> ModuleSpec | None:
        module = ModuleSpec(name, None, is_package=True)
        module.submodule_search_locations = ["/packages/" + name.replace(".", "/")]
        return libraries.find(name) if name == "dew_flash_attn" else module

    monkeypatch.setattr(flash3_xla, "find_spec", find)
    libraries.runtimes = ["/packages/nvidia/cu13/lib/libcudart.so.13"]
    assert flash3_xla.probe() == "dew-flash-attn-cu13 0.3.6"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"versions": {}}, "neither dew-flash-attn-cu13 nor dew-flash-attn-cu12 is installed"),
        (
            {"versions": {"dew-flash-attn-cu12": "0.3.6", "jax-cuda13-plugin": "0.11.2"}},
            "dew-flash-attn-cu12 needs jax-cuda12-plugin, and JAX has jax-cuda13-plugin",
        ),
        ({"runtimes": []}, "libcudart.so.13 was not found; jax[cuda13] installs it"),
        (
            {"symbols": ["dew_flash3_mha_fwd"]},
            "dew-flash-attn-cu13 0.3.6: libdew_flash_attn3.so has no dew_flash3_mha_bwd",
        ),
        ({"folder": Path("/nowhere")}, "the package dew_flash_attn has no libdew_flash_attn3.so"),
    ],
)
def test_what_is_missing_is_said(libraries: Libraries, changes: dict[str, Any], expected: str) -> None:
    for name, value in changes.items():
        setattr(libraries, name, value)
    with pytest.raises(ImportError, match=f"^{re.escape(expected)}$"):
        flash3_xla.probe()
    assert libraries.registered == [] or "has no dew_flash3" in expected


# The programs


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash3_xla, "register", lambda: None)


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """Lets the backend claim the CPU."""
    claims = {
        f"{way}_claims": replace(getattr(flash3_xla, way.upper()), devices=("cpu",)) for way in ("forward", "backward")
    }
    with replaced(backends.load("flash3_xla"), probe=lambda: "a stand-in", **claims):
        yield


@pytest.fixture
def stand_in(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash3_xla, "_call", flash3_handlers.call)


def test_the_custom_calls_of_a_dense_program(on_cpu: None, without_library: None) -> None:
    q, k, v = (jax.ShapeDtypeStruct((2, n, h, 12), jnp.bfloat16) for n, h in ((6, 4), (10, 2), (10, 2)))

    def loss(*qkv: Any) -> Any:
        return jax_frontend.attention(*qkv, causal=True, window=(3, 0), backend="flash3_xla").astype(jnp.float32).sum()

    text = lowered(jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, v))
    assert calls_in(text) == {
        "attn_core_flash3_fwd": (
            "(tensor<2x6x4x16xbf16>, tensor<2x10x2x16xbf16>, tensor<2x10x2x16xbf16>) -> "
            "(tensor<2x6x4x16xbf16>, tensor<2x4x6xf32>, tensor<1x1x1x1xf32>, tensor<1x1x1xf32>)"
        ),
        "attn_core_flash3_bwd": (
            "(tensor<2x6x4x16xbf16>, tensor<2x6x4x16xbf16>, tensor<2x10x2x16xbf16>, tensor<2x10x2x16xbf16>, "
            "tensor<2x6x4x16xbf16>, tensor<2x4x6xf32>) -> (tensor<2x6x4x16xbf16>, tensor<2x10x2x16xbf16>, "
            "tensor<2x10x2x16xbf16>, tensor<1584xf32>, tensor<1584xf32>)"
        ),
    }
    for attribute in ("is_causal = false", "window_size_left = 3 : i64", "window_size_right = 0 : i64"):
        assert text.count(attribute) == 2
    assert text.count("softmax_scale = 0.2886751345948") == 2 and "max_seqlen" not in text


def test_the_custom_calls_of_a_packed_program(on_cpu: None, without_library: None) -> None:
    q = jax.ShapeDtypeStruct((9, 2, 64), jnp.float16)
    cu = jax.ShapeDtypeStruct((3,), jnp.int32)

    def loss(q: Any, cu: Any) -> Any:
        info = jax_frontend.SeqInfo(cu, cu, 5, 5)
        return jax_frontend.attention(q, q, q, seq_info=info, causal=True, backend="flash3_xla").sum()

    text = lowered(jax.jit(jax.grad(loss)).trace(q, cu))
    wide = "tensor<9x2x64xf16>"
    calls = calls_in(text)
    offsets = re.findall(r"tensor<(\d+)xi32>", calls["attn_core_flash3_varlen_fwd"])
    assert len(set(offsets)) == 1 and calls["attn_core_flash3_varlen_fwd"].startswith(
        f"({wide}, {wide}, {wide}, tensor<"
    )
    assert calls["attn_core_flash3_varlen_bwd"].startswith(f"({', '.join([wide] * 5)}, tensor<2x9xf32>, tensor<")
    scratch = 2 * (9 + 128 * int(offsets[0]))
    assert calls["attn_core_flash3_varlen_bwd"].endswith(f"tensor<{scratch}xf32>, tensor<{scratch}xf32>)")
    assert text.count("is_causal = true") == text.count("max_seqlen_k = ") == 2


def lowered(traced: Any) -> str:
    return str(traced.lower(lowering_platforms=("cuda",)).as_text())


def calls_in(text: str) -> dict[str, str]:
    """The types of each of our custom calls in a program, by its name."""
    return dict(re.findall(r"custom_call @(attn_core_flash3_\w+)\(.* : (\(.*\) -> \(.*\))", text))


# Whole calls, with a stand-in for the handlers

DENSE = {"batch": 2, "q_len": 7, "kv_len": 11, "num_heads": 6, "num_kv_heads": 3, "head_dim": 13, "value_dim": 13}
DOCUMENTS = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "value_dim": 8,
    "lengths": ((3, 0, 2, 4, 1), (2, 4, 0, 3, 1)),
}
CASES = {
    "float16": {"dtype": "float16"},
    "causal": {"causal": True},
    "rows without keys": {"q_len": 11, "kv_len": 5, "causal": True},
    "rows without keys, with sinks": {"q_len": 11, "kv_len": 5, "causal": True, "sinks": True},
    "window": {"window": (2, 1), "scale": 0.7},
    "wide window": {"window": (10, 6)},
    "window beside the keys": {"q_len": 11, "kv_len": 4, "window": (1, 0)},
    "narrow values": {"head_dim": 19, "value_dim": 5},
    "wide values": {"head_dim": 5, "value_dim": 19},
    "sinks": {"sinks": True, "extras_dtype": "float32"},
    "documents": {**DOCUMENTS, "causal": True},
    "documents in a window": {**DOCUMENTS, "window": (1, 0)},
    "documents with sinks": {**DOCUMENTS, "sinks": True},
    "tokens behind the last document": {**DOCUMENTS, "causal": True, "tail": (5, 3)},
    "queries behind the last document": {**DOCUMENTS, "tail": (5, 0), "sinks": True},
    "keys behind the last document": {**DOCUMENTS, "tail": (0, 4), "one_row": True},
}


def case(name: str, **more: Any) -> Call:
    sizes = {} if "lengths" in CASES[name] else DENSE
    return make_call(3, **{"dtype": "bfloat16", **sizes, **CASES[name], **more})


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_the_results_match_the_reference(name: str, stand_in: None) -> None:
    for call in (case(name, return_lse=True), case(name, needs_backward=True)):
        verdict = judge("jax", call, run("jax", call, "flash3_xla", rounding_matters=False))
        assert verdict.ok, verdict


def test_the_corners_of_the_claims(stand_in: None) -> None:
    for name, call in corners(backends.load("flash3_xla").forward_claims).items():
        verdict = judge("jax", call, run("jax", call, "flash3_xla", rounding_matters=False))
        assert verdict.ok, f"{name}: {verdict}"


def arrays(call: Call) -> tuple[Any, Any, Any]:
    return tuple(jnp.asarray(array, call.spec.dtype) for array in call.inputs[:3])


def attend(*qkv: Any, **options: Any) -> Any:
    return jax_frontend.attention(*qkv, backend="flash3_xla", **options)


@pytest.mark.parametrize("sinks", [False, True])
def test_vmap_gives_each_elements_results(sinks: bool, stand_in: None) -> None:
    """Folded into the batch without sinks; with them, whose gradients would be summed, one after another."""
    q, k, v = (jnp.stack([array, array[::-1], 2 * array]) for array in arrays(case("causal")))
    extras = {"sinks": jnp.arange(6.0) - 3} if sinks else {}

    def loss(q: Any, k: Any, v: Any, extras: Any) -> Any:
        return (attend(q, k, v, causal=True, **extras).astype(jnp.float32) ** 2).sum()

    both = jax.value_and_grad(loss, (0, 1, 2, 3))
    mapped = jax.jit(jax.vmap(both, (0, 0, None, None)))(q, k, v[0], extras)
    alone = [jax.jit(both)(q[n], k[n], v[0], extras) for n in range(3)]
    for actual, *expected in zip(*map(jax.tree.leaves, (mapped, *alone)), strict=True):
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (actual, jnp.stack(expected))), rtol=2e-2)


def test_vmap_of_packed_documents(stand_in: None) -> None:
    q, k, v = (jnp.stack([array, 2 * array]) for array in arrays(case("documents")))
    offsets = jnp.array([[0, 3, 10], [0, 7, 9]], jnp.int32)

    def one(q: Any, k: Any, v: Any, cu: Any) -> Any:
        return attend(q, k, v, seq_info=jax_frontend.SeqInfo(cu, cu, 10, 10), causal=True)

    mapped = jax.jit(jax.vmap(one))(q, k, v, offsets)
    for n in range(2):
        np.testing.assert_array_equal(mapped[n], jax.jit(one)(q[n], k[n], v[n], offsets[n]))
    assert not np.asarray(mapped[1, 9:]).any()  # no document has the last token


def test_a_mesh_splits_the_call(stand_in: None) -> None:
    q, k, v = arrays(case("causal"))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    rows = PartitionSpec("data")

    def gradients(*qkv: Any) -> Any:
        return jax.grad(lambda *x: attend(*x, causal=True).astype(jnp.float32).sum(), (0, 1, 2))(*qkv)

    expected = jax.jit(gradients)(q, k, v)
    split = jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=rows, out_specs=rows))(q, k, v)
    for actual, whole in zip(split, expected, strict=True):
        np.testing.assert_array_equal(actual, whole)


def test_forward_mode_is_refused_by_name_and_runs_on_other_operations(stand_in: None) -> None:
    q, k, v = arrays(case("causal"))

    def loss(q: Any, **options: Any) -> Any:
        return jax_frontend.attention(q, k, v, **options).astype(jnp.float32).sum()

    for derivative in (jax.jvp, lambda f, *x: jax.jvp(jax.grad(f), *x)):
        with pytest.raises((NoBackendError, SpecError), match="flash3_xla"):
            derivative(partial(loss, backend="flash3_xla"), (q,), (q,))
        derivative(partial(loss, backend=("flash3_xla", "jax_xla")), (q,), (q,))


def test_a_gradient_of_the_log_sum_exp_is_refused(stand_in: None) -> None:
    q, k, v = arrays(case("causal"))
    with pytest.raises(NoBackendError, match=r"takes no\s+gradient of the log-sum-exp"):
        jax.grad(lambda q: attend(q, k, v, return_lse=True)[1].sum())(q)


# On a GPU, beside the generated suites

WIDTHS = (40, 64, 96, 128, 192, 256)
MANY = ((1, 0, 2, 0, 3) * 250, (2, 1, 0, 0, 3) * 250)
"""The lengths of more documents than one block of the kernel's preparation counts (992), most of them short."""


def judged_on_gpu(call: Call) -> None:
    missing = reachable("jax", "flash3_xla", "cuda")
    if missing:
        pytest.skip(missing)
    verdict = judge("jax", call, run("jax", call, "flash3_xla", "cuda"), "cuda")
    assert verdict.ok, verdict


@pytest.mark.cuda
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_on_a_gpu(width: int, dtype: str, packed: bool) -> None:
    sizes: dict[str, Any] = {"batch": 2, "q_len": 193, "kv_len": 331}
    if packed:
        sizes = {"lengths": ((131, 0, 67, 5), (197, 3, 0, 131)), "tail": (11, 7)}
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": width, "value_dim": width}
    judged_on_gpu(make_call(5, **sizes, **heads, dtype=dtype, causal=True, needs_backward=True))


@pytest.mark.cuda
@pytest.mark.parametrize("window", [None, (2, 1)])
def test_many_short_documents_on_a_gpu(window: Any) -> None:
    heads = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 64, "value_dim": 64, "dtype": "bfloat16"}
    judged_on_gpu(make_call(5, MANY, **heads, window=window, causal=window is None, needs_backward=True))


@pytest.mark.cuda
def test_on_a_gpu_nothing_imports_the_package_and_forwards_repeat() -> None:
    call = make_call(
        5,
        batch=4,
        q_len=1500,
        kv_len=1500,
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,
        value_dim=128,
        dtype="bfloat16",
        causal=True,
        return_lse=True,
    )
    judged_on_gpu(call)
    first, *others = (run("jax", call, "flash3_xla", "cuda") for _ in range(4))
    assert all(np.array_equal(first[name], other[name]) for other in others for name in first)
    assert "dew_flash_attn" not in sys.modules


BESIDE_TORCH: dict[str, dict[str, Any]] = {
    "dense": {"q_len": 1000, "kv_len": 1000, "causal": True},
    "window": {"q_len": 1000, "kv_len": 1300, "window": (200, 0)},
    "wide heads": {"q_len": 700, "kv_len": 700, "causal": True, "head_dim": 256, "value_dim": 256},
    "rows without keys": {"q_len": 700, "kv_len": 300, "causal": True},
    "documents": {"lengths": ((400, 0, 333, 267), (400, 128, 205, 267)), "causal": True},
}


@pytest.mark.cuda
@pytest.mark.parametrize("name", BESIDE_TORCH)
def test_a_forward_has_the_bits_of_flash3_in_torch(name: str) -> None:
    """Two builds of the same sources, where neither splits the keys: see ``modelled``."""
    for framework, backend in (("torch", "flash3"), ("jax", "flash3_xla")):
        if missing := reachable(framework, backend, "cuda"):
            pytest.skip(missing)
    sizes = {"num_heads": 16, "num_kv_heads": 4, "head_dim": 128, "value_dim": 128, **BESIDE_TORCH[name]}
    call = make_call(5, **({} if "lengths" in sizes else {"batch": 4}), **sizes, dtype="bfloat16", return_lse=True)
    in_torch, in_jax = run("torch", call, "flash3", "cuda"), run("jax", call, "flash3_xla", "cuda")
    assert all(np.array_equal(in_torch[result], in_jax[result]) for result in ("out", "lse"))
