"""Tests Unsloth's helpers for packed rows: their results fit attention, and their masks mean what they claim."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from frameworks import BOTH, Framework

import torch_frontend
from attn_core import ShapeError, SpecError
from torch_frontend import attention
from torch_frontend.unsloth import (
    build_sdpa_packed_attention_mask,
    build_xformers_block_causal_mask,
    cover_padded_cu_seqlens,
    get_packed_info_from_kwargs,
    mask_packed_boundary_labels,
    mask_packed_sequence_boundaries,
    move_xformers_attention_bias,
)

LENGTHS = [3, 0, 1, 5]


@pytest.mark.parametrize("given", [LENGTHS, torch.tensor(LENGTHS), torch.tensor([LENGTHS[:2], LENGTHS[2:]])])
def test_seq_info_of_lengths(given: Any, device: str) -> None:
    given = given.to(device) if isinstance(given, torch.Tensor) else given
    lengths, offsets, longest = get_packed_info_from_kwargs({"packed_seq_lengths": given}, device)
    assert lengths.device.type == offsets.device.type == device and type(longest) is int
    assert lengths.dtype == offsets.dtype == torch.int32
    assert (lengths.tolist(), offsets.tolist(), longest) == (LENGTHS, [0, 3, 3, 4, 9], 5)
    assert get_packed_info_from_kwargs({}, device) is None
    assert get_packed_info_from_kwargs({"packed_seq_lengths": None}, device) is None


@pytest.mark.parametrize("given", [[3, -1], [2.5], torch.tensor([True])])
def test_lengths_are_counts(given: Any, device: str) -> None:
    given = given.to(device) if isinstance(given, torch.Tensor) else given
    with pytest.raises(SpecError, match="packed_seq_lengths: expected lengths"):
        get_packed_info_from_kwargs({"packed_seq_lengths": given}, device)


@pytest.mark.parametrize("window", [None, 0, -1, 2])
def test_the_dense_mask_equals_seq_info(window: int | None, device: str) -> None:
    packed = get_packed_info_from_kwargs({"packed_seq_lengths": LENGTHS}, device)
    mask = build_sdpa_packed_attention_mask(packed, dtype=torch.float32, device=device, sliding_window=window)
    assert mask.shape == (1, 1, 9, 9) and mask.dtype == torch.float32
    q, k, v = torch.randn(3, 1, 9, 2, 4, generator=torch.Generator().manual_seed(0)).to(device)
    dense = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask)
    keys = window if window and window > 0 else None
    ours = attention(q, k, v, causal=True, window=keys, seq_info=packed)
    torch.testing.assert_close(dense.transpose(1, 2), ours, rtol=1e-5, atol=1e-5)


def test_a_changed_length_changes_the_mask(device: str) -> None:
    """Nothing is cached by the identity of a tensor, because a tensor can change in place."""
    lengths, offsets, longest = get_packed_info_from_kwargs({"packed_seq_lengths": [2, 2]}, device)
    before = build_sdpa_packed_attention_mask((lengths, offsets, longest), dtype=torch.float32, device=device)
    lengths[:] = torch.tensor([1, 3], device=device)
    after = build_sdpa_packed_attention_mask((lengths, offsets, 3), dtype=torch.float32, device=device)
    assert before[0, 0, 2, 1] == -torch.inf and after[0, 0, 2, 1] == 0


def test_the_xformers_bias_of_packed_rows(device: str) -> None:
    base = object()
    assert build_xformers_block_causal_mask(None, base_mask=base) is base
    packed = get_packed_info_from_kwargs({"packed_seq_lengths": LENGTHS}, device)
    try:
        from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask
    except ImportError:
        assert build_xformers_block_causal_mask(packed) is None
        return
    mask = build_xformers_block_causal_mask(packed)
    assert isinstance(mask, BlockDiagonalCausalMask) and mask.q_seqinfo.seqstart_py == [0, 3, 4, 9]
    assert type(build_xformers_block_causal_mask(packed, sliding_window=2)) is not type(mask)


@dataclass
class Offsets:
    """Stands for a tensor of offsets."""

    values: list[int]
    device: Any = "meta"

    def to(self, device: torch.device) -> Offsets:
        return Offsets(self.values, device)


@dataclass
class SeqLenInfo:
    """Stands for xformers' class that holds one side's offsets."""

    seqstart: Offsets
    seqstart_py: list[int]


@dataclass
class BlockDiagonalMask:
    """Stands for xformers' class of this name."""

    q_seqinfo: SeqLenInfo
    k_seqinfo: SeqLenInfo
    window: int | None = None

    @classmethod
    def from_seqlens(cls, lengths: list[int]) -> BlockDiagonalMask:
        starts = [sum(lengths[:at]) for at in range(len(lengths) + 1)]
        info = SeqLenInfo(Offsets(starts), starts)
        return cls(info, info)


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Stands for xformers' class of this name."""

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalMask:
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo, window_size)


@pytest.mark.parametrize("window", [None, 0, -1, 3])
@pytest.mark.usefixtures("device")
def test_a_base_mask_receives_the_window(window: int | None) -> None:
    base = BlockDiagonalCausalMask.from_seqlens([2, 7])
    actual = build_xformers_block_causal_mask(None, sliding_window=window, base_mask=base)
    assert actual == replace(base, window=3 if window == 3 else None) and base.window is None
    table = torch.ones(2, 2)
    assert build_xformers_block_causal_mask(None, sliding_window=window, base_mask=table) is table
    assert build_xformers_block_causal_mask(None, sliding_window=window) is None
    if window == 3:
        with pytest.raises(SpecError, match=r"^sliding_window=3: expected a base_mask "):
            build_xformers_block_causal_mask(None, sliding_window=window, base_mask=object())


@pytest.mark.parametrize("window", [None, 3])
def test_an_xformers_bias_is_on_the_device_of_the_lengths(
    window: int | None, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    names = ("xformers", "xformers.ops", "xformers.ops.fmha", "xformers.ops.fmha.attn_bias")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        if "." in name:
            parent, _, own = name.rpartition(".")
            monkeypatch.setattr(sys.modules[parent], own, sys.modules[name], raising=False)
    for kind in (BlockDiagonalMask, BlockDiagonalCausalMask):
        monkeypatch.setattr(sys.modules[names[-1]], kind.__name__, kind, raising=False)
    packed = get_packed_info_from_kwargs({"packed_seq_lengths": LENGTHS}, device)
    mask = build_xformers_block_causal_mask(packed, sliding_window=window)
    assert mask.window == window and packed is not None
    for info in (mask.q_seqinfo, mask.k_seqinfo):
        assert info.seqstart == Offsets([0, 3, 4, 9], packed[0].device)
        assert info.seqstart_py == [0, 3, 4, 9]
    if window is None:
        padded = build_xformers_block_causal_mask(packed, total_tokens=11, is_causal=False)
        assert type(padded) is BlockDiagonalMask and padded.q_seqinfo.seqstart_py == [0, 3, 4, 9, 11]
        elsewhere = move_xformers_attention_bias(padded, "meta")
        assert elsewhere.q_seqinfo.seqstart.device == "meta" and padded.q_seqinfo.seqstart.device == packed[0].device
    else:
        with pytest.raises(SpecError, match=r"^sliding_window=3: expected None with is_causal=False"):
            build_xformers_block_causal_mask(packed, sliding_window=window, is_causal=False)


def test_biases_without_offsets_move_themselves() -> None:
    bias = Offsets([0, 2])
    assert move_xformers_attention_bias(bias, "meta") == Offsets([0, 2], "meta")
    assert move_xformers_attention_bias(None, "meta") is None
    plain = object()
    assert move_xformers_attention_bias(plain, "meta") is plain


def test_padding_behind_the_documents_is_one_more_document(device: str) -> None:
    packed = get_packed_info_from_kwargs({"packed_seq_lengths": LENGTHS}, device)
    assert packed is not None
    offsets, longest = cover_padded_cu_seqlens(packed, 16)
    assert (offsets.tolist(), offsets.dtype, longest) == ([0, 3, 3, 4, 9, 16], torch.int32, 7)
    assert cover_padded_cu_seqlens(packed, 9) == (packed[1], 5)
    mask = build_sdpa_packed_attention_mask(packed, dtype=torch.float32, device=device, total_tokens=11)
    longer = get_packed_info_from_kwargs({"packed_seq_lengths": [*LENGTHS, 2]}, device)
    assert torch.equal(mask, build_sdpa_packed_attention_mask(longer, dtype=torch.float32, device=device))


def test_a_mask_without_causal_shows_the_whole_document(device: str) -> None:
    packed = get_packed_info_from_kwargs({"packed_seq_lengths": LENGTHS}, device)
    mask = build_sdpa_packed_attention_mask(packed, dtype=torch.float32, device=device, is_causal=False)[0, 0]
    document = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 2], device=device)
    assert torch.equal(mask == 0, document[:, None] == document)
    with pytest.raises(SpecError, match=r"^sliding_window=2: expected None with is_causal=False"):
        build_sdpa_packed_attention_mask(packed, dtype=torch.float32, device=device, sliding_window=2, is_causal=False)


@pytest.mark.parametrize(
    ("positions", "lengths"),
    [
        ([[0, 1, 2, 0, 0, 1]], [3, 1, 2]),
        ([[0, 1, 2, 3]], None),  # one document
        ([[1, 1, 0, 1, 0, 1]], None),  # padding at the start
        ([[0, 1, 0], [0, 1, 2]], None),  # a batch
        ([0, 1, 0, 1], None),
    ],
)
def test_documents_may_follow_from_positions(positions: Any, lengths: Any, device: str) -> None:
    rows = torch.tensor(positions, device=device)
    packed = get_packed_info_from_kwargs({}, device, rows)
    assert (None if packed is None else packed[0].tolist()) == lengths
    if packed is not None:
        assert (packed[1].tolist(), packed[2]) == ([0, 3, 4, 6], 3)
    stated = get_packed_info_from_kwargs({"packed_seq_lengths": [4, 2]}, device, rows)
    assert stated is not None and stated[0].tolist() == [4, 2]


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_the_last_label_of_each_document_is_masked(layout: str, device: str) -> None:
    numbers = torch.arange(1, 10, device=device)
    labels = numbers.reshape(1, 9) if layout == "contiguous" else numbers.reshape(3, 3).mT
    order = labels.reshape(-1).clone()
    assert mask_packed_sequence_boundaries(labels, LENGTHS)
    expected = order.clone()
    expected[[2, 3, 8]] = -100
    assert labels.reshape(-1).tolist() == expected.tolist()


def test_documents_and_labels_of_different_lengths(device: str) -> None:
    labels = torch.arange(1, 9, device=device)  # shifted: one label less than tokens
    assert mask_packed_sequence_boundaries(labels, torch.tensor(LENGTHS, device=device), ignore_index=-1)
    assert labels.tolist() == [1, 2, -1, -1, 5, 6, 7, 8]
    padded = torch.arange(1, 13, device=device)
    assert mask_packed_sequence_boundaries(padded, LENGTHS)
    assert [at for at, label in enumerate(padded.tolist()) if label == -100] == [2, 3, 8]
    leading = torch.arange(1, 4, device=device)
    assert mask_packed_sequence_boundaries(leading, [0, 2, 1])
    assert leading.tolist() == [1, -100, -100]
    assert not mask_packed_sequence_boundaries(padded, None) and not mask_packed_sequence_boundaries(padded, [])
    short = torch.arange(3, device=device)
    if device == "cpu":
        with pytest.raises(ShapeError, match="seq_lengths: expected no more than 4 tokens in all, got 5"):
            mask_packed_sequence_boundaries(short, [2, 3])
        return
    assert mask_packed_sequence_boundaries(short, [2, 3])  # no read of the lengths from a GPU
    assert short.tolist() == [0, -100, 2]


@pytest.mark.parametrize("shape", [(9,), (1, 9), (3, 3)])
@pytest.mark.parametrize("lengths", [LENGTHS, [3, 0, 1, 2], [9]])
def test_labels_that_a_loss_shifts_later(shape: tuple[int, ...], lengths: list[int], device: str) -> None:
    """After the loss shifts them they equal the labels that were shifted before."""
    labels = torch.arange(1, 10, device=device).reshape(shape)
    before = labels.clone()
    actual = mask_packed_boundary_labels(labels, torch.tensor(lengths, device=device))
    assert torch.equal(labels, before) and actual.shape == labels.shape and actual.dtype == labels.dtype
    shifted = before.reshape(-1)[1:].clone()
    mask_packed_sequence_boundaries(shifted, lengths)
    assert torch.equal(actual.reshape(-1)[1:], shifted)
    assert actual.reshape(-1)[0] == (-100 if sum(lengths) == 9 else 1)  # the first label is no token's target
    assert torch.equal(mask_packed_boundary_labels(actual, lengths), actual)
    assert (mask_packed_boundary_labels(labels, [3, 6], ignore_index=-1) == -1).sum() == 2


def test_labels_without_documents_are_unchanged(device: str) -> None:
    labels = torch.arange(4, device=device)
    for lengths in (None, [], torch.tensor([], dtype=torch.int32)):
        assert mask_packed_boundary_labels(labels, lengths) is labels
    assert mask_packed_boundary_labels(None, [4]) is None
    empty = labels[:0]
    assert mask_packed_boundary_labels(empty, [0]) is empty
    if device == "cpu":
        with pytest.raises(ShapeError, match=r"^seq_lengths: expected no more than 4 tokens in all, got 5"):
            mask_packed_boundary_labels(labels, [2, 3])


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_the_root_has_run_attention(framework: Framework) -> None:
    assert framework.frontend.run_attention is framework.frontend.unsloth.run_attention


@pytest.mark.usefixtures("device")
def test_flags_match_the_installed_packages() -> None:
    available = {name for name, entry in torch_frontend.available_backends().items() if entry.reason is None}
    assert torch_frontend.unsloth.SDPA_HAS_GQA is True
    assert torch_frontend.unsloth.HAS_XFORMERS is ("xformers" in available)
    assert torch_frontend.unsloth.HAS_FLASH_ATTENTION is bool(available & {"flash2", "flash3", "flash4"})
    with pytest.raises(AttributeError, match="HAS_NOTHING"):
        _ = torch_frontend.HAS_NOTHING
