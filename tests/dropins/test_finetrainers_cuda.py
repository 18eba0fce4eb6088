"""Tests Finetrainers' attention_dispatch on a GPU: every argument on every provider, in the dtypes of its kernels."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from finetrainers_cases import (
    ARGUMENTS,
    BATCH,
    HEADS,
    KEEP,
    dispatched,
    judged,
    reference_of,
    tensors,
    with_scale_above_0,
)
from frameworks import as_numpy

from attn_core import NoBackendError, SpecError
from attn_core.call.tensors import Gradients
from attn_core.correctness import accuracy

pytestmark = pytest.mark.cuda

HALF = ("flash", "flash_varlen", "flex", "xformers", "_native_flash", "_native_efficient", "_native_cudnn")
SINGLE = ("flex", "xformers", "_native_efficient")  # the kernels that take float32
ANY = ("native", "_native_math")
WAYS = [(word, torch.bfloat16) for word in (*HALF, *ANY)] + [(word, torch.float32) for word in (*SINGLE, *ANY)]


def over(ways: list[tuple[str, torch.dtype]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("word", "dtype"), ways, ids=lambda part: part if isinstance(part, str) else str(part).removeprefix("torch.")
    )


# flex, which native also chooses, compiles for half a minute, so it has one dtype where no test needs both.
HALVES = [way for way in WAYS if way not in (("flex", torch.float32), ("native", torch.float32))]
ways, halves = over(WAYS), over(HALVES)
lengths = pytest.mark.parametrize(("q_len", "kv_len"), [(7, 7), (7, 5), (1, 7)])
"""Without 5 queries of 7 keys, the lengths of ``test_supported_arguments_are_honoured``."""

MASKS = {"keys", "keys and causal", "table", "table and causal", "added", "window and keys", "softcap and keys"}
WINDOWS = {"window", "left window", "window and keys"}
SOFTCAPS = {"softcap", "softcap and keys"}
LEARNED = ("is_causal", "keys", "window", "softcap", "added")
REFUSED: dict[Any, set[str]] = {
    "flash": {*MASKS, "lse and keys", "dropout"},
    "flash_varlen": {"keys and causal", "table", "table and causal", "added", "window and keys", "dropout"},
    "flex": {"dropout"},
    "xformers": {*SOFTCAPS, "slopes", "dropout"},
    ("xformers", torch.float32): {*SOFTCAPS, "slopes", "dropout", "window", "left window"},
    "_native_flash": {*MASKS, *SOFTCAPS, "lse and keys", "slopes", "dropout"},
    "_native_efficient": {*WINDOWS, *SOFTCAPS, "slopes", "dropout", "added"},
    ("_native_efficient", torch.float32): {*WINDOWS, *SOFTCAPS, "slopes", "dropout"},
    "_native_cudnn": {*WINDOWS, *SOFTCAPS, "slopes", "dropout", "added", "deterministic"},
    "native": set(),
    "_native_math": set(),
}
"""Arguments that the kernels lack for calls of 5 queries and 7 keys; all others must be honoured there."""
WITHOUT_GRADIENT = {("xformers", torch.bfloat16, "added")}
"""Arguments that a word's kernels honour in a forward alone: this bias is float32."""

MORE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # like ARGUMENTS, for calls of equal lengths
    "causal window": ({"is_causal": True, "window_size": (2, 0)}, {"causal": True, "window": (2, 0)}, "window"),
    "causal and softcap": ({"is_causal": True, "softcap": 1.5}, {"causal": True, "softcap": 1.5}, "softcap=1.5"),
    "causal, for the log-sum-exp": ({"is_causal": True, "return_lse": True}, {"causal": True}, "return_lse"),
    "everything": (
        {"is_causal": True, "window_size": (3, 0), "softcap": 1.5, "scale": 0.3, "deterministic": True},
        {"causal": True, "window": (3, 0), "softcap": 1.5, "scale": 0.3},
        "window|softcap|deterministic",
    ),
}


def of_lengths(values: dict[str, Any], q_len: int, kv_len: int) -> dict[str, Any]:
    """The same arguments (or fields) with tables for other lengths."""

    def resized(value: Any) -> Any:
        if not isinstance(value, np.ndarray) or value.ndim != 4:
            return value
        rows, keys = (n if size > 1 else 1 for n, size in zip((q_len, kv_len), value.shape[2:], strict=True))
        return np.resize(value, (*value.shape[:2], rows, keys))

    return {name: resized(value) for name, value in values.items()}


def positive(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a spec after ``with_scale_above_0`` has negated the query."""
    return fields | {"scale": abs(fields["scale"])} if "scale" in fields else fields


def is_honoured(word: str, qkv: Any, arguments: dict[str, Any], fields: dict[str, Any], reason: str) -> bool:
    """Whether a call is honoured, with the right result; False for a refusal that names the reason. Anything else
    fails."""
    try:
        actual = dispatched(word, qkv, arguments)
    except (NoBackendError, SpecError) as refusal:
        assert reason and re.search(reason, str(refusal)), refusal
        return False
    out, lse = actual if arguments.get("return_lse") else (actual, None)
    verdict = judged(out, lse, with_scale_above_0(qkv, fields), **positive(fields))
    assert out.dtype == qkv[0].dtype and verdict.ok, verdict
    return True


@pytest.mark.on_gpus(only=lambda word, name, **_: word != "flex" or name not in LEARNED)  # test_gradients compiles both
@halves
@pytest.mark.parametrize("name", ARGUMENTS)
def test_supported_arguments_are_honoured(word: str, dtype: torch.dtype, name: str) -> None:
    arguments, fields, reason = ARGUMENTS[name]
    refused = REFUSED.get((word, dtype), REFUSED[word])
    assert is_honoured(word, tensors(device="cuda", dtype=dtype), arguments, fields, reason) == (name not in refused)


@over([(word, dtype) for word, dtype in HALVES if word != "flex"])
@lengths
def test_every_argument_is_honoured_or_refused_by_name(word: str, dtype: torch.dtype, q_len: int, kv_len: int) -> None:
    qkv, ran = tensors(q_len, kv_len, device="cuda", dtype=dtype), []
    for name, (arguments, fields, reason) in (ARGUMENTS | (MORE if q_len == kv_len else {})).items():
        # Causal from the first key: the keys that no query sees are cut off. That leaves one key for one query, and all
        # keys if
        # there are more queries than keys.
        where = ["alignment"] * (q_len > kv_len) + ["kv_len=1"] * (q_len == 1) if fields.get("causal") else []
        why = "|".join(filter(None, (reason, *where)))
        given = of_lengths(arguments, q_len, kv_len), of_lengths(fields, q_len, kv_len)
        ran += [name] if is_honoured(word, qkv, *given, why) else []
    assert {"plain", "scale", "scale below 0", "no window", "no softcap", "return_lse"} <= set(ran)


@halves
@pytest.mark.parametrize("name", LEARNED)
def test_gradients(word: str, dtype: torch.dtype, name: str) -> None:
    arguments, fields, reason = ARGUMENTS[name]
    leaves = [tensor.requires_grad_() for tensor in tensors(device="cuda", dtype=dtype)]
    if name in REFUSED.get((word, dtype), REFUSED[word]) or (word, dtype, name) in WITHOUT_GRADIENT:
        with pytest.raises((NoBackendError, SpecError), match=reason):
            dispatched(word, leaves, arguments)
        return
    out = dispatched(word, leaves, arguments)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    gradients = torch.autograd.grad(out, leaves, dout)
    spec, inputs = reference_of(leaves, **fields, dtype=str(dtype).removeprefix("torch."), needs_backward=True)
    rows = [as_numpy(tensor).swapaxes(1, 2) for tensor in (out, dout, *gradients)]  # [batch, len, heads, dim]
    verdict = accuracy.expect(spec, inputs, dout=rows[1]).judge(out=rows[0], gradients=Gradients(*rows[2:]))
    assert verdict.ok, verdict


@pytest.mark.parametrize(("q_len", "kv_len"), [(7, 7), (5, 7), (7, 5), (1, 7)])
@pytest.mark.parametrize("kind", ["left", "right", "holes", "nothing", "one row nothing", "all", "one for all rows"])
def test_masks_of_keys_on_flash_varlen(q_len: int, kv_len: int, kind: str) -> None:
    """Dropped keys may hold any value: no result depends on it."""
    keep = np.ones((BATCH, kv_len), bool)
    keep[0, {"left": slice(0, 3), "right": slice(-3, None), "holes": slice(1, None, 2)}.get(kind, slice(0, 0))] = False
    keep[0] &= kind != "one row nothing"
    keep &= kind != "nothing"
    if kind == "one for all rows":
        keep = np.arange(kv_len)[None, :] != 2
    q, k, v = tensors(q_len, kv_len, device="cuda", dtype=torch.bfloat16)
    dropped = torch.from_numpy(~keep).to("cuda")[:, None, :, None]
    leaves = [q, k.masked_fill(dropped, torch.nan), v.masked_fill(dropped, torch.nan)]
    leaves = [tensor.requires_grad_() for tensor in leaves]
    arguments, fields = {"attn_mask": keep}, {"mask": keep[:, None, None, :]}
    with torch.no_grad():
        results = dispatched("flash_varlen", leaves, {**arguments, "return_lse": True})
    out = dispatched("flash_varlen", leaves, arguments)
    for each in (results, (out, None)):
        verdict = judged(*each, (q, k, v), **fields)
        assert verdict.ok, verdict
    out.sum().backward()
    gradients = [leaf.grad for leaf in leaves]
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not any(gradient.masked_select(dropped).any() for gradient in gradients[1:])


@pytest.mark.parametrize(
    ("word", "dtype"), [("flash", torch.bfloat16), ("native", torch.bfloat16), ("_native_math", torch.float32)]
)
def test_dropout_is_drawn_from_torchs_generator_and_keeps_the_mean(word: str, dtype: torch.dtype) -> None:
    q, k, v = tensors(64, 64, device="cuda", dtype=dtype)
    v = torch.ones_like(v)

    def output_of(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return dispatched(word, (q, k, v), {"dropout_p": 0.25}).float()

    assert torch.equal(output_of(0), output_of(0)) and not torch.equal(output_of(0), output_of(1))
    assert output_of(0).std() > 0.01
    assert output_of(0).mean().item() == pytest.approx(1.0, abs=0.02)


@ways
def test_fewer_kv_heads_need_enable_gqa(word: str, dtype: torch.dtype) -> None:
    qkv = tensors(device="cuda", dtype=dtype)
    with pytest.raises((SpecError, RuntimeError), match=r"enable_gqa|must match"):
        dispatched(word, qkv, {"enable_gqa": False})
    one = (qkv[0], *(tensor[:, :1] for tensor in qkv[1:]))  # one kv head serves all heads, as in torch
    every = (qkv[0], *(tensor[:, :1].expand(-1, HEADS, -1, -1) for tensor in qkv[1:]))
    actual, right = (dispatched(word, given, {"enable_gqa": False}) for given in (one, every))
    torch.testing.assert_close(actual, right, atol=0.03 if dtype == torch.bfloat16 else 1e-5, rtol=0)


def test_a_mask_of_two_axes_is_one_of_keys() -> None:
    for word in ("flash_varlen", "flex", "xformers"):
        fields = {"mask": KEEP[:, None, None, :]}
        assert is_honoured(word, tensors(device="cuda", dtype=torch.bfloat16), {"attn_mask": KEEP}, fields, "")
