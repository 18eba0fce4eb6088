"""Tests SageAttention's backends without a GPU: arguments and refusals as data, and the arithmetic around its
functions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from oracle_cases import make

from attn_core import AttentionSpec, Target, backends
from attn_core.backends import sage
from attn_core.backends.support import Build
from attn_core.selection import refusals

NAMES = ("sage", "sage_fp16_cuda", "sage_fp16_triton", "sage_fp8_cuda", "sage_fp8_cuda_sm90")
SPEC = AttentionSpec(
    **{"batch": 2, "q_len": 5, "kv_len": 64, "num_heads": 6, "num_kv_heads": 3, "head_dim": 64, "value_dim": 64},
    **{"dtype": "bfloat16", "scale": 0.125},
)
SQUARE = {"q_len": 70, "kv_len": 70, "causal": True}
FIRST, SECOND = (
    Build("sageattention 1.0.6", ("lse",), version=(1, 0, 6)),
    Build("sageattention 2.2.0", version=(2, 2, 0)),
)


PADDED = "kv_len=63, causal=False: without causal, the Triton kernel counts the keys that pad kv_len"


def on(device: str, build: Build | None = None) -> Target:
    return Target("torch", device, builds=() if build is None else tuple((name, build) for name in NAMES))


def reasons(name: str, target: Target, **requested: Any) -> tuple[str, ...]:
    return refusals(name, replace(SPEC, **requested), target)


PLAIN = {
    "function": "sageattn",
    "arguments": {"tensor_layout": "NHD", "is_causal": False, "sm_scale": 0.125, "smooth_k": False},
    **{"rows": None, "repeat": 1},
}


@pytest.mark.parametrize(
    ("name", "requested", "expected", "arguments"),
    [
        ("sage", {}, {}, {}),
        ("sage", SQUARE, {"rows": 128}, {"is_causal": True}),
        ("sage", {"causal": True, "q_len": 1}, {}, {}),
        ("sage", {"return_lse": True}, {"repeat": 2}, {"return_lse": True}),
        ("sage_fp16_triton", SQUARE, {"function": "sageattn_qk_int8_pv_fp16_triton", "rows": 128}, {"is_causal": True}),
        (
            "sage_fp16_cuda",
            {**SQUARE, "return_lse": True},
            {"function": "sageattn_qk_int8_pv_fp16_cuda"},
            {"is_causal": True, "return_lse": True, "pv_accum_dtype": "fp32"},
        ),
        ("sage_fp8_cuda", {}, {"function": "sageattn_qk_int8_pv_fp8_cuda"}, {"pv_accum_dtype": "fp32+fp32"}),
        (
            "sage_fp8_cuda_sm90",
            {"scale": 0.3},
            {"function": "sageattn_qk_int8_pv_fp8_cuda_sm90"},
            {"sm_scale": 0.3, "pv_accum_dtype": "fp32+fp32"},
        ),
    ],
)
def test_lower(name: str, requested: dict[str, Any], expected: dict[str, Any], arguments: dict[str, Any]) -> None:
    module: Any = backends.load(name)
    merged = {**PLAIN, **expected, "arguments": {**PLAIN["arguments"], **arguments}}
    assert module.lower(replace(SPEC, **requested)) == merged


def test_never_chosen_automatically() -> None:
    for name in NAMES:
        module: Any = backends.load(name)
        assert module.forward_claims.approximate and module.backward_claims is None
        assert not any(record.preference for record in backends.records(name).values())


@pytest.mark.parametrize(
    ("target", "requested", "says"),
    [
        (on("sm90", FIRST), {"kv_len": 63}, PADDED),
        (on("sm90"), {"kv_len": 63}, PADDED),
        (on("sm86", SECOND), {"kv_len": 63}, PADDED),
        (on("sm90", FIRST), {"causal": True}, "causal with q_len 5 and kv_len 64: SageAttention needs as many keys as"),
        (on("sm90", FIRST), {"return_lse": True}, "return_lse: SageAttention (sageattention 1.0.6) has no log-sum-exp"),
        (on("sm90", FIRST), {"window": (3, 0)}, "window=(3, 0): SageAttention (sageattention 1.0.6) has none"),
        (on("sm90", SECOND), {"softcap": 9.0}, "softcap=9.0: SageAttention has none"),
        (on("sm90", SECOND), {"mask_shape": (1, 1, 1, 64)}, "mask of shape [1, 1, 1, 64]: SageAttention has none"),
        (on("sm90", SECOND), {"sinks": True}, "sinks: SageAttention has none"),
        (on("sm90", SECOND), {"head_dim": 129}, "head_dim=129: SageAttention stops at 128"),
        (on("sm90", SECOND), {"dtype": "float32"}, "dtype float32: SageAttention takes bfloat16, float16"),
        (on("sm90", SECOND), {"needs_backward": True}, "backward: SageAttention has no gradient"),
        (
            on("sm90", SECOND),
            {"kv_len": 2**22},
            "3221225472 elements in q, k or v: SageAttention counts them in 32 bits",
        ),
        (
            on("sm90", FIRST),
            {"batch": 1, "documents": 2, "max_len_q": 5, "max_len_k": 64},
            "seq_info with packed documents: SageAttention (sageattention 1.0.6) has none",
        ),
    ],
)
def test_refusals_name_value_and_limit(target: Target, requested: dict[str, Any], says: str) -> None:
    assert any(why.startswith(says) for why in reasons("sage", target, **requested)), reasons(
        "sage", target, **requested
    )


def test_supported_calls_are_not_refused() -> None:
    for requested in ({}, SQUARE, {"causal": True, "q_len": 1}, {"head_dim": 96, "value_dim": 40}, {"kv_len": 128}):
        assert reasons("sage", on("sm90", FIRST), **requested) == ()
    assert reasons("sage", on("sm80", SECOND), kv_len=63, return_lse=True) == ()
    assert reasons("sage_fp16_cuda", on("sm90", SECOND), kv_len=63, return_lse=True) == ()
    assert reasons("sage_fp16_triton", on("sm90", SECOND), kv_len=63) != ()
    assert reasons("sage_fp8_cuda", on("sm90")) == ("device sm90: SageAttention's fp8 CUDA kernel needs sm89",)
    for build in (None, Build("sageattention 2.3.0", version=(2, 3, 0))):
        assert reasons("sage_fp8_cuda_sm90", on("sm90", build), kv_len=63) == ()
    for name in ("sage", "sage_fp8_cuda_sm90"):  # which is the kernel that sageattn itself chooses there
        assert "SageAttention/issues/320" in reasons(name, on("sm90", SECOND))[0]


class Core:
    """Stands for ``sageattention.core``, with flags for the compiled kernels."""

    SM80_ENABLED, SM90_ENABLED = True, False


@pytest.mark.parametrize("installed", ["1.0.6", "2.2.0+cu130"])
def test_the_build_lists_the_installed_kernels(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import ModuleType

    package: Any = ModuleType("sageattention")
    package.core, package.sageattn = Core, print
    if installed.startswith("2"):
        for function in sage.FUNCTIONS.values():
            setattr(package, function.name, print)
    monkeypatch.setitem(sys.modules, "sageattention", package)
    monkeypatch.setitem(sys.modules, "sageattention.core", package.core)
    monkeypatch.setattr("importlib.metadata.version", lambda name: installed)
    assert sage.probe() == installed
    if installed == "1.0.6":
        assert sage.build() == FIRST
        with pytest.raises(ImportError, match=r"sageattention 1\.0\.6 has no sageattn_qk_int8_pv_fp16_triton"):
            backends.load("sage_fp16_triton").probe()  # type: ignore[union-attr]
        return
    assert sage.build() == Build("sageattention 2.2.0+cu130", version=(2, 2, 0))
    assert backends.load("sage_fp16_cuda").probe() == installed  # type: ignore[union-attr]
    with pytest.raises(ImportError, match="cuda_sm90 was not compiled into this sageattention"):
        backends.load("sage_fp8_cuda_sm90").probe()  # type: ignore[union-attr]


# The arithmetic around the functions, with a stand-in that has the faults of the real ones

torch = pytest.importorskip("torch")
import kernel_stand_ins
from direct_calls import assert_right, judged, ran, tensors
from kernel_stand_ins import Score


def stand_in(q: Any, k: Any, v: Any, *, triton: bool, is_causal: bool, sm_scale: float, **rest: Any) -> Any:
    """Exact in float64, but counts padded keys and writes to its k, as the Triton kernels do."""
    assert rest.pop("tensor_layout") == "NHD" and rest.pop("smooth_k") is False
    return_lse = rest.pop("return_lse", False)
    rows, keys = q.shape[1], k.shape[1]
    assert q.shape[-1] in (64, 128) and not torch.is_grad_enabled()
    assert not is_causal or (rows == keys and (keys % 128 == 0 or not triton))
    wide = torch.nn.functional.pad(k, (0, 0, 0, 0, 0, -keys % 64)) if triton else k
    seen = torch.ones(rows, wide.shape[1], dtype=torch.bool)
    padded = torch.nn.functional.pad(v, (0, 0, 0, 0, 0, wide.shape[1] - keys))
    out, lse = kernel_stand_ins.forward(q, wide, padded, seen.tril() if is_causal else seen, Score(sm_scale))
    k.zero_()
    return (out.to(q.dtype), lse.float()) if return_lse else out.to(q.dtype)


CASES: dict[str, dict[str, Any]] = {
    "plain": {"kv_len": 64},
    "causal": {"q_len": 7, "causal": True},
    "causal, more than a block": {"batch": 1, "q_len": 130, "kv_len": 130, "causal": True},
    "causal of a block": {"batch": 1, "q_len": 128, "kv_len": 128, "causal": True, "num_kv_heads": 9},
    "wide heads": {"kv_len": 64, "head_dim": 96, "value_dim": 70},
    "one query": {"q_len": 1, "kv_len": 128, "causal": True},
}


@pytest.mark.parametrize("with_lse", [False, True], ids=["no log-sum-exp", "log-sum-exp"])
@pytest.mark.parametrize("name", ["sage", "sage_fp16_triton", "sage_fp16_cuda"])
@pytest.mark.parametrize("case", CASES)
def test_results_match_the_reference(case: str, name: str, with_lse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = backends.load(name)
    triton = name != "sage_fp16_cuda"

    def function(requested: str) -> Any:
        def run(*operands: Any, pv_accum_dtype: str = "", **arguments: Any) -> Any:
            return stand_in(*operands, triton=triton, **arguments)

        return run

    monkeypatch.setattr(sage, "_function", function)
    made = make({**CASES[case], "return_lse": with_lse}, "float32")
    assert module.refuses(made.spec, "sm90", FIRST) == ()
    inputs = tensors(made.inputs, "float32")
    keys = inputs.k.clone()
    lse = assert_right(module, made, inputs).lse
    assert torch.equal(inputs.k, keys), "the caller's k has been changed"
    assert with_lse or lse.isnan().all()


def test_the_stand_in_shows_the_fault_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sage, "_function", lambda name: lambda *a, **kw: stand_in(*a, triton=True, **kw))
    made = make({"kv_len": 63}, "float32")
    assert any("kv_len=63" in why for why in refusals("sage", made.spec, on("sm90", FIRST)))
    assert not judged(made, ran(sage.BACKEND, made)).ok
