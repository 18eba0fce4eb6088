"""Tests xformers' backends without a GPU: masks, arguments and refusals as data, and the arithmetic around the
kernels."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from callers_view import callers_results
from oracle_cases import LENGTHS_K, LENGTHS_Q, PACKED, make

from attn_core import AttentionSpec, Target, backends
from attn_core.backends.support import Build
from attn_core.backends.xformers import backend as xformers
from attn_core.backends.xformers import operators
from attn_core.backends.xformers.bias import NO_CLASS, TENSOR, Mask, added_tensor, documents_mask, mask_of, rows_mask
from attn_core.call.masks import visible
from attn_core.call.tensors import Gradients, Inputs
from attn_core.selection import refusals

WORDS = ("flash", "cutlass", "flash3", "splitk")
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
    how = backends.load("xformers_splitk").lower(spec)
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
    ("name", "requested", "expected"),
    [
        ("xformers", {}, {}),
        ("xformers", {"causal": True, "num_kv_heads": 6}, {"attn_bias": CAUSAL, "groups": None}),
        ("xformers", {"dtype": "float32"}, {"operator": "cutlass", "groups": "repeated"}),
        (
            "xformers",
            {"mask_shape": (2, 1, 1, 7), "causal": True},
            {"operator": "cutlass", "attn_bias": TENSOR, "groups": "repeated", "empty_rows": True},
        ),
        ("xformers", {"head_dim": 320}, {"operator": "cutlass", "groups": "repeated"}),
        (
            "xformers",
            {"causal": True, "alignment": "top_left"},
            {"operator": "cutlass", "attn_bias": "LowerTriangularMask", "groups": "repeated"},
        ),
        ("xformers", {"softcap": 50.0}, None),
        ("xformers_flash", {"q_len": 9, "causal": True}, {"attn_bias": CAUSAL, "empty_rows": True}),
        ("xformers_flash", {"window": (2, 0)}, {"attn_bias": LOCAL, "window": {"_window_size": 3}}),
        ("xformers_flash", {"window": (2, None), "causal": True}, {"attn_bias": LOCAL, "window": {"_window_size": 3}}),
        (
            "xformers_flash",
            {"window": (2, 1)},
            {"attn_bias": "LocalAttentionFromBottomRightMask", "window": {"window_left": 2, "window_right": 1}},
        ),
        (
            "xformers_flash",
            {"window": (None, 1)},
            {"attn_bias": "LocalAttentionFromBottomRightMask", "window": {"window_left": 12, "window_right": 1}},
        ),
        ("xformers_flash", {"q_len": 1, "causal": True}, {}),
        ("xformers_flash", {"window": (6, 4)}, {}),
        ("xformers_flash", DOCUMENTS, {"attn_bias": "BlockDiagonalMask", "empty_rows": True}),
        (
            "xformers_flash3",
            {**DOCUMENTS, "causal": True},
            {"operator": "flash3", "attn_bias": "BlockDiagonalCausalFromBottomRightMask", "empty_rows": True},
        ),
        (
            "xformers_flash",
            {**DOCUMENTS, "window": (3, 0)},
            {
                "attn_bias": "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
                **{"window": {"_window_size": 4}, "empty_rows": True},
            },
        ),
        ("xformers_splitk", {"q_len": 1, "causal": True, "kv_len": 99}, {"operator": "splitk"}),
        (
            "xformers_splitk",
            {"causal": True},
            {
                **{"operator": "splitk", "attn_bias": "BlockDiagonalCausalWithOffsetPaddedKeysMask"},
                "laid_end_to_end": True,
            },
        ),
        (
            "xformers_splitk",
            {"q_len": 1, "kv_len": 99, "window": (9, None)},
            {
                **{"operator": "splitk", "attn_bias": "BlockDiagonalCausalLocalAttentionPaddedKeysMask"},
                **{"window": {"_window_size": 10}, "laid_end_to_end": True},
            },
        ),
        (
            "xformers_splitk",
            {"bias_shape": (1, 6, 5, 7)},
            {"operator": "splitk", "attn_bias": TENSOR, "empty_rows": True},
        ),
    ],
)
def test_lower(name: str, requested: dict[str, Any], expected: dict[str, Any] | None) -> None:
    module: Any = backends.load(name)
    assert module.lower(replace(SPEC, **requested)) == (
        {"operator": None} if expected is None else {**PLAIN, **expected}
    )


def reasons(name: str, target: Target = SM90, **requested: Any) -> tuple[str, ...]:
    return refusals(name, replace(SPEC, **requested), target)


@pytest.mark.parametrize(
    ("name", "requested", "says"),
    [
        ("xformers_flash", {"q_len": 9, "window": (2, 1)}, "misplaces windows with an open or positive right side"),
        ("xformers_flash", {**DOCUMENTS, "window": (2, 1)}, "in each of 3 documents: the xformers flash kernel has no"),
        ("xformers_flash", {"causal": True, "alignment": "top_left"}, "the xformers flash kernel has bottom_right"),
        ("xformers_flash", {"dtype": "float32"}, "the xformers flash kernel takes bfloat16, float16"),
        ("xformers_flash", {"head_dim": 264}, "head_dim=264: the xformers flash kernel stops at 256"),
        ("xformers_flash", {"deterministic": True, "needs_backward": True}, "backward: deterministic=True"),
        (
            "xformers_flash",
            {"mask_shape": (1, 1, 5, 7)},
            "mask of shape [1, 1, 5, 7]: the xformers flash kernel has none",
        ),
        ("xformers_flash3", {"softcap": 9.0}, "softcap=9.0: the xformers FlashAttention-3 kernel has none"),
        ("xformers_cutlass", {"window": (2, 0), "needs_backward": True}, "gives infs and NaNs for windows"),
        (
            "xformers_cutlass",
            {"window": (2, 1)},
            "window=(2, 1), alignment=bottom_right with q_len 5 and kv_len 7: the",
        ),
        (
            "xformers_cutlass",
            {"window": (2, 0), "alignment": "top_left"},
            "the xformers CUTLASS kernel has no such mask",
        ),
        (
            "xformers_cutlass",
            {"q_len": 9, "causal": True},
            "the xformers CUTLASS kernel is undefined for rows that see no key",
        ),
        (
            "xformers_cutlass",
            {"bias_shape": (1, 6, 5, 7), "bias_dtype": "float32"},
            "bias in float32 with bfloat16: the xformers CUTLASS",
        ),
        ("xformers_cutlass", DOCUMENTS, "seq_info with packed documents: the xformers CUTLASS kernel has none"),
        ("xformers_cutlass", {"kv_len": 2**23}, "3221225472 elements in a row of q, k or v"),
        ("xformers_splitk", {"q_len": 17, "causal": True, "kv_len": 40}, "the xformers split-KV kernel masks up to 16"),
        ("xformers_splitk", {"window": (2, 1)}, "the xformers split-KV kernel has no such mask"),
        (
            "xformers_splitk",
            {"q_len": 2**17, "head_dim": 80, "value_dim": 80},
            "counts the 12884901888 elements of its partial results in 32 bits",
        ),
        ("xformers_splitk", {"needs_backward": True}, "backward: the xformers split-KV kernel has no gradient"),
        ("xformers", {"dropout": 0.1}, "dropout=0.1: xformers has none"),
        (
            "xformers",
            {"mask_shape": (1, 1, 5, 7), **DOCUMENTS},
            "packed documents: the xformers CUTLASS kernel has none",
        ),
        ("xformers", {"window": (2, 1), "dtype": "float32"}, "dtype float32: the xformers flash kernel takes"),
    ],
)
def test_refusals_name_value_and_limit(name: str, requested: dict[str, Any], says: str) -> None:
    assert any(says in why for why in reasons(name, **requested)), reasons(name, **requested)


@pytest.mark.parametrize("name", ["xformers", *(f"xformers_{word}" for word in WORDS)])
def test_calls_that_every_operator_supports(name: str) -> None:
    for requested in (
        {},
        {"causal": True},
        {"sinks": True},
        {"return_lse": True},
        {"value_dim": 24},
        {"deterministic": True},
    ):
        assert reasons(name, **requested) == ()
    assert reasons(name, Target("torch", "cpu"))[0].startswith("device cpu: ")
    assert (reasons(name, Target("torch", "sm80")) == ()) is (name != "xformers_flash3")


def test_the_reasons_of_both_operators_are_listed_once() -> None:
    actual = reasons("xformers", mask_shape=(1, 1, 5, 7), **DOCUMENTS)
    assert actual == (
        "mask of shape [1, 1, 5, 7]: the xformers flash kernel has none",
        "seq_info with packed documents: the xformers CUTLASS kernel has none",
    )
    assert reasons("xformers", softcap=3.0) == ("softcap=3.0: xformers has none",)
    training = reasons("xformers", window=(2, 0), dtype="float32", needs_backward=True)
    assert len(training) == 2 and "flash kernel takes" in training[0] and "infs and NaNs" in training[1]


def test_the_limits_of_an_unusual_build_are_reasons() -> None:
    forward_only = Target("torch", "sm90", builds=(("xformers_flash3", Build("fa3F@pip_pkg", ("backward",))),))
    assert reasons("xformers_flash3", forward_only) == ()
    (why,) = reasons("xformers_flash3", forward_only, needs_backward=True)
    assert why.startswith("backward: the xformers FlashAttention-3 kernel") and why.endswith("has no gradient")
    narrow = Target("torch", "sm90", builds=(("xformers_flash", Build("fa2F@2.8.3", head_dims=(64, 128))),))
    assert reasons("xformers_flash", narrow, head_dim=192, value_dim=192) == (
        "head_dim=192: the xformers flash kernel (fa2F@2.8.3) stops at 128",
    )


def test_a_missing_package_is_the_reason() -> None:
    try:
        import xformers as package  # noqa: F401
    except ImportError:
        for name in ("xformers", "xformers_cutlass"):
            version, why = backends.availability(name, "cuda")
            assert version is None and "ModuleNotFoundError: No module named 'xformers" in str(why)
    else:
        pytest.skip("xformers is installed")


# The arithmetic around the kernels, with stand-ins that follow xformers' conventions

torch = pytest.importorskip("torch")
from attn_core.correctness import accuracy


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
        """``[batch or 1, heads or 1, q_len, kv_len]`` to add to the scores."""
        if mask is None or isinstance(mask, torch.Tensor):
            if mask is not None and self.word == "cutlass":
                assert mask.dtype == q.dtype and mask.stride(-1) == 1 and not any(s % 8 for s in mask.stride()[:-1])
            return torch.zeros(()) if mask is None else mask.double()
        window = {name: value for name, value in vars(mask).items() if "window" in name}
        if hasattr(mask, "q_seqinfo"):
            sides = (mask.q_seqinfo, mask.k_seqinfo)
            assert self.word == "splitk" or all(info.seqstart_py == [] for info in sides)
            name = mask.name.replace("WithOffsetPaddedKeys", "FromBottomRight").replace("PaddedKeys", "FromBottomRight")
            seen = seen_in_documents(Mask(name, window), *(info.seqstart.numpy() for info in sides))
        else:
            seen = seen_by(Mask(mask.name, window), q.shape[1], k.shape[1])
        return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~torch.from_numpy(seen), -torch.inf)

    def scores(self, q: Any, k: Any, mask: Any, scale: float) -> Any:
        """``[batch, heads..., q_len, kv_len]``"""
        added = self.added(mask, q, k)
        heads_first = [x.double().movedim(1, -2) for x in (q, k)]
        return scale * heads_first[0] @ heads_first[1].mT + added

    def memory_efficient_attention_forward_requires_grad(
        self, q: Any, k: Any, v: Any, mask: Any, p: float, scale: float, *, op: Any
    ) -> tuple[Any, Any]:
        assert q.shape[2:-1] == k.shape[2:-1] and q.shape[0] == k.shape[0] and not torch.is_grad_enabled()
        assert q.dim() == 4 or (self.word != "cutlass" and k.stride(3) == 0 and q.stride(3) != 0)
        scores = self.scores(q, k, mask, scale)
        lse = scores.logsumexp(-1)
        out = (torch.softmax(scores, -1).nan_to_num() @ v.double().movedim(1, -2)).movedim(-2, 1)
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
        weights = torch.exp(self.scores(q, k, mask, scale) - lse[..., None].double())
        dout, out, q, k, v = (x.double().movedim(1, -2) for x in (dout, out, q, k, v))
        dscores = scale * weights * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
        actual = (dscores @ k, dscores.mT @ q, weights.mT @ dout)
        return tuple(x.movedim(-2, 1).float() for x in actual)  # type: ignore[return-value]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(word: str) -> Any:
        monkeypatch.setattr(operators, "load_operator", lambda requested: (StandIn(requested), None, None))
        monkeypatch.setattr(operators, "widths", lambda requested: (64, 128))
        return backends.load(f"xformers_{word}")

    return use


PACKED_CALL = {**PACKED, "max_len_q": 6, "max_len_k": 5}
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "plain": (WORDS, {}),
    "as many heads": (WORDS, {"num_kv_heads": 9}),
    "one kv head": (WORDS, {"num_kv_heads": 1}),
    "causal": (WORDS, {"causal": True}),
    "causal with empty rows": (("flash", "flash3", "splitk"), {"causal": True, "q_len": 7, "kv_len": 5}),
    "causal top_left": (("cutlass",), {"causal": True, "alignment": "top_left"}),
    "causal window": (("flash", "flash3", "splitk"), {"window": (2, 0)}),
    "window": (("flash", "flash3"), {"window": (2, 1)}),
    "sinks": (WORDS, {"sinks": True, "causal": True}),
    "packed": (("flash", "flash3"), PACKED_CALL),
    "packed, causal": (("flash", "flash3"), {**PACKED_CALL, "causal": True, "sinks": True}),
    "packed, causal window": (("flash",), {**PACKED_CALL, "window": (1, 0)}),
    "mask": (("cutlass", "splitk"), {"mask_shape": (2, 9, 5, 7)}),
    "mask by key": (("cutlass", "splitk"), {"mask_shape": (2, 1, 1, 7), "causal": True, "q_len": 9}),
    "mask and window": (("cutlass", "splitk"), {"mask_shape": (1, 1, 5, 1), "window": (1, 1), "alignment": "top_left"}),
    "bias": (("cutlass", "splitk"), {"bias_shape": (1, 9, 1, 7), "mask_shape": (2, 1, 5, 1)}),
    "long rows": (("cutlass",), {"q_len": 67, "kv_len": 71, "causal": True}),
}


@pytest.mark.parametrize(("name", "word"), [(name, word) for name, (words, _) in CASES.items() for word in words])
def test_forward_and_backward_match_the_reference(name: str, word: str, stand_in: Any) -> None:
    module, requested = stand_in(word), CASES[name][1]
    learns = module.BACKWARD is not None and not (word == "cutlass" and "window" in requested and "mask" not in name)
    case = make({**requested, "needs_backward": learns, "return_lse": True}, "float32")
    refused = [why for why in reasons_of(module, case.spec) if "takes bfloat16" not in why]
    assert refused == []
    kinds = {
        name: None if array is None else torch.from_numpy(np.asarray(array))
        for name, array in case.inputs._asdict().items()
    }
    inputs = Inputs(**{k: x.float() if x is not None and x.is_floating_point() else x for k, x in kinds.items()})
    out, lse = module.forward(case.spec, inputs)
    assert out.shape == case.spec.out_shape and lse.shape == case.spec.lse_shape and lse.dtype == torch.float32
    dlse = case.dlse if learns else None
    expected = accuracy.expect(case.spec, case.inputs, dout=case.dout if learns else None, dlse=dlse)
    gradients = None
    if learns:
        dout = torch.from_numpy(case.dout).float()
        actual = module.backward(case.spec, inputs, out, lse, dout, torch.from_numpy(case.dlse).float())
        gradients = Gradients(*(None if part is None else part.double().numpy() for part in actual))
    lse, gradients = callers_results(case.spec, case.inputs, lse, gradients, dlse)
    verdict = expected.judge(out=out.double().numpy(), lse=lse, gradients=gradients)
    assert verdict.ok, verdict


def reasons_of(module: Any, spec: AttentionSpec) -> tuple[str, ...]:
    return module.refuses(spec, "sm90", None)


def test_gradients_of_a_group_are_summed_in_float32() -> None:
    spec = replace(SPEC, num_heads=512, num_kv_heads=1)
    ones = torch.ones((1, 1, 512, 1), dtype=torch.bfloat16)
    ones[..., 0, :] = 512.0
    assert operators._summed(spec, ones).item() == torch.tensor(1023.0).to(torch.bfloat16).item()
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
        ("flash3", (64, 128, 192, 256), {1: 64, 65: 72, 128: 128, 250: 256}),
        ("cutlass", (), {1: 8, 64: 64, 65: 72, 700: 704}),
        ("splitk", (), {1: 16, 17: 32, 64: 64, 96: 128, 512: 512}),
    ],
)
def test_the_probed_widths(
    word: str, installed: Any, expected: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "widths", lambda requested: installed)
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

    def stand_in(word: str, width: int, *, backward: bool = False) -> bool:
        return runs["backward"] if backward else width in runs["forward"]

    monkeypatch.setattr(operators, "runs", stand_in)
    operators.widths.cache_clear()
    try:
        assert backends.load("xformers_flash").build() == xformers.build() == build  # type: ignore[union-attr]
        assert backends.load("xformers_cutlass").build() is None  # type: ignore[union-attr]
    finally:
        operators.widths.cache_clear()
