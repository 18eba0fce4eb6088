"""Tests that what spells the options of a call by hand agrees with their record: names, defaults, order and types."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from operator import attrgetter
from typing import Any, get_type_hints

import jax
import numpy as np
import pytest
import torch

from attn_core.call import keywords
from attn_core.call.options import OPTIONS, PAGED, PLAIN, Door, Layout, Option, Options, Window, names_at
from attn_core.call.seq_info import SeqInfoLike
from attn_core.call.spec import AttentionSpec
from attn_core.expressions.tracing import TracedFunction

FRONTENDS = ("torch_frontend", "jax_frontend")
TYPES = {"Callable": Callable, "Sequence": Sequence, "Window": Window, "Layout": Layout, "np": np}
TYPES |= {"TracedFunction": TracedFunction, "SeqInfoLike": SeqInfoLike}
ARRAYS = {
    "torch_frontend": {"Array": torch.Tensor, "Random": torch.Generator, "Tensor": torch.Tensor, "torch": torch},
    "jax_frontend": {"Array": jax.Array, "Random": jax.Array},
    "keywords": {"Array": keywords.Array, "Random": keywords.Random},
}
BY_NAME = {option.name: option for option in OPTIONS}
# Arguments that are no options of a call: the tables of a step on pages, and how rows are spread.
TABLES = {"block_table", "seq_lens", "cu_seqlens_q", "k_scales", "v_scales", "out"}
SPREAD = {"mesh", "axis_name", "strategy", "layout", "length", "head_groups", "partition_spec"}
FUNCTIONS: dict[str, tuple[Door, set[str]]] = {
    "attention": (Door.ATTENTION, {"q", "k", "v"}),
    "explain": (Door.ATTENTION, {"q", "k", "v", "needs_backward"}),
    "attention_qkvpacked": (Door.QKVPACKED, {"qkv"}),
    "paged_attention": (Door.PAGES, {"q", "k_pages", "v_pages", *TABLES}),
    "explain_paged": (Door.PAGES, {"q", "k_pages", "v_pages", *TABLES}),
    "PagedKVCache.attend": (Door.CACHE, {"self", "layer", "q", "step", "out"}),
    "context_parallel_attention": (Door.RANKS, {"q", "k", "v", *SPREAD}),
    "explain_context_parallel": (Door.RANKS, {"q", "k", "v", *SPREAD, "needs_backward"}),
}
KEYWORDS: dict[str, tuple[Door, set[str]]] = {
    "LayerKeywords": (Door.LAYER_CALL, set()),
    "EquinoxKeywords": (Door.EQUINOX, set()),
    "QkvPackedKeywords": (Door.QKVPACKED, {"return_lse"}),
    "AttentionKeywords": (Door.ATTENTION, {"return_lse", "return_max_logit"}),
    "ExplainKeywords": (Door.ATTENTION, set()),
    "SpreadKeywords": (Door.RANKS, {"return_lse"}),
    "CachedKeywords": (Door.CACHE, {"return_lse"}),
    "PagedKeywords": (Door.PAGES, {"return_lse"}),
    "ExplainPagedKeywords": (Door.PAGES, set()),
}
LAYERS = ("torch_frontend.module", "jax_frontend.linen", "jax_frontend.nnx")


def meant(kind: str, place: str) -> Any:
    """Returns the type that an annotation names."""
    return eval(kind, TYPES | ARRAYS[place])


def kind_of(option: Option, place: str) -> Any:
    return meant(option.kind, place)


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_have_the_options_of_the_record(frontend: str, function: str) -> None:
    door, own = FUNCTIONS[function]
    parameters = inspect.signature(attrgetter(function)(import_module(frontend))).parameters
    options = {name: each for name, each in parameters.items() if name not in own}
    assert set(options) == set(names_at(door))
    if door in (Door.ATTENTION, Door.QKVPACKED, Door.RANKS):
        assert tuple(options) == names_at(door)
    for name, parameter in options.items():
        assert parameter.kind is parameter.KEYWORD_ONLY
        default = True if name == "causal" and door in (Door.PAGES, Door.CACHE) else BY_NAME[name].default
        assert (type(parameter.default), parameter.default) == (type(default), default), name
        if door is not Door.RANKS or "Array" not in BY_NAME[name].kind:  # tables, which it refuses by name
            assert meant(parameter.annotation, frontend) == kind_of(BY_NAME[name], frontend), name


@pytest.mark.parametrize("name", KEYWORDS)
def test_the_keywords_have_the_options_of_the_record(name: str) -> None:
    door, spelled = KEYWORDS[name]
    hints = get_type_hints(getattr(keywords, name))
    hints = {option: hint for option, hint in hints.items() if option in BY_NAME}
    assert set(hints) == set(names_at(door)) - spelled
    for option, hint in hints.items():
        assert hint == kind_of(BY_NAME[option], "keywords"), option


@pytest.mark.parametrize("module", LAYERS)
def test_layers_have_the_options_of_the_record(module: str) -> None:
    for package in ("torch", "flax"):
        pytest.importorskip(package)
    layer = import_module(module).Attention
    call = layer.forward if issubclass(layer, torch.nn.Module) else layer.__call__
    fixed, of_call = inspect.signature(layer.__init__).parameters, inspect.signature(call).parameters
    for name in names_at(Door.LAYER):
        assert fixed[name].default == BY_NAME[name].default, name
    shared = [name for name in of_call if name in BY_NAME and name not in ("deterministic", "dropout_rng")]
    assert tuple(shared) == names_at(Door.LAYER_CALL)
    for name in shared:
        assert of_call[name].default == BY_NAME[name].default, name


def test_the_plain_options_are_fields_of_options_and_of_a_spec() -> None:
    hints, in_spec = get_type_hints(Options), AttentionSpec.__dataclass_fields__
    for option in map(BY_NAME.get, {*PLAIN, *PAGED}):
        assert Options._field_defaults[option.name] == option.default
        assert hints[option.name] == kind_of(option, "keywords")
        assert option.name in in_spec
    tensors_say = {"max_len_k", "mask_mod", "score_mod", "aux_gradients"}
    assert {*PLAIN, *PAGED} | tensors_say == set(Options._fields)


def test_each_option_says_what_it_means() -> None:
    for option in OPTIONS:
        assert option.meaning.endswith(".") and "\n" not in option.meaning, option.name
