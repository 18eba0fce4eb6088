"""The stored calls of ``calls.json``, the form in which a backend takes one, and its results.

A call has fields of a spec, in which letters give shapes and names give functions, and besides ``lengths``, ``packed``,
``tail`` (tokens behind the last document), ``shifted`` (torch's tensors begin one element behind an aligned address),
``paged`` and ``page_size``. ``prefers`` lists values of a field: a call on a GPU has the
first that the backend takes. What a call does not say may differ by backend.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attn_core import backends
from attn_core.backends.shared import known_bad
from attn_core.backends.support import Support
from attn_core.call.functions import trace
from attn_core.call.seq_info import SeqInfo
from attn_core.call.spec import AttentionSpec, PagedKV
from attn_core.call.tensors import Inputs, PagedInputs
from attn_core.cli import in_jax, in_torch
from attn_core.cli.spec_options import defaults_on
from attn_core.cli.trial import Arrays, Trial, draw
from attn_core.correctness.reference import append
from attn_core.errors import SpecError
from attn_core.expressions.tracing import Aux
from attn_core.selection import Target, refusals

Call = dict[str, Any]
STORED: dict[str, Any] = json.loads((Path(__file__).parent / "calls.json").read_text(encoding="utf-8"))
CALLS: dict[str, Call] = STORED["calls"]
CHECKS: dict[str, Any] = STORED["checks"]
"""By name, in the order of the report: the calls, and what a check asks of every call besides."""
FUNCTIONS: dict[str, Any] = {
    "shown keys": lambda b, h, q, k, shown: shown[h, k] | (k == 2 * q),
    "slopes": lambda s, b, h, q, k, by: s - 0.02 * by[h] * abs(q - k),
    "added": lambda s, b, h, q, k, by: s + by[h, q],
}


class Subject(NamedTuple):
    """A backend, the framework that calls it, and the device, such as ``"cpu"`` or ``"sm90"``."""

    backend: str
    framework: str
    device: str

    @property
    def target(self) -> Target:
        """This process's installation."""
        return Target.here(self.framework, self.device)

    @property
    def claims(self) -> Support:
        """The claims about the forward, narrowed to the installed build."""
        return self.target.claims(self.backend)[0]

    @property
    def missing(self) -> str | None:
        """Why the backend runs no call here; None if it runs some."""
        if not self.claims.runs_on(self.device):
            return f"no kernel for {self.device}"
        return self.target.out_of_reach(self.backend) or dict(self.target.unavailable).get(self.backend)

    def __str__(self) -> str:
        return f"{self.backend} in {self.framework}"


def subjects_on(places: Iterable[tuple[str, str]], names: tuple[str, ...] = ()) -> list[Subject]:
    """Returns every backend, or ``names``, at each place: a framework and a device."""
    return [Subject(name, *place) for place in places for name in names or backends.names()]


def faults_of(subjects: Iterable[Subject]) -> tuple[known_bad.Row, ...]:
    """Returns the known faults of the kernels that run here, each with its backends and one device."""
    found: dict[tuple[known_bad.Row, str], list[str]] = {}
    for subject in subjects:
        if subject.missing is None:
            build = subject.target.build(subject.backend)
            version = () if build is None else build.version
            for row in known_bad.rows_about(subject.backend, subject.device, version):
                found.setdefault((row, subject.device), []).append(subject.backend)
    return tuple(
        row._replace(backends=tuple(dict.fromkeys(names)), devices=(device,)) for (row, device), names in found.items()
    )


class Form(NamedTuple):
    """A call as a backend takes it."""

    spec: AttentionSpec
    # the tokens of each document or batch row: of queries, and of keys
    lengths: tuple[tuple[int, ...], tuple[int, ...]]
    page_size: int | None = None  # None without pages
    shifted: bool = False

    @property
    def requested(self) -> AttentionSpec:
        """The spec that selection sees: with pages, if there are any."""
        if self.page_size is None:
            return self.spec
        counts = [-(-length // self.page_size) for length in self.lengths[1]]
        pages = PagedKV(num_pages=sum(counts) + 1, page_size=self.page_size, width=max(*counts, 1))
        return replace(self.spec, paged=pages, kv_len=pages.width * self.page_size, max_len_k=None)


@lru_cache(maxsize=64)  # one object, because jitted programs are known by it
def documents(lengths: tuple[tuple[int, ...], tuple[int, ...]]) -> SeqInfo:
    """Returns packed documents of these lengths with numpy offsets."""
    return SeqInfo.from_lengths(*map(list, lengths))


def sizes_of(lengths: tuple[Sequence[int], Sequence[int]], packed: bool, tail: int = 0) -> dict[str, Any]:
    """Returns the fields of a spec with documents, or batch rows, of these lengths."""
    queries, keys = lengths
    if not packed:
        rows = {"batch": len(queries), "q_len": queries[0], "kv_len": keys[0]}
        return rows | {"documents": None, "max_len_q": None, "max_len_k": None}
    longest = {"max_len_q": max(queries), "max_len_k": max(keys)}
    return {"batch": 1, "q_len": sum(queries) + tail, "kv_len": sum(keys) + tail, "documents": len(queries)} | longest


def calls_of(check: str) -> dict[str, Call]:
    """Returns the calls of a check by name, with what it asks of each."""
    calls, asks = CHECKS[check]["calls"], CHECKS[check].get("asks", {})
    named = STORED[calls] if isinstance(calls, str) else {name: CALLS[name] for name in calls}
    return {name: call | asks for name, call in named.items()}


def forms(subject: Subject, call: Call) -> Iterator[Form]:
    """Yields the forms of a call, the fullest first: with gradients, log-sum-exp and lengths that end amid tiles."""
    usual = STORED["usual"]
    pages_alone = backends.load(subject.backend, subject.target.kind).takes_pages_alone
    paged = pages_alone or "paged" in call or "page_size" in call
    ways = usual["pages" if paged else "documents" if "packed" in call else "rows"]
    dtypes = (defaults_on(subject.device).dtype, "bfloat16", "float16", "float32")
    claimed = [dtype for dtype in dtypes if dtype in subject.claims.dtypes]
    prefers = {} if subject.target.kind == "cpu" else call.get("prefers", {})  # a CPU adds gradients in one order
    ways = {**prefers, "page_size": [None], "dtype": claimed[:1], **ways}
    for values in product(*([call[name]] if name in call else ways[name] for name in ways)):
        fields = {**usual["fields"], "num_kv_heads": call.get("num_heads", 3), **call, **dict(zip(ways, values))}
        queries, keys = fields.pop("lengths")
        page_size = fields.pop("page_size")
        packed, tail, shifted = (fields.pop(name, False) for name in ("packed", "tail", "shifted"))
        fields = {name: value for name, value in fields.items() if name not in ("paged", "prefers")}
        spec = spec_of(fields | sizes_of((queries, keys), packed or paged, tail))
        yield Form(spec, (tuple(queries), tuple(keys)), page_size, shifted)


def spec_of(fields: Call) -> AttentionSpec:
    """Returns a spec of fields in which letters give shapes and names give functions."""
    letters = {"b": fields["batch"], "h": fields["num_heads"], "q": fields["q_len"], "k": fields["kv_len"]}

    def plain(value: Any) -> Any:
        return tuple(map(plain, value)) if isinstance(value, list | tuple) else letters.get(value, value)

    mask_mod, score_mod = (FUNCTIONS.get(fields.get(name, "")) for name in ("mask_mod", "score_mod"))
    arrays = tuple(Aux(*plain(each)) for each in fields.get("aux", ()))
    functions = dict(zip(("mask_mod", "score_mod", "aux"), trace(mask_mod, score_mod, arrays)))
    return AttentionSpec(**{name: plain(value) for name, value in fields.items()} | functions)


def accepted(subject: Subject, call: Call) -> Form | str:
    """Returns the fullest form of a call that a backend takes, or why it takes none."""
    why = ""
    try:
        for form in forms(subject, call):
            why = refusal(subject, form)
            if not why:
                return form
    except SpecError as error:  # such as a call that no page can hold
        return str(error)
    return why


def refusal(subject: Subject, form: Form) -> str:
    """Returns why a backend does not take a form; empty if it does."""
    return next(iter(refusals(subject.backend, form.requested, subject.target)), "")


class Case(NamedTuple):
    """A call with numbers, for one subject."""

    subject: Subject
    form: Form
    trial: Trial

    def run(self, inputs: Inputs | None = None) -> Arrays:
        """Returns the results as float64 arrays by name. inputs: those of the trial by default."""
        trial = self.trial if inputs is None else self.trial._replace(inputs=inputs)
        backend, framework, device = self.subject
        trial = trial if self.form.page_size is None else self._in_pages(trial)
        if framework == "torch":
            return in_torch.run(trial, backend, device, self.form.shifted)
        return in_jax.run(trial, backend, device)

    def _in_pages(self, trial: Trial) -> Trial:
        """Returns a packed trial with its keys and values in pages in a mixed order; unused places are NaN."""
        spec, inputs, lengths = self.form.requested, trial.inputs, np.asarray(self.form.lengths[1], np.int32)
        assert spec.paged is not None
        size, pages = spec.paged.page_size, spec.paged.num_pages
        used = np.arange(spec.paged.width) < -(-lengths[:, None] // size)  # [documents, width]
        table = np.full(used.shape, -1, np.int32)
        table[used] = np.random.default_rng(0).permutation(pages)[: used.sum()]

        def pool(array: np.ndarray) -> np.ndarray:
            empty = np.full((pages, size, *array.shape[1:]), np.nan)
            return append(empty, array[: lengths.sum()], table, lengths, inputs.cu_seqlens_k)

        paged = PagedInputs(inputs.q, pool(inputs.k), pool(inputs.v), table, lengths, inputs.cu_seqlens_q, inputs.sinks)
        return trial._replace(spec=spec, inputs=paged, seq_info=None)


def drawn(subject: Subject, form: Form) -> Case:
    """Returns a call with numbers, the same on every machine: a quarter of a bias is -inf, which hides its pairs, and
    tokens behind the last document are large."""
    trial = draw(form.spec, documents(form.lengths) if form.spec.packed else None)
    inputs = trial.inputs
    if form.spec.packed:
        for array, used in ((inputs.q, form.lengths[0]), (inputs.k, form.lengths[1]), (inputs.v, form.lengths[1])):
            array[sum(used) :] = 1000.0
    if inputs.bias is not None:
        hidden = np.random.default_rng(1).random(inputs.bias.shape) < 0.25
        inputs = inputs._replace(bias=np.where(hidden, -np.inf, inputs.bias))
    return Case(subject, form, trial._replace(inputs=inputs))
