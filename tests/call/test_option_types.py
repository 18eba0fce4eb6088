"""Tests that an option of a wrong type is refused before and after an equal legal value, on every entry point.

1, 1.0 and True are equal, and so are pairs of them. A cache that finds a call by its options must not confuse them,
and an option that is falsy must not count as None.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from unsloth_rows import attend_as_unsloth

import jax_frontend
import torch_frontend.finetrainers
from attn_core import SpecError
from attn_core.call.options import is_plain_window
from torch_frontend.module import Attention

# (option, value of a wrong type, the legal value that equals it, the other options of the call)
WRONG: list[tuple[str, Any, Any, dict[str, Any]]] = [
    ("window", 3.0, 3, {"causal": True}),
    ("window", True, 1, {"causal": True}),
    ("window", (3.0, 0), (3, 0), {}),
    ("window", (True, False), (1, 0), {}),
    ("window", (None, 0.0), (None, 0), {}),
    ("window", (Fraction(3), None), (3, None), {}),
    ("causal", 1, True, {}),
    ("causal", 0, False, {}),
    ("causal", 1.0, True, {}),
    ("deterministic", 1, True, {}),
    ("deterministic", 0.0, False, {}),
    ("return_lse", 1.0, True, {}),
    ("return_lse", 0, False, {}),
    ("softcap", True, 1.0, {}),
    ("softcap", 50 + 0j, 50.0, {}),
    ("softcap", Decimal("50"), 50.0, {}),
    ("softcap", 10**400, 50.0, {}),
    ("scale", True, 1.0, {}),
    ("scale", 1 + 0j, 1, {}),
    ("scale", "1", 1, {}),
    ("dropout", False, 0.0, {}),
    ("dropout", "", 0.0, {}),
    ("dropout", [], 0.0, {}),
    ("dropout", {}, 0.0, {}),
    ("dropout", 0j, 0.0, {}),
    ("dropout", Decimal(0), 0.0, {}),
]
LENGTH = 5


def _rows(array: Callable[..., Any]) -> tuple[Any, ...]:
    return tuple(array(np.random.default_rng(0).standard_normal((1, LENGTH, 2, 8)).astype(np.float32)) for _ in "qkv")


def _paged(frontend: Any, array: Callable[..., Any], name: str) -> Callable[..., Any]:
    def call(**options: Any) -> Any:
        pool = np.random.default_rng(0).standard_normal((4, 4, 2, 8)).astype(np.float32)
        tables = {
            "block_table": np.array([[1, 2]], np.int32),
            "seq_lens": np.array([LENGTH], np.int32),
            "cu_seqlens_q": np.array([0, LENGTH], np.int32),
        }
        return getattr(frontend, name)(_rows(array)[0][0], array(pool), array(pool), **tables, **options)

    return call


def _run_attention(frontend: Any, array: Callable[..., Any]) -> Callable[..., Any]:
    """Unsloth's call, with its options in flash-attn's dict."""
    names = {"window": "window_size", "scale": "softmax_scale", "dropout": "dropout_p"}

    def call(**options: Any) -> Any:
        bag = {names.get(name, name): value for name, value in options.items()}
        config = {"backend": "flash_dense", "flash_dense_kwargs": bag}
        return attend_as_unsloth(frontend, *_rows(array), config=config)

    return call


def _dense(frontend: Any, array: Callable[..., Any], name: str) -> Callable[..., Any]:
    def call(**options: Any) -> Any:
        return getattr(frontend, name)(*_rows(array), **options)

    return call


def _qkvpacked(frontend: Any, array: Callable[..., Any]) -> Callable[..., Any]:
    def call(**options: Any) -> Any:
        together = np.stack([np.asarray(each) for each in _rows(array)], axis=2)
        return frontend.attention_qkvpacked(array(together), **options)

    return call


def _host(function: Callable[..., Any], array: Callable[..., Any], **names: str) -> Callable[..., Any]:
    """A host's function of q, k and v, with its names for our options."""

    def call(**options: Any) -> Any:
        return function(*_rows(array), **{names.get(key, key): value for key, value in options.items()})

    return call


def _layer(frontend: Any, array: Callable[..., Any]) -> Callable[..., Any]:
    def call(**options: Any) -> Any:
        torch.manual_seed(0)
        return Attention(2, 16, head_dim=8, **options)(torch.ones(1, LENGTH, 16))

    return call


ARRAYS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "torch": (torch_frontend, torch.from_numpy),
    "jax": (jax_frontend, jnp.asarray),
}
ENTRIES: dict[str, Callable[..., Any]] = {}
for kind, (frontend, array) in ARRAYS.items():
    ENTRIES[f"{kind} attention"] = _dense(frontend, array, "attention")
    ENTRIES[f"{kind} explain"] = _dense(frontend, array, "explain")
    ENTRIES[f"{kind} qkvpacked"] = _qkvpacked(frontend, array)
    ENTRIES[f"{kind} paged"] = _paged(frontend, array, "paged_attention")
    ENTRIES[f"{kind} explain_paged"] = _paged(frontend, array, "explain_paged")
    ENTRIES[f"{kind} run_attention"] = _run_attention(frontend, array)
ENTRIES["torch attention_dispatch"] = _host(
    torch_frontend.finetrainers.attention_dispatch, torch.from_numpy, causal="is_causal", dropout="dropout_p"
)
ENTRIES["jax dot_product_attention"] = _host(
    jax_frontend.dot_product_attention,
    jnp.asarray,
    causal="is_causal",
    window="local_window_size",
    return_lse="return_residual",
)
ENTRIES["torch layer"] = _layer(torch_frontend, torch.from_numpy)
LACKS = {
    "attention_dispatch": {"window", "softcap", "deterministic", "return_lse"},
    "dot_product_attention": {"softcap", "deterministic", "dropout"},
    "layer": {"dropout", "deterministic", "return_lse"},
    "paged": {"dropout"},
    "explain_paged": {"dropout"},
    "run_attention": {"return_lse"},
}


def _cases() -> list[Any]:
    results = []
    for entry in ENTRIES:
        for name, wrong, legal, beside in WRONG:
            last = entry.split()[1]
            if name in LACKS.get(last, ()):
                continue
            if last == "attention_dispatch" and isinstance(wrong, bool):
                continue  # torch's own function, which raises this error, takes True for 1.0
            if last == "dot_product_attention" and isinstance(legal, tuple) and None in legal:
                continue  # both sides have bounds there
            if last == "run_attention":
                if name == "window" and (not isinstance(wrong, tuple) or None in legal):
                    continue  # a dict has pairs, where -1 is unbounded
                if name in ("dropout", "softcap") and not wrong:
                    continue  # flash-attn's value for no softcap
            results.append(pytest.param(entry, name, wrong, legal, beside, id=f"{entry}-{name}={str(wrong)[:12]}"))
    return results


@pytest.mark.sampled
@pytest.mark.parametrize(("entry", "name", "wrong", "legal", "beside"), _cases())
def test_a_wrong_type_is_refused_before_and_after_an_equal_legal_value(
    entry: str, name: str, wrong: Any, legal: Any, beside: dict[str, Any]
) -> None:
    call, messages = ENTRIES[entry], []
    for value in (wrong, legal, wrong, legal, wrong):
        given = {**beside, name: value}
        if value is legal:
            call(**given)
            continue
        with pytest.raises((SpecError, TypeError) if "dispatch" in entry else SpecError) as error:
            call(**given)
        messages.append(str(error.value))
    assert len(set(messages)) == 1, messages


@pytest.mark.parametrize("entry", ["torch attention", "torch qkvpacked", "torch explain"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_generator_of_a_wrong_type_is_refused(entry: str, dropout: float) -> None:
    with pytest.raises(SpecError, match=r"^dropout_rng: expected a torch\.Generator"):
        ENTRIES[entry](dropout=dropout, dropout_rng=1)


def test_numpy_and_int_windows_are_accepted() -> None:
    for window in (None, 3, (3, 0), (None, 0), (3, None), (None, None)):
        assert is_plain_window(window)
    for window in (True, 3.0, [3, 0], (3.0, 0), (True, 0), (np.int64(3), 0), (3,), (3, 0, 0), "30"):
        assert not is_plain_window(window)
