"""Tests xformers' backend: masks, arguments and refusals as data, the arithmetic around the kernels with stand-ins, and
on a GPU each of its operators."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from oracle_cases import LENGTHS_K, LENGTHS_Q, PACKED, make

from attn_core import AttentionSpec, Target, backends
from attn_core.backends import xformers
from attn_core.backends.support import Build
from attn_core.backends.xformers import operators
from attn_core.backends.xformers.operators import (
    NO_CLASS,
    TENSOR,
    Mask,
    added_tensor,
    documents_mask,
    mask_of,
    rows_mask,
)
from attn_core.call.masks import visible
from attn_core.call.tensors import Inputs
from attn_core.selection import preference, refusals

WORDS = tuple(xformers.OPERATORS)
SM90 = Target("torch", "sm90")
SPEC = AttentionSpec(
    batch=2, q_len=5, kv_len=7, num_heads=6, num_kv_heads=3, head_dim=64, value_dim=64, dtype="bfloat16", scale=0.125
)
DOCUMENTS = {"batch": 1, "documents": 3, "max_len_q": 4, "max_len_k": 5}
CU_Q, CU_K = (np.cumsum([0, *lengths]) for lengths in (LENGTHS_Q, LENGTHS_K))


def seen_by(mask: Mask, q_len: int, kv_len: int) -> np.ndarray:
    """The pairs that a class of xformers shows in a block, written down from its documentation."""
    name, shift = mask.name or "", kv_len - q_len if "FromBottomRight" in (mask.name or "") else 0
    distance = np.arange(kv_len)[None, :] - (np.arange(q_len)[:, None] + shift)
    if name == "LocalAttentionFromBottomRightMask":
        return (distance >= -mask.window["window_left"]) & (distance <= mask.window["window_right"])
    seen = distance <= 0 if "LowerTriangular" in name or "Causal" in name else np.ones(distance.shape, bool)
    return seen & (distance > -mask.window.get("_window_size", q_len + kv_len))


def seen_in_documents(mask: Mask, cu_q: Any, cu_k: Any) -> np.ndarray:
    seen = np.zeros((cu_q[-1], cu_k[-1]), bool)
    for q0, q1, k0, k1 in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        seen[q0:q1, k0:k1] = seen_by(mask, q1 - q0, k1 - k0)
    return seen


LENGTHS = ((5, 11), (11, 7), (7, 7), (1, 9), (1, 1), (3, 2), (6, 1))
WINDOWS = (*product((None, 0, 2, 30), (None, 0, 1, 30)),)
ALIGNMENTS = ("bottom_right", "top_left")


# Masks


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len"), LENGTHS)
def test_mask_classes_match_the_visible_set(q_len: int, kv_len: int, causal: bool, alignment: Any) -> None:
    described = 0
    for window in WINDOWS:
        spec = replace(SPEC, q_len=q_len, kv_len=kv_len, causal=causal, alignment=alignment, window=window)
        mask, expected = mask_of(spec), visible(spec)[0, 0]
        if mask.name == NO_CLASS:
            assert alignment == "top_left" and q_len != kv_len and window != (None, None)
            continue
        described += 1
        assert (seen_by(mask, q_len, kv_len) == expected).all(), (window, mask)
        assert (mask.name is None) == expected.all(), "a mask is asked for only where something is hidden"
    assert described == len(WINDOWS) or alignment == "top_left"


@pytest.mark.parametrize("causal", [False, True])
def test_mask_classes_match_the_visible_set_of_documents(causal: bool) -> None:
    names = set()
    for window in WINDOWS:
        spec = replace(SPEC, **PACKED, max_len_q=6, max_len_k=5, causal=causal, window=window)
        mask = mask_of(spec)
        if mask.name == NO_CLASS:
            assert not causal and 0 not in window[1:]
            continue
        names.add(mask.name)
        expected = visible(spec, None, CU_Q, CU_K)[0, 0]
        assert (seen_in_documents(mask, CU_Q, CU_K) == expected).all(), (window, mask)
    assert names >= {"BlockDiagonalMask" if not causal else "BlockDiagonalCausalFromBottomRightMask"}
    assert mask_of(replace(spec, alignment="top_left", causal=True)).name == NO_CLASS


@pytest.mark.parametrize("q_len", [1, 2, 16])
def test_concatenated_rows_are_bottom_right_blocks(q_len: int) -> None:
    attn_bias = pytest.importorskip("xformers.ops.fmha.attn_bias", exc_type=ImportError)
    spec = replace(SPEC, batch=3, q_len=q_len, kv_len=19, causal=True, window=(4, 0))
    how = xformers._lower("splitk", spec)
    built = rows_mask(attn_bias, Mask(how["attn_bias"], how["window"]), spec, "cpu")
    seen = built.materialize((3 * q_len, 3 * 19)).exp() > 0
    rows = [slice(row * q_len, (row + 1) * q_len) for row in range(3)]
    for row, span in enumerate(rows):
        keys = slice(row * 19, (row + 1) * 19)
        assert (seen[span, keys].numpy() == visible(spec)[0, 0]).all()
        assert int(seen[span].sum()) == int(seen[span, keys].sum())


def test_masks_match_the_installed_xformers() -> None:
    attn_bias = pytest.importorskip("xformers.ops.fmha.attn_bias", exc_type=ImportError)
    for (q_len, kv_len), causal, alignment, window in product(LENGTHS, (False, True), ALIGNMENTS, WINDOWS):
        mask = mask_of(replace(SPEC, q_len=q_len, kv_len=kv_len, causal=causal, alignment=alignment, window=window))
        if mask.name:
            built = getattr(attn_bias, mask.name)(**mask.window).materialize((q_len, kv_len))
            assert ((built.exp() > 0).numpy() == seen_by(mask, q_len, kv_len)).all(), mask
    cu = np.array([0, 3, 3, 8])  # xformers itself has no mask for documents with fewer keys than queries
    info = attn_bias._SeqLenInfo.from_seqlens([3, 0, 5], device=attn_bias.torch.device("cpu"))
    offsets = attn_bias.torch.tensor([0, 3, 3, 8]), attn_bias.torch.tensor([0, 1, 4, 8])
    for causal, window in product((False, True), WINDOWS):
        spec = replace(SPEC, q_len=8, kv_len=8, **DOCUMENTS, causal=causal, window=window)
        mask = mask_of(spec)
        if mask.name:
            built = getattr(attn_bias, mask.name)(q_seqinfo=info, k_seqinfo=info, **mask.window).materialize((8, 8))
            assert ((built.exp() > 0).numpy() == seen_in_documents(mask, cu, cu)).all(), mask
            ours = documents_mask(attn_bias, mask, spec, Inputs(*(None,) * 7, *offsets))
            assert type(ours).__name__ == mask.name
            assert (ours.q_seqinfo.seqstart is offsets[0], ours.k_seqinfo.max_seqlen) == (True, 5)


@pytest.mark.parametrize(("q_len", "longest", "expected"), [(3, 1, 1), (2, 1, 2), (8, 5, 5)])
def test_max_seqlen_of_documents_with_one_query(q_len: int, longest: int, expected: int) -> None:
    """FlashAttention 2 reads ``max_seqlen_q = 1`` as one query in every document."""
    modules = SimpleNamespace(_SeqLenInfo=SimpleNamespace, BlockDiagonalMask=SimpleNamespace)
    spec = replace(SPEC, **{**DOCUMENTS, "q_len": q_len, "kv_len": 15, "max_len_q": longest})
    made = documents_mask(modules, Mask("BlockDiagonalMask", {}), spec, Inputs(*(None,) * 9))
    assert made.q_seqinfo.max_seqlen == expected


# Lowering and refusals

PLAIN = {
    **{"operator": "flash", "attn_bias": None, "window": {}, "scale": 0.125, "groups": "five axes"},
    **{"laid_end_to_end": False, "empty_rows": False},
}
CAUSAL, LOCAL = "LowerTriangularFromBottomRightMask", "LowerTriangularFromBottomRightLocalAttentionMask"


@pytest.mark.parametrize(
    ("word", "requested", "expected"),
    [
        (None, {}, {}),
        (None, {"causal": True, "num_kv_heads": 6}, {"attn_bias": CAUSAL, "groups": None}),
        (None, {"dtype": "float32"}, {"operator": "cutlass", "groups": "repeated"}),
        (
            None,
            {"mask_shape": (2, 1, 1, 7), "causal": True},
            {"operator": "cutlass", "attn_bias": TENSOR, "groups": "repeated", "empty_rows": True},
        ),
        (None, {"head_dim": 320}, {"operator": "cutlass", "groups": "repeated"}),
        (
            None,
            {"causal": True, "alignment": "top_left"},
            {"operator": "cutlass", "attn_bias": "LowerTriangularMask", "groups": "repeated"},
        ),
        (None, {"softcap": 50.0}, None),
        ("flash", {"q_len": 9, "causal": True}, {"attn_bias": CAUSAL, "empty_rows": True}),
        ("flash", {"window": (2, 0)}, {"attn_bias": LOCAL, "window": {"_window_size": 3}}),
        ("flash", {"window": (2, None), "causal": True}, {"attn_bias": LOCAL, "window": {"_window_size": 3}}),
        (
            "flash",
            {"window": (2, 1)},
            {"attn_bias": "LocalAttentionFromBottomRightMask", "window": {"window_left": 2, "window_right": 1}},
        ),
        (
            "flash",
            {"window": (None, 1)},
            {"attn_bias": "LocalAttentionFromBottomRightMask", "window": {"window_left": 12, "window_right": 1}},
        ),
        ("flash", {"q_len": 1, "causal": True}, {}),
        ("flash", {"window": (6, 4)}, {}),
        ("flash", DOCUMENTS, {"attn_bias": "BlockDiagonalMask", "empty_rows": True}),
        (
            "flash",
            {**DOCUMENTS, "causal": True},
            {"attn_bias": "BlockDiagonalCausalFromBottomRightMask", "empty_rows": True},
        ),
        (
            "flash",
            {**DOCUMENTS, "window": (3, 0)},
            {
                "attn_bias": "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
                **{"window": {"_window_size": 4}, "empty_rows": True},
            },
        ),
        ("splitk", {"q_len": 1, "causal": True, "kv_len": 99}, {"operator": "splitk"}),
        (
            "splitk",
            {"causal": True},
            {
                **{"operator": "splitk", "attn_bias": "BlockDiagonalCausalWithOffsetPaddedKeysMask"},
                "laid_end_to_end": True,
            },
        ),
        (
            "splitk",
            {"q_len": 1, "kv_len": 99, "window": (9, None)},
            {
                **{"operator": "splitk", "attn_bias": "BlockDiagonalCausalLocalAttentionPaddedKeysMask"},
                **{"window": {"_window_size": 10}, "laid_end_to_end": True},
            },
        ),
        (
            "splitk",
            {"bias_shape": (1, 6, 5, 7)},
            {"operator": "splitk", "attn_bias": TENSOR, "empty_rows": True},
        ),
    ],
)
def test_lower(word: str | None, requested: dict[str, Any], expected: dict[str, Any] | None) -> None:
    spec = replace(SPEC, **requested)
    how = xformers.lower(spec) if word is None else xformers._lower(word, spec)
    assert how == ({"operator": None} if expected is None else {**PLAIN, **expected})


LONG: dict[str, Any] = {"batch": 8, "q_len": 2, "kv_len": 2**14, "num_heads": 32, "num_kv_heads": 8}
MASKED: dict[str, Any] = {**LONG, "mask_shape": (8, 1, 1, 2**14)}


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        (LONG, "splitk"),
        ({**LONG, "causal": True, "q_len": 16}, "splitk"),
        ({**MASKED, "q_len": 1}, "splitk"),
        ({**LONG, "bias_shape": (1, 32, 2, 2**14), "window": (9, 0), "num_kv_heads": 32}, "splitk"),
        ({**LONG, "q_len": 1}, "flash"),
        ({**LONG, "q_len": 17}, "flash"),
        ({**LONG, "num_kv_heads": 32}, "flash"),
        ({**LONG, "window": (9, 0)}, "flash"),
        ({**LONG, "batch": 4}, "flash"),
        ({**LONG, "needs_backward": True}, "flash"),
        ({**MASKED, "needs_backward": True}, "cutlass"),
        ({**MASKED, "mask_shape": (1, 1, 1, 2**12), "batch": 1, "kv_len": 2**12}, "cutlass"),
        ({**MASKED, "dtype": "float32"}, "cutlass"),
    ],
)
def test_split_kv_runs_long_decoding(requested: dict[str, Any], expected: str) -> None:
    spec = replace(SPEC, **requested)
    assert xformers.lower(spec)["operator"] == expected
    assert xformers.modelled(spec) is (expected == "splitk")
    assert ("xformers" in preference.predicted(spec, "torch", "sm90")) is (expected == "splitk")


def test_split_kv_runs_what_no_other_operator_can() -> None:
    spec = replace(SPEC, bias_shape=(1, 6, 5, 7), bias_dtype="float32")
    assert xformers.lower(spec)["operator"] == "splitk" and not xformers.modelled(spec)
    assert xformers.lower(replace(spec, needs_backward=True))["operator"] is None


def reasons(word: str | None = None, target: Target = SM90, **requested: Any) -> tuple[str, ...]:
    """The reasons against an operator, or against the backend."""
    spec = replace(SPEC, **requested)
    return refusals("xformers", spec, target) if word is None else xformers._misfits(word, spec)


@pytest.mark.parametrize(
    ("word", "requested", "says"),
    [
        ("flash", {"q_len": 9, "window": (2, 1)}, "misplaces windows with an open or positive right side"),
        ("flash", {**DOCUMENTS, "window": (2, 1)}, "in each of 3 documents: the xformers flash kernel has no"),
        ("flash", {"causal": True, "alignment": "top_left"}, "the xformers flash kernel has bottom_right"),
        ("flash", {"dtype": "float32"}, "the xformers flash kernel takes bfloat16, float16"),
        ("flash", {"head_dim": 264}, "head_dim=264: the xformers flash kernel stops at 256"),
        ("flash", {"deterministic": True, "needs_backward": True}, "backward: deterministic=True"),
        (
            "flash",
            {"mask_shape": (1, 1, 5, 7)},
            "mask of shape [1, 1, 5, 7]: the xformers flash kernel has none",
        ),
        ("flash", {"softcap": 9.0}, "softcap=9.0: the xformers flash kernel has none"),
        ("cutlass", {"window": (2, 0), "needs_backward": True}, "gives infs and NaNs for windows"),
        (
            "cutlass",
            {"window": (2, 1)},
            "window=(2, 1), alignment=bottom_right with q_len 5 and kv_len 7: the",
        ),
        (
            "cutlass",
            {"window": (2, 0), "alignment": "top_left"},
            "the xformers CUTLASS kernel has no such mask",
        ),
        (
            "cutlass",
            {"q_len": 9, "causal": True},
            "the xformers CUTLASS kernel is undefined for rows that see no key",
        ),
        (
            "cutlass",
            {"bias_shape": (1, 6, 5, 7), "bias_dtype": "float32"},
            "bias in float32 with bfloat16: the xformers CUTLASS",
        ),
        ("cutlass", DOCUMENTS, "seq_info with packed documents: the xformers CUTLASS kernel has none"),
        ("cutlass", {"kv_len": 2**23}, "3221225472 elements in a row of q, k or v"),
        ("splitk", {"q_len": 17, "causal": True, "kv_len": 40}, "the xformers split-KV kernel masks up to 16"),
        ("splitk", {"window": (2, 1)}, "the xformers split-KV kernel has no such mask"),
        (
            "splitk",
            {"q_len": 2**17, "head_dim": 80, "value_dim": 80},
            "counts the 12884901888 elements of its partial results in 32 bits",
        ),
        ("splitk", {"needs_backward": True}, "backward: the xformers split-KV kernel has no gradient"),
        (None, {"dropout": 0.1}, "dropout=0.1: xformers has none"),
        (
            None,
            {"mask_shape": (1, 1, 5, 7), **DOCUMENTS},
            "packed documents: the xformers CUTLASS kernel has none",
        ),
        (None, {"window": (2, 1), "dtype": "float32"}, "dtype float32: the xformers flash kernel takes"),
    ],
)
def test_refusals_name_value_and_limit(word: str | None, requested: dict[str, Any], says: str) -> None:
    assert any(says in why for why in reasons(word, **requested)), reasons(word, **requested)


@pytest.mark.parametrize("word", [None, *WORDS])
def test_calls_that_every_operator_supports(word: str | None) -> None:
    for requested in (
        {},
        {"causal": True},
        {"sinks": True},
        {"return_lse": True},
        {"value_dim": 24},
        {"deterministic": True},
    ):
        assert reasons(word, **requested) == ()
    assert reasons(target=Target("torch", "cpu"))[0].startswith("device cpu: ")
    assert reasons(target=Target("torch", "sm80")) == ()


def test_the_reasons_of_all_operators_are_listed_once() -> None:
    actual = reasons(mask_shape=(1, 1, 5, 7), **DOCUMENTS)
    assert actual == (
        "mask of shape [1, 1, 5, 7]: the xformers flash kernel has none",
        "seq_info with packed documents: the xformers CUTLASS kernel has none",
        "seq_info with packed documents: the xformers split-KV kernel has none",
    )
    assert reasons(softcap=3.0) == ("softcap=3.0: xformers has none",)
    training = reasons(window=(2, 0), dtype="float32", needs_backward=True)
    assert len(training) == 2 and "flash kernel takes" in training[0] and "infs and NaNs" in training[1]


def test_the_limits_of_an_unusual_build_are_reasons() -> None:
    forward_only = Target("torch", "sm90", builds=(("xformers", Build("fa2F@pip_pkg", ("backward",))),))
    assert reasons(target=forward_only) == ()
    (why,) = reasons(target=forward_only, needs_backward=True)
    assert why.startswith("backward: xformers") and why.endswith("has no gradient")
    narrow = Target("torch", "sm90", builds=(("xformers", Build("fa2F@2.8.3", head_dims=(64, 128))),))
    assert reasons(target=narrow, head_dim=192, value_dim=192) == ("head_dim=192: xformers (fa2F@2.8.3) stops at 128",)


def test_a_missing_package_is_the_reason() -> None:
    try:
        import xformers as package  # noqa: F401
    except ImportError:
        version, why = backends.availability("xformers", "cuda")
        assert version is None and "ModuleNotFoundError: No module named '" in str(why)
    else:
        pytest.skip("xformers is installed")


# The arithmetic around the kernels, with stand-ins that follow xformers' conventions

torch = pytest.importorskip("torch")
import kernel_stand_ins
from direct_calls import assert_right, rewritten

from torch_frontend import attention


class StandIn:
    """``xformers.ops.fmha`` for one operator, in float64: its shapes, its log-sum-exp, and the conditions that it
    checks."""

    attn_bias: Any

    def __init__(self, word: str) -> None:
        self.word, self.attn_bias = word, SimpleNamespace()
        for name in ("_SeqLenInfo", "_PaddedSeqLenInfo"):
            setattr(self.attn_bias, name, SimpleNamespace)
        for name in [*xformers._FLASH_MASKS[1:], *xformers._ROW_MASKS.values(), "LowerTriangularMask"]:
            setattr(self.attn_bias, str(name), lambda name=name, **fields: SimpleNamespace(name=name, **fields))

    def added(self, mask: Any, q: Any, k: Any) -> Any:
        """``[batch or 1, heads, q_len, kv_len]`` or ``[q_len, kv_len]`` to add to the scores."""
        if mask is None or isinstance(mask, torch.Tensor):
            if mask is not None and self.word == "cutlass":
                assert mask.dtype == q.dtype and mask.stride(-1) == 1 and not any(s % 8 for s in mask.stride()[:-1])
            return 0.0 if mask is None else mask.double().expand(-1, *q.shape[2:-1], -1, -1).flatten(1, -3)
        window = {name: value for name, value in vars(mask).items() if "window" in name}
        if hasattr(mask, "q_seqinfo"):
            sides = (mask.q_seqinfo, mask.k_seqinfo)
            assert self.word == "splitk" or all(info.seqstart_py == [] for info in sides)
            name = mask.name.replace("WithOffsetPaddedKeys", "FromBottomRight").replace("PaddedKeys", "FromBottomRight")
            seen = seen_in_documents(Mask(name, window), *(info.seqstart.numpy() for info in sides))
        else:
            seen = seen_by(Mask(mask.name, window), q.shape[1], k.shape[1])
        return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~torch.from_numpy(seen), -torch.inf)

    def memory_efficient_attention_forward_requires_grad(
        self, q: Any, k: Any, v: Any, mask: Any, p: float, scale: float, *, op: Any
    ) -> tuple[Any, Any]:
        assert q.shape[2:-1] == k.shape[2:-1] and q.shape[0] == k.shape[0] and not torch.is_grad_enabled()
        assert q.dim() == 4 or (self.word != "cutlass" and k.stride(3) == 0 and q.stride(3) != 0)
        score = kernel_stand_ins.Score(scale, bias=self.added(mask, q, k))
        out, lse = kernel_stand_ins.forward(*(x.flatten(2, -2) for x in (q, k, v)), True, score)
        out, lse = out.reshape(q.shape[:-1] + v.shape[-1:]), lse.unflatten(1, q.shape[2:-1])
        if self.word == "flash":
            lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        if self.word == "cutlass":
            lse = lse.masked_fill(lse == -torch.inf, 0.0)
            lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
        return out.to(q.dtype), lse.float()

    def memory_efficient_attention_backward(
        self, dout: Any, out: Any, lse: Any, q: Any, k: Any, v: Any, mask: Any, p: float, scale: float, *, op: Any
    ) -> tuple[Any, Any, Any]:
        assert q.dim() == 4 and q.shape[2] == k.shape[2] and lse.shape == (q.shape[0], q.shape[2], q.shape[1])
        assert not (lse == -torch.inf).any()
        score = kernel_stand_ins.Score(scale, bias=self.added(mask, q, k))
        dq, dk, dv, _ = kernel_stand_ins.backward(q, k, v, out, dout, lse, True, score)
        return dq.float(), dk.float(), dv.float()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(word: str) -> Any:
        monkeypatch.setattr(operators, "load_operator", lambda requested: (StandIn(requested), None, None))
        monkeypatch.setattr(operators, "flash_widths", lambda: (64, 128))
        return xformers._kernel(word)

    return use


PACKED_CALL = {**PACKED, "max_len_q": 6, "max_len_k": 5}
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "plain": (WORDS, {}),
    "as many heads": (WORDS, {"num_kv_heads": 9}),
    "one kv head": (WORDS, {"num_kv_heads": 1}),
    "causal": (WORDS, {"causal": True}),
    "causal with empty rows": (("flash", "splitk"), {"causal": True, "q_len": 7, "kv_len": 5}),
    "causal top_left": (("cutlass",), {"causal": True, "alignment": "top_left"}),
    "causal window": (("flash", "splitk"), {"window": (2, 0)}),
    "window": (("flash",), {"window": (2, 1)}),
    "sinks": (WORDS, {"sinks": True, "causal": True}),
    "packed": (("flash",), PACKED_CALL),
    "packed, causal": (("flash",), {**PACKED_CALL, "causal": True, "sinks": True}),
    "packed, causal window": (("flash",), {**PACKED_CALL, "window": (1, 0)}),
    "mask": (("cutlass", "splitk"), {"mask_shape": (2, 9, 5, 7)}),
    "mask by key": (("cutlass", "splitk"), {"mask_shape": (2, 1, 1, 7), "causal": True, "q_len": 9}),
    "mask and window": (("cutlass", "splitk"), {"mask_shape": (1, 1, 5, 1), "window": (1, 1), "alignment": "top_left"}),
    "bias": (("cutlass", "splitk"), {"bias_shape": (1, 9, 1, 7), "mask_shape": (2, 1, 5, 1)}),
    "long rows": (("cutlass",), {"q_len": 67, "kv_len": 71, "causal": True}),
}


OF_OPERATORS = [(name, word) for name, (words, _) in CASES.items() for word in words]


def check(name: str, word: str, dtype: str, device: str) -> None:
    """Judges the forward and backward of one operator by the reference."""
    kernel, requested = xformers._kernel(word), CASES[name][1]
    learns = word != "splitk" and not (word == "cutlass" and "window" in requested and "mask" not in name)
    case = make({**requested, "needs_backward": learns, "return_lse": True}, dtype)
    assert list(xformers._refuses(word, case.spec)) == []
    assert_right(rewritten(kernel), case, device=device)


@pytest.mark.parametrize(("name", "word"), OF_OPERATORS)
def test_forward_and_backward_match_the_reference(name: str, word: str, stand_in: Any) -> None:
    stand_in(word)
    check(name, word, "float32", "cpu")


@pytest.fixture
def installed() -> None:
    why = backends.availability("xformers", "cuda")[1]
    if why is not None:
        pytest.skip(why)


@pytest.mark.cuda
@pytest.mark.parametrize(("name", "word"), OF_OPERATORS)
def test_each_operator_matches_the_reference(name: str, word: str, installed: None) -> None:
    check(name, word, "bfloat16", "cuda")


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("word", "requested"),
    [("flash", {"causal": True}), ("cutlass", {"mask_shape": (2, 1, 1, 7)}), ("splitk", {**MASKED, "q_len": 1})],
)
def test_the_operator_that_runs_a_call_is_the_one_named(
    word: str, requested: dict[str, Any], installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, forward = [], operators.forward

    def watched(how: dict[str, Any], *arguments: Any) -> Any:
        ran.append(how["operator"])
        return forward(how, *arguments)

    monkeypatch.setattr(operators, "forward", watched)
    spec = replace(SPEC, **requested)
    torch.manual_seed(0)
    queries = (spec.batch, spec.q_len, spec.num_heads, spec.head_dim)
    keys = (spec.batch, spec.kv_len, spec.num_kv_heads)
    shapes = (queries, (*keys, spec.head_dim), (*keys, spec.value_dim))
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
    mask = None if spec.mask_shape is None else torch.rand(spec.mask_shape, device="cuda") < 0.5
    out, expected = (
        attention(q, k, v, mask=mask, causal=spec.causal, scale=spec.scale, backend=name)
        for name in ("xformers", "math")
    )
    assert ran == [word]
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def test_gradients_of_a_group_are_summed_in_float32() -> None:
    ones = torch.ones((1, 1, 512, 1), dtype=torch.bfloat16)
    ones[..., 0, :] = 512.0
    assert operators.by_kv_head(ones, 1).item() == torch.tensor(1023.0).to(torch.bfloat16).item()
    repeated = operators._repeated(replace(SPEC), torch.arange(3.0).view(1, 1, 3, 1))
    assert repeated.flatten().tolist() == [0, 0, 1, 1, 2, 2]


def test_added_tensors_are_small_and_aligned() -> None:
    spec = replace(SPEC, mask_shape=(2, 1, 1, 7), dtype="float16")
    q = torch.zeros(2, 5, 6, 64, dtype=torch.float16)
    added = added_tensor(spec, Inputs(q, None, None, mask=torch.ones(2, 1, 1, 7, dtype=torch.bool)), q.dtype)
    assert added.shape == (2, 6, 5, 7) and added.dtype == torch.float16
    assert added.stride() == (8, 0, 0, 1) and added.untyped_storage().nbytes() == 2 * 8 * 2


@pytest.mark.parametrize(
    ("word", "installed", "expected"),
    [
        ("flash", (32, 64, 96, 128, 192, 256), {1: 8, 11: 16, 72: 72, 96: 96, 250: 256}),
        ("flash", (64, 128), {1: 64, 40: 40, 64: 64, 72: 128, 100: 104, 128: 128}),
        ("cutlass", (), {1: 8, 64: 64, 65: 72, 700: 704}),
        ("splitk", (), {1: 16, 17: 32, 64: 64, 96: 128, 512: 512}),
    ],
)
def test_the_probed_widths(
    word: str, installed: Any, expected: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "flash_widths", lambda: installed)
    assert {dim: operators.width(word, dim) for dim in expected} == expected


@pytest.mark.parametrize(
    ("runs", "build"),
    [
        ({"forward": (64, 128), "backward": True}, Build("fa2F@9", (), head_dims=(64, 128))),
        ({"forward": (32, 64, 96, 128, 192, 256), "backward": True}, Build("fa2F@9")),
        ({"forward": (32, 64, 96, 128, 192, 256), "backward": False}, Build("fa2F@9", ("backward",))),
    ],
)
def test_builds_are_probed_by_a_small_call(runs: Any, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    fmha = SimpleNamespace(flash=SimpleNamespace())
    monkeypatch.setattr(operators, "load_operator", lambda word: (fmha, SimpleNamespace(NAME="fa2F@9"), None))

    def stand_in(width: int, *, backward: bool = False) -> bool:
        return runs["backward"] if backward else width in runs["forward"]

    monkeypatch.setattr(operators, "runs", stand_in)
    operators.flash_widths.cache_clear()
    try:
        assert xformers.build() == build
    finally:
        operators.flash_widths.cache_clear()
