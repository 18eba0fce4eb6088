"""``attn tune``: measures this machine on a small grid of calls, and writes the table that automatic choice follows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from statistics import geometric_mean
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from attn_core import backends
from attn_core.call.seq_info import SeqInfo
from attn_core.call.spec import AttentionSpec
from attn_core.cli.certify.calls import sizes_of, spec_of
from attn_core.cli.compare import able, timed
from attn_core.cli.devices import devices_here
from attn_core.cli.spec_options import complain, defaults_on
from attn_core.cli.timing import Entry, right_times
from attn_core.cli.trial import draw
from attn_core.errors import SpecError
from attn_core.selection import Target, tables
from attn_core.selection.cost_model import (
    EFFECTS,
    FACTORS,
    RATES,
    Kind,
    Model,
    Sizes,
    host_multiple,
    kind_of_call,
    microseconds,
    sizes_of_call,
)
from attn_core.selection.preference import caution, ranking
from attn_core.selection.whole_file import check_place

ROUNDS = 3
"""Timed rounds of each backend."""

TILE, PROCESSORS = {"cuda": 128, "cpu": 32}, 8
"""Queries that kernels work on at a time, about, and the tiles that a CPU works on at a time."""

FEWEST, FEWEST_AFTER_START = 12, 3
"""A backend needs this many measured calls in a direction for a model; fewer if the package has a model of it."""

HELD_OUT = 5
"""One call in so many is held out of a first fit, whose choice for it says how good the choice is on other calls."""

MOST_SCORES = 2**28
"""From this many scores on, the math backend is timed only if nothing else runs the call: it may store every score."""

COMPILED_EVERY = 4
"""A backend that compiles for seconds is timed in one of so many calls."""

NEAREST = "sm90"
"""The device whose models the fit starts from on a GPU that the package has no table of."""

SHAPES: dict[str, tuple[tuple[int, int], ...]] = {
    "cuda": ((16, 128), (4, 512), (1, 1024), (8, 1024), (2, 2048), (1, 4096), (1, 8192)),
    "cpu": ((1, 32), (4, 64), (1, 256), (4, 256), (1, 512), (1, 1024)),
}
"""(batch, tokens) of the calls."""

DECODING: dict[str, tuple[tuple[int, int], ...]] = {
    "cuda": ((1, 512), (1, 8192), (16, 2048), (64, 1024), (16, 8192)),
    "cpu": ((1, 128), (1, 1024), (4, 512), (8, 1024)),
}
"""(batch, keys) of the calls with one query, forward alone."""

VARIANTS: tuple[dict[str, Any], ...] = (
    {"causal": True},
    {"head_dim": 64, "value_dim": 64},
    {"causal": True, "num_kv_heads": 2},
    {"causal": True, "documents": 4},
    {"mask_shape": ("b", 1, 1, "k")},
    {"causal": True, "window": (127, 0)},
    {"dtype": "other"},
    {"causal": True, "softcap": 30.0},
    {"mask_shape": ("b", 1, "q", "k"), "num_kv_heads": 2},
    {"bias_shape": ("b", "h", "q", "k")},
    {"causal": True, "sinks": True, "num_kv_heads": 2},
    {"head_dim": 32, "value_dim": 32},
    {"causal": True, "head_dim": 256, "value_dim": 256},
    {"causal": True, "alibi_shape": ("h",)},
    {"dtype": "other", "causal": True, "documents": 3},
    {"causal": True, "head_dim": 96, "value_dim": 96, "num_kv_heads": 2},
)
"""What each shape is combined with, as ``spec_of`` takes it."""


class Case(NamedTuple):
    """One measured call: its number in the grid, its spec, and each backend's entry (``timing.measure``)."""

    number: int
    spec: AttentionSpec
    entries: dict[str, Entry]

    @property
    def times(self) -> dict[str, float]:
        """The microseconds of the backends with right numbers."""
        return right_times(self.entries, self.spec.dtype)


Models = dict[bool, dict[str, Model]]
"""By direction (True for training), then by backend."""


def tune(
    device: Annotated[str | None, typer.Option(help="cpu, or cuda (the GPU here). Default: the GPU, else cpu.")] = None,
    framework: Annotated[str, typer.Option(help="torch, or jax on a CPU. A GPU has one table for both.")] = "torch",
    minutes: Annotated[float, typer.Option(min=0.01, help="Start no new call after this time.")] = 3.0,
) -> None:
    """Measure this machine for a few minutes, and let automatic choice follow the measurements.

    Writes a table into the configuration folder. New processes use it as long as the device and the versions of the
    packages stay the same; delete the file to return to the package's own table. Prints what the choice costs: its time
    over that of the fastest backend, for calls that the models did not see, and for all.

    Exit code: 0 on success; 1 if there was no time for enough calls, or the device failed; 2 for invalid options.
    """
    target = Target.here(framework, device_of(device or ("cpu" if framework == "jax" else None), framework))
    if framework == "jax" and target.device != "cpu":
        raise SpecError(
            f"--framework=jax --device={target.device}: a GPU's table is measured in torch; use --framework torch"
        )
    path = tables.user_path(framework, target.device)
    check_place(path, with_folder=True)
    cases = _measure(target, 60 * minutes)
    held = [case for case in cases if case.number % HELD_OUT == 0]
    first = fitted([case for case in cases if case.number % HELD_OUT], target, held)
    models = fitted(cases, target, held, first)
    if not all(models.values()):
        complain(f"{len(cases)} measured calls are too few; try --minutes {5 * minutes:g}")
        raise typer.Exit(1)
    choices = {
        "this table, calls held out of its fit": costs(held, target, first),
        "this table, all calls": costs(cases, target, models),
        "the static order, all calls": costs(cases, target, None),
    }
    try:
        tables.write_table(_table(cases, target, models, choices["this table, calls held out of its fit"]), path)
    except SpecError as error:
        complain(error)
        raise typer.Exit(1) from None
    typer.echo(_report(choices))
    typer.echo(f"wrote {path}; automatic choice follows it in new processes, and `attn doctor` shows it")


def device_of(requested: str | None, framework: str) -> str:
    """Returns the device to measure: the requested one, else the GPU of this machine, else "cpu".

    Raises:
        SpecError: if this machine does not have the device, or no models exist for its kind.
    """
    device = devices_here(requested, framework)[framework]
    if backends.kind_of(device) in SHAPES:
        return device
    if requested is None:
        return "cpu"
    raise SpecError(f"--device={device}: expected a device that can be timed: {' or '.join(SHAPES)}")


# The grid


def grid(device: str) -> list[tuple[AttentionSpec, tuple[int, ...] | None]]:
    """Returns the calls of a device with their documents, so mixed that the first ones are of all kinds."""
    kind = backends.kind_of(device)
    calls = [_call(device, *shape, variant) for shape in SHAPES[kind] for variant in VARIANTS]
    for batch, keys in DECODING[kind]:
        for variant in (
            {"causal": True, "num_kv_heads": 2},
            {"causal": True},
            {"mask_shape": ("b", 1, 1, "k"), "num_kv_heads": 2},
        ):
            calls.append(_call(device, batch, keys, variant | {"q_len": 1}))
    calls = list(dict.fromkeys(calls))  # rows that are packed may become the same call
    step = next(step for step in range(29, len(calls)) if math.gcd(step, len(calls)) == 1)
    return [calls[place * step % len(calls)] for place in range(len(calls))]


def _call(
    device: str, batch: int, tokens: int, variant: dict[str, Any]
) -> tuple[AttentionSpec, tuple[int, ...] | None]:
    """Returns the spec of a measured call, and the lengths of its documents, None for a dense one.

    Args:
        variant: the keywords of a spec that differ from plain attention; dtype "other" is the second one of a device.
    """
    heads, width, other = (8, 64, "bfloat16") if device == "cpu" else (16, 128, "float32")
    options: dict[str, Any] = {"batch": batch, "q_len": tokens, "kv_len": tokens, "dtype": defaults_on(device).dtype}
    options |= {"num_heads": heads, "num_kv_heads": heads, "head_dim": width, "value_dim": width} | variant
    if options["dtype"] == "other":
        options["dtype"] = other
    documents = None
    if count := options.get("documents"):
        # Uneven, as documents are: 1, 2, 3, ... parts of the tokens.
        tokens *= batch
        ends = [tokens * part * (part + 1) // (count * (count + 1)) for part in range(count + 1)]
        documents = tuple(end - begin for begin, end in pairwise(ends))
        options |= sizes_of((documents, documents), packed=True)
    return spec_of(options), documents


# Measuring


def _measure(target: Target, seconds: float) -> list[Case]:
    """Measures the grid in both directions, until time is up."""
    began, calls = perf_counter(), grid(target.device)
    cases: list[Case] = []
    # Progress goes to stderr, so that stdout has only the result.
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("measuring", total=1.0)
        for number, (spec, documents) in enumerate(calls):
            for training in (False, True):
                if perf_counter() - began > seconds:
                    return cases
                if not (training and spec.q_len == 1):
                    case = measured(replace(spec, needs_backward=training), documents, target, number)
                    cases.append(case)
                    progress.console.print(_line(case), highlight=False)
            # Either the calls or the time come to an end first.
            share = max((number + 1) / len(calls), (perf_counter() - began) / seconds)
            progress.update(bar, completed=share, description=f"call {number + 1} of {len(calls)}")
    return cases


def measured(spec: AttentionSpec, documents: tuple[int, ...] | None, target: Target, number: int) -> Case:
    """Times a call on the backends that automatic choice may take for it."""
    here = able(spec, target)
    # In the usual order, so that the first result comes from a fast backend and slow ones are recognised.
    names = [name for name in backends.usual_order(target.framework, target.kind) if name in here]
    scores = spec.batch * spec.num_heads * spec.q_len * spec.kv_len
    compiled = {name for name in names if backends.load(name, target.kind).timing.compiles_for_seconds}
    if scores >= MOST_SCORES and not {*names} <= {"math", *compiled}:
        names = [name for name in names if name != "math"]
    if number % COMPILED_EVERY and not {*names} <= compiled:
        names = [name for name in names if name not in compiled]
    info = None if documents is None else SeqInfo.from_lengths(documents)
    entries = timed(draw(spec, info), target.framework, target.device, names, ROUNDS, beside=False)
    return Case(number, spec, entries)


def _line(case: Case) -> str:
    times = case.times
    shown = ", ".join(f"{name} {time:.0f}" for time, name in sorted((time, name) for name, time in times.items()))
    wrong = [name for name in case.entries if name not in times]
    return f"{escape(str(case.spec))}, µs: {shown}" + "".join(
        f"; [red]{name} failed or is wrong[/red]" for name in wrong
    )


# Models, and what a choice by them costs


def fitted(cases: list[Case], target: Target, held: list[Case], blind: Models | None = None) -> Models:
    """Returns the models of the backends with enough measured calls.

    Args:
        held: the cases that tell the models' errors.
        blind: models that did not see these; None for the result itself.
    """
    samples: dict[tuple[bool, str], list[Sample]] = {}
    for case in cases:
        times = case.times
        kind, sizes = kind_of_call(case.spec), _sizes(case.spec, target)
        for name, time in times.items():
            # Where a backend is far from the best, its exact time decides nothing.
            weight = 1 / (1 + (math.log(time / min(times.values())) / 2) ** 2)
            host = min(time, case.entries[name]["host"]) if target.kind == "cuda" else 0.0
            if _is_modelled(name, case.spec, target):
                samples.setdefault((case.spec.needs_backward, name), []).append(Sample(kind, sizes, time, host, weight))
    table = tables.shipped_table(target.framework, target.device)
    if table is None and target.kind == "cuda":
        table = tables.shipped_table(target.framework, NEAREST)
    start: Mapping[bool, Mapping[str, Model]] = {} if table is None else table.models
    models: Models = {False: {}, True: {}}
    for (training, name), each in samples.items():
        first = start.get(training, {}).get(name)
        if len(each) >= (FEWEST if first is None else FEWEST_AFTER_START):
            models[training][name] = fit(each, first)
    for training, named in models.items():
        for name, model in named.items():
            judged = (blind or models)[training].get(name, model)
            named[name] = model._replace(error=_error(name, judged, training, held, target))
    return models


def _error(name: str, model: Model, training: bool, held: list[Case], target: Target) -> float:
    """Returns the root mean square error of log time, as if two more calls had been wrong by a factor of 1.6."""
    squares = 2 * [math.log(1.6) ** 2]
    for case in held:
        if case.spec.needs_backward is training and (time := case.times.get(name)):
            predicted = microseconds(model, kind_of_call(case.spec), _sizes(case.spec, target))
            squares.append(min(1.0, math.log(predicted / time) ** 2))
    return math.sqrt(sum(squares) / len(squares))


def _sizes(spec: AttentionSpec, target: Target) -> Sizes:
    return sizes_of_call(spec, TILE[target.kind], _processors(target))


def _processors(target: Target) -> int:
    if target.device == "cpu":
        return PROCESSORS
    import torch

    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def costs(cases: list[Case], target: Target, models: Models | None) -> dict[str, dict[str, Any]]:
    """Returns what the choice by models costs, by direction: how many cases, the mean, the worst and its call.

    The cost is the time of the chosen backend over that of the fastest. Without models, the static order chooses.
    """
    usual = backends.usual_order(target.framework, target.kind)
    result = {}
    for direction, training in tables.DIRECTIONS.items():
        ratios = []
        for case in (case for case in cases if case.times and case.spec.needs_backward is training):
            times = case.times
            order = usual if models is None else ranking(_predicted(case.spec, target, models), usual)
            chosen, best = next(name for name in order if name in times), min(times, key=times.__getitem__)
            ratios.append((times[chosen] / times[best], f"{case.spec}: {chosen} for {best}"))
        if ratios:
            mean, (worst, where) = geometric_mean(ratio for ratio, _ in ratios), max(ratios)
            result[direction] = {"cases": len(ratios), "geometric mean": mean, "worst": worst, "worst case": where}
    return result


def _predicted(spec: AttentionSpec, target: Target, models: Models) -> dict[str, float]:
    call, sizes = kind_of_call(spec), _sizes(spec, target)
    known = {name: one for name, one in models[spec.needs_backward].items() if _is_modelled(name, spec, target)}
    return {
        name: caution(name, target.kind, model.error) * microseconds(model, call, sizes)
        for name, model in known.items()
    }


def _is_modelled(name: str, spec: AttentionSpec, target: Target) -> bool:
    return backends.load(name, target.kind).modelled(spec)


def _report(choices: dict[str, dict[str, dict[str, Any]]]) -> str:
    lines = ["| choice | direction | calls | geometric mean | worst | where |", "|---" * 6 + "|"]
    for name, chosen in choices.items():
        for direction, facts in chosen.items():
            numbers = f"{facts['geometric mean']:.3f} | {facts['worst']:.2f} | {facts['worst case']}"
            lines.append(f"| {name} | {direction} | {facts['cases']} | {numbers} |")
    return "\n".join([*lines, "\nThe time of the chosen backend over that of the fastest.\n"])


def _table(cases: list[Case], target: Target, models: Models, held_out: object) -> dict[str, object]:
    """Returns the content of the file, in the format of the package's tables."""
    return {
        "format": tables.FORMAT,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": target.device,
        "device_name": tables.device_name(target.device),
        "framework": target.framework,
        "versions": tables.versions(),
        "tile": TILE[target.kind],
        "processors": _processors(target),
        "calls": len({replace(case.spec, needs_backward=False) for case in cases}),
        "held_out": held_out,
        "models": {
            direction: {name: tables.plain_model(model) for name, model in models[training].items()}
            for direction, training in tables.DIRECTIONS.items()
        },
    }


# The fit. The parameters of a model are logarithms (``cost_model.Model``), so that a product of rate and effects is a
# sum. A model has more parameters than a minute of measuring has calls. So the fit is a ridge regression of log times:
# parameters stay where they start, with a spread for each, unless calls say otherwise.

RATE_SPREAD, FACTOR_SPREAD = 3.0, 0.4
"""How far the logarithm of a rate, or of an effect, may be from where it starts without evidence."""

ERROR = 0.05
"""The usual error of a log time."""

STEPS, LONGEST = 60, 0.7
"""The most steps of a fit, and the most that a parameter changes in one."""

FIRST_SHARE, FIRST_QUANTILE, UNKNOWN_RATE = 0.3, 0.03, 10.0
"""Where rates start without a model: no part of a call takes longer than the call, so the smallest times per size bound
a rate. The bound is this quantile, and the start this share of it. A size that no call has gets the last, in µs."""

HOST_DECIDES, IDLE = 1.15, 0.5
"""The host decided a time if it is at most this many times the host's. On a CPU, whose host does the work, the host's
rate is this share of the least time, so that it decides nothing."""


class Sample(NamedTuple):
    """A measured call: its kind and sizes, its microseconds, the host's (0 if unknown), and how much it counts."""

    kind: Kind
    sizes: Sizes
    microseconds: float
    host: float
    weight: float


def fit(samples: Sequence[Sample], start: Model | None) -> Model:
    """Returns the model whose log times differ least from the samples, near a start."""
    sizes = np.array([sample.sizes for sample in samples])
    times = np.array([sample.microseconds for sample in samples])
    weights = np.array([sample.weight for sample in samples])
    rates, factors = _first(sizes, times) if start is None else (np.array(start.rates[1:]), np.array(start.factors))
    # Which factors each sample has, and which rates (but the host's) each factor multiplies.
    present = np.array([[EFFECTS[name](sample.kind) for _, name, _ in FACTORS] for sample in samples], float)
    reach = np.zeros((len(FACTORS), len(RATES)))
    for number, (_, _, places) in enumerate(FACTORS):
        reach[number, list(places)] = 1.0
    of_host, reach = reach[:, 0] > 0, reach[:, 1:]
    # Effects on the host stay those of the start.
    multiple = host_multiple((present * factors)[:, of_host])
    host_rate = _host_rate(samples, multiple)
    host = host_rate * multiple
    count = len(RATES) - 1
    center = np.concatenate([rates, factors])
    pull = 1 / np.concatenate([np.full(count, RATE_SPREAD), np.full(len(FACTORS), FACTOR_SPREAD)]) ** 2
    parameters = center

    def parts(parameters: np.ndarray) -> np.ndarray:
        logs = parameters[:count] + (present * parameters[count:]) @ reach
        return np.exp(np.clip(logs, -30, 30)) * sizes  # type: ignore[no-any-return]

    def loss(parameters: np.ndarray) -> float:
        errors = np.log(np.maximum(parts(parameters).sum(1), host) / times) / ERROR
        # The logarithm of large ones, so that a wrong time does little harm.
        return float(weights @ (9 * np.log1p(errors**2 / 9)) + pull @ (parameters - center) ** 2)

    least = loss(parameters)
    for _ in range(STEPS):
        each = parts(parameters)
        device = each.sum(1)
        errors = np.log(np.maximum(device, host) / times)
        # The derivative of a log time by a log rate is the rate's share of the time.
        shares = np.where((device >= host)[:, None], each / device[:, None], 0.0)
        slopes = np.concatenate([shares, (shares @ reach.T) * present], axis=1)
        weight = weights / (1 + (errors / ERROR) ** 2 / 9) / ERROR**2
        curvature = (slopes.T * weight) @ slopes + np.diag(pull)
        step = np.linalg.solve(curvature, slopes.T @ (weight * errors) + pull * (parameters - center))
        step = np.clip(step, -LONGEST, LONGEST)
        lower = loss(parameters - step)
        while lower > least and np.abs(step).max() > 1e-4:
            step = step / 3
            lower = loss(parameters - step)
        if least - lower < 1e-3 * max(1.0, least):
            break
        parameters, least = parameters - step, lower
    return Model((math.log(host_rate), *map(float, parameters[:count])), tuple(map(float, parameters[count:])))


def _host_rate(samples: Sequence[Sample], multiple: np.ndarray) -> float:
    """Returns the host's microseconds without any effect; ``multiple``: what the effects of each sample make of it."""
    hosts = np.array([sample.host for sample in samples]) / multiple
    decided = np.array([sample.microseconds < HOST_DECIDES * sample.host for sample in samples])
    if hosts.any():
        return float(np.median(hosts[decided] if decided.any() else hosts))
    return IDLE * min(sample.microseconds for sample in samples)


def _first(sizes: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rates = []
    for column in sizes.T:
        bounds = times[column > 0] / column[column > 0]
        bound = float(np.quantile(bounds, FIRST_QUANTILE)) if len(bounds) else UNKNOWN_RATE
        rates.append(math.log(FIRST_SHARE * bound))
    return np.array(rates), np.zeros(len(FACTORS))
