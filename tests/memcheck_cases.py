"""A few small calls through every backend that is available here, to be run under a tool that watches memory:

compute-sanitizer --tool memcheck --error-exitcode 1 python tests/memcheck_cases.py

Prints what ran and what did not, with its reason; exit code 1 only when a call raises or gives NaN or Inf. Without an
NVIDIA GPU nothing runs. ``--only NAME ...`` runs these backends alone.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a file, the project need not be installed

import torch
from small_calls import KINDS, most_it_can, small_call, torch_backends, why_not


def main(arguments: list[str] | None = None) -> int:
    """Runs every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these backends alone")
    only = parser.parse_args(arguments).only
    if not torch.cuda.is_available():
        print(f"not run: all cases: needs an NVIDIA GPU, torch {torch.__version__} sees none")
        print("memcheck cases: 0 ran")
        return 0
    ran, wrong = 0, 0
    for name in torch_backends():
        for kind in KINDS if only is None or name in only else ():
            outcome = run_case(name, kind)
            ran += outcome is not None
            wrong += outcome is False
    print(f"memcheck cases: {ran} ran, {wrong} wrong")
    return 1 if wrong else 0


def run_case(backend: str, kind: str) -> bool | None:
    """Whether a case went well; None where the backend cannot run it."""
    call = small_call(kind)
    able = most_it_can(call, backend)
    if able is None:
        print(f"not run: {kind}: {why_not(call, backend)}", flush=True)
        return None
    trained = able[0]
    label = f"{backend}, {kind}, {'forward and backward' if trained else 'forward'}"
    try:
        results = call.run(backend, trained)
        torch.cuda.synchronize()
    except Exception as error:  # the other cases are worth having
        print(f"wrong: {label}: {type(error).__name__}: {error}", flush=True)
        return False
    finite = all(bool(tensor.isfinite().all()) for tensor in results)
    print(f"{'ran' if finite else 'wrong: NaN or Inf'}: {label}", flush=True)
    return finite


if __name__ == "__main__":
    sys.exit(main())
