"""A few small calls through every backend that is available here, to be run under a tool that watches memory:

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/memcheck_cases.py

The tool knows the driver's allocations, not tensors: without that variable torch cuts many tensors out of one, and what
is read beside a tensor is seen only where it lies outside of them all.

Prints what ran and what did not, with its reason; exit code 1 only when a call raises, gives NaN or Inf, or writes
beside a pool of pages. Without an NVIDIA GPU nothing runs. ``--only NAME ...`` runs these backends alone;
``append_kv``, ``merge``, ``offsets`` and ``tables`` are names of our other Triton kernels, and ``--own`` means all of
our kernels.
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

import small_paged_calls as paged
import torch
from small_calls import KINDS, most_it_can, small_call, torch_backends, why_not

from attn_core import PagedKV
from attn_core.backends.shared import pools
from attn_core.call.trailing_tokens import tail_of
from attn_core.context_parallel.on_torch.merge import merge
from attn_core.errors import SpecError
from torch_frontend.dispatch import offsets

APPEND = "append_kv"
OWN = ("triton_splitkv", APPEND, "merge", "offsets", "tables")
"""Everything that runs a kernel of this project."""


def main(arguments: list[str] | None = None) -> int:
    """Runs every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these backends alone")
    parser.add_argument("--own", action="store_true", help="kernels of this project alone")
    parsed = parser.parse_args(arguments)
    only = OWN if parsed.own else parsed.only
    if not torch.cuda.is_available():
        print(f"not run: all cases: needs an NVIDIA GPU, torch {torch.__version__} sees none")
        print("memcheck cases: 0 ran")
        return 0
    requested = [(run_case, name, kind) for name in torch_backends() for kind in KINDS]
    requested += [(run_paged, name, kind) for name in paged.paged_backends() for kind in paged.KINDS]
    requested += [(run_append, APPEND, kind) for kind in paged.KINDS]
    requested += [(run_other, name, name) for name in OTHERS]
    outcomes = [case(name, kind) for case, name, kind in requested if only is None or name in only]
    ran, wrong = len(outcomes) - outcomes.count(None), outcomes.count(False)
    print(f"memcheck cases: {ran} ran, {wrong} wrong")
    return 1 if wrong else 0


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
    safe_table, safe_lengths = pools.safe_tables(spec, inputs)
    expected = table.cpu().clamp(0, paged.PAGES - 1), lengths.cpu().clamp(0, width * page_size)
    return torch.equal(safe_table.cpu(), expected[0]) and torch.equal(safe_lengths.cpu(), expected[1])


OTHERS: dict[str, Callable[[str], bool]] = {"merge": merges, "offsets": completes_offsets, "tables": clamps_tables}


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
