"""The checks of a certificate: a call is judged by bounds, by the mask probe, or by the bits of other calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from attn_core import backends
from attn_core.call.functions import aux_of
from attn_core.cli.certify.calls import CALLS, PAGED_CALLS, Arrays, Call, Form, documents, run_call, sizes_of
from attn_core.cli.certify.subject import Subject
from attn_core.cli.frameworks import devices_of, installed
from attn_core.cli.trial import Outcome, Trial, expectation, judge
from attn_core.correctness.probe import MaskProbe, mask_probe
from attn_core.selection import choice

REACHES_BACK = dict.fromkeys(("flash3", "flash4"), "the last tile of a document holds the next one's first tokens")
"""A NaN may reach documents before it, as a tile may hold several; docs/reference/semantics.md documents these."""
SPLITS_KEYS = ("flash2", "flash3", "triton_splitkv")
"""Where these split the keys of few queries, a row that is NaN may be 0 in the output."""
PADDING = 28
"""Tokens behind a row, which the causal diagonal hides."""
QUERIES, KEYS = ("q", "out", "dq", "lse", "dout", "dlse"), ("k", "v", "dk", "dv")
"""The arrays with the tokens of queries, and those with the tokens of keys."""

Place = tuple[int, int] | None
"""Which part of a call, a document or batch row, and from which token on; None for no part."""


class Finding(NamedTuple):
    """What is wrong with a call, or None; and its largest error as a part of its bound, 0 if bits were compared."""

    fault: str | None = None
    use: float = 0.0


def within_bounds(subject: Subject, form: Form, trial: Trial) -> Finding:
    """Compares every result and gradient with the reference. An approximate backend must give no NaN."""
    arrays = run_call(subject, form, trial)
    if subject.claims.approximate:
        names = [name for name, array in arrays.items() if np.isnan(array).any()]
        return Finding(f"NaN in {', '.join(names)} of finite inputs" if names else None)
    accuracy = judge(expectation(trial), Outcome(arrays, 0.0))
    wrong = [str(quantity) for quantity in accuracy.quantities if not quantity.use <= 1]
    return Finding("; ".join(wrong) or None, accuracy.worst)


def sees_its_mask(subject: Subject, form: Form, trial: Trial) -> Finding:
    """Compares the visible pairs with the spec's mask, then changes keys that one row of queries does not see."""
    probe, inputs, row = _probe_of(trial), trial.inputs, form.spec.q_len // 2
    wide = (each._replace(**{name: getattr(each, name).astype(float) for name in "qkv"}) for each in probe.inputs())
    wrong = probe.differences([run_call(subject, form, trial._replace(inputs=each))["out"] for each in wide])
    # Quantised keys share their scale with the keys of their block, hidden ones among them.
    if wrong or subject.claims.approximate or form.spec.empty:
        return Finding(f"{len(wrong)} pairs: {wrong[0]}" if wrong else None)
    seen = np.asarray(probe.expected[:, :, row].any(axis=1)).swapaxes(1, 2)  # [batch, kv_len, kv_heads]
    random = np.random.default_rng(1)
    # Integers of both signs up to 6, which every dtype represents, so larger than what the other rows see.
    changed = {
        name: np.where(seen.reshape(*array.shape[:-1], 1), array, random.integers(-6, 7, array.shape).astype(float))
        for name, array in (("k", inputs.k), ("v", inputs.v))
    }
    both = (run_call(subject, form, each) for each in (trial, trial._replace(inputs=inputs._replace(**changed))))
    differs = differing(*({name: _by_token(name, each[name])[..., row, :, :] for name in each} for each in both))
    return Finding(f"query {row} changes with keys that it does not see: {differs}" if differs else None)


def _probe_of(trial: Trial) -> MaskProbe:
    names = ("mask", "cu_seqlens_q", "cu_seqlens_k", "key_ranges")
    return mask_probe(trial.spec, **{name: getattr(trial.inputs, name) for name in names}, aux=aux_of(trial.inputs))


class Twin(NamedTuple):
    """Another call, of which parts must have the bits of the first.

    Attributes:
        words: how it differs.
        places: the places of its parts in the first call.
        poisoned: the part that must show its NaN or Inf in the output, or None.
    """

    words: str
    subject: Subject
    form: Form
    trial: Trial
    places: list[Place]
    poisoned: int | None = None


def same_bits(twins: Callable[..., Iterator[Twin]]) -> Callable[[Subject, Form, Trial], Finding]:
    """Returns a judge that compares the bits of a call with those of its twins."""

    def judged(subject: Subject, form: Form, trial: Trial) -> Finding:
        results = run_call(subject, form, trial)
        stable = subject.kind == "cpu" or form.spec.deterministic  # else a GPU may add gradients in any order
        whole = _parts(form, results if stable else {"out": results["out"]})
        for twin in twins(subject, form, trial):
            if choice.refusals(twin.subject.backend, twin.form.asked, twin.subject.target):
                continue
            parts = _parts(twin.form, run_call(twin.subject, twin.form, twin.trial))
            for place, part in zip(twin.places, parts):
                if place is not None and (wrong := _moved(whole[place[0]], part, place[1])):
                    return Finding(f"{twin.words}: {wrong} differs")
            if twin.poisoned is not None and np.isfinite(parts[twin.poisoned]["out"]).all():
                return Finding(f"{twin.words} does not show in the output of visible keys")
        return Finding()

    return judged


def _moved(whole: Arrays, part: Arrays, first: int) -> str:
    """Compares what both have, from the first token on, as long as the shorter."""
    sizes = {name: min(len(array) - first, len(part[name])) for name, array in whole.items() if name in part}
    one = {name: whole[name][first : first + size] for name, size in sizes.items()}
    return differing(one, {name: part[name][:size] for name, size in sizes.items()})


def differing(one: Arrays, other: Arrays) -> str:
    """Returns the results that differ in any bit, each with the largest difference; empty if none does."""
    found = []
    for name, array in one.items():
        if array.tobytes() == other[name].tobytes():  # as bytes, because NaN differs from itself, and -0.0 equals 0.0
            continue
        with np.errstate(invalid="ignore"):
            found.append(f"{name} by {np.nanmax(np.abs(array - other[name]), initial=0.0):.2g}")
    return ", ".join(found)


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


def _given(form: Form, trial: Trial) -> list[Arrays]:
    """Returns what is given of each document or batch row: q, k, v, and the gradients of out and log-sum-exp."""
    arrays = {name: getattr(trial.inputs, name) for name in "qkv"} | {"dout": trial.dout}
    return _parts(form, arrays if trial.dlse is None else arrays | {"dlse": trial.dlse})[:-1]


def _joined(form: Form, trial: Trial, parts: list[Arrays], packed: bool) -> tuple[Form, Trial]:
    """Returns the call of some documents or rows, packed or as batch rows of one length."""
    lengths = tuple(len(part["q"]) for part in parts), tuple(len(part["k"]) for part in parts)
    spec = replace(form.spec, **sizes_of(lengths, packed))
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    if not packed:
        whole = {name: array.reshape(len(parts), -1, *array.shape[1:]) for name, array in whole.items()}
    dlse = whole["dlse"][..., 0].swapaxes(-1, -2) if "dlse" in whole else None
    info = documents(lengths) if packed else None
    offsets = (None, None) if info is None else (info.cu_seqlens_q, info.cu_seqlens_k)
    changed = {name: whole[name] for name in "qkv"} | dict(zip(("cu_seqlens_q", "cu_seqlens_k"), offsets))
    joined = Trial(spec, trial.inputs._replace(**changed), info, whole["dout"], dlse, trial.seed)
    return form._replace(spec=spec, lengths=lengths), joined


def _again(subject: Subject, form: Form, trial: Trial) -> Iterator[Twin]:
    places: list[Place] = [(number, 0) for number in range(len(form.lengths[0]) + 1)]
    for words in ("another run", "a third run"):
        yield Twin(words, subject, form, trial, places)


def _in_torch(subject: Subject, form: Form, trial: Trial) -> Iterator[Twin]:
    # Each framework adds the gradient of the sinks itself for rows that see no key: then no sums are compared.
    seen = form.spec.bias_shape is None and _probe_of(trial).expected.any(axis=(-2, -1)).all()
    count = len(form.lengths[0]) + bool(seen or not form.spec.sinks)
    yield Twin("in torch", subject._replace(framework="torch"), form, trial, [(number, 0) for number in range(count)])


def _poisoned(subject: Subject, form: Form, trial: Trial) -> Iterator[Twin]:
    given, last = _given(form, trial), len(form.lengths[0]) - 1
    reaches_back = subject.backend in REACHES_BACK and form.spec.packed
    shows = subject.backend not in SPLITS_KEYS
    for value, number in ((np.nan, 0), (np.inf, last)):
        filled = {name: np.full_like(array, value) for name, array in given[number].items() if name != "dlse"}
        parts = [part | (filled if place == number else {}) for place, part in enumerate(given)]
        spared = range(number + 1) if reaches_back else (number,)
        places: list[Place] = [None if place in spared else (place, 0) for place in range(last + 1)]
        words = f"{value} in part {number}"
        yield Twin(words, subject, *_joined(form, trial, parts, form.spec.packed), places, number if shows else None)


def _beside_others(subject: Subject, form: Form, trial: Trial) -> Iterator[Twin]:
    """Yields the parts in another order, the last alone, as a batch row, and with padding behind it."""
    given, packed, last = _given(form, trial), form.spec.packed, len(form.lengths[0]) - 1
    order: list[Place] = [(number, 0) for number in range(last, -1, -1)]
    yield Twin("in another order", subject, *_joined(form, trial, given[::-1], packed), order)
    yield Twin("alone", subject, *_joined(form, trial, given[-1:], packed), order)
    if not subject.pages_alone:
        yield Twin("alone, as a batch row", subject, *_joined(form, trial, given[-1:], False), order)
    if form.spec.causal and not subject.pages_alone:
        room = ((0, PADDING), (0, 0), (0, 0))
        row = {name: np.pad(array, room, "wrap" if name in "qkv" else "constant") for name, array in given[-1].items()}
        yield Twin("alone, with padding", subject, *_joined(form, trial, [row], False), order)


def _in_chunks(subject: Subject, form: Form, trial: Trial) -> Iterator[Twin]:
    """Yields chunks of the last prompt, on tensors and in pages."""
    last = len(form.lengths[0]) - 1
    prompt, length = _given(form, trial)[last], form.lengths[0][last]
    ways: tuple[int | None, ...] = (16, 64) if subject.pages_alone else (None, 16)
    for page_size in ways if subject.claims.paged else (None,):
        for start, end in ((0, length), (0, 29), (29, length - 1), (length - 1, length)):
            chunk = {name: array[start:end] if name in QUERIES else array[:end] for name, array in prompt.items()}
            joined, cut = _joined(form, trial, [chunk], packed=page_size is not None)
            words = f"queries {start} to {end - 1}, " + (f"in pages of {page_size}" if page_size else "on tensors")
            yield Twin(words, subject, joined._replace(page_size=page_size), cut, [(last, start)])


class Check(NamedTuple):
    """A check.

    Attributes:
        calls: the stored calls that it judges, by name.
        judge: judges one call.
        claim: the field of Support without which a backend has no such check; words: what it claims.
        asks: what the check asks of every call besides.
        stable: whether a call on a GPU must be deterministic if the backend can, because its gradients are compared.
    """

    calls: dict[str, Call]
    judge: Callable[[Subject, Form, Trial], Finding]
    claim: str = ""
    words: str = ""
    asks: Call | None = None
    stable: bool = False

    def asks_of(self, subject: Subject) -> Call:
        """Returns what the check asks of every call of a subject."""
        stable = self.stable and subject.kind != "cpu" and subject.claims.deterministic
        return (self.asks or {}) | ({"deterministic": True} if stable else {})


def _named(*names: str) -> dict[str, Call]:
    return {name: CALLS[name] for name in names}


FORWARD: Call = {"needs_backward": False, "bias_gradient": False, "aux_gradients": ()}
PROMPT: Call = {"lengths": ((67, 97), (67, 97)), "packed": True, "needs_backward": False, "invariant": "prefix"}
PROMPTS = _named("causal", "window, causal", "grouped heads", "softcap", "sinks")
ROWS = PROMPTS | _named("plain", "ALiBi", "packed", "packed, causal", "packed, window")
OTHERS = ROWS | _named("everything", "packed, everything")
REPEATED = OTHERS | _named("bias with a gradient")
CHECKS = {
    "bounds": Check(CALLS, within_bounds),
    "pages": Check(PAGED_CALLS, within_bounds, "paged", "keys and values in pages"),
    "mask": Check(CALLS, sees_its_mask, asks=FORWARD),
    "nan": Check(OTHERS, same_bits(_poisoned), stable=True),
    "repeats": Check(REPEATED, same_bits(_again), "deterministic", "deterministic results", {"deterministic": True}),
    "frameworks": Check(CALLS, same_bits(_in_torch), stable=True),
    "batch": Check(ROWS, same_bits(_beside_others), "invariant", "batch invariance", {"invariant": "batch"}),
    "prefix": Check(PROMPTS, same_bits(_in_chunks), "invariant", "prefix invariance", PROMPT),
}
"""By name, in the order of the report."""


def excluded(name: str, subject: Subject) -> str | None:
    """Returns why a subject cannot have a check, "" if another subject's entry has it, or None."""
    check = CHECKS[name]
    claimed = getattr(subject.claims, check.claim, True)
    if not (claimed is True or (claimed and (check.asks or {})["invariant"] in claimed)):
        return f"claims no {check.words}"
    if name == "nan" and subject.claims.approximate:
        return "approximate: an Inf spoils what it is quantised with"
    if name != "frameworks":
        return None
    if subject.framework != "jax" or backends.load(subject.backend, subject.kind).FRAMEWORK == "jax":
        return "" if subject.framework != "jax" else "runs in JAX only"
    here = "torch" in installed() and subject.device in devices_of("torch")
    return None if here else f"torch has no {subject.device} here"
