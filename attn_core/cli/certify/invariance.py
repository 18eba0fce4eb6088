"""Invariance: the claims of a backend about bits that do not depend on the other rows, nor on how a prompt is cut.

A backend claims them in its Support's field ``invariant``, a tuple of "batch" and "prefix". A version of this package
without that field claims nothing, so the checks exclude every backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from attn_core.call.seq_info import SeqInfo
from attn_core.call.spec import AttentionSpec
from attn_core.cli.campaign.case import Case
from attn_core.cli.campaign.judge import trial_of
from attn_core.cli.campaign.relations import document_alone
from attn_core.cli.certify.check import Arrays, Finding, Part, differing, of_part, parts_of, run_call
from attn_core.cli.certify.draw import NOT_ON_PAGES, WITHOUT_TABLES
from attn_core.cli.certify.subject import DENSE, PAGED, Subject
from attn_core.cli.trial import Trial

BATCH, PREFIX = "batch", "prefix"


def requested(spec: AttentionSpec, kind: str) -> AttentionSpec:
    """Returns the spec of the same call with ``invariant=kind``. Never called while no backend claims it."""
    fields: dict[str, Any] = {"invariant": kind}
    return replace(spec, **fields)


def _narrow(spec: AttentionSpec) -> AttentionSpec:
    """Returns a spec with one channel instead of 11, because libraries multiply one column by other kernels."""
    return replace(spec, head_dim=1, value_dim=1) if spec.head_dim == 11 else spec


def unclaimed(kind: str) -> Callable[[Subject], str | None]:
    """Returns a Check's ``excludes``: backends that do not claim a kind of invariance."""

    def excludes(subject: Subject) -> str | None:
        return None if kind in getattr(subject.claims, "invariant", ()) else f"claims no {kind} invariance"

    return excludes


# The other rows


def plain_rows(subject: Subject, spec: AttentionSpec) -> AttentionSpec:
    """Returns the spec without tables, which all rows may share."""
    return requested(replace(_narrow(spec), **WITHOUT_TABLES), BATCH)


def ignores_the_batch(subject: Subject, case: Case) -> Finding:
    """Runs every document or row alone, and all of them in another order, and compares their bits."""
    trial = trial_of(case)
    whole, parts = run_call(subject, case, trial), parts_of(trial)
    # One of them alone, because JAX compiles each call; the other order covers all.
    for number in (case.seed % len(parts),):
        part = parts[number]
        expected = of_part(trial, whole, part)
        for words, alone in _alone(subject, trial, part):
            results = run_call(subject, _as_case(case, alone), alone)
            if wrong := differing(expected, _flat(_unpadded(results, trial.spec, part))):
                return Finding(f"row {number} {words} differs from the same row in the batch: {', '.join(wrong)}")
    order = list(range(len(parts)))[::-1]
    moved = _in_order(trial, [parts[number] for number in order])
    results, places = run_call(subject, _as_case(case, moved), moved), parts_of(moved)
    for place, number in enumerate(order):
        both = of_part(trial, whole, parts[number]), of_part(moved, results, places[place])
        if wrong := differing(*both):
            return Finding(f"row {number} differs at place {place} of the batch: {', '.join(wrong)}")
    return Finding()


def _flat(arrays: Arrays) -> Arrays:
    return {name: array.ravel() for name, array in arrays.items()}


PADDING = 28
"""Tokens behind a row, which the causal diagonal hides."""


def _alone(subject: Subject, trial: Trial, part: Part) -> Iterator[tuple[str, Trial]]:
    """Yields a part as a call of its own: in its own form, as a row without documents, and with padding behind it."""
    yield "alone", _in_order(trial, [part])
    if subject.pages_alone:
        return
    row = document_alone(trial, *part) if trial.spec.packed else _in_order(trial, [part])
    if trial.spec.packed:
        yield "alone, without documents", row
    hides = row.spec.causal and (row.spec.alignment == "bottom_right" or row.spec.q_len <= row.spec.kv_len)
    if hides and not row.spec.empty:
        yield "alone, with padding", _padded(row)


def _padded(row: Trial) -> Trial:
    """Returns a causal row with some of its tokens again behind it, which have no gradient."""
    q, k, v = (np.pad(each, ((0, 0), (0, PADDING), (0, 0), (0, 0)), "wrap") for each in row.inputs[:3])
    spec = replace(row.spec, q_len=q.shape[1], kv_len=k.shape[1])
    dout = np.pad(row.dout, ((0, 0), (0, PADDING), (0, 0), (0, 0)))
    dlse = None if row.dlse is None else np.pad(row.dlse, ((0, 0), (0, 0), (0, PADDING)))
    return row._replace(spec=spec, inputs=row.inputs._replace(q=q, k=k, v=v), dout=dout, dlse=dlse)


def _unpadded(arrays: Arrays, spec: AttentionSpec, part: Part) -> Arrays:
    """Returns the results of a row of its own, or of a document, without padding."""
    queries, keys = (
        (len(range(*tokens.indices(2**62))) for tokens in part) if spec.packed else (spec.q_len, spec.kv_len)
    )
    ends = {"out": queries, "dq": queries, "dk": keys, "dv": keys}
    cut = {name: array[:, : ends[name]] if array.ndim == 4 else array for name, array in arrays.items() if name in ends}
    return cut | {"lse": arrays["lse"][..., :queries]} if "lse" in arrays else cut


def _in_order(trial: Trial, parts: list[Part]) -> Trial:
    """Returns a trial with some of the documents or rows, in this order."""
    spec, inputs = trial.spec, trial.inputs
    queries, keys = (np.concatenate([np.r_[part[side]] for part in parts]) for side in (0, 1))
    tensors = inputs._replace(q=inputs.q[queries], k=inputs.k[keys], v=inputs.v[keys])
    if not spec.packed:
        slopes, dlse = inputs.alibi_slopes, None if trial.dlse is None else trial.dlse[queries]
        slopes = slopes[queries] if slopes is not None and slopes.ndim == 2 else slopes
        rows = replace(spec, batch=len(parts), alibi_shape=None if slopes is None else slopes.shape)
        return Trial(rows, tensors._replace(alibi_slopes=slopes), None, trial.dout[queries], dlse, trial.seed)
    dlse = None if trial.dlse is None else trial.dlse[:, queries]
    return _packed(spec, tensors, trial.dout[queries], dlse, [[s.stop - s.start for s in part] for part in parts])


def _packed(spec: AttentionSpec, tensors: Any, dout: Any, dlse: Any, lengths: list[list[int]]) -> Trial:
    info = SeqInfo.from_lengths(*(list(side) for side in zip(*lengths)))
    sizes: dict[str, Any] = {"batch": 1, "q_len": len(tensors.q), "kv_len": len(tensors.k), "documents": len(lengths)}
    packed = replace(spec, **sizes, max_len_q=info.max_len_q, max_len_k=info.max_len_k)
    offsets = {"cu_seqlens_q": info.cu_seqlens_q, "cu_seqlens_k": info.cu_seqlens_k}
    return Trial(packed, tensors._replace(**offsets), info, dout, dlse)


def _as_case(case: Case, trial: Trial, entry: str | None = None) -> Case:
    """Returns the case of a rewritten trial, of which ``run_call`` needs the entry alone."""
    return replace(case, entry=entry or case.entry, spec=trial.spec, lengths=None)


# The cuts of a prompt


def prompts(subject: Subject, spec: AttentionSpec) -> AttentionSpec:
    """Returns the spec of whole causal prompts: as many queries as keys, without gradients."""
    same: dict[str, Any] = {"kv_len": spec.q_len, "max_len_k": spec.max_len_q}
    same |= {"causal": True, "return_lse": True, "window": (spec.window[0], None)}
    return requested(replace(_narrow(spec), **NOT_ON_PAGES | same), PREFIX)


def is_prompt(spec: AttentionSpec) -> bool:
    """Returns whether there is a prompt to cut, and its causal diagonal was not refused."""
    return spec.causal and spec.q_len >= 2


def ignores_the_cuts(subject: Subject, case: Case) -> Finding:
    """Cuts prompts into chunks, on tensors and on pages, and compares the bits of out and lse with the whole."""
    trial = _squared(trial_of(case))
    random = np.random.default_rng(case.seed)
    for number, (rows, keys) in _longest(parts_of(trial)):
        prompt = _prompt(trial, rows, keys)
        length = prompt.spec.q_len
        if length < 2:
            continue
        _, entry, first = next(_ways(subject, prompt, 0, length))
        whole = _by_token(run_call(subject, _as_case(case, first, entry), first), first.spec)
        ends = sorted({int(random.integers(1, length)), length - 1, length})
        for start, end in [(0, length), *zip([0, *ends], ends)]:
            for words, entry, chunk in _ways(subject, prompt, start, end):
                results = _by_token(run_call(subject, _as_case(case, chunk, entry), chunk), chunk.spec)
                expected = {name: np.ascontiguousarray(array[start:end]) for name, array in whole.items()}
                if wrong := differing(expected, results):
                    where = f"queries {start} to {end - 1} of prompt {number}, {length} tokens, {words}"
                    return Finding(f"{where}, differ from the whole prompt: {', '.join(wrong)}")
    return Finding()


def _longest(parts: list[Part]) -> list[tuple[int, Part]]:
    """Returns the longest prompt with its number. One alone, because JAX compiles each of its chunks."""
    return [max(enumerate(parts), key=lambda each: each[1][0].stop - each[1][0].start)]


def _squared(trial: Trial) -> Trial:
    """Returns a packed trial whose documents of keys are those of its queries."""
    if trial.seq_info is None:
        return trial
    lengths = np.diff(trial.seq_info.cu_seqlens_q).tolist()
    total = sum(lengths)
    inputs = trial.inputs._replace(**{name: getattr(trial.inputs, name)[:total] for name in "qkv"})
    return _packed(trial.spec, inputs, trial.dout[:total], None, [[n, n] for n in lengths])


def _prompt(trial: Trial, rows: slice, keys: slice) -> Trial:
    """Returns one prompt as a row without documents."""
    if trial.spec.packed:
        return document_alone(trial, rows, keys)
    return _in_order(trial, [(rows, keys)])


def _by_token(arrays: Arrays, spec: AttentionSpec) -> Arrays:
    """Returns out and lse with the tokens as first axis."""
    lse = arrays["lse"].reshape(spec.num_heads, -1).T
    out = arrays["out"].reshape(-1, spec.num_heads, spec.value_dim)
    return {"out": np.ascontiguousarray(out), "lse": np.ascontiguousarray(lse)}


def _ways(subject: Subject, prompt: Trial, start: int, end: int) -> Iterator[tuple[str, str, Trial]]:
    """Yields the queries of a chunk with the keys up to its end: (in words, the entry, the trial)."""
    spec, inputs, framework = prompt.spec, prompt.inputs, subject.framework
    cut = inputs._replace(q=inputs.q[:, start:end], k=inputs.k[:, :end], v=inputs.v[:, :end])
    cut_spec = replace(spec, q_len=end - start, kv_len=end)
    chunk = prompt._replace(spec=cut_spec, inputs=cut, dout=prompt.dout[:, start:end])
    if not subject.pages_alone:
        yield "on tensors", DENSE[framework], chunk
    if subject.claims.paged:
        flat = cut._replace(**{name: getattr(cut, name)[0] for name in "qkv"})
        packed = _packed(chunk.spec, flat, chunk.dout[0], None, [[end - start, end]])
        # The seed chooses the size of a page, and the order of the pages.
        yield "on pages", PAGED[framework], packed._replace(seed=prompt.seed + end)
