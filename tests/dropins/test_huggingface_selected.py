"""Tests transformers' models that select keys for each query, with selections that hide keys: equal to ``eager``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import masking_utils
from transformers_models import check_slopes, draw_weights, slopes_of

from attn_core.errors import ShapeError, SpecError
from torch_frontend import huggingface
from torch_frontend.huggingface import attention, masks

pytestmark = pytest.mark.usefixtures("registered")

LENGTH, NEW = 13, 4
COMMON: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
COMMON |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64, "head_dim": 8}
COMMON |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
EXPERTS |= {"n_routed_experts": 4, "n_shared_experts": 1}
LATENT: dict[str, Any] = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
LATENT |= {"v_head_dim": 8, "index_topk": 3, "index_head_dim": 16, "index_n_heads": 2}
DSA = COMMON | EXPERTS | LATENT
COMPRESSED = ["compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"]
PICTURES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "image_size": 16}
PICTURES |= {"num_attention_heads": 4, "patch_size": 4, "head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "axk2": DSA,
    "deepseek_v32": DSA,
    "glm_moe_dsa": DSA | {"indexer_types": ["full", "shared", "full"]},
    "hy_v4": DSA | {"indexer_types": ["full", "shared", "full"]},  # with a sink for each head
    "dots3_note_text": DSA
    | {"head_dim": 16, "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"]}
    | {"sliding_window": 5, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 16}
    | {"swa_q_lora_rank": 16, "swa_kv_lora_rank": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8},
    "minimax_m3_vl_text": COMMON
    | {"num_key_value_heads": 2, "dense_intermediate_size": 48, "shared_intermediate_size": 16, "rotary_dim": 8}
    | {"num_experts_per_tok": 2, "num_local_experts": 4, "index_n_heads": 2, "index_head_dim": 8}
    | {"index_block_size": 3, "index_topk_blocks": 2, "layer_types": ["full_attention", *["minimax_m3_sparse"] * 2]},
    "qwen4_exp_text": COMMON
    | {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    | {"shared_expert_intermediate_size": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "hc_count": 2}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "hc_lowrank": 8, "ple_embed_dim": 32}
    | {"layer_types": ["linear_attention", "full_attention", "full_attention"], "indexer_n_heads": 2}
    | {"indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4, "indexer_compress_ratio": 2},
    "deepseek_v4": COMMON
    | {"num_key_value_heads": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    | {"q_lora_rank": 16, "o_lora_rank": 8, "o_groups": 2, "qk_rope_head_dim": 4, "index_topk": 1, "hc_mult": 2}
    | {"index_head_dim": 8, "index_n_heads": 2, "sliding_window": 4, "layer_types": COMPRESSED}
    | {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}},
    "inkling2_text": COMMON
    | {"unpadded_vocab_size": 97}
    | {"layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"]}
    | {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "num_key_value_heads": 2, "swa_head_dim": 8}
    | {"sliding_window_size": 5, "rel_extent": 8, "d_rel": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 16, "n_shared_experts": 1},
    "mistral_large4": {
        "text_config": {"model_type": "mistral_large4_text", **DSA, "indexer_types": ["full", "full", "shared"]},
        "vision_config": {"model_type": "pixtral", **PICTURES},
        "image_token_index": 96,
    },
}
"""Sizes of a small model of each type, with 3 of 13 keys selected, or 2 blocks of 3 keys."""

SELECTED: dict[str, dict[str, Any]] = {
    "deepseek_v32": {"index_topk": 64},
    "minimax_m3_vl_text": {"index_topk_blocks": 64},
    "qwen4_exp_text": {"indexer_budget": 64},
}
"""Changes of a configuration that select every key."""


def build(family: str, name: str, **changed: Any) -> Any:
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    config = transformers.CONFIG_MAPPING[family](**FAMILIES[family] | changed)
    kind = transformers.AutoModelForImageTextToText if "vision_config" in FAMILIES[family] else None
    torch.manual_seed(0)
    model = (kind or transformers.AutoModelForCausalLM).from_config(config, attn_implementation=name)
    return draw_weights(model, 0.3)


def reference(family: str, padding: bool) -> str:
    """The implementation to compare with. MiniMax M3 selects among padding, too, so that the output there counts: it is
    0 on ``sdpa``, as here, and the mean of all values on ``eager``."""
    return "sdpa" if padding and family == "minimax_m3_vl_text" else "eager"


def skip_nan(family: str, expected: torch.Tensor) -> None:
    """Skips a test whose reference is NaN: in transformers 5.17 Qwen 4 adds the lowest float twice."""
    if family == "qwen4_exp_text" and not expected.isfinite().all():
        pytest.skip(f"transformers {transformers.__version__} gives NaN itself")


def rows(padding: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 95, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    keep = torch.ones_like(ids)
    if padding:
        keep[0, :4] = 0
    return {"input_ids": ids * keep, "attention_mask": keep}


@pytest.mark.sampled
@pytest.mark.parametrize("padding", [False, True], ids=["whole rows", "left padding"])
@pytest.mark.parametrize("family", FAMILIES)
def test_selected_keys_give_what_eager_gives(family: str, padding: bool) -> None:
    """Logits and the gradient of every parameter."""
    given, found = rows(padding), []
    for name in (reference(family, padding), huggingface.NAME):
        model = build(family, name)
        logits = model(**given, use_cache=False).logits[given["attention_mask"].bool()]
        found.append((logits.detach(), slopes_of(model, logits)))
    (expected, slopes), (actual, mine) = found
    skip_nan(family, expected)
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    check_slopes(mine, slopes)


@pytest.mark.sampled
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generated_tokens_are_those_of_eager(family: str, cache: str) -> None:
    limits = {"max_new_tokens": NEW, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    limits |= {"return_dict_in_generate": True, "output_logits": True, "eos_token_id": None, "pad_token_id": 0}
    try:
        expected = build(family, reference(family, padding=True)).generate(**rows(True), **limits)
    except Exception as error:  # this model has no such cache
        assert cache == "static"
        pytest.skip(f"{family}: {type(error).__name__}: {error}")
    skip_nan(family, torch.stack(expected.logits))
    actual = build(family, huggingface.NAME).generate(**rows(True), **limits)
    assert torch.equal(actual.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(actual.logits), torch.stack(expected.logits), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", SELECTED)
def test_the_selection_hides_keys(family: str) -> None:
    """Otherwise the tests above would prove nothing."""
    few, all_keys = (build(family, huggingface.NAME, **changed)(**rows(False)) for changed in ({}, SELECTED[family]))
    assert (few.logits - all_keys.logits).abs().max() > 0.1


def test_documents_in_a_row_select_their_own_keys() -> None:
    """Compared with each document alone; the cache is off because the model's indexer reads documents from its mask."""
    model, lengths = build("deepseek_v32", huggingface.NAME), (6, 1, 6)
    ids = rows(False)["input_ids"][:1]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        actual = model(ids, position_ids=positions, use_cache=False).logits
        alone = [model(part, use_cache=False).logits for part in ids.split(lengths, 1)]
    torch.testing.assert_close(actual, torch.cat(alone, 1), rtol=1e-3, atol=1e-4)


def dense(
    q: Any, k: Any, v: Any, mask: torch.Tensor, sinks: torch.Tensor | None = None, bias: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """Attention in float64 by its definition; a row that sees no key gives 0."""
    scores = (q.double() @ k.double().mT) / q.shape[-1] ** 0.5 + bias
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()], -1)
    weights = torch.nan_to_num(scores.softmax(-1))[..., : k.shape[2]]
    return (weights @ v.double()).transpose(1, 2)


def operands(batch: int = 2, heads: int = 3, queries: int = 7, keys: int = 7) -> Any:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(batch, heads, n, 5, generator=generator) for n in (queries, keys, keys))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), SimpleNamespace(is_causal=True)


OFFSETS = torch.tensor([0, 3, 7, 12, 14], dtype=torch.int32)
PACKED = {"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS, "max_length_q": 5, "max_length_k": 5}
NUMBERS = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1]])
MASKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "described": (lambda: masks.mask(2, 7, 7, mask_function=masking_utils.causal_mask_function), {}),
    "none": (lambda: None, {}),
    "dense": (lambda: torch.ones(2, 1, 7, 7, dtype=torch.bool).tril(), {}),
    "float": (lambda: torch.zeros(2, 1, 7, 7).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf), {}),
    "documents": (lambda: masks.mask(2, 7, 7, mask_function=masking_utils.causal_mask_function), PACKED),
}
INDICES = torch.tensor([[0, 1, 6], [0, 2, -1], [2, 2, 5], [3, -1, 6], [6, 6, 6], [1, 4, 5], [0, 3, 6]])


@pytest.mark.parametrize("kind", MASKS)
def test_indices_hide_keys_of_every_mask(kind: str) -> None:
    """Also rows that select no visible key, a key twice, and nothing; and the gradients."""
    q, k, v, module = operands()
    make, documents = MASKS[kind]
    indices = torch.stack([INDICES, INDICES.flip(1)]).int()
    if kind == "float":
        indices[:, 4] = torch.tensor([1, 2, 4])  # a row of -inf alone has no meaning for a float mask
    seen = torch.ones(7, 7, dtype=torch.bool).tril() & (indices[..., None] == torch.arange(7)).any(2)[:, None]
    if documents:
        seen = seen & (NUMBERS[:, None, :, None] == NUMBERS[:, None, None])
    out = attention.attend(module, q, k, v, make(), indices=indices, **documents)[0]
    expected = dense(q, k, v, seen)
    torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-5)
    for mine, slope in zip(*(torch.autograd.grad((each**2).sum(), (q, k, v)) for each in (out, expected))):
        torch.testing.assert_close(mine, slope, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("training", [False, True])
def test_sinks_of_each_query_take_their_share(kind: str, training: bool) -> None:
    q, k, v, module = operands()
    module.training, (make, documents) = training, MASKS[kind]
    sinks = torch.randn(2, 3, 7, 1, generator=torch.Generator().manual_seed(4)).requires_grad_()
    seen = torch.ones(2, 1, 7, 7, dtype=torch.bool).tril()
    if documents:
        seen = seen & (NUMBERS[:, None, :, None] == NUMBERS[:, None, None])
    out = attention.attend(module, q, k, v, make(), sinks=sinks, **documents)[0]
    expected = dense(q, k, v, seen, sinks)
    torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-5)
    for mine, slope in zip(*(torch.autograd.grad((each**2).sum(), (q, k, v, sinks)) for each in (out, expected))):
        torch.testing.assert_close(mine, slope, rtol=1e-4, atol=1e-4)


def test_sinks_of_queries_that_see_no_key_leave_zeros() -> None:
    q, k, v, module = operands()
    sinks = torch.zeros(2, 3, 7, 1).requires_grad_()
    out = attention.attend(module, q, k, v, torch.zeros(2, 1, 7, 7, dtype=torch.bool), sinks=sinks)[0]
    slopes = torch.autograd.grad(out.sum(), (q, k, v, sinks))
    assert not out.any() and not any(slope.any() for slope in slopes)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_bool_table_is_refused_where_a_model_appends_floats_to_it(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek V4 appends columns of 0 and -inf, which a bool table would turn around; floats give what eager gives."""
    ids, tables = rows(False)["input_ids"], torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril().triu(-3)
    added = torch.zeros(tables.shape).masked_fill(~tables, torch.finfo(torch.float32).min)
    model, eager = build("deepseek_v4", huggingface.NAME), build("deepseek_v4", "eager")
    with torch.no_grad():
        actual, expected = (each(ids, attention_mask=added, use_cache=False).logits for each in (model, eager))
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)
        monkeypatch.setattr(attention, "_is_compiling", lambda: compiled)
        with pytest.raises(SpecError, match=r"attention_mask: expected floats, .* bool mask of 4 axes: DeepseekV4A"):
            model(ids, attention_mask=tables, use_cache=False)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "indices of another length": ({"indices": INDICES[None, :5]}, ShapeError, r"indices: expected \[2, 7, count\]"),
    "blocks without an indexer": ({"block_indices": INDICES}, SpecError, "block_indices: expected a layer with"),
    "sinks of heads": ({"sinks": torch.zeros(3)}, ShapeError, r"sinks: expected one for each query, \[2, 3, 7, 1\]"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_selections_are_refused_by_name(kind: str) -> None:
    q, k, v, module = operands()
    given, error, message = REFUSED[kind]
    with pytest.raises(error, match=message):
        attention.attend(module, q, k, v, None, **given)
