"""Tests that ``ragged_paged_attention`` is the function of that name in jax, whose reference judges it here."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as host

from attn_core import DTypeError, NoBackendError, ShapeError, SpecError
from jax_frontend import ragged_paged_attention

pytestmark = pytest.mark.sampled

module = import_module("jax_frontend.paged.ragged_paged_attention")
PAGE, WIDTH, SEQUENCES, TOKENS = 4, 3, 4, 11


def arguments(new: list[int], lengths: list[int], seed: int = 0, kv_heads: int = 2) -> dict[str, Any]:
    """Sequences at the beginning of tables with room for more, in which everything else is no valid number."""
    random = np.random.default_rng(seed)
    count = len(new)
    tables = {
        "kv_lens": np.full(SEQUENCES, 10_000, np.int32),
        "page_indices": random.permutation(SEQUENCES * WIDTH).reshape(SEQUENCES, WIDTH).astype(np.int32),
        "cu_q_lens": np.full(SEQUENCES + 1, -7, np.int32),
        "num_seqs": np.array([count], np.int32),
    }
    tables["kv_lens"][:count] = lengths
    tables["cu_q_lens"][: count + 1] = np.cumsum([0, *new])
    tables["page_indices"][count:] = -1
    pages = random.standard_normal((SEQUENCES * WIDTH, PAGE, 2 * kv_heads, 8)).astype(np.float32)
    q = random.standard_normal((TOKENS, 4, 8)).astype(np.float32)
    return {name: jnp.asarray(array) for name, array in {"q": q, "kv_pages": pages, **tables}.items()}


def expected(arrays: dict[str, Any], **options: Any) -> np.ndarray:
    """The host's reference, and 0 behind its last token."""
    with jax.default_matmul_precision("highest"):
        rows = np.asarray(host.ref_ragged_paged_attention(*arrays.values(), **options))
    return np.concatenate((rows, np.zeros((TOKENS - len(rows), *rows.shape[1:]), rows.dtype)))


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"sm_scale": 0.3, "mask_value": None},
    {"sliding_window": 3, "soft_cap": 2.0},
    {"k_scale": 1.5, "v_scale": 0.25, "sm_scale": 0.3, "soft_cap": 5.0},
    {"num_kv_pages_per_block": 2, "num_queries_per_block": 8, "vmem_limit_bytes": 1000},
)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(OPTIONS)))
@settings(max_examples=6)
@given(st.data())
def test_results_are_those_of_the_host(number: int, data: Any) -> None:
    new = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    lengths = [n + data.draw(st.integers(0, PAGE * WIDTH - n)) for n in new]
    call = arguments(new, lengths, data.draw(st.integers(0, 99)), data.draw(st.sampled_from((1, 2, 4))))
    known = ("num_kv_pages_per_block", "num_queries_per_block", "vmem_limit_bytes")
    of_reference = {name: value for name, value in OPTIONS[number].items() if name not in known}
    right = expected(call, **of_reference)
    for backend in (None, "jax_xla"):
        actual = ragged_paged_attention(**call, **OPTIONS[number], backend=backend)
        np.testing.assert_allclose(actual, right, rtol=2e-5, atol=2e-5)


def test_one_program_serves_any_number_of_sequences() -> None:
    run = jax.jit(lambda call: ragged_paged_attention(**call, sm_scale=0.4, max_len_q=4))
    for new, lengths in (([1], [9]), ([4, 1, 1], [4, 12, 7]), ([2, 3, 1, 4], [5, 6, 7, 8])):
        call = arguments(new, lengths)
        np.testing.assert_allclose(run(call), expected(call, sm_scale=0.4), rtol=2e-5, atol=2e-5)
    assert run._cache_size() == 1


def test_tables_of_numpy_are_taken() -> None:
    call = arguments([2, 1], [5, 9])
    tables = {name: np.asarray(call[name]) for name in ("kv_lens", "page_indices", "cu_q_lens", "num_seqs")}
    np.testing.assert_array_equal(ragged_paged_attention(**{**call, **tables}), ragged_paged_attention(**call))


def test_the_signature_is_the_hosts() -> None:
    ours, theirs = (
        inspect.signature(each).parameters for each in (ragged_paged_attention, host.ragged_paged_attention)
    )
    assert list(ours)[: len(theirs)] == list(theirs) and set(ours) - set(theirs) == {"max_len_q", "backend"}
    for name, parameter in theirs.items():
        assert ours[name].kind is parameter.kind and ours[name].default == pytest.approx(parameter.default, nan_ok=True)


@pytest.mark.parametrize("fault", ["window", "keys for values", "num_seqs"])
def test_planted_faults_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = arguments([2, 3, 1], [9, 12, 7])
    right = expected(call, sliding_window=3)
    if fault == "keys for values":
        views = module.views_of_one
        monkeypatch.setattr(module, "views_of_one", lambda *each: views(*each)[::-1])
    if fault == "num_seqs":
        call["num_seqs"] = jnp.array([2], jnp.int32)
    actual = ragged_paged_attention(**call, sliding_window=4 if fault == "window" else 3)
    assert abs(actual - right).max() > 1e-3


CALL = arguments([2, 1], [5, 9])
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "mask value": ({"mask_value": -5.0}, SpecError, "mask_value=-5.0: expected None, or -1e"),
    "window": ({"sliding_window": 0}, SpecError, "sliding_window=0: expected 1 or more"),
    "soft cap": ({"soft_cap": 0.0}, SpecError, "soft_cap=0.0: expected a finite number above 0"),
    "scale": ({"sm_scale": None}, SpecError, "sm_scale=None: expected a finite number"),
    "k_scale": ({"k_scale": 0.0}, SpecError, "k_scale=0.0: expected a finite number above 0"),
    "v_scale": ({"v_scale": float("nan")}, SpecError, "v_scale=nan: expected a finite number above 0"),
    "tuning": ({"num_queries_per_block": 0}, SpecError, "num_queries_per_block=0: expected at least 1"),
    "odd heads": (
        {"kv_pages": CALL["kv_pages"][:, :, :3]},
        ShapeError,
        r"kv_pages: expected \[pages, size, 2 \* heads",
    ),
    "dtypes": ({"kv_pages": CALL["kv_pages"].astype(jnp.bfloat16)}, DTypeError, "kv_pages: expected the dtype of q"),
    "an int": ({"num_seqs": 3}, TypeError, "num_seqs: expected a jax.Array"),
    "no axis": ({"num_seqs": jnp.int32(3)}, ShapeError, r"num_seqs: expected shape \[1\], got \[\]"),
    "int16": ({"kv_lens": np.zeros(4, np.int16)}, DTypeError, "kv_lens: expected dtype int32, got int16"),
    "short offsets": (
        {"cu_q_lens": jnp.zeros(4, jnp.int32)},
        ShapeError,
        r"cu_q_lens: expected shape \[5\], got \[4\]",
    ),
    "flat pages": (
        {"page_indices": jnp.zeros(4, jnp.int32)},
        ShapeError,
        r"page_indices: expected shape \[max_num_seqs",
    ),
    "too long": ({"kv_lens": CALL["kv_lens"] * 0 + 13}, SpecError, r"kv_lens\[0\]=13: expected 0 to 12 tokens"),
    "no page": ({"page_indices": CALL["page_indices"] + 99}, SpecError, r"page_indices\[0, 0\]=\d+: expected a page"),
    "head_dim": ({"q": CALL["q"][..., :4]}, ShapeError, "kv_pages: expected the head_dim of q"),
    "backend": ({"backend": "flash3"}, NoBackendError, "backend='flash3' cannot run this call"),
    "another kernel's": ({"distribution": 3}, TypeError, "unexpected keyword argument 'distribution'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_error_with_the_hosts_names(name: str) -> None:
    changes, kind, text = BAD[name]
    with pytest.raises(kind, match=text):
        ragged_paged_attention(**{**CALL, **changes})
