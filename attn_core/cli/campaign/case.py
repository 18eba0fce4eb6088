"""Case: one call of a campaign as plain data, and as one line of JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from attn_core.call.plain import plain_fields, spec_of
from attn_core.call.seq_info import SeqInfo
from attn_core.call.spec import AttentionSpec
from attn_core.errors import SpecError

LONGEST_TEXT = 64 * 1024
"""Characters. A reproducer has a few hundred; a longer text is no reproducer."""

Lengths = tuple[tuple[int, ...], tuple[int, ...]]
"""The tokens of each query document, and of each key document."""


@dataclass(frozen=True)
class Case:
    """One call, complete: the same Case gives the same numbers on every machine.

    Attributes:
        entry: the entry point that runs it, a name of ``entries.ENTRIES``.
        spec: the call.
        backend: the backend by name, or None for automatic choice.
        seed: of the numbers.
        lengths: of the packed documents; None if the call is not packed. Tokens behind the last one belong to none.
        relation: a name of ``relations.RELATIONS``: the call is rewritten that way before it runs, and its result must
            still be that of ``spec``. None runs the call as it is.
    """

    entry: str
    spec: AttentionSpec
    backend: str | None = None
    seed: int = 0
    lengths: Lengths | None = None
    relation: str | None = None

    @property
    def seq_info(self) -> SeqInfo | None:
        """The documents with numpy offsets, or None."""
        if self.lengths is None:
            return None
        spec = self.spec
        return SeqInfo.from_lengths(*self.lengths, max_len=(spec.max_len_q or 0, spec.max_len_k or 0))

    def __str__(self) -> str:
        return text_of(self)


FIELDS: dict[str, tuple[type, ...]] = {
    "entry": (str,),
    "spec": (dict,),
    "backend": (str, type(None)),
    "seed": (int,),
    "lengths": (list, type(None)),
    "relation": (str, type(None)),
}


def text_of(case: Case) -> str:
    """Returns a case as one line of JSON, without the fields that have their defaults."""
    plain: dict[str, Any] = {"entry": case.entry, "spec": plain_fields(case.spec), "seed": case.seed}
    plain |= {
        name: getattr(case, name) for name in ("backend", "lengths", "relation") if getattr(case, name) is not None
    }
    return json.dumps(plain)


def case_of(text: str) -> Case:
    """Inverts ``text_of``.

    Raises:
        SpecError: if the text is not the JSON of a case. The text is parsed as data; nothing in it is run.
    """
    if len(text) > LONGEST_TEXT:
        raise SpecError(f"case: expected at most {LONGEST_TEXT} characters, got {len(text)}")
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"case: expected one JSON object as a campaign prints it: {error}") from None
    if not isinstance(plain, dict) or not {"entry", "spec"} <= plain.keys():
        raise SpecError("case: expected a JSON object with at least 'entry' and 'spec'")
    for name, value in plain.items():
        if name not in FIELDS:
            raise SpecError(f"case: unknown field {name!r}; expected {', '.join(FIELDS)}")
        if not isinstance(value, FIELDS[name]) or isinstance(value, bool):
            expected = " or ".join("null" if kind is type(None) else kind.__name__ for kind in FIELDS[name])
            raise SpecError(f"case: {name}: expected {expected}, got {type(value).__name__}")
    try:
        spec = spec_of(plain["spec"])
    except TypeError as error:
        raise SpecError(f"case: spec: {error}") from None
    lengths = None if plain.get("lengths") is None else _lengths(plain["lengths"], spec)
    if (lengths is None) != (spec.documents is None):
        raise SpecError("case: expected lengths exactly if the spec has documents")
    options = {name: plain[name] for name in ("backend", "seed", "relation") if name in plain}
    return Case(plain["entry"], spec, lengths=lengths, **options)


def _lengths(plain: list[Any], spec: AttentionSpec) -> Lengths:
    right = len(plain) == 2 and all(
        isinstance(side, list) and len(side) == spec.documents and all(type(n) is int and n >= 0 for n in side)
        for side in plain
    )
    if not right:
        raise SpecError(f"case: lengths: expected two lists of {spec.documents} document lengths, 0 or more")
    queries, keys = (tuple(side) for side in plain)
    if sum(queries) > spec.q_len or sum(keys) > spec.kv_len:
        raise SpecError("case: lengths: expected no more tokens than q_len and kv_len have")
    return queries, keys
