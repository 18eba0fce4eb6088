"""A few small calls through every backend that is available here, to be run under a tool that watches memory:

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/memcheck_cases.py

The tool knows the driver's allocations, not tensors: without that variable torch cuts many tensors out of one, and what
is read beside a tensor is seen only where it lies outside of them all.

Prints what ran and what did not, with its reason; exit code 1 only when a call raises, gives NaN or Inf, or writes
beside a pool of pages. Without an NVIDIA GPU nothing runs. ``--only NAME ...`` runs these backends alone;
``append_kv``, ``merge``, ``offsets``, ``tables``, ``rotary`` and ``jvp`` are names of our other Triton kernels,
``block_tables``, ``block_states``, ``segments`` and ``sinks`` of those of the CuTe DSL, and ``--own`` means all of our
kernels.
``functions`` runs our mask and score functions inside FlashAttention-4's kernels.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]  # run as a file, the project need not be installed

import numpy as np
import small_paged_calls as paged
import torch
from small_calls import KINDS, most_it_can, small_call, torch_backends, why_not

import torch_frontend
from attn_core import AttentionSpec, PagedKV
from attn_core.backends import flash3, flash4, triton_jvp
from attn_core.backends import flash4 as flash4_kernel
from attn_core.backends.flash4 import block_tables, own_kernels
from attn_core.backends.shared import pages
from attn_core.backends.shared.rewrites import sink_gradient, with_sinks
from attn_core.call.functions import seen_by_function, trace
from attn_core.call.masks import visible
from attn_core.call.segments import function_of
from attn_core.call.seq_info import tail_of
from attn_core.call.tensors import Inputs, Tangents
from attn_core.context_parallel.on_torch.tiles import merge
from attn_core.correctness import reference
from attn_core.errors import SpecError
from attn_core.expressions.tracing import Aux
from attn_core.selection import Target, forward_mode
from torch_frontend.dispatch import offsets, plan

APPEND = "append_kv"
OWN = (
    *("triton_splitkv", "triton_ordered", "triton_jvp", "jvp", APPEND, "merge", "offsets", "tables", "rotary"),
    *("block_tables", "block_states", "segments", "sinks"),
)
"""Everything that runs a kernel of this project."""


def main(arguments: list[str] | None = None) -> int:
    """Runs every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these backends alone")
    parser.add_argument("--own", action="store_true", help="kernels of this project alone")
    parser.add_argument("--functions", action="store_true", help="with --own: also our functions in other kernels")
    parsed = parser.parse_args(arguments)
    if parsed.own:
        leave_out_flash3()
    only = (*OWN, *(["functions"] if parsed.functions else [])) if parsed.own else parsed.only
    if not torch.cuda.is_available():
        print(f"not run: all cases: needs an NVIDIA GPU, torch {torch.__version__} sees none")
        print("memcheck cases: 0 ran")
        return 0
    requested = [(run_case, name, kind) for name in torch_backends() for kind in KINDS]
    requested += [(run_tangents, "triton_jvp", kind) for kind in KINDS]
    requested += [(run_paged, name, kind) for name in paged.paged_backends() for kind in paged.KINDS]
    requested += [(run_append, APPEND, kind) for kind in paged.KINDS]
    requested += [(run_other, name, name) for name in OTHERS]
    requested += [(run_of_triton, name, name) for name in OF_TRITON]
    requested += [(run_of_flash4, name, name) for name in OF_FLASH4]
    outcomes = [case(name, kind) for case, name, kind in requested if only is None or name in only]
    ran, wrong = len(outcomes) - outcomes.count(None), outcomes.count(False)
    print(f"memcheck cases: {ran} ran, {wrong} wrong")
    return 1 if wrong else 0


def leave_out_flash3() -> None:
    """Makes flash3 unavailable: to find out its build it runs kernels, which are not ours."""

    def missing() -> Any:
        raise ImportError("left out")

    flash3.operators = missing  # which the probe and the build ask


def run_case(backend: str, kind: str) -> bool | None:
    """Whether a case passed; None if the backend cannot run it."""
    call = small_call(kind)
    able = most_it_can(call, backend)
    if able is None:
        print(f"not run: {kind}: {why_not(call, backend)}", flush=True)
        return None
    trained = able[0]
    label = f"{backend}, {kind}, {'forward and backward' if trained else 'forward'}"
    return passed(label, lambda: finite(*call.run(backend, trained)))


def run_tangents(backend: str, kind: str, device: str = "cuda") -> bool | None:
    """The same in forward mode, with tangents of q, k and v."""
    call = small_call(kind, device=device)
    choice = forward_mode.choose(
        call.selection(backend, False).spec, Target.here("torch", plan.device_name(call.q.device)), (backend,)
    )
    if choice.backend is None:
        print(f"not run: {kind}: {choice}", flush=True)
        return None

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        return call._replace(q=qkv[0], k=qkv[1], v=qkv[2]).run(backend, False)[0]

    primals = (call.q, call.k, call.v)
    return passed(f"{backend}, {kind}, tangents", lambda: finite(*torch.func.jvp(attend, primals, primals[::-1])))


def run_paged(backend: str, kind: str, device: str = "cuda") -> bool | None:
    """The same on keys and values in pages."""
    call = paged.first_accepted(kind, backend, device)
    if call is None:
        print(f"not run: {kind}: {paged.why_not(kind, backend, device)}", flush=True)
        return None

    def passes() -> bool:
        try:
            return finite(call.attend(backend))
        except SpecError:  # a backend that copies the tables to the host and reads them
            if "lying" not in kind:
                raise
            return True

    return passed(f"{backend}, {kind}, forward", passes)


def run_append(name: str, kind: str, device: str = "cuda") -> bool:
    """Appends new keys and values to their pages, and checks that nothing beside the pool is written."""
    call = paged.paged_call(kind, paged.PAGE_SIZES[0], device=device)

    def passes() -> bool:
        before = [pool.clone() for pool in call.pools]
        call.append()
        written = [bool((pool != old).any()) for pool, old in zip(call.pools, before, strict=True)]
        return finite(*call.pools) and call.guarded() and all(written)

    return passed(f"{name}, {kind}, in place", passes)


def run_other(name: str, kind: str, device: str = "cuda") -> bool:
    """Runs one of OTHERS, and compares it with the same arithmetic by torch's operations on the CPU."""
    return passed(f"{name}, beside torch's operations", lambda: OTHERS[kind](device))


def run_of_triton(name: str, kind: str) -> bool:
    """Runs one of OF_TRITON."""
    return passed(f"{name}, finite", OF_TRITON[kind])


def run_of_flash4(name: str, kind: str) -> bool | None:
    """Runs one of OF_FLASH4, and compares it with the definition; None if flash-attn-4 is not installed."""
    try:
        flash4.probe()
    except (ImportError, RuntimeError) as error:
        print(f"not run: {name}: {type(error).__name__}: {error}", flush=True)
        return None
    return passed(f"{name}, beside the definition", OF_FLASH4[kind])


def merges(device: str) -> bool:
    """Merges two results; some rows of each saw no key."""
    generator = torch.Generator().manual_seed(1)
    out, part = (torch.randn(2, 67, 3, 80, generator=generator) for _ in range(2))
    lse, part_lse = (torch.randn(2, 3, 67, generator=generator) for _ in range(2))
    lse[:, :, ::5], part_lse[:, :, ::7] = -torch.inf, -torch.inf
    here = [tensor.to(device, copy=True) for tensor in (out, lse, part, part_lse)]
    merge(*here)
    merge(out, lse, part, part_lse)
    return all(torch.allclose(a.cpu(), b, atol=1e-5) for a, b in zip(here, (out, lse), strict=False))


def completes_offsets(device: str) -> bool:
    """Completes offsets that lie outside of the tokens and decrease."""
    tail, tokens = tail_of((91, 83), (5, 7), 30), (91, 83)
    assert tail is not None
    lies = torch.randint(-200, 200, (2, 31), dtype=torch.int32, generator=torch.Generator().manual_seed(2))
    lies[0, 3], lies[1, 4] = 2**31 - 1, -(2**31)
    actual = offsets._safe(*lies.to(device), tail, tokens)
    return all(torch.equal(a.cpu(), b) for a, b in zip(actual, offsets.safe_by_torch(*lies, tail, tokens), strict=True))


def clamps_tables(device: str) -> bool:
    """Clamps pages and lengths that lie outside of the pool."""
    call = paged.paged_call("paged decode, lying tables", 16, device=device)
    table, lengths = call.tables["block_table"], call.tables["seq_lens"]
    page_size, width = call.pools[0].shape[1], table.shape[1]
    spec = PagedKV(num_pages=paged.PAGES, page_size=page_size, width=width)
    inputs: Any = SimpleNamespace(block_table=table, seq_lens=lengths)
    safe_table, safe_lengths = pages.safe_tables(spec, inputs)
    expected = table.cpu().clamp(0, paged.PAGES - 1), lengths.cpu().clamp(0, width * page_size)
    return torch.equal(safe_table.cpu(), expected[0]) and torch.equal(safe_lengths.cpu(), expected[1])


def rotates(device: str) -> bool:
    """Rotates queries, and appends rotated keys by slots; on a GPU two slots are no place, and two positions no row."""
    call, random = paged.paged_call("paged chunk", 16, device=device), torch.Generator().manual_seed(3)
    tokens, slots = len(call.k), torch.randperm(16 * paged.PAGES, generator=random)
    slots, positions = slots[:tokens], torch.randint(0, 40, (tokens,), generator=random)
    angles = [torch.randn(40, 24, generator=random) for _ in "cs"]
    slots[3] = -1
    lies, wrong = slots.clone(), positions.clone()
    if device != "cpu":
        lies[5:7], wrong[7:9] = torch.tensor([2**31 - 1, -9]), torch.tensor([2**31 - 1, -5])
        slots[5:7], positions[7:9] = -1, torch.tensor([39, 0])
    for interleaved in (False, True):
        pools = [pool.cpu() for pool in call.pools]
        there, where = tuple(each.to(device) for each in angles), {"positions": wrong.to(device)}
        options = {"rotary": there, "rotary_interleaved": interleaved}
        torch_frontend.append_kv(*call.pools, call.k, call.v, slot_mapping=lies.to(device), **where, **options)
        options = {"rotary": tuple(angles), "rotary_interleaved": interleaved}
        torch_frontend.append_kv(*pools, call.k.cpu(), call.v.cpu(), slot_mapping=slots, positions=positions, **options)
        actual = torch_frontend.apply_rotary(call.q, *there, **where, interleaved=interleaved)
        turned = torch_frontend.apply_rotary(call.q.cpu(), *angles, positions=positions, interleaved=interleaved)
        pairs = zip((*call.pools, actual), (*pools, turned), strict=True)
        if not all([torch.equal(one.cpu(), other) for one, other in pairs]):
            return False
    return call.guarded()


def moves_forward() -> bool:
    """Computes tangents of documents whose offsets lie outside of the tokens and decrease."""
    sizes = {"batch": 1, "q_len": 91, "kv_len": 83, "num_heads": 4, "num_kv_heads": 2, "head_dim": 48, "value_dim": 40}
    spec = AttentionSpec(
        **sizes, dtype="float32", documents=5, max_len_q=40, max_len_k=40, causal=True, softcap=3.0, return_lse=True
    )
    generator = torch.Generator().manual_seed(9)
    shapes = ((91, 4, 48), (83, 2, 48), (83, 2, 40)) * 2
    tensors = [torch.randn(shape, generator=generator).cuda() for shape in shapes]
    lies = torch.tensor([0, 50, -7, 2**31 - 1, 30, 83], dtype=torch.int32).cuda()
    inputs = Inputs(*tensors[:3], cu_seqlens_q=lies, cu_seqlens_k=lies)
    triton_jvp.jvp(spec, inputs, Tangents(*tensors[3:]), primals=True)
    right = torch.tensor([0, 40, 41, 41, 60, 83], dtype=torch.int32).cuda()
    inputs = inputs._replace(cu_seqlens_q=right, cu_seqlens_k=right)
    results = triton_jvp.jvp(spec, inputs, Tangents(*tensors[3:]), primals=True)
    # The tokens behind the last offset belong to no document.
    return finite(*(each[:83] if each.shape[0] == 91 else each[:, :83] for each in results))


OTHERS: dict[str, Callable[[str], bool]] = {
    **{"merge": merges, "offsets": completes_offsets, "tables": clamps_tables},
    "rotary": rotates,
}


SIZES: dict[str, Any] = {
    **{"batch": 2, "q_len": 300, "kv_len": 500, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "value_dim": 64},
    "dtype": "bfloat16",
}


def block_tables_of_lying_ranges() -> bool:
    """Makes the tables of both sides from ranges with any numbers."""
    random = np.random.default_rng(3)
    ranges = random.integers(-50, 400, (2, 2, 500, 2, 2)).astype(np.int32)
    ranges[:, :, 7], ranges[:, 1, 9, :, 0], ranges[0, 0, 130:280] = 2**31 - 1, -(2**31), (0, 300)
    spec = AttentionSpec(**SIZES, key_ranges_shape=ranges.shape, window=(400, None))
    shown = visible(spec, key_ranges=np.clip(ranges, 0, 300))
    inputs = Inputs(*(torch.zeros(1, device="cuda") for _ in range(3)), key_ranges=torch.from_numpy(ranges).cuda())
    for of_queries in (True, False):
        table, *_ = block_tables.table(spec, inputs, None, of_queries, own_kernels)
        if not same_blocks(*table, shown, of_queries):
            return False
    return True


def same_blocks(partial_count: Any, partial: Any, full_count: Any, full: Any, shown: Any, of_queries: bool) -> bool:
    """Whether a table has exactly the blocks with visible pairs, and as full ones only those that are.

    Of a list it reads what was written alone.
    """
    for row, head, block in np.ndindex(*full_count.shape):
        whole = set(full[row, head, block, : int(full_count[row, head, block])].tolist())
        some = set(partial[row, head, block, : int(partial_count[row, head, block])].tolist())
        for other in range(full.shape[3]):
            q, k = (block, other) if of_queries else (other, block)
            tile = shown[row, head, 128 * q : 128 * q + 128, 128 * k : 128 * k + 128]
            if (other in whole | some) != tile.any() or (other in whole and not tile.all()):
                return False
    return True


def block_states_beyond_an_array() -> bool:
    """Evaluates a mask function whose lookups go beyond its array on both sides."""
    ids = np.random.default_rng(4).integers(0, 2, 100).astype(np.int32)
    spec = AttentionSpec(**SIZES, **functions_of(lambda b, h, q, k, ids: ids[q - 120] == ids[k], None, ids))
    shown = seen_by_function(spec, (ids,))
    states = block_tables.states(spec, [torch.from_numpy(ids).cuda()], torch.device("cuda"), own_kernels)
    tiles = [[shown[0, 0, q : q + 128, k : k + 128] for k in range(0, 500, 128)] for q in range(0, 300, 128)]
    expected = [[int(tile.any()) * (1 + int(tile.all())) for tile in row] for row in tiles]
    return bool(states.cpu()[0, 0].tolist() == expected)


def block_states_of_segments() -> bool:
    """Finds the blocks of equal segments, whose ids come back, and of a band of positions in any order."""
    random = np.random.default_rng(7)
    ids = np.repeat(random.integers(0, 3, (2, 8)), 64, 1).astype(np.int32)
    places = random.permutation(500).astype(np.int32)[None].repeat(2, 0)
    arrays = ids[:, :300], ids[:, :500], places[:, :300], places
    aux = tuple(Aux(array.shape, "int32") for array in arrays)
    for band in ((None, None), (40, 0)):
        count = 2 if band == (None, None) else 4
        spec = AttentionSpec(**SIZES, mask_mod=function_of(True, band, tuple(range(count))), aux=aux[:count])
        shown = seen_by_function(spec, arrays[:count])
        on_gpu = [torch.from_numpy(np.ascontiguousarray(array)).cuda() for array in arrays[:count]]
        states = block_tables.states(spec, on_gpu, torch.device("cuda"), own_kernels).cpu()
        for row, q, k in np.ndindex(2, 3, 4):
            tile = shown[row, 0, 128 * q : 128 * q + 128, 128 * k : 128 * k + 128]
            if int(states[row, 0, q, k]) != int(tile.any()) * (1 + int(tile.all())):
                return False
    return True


def sinks_of_flash4() -> bool:
    """Adds sinks to results of which some rows saw no key, and sums their gradient, dense and packed."""
    generator = torch.Generator().manual_seed(8)
    for rows in ((2,), ()):
        out, dout = (torch.randn(*rows, 67, 4, 72, generator=generator).bfloat16() for _ in range(2))
        lse, dlse = (torch.randn(*rows, 4, 67, generator=generator) for _ in range(2))
        empty = torch.zeros_like(lse, dtype=torch.bool)
        empty[..., ::5] = True
        lse[empty], out.transpose(-2, -3)[empty] = -torch.inf, 0.0
        sinks = torch.randn(4, generator=generator)
        expected = with_sinks(out, lse, sinks)
        actual = flash4_kernel.add_sinks(out.cuda(), lse.cuda(), sinks.cuda())
        ours = flash4_kernel.sink_gradient(sinks.cuda(), *actual, dout.cuda(), dlse.cuda())
        theirs = sink_gradient(sinks, *expected, dout, dlse)
        close = torch.allclose(actual[0].cpu().float(), expected[0].float(), rtol=0.01, atol=1e-3)
        close = close and torch.allclose(actual[1].cpu(), expected[1], atol=1e-5)
        if not (close and torch.allclose(ours.cpu(), theirs, rtol=1e-3, atol=0.02)):
            return False
    return True


def functions_in_kernels() -> bool:
    """Runs a mask and a score function forward and backward; their lookups go beyond the array, too."""
    table = np.random.default_rng(5).random((4, 700)).astype(np.float32)
    ours = functions_of(
        lambda b, h, q, k, table: table[h, k] < 0.8, lambda s, b, h, q, k, table: s + table[h, q - k + 250], table
    )
    spec = AttentionSpec(**SIZES, **ours, needs_backward=True, causal=True)
    generator = torch.Generator("cuda").manual_seed(6)
    shapes = (2, 300, 4, 64), (2, 500, 2, 64), (2, 500, 2, 64)
    q, k, v = (torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    inputs = Inputs(q, k, v, aux0=torch.from_numpy(table).cuda())
    out, lse = flash4.forward(spec, inputs)
    gradients = flash4.backward(spec, inputs, out, lse, torch.ones_like(out), None)
    expected = reference.forward(spec, Inputs(*(tensor.double().cpu().numpy() for tensor in (q, k, v)), aux0=table))[0]
    return finite(out, *gradients[:3]) and bool(np.abs(out.double().cpu().numpy() - expected).max() < 0.05)


def functions_of(mask_mod: Any, score_mod: Any, array: np.ndarray) -> dict[str, Any]:
    """The fields of a spec with functions of one array."""
    trees = trace(mask_mod, score_mod, (array,))
    return {"mask_mod": trees[0], "score_mod": trees[1], "aux": (Aux(array.shape, str(array.dtype)),)}


OF_TRITON: dict[str, Callable[[], bool]] = {"jvp": moves_forward}
"""Those that have no other form on a CPU."""
OF_FLASH4: dict[str, Callable[[], bool]] = {
    "block_tables": block_tables_of_lying_ranges,
    "block_states": block_states_beyond_an_array,
    "segments": block_states_of_segments,
    "sinks": sinks_of_flash4,
    "functions": functions_in_kernels,
}


def finite(*tensors: torch.Tensor) -> bool:
    """Whether no element is NaN or Inf."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def passed(label: str, case: Callable[[], bool]) -> bool:
    """Runs a case until its kernels end, and prints its outcome."""
    try:
        passes = case()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception as error:  # the other cases should run anyway
        print(f"wrong: {label}: {type(error).__name__}: {error}", flush=True)
        return False
    print(f"{'ran' if passes else 'wrong: NaN, Inf, or a write beside the pool'}: {label}", flush=True)
    return passes


if __name__ == "__main__":
    sys.exit(main())
