"""Measures the headline figures on one Hopper GPU: ratios of candidates that take turns in one process.

python -m benchmarks.hopper --json hopper.json                      # measures everything, on an NVIDIA GPU
python -m benchmarks.hopper --json hopper.json --only softcap jax   # some of it
python -m benchmarks.hopper --render hopper.json --junit results.xml --memcheck memcheck.txt --sweep sweep.json
                                                                    # prints the page; needs no GPU
... --render first.json later.json                                  # measures of a later run replace earlier ones
... --render ... --write                                            # benchmarks/results/hopper.json and hopper.md

If a package is missing or a call is refused, its row says "not run" and the reason. torch is measured first, because
JAX takes three quarters of the GPU's memory when it starts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.hopper_report import MEASURES, combined, figures_of, page
from benchmarks.measure import environment

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("triton", "flash-attn", "tokenspeed-fa3", "flash-attn-4", "xformers", "sageattention", "tokamax", "fa4-jax")


def measures() -> dict[str, Callable[[], list[Any]]]:
    """Returns the measures in the order in which they run; each returns groups."""
    from benchmarks import hopper_checks, hopper_torch

    def jax_beside_torch() -> list[Any]:
        from benchmarks import hopper_jax

        return hopper_jax.jax_beside_torch()

    def callback_lane() -> list[Any]:
        from benchmarks import hopper_lane

        return hopper_lane.callback_lane()

    def compiled_lane() -> list[Any]:
        from benchmarks import hopper_lane

        return hopper_lane.compiled()

    def jax_backends() -> list[Any]:
        from benchmarks import hopper_jax_backends

        return hopper_jax_backends.by_size()

    def training_steps() -> list[Any]:
        from benchmarks import hopper_training

        return hopper_training.training_steps()

    def paged() -> list[Any]:
        from benchmarks import hopper_paged

        return hopper_paged.paged()

    return {
        "memory": hopper_checks.memory,
        "attention": hopper_torch.attention_beside_kernels,
        "softcap": hopper_torch.softcap_speed,
        "softcap_error": hopper_checks.softcap_error,
        "small": hopper_torch.small_calls,
        "dropins": hopper_torch.dropins_beside_attention,
        "jax": jax_beside_torch,
        "compiled": compiled_lane,
        "callback": callback_lane,
        "training": training_steps,
        "jax_backends": jax_backends,
        "paged": paged,
    }


def measured(names: list[str], target: Path) -> dict[str, Any]:
    """Runs the named measures, and writes the result after each one, so that a later crash loses nothing."""
    result: dict[str, Any] = {"environment": gpu_environment(), "measures": {}}
    for name, run in measures().items():
        if name not in names:
            continue
        print(f"{MEASURES[name]} ...", flush=True)
        try:
            groups = [group.as_json() for group in run()]
            result["measures"][name] = {"groups": groups, "error": None}
        except Exception as error:  # the other measures are still useful
            result["measures"][name] = {"groups": [], "error": f"failed: {type(error).__name__}: {error}"}
            print(result["measures"][name]["error"], flush=True)
        target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def gpu_environment() -> dict[str, Any]:
    """Returns ``environment()`` with the GPU and the packages of its kernels."""
    import torch

    where = environment()
    for package in PACKAGES:
        try:
            where["versions"][package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            where["versions"][package] = None
    where["versions"] |= {"CUDA": torch.version.cuda, "cuDNN": torch.backends.cudnn.version(), "driver": _driver()}
    where["device"] = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}"
    return where


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--json", type=Path, metavar="OUT", help="measure, and write the raw result here")
    what.add_argument(
        "--render",
        type=Path,
        nargs="+",
        metavar="JSON",
        help="print the page; later files replace measures of earlier ones",
    )
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES), help="run only these measures")
    parser.add_argument(
        "--junit",
        type=Path,
        nargs="+",
        default=[],
        metavar="XML",
        help="pytest's JUnit XML; of several files, the last counts",
    )
    parser.add_argument("--memcheck", type=Path, metavar="LOG", help="the log of compute-sanitizer")
    parser.add_argument("--sweep", type=Path, metavar="JSON", help="the sweep through all backends")
    parser.add_argument(
        "--write", action="store_true", help="with --render: also write hopper.json and hopper.md in benchmarks/results"
    )
    return parser


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Measures or renders. Exit code: 0 if ``all_well``, otherwise 1; 2 if there is no GPU to measure on."""
    options = _parser().parse_args(arguments)
    if options.json is not None:
        import torch

        if not torch.cuda.is_available():
            print(f"benchmarks.hopper needs an NVIDIA GPU: torch {torch.__version__} sees none", file=sys.stderr)
            return 2
        result = measured(options.only, options.json)
    else:
        result = combined(options.render, options.junit, options.memcheck, options.sweep)
    text = page(result)
    print(text)
    if options.render is not None and options.write:
        (root / "benchmarks/results/hopper.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        (root / "benchmarks/results/hopper.md").write_text(text, encoding="utf-8")
    return 0 if all_well(result) else 1


def all_well(result: dict[str, Any]) -> bool:
    """Returns whether every goal was met, and no measure, test or memcheck failed, among those that were run."""
    missed = any(figure["held"] is False for _, figure in figures_of(result))
    errors = any(found["error"] for found in result["measures"].values())
    failed = bool((result.get("tests") or {}).get("failed"))
    memcheck = result.get("memcheck")
    unclean = memcheck is not None and memcheck["errors"] != sum(memcheck["api_calls"].values())
    return not (missed or errors or failed or unclean)


if __name__ == "__main__":
    sys.exit(main())
