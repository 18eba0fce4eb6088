"""Calls on keys and values in pages: drawn, run through either frontend, and judged like any other call.

Pages are scattered over a pool. Everything outside the sequences is NaN: whole pages, and the ends of last pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from both_frontends import Results, _numpy, compiled_as, jax_array, jax_device, module_on
from hypothesis import strategies as st
from oracle_cases import rounded
from paged_inputs import inputs_of

import jax_frontend
import torch_frontend
from attn_core import AttentionSpec, NoBackendError, Selection, backends
from attn_core.backends.support import Support
from attn_core.call.spec import PagedKV
from attn_core.call.tensors import PagedInputs
from attn_core.correctness import accuracy
from attn_core.correctness.reference import gather_pages

LAYOUTS = ("contiguous", "heads_outside", "one_tensor", "interleaved")
"""The memory layouts of torch's pools: dense; by heads first; or keys and values of a page, or of a head, side by side
in one tensor."""


@dataclass(frozen=True, eq=False, repr=False)
class PagedCall:
    """One call to ``paged_attention`` with everything that its results are judged by.

    Attributes:
        spec: the call; inputs: numpy arrays in the layout of PagedInputs, float64 numbers that the dtype represents.
        window: as the caller writes it; bound: ``max_len_q`` as the caller writes it.
        layout: one of LAYOUTS; host_tables: whether the tables are passed as numpy arrays.
    """

    spec: AttentionSpec
    inputs: PagedInputs
    window: Any = None
    bound: int | None = None
    layout: str = "contiguous"
    host_tables: bool = False
    seed: int = 0

    def __repr__(self) -> str:
        cu = self.inputs.cu_seqlens_q
        return (
            f"PagedCall({self.spec}; window={self.window!r}, max_len_q={self.bound}, layout={self.layout}, "
            f"host_tables={self.host_tables}, seq_lens={self.inputs.seq_lens.tolist()}, "
            f"cu_seqlens_q={None if cu is None else cu.tolist()}, table={self.inputs.block_table.tolist()}, "
            f"seed={self.seed})"
        )

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # hypothesis would print every array
        printer.text(repr(self))

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of ``paged_attention`` that are plain values."""
        names = ("causal", "softcap", "scale", "return_lse")
        plain = {name: getattr(self.spec, name) for name in names}
        return plain | {"window": self.window, "max_len_q": self.bound}

    @property
    def tables(self) -> dict[str, Any]:
        """The tables as numpy arrays."""
        names = ("block_table", "seq_lens", "cu_seqlens_q")
        return {name: getattr(self.inputs, name) for name in names}

    @property
    def int_arrays(self) -> dict[str, Any]:
        """The tables, and key_ranges and kv_starts if there are any."""
        others = {name: getattr(self.inputs, name) for name in ("key_ranges", "kv_starts")}
        return self.tables | {name: array for name, array in others.items() if array is not None}


def make_paged(
    lengths: Any,
    new: Any = None,
    *,
    page_size: int = 4,
    spare: int = 2,
    wider: int = 1,
    shared: int = 0,
    ranges: tuple[int, int] | None = None,
    alibi: int = 0,
    starts: bool = False,
    window: Any = None,
    bound: int | None = None,
    layout: str = "contiguous",
    host_tables: bool = False,
    seed: int = 0,
    **fields: Any,
) -> PagedCall:
    """A call of sequences of ``lengths`` tokens, ``new`` of which are queries.

    Args:
        new: if None, one query each and no offsets.
        spare: pages that no sequence holds; wider: unused columns of the table.
        shared: the number of pages that the second sequence reads of the first one's in place of its own.
        ranges: key ranges of so many kv heads and so many ranges each, or None.
        alibi: the axes of the slopes: 1 for one per head, 2 for one per sequence and head; 0: none.
        starts: whether each sequence has a first visible key; then no page is shared.
        fields: of the spec.
    """
    counts = [-(-length // page_size) for length in lengths]
    width = max(counts, default=0) + wider
    paged = PagedKV(num_pages=sum(counts) + spare, page_size=page_size, width=width, starts=starts)
    queries = len(lengths) if new is None else sum(new)
    longest = 1 if new is None else min(queries if bound is None else bound, queries)
    if new is not None and queries == len(lengths):
        longest = max(longest, 2)  # the offsets may leave a sequence without queries
    sizes: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "value_dim": 8, "dtype": "float32"}
    sizes = {**sizes, "causal": True, **fields}
    spec = AttentionSpec(
        **sizes,
        **{"batch": 1, "q_len": queries, "kv_len": paged.capacity, "documents": len(lengths), "paged": paged},
        window=(window - 1, 0) if isinstance(window, int) else window or (None, None),
        max_len_q=longest,
        max_len_k=paged.capacity,
        key_ranges_shape=None if ranges is None else (1, ranges[0], queries, ranges[1], 2),
        alibi_shape=(len(lengths), sizes["num_heads"])[2 - alibi :] if alibi else None,
    )
    inputs = inputs_of(spec, np.random.default_rng(seed), lengths, [1] * len(lengths) if new is None else new)
    dtypes = {**dict.fromkeys(("q", "k", "v", "sinks"), spec.dtype), "alibi_slopes": "float32"}
    exact = {n: rounded(getattr(inputs, n), d) for n, d in dtypes.items() if getattr(inputs, n) is not None}
    inputs = inputs._replace(**exact, cu_seqlens_q=None if new is None else inputs.cu_seqlens_q)
    if shared and not starts:
        inputs = sharing(inputs, shared)
    return PagedCall(spec, inputs, window, bound, layout, host_tables, seed)


def sharing(inputs: PagedInputs, pages: int) -> PagedInputs:
    """The second sequence reads the first one's pages at its beginning; its own pages there belong to no sequence."""
    table, k, v = inputs.block_table.copy(), inputs.k.copy(), inputs.v.copy()
    for pool in (k, v):
        pool[table[1, :pages]] = np.nan
    table[1, :pages] = table[0, :pages]
    return inputs._replace(block_table=table, k=k, v=v)


def most_shared(lengths: Any, page_size: int) -> int:
    """The number of pages that the second sequence may read of the first one's: the pages that the first one fills."""
    if len(lengths) < 2:
        return 0
    return min(lengths[0] // page_size, -(-lengths[1] // page_size))


# Drawing

HEADS = ((1, 1, 8, 8), (6, 2, 5, 5), (4, 1, 8, 3), (3, 3, 16, 16), (8, 2, 11, 13))
"""(heads, kv heads, head_dim, value_dim)."""
GPU_HEADS = ((8, 2, 64, 64), (4, 4, 128, 128), (6, 1, 128, 128), (16, 4, 256, 256), (6, 2, 16, 32))
WINDOWS = (1, 3, 40, (2, 1), (0, 0), (None, 1), (5, None), (7, 0))
FEATURES: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "window": st.sampled_from(WINDOWS).map(lambda window: {"window": window}),
    "softcap": st.sampled_from((0.7, 30.0)).map(lambda softcap: {"softcap": softcap}),
    "scale": st.sampled_from((0.31, 1.7)).map(lambda scale: {"scale": scale}),
    "sinks": st.just({"sinks": True}),
    "all_see_all": st.just({"causal": False}),
}


@st.composite
def batches(draw: Any, page_size: int, on_gpu: bool = False) -> tuple[list[int], list[int] | None]:
    """(lengths, new) of some sequences: decoding, chunks of a prefill, both at once; some sequences are empty.

    On a CPU some have more new tokens than keys.
    """
    longest = max(2 * page_size + 3, 600 if on_gpu else 40)
    near = st.sampled_from((1, page_size - 1, page_size, page_size + 1, 2 * page_size)).filter(lambda n: n > 0)
    some = st.one_of(near, st.integers(1, longest))
    kinds = ("decode", "prefill", "chunks", "mixed", *(() if on_gpu else ("more queries than keys",)))
    kind = draw(st.sampled_from(kinds), label="kind")
    lengths = draw(st.lists(some if kind == "decode" else st.one_of(some, st.just(0)), min_size=1, max_size=5))
    if kind == "decode":
        return lengths, None
    if kind == "prefill":
        return lengths, lengths
    if kind == "more queries than keys":
        lengths = [min(n, 7) for n in lengths]
        return lengths, [draw(st.integers(0, n + 6)) for n in lengths]
    most = [min(n, 150 if on_gpu else 25) if kind == "chunks" or draw(st.booleans()) else min(n, 1) for n in lengths]
    return lengths, [draw(st.integers(0, n)) for n in most]


@st.composite
def paged_calls(draw: Any, claims: Support, on_gpu: bool = False, page_sizes: tuple[int, ...] = ()) -> PagedCall:
    """Any call that a backend claims."""
    page_size = draw(st.sampled_from(page_sizes or ((16, 1, 3, 64, 256) if on_gpu else (16, 1, 3, 256))))
    lengths, new = draw(batches(page_size, on_gpu))
    heads = draw(st.sampled_from(GPU_HEADS if on_gpu else HEADS))
    names = ("num_heads", "num_kv_heads", "head_dim", "value_dim")
    fields: dict[str, Any] = dict(zip(names, heads, strict=True))
    for feature in sorted(draw(st.sets(st.sampled_from(sorted(FEATURES)), max_size=3))):
        fields |= draw(FEATURES[feature])
    if claims.key_ranges and draw(st.integers(0, 3)) == 0:
        fields["ranges"] = draw(st.sampled_from((1, fields["num_kv_heads"]))), draw(st.integers(1, 2))
    if claims.paged_alibi and draw(st.integers(0, 3)) == 0:
        fields["alibi"] = draw(st.integers(1, 2))
    if claims.paged_starts and draw(st.integers(0, 3)) == 0:
        fields["starts"] = True
    if isinstance(fields.get("window"), int):
        fields["causal"] = True
    bound = None
    if new is not None and draw(st.booleans()):
        bound = max(new) + draw(st.integers(0, 3))
        if sum(new) > len(new) * bound:
            bound = None
    return make_paged(
        lengths,
        new,
        page_size=page_size,
        spare=draw(st.integers(1, 4)),
        wider=draw(st.integers(0, 2)),
        shared=draw(st.integers(0, most_shared(lengths, page_size))),
        bound=bound,
        layout=draw(st.sampled_from(LAYOUTS)),
        host_tables=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16), label="seed"),
        dtype=draw(st.sampled_from(claims.dtypes)),
        return_lse=draw(st.booleans()),
        **fields,
    )


SIGNATURES: tuple[dict[str, Any], ...] = (
    {"new": None, "page_size": 3, "host_tables": True},
    {"new": None, "page_size": 16, "num_heads": 6, "num_kv_heads": 2, "window": 5, "sinks": True, "return_lse": True},
    {"new": 13, "page_size": 1, "dtype": "bfloat16", "softcap": 0.7, "return_lse": True, "host_tables": True},
    {"new": 13, "page_size": 3, "num_heads": 6, "num_kv_heads": 3, "value_dim": 5, "window": (2, 1), "causal": False},
    {"new": 13, "page_size": 16, "dtype": "float64", "num_kv_heads": 1, "scale": 0.31, "sinks": True, "bound": 9},
    {"new": 13, "page_size": 3, "num_heads": 6, "num_kv_heads": 3, "ranges": (3, 2), "sinks": True, "return_lse": True},
    {"new": 7, "page_size": 16, "ranges": (1, 1), "causal": False, "window": (6, 1), "host_tables": True},
    {"new": 7, "page_size": 256, "dtype": "float16", "causal": False, "return_lse": True},
    {"new": None, "page_size": 16, "num_heads": 6, "alibi": 2, "starts": True, "return_lse": True},
    {"new": 13, "page_size": 3, "alibi": 1, "starts": True, "window": (9, 1), "host_tables": True},
)
"""Calls with constant shapes: ``new`` queries in total, of four sequences on tables of fixed width."""


@st.composite
def paged_signatures(draw: Any, claims: Support, on_gpu: bool = False) -> PagedCall:
    """A call of one of SIGNATURES, for frontends that compile for every shape and option. Its tables are free."""
    fields = dict(draw(st.sampled_from(SIGNATURES)))
    if fields.get("dtype", "float32") not in claims.dtypes:
        fields["dtype"] = claims.dtypes[0]
    if on_gpu:
        fields |= {"head_dim": 64, "value_dim": 64}
    page_size, tokens, bound = fields["page_size"], fields.pop("new"), fields.get("bound")
    width = -(-40 // page_size)
    if tokens is None:
        lengths, new = draw(st.lists(st.integers(1, width * page_size), min_size=4, max_size=4)), None
    else:
        cuts = draw(st.lists(st.integers(0, tokens), min_size=3, max_size=3).map(sorted))
        new = np.diff([0, *cuts, tokens]).tolist()
        if bound is not None and max(new) > bound:
            new = [4, 0, 1, tokens - 5]
        lengths = [n if on_gpu or draw(st.booleans()) else draw(st.integers(0, n)) for n in new]
        lengths = [draw(st.integers(least, width * page_size)) for least in lengths]
    counts = [-(-n // page_size) for n in lengths]
    return make_paged(
        lengths,
        new,
        wider=width - max(counts),
        spare=4 * width + 1 - sum(counts),
        shared=draw(st.integers(0, most_shared(lengths, page_size))),
        seed=draw(st.integers(0, 2**16), label="seed"),
        **fields,
    )


# Running


def run(framework: str, call: PagedCall, backend: Any = None, device: str = "cpu") -> Results:
    """out, and lse if the call returns it, as numpy arrays; JAX runs eagerly with host tables, else inside jit."""
    actual = (_run_torch if framework == "torch" else _run_jax)(call, backend, device)
    actual = actual if isinstance(actual, (tuple, list)) else (actual,)
    results = {name: _plain(array) for name, array in zip(("out", "lse"), actual)}
    assert results["out"].shape == call.spec.out_shape and ("lse" in results) is call.spec.return_lse
    return results


def _plain(array: Any) -> np.ndarray:
    return _numpy(array) if isinstance(array, torch.Tensor) else np.asarray(array)


def explained(framework: str, call: PagedCall, backend: Any = None, device: str = "cpu") -> Selection:
    """``explain_paged`` on the call."""
    if framework == "torch":
        arrays, tables = torch_arguments(call, device)
        return torch_frontend.explain_paged(*arrays, **tables, **call.options, backend=backend)
    with jax_on(call, device):
        arrays, tables = jax_arguments(call)
        return jax_frontend.explain_paged(*arrays, **tables, **call.options, backend=backend)


def judge(call: PagedCall, results: Results) -> accuracy.Accuracy:
    """Judges results against the float64 reference on the sequences' tokens, within the bounds of the arithmetic."""
    return accuracy.expect(*gather_pages(call.spec, call.inputs)).judge(out=results["out"], lse=results.get("lse"))


def conforms(framework: str, call: PagedCall, backend: str, device: str = "cpu") -> bool:
    """Whether the backend accepts the call. Asserts that the result is then correct, and else that every reason is
    named."""
    selection = explained(framework, call, backend, device)
    if selection.backend is None:
        try:
            run(framework, call, backend, device)
        except NoBackendError as refusal:
            reasons = selection.reasons(backend)
            said = " ".join(str(refusal).split())  # the message is wrapped
            # The error turns "(needs PACKAGE)" into a command.
            assert reasons and [why for why in reasons if why.partition(" (needs ")[0] not in said] == []
            return False
        raise AssertionError(f"{backend} ran what explain_paged says it refuses: {selection}")
    verdict = judge(call, run(framework, call, backend, device))
    assert verdict.ok, f"{backend} in {framework}: {call}\n{verdict}"
    return True


def torch_arguments(call: PagedCall, device: str = "cpu") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """((q, k_pages, v_pages), the tables and sinks) as tensors."""
    kind = {"dtype": getattr(torch, call.spec.dtype), "device": device}
    q, k, v = (torch.tensor(array, **kind) for array in call.inputs[:3])
    tables = call.int_arrays
    if not call.host_tables:
        tables = {n: None if table is None else torch.tensor(table, device=device) for n, table in tables.items()}
    if call.inputs.sinks is not None:
        tables["sinks"] = torch.tensor(call.inputs.sinks, **kind)
    if call.inputs.alibi_slopes is not None:
        tables["alibi_slopes"] = torch.tensor(call.inputs.alibi_slopes, dtype=torch.float32, device=device)
    return (q, *laid_out(k, v, call.layout)), tables


def laid_out(k: torch.Tensor, v: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The same pools in another memory layout."""
    if layout == "heads_outside":  # [pages, slots, heads, dim] in the memory of [pages, heads, slots, dim]
        return tuple(pool.transpose(1, 2).contiguous().transpose(1, 2) for pool in (k, v))  # type: ignore[return-value]
    if layout == "one_tensor" and k.shape == v.shape:
        return torch.stack((k, v), 1).unbind(1)  # type: ignore[return-value]
    if layout == "interleaved" and k.shape == v.shape:
        return torch.stack((k, v), 3).unbind(3)  # type: ignore[return-value]
    return k, v


def _run_torch(call: PagedCall, backend: Any, device: str) -> Any:
    arrays, tables = torch_arguments(call, device)
    return torch_frontend.paged_attention(*arrays, **tables, **call.options, backend=backend)


@contextmanager
def jax_on(call: PagedCall, device: str) -> Iterator[None]:
    """JAX on a device with float64 for float64 calls alone, and with full float32 products."""
    with (
        jax.enable_x64(call.spec.dtype == "float64"),
        jax.default_device(jax_device(device)),
        jax.default_matmul_precision("highest"),
    ):
        yield


def jax_arguments(call: PagedCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """((q, k_pages, v_pages), the tables and sinks) as JAX arrays, on the default device."""
    arrays = tuple(jax_array(array, call.spec.dtype) for array in call.inputs[:3])
    tables = call.int_arrays
    if not call.host_tables:
        tables = {name: None if table is None else jax_array(table) for name, table in tables.items()}
    if call.inputs.sinks is not None:
        tables["sinks"] = jax_array(call.inputs.sinks, call.spec.dtype)
    if call.inputs.alibi_slopes is not None:
        tables["alibi_slopes"] = jax_array(call.inputs.alibi_slopes, jnp.float32)
    return arrays, tables


def _run_jax(call: PagedCall, backend: Any, device: str) -> Any:
    with jax_on(call, device):
        arrays, tables = jax_arguments(call)
        if call.host_tables:
            return jax_frontend.paged_attention(*arrays, **tables, **call.options, backend=backend)
        return jax.block_until_ready(_program(backend, tuple(sorted(call.options.items())))(arrays, tables))


@lru_cache(maxsize=256)
def _program(backend: Any, options: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(
        lambda arrays, tables: jax_frontend.paged_attention(*arrays, **tables, **dict(options), backend=backend),
        compiler_options=compiled_as(backend),
    )


def paged_backends(*devices: str) -> list[tuple[str, str]]:
    """(backend, device) of every backend that claims pages."""
    results = []
    for name in backends.names():
        for device in devices or ("cpu", "cuda"):
            module = module_on(name, device)
            claims = module.forward_claims
            if claims.paged and (claims.runs_on(device) or device in map(backends.kind_of, claims.devices)):
                results.append((name, device))
    return results


def without_answers(call: PagedCall) -> PagedCall:
    """The call with finite numbers in every page, for wrong tables."""
    k, v = (np.where(np.isnan(pool), 0.25, pool) for pool in (call.inputs.k, call.inputs.v))
    return replace(call, inputs=call.inputs._replace(k=k, v=v))


LIES: dict[str, dict[str, Any]] = {
    "pages": {"block_table": [[99, 2**31 - 1, 10**6] * 3, [-1, -(2**31), -5] * 3]},
    "lengths beyond the table": {"seq_lens": [10**6, 2**31 - 1]},
    "negative lengths": {"seq_lens": [-1, -(2**31)]},
    "offsets": {"cu_seqlens_q": [99, -5, 2**31 - 1]},
    "offsets that go back": {"cu_seqlens_q": [0, 7, 3]},
    "one long sequence": {"cu_seqlens_q": [0, 7, 7]},
    "starts beyond the end": {"kv_starts": [10**6, 2**31 - 1]},
    "negative starts": {"kv_starts": [-1, -(2**31)]},
}
"""Tables of two sequences that lead outside of the pool."""


def lying(lie: str, **fields: Any) -> PagedCall:
    """A call of two sequences with wrong tables, and finite numbers all over the pool."""
    call = make_paged((30, 33), (4, 3), page_size=4, wider=0, starts="starts" in lie, **fields)
    tables = {name: np.array(table, np.int32) for name, table in LIES[lie].items()}
    return replace(call, inputs=without_answers(call).inputs._replace(**tables))


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy at an address where JAX on a CPU may use numpy's memory directly: a multiple of 64 bytes."""
    room = np.zeros(array.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    made = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made
