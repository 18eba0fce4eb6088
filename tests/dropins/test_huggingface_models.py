"""Tests which models ``attn_implementation="attn_core"`` accepts: only those whose attention looks up a function."""

from __future__ import annotations

import functools
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import masking_utils

from attn_core.errors import SpecError
from torch_frontend import huggingface
from torch_frontend.huggingface import masks, registration

pytestmark = pytest.mark.usefixtures("registered")

SIZES: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
OWN = {  # one of each kind: added masks, ALiBi, sparse and convolutional attention, a decoder beside an encoder
    "bloom": SIZES,
    "mpt": {"vocab_size": 97, "d_model": 32, "n_layers": 1, "n_heads": 4},
    "xglm": {"vocab_size": 97, "d_model": 32, "num_layers": 1, "attention_heads": 4, "ffn_dim": 32},
    "big_bird": SIZES,
    "convbert": SIZES,
    "led": {"vocab_size": 97, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32},
    "visual_bert": SIZES,
}


def llama() -> Any:
    return transformers.LlamaConfig(**SIZES, intermediate_size=32)


@pytest.mark.parametrize("name", [huggingface.NAME, "attn_core:math", "attn_core:flash3", "attn_core:fa3"])
@pytest.mark.parametrize("family", OWN)
def test_a_model_with_its_own_attention_is_refused_at_construction(family: str, name: str) -> None:
    def config() -> Any:
        return transformers.CONFIG_MAPPING[family](**OWN[family])

    with pytest.raises(SpecError, match=rf"attn_implementation='{name}': .* computes attention in its own code"):
        transformers.AutoModel.from_config(config(), attn_implementation=name)
    transformers.AutoModel.from_config(config())  # transformers itself is unchanged


PARTS = 7
"""Parts of transformers' list of models, each of which imports its models' files."""


@pytest.mark.sampled
@pytest.mark.parametrize("part", range(PARTS))
def test_every_model_that_looks_up_no_function_is_refused(part: int) -> None:
    """For the whole list of transformers: our implementations accept a class if and only if transformers' own check
    does, but for two whose files have attention of both kinds."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    refused = 0
    for listed in list(MODEL_MAPPING_NAMES.values())[part::PARTS]:
        for name in listed if isinstance(listed, (tuple, list)) else [listed]:
            kind = getattr(transformers, name, None)
            if not hasattr(kind, "_can_set_attn_implementation"):
                continue
            if kind._can_set_attn_implementation() and name not in ("GitModel", "InformerModel"):
                registration.refuse_model_code(kind, huggingface.NAME)
                continue
            refused += 1
            with pytest.raises(SpecError, match=kind.__name__):
                registration.refuse_model_code(kind, huggingface.NAME)
    assert refused > 50 / PARTS, refused


def test_a_model_with_its_own_attention_in_some_layers_is_refused() -> None:
    """Informer adds the mask to scores in its ProbSparse layers; the other layers look up a function."""
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "prediction_length": 6}
    config = transformers.InformerConfig(**sizes)
    with pytest.raises(SpecError, match="InformerModel computes attention in its own code"):
        transformers.InformerModel._from_config(config, attn_implementation=huggingface.NAME)
    transformers.InformerModel._from_config(config, attn_implementation="eager")


BY_NAME = re.compile(r"\b(?!ALL_)\w+\[[\w.]*attn_implementation\]")


def files_with_both_kinds() -> list[str]:
    """The modules of transformers that look attention up in a table of classes, and elsewhere in the interface."""
    root = Path(transformers.__file__).parent
    sources = {path: path.read_text(encoding="utf-8") for path in sorted(root.glob("models/*/modeling_*.py"))}
    both = [path for path, text in sources.items() if BY_NAME.search(text) and "ALL_ATTENTION_FUNCTIONS.get_" in text]
    return [".".join(("transformers", *path.relative_to(root).with_suffix("").parts)) for path in both]


@pytest.mark.parametrize("path", files_with_both_kinds())
def test_a_model_that_looks_its_attention_up_by_name_is_refused_at_construction(path: str) -> None:
    """SAM's vision encoder and GIT, for example, would raise a bare KeyError. Parts without them are built."""
    kinds = [kind for kind in vars(importlib.import_module(path)).values() if getattr(kind, "__module__", None) == path]
    models = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)]
    found: dict[bool, list[str]] = {True: [], False: []}
    for kind in models:
        if "PreTrained" in kind.__name__ or kind.config_class is None:
            continue
        with torch.device("meta"):
            try:
                kind._from_config(kind.config_class(), attn_implementation="eager")
            except Exception:  # its default configuration is not complete
                continue
            try:
                kind._from_config(kind.config_class(), attn_implementation=huggingface.NAME)
            except SpecError as error:
                assert "computes attention in its own code" in str(error) and "'eager'" in str(error)
                found[False].append(kind.__name__)
            else:
                found[True].append(kind.__name__)
    assert found[False] and bool(found[True]) == ("sam" not in path), found


def test_the_other_part_of_sam_may_use_ours() -> None:
    def build(name: Any) -> Any:
        torch.manual_seed(0)
        picture = {"image_size": 64, "patch_size": 16}
        vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "mlp_dim": 32, "window_size": 2}
        config = transformers.SamConfig(
            vision_config=vision | picture, prompt_encoder_config=picture, mask_decoder_config={"mlp_dim": 32}
        )
        return transformers.SamModel._from_config(config, attn_implementation=name).eval()

    given = {"pixel_values": torch.randn(1, 3, 64, 64), "input_points": torch.rand(1, 1, 2, 2) * 60}
    models = build("eager"), build({"": huggingface.NAME, "vision_config": "eager"})
    assert models[1].mask_decoder.config._attn_implementation == huggingface.NAME
    expected, actual = (model(**given).pred_masks for model in models)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    with pytest.raises(SpecError, match="SamVisionEncoder computes attention in its own code"):
        models[0].set_attn_implementation(huggingface.NAME)


def sound(name: str) -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "output_proj_dims": 16}
    config = transformers.Gemma4AudioConfig(**sizes, attention_chunk_size=4, attention_context_left=5)
    keep = torch.ones(2, 64, dtype=torch.bool)
    keep[0, -17:] = False
    model = transformers.Gemma4AudioModel._from_config(config, attn_implementation=name).eval()
    return model, {"input_features": torch.randn(2, 64, 128), "attention_mask": keep}


def reading_order(name: str) -> Any:
    from transformers.models.pp_doclayout_v2 import modeling_pp_doclayout_v2 as modeling

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    config = modeling.PPDocLayoutV2ReadingOrderConfig(**sizes, coordinate_size=6, shape_size=4)
    model = modeling.PPDocLayoutV2ReadingOrder._from_config(config, attn_implementation=name).eval()
    shown = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    return model, {"boxes": torch.randint(0, 1000, (2, 5, 4)).sort(-1).values, "mask": shown}


@pytest.mark.parametrize("build", [sound, reading_order])
def test_a_part_that_adds_its_mask_itself_gets_the_mask_of_eager(build: Any) -> None:
    """So that the larger model runs: its other parts use ours."""
    results = []
    for name in ("eager", huggingface.NAME):
        torch.manual_seed(0)
        try:
            model, given = build(name)
        except (AttributeError, ImportError):
            pytest.skip(f"transformers {transformers.__version__} has no such model")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.3)
            out = model(**given)
        results.append(out if torch.is_tensor(out) else out.last_hidden_state)
    assert results[0].isfinite().all() and results[0].abs().max() > 0.1
    # From transformers 5.24 on the reading order looks its attention up, so ours runs and rounds in its own way.
    exact = {} if model._supports_sdpa else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(results[1], results[0], **exact)


def test_a_refused_part_of_a_model_may_use_another_implementation() -> None:
    def build(name: Any) -> Any:
        vision = transformers.Swinv2Config(image_size=32, embed_dim=16, depths=[1], num_heads=[2], window_size=4)
        config = transformers.LlavaConfig(vision_config=vision, text_config=llama())
        return transformers.LlavaModel._from_config(config, attn_implementation=name)

    with pytest.raises(SpecError, match="Swinv2Model computes attention in its own code"):
        build(huggingface.NAME)
    model = build({"": huggingface.NAME, "text_config": huggingface.NAME, "vision_config": "eager"})
    used = [part.config._attn_implementation for part in (model.language_model, model.vision_tower)]
    assert used == [huggingface.NAME, "eager"]


def test_a_class_without_source_is_judged_by_the_class_that_it_extends() -> None:
    """For example a class that is defined in a notebook."""
    module = ModuleType("a_notebook")
    sys.modules[module.__name__] = module
    try:
        exec(
            "import transformers\nclass Mine(transformers.LlamaForCausalLM): pass\n"
            "class Theirs(transformers.BloomForCausalLM): pass\nclass Alone(transformers.PreTrainedModel): pass",
            module.__dict__,
        )
        module.Mine._from_config(llama(), attn_implementation=huggingface.NAME)
        for kind in (module.Theirs, module.Alone):
            with pytest.raises(SpecError, match=f"{kind.__name__} computes attention in its own code"):
                registration.refuse_model_code(kind, huggingface.NAME)
    finally:
        del sys.modules[module.__name__]


ARITHMETIC = {
    "scores + mask": lambda scores, mask: scores + mask,
    "mask + scores": lambda scores, mask: mask + scores,
    "scores += mask": lambda scores, mask: scores.__iadd__(mask),
    "mask += scores": lambda scores, mask: mask.__add__(scores),
    "scores - mask": lambda scores, mask: scores - mask,
    "1.0 - mask": lambda scores, mask: 1.0 - mask,
    "scores * mask": lambda scores, mask: scores * mask,
    "mask * -10000.0": lambda scores, mask: mask * -10000.0,
    "scores / mask": lambda scores, mask: scores / mask,
    "scores.add_(mask)": lambda scores, mask: scores.add_(mask),
    "torch.add": lambda scores, mask: torch.add(scores, mask, alpha=2),
    "torch.rsub": lambda scores, mask: torch.rsub(scores, mask),
    "mask.add": lambda scores, mask: mask.add(scores),
    "mask.mul": lambda scores, mask: mask.mul(2),
}


@pytest.mark.parametrize("how", ARITHMETIC)
def test_arithmetic_on_a_described_mask_is_refused(how: str) -> None:
    mask = masks.mask(1, 3, 5, 2, mask_function=masking_utils.causal_mask_function)
    with pytest.raises(SpecError, match="attention_mask: expected a model that hands its mask on to attention"):
        ARITHMETIC[how](torch.zeros(1, 2, 3, 5), mask)


@pytest.mark.parametrize("when", ["before", "after", "before and after"])
def test_wrappers_of_other_libraries_are_kept(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrappers around ours and inside it. After unregistering, ours does nothing, and registering again works."""
    kind = transformers.PreTrainedModel
    huggingface.unregister()
    heard: list[str] = []

    def wrap(when: str) -> None:
        for method in registration._WRAPPED_METHODS:
            original = getattr(kind, method)

            @functools.wraps(original)
            def theirs(self: Any, *given: Any, original: Any = original, **keywords: Any) -> Any:
                heard.append(when)
                return original(self, *given, **keywords)

            monkeypatch.setattr(kind, method, theirs)

    def build(name: str) -> str:
        heard.clear()
        model = transformers.LlamaForCausalLM._from_config(llama(), attn_implementation=name)
        assert set(heard) == set(when.split(" and ")) - ({"before"} if name == "attn_core:math" else set())
        return str(model.config._attn_implementation)

    try:
        if "before" in when:
            wrap("before")
        huggingface.register()
        if "after" in when:
            wrap("after")
        theirs = {method: getattr(kind, method) for method in registration._WRAPPED_METHODS}
        for _ in range(2):
            huggingface.register()
            assert (build(huggingface.NAME), build("attn_core:math"), build("sdpa")) == (
                "attn_core",
                "attn_core:math",
                "sdpa",
            )
            if "after" in when:
                assert all(getattr(kind, method) is wrapper for method, wrapper in theirs.items())
            huggingface.unregister()
            assert build("sdpa") == "sdpa"
            with pytest.raises(ValueError, match="not supported"):
                build("attn_core:math")
        if when == "before":  # ours is removed
            assert not any(map(registration._is_ours, map(kind.__dict__.__getitem__, registration._WRAPPED_METHODS)))
    finally:
        monkeypatch.undo()
        huggingface.unregister()
        huggingface.register()


KEPT: dict[str, Any] = {
    "opt": lambda: transformers.OPTConfig(**SIZES, ffn_dim=32, word_embed_proj_dim=32),
    "stablelm": lambda: transformers.StableLmConfig(**SIZES, intermediate_size=32, num_key_value_heads=4),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=1, n_head=4),
}


@pytest.mark.parametrize("family", KEPT)
def test_models_that_do_not_pass_output_attentions_on_return_no_weights(family: str) -> None:
    """Their layers do not pass output_attentions to attention; a model whose layers do raises an error."""
    kind, ids = transformers.AutoModelForCausalLM, torch.arange(2, 9)[None]
    model = kind.from_config(KEPT[family](), attn_implementation=huggingface.NAME).eval()
    actual = model(ids, output_attentions=True)
    assert not actual.attentions
    torch.testing.assert_close(actual.logits, model(ids).logits, rtol=0, atol=0)
    with pytest.raises(SpecError, match="output_attentions=True: fused kernels never hold the weights"):
        kind.from_config(llama(), attn_implementation=huggingface.NAME)(ids, output_attentions=True)
    with pytest.raises(ValueError, match="output_attentions"):  # that of transformers
        model.config.output_attentions = True
