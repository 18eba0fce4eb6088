"""Tests documents packed in the rows of transformers' models and given by their positions alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import masking_utils
from transformers_models import ALTERNATING, DECODER, DECODERS, build, check_gradients

from torch_frontend import huggingface
from torch_frontend.huggingface import attention, layer_call, masks

pytestmark = pytest.mark.usefixtures("registered")

TOLERANCE = {"rtol": 3e-5, "atol": 3e-4}  # for logits of size ~10 after two layers in float32
COMMON: dict[str, Any] = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "intermediate_size": 56}
FAMILIES: dict[str, Any] = {
    **DECODERS,
    "afmoe": lambda: transformers.AfmoeConfig(
        **DECODER | ALTERNATING, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, num_dense_layers=2
    ),
    "opt": lambda: transformers.OPTConfig(**COMMON, ffn_dim=56, word_embed_proj_dim=48, dropout=0.0),
    "biogpt": lambda: transformers.BioGptConfig(**COMMON | STILL, activation_dropout=0.0, layerdrop=0.0),
    "bert": lambda: transformers.BertConfig(**COMMON | STILL, is_decoder=True),
    "roberta": lambda: transformers.RobertaConfig(**COMMON | STILL, is_decoder=True),
}
ROWS: dict[str, Any] = {
    "two rows": ((6, 1, 10), (9, 8)),
    "one row": ((6, 1, 10),),
    "offsets": ((6, 1, 10),),
}
OFFSETS = torch.tensor([0, 6, 7, 17], dtype=torch.int32)
CASES = [(family, told) for family in FAMILIES for told in ROWS if family in DECODERS or told != "offsets"]


@pytest.mark.sampled
@pytest.mark.on_gpus(only=lambda family, **_: family not in ("gemma2", "qwen3"))  # in bfloat16 in test_huggingface
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize(("family", "told"), CASES)
def test_positions_that_restart_begin_documents(family: str, told: str, use_cache: bool, device: str) -> None:
    """Logits and the gradient of every parameter, compared with each document alone through eager."""
    eager, ours = (build(FAMILIES[family](), name, factor=5.0, device=device) for name in ("eager", huggingface.NAME))
    rows, first = ROWS[told], 2 if family == "roberta" else 0
    positions = torch.stack([torch.cat([torch.arange(n) + first for n in lengths]) for lengths in rows]).to(device)
    ids = torch.randint(2, 97, positions.shape, generator=torch.Generator().manual_seed(1)).to(device)
    given = {"position_ids": positions, "use_cache": use_cache}
    if told == "offsets":
        given |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), OFFSETS.to(device))
        given |= {"max_length_q": 10, "max_length_k": 10}
    actual = ours(ids, **given).logits
    weights = torch.randn(actual.shape, generator=torch.Generator().manual_seed(2)).to(device)
    (actual * weights).sum().backward()
    for row, lengths in enumerate(rows):
        for document, mine in zip(
            ids[row].split(lengths), zip(actual[row].split(lengths), weights[row].split(lengths))
        ):
            places = torch.arange(first, first + len(document), device=device)[None]
            alone = eager(document[None], position_ids=places).logits[0]
            assert alone.abs().max() > 0.5
            torch.testing.assert_close(mine[0], alone, **TOLERANCE)
            (alone * mine[1]).sum().backward()
    check_gradients(ours, eager, rounding=0.0 if family in DECODERS else 1e-6)


PACKED = [0, 1, 2, 0, 1, 0, 1, 2]


def offsets_of(positions: Any, **changed: Any) -> Any:
    """The offsets that attention receives for eight tokens; ``changed`` replaces arguments of a plain causal call."""
    seen: list[Any] = []
    given = {"queries": 8, "keys": 8, "function": masking_utils.causal_mask_function, "padding": None} | changed
    q, k = (torch.zeros(1, 2, given[name], 8) for name in ("queries", "keys"))
    mask = given.get("mask", "described")
    if mask == "described":
        offset = given["keys"] - given["queries"]
        sizes = (1, given["queries"], given["keys"], offset)
        mask = masks.mask(*sizes, mask_function=given["function"], attention_mask=given["padding"])
    module, patch = SimpleNamespace(is_causal=given.get("is_causal", True)), pytest.MonkeyPatch()
    with patch.context() as context:
        context.setattr(attention, "attention", lambda q, k, v, **options: seen.append(options) or q)
        attention.attend(module, q, k, k, mask, position_ids=torch.as_tensor(positions))
    info = seen[0]["seq_info"]
    return None if info is None else info.cu_seqlens_q.tolist()


def test_the_offsets_that_positions_give() -> None:
    assert offsets_of([PACKED]) == offsets_of([PACKED], mask=None) == [0, 3, 5, 8]
    assert offsets_of([PACKED], padding=torch.ones(1, 8, dtype=torch.bool)) == [0, 3, 5, 8]
    assert offsets_of([[4, 5, 4, 5, 6, 7, 4, 4]]) == [0, 2, 6, 7, 8]
    assert offsets_of(torch.tensor([PACKED]).bfloat16()) == [0, 3, 5, 8]
    offsets = torch.tensor([0, 8], dtype=torch.int32)
    assert layer_call.documents_from_offsets(offsets, offsets, 8, 8).max_len_q == 8


SILENT: dict[str, tuple[Any, dict[str, Any]]] = {
    "one document": ([list(range(8))], {}),
    "a later part of one": ([list(range(5, 13))], {}),
    "left padding, with ones": ([[1, 1, 1, 0, 1, 2, 3, 4]], {}),
    "left padding, with zeros": ([[0, 0, 0, 0, 1, 2, 3, 4]], {"padding": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])}),
    "right padding, with ones": ([[0, 1, 2, 3, 4, 1, 1, 1]], {}),
    "jumps": ([[0, 1, 2, 7, 8, 9, 20, 21]], {}),
    "jumps back, but not to the first": ([[0, 1, 2, 3, 2, 3, 4, 5]], {}),
    "M-RoPE": ([[PACKED]] * 3, {}),
    "another length": ([PACKED[:7]], {}),
    "another number of rows": ([PACKED] * 2, {}),
    "a cache with content": ([PACKED[:5]], {"queries": 5}),
    "one new token": ([[0]], {"queries": 1}),
    "both directions": ([PACKED], {"function": masking_utils.bidirectional_mask_function}),
    "cross-attention": ([PACKED], {"mask": None, "is_causal": False}),
    "a table": ([PACKED], {"mask": torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()}),
}


@pytest.mark.parametrize("name", SILENT)
def test_positions_without_documents_give_no_offsets(name: str) -> None:
    positions, changed = SILENT[name]
    assert offsets_of(positions, **changed) is None


def test_positions_are_read_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reads = build(DECODERS["llama"]()), []
    plain = layer_call._read_documents
    monkeypatch.setattr(layer_call, "_read_documents", lambda *given: reads.append(given) or plain(*given))
    ids = torch.arange(2, 10)[None]
    model(ids, position_ids=torch.tensor([PACKED]))
    assert len(reads) == 1
    model.generate(ids, max_new_tokens=3, do_sample=False)
    assert len(reads) == 2  # the prompt's; a new token has one position


def test_a_mask_moved_to_its_own_device_keeps_its_documents() -> None:
    """accelerate moves each layer's inputs to the layer's device, and so do the hooks of ``device_map``."""
    made = masks.mask(1, 8, 8, mask_function=masking_utils.causal_mask_function)
    assert made.to("cpu") is made.to(torch.device("cpu"), non_blocking=True) is made
    assert made.to("meta") is not made
