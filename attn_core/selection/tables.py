"""The tables of automatic choice: cost models as JSON, shipped with the package or written by ``attn tune``.

A user's table replaces the shipped one of its device. It lies in the user's configuration folder and is ignored, with
one warning, if it cannot be read, or was measured on another device or with other versions.

For cards that this project does not own, a row of ``published.json`` has an order from figures that others published,
with its sources and their dates. It decides only where no table does. A row without ``first`` changes nothing: its
sources disagree.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from attn_core.call.spec import AttentionSpec
from attn_core.selection.cost_model import FACTORS, RATES, Model
from attn_core.selection.whole_file import read_json, write_whole

FORMAT = 4
"""Of the tables. A table in another format is not read."""

PACKAGES = (
    "attn-core",
    "torch",
    "triton",
    "jax",
    "jaxlib",
    "jax-tvm-ffi",
    "flash-attn",
    "flash-attn-4",
    "flash-attn-3",
    "xformers",
)
"""A table was measured with the versions of these packages. A user's table is stale if one of them changed."""

DIRECTIONS = {"forward": False, "training": True}


@dataclass(frozen=True)
class Table:
    """The cost models of one device in one framework."""

    source: str  # what was measured, where and when, as text
    tile: int  # see ``cost_model.sizes_of_call``
    processors: int  # the same
    models: Mapping[bool, Mapping[str, Model]]  # by direction (True for training), then by backend
    of_this_host: bool = False  # whether the user measured it on this machine


def user_folder() -> Path:
    """Returns the folder of a user's files in the XDG configuration folder."""
    folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(folder) / "attn-core"


def user_path(framework: str, device: str) -> Path:
    """Returns where ``attn tune`` writes the table of a device: the XDG configuration folder."""
    return user_folder() / f"{framework}-{device}.json"


@cache  # so that a process keeps its order of choice whatever happens to the files
def table_in_force(framework: str, device: str) -> Table | None:
    """Returns the table that decides for a device: the user's, else the shipped one, else None."""
    return user_table(framework, device) or shipped_table(framework, device)


@cache
def shipped_table(framework: str, device: str) -> Table | None:
    """Returns the table of the package for a device, or None."""
    file = Path(__file__).with_name("measured") / f"{framework}-{device}.json"
    return table_of(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None


def user_table(framework: str, device: str) -> Table | None:
    """Returns the user's table of a device, or None. Warns if there is one that cannot be used."""
    path: Path | None = None
    try:
        path = user_path(framework, device)
        if not path.is_file():
            return None
        raw = read_json(path)
        reason = _stale(raw, device)
        if reason is None:
            return table_of(raw, str(path))
    except Exception as error:  # a damaged file may fail in any way, and must not stop attention
        reason = f"it is not a table of attn tune ({type(error).__name__}: {error})"
    if path is None:  # a process without a home folder has no table
        return None
    warnings.warn(f"{path}: ignored, because {reason}; run `attn tune`, or delete the file", stacklevel=2)
    return None


def _stale(raw: dict[str, Any], device: str) -> str | None:
    """Returns why a table does not describe this installation, or None."""
    if raw["format"] != FORMAT:
        return f"its format is {raw['format']}, not {FORMAT}"
    if (name := device_name(device)) is not None and name != raw["device_name"]:
        return f"it was measured on {raw['device_name']}, and this is {name}"
    for package, now in versions().items():
        if raw["versions"].get(package) != now:
            return f"it was measured with {package} {raw['versions'].get(package)}, and {now} is installed"
    return None


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str | None]:
    """Returns the versions of packages; None if not installed."""
    from importlib import metadata  # a fifth of the time of ``import attn_core``, and few calls need it

    result: dict[str, str | None] = {}
    for name in packages:
        try:
            result[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            result[name] = None
    return result


def device_name(device: str) -> str | None:
    """Returns the name of this machine's processor or GPU; None for a GPU before torch is imported."""
    if device == "cpu":
        return f"{processor()}, {os.cpu_count()} cores"
    torch = sys.modules.get("torch")  # never imported here, because a choice must not load a framework
    if torch is None or not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_name())


def processor() -> str:
    """Returns the name of this machine's processor; "CPU" if the system does not say it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return "CPU"


def table_of(raw: dict[str, Any], path: str = "") -> Table:
    """Returns a table from the content of its file.

    Raises:
        KeyError, TypeError, ValueError: if the content is not a table's.
    """
    where = f"{path}: " if path else ""
    source = f"{where}{raw['calls']} calls measured on {raw['device_name']}, {raw['date']}"
    models = {
        training: {name: _model(content) for name, content in raw["models"].get(direction, {}).items()}
        for direction, training in DIRECTIONS.items()
    }
    tile, processors = int(raw["tile"]), int(raw["processors"])
    if tile < 1 or processors < 1:
        raise ValueError(f"tile={tile}, processors={processors}: expected 1 or more")
    return Table(source, tile, processors, models, of_this_host=bool(path))


def _model(content: dict[str, Any]) -> Model:
    """Reads the parameters of one backend in one direction. Raises ValueError for what cannot be right."""
    factors = {(group, name): value for group, named in content["factors"].items() for name, value in named.items()}
    known = [(group, name) for group, name, _ in FACTORS]
    if unknown := factors.keys() - set(known):
        raise ValueError(f"unknown factors: {', '.join(' '.join(one) for one in sorted(unknown))}")
    rates = tuple(float(content["rates"][name]) for name in RATES)
    effects, error = tuple(float(factors.get(key, 0.0)) for key in known), float(content["error"])
    # json reads NaN and 1e999. A NaN would make the order of the backends depend on how they are compared.
    if not all(map(math.isfinite, (*rates, *effects, error))):
        raise ValueError("rates, factors, error: expected finite numbers")
    return Model(rates, effects, error)


def plain_model(model: Model) -> dict[str, Any]:
    """Inverts the reading of a model, but for factors below one part in two hundred, which are left out."""
    factors: dict[str, dict[str, float]] = {}
    for (group, name, _), value in zip(FACTORS, model.factors, strict=True):
        if abs(value) >= 0.005:
            factors.setdefault(group, {})[name] = round(value, 3)
    rates = {name: round(value, 4) for name, value in zip(RATES, model.rates, strict=True)}
    return {"rates": rates, "factors": factors, "error": round(model.error, 4)}


def write_table(table: dict[str, Any], path: Path) -> None:
    """Writes a table as JSON with a line for each model, so that diffs of two files are readable.

    Raises:
        SpecError: if the file cannot be written. An earlier file is unchanged.
    """
    head = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in table.items() if name != "models"]
    directions = []
    for direction, models in table["models"].items():
        lines = ",\n".join(f"   {json.dumps(name)}: {json.dumps(model)}" for name, model in models.items())
        directions.append(f"  {json.dumps(direction)}: {{\n{lines}\n  }}")
    text = "".join(f" {line},\n" for line in head)
    write_whole(f'{{\n{text} "models": {{\n' + ",\n".join(directions) + "\n }\n}\n", path, with_folder=True)


class Figures(NamedTuple):
    """What others measured on one card.

    Attributes:
        device: such as ``"sm80"``, in both frameworks: JAX runs the same kernels.
        calls: the fields of ``AttentionSpec``, with their values, that the measured calls had; empty for all calls.
        first: the backends that were faster, best first; they come directly before ``ahead_of`` if they came after it.
        ahead_of: the backend that they were compared with.
        figures: what was measured, in words.
        sources: link -> date.
    """

    device: str
    calls: Mapping[str, Any]
    first: tuple[str, ...]
    ahead_of: str
    figures: str
    sources: Mapping[str, str]

    def __str__(self) -> str:
        sources = ", ".join(f"{link} ({date})" for link, date in self.sources.items())
        return f"order from published figures, not ours: {self.figures}: {sources}; `attn tune` measures yours"

    def ordered(self, usual: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the usual order with ``first`` before ``ahead_of``, as far as it has these backends."""
        place = usual.index(self.ahead_of) if self.ahead_of in usual else len(usual)
        before, after = usual[:place], usual[place:]
        first = tuple(name for name in self.first if name in after)
        return (*before, *first, *(name for name in after if name not in first))


@cache
def published() -> tuple[Figures, ...]:
    """Returns all rows of ``published.json``."""
    rows = json.loads(Path(__file__).with_name("published.json").read_text("utf-8"))
    return tuple(Figures(**row | {"first": tuple(row["first"])}) for row in rows)


def figures_for(spec: AttentionSpec, device: str) -> Figures | None:
    """Returns the row of a call on a device, or None. No row is about keys and values in pages."""
    if spec.paged is not None:
        return None
    for row in published():
        if row.device == device and all(getattr(spec, name) == value for name, value in row.calls.items()):
            return row
    return None
