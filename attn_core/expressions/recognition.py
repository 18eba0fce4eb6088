"""What the terms of a mask function say in a cheaper form: a band of distances, chunks, documents by their ids.

The terms are those of the outermost ``and``. A term is recognised only if the cheaper form shows exactly the same pairs
for all indices up to ``MAX_INDEX``, ints that wrap around included. All others stay an expression.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from attn_core.expressions.building import build
from attn_core.expressions.properties import INT_MAX, INT_MIN, MAX_INDEX
from attn_core.expressions.tree import Expression, nodes


class Split(NamedTuple):
    """A mask as a band and what is left of it.

    Attributes:
        least, most: the bounds of ``k - q``, both included; None is unbounded.
        rest: the other terms, joined by ``and``; None if there are none.
    """

    least: int | None = None
    most: int | None = None
    rest: Expression | None = None


class Groups(NamedTuple):
    """A mask that shows the pairs of one group of tokens: a chunk of a fixed size, or the tokens of equal ids.

    Attributes:
        chunk: the tokens of a chunk, which count from the start of the row; None for ids.
        array: the number of the array of ids; None for chunks.
        by_row: whether the ids have an axis for batch rows before the one for tokens.
    """

    chunk: int | None = None
    array: int | None = None
    by_row: bool = False


@lru_cache(maxsize=256)
def split(tree: Expression) -> Split:
    """Returns a mask as a band and what is left of it; cached."""
    forms = _linear_forms(tree)
    least: int | None = None
    most: int | None = None
    rest: Expression | None = None
    for term in _terms(tree):
        bounds = _bounds_of_distance(term, forms)
        if bounds is None:
            rest = term if rest is None else build("and", rest, term)
            continue
        low, high = bounds
        least = low if least is None else least if low is None else max(least, low)
        most = high if most is None else most if high is None else min(most, high)
    return Split(least, most, rest)


@lru_cache(maxsize=256)
def groups_of(tree: Expression) -> Groups | None:
    """Returns the groups whose pairs a mask shows, ``q // 64 == k // 64`` or ``ids[q] == ids[k]``; None for another."""
    if tree.op != "equal":
        return None
    sides = {_leaf_of(operand): operand for operand in tree.operands}
    if set(sides) != {"q", "k"}:
        return None
    of_query, of_key = sides["q"], sides["k"]
    if of_query.op == "lookup":
        same = (
            of_key.op == "lookup" and of_query.value == of_key.value and of_query.operands[:-1] == of_key.operands[:-1]
        )
        return Groups(array=int(of_query.value or 0), by_row=len(of_query.operands) == 2) if same else None
    chunk = _chunk_of(of_query)
    return Groups(chunk=chunk) if chunk is not None and chunk == _chunk_of(of_key) else None


def _leaf_of(tree: Expression) -> str | None:
    """Returns "q" or "k" if the tree is a chunk of this index, or a lookup of an int by it and perhaps the row."""
    if tree.op == "lookup" and tree.kind == "int":
        *before, last = [operand.op for operand in tree.operands]
        return last if before in ([], ["b"]) and last in ("q", "k") else None
    return tree.operands[0].op if _chunk_of(tree) is not None else None


def _chunk_of(tree: Expression) -> int | None:
    """Returns the divisor of ``index // divisor`` or ``index >> bits``; None for another tree."""
    if tree.op not in ("floor_divide", "shift_right"):
        return None
    index, by = tree.operands
    if index.op not in ("q", "k") or by.op != "constant" or by.value is None:
        return None
    # Of indices, which are not negative, a shift is a division.
    divisor = int(by.value) if tree.op == "floor_divide" else 1 << int(by.value)
    return divisor if divisor > 0 else None


def _terms(tree: Expression) -> list[Expression]:
    """Returns the terms of the outermost ``and``, each once, in their order."""
    terms: dict[Expression, None] = {}
    seen: set[Expression] = set()
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if node.op != "and":
            terms[node] = None
        elif node not in seen:  # a node that is used twice would be walked exponentially often
            seen.add(node)
            waiting += reversed(node.operands)
    return list(terms)


class _Linear(NamedTuple):
    """``q * of_q + k * of_k + constant``, which never wraps around."""

    of_q: int
    of_k: int
    constant: int

    def fits(self) -> bool:
        """Whether every value is an int of 32 bits, and its negative, too."""
        ends = [(min(0, factor * MAX_INDEX), max(0, factor * MAX_INDEX)) for factor in self[:2]]
        low, high = (self.constant + sum(pair[end] for pair in ends) for end in (0, 1))
        return low > INT_MIN and high <= INT_MAX


def _linear_forms(tree: Expression) -> dict[Expression, _Linear]:
    """Returns the nodes of a tree that are linear in q and k, each with its form."""
    forms: dict[Expression, _Linear] = {}
    for node in nodes(tree):
        form = _linear(node, [forms.get(operand) for operand in node.operands])
        if form is not None and form.fits():
            forms[node] = form
    return forms


def _linear(node: Expression, operands: list[_Linear | None]) -> _Linear | None:
    if node.op in ("q", "k"):
        return _Linear(int(node.op == "q"), int(node.op == "k"), 0)
    if node.op == "constant" and node.kind == "int":
        return _Linear(0, 0, int(node.value or 0))
    if node.kind != "int" or None in operands or node.op not in ("add", "subtract", "negative", "multiply"):
        return None
    a, b = operands[0], operands[-1]
    assert a is not None and b is not None
    if node.op == "negative":
        return _scaled(a, -1)
    if node.op == "multiply":
        constant, other = (a, b) if a[:2] == (0, 0) else (b, a)
        return _scaled(other, constant.constant) if constant[:2] == (0, 0) else None
    return _sum(a, b if node.op == "add" else _scaled(b, -1))


def _sum(a: _Linear, b: _Linear) -> _Linear:
    return _Linear(*(x + y for x, y in zip(a, b, strict=True)))


def _scaled(form: _Linear, factor: int) -> _Linear:
    return _Linear(*(factor * part for part in form))


def _bounds_of_distance(term: Expression, forms: dict[Expression, _Linear]) -> tuple[int | None, int | None] | None:
    """Returns the least and the most ``k - q`` for which a term is True; None if that is not all it says."""
    negated = term.op == "not"
    term = term.operands[0] if negated else term
    if term.op not in ("less", "less_equal", "equal") or (negated and term.op == "equal"):
        return None
    a, b = term.operands[::-1] if negated else term.operands  # not a < b is b <= a
    if a.op == "abs" and term.op != "equal":
        return _within(forms.get(a.operands[0]), forms.get(b), (term.op == "less") != negated)
    left, right = forms.get(a), forms.get(b)
    if left is None or right is None:
        return None
    # The difference of the sides, which cannot wrap around here: at least 0, at least 1, or 0.
    difference = _sum(right, _scaled(left, -1))
    if term.op == "equal":
        lower, upper = _at_least(difference), _at_least(_scaled(difference, -1))
        return None if lower is None or upper is None else _both(lower, upper)
    is_strict = (term.op == "less") != negated
    return _at_least(difference._replace(constant=difference.constant - is_strict))


def _within(inside: _Linear | None, limit: _Linear | None, is_strict: bool) -> tuple[int | None, int | None] | None:
    """Returns the bounds of ``abs(inside) <= limit``, or ``<``."""
    if inside is None or limit is None or limit[:2] != (0, 0):
        return None
    most = limit.constant - is_strict
    lower = _at_least(inside._replace(constant=inside.constant + most))
    upper = _at_least(_scaled(inside, -1)._replace(constant=most - inside.constant))
    return None if lower is None or upper is None else _both(lower, upper)


def _at_least(form: _Linear) -> tuple[int | None, int | None] | None:
    """Returns the bounds of ``k - q`` that say ``form >= 0``; None if it is no multiple of the distance."""
    if form.of_k != -form.of_q or form.of_k == 0:
        return None
    if form.of_k > 0:
        return -(form.constant // form.of_k), None  # the least distance whose multiple is at least -constant
    return None, form.constant // form.of_q


def _both(first: tuple[int | None, int | None], second: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    """Returns a lower and an upper bound, in any order, as a pair."""
    return (first[0], second[1]) if first[1] is None else (second[0], first[1])
