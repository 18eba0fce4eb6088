"""The tables of pages: each function turns a file of raw times into Markdown. Needs no framework and no GPU.

``benchmarks.report`` puts them into pages, and the program that measures prints its own.
"""

from __future__ import annotations

import statistics

from benchmarks.measure import Result, Row, dates, median_ratio, medians

# Shared


def lines_of(head: list[str], rows: list[list[str]]) -> str:
    """Returns a Markdown table."""
    rule = "|---" * len(head) + "|"
    return "\n".join([_line(head), rule, *map(_line, rows)])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def versions_of(result: Result, python: bool = True) -> str:
    """Returns the versions of packages, without those that are not installed."""
    where = result["environment"]
    versions = {"Python": where["python"], **where["versions"]} if python else where["versions"]
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def measured_on(result: Result) -> str:
    """Returns the date, the device and the versions of a result as a sentence."""
    device = result["environment"]["processor"] if result["device"] == "cpu" else result["device"]
    dtype = f", {result['dtype'].removeprefix('torch.')}" if "dtype" in result else ""
    return f"Measured on {dates(result)}: {device}{dtype}, {versions_of(result, python=bool(dtype))}."


def rows_of(result: Result, call: str) -> dict[str, Row]:
    """Returns the rows of a call by what they measure."""
    return {row.get("what", ""): row for row in result["calls"] if row["call"] == call}


# One GPU


def speeds(result: Result) -> str:
    """Returns the median time of every candidate of ``benchmarks.gpu``, and its TFLOP/s if the operations are known."""
    rows = []
    for row in result["calls"]:
        for name, seconds in medians(row["seconds"]).items():
            rate = f"{row['flops'] / seconds / 1e12:,.0f}" if "flops" in row else ""
            rows.append([row["call"], row["what"], name, f"{1e6 * seconds:,.1f}", rate])
    return lines_of(["call", "", "candidate", "median µs", "TFLOP/s"], rows)


def jax_calls(result: Result) -> str:
    """Returns calls in both frameworks, and beside other packages."""
    calls = result["calls"]
    rows = []
    for row in calls:
        times = [f"{1e3 * statistics.median(row['seconds'][name]):.3f}" for name in ("torch", "jax")]
        rows.append(
            [row["call"], row["what"], *times, f"{median_ratio(row['seconds'], 'jax', 'torch'):.2f}", row["lane"]]
        )
    launched = sum(row["lane"] != "callback" for row in calls)
    parts = [
        lines_of(["call", "", "torch, ms", "JAX, ms", "JAX beside torch", "reached by"], rows),
        f"{launched} of {len(calls)} calls use no callback into Python.",
        *peers(calls),
    ]
    return "\n\n".join(parts)


def peers(calls: list[Row]) -> list[str]:
    """Returns a table of other packages' times beside ours in JAX, and the calls that they do not take."""
    rows = [row for row in calls if "left_out" in row]
    names = list(dict.fromkeys(name for row in rows for name in row["seconds"] if name not in ("torch", "jax")))
    lines = []
    for row in rows:
        cells = [row["call"], row["what"], f"{1e3 * statistics.median(row['seconds']['jax']):.3f}"]
        for name in names:
            seconds = row["seconds"].get(name)
            ratio = median_ratio(row["seconds"], "jax", name) if seconds else 0.0
            cells.append(f"{1e3 * statistics.median(seconds):.3f} (ours {ratio:.2f} times as fast)" if seconds else "")
        lines.append(cells)
    reasons: dict[str, list[str]] = {}
    for row in rows:
        for name, reason in row["left_out"].items():
            reasons.setdefault(f"{name}: {reason.splitlines()[0]}", []).append(f"{row['call']} ({row['what']})")
    table = [lines_of(["call", "", "ours, ms", *(f"{name}, ms" for name in names)], lines)] if names else []
    reason_lines = "\n".join(f"- {reason}: {'; '.join(where)}" for reason, where in reasons.items())
    return [*table, *([reason_lines] if reason_lines else [])]


PAGE_RATES = {
    **{f"{drafts} drafts": 2.5 for drafts in (2, 4, 8, 16)},
    "one sequence of 65536": 3.0,
    "one kv head": 2.5,
    "uneven lengths": 3.3,
}
"""Goals for TB/s."""
PAGE_RATIOS = (
    ("64 x 8192, pages in", "float8_e4m3fn", "bfloat16", 1.7),
    ("64 x 8192, pages in", "int8", "bfloat16", 1.7),
    ("64 x 8192, pages in", "int4", "bfloat16", 2.4),
    ("append of 64 tokens, 100 in a CUDA graph", "rotated, float8_e4m3fn", "plain", 1 / 1.15),
    ("flash_attn_func, 1 x 64 tokens", "flash_attn_func", "flash-attn 2", 1.0),
    ("a cache of 16 x 6000", "flash_attn_with_kvcache", "flash-attn 2", 1.0),
    ("a cache of 16 x 6000", "flash_attn_with_kvcache", "FlashAttention-3", 1.0),
    ("a cache of 128 x 2048", "flash_attn_with_kvcache", "flash-attn 2", 1.0),
    ("a cache of 128 x 2048", "flash_attn_with_kvcache", "FlashAttention-3", 1.0),
)
"""Goals for the speed of a candidate beside another one."""


def pages(result: Result) -> str:
    """Returns the times and rates of ``benchmarks.pages``, and its goals."""
    rows, goals = [], []
    for row in result["calls"]:
        for name, seconds in medians(row["seconds"]).items():
            read = row.get("read", {}).get(name, row.get("bytes"))
            rate = "" if read is None else f"{read / seconds / 1e12:.2f}"
            rows.append([row["call"], name, f"{1e6 * seconds:.0f}", rate])
    for call, goal in PAGE_RATES.items():
        for row in rows_of(result, call).values():
            rate = f"{row['bytes'] / statistics.median(row['seconds']['attention']) / 1e12:.2f}"
            goals.append([call, f">= {goal} TB/s", rate])
    for call, name, beside, least in PAGE_RATIOS:
        for row in rows_of(result, call).values():
            if {name, beside} <= set(row["seconds"]):
                times = f"{median_ratio(row['seconds'], name, beside):.2f} times as fast"
                goals.append([f"{call}: {name} beside {beside}", f">= {least:.2f}", times])
    return f"{lines_of(['call', '', 'µs', 'TB/s'], rows)}\n\n{lines_of(['goal', '', ''], goals)}"


WORK = 4 * 32 * 128
"""Floating-point operations of a forward per visible pair; with gradients 3.5 times as many."""
GOALS = {"plain": 0.85, "FlexAttention": 1.5}
"""Times the speed of kernels without a mask, and of torch's FlexAttention."""
IN_A_ROW = {"forward": 50, "training": 10}
"""The calls that a candidate named "many" of ``benchmarks.masks`` makes before it waits."""
PLAIN_PAIRS = 8192 * 8193 // 2
"""The visible pairs of the call without a mask."""
ON_DEVICE = "many, ranges on the device"
OTHERS = {
    "ranges on the device": ("beside the same ranges on the device", "attention"),
    "FlexAttention": ("beside FlexAttention", "attention"),
    "a dense mask": ("beside a dense mask", "attention"),
    "many": ("JAX beside torch, in a row", "many in jax"),
    "jax.nn, a dense mask": ("JAX beside jax.nn with a dense mask", "jax"),
}
"""The other candidates of a row: the title of their column, and our candidate beside them."""
CONSTRUCTORS = {
    "16 completions of 512 on a prompt of 4096": "shared_prefix(4096, [512] * 16)",
    "tree of depth 4, 8320 tokens": "tree(parents)",
    "prefix-LM, half of 8192": "prefix_lm([4096], 8192)",
    "16 images of 256 in 8192": "blocks(np.arange(0, 8192, 256), [False, True] * 16, 8192)",
    "block diffusion, 32 of 4096": "block_diffusion(4096, 32)",
    "64 global tokens and a window of 1024": "global_and_window(64, (1024, 1024), 8192)",
}
"""The calls of ``attn_core.masks`` that ``benchmarks.masks`` times, by their names."""


def gallery(result: Result) -> str:
    """Returns the constructor and the speeds of each mask, for the page of masks."""
    where = f"{result['device']}, {result['environment']['date']}"
    head = [where, "forward", "beside FlexAttention", "with gradients", "beside FlexAttention", "beside a dense mask"]
    rows = []
    for name, constructor in CONSTRUCTORS.items():
        by_what = rows_of(result, name)
        cells = [f"`{constructor}`"]
        for row in (by_what["forward"], by_what["training"]):
            cells += [f"{_tflops(row, 'attention'):.0f} TFLOP/s", f"{_times(row, 'FlexAttention'):.2f}"]
        rows.append([*cells, f"{_times(by_what['training'], 'a dense mask'):.1f}"])
    return lines_of(head, rows)


def masks(result: Result) -> str:
    """Returns the speeds of masks and score functions, forward and with gradients."""
    parts, met = [], dict.fromkeys(GOALS, 0)
    for what in ("forward", "training"):
        plain, *rest = (row for row in result["calls"] if row["what"] == what)
        name, *_ = (kernel for kernel in ("flash3", "flash4") if f"many {kernel}" in plain["seconds"])
        more = [other for other, (_, ours) in OTHERS.items() if any(_has(row, other, ours) for row in rest)]
        titles = ["forward and gradients" if what == "training" else "forward", "TFLOP/s", "in a row"]
        titles.append(f"beside {name}, causal, {_tflops(plain, f'many {name}'):.0f}, in a row")
        rows = []
        for row in rest:
            beside = median_ratio(row["seconds"], "many beside it", "many, causal") * row["pairs"] / PLAIN_PAIRS
            ratios = {"plain": beside} | {other: _times(row, other) for other in more}
            for goal, least in GOALS.items():
                met[goal] += (ratios[goal] or 0) >= least
            cells = [f"{_tflops(row, candidate):.0f}" for candidate in ("attention", "many beside it")]
            rows.append([row["call"], *cells, *("" if each is None else f"{each:.2f}" for each in ratios.values())])
        parts.append(lines_of([*titles, *(OTHERS[other][0] for other in more)], rows))
        if _has(plain, "many flash3", "many flash4"):
            times = median_ratio(plain["seconds"], "many flash4", "many flash3")
            parts.append(f"Without a mask, causal: flash4 runs its forward at {times:.2f} of flash3's speed.")
    timed = [row for row in result["calls"] if _has(row, "many", ON_DEVICE)]
    share = statistics.median(1 - 1 / median_ratio(row["seconds"], "many", ON_DEVICE) for row in timed)
    count = sum(row["call"] != "causal, 8192" for row in result["calls"])
    parts.append(
        f"Ranges in numpy keep their block tables. Of ranges on the device a forward makes them every time, which is "
        f"{100 * share:.0f} % of its time (median of 50 calls in a row; the goal is 5 %). "
        f"{met['plain']} of {count} rows reach {GOALS['plain']} of the kernels without a mask, and "
        f"{met['FlexAttention']} of {count} are {GOALS['FlexAttention']} times as fast as FlexAttention."
    )
    return "\n\n".join(parts)


def _has(row: Row, *names: str) -> bool:
    return all(name in row["seconds"] for name in names)


def _tflops(row: Row, name: str) -> float:
    """TFLOP/s, of visible pairs alone."""
    calls = IN_A_ROW[row["what"]] if name.startswith("many") else 1
    work = (3.5 if row["what"] == "training" else 1.0) * calls * WORK * row["pairs"]
    return work / statistics.median(row["seconds"][name]) / 1e12


def _times(row: Row, other: str) -> float | None:
    """How many times as fast as another candidate ours is; None if one of them was not timed."""
    ours = OTHERS[other][1]
    if other == "many" and ON_DEVICE in row["seconds"]:
        other = ON_DEVICE  # a program of JAX makes its block tables in each call
    return median_ratio(row["seconds"], ours, other) if _has(row, other, ours) else None


# Calls beside their rivals

BEHIND = 0.95
"""A call is behind if the rival's time is less than this share of ours."""


def small_calls(result: Result) -> str:
    """Returns one table for each set of shapes that have the same cases; cells are ours / the rival's microseconds."""
    by_shape: dict[str, dict[str, Row]] = {}
    for row in result["calls"]:
        by_shape.setdefault(row["what"], {})[row["call"]] = row
    groups: dict[tuple[str, ...], list[str]] = {}
    for shape, of_shape in by_shape.items():
        groups.setdefault(tuple(of_shape), []).append(shape)
    tables = []
    for cases, shapes in groups.items():
        rows = []
        for case in cases:
            times = [medians(by_shape[shape][case]["seconds"]) for shape in shapes]
            cells = [f"{1e6 * each['attention']:.0f} / {1e6 * each['rival']:.0f}" for each in times]
            rows.append([case, by_shape[shapes[0]][case]["rival"], *cells])
        tables.append(lines_of(["call", "beside", *shapes], rows))
    return "\n\n".join(tables)


def drawn(result: Result) -> str:
    """Returns the geometric means of F.sdpa's time over ours, eager and in a graph, and a row for each call behind.

    A call is behind if it is on our tensors, with the tokens first, beside F.sdpa on its own, with the heads first. The
    other two pairs have both sides in one layout; a result that was stored before has no such times.
    """
    ours, sdpa = "attention", "F.sdpa"
    pairs = {
        "": (ours, sdpa),
        "tokens first": (ours, f"{sdpa}, tokens first"),
        "heads first": (f"{ours}, heads first", sdpa),
    }
    columns = {(pair, how): each for pair, each in pairs.items() for how in ("eager", "in a graph")}
    head = ["call", "attention", "F.sdpa", *(", ".join(filter(None, column)) for column in columns), "by name"]
    parts = []
    for what in ("forward", "training"):
        rows, found = [], {column: [] for column in columns}
        for row in (each for each in result["calls"] if each["what"] == what):
            times = {name: 1e6 * seconds for name, seconds in medians(row["seconds"]).items()}
            cells, slower = [], False
            for (pair, how), names in columns.items():
                one, other = (times.get(name if how == "eager" else f"{name}, {how}") for name in names)
                if one is None or other is None:
                    cells.append("")
                    continue
                found[pair, how].append(other / one)
                cells.append(f"{other / one:.2f}: {one:.0f} / {other:.0f}")
                slower |= pair == "" and other / one < BEHIND
            if slower:
                named = sorted((time, name) for name, time in times.items() if not name.startswith((ours, sdpa)))
                others = ", ".join(f"{name} {time:.0f}" for time, name in named)
                rows.append([row["call"], row["backend"], row["kernel of F.sdpa"], *cells, others])
        means = [f"{name} {_of_ratios(ratios)}" for name, ratios in zip(head[3:], found.values()) if ratios]
        parts += [f"{what}, F.sdpa's time over ours: {'; '.join(means)}.", lines_of(head, rows)]
    return "\n\n".join(parts)


def _of_ratios(ratios: list[float]) -> str:
    """Returns the geometric mean, the worst, and how many are below BEHIND."""
    mean, behind = statistics.geometric_mean(ratios), sum(ratio < BEHIND for ratio in ratios)
    return f"{mean:.3f}, worst {min(ratios):.2f}, {behind} of {len(ratios)} below {BEHIND}"


def cpu(result: Result) -> str:
    """Returns where and when the figures of a CPU were measured, and the figures."""
    where = f"{result['environment']['processor']}, {result['cores']} cores, {versions_of(result)}"
    rows = []
    for figure in result["figures"]:
        each = ", ".join(f"{name} {value:,.1f} µs" for name, value in figure["median_microseconds"].items())
        rows.append([figure["name"], f"{figure['value']:.2f} {figure['unit']}", figure["goal"] or "", each])
    table = lines_of(["figure", "measured", "goal", "medians"], rows)
    return f"Measured on {result['environment']['date']}: {where}.\n\n{table}"


# Whole models

PROMPT, COMPLETIONS, LENGTH = 2048, 8, 512
FORMS = ("shared", "copied")


def grpo(result: Result) -> str:
    """Returns a training step with the prompt once and with a copy for every completion."""
    shared, copied = (result["forms"][form] for form in FORMS)
    rows = [
        [name, str(form["tokens"]), f"{statistics.median(form['seconds']):.3g}", f"{form['peak_bytes'] / 2**30:.2f}"]
        for name, form in (("the prompt once", shared), ("a copy for every completion", copied))
    ]
    times = statistics.median(copied["seconds"]) / statistics.median(shared["seconds"])
    memory = copied["peak_bytes"] / shared["peak_bytes"]
    apart = abs(shared["gradient_norm"] / copied["gradient_norm"] - 1)
    where = f"{result['dtype']}, {result['device']}, {result['environment']['date']}"
    return (
        f"A step on {COMPLETIONS} completions of {LENGTH} tokens on one prompt of {PROMPT}, with the model of the "
        f"training example ({where}): {times:.1f} times as fast with the prompt once, and {memory:.1f} times less "
        f"memory. The norms of the gradients differ by {apart:.0e} of their size.\n\n"
        + lines_of(["rows", "tokens", "seconds of a step", "peak memory, GiB"], rows)
    )


IMPLEMENTATION = "attn_core"
ORDER = ("eager", "flex_attention", "sdpa", "flash_attention_2")


def steps(result: Result) -> list[tuple[str, Row]]:
    """Returns the groups of prefill and training with their titles.

    flex has groups of its own, beside ours. They join the others of their family and mode if there are any: speeds are
    relative to ours in the same group.
    """
    groups: dict[str, Row] = {}
    for group in result["models"]:
        title = f"{group['family']}, {group['mode']}"
        speeds, failures = relative(group), dict(group["failures"])
        if title in groups:
            speeds, failures = groups[title]["speeds"] | speeds, groups[title]["failures"] | failures
            group = groups[title] | {"errors": group["errors"] | groups[title]["errors"]}
        groups[title] = group | {"speeds": speeds, "failures": failures}
    return list(groups.items())


def relative(group: Row) -> dict[str, float]:
    """Returns how many times as fast ours is as each implementation: medians over the rounds."""
    seconds = group["seconds"]
    others = [name for name in seconds if name != IMPLEMENTATION and IMPLEMENTATION in seconds]
    return {name: median_ratio(seconds, IMPLEMENTATION, name) for name in others}


def title_of(group: Row) -> str:
    """Returns the cache of a group of generate and how it was measured."""
    lengths = ", lengths never seen before" if group.get("new_lengths") else ""
    return f"{group['cache']}, {'compiled' if group['compiled'] else 'not compiled'}{lengths}"


def generate(result: Result) -> str:
    """Returns where and when whole models were measured, and the tokens per second of generate."""
    where = result["environment"]
    device = where["device"] if where["device"] != "CPU" else where["processor"]
    parts = [f"Measured on {where['date']}: {device}, {result['dtype']},\n{versions_of(result)}."]
    for group in result["generate"][:1]:
        call = f"{group['rows']} prompts of {group['prompt']} tokens, {group['tokens']} new tokens each"
        parts.append(f"`generate` with Llama-8B shapes: {call}.\nThe time includes the prompts.")
    rows = []
    for group in result["generate"]:
        tokens, cells = group["rows"] * group["tokens"], [title_of(group)]
        for name in ("sdpa", IMPLEMENTATION):
            times = group["seconds"].get(name)
            cells.append(f"{tokens / statistics.median(times):,.0f} tokens/s" if times else "failed")
        ratio, equal = relative(group).get("sdpa"), group["equal_tokens"]
        cells += [f"{ratio:.2f} times as fast" if ratio else "", "" if equal is None else f"{equal:.0%}"]
        rows.append(cells)
    parts.append(lines_of(["cache", "sdpa", "attn_core", "attn_core beside sdpa", "equal tokens"], rows))
    return "\n\n".join(parts)


def models(result: Result) -> str:
    """Returns prefill and training: ours in ms, its speed beside the others, and what was refused or failed."""
    rows = []
    for title, group in steps(result):
        own, error = group["seconds"].get(IMPLEMENTATION), group["errors"].get(IMPLEMENTATION)
        kernels = dict.fromkeys(label.partition(" ")[0] for label in group["backends"])
        speeds = [group["speeds"].get(name) for name in ORDER]
        cells = [title, f"{statistics.median(own) * 1e3:,.1f} ms" if own else "failed"]
        cells += [f"{speed:.2f}" if speed else "–" for speed in speeds]
        rows.append([*cells, f"{error:.2f}" if error is not None else "", ", ".join(kernels)])
    head = ["model", IMPLEMENTATION, *(f"beside {name}" for name in ORDER), "error", "kernels"]
    return lines_of(head, rows)


def failures(result: Result) -> str:
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


# Rows over ranks

ONE, CHOSEN = "one rank", "chosen"
DIRECTIONS = ("forward", "training")
NEAR = 0.03
"""How much slower than the best way the chosen one may be."""
SLOWER = 1.05
"""JAX's time divided by torch's: the goal."""
MIB = 2.0**20


def context_head(result: Result) -> str:
    """Returns where and how rows over ranks were measured."""
    ranks, where = result["ranks"], result["environment"]
    return (
        f"{ranks} ranks on {result['device']}, {result['dtype']}, {where['date']}, Python {where['python']}; "
        f"{versions_of(result, python=False)}. Drawn rows: seed {result['seed']}. E = T1 / ({ranks} T{ranks}): the "
        "time of one rank for the whole row, divided by the ranks' time and number. Medians over rounds in which the "
        'candidates took turns; the slowest rank counts. "chosen" is the way that choose_layout would '
        f"take, over all strategies and layouts. JAX runs the chosen way in one process for all ranks."
    )


def scaling(result: Result) -> str:
    """Returns the efficiency of one causal row over several ranks, by the tokens of a rank."""
    rows = [
        [str(row["ranks"]), str(row["tokens"] // row["ranks"]), *(f"{_share(row, each):.3f}" for each in DIRECTIONS)]
        for row in result["rows"]
    ]
    return lines_of(["GPUs", "tokens per rank", "forward", "forward + backward"], rows)


def _share(row: Row, direction: str) -> float:
    return efficiency(row["torch"][direction], row["ranks"]) or 0.0


def median(entry: Row, name: str) -> float | None:
    """Returns the median seconds of a candidate in one direction; None if it did not run."""
    seconds = entry["seconds"].get(name)
    return statistics.median(seconds) if seconds else None


def efficiency(entry: Row, ranks: int) -> float | None:
    """Returns E of the chosen way: the median over rounds; None if it or one rank did not run."""
    if not {ONE, CHOSEN} <= entry["seconds"].keys():
        return None
    return median_ratio(entry["seconds"], CHOSEN, ONE) / ranks


def regret(entry: Row) -> float | None:
    """Returns by how much the chosen way is slower than the best one, 0.02 for 2 %; None if no other way ran."""
    times = {name: statistics.median(each) for name, each in entry.get("others", {}).items() if each}
    if CHOSEN not in times or len(times) < 2:
        return None
    return max(0.0, times[CHOSEN] / min(times.values()) - 1)


def context(result: Result) -> str:
    """Returns efficiency and memory of rows over ranks, and the time of every other way."""
    rows, ranks = result["rows"], result["ranks"]
    names = ["row", "direction", "E", "goal", "chosen", "measured"]
    names += ["above the best way", "JAX", "JAX / torch", "memory of a rank", "of one rank alone"]
    lines = []
    for row in rows:
        for at, direction in enumerate(DIRECTIONS):
            cells = [f"{row['name']}: {row['words']}", direction]
            entry = row["torch"].get(direction)
            if entry is None:
                lines.append([*cells, row["error"], *[""] * (len(names) - 3)])
                continue
            jax, goal = row.get("jax", {}).get(direction, {}), row["goals"][at] if row["goals"] else None
            lines.append([*cells, *_efficiency(entry, ranks, goal), *_cost(entry), *_jax(entry, jax)])
            memory = entry["memory"]
            lines[-1] += ["" if memory.get(name) is None else f"{memory[name] / MIB:.0f} MiB" for name in (CHOSEN, ONE)]
    return "\n\n".join([context_head(result), lines_of(names, lines), "Every way that ran, in ms:", _ways(rows)])


def _efficiency(entry: Row, ranks: int, goal: float | None) -> list[str]:
    e = efficiency(entry, ranks)
    shown = "" if e is None else f"{e:.2f}{' (missed)' if goal is not None and e < goal else ''}"
    return [shown, "" if goal is None else f"≥ {goal:.2f}"]


def _cost(entry: Row) -> list[str]:
    above = regret(entry)
    shown = "" if above is None else f"{above:.1%}{' (missed)' if above > NEAR else ''}"
    return [entry["chosen"], _ms(median(entry, CHOSEN)), shown]


def _jax(entry: Row, of_jax: Row) -> list[str]:
    measured, jax = median(entry, CHOSEN), median({"seconds": of_jax}, "seconds")
    ratio = None if jax is None or not measured else jax / measured
    shown = "" if ratio is None else f"{ratio:.2f}{' (missed)' if ratio > SLOWER else ''}"
    return [_ms(jax) or of_jax.get("error", ""), shown]


def _ways(rows: list[Row]) -> str:
    entries = [entry for row in rows for entry in row["torch"].values()]
    names = list(dict.fromkeys(_column(name) for entry in entries for name in (*entry["estimates"], *entry["refused"])))
    lines, refused = [], dict[str, set[str]]()
    for row in rows:
        for direction, entry in row["torch"].items():
            cells = dict.fromkeys(names, "")
            for name in (*entry["estimates"], *entry["refused"]):
                times = entry["others"].get(CHOSEN if name == entry["chosen"] else name)
                why = entry["refused"].get(name)
                if why:
                    refused.setdefault(f"{_column(name)}: {why}", set()).add(row["name"])
                cells[_column(name)] = _ms(statistics.median(times)) if times else "refused" if why else "not measured"
            lines.append([row["name"], direction, *cells.values()])
    reasons = [f"- {why} ({', '.join(sorted(names))})" for why, names in sorted(refused.items())]
    table = lines_of(["row", "direction", *names], lines)
    return "\n\n".join([table, *(["Refused:", "\n".join(reasons)] if reasons else [])])


def _column(name: str) -> str:
    """Returns the column of a way: "ring, window" for "ring, window:4096", because a row's window is in its words."""
    return name.partition(":")[0]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3g} ms"
