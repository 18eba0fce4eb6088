"""The options of a call as the caller writes them, and the one place that checks them."""

from __future__ import annotations

import math
import numbers
from typing import Any, Literal, NamedTuple, get_args

from attn_core.call.seq_info import is_host_int
from attn_core.errors import SpecError

Alignment = Literal["bottom_right", "top_left"]


class Options(NamedTuple):
    """The options of a call as the caller wrote them; the keywords of ``attention`` by the same names."""

    causal: bool = False
    alignment: str = "bottom_right"
    window: int | tuple[int | None, int | None] | None = None
    softcap: float | None = None
    scale: float | None = None
    max_len_q: int | None = None
    max_len_k: int | None = None
    dropout: float = 0.0
    deterministic: bool = False
    return_lse: bool = False


def checked(options: Options) -> Options:
    """Returns the options with every type and value checked; the window is then a pair, and the numbers Python floats.

    A call's entry checks its options, because they become the key of a cache. A spec checks its own with this function,
    because anyone may build one. Functions between the two trust their options.

    Raises:
        SpecError: naming the option, its value and what was expected.
    """
    flag("causal", options.causal)
    flag("deterministic", options.deterministic)
    flag("return_lse", options.return_lse)
    if not isinstance(options.alignment, str) or options.alignment not in get_args(Alignment):
        raise SpecError(f"alignment={options.alignment!r}: expected one of {', '.join(get_args(Alignment))}")
    softcap = _positive("softcap", options.softcap, "None switches it off")
    scale = _positive("scale", options.scale, "None gives 1/sqrt(head_dim)")
    dropout = number("dropout", options.dropout) or 0.0
    if not 0 <= dropout < 1:
        raise SpecError(f"dropout={options.dropout}: expected a probability in [0, 1); 0 switches it off")
    window = normalise_window(options.window, options.causal)
    return options._replace(window=window, softcap=softcap, scale=scale, dropout=dropout)


def checked_in_trace(options: Options) -> Options:
    """Returns the options of a call that a compiler traces, with the flags and the window checked.

    The numbers may be symbols in a trace, so the op that the trace contains checks them when it runs.
    """
    for name in ("causal", "deterministic", "return_lse"):
        flag(name, getattr(options, name))
    window = normalise_window(options.window, options.causal)
    return options._replace(window=window, dropout=options.dropout or 0.0)  # 0.0 itself may be a symbol


def requested_names(backend: Any) -> tuple[str, ...] | None:
    """The names of ``backend=``: one, or several in order of preference; None where there is none.

    Raises:
        SpecError: for what is neither a name nor names.
    """
    if backend is None:
        return None
    names = (backend,) if isinstance(backend, str) else backend
    if not isinstance(names, (tuple, list)) or not names or not all(isinstance(name, str) and name for name in names):
        raise SpecError(f"backend={backend!r}: expected a backend's name, or a tuple of names in order of preference")
    return tuple(names)


def normalise_window(window: Any, causal: bool) -> tuple[int | None, int | None]:
    """``W`` -> ``(W - 1, 0)``: W keys, self included. A pair of inclusive distances passes through; None: unbounded."""
    if window is None:
        return (None, None)
    if is_host_int(window):
        if not flag("causal", causal):
            raise SpecError(
                f"window={window}: an int means that many keys up to and including self, which needs causal=True; "
                f"without causal give inclusive distances, such as window=({max(window - 1, 0)}, {max(window - 1, 0)})"
            )
        if window < 1:
            raise SpecError(f"window={window}: expected 1 or more keys, self included; None is unbounded")
        return (int(window) - 1, 0)
    if isinstance(window, (tuple, list)) and len(window) == 2 and all(w is None or is_host_int(w) for w in window):
        left, right = (None if w is None else int(w) for w in window)
        for side, distance in (("left", left), ("right", right)):
            if distance is not None and distance < 0:
                raise SpecError(
                    f"window={tuple(window)}: expected a {side} distance of 0 or more, got {distance}; "
                    "None is unbounded"
                )
        return (left, right)
    raise SpecError(f"window={window!r}: expected an int, a pair (left, right) of ints or None, or None")


def is_plain_window(window: Any) -> bool:
    """Whether a window has the types that a key of a cache may have: an int, or a tuple of ints and Nones, or None.

    ``(3.0, 0)`` and ``(True, 0)`` equal pairs of ints. A cache that knows only the types of its arguments would take
    them for such, so what is no plain window is checked each time.
    """
    if type(window) is not tuple:
        return window is None or type(window) is int
    if len(window) != 2:
        return False
    left, right = window
    return (left is None or type(left) is int) and (right is None or type(right) is int)


def flag(name: str, value: Any) -> bool:
    """The value, if it is True or False and nothing like it."""
    if not isinstance(value, bool):
        raise SpecError(f"{name}={value!r}: expected True or False")
    return value


def number(name: str, value: Any) -> float | None:
    """The value as a float, if it is a real number on the host; None for None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise SpecError(
            f"{name}={value!r}: expected a number known on the host; under jit or compile it must be a static argument"
        )
    try:
        return float(value)
    except OverflowError:
        raise SpecError(f"{name}: expected a number that a float can hold, got one beyond 1.8e308") from None


def _positive(name: str, value: Any, remedy: str) -> float | None:
    checked_number = number(name, value)
    if checked_number is not None and not (math.isfinite(checked_number) and checked_number > 0):
        raise SpecError(f"{name}={value}: expected a finite number above 0; {remedy}")
    return checked_number
