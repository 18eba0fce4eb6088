"""Tests torch's own CUDA kernels without a GPU: their arguments, their refusals, and the arithmetic around them.

Stand-ins replace the kernels: plain torch with the kernels' shapes, conventions and faults. Outputs that a kernel
leaves unwritten are NaN. A stand-in asserts the conditions that its kernel checks or gets wrong.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from direct_calls import Results, assert_right, judged, ran, tensors
from kernel_stand_ins import Score, backward, forward
from oracle_cases import make

from attn_core import Target, backends, selection
from attn_core.backends import sdpa_cudnn as cudnn
from attn_core.backends import sdpa_efficient as efficient
from attn_core.backends.sdpa_efficient import operands
from attn_core.backends.sdpa_flash import cuda as flash
from attn_core.backends.shared import aten_masks
from attn_core.backends.support import Build
from attn_core.call.masks import visible
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs
from attn_core.correctness import accuracy

NAN, INF = float("nan"), float("inf")
CUDNN = Build("cuDNN 9.19.0", version=(9, 19, 0))
SPEC = AttentionSpec(
    **{"batch": 2, "q_len": 40, "kv_len": 96, "num_heads": 6, "num_kv_heads": 2, "head_dim": 64, "value_dim": 64},
    **{"dtype": "bfloat16", "scale": 0.5},
)
PACKED = {"batch": 1, "documents": 3, "max_len_q": 9, "max_len_k": 20}


def refusals(name: str, device: str = "sm90", build: Build | None = CUDNN, **changes: Any) -> tuple[str, ...]:
    builds = ((name, build),) if build is not None and name == "sdpa_cudnn" else ()
    return selection.refusals(name, replace(SPEC, **changes), Target("torch", device, builds=builds))


# The arguments of the kernels


def test_the_arguments_of_the_flash_kernel() -> None:
    assert flash.lower(SPEC) == {
        **{"max_q": 40, "max_k": 96, "is_causal": False, "scale": 0.5},
        **{"window_size_left": None, "window_size_right": None, "empty_rows": False},
    }
    causal = flash.lower(replace(SPEC, causal=True))
    assert (causal["is_causal"], causal["window_size_left"], causal["window_size_right"]) == (True, None, None)
    assert flash.lower(replace(SPEC, causal=True, q_len=97))["empty_rows"]
    window = flash.lower(replace(SPEC, causal=True, window=(7, 0)))
    assert (window["is_causal"], window["window_size_left"], window["window_size_right"]) == (True, 7, 0)
    assert flash.lower(replace(SPEC, window=(7, 3)))["window_size_right"] == 3
    assert flash.lower(replace(SPEC, window=(700, 300))) == flash.lower(SPEC), "a window that hides nothing"
    decode = flash.lower(replace(SPEC, causal=True, window=(7, None), q_len=1))
    assert (decode["window_size_left"], decode["window_size_right"]) == (7, 0)
    packed = flash.lower(replace(SPEC, **PACKED, causal=True))
    assert (packed["max_q"], packed["max_k"], packed["empty_rows"]) == (9, 20, True)
    assert flash.lower(replace(SPEC, **{**PACKED, "max_len_q": 1}))["max_q"] == 2


def test_the_arguments_of_the_memory_efficient_kernel() -> None:
    assert efficient.lower(SPEC) == {
        **{"rows": slice(0, 40), "max_q": None, "max_k": None, "custom_mask_type": 0, "scale": 0.5},
        **{"window_size": None, "num_splits_key": None, "split_documents": False},
    }

    def requested(*names: str, **changes: Any) -> tuple[Any, ...]:
        return tuple(efficient.lower(replace(SPEC, **changes))[name] for name in names)

    band = "rows", "custom_mask_type", "window_size"
    assert requested(*band, causal=True) == (slice(0, 40), 2, None)
    assert requested(*band, causal=True, alignment="top_left") == (slice(0, 40), 1, None)
    assert requested(*band, causal=True, kv_len=40) == (slice(0, 40), 1, None)
    assert requested(*band, causal=True, kv_len=30) == (slice(10, 40), 1, None), "ten rows see nothing"
    assert requested(*band, causal=True, q_len=1) == (slice(0, 1), 0, None)
    assert requested(*band, causal=True, window=(7, 0)) == (slice(0, 40), 2, 8)
    assert requested(*band, window=(7, None), q_len=1) == (slice(0, 1), 2, 8)
    assert requested(*band, causal=True, window=(7, 0), kv_len=20, alignment="top_left") == (slice(0, 27), 1, 8)
    assert requested(*band, causal=True, window=(7, 0), kv_len=20) == (slice(20, 40), 1, 8)
    assert requested("num_splits_key", deterministic=True) == (1,)
    documents = "max_q", "max_k", "custom_mask_type", "num_splits_key", "split_documents"
    assert requested(*documents, **PACKED) == (9, 20, 0, 1, False)
    assert requested(*documents, **PACKED, causal=True) == (9, 20, 2, None, True)
    assert requested(*documents, **PACKED, causal=True, alignment="top_left") == (9, 20, 1, None, False)
    assert requested("max_q", "max_k", **{**PACKED, "max_len_q": 70, "max_len_k": 90}) == (40, 90)


def test_the_arguments_of_cudnn() -> None:
    assert cudnn.lower(SPEC) == {"is_causal": False, "band_in_bias": False, "scale": 0.5, "with_lse": False}
    assert all(cudnn.lower(replace(SPEC, **{name: True}))["with_lse"] for name in ("return_lse", "needs_backward"))
    assert cudnn.lower(replace(SPEC, causal=True, kv_len=40))["is_causal"]
    assert not cudnn.lower(replace(SPEC, causal=True, q_len=1))["is_causal"], "the last row sees every key"
    masked = cudnn.lower(replace(SPEC, causal=True, mask_shape=(2, 1, 1, 96)))
    assert (masked["is_causal"], masked["band_in_bias"]) == (False, True), "the diagonal ends at the bottom right"
    for others in ({"kv_len": 40, "mask_shape": (2, 1, 1, 40)}, {"alignment": "top_left", "bias_shape": (1, 1, 1, 96)}):
        beside = cudnn.lower(replace(SPEC, causal=True, **others))
        assert (beside["is_causal"], beside["band_in_bias"]) == (True, False)
    single = cudnn.lower(replace(SPEC, causal=True, alignment="top_left", q_len=1, bias_shape=(1, 1, 1, 96)))
    assert (single["is_causal"], single["band_in_bias"]) == (False, True), "kernels that were not tried"


# Refusals


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("sdpa_flash", {}),
        ("sdpa_flash", {"causal": True, "window": (7, 0), "needs_backward": True, "return_lse": True, "sinks": True}),
        ("sdpa_flash", {"window": (7, 3), "q_len": 97}),
        ("sdpa_flash", {**PACKED, "causal": True, "window": (7, 0), "dtype": "float16", "value_dim": 40}),
        ("sdpa_efficient", {"causal": True, "value_dim": 24, "needs_backward": True, "deterministic": True}),
        ("sdpa_efficient", {"mask_shape": (2, 1, 1, 96), "causal": True, "needs_backward": True}),
        ("sdpa_efficient", {"dtype": "float32", "bias_shape": (1, 6, 40, 1), "bias_gradient": True}),
        ("sdpa_efficient", {**PACKED, "causal": True, "needs_backward": True, "dtype": "float32"}),
        ("sdpa_efficient", {"causal": True, "window": (7, 0)}),
        ("sdpa_efficient", {"causal": True, "window": (7, 0), "kv_len": 30, "needs_backward": True}),
        ("sdpa_cudnn", {"needs_backward": True, "return_lse": True, "sinks": True, "value_dim": 40}),
        ("sdpa_cudnn", {"head_dim": 256, "value_dim": 256}),
        ("sdpa_cudnn", {"causal": True, "kv_len": 40, "needs_backward": True}),
        ("sdpa_cudnn", {"causal": True, "mask_shape": (2, 1, 1, 96)}),
        ("sdpa_cudnn", {"causal": True, "q_len": 1}),
        ("sdpa_cudnn", {"causal": True, "alignment": "top_left", "needs_backward": True}),
    ],
)
def test_supported_calls_are_not_refused(name: str, changes: dict[str, Any]) -> None:
    assert refusals(name, **changes) == ()


@pytest.mark.parametrize(
    ("name", "device", "changes", "words"),
    [
        ("sdpa_flash", "sm75", {}, "device sm75: the aten CUDA flash kernel needs sm80 or newer"),
        ("sdpa_flash", "sm90", {"window": (7, 3), "q_len": 98}, r"window=\(7, 3\), q_len=98, kv_len=96: misplaces"),
        ("sdpa_flash", "sm90", {"window": (7, None), "q_len": 98}, "open or positive right side"),
        ("sdpa_flash", "sm90", {**PACKED, "window": (7, 3)}, r"window=\(7, 3\), .*: misplaces"),
        ("sdpa_flash", "sm90", {"causal": True, "alignment": "top_left"}, "alignment=top_left"),
        ("sdpa_flash", "sm90", {"alibi_shape": (6,)}, "alibi_slopes: the aten CUDA flash kernel has none"),
        ("sdpa_flash", "sm90", {"dropout": 0.1}, "dropout=0.1: the aten CUDA flash kernel has none"),
        ("sdpa_flash", "sm90", {"softcap": 5.0}, "softcap=5.0"),
        ("sdpa_flash", "sm90", {"needs_backward": True, "deterministic": True}, "backward: deterministic=True"),
        ("sdpa_flash", "sm89", {"needs_backward": True, "head_dim": 256}, "head_dim=256 on sm89"),
        ("sdpa_flash", "sm90", {"dtype": "float32"}, "dtype float32"),
        ("sdpa_flash", "sm90", {"batch": 70_000}, "70000 batch rows or documents"),
        ("sdpa_efficient", "sm90", {"window": (7, 3)}, r"window=\(7, 3\): the aten memory-efficient kernel has causal"),
        ("sdpa_efficient", "sm90", {"window": (7, None)}, r"window=\(7, None\): .* causal windows only"),
        ("sdpa_efficient", "sm90", {**PACKED, "window": (7, 0)}, r"window=\(7, 0\) with packed documents"),
        ("sdpa_efficient", "sm90", {**PACKED, "mask_shape": (1, 1, 40, 96)}, r"mask of shape \[1, 1, 40, 96\] with pa"),
        (
            "sdpa_efficient",
            "sm90",
            {"bias_shape": (1, 6, 40, 96), "bias_dtype": "float32"},
            "would round it to bfloat16",
        ),
        (
            *("sdpa_efficient", "sm90", {"causal": True, "window": (7, 0), "needs_backward": True}),
            "backward: window=.* the gradient's window starts at the top left",
        ),
        ("sdpa_efficient", "sm90", {"batch": 1, "q_len": 2**21, "kv_len": 2**23}, r"2\*\*31 elements"),
        (
            *("sdpa_efficient", "sm90"),
            *({"batch": 1, "q_len": 2**16, "kv_len": 2**16, "mask_shape": (1, 1, 2**16, 2**16)}, "issues/162588"),
        ),
        ("sdpa_efficient", "sm90", {**PACKED, "documents": 40_000, "causal": True}, "80000 batch rows or documents"),
        ("sdpa_cudnn", "sm90", {"causal": True}, "bottom_right, with q_len 40 and kv_len 96"),
        ("sdpa_cudnn", "sm90", {"window": (7, 0)}, r"window=\(7, 0\): cuDNN attention has none"),
        ("sdpa_cudnn", "sm90", {"bias_shape": (1, 6, 40, 96), "bias_dtype": "float32"}, "would round it to bfloat16"),
        ("sdpa_cudnn", "sm90", {"bias_shape": (1, 6, 40, 96), "bias_gradient": True}, "gradient of the bias"),
        ("sdpa_cudnn", "sm90", PACKED, "packed documents"),
        ("sdpa_cudnn", "sm90", {"kv_len": 1}, "kv_len=1"),
        ("sdpa_cudnn", "sm80", {"head_dim": 136}, "head_dim=136 on sm80 with cuDNN 9.19.0"),
        ("sdpa_cudnn", "sm90", {"deterministic": True}, "^deterministic=True"),
        ("sdpa_cudnn", "sm90", {"kv_len": 192, "needs_backward": True}, "/pytorch/issues/196678"),
        (
            *("sdpa_cudnn", "sm90"),
            *({"kv_len": 64, "needs_backward": True, "mask_shape": (1, 1, 1, 64), "causal": True}, "issues/196678"),
        ),
        ("sdpa_cudnn", "sm90", {"q_len": 1, "needs_backward": True}, "cudnn-frontend/issues/1072"),
        ("sdpa_cudnn", "sm100", {"q_len": 1}, "/pytorch/issues/193893"),
    ],
)
def test_refusals_name_the_value(name: str, device: str, changes: dict[str, Any], words: str) -> None:
    import re

    reasons = refusals(name, device, **changes)
    assert any(re.search(words, reason) for reason in reasons), reasons


def test_the_cudnn_version_decides_what_is_supported() -> None:
    nan = {"kv_len": 192, "needs_backward": True}
    newer = Build("cuDNN 9.26.0", version=(9, 26, 0))
    assert refusals("sdpa_cudnn", build=newer, **nan) == ()
    assert refusals("sdpa_cudnn", "sm80", **nan) == (), "the faulty kernel is sm90's"
    assert refusals("sdpa_cudnn", **{**nan, "kv_len": 200}) == ()
    assert refusals("sdpa_cudnn", **{**nan, "q_len": 192, "causal": True}) == ()
    assert any("cuDNN of unknown version" in why for why in refusals("sdpa_cudnn", build=None, **nan))
    assert "stops at 128" in refusals("sdpa_cudnn", build=None, head_dim=256)[0]
    assert "stops at 128" in refusals("sdpa_cudnn", build=Build("", version=(9, 8, 0)), head_dim=256)[0]
    for version, refused in (((9, 18, 1), 0), ((9, 25, 0), 1), ((9, 24, 1), 0), ((9, 25, 1), 0), ((), 1)):
        reasons = refusals("sdpa_cudnn", "sm100", Build("", version=version), q_len=1)
        assert len([why for why in reasons if "193893" in why]) == refused


def test_the_cudnn_version_is_read_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    assert cudnn.build() == CUDNN and cudnn.probe() == f"{torch.__version__} (cuDNN 9.19.0)"
    for actual in (None, 8907):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda actual=actual: actual)
        with pytest.raises(ImportError, match="no cuDNN 9"):
            cudnn.probe()


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch was built with CUDA")
def test_none_is_available_in_a_torch_without_cuda() -> None:
    for name in ("sdpa_flash", "sdpa_efficient", "sdpa_cudnn"):
        assert "not available" in (backends.availability(name, "cuda")[1] or "")


# The arithmetic around the kernels


def sequences(q: Any, k: Any, cu_q: Any, cu_k: Any) -> list[tuple[int, int, slice, slice]]:
    """(index, batch row, rows, keys) of each batch row or document."""
    if cu_q is None:
        return [(n, n, slice(0, q.shape[1]), slice(0, k.shape[1])) for n in range(q.shape[0])]
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    return [(n, 0, slice(*ends_q[n : n + 2]), slice(*ends_k[n : n + 2])) for n in range(len(ends_q) - 1)]


def efficient_pieces(q: Any, k: Any, bias: Any, cu_q: Any, cu_k: Any, mask_type: int, window: int | None) -> Any:
    """(index of lse, batch row, rows, keys, visible, bias, offset) of each sequence."""
    assert q.shape[2] == k.shape[2], "equal heads"
    assert q.stride(-1) == k.stride(-1) == 1
    assert window is None or mask_type
    if bias is not None:
        assert cu_q is None and bias.dtype == q.dtype and bias.stride(-1) == 1
        assert bias.shape == (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        assert all(n <= 1 or s % 8 == 0 for n, s in zip(bias.shape[:3], bias.stride()[:3], strict=True))
    for index, batch, rows, keys in sequences(q, k, cu_q, cu_k):
        queries, count = rows.stop - rows.start, keys.stop - keys.start
        offset = count - queries if mask_type == 2 else 0
        assert offset >= 0 or count == 0, "unsigned: the kernel would mask nothing"
        distance = torch.arange(count) - torch.arange(queries)[:, None] - offset
        seen = distance <= 0 if mask_type else torch.full(distance.shape, True)
        if window is not None:
            seen &= distance > -window
            assert seen.any(-1).all(), "tiles that meet no key stay unwritten"
        yield index, batch, rows, keys, seen, 0.0 if bias is None else bias[batch].double(), offset


def efficient_forward(
    q, k, v, bias, cu_q, cu_k, max_q, max_k, dropout, mask_type, want_lse, *, scale, window_size
) -> Any:
    assert want_lse and dropout == 0.0 and (max_q is None) == (cu_q is None)
    count, longest = (q.shape[0], q.shape[1]) if cu_q is None else (len(cu_q) - 1, max_q)
    raw = torch.full((count, q.shape[2], -(-longest // 32) * 32), INF)
    out = q.new_full((*q.shape[:3], v.shape[3]), NAN)
    for index, batch, rows, keys, seen, some, _ in efficient_pieces(q, k, bias, cu_q, cu_k, mask_type, window_size):
        if seen.numel():
            part, lse = forward(q[batch, rows], k[batch, keys], v[batch, keys], seen, Score(scale, bias=some))
            out[batch, rows], raw[index, :, : lse.shape[1]] = part, lse.masked_fill(lse == -INF, 0.0)
    return out, raw, None, None, max_q, max_k


def efficient_backward(*given: Any, scale: float, num_splits_key: int | None, window_size: int | None) -> Any:
    dout, q, k, v, bias, out, cu_q, cu_k, max_q, max_k, lse, dropout, seed, state, mask_type, want_dbias = given
    assert lse.shape[2] == -(-max_q // 32) * 32 and lse.is_contiguous() and dout.shape == out.shape
    assert out[0].is_contiguous(), "the kernel knows one row stride of out"
    assert max_q <= q.shape[1] and max_k <= k.shape[1] and seed.dtype == state.dtype == torch.int64 and dropout == 0.0
    assert cu_q is None or mask_type or num_splits_key == 1, "a division by the queries of a document"
    actual = [torch.full_like(t, NAN, memory_format=torch.contiguous_format) for t in (q, k, v)]
    dbias = torch.full(bias.shape, NAN) if want_dbias else None
    pieces = efficient_pieces(q, k, bias, cu_q, cu_k, mask_type, window_size)
    for index, batch, rows, keys, seen, some, offset in pieces:
        assert window_size is None or offset == 0, "the gradient's window is top-left"
        actual[1][batch, keys], actual[2][batch, keys] = 0.0, 0.0
        if not seen.numel():
            continue
        count = rows.stop - rows.start
        assert (lse[index, :, count:] == INF).all()
        operands = q[batch, rows], k[batch, keys], v[batch, keys], out[batch, rows], dout[batch, rows]
        *parts, dscore = backward(*operands, lse[index, :, :count], seen, Score(scale, bias=some))
        for gradient, place, part in zip(actual, (rows, keys, keys), parts, strict=True):
            gradient[batch, place] = part
        if dbias is not None:
            dbias[batch] = torch.where(seen, dscore, NAN)
    return (*actual, dbias)


def flash_pieces(q: Any, k: Any, cu_q: Any, cu_k: Any, how: dict[str, Any]) -> Any:
    """(place of lse, rows of q, keys of k, visible) of each sequence; bottom-right."""
    assert q.shape[-1] == k.shape[-1] and q.shape[-1] % 8 == 0
    left, right = how["window_size_left"], 0 if how["is_causal"] else how["window_size_right"]
    for _, batch, rows, keys in sequences(q, k, cu_q, cu_k):
        queries, count = rows.stop - rows.start, keys.stop - keys.start
        distance = torch.arange(count) - torch.arange(queries)[:, None] - (count - queries)
        seen = torch.full(distance.shape, True)
        seen &= True if left is None else distance >= -left
        seen &= True if right is None else distance <= right
        if cu_q is None:
            yield np.s_[batch], np.s_[batch, rows], np.s_[batch, keys], seen
        else:
            yield np.s_[:, rows], rows, keys, seen


def flash_forward(*given: Any, scale: float, **window: Any) -> Any:
    q, k, v, cu_q, cu_k, max_q, _, dropout, is_causal, debug = given
    assert dropout == 0.0 and not debug and (cu_q is None or max_q > 1)
    out = torch.full_like(q, NAN)
    lse = torch.full((q.shape[1], q.shape[0]) if cu_q is not None else (q.shape[0], q.shape[2], q.shape[1]), NAN)
    for place, rows, keys, seen in flash_pieces(q, k, cu_q, cu_k, {**window, "is_causal": is_causal}):
        out[rows], sums = forward(q[rows], k[keys], v[keys], seen, Score(scale))
        lse[place] = sums.masked_fill(sums == -INF, INF)
    return out, lse, None, None, None


def flash_backward(*given: Any, scale: float, **window: Any) -> Any:
    dout, q, k, v, out, lse, cu_q, cu_k, _, _, dropout, is_causal, state, unused = given
    assert state.dtype == unused.dtype == torch.uint64 and state.shape == (2,) and dropout == 0.0
    assert lse.is_contiguous() and not (lse == -INF).any()
    dq, dk, dv = (torch.full_like(t, NAN) for t in (q, k, v))
    for place, rows, keys, seen in flash_pieces(q, k, cu_q, cu_k, {**window, "is_causal": is_causal}):
        operands = q[rows], k[keys], v[keys], out[rows], dout[rows], lse[place]
        dq[rows], dk[keys], dv[keys], _ = backward(*operands, seen, Score(scale))
    return dq, dk, dv


def cudnn_seen(q: Any, k: Any, bias: Any, is_causal: bool) -> Any:
    assert bias is None or (bias.dtype == q.dtype and bias.dim() == 4)
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(0 if is_causal else k.shape[2])
    if not cudnn.zero_for_empty_rows() and bias is not None:
        assert (seen & (bias != -INF)).any(-1).all(), "versions differ about rows that see nothing"
    return seen


def cudnn_output(q: Any, width: int) -> Any:
    """An output as torch allocates it for q: dense, its axes in the order of q's strides."""
    if width == q.shape[3]:
        return torch.empty_like(q)
    order = sorted(range(4), key=q.stride().__getitem__, reverse=True)
    shape = (*q.shape[:3], width)
    return q.new_empty([shape[axis] for axis in order]).permute([order.index(axis) for axis in range(4)])


def cudnn_forward(q, k, v, bias, want_lse, dropout, is_causal, debug, *, scale) -> Any:
    assert dropout == 0.0 and not debug
    score = Score(scale, bias=0.0 if bias is None else bias.double())
    part, sums = forward(*(t.transpose(1, 2) for t in (q, k, v)), cudnn_seen(q, k, bias, is_causal), score)
    out, lse = cudnn_output(q, v.shape[3]).copy_(part.transpose(1, 2)), sums[..., None].float()
    return out, lse if want_lse else None, None, None, q.shape[2], k.shape[2], None, None, None


def cudnn_backward(*given: Any, scale: float) -> Any:
    dout, q, k, v, out, lse, seed, state, bias, cu_q, cu_k, max_q, max_k, dropout, is_causal = given
    assert cu_q is None and cu_k is None and (max_q, max_k, dropout) == (q.shape[2], k.shape[2], 0.0)
    assert out.stride() == dout.stride() == cudnn_output(q, v.shape[3]).stride(), "torch's plans hold one layout"
    assert lse.shape == (*q.shape[:3], 1) and lse.is_contiguous()
    assert lse.isfinite().all() or cudnn.zero_for_empty_rows()
    lse = lse.masked_fill(lse == -INF, 0.0)
    assert seed.dtype == state.dtype == torch.int64
    score = Score(scale, bias=0.0 if bias is None else bias.double())
    operands = (t.transpose(1, 2) for t in (q, k, v, out, dout))
    gradients = backward(*operands, lse[..., 0], cudnn_seen(q, k, bias, is_causal), score)[:3]
    return tuple(t.transpose(1, 2).to(q.dtype) for t in gradients)


# names of oracle_cases
LENGTHS = {"batch": 1, "q_len": 12, "kv_len": 14, "documents": 6, "max_len_q": 6, "max_len_k": 5}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("flash efficient cudnn", {}),
    "a width of their own": ("flash efficient cudnn", {"head_dim": 16, "value_dim": 16}),
    "narrow values": ("flash efficient cudnn", {"head_dim": 32, "value_dim": 16}),
    "wide values": ("flash efficient cudnn", {"head_dim": 16, "value_dim": 32}),
    "causal": ("flash efficient", {"causal": True}),
    "causal, rows that see nothing": ("flash efficient", {"causal": True, "q_len": 11, "kv_len": 7}),
    "causal top_left": ("efficient cudnn", {"causal": True, "alignment": "top_left"}),
    "causal top_left, more queries": ("efficient cudnn", {"causal": True, "alignment": "top_left", "q_len": 11}),
    "causal square": ("flash efficient cudnn", {"causal": True, "q_len": 7}),
    "decoding": ("flash efficient cudnn", {"causal": True, "q_len": 1}),
    "decoding in a window": ("flash efficient", {"causal": True, "q_len": 1, "window": (2, 0), "no_gradient": True}),
    "window": ("flash", {"window": (2, 1)}),
    "window to the left": ("flash", {"window": (2, None)}),
    "causal window": ("flash efficient", {"causal": True, "window": (2, 0), "no_gradient": True}),
    "causal window, gradient": ("flash", {"causal": True, "window": (2, 0)}),
    "causal window, square": ("flash efficient", {"causal": True, "window": (2, 0), "q_len": 7}),
    "causal window, rows before": ("flash efficient", {"causal": True, "window": (2, 0), "q_len": 13}),
    "causal window, rows after": (
        "efficient",
        {"causal": True, "window": (2, 0), "q_len": 13, "alignment": "top_left"},
    ),
    "mask": ("efficient cudnn", {"mask_shape": (2, 9, 5, 7)}),
    "mask by key": ("efficient cudnn", {"mask_shape": (2, 1, 1, 7)}),
    "mask by query": ("efficient cudnn", {"mask_shape": (2, 1, 5, 1)}),
    "mask by batch": ("efficient cudnn", {"mask_shape": (2, 1, 1, 1)}),
    "mask by key, causal": ("efficient cudnn", {"mask_shape": (2, 1, 1, 7), "causal": True}),
    "mask, causal, empty": ("efficient cudnn", {"mask_shape": (2, 9, 11, 7), "causal": True, "q_len": 11}),
    "mask, causal square": ("efficient cudnn", {"mask_shape": (2, 9, 7, 7), "causal": True, "q_len": 7}),
    "mask and bias, causal top_left": (
        "efficient cudnn",
        {"mask_shape": (2, 1, 1, 7), "bias_shape": (1, 9, 5, 7), "causal": True, "alignment": "top_left"},
    ),
    "mask by key, causal window": (
        "efficient",
        {"mask_shape": (2, 1, 1, 7), "causal": True, "window": (1, 0), "q_len": 7},
    ),
    "bias": ("efficient", {"bias_shape": (2, 9, 5, 7), "bias_gradient": True}),
    "bias without a gradient": ("efficient cudnn", {"bias_shape": (2, 9, 5, 7)}),
    "bias and mask": ("efficient cudnn", {"bias_shape": (1, 1, 5, 7), "mask_shape": (2, 9, 1, 7)}),
    "bias, causal, without a gradient": ("efficient cudnn", {"bias_shape": (1, 9, 5, 1), "causal": True}),
    "bias of aligned rows": ("efficient", {"bias_shape": (2, 9, 5, 16), "bias_gradient": True, "kv_len": 16}),
    "bias by head": ("efficient", {"bias_shape": (1, 9, 1, 7), "bias_gradient": True}),
    "bias by batch": ("efficient", {"bias_shape": (2, 1, 5, 1), "bias_gradient": True}),
    "bias, causal": ("efficient", {"bias_shape": (1, 9, 5, 7), "bias_gradient": True, "causal": True}),
    "bias, mask, rows that see nothing": (
        "efficient",
        {
            **{"bias_shape": (1, 9, 11, 7), "mask_shape": (2, 1, 1, 7), "bias_gradient": True},
            **{"causal": True, "q_len": 11, "sinks": True},
        },
    ),
    "packed": ("flash efficient", LENGTHS),
    "packed, causal": ("flash efficient", {**LENGTHS, "causal": True}),
    "packed, causal top_left": ("efficient", {**LENGTHS, "causal": True, "alignment": "top_left"}),
    "packed, a bound for a length": ("efficient", {**LENGTHS, "causal": True, "max_len_q": 99, "max_len_k": 99}),
    "packed, causal window": ("flash", {**LENGTHS, "causal": True, "window": (1, 0)}),
}
STANDINS = {
    "flash": (flash, "sdpa_flash", (flash_forward, flash_backward)),
    "efficient": (efficient, "sdpa_efficient", (efficient_forward, efficient_backward)),
    "cudnn": (cudnn, "sdpa_cudnn", (cudnn_forward, cudnn_backward)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("extra", ["", "sinks", "return_lse"])
@pytest.mark.parametrize(
    ("kernel", "case"), [(kernel, case) for case, (kernels, _) in CASES.items() for kernel in kernels.split()]
)
def test_results_match_the_reference(
    kernel: str, case: str, extra: str, monkeypatch: pytest.MonkeyPatch, zero_for_empty_rows: bool = True
) -> None:
    module, name, ops = STANDINS[kernel]
    monkeypatch.setattr(module, "_kernels", lambda: ops)
    monkeypatch.setattr(cudnn, "forward_binding", lambda: cudnn_forward)
    monkeypatch.setattr(cudnn, "_trials", lambda: zero_for_empty_rows)
    fields = {**CASES[case][1], **({extra: True} if extra else {})}
    learns = not fields.pop("no_gradient", False)
    if extra == "return_lse":
        fields.pop("bias_gradient", None)  # these are refused together
    for dtype in module.FORWARD.dtypes[:2]:
        made = make({**fields, "needs_backward": learns}, dtype)
        target = Target("torch", "sm80", builds=(("sdpa_cudnn", CUDNN),))
        assert selection.refusals(name, made.spec, target) == ()
        assert_right(module, made)


@pytest.mark.parametrize(
    "case", [case for case, (kernels, fields) in CASES.items() if "cudnn" in kernels and "mask" in case]
)
def test_a_cudnn_that_is_wrong_for_rows_without_keys(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    test_results_match_the_reference("cudnn", case, "", monkeypatch, zero_for_empty_rows=False)


def with_derivative(forward: Any, backward: Any, formula: Any) -> Any:
    """The stand-in of a forward op with torch's derivative of it: ``formula`` orders the backward op's arguments."""

    class Op(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, named: Any, q: Any, k: Any, v: Any, bias: Any, *others: Any) -> Any:
            results = forward(q, k, v, *(() if bias is ... else (bias,)), *others, **named)
            ctx.save_for_backward(q, k, v, None if bias is ... else bias, *results[:2])
            ctx.rest = others, results[2:], named
            if results[1] is not None:
                ctx.mark_non_differentiable(results[1])
            return results

        @staticmethod
        def backward(ctx: Any, dout: Any, *_: Any) -> Any:
            return None, *formula(backward, dout, *ctx.saved_tensors, *ctx.rest), *(None,) * len(ctx.rest[0])

    return Op


def native_efficient(*given: Any, **named: Any) -> Any:
    def formula(backward: Any, dout: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, lse: Any, *rest: Any) -> Any:
        (*_, causal, _), _, named = rest
        wanted, word = bias is not None and bias.requires_grad, torch.zeros((), dtype=torch.int64)
        lengths, rest = (q.shape[1], k.shape[1]), (lse, 0.0, word, word, causal, wanted)
        settings = {"scale": named["scale"], "num_splits_key": None, "window_size": None}  # torch passes on no window
        return backward(dout.contiguous(), q, k, v, bias, out, None, None, *lengths, *rest, **settings)

    return with_derivative(efficient_forward, efficient_backward, formula).apply(named, *given)


def native_flash(q: Any, k: Any, v: Any, *given: Any, **named: Any) -> Any:
    def formula(backward: Any, dout: Any, q: Any, k: Any, v: Any, _: Any, out: Any, lse: Any, *rest: Any) -> Any:
        (cu_q, cu_k, max_q, max_k, dropout, causal, _), _, named = rest
        states = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
        settings = (cu_q, cu_k, max_q, max_k, dropout, causal, *states)
        return *backward(dout.contiguous(), q, k, v, out, lse, *settings, **named), None

    return with_derivative(flash_forward, flash_backward, formula).apply(named, q, k, v, ..., *given)


def native_flash_of_heads(q: Any, k: Any, v: Any, dropout: float, causal: bool, debug: bool, scale: Any) -> Any:
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    window = {"window_size_left": None, "window_size_right": None}
    out, *others = native_flash(
        q, k, v, None, None, q.shape[1], k.shape[1], dropout, causal, debug, scale=scale, **window
    )
    return out.transpose(1, 2), *others


def native_cudnn(*given: Any, **named: Any) -> Any:
    def formula(backward: Any, dout: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, lse: Any, *rest: Any) -> Any:
        (_, dropout, causal, _), _, named = rest
        word = torch.zeros((), dtype=torch.int64)
        dout = cudnn_output(q, v.shape[3]).copy_(dout)
        settings = (None, None, q.shape[2], k.shape[2], dropout, causal)
        return *backward(dout, q, k, v, out, lse, word, word, bias, *settings, **named), None

    return with_derivative(cudnn_forward, cudnn_backward, formula).apply(named, *given)


NATIVE = {"flash": native_flash, "efficient": native_efficient, "cudnn": native_cudnn}


def shortcut_spec(kernel: str, case: str, learns: bool) -> AttentionSpec:
    """The spec of a case of CASES, with a width that every kernel has."""
    fields = {**CASES[case][1], "head_dim": 16, "value_dim": 16}
    learns = not fields.pop("no_gradient", False) and learns
    fields |= {"needs_backward": learns} | ({} if learns and kernel != "cudnn" else {"bias_gradient": False})
    return make(fields, "bfloat16").spec


WITH_SHORTCUTS = [
    (kernel, case, learns)
    for case, (kernels, _) in CASES.items()
    for kernel in kernels.split()
    for learns in (True, False)
    if shortcut_spec(kernel, case, learns).needs_backward is learns
]


def judge_shortcut(run: Any, spec: AttentionSpec, device: str) -> None:
    made = make({name: getattr(spec, name) for name in FIELDS}, "bfloat16")
    inputs = tensors(made.inputs, spec.dtype, device)
    explicit = [inputs.mask, inputs.bias] if spec.mask_shape or spec.bias_shape else []
    for tensor in (*inputs[:3], *([inputs.bias] if spec.bias_gradient else [])) if spec.needs_backward else ():
        tensor.requires_grad_()
    _judge_layout(run, made, inputs, explicit, lambda tensor: tensor)
    if hasattr(run, "heads_first"):
        _judge_layout(run.heads_first, made, inputs, explicit, lambda tensor: tensor.transpose(1, 2))
        _judge_layout(run.heads_first, made, inputs, explicit, lambda tensor: tensor.transpose(1, 2).contiguous())


def _judge_layout(run: Any, made: Any, inputs: Inputs, explicit: list[Any], exchange: Any) -> None:
    """Judges a shortcut whose tensors ``exchange`` makes; its output has the axes that ``exchange`` gives."""
    spec = made.spec
    for tensor in (*inputs[:3], inputs.bias):
        if tensor is not None:
            tensor.grad = None
    out, _ = run(*map(exchange, inputs[:3]), *explicit)
    out = out if exchange(inputs.q).shape == inputs.q.shape else out.transpose(1, 2)
    gradients = None
    if spec.needs_backward:
        out.backward(torch.from_numpy(made.dout).to(out))
        dbias = inputs.bias.grad if spec.bias_gradient else None
        gradients = Gradients(*(t.grad for t in inputs[:3]), dbias, None)
    verdict = judged(made, Results(out, None, gradients))
    assert verdict.ok, verdict
    assert tuple(out.shape) == spec.out_shape


FIELDS = tuple(name for name in AttentionSpec.__dataclass_fields__ if name != "dtype")


@pytest.mark.sampled
@pytest.mark.parametrize(("kernel", "case", "learns"), WITH_SHORTCUTS)
def test_shortcuts_match_the_reference(kernel: str, case: str, learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own derivative of the forward op gives the gradients of the call."""
    module, _, _ = STANDINS[kernel]
    monkeypatch.setattr(module, "_kernels", lambda: (NATIVE[kernel], None))
    monkeypatch.setattr(flash, "_heads_first_binding", lambda: native_flash_of_heads)
    monkeypatch.setattr(cudnn, "forward_binding", lambda: native_cudnn)
    monkeypatch.setattr(cudnn, "_trials", lambda: True)
    spec = shortcut_spec(kernel, case, learns)
    run = module.BACKEND.shortcut_of(spec)
    if run is not None:  # the table below says which calls have one
        judge_shortcut(run, spec, "cpu")


@pytest.mark.cuda
@pytest.mark.parametrize(("kernel", "case", "learns"), WITH_SHORTCUTS)
def test_shortcuts_match_the_reference_on_a_gpu(kernel: str, case: str, learns: bool) -> None:
    module, name, _ = STANDINS[kernel]
    spec = shortcut_spec(kernel, case, learns)
    if reasons := selection.refusals(name, spec, Target.here("torch", _device())):
        pytest.skip("; ".join(reasons))
    run = module.BACKEND.shortcut_of(spec)
    if run is not None:
        judge_shortcut(run, spec, "cuda")


def test_cudnn_runs_values_of_their_own_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded values cost MLA's gradient half as much time again."""
    for version, dims, apart in (
        ((9, 19, 0), (64, 32), True),
        ((9, 19, 0), (32, 128), True),
        ((9, 19, 0), (192, 128), True),
        ((9, 10, 0), (192, 128), False),
        ((9, 19, 0), (192, 64), False),
        ((9, 19, 0), (128, 256), False),
    ):
        monkeypatch.setattr(cudnn, "build", lambda version=version: Build("", version=version))
        cudnn._kernel.cache_clear()
        spec = replace(SPEC, head_dim=dims[0], value_dim=dims[1])
        assert (cudnn._kernel(spec).runs(spec) != spec) is not apart
    cudnn._kernel.cache_clear()


@pytest.mark.cuda
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (64, 32), (32, 128), (192, 128)], ids=str)
def test_the_layout_of_results_is_the_one_that_torch_allocates(order: tuple[int, ...], dims: tuple[int, int]) -> None:
    if reasons := selection.refusals("sdpa_cudnn", replace(SPEC, head_dim=dims[0]), Target.here("torch", _device())):
        pytest.skip("; ".join(reasons))
    sizes = (2, 3, 130, dims[0])
    q = torch.randn([sizes[axis] for axis in order], device="cuda", dtype=torch.bfloat16)
    q = q.permute([order.index(axis) for axis in range(4)])
    k, v = (torch.randn(2, 3, 70, width, device="cuda", dtype=torch.bfloat16) for width in dims)
    out = cudnn.forward_binding()(q, k, v, None, True, 0.0, False, False, scale=0.1)[0]
    assert cudnn.as_allocated_for(q, out) is out


@pytest.mark.cuda
def test_the_installed_cudnn_is_tried_for_rows_without_keys() -> None:
    """Its version decides how masked calls run. The answer must be the one that the trial of this version gives."""
    if backends.availability("sdpa_cudnn", "cuda")[1]:
        pytest.skip("no cuDNN")
    first = cudnn.zero_for_empty_rows()
    assert cudnn.zero_for_empty_rows() is first
    if torch.backends.cudnn.version() // 100 == 919:
        assert first, "seen on an H200"


SHORTCUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("flash efficient cudnn", {}),
    "training": ("flash efficient cudnn", {"needs_backward": True}),
    "the log-sum-exp": ("flash efficient cudnn", {"return_lse": True}),
    "the gradient of the log-sum-exp": ("", {"return_lse": True, "needs_backward": True}),
    "another width of v": ("efficient cudnn", {"value_dim": 32}),
    "an odd width": ("", {"head_dim": 44, "value_dim": 44}),
    "sinks": ("", {"sinks": True}),
    "packed": ("", PACKED),
    "rows that see no key": ("flash", {"causal": True, "q_len": 97}),
    "their log-sum-exp": ("", {"causal": True, "q_len": 97, "return_lse": True}),
    "a window": ("flash efficient", {"causal": True, "window": (7, 0)}),
    "a window, training": ("flash", {"causal": True, "window": (7, 0), "needs_backward": True}),
    "equal bits, training": ("", {"deterministic": True, "needs_backward": True}),
    "a mask": ("efficient cudnn", {"mask_shape": (2, 1, 1, 96), "needs_backward": True}),
    "a mask's log-sum-exp": ("cudnn", {"mask_shape": (2, 1, 1, 96), "return_lse": True}),
    "a bias's gradient": ("efficient", {"bias_shape": (1, 6, 40, 96), "needs_backward": True, "bias_gradient": True}),
    "a bias's gradient under causal": (
        *("", {"bias_shape": (1, 6, 40, 96), "needs_backward": True, "bias_gradient": True, "causal": True}),
    ),
}


@pytest.mark.parametrize("case", SHORTCUTS)
def test_which_calls_run_with_torchs_own_derivative(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, changes = SHORTCUTS[case]
    spec = replace(SPEC, **changes)
    monkeypatch.setattr(cudnn, "_trials", lambda: True)
    supported = [name for name, (_, full, _) in STANDINS.items() if not refusals(full, **changes)]
    assert " ".join(name for name in supported if STANDINS[name][0].BACKEND.shortcut_of(spec)) == expected


# The helper functions


@pytest.mark.parametrize("seed", range(40))
def test_empty_rows_finds_every_row_that_sees_nothing(seed: int) -> None:
    random = np.random.default_rng(seed)
    q_len, kv_len = (int(n) for n in random.integers(1, 9, 2))
    shape = tuple(int(random.choice((1, n))) for n in (2, 3, q_len, kv_len))
    fields = {"causal": bool(random.random() < 0.7), "alignment": str(random.choice(("top_left", "bottom_right")))}
    window = (int(random.integers(0, 4)), 0) if fields["causal"] and random.random() < 0.5 else (None, None)
    spec = AttentionSpec(
        **{"batch": 2, "q_len": q_len, "kv_len": kv_len, "num_heads": 3, "num_kv_heads": 3, "head_dim": 8},
        **{"value_dim": 8, "dtype": "float32", "mask_shape": shape, "window": window, **fields},
    )
    mask = random.random(shape) < 0.4
    edge = aten_masks.needed_band(spec)
    actual = aten_masks.empty_rows(torch.from_numpy(mask), edge, slice(0, q_len), kv_len).expand(2, 3, q_len)
    assert np.array_equal(actual.numpy(), np.broadcast_to(~visible(spec, mask).any(-1), (2, 3, q_len)))


def test_aligned_masks_have_rows_that_kernels_can_load() -> None:
    for keys in (7, 8, 13):
        for whole in (torch.randn(2, 1, 5, keys), torch.randn(2, 1, keys, 5).mT, torch.randn(2, 1, 5, 1)):
            actual = aten_masks.in_rows_of(whole, keys)
            assert torch.equal(actual, whole.expand(2, 1, 5, keys))
            assert actual.stride(-1) == 1 and actual.stride(-2) % 8 == 0 and actual.data_ptr() % 16 == 0
    fits = torch.randn(2, 1, 5, 16)
    assert aten_masks.in_rows_of(fits, 16) is fits, "no copy of what is right"


def test_a_mask_takes_the_dtype_of_q_and_a_bias_keeps_float32() -> None:
    mask, bias = torch.tensor([[[[True, False]]]]), torch.tensor([[[[1.5, 2.5]]]])
    added = aten_masks.additive(mask, None, torch.bfloat16, 2)
    assert added.dtype == torch.bfloat16 and added.tolist() == [[[[0.0, -INF]]]] and added.stride(2) == 8
    both = aten_masks.additive(mask, bias, torch.float32, 2)
    assert both.dtype == torch.float32 and both.tolist() == [[[[1.5, -INF]]]]


def test_the_log_sum_exp_is_reordered_by_token_and_by_document() -> None:
    cu_q, cu_k = torch.tensor([0, 3, 3, 5, 11], dtype=torch.int32), torch.tensor([0, 5, 7, 7, 9], dtype=torch.int32)
    where = operands.places(cu_q, cu_k, 11, 32)
    assert where.document.tolist() == [0, 0, 0, 2, 2, 3, 3, 3, 3, 3, 3]
    assert where.position.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 5]
    assert where.empty.tolist() == [False] * 3 + [True] * 2 + [False] * 6
    raw = torch.randn(4, 2, 32)
    lse = operands.by_token(raw, where)
    assert torch.equal(lse[:, :3], raw[0, :, :3]) and torch.equal(lse[:, 5:], raw[3, :, :6])
    assert (lse[:, 3:5] == -INF).all()
    again = operands.by_document(lse, where, 4, 32)
    assert torch.equal(again[0, :, :3], raw[0, :, :3]) and torch.equal(again[3, :, :6], raw[3, :, :6])
    assert (again[0, :, 3:] == INF).all() and (again[1:3] == INF).all() and (again[3, :, 6:] == INF).all()


def test_queries_without_a_key_become_separate_documents() -> None:
    cu_q, cu_k = torch.tensor([0, 3, 3, 5, 11], dtype=torch.int32), torch.tensor([0, 5, 7, 7, 9], dtype=torch.int32)
    queries, keys = operands.split_at_first_key(cu_q, cu_k)
    assert queries.dtype == keys.dtype == torch.int32
    assert queries.tolist() == [0, 0, 3, 3, 3, 5, 5, 9, 11]
    assert keys.tolist() == [0, 0, 5, 5, 7, 7, 7, 7, 9]


def test_wrong_offsets_give_places_within_the_tensors() -> None:
    lies = torch.tensor([0, 900, 2, 5], dtype=torch.int32)
    where = operands.places(lies, lies, 7, 32)
    assert (where.document >= 0).all() and (where.document < 3).all()
    assert (where.position >= 0).all() and (where.position < 32).all()


def test_kv_heads_are_repeated_and_summed_by_group() -> None:
    k = torch.randn(2, 5, 3, 8)
    wide = operands.for_each_head(k, 4)
    assert torch.equal(wide, k.repeat_interleave(4, dim=2))
    one = operands.for_each_head(k[:, :, :1], 4)
    assert one.shape == (2, 5, 4, 8) and one.data_ptr() == k.data_ptr(), "one kv head is not copied"
    low = torch.randn(2, 5, 12, 8).bfloat16()
    assert torch.equal(operands.by_kv_head(low, 3), low.float().unflatten(2, (3, 4)).sum(3).bfloat16())
    assert operands.by_kv_head(low, 12) is low


# The ops themselves, on meta tensors: names, order and types of their arguments


def fits(kind: str, value: Any) -> bool:
    """Whether a value fits an argument of a schema; a missing tensor is None."""
    types = {"Tensor": torch.Tensor, "int": int, "float": float, "bool": bool}
    word = next(word for word in types if word in kind)
    return value is None if value is None and (word == "Tensor" or "Optional" in kind) else type(value) is types[word]


def with_checked_arguments(op: Any) -> Any:
    """Wraps the op and checks the arguments against its schema first. torch's meta function of one backward op is
    wrong."""

    def run(*given: Any, **named: Any) -> Any:
        arguments = op._schema.arguments
        positional = [argument for argument in arguments if not argument.kwarg_only]
        assert len(given) == len(positional)
        names = {argument.name: argument for argument in arguments if argument.kwarg_only}
        pairs = [*zip(positional, given, strict=True), *((names[name], value) for name, value in named.items())]
        wrong = [argument.name for argument, value in pairs if not fits(str(argument.type), value)]
        assert not wrong, wrong
        if op is torch.ops.aten._efficient_attention_backward.default:
            return (*(torch.empty_like(given[at]) for at in (1, 2, 3)), None)
        return op(*given, **named)

    return run


@pytest.mark.parametrize("kernel", STANDINS)
@pytest.mark.parametrize("packed", [False, True])
def test_the_arguments_fit_the_installed_torch(kernel: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, _ = STANDINS[kernel]
    ops = tuple(map(with_checked_arguments, module._kernels()))
    monkeypatch.setattr(module, "_kernels", lambda: ops)
    changes: dict[str, Any] = {"causal": True, "kv_len": 40, "needs_backward": True, "sinks": True}
    changes |= PACKED if packed else {}
    if packed and not module.FORWARD.packed:
        assert refusals(name, **changes)
        return
    spec = replace(SPEC, **changes, head_dim=44, value_dim=44)

    def empty(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.empty(shape if packed else (2, *shape), dtype=dtype, device="meta")

    q, k = empty(40, 6, 44), empty(40, 2, 44)
    offsets = torch.empty(4, dtype=torch.int32, device="meta") if packed else None
    sinks = torch.empty(6, device="meta")
    inputs = Inputs(q.requires_grad_(), k, k, sinks=sinks, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    out, lse = module.forward(spec, inputs)
    assert tuple(out.shape) == spec.out_shape and out.dtype == torch.bfloat16 and not out.requires_grad
    assert tuple(lse.shape) == spec.lse_shape and lse.dtype == torch.float32
    actual = module.backward(spec, inputs, out, lse, torch.empty_like(q), None)
    assert (actual.dq.shape, actual.dk.shape, actual.dv.shape) == (q.shape, k.shape, k.shape)


def flash_forward_in_place(place: Any, *given: Any, **how: Any) -> Any:
    out, lse, *_ = flash_forward(*given, **how)
    place.copy_(out)
    return lse


def test_the_flash_kernel_writes_into_a_suitable_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "_kernels", lambda: (flash_forward, flash_backward))
    monkeypatch.setattr(flash, "_in_place", lambda: flash_forward_in_place)
    made = make({"causal": True, "q_len": 11, "kv_len": 7, "head_dim": 16, "value_dim": 16}, "bfloat16")
    inputs = tensors(made.inputs, "bfloat16")
    out, lse = flash.forward(made.spec, inputs)
    place = torch.full_like(out, NAN)
    actual = flash.forward(made.spec, inputs, (place, None))
    assert actual[0] is place and torch.equal(place, out) and torch.equal(actual[1], lse)
    odd = torch.full((*out.shape[:-1], 17), NAN, dtype=out.dtype)[..., 1:]
    assert flash.forward(made.spec, inputs, (odd, None))[0] is not odd
    one = make({"causal": True, "q_len": 1, "head_dim": 16, "value_dim": 16}, "bfloat16")
    place = torch.empty(one.spec.out_shape, dtype=torch.bfloat16)
    assert one.spec.group_size > 1
    assert flash.forward(one.spec, tensors(one.inputs, "bfloat16"), (place, None))[0] is not place
    monkeypatch.setattr(flash, "_in_place", lambda: None)
    place = torch.empty_like(out)
    assert flash.forward(made.spec, inputs, (place, None))[0] is not place


def test_the_arguments_of_the_in_place_flash_kernel_fit_the_installed_torch() -> None:
    if flash._in_place() is None:
        pytest.skip(f"torch {torch.__version__} has no such op")
    plain, in_place = (op._schema.arguments for op in (flash._kernels()[0], flash._in_place()))
    assert [argument.name for argument in in_place] == ["out", *(argument.name for argument in plain)]
    assert [argument.default_value for argument in in_place[1:]] == [argument.default_value for argument in plain]
    assert len(flash._in_place()._schema.returns) == 1


# On a GPU: calls that the generated suites do not draw


@pytest.mark.cuda
@pytest.mark.parametrize("fields", [{"causal": True}, {"q_len": 1}, {**LENGTHS, "causal": True}])
def test_the_in_place_flash_kernel_gives_the_same_bits(fields: dict[str, Any]) -> None:
    if flash._in_place() is None:
        pytest.skip(f"torch {torch.__version__} has no such op")
    made = make({**fields, "head_dim": 64, "value_dim": 64}, "bfloat16")
    inputs = tensors(made.inputs, "bfloat16", "cuda")
    out, lse = flash.forward(made.spec, inputs)
    place = torch.full_like(out, NAN)
    actual = flash.forward(made.spec, inputs, (place, None))
    assert torch.equal(actual[0], out) and torch.equal(actual[1], lse)
    assert (actual[0] is place) is (made.spec.q_len > 1)


def judged_here(name: str, fields: dict[str, Any], dtype: str) -> accuracy.Accuracy:
    """The verdict on one call with gradients on the GPU."""
    made = make({**fields, "needs_backward": True}, dtype)
    if reasons := selection.refusals(name, made.spec, Target.here("torch", _device())):
        pytest.skip("; ".join(reasons))
    return judged(made, ran(backends.load(name, "cuda"), made, device="cuda"))


def _device() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm{major}{minor}"


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("widths", [(512, 320), (320, 512), (136, 24)])
def test_large_head_dims_match_the_reference(widths: tuple[int, int], dtype: str) -> None:
    sizes = {
        "q_len": 67,
        "kv_len": 131,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": widths[0],
        "value_dim": widths[1],
    }
    verdict = judged_here("sdpa_efficient", {**sizes, "causal": True}, dtype)
    assert verdict.ok, verdict


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_efficient"])
@pytest.mark.parametrize("causal", [False, True])
def test_documents_with_more_queries_than_keys(name: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In some documents whole tiles of queries see nothing, and some documents have no query."""
    queries, keys = (300, 0, 129, 70, 1), (100, 257, 0, 70, 5)
    monkeypatch.setattr("oracle_cases.LENGTHS_Q", queries)
    monkeypatch.setattr("oracle_cases.LENGTHS_K", keys)
    sizes = {"batch": 1, "q_len": sum(queries), "kv_len": sum(keys), "documents": 5, "max_len_q": 300, "max_len_k": 257}
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 160, "value_dim": 160}
    verdict = judged_here(name, {**sizes, **heads, "causal": causal}, "bfloat16")
    assert verdict.ok, verdict


@pytest.mark.cuda
def test_the_cudnn_backward_takes_gradients_of_any_layout() -> None:
    """torch caches cuDNN's plans by the layout of q, k and v: another layout of dout must not reuse the first plan."""
    spec = replace(SPEC, kv_len=40, needs_backward=True)
    target, module = Target.here("torch", _device()), backends.load("sdpa_cudnn", "cuda")
    if reasons := selection.refusals("sdpa_cudnn", spec, target):
        pytest.skip("; ".join(reasons))
    q, k, dout = (torch.randn(2, 40, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (6, 2, 6))
    inputs = Inputs(q, k, torch.randn_like(k))
    out, lse = module.forward(spec, inputs)
    layouts = (dout, dout.transpose(1, 2).contiguous().transpose(1, 2), torch.stack((dout, dout), -1)[..., 0])
    first, *others = (module.backward(spec, inputs, out, lse, layout, None) for layout in layouts)
    for other in others:
        for one, two in zip(first[:3], other[:3], strict=True):
            torch.testing.assert_close(one, two, rtol=2e-2, atol=2e-2)


LAUNCHES: dict[str, tuple[str, dict[str, Any], int]] = {
    "flash": ("sdpa_flash", {}, 1),
    "flash, causal window": ("sdpa_flash", {"causal": True, "window": 9}, 1),
    "efficient": ("sdpa_efficient", {}, 1),
    "efficient, mask": ("sdpa_efficient", {"mask": (2, 1, 40, 96)}, 2),
    "efficient, mask of odd rows": ("sdpa_efficient", {"mask": (2, 1, 40, 95)}, 3),
    "efficient, bias": ("sdpa_efficient", {"bias": (1, 2, 40, 96)}, 1),
    "cudnn": ("sdpa_cudnn", {}, 1),
    "cudnn, mask": ("sdpa_cudnn", {"mask": (2, 1, 40, 95)}, 2),
    "cudnn, padding mask": ("sdpa_cudnn", {"mask": (2, 1, 1, 96)}, 2),
    "cudnn, bias": ("sdpa_cudnn", {"bias": (1, 2, 40, 95)}, 1),
}
"""Backend, mask and bias shapes and options, and the most kernels that a forward may launch."""


@pytest.mark.cuda
@pytest.mark.parametrize("case", LAUNCHES)
def test_the_number_of_kernels_that_a_call_launches(case: str) -> None:
    from torch.profiler import ProfilerActivity, profile

    from torch_frontend import attention

    name, options, most = LAUNCHES[case]
    tables = [shape for kind, shape in options.items() if kind in ("mask", "bias")]
    keys = tables[0][3] if tables else 96
    q, k = (torch.randn(2, length, 2, 64, device="cuda", dtype=torch.bfloat16) for length in (40, keys))
    given = dict(options)
    if "mask" in options:
        given["mask"] = torch.rand(options["mask"], device="cuda") > 0.2
    if "bias" in options:
        given["bias"] = torch.randn(options["bias"], device="cuda", dtype=torch.bfloat16)

    def call() -> None:
        attention(q, k, k, backend=name, **given)

    call()  # plans and compiles
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    kernels = [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [kernel for kernel in kernels if not kernel.startswith(("Memset", "Memcpy", "attn."))]
    if not kernels:
        pytest.skip("torch.profiler sees no kernels on this machine")
    assert len(kernels) <= most, kernels
