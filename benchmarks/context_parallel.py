"""Context parallelism on several GPUs of one host: the page's table from what the two benchmarks wrote.

torchrun --nproc-per-node 2 -m benchmarks.context_torch --json torch.json      # on the GPUs
python -m benchmarks.context_jax --json jax.json
python -m benchmarks.context_parallel torch.json jax.json                      # prints the section; needs no GPU
... --write                                                                    # docs/context_parallel.md, results/

Of several files of one framework a later one replaces the measures that it has as well.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE, RESULTS = ROOT / "docs" / "context_parallel.md", ROOT / "benchmarks" / "results" / "context-parallel.json"
HEADING = "## Measured"
GOALS = {
    (8192, 2): (0.85, 0.90, ("all_gather", "ulysses")),
    (16384, 2): (0.92, 0.94, ("all_gather", "ulysses")),
    (32768, 2): (0.90, 0.92, ("ring",)),
    (8192, 4): (0.86, 0.90, ("all_gather", "ulysses")),
    (16384, 4): (0.92, 0.94, ("all_gather", "ulysses")),
    (32768, 4): (0.88, 0.92, ("ring",)),
}
"""By tokens of a rank and ranks: the least efficiency forward, and with backward, of the best of these strategies."""
MEASURES = ("speed", "errors", "peers", "long")
ONE = "one GPU"


def main(arguments: list[str] | None = None) -> None:
    """Prints the section, or writes it into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    found = combined([json.loads(path.read_text(encoding="utf-8")) for path in options.files])
    text = section(found)
    if not options.write:
        print(text)
        return
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(in_page(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")


def combined(files: list[dict[str, Any]]) -> dict[str, Any]:
    """``{framework: measures}`` of files; each measure with where it was made."""
    found: dict[str, Any] = {}
    for file in files:
        of = found.setdefault(file["framework"], {"world": file["world"]})
        for name in MEASURES:
            if file.get(name):
                of[name] = {"environment": file.get("environment"), "rows": file[name]}
    return found


def in_page(page: str, text: str) -> str:
    """The page with the section in place of the one that it has."""
    before, _, rest = page.partition(f"{HEADING}\n")
    _, heading, after = rest.partition("\n## ")
    return f"{before}{text.rstrip()}\n{heading}{after}"


def section(found: dict[str, Any]) -> str:
    """The section "Measured"."""
    torch = found.get("torch", {})
    speed = torch.get("speed")
    lines = [HEADING, "", "Written by `python -m benchmarks.context_parallel` from what the benchmarks wrote.", ""]
    if speed:
        lines += _head(speed, torch["world"])
        for row in speed["rows"]:
            lines += _speed(row, torch["world"], found)
    for name, write in (("peers", _peers), ("errors", _errors), ("long", _long)):
        if torch.get(name):
            lines += write(torch[name]["rows"], speed["rows"] if speed else [])
    return "\n".join(lines) + "\n"


def _head(speed: dict[str, Any], world: int) -> list[str]:
    where = speed["environment"]
    made = "its versions were not written down" if where is None else f"measured on {where['date']}, {_versions(where)}"
    return [
        f"{world} x NVIDIA H200 of one host, NVLink multicast off; {made}. One causal row of bfloat16, heads 32/8, "
        "head_dim 128. E is the time of one GPU with the whole row over that of the ranks, divided by their number; "
        "the backend named is that of one GPU, and of a strategy whose every tile it can run; else the next that can. "
        "Medians over rounds in which the candidates took turns; the slowest rank counts. "
        '"waiting" is how much longer a call takes than without anything being sent.',
        "",
    ]


def _versions(where: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version)


def _speed(row: dict[str, Any], world: int, found: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [f"Not run: {row['error']}", ""]
    words = list(row["seconds"])
    backend = row["notes"][words[0]].get(ONE, ""), row["notes"][words[-1]].get(ONE, "")
    lines = [f"### {row['shard']} tokens a rank", "", f"Backend: {backend[0]} forward, {backend[1]} with backward.", ""]
    lines += [
        "| | " + " | ".join(f"{word}, ms | E | waiting, ms | JAX, ms" for word in words) + " | beyond inputs, GB |"
    ]
    lines += ["|---" * (2 + 4 * len(words)) + "|"]
    names = [name for name in row["seconds"][words[0]] if not name.endswith("nothing sent")]
    for name in names:
        cells = [cell for word in words for cell in _cells(row, word, name, world, found)]
        memory = row["memory"][words[-1]].get(name)
        lines.append(f"| {name} | {' | '.join(cells)} | {'' if memory is None else f'{memory / 1e9:.2f}'} |")
    return [*lines, "", *_verdict(row, words, world), ""]


def _cells(row: dict[str, Any], word: str, name: str, world: int, found: dict[str, Any]) -> Iterator[str]:
    seconds = row["seconds"][word]
    if name not in seconds:
        yield from ("not run", "", "", "")
        return
    yield _ms(seconds[name])
    yield "" if name == ONE else f"{_efficiency(seconds, name, world):.3f}"
    silent = seconds.get(f"{name}, nothing sent")
    yield "" if silent is None else f"{1e3 * (statistics.median(seconds[name]) - statistics.median(silent)):.2f}"
    jax = next((other for other in _rows(found, "jax", "speed") if other.get("shard") == row["shard"]), {})
    times = jax.get("seconds", {}).get(word, {}).get(name)
    yield "" if times is None else _ms(times)


def _rows(found: dict[str, Any], framework: str, measure: str) -> list[dict[str, Any]]:
    return found.get(framework, {}).get(measure, {}).get("rows", [])  # type: ignore[no-any-return]


def _ms(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.2f}"


def _efficiency(seconds: dict[str, list[float]], name: str, world: int) -> float:
    pairs = zip(seconds[ONE], seconds[name], strict=True)
    return statistics.median(one / (world * several) for one, several in pairs)


def _verdict(row: dict[str, Any], words: list[str], world: int) -> Iterator[str]:
    goals = GOALS.get((row["shard"], world))
    if goals is None:
        return
    *least, strategies = goals
    for word, goal in zip(words, least, strict=True):
        seconds = row["seconds"][word]
        able = [name for name in seconds if name.startswith(strategies) and not name.endswith("nothing sent")]
        best = max((_efficiency(seconds, name, world) for name in able), default=0.0)
        verdict = "met" if best >= goal else "missed"
        yield f"- {word}, {' or '.join(strategies)}: E {best:.3f}, goal >= {goal}: {verdict}"


def _peers(rows: list[dict[str, Any]], speed: list[dict[str, Any]]) -> list[str]:
    lines = [
        "### Beside torch's own context_parallel",
        "",
        "Of cuDNN's attention, with k and v copied for every head.",
        "",
    ]
    lines += ["| tokens a rank | | forward, ms | forward + backward, ms |", "|---|---|---|---|"]
    for row in rows:
        if "error" in row:
            lines.append(f"| | not run: {row['error']} | | |")
            continue
        ours = next((other["seconds"] for other in speed if other.get("shard") == row["shard"]), {})
        for seconds in (row["seconds"], ours):
            for name in seconds.get("forward", {}):
                if name != ONE and not name.endswith("nothing sent"):
                    cells = " | ".join(_ms(seconds[word][name]) if name in seconds[word] else "" for word in seconds)
                    lines.append(f"| {row['shard']} | {name} | {cells} |")
    return [*lines, ""]


def _errors(rows: list[dict[str, Any]], speed: list[dict[str, Any]]) -> list[str]:
    failed = [row["error"].splitlines()[0] for row in rows if "error" in row]
    if failed:
        return ["### Errors", "", *(f"Not run: {why}" for why in failed), ""]
    lines = ["### Errors", "", "Against float64, over those of one GPU with the same backend: mean, largest.", ""]
    lines += ["| | backend | out | dq | dk | dv |", "|---|---|---|---|---|---|"]
    for row in (case for part in rows for case in part.get("found", [])):
        ratios = (
            " ".join(f"{each['several'][what] / each['one'][what]:.2f}" for what in ("mean", "max"))
            for each in row["errors"].values()
        )
        lines.append(f"| {row['candidate']}, {row['case']} | {row['backend']} | {' | '.join(ratios)} |")
    return [*lines, ""]


def _long(rows: list[dict[str, Any]], speed: list[dict[str, Any]]) -> list[str]:
    lines = ["### Long rows", "", "A forward in a zigzag ring; an element of a late row is compared with float64.", ""]
    lines += ["| tokens | seconds | GB a rank beyond inputs | largest error |", "|---|---|---|---|"]
    for row in rows:
        if "error" in row:
            lines.append(f"| not run: {row['error']} | | | |")
        else:
            memory, error = row["bytes beyond inputs"] / 1e9, row["largest error of a row"]
            lines.append(f"| {row['tokens']} | {row['seconds']:.2f} | {memory:.1f} | {error:.1e} |")
    return [*lines, ""]


if __name__ == "__main__":
    main()
