"""checks: a debug mode that warns of values of a call and of its results that are almost always a mistake.

The shapes, dtypes and devices of results are checked always; ``result_error`` says what is wrong with one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import numpy as np

from attn_core.call.arguments import may_be_heads_first
from attn_core.call.functions import AUX
from attn_core.call.masks import visible
from attn_core.call.observe import OURS, Switch, variable_of, warn
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Array, dtype_name
from attn_core.errors import ResultError
from attn_core.expressions.properties import check_ints
from attn_core.expressions.tree import ExpressionError

_enabled = variable_of("checks")

enabled = _enabled.get
"""Returns whether checks are on. The bound method of the context variable itself, because every call reads it."""


MAY_HIDE = ("bias", "sinks", "lse")
"""Operands in which -inf has a meaning: it hides a key in a bias, and switches off a sink."""


class CheckWarning(UserWarning):
    """A finding of ``checks``; ``warnings.simplefilter("error", CheckWarning)`` makes it an error."""


def checks(on: bool = True) -> Switch:
    """Switches the checks of values on or off: ``checks(True)`` from here on, ``with checks(True):`` for a block.

    Each eager call of ``attention`` then warns with ``CheckWarning`` of rows that see no key, masks that look inverted
    or like an upper triangle, inputs that are not finite, and NaN that a kernel returns for finite inputs, in both
    directions. It reads all values, so it waits for the device, and needs the time and memory of a full mask. Calls
    inside ``jax.jit``, ``torch.compile`` and transforms are not checked, except that a function which JAX traces while
    checks are on warns of wrong offsets of documents and of NaN in results when it runs. ``ATTN_CORE_CHECKS=1``
    switches the checks on when the package is imported. The switch belongs to the current thread or task.

    Raises:
        SpecError: unless ``on`` is True or False.
    """
    return Switch("checks", _enabled, on)


def warn_of_values(spec: AttentionSpec, arrays: Mapping[str, np.ndarray | None], tokens: int | None = None) -> None:
    """Warns of every finding.

    Args:
        arrays: the call's arrays by the names of ``Inputs``, bfloat16 as float32.
        tokens: the query tokens that belong to a document; None for all. Later rows see no key by definition.
    """
    for finding in findings(spec, arrays, tokens):
        warn(finding, CheckWarning)


def warn_of_layout(q: Any, k: Any, caller: FrameType) -> None:
    """Warns that a call does not say its layout, if the shapes of q and k fit both.

    Args:
        caller: the frame that calls ``attention``; our own layers and drop-ins know their layout.
    """
    shapes = [tuple(getattr(each, "shape", ())) for each in (q, k)]
    if not all(len(shape) == 4 for shape in shapes) or not may_be_heads_first(*shapes):
        return
    if str(caller.f_globals.get("__name__", "")).partition(".")[0] not in OURS:
        warn(
            f"layout=None: expected 'bshd' or 'bhsd' while checks are on, because q {list(shapes[0])} and k "
            f"{list(shapes[1])} are read as [batch, seq, heads, head_dim], but fit [batch, heads, seq, head_dim], too",
            CheckWarning,
        )


def findings(spec: AttentionSpec, arrays: Mapping[str, np.ndarray | None], tokens: int | None = None) -> Iterator[str]:
    """Yields a sentence for everything in the values of a call that is almost always a mistake."""
    for name, array in arrays.items():
        if array is not None and array.dtype.kind == "f" and (wrong := _not_finite(name, array)).any():
            first = [int(index) for index in np.argwhere(wrong)[0]]
            yield f"{name}: {int(wrong.sum())} of {array.size} values are not finite, the first is {name}{first}"
    for number, array in enumerate(map(arrays.get, AUX)):
        try:
            check_ints(number, array)
        except ExpressionError as error:  # of an array on a device, whose low 32 bits count
            yield str(error)
    mask = arrays.get("mask")
    if mask is not None and mask.size:
        yield from _polarity(mask, spec)
    yield from _blind_rows(spec, arrays, tokens)


def _not_finite(name: str, array: np.ndarray) -> np.ndarray:
    """Returns where an operand is NaN, or infinite without a meaning."""
    return ~(np.isfinite(array) | ((array == -np.inf) if name in MAY_HIDE else False))


def _polarity(mask: np.ndarray, spec: AttentionSpec) -> Iterator[str]:
    """Yields a sentence if True seems to mean hidden, as in torch.nn's masks."""
    *_, rows, columns = (1, 1, *mask.shape)
    if rows == columns > 1 and any((mask == np.triu(np.ones((rows, columns), bool), above)).all() for above in (0, 1)):
        yield (
            f"mask: the visible keys of {list(mask.shape)} are an upper triangle, the future; in torch.nn True hides, "
            "here it shows: pass ~mask, or causal=True without a mask"
        )
    elif rows == 1 and columns == spec.kv_len and 2 * mask.sum() < mask.size and not mask.all(-1).any():
        yield (
            f"mask: the mask of keys {list(mask.shape)} shows {int(mask.sum())} of {mask.size} keys and no whole row, "
            "so it looks inverted; in torch.nn True hides padding, here True shows a key: pass ~mask"
        )


def _blind_rows(spec: AttentionSpec, arrays: Mapping[str, np.ndarray | None], tokens: int | None) -> Iterator[str]:
    """Yields a warning if rows see no key: most often a mistake in the mask.

    Args:
        tokens: the rows that belong to a document; those behind the last offset see nothing by right.
    """
    bias = arrays.get("bias")
    names = ("mask", "cu_seqlens_q", "cu_seqlens_k", "key_ranges")
    tables = {name: arrays.get(name) for name in names}
    aux = [array for array in map(arrays.get, AUX) if array is not None]
    seen: Any = visible(spec, **tables, aux=aux)
    if bias is not None:
        seen = seen & (bias != -np.inf)
    blind = ~seen.any(-1)[..., :tokens]  # [batch or 1, heads or 1, rows]
    if blind.any():
        batch, head, row = (int(index) for index in np.argwhere(blind)[0])
        causes = [name for name in ("mask", "key_ranges", "bias") if arrays.get(name) is not None]
        causes += ["mask_mod"] if spec.mask_mod is not None else []
        causes += [name for name, given in (("causal", spec.causal), ("window", spec.window != (None, None))) if given]
        yield (
            f"{' and '.join(causes) or 'kv_len'}: {int(blind.sum())} of {blind.size} rows see no key, so their output "
            f"is 0; the first is query {row} of head {head} in batch row {batch}"
        )


def result_error(name: str, actual: Any, shape: tuple[int, ...], dtype: str, device: object = None) -> ResultError:
    """Returns the error for a result of the wrong type, shape, dtype or device.

    Args:
        name: of the result: out, lse, dq and so on.
        device: the expected device; None if it cannot differ.
    """
    place = "" if device is None else f" on {device}"
    expected = f"{dtype} {list(shape)}{place}"
    if hasattr(actual, "shape") and hasattr(actual, "dtype"):
        where = "" if device is None else f" on {actual.device}"
        got = f"{dtype_name(actual)} {list(actual.shape)}{where}"
    else:
        got = type(actual).__name__
    return ResultError(
        f"{name}: the kernel returned {got}, expected {expected}; the installed version of its package does not do "
        "what this backend expects: name another backend, and see `attn doctor`"
    )


def warn_of_results(
    name: str, dropout: float, operands: Mapping[str, Array | None], results: Mapping[str, Array | None]
) -> None:
    """Warns of each result with NaN, if every operand is finite.

    An output of infinity counts as well, because it is a mean of finite values; with dropout it is not. A gradient of
    half precision may overflow to infinity.

    Args:
        name: the call's ``range_name``, which begins with the backend.
        operands, results: arrays by name, of numpy or bfloat16 of ml_dtypes; None for an absent one.
    """
    if not all(_is_finite(operand, array) for operand, array in operands.items()):
        return
    for result, array in results.items():
        wrong = None if array is None else _places_wrong(result, np.asarray(array), dropout)
        if wrong is not None and wrong.any():
            first = [int(index) for index in np.argwhere(wrong)[0]]
            warnings.warn(
                f"{result}: {int(wrong.sum())} of {wrong.size} values are NaN or infinite, the first is "
                f"{result}{first}, although every input of the call {name} is finite: the kernel is wrong for this "
                'call; name another backend, for instance backend="math"',
                CheckWarning,
                stacklevel=2,
            )


def _places_wrong(result: str, array: np.ndarray, dropout: float) -> np.ndarray:
    """Returns where a result has a value that finite operands cannot give."""
    if result == "out" and not dropout:
        return ~np.isfinite(array)
    if result == "lse":  # -inf belongs to a row without keys
        return np.isnan(array) | (array == np.inf)
    return np.isnan(array)


def _is_finite(name: str, array: Array | None) -> bool:
    return array is None or np.asarray(array).dtype.kind in "iub" or not _not_finite(name, np.asarray(array)).any()
