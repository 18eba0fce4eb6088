"""A few small calls through every backend that is available here, to be run under a tool that watches memory:

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/memcheck_cases.py

The tool knows the driver's allocations, not tensors: without that variable torch cuts many tensors out of one, and what
is read beside a tensor is seen only where it lies outside of them all.

Prints what ran and what did not, with its reason; exit code 1 only when a call raises, gives NaN or Inf, or writes
beside a pool of pages. Without an NVIDIA GPU nothing runs. ``--only NAME ...`` runs these backends (and ``append_kv``)
alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]  # run as a file, the project need not be installed

import small_paged_calls as paged
import torch
from small_calls import KINDS, most_it_can, small_call, torch_backends, why_not

from attn_core.errors import SpecError

APPEND = "append_kv"


def main(arguments: list[str] | None = None) -> int:
    """Runs every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these backends alone")
    only = parser.parse_args(arguments).only
    if not torch.cuda.is_available():
        print(f"not run: all cases: needs an NVIDIA GPU, torch {torch.__version__} sees none")
        print("memcheck cases: 0 ran")
        return 0
    requested = [(run_case, name, kind) for name in torch_backends() for kind in KINDS]
    requested += [(run_paged, name, kind) for name in paged.paged_backends() for kind in paged.KINDS]
    requested += [(run_append, APPEND, kind) for kind in paged.KINDS]
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
