"""The options of a call: one record of every argument besides queries, keys and values, and the checks of its values.

``OPTIONS`` has each option once. Lists of names, checks, layers, operators' schemas and the command line derive from
it. What type checkers and readers need spelled out (``Options``, the public signatures, the classes of
``call.keywords``) is compared with it by ``tests/repository/test_options.py``.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from enum import Flag, auto
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

from attn_core.call.kinds import is_host_int, must_be_static
from attn_core.errors import SpecError, shown
from attn_core.expressions.tree import Expression

Alignment = Literal["bottom_right", "top_left"]
Invariant = Literal["batch", "prefix"]
"""What a result must not depend on: see ``AttentionSpec.invariant``."""
Window = int | tuple[int | None, int | None] | None
"""The argument ``window``; ``normalise_window`` makes a pair of it."""


class Options(NamedTuple):
    """The options of a call that are plain values, under the names of ``attention``; and what tensors say about them.

    The functions are expressions, traced by ``functions.trace``.
    """

    causal: bool = False
    alignment: str = "bottom_right"
    window: Window = None
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

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Options:
        """Returns the plain options among named arguments, with the defaults of those that are missing."""
        return cls(**{name: values[name] for name in (*PLAIN, "max_len_q") if name in values})


class Door(Flag):
    """Who takes an option from the caller."""

    ATTENTION = auto()
    """``attention`` and ``explain``."""
    QKVPACKED = auto()
    PAGES = auto()
    """``paged_attention`` and ``explain_paged``."""
    CACHE = auto()
    """``PagedKVCache.attend``."""
    RANKS = auto()
    """``context_parallel_attention`` and ``explain_context_parallel``."""
    LAYER = auto()
    """The attention layers of torch and Flax, as an attribute. In Flax ``deterministic`` means "no dropout"."""
    LAYER_CALL = auto()
    """A call of these layers."""
    EQUINOX = auto()
    """``attend`` of ``jax_frontend.equinox``."""


class Option(NamedTuple):
    """An argument of a call besides q, k and v.

    Attributes:
        name, default: as in ``attention``; ``causal`` is True by default on pages.
        kind: its type; ``Array`` is the frontend's, and ``Random`` what its dropout draws from.
        doors: who takes it.
        meaning: one line of words.
        check: of a flag or a number: takes the option's name and value. Returns the value in its one form, or raises
            SpecError. None for the window, which needs ``causal``, and for what is checked with the tensors.
    """

    name: str
    kind: str
    default: Any
    doors: Door
    meaning: str
    check: Callable[[str, Any], Any] | None = None


def names_at(door: Door) -> tuple[str, ...]:
    """Returns the names of the options that a door takes, or each of several ones, in the order of ``OPTIONS``."""
    return tuple(option.name for option in OPTIONS if door in option.doors)


def check_options(options: Options) -> Options:
    """Returns the options after checking each type and value. The window becomes a pair, and numbers become floats.

    The public functions call it, because options become the key of a cache, in which 1 and True would be equal. A spec
    calls it for its own fields, because anyone may build a spec. Functions between the two trust their options.

    Raises:
        SpecError: naming the option, its value and what was expected.
    """
    return _checked(options, _CHECKS)


def check_traced_options(options: Options) -> Options:
    """Returns the options of a call that a compiler traces, after checking those that are constants there.

    The numbers may be symbols in a trace, so the op that the trace contains checks them when it runs.
    """
    options = options._replace(dropout=options.dropout or 0.0)  # 0.0 itself may be a symbol
    return _checked(options, _CHECKS_OF_CONSTANTS)


def _checked(options: Options, checks: tuple[tuple[str, Callable[[str, Any], Any]], ...]) -> Options:
    changed: dict[str, Any] = {}
    for name, check in checks:
        value = getattr(options, name)
        checked = check(name, value)
        if checked is not value:  # seldom, and a replaced field takes as long as a check
            changed[name] = checked
    return options._replace(window=normalise_window(options.window, options.causal), **changed)


def check_paged_options(*values: Any) -> Options:
    """Returns the options of a paged call, in the order of ``PAGED``, after checking each."""
    return check_options(Options(**dict(zip(PAGED, values))))


def requested_names(backend: object) -> tuple[str, ...] | None:
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


def normalise_window(window: object, causal: bool) -> tuple[int | None, int | None]:
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


def is_plain_window(window: object) -> bool:
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


def check_flag(name: str, value: object) -> bool:
    """Returns a value that is True or False. Raises SpecError for any other value, such as 1."""
    if not isinstance(value, bool):
        raise SpecError(f"{name}={shown(value)}: expected True or False{must_be_static(value)}")
    return value


def _alignment(name: str, value: object) -> str:
    if not isinstance(value, str) or value not in get_args(Alignment):
        expected = f"expected one of {', '.join(get_args(Alignment))}{must_be_static(value)}"
        raise SpecError(f"{name}={shown(value)}: {expected}")
    return value


def _promise(name: str, value: object) -> str | None:
    if value is None or (isinstance(value, str) and value in get_args(Invariant)):
        return value
    expected = f"expected one of {', '.join(get_args(Invariant))}, or None{must_be_static(value)}"
    raise SpecError(f"{name}={shown(value)}: {expected}")


def check_number(name: str, value: object) -> float | None:
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


def _positive(name: str, value: object, remedy: str) -> float | None:
    """Returns a finite number above 0 as a float; None for None."""
    checked_number = check_number(name, value)
    # Kernels compute in float32, in which a larger number is infinite.
    if checked_number is not None and not 0 < checked_number <= _LARGEST:
        raise SpecError(f"{name}={value}: expected a finite number above 0; {remedy}")
    return checked_number


def _probability(name: str, value: object) -> float:
    number = check_number(name, value) or 0.0
    # 1 is excluded, because the other weights are multiplied by 1 / (1 - dropout).
    if not 0 <= number < 1:
        raise SpecError(f"{name}={value}: expected a probability in [0, 1); 0 switches it off")
    return number


def _most_tokens(name: str, value: object) -> int | None:
    if value is not None and (not is_host_int(value) or value < 0):
        expected = f"expected a host int, at least the most new tokens of a sequence{must_be_static(value)}"
        raise SpecError(f"{name}={shown(value)}: {expected}")
    return value


_softcap = partial(_positive, remedy="None switches it off")
_scale = partial(_positive, remedy="None gives 1/sqrt(head_dim)")
_ONE_DEVICE = Door.ATTENTION | Door.QKVPACKED | Door.EQUINOX
_ROWS = _ONE_DEVICE | Door.RANKS
_ALL = _ROWS | Door.PAGES | Door.CACHE
_LAYER, _CALL = Door.LAYER, Door.LAYER_CALL
_NO_RANKS = _ALL & ~Door.RANKS | _LAYER
_FUNCTION = "Callable[..., object] | TracedFunction | None"
_TABLE = "Array | np.ndarray | None"

OPTIONS = (
    Option("causal", "bool", False, _ALL | _LAYER, "Hide later keys from each query.", check_flag),
    Option("alignment", "str", "bottom_right", _ROWS | _LAYER, "The diagonal: bottom_right or top_left.", _alignment),
    Option("window", "Window", None, _ALL | _LAYER, "W keys, self included; or distances (left, right)."),
    Option("softcap", "float | None", None, _ALL | _LAYER, "Cap c: scores become c * tanh(s / c).", _softcap),
    Option("scale", "float | None", None, _ALL | _LAYER, "Factor on q . k. Default: 1/sqrt(head_dim).", _scale),
    Option("mask", "Array | None", None, _ROWS & ~Door.EQUINOX | _CALL, "True where a query sees a key."),
    Option("key_ranges", _TABLE, None, _ALL | _CALL, "The queries that see each key, as ranges."),
    Option("mask_mod", _FUNCTION, None, _ONE_DEVICE | _CALL, "Says whether a query sees a key."),
    Option("score_mod", _FUNCTION, None, _ONE_DEVICE | _CALL, "Maps each score to another one."),
    Option("aux", "Sequence[Array | np.ndarray]", (), _ONE_DEVICE | _CALL, "The arrays that the two functions index."),
    Option("q_segment_ids", _TABLE, None, _ONE_DEVICE | _CALL, "A query sees the keys of its own id."),
    Option("kv_segment_ids", _TABLE, None, _ONE_DEVICE | _CALL, "The ids of keys, if they are others."),
    Option("q_positions", _TABLE, None, _ONE_DEVICE | _CALL, "What causal and window compare."),
    Option("kv_positions", _TABLE, None, _ONE_DEVICE | _CALL, "The positions of keys, if they are others."),
    Option("bias", "Array | None", None, _ROWS | _CALL, "Is added to the scores."),
    Option("alibi_slopes", "Array | None", None, _ALL | _CALL, "Adds -slope * distance to the scores."),
    Option("sinks", "Array | None", None, _ALL, "One more logit for each head, without a value."),
    Option("seq_info", "SeqInfoLike", None, _ROWS | _CALL, "Packed documents, which never see each other."),
    Option(
        "layout",
        "Layout | None",
        None,
        Door.ATTENTION,
        "The axes of q, k, v and the output: bshd, also for None, or bhsd.",
    ),
    Option("dropout", "float", 0.0, _ROWS & ~Door.EQUINOX, "Probability of dropping a softmax weight.", _probability),
    Option("deterministic", "bool", False, _ALL & ~Door.EQUINOX, "Require equal bits every run.", check_flag),
    Option("backend", "str | tuple[str, ...] | None", None, _ALL | _LAYER, "Kernels in order of preference."),
    Option("return_lse", "bool", False, _ALL & ~Door.EQUINOX, "Also return the log-sum-exp.", check_flag),
    Option("return_max_logit", "bool", False, Door.ATTENTION, "Also return the largest logit of each head."),
    Option("dropout_rng", "Random | None", None, Door.ATTENTION | Door.QKVPACKED, "What dropout draws from."),
    Option("max_len_q", "int | None", None, Door.PAGES, "At least the most new tokens of a sequence.", _most_tokens),
    Option("kv_lengths", _TABLE, None, Door.ATTENTION, "The end of each row's keys in a dense cache."),
    Option("kv_starts", _TABLE, None, Door.ATTENTION | Door.PAGES, "The first key of each row of a cache."),
    Option("cache_index", _TABLE, None, Door.ATTENTION, "The row of the cache that each row of q reads."),
    Option(
        "invariant", "str | None", None, _NO_RANKS, "batch: equal bits in every batch; prefix: in chunks too.", _promise
    ),
)
"""Every option of a call, in the order of the arguments of ``attention``."""

_plain = [option for option in OPTIONS if option.check is not None or option.name == "window"]
PLAIN = tuple(option.name for option in _plain if Door.ATTENTION in option.doors)
"""The options that are flags and numbers."""
FLAGS = tuple(name for name in PLAIN if isinstance(Options._field_defaults[name], bool))
"""The flags among them."""
PAGED = tuple(option.name for option in _plain if Door.PAGES in option.doors)
"""Those of a paged call."""
ON_PAGES = tuple(name for name in PLAIN if name in PAGED and name != "window")
"""Those of both but the window, which a call on a dense cache adjusts before it runs on pages."""
_CHECKS = tuple((option.name, option.check) for option in OPTIONS if option.check)
_CHECKS_OF_CONSTANTS = tuple(each for each in _CHECKS if each[0] not in ("softcap", "scale", "dropout", "max_len_q"))


Layout = Literal["bshd", "bhsd"]
"""``[batch, seq, heads, head_dim]`` or ``[batch, heads, seq, head_dim]``; packed the same without the batch."""
HEADS_FIRST_HINT = "if q, k and v are [batch, heads, seq, head_dim], pass layout='bhsd'"
EXCHANGED_HINT = "it fits if the axes of heads and sequence are exchanged: check the layout of q, k and v"


def check_layout(layout: object) -> Layout:
    """Returns one of the two layouts, "bshd" for None. Raises SpecError for any other value."""
    if layout is None:
        return "bshd"
    if not isinstance(layout, str) or layout not in get_args(Layout):
        raise SpecError(
            f"layout={shown(layout)}: expected 'bshd', which is [batch, seq, heads, head_dim], or 'bhsd', which is "
            "[batch, heads, seq, head_dim]"
        )
    return layout  # type: ignore[return-value]
