"""Tests every argument of Finetrainers' attention_dispatch on every provider, in the dtypes of its kernels."""

from __future__ import annotations

import importlib
import re
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from finetrainers_cases import (
    ADDED,
    BATCH,
    HEADS,
    KEEP,
    KEEP4,
    KV_LEN,
    Q_LEN,
    close,
    dispatched,
    expected,
    reference_of,
    tensors,
)
from frameworks import as_numpy
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from attn_core import NoBackendError, SpecError
from attn_core.call.tensors import Gradients
from attn_core.correctness import accuracy
from torch_frontend import use_backend
from torch_frontend.finetrainers import AttentionProvider, attention_dispatch, attention_provider, providers

MODULE = importlib.import_module("torch_frontend.finetrainers")
FLOAT, HALF = torch.float32, torch.bfloat16


class Way(NamedTuple):
    """A provider on a device, in a dtype of its kernels."""

    word: str
    dtype: torch.dtype = FLOAT
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.word}-{str(self.dtype).removeprefix('torch.')}-{self.device}"

    def tensors(self, q_len: int = Q_LEN, kv_len: int = KV_LEN) -> Any:
        return tensors(q_len, kv_len, device=self.device, dtype=self.dtype)


def over(ways: list[Way]) -> pytest.MarkDecorator:
    params = [pytest.param(way, marks=[pytest.mark.cuda] * (way.device == "cuda"), id=str(way)) for way in ways]
    return pytest.mark.parametrize("way", params)


HERE = [Way(word) for word in ("flash", "flash_varlen", "flex", "native", "_native_flash", "_native_math")]
IN_HALF = ("flash", "flash_varlen", "flex", "xformers", "_native_flash", "_native_efficient", "_native_cudnn")
IN_BOTH = ("native", "_native_math")
THERE = [Way(word, HALF, "cuda") for word in (*IN_HALF, *IN_BOTH)]
THERE += [Way(word, FLOAT, "cuda") for word in ("flex", "xformers", "_native_efficient", *IN_BOTH)]
# flex, which native also chooses, compiles for half a minute, so it has one dtype where no test needs both.
FEWER = [way for way in THERE if way[:2] not in (("flex", FLOAT), ("native", FLOAT))]
lengths = pytest.mark.parametrize(("q_len", "kv_len"), [(7, 7), (7, 5), (1, 7)])
"""Without 5 queries of 7 keys, the lengths of ``test_supported_arguments_are_honoured``."""

TABLE = np.random.default_rng(1).random((BATCH, HEADS, Q_LEN, KV_LEN)) < 0.7
SLOPES = np.geomspace(0.5, 0.01, HEADS).astype(np.float32)
FROM_THE_END = {"alignment": "bottom_right"}
ARGUMENTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # name: (arguments, fields of the spec, how a refusal names them)
    "plain": ({}, {}, ""),
    "scale": ({"scale": 0.7}, {"scale": 0.7}, ""),
    "scale below 0": ({"scale": -0.7}, {"scale": -0.7}, ""),
    "is_causal": ({"is_causal": True}, {"causal": True}, ""),
    "keys": ({"attn_mask": KEEP4}, {"mask": KEEP4}, "mask"),
    "keys and causal": ({"attn_mask": KEEP4, "is_causal": True}, {"mask": KEEP4, "causal": True}, "mask"),
    "table": ({"attn_mask": TABLE}, {"mask": TABLE}, "mask"),
    "table and causal": ({"attn_mask": TABLE, "is_causal": True}, {"mask": TABLE, "causal": True}, "mask"),
    "added": ({"attn_mask": ADDED}, {"bias": ADDED}, "bias|attn_mask"),
    "window": ({"window_size": (2, 1)}, {"window": (2, 1), **FROM_THE_END}, "window"),
    "left window": ({"window_size": [3, -1]}, {"window": (3, None), **FROM_THE_END}, "window"),
    "no window": ({"window_size": (-1, -1)}, {}, ""),
    "softcap": ({"softcap": 1.5}, {"softcap": 1.5}, "softcap=1.5"),
    "no softcap": ({"softcap": 0.0}, {}, ""),
    "slopes": ({"alibi_slopes": SLOPES}, {"slopes": SLOPES, **FROM_THE_END}, "alibi_slopes"),
    "deterministic": ({"deterministic": True}, {}, "deterministic"),
    "return_lse": ({"return_lse": True}, {}, "return_lse"),
    "dropout": ({"dropout_p": 1e-9}, {}, "dropout=1e-09"),
    "window and keys": (
        {"window_size": (2, 1), "attn_mask": KEEP4},
        {"mask": KEEP4, "window": (2, 1), **FROM_THE_END},
        "window",
    ),
    "softcap and keys": ({"softcap": 1.5, "attn_mask": KEEP4}, {"softcap": 1.5, "mask": KEEP4}, "softcap|mask"),
    "lse and keys": ({"return_lse": True, "attn_mask": KEEP4}, {"mask": KEEP4}, "mask|return_lse"),
}
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

MASKS = {"keys", "keys and causal", "table", "table and causal", "added", "window and keys", "softcap and keys"}
WINDOWS = {"window", "left window", "window and keys"}
SOFTCAPS = {"softcap", "softcap and keys"}
LEARNED = ("is_causal", "keys", "keys and causal", "window", "softcap", "added")
LACKING: dict[str, dict[Any, set[str]]] = {
    "cpu": {
        "flash": {*SOFTCAPS, "dropout"},
        "flash_varlen": {*SOFTCAPS, "table", "table and causal", "added", "dropout", "window and keys"},
        "flex": {"dropout"},
        "native": set(),
        "_native_flash": {*SOFTCAPS, "dropout"},
        "_native_math": set(),
    },
    "cuda": {
        "flash": {*MASKS, "lse and keys", "dropout"},
        "flash_varlen": {"keys and causal", "table", "table and causal", "added", "window and keys", "dropout"},
        "flex": {"dropout"},
        "xformers": {*SOFTCAPS, "slopes", "dropout"},
        ("xformers", FLOAT): {*SOFTCAPS, "slopes", "dropout", "window", "left window"},
        "_native_flash": {*MASKS, *SOFTCAPS, "lse and keys", "slopes", "dropout"},
        "_native_efficient": {*WINDOWS, *SOFTCAPS, "slopes", "dropout", "added"},
        ("_native_efficient", FLOAT): {*WINDOWS, *SOFTCAPS, "slopes", "dropout"},
        "_native_cudnn": {*WINDOWS, *SOFTCAPS, "slopes", "dropout", "added", "deterministic"},
        "native": set(),
        "_native_math": set(),
    },
}
"""Arguments that the kernels lack for calls of 5 queries and 7 keys; all others must be honoured there."""
WITHOUT_GRADIENT = {("xformers", HALF, "added")}
"""Arguments that a word's kernels honour in a forward alone: this bias is float32."""


def lacking(way: Way) -> set[str]:
    table = LACKING[way.device]
    return table.get(way[:2], table[way.word])


def of_lengths(values: dict[str, Any], q_len: int, kv_len: int) -> dict[str, Any]:
    """The same arguments (or fields) with tables for other lengths."""

    def resized(value: Any) -> Any:
        if not isinstance(value, np.ndarray) or value.ndim != 4:
            return value
        rows, keys = (n if size > 1 else 1 for n, size in zip((q_len, kv_len), value.shape[2:], strict=True))
        return np.resize(value, (*value.shape[:2], rows, keys))

    return {name: resized(value) for name, value in values.items()}


def check(out: Any, lse: Any, qkv: Any, **call: Any) -> None:
    """Checks that an output in the host's layout, and the log-sum-exp if there is one, are within the dtype's bounds.

    The reference takes a negative scale as a positive one with a negated query.
    """
    if "scale" in call:
        qkv = (qkv[0] * float(np.sign(call["scale"])), *qkv[1:])
        call |= {"scale": abs(call["scale"])}
    spec, inputs = reference_of(qkv, **call, dtype=str(out.dtype).removeprefix("torch."))
    own = as_numpy(out).swapaxes(1, 2)  # [batch, q_len, heads, value_dim]
    verdict = accuracy.expect(spec, inputs).judge(out=own, lse=None if lse is None else as_numpy(lse))
    assert out.dtype == qkv[0].dtype and verdict.ok, verdict
    assert out.is_cuda or all(quantity.error < 2e-5 for quantity in verdict.quantities), verdict


def is_honoured(word: str, qkv: Any, arguments: dict[str, Any], fields: dict[str, Any], reason: str) -> bool:
    """Whether a call is honoured, with the right result; False for a refusal that names the reason. Anything else
    fails."""
    try:
        actual = dispatched(word, qkv, arguments)
    except (NoBackendError, SpecError) as refusal:
        assert reason and re.search(reason, str(refusal)), refusal
        return False
    out, lse = actual if arguments.get("return_lse") else (actual, None)
    check(out, lse, qkv, **fields)
    return True


@pytest.mark.sampled
@pytest.mark.on_gpus(only=lambda way, name: way.word != "flex" or name not in LEARNED)  # test_gradients compiles both
@pytest.mark.parametrize("name", ARGUMENTS)
@over(HERE + FEWER)
def test_supported_arguments_are_honoured(way: Way, name: str) -> None:
    assert is_honoured(way.word, way.tensors(), *ARGUMENTS[name]) == (name not in lacking(way))


@over([way for way in HERE + FEWER if way.word != "flex"])
@lengths
def test_every_argument_is_honoured_or_refused_by_name(way: Way, q_len: int, kv_len: int) -> None:
    ran = []
    for name, (arguments, fields, reason) in (ARGUMENTS | (MORE if q_len == kv_len else {})).items():
        # Causal from the first key: the keys that no query sees are cut off. That leaves one key for one query, and all
        # keys if there are more queries than keys.
        where = ["alignment"] * (q_len > kv_len) + ["kv_len=1"] * (q_len == 1) if fields.get("causal") else []
        why = "|".join(filter(None, (reason, *where)))
        given = of_lengths(arguments, q_len, kv_len), of_lengths(fields, q_len, kv_len)
        ran += [name] if is_honoured(way.word, way.tensors(q_len, kv_len), *given, why) else []
    assert {"plain", "scale", "scale below 0", "no window", "no softcap", "return_lse"} <= set(ran)


@pytest.mark.parametrize("word", [word.value for word in AttentionProvider if Way(word.value) not in HERE])
def test_words_without_a_kernel_on_the_cpu_are_refused_with_the_reason(word: str) -> None:
    refusals = {}
    for name, (arguments, *_) in ARGUMENTS.items():
        with pytest.raises((NoBackendError, SpecError), match=r"needs|attn_mask") as refusal:
            dispatched(word, tensors(), arguments)
        refusals[name] = str(refusal.value)
    assert refusals["plain"].startswith(f"backend={AttentionProvider(word).kernels[0]!r} cannot run this call:")
    if word == "sage_varlen":
        assert refusals["keys"].startswith("backend='sage' cannot run this call:")


@pytest.mark.on_gpus(only=lambda name, **_: name != "keys and causal")  # kernels that other names judge
@pytest.mark.parametrize("name", LEARNED)
@over([way for way in HERE if way.word != "flex"] + FEWER)  # flex has no gradient on the CPU
def test_gradients(way: Way, name: str) -> None:
    arguments, fields, reason = ARGUMENTS[name]
    leaves = [tensor.requires_grad_() for tensor in way.tensors()]
    if name in lacking(way) or (*way[:2], name) in WITHOUT_GRADIENT:
        with pytest.raises((NoBackendError, SpecError), match=reason):
            dispatched(way.word, leaves, arguments)
        return
    out = dispatched(way.word, leaves, arguments)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    gradients = torch.autograd.grad(out, leaves, dout)
    spec, inputs = reference_of(leaves, **fields, dtype=str(way.dtype).removeprefix("torch."), needs_backward=True)
    rows = [as_numpy(tensor).swapaxes(1, 2) for tensor in (out, dout, *gradients)]  # [batch, len, heads, dim]
    verdict = accuracy.expect(spec, inputs, dout=rows[1]).judge(out=rows[0], gradients=Gradients(*rows[2:]))
    assert verdict.ok, verdict


@pytest.mark.sampled
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len"), [(7, 7), (5, 7), (7, 5), (1, 7)])
@pytest.mark.parametrize("kind", ["left", "right", "holes", "nothing", "one row nothing", "all", "one for all rows"])
@pytest.mark.on_gpus(only=lambda causal, **_: not causal)
@over([Way("flash_varlen"), Way("sage_varlen"), Way("flash_varlen", HALF, "cuda")])
def test_masks_of_keys_on_the_varlen_providers(
    way: Way, kind: str, q_len: int, kv_len: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row by row, too, as sage_varlen runs: here on a kernel that the CPU has.

    Dropped keys may hold any value: no result depends on it.
    """
    if causal and way.device == "cuda":
        pytest.skip("no kernel there has keys and causal")
    monkeypatch.setattr(AttentionProvider.SAGE_VARLEN, "kernels", ("math",))
    keep = np.ones((BATCH, kv_len), bool)
    keep[0, {"left": slice(0, 3), "right": slice(-3, None), "holes": slice(1, None, 2)}.get(kind, slice(0, 0))] = False
    keep[0] &= kind != "one row nothing"
    keep &= kind != "nothing"
    if kind == "one for all rows":
        keep = np.arange(kv_len)[None, :] != 2
    q, k, v = way.tensors(q_len, kv_len)
    dropped = torch.from_numpy(~keep).to(way.device)[:, None, :, None]
    leaves = [q, k.masked_fill(dropped, torch.nan), v.masked_fill(dropped, torch.nan)]
    leaves = [tensor.requires_grad_() for tensor in leaves]
    arguments, fields = {"attn_mask": keep, "is_causal": causal}, {"mask": keep[:, None, None, :], "causal": causal}
    with torch.no_grad():
        results = dispatched(way.word, leaves, {**arguments, "return_lse": True})
    out = dispatched(way.word, leaves, arguments)
    check(*results, (q, k, v), **fields)
    check(out, None, (q, k, v), **fields)
    out.sum().backward()
    gradients = [leaf.grad for leaf in leaves]
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not any(gradient.masked_select(dropped).any() for gradient in gradients[1:])


@over([*(Way("native", FLOAT, device) for device in ("cpu", "cuda")), Way("_native_math", FLOAT, "cuda")]
      + [Way(word, HALF, "cuda") for word in ("flash", "native")])  # fmt: skip
def test_dropout_is_drawn_from_torchs_generator_and_keeps_the_mean(way: Way) -> None:
    q, k, v = way.tensors(64, 64)
    v = torch.ones_like(v)

    def drawn(seed: int, probability: float = 0.25) -> torch.Tensor:
        torch.manual_seed(seed)
        return dispatched(way.word, (q, k, v), {"dropout_p": probability}).float()

    assert torch.equal(drawn(0), drawn(0)) and not torch.equal(drawn(0), drawn(1))
    assert drawn(0).std() > 0.01
    assert drawn(0).mean().item() == pytest.approx(1.0, abs=0.02)
    assert way[:2] != ("native", FLOAT) or not drawn(0, 1.0).any()


@over(HERE + THERE)
def test_fewer_kv_heads_need_enable_gqa(way: Way) -> None:
    qkv = way.tensors()
    with pytest.raises((SpecError, RuntimeError), match=r"enable_gqa|must match"):
        dispatched(way.word, qkv, {"enable_gqa": False})
    one = (qkv[0], *(tensor[:, :1] for tensor in qkv[1:]))  # one kv head serves all heads, as in torch
    every = (qkv[0], *(tensor[:, :1].expand(-1, HEADS, -1, -1) for tensor in qkv[1:]))
    actual, right = (dispatched(way.word, given, {"enable_gqa": False}) for given in (one, every))
    torch.testing.assert_close(actual, right, atol=0.03 if way.dtype == HALF else 1e-5, rtol=0)


@over([Way(word) for word in ("flash_varlen", "flex")] + [Way(word, FLOAT, "cuda") for word in ("flex", "xformers")]
      + [Way(word, HALF, "cuda") for word in ("flash_varlen", "flex", "xformers")])  # fmt: skip
def test_a_mask_of_two_axes_is_one_of_keys(way: Way) -> None:
    assert is_honoured(way.word, way.tensors(), {"attn_mask": KEEP}, {"mask": KEEP4}, "")
    table, native = TABLE[0, 0], Way("native", FLOAT, way.device)
    close(dispatched("native", native.tensors(), {"attn_mask": table}), expected(tensors(), mask=table[None, None])[0])


def test_an_expanded_mask_of_keys_is_one_of_keys() -> None:
    whole = torch.from_numpy(KEEP4).expand(BATCH, HEADS, Q_LEN, KV_LEN)
    close(dispatched("flash_varlen", tensors(), {"attn_mask": whole}), expected(tensors(), mask=KEEP4)[0])
    with pytest.raises(SpecError, match=r"flash_varlen takes masks of keys .*another provider"):
        dispatched("flash_varlen", tensors(), {"attn_mask": whole.contiguous()})


def test_a_scale_of_0_is_the_mean(device: str) -> None:
    q, k, v = tensors(device=device)
    torch.testing.assert_close(
        attention_dispatch(q, k, v, scale=0.0, enable_gqa=True)[:, 0], v.mean(2)[:, 0, None].expand(-1, Q_LEN, -1)
    )


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of the calls of attention, in order."""
    options: list[dict[str, Any]] = []
    attention = MODULE.attention
    monkeypatch.setattr(MODULE, "attention", lambda *qkv, **given: options.append(given) or attention(*qkv, **given))
    return options


def test_every_option_reaches_the_kernels_call(device: str, seen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On each of the ways that a call takes: dense, masks of keys."""
    monkeypatch.setattr(providers, "DEFAULT", "flash_varlen")
    options = {"deterministic": True, "softcap": 2.0, "dropout_p": 0.1, "scale": 0.7}
    for what in ({}, {"attn_mask": KEEP}, {"attn_mask": KEEP, "is_causal": True}):
        seen.clear()
        with use_backend("math"):
            dispatched(None, tensors(7, 7, device=device), options | what)
        assert seen
        for call in seen:
            found = {name: call[name] for name in ("deterministic", "softcap", "scale", "dropout", "backend")}
            assert found == {"deterministic": True, "softcap": 2.0, "scale": 0.7, "dropout": 0.1, "backend": ("math",)}


def test_block_masks_are_used_by_flex_and_refused_elsewhere(device: str, seen: Any) -> None:
    block = create_block_mask(lambda b, h, i, j: (i + 2 * j) % 3 > 0, None, None, Q_LEN, KV_LEN, device=device)
    table = (np.arange(Q_LEN)[:, None] + 2 * np.arange(KV_LEN)) % 3 > 0
    qkv = tensors(device=device)
    close(dispatched("flex", qkv, {"attn_mask": block}), expected(qkv, mask=table[None, None])[0])
    assert seen[0]["mask_mod"] is not None and seen[0]["mask"] is None  # no dense mask is written
    with pytest.raises(SpecError, match=r"BlockMask of \[2 or 1, 6 or 1, 7, 7\], got \[1, 1, 5, 7\]"):
        dispatched("flex", tensors(7, device=device), {"attn_mask": block})
    with pytest.raises(TypeError, match=r"attn_mask: expected a torch.Tensor, got .*BlockMask"):
        dispatched("_native_math", qkv, {"attn_mask": block})
    counts = torch.zeros_like(block.kv_num_blocks)  # its blocks hide all keys
    blocks = BlockMask.from_kv_blocks(counts, block.kv_indices, seq_lengths=(Q_LEN, KV_LEN))
    with pytest.raises(SpecError, match="attn_mask: expected a BlockMask that has a mask function"):
        dispatched("flex", qkv, {"attn_mask": blocks})
    blocks = BlockMask.from_kv_blocks(block.kv_num_blocks, block.kv_indices, seq_lengths=(Q_LEN, KV_LEN))
    if device == "cpu":  # these hide nothing, which is looked at only there
        close(dispatched("flex", qkv, {"attn_mask": blocks}), expected(qkv)[0])
    else:
        with pytest.raises(SpecError, match=r"attn_mask: expected a BlockMask .*, or no mask if it hides nothing"):
            dispatched("flex", qkv, {"attn_mask": blocks})


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    # by the words of the refusal: the provider and the arguments
    r"attention_kwargs\['sinks'\]: unknown; expected one of window_size, softcap": ("native", {"sinks": 1}),
    r"\['cu_seqlens_q'\]: unknown; .*attention\(seq_info=\)": ("flash_varlen", {"cu_seqlens_q": [0]}),
    r"\['window_size'\]=3: expected two distances": ("native", {"window_size": 3}),
    r"\['deterministic'\].*=1: expected True or False": ("native", {"deterministic": 1}),
    "softcap='high': expected a number": ("native", {"softcap": "high"}),
    "is_causal with window_size .* equal lengths": ("native", {"is_causal": True, "window_size": (2, 0)}),
    "enable_gqa=False with 6 heads of query and 3 of key": ("flash", {"enable_gqa": False}),
    "attn_mask: provider flash_varlen takes bool masks of keys": ("flash_varlen", {"attn_mask": ADDED}),
    "attn_mask: expected bool .*becomes bool by attn_mask != 0": ("flash", {"attn_mask": KEEP.astype(np.int32)}),
    "dropout=0.5": ("flash", {"dropout_p": 0.5}),
    "dropout=2.0": ("flash", {"dropout_p": 2.0}),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_honoured_is_named(message: str, device: str) -> None:
    word, arguments = WRONG[message]
    with pytest.raises((SpecError, NoBackendError), match=message):
        dispatched(word, tensors(device=device), arguments)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_tensors_that_do_not_fit_are_named(name: str, device: str) -> None:
    for change in (lambda t: t[0], lambda t: t.half(), lambda t: t.cpu().numpy()):
        given = dict(zip(("query", "key", "value"), tensors(device=device), strict=True))
        given[name] = change(given[name])
        with attention_provider("flash"), pytest.raises((SpecError, TypeError), match=r"query|key|value"):
            attention_dispatch(**given, enable_gqa=True)
