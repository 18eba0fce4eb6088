"""checks: a debug mode that looks at the values of each call and warns of what is almost always a mistake."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from attn_core.call.functions import AUX
from attn_core.call.masks import visible
from attn_core.call.spec import AttentionSpec
from attn_core.call.switch import Switch, variable_of
from attn_core.expressions.properties import check_ints
from attn_core.expressions.tree import ExpressionError

_enabled = variable_of("checks")

enabled = _enabled.get
"""Returns whether checks are on. The bound method of the context variable itself, because every call reads it."""


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
        warnings.warn(finding, CheckWarning, stacklevel=2)


def findings(spec: AttentionSpec, arrays: Mapping[str, np.ndarray | None], tokens: int | None = None) -> Iterator[str]:
    """Yields a sentence for everything in the values of a call that is almost always a mistake."""
    for name, array in arrays.items():
        if array is not None and array.dtype.kind == "f":
            yield from _not_finite(name, array)
    for number, array in enumerate(map(arrays.get, AUX)):
        try:
            check_ints(number, array)
        except ExpressionError as error:  # of an array on a device, whose low 32 bits count
            yield str(error)
    mask = arrays.get("mask")
    if mask is not None and mask.size:
        yield from _polarity(mask, spec)
    yield from _blind_rows(spec, arrays, tokens)


def _not_finite(name: str, array: np.ndarray) -> Iterator[str]:
    # -inf hides a key in a bias, and switches off a sink.
    wrong = ~np.isfinite(array) & ~((array == -np.inf) if name in ("bias", "sinks") else False)
    if wrong.any():
        first = tuple(int(index) for index in np.argwhere(wrong)[0])
        yield f"{name}: {int(wrong.sum())} of {array.size} values are not finite, the first is {name}{list(first)}"


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
