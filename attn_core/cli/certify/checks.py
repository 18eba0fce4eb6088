"""The checks of a certificate: a call is judged by bounds, by the mask probe, or by the bits of other calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, NamedTuple
from warnings import catch_warnings, simplefilter

import numpy as np

from attn_core import backends
from attn_core.call.functions import aux_of
from attn_core.cli.certify.calls import Call, Case, Form, Subject, accepted, documents, drawn, refusal, sizes_of
from attn_core.cli.devices import installed
from attn_core.cli.trial import Arrays, Trial, differing, expectation, judge
from attn_core.correctness.probe import MaskProbe, mask_probe
from attn_core.errors import LayoutWarning

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
PADDING = 28
"""Tokens behind a row, which the causal diagonal hides."""
QUERIES, KEYS = ("q", "out", "dq", "lse", "dout", "dlse"), ("k", "v", "dk", "dv")
"""The arrays with the tokens of queries, and those with the tokens of keys."""


class Finding(NamedTuple):
    """The result of a call."""

    fault: str = ""  # what is wrong, or empty
    use: float = 0.0  # the largest error as a part of its bound, 0 if bits were compared
    missing: str = ""  # why nothing was compared, or empty


def within_bounds(case: Case) -> Finding:
    """Compares every result and gradient with the reference. An approximate backend must give no NaN."""
    arrays = case.run()
    if case.subject.claims.approximate:
        names = [name for name, array in arrays.items() if np.isnan(array).any()]
        return Finding(f"NaN in {', '.join(names)} of finite inputs" if names else "")
    accuracy = judge(expectation(case.trial), arrays)
    wrong = [str(quantity) for quantity in accuracy.quantities if not quantity.use <= 1]
    return Finding("; ".join(wrong), accuracy.worst)


def sees_its_mask(case: Case) -> Finding:
    """Compares the visible pairs with the spec's mask, then changes keys that one row of queries does not see."""
    probe, inputs, row = _probe_of(case.trial), case.trial.inputs, case.trial.spec.q_len // 2
    wrong = probe.differences([case.run(each)["out"] for each in probe.inputs()])
    # Quantised keys share their scale with the keys of their block, hidden ones among them.
    if wrong or case.subject.claims.approximate or case.trial.spec.empty:
        return Finding(f"{len(wrong)} pairs: {wrong[0]}" if wrong else "")
    seen = np.asarray(probe.expected[:, :, row].any(axis=1)).swapaxes(1, 2)  # [batch, kv_len, kv_heads]
    random = np.random.default_rng(1)
    # Integers of both signs up to 6, which every dtype represents, so larger than what the other rows see.
    changed = {
        name: np.where(seen.reshape(*array.shape[:-1], 1), array, random.integers(-6, 7, array.shape).astype(float))
        for name, array in (("k", inputs.k), ("v", inputs.v))
    }
    one, other = (
        {name: _by_token(name, array)[..., row, :, :] for name, array in each.items() if name in ("out", "lse")}
        for each in (case.run(), case.run(inputs._replace(**changed)))
    )
    differs = differing(one, other)
    return Finding(f"query {row} changes with keys that it does not see: {differs}" if differs else "")


def _probe_of(trial: Trial) -> MaskProbe:
    names = ("mask", "cu_seqlens_q", "cu_seqlens_k", "key_ranges")
    return mask_probe(trial.spec, **{name: getattr(trial.inputs, name) for name in names}, aux=aux_of(trial.inputs))


class Twin(NamedTuple):
    """Another call, of which parts must have the bits of the first. Parts are documents or batch rows."""

    words: str  # how it differs
    case: Case
    # for each of its parts what the first call gave there; nothing for a part that is not compared
    expected: list[Arrays]
    poisoned: int | None = None  # the part that must show its NaN or Inf in the output, or None


Twins = Callable[[Case, list[Arrays]], Iterator[Twin]]
"""From a call and the results of its parts, the sums over all parts behind them."""


def same_bits(twins: Twins, case: Case) -> Finding:
    """Compares the bits of a call with those of its twins."""
    results, missing, compared = case.run(), "", False
    # A GPU adds gradients in any order, unless the call is deterministic.
    stable = case.subject.target.kind == "cpu" or case.trial.spec.deterministic
    for twin in twins(case, _parts(case.form, results if stable else {"out": results["out"]})):
        if why := refusal(*twin.case[:2]):
            missing = missing or why
            continue
        compared, parts = True, _parts(twin.case.form, twin.case.run())
        for one, other in zip(twin.expected, parts):
            if wrong := differing(one, other):
                return Finding(f"{twin.words}: {wrong} differs")
        if twin.poisoned is not None and np.isfinite(parts[twin.poisoned]["out"]).all():
            return Finding(f"{twin.words} does not show in the output of visible keys")
    return Finding(missing="" if compared else missing or "no other call has the same bits")


def _by_token(name: str, array: np.ndarray) -> np.ndarray:
    """Returns an array with tokens before heads; the log-sum-exp has them behind, and no channels."""
    return array.swapaxes(-1, -2)[..., None] if name in ("lse", "dlse") else array


def _parts(form: Form, arrays: Arrays) -> list[Arrays]:
    """Returns arrays apart by documents or batch rows, tokens first; behind them the sums over all of them."""
    parts: list[Arrays] = [{} for _ in form.lengths[0]]
    for names, lengths in zip((QUERIES, KEYS), form.lengths):
        ends = np.cumsum((0, *lengths))
        for name in (name for name in names if name in arrays):
            array = _by_token(name, arrays[name])
            tokens = array if form.spec.packed else array.reshape(-1, *array.shape[2:])
            for part, start, end in zip(parts, ends, ends[1:]):
                part[name] = tokens[start:end]
    return [*parts, {name: array for name, array in arrays.items() if name not in QUERIES + KEYS}]


def _given(case: Case) -> list[Arrays]:
    """Returns what is given of each document or batch row: q, k, v, and the gradients of out and log-sum-exp."""
    given = {name: getattr(case.trial.inputs, name) for name in "qkv"} | {"dout": case.trial.dout}
    return _parts(case.form, given if case.trial.dlse is None else given | {"dlse": case.trial.dlse})[:-1]


def _joined(case: Case, parts: list[Arrays], packed: bool) -> Case:
    """Returns the call of some documents or rows, packed or as batch rows of one length."""
    lengths = tuple(len(part["q"]) for part in parts), tuple(len(part["k"]) for part in parts)
    spec = replace(case.form.spec, **sizes_of(lengths, packed))
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    if not packed:
        whole = {name: array.reshape(len(parts), -1, *array.shape[1:]) for name, array in whole.items()}
    dlse = whole["dlse"][..., 0].swapaxes(-1, -2) if "dlse" in whole else None
    info = documents(lengths) if packed else None
    changed: dict[str, Any] = {name: whole[name] for name in "qkv"}
    changed |= {name: getattr(info, name, None) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    trial = Trial(spec, case.trial.inputs._replace(**changed), info, whole["dout"], dlse, case.trial.seed)
    form = case.form._replace(spec=spec, lengths=lengths, page_size=case.form.page_size if packed else None)
    return Case(case.subject, form, trial)


def _again(case: Case, whole: list[Arrays]) -> Iterator[Twin]:
    for words in ("another run", "a third run"):
        yield Twin(words, case, whole)


def _in_torch(case: Case, whole: list[Arrays]) -> Iterator[Twin]:
    if "torch" in installed():
        # Each framework adds the gradient of the sinks itself for rows that see no key: then no sums are compared.
        spec = case.form.spec
        seen = spec.bias_shape is None and _probe_of(case.trial).expected.any(axis=(-2, -1)).all()
        other = case._replace(subject=case.subject._replace(framework="torch"))
        yield Twin("in torch", other, whole if seen or not spec.sinks else whole[:-1])


def _poisoned(case: Case, whole: list[Arrays]) -> Iterator[Twin]:
    """Yields the call with NaN, then Inf, in all of one document or row. The others' results must keep their bits."""
    given, packed = _given(case), case.form.spec.packed
    backend = backends.load(case.subject.backend, case.subject.target.kind)
    if case.subject.claims.approximate:  # an Inf spoils what it is quantised with
        return
    for value, number in ((np.nan, 0), (np.inf, len(given) - 1)):
        filled = {name: np.full_like(array, value) for name, array in given[number].items() if name != "dlse"}
        parts = [part | (filled if place == number else {}) for place, part in enumerate(given)]
        first = 0 if backend.reaches_next_document and packed else number
        expected = [{} if first <= place <= number else whole[place] for place in range(len(given))]
        shows = None if backend.splits_keys else number
        yield Twin(f"{value} in part {number}", _joined(case, parts, packed), expected, shows)


def _beside_others(case: Case, whole: list[Arrays]) -> Iterator[Twin]:
    """Yields the parts in another order, the last alone, as a batch row, and with padding behind it."""
    given, packed = _given(case), case.form.spec.packed
    expected = whole[-2::-1]  # without the sums
    yield Twin("in another order", _joined(case, given[::-1], packed), expected)
    yield Twin("alone", _joined(case, given[-1:], packed), expected)
    yield Twin("alone, as a batch row", _joined(case, given[-1:], False), expected)
    if case.form.spec.causal:
        room = ((0, PADDING), (0, 0), (0, 0))
        row = {name: np.pad(array, room, "wrap" if name in "qkv" else "constant") for name, array in given[-1].items()}
        yield Twin("alone, with padding", _joined(case, [row], False), expected)


def _in_chunks(case: Case, whole: list[Arrays]) -> Iterator[Twin]:
    """Yields chunks of the last prompt, on tensors and in pages."""
    prompt, length = _given(case)[-1], case.form.lengths[0][-1]
    for page_size in (None, 16):
        for start, end in ((0, 29), (29, length - 1), (length - 1, length)):
            chunk = {name: array[start:end] if name in QUERIES else array[:end] for name, array in prompt.items()}
            cut = _joined(case, [chunk], packed=page_size is not None)
            cut = cut._replace(form=cut.form._replace(page_size=page_size))
            words = f"queries {start} to {end - 1}, " + (f"in pages of {page_size}" if page_size else "on tensors")
            yield Twin(words, cut, [{name: array[start:] for name, array in whole[-2].items()}])


JUDGES: dict[str, Callable[[Case], Finding]] = {
    "bounds": within_bounds,
    "pages": within_bounds,
    "mask": sees_its_mask,
    "nan": partial(same_bits, _poisoned),
    "batch": partial(same_bits, _beside_others),
    "prefix": partial(same_bits, _in_chunks),
    "frameworks": partial(same_bits, _in_torch),
    "repeats": partial(same_bits, _again),
}
"""By the name of a check."""


class Entry(NamedTuple):
    """The result of one check of one backend in one framework, with the calls that the backend refuses by reason."""

    check: str
    result: str
    backend: str
    framework: str
    device: str
    draws: int = 0
    worst: float | None = None
    seconds: float = 0.0
    reason: str = ""
    repeat: str = ""
    refused: dict[str, list[str]] = {}  # noqa: RUF012 (never changed)


def entry_of(name: str, subject: Subject, calls: dict[str, Call]) -> Entry:
    """Runs one check of one subject: every one of some calls that the backend takes."""
    began = monotonic()
    refused: dict[str, list[str]] = {}
    findings: dict[str, Finding] = {}
    for call, fields in calls.items():
        form = accepted(subject, fields)
        finding = Finding(missing=form) if isinstance(form, str) else _finding(name, subject, form)
        if finding.missing:
            refused.setdefault(finding.missing, []).append(call)
        else:
            findings[call] = finding
        if name == "bounds" and isinstance(form, Form) and not form.spec.needs_backward and form.page_size is None:
            why = refusal(subject, form._replace(spec=replace(form.spec, needs_backward=True)))
            refused.setdefault(f"without gradients: {why}", []).append(call)
    faults = "; ".join(f"{call}: {finding.fault}" for call, finding in findings.items() if finding.fault)
    worst = max((finding.use for finding in findings.values()), default=0.0)
    where = f"--backend {subject.backend} --framework {subject.framework} --device {subject.device}"
    return Entry(
        name,
        FAILED if faults else PASSED if findings else NOT_RUN,
        *subject,
        draws=len(findings),
        worst=round(worst, 3) if 0 < worst < float("inf") else None,
        seconds=round(monotonic() - began, 2),
        reason=faults,
        repeat=f"attn certify {where} --check {name}" if faults else "",
        refused=refused,
    )


def _finding(check: str, subject: Subject, form: Form) -> Finding:
    try:
        with catch_warnings():
            simplefilter("ignore", LayoutWarning)  # some sizes look like another layout
            finding = JUDGES[check](drawn(subject, form))
    except Exception as error:  # whatever a call raises although it was accepted is a fault
        finding = Finding(f"raised {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return finding._replace(fault=f"{finding.fault} ({form.spec})") if finding.fault else finding
