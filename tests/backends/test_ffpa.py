"""Tests FFPA: arguments, refusals, choice, and calls with a stand-in for its entry points.

The stand-in checks what the package checks, and computes with the math backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("jax")
from both_frontends import judge, reachable, run
from frameworks import replaced
from spec_strategies import Call, corners, make_call

import torch_frontend
from attn_core import AttentionSpec, Target, backends, explain
from attn_core.backends import ffpa
from attn_core.backends.shared.claims import unmet_claims
from attn_core.call.tensors import Inputs
from attn_core.selection import preference

math: Any = backends.load("math")

SPEC = AttentionSpec(
    batch=2, q_len=6, kv_len=10, num_heads=4, num_kv_heads=2, head_dim=512, value_dim=512, dtype="bfloat16"
)
PACKED = replace(SPEC, batch=1, documents=3, max_len_q=4, max_len_k=5)
OPEN = {"softmax_scale": 1 / 512**0.5, "causal": False, "window_size_left": None, "window_size_right": None}


def reasons(spec: AttentionSpec, device: str = "sm90") -> tuple[str, ...]:
    """Every reason of the claims and of the module's own rules."""
    claims = ffpa.BACKWARD if spec.needs_backward else ffpa.FORWARD
    return (*unmet_claims(claims, spec, device), *ffpa.refuses(spec, device, None))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (SPEC, {}),
        (replace(SPEC, causal=True), {"causal": True}),
        (replace(SPEC, window=(None, 0)), {"causal": True}),
        (replace(SPEC, causal=True, window=(3, None)), {"window_size_left": 3, "window_size_right": 0}),
        (replace(SPEC, window=(3, 2)), {"window_size_left": 3, "window_size_right": 2}),
        (replace(SPEC, window=(None, 2)), {"window_size_right": 2}),
        (replace(SPEC, scale=2.0), {"softmax_scale": 2.0}),
        (replace(SPEC, return_lse=True, sinks=True, deterministic=True), {}),
        (replace(SPEC, q_len=10, causal=True, alignment="top_left"), {"causal": True}),
        (PACKED, {"max_seqlen_q": 6, "max_seqlen_k": 10}),
    ],
)
def test_lower(spec: AttentionSpec, expected: dict[str, Any]) -> None:
    assert ffpa.lower(spec) == {**OPEN, **expected}
    assert reasons(spec) == ()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (replace(SPEC, softcap=2.0), "softcap=2.0: the FFPA kernel has none"),
        (replace(SPEC, head_dim=520, value_dim=520), "head_dim=520: the FFPA kernel stops at 512"),
        (
            replace(SPEC, causal=True, alignment="top_left"),
            "alignment=top_left with q_len 6 and kv_len 10: the FFPA kernel has bottom_right",
        ),
        (
            replace(SPEC, window=(3, 0), needs_backward=True),
            "window=(3, 0): the FFPA kernel has none",
        ),
        (replace(SPEC, batch=65536), "65536 batch rows or documents: the FFPA kernel stops at 65535"),
    ],
)
def test_refusals_name_the_value(spec: AttentionSpec, expected: str) -> None:
    (reason,) = reasons(spec)
    assert reason.endswith(expected)


def test_the_widths() -> None:
    widths = [ffpa.KERNEL.width(dim) for dim in (1, 257, 320, 321, 384, 448, 449, 512)]
    assert widths == [320, 320, 320, 384, 384, 448, 512, 512]


# Automatic choice


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("trained", [False, True])
def test_it_runs_long_rows_of_wide_heads(trained: bool, framework: str) -> None:
    wide = replace(SPEC, q_len=4096, kv_len=4096, causal=True, needs_backward=trained)
    assert explain(wide, Target(framework, "sm90")).backend == "ffpa"
    short = replace(wide, q_len=64, kv_len=64)
    assert explain(short, Target(framework, "sm90")).backend in ("sdpa_efficient", "jax_xla")


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_it_ranks_behind_the_kernels_of_narrow_heads(width: int, trained: bool, framework: str) -> None:
    spec = replace(SPEC, q_len=4096, kv_len=4096, head_dim=width, value_dim=width, needs_backward=trained)
    ranked = preference.order(spec, framework, "sm90")
    assert ranked.index("ffpa") > ranked.index("sdpa_efficient")
    assert "ffpa" not in preference.predicted(spec, framework, "sm90")


def test_training_of_wide_heads_in_jax_without_the_package_is_jaxs_own() -> None:
    """Which took a quarter of the time of ``sdpa_efficient``; forwards took as long."""
    spec = replace(SPEC, q_len=2048, kv_len=2048, causal=True)
    target = Target("jax", "sm90", unavailable=(("ffpa", "not installed"),))
    assert explain(spec, target).backend == "sdpa_efficient"
    assert explain(replace(spec, needs_backward=True), target).backend == "jax_xla"


# Whole calls, with a stand-in for the entry points


class StandIn:
    """The entry points of the package: what they assert of their arguments, and results by the math backend."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def forward(self, q: Any, k: Any, v: Any, *, out: Any, lse: Any, **how: Any) -> tuple[Any, Any]:
        spec, inputs = self._checked(q, k, v, how)
        results = math.forward(spec, inputs)
        assert not how["pack_gqa"] or 64 % spec.group_size == 0
        out = torch.empty(spec.out_shape, dtype=q.dtype) if out is None else out
        return out.copy_(results[0]), lse.copy_(results[1])

    def backward(
        self, q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, *, dlse: Any, dq: Any, dk: Any, dv: Any, **how: Any
    ) -> tuple[Any, ...]:
        assert how["window_size_left"] is None and (how["causal"] or how["window_size_right"] is None)
        spec, inputs = self._checked(q, k, v, how)
        assert lse.shape == spec.lse_shape and lse.is_contiguous() and out.shape == dout.shape == spec.out_shape
        assert dlse is None or dlse.isfinite().all()  # the kernel subtracts it from sums that it multiplies by weights
        gradients = math.backward(spec, inputs, out, lse, dout, dlse)
        buffers = [
            torch.empty_like(like) if buffer is None else buffer for like, buffer in zip((q, k, v), (dq, dk, dv))
        ]
        return tuple(buffer.copy_(gradient) for buffer, gradient in zip(buffers, gradients))

    def _checked(self, q: Any, k: Any, v: Any, how: dict[str, Any]) -> tuple[AttentionSpec, Inputs]:
        self.calls.append(how)
        assert q.shape[-1] in ffpa.WIDTHS and k.shape == v.shape and k.data_ptr() != v.data_ptr()
        for tensor in (q, k, v):
            assert not tensor.requires_grad and tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0
        ends = how.get("cu_seqlens_q"), how.get("cu_seqlens_k")
        sizes: dict[str, Any] = {"batch": len(q), "q_len": q.shape[-3], "kv_len": k.shape[-3]}
        if ends[0] is not None:
            for offsets, tensor, longest in zip(ends, (q, k), (how["max_seqlen_q"], how["max_seqlen_k"])):
                lengths = offsets.diff()
                assert offsets[0] == 0 and offsets[-1] == len(tensor) and offsets.dtype == torch.int32
                assert (lengths >= 0).all() and lengths.max() <= longest
            sizes |= {"batch": 1, "documents": len(ends[0]) - 1}
            sizes |= {"max_len_q": how["max_seqlen_q"], "max_len_k": how["max_seqlen_k"]}
        assert not how["causal"] or how["window_size_left"] is how["window_size_right"] is None
        spec = AttentionSpec(
            **sizes,
            **{
                "num_heads": q.shape[-2],
                "num_kv_heads": k.shape[-2],
                "head_dim": q.shape[-1],
                "value_dim": v.shape[-1],
            },
            **{"dtype": str(q.dtype).removeprefix("torch."), "causal": how["causal"], "scale": how["softmax_scale"]},
            window=(how["window_size_left"], how["window_size_right"]),
        )
        return spec, Inputs(q, k, v, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1])


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Lets the backend claim the CPU, with a stand-in for the package."""
    package = StandIn()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(ffpa, "entry_points", lambda: package)
    claims = {f"{way}_claims": replace(getattr(ffpa, way.upper()), devices=("cpu",)) for way in ("forward", "backward")}
    with replaced(backends.load("ffpa"), probe=lambda: "a stand-in", **claims):
        yield package


DENSE = {"batch": 2, "q_len": 7, "kv_len": 11, "num_heads": 6, "num_kv_heads": 3, "head_dim": 320, "value_dim": 320}
DOCUMENTS = {
    **{"num_heads": 4, "num_kv_heads": 2, "head_dim": 320, "value_dim": 320},
    "lengths": ((3, 0, 2, 4, 1), (2, 4, 0, 3, 1)),
}
CASES: dict[str, dict[str, Any]] = {
    "float16": {"dtype": "float16"},
    "causal": {"causal": True},
    "rows without keys": {"q_len": 11, "kv_len": 5, "causal": True},
    "rows without keys, with sinks": {"q_len": 11, "kv_len": 5, "causal": True, "sinks": True},
    "another width": {"head_dim": 331, "value_dim": 331, "causal": True},
    "narrow heads": {"head_dim": 19, "value_dim": 5},
    "wide values": {"head_dim": 300, "value_dim": 390, "scale": 0.05},
    "sinks": {"sinks": True, "extras_dtype": "float32"},
    "documents": {**DOCUMENTS, "causal": True},
    "documents with sinks": {**DOCUMENTS, "sinks": True},
    "tokens behind the last document": {**DOCUMENTS, "causal": True, "tail": (5, 3)},
    "queries behind the last document": {**DOCUMENTS, "tail": (5, 0), "sinks": True},
    "keys behind the last document": {**DOCUMENTS, "tail": (0, 4), "one_row": True},
}
WINDOWS: dict[str, dict[str, Any]] = {
    "window": {"window": (2, 1)},
    "a left side": {"window": (3, None)},
    "a right side": {"window": (None, 2)},
    "window beside the keys": {"q_len": 11, "kv_len": 4, "window": (1, 0)},
    "documents in a window": {**DOCUMENTS, "window": (1, 0)},
}


def case(name: str, **more: Any) -> Call:
    described = {**CASES, **WINDOWS}[name]
    sizes = {} if "lengths" in described else DENSE
    return make_call(3, **{"dtype": "bfloat16", **sizes, **described, **more})


@pytest.mark.sampled
@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("name", [*CASES, *WINDOWS])
def test_the_results_match_the_reference(name: str, framework: str, stand_in: StandIn) -> None:
    trained = [case(name, needs_backward=True, return_lse=True)] if name in CASES else []
    for call in (case(name), *trained):
        verdict = judge(framework, call, run(framework, call, "ffpa"))
        assert verdict.ok, verdict
    assert stand_in.calls


def test_the_corners_of_the_claims(stand_in: StandIn) -> None:
    for name, call in corners(ffpa.BACKWARD).items():
        verdict = judge("torch", call, run("torch", call, "ffpa"))
        assert verdict.ok, f"{name}: {verdict}"


def test_the_gradient_of_an_infinite_lse_does_not_reach_the_kernel(stand_in: StandIn) -> None:
    """Rows that see no key have an lse of -inf, whose square has a gradient of -inf."""
    q, k, v = (torch.randn(1, length, 2, 320).bfloat16().requires_grad_() for length in (5, 3, 3))
    found = []
    for backend in ("ffpa", "math"):
        out, lse = torch_frontend.attention(q, k, v, causal=True, return_lse=True, backend=backend)
        found.append(torch.autograd.grad(out.sum() + lse.square().sum(), (q, k, v)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=0.02, rtol=0.02)
        assert one.isfinite().all()


def test_keys_that_are_also_the_values(stand_in: StandIn) -> None:
    q, k = torch.randn(1, 5, 2, 512).bfloat16(), torch.randn(1, 5, 2, 512).bfloat16()
    both = torch_frontend.attention(q, k, k, backend="ffpa")
    assert torch.equal(both, torch_frontend.attention(q, k, k.clone(), backend="ffpa"))


# On a GPU, beside the generated suites


def judged_on_gpu(call: Call) -> None:
    missing = reachable("torch", "ffpa", "cuda")
    if missing:
        pytest.skip(missing)
    verdict = judge("torch", call, run("torch", call, "ffpa", "cuda"), "cuda")
    assert verdict.ok, verdict


HEADS = {"num_heads": 4, "num_kv_heads": 2, "causal": True, "needs_backward": True, "return_lse": True}
FORMS: dict[str, dict[str, Any]] = {
    "dense": {"batch": 2, "q_len": 193, "kv_len": 331},
    "packed": {"lengths": ((131, 0, 67, 5), (197, 3, 0, 131)), "tail": (11, 7)},
}


@pytest.mark.cuda
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width", [64, *ffpa.WIDTHS])
def test_every_width_on_a_gpu(width: int, form: str) -> None:
    judged_on_gpu(make_call(5, **FORMS[form], **HEADS, head_dim=width, value_dim=width, dtype="bfloat16"))


@pytest.mark.cuda
def test_float16_on_a_gpu() -> None:
    judged_on_gpu(make_call(5, **FORMS["dense"], **HEADS, head_dim=512, value_dim=512, dtype="float16"))


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("window", "form"), [((70, 0), "dense"), ((70, 9), "dense"), ((None, 9), "dense"), ((70, 0), "packed")]
)
@pytest.mark.parametrize("width", [320, 512])
def test_windows_on_a_gpu(window: Any, form: str, width: int) -> None:
    forward = {**HEADS, "causal": False, "needs_backward": False, "window": window}
    judged_on_gpu(make_call(5, **FORMS[form], **forward, head_dim=width, value_dim=width, dtype="bfloat16"))


@pytest.mark.cuda
@pytest.mark.parametrize("heads", [(8, 4), (6, 2)])
def test_equal_bits_on_every_run_on_a_gpu(heads: tuple[int, int]) -> None:
    sizes = {"batch": 2, "q_len": 1500, "kv_len": 1500, "num_heads": heads[0], "num_kv_heads": heads[1]}
    more = {"head_dim": 512, "value_dim": 512, "dtype": "bfloat16", "causal": True, "needs_backward": True}
    call = make_call(5, **sizes, **more, deterministic=True)
    judged_on_gpu(call)
    first, *others = (run("torch", call, "ffpa", "cuda") for _ in range(4))
    assert all(np.array_equal(first[name], other[name]) for other in others for name in first)
