"""Tests mask objects of xformers and torch: read into the options of a call, or refused with what to pass instead."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from attn_core import SeqInfo
from attn_core.call.hints import MASKS, Meaning
from attn_core.errors import ShapeError, SpecError
from torch_frontend import attention, attention_qkvpacked, explain
from torch_frontend.module import Attention

Tensor = torch.Tensor
MODULES = ("xformers.ops.fmha.attn_bias", "mslk.attention.fmha.attn_bias")
LENGTHS, LENGTHS_K = [3, 1, 4], [5, 2, 4]
QUERIES, KEYS, HEADS, DIM = sum(LENGTHS), sum(LENGTHS_K), 2, 8


def starts(lengths: list[int], on_host: bool = True) -> SimpleNamespace:
    """What xformers' _SeqLenInfo has."""
    offsets = np.cumsum([0, *lengths]).astype(np.int32)
    held = offsets.tolist() if on_host else []
    return SimpleNamespace(seqstart=torch.from_numpy(offsets), seqstart_py=held, max_seqlen=max(lengths))


def blocks(lengths: list[int] = LENGTHS, lengths_k: list[int] | None = LENGTHS_K, **window: int) -> dict[str, Any]:
    sides = {"q_seqinfo": starts(lengths)}
    return sides | {"k_seqinfo": sides["q_seqinfo"] if lengths_k is None else starts(lengths_k)} | window


def xformers_object(name: str, module: str = MODULES[0], **fields: Any) -> Any:
    """Stands for an object of xformers' class of that name."""
    kind = type(name, (), {"__module__": module})
    value = kind()
    vars(value).update(fields)
    return value


def band(left: int | None, right: int, offset: int, rows: int, columns: int) -> np.ndarray:
    distance = np.arange(columns) - (np.arange(rows)[:, None] + offset)
    return (distance <= right) & (True if left is None else distance >= -left)


def in_blocks(part: Callable[[int, int], np.ndarray]) -> np.ndarray:
    seen = np.zeros((QUERIES, KEYS), bool)
    for (q, q_end), (k, k_end) in zip(
        pairwise(np.cumsum([0, *LENGTHS])), pairwise(np.cumsum([0, *LENGTHS_K])), strict=True
    ):
        seen[q:q_end, k:k_end] = part(q_end - q, k_end - k)
    return seen


BIAS = torch.randn(1, HEADS, QUERIES, KEYS)
OBJECTS: dict[str, tuple[dict[str, Any], np.ndarray]] = {
    "BlockDiagonalMask": (blocks(), in_blocks(lambda q, k: np.ones((q, k), bool))),
    "BlockDiagonalCausalMask": (blocks(), in_blocks(lambda q, k: band(None, 0, 0, q, k))),
    "BlockDiagonalCausalFromBottomRightMask": (blocks(), in_blocks(lambda q, k: band(None, 0, k - q, q, k))),
    "BlockDiagonalCausalLocalAttentionMask": (
        blocks(_window_size=2),
        in_blocks(lambda q, k: band(1, 0, 0, q, k)),
    ),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (
        blocks(_window_size=2),
        in_blocks(lambda q, k: band(1, 0, k - q, q, k)),
    ),
    "LowerTriangularMask": ({}, band(None, 0, 0, QUERIES, KEYS)),
    "LowerTriangularMaskWithTensorBias": ({"_bias": BIAS}, band(None, 0, 0, QUERIES, KEYS)),
    "LowerTriangularFromBottomRightMask": ({}, band(None, 0, KEYS - QUERIES, QUERIES, KEYS)),
    "LowerTriangularFromBottomRightLocalAttentionMask": (
        {"_window_size": 3},
        band(2, 0, KEYS - QUERIES, QUERIES, KEYS),
    ),
    "LocalAttentionFromBottomRightMask": (
        {"window_left": 2, "window_right": 1},
        band(2, 1, KEYS - QUERIES, QUERIES, KEYS),
    ),
}
"""By class: its attributes, and the pairs that it shows according to xformers' ``materialize``."""


def tensors() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, length, HEADS, DIM) for length in (QUERIES, KEYS, KEYS)]


def right(name: str, seen: np.ndarray) -> Tensor:
    bias = BIAS if name == "LowerTriangularMaskWithTensorBias" else None
    return attention(*tensors(), mask=torch.from_numpy(seen)[None, None], bias=bias)


def test_every_class_that_is_read_is_tested() -> None:
    assert OBJECTS.keys() == {name for name, meaning in MASKS.items() if isinstance(meaning, Meaning)}


@pytest.mark.parametrize("argument", ["mask", "bias"])
@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_is_read_exactly(name: str, argument: str) -> None:
    fields, seen = OBJECTS[name]
    for module in MODULES:
        value = {argument: xformers_object(name, module, **fields)}
        torch.testing.assert_close(attention(*tensors(), **value), right(name, seen), rtol=1e-5, atol=1e-5)
    spec = explain(*tensors(), **value).spec
    assert spec.mask_shape is None and (spec.bias_shape is None) == ("_bias" not in fields)
    assert (spec.documents == 3) == ("q_seqinfo" in fields)


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("argument", ["mask", "bias"])
def test_torchs_causal_bias_is_read(make: Any, argument: str) -> None:
    value = make(QUERIES, KEYS)
    expected = attention(*tensors(), mask=value._materialize()[None, None])
    torch.testing.assert_close(attention(*tensors(), **{argument: value}), expected)
    heads_first = [tensor.transpose(1, 2) for tensor in tensors()]
    out = attention(*heads_first, **{argument: value}, layout="bhsd")
    torch.testing.assert_close(out.transpose(1, 2), expected)
    with pytest.raises(ShapeError, match=f"^{argument}: CausalBias: expected one of {QUERIES} queries and {KEYS} keys"):
        attention(*tensors(), **{argument: make(QUERIES, KEYS + 1)})


def test_objects_join_what_they_do_not_say() -> None:
    documents, seq_info = xformers_object("BlockDiagonalMask", **blocks()), SeqInfo.from_lengths(LENGTHS, LENGTHS_K)
    options: dict[str, Any] = {"causal": True, "window": 2, "softcap": 3.0}
    expected = attention(*tensors(), **options, seq_info=seq_info)
    assert torch.equal(attention(*tensors(), **options, mask=documents), expected)
    keys = torch.rand(1, 1, 1, KEYS) < 0.7
    expected = attention(*tensors(), causal=True, alignment="top_left", mask=keys)
    triangle = xformers_object("LowerTriangularMask")
    assert torch.equal(attention(*tensors(), mask=keys, bias=triangle), expected)
    window = attention(*tensors(), window=(1, None), mask=triangle)
    assert torch.equal(window, attention(*tensors(), causal=True, alignment="top_left", window=(1, None)))


def test_every_entry_point_reads_them() -> None:
    qkv, triangle = torch.randn(1, 5, 3, HEADS, DIM), xformers_object("LowerTriangularMask")
    assert torch.equal(attention_qkvpacked(qkv, mask=triangle), attention_qkvpacked(qkv, causal=True))
    layer, x = Attention(HEADS, in_features=HEADS * DIM), torch.randn(1, 5, HEADS * DIM)
    causal = Attention(HEADS, in_features=HEADS * DIM, causal=True)
    causal.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x, mask=triangle), causal(x))
    with torch.no_grad():  # a layer that trains, in a pass without gradients
        assert torch.equal(layer(x, mask=triangle), causal(x))


def test_gradients_flow_through_the_bias_of_a_triangle() -> None:
    bias = torch.randn(1, HEADS, QUERIES, KEYS, requires_grad=True)
    attention(*tensors(), mask=xformers_object("LowerTriangularMaskWithTensorBias", _bias=bias)).sum().backward()
    assert bias.grad is not None and bias.grad.any() and not bias.grad[..., 0, 1:].any()


def test_offsets_on_another_device_are_taken_from_the_host() -> None:
    side = SimpleNamespace(seqstart=torch.empty(4, device="meta"), seqstart_py=[0, 3, 4, 8], max_seqlen=4)
    mask = xformers_object("BlockDiagonalMask", q_seqinfo=side, k_seqinfo=side)
    rows = torch.randn(1, 8, HEADS, DIM)
    assert torch.equal(
        attention(rows, rows, rows, mask=mask), attention(rows, rows, rows, seq_info=SeqInfo.from_lengths(LENGTHS))
    )


TRIANGLE, LOCAL = xformers_object("LowerTriangularMask"), xformers_object("LocalAttentionFromBottomRightMask")
LOCAL.window_left = LOCAL.window_right = 1
CLASHES: dict[str, tuple[dict[str, Any], str]] = {
    "causal": ({"mask": TRIANGLE, "causal": True}, "mask: LowerTriangularMask with causal=True"),
    "window": ({"bias": LOCAL, "window": (1, 1)}, "bias: LocalAttentionFromBottomRightMask with window="),
    "alignment": ({"mask": LOCAL, "alignment": "top_left"}, "mask: .* with alignment='top_left'"),
    "documents": ({"mask": TRIANGLE, "seq_info": SeqInfo.from_lengths(LENGTHS, LENGTHS_K)}, "mask: .* with seq_info="),
    "two": ({"mask": TRIANGLE, "bias": LOCAL}, "mask and bias: expected one object"),
    "two biases": (
        {"mask": xformers_object("LowerTriangularMaskWithTensorBias", _bias=BIAS), "bias": BIAS},
        "mask: LowerTriangularMaskWithTensorBias with bias=: expected one bias",
    ),
}


@pytest.mark.parametrize("clash", CLASHES)
def test_an_option_that_says_the_same_is_refused(clash: str) -> None:
    options, says = CLASHES[clash]
    for call in (attention, explain):
        with pytest.raises(SpecError, match=f"^{says}"):
            call(*tensors(), **options)


def test_unknown_classes_are_refused_with_what_to_pass() -> None:
    subclass = type("LowerTriangularMask", (), {"__module__": "a_user"})()
    with pytest.raises(TypeError, match=r"mask: expected a torch.Tensor, got a_user.Lower.*; pass causal=True"):
        attention(*tensors(), mask=subclass)
    for name in ("BlockDiagonalGappyKeysMask", "PagedBlockDiagonalPaddedKeysMask"):
        with pytest.raises(TypeError, match=f"^mask: .*{name}; {str(MASKS[name])[:12]}".replace("(", r"\(")):
            attention(*tensors(), mask=xformers_object(name))


def test_xformers_own_objects() -> None:
    attn_bias = pytest.importorskip("xformers.ops.fmha.attn_bias")
    for name, (fields, seen) in OBJECTS.items():
        kind = getattr(attn_bias, name)
        values = [value for key, value in fields.items() if not key.endswith("seqinfo")]
        if "q_seqinfo" in fields:
            sides = [attn_bias._SeqLenInfo.from_seqlens(each) for each in (LENGTHS, LENGTHS_K)]
            value = kind(*sides, **{key: fields[key] for key in fields if key == "_window_size"})
        else:
            value = kind(*values)
        shape = (QUERIES, KEYS)
        drawn = value.materialize((1, HEADS, *shape)).exp() > 0
        assert np.array_equal(drawn[0, 0].numpy(), seen), name
        torch.testing.assert_close(attention(*tensors(), mask=value), right(name, seen), rtol=1e-5, atol=1e-5)
