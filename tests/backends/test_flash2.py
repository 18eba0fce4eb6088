"""Tests flash-attn 2: the arguments of the kernel, what is refused, and the arithmetic around a stand-in for the
kernel."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from attn_core import AttentionSpec, Target, backends, selection
from attn_core.backends import flash2
from attn_core.backends.shared import rewrites
from attn_core.backends.support import Build
from attn_core.call.masks import band
from attn_core.call.tensors import Inputs
from attn_core.correctness import accuracy, reference

torch = pytest.importorskip("torch")
import kernel_stand_ins
from direct_calls import assert_right, assert_writes_into, judged, ran, tensors
from oracle_cases import fill, make

SPEC = AttentionSpec(
    batch=2, q_len=5, kv_len=7, num_heads=6, num_kv_heads=3, head_dim=64, value_dim=64, dtype="bfloat16", scale=0.25
)
PACKED = {"batch": 1, "q_len": 12, "kv_len": 14, "documents": 6, "max_len_q": 6, "max_len_k": 5}
PLAIN = {
    **{"dropout_p": 0.0, "softmax_scale": 0.25, "causal": False, "window_size_left": -1, "window_size_right": -1},
    **{"softcap": 0.0, "deterministic": False, "empty_rows": False, "shifted_lse": False},
}


def spec_of(**changes: Any) -> AttentionSpec:
    return replace(SPEC, **changes)


def reasons(spec: AttentionSpec, device: str = "sm90", build: Build | None = None) -> tuple[str, ...]:
    builds = () if build is None else (("flash2", build),)
    return selection.refusals("flash2", spec, Target("torch", device, builds=builds))


# The kernel's own arguments


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({}, {}),
        ({"causal": True}, {"causal": True}),
        ({"causal": True, "q_len": 9}, {"causal": True, "empty_rows": True}),
        ({"q_len": 1, "causal": True}, {"causal": True}),
        ({"window": (3, 0)}, {"causal": True, "window_size_left": 3}),
        ({"window": (3, 2), "causal": True}, {"causal": True, "window_size_left": 3}),
        ({"window": (0, 2)}, {"window_size_left": 0, "window_size_right": 2}),
        ({"window": (None, 2)}, {"window_size_right": 2}),
        ({"window": (7, 7)}, {}),
        ({"window": (6, 6)}, {"window_size_left": 6, "window_size_right": 6}),
        ({"softcap": 50.0}, {"softcap": 50.0}),
        ({"dropout": 0.1, "deterministic": True}, {"dropout_p": 0.1, "deterministic": True}),
        ({"alibi_shape": (6,)}, {}),
        ({"alibi_shape": (2, 6), "causal": True}, {"causal": True, "shifted_lse": True}),
        ({"alibi_shape": (6,), "window": (3, 0)}, {"causal": True, "window_size_left": 3}),
        ({"alibi_shape": (6,), "window": (7, 0)}, {"causal": True, "shifted_lse": True}),
    ],
)
def test_lower_dense_calls(changes: dict[str, Any], differs: dict[str, Any]) -> None:
    assert flash2.lower(spec_of(**changes)) == {**PLAIN, **differs}


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({}, {}),
        ({"causal": True}, {"causal": True}),
        ({"max_len_k": 3, "window": (3, None)}, {}),
        ({"max_len_k": 3, "window": (2, None)}, {"window_size_left": 2}),
        ({"max_len_k": 3, "window": (None, 4)}, {"window_size_right": 4}),
        ({"alibi_shape": (1, 6), "causal": True, "window": (5, 0)}, {"causal": True, "shifted_lse": True}),
        ({"max_len_q": 1, "q_len": 6}, {"max_seqlen_q": 1}),
        ({"max_len_q": 1, "q_len": 5}, {"max_seqlen_q": 2}),
    ],
)
def test_lower_packed_calls(changes: dict[str, Any], differs: dict[str, Any]) -> None:
    expected = {**PLAIN, "max_seqlen_q": 6, "max_seqlen_k": 5, "empty_rows": True, **differs}
    if changes.get("max_len_k") == 3 and changes["window"] == (3, None):
        # the longest document has 5 keys: either 3 keys, or one less than its 6 queries
        expected["window_size_left"] = 3
    assert flash2.lower(spec_of(**{**PACKED, **changes})) == expected


def kernel_sees(how: dict[str, Any], q_len: int, kv_len: int, longest: int) -> np.ndarray:
    """The pairs that flash_api.cpp and mask.h show within a document, given the number of keys of the longest
    document."""
    left, right = how["window_size_left"], how["window_size_right"]
    left, right = (-1 if side >= longest else side for side in (left, right))
    right = 0 if how["causal"] and q_len > 1 else right
    if left < 0 <= right:
        left = longest
    if right < 0 <= left:
        right = longest
    distance = np.arange(kv_len)[None] - (np.arange(q_len)[:, None] + kv_len - q_len)
    seen = np.ones((q_len, kv_len), bool)
    return seen if left < 0 and right < 0 else seen & (distance >= -left) & (distance <= right)


SIDES = (None, 0, 1, 2, 4, 5, 7, 9)


def test_a_dense_window_is_refused_exactly_if_the_kernel_masks_it_differently() -> None:
    refused = 0
    for q_len, kv_len, left, right in product(range(1, 10), range(1, 7), SIDES, SIDES):
        spec = spec_of(q_len=q_len, kv_len=kv_len, window=(left, right))
        rows, keys = np.arange(q_len)[:, None], np.arange(kv_len)[None]
        desired = np.broadcast_to(band(spec).contains(rows, keys), (q_len, kv_len))
        wrong = (kernel_sees(flash2.lower(spec), q_len, kv_len, kv_len) != desired).any()
        why = [reason for reason in reasons(spec) if reason.startswith("window=")]
        assert bool(why) is bool(wrong), spec
        assert not wrong or q_len > kv_len + 1, spec
        refused += wrong
    assert refused > 100


def test_packed_windows_mask_every_document_correctly() -> None:
    for max_q, max_k, left, right in product((1, 4, 9), (1, 3, 6), SIDES, SIDES):
        spec = spec_of(**{**PACKED, "max_len_q": max_q, "max_len_k": max_k, "window": (left, right), "q_len": 13})
        assert reasons(spec) == ()
        how = flash2.lower(spec)
        for q_len, kv_len in product(range(1, max_q + 1), range(1, max_k + 1)):
            edge = band(spec, q_len, kv_len)
            desired = edge.contains(np.arange(q_len)[:, None], np.arange(kv_len)[None])
            assert (kernel_sees(how, q_len, kv_len, how["max_seqlen_k"]) == desired).all(), (spec, q_len, kv_len)


# What is refused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q_len": 9, "window": (3, None)}, "window=(3, None), q_len=9, kv_len=7: misplaces windows"),
        ({"alignment": "top_left", "causal": True}, "alignment=top_left with q_len 5 and kv_len 7"),
        ({"alignment": "top_left", "alibi_shape": (6,)}, "alignment=top_left with alibi_slopes"),
        ({**PACKED, "alignment": "top_left", "alibi_shape": (6,)}, "alignment=top_left with alibi_slopes"),
        ({"dropout": 0.1, "softcap": 50.0}, "dropout=0.1 with softcap=50.0"),
        ({"dropout": 0.001}, "dropout=0.001: the FlashAttention 2 kernel drops in steps of 1/256"),
        ({"dropout": 0.999}, "dropout=0.999"),
        ({"softcap": 5.0, "return_lse": True, "needs_backward": True}, "softcap=5.0"),
        ({"batch": 65536}, "65536 batch rows"),
        ({"head_dim": 264, "value_dim": 264}, "head_dim=264: the FlashAttention 2 kernel stops at 256"),
        ({"dtype": "float32"}, "dtype float32"),
        ({"mask_shape": (1, 1, 1, 7)}, "mask of shape"),
        ({"bias_shape": (1, 1, 5, 7)}, "bias of shape"),
    ],
)
def test_refusals_name_the_value(changes: dict[str, Any], words: str) -> None:
    (why,) = reasons(spec_of(**changes))
    assert words in why


def test_supported_calls_are_not_refused() -> None:
    for changes in (
        {"causal": True, "q_len": 9},
        {"window": (3, None), "q_len": 8},
        {"window": (3, 2), "q_len": 9},
        {"alignment": "top_left", "causal": True, "q_len": 7, "alibi_shape": (6,)},
        {"head_dim": 5, "value_dim": 13, "sinks": True, "needs_backward": True, "return_lse": True},
        {**PACKED, "causal": True, "alibi_shape": (1, 6), "needs_backward": True, "dropout": 0.2},
    ):
        assert reasons(spec_of(**changes)) == ()


def test_large_head_dims_have_no_backward_on_small_devices() -> None:
    spec = spec_of(head_dim=200, value_dim=200, dropout=0.1, needs_backward=True)
    assert reasons(spec) == reasons(spec, "sm80") == ()
    (why,) = reasons(spec, "sm89")
    assert why == "backward: dropout=0.1 with head_dim=200: the FlashAttention 2 kernel has none on sm89"
    narrow = replace(spec, head_dim=130, value_dim=130)
    assert reasons(narrow, "sm86") == ()
    assert "head_dim=256" in reasons(narrow, "sm86", Build("a build", head_dims=(64, 256)))[0]


def test_the_backward_of_long_sequences_needs_a_recent_version() -> None:
    spec = spec_of(q_len=2**19, kv_len=2**19, num_heads=64, num_kv_heads=8, needs_backward=True)
    many = spec_of(**{**PACKED, "documents": 50_000, "num_heads": 6, "needs_backward": True})
    for long in (spec, many):
        (why,) = reasons(long)
        assert "in 32 bits" in why and "flash-attn of unknown version" in why
        (older,) = reasons(long, build=Build("flash-attn 2.8.2", version=(2, 8, 2)))
        assert "flash-attn 2.8.2" in older
        assert reasons(long, build=Build("flash-attn 2.8.3", version=(2, 8, 3))) == ()
        assert reasons(replace(long, needs_backward=False)) == ()


def test_a_build_with_few_head_dims_refuses_the_others() -> None:
    build = Build("flash-attn 2.8.3", head_dims=(64, 128), version=(2, 8, 3))
    assert reasons(spec_of(head_dim=80, value_dim=80), build=build) == ()
    (why,) = reasons(spec_of(head_dim=136, value_dim=136), build=build)
    assert why == "head_dim=136: the FlashAttention 2 kernel (flash-attn 2.8.3) stops at 128"


@pytest.mark.parametrize(
    ("dim", "head_dims", "width"),
    [
        *((80, (), 80), (77, (), 80), (80, (64, 96, 128), 80), (80, (64, 128), 128), (8, (64, 128), 64)),
        *((64, (64, 128), 64), (60, (64, 128), 64), (40, (64, 128), 40), (128, (64, 128), 128)),
        *((136, (128, 192, 256), 192), (136, (128, 160, 192), 136), (200, (128, 192, 256), 256)),
    ],
)
def test_the_kernel_width_of_each_head_dim(dim: int, head_dims: tuple[int, ...], width: int) -> None:
    assert rewrites.width_of(dim, flash2.WIDTHS, head_dims) == width


# ROCm, tested as plain data because the project has no AMD GPU


@pytest.mark.parametrize("device", ["gfx90a", "gfx942", "gfx950"])
def test_rocm_builds_refuse_options_that_they_would_ignore(device: str) -> None:
    capped, windowed = spec_of(softcap=50.0), spec_of(window=(3, 2))
    ck, triton = flash2.ROCM_CK, flash2.ROCM_TRITON
    assert reasons(SPEC, device) == reasons(SPEC, device, ck) == reasons(SPEC, device, triton) == ()
    assert reasons(capped, device, ck) == ("softcap=50.0: the FlashAttention 2 kernel (ROCm CK) has none",)
    assert reasons(windowed, device, ck) == ()
    assert reasons(capped, device, triton) == ("softcap=50.0: the FlashAttention 2 kernel (ROCm Triton) has none",)
    assert reasons(windowed, device, triton) == ("window=(3, 2): the FlashAttention 2 kernel (ROCm Triton) has none",)
    assert reasons(spec_of(causal=True), device, triton) == ()


def test_rocm_refusals_depend_on_the_build() -> None:
    for changes, words in (({"softcap": 50.0}, "softcap=50.0"), ({"window": (3, 2)}, "window=(3, 2)")):
        (why,) = reasons(spec_of(**changes), "gfx942")
        assert why.startswith(words) and "ignore it silently" in why
        assert reasons(spec_of(**changes)) == ()  # NVIDIA
    for changes in ({"alibi_shape": (6,)}, {"dropout": 0.1}):
        assert len(reasons(spec_of(**changes), "gfx942", flash2.ROCM_CK)) == 1
    promised = spec_of(deterministic=True, needs_backward=True)
    assert reasons(promised, "gfx942", flash2.ROCM_CK) == ()
    assert "ROCm Triton" in reasons(promised, "gfx942", flash2.ROCM_TRITON)[0]


# The installation


def installed(monkeypatch: pytest.MonkeyPatch, version: str = "2.8.3", **interface: Any) -> SimpleNamespace:
    """Installs a fake package that ``import_module`` finds."""
    modules = {
        "flash_attn": SimpleNamespace(__version__=version),
        "flash_attn.flash_attn_interface": SimpleNamespace(**interface),
        "flash_attn_2_cuda": SimpleNamespace(__name__="flash_attn_2_cuda"),
    }
    monkeypatch.setattr(flash2, "import_module", modules.__getitem__)
    return modules["flash_attn_2_cuda"]


@pytest.fixture(autouse=True)
def _empty_caches() -> Any:
    for cached in (flash2._extension, flash2.build, rewrites._widened):
        cached.cache_clear()
    yield
    for cached in (flash2._extension, flash2.build, rewrites._widened):
        cached.cache_clear()


def test_which_versions_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "2.8.3.post2")
    assert flash2.probe() == "2.8.3.post2"
    installed(monkeypatch, "2.6.1")
    with pytest.raises(ImportError, match=r"flash-attn 2\.6\.1"):
        flash2.probe()


def test_which_extension_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash2, "_runs", lambda width: width in (64, 128))
    installed(monkeypatch, "2.8.3.post2")
    assert flash2.build() == Build("flash-attn 2.8.3.post2", head_dims=(64, 128), version=(2, 8, 3))
    monkeypatch.setattr(torch.version, "hip", "6.3")
    flash2.build.cache_clear()
    assert flash2.build() is flash2.ROCM_CK
    flash2.build.cache_clear()
    flash2._extension.cache_clear()
    installed(monkeypatch, USE_TRITON_ROCM=True, flash_attn_gpu=SimpleNamespace(__name__="interface_fa"))
    assert flash2.build() is flash2.ROCM_TRITON


def test_a_build_that_cannot_run_here_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    monkeypatch.setattr(flash2, "_runs", lambda width: False)
    with pytest.raises(RuntimeError, match="none of its kernels runs"):
        flash2.build()


# The arithmetic around the kernel


class StandIn:
    """The extension's functions in float64. They follow the kernel: lse is +inf in empty rows, and ALiBi counts by
    the key."""

    def __init__(self, returned: int = 4) -> None:
        self.returned = returned

    def fwd(self, q, k, v, out, slopes, p, scale, causal, left, right, softcap, return_softmax, generator):
        assert not return_softmax and generator is None and p == 0.0
        assert q.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0
        out = torch.empty_like(q) if out is None else out
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1])
        for row in range(q.shape[0]):
            of_row = slopes if slopes is None or slopes.ndim == 1 else slopes[row]
            settings = (of_row, (scale, causal, left, right, softcap), k.shape[1])
            out[row], lse[row] = attend(q[row], k[row], v[row], *settings)
        return [out, *([q, k, v, out] if self.returned == 8 else []), lse, torch.empty(0), torch.empty(2)]

    def bwd(self, dout, q, k, v, out, lse, dq, dk, dv, slopes, p, scale, causal, left, right, softcap, *last):
        assert p == 0.0 and last[1:] == (None, None) and lse.is_contiguous() and lse.dtype == torch.float32
        dq, dk, dv = (torch.empty_like(x) if d is None else d for d, x in ((dq, q), (dk, k), (dv, v)))
        for row in range(q.shape[0]):
            of_row = slopes if slopes is None or slopes.ndim == 1 else slopes[row]
            settings = (of_row, (scale, causal, left, right, softcap), k.shape[1])
            parts = (q[row], k[row], v[row], out[row], dout[row], lse[row])
            dq[row], dk[row], dv[row] = differentiate(*parts, *settings)
        return [dq, dk, dv, torch.empty(0)]

    def varlen_fwd(self, q, k, v, out, cu_q, cu_k, used, pad, table, slopes, max_q, max_k, p, scale, zero, *rest):
        assert used is pad is table is None and zero and (slopes is None or slopes.ndim == 1)
        out = torch.zeros_like(q) if out is None else out.zero_()
        lse = torch.full((q.shape[1], q.shape[0]), -torch.inf)
        for rows, keys in kernel_stand_ins.spans(q, k, cu_q, cu_k):
            settings = (slopes, (scale, *rest[:4]), max_k)
            out[rows], lse[:, rows] = attend(q[rows], k[keys], v[keys], *settings)
        return [out, *([q, k, v, out] if self.returned == 8 else []), lse, torch.empty(0), torch.empty(2)]

    def varlen_bwd(self, dout, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, slopes, max_q, max_k, p, scale, zero, *rest):
        assert zero and lse.is_contiguous() and len(rest) == 7
        dq, dk, dv = (torch.zeros_like(x) if d is None else d.zero_() for d, x in ((dq, q), (dk, k), (dv, v)))
        for rows, keys in kernel_stand_ins.spans(q, k, cu_q, cu_k):
            parts = (q[rows], k[keys], v[keys], out[rows], dout[rows], lse[:, rows])
            dq[rows], dk[keys], dv[keys] = differentiate(*parts, slopes, (scale, *rest[:4]), max_k)
        return [dq, dk, dv, torch.empty(0)]


def attend(q: Any, k: Any, v: Any, *settings: Any) -> tuple[Any, Any]:
    out, lse = kernel_stand_ins.forward(q, k, v, *computed_as(q, k, *settings))
    return out, lse.masked_fill(lse == -torch.inf, torch.inf)


def differentiate(q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, *settings: Any) -> tuple[Any, ...]:
    lse = lse.masked_fill(lse.isinf(), 0.0)
    return kernel_stand_ins.backward(q, k, v, out, dout, lse, *computed_as(q, k, *settings))[:3]


def computed_as(q: Any, k: Any, slopes: Any, settings: Any, longest: int) -> tuple[Any, kernel_stand_ins.Score]:
    """The visible pairs and the scores; ALiBi as the kernel computes it if the call is causal."""
    scale, causal, left, right, softcap = settings
    rows, keys, bias = torch.arange(len(q))[:, None] + len(k) - len(q), torch.arange(len(k))[None], 0.0
    if slopes is not None:
        assert slopes.dtype == torch.float32
        added = keys if causal and left < 0 else -(rows - keys).abs()
        bias = slopes.double()[:, None, None] * added
    how = {"causal": causal, "window_size_left": left, "window_size_right": right}
    return kernel_sees(how, len(q), len(k), longest), kernel_stand_ins.softcapped(scale, softcap, bias)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal with empty rows": {"causal": True, "q_len": 7, "kv_len": 5},
    "window": {"window": (2, 1)},
    "window with empty rows": {"window": (2, 0), "q_len": 11},
    "softcap": {"softcap": 0.9},
    "causal alibi": {"alibi_shape": (9,), "causal": True},
    "causal alibi with empty rows": {"alibi_shape": (2, 9), "causal": True, "q_len": 11},
    "causal alibi, decode": {"alibi_shape": (9,), "causal": True, "q_len": 1},
    "alibi": {"alibi_shape": (2, 9)},
    "window, alibi": {"alibi_shape": (9,), "window": (2, 0)},
    "softcap, causal alibi": {"alibi_shape": (9,), "causal": True, "softcap": 0.9},
    "packed": PACKED,
    "packed, window": {**PACKED, "window": (2, None)},
    "packed, causal alibi": {**PACKED, "causal": True, "alibi_shape": (9,)},
    "packed, causal alibi by row": {**PACKED, "causal": True, "alibi_shape": (1, 9)},
    "packed, window, alibi": {**PACKED, "window": (2, 1), "alibi_shape": (9,)},
}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn()
    monkeypatch.setattr(flash2, "_extension", lambda: made)
    monkeypatch.setattr(flash2, "build", lambda: Build("a stand-in", head_dims=(32, 64)))
    return made


@pytest.mark.sampled
@pytest.mark.parametrize("extra", ["", "sinks", "gradient of lse", "sinks, gradient of lse"])
@pytest.mark.parametrize("name", CASES)
def test_results_match_the_reference(name: str, extra: str, stand_in: StandIn) -> None:
    with_lse = "lse" in extra
    if with_lse and "softcap" in name:
        pytest.skip("refused: no gradient of the log-sum-exp with softcap")
    changes = {**CASES[name], "sinks": "sinks" in extra, "return_lse": with_lse, "needs_backward": True}
    case = make(changes, "bfloat16")
    assert reasons(case.spec) == ()
    assert_right(flash2, case)


def test_the_return_values_of_version_2_6(stand_in: StandIn) -> None:
    case = make({"causal": True}, "bfloat16")
    out, lse, _ = ran(flash2, case)
    stand_in.returned = 8  # flash-attn 2.6 returns more tensors
    again = ran(flash2, case)
    assert torch.equal(out, again.out) and torch.equal(lse, again.lse)


@pytest.mark.parametrize("changes", [{}, {"causal": True}, {"window": (5, 3)}, {"softcap": 2.0}])
def test_the_shortcut_gives_the_bits_of_the_forward(changes: dict[str, Any], stand_in: StandIn) -> None:
    case = make({**changes, "head_dim": 16, "value_dim": 16, "q_len": 60, "kv_len": 60}, "bfloat16")
    inputs, run = tensors(case.inputs, case.spec.dtype), flash2.shortcut(case.spec)
    assert run is not None
    for one, two in zip(run(*inputs[:3]), flash2.forward(case.spec, inputs), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    "changes", [{"needs_backward": True}, {"head_dim": 12, "value_dim": 12}, {"q_len": 70, "kv_len": 9, "causal": True}]
)
def test_calls_without_a_shortcut(changes: dict[str, Any], stand_in: StandIn) -> None:
    assert flash2.shortcut(make(changes, "bfloat16").spec) is None


@pytest.mark.parametrize("changes", [{}, PACKED], ids=["dense", "packed"])
def test_results_are_written_into_the_given_buffers(changes: dict[str, Any], stand_in: StandIn) -> None:
    assert_writes_into(flash2, make({**changes, "head_dim": 16, "value_dim": 16, "needs_backward": True}, "bfloat16"))


# Dropout: only the kernel knows the mask

DROPOUT: dict[str, dict[str, Any]] = {
    "dense": {"batch": 2, "q_len": 83, "kv_len": 61},
    "causal, alibi": {"batch": 2, "q_len": 83, "kv_len": 61, "causal": True, "alibi_shape": (6,)},
    "window": {"batch": 2, "q_len": 47, "kv_len": 61, "window": (17, 5)},
    "packed": {"batch": 1, "documents": 3, "causal": True, "max_len_q": 53, "max_len_k": 61},
}
LENGTHS_Q, LENGTHS_K = (29, 0, 53), (61, 5, 43)


class DropoutCall:
    """A call with dropout on the GPU, its numpy inputs, and the mask that its two random words produce."""

    def __init__(self, name: str, dropout: float = 0.3, words: tuple[int, int] = (-12345, 2**62 + 1)) -> None:
        fields = {"num_heads": 6, "num_kv_heads": 3, "head_dim": 64, "value_dim": 64, "dtype": "bfloat16"}
        lengths = {"q_len": sum(LENGTHS_Q), "kv_len": sum(LENGTHS_K)} if name == "packed" else {}
        self.spec = AttentionSpec(**{**fields, **lengths, **DROPOUT[name]}, dropout=dropout, needs_backward=True)
        packed = self.spec.packed
        self.case = fill(self.spec, 3, LENGTHS_Q if packed else None, LENGTHS_K if packed else None)
        self.inputs = tensors(self.case.inputs, "bfloat16", "cuda")._replace(rng=torch.tensor(words))

    def keep_mask(self) -> np.ndarray:
        """bool ``[batch, heads, q_len, kv_len]``. With q = 0 and v = identity the output shows the mask itself."""
        spec, inputs = self.spec, self.inputs
        starts = np.asarray(self.case.inputs.cu_seqlens_k) if spec.packed else np.zeros(1, int)
        keys = np.arange(spec.kv_len)
        channel = keys - starts[np.searchsorted(starts[1:], keys, side="right")] if spec.packed else keys
        identity = torch.eye(64, dtype=torch.bfloat16, device="cuda")[torch.from_numpy(channel).cuda()]
        v = identity[:, None, :].expand(spec.kv_len, 3, 64)
        v = v.contiguous() if spec.packed else v.expand(spec.batch, *v.shape).contiguous()
        bare = replace(spec, causal=False, window=(None, None), alibi_shape=None)
        requested = inputs._replace(q=torch.zeros_like(inputs.q), v=v, alibi_slopes=None)
        out = flash2.forward(bare, requested)[0].float().cpu().numpy() > 0
        out = (out[None] if spec.packed else out).swapaxes(1, 2)  # [batch, heads, q_len, channel]
        return out[..., channel]


def needs_flash2() -> None:
    from torch_frontend.dispatch.plan import device_name

    reason = backends.availability("flash2", "cuda")[1]
    device = device_name(torch.device("cuda"))
    if reason or not flash2.FORWARD.runs_on(device):
        pytest.skip(reason or f"flash2 does not run on {device}")


@pytest.mark.cuda
@pytest.mark.parametrize("dropout", [0.05, 0.3, 0.8])
def test_the_dropped_fraction_is_the_dropout_rate(dropout: float) -> None:
    needs_flash2()
    keep_mask = DropoutCall("dense", dropout).keep_mask()
    probability = (np.floor(255 * (1 - dropout)) + 1) / 256
    deviation = np.sqrt(probability * (1 - probability) / keep_mask.size)
    assert abs(keep_mask.mean() - probability) < 5 * deviation


@pytest.mark.cuda
def test_the_mask_depends_on_both_random_words() -> None:
    needs_flash2()
    first = DropoutCall("dense").keep_mask()
    assert (first == DropoutCall("dense").keep_mask()).all()
    for words in ((-12345, 2**62), (-12344, 2**62 + 1)):
        # 2 p (1 - p) = 0.42 of the elements differ
        assert 0.3 < (first != DropoutCall("dense", words=words).keep_mask()).mean() < 0.54


@pytest.mark.cuda
@pytest.mark.parametrize("name", DROPOUT)
def test_forward_and_backward_drop_the_same_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_flash2()
    call = DropoutCall(name)
    keep_mask = call.keep_mask() / (1 - call.spec.dropout)
    monkeypatch.setattr(reference, "_dropout_factors", lambda spec, rng: keep_mask)
    verdict = judged(call.case, ran(flash2, call.case, call.inputs))
    assert verdict.ok, verdict


@pytest.mark.cuda
def test_dropout_is_refused_during_a_graph_capture() -> None:
    needs_flash2()
    call = DropoutCall("dense")
    flash2.forward(call.spec, call.inputs)
    with pytest.raises(RuntimeError, match="CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        flash2.forward(call.spec, call.inputs)


@pytest.mark.cuda
@pytest.mark.parametrize("dim", [40, 64, 80, 100, 128])
def test_decoding_one_query_with_grouped_heads(dim: int) -> None:
    """The kernel rearranges a single query: a dense call writes the buffer, a packed call returns another tensor."""
    needs_flash2()
    fields = {"num_heads": 6, "num_kv_heads": 2, "head_dim": dim, "value_dim": dim, "dtype": "bfloat16"}
    q, k, v = (torch.randn(3, length, h, dim, device="cuda").bfloat16() for length, h in ((1, 6), (77, 2), (77, 2)))
    dense = AttentionSpec(batch=3, q_len=1, kv_len=77, causal=True, **fields)
    buffer = torch.empty_like(q)
    out, lse = flash2.forward(dense, Inputs(q, k, v), (buffer, None))
    packed = AttentionSpec(batch=1, q_len=3, kv_len=231, causal=True, documents=3, max_len_q=1, max_len_k=77, **fields)
    starts = torch.arange(4, dtype=torch.int32, device="cuda")
    inputs = Inputs(*(t.flatten(0, 1) for t in (q, k, v)), cu_seqlens_q=starts, cu_seqlens_k=starts * 77)
    packed_out, packed_lse = flash2.forward(packed, inputs, (torch.empty_like(inputs.q), None))
    expected = accuracy.expect(dense, Inputs(*(t.double().cpu().numpy() for t in (q, k, v))))
    for actual, found_lse in ((out, lse), (packed_out[:, None], packed_lse.T[..., None])):
        verdict = expected.judge(out=actual.double().cpu().numpy(), lse=found_lse.cpu().numpy())
        assert verdict.ok, verdict
    assert dim not in (64, 128) or out is buffer
