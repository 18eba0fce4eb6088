"""Tests AttentionSpec: it validates itself, compares and hashes by value, and is the same in every process."""

from __future__ import annotations

import copy
import math
import os
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_core import AttentionSpec, DTypeError, ShapeError, SpecError
from attn_core.call.spec import DTYPES

PLAIN: dict[str, Any] = {
    **{"batch": 2, "q_len": 5, "kv_len": 7, "num_heads": 6, "num_kv_heads": 3, "head_dim": 11, "value_dim": 13},
    "dtype": "float32",
}
SPEC = AttentionSpec(**PLAIN)
PACKED = {**PLAIN, "batch": 1, "documents": 3, "max_len_q": 5, "max_len_k": 7}

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "top left": {"alignment": "top_left"},
    "window": {"window": (3, None)},
    "softcap": {"softcap": 50.0},
    "scale": {"scale": 0.25},
    "mask": {"mask_shape": (2, 1, 1, 7)},
    "bias": {"bias_shape": (1, 6, 5, 7), "bias_gradient": True},
    "alibi": {"alibi_shape": (6,)},
    "alibi of batch": {"alibi_shape": (2, 6)},
    "sinks": {"sinks": True},
    "packed": PACKED,
    "dropout": {"dropout": 0.1},
    "deterministic": {"deterministic": True},
    "invariant": {"invariant": "batch"},
    "training": {"needs_backward": True},
    "lse": {"return_lse": True},
    "bfloat16": {"dtype": "bfloat16"},
}

WRONG = {
    "batch": ({"batch": -1}, ShapeError, "^batch=-1: expected a length of 0 or more"),
    "q_len": ({"q_len": -5}, ShapeError, "^q_len=-5: "),
    "kv_len": ({"kv_len": -7}, ShapeError, "^kv_len=-7: "),
    "num_heads": ({"num_heads": 0}, ShapeError, "^num_heads=0: expected at least 1"),
    "num_kv_heads": ({"num_kv_heads": 0}, ShapeError, "^num_kv_heads=0: "),
    "head_dim": ({"head_dim": 0}, ShapeError, "^head_dim=0: "),
    "value_dim": ({"value_dim": -1}, ShapeError, "^value_dim=-1: "),
    "groups": ({"num_kv_heads": 4}, ShapeError, "^k: expected kv heads that divide the 6 query heads, got 4"),
    "dtype": ({"dtype": "int8"}, DTypeError, f"^q: expected one of {', '.join(DTYPES)}, got int8"),
    "packed batch": ({**PACKED, "batch": 2}, ShapeError, "^seq_info: packed documents live in one row, got batch 2"),
    "mask": ({"mask_shape": (2, 6, 5, 8)}, ShapeError, r"^mask: .* = \[2, 6, 5, 7\], got \[2, 6, 5, 8\]"),
    "mask rank": ({"mask_shape": (5, 7)}, ShapeError, r"^mask: .* got \[5, 7\]"),
    "bias": ({"bias_shape": (3, 1, 1, 1)}, ShapeError, r"^bias: .* got \[3, 1, 1, 1\]"),
    "alibi": ({"alibi_shape": (3,)}, ShapeError, r"^alibi_slopes: expected shape \[heads\] = \[6\] or .* got \[3\]"),
    "left": ({"window": (-1, 0)}, SpecError, r"^window=\(-1, 0\): expected a left distance of 0 or more, got -1"),
    "right": ({"window": (0, -2)}, SpecError, r"^window=\(0, -2\): expected a right distance"),
    "int window": ({"window": 3}, SpecError, r"^window=3: expected a pair \(left, right\)"),
    "long window": ({"window": (1, 2, 3)}, SpecError, r"^window=\(1, 2, 3\): expected a pair"),
    "alignment": ({"alignment": "left"}, SpecError, "^alignment='left': expected one of bottom_right, top_left"),
    "softcap 0": ({"softcap": 0}, SpecError, "^softcap=0: expected a finite number above 0; None"),
    "softcap nan": ({"softcap": math.nan}, SpecError, "^softcap=nan: "),
    "scale 0": ({"scale": 0.0}, SpecError, r"^scale=0.0: .*None gives 1/sqrt\(head_dim\)"),
    "scale inf": ({"scale": math.inf}, SpecError, "^scale=inf: "),
    "dropout 1": ({"dropout": 1.0}, SpecError, r"^dropout=1.0: expected a probability in \[0, 1\)"),
    "dropout nan": ({"dropout": math.nan}, SpecError, "^dropout=nan: "),
    "number as flag": ({"causal": 1}, SpecError, "^causal=1: expected True or False"),
    "text as number": ({"scale": "1"}, SpecError, "^scale='1': expected a number known on the host"),
    "fraction in window": ({"window": (3.0, 0)}, SpecError, r"^window=\(3.0, 0\): expected an int, a pair"),
    "gradient of no bias": ({"bias_gradient": True}, SpecError, "^bias_gradient=True: expected a bias"),
}


@pytest.mark.parametrize(("changes", "error", "says"), WRONG.values(), ids=WRONG)
def test_wrong_fields_are_refused(changes: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        AttentionSpec(**{**PLAIN, **changes})
    assert type(caught.value) is error


def test_derived_properties() -> None:
    assert (SPEC.packed, SPEC.group_size, SPEC.empty) == (False, 2, False)
    assert (SPEC.out_shape, SPEC.lse_shape, SPEC.lse_dtype) == ((2, 5, 6, 13), (2, 6, 5), "float32")
    packed = AttentionSpec(**PACKED)
    assert (packed.packed, packed.out_shape, packed.lse_shape) == (True, (5, 6, 13), (6, 5))
    assert replace(SPEC, dtype="float64").lse_dtype == "float64"
    assert all(replace(SPEC, **{name: 0}).empty for name in ("batch", "q_len", "kv_len"))


def test_an_explicit_default_scale_equals_the_default() -> None:
    assert SPEC.scale == 1 / math.sqrt(11)
    assert AttentionSpec(**PLAIN, scale=1 / math.sqrt(11)) == SPEC


@pytest.mark.parametrize(("whole", "real"), [("softcap", 50), ("scale", 1), ("dropout", 0)])
def test_equal_numbers_of_other_types_are_equal_specs(whole: str, real: int) -> None:
    one, other = replace(SPEC, **{whole: real}), replace(SPEC, **{whole: float(real)})
    assert (one, hash(one), one.key, one.digest()) == (other, hash(other), other.key, other.digest())


def test_a_spec_of_other_lengths_equals_one_made_anew() -> None:
    first = replace(SPEC, mask_shape=(SPEC.batch, 1, SPEC.q_len, SPEC.kv_len), bias_shape=(1, 1, SPEC.q_len, 1))
    for sizes in (
        {"batch": 7, "q_len": 11, "kv_len": 13, "mask_shape": (7, 1, 11, 13), "bias_shape": (1, 1, 11, 1)},
        {"batch": 7, "q_len": 11, "kv_len": 13},
    ):
        other = first.with_lengths(**sizes)  # type: ignore[arg-type]
        made = replace(first, **({"mask_shape": None, "bias_shape": None} | sizes))
        assert (other, hash(other), vars(other)) == (made, hash(made), vars(made) | {"symbolic": False})


def test_is_frozen_and_takes_keywords_alone() -> None:
    with pytest.raises(FrozenInstanceError):
        SPEC.causal = True  # type: ignore[misc]
    with pytest.raises(TypeError):
        AttentionSpec(2, 5, 7, 6, 3, 11, 13, "float32")  # type: ignore[misc]


def test_specs_with_one_different_field_differ() -> None:
    specs = [AttentionSpec(**{**PLAIN, **changes}) for changes in VARIANTS.values()]
    for names in (set(specs), {spec.key for spec in specs}, {spec.digest() for spec in specs}):
        assert len(names) == len(specs)
    assert len({str(spec) for spec in specs}) == len(specs) - 1  # the text for people leaves the scale out
    assert specs[0].digest("forward") != specs[0].digest("backward")


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_copies_and_pickles_are_equal(changes: dict[str, Any]) -> None:
    spec = AttentionSpec(**{**PLAIN, **changes})
    for twin in (
        AttentionSpec(**{**PLAIN, **changes}),
        pickle.loads(pickle.dumps(spec)),
        copy.deepcopy(spec),
        replace(spec),
    ):
        assert (twin, hash(twin), twin.key) == (spec, hash(spec), spec.key)
        assert {spec: "found"}[twin] == "found"


READS_SPECS = """
import pickle, sys
specs = pickle.load(sys.stdin.buffer)
again = [type(spec)(**{name: getattr(spec, name) for name in type(spec).__dataclass_fields__}) for spec in specs]
assert [hash(spec) for spec in specs] == [hash(spec) for spec in again]  # the hash is this process's own
assert all({spec: 1}[twin] for spec, twin in zip(specs, again))
print("torch" in sys.modules or "jax" in sys.modules)
print(*(spec.digest("word") for spec in specs), sep="\\n")
"""


def test_equality_and_digest_hold_in_another_process() -> None:
    """With another hash seed the hashes differ, but the specs and their digests are equal."""
    specs = [AttentionSpec(**{**PLAIN, **changes}) for changes in VARIANTS.values()]
    actual = subprocess.run(
        [sys.executable, "-c", READS_SPECS],
        input=pickle.dumps(specs),
        capture_output=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
        check=True,
    )
    loaded, *digests = actual.stdout.decode().split()
    assert loaded == "False"
    assert digests == [spec.digest("word") for spec in specs]


def test_text_names_only_the_features_of_the_call() -> None:
    assert str(SPEC) == "float32, batch 2, q_len 5, kv_len 7, heads 6/3, head_dim 11/13"
    requested = replace(
        SPEC, value_dim=11, causal=True, window=(3, None), softcap=50.0, sinks=True, needs_backward=True
    )
    assert str(requested) == (
        "float32, batch 2, q_len 5, kv_len 7, heads 6/3, head_dim 11, causal, window=(3, None), softcap=50.0, sinks, "
        "needs_backward"
    )


sizes = st.integers(0, 9)
specs = st.builds(
    lambda kv_heads, group, **rest: AttentionSpec(num_kv_heads=kv_heads, num_heads=kv_heads * group, **rest),
    kv_heads=st.integers(1, 4),
    group=st.integers(1, 4),
    batch=sizes,
    q_len=sizes,
    kv_len=sizes,
    head_dim=st.integers(1, 9),
    value_dim=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES),
    causal=st.booleans(),
    alignment=st.sampled_from(("bottom_right", "top_left")),
    window=st.tuples(*[st.none() | st.integers(0, 9)] * 2),
    softcap=st.none() | st.floats(0.1, 100),
    scale=st.none() | st.floats(0.1, 10),
    dropout=st.just(0.0) | st.floats(0, 0.9),
    sinks=st.booleans(),
    return_lse=st.booleans(),
)


FLIPS: dict[str, Any] = {
    "nothing": lambda spec: spec,
    "causal": lambda spec: replace(spec, causal=not spec.causal),
    "softcap": lambda spec: replace(spec, softcap=None if spec.softcap else 1.0),
    "scale": lambda spec: replace(spec, scale=spec.scale * 2),
    "window": lambda spec: replace(spec, window=spec.window[::-1]),
    "batch": lambda spec: replace(spec, batch=spec.batch + 1),
}


@given(specs, st.sampled_from(sorted(FLIPS)))
def test_specs_are_equal_if_and_only_if_every_field_is(one: AttentionSpec, flip: str) -> None:
    other = FLIPS[flip](one)
    alike = all(getattr(one, field.name) == getattr(other, field.name) for field in fields(one))
    assert (one == other) is alike
    assert (one.key == other.key) is alike
    assert hash(one) == hash(other) or not alike
    assert pickle.loads(pickle.dumps(one)) == one
