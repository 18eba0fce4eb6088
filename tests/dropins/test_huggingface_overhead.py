"""Counts what transformers' layers cost beside attention itself: Python frames, torch operations, masks read."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import masking_utils

import torch_frontend
from attn_core.backends.shared import aten_masks
from torch_frontend import huggingface
from torch_frontend.huggingface import attention, layer_call, masks
from torch_frontend.huggingface.described_mask import DescribedMask, description_of

pytestmark = pytest.mark.usefixtures("registered")

PACKAGE = str(Path(torch_frontend.__file__).parent)
ROWS, LENGTH, SLOTS = 3, 17, 64
CAUSAL = {"mask_function": masking_utils.causal_mask_function}


def llama(**others: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": None}
    config = transformers.LlamaConfig(**sizes, **heads, **others)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=huggingface.NAME).eval()


def tokens(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(2, 97, (ROWS, length), generator=torch.Generator().manual_seed(1))


def left_padding(length: int = LENGTH) -> torch.Tensor:
    keep = torch.ones(ROWS, length, dtype=torch.long)
    keep[0, :4], keep[1, :7] = 0, 0
    return keep


def frames_of_ours(run: Callable[[], Any]) -> Counter[str]:
    """The Python functions of torch_frontend that a run enters, by module and name."""
    frames: Counter[str] = Counter()

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            frames[f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"] += 1

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return frames


def operations(run: Callable[[], Any]) -> int:
    """The number of ATen operations that a run calls, views included."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return sum(event.count for event in profile.key_averages() if event.key.startswith("aten::"))


def operands(queries: int, keys: int) -> tuple[torch.Tensor, ...]:
    """q, k, v ``[batch, heads, len, head_dim]``, views of ``[batch, len, heads, head_dim]`` as in a model."""
    shapes = (ROWS, queries, 4, 8), (ROWS, keys, 2, 8), (ROWS, keys, 2, 8)
    return tuple(torch.randn(shape).transpose(1, 2) for shape in shapes)


def mask(queries: int, keys: int, padded: bool, slots: int = 0) -> Any:
    """The mask of queries at the end of keys, in a static cache of slots if there are any."""
    given = {"attention_mask": left_padding(keys) if padded else None, **CAUSAL}
    if not slots:
        return masks.mask(ROWS, queries, keys, keys - queries, **given)
    return masks.mask(ROWS, queries, slots, torch.tensor(keys - queries), allow_is_causal_skip=False, **given)


PLACES = {"prefill": (LENGTH, LENGTH, 0), "step": (1, LENGTH + 1, 0), "static step": (1, LENGTH + 1, SLOTS)}
PREPARED = ["attention.attention", "prepared.find", "prepared.is_observed", "eager_calls.attend_directly"]
WITH_MASK = ["eager_calls.attend", "prepared._are_readable"]
"""The functions of a prepared call, and those that a mask adds."""


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("place", PLACES)
def test_a_warm_layer_costs_few_frames_and_views_beside_attention(place: str, padded: bool) -> None:
    queries, keys, slots = PLACES[place]
    q, k, v = operands(queries, slots or keys)
    made, layer, positions = mask(queries, keys, padded, slots), torch.nn.Module().eval(), torch.arange(queries)[None]

    def run() -> Any:
        return attention.attend(layer, q, k, v, made, scaling=0.3, position_ids=positions, use_cache=True)

    run()
    described = made if isinstance(made, DescribedMask) else description_of(made)
    assert described is not None
    (call,) = described.shared.values()
    assert call.seen == (keys if slots else None) and (call.mask is not None) == padded
    assert call.causal == (queries > 1)  # a single query at the last key has no band

    def direct() -> Any:
        rows = (tensor[:, :, :keys].transpose(1, 2) if slots else tensor.transpose(1, 2) for tensor in (q, k, v))
        return torch_frontend.attention(*rows, causal=call.causal, alignment=call.alignment, mask=call.mask, scale=0.3)

    direct()
    expected = ["attention.attend", "attention.check_keywords", "recomputed.attention_of_heads", *PREPARED]
    expected += ["described_mask.description_of"] * bool(slots) + WITH_MASK * padded
    expected += ["recomputed._fits_packing"] * (queries == 1)
    assert frames_of_ours(run) <= Counter(expected)
    # attention's seven views are missing, each two operations for the profiler. One view of the output remains.
    assert operations(run) <= operations(direct) - 8


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
def test_a_kernel_with_another_layout_costs_three_frames_beside_attention(trains: bool) -> None:
    """Softcap has no kernel with the layers' layout on the CPU; the kernels of a GPU have another layout, too."""
    q, k, v = (tensor.requires_grad_(trains) for tensor in operands(LENGTH, LENGTH))
    made, layer, positions = mask(LENGTH, LENGTH, False), torch.nn.Module().train(trains), torch.arange(LENGTH)[None]

    def run() -> Any:
        return attention.attend(layer, q, k, v, made, scaling=0.3, softcap=5.0, position_ids=positions, use_cache=True)

    def direct() -> Any:
        rows = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return torch_frontend.attention(*rows, causal=True, scale=0.3, softcap=5.0)

    run(), direct()
    beside = ["attention.attend", "attention.check_keywords", "recomputed.attention_of_heads"]
    assert frames_of_ours(run) - frames_of_ours(direct) <= Counter(beside)
    assert operations(run) <= operations(direct)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_layers_share_one_prepared_call(padded: bool) -> None:
    model, ids = llama(), tokens()
    frames = frames_of_ours(lambda: model(ids, attention_mask=left_padding() if padded else torch.ones_like(ids)))
    assert frames["attention.attend"] >= 3
    assert frames["layer_call.prepare"] == frames["masks.mask"] == 1, frames
    assert frames["layer_call._read_documents"] == (not padded)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_generate_reads_no_unwritten_slot_and_builds_no_table_of_queries(
    cache: str, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids, keys, tables = llama(), tokens(), [], []
    plain, dense = attention.attention, masking_utils.sdpa_mask

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        keys.append(k.shape[2])
        assert (options["mask"] is not None) == padded
        return plain(q, k, v, **options)

    def built(batch: int, q_length: int, *others: Any, **options: Any) -> Any:
        tables.append(q_length)
        return dense(batch, q_length, *others, **options)

    monkeypatch.setattr(attention, "attention", spy)
    monkeypatch.setattr(masking_utils, "sdpa_mask", built)
    keep = left_padding() if padded else torch.ones_like(ids)
    limits = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    model.generate(ids, attention_mask=keep, **limits)
    assert keys == [length for length in range(LENGTH, LENGTH + 4) for _ in range(3)]
    assert set(tables) <= {1}


def test_a_dense_mask_loses_its_description_when_it_changes() -> None:
    made = mask(1, LENGTH, False, SLOTS)
    assert isinstance(made, torch.Tensor) and made.shape == (ROWS, 1, 1, SLOTS)
    assert description_of(made) is not None and description_of(made.contiguous()) is description_of(made)
    for other in (made.clone(), made[:2], copy.deepcopy(made), made.contiguous().to(torch.float32)):
        assert description_of(other) is None
    q, k, v = operands(1, SLOTS)
    layer = torch.nn.Module().eval()
    assert not torch.equal(
        attention.attend(layer, q, k, v, made)[0], attention.attend(layer, q, k, v, made.logical_not())[0]
    )
    made[:, :, :, 0] = False
    assert description_of(made) is None
    expected = torch_frontend.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask=made)
    torch.testing.assert_close(attention.attend(layer, q, k, v, made)[0], expected)
    with torch.inference_mode():
        assert description_of(mask(1, LENGTH, False, SLOTS)) is None  # changes are not counted there


def test_a_shared_call_is_not_used_for_other_arguments() -> None:
    """Other position ids, a contradicting window, other lengths: each is read or refused as for a first layer."""
    from attn_core.errors import ShapeError, SpecError

    made, layer = mask(LENGTH, LENGTH, False), torch.nn.Module().eval()
    q, k, v = operands(LENGTH, LENGTH)
    plain = attention.attend(layer, q, k, v, made)[0]
    rising = torch.arange(LENGTH)[None]
    packed = torch.cat([torch.arange(9), torch.arange(LENGTH - 9)])[None]
    assert torch.equal(attention.attend(layer, q, k, v, made, position_ids=rising)[0], plain)
    apart = attention.attend(layer, q, k, v, made, position_ids=packed)[0]
    torch.testing.assert_close(apart[:, :9], plain[:, :9])
    assert not torch.allclose(apart[:, 9:], plain[:, 9:])
    assert torch.equal(attention.attend(layer, q, k, v, made)[0], plain)
    with pytest.raises(SpecError, match="sliding_window=5"):
        attention.attend(layer, q, k, v, made, sliding_window=5)
    with pytest.raises(ShapeError, match="built for"):
        attention.attend(layer, q, k[:, :, 1:], v[:, :, 1:], made)
    with pytest.raises(SpecError, match="unknown_option"):
        attention.attend(layer, q, k, v, made, unknown_option=3)


@pytest.mark.parametrize("padded", [None, 0, 3, -2], ids=["none", "exact", "longer", "shorter"])
@pytest.mark.parametrize("window", [None, 5])
def test_the_row_of_a_static_cache_is_transformers_own(padded: int | None, window: int | None) -> None:
    """``padded``: how many columns the padding mask has beyond the tokens so far."""
    function = masking_utils.causal_mask_function
    if window is not None:
        function = masking_utils.sliding_window_causal_mask_function(window)
    keep = None if padded is None else left_padding(LENGTH + padded).bool()
    given = {"mask_function": function, "attention_mask": keep, "allow_is_causal_skip": False}
    for slots, start in ((SLOTS, 0), (8, 10), (LENGTH + 1, 0)):
        place = (ROWS, 1, slots, torch.tensor(LENGTH - 1), start)
        expected = masking_utils.sdpa_mask(*place, **given)
        made = masks.mask(*place, **given)
        assert made.is_contiguous() and made.dtype == torch.bool and torch.equal(made, expected)


def test_the_row_of_a_static_cache_takes_few_operations() -> None:
    place, given = (ROWS, 1, SLOTS, torch.tensor(LENGTH - 1)), {**CAUSAL, "attention_mask": left_padding().bool()}
    row = operations(lambda: masks.row_of_keys(None, ROWS, SLOTS, (place[3], 0), given["attention_mask"], "cpu"))
    assert 3 * row <= 2 * operations(lambda: masking_utils.sdpa_mask(*place, **given, allow_is_causal_skip=False))


def test_a_layer_with_a_dense_mask_costs_few_frames() -> None:
    """As with a static cache on a GPU, where the mask is not read."""
    made, layer = mask(1, LENGTH + 1, True, SLOTS), torch.nn.Module().eval()
    del made._attn_core_description
    aten_masks.keep_additive(made)
    q, k, v = operands(1, SLOTS)

    def run() -> Any:
        return attention.attend(layer, q, k, v, made, scaling=0.3, position_ids=torch.arange(1)[None], use_cache=True)

    run()
    expected = ["attention.attend", "attention.check_keywords", "recomputed.attention_of_heads", *PREPARED, *WITH_MASK]
    expected += ["described_mask.description_of", "layer_call.read_table"]
    assert frames_of_ours(run) <= Counter([*expected, "recomputed._fits_packing"])


@pytest.mark.parametrize("place", ["prefill", "step"])
def test_layers_convert_a_padding_mask_once(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys, slots = PLACES[place]
    q, k, v = operands(queries, keys)
    made, layer, converted = mask(queries, keys, True, slots), torch.nn.Module().eval(), []
    where = torch.where
    monkeypatch.setattr(torch, "where", lambda *given: converted.append(1) or where(*given))
    outs = [attention.attend(layer, q, k, v, made, scaling=0.3)[0] for _ in range(3)]
    assert len(converted) == 1 and torch.equal(outs[0], outs[2])


def test_a_single_query_with_a_window_that_hides_keys_keeps_it() -> None:
    window = masking_utils.sliding_window_causal_mask_function(5)
    for keys, expected in ((5, None), (6, (4, None))):
        visible = masks.mask(ROWS, 1, keys, keys - 1, mask_function=window).visible
        call = layer_call.cut_keys(visible, None, None)
        assert (call.causal, call.window) == (expected is not None, expected)
