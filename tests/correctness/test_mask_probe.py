"""Tests which pairs each backend sees, pair by pair and without tolerance, for every mask feature in both
frameworks."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")
from both_frontends import FRAMEWORKS, backends_of, claimed, compiles_for_long, judged, module_on, only, run, target
from hypothesis import settings
from spec_strategies import Call, make_call

from attn_core import explain
from attn_core.correctness.accuracy import MaskProbe, mask_probe

pytestmark = pytest.mark.sampled

# One call shows everything: it has as many channels as there are pairs of key and kv head.
DENSE = {"batch": 2, "num_heads": 6, "num_kv_heads": 2, "dtype": "float32"}
LENGTHS = {
    "more keys": {**DENSE, "q_len": 5, "kv_len": 11, "head_dim": 22, "value_dim": 22},
    "more queries": {**DENSE, "q_len": 11, "kv_len": 7, "head_dim": 14, "value_dim": 14},
    "as many": {**DENSE, "q_len": 7, "kv_len": 7, "head_dim": 14, "value_dim": 14},
    "documents": {**DENSE, "lengths": ((3, 0, 5, 1, 2), (3, 0, 5, 1, 2)), "head_dim": 22, "value_dim": 22},
    "other key documents": {
        **DENSE,
        "lengths": ((3, 0, 2, 6, 0, 1), (5, 2, 0, 4, 0, 3)),
        "head_dim": 28,
        "value_dim": 28,
    },
}
PARTIAL = ("sdpa_efficient", "xformers")
"""Backends that claim packed documents, windows and masks, and refuse some of their combinations."""
CAUSAL = (False, True)
ALIGNMENTS = ("bottom_right", "top_left")
WINDOWS = (None, (2, 1), (0, 0), (None, 1), (3, None), (1, 4))
MASKS = (None, (0, 0, 0, 0), (0, 1, 1, 0))
"""The axes of a bool mask: full (0) or broadcast (1)."""


class Probed(NamedTuple):
    """A call with the inputs of a probe, and the probe."""

    call: Call
    probe: MaskProbe


def probed(
    lengths: str, causal: bool, alignment: str, window: Any, mask: Any, boundaries: Any = None, **changes: Any
) -> Probed:
    """``lengths`` is a key of LENGTHS; ``changes`` override fields of the spec."""
    fields = {**LENGTHS[lengths], "causal": causal, "alignment": alignment, "window": window, **changes}
    if boundaries is not None:
        fields["lengths"] = boundaries
    if mask is not None:
        sizes = make_call(**fields).spec
        full = (sizes.batch, sizes.num_heads, sizes.q_len, sizes.kv_len)
        fields["mask_shape"] = tuple(1 if broadcast else n for n, broadcast in zip(full, mask, strict=True))
    call = make_call(**fields)
    inputs = call.inputs
    names = ("mask", "cu_seqlens_q", "cu_seqlens_k", "key_ranges")
    probe = mask_probe(call.spec, **{name: getattr(inputs, name) for name in names})
    return Probed(call, probe)


def differences(framework: str, probed: Probed, backend: str, device: str = "cpu") -> list[str]:
    """The pairs that the backend sees and should not, or the other way round."""
    outs = [seen_by(framework, probed, inputs, backend, device).astype(np.float32) for inputs in probed.probe.inputs()]
    return probed.probe.differences(outs)


def seen_by(framework: str, probed: Probed, inputs: Any, backend: str, device: str) -> np.ndarray:
    """The output that shows the visible pairs by its zeros, which no rounding changes."""
    return run(framework, replace(probed.call, inputs=inputs), backend, device, rounding_matters=False)["out"]


def check_all(framework: str, backend: str, device: str, every: list[tuple[Any, ...]], **changes: Any) -> None:
    """Probes combinations of features. At least one of them must run, if the backend claims any."""
    where, ran, wrong = target(framework, device), 0, []
    if missing := judged(framework, backend, device):
        pytest.skip(missing)
    claims = module_on(backend, device).forward_claims
    if "float32" not in claims.dtypes:
        changes = {"dtype": claims.dtypes[0], **changes}
    for features in every:
        requested = probed(*features, **changes)
        if explain(requested.call.spec, where, backend).backend is None:
            continue
        ran += 1
        wrong += [f"{features}: {actual}" for actual in differences(framework, requested, backend, device)[:2]]
    assert wrong == []
    if not ran:
        pytest.skip(f"{backend} in {framework} on {where.device} refuses all of these")
    assert ran == len(every) or not (claims.packed and claims.window and claims.mask) or backend in PARTIAL


def combinations(framework: str, backend: str, lengths: str, device: str = "cpu") -> list[tuple[Any, ...]]:
    """Every combination of the features; a sample in the bounded profile if each costs a compilation.

    The steps have no common factor with the numbers of features, so a sample contains all of each feature.
    """
    every = list(product((lengths,), CAUSAL, ALIGNMENTS, WINDOWS, MASKS))
    if settings.get_current_profile_name() == "thorough":
        return every
    compiled = framework == "jax" and backends_of("jax").count(backend)
    if compiles_for_long(backend, device):
        return every[::46]
    return every[:: 11 if compiled or backend == "flex" else 5 if framework == "jax" else 1]


@pytest.mark.on_gpus(only=lambda lengths, **_: lengths != "documents")  # "other key documents" is harder
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("backend", "device"), claimed())
def test_the_visible_set(backend: str, lengths: str, framework: str, device: str) -> None:
    only(("other key documents",), lengths, backend, device)
    check_all(framework, backend, device, combinations(framework, backend, lengths, device))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("backend", "device"), [c for c in claimed() if module_on(*c.values).forward_claims.key_ranges]
)
def test_the_visible_set_of_key_ranges(backend: str, device: str, framework: str) -> None:
    shapes = ((2, 2, 2), (1, 2, 1), (2, 1, 1))
    for rows, heads, ranges in shapes[:1] if compiles_for_long(backend, device) else shapes:  # it compiles each
        some = [("more keys", True, "top_left", (3, None), (0, 1, 1, 0)), ("more keys", False, "top_left", None, None)]
        some = some[:1] if compiles_for_long(backend, device) else some
        check_all(framework, backend, device, some, key_ranges_shape=(rows, heads, 11, ranges, 2))
    packed = [("documents", False, "top_left", None, None), ("documents", True, "bottom_right", (2, 1), None)]
    packed = packed[-1:] if compiles_for_long(backend, device) else packed
    check_all(framework, backend, device, packed, key_ranges_shape=(1, 2, 11, 2, 2))
    if compiles_for_long(backend, device):  # test_flex_cuda has ranges beyond one block
        return
    sizes = {"batch": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 128, "value_dim": 128}
    long = [("more keys", False, "top_left", (3, 129), (0, 1, 1, 0)), ("more keys", False, "top_left", None, None)]
    sizes |= {"q_len": 263, "kv_len": 271}
    check_all(framework, backend, device, long, key_ranges_shape=(1, 1, 271, 2, 2), **sizes)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize(("backend", "device"), claimed())
def test_the_visible_set_in_every_dtype(backend: str, device: str, dtype: str, framework: str) -> None:
    only(("bfloat16",), dtype, backend, device)
    some = [
        ("more queries", True, "bottom_right", (2, 1), (0, 0, 0, 0)),
        ("other key documents", True, "bottom_right", (3, None), None),
    ]
    check_all(framework, backend, device, some, dtype=dtype)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("backend", "device"), claimed())
def test_the_visible_set_across_blocks(backend: str, device: str, framework: str) -> None:
    """Lengths beyond one block of queries and keys, and bands that end inside a block."""
    sizes = {"batch": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 128, "value_dim": 128}
    some = [
        ("more keys", True, "bottom_right", (140, 0), None),
        ("more keys", False, "top_left", (3, 129), (0, 1, 1, 0)),
        ("more keys", True, "bottom_right", None, None),
    ]
    check_all(framework, backend, device, some, q_len=263, kv_len=271, **sizes)


@pytest.mark.on_gpus(only=lambda window, **_: window == 2)  # a frontend counts the keys, on every device alike
@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("backend", "device"), claimed())
def test_an_int_window_shows_that_many_keys(backend: str, device: str, framework: str, window: int) -> None:
    """Counted without the library: row i sees ``min(i + 1, window)`` keys, itself the last of them."""
    dtypes = module_on(backend, device).forward_claims.dtypes
    requested = probed(
        "as many", True, "bottom_right", window, None, dtype="float32" if "float32" in dtypes else dtypes[0]
    )
    if explain(requested.call.spec, target(framework, device), backend).backend is None:
        pytest.skip(f"{backend} does not run this in {framework}")
    (inputs,) = requested.probe.inputs()
    seen = requested.probe.visible_pairs([seen_by(framework, requested, inputs, backend, device)])
    keys = seen.any(3)[0, 0]  # [q_len, kv_len]
    assert [row.nonzero()[0].tolist() for row in keys] == [list(range(max(0, i + 1 - window), i + 1)) for i in range(7)]


@pytest.mark.parametrize(
    ("lengths", "truth", "fault"),
    [
        ("more keys", {"window": (2, 1)}, {"window": (3, 1)}),
        ("more keys", {"window": (2, 1)}, {"window": (2, 0)}),
        ("more queries", {"causal": True}, {"causal": True, "alignment": "top_left"}),
        ("other key documents", {"causal": True}, {"causal": True, "alignment": "top_left"}),
        ("other key documents", {}, {"boundaries": ((4, 0, 1, 6, 0, 1), (5, 2, 0, 4, 0, 3))}),
        ("documents", {}, {"boundaries": ((3, 0, 5, 1, 2), (3, 1, 4, 1, 2))}),
    ],
)
def test_the_probe_sees_planted_faults(lengths: str, truth: dict[str, Any], fault: dict[str, Any]) -> None:
    """A backend that gets another spec stands for one that misreads its call."""
    plain = {"causal": False, "alignment": "bottom_right", "window": None, "mask": None, "boundaries": None}
    requested, misread = (probed(lengths, **{**plain, **changes}) for changes in (truth, fault))
    (inputs,) = requested.probe.inputs()
    offsets = {name: getattr(misread.call.inputs, name) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    faulty = replace(misread.call, inputs=inputs._replace(**offsets))
    assert requested.probe.differences([run("torch", faulty, "math")["out"]])
    assert requested.probe.differences([run("torch", replace(requested.call, inputs=inputs), "math")["out"]]) == []
