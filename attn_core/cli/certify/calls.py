"""The stored calls of ``calls.json``, the form in which a backend takes one, and its results.

A call has fields of a spec, of which tables give their shape by letters, and besides ``lengths``, ``packed``, ``tail``
(tokens behind the last document), ``shifted`` (torch's tensors begin one element behind an aligned address), ``paged``
and ``page_size``. What it does not say may differ by backend.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attn_core.call.functions import trace
from attn_core.call.pages import PagedKV
from attn_core.call.seq_info import SeqInfo
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import PagedInputs
from attn_core.cli import in_jax, in_torch
from attn_core.cli.certify.subject import Subject
from attn_core.cli.trial import Trial, draw
from attn_core.errors import SpecError
from attn_core.expressions.tracing import Aux
from attn_core.selection import choice

Call = dict[str, Any]
Arrays = dict[str, np.ndarray]
STORED: dict[str, Any] = json.loads((Path(__file__).parent / "calls.json").read_text(encoding="utf-8"))
CALLS: dict[str, Call] = STORED["calls"]
PAGED_CALLS: dict[str, Call] = STORED["pages"]
FUNCTIONS: dict[str, Any] = {
    "shown keys": lambda b, h, q, k, shown: shown[h, k] | (k == 2 * q),
    "slopes": lambda s, b, h, q, k, by: s - 0.02 * by[h] * abs(q - k),
    "added": lambda s, b, h, q, k, by: s + by[h, q],
}
ROWS = (((67, 67), (131, 131)), ((128, 128), (128, 128)))
DOCUMENTS = (((5, 67, 1, 20), (9, 131, 4, 20)), ((5, 67, 1, 20), (5, 67, 1, 20)))
"""Usual lengths of queries and keys, which end amid tiles, and others for backends that refuse these."""
DTYPES = {"cpu": ("float32", "bfloat16", "float16"), "cuda": ("bfloat16", "float16", "float32")}
"""The usual dtype of a kind of device comes first."""


class Form(NamedTuple):
    """A call as a backend takes it.

    Attributes:
        lengths: the tokens of each document or batch row: of queries, and of keys.
        page_size: None without pages.
        lost: why it has no gradients; empty if it has them, or should not.
    """

    spec: AttentionSpec
    lengths: tuple[tuple[int, ...], tuple[int, ...]]
    page_size: int | None = None
    shifted: bool = False
    lost: str = ""

    @property
    def asked(self) -> AttentionSpec:
        """The spec that selection sees: with pages, if there are any."""
        if self.page_size is None:
            return self.spec
        counts = [-(-length // self.page_size) for length in self.lengths[1]]
        pages = PagedKV(num_pages=sum(counts) + 1, page_size=self.page_size, width=max(*counts, 1))
        return replace(self.spec, paged=pages, kv_len=pages.width * self.page_size, max_len_k=None)


@lru_cache(maxsize=64)  # one object, because jitted programs are known by it
def documents(lengths: Any) -> SeqInfo:
    """Returns packed documents of these lengths with numpy offsets."""
    return SeqInfo.from_lengths(*map(list, lengths))


def sizes_of(lengths: Any, packed: bool, tail: int = 0) -> dict[str, Any]:
    """Returns the fields of a spec with documents, or batch rows, of these lengths."""
    queries, keys = lengths
    if not packed:
        rows = {"batch": len(queries), "q_len": queries[0], "kv_len": keys[0]}
        return rows | {"documents": None, "max_len_q": None, "max_len_k": None}
    longest = {"max_len_q": max(queries), "max_len_k": max(keys)}
    return {"batch": 1, "q_len": sum(queries) + tail, "kv_len": sum(keys) + tail, "documents": len(queries)} | longest


def _forms(subject: Subject, call: Call) -> Iterator[Form]:
    """Yields the forms of a call, the fullest first: with gradients, log-sum-exp and odd lengths."""
    paged = subject.pages_alone or "paged" in call or "page_size" in call
    claimed = [dtype for dtype in DTYPES.get(subject.kind, DTYPES["cuda"]) if dtype in subject.claims.dtypes]
    usual: dict[str, tuple[Any, ...]] = {
        "needs_backward": (False,) if paged else (True, False),
        "lengths": DOCUMENTS if paged or "packed" in call else ROWS,
        "return_lse": (True, False),
        "page_size": (16, 256) if paged else (None,),
        "dtype": tuple(claimed[:1]),
    }
    ways = {name: (call[name],) if name in call else values for name, values in usual.items()}
    for values in product(*ways.values()):
        fields = {"num_heads": 3, "num_kv_heads": call.get("num_heads", 3), "head_dim": 64, "value_dim": 64}
        fields |= call | dict(zip(ways, values))
        queries, keys = fields.pop("lengths")
        packed, tail = fields.pop("packed", False) or paged, fields.pop("tail", 0)
        fields.pop("paged", None)
        page_size, shifted = fields.pop("page_size"), fields.pop("shifted", False)
        spec = _spec(fields | sizes_of((queries, keys), packed, tail))
        yield Form(spec, (tuple(queries), tuple(keys)), page_size, shifted)


def _spec(fields: Call) -> AttentionSpec:
    """Returns a spec of fields whose shapes are letters and whose functions are names."""
    letters = {"b": fields["batch"], "h": fields["num_heads"], "q": fields["q_len"], "k": fields["kv_len"]}

    def shape(text: str) -> tuple[int, ...]:
        return tuple(letters[letter] if letter in letters else int(letter) for letter in text)

    mask_mod, score_mod = (FUNCTIONS.get(fields.get(name, "")) for name in ("mask_mod", "score_mod"))
    arrays = tuple(Aux(shape(text), dtype) for text, dtype in fields.get("aux", ()))
    traced = dict(zip(("mask_mod", "score_mod", "aux"), trace(mask_mod, score_mod, arrays)))
    shapes = {name: shape(text) for name, text in fields.items() if name.endswith("_shape")}
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return AttentionSpec(**fields | lists | shapes | traced)


def accepted(subject: Subject, call: Call) -> Form | str:
    """Returns the fullest form of a call that a backend takes, or why it takes none."""
    why = lost = ""
    try:
        for form in _forms(subject, call):
            reasons = choice.refusals(subject.backend, form.asked, subject.target)
            if not reasons:
                return form if form.spec.needs_backward else form._replace(lost=lost)
            why = reasons[0]
            lost = why if form.spec.needs_backward else lost
    except SpecError as error:  # such as a call that no page can hold
        return str(error)
    return why


def trial_of(form: Form) -> Trial:
    """Returns the numbers of a call, the same on every machine: a quarter of a bias is -inf, which hides its pairs, and
    tokens behind the last document are large."""
    trial = draw(form.spec, documents(form.lengths) if form.spec.packed else None)
    inputs = trial.inputs
    if form.spec.packed:
        for array, used in ((inputs.q, form.lengths[0]), (inputs.k, form.lengths[1]), (inputs.v, form.lengths[1])):
            array[sum(used) :] = 1000.0
    if inputs.bias is not None:
        hidden = np.random.default_rng(1).random(inputs.bias.shape) < 0.25
        inputs = inputs._replace(bias=np.where(hidden, -np.inf, inputs.bias))
    return trial._replace(inputs=inputs)


def run_call(subject: Subject, form: Form, trial: Trial) -> Arrays:
    """Returns the results of a trial on a subject as float64 arrays by name."""
    trial = trial if form.page_size is None else _in_pages(form, trial)
    if subject.framework == "torch":
        return in_torch.run(trial, subject.backend, subject.device, 0, form.shifted).arrays
    return in_jax.run(trial, subject.backend, subject.device, 0).arrays


def _in_pages(form: Form, trial: Trial) -> Trial:
    """Returns a packed trial with its keys and values in pages in a mixed order; unused places are NaN."""
    spec, inputs, lengths = form.asked, trial.inputs, np.asarray(form.lengths[1], np.int32)
    assert spec.paged is not None
    size, pages, total = spec.paged.page_size, spec.paged.num_pages, int(lengths.sum())
    used = np.arange(spec.paged.width) < -(-lengths[:, None] // size)  # [documents, width]
    table = np.full(used.shape, -1, np.int32)
    table[used] = np.random.default_rng(0).permutation(pages)[: used.sum()]
    document = np.repeat(np.arange(len(lengths)), lengths)  # of each token
    place = np.arange(total) - (np.cumsum(lengths) - lengths)[document]
    k, v = (np.full((pages, size, *array.shape[1:]), np.nan) for array in (inputs.k, inputs.v))
    for pool, array in ((k, inputs.k), (v, inputs.v)):
        pool[table[document, place // size], place % size] = array[:total]
    paged = PagedInputs(inputs.q, k, v, table, lengths, inputs.cu_seqlens_q, inputs.sinks)
    return trial._replace(spec=spec, inputs=paged, seq_info=None)
