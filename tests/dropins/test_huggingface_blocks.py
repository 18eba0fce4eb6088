"""Tests transformers' blocks of tokens that see each other in a causal row, such as images, without a dense mask."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
from transformers import masking_utils

from attn_core.call.key_ranges import contains
from attn_core.context_parallel import one_device
from torch_frontend.dispatch import in_parts
from torch_frontend.huggingface import attention, masks, patterns
from torch_frontend.huggingface.described_mask import DescribedMask
from torch_frontend.huggingface.masks import mask

TOKENS = 300


def image_ids(*images: tuple[int, int], tokens: int = TOKENS) -> torch.Tensor:
    """``[tokens]``: the image of each token, -1 for text."""
    ids = torch.full((tokens,), -1)
    for number, (start, stop) in enumerate(images):
        ids[start:stop] = number
    return ids


IDS = torch.stack([image_ids((30, 90), (200, 271)), image_ids((0, 50), (51, 60), (60, 99))])
PADDING = torch.cat([torch.zeros(2, 17), torch.ones(2, TOKENS - 17)], 1).bool()


def function_of(ids: torch.Tensor, window: int | None = None) -> Any:
    """transformers' mask function of a causal row, or a window, with images."""
    band = masking_utils.causal_mask_function
    if window is not None:
        band = masking_utils.sliding_window_causal_mask_function(window)
    return masking_utils.or_masks(band, masking_utils.blockwise_overlay(ids))


def dense_of(ids: torch.Tensor, window: int | None, padding: Any, q_len: int, offset: int) -> torch.Tensor:
    return masking_utils.sdpa_mask(
        *(len(ids), q_len, TOKENS, offset, 0),
        mask_function=function_of(ids, window),
        attention_mask=padding,
        allow_is_causal_skip=False,
        device="cpu",
    )


@pytest.mark.parametrize("q_len", [TOKENS, 250])
@pytest.mark.parametrize("padding", [None, PADDING], ids=["no padding", "padding"])
@pytest.mark.parametrize("window", [None, 64])
def test_images_are_key_ranges(window: int | None, padding: Any, q_len: int) -> None:
    offset = TOKENS - q_len
    described = mask(
        2, q_len, TOKENS, offset, 0, mask_function=function_of(IDS, window), attention_mask=padding, device="cpu"
    )
    dense = dense_of(IDS, window, padding, q_len, offset)
    assert isinstance(described, DescribedMask)
    seen = contains(described.visible.key_ranges, np.arange(q_len))
    assert torch.equal(torch.from_numpy(np.broadcast_to(seen, dense.shape).copy()), dense)
    assert torch.equal(described.build(), dense)


def test_the_attention_of_images_is_that_of_the_dense_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and gradients, by kernels that have no key ranges."""
    chosen = []
    original = one_device.choose
    monkeypatch.setattr(one_device, "choose", lambda *call: chosen.append(original(*call)) or chosen[-1])
    in_parts._plan_in_parts.cache_clear()
    q, k, v = (torch.randn(2, heads, TOKENS, 16, requires_grad=True) for heads in (4, 2, 2))
    described = mask(2, TOKENS, TOKENS, mask_function=function_of(IDS), device="cpu")
    out, _ = attention.attend(SimpleNamespace(training=True), q, k, v, described)
    dense = dense_of(IDS, None, None, TOKENS, 0)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, dense, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    actual, right = (torch.autograd.grad(each, (q, k, v), dout) for each in (out, expected))
    torch.testing.assert_close(actual, right, rtol=1e-4, atol=1e-5)
    assert chosen and all(isinstance(each, one_device.Tiled) for each in chosen)


@pytest.mark.usefixtures("registered")
def test_a_model_passes_its_images() -> None:
    """As models build it: ``create_causal_mask(block_sequence_ids=)`` of a config that names our attention."""
    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1, vocab_size=9)
    config._attn_implementation = "attn_core"
    rows = torch.zeros(2, TOKENS, 64)
    made = masking_utils.create_causal_mask(config, rows, None, None, block_sequence_ids=IDS)
    assert isinstance(made, DescribedMask) and made.visible.key_ranges is not None


def test_short_rows_and_scattered_blocks_have_a_dense_mask() -> None:
    ids = image_ids((3, 9), tokens=20)[None]
    assert isinstance(mask(1, 20, 20, mask_function=function_of(ids), device="cpu"), torch.Tensor)
    scattered = IDS.clone()
    scattered[0, 150:160] = 0  # the first image in two pieces
    table = mask(2, TOKENS, TOKENS, mask_function=function_of(scattered), device="cpu")
    assert torch.equal(table, dense_of(scattered, None, None, TOKENS, 0))


def test_a_union_of_another_kind_is_no_pattern() -> None:
    function = masking_utils.or_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k < 5)
    assert patterns.read_pattern(function) is None
    both = masking_utils.bidirectional_mask_function
    assert patterns.read_pattern(masking_utils.or_masks(both, masking_utils.blockwise_overlay(IDS))) is None
    inside = masking_utils.and_masks(function_of(IDS), masking_utils.packed_sequence_mask_function(IDS))
    assert patterns.read_pattern(inside) is None


def test_images_of_packed_rows_are_refused() -> None:
    described = mask(2, TOKENS, TOKENS, mask_function=function_of(IDS), device="cpu")
    q, k = torch.zeros(2, 4, TOKENS, 16), torch.zeros(2, 2, TOKENS, 16)
    offsets = torch.tensor([0, TOKENS, 2 * TOKENS], dtype=torch.int32)
    packed = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": TOKENS, "max_length_k": TOKENS}
    with pytest.raises(ValueError, match="attention_mask: expected no blocks of tokens that see each other"):
        attention.attend(SimpleNamespace(training=False), q, k, k, described, **packed)


def test_a_wrong_end_of_an_image_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = masks._spans
    monkeypatch.setattr(masks, "_spans", lambda ids: right(ids) - np.array([0, 2]))
    described = mask(2, TOKENS, TOKENS, mask_function=function_of(IDS), device="cpu")
    seen = contains(described.visible.key_ranges, np.arange(TOKENS))
    assert not np.array_equal(seen, dense_of(IDS, None, None, TOKENS, 0).numpy())
