"""Tests that bad input is one typed error before any kernel runs; it names the argument, its value and the remedy.

Every row runs through torch (without and with gradients) and JAX (eager, and while ``jax.jit`` traces), and ``explain``
must raise the same error as ``attention``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from frameworks import BOTH, JAX, TORCH, Framework, spied
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash
from torch_first import torch_first  # noqa: F401 (a fixture)

from attn_core import DeviceError, DTypeError, NoBackendError, SeqInfo, ShapeError, SpecError, backends

# The spy sees every run of torch's kernels from JAX, but not the runs of a compiled program of jax_xla.
pytestmark = pytest.mark.usefixtures("torch_first")

Make = Callable[[Framework], Any]
DTYPES = "float64, float32, bfloat16, float16"


class Bad(NamedTuple):
    """A call that must fail: the changes to a good call, the exact exception, and patterns of its message."""

    changes: dict[str, Any]
    error: type[Exception]
    says: tuple[str, ...]
    packed: bool = False
    only: Framework | None = None


def dense(f: Framework) -> dict[str, Any]:
    return {"q": f.zeros(2, 5, 6, 11), "k": f.zeros(2, 7, 3, 11), "v": f.zeros(2, 7, 3, 11)}


def packed(f: Framework) -> dict[str, Any]:
    return {"q": f.zeros(5, 6, 11), "k": f.zeros(5, 3, 11), "v": f.zeros(5, 3, 11), "seq_info": offsets(0, 3, 5)(f)}


def zeros(*shape: int, dtype: str = "float32") -> Make:
    return lambda f: f.zeros(*shape, dtype=dtype)


def number(value: Any) -> Make:
    """An array of the framework without axes."""
    return lambda f: f.array(np.asarray(value))


def offsets(*values: int, longest: Any = 5, longest_k: Any = None, dtype: str = "int32") -> Make:
    """A SeqInfo of the framework's arrays."""

    def make(f: Framework) -> SeqInfo:
        array = f.array(np.array(values, np.int32), dtype)
        return SeqInfo(array, array, longest, longest if longest_k is None else longest_k)

    return make


def triple(*values: int, longest: Any = 5, dtype: str = "int32") -> Make:
    """The triple (seq_lens, cu_seqlens, max_seqlen) of the framework's arrays."""
    return lambda f: (None, f.array(np.array(values, np.int32), dtype), longest(f) if callable(longest) else longest)


def shape(says: str, **changes: Any) -> Bad:
    return Bad(changes, ShapeError, (says,))


def kind(*says: str, **changes: Any) -> Bad:
    return Bad(changes, DTypeError, says)


def value(*says: str, **changes: Any) -> Bad:
    return Bad(changes, SpecError, says)


def foreign(*says: str, **changes: Any) -> Bad:
    return Bad(changes, TypeError, says)


def documents(seq_info: Any, error: type[Exception], *says: str, **changes: Any) -> Bad:
    return Bad({"seq_info": seq_info, **changes}, error, says, packed=True)


RANKS = {
    f"{name} of rank {len(size)}": shape(
        rf"^{name}: expected \[batch, seq, heads, head_dim\], got {re.escape(str(list(size)))}; .*needs seq_info=",
        **{name: zeros(*size)},
    )
    for name in "qkv"
    for size in ((), (7,), (7, 11), (7, 3, 11), (1, 2, 7, 3, 11))
}

SHAPES = {
    "batch of k": shape(r"^k: expected the batch of q \(2\), got 1; expand k", k=zeros(1, 7, 3, 11)),
    "batch of v": shape(r"^v: expected the batch of q \(2\), got 1; expand v", v=zeros(1, 7, 3, 11)),
    "head_dim": shape(r"^k: expected the head_dim of q \(11\), got 8, because", k=zeros(2, 7, 3, 8)),
    "v longer than k": shape(r"^v: expected the length of k \(7\), got 13; ", v=zeros(2, 13, 3, 11)),
    "v shorter than k": shape(r"^v: expected the length of k \(7\), got 5; ", v=zeros(2, 5, 3, 11)),
    "heads of v": shape(r"^v: expected the heads of k \(3\), got 2; ", v=zeros(2, 7, 2, 11)),
    "heads do not divide": shape(
        r"^k: expected kv heads that divide the 6 query heads, got 4; ", k=zeros(2, 7, 4, 11), v=zeros(2, 7, 4, 11)
    ),
    "more kv heads than heads": shape(
        r"divide the 3 query heads, got 6", q=zeros(2, 5, 3, 11), k=zeros(2, 7, 6, 11), v=zeros(2, 7, 6, 11)
    ),
    "no heads": shape(r"^q: expected at least one head .*got shape \[2, 5, 0, 11\]", q=zeros(2, 5, 0, 11)),
    "no kv heads": shape(r"^k: expected at least one head ", k=zeros(2, 7, 0, 11), v=zeros(2, 7, 0, 11)),
    "no channels": shape(
        r"^q: expected .* one channel, got shape \[2, 5, 6, 0\]", q=zeros(2, 5, 6, 0), k=zeros(2, 7, 3, 0)
    ),
    "no channels in v": shape(r"^v: expected .* one channel, got shape \[2, 7, 3, 0\]", v=zeros(2, 7, 3, 0)),
    **{
        f"mask of shape {size}": shape(
            rf"^mask: .* broadcastable to \[batch, heads, q, kv\] = \[2, 6, 5, 7\], got {re.escape(str(list(size)))}$",
            mask=zeros(*size, dtype="bool"),
        )
        for size in ((5, 8), (3, 5, 7), (3, 1, 5, 7), (0,))
    },
    "mask with five axes": shape(
        r"^mask: .*at most 4 axes, got \[1, 1, 1, 5, 7\]", mask=zeros(1, 1, 1, 5, 7, dtype="bool")
    ),
    "bias of the wrong shape": shape(r"^bias: .*\[2, 6, 5, 7\], got \[4, 7\]$", bias=zeros(4, 7)),
    **{
        f"alibi_slopes of shape {size}": shape(
            r"^alibi_slopes: expected shape \[heads\] = \[6\] or \[batch, heads\] = \[2, 6\], got "
            + re.escape(str(list(size))),
            alibi_slopes=zeros(*size),
        )
        for size in ((), (3,), (6, 1), (3, 6))
    },
    **{
        f"sinks of shape {size}": shape(
            r"^sinks: expected one logit per query head, shape \[6\], got " + re.escape(str(list(size))),
            sinks=zeros(*size),
        )
        for size in ((), (3,), (1, 6))
    },
}

KINDS = {
    "dtype of k": kind(
        "^k: expected the dtype of q, got q float32, k float16, v float32; cast them",
        k=zeros(2, 7, 3, 11, dtype="float16"),
    ),
    "dtype of v": kind(
        "^v: expected the dtype of q, got q float32, k float32, v bfloat16; cast them",
        v=zeros(2, 7, 3, 11, dtype="bfloat16"),
    ),
    **{
        f"{dtype} inputs": kind(
            f"^q: expected one of {DTYPES}, got {dtype}; cast",
            q=zeros(2, 5, 6, 11, dtype=dtype),
            **{name: zeros(2, 7, 3, 11, dtype=dtype) for name in "kv"},
        )
        for dtype in ("int32", "complex64", "bool")
    },
    **{
        f"{dtype} mask": kind(
            rf"^mask: expected dtype bool \(True = visible\), got {dtype}; .*bias=.*mask != 0",
            mask=zeros(5, 7, dtype=dtype),
        )
        for dtype in ("int32", "uint8", "float32")
    },
    "bool bias": kind(f"^bias: expected one of {DTYPES}, got bool; .*mask=", bias=zeros(5, 7, dtype="bool")),
    "int bias": kind(f"^bias: expected one of {DTYPES}, got int32", bias=zeros(5, 7, dtype="int32")),
    "int sinks": kind(f"^sinks: .*{DTYPES}, got int32; cast it", sinks=zeros(6, dtype="int32")),
    "int slopes": kind(f"^alibi_slopes: .*{DTYPES}, got int32; cast it", alibi_slopes=zeros(6, dtype="int32")),
}

WINDOWS = {
    "int window without causal": value(r"^window=3: .*expected causal=True with an int.* window=\(2, 2\)", window=3),
    "window 0": value("^window=0: expected 1 or more keys, self included; None", window=0, causal=True),
    "window -1": value("^window=-1: expected 1 or more keys", window=-1, causal=True),
    "numpy window 0": value("^window=0: expected 1 or more keys", window=np.int64(0), causal=True),
    "window -1, not causal": value(r"^window=-1: .*expected causal=True with an int.* window=\(0, 0\)", window=-1),
    "negative distance": value(
        r"^window=\(1, -2\): expected a right distance of 0 or more, got -2; None", window=(1, -2)
    ),
    "negative distance in a list": value(
        r"^window=\(-3, 1\): expected a left distance .* got -3; None", window=[-3, 1]
    ),
    **{
        f"window {given!r}": value(
            f"^window={re.escape(repr(given))}: expected an int, a pair", window=given, causal=True
        )
        for given in (True, False, 2.0, np.float32(2), "3", (1,), (1, 2, 3), (1.0, 2), (True, 2), {1, 2})
    },
}

NUMBERS = {
    **{
        f"softcap {given}": value(f"^softcap={given}: expected a finite number above 0; None", softcap=given)
        for given in (0, 0.0, -1.0, float("nan"), float("inf"), -(10**9))
    },
    **{
        f"scale {given}": value(f"^scale={given}: expected a finite number above 0; None", scale=given)
        for given in (0, -0.5, float("nan"), float("inf"), float("-inf"))
    },
    **{
        f"dropout {given}": value(rf"^dropout={given}: expected a probability in \[0, 1\); 0", dropout=given)
        for given in (-0.1, 1.0, 1.5, float("nan"))
    },
    **{
        f"{name} {given!r}": value(
            f"^{name}={re.escape(repr(given))}: expected a number known on the host", **{name: given}
        )
        for name in ("softcap", "scale", "dropout")
        for given in (True, "0.5", 1j)
    },
    **{
        f"array as {name}": value(f"^{name}=.*: expected a number known on the host; .*static", **{name: number(0.5)})
        for name in ("softcap", "dropout")
    },
}

FLAGS = ("causal", "deterministic", "return_lse", "return_max_logit")
CHOICES = {
    **{
        f"{name} {given!r}": value(f"^{name}={re.escape(repr(given))}: expected True or False", **{name: given})
        for name in FLAGS
        for given in (1, None, "yes", np.True_)
    },
    **{f"array as {name}": value(f"^{name}=", **{name: number(True)}) for name in FLAGS},
    "array as causal, with a window": value("^causal=", causal=number(True), window=3),
    **{
        f"alignment {given!r}": value(
            f"^alignment={re.escape(repr(given))}: expected one of bottom_right, top_left", alignment=given
        )
        for given in ("bottom-right", "", None, 1)
    },
    "unknown backend": value(r"^backend='sdpa_flsh': unknown backend; did you mean .*sdpa_flash", backend="sdpa_flsh"),
    "unknown among several": value(
        "^backend='flash5': unknown backend; did you mean .*flash4", backend=("math", "flash5")
    ),
    "unknown in a list": value("^backend='mth': unknown backend; did you mean math", backend=["mth"]),
    **{
        f"backend of others: {word}": value(
            f"^backend='{word}': unknown backend; did you mean {' or '.join(names)}\\?$", backend=word
        )
        for word, names in backends.foreign_names().items()
    },
    "backend in capitals": value("^backend='Math': unknown backend; did you mean math", backend="Math"),
    "unlike any backend": value(
        f"^backend='zzz': unknown backend; expected one of {', '.join(backends.names())}", backend="zzz"
    ),
    **{
        f"backend {given!r}": value(
            f"^backend={re.escape(repr(given))}: expected a backend's name, or a tuple", backend=given
        )
        for given in (3, (1,), ("math", None), {"math"})
    },
    "unknown keyword": foreign("^is_causal: expected causal=; .*top_left", is_causal=True),
}

TENSORS = {
    "q": zeros(2, 5, 6, 11),
    "k": zeros(2, 7, 3, 11),
    "v": zeros(2, 7, 3, 11),
    "mask": zeros(5, 7, dtype="bool"),
    "bias": zeros(5, 7),
    "alibi_slopes": zeros(6),
    "sinks": zeros(6),
}
KIND_OF_ARRAY = {"torch": "torch.Tensor", "jax": "jax.Array"}

FOREIGN = {
    **{
        f"{name} of {mine.other} in {mine}": Bad(
            {name: lambda f, make=make: make(f.other)},
            TypeError,
            (f"^{name}: expected a {KIND_OF_ARRAY[mine.name]}, got .*; use {mine.other}_frontend.attention",),
            only=mine,
        )
        for mine in BOTH
        for name, make in TENSORS.items()
    },
    **{
        f"{name} as {type(given).__name__}": foreign(
            rf"^{name}: expected a (torch.Tensor|jax.Array), got .*; use ", **{name: given}
        )
        for name in TENSORS
        for given in (np.zeros((2, 7, 3, 11), np.float32), [[True]], 3.0)
    },
    **{
        f"{name} as None": foreign(rf"^{name}: expected a .*, got builtins.NoneType; ", **{name: None})
        for name in "qkv"
    },
    **{
        f"{name} as xformers' {mask}": Bad({name: type(mask, (), {})()}, error, (f"^{name}: .*{mask}; {says}",))
        for name, error in (("mask", TypeError), ("seq_info", SpecError))
        for mask, says in (
            ("BlockDiagonalMask", r"pass seq_info=SeqInfo.from_lengths\(\[...\]\) with the lengths of its blocks$"),
            ("BlockDiagonalCausalMask", ".*from_lengths.* causal=True, alignment=.top_left.$"),
            ("LowerTriangularFromBottomRightMask", "pass causal=True, alignment=.bottom_right.$"),
        )
    },
    **{
        f"mask as splash attention's {type(mask).__name__}": foreign(
            f"^mask: .*{type(mask).__name__}; {says}$", mask=mask
        )
        for mask, says in (
            (splash.CausalMask((5, 7)), "pass causal=True, alignment=.top_left."),
            (splash.LocalMask((5, 7), (2, None), 0), r"pass window=\(left, right\), alignment='top_left'"),
            (splash.FullMask((5, 7)), "leave mask= away"),
            (splash.NumpyMask(np.ones((5, 7), bool)), r"pass its array as a bool mask \[1, 1, q_len, kv_len\]"),
        )
    },
    "k as None beside a mask": foreign("^k: expected a .*, got builtins.NoneType", k=None, mask=TENSORS["mask"]),
}

PACKED = {
    "offsets that do not start at 0": documents(
        offsets(1, 5), SpecError, r"^seq_info.cu_seqlens_q: expected to start at 0, got 1; prepend the zero"
    ),
    "decreasing offsets": documents(
        offsets(0, 3, 2, 5), SpecError, "^seq_info.cu_seqlens_q: .* got 3 then 2 at position 2; pass cumulative lengths"
    ),
    "lengths for offsets": documents(offsets(0, 3, 2), SpecError, "pass cumulative lengths, not lengths"),
    "offsets that end late": documents(
        offsets(0, 3, 13, longest=13),
        SpecError,
        "^seq_info.cu_seqlens_q: expected to end at the token count 5 or before it, got 13; .*padding",
    ),
    "key offsets that end late": documents(
        lambda f: SeqInfo(f.array([0, 5], "int32"), f.array([0, 13], "int32"), 13, 13),
        SpecError,
        "cu_seqlens_k: .*end at .* 5 or before it, got 13",
    ),
    "queries that end early, keys that end late": documents(
        lambda f: SeqInfo(f.array([0, 3], "int32"), f.array([0, 13], "int32"), 13, 13),
        SpecError,
        "cu_seqlens_k: .*end at .* 5 or before it, got 13",
    ),
    "numpy offsets that end late": documents(
        lambda f: SeqInfo(*[np.array([0, 3, 6], np.int32)] * 2, 5, 5),
        SpecError,
        "cu_seqlens_q: .*end at the token count 5 or before it, got 6",
    ),
    "decreasing offsets that end early": documents(
        offsets(0, 3, 2), SpecError, "^seq_info.cu_seqlens_q: .* got 3 then 2 at position 2; pass cumulative lengths"
    ),
    "too short a longest document before padding": documents(
        offsets(0, 4, longest=3), SpecError, "^seq_info.max_len_q=3: expected at least the longest document, 4 tokens"
    ),
    "float offsets": documents(
        offsets(0, 5, dtype="float32"), DTypeError, "^seq_info.cu_seqlens_q: expected dtype int32, got float32; cast it"
    ),
    "int16 numpy offsets": documents(
        lambda f: (None, np.array([0, 5], np.int16), 5),
        DTypeError,
        r"^seq_info.cu_seqlens_q: .*int32, got int16; .*astype",
    ),
    "int64 numpy offsets beyond int32": documents(
        lambda f: (None, np.array([0, 2**32 + 5]), 5), SpecError, "^seq_info.cu_seqlens_q: expected offsets of at most"
    ),
    "2-D offsets": documents(
        lambda f: SeqInfo(*[f.array([[0, 5]], "int32")] * 2, 5, 5),
        ShapeError,
        r"cu_seqlens_q: .*\[documents \+ 1\].* got \[1, 2\]",
    ),
    "a single offset": documents(offsets(0), ShapeError, r"cu_seqlens_q: .* at least one document, got \[1\]"),
    "no offset": documents(offsets(), ShapeError, r"cu_seqlens_q: .* at least one document, got \[0\]"),
    "differing numbers of documents": documents(
        lambda f: SeqInfo(f.array([0, 5], "int32"), f.array([0, 3, 5], "int32"), 5, 5),
        ShapeError,
        r"^seq_info.cu_seqlens_k: expected as many documents as cu_seqlens_q \(1\), got 2; .*length 0",
    ),
    "too short a longest document": documents(
        offsets(0, 4, 5, longest=3),
        SpecError,
        "^seq_info.max_len_q=3: expected at least the longest document, 4 tokens",
    ),
    "too short a longest key document": documents(
        offsets(0, 4, 5, longest_k=3), SpecError, "^seq_info.max_len_k=3: .*4 tokens"
    ),
    "a longest document that cannot be": documents(
        offsets(0, 5, longest=4), SpecError, "^seq_info.max_len_q=4: .*; 1 documents .* cannot have the 5 tokens of q"
    ),
    "triple that ends late": documents(
        triple(0, 6), SpecError, "cu_seqlens_q: expected to end at the token count 5 or before it, got 6"
    ),
    "triple with a float": documents(
        triple(0, 5, longest=5.0), SpecError, r"^seq_info.max_len_q=5.0: expected a host int"
    ),
    "triple with a bool": documents(
        triple(0, 5, longest=True), SpecError, r"^seq_info.max_len_q=True: expected a host int"
    ),
    "triple with a negative": documents(triple(0, 5, longest=-1), SpecError, r"^seq_info.max_len_q=-1: .*0 or more"),
    "triple with an array": documents(
        triple(0, 5, longest=number(5)), SpecError, r"max_len_q=.*: expected a host int .*synchron"
    ),
    "triple with numpy's array": documents(
        triple(0, 5, longest=np.array(5)), SpecError, "max_len_q=.*: expected a host int"
    ),
    "a pair": documents(
        lambda f: triple(0, 5)(f)[1:],
        SpecError,
        "^seq_info: expected a SeqInfo or the triple .* got tuple; .*from_lengths",
    ),
    "a list": documents(["3"], SpecError, "^seq_info: .* got list; build one with SeqInfo.from_lengths"),
    **{
        f"lengths {lengths}": documents(
            lengths,
            SpecError,
            rf"^seq_info: .*got {re.escape(shown)}; lengths .* are SeqInfo.from_lengths\({re.escape(shown)}\)$",
        )
        for lengths, shown in (
            ([3, 2], "[3, 2]"),
            ([3, 1, 1], "[3, 1, 1]"),
            ((3, np.int32(1), 1), "[3, 1, 1]"),
            ([1] * 7, "[1, 1, 1, 1, 1, 1, ...]"),
        )
    },
    "offsets for lengths": documents(
        lambda f: SeqInfo.from_lengths([0, 3, 5]),
        SpecError,
        "^seq_info.cu_seqlens_q: .* got 8; the lengths start with 0 and never decrease, .*like offsets: pass np.diff",
    ),
    "a string": documents("3,2", SpecError, "^seq_info: .* got str"),
    "offsets as a list": documents(
        (None, [0, 5], 5), TypeError, "^seq_info.cu_seqlens_q: expected a .*, got builtins.list; use"
    ),
    "offsets of the other framework": documents(
        lambda f: triple(0, 5)(f.other),
        TypeError,
        "^seq_info.cu_seqlens_q: expected a .*; use (torch|jax)_frontend.attention",
    ),
    "several rows": documents(
        lambda f: SeqInfo.from_lengths([5, 5]),
        ShapeError,
        r"^q: expected one row of packed documents \[1, tokens, heads, head_dim\], got \[2, 5, 6, 11\]; "
        r"reshape to \[1, batch \* seq, heads, head_dim\] if no row has padding, "
        r"else unpad\(attention_mask, q, k, v\)$",
        **{name: TENSORS[name] for name in "qkv"},
    ),
    "mixed ranks": documents(
        lambda f: SeqInfo.from_lengths([5]),
        ShapeError,
        r"^k: .*the same rank .*got \[1, 5, 3, 11\].*q \[5, 6, 11\]",
        k=zeros(1, 5, 3, 11),
    ),
    "packed tensors of rank 2": documents(
        lambda f: SeqInfo.from_lengths([5]),
        ShapeError,
        r"^q: expected \[tokens, heads, head_dim\] or",
        **{n: zeros(5, 11) for n in "qkv"},
    ),
    "packed tensors without seq_info": documents(
        None, ShapeError, r"^q: expected \[batch, seq, heads, head_dim\], got \[5, 6, 11\]; .*seq_info="
    ),
}


def meta(*size: int) -> Make:
    return lambda f: torch.zeros(*size, device="meta")


DEVICES = {
    "k on another device": Bad(
        {"k": meta(2, 7, 3, 11)}, DeviceError, (r"^k: expected the device of q \(cpu\), got meta; move it",), only=TORCH
    ),
    "v on another device": Bad(
        {"v": meta(2, 7, 3, 11)}, DeviceError, (r"^v: expected the device of q \(cpu\), got meta",), only=TORCH
    ),
    "q on another device": Bad(
        {"q": meta(2, 5, 6, 11)}, DeviceError, (r"^k: expected the device of q \(meta\), got cpu",), only=TORCH
    ),
    "sinks on another device": Bad(
        {"sinks": meta(6)}, DeviceError, ("^sinks: .* got meta; move it there",), only=TORCH
    ),
    "offsets on another device": Bad(
        {"seq_info": lambda f: (None, torch.zeros(2, dtype=torch.int32, device="meta"), 5)},
        DeviceError,
        (r"^seq_info.cu_seqlens_q: expected the device of q \(cpu\), got meta; move it there",),
        packed=True,
        only=TORCH,
    ),
    "int64 offsets": Bad(
        {"seq_info": triple(0, 5, dtype="int64")},
        DTypeError,
        ("^seq_info.cu_seqlens_q: .*int32, got int64; cast",),
        packed=True,
        only=TORCH,
    ),
}

TABLE = {**RANKS, **SHAPES, **KINDS, **WINDOWS, **NUMBERS, **CHOICES, **FOREIGN, **PACKED, **DEVICES}
CASES = [
    pytest.param(framework, row, id=f"{framework}-{name}")
    for name, row in TABLE.items()
    for framework in BOTH
    if row.only in (None, framework)
]


@pytest.fixture(scope="module")
def backends_run() -> Iterator[list[str]]:
    with spied() as names:
        yield names


@pytest.fixture(autouse=True)
def no_backend_ran(backends_run: list[str]) -> Iterator[None]:
    """Checks at the end of each test that no backend has run. A test that runs one empties the list itself."""
    backends_run.clear()
    yield
    assert backends_run == []


def arguments(framework: Framework, row: Bad) -> dict[str, Any]:
    """The keywords of the bad call."""
    made = {name: given(framework) if callable(given) else given for name, given in row.changes.items()}
    return {**(packed if row.packed else dense)(framework), **made}


def assert_fails(row: Bad, call: Callable[[], Any]) -> str:
    """Asserts that a call fails as the row says, and returns the message."""
    with pytest.raises(row.error) as caught:
        call()
    assert type(caught.value) is row.error
    for pattern in row.says:
        assert re.search(pattern, str(caught.value)), f"{pattern!r} is not in {str(caught.value)!r}"
    return str(caught.value)


@pytest.mark.sampled
@pytest.mark.parametrize(("framework", "row"), CASES)
def test_bad_input_is_one_clear_error(framework: Framework, row: Bad) -> None:
    frontend = framework.frontend
    message = assert_fails(row, lambda: frontend.attention(**arguments(framework, row)))
    assert assert_fails(row, lambda: frontend.explain(**arguments(framework, row))) == message
    if framework is TORCH:
        assert_fails(row, lambda: frontend.attention(**with_gradients(arguments(framework, row))))
    else:
        assert_fails(row, lambda: traced(arguments(framework, row)))


def with_gradients(given: dict[str, Any]) -> dict[str, Any]:
    """The same call with q, k and v that require gradients."""

    def leaf(tensor: Any) -> Any:
        learnable = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
        return tensor.clone().requires_grad_() if learnable else tensor

    return {name: leaf(tensor) if name in "qkv" else tensor for name, tensor in given.items()}


def traced(given: dict[str, Any]) -> Any:
    """Runs the call while jit traces it: arrays are traced, a seq_info is part of the program."""
    arrays = {name: array for name, array in given.items() if isinstance(array, jax.Array)}
    rest = {name: array for name, array in given.items() if name not in arrays}
    return jax.jit(lambda arrays: JAX.frontend.attention(**arrays, **rest))(arrays)


@pytest.mark.parametrize("framework", BOTH, ids=str)
@pytest.mark.parametrize("call", [dense, packed])
def test_the_spy_sees_the_backends_of_good_calls(framework: Framework, call: Make, backends_run: list[str]) -> None:
    framework.frontend.attention(**call(framework))
    assert set(backends_run) == {"sdpa_flash"}
    backends_run.clear()
    framework.frontend.attention(**call(framework), softcap=3.0)
    assert backends_run[0] == "math"
    backends_run.clear()


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_caches_tell_equal_values_of_different_types_apart(framework: Framework, backends_run: list[str]) -> None:
    """1 == True, so a cache must not return the plan of one for the other, which may be an error."""
    framework.frontend.attention(**dense(framework), softcap=1.0, mask=framework.zeros(5, 7, dtype="bool"))
    backends_run.clear()
    assert_fails(
        value("^softcap=True"),
        lambda: framework.frontend.attention(
            **dense(framework), softcap=True, mask=framework.zeros(5, 7, dtype="bool")
        ),
    )


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_a_refused_backend_lists_every_reason_and_runs_nothing(framework: Framework) -> None:
    call = dense(framework) | {"softcap": 5.0, "v": framework.zeros(2, 7, 3, 5), "backend": "sdpa_flash"}
    row = Bad(
        {},
        NoBackendError,
        (
            "^backend='sdpa_flash' cannot run this call:\n  value_dim=5: ",
            r"softcap=5\.0: ",
            "can run it, but a backend requested by name never falls back:\n  (jax_xla\n  )?math",
        ),
    )
    message = assert_fails(row, lambda: framework.frontend.attention(**call))
    selection = framework.frontend.explain(**call)
    assert selection.backend is None
    assert str(selection) == message
    everything = selection.text(everything=True)
    assert all(f"\n  {name} " in everything for name in backends.names())
    assert len(selection.reasons("sdpa_flash")) == 2


def test_a_backend_without_gradients_is_refused_before_it_runs() -> None:
    row = Bad(
        {},
        NoBackendError,
        ("^backend='flex' cannot run this call:\n  backward: FlexAttention on CPU has no gradient\n",),
    )
    assert_fails(row, lambda: TORCH.frontend.attention(**with_gradients(dense(TORCH)), backend="flex"))
    given = dense(JAX)

    def loss(q: jax.Array) -> jax.Array:
        return JAX.frontend.attention(q, given["k"], given["v"], backend="flex").sum()

    assert_fails(row, lambda: jax.grad(loss)(given["q"]))
    assert_fails(row, lambda: jax.jit(jax.grad(loss))(given["q"]))


def test_a_kernel_of_another_device_is_refused() -> None:
    row = Bad({}, NoBackendError, ("^backend='sdpa_flash' cannot run this call", "device meta: .* needs cpu"))
    call = {"q": torch.zeros(2, 5, 6, 11, device="meta"), **{n: torch.zeros(2, 7, 3, 11, device="meta") for n in "kv"}}
    assert_fails(row, lambda: TORCH.frontend.warm_up(**call, backend="sdpa_flash"))
    assert TORCH.frontend.attention(**call).is_meta  # torch's operations run on every device


def test_alibi_slopes_that_require_a_gradient_are_refused() -> None:
    row = value(r"^alibi_slopes: expected requires_grad=False, .*; pass alibi_slopes.detach\(\)")
    slopes = torch.zeros(6, requires_grad=True)
    assert_fails(row, lambda: TORCH.frontend.attention(**dense(TORCH), alibi_slopes=slopes))

    def loss(slopes: jax.Array) -> jax.Array:
        return JAX.frontend.attention(**dense(JAX), alibi_slopes=slopes).sum()

    row = value("^alibi_slopes: expected no gradient, .*; use jax.lax.stop_gradient")
    assert_fails(row, lambda: jax.grad(loss)(jnp.zeros(6)))
    assert_fails(row, lambda: jax.jit(jax.grad(loss))(jnp.zeros(6)))


def test_alibi_slopes_are_accepted_under_no_grad(backends_run: list[str]) -> None:
    with torch.no_grad():
        TORCH.frontend.attention(**dense(TORCH), alibi_slopes=torch.zeros(6, requires_grad=True))
    backends_run.clear()


def test_dropout_in_jax_needs_a_key_and_the_xla_path() -> None:
    row = value(r"^dropout=0.1: expected dropout_rng, a PRNG key such as jax.random.key\(0\)")
    assert_fails(row, lambda: JAX.frontend.attention(**dense(JAX), dropout=0.1))
    assert_fails(row, lambda: traced(dense(JAX) | {"dropout": 0.1}))
    for wrong in (0, jax.random.split(jax.random.key(0)), jnp.ones(2)):
        row = value("^dropout_rng: expected one PRNG key such as")
        assert_fails(row, lambda: JAX.frontend.attention(**dense(JAX), dropout=0.1, dropout_rng=wrong))  # noqa: B023
    row = Bad(
        {},
        NoBackendError,
        ("^backend='math' cannot run this call:\n  dropout=0.1: in JAX only the XLA path has dropout\n",),
    )
    key = jax.random.key(0)
    assert_fails(row, lambda: JAX.frontend.attention(**dense(JAX), dropout=0.1, dropout_rng=key, backend="math"))


@pytest.mark.parametrize(("name", "given"), [("scale", 0.5), ("window", 3)])
def test_arrays_are_no_options_in_torch(name: str, given: Any) -> None:
    """JAX takes both, see tests/jax_frontend/test_traced_options.py."""
    call = lambda: TORCH.frontend.attention(**dense(TORCH), causal=True, **{name: torch.tensor(given)})  # noqa: E731
    assert_fails(value(f"^{name}=.*: expected"), call)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        *((name, 0.5) for name in ("softcap", "dropout", "backend", "alignment")),
        *((name, True) for name in FLAGS),
        ("max_len_q", 5),
    ],
)
def test_traced_options_are_refused_by_name(name: str, given: Any) -> None:
    """A tracer in place of a static value: the error names the option."""

    def call(option: Any) -> Any:
        if name == "max_len_q":
            offsets = jnp.array([0, 3, 5], jnp.int32)
            return JAX.frontend.attention(**(packed(JAX) | {"seq_info": (None, offsets, option)}))
        return JAX.frontend.attention(**dense(JAX), **{name: option})

    says = (
        rf"^(seq_info\.)?{name}=(JitTracer|\(.*JitTracer).*; it must be static: under jit close over it or name it in"
    )
    assert_fails(value(says), lambda: jax.jit(call)(given))


def test_traced_lengths_of_documents_are_refused_by_name() -> None:
    says = (
        r"^lengths_q: expected lengths as non-negative ints, got JitTracer.*; it must be static: under jit close over"
    )
    assert_fails(value(says), lambda: jax.jit(SeqInfo.from_lengths)(jnp.array([2, 3])))


def test_int64_offsets_in_jax() -> None:
    with jax.enable_x64(True):
        row = Bad({}, DTypeError, ("^seq_info.cu_seqlens_q: expected dtype int32, got int64; cast it to int32",))
        call = packed(JAX) | {"seq_info": (None, jnp.array([0, 5], jnp.int64), 5)}
        assert_fails(row, lambda: JAX.frontend.attention(**call))
        assert_fails(
            row,
            lambda: jax.jit(lambda call: JAX.frontend.attention(**call))(
                {**call, "seq_info": SeqInfo(*[call["seq_info"][1]] * 2, 5, 5)}
            ),
        )


def test_wrong_traced_offsets_are_an_error_at_run_time(backends_run: list[str]) -> None:
    """Trace time cannot judge values that exist only at run time, so the kernel's own check raises through XLA."""
    program = jax.jit(lambda call: JAX.frontend.attention(**call))
    with pytest.raises(
        jax.errors.JaxRuntimeError,
        match=r"seq_info.cu_seqlens_q: expected to end at the token count 5 or before it, got 6",
    ):
        jax.block_until_ready(program(packed(JAX) | {"seq_info": offsets(0, 6)(JAX)}))
    backends_run.clear()  # the backend ran: it makes this check


COMPILED = {
    name: TABLE[name] for name in ("softcap -1.0", "int32 mask", "unknown backend", "heads do not divide", "batch of k")
}


@pytest.mark.parametrize("row", COMPILED.values(), ids=COMPILED)
def test_compile_raises_the_same_error(row: Bad) -> None:
    torch._dynamo.reset()
    call = arguments(TORCH, row)
    compiled = torch.compile(lambda call: TORCH.frontend.attention(**call), fullgraph=True, backend="eager")
    assert_fails(row, lambda: compiled(call))


@pytest.mark.parametrize("name", ["int window without causal", "backend 3", "unknown keyword"])
def test_compile_with_graph_breaks_raises_the_same_error(name: str) -> None:
    torch._dynamo.reset()
    row = TABLE[name]
    assert_fails(
        row,
        lambda: torch.compile(lambda call: TORCH.frontend.attention(**call), backend="eager")(arguments(TORCH, row)),
    )


def test_second_derivatives_are_refused(backends_run: list[str]) -> None:
    given = with_gradients(dense(TORCH))
    for options in ({}, {"softcap": 3.0}):
        (gradient,) = torch.autograd.grad(
            TORCH.frontend.attention(**given, **options).square().sum(), given["q"], create_graph=True
        )
        with pytest.raises(RuntimeError):
            torch.autograd.grad(gradient.sum(), given["q"])
    fixed = dense(JAX)

    def loss(q: jax.Array) -> jax.Array:
        return JAX.frontend.attention(q, fixed["k"], fixed["v"]).sum()

    with pytest.raises(SpecError, match="expected second derivatives in forward over reverse mode"):
        jax.grad(lambda q: jax.grad(loss)(q).sum())(fixed["q"])
    backends_run.clear()
