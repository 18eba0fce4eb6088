"""The options of a call as the caller writes them, and their checks."""

from __future__ import annotations

import numbers
from typing import Any, Literal, NamedTuple, get_args

from attn_core.call.seq_info import is_host_int, must_be_static
from attn_core.errors import SpecError, shown
from attn_core.expressions.tree import Expression

Alignment = Literal["bottom_right", "top_left"]
Invariant = Literal["batch", "prefix"]
"""What a result must not depend on: see ``AttentionSpec.invariant``."""
Window = int | tuple[int | None, int | None] | None
"""The argument ``window``; ``normalise_window`` makes a pair of it."""


class Options(NamedTuple):
    """The options of a call: the keyword arguments of ``attention`` that are not tensors, under the same names.

    The functions are expressions, traced by ``functions.trace``.
    """

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
    mask_mod: Expression | None = None
    score_mod: Expression | None = None
    aux_gradients: tuple[int, ...] = ()
    """The numbers of the aux arrays whose gradient may be requested; the frontends find out."""
    invariant: str | None = None


PLAIN = ("causal", "alignment", "window", "softcap", "scale", "dropout", "deterministic", "return_lse", "invariant")
"""The options that are flags and numbers. All lists of options that a call passes on come from it, so none is lost."""
ON_PAGES = tuple(name for name in PLAIN if name not in ("alignment", "window", "dropout"))
"""The options of ``paged_attention`` among them, but for the window, which a call on a dense cache first adjusts."""


def check_options(options: Options) -> Options:
    """Returns the options after checking each type and value. The window becomes a pair, and numbers become floats.

    The public functions call it, because options become the key of a cache, in which 1 and True would be equal. A spec
    calls it for its own fields, because anyone may build a spec. Functions between the two trust their options.

    Raises:
        SpecError: naming the option, its value and what was expected.
    """
    check_flag("causal", options.causal)
    check_flag("deterministic", options.deterministic)
    check_flag("return_lse", options.return_lse)
    if not isinstance(options.alignment, str) or options.alignment not in get_args(Alignment):
        expected = f"expected one of {', '.join(get_args(Alignment))}{must_be_static(options.alignment)}"
        raise SpecError(f"alignment={shown(options.alignment)}: {expected}")
    check_invariant(options.invariant)
    softcap = _positive("softcap", options.softcap, "None switches it off")
    scale = _positive("scale", options.scale, "None gives 1/sqrt(head_dim)")
    dropout = check_number("dropout", options.dropout) or 0.0
    # 1 is excluded, because the other weights are multiplied by 1 / (1 - dropout).
    if not 0 <= dropout < 1:
        raise SpecError(f"dropout={options.dropout}: expected a probability in [0, 1); 0 switches it off")
    window = normalise_window(options.window, options.causal)
    return options._replace(window=window, softcap=softcap, scale=scale, dropout=dropout)


def check_traced_options(options: Options) -> Options:
    """Returns the options of a call that a compiler traces, with the flags and the window checked.

    The numbers may be symbols in a trace, so the op that the trace contains checks them when it runs.
    """
    for name in ("causal", "deterministic", "return_lse"):
        check_flag(name, getattr(options, name))
    check_invariant(options.invariant)
    window = normalise_window(options.window, options.causal)
    return options._replace(window=window, dropout=options.dropout or 0.0)  # 0.0 itself may be a symbol


def requested_names(backend: Any) -> tuple[str, ...] | None:
    """Returns the names in ``backend=``, which is one name or several in order of preference; None for None.

    Raises:
        SpecError: for any other value.
    """
    if backend is None:
        return None
    names = (backend,) if isinstance(backend, str) else backend
    if not isinstance(names, (tuple, list)) or not names or not all(isinstance(name, str) and name for name in names):
        expected = f"expected a backend's name, or a tuple of names in order of preference{must_be_static(backend)}"
        raise SpecError(f"backend={shown(backend)}: {expected}")
    return tuple(names)


def normalise_window(window: Any, causal: bool) -> tuple[int | None, int | None]:
    """Returns a window as a pair of inclusive distances, in which None is unbounded.

    An int W means W keys, self included: ``(W - 1, 0)``. A pair is returned unchanged; None becomes ``(None, None)``.

    Raises:
        SpecError: for an int without ``causal``, a negative distance, or any other value.
    """
    if window is None:
        return (None, None)
    if is_host_int(window):
        if not check_flag("causal", causal):
            raise SpecError(
                f"window={window}: expected causal=True with an int, which is a number of keys up to and including "
                "self; without causal pass inclusive distances, such as "
                # The remedy must be a legal window, also if this one is below 1.
                f"window=({max(window - 1, 0)}, {max(window - 1, 0)})"
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
    distances = window if isinstance(window, (tuple, list)) else (window,)
    hint = next(filter(None, map(must_be_static, distances)), "")
    raise SpecError(f"window={shown(window)}: expected an int, a pair (left, right) of ints or None, or None{hint}")


def is_plain_window(window: Any) -> bool:
    """Returns whether a window is None, an int, or a tuple of two ints or Nones, and so may be part of a cache's key.

    ``(3.0, 0)`` and ``(True, 0)`` are equal to pairs of ints. A typed cache compares the type of the window, but not
    the types inside a tuple, so it would return the plan of the valid pair for an invalid one.
    """
    if type(window) is not tuple:
        return window is None or type(window) is int
    if len(window) != 2:
        return False
    left, right = window
    return (left is None or type(left) is int) and (right is None or type(right) is int)


def check_flag(name: str, value: Any) -> bool:
    """Returns a value that is True or False. Raises SpecError for any other value, such as 1."""
    if not isinstance(value, bool):
        raise SpecError(f"{name}={shown(value)}: expected True or False{must_be_static(value)}")
    return value


def check_invariant(value: Any) -> str | None:
    """Returns a value of ``invariant``: "batch", "prefix" or None. Raises SpecError for any other value."""
    if value is None or (isinstance(value, str) and value in get_args(Invariant)):
        return value
    expected = f"expected one of {', '.join(get_args(Invariant))}, or None{must_be_static(value)}"
    raise SpecError(f"invariant={shown(value)}: {expected}")


def check_number(name: str, value: Any) -> float | None:
    """Returns a real number on the host as a float; None for None. Raises SpecError for any other value."""
    if value is None:
        return None
    # A bool is a Real in Python, and would pass as the number 0 or 1.
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise SpecError(f"{name}={shown(value)}: expected a number known on the host{must_be_static(value)}")
    try:
        return float(value)
    except OverflowError:
        raise SpecError(f"{name}: expected a number up to 1.8e308, the largest float, got a larger one") from None


_LARGEST = 3.4028235e38
"""The largest float32."""


def _positive(name: str, value: Any, remedy: str) -> float | None:
    """Returns a finite number above 0 as a float; None for None."""
    checked_number = check_number(name, value)
    # Kernels compute in float32, in which a larger number is infinite.
    if checked_number is not None and not 0 < checked_number <= _LARGEST:
        raise SpecError(f"{name}={value}: expected a finite number above 0; {remedy}")
    return checked_number
