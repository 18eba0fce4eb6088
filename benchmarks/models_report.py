"""Writes docs/explanation/whole_models.md and its plots from benchmarks/results/models-*.json.

python -m benchmarks.models_report            # prints the page
python -m benchmarks.models_report --write    # writes the page and the plots; needs no GPU and no framework
python -m benchmarks.models_report --merge models-h200.json later.json --write   # first replaces parts of the result
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS, IMAGES = ROOT / "benchmarks/results", ROOT / "docs/images"
PAGE = ROOT / "docs/explanation/whole_models.md"
OURS = "attn_core"
ORDER = ("eager", "flex_attention", "sdpa", "flash_attention_2", OURS)
Group = dict[str, Any]


def main(arguments: list[str] | None = None) -> None:
    """Prints the page, or writes the page and the plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument(
        "--merge",
        nargs=2,
        metavar=("NAME", "LATER"),
        help="a stored file, and a later run of some parts",
    )
    options = parser.parse_args(arguments)
    if options.merge:
        first, later = RESULTS / options.merge[0], Path(options.merge[1])
        both = merged(*(json.loads(file.read_text(encoding="utf-8")) for file in (first, later)))
        first.write_text(json.dumps(both, indent=1), encoding="utf-8")
    results = stored()
    if not options.write:
        print(page(results))
        return
    for name, result in results.items():
        draw(result, IMAGES / f"{name}.png")
    PAGE.write_text(page(results), encoding="utf-8")


def stored() -> dict[str, dict[str, Any]]:
    """Reads the results by the stem of their file, GPUs first."""
    files = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob("models-*.json"))}
    return dict(sorted(files.items(), key=lambda item: item[1]["environment"]["device"] == "CPU"))


def merged(first: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Returns the first result with the groups of a later run in place of its own ones.

    Raises:
        SystemExit: if the runs differ in the date, the device or a version, because the page names one of each.
    """
    one, other = first["environment"], later["environment"]
    if one["device"] != "CPU":  # the host's number of threads does not matter to a GPU
        other = other | {"threads": one["threads"]}
    if one != other:
        raise SystemExit(f"--merge: the runs differ: {one}, {other}")
    generated = {title_of(group): group for group in (*first["generate"], *later["generate"])}
    trained = {(group["family"], group["mode"]): group for group in (*first["models"], *later["models"])}
    return first | {"generate": list(generated.values()), "models": list(trained.values())}


def steps(result: dict[str, Any]) -> list[tuple[str, Group]]:
    """Returns the groups of prefill and training with their titles.

    flex has groups of its own, beside ours. They join the others of their family and mode if there are any: speeds are
    relative to ours in the same group.
    """
    groups: dict[str, Group] = {}
    for group in result["models"]:
        title = f"{group['family']}, {group['mode']}"
        speeds, failures = relative(group), dict(group["failures"])
        if title in groups:
            speeds, failures = groups[title]["speeds"] | speeds, groups[title]["failures"] | failures
            group = groups[title] | {"errors": group["errors"] | groups[title]["errors"]}
        groups[title] = group | {"speeds": speeds, "failures": failures}
    return list(groups.items())


def relative(group: Group) -> dict[str, float]:
    """Returns how many times as fast ours is as each implementation: medians over the rounds."""
    if OURS not in group["seconds"]:
        return {}
    own = group["seconds"][OURS]
    return {
        name: statistics.median(other / one for one, other in zip(own, seconds, strict=True))
        for name, seconds in group["seconds"].items()
        if name != OURS
    }


def milliseconds(seconds: list[float]) -> str:
    """Returns the median in ms."""
    return f"{statistics.median(seconds) * 1e3:,.1f}"


def title_of(group: Group) -> str:
    """Returns the cache of a group of generate and how it was measured."""
    lengths = ", lengths never seen before" if group.get("new_lengths") else ""
    return f"{group['cache']}, {'compiled' if group['compiled'] else 'not compiled'}{lengths}"


def generate_table(result: dict[str, Any]) -> str:
    """Returns tokens per second of generate as a Markdown table."""
    head = ["| cache | sdpa | attn_core | attn_core beside sdpa | equal tokens |", "|---|---|---|---|---|"]
    lines = []
    for group in result["generate"]:
        tokens = group["rows"] * group["tokens"]
        cells = [title_of(group)]
        for name in ("sdpa", OURS):
            times = group["seconds"].get(name)
            cells.append(f"{tokens / statistics.median(times):,.0f} tokens/s" if times else "failed")
        ratio, equal = relative(group).get("sdpa"), group["equal_tokens"]
        cells += [f"{ratio:.2f} times as fast" if ratio else "", "" if equal is None else f"{equal:.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*head, *lines])


def steps_table(result: dict[str, Any]) -> str:
    """Returns prefill and training as a Markdown table: ours in ms, and its speed beside the others."""
    others = ORDER[:-1]
    head = [
        f"| model | {OURS} | {' | '.join(f'beside {name}' for name in others)} | error | kernels |",
        f"|---|---|{'---|' * len(others)}---|---|",
    ]
    lines = []
    for title, group in steps(result):
        own = group["seconds"].get(OURS)
        cells = [title, f"{milliseconds(own)} ms" if own else "failed"]
        for name in others:
            speed = group["speeds"].get(name)
            cells.append(f"{speed:.2f}" if speed else "–")
        error = group["errors"].get(OURS)
        kernels = dict.fromkeys(label.partition(" ")[0] for label in group["backends"])
        cells += [f"{error:.2f}" if error is not None else "", ", ".join(kernels)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*head, *lines])


def failures(result: dict[str, Any]) -> str:
    """Returns what was refused, failed, was wrong, or was not run, as a Markdown list."""
    found: dict[str, list[str]] = {}
    for title, group in steps(result):
        for name, text in group["failures"].items():
            found.setdefault(f"{name}: {text.splitlines()[0][:160].replace('|', '/')}", []).append(title)
        for name, error in group["errors"].items():
            if error > 2:
                found.setdefault(f"{name}: error {error:.1f} times that of eager", []).append(title)
    for group in result["generate"]:
        for name, text in group["failures"].items():
            found.setdefault(f"{name}: {text.splitlines()[0][:160]}", []).append(f"generate, {group['cache']}")
    lines = [f"- {'; '.join(titles)}: {text}" for text, titles in found.items()]
    return "\n".join([*lines, *(f"- not run: {text}" for text in result["not_run"])]) or "- nothing"


def section(name: str, result: dict[str, Any]) -> str:
    """Returns the part of the page about one device."""
    environment = result["environment"]
    device = environment["device"] if environment["device"] != "CPU" else environment["processor"]
    versions = {"Python": environment["python"], **environment["versions"]}
    tokens = result["models"][0]["tokens"] if result["models"] else 0
    call = result["generate"][0] if result["generate"] else {"rows": 0, "prompt": 0, "tokens": 0}
    return f"""## {device}

Measured on {environment["date"]}: {device}, {result["dtype"]},
{", ".join(f"{package} {version}" for package, version in versions.items() if version)}.

`generate` with Llama-8B shapes: {call["rows"]} prompts of {call["prompt"]} tokens, {call["tokens"]} new tokens each.
The time includes the prompts.

{generate_table(result)}

"equal tokens" is the share of tokens that are the same with both. Random weights give many nearly equal logits, so a
rounding difference soon changes a token in bfloat16, and with it all later ones of the row.

One row of {tokens} tokens. The columns "beside" say how many times as fast attn_core is.

{steps_table(result)}

![Speed of attn_core beside the other implementations](../images/{name}.png)

Refused, failed or not run:

{failures(result)}
"""


def page(results: dict[str, dict[str, Any]]) -> str:
    """Returns docs/explanation/whole_models.md."""
    return f"""# Whole models

This page shows how fast transformers' models run with `attn_implementation="attn_core"` and with transformers' own
implementations. `python -m benchmarks.models_report --write` writes this page from the raw times in
`benchmarks/results`. The models have four layers of the named model's shapes, and random weights. On a CPU they are an
eighth as wide. Implementations took turns, and ratios are medians over rounds.

"error" is the mean error of the result (prefill: hidden states; training: a gradient), divided by the error of `eager`
in the same dtype. Both are measured against `eager` in a wider dtype: float32 for bfloat16, float64 for float32. A dash
means that the implementation refused the model, failed, or was not run; the lists below each plot say why.

```bash
python -m benchmarks.models --json models.json   # on a GPU, or small models without one
```

{chr(10).join(section(name, result) for name, result in results.items())}"""


def draw(result: dict[str, Any], file: Path) -> None:
    """Writes a plot of how many times as fast attn_core is as each implementation.

    Raises:
        SystemExit: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise SystemExit("the plots need matplotlib; pip install 'attn-core[cli]'") from None
    groups = [(title, group["speeds"]) for title, group in reversed(steps(result)) if group["speeds"]]
    for group in reversed(result["generate"]):
        groups.append((f"generate, {title_of(group)}", relative(group)))
    names = [name for name in ORDER[:-1] if any(name in speeds for _, speeds in groups)]
    figure = Figure(figsize=(8, 0.42 * len(groups) + 1.2), layout="constrained")
    axes = figure.subplots()
    colours = {"eager": "#a9c3de", "flex_attention": "#8ab17d", "sdpa": "#35618f", "flash_attention_2": "#6d597a"}
    height = 0.8 / max(1, len(names))
    for at, name in enumerate(names):
        bars = [
            (row + 0.4 - (at + 0.5) * height, speeds[name]) for row, (_, speeds) in enumerate(groups) if name in speeds
        ]
        axes.barh([row for row, _ in bars], [speed for _, speed in bars], height, color=colours[name], label=name)
    axes.axvline(1, color="#c44e00", linewidth=1)
    axes.set_yticks(range(len(groups)), [title for title, _ in groups])
    axes.set(xlabel=f"how many times as fast {OURS} is; right of the line it is faster")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(title="beside", fontsize=8)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
