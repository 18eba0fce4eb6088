"""Reads the keyword bags of Unsloth's AttentionConfig. An option in several bags must have one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attn_core.call.seq_info import is_host_int
from attn_core.dropins.unsloth.block_masks import NAMES
from attn_core.errors import SpecError, shown

_FLASH = {
    "causal": "causal",
    "softmax_scale": "scale",
    "dropout_p": "dropout",
    "window_size": "window",
    "softcap": "softcap",
    "alibi_slopes": "alibi_slopes",
    "deterministic": "deterministic",
    "invariant": "invariant",
}
OPTIONS = tuple(_FLASH.values())
"""Our names of the options that need no mask."""
BAGS: Mapping[str, Mapping[str, str | None]] = {
    "flash_dense_kwargs": _FLASH,
    "flash_varlen_kwargs": _FLASH,
    "sdpa_kwargs": {
        "is_causal": "causal",
        "scale": "scale",
        "dropout_p": "dropout",
        "attn_mask": "mask",
        "enable_gqa": None,  # follows from the shapes
        "invariant": "invariant",
    },
    "xformers_kwargs": {
        "scale": "scale",
        "p": "dropout",
        "attn_bias": "mask",
        "softcap": "softcap",
        "invariant": "invariant",
    },
}
"""By bag: the host's name of each option -> our name. ``invariant`` is ours alone."""


@dataclass
class Option:
    """One option of a call.

    Attributes:
        name: our name of it.
        value: its value, or None if no bag states it.
        where: the bag and key that state it, for errors; "" if none does.
    """

    name: str
    value: Any = None
    where: str = ""

    def state(self, value: Any, where: str) -> None:
        """Sets the value. Raises SpecError if another place states another value."""
        # The host would take the value of one branch, so which one counts would depend on the machine.
        if self.where and not _same(self.value, value):
            raise SpecError(
                f"{where}={shown(value)} contradicts {self.where}={shown(self.value)}; "
                f"pass {self.name} once, or the same value twice"
            )
        self.value, self.where = value, where


def bag_of(config: Any, name: str) -> Mapping[str, Any]:
    """Returns a bag of the config, empty if it is None. Raises SpecError if it is no mapping."""
    bag = getattr(config, name)
    if bag is None:
        return {}
    if type(bag) is not dict and not isinstance(bag, Mapping):
        raise SpecError(f"config.{name}={shown(bag)}: expected a dict of options by name, or None")
    return bag


def read_options(config: Any, branch: str) -> dict[str, Option]:
    """Returns every option by our name, with its value if a bag of the config states one.

    Dropout counts in the bag of the host's branch alone, where a missing one is 0: hosts drop weights in some branches
    only.

    Raises:
        SpecError: for unknown keys, and bags that contradict each other.
    """
    stated = {name: Option(name) for name in (*OPTIONS, "mask", "triangle", "blocks")}
    for bag, spellings in BAGS.items():
        for key, value in bag_of(config, bag).items():
            # An option that is unknown here might change the result in the host, so it is not ignored.
            if key not in spellings:
                raise SpecError(f"config.{bag}[{key!r}]: unknown; expected one of {', '.join(spellings)}")
            option = spellings[key]
            if option == "dropout" and bag != f"{branch}_kwargs":
                continue  # the host's branch would not read this bag
            if option == "mask" and value is not None:
                state_mask(stated, value, f"config.{bag}[{key!r}]")
            elif option is not None and value is not None:
                stated[option].state(value, f"config.{bag}[{key!r}]")
    return stated


def state_mask(stated: dict[str, Option], value: Any, where: str) -> None:
    """Records a mask under "mask"; or under "blocks" (xformers'), or its type under "triangle" if it means causal."""
    name = "triangle" if _says_only_causal(value) else "blocks" if type(value).__name__ in NAMES else "mask"
    # The type, because two objects of these classes mean the same but need not be equal.
    stated[name].state(type(value) if name == "triangle" else value, where)


def distances(value: Any, where: str) -> tuple[int | None, int | None] | None:
    """Returns flash-attn's window_size, in which -1 is unbounded, as distances; None if both sides are unbounded."""
    if value is None:
        return None
    if not isinstance(value, (tuple, list)) or len(value) != 2 or not all(map(is_host_int, value)):
        raise SpecError(f"{where}={shown(value)}: expected two distances (left, right) as ints, -1 for unbounded")
    left, right = (None if distance < 0 else distance for distance in value)
    return None if left is None and right is None else (left, right)


def _says_only_causal(mask: Any) -> bool:
    """Returns whether a mask is one of xformers' LowerTriangularMask family, by name: they only mean causal."""
    return type(mask).__name__ in ("LowerTriangularMask", "LowerTriangularFromBottomRightMask")


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if hasattr(one, "shape") or hasattr(other, "shape"):
        return False  # comparing the values of arrays would wait for the device
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return list(one) == list(other)
    return bool(one == other)
