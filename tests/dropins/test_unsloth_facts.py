"""Compares our names, parameters and fields with those that Unsloth's files use, from a stored table of its release.

To check another release, unpack its wheel and set UNSLOTH_SOURCE to the folder, or install it;
``python tests/helpers/unsloth_facts.py FOLDER > tests/dropins/unsloth_facts.json`` stores its table.
"""

from __future__ import annotations

import ast
import inspect
import os
from dataclasses import MISSING, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import unsloth_facts

pytest.importorskip("torch")

from attn_core.dropins import unsloth as arguments
from attn_core.dropins.unsloth import BAGS
from torch_frontend import unsloth

FACTS = unsloth_facts.stored()
NOT_OURS = {
    "clear_packed_caches": "we cache no masks and no lengths",
    "configure_padding_free": "configures TRL's trainer",
    "configure_sample_packing": "configures TRL's trainer",
    "enable_padding_free_metadata": "changes the trainer's collator, which then passes packed_seq_lengths",
    "enable_sample_packing": "changes the trainer's collator, which then passes packed_seq_lengths",
    "mark_allow_overlength": "sets a flag on the host's models",
    "patch_hybrid_linear_attention_varlen": "is for linear attention",
}
"""Public names that belong to the host's training, not to attention."""


def test_every_name_that_unsloths_files_import_exists() -> None:
    names = {name for needs in FACTS["files"].values() for name in needs.get("imports", ())}
    public = {name for name in names if not name.startswith("_")} | {name.split(".")[1] for name in FACTS["signatures"]}
    assert {name for name in public if not hasattr(unsloth, name)} == NOT_OURS.keys()


@pytest.mark.parametrize("name", [name for name in FACTS["signatures"] if name.split(".")[1] not in NOT_OURS])
def test_our_functions_take_unsloths_arguments(name: str) -> None:
    theirs = inspect.signature(_function(FACTS["signatures"][name]))
    ours = inspect.signature(getattr(unsloth, name.split(".")[1]))
    if name.endswith("decode_scaled_dot_product_attention"):
        assert list(ours.parameters)[:3] == list(theirs.parameters)[:3]
        assert {"attn_mask", "is_causal", "enable_gqa", "scale", "dropout_p"} < set(ours.parameters)
        return
    assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
        (p.name, p.kind, p.default) for p in theirs.parameters.values()
    ]


def _function(parameters: str) -> Any:
    """Returns a function with these parameters, whose defaults are constants."""
    tree = ast.parse(f"def function({parameters}): pass")
    (function,) = tree.body
    assert isinstance(function, ast.FunctionDef)
    defaults = (*function.args.defaults, *filter(None, function.args.kw_defaults))
    assert all(isinstance(ast.literal_eval(default), (int, float, str, type(None))) for default in defaults)
    space: dict[str, Any] = {}
    exec(compile(tree, "<signature>", "exec"), space)
    return space["function"]


OURS_IS_OPTIONAL = ("requires_grad", "seq_info", "attention_mask", "causal_mask")
"""Fields that have a default here, and none in the host."""


@pytest.mark.parametrize("name", FACTS["fields"])
def test_our_objects_have_unsloths_fields_in_its_order(name: str) -> None:
    for theirs, ours in zip(FACTS["fields"][name], fields(getattr(unsloth, name)), strict=True):
        field, _, default = theirs.partition("=")
        assert field == ours.name
        if default or field not in OURS_IS_OPTIONAL:
            assert ours.default == (ast.literal_eval(default) if default else MISSING), field


@pytest.mark.parametrize("file", [file for file, needs in FACTS["files"].items() if "AttentionConfig" in needs])
def test_every_field_and_option_that_a_file_sets_is_known(file: str) -> None:
    needs = FACTS["files"][file]
    for name in ("AttentionConfig", "AttentionContext"):
        known = {field.name for field in fields(getattr(arguments, name))}
        known |= {f"{bag}[{key}]" for bag, keys in BAGS.items() for key in keys}
        assert set(needs[name]) <= known


def _source() -> Path | None:
    """Returns the folder of an unpacked or installed release."""
    if "UNSLOTH_SOURCE" in os.environ:
        return Path(os.environ["UNSLOTH_SOURCE"])
    spec = find_spec("unsloth")
    return None if spec is None or spec.origin is None else Path(spec.origin).parents[1]


@pytest.mark.skipif(_source() is None, reason="no release of unsloth: install one or set UNSLOTH_SOURCE to its folder")
def test_the_table_equals_that_of_the_release() -> None:
    source = _source()
    assert source is not None
    derived = unsloth_facts.derive(source)
    assert derived == FACTS, f"unsloth {derived['version']} differs from the stored {FACTS['version']}"
