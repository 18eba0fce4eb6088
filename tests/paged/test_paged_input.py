"""Tests that bad arguments of calls on pages are one typed error with argument, value and limit, before any kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from frameworks import BOTH, JAX, TORCH, Framework, empty_plan_caches, spied

from attn_core import DeviceError, DTypeError, NoBackendError, ShapeError, SpecError
from attn_core.backends.shared import row_blocks
from attn_core.paged import tables

Make = Callable[[Framework], Any]


class Bad(NamedTuple):
    """The changes to a good call, the exact exception, and the beginning of its message."""

    changes: dict[str, Any]
    error: type[Exception]
    says: str
    only: Framework | None = None
    eager: bool = False
    """Whether the error needs the values of tables, which a traced call does not have."""


def good(f: Framework) -> dict[str, Any]:
    """Two sequences of 5 and 3 tokens with 3 and 1 queries, in a pool of 7 pages of 4 tokens."""
    return {
        "q": f.zeros(4, 6, 8),
        "k_pages": f.zeros(7, 4, 3, 8),
        "v_pages": f.zeros(7, 4, 3, 5),
        "block_table": table([4, 2, -1], [0, -1, -1])(f),
        "seq_lens": table(5, 3)(f),
        "cu_seqlens_q": table(0, 3, 4)(f),
    }


def good_append(f: Framework) -> dict[str, Any]:
    arguments = good(f)
    del arguments["q"]
    return {"k": f.zeros(4, 3, 8), "v": f.zeros(4, 3, 5), **arguments}


def table(*values: Any, dtype: str = "int32") -> Make:
    return lambda f: f.array(np.array(values, np.int64).astype(dtype))


def zeros(*shape: int, dtype: str = "float32") -> Make:
    return lambda f: f.zeros(*shape, dtype=dtype)


def elsewhere(name: str) -> dict[str, Make]:
    """An argument of a good call on another device than the others."""
    return {name: lambda f: {**good_append(f), **good(f), "sinks": f.zeros(6)}[name].to("meta")}


def numpys(*values: Any) -> Make:
    return lambda f: np.array(values)


TABLES: dict[str, Bad] = {
    "table of int16": Bad(
        {"block_table": table([4, 2], [0, -1], dtype="int16")},
        DTypeError,
        "^block_table: expected dtype int32 or int64, got int16; cast",
    ),
    "lengths of float": Bad(
        {"seq_lens": zeros(2)}, DTypeError, "^seq_lens: expected dtype int32 or int64, got float32; cast it"
    ),
    "offsets of int16": Bad(
        {"cu_seqlens_q": table(0, 3, 4, dtype="int16")},
        DTypeError,
        "^cu_seqlens_q: expected dtype int32 or int64, got int16",
    ),
    "flat table": Bad(
        {"block_table": table(4, 2)}, ShapeError, r"^block_table: expected shape \[batch, width\], got \[2\]"
    ),
    "square lengths": Bad({"seq_lens": table([5, 3])}, ShapeError, r"^seq_lens: expected shape \[2\], got \[1, 2\]"),
    "too many lengths": Bad({"seq_lens": table(5, 3, 1)}, ShapeError, r"^seq_lens: expected shape \[2\], got \[3\]"),
    "too few offsets": Bad(
        {"cu_seqlens_q": table(0, 4)}, ShapeError, r"^cu_seqlens_q: expected shape \[3\], got \[2\]"
    ),
    "no offsets": Bad({"cu_seqlens_q": None}, ShapeError, "^cu_seqlens_q: expected .*each of the 2 .*, but [qk] has 4"),
    "no table": Bad({"block_table": None}, TypeError, "^block_table: expected a .*, got .*NoneType"),
    "no lengths": Bad({"seq_lens": None}, TypeError, "^seq_lens: expected a .*, got .*NoneType"),
    "a list for a table": Bad({"block_table": [[4, 2], [0, -1]]}, TypeError, "^block_table: expected a .*, got .*list"),
    "a list for lengths": Bad({"seq_lens": [5, 3]}, TypeError, "^seq_lens: expected a .*, got .*list"),
    "a list of offsets": Bad({"cu_seqlens_q": [0, 3, 4]}, TypeError, "^cu_seqlens_q: expected a .*, got .*list"),
    "an int for lengths": Bad({"seq_lens": 5}, TypeError, "^seq_lens: expected a .*, got .*int"),
    "page beyond the pool": Bad(
        {"block_table": table([4, 7, -1], [0, -1, -1])},
        SpecError,
        r"^block_table\[0, 1\]=7: expected a page of the pool's 7 for token 4 of 5",
        eager=True,
    ),
    "page that is missing": Bad(
        {"block_table": table([4, 2, -1], [-1, 1, -1])},
        SpecError,
        r"^block_table\[1, 0\]=-1: expected a page of the pool's 7 for token 0 of 3",
        eager=True,
    ),
    "negative length": Bad(
        {"seq_lens": table(5, -1)}, SpecError, r"^seq_lens\[1\]=-1: expected 0 to 12 tokens, .*3 pages of 4", eager=True
    ),
    "length beyond the table": Bad(
        {"seq_lens": table(13, 3)}, SpecError, r"^seq_lens\[0\]=13: expected 0 to 12 tokens, .*3 pages of 4", eager=True
    ),
    "offsets that start late": Bad(
        {"cu_seqlens_q": table(1, 3, 4)}, SpecError, "^cu_seqlens_q: expected to start at 0, got 1", eager=True
    ),
    "offsets that go back": Bad(
        {"cu_seqlens_q": table(0, 5, 4)},
        SpecError,
        "^cu_seqlens_q: expected non-decreasing offsets, got 5 then 4",
        eager=True,
    ),
    "offsets that end late": Bad(
        {"cu_seqlens_q": table(0, 1, 5)},
        SpecError,
        "^cu_seqlens_q: expected to end at the token count 4 or before it, got 5",
        eager=True,
    ),
    "numpy page beyond the pool": Bad(
        {
            "block_table": numpys(np.int32([4, 9]), np.int32([0, 0])),
            "seq_lens": numpys(np.int32(5), np.int32(3)),
            "cu_seqlens_q": numpys(*np.int32([0, 3, 4])),
        },
        SpecError,
        r"^block_table\[0, 1\]=9: expected a page of the pool's 7",
        eager=True,
    ),
    "numpy page beyond int32": Bad(
        {
            "block_table": numpys([4, 2, 2**31], [0, 0, 0]),
            "seq_lens": numpys(*np.int32([5, 3])),
            "cu_seqlens_q": numpys(*np.int32([0, 3, 4])),
        },
        SpecError,
        r"^block_table\[0, 2\]=2147483648: expected -2147483648 to 2147483647, a value of int32",
        eager=True,
    ),
    "length beyond int32": Bad(
        {"seq_lens": lambda f: f.array(np.array([5, -(2**40)]))},
        SpecError,
        r"^seq_lens\[1\]=-1099511627776: expected -2147483648 to 2147483647, a value of int32",
        only=TORCH,
        eager=True,
    ),
}

POOLS: dict[str, Bad] = {
    "pages of nothing": Bad({"k_pages": zeros(7, 0, 3, 8)}, ShapeError, r"^k_pages: .*, got \[7, 0, 3, 8\]"),
    "page size of v": Bad({"v_pages": zeros(7, 2, 3, 5)}, ShapeError, r"^v_pages: .*\[7, 4, 3\], got \[7, 2, 3\]"),
    "pool of three axes": Bad(
        {"k_pages": zeros(28, 3, 8)}, ShapeError, r"^k_pages: .*\[num_pages, .*, got \[28, 3, 8\]"
    ),
    "values of three axes": Bad({"v_pages": zeros(28, 3, 5)}, ShapeError, r"^v_pages: .*, got \[28, 3, 5\]"),
    "pages of v": Bad({"v_pages": zeros(8, 4, 3, 5)}, ShapeError, r"^v_pages: .*\[7, 4, 3\], got \[8, 4, 3\]"),
    "heads of v": Bad({"v_pages": zeros(7, 4, 1, 5)}, ShapeError, r"^v_pages: .*\[7, 4, 3\], got \[7, 4, 1\]"),
    "dtype of v": Bad(
        {"v_pages": zeros(7, 4, 3, 5, dtype="float16")},
        DTypeError,
        "^v_pages: expected the dtype of k_pages, float32, got float16; cast it",
    ),
    "pools of ints": Bad(
        {name: zeros(7, 4, 3, 8, dtype="int32") for name in ("k_pages", "v_pages")},
        DTypeError,
        "^k_pages: expected one of float64, float32, bfloat16, float16, float8_e4m3fn, int8 or uint8 .*, got int32",
    ),
    "a list for a pool": Bad({"k_pages": [0.0]}, TypeError, "^k_pages: expected a .*, got .*list"),
    "numpy for a pool": Bad(
        {"v_pages": lambda f: np.zeros((7, 4, 3, 5))}, TypeError, "^v_pages: expected a .*, got numpy"
    ),
}

ATTENTION: dict[str, Bad] = {
    **TABLES,
    **POOLS,
    "q of four axes": Bad(
        {"q": zeros(1, 4, 6, 8)}, ShapeError, r"^q: expected \[tokens, heads, head_dim\], got \[1, 4, 6, 8\]"
    ),
    "heads": Bad({"q": zeros(4, 4, 8)}, ShapeError, "^k: expected kv heads that divide the 4 query heads, got 3"),
    "head_dim": Bad({"q": zeros(4, 6, 7)}, ShapeError, r"^k_pages: expected the head_dim of q \(7\), got 8"),
    "dtype of q": Bad(
        {"q": zeros(4, 6, 8, dtype="bfloat16")}, DTypeError, "^q: expected the dtype of k_pages, float32, got bf"
    ),
    "no q": Bad({"q": None}, TypeError, "^q: expected a .*, got .*NoneType"),
    "numpy q": Bad({"q": lambda f: np.zeros((4, 6, 8))}, TypeError, "^q: expected a .*, got numpy.ndarray"),
    "sinks of one head": Bad({"sinks": zeros(1)}, ShapeError, r"^sinks: .* per query head, shape \[6\], got \[1\]"),
    "sinks of ints": Bad({"sinks": zeros(6, dtype="int32")}, DTypeError, "^sinks: expected one of .*, got int32"),
    "a list of sinks": Bad({"sinks": [0.0] * 6}, TypeError, "^sinks: expected a .*, got .*list"),
    "slopes of three heads": Bad(
        {"alibi_slopes": zeros(3)},
        ShapeError,
        r"^alibi_slopes: expected shape \[heads\] = \[6\] or \[sequences, heads\] = \[2, 6\], got \[3\]",
    ),
    "slopes of ints": Bad(
        {"alibi_slopes": zeros(6, dtype="int32")}, DTypeError, "^alibi_slopes: expected one of .*, got int32; cast it"
    ),
    "a list of slopes": Bad({"alibi_slopes": [0.0] * 6}, TypeError, "^alibi_slopes: expected a .*, got .*list"),
    "starts of int16": Bad(
        {"kv_starts": table(0, 1, dtype="int16")}, DTypeError, "^kv_starts: expected dtype int32, got int16; cast it"
    ),
    "too many starts": Bad({"kv_starts": table(0, 1, 2)}, ShapeError, r"^kv_starts: expected shape \[2\], got \[3\]"),
    "a list of starts": Bad({"kv_starts": [0, 1]}, TypeError, "^kv_starts: expected a .*, got .*list"),
    "a negative start": Bad(
        {"kv_starts": table(0, -1)}, SpecError, r"^kv_starts\[1\]=-1: expected 0 to 3, the length of", eager=True
    ),
    "a start behind the end": Bad(
        {"kv_starts": table(6, 0)}, SpecError, r"^kv_starts\[0\]=6: expected 0 to 5, the length of", eager=True
    ),
    "max_len_q too small for all": Bad(
        {"max_len_q": 1}, SpecError, "^max_len_q=1: expected at least the longest document, 3 tokens", eager=True
    ),
    "max_len_q too small for one": Bad(
        {"max_len_q": 2}, SpecError, "^max_len_q=2: expected at least the longest document, 3 tokens", eager=True
    ),
    **{
        f"max_len_q {value!r}": Bad({"max_len_q": value}, SpecError, f"^max_len_q={value!r}: expected a host int")
        for value in (-1, True, 2.0, "3")
    },
    "causal": Bad({"causal": 1}, SpecError, "^causal=1: expected True or False"),
    "window": Bad({"window": 0}, SpecError, "^window=0: expected 1 or more keys"),
    "window without causal": Bad({"window": 3, "causal": False}, SpecError, "^window=3: expected causal=True"),
    "softcap": Bad({"softcap": -1.0}, SpecError, "^softcap=-1.0: expected a finite number above 0"),
    "scale": Bad({"scale": 0.0}, SpecError, "^scale=0.0: expected a finite number above 0"),
    "return_lse": Bad({"return_lse": None}, SpecError, "^return_lse=None: expected True or False"),
    "backend": Bad({"backend": "mth"}, SpecError, "^backend='mth': unknown backend; did you mean math"),
    "backend of another kind": Bad({"backend": 3}, SpecError, "^backend=3: expected a backend's name"),
    "backend without pages": Bad({"backend": "sdpa_flash"}, NoBackendError, "keys and values in pages of 4: "),
    "no heads": Bad({"q": zeros(4, 0, 8)}, ShapeError, "^num_heads=0: expected at least 1"),
    "q on another device": Bad(
        elsewhere("q"),
        DeviceError,
        r"^k_pages: expected the device of q \(meta\), got cpu; move it there",
        only=TORCH,
    ),
    **{
        f"{name} on another device": Bad(
            elsewhere(name),
            DeviceError,
            rf"^{name}: expected the device of q \(cpu\), got meta; move it there",
            only=TORCH,
        )
        for name in ("k_pages", "v_pages", "block_table", "seq_lens", "cu_seqlens_q", "sinks")
    },
}

APPEND: dict[str, Bad] = {
    **TABLES,
    "fewer tokens than new ones": Bad(
        {"seq_lens": table(2, 3)},
        SpecError,
        r"^seq_lens\[0\]=2: expected at least the 3 queries of the sequence; ",
        eager=True,
    ),
    **POOLS,
    "k of two axes": Bad({"k": zeros(4, 24)}, ShapeError, r"^k: expected .*\[4, 3, 8\], got \[4, 24\]"),
    "width of v": Bad({"v": zeros(4, 3, 8)}, ShapeError, r"^v: expected .*\[4, 3, 5\], got \[4, 3, 8\]"),
    "tokens of v": Bad({"v": zeros(5, 3, 5)}, ShapeError, r"^v: expected .*\[4, 3, 5\], got \[5, 3, 5\]"),
    "dtype of k": Bad(
        {"k": zeros(4, 3, 8, dtype="float16")}, DTypeError, "^k: expected the dtype of k_pages, float32, got"
    ),
    "no k": Bad({"k": None}, TypeError, "^k: expected a .*, got .*NoneType"),
    "numpy v": Bad({"v": lambda f: np.zeros((4, 3, 5))}, TypeError, "^v: expected a .*, got numpy.ndarray"),
    "a page that two sequences write to": Bad(
        {"block_table": table([4, 2, -1], [2, -1, -1]), "seq_lens": table(5, 1)},
        SpecError,
        "^block_table: expected a separate slot for each new token, but slot 8 would be written 2 times; ",
        eager=True,
    ),
    "heads of k": Bad({"k": zeros(4, 1, 8)}, ShapeError, r"^k: expected .*\[4, 3, 8\], got \[4, 1, 8\]"),
    "k without axes": Bad({"k": zeros()}, ShapeError, r"^k: expected .*, got \[\]"),
    "dtype of the new v": Bad(
        {"v": zeros(4, 3, 5, dtype="bfloat16")}, DTypeError, "^v: expected the dtype of v_pages, float32, got bfloat16"
    ),
    "no room for the one new token": Bad(
        {"k": zeros(2, 3, 8), "v": zeros(2, 3, 5), "cu_seqlens_q": None, "seq_lens": table(5, 0)},
        SpecError,
        r"^seq_lens\[1\]=0: expected at least the 1 queries of the sequence; ",
        eager=True,
    ),
    **{
        f"{name} on another device": Bad(
            elsewhere(name),
            DeviceError,
            rf"^{name}: expected the device of k_pages \(cpu\), got meta; move it there",
            only=TORCH,
        )
        for name in ("v_pages", "k", "v", "block_table", "seq_lens", "cu_seqlens_q")
    },
}


def by_slots(**changes: Any) -> dict[str, Any]:
    """An append by slots, with changes."""
    none = {"block_table": None, "seq_lens": None, "cu_seqlens_q": None}
    return {**none, "slot_mapping": table(9, -1, 27, 0), **changes}


def angles(*shape: int, dtype: str = "float32") -> Make:
    return lambda f: (f.zeros(*shape, dtype=dtype), f.zeros(*shape, dtype=dtype))


APPEND |= {
    "slots and a table": Bad(
        {"slot_mapping": table(0, 1, 2, 3)}, SpecError, "^block_table: expected None with slot_mapping, .*; pass one$"
    ),
    "slots and offsets": Bad(
        by_slots(cu_seqlens_q=table(0, 3, 4)), SpecError, "^cu_seqlens_q: expected None with slot_mapping"
    ),
    "too few slots": Bad(
        by_slots(slot_mapping=table(0, 1, 2)), ShapeError, r"^slot_mapping: expected shape \[4\], got \[3\]"
    ),
    "slots of float": Bad(
        by_slots(slot_mapping=zeros(4)), DTypeError, "^slot_mapping: expected dtype int32 or int64, got float32; cast"
    ),
    "a list of slots": Bad(by_slots(slot_mapping=[0, 1, 2, 3]), TypeError, "^slot_mapping: expected a .*, got .*list"),
    "a slot behind the pool": Bad(
        by_slots(slot_mapping=table(0, 28, 1, 2)),
        SpecError,
        r"^slot_mapping\[1\]=28: expected 0 to 27, because the pool has 7 pages of 4, or -1 for",
        eager=True,
    ),
    "a slot of numpy behind the pool": Bad(
        by_slots(slot_mapping=numpys(0, 1, 2**40, 2)),
        SpecError,
        r"^slot_mapping\[2\]=1099511627776: expected 0 to 27",
        eager=True,
    ),
    "a slot below -1": Bad(
        by_slots(slot_mapping=table(0, 2, 1, -2)), SpecError, r"^slot_mapping\[3\]=-2: expected 0 to 27", eager=True
    ),
    "two tokens in a slot": Bad(
        by_slots(slot_mapping=table(5, -1, 5, 5)),
        SpecError,
        "^slot_mapping: expected a separate slot for each new token, but slot 5 would be written 3 times",
        eager=True,
    ),
    "rotary of slots": Bad(
        by_slots(rotary=angles(9, 4)), SpecError, "^positions: expected each token's position, got None; slot_mapping"
    ),
    "positions without rotary": Bad(
        {"positions": table(0, 1, 2, 3)}, SpecError, "^positions: expected None without rotary"
    ),
    "interleaved without rotary": Bad(
        {"rotary_interleaved": True}, SpecError, "^rotary_interleaved=True: expected False without rotary"
    ),
    "interleaved of 1": Bad(
        {"rotary": angles(9, 4), "rotary_interleaved": 1}, SpecError, "^rotary_interleaved=1: expected True or False"
    ),
    "rotary of one array": Bad(
        {"rotary": zeros(9, 4)}, SpecError, r"^rotary=.*: expected a pair \(cos, sin\) of arrays, or None"
    ),
    "rotary without sin": Bad(
        {"rotary": lambda f: (f.zeros(9, 4), None)}, SpecError, r"^rotary=.*: expected a pair \(cos, sin\) of arrays"
    ),
    "numpy cos": Bad(
        {"rotary": (np.zeros((9, 4)), np.zeros((9, 4)))}, TypeError, r"^rotary\[0\]: expected a .*, got numpy"
    ),
    "a wide rotary": Bad(
        {"rotary": angles(9, 5)},
        ShapeError,
        r"^rotary\[0\]: expected at most 4 angles for a head_dim of 8, got 5, which is",
    ),
    "flat angles": Bad(
        {"rotary": angles(9)}, ShapeError, r"^rotary\[0\]: expected \[max_positions, rotary_dim / 2\], got \[9"
    ),
    "angles of another shape": Bad(
        {"rotary": lambda f: (f.zeros(9, 4), f.zeros(8, 4))},
        ShapeError,
        r"^rotary\[1\]: expected the shape of rotary\[0\], \[9, 4\]",
    ),
    "angles of ints": Bad(
        {"rotary": angles(9, 4, dtype="int32")}, DTypeError, r"^rotary\[0\]: expected one of .*, got int32"
    ),
    "too few angles": Bad(
        {"rotary": angles(4, 4)},
        SpecError,
        r"^seq_lens\[0\]=5: expected at most 4 tokens, because cos and sin of rotary have 4 positions",
        eager=True,
    ),
    "a position behind the angles": Bad(
        {"rotary": angles(9, 4), "positions": table(0, 9, 1, 2)},
        SpecError,
        r"^positions\[1\]=9: expected 0 to 8, because cos and sin have 9 positions",
        eager=True,
    ),
    "too few positions": Bad(
        {"rotary": angles(9, 4), "positions": table(0, 1, 2)}, ShapeError, r"^positions: expected .*\[4\], got \[3\]"
    ),
}


def rows(cases: dict[str, Bad]) -> list[Any]:
    """(framework, case) as params."""
    return [
        pytest.param(framework, case, id=f"{framework}-{name}")
        for name, case in cases.items()
        for framework in BOTH
        if case.only in (None, framework)
    ]


def arguments(f: Framework, case: Bad, base: dict[str, Any]) -> dict[str, Any]:
    return {**base, **{name: make(f) if callable(make) else make for name, make in case.changes.items()}}


def called(f: Framework, name: str, given: dict[str, Any]) -> Any:
    first = ("q", "k_pages", "v_pages") if name != "append_kv" else ("k_pages", "v_pages", "k", "v")
    rest = {key: value for key, value in given.items() if key not in first}
    return getattr(f.frontend, name)(*(given[key] for key in first), **rest)


def test_the_unchanged_calls_run() -> None:
    for f in BOTH:
        assert called(f, "paged_attention", good(f)).shape == (4, 6, 5)
        called(f, "append_kv", good_append(f))


@pytest.mark.sampled
@pytest.mark.parametrize(("framework", "case"), rows(ATTENTION))
def test_bad_arguments_of_paged_attention(framework: Framework, case: Bad) -> None:
    given = arguments(framework, case, good(framework))
    empty_plan_caches(programs=False)
    with spied() as ran, pytest.raises(case.error, match=case.says) as refused:
        called(framework, "paged_attention", given)
    assert refused.type is case.error
    assert ran == []
    if not case.eager and case.error is not NoBackendError:
        with pytest.raises(case.error, match=case.says):
            called(framework, "explain_paged", given)
    empty_plan_caches(programs=False)


@pytest.mark.sampled
@pytest.mark.parametrize(("framework", "case"), rows(APPEND))
def test_bad_arguments_of_append(framework: Framework, case: Bad) -> None:
    given = arguments(framework, case, good_append(framework))
    with pytest.raises(case.error, match=case.says) as refused:
        called(framework, "append_kv", given)
    assert refused.type is case.error
    for name in ("k_pages", "v_pages"):
        if framework is JAX and isinstance(given[name], jax.Array):
            assert not given[name].is_deleted(), "what is refused is not donated"
        elif framework is TORCH and isinstance(given[name], torch.Tensor) and given[name].is_cpu:
            assert not given[name].any()


@pytest.mark.parametrize("name", [name for name, case in ATTENTION.items() if not case.eager and not case.only])
def test_bad_arguments_inside_jit(name: str) -> None:
    """While JAX traces, it raises the same errors, except those about values."""
    case = ATTENTION[name]
    given = arguments(JAX, case, good(JAX))
    traced = {key: value for key, value in given.items() if isinstance(value, jax.Array)}
    rest = {key: value for key, value in given.items() if key not in traced}
    with pytest.raises(case.error, match=case.says):
        jax.jit(lambda arrays: called(JAX, "paged_attention", {**arrays, **rest}))(traced)


@pytest.mark.parametrize("name", ["page beyond the pool", "length beyond the table", "offsets that go back"])
def test_tables_that_are_constants_of_a_jitted_function_are_checked(name: str) -> None:
    case = ATTENTION[name]
    given = arguments(JAX, case, good(JAX))
    with pytest.raises(case.error, match=case.says):
        jax.jit(lambda q: called(JAX, "paged_attention", {**given, "q": q}))(given["q"])


@pytest.mark.parametrize("how", ["torch", "torch op", "jax", "jax inside jit"])
def test_tables_are_checked_once(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first code to see their values checks them: the frontend, or the op or callback of a traced program."""
    checks: list[str] = []
    for module, name in ((tables, "check_values"), (tables, "check_cu_seqlens"), (row_blocks, "check_cu_seqlens")):
        counted = getattr(module, name)

        def count(*values: Any, run: Any = counted, name: str = name, **more: Any) -> None:
            checks.append(name)
            run(*values, **more)

        monkeypatch.setattr(module, name, count)
    f = TORCH if how.startswith("torch") else JAX
    given = {**good(f), "backend": "math"}
    arrays = {key: value for key, value in given.items() if key != "backend"}
    call = partial(called, f, "paged_attention")
    if how == "torch op":
        torch.compile(call, backend="aot_eager")(given)
    elif how == "jax inside jit":
        jax.block_until_ready(jax.jit(lambda arrays: call({**arrays, "backend": "math"}))(arrays))
    else:
        jax.block_until_ready(call(given))
    assert sorted(checks) == ["check_cu_seqlens", "check_values"]


def test_a_refused_append_writes_nothing() -> None:
    for f in BOTH:
        given = {**good_append(f), "block_table": table([4, -1, -1], [0, -1, -1])(f)}
        given["k"] = f.array(np.ones((4, 3, 8), np.float32))
        with pytest.raises(SpecError, match=r"^block_table\[0, 1\]=-1: "):
            called(f, "append_kv", given)
        assert not given["k_pages"].any()


# Gradients


def test_torch_refuses_gradients_by_name() -> None:
    for name in ("q", "k_pages", "v_pages", "sinks"):
        given = {**good(TORCH), "sinks": torch.zeros(6)}
        given[name].requires_grad_()
        says = f"^{name}: expected requires_grad=False, keys and values in pages are for inference; use torch.no_grad"
        for function in ("paged_attention", "explain_paged"):
            with pytest.raises(SpecError, match=says):
                called(TORCH, function, given)
        with torch.no_grad():
            assert not called(TORCH, "paged_attention", given).requires_grad
        with torch.inference_mode():
            called(TORCH, "paged_attention", given)


@pytest.mark.parametrize("function", ["paged_attention", "append_kv"])
def test_torch_refuses_compiled_gradients_and_tangents_by_name(function: str) -> None:
    make = good if function == "paged_attention" else good_append
    for name in ("k_pages", "v_pages", "sinks" if function == "paged_attention" else "k"):
        given = {"sinks": torch.zeros(6)} if name == "sinks" else {}
        given = {**make(TORCH), **given}

        def alone(array: Any) -> Any:
            results = called(TORCH, function, {**given, name: array * 1})  # noqa: B023
            return results[0] if isinstance(results, tuple) else results

        with pytest.raises(SpecError, match=f"^{name}: expected no tangent, .*; use torch.Tensor.detach"):
            torch.func.jvp(alone, (given[name],), (given[name],))
        with pytest.raises(SpecError, match=f"^{name}: expected requires_grad=False"):
            torch.func.grad(lambda array: alone(array).sum())(given[name])
        torch._dynamo.reset()
        given[name] = given[name].clone().requires_grad_()
        with pytest.raises(Exception, match=f"{name}: expected requires_grad=False"):
            torch.compile(lambda array: alone(array), backend="aot_eager")(given[name])


def test_append_under_no_grad_and_in_inference_mode() -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        given = good_append(TORCH)
        given["k"] = torch.ones(4, 3, 8, requires_grad=True)
        with mode():
            called(TORCH, "append_kv", given)
        assert given["k_pages"].sum() == 4 * 3 * 8 and not given["k_pages"].requires_grad


@pytest.mark.parametrize("backend", ["math", "jax_xla"])
@pytest.mark.parametrize("name", ["q", "k_pages", "v_pages", "sinks"])
def test_jax_refuses_gradients_by_name(name: str, backend: str) -> None:
    given = {**good(JAX), "sinks": jnp.zeros(6), "backend": backend}

    def total(array: Any) -> Any:
        return called(JAX, "paged_attention", {**given, name: array}).sum()

    says = "^paged: keys and values in pages are for inference, .*; use jax.lax.stop_gradient"
    with pytest.raises(SpecError, match=says):
        jax.grad(total)(given[name])
    with pytest.raises(SpecError, match=says):
        jax.jit(jax.grad(total))(given[name])
    with pytest.raises(SpecError, match=says):
        jax.jvp(total, (given[name],), (given[name],))


def test_jax_accepts_a_stopped_gradient() -> None:
    given = good(JAX)

    def total(weight: Any) -> Any:
        frozen = {"q": jax.lax.stop_gradient(given["q"] * weight)}
        return called(JAX, "paged_attention", {**given, **frozen}).sum() + weight**2

    assert jax.grad(total)(3.0) == 6.0
