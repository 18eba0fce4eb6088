"""The option ``--key-ranges``: a call of a constructor of ``attn_core.masks``, as it is written in Python."""

from __future__ import annotations

import ast

import numpy as np

from attn_core import masks
from attn_core.errors import SpecError


def key_ranges_of(text: str) -> np.ndarray:
    """Returns the key ranges that a text such as ``"shared_prefix(4, [3, 3])"`` builds. The arguments are literals.

    Raises:
        SpecError, ShapeError: for another text, and for what the constructor refuses.
    """
    expected = f"--key-ranges={text[:200]!r}: expected a call such as 'shared_prefix(4, [3, 3])'"
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise SpecError(f"{expected}, got no Python expression") from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in masks.__all__:
        raise SpecError(f"{expected}, of one of {', '.join(masks.__all__)}")
    try:
        arguments = [ast.literal_eval(each) for each in call.args]
        keywords = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise SpecError(f"{expected}, whose arguments are numbers, lists, True, False or None") from None
    try:
        ranges: np.ndarray = getattr(masks, call.func.id)(*arguments, **keywords)
    except TypeError as error:  # too many arguments, or too few
        raise SpecError(f"{expected}: {error}") from None
    return ranges
