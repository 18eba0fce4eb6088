"""The section "Time and load" of docs/explanation/reliability.md, from the files of ``benchmarks.soak``.

python -m benchmarks.soak_report            # draws docs/images/soak.png
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import caches, soak_verdict

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
PICTURE = ROOT / "docs/images/soak.png"

HEAD = f"""## Time and load

`python -m benchmarks.soak` runs calls that never repeat: sizes, options, masks, packed offsets, pages, gradients and
refused calls in torch (`eager`); offsets, pages and masks as traced values, and a new program in each 500 calls, in JAX
under `jax.jit` (`jit`). JAX keeps every compiled program without a limit, so the run clears JAX's caches every eighth
reading and compares memory then. A twentieth of each run is warm-up.

A run fails if, in its last half, resident memory grows by more than {soak_verdict.BYTES_PER_CALL} bytes per call (the
smallest Python object), or Python's memory by more than {soak_verdict.BLOCKS_PER_CALL} blocks per call. More is allowed
for two things:

- a new program of JAX: {soak_verdict.PROGRAM_BYTES // 1024} KiB and {soak_verdict.PROGRAM_BLOCKS} blocks. JAX alone
  leaves up to 300 KiB and 80 blocks;
- a new entry of one of our caches: {soak_verdict.ENTRY_BYTES} bytes and {soak_verdict.ENTRY_BLOCKS} blocks. This growth
  ends when the cache is full.

A run also fails if descriptors, threads or handlers grow, if a cache exceeds its bound, or if a call of the last tenth
takes more than {soak_verdict.SLOWER} times as long as one of the first, measured beside a fixed piece of work.
"""

ALLOCATOR = """A driver runs 50 000 random operations of the page allocator beside a small model, and checks every
invariant after each operation: `tests/paged/test_page_allocator_model.py`. The state machine of
`tests/paged/test_page_allocator.py` runs shorter histories that shrink.
"""

CACHES = """### Caches

A test finds every cache in the sources and fails if one has no bound (`tests/repository/test_soak_benchmark.py`).
Entries of a cache without a number are few by their nature, but for one: JAX's calls by callback stay known to the
process, because a compiled program may run at any time.

torch and JAX have caches of their own. oneDNN keeps 1024 compiled kernels: the backward of torch's attention in
bfloat16 on a CPU took 0.6 GiB for them, without attn-core, and then stopped growing.
"""


def stored() -> list[dict[str, Any]]:
    """Reads the runs, by the names of their files."""
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob("soak-*.json"))]


def section() -> str:
    """Returns the section as Markdown; it has the table of caches even without a run."""
    runs = stored()
    parts = [HEAD]
    if runs:
        parts += [_table(runs)]
    if runs and PICTURE.is_file():
        parts += ["![Memory and time of calls over a run](../images/soak.png)\n"]
    parts += [ALLOCATOR, *_serving(), CACHES, _caches()]
    return "\n".join(parts)


def _table(runs: list[dict[str, Any]]) -> str:
    columns = (
        *("mode", "device", "date", "versions", "calls", "seconds", "MiB in the first / last half"),
        *("bytes per call (allowed)", "blocks per call (allowed)", "descriptors", "threads"),
        *("last / first tenth", "verdict"),
    )
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for run in runs:
        found, versions = soak_verdict.figures(run), run["environment"]["versions"]
        shown = ", ".join(f"{name} {versions[name]}" for name in ("torch", "jax") if versions.get(name))
        cells = (
            *(
                run["mode"],
                run["device_name"],
                run["environment"]["date"],
                shown,
                run["calls"],
                f"{run['seconds']:.0f}",
            ),
            " / ".join(f"{size / 2**20:.0f}" for size in found["resident"]),
            f"{found['bytes per call']:.1f} ({found['bytes per call allowed']:.0f})",
            f"{found['blocks per call']:.3f} ({found['blocks per call allowed']:.2f})",
            *(" / ".join(map(str, found[name])) for name in ("descriptors", "threads")),
            f"{found['last / first tenth']:.2f}",
            "; ".join(soak_verdict.faults(run)) or "nothing grows",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, ""])


def _serving() -> list[str]:
    file = RESULTS / "serving-load.json"
    if not file.is_file():
        return []
    run = json.loads(file.read_text(encoding="utf-8"))
    counts = run["counts"]
    cancelled = counts["cancelled while waiting"] + counts["cancelled while running"]
    return [
        f"`python -m benchmarks.serving_load` served {run['requests']} requests from a small pool: {cancelled} were "
        f"cancelled, {counts['preempted']} times a request lost its pages to others, and {counts['forked']} forked "
        f"another's pages. {run['answers']} answers, {len(run['faults'])} faults: each is compared with the answer to "
        "the request alone (`tests/paged/test_serving_load.py`).\n"
    ]


def _caches() -> str:
    by_module: dict[str, list[str]] = {}
    for cache in caches.all_caches():
        by_module.setdefault(cache.module, []).append(f"`{cache.name}`: {cache.bound}")
    rows = (f"| `{module}` | {'; '.join(found)} |" for module, found in by_module.items())
    return "\n".join(["| module | caches, and the most entries or what there is one for |", "|---|---|", *rows, ""])


def figure(runs: list[dict[str, Any]]) -> Any:
    """Draws memory and the time of a call over each run, both as multiples of their median."""
    from statistics import median

    from attn_core.cli.plots import BLUE, ORANGE, empty_figure

    drawing = empty_figure(4.5 * len(runs) + 1, 4)
    for axes, run in zip(drawing.subplots(1, len(runs), squeeze=False)[0], runs, strict=True):
        for name, colour, label in (("resident", BLUE, "resident memory"), ("ratio", ORANGE, "time of a call")):
            values = [point[name] for point in run["points"]]
            middle = median(values)
            style = {"color": colour, "linewidth": 1.6 if name == "resident" else 0.8}
            calls = [point["calls"] / 1000 for point in run["points"]]
            axes.plot(calls, [value / middle for value in values], **style)
            axes.plot([], [], color=colour, label=label)
        axes.set(title=f"{run['mode']}, {run['device_name']}", xlabel="thousand calls", ylabel="multiple of the median")
        axes.set(ylim=(0, 2))
        axes.title.set_fontsize(9)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return drawing


if __name__ == "__main__":
    figure(stored()).savefig(PICTURE, dpi=120)
