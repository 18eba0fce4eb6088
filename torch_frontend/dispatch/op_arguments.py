"""The arguments of ``attn::forward`` and ``attn::backward``: the fields of Inputs, then options as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

from attn_core.call.functions import KINDS
from attn_core.call.options import Options
from attn_core.call.tensors import Inputs
from attn_core.expressions.tree import Expression, from_text

TENSORS = len(Inputs._fields)
"""The number of tensors, which come before the options."""


class OpOptions(NamedTuple):
    """What the arguments of an op say besides the tensors: the checked options of a call, and three things more."""

    options: Options
    needs_backward: bool
    bias_gradient: bool
    backend: str | None
    """Names in order of preference, joined by ``join_names``, because torch.jit accepts no list of names."""

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of an op: the window as two numbers, functions and the numbers of arrays as text."""
        values: list[Any] = []
        named: dict[str, Any] = self.options._asdict()
        for name, value in named.items():
            if name == "window":
                values += value
            elif name in KINDS:
                values.append(None if value is None else value.text)
            elif name == "aux_gradients":
                values.append(",".join(map(str, value)) or None)
            else:
                values.append(value)
        return *values, self.needs_backward, self.bias_gradient, self.backend

    @classmethod
    def of(cls, arguments: Sequence[Any]) -> OpOptions:
        """Returns what the arguments of an op say; the inverse of ``arguments``."""
        *values, needs_backward, bias_gradient, backend = arguments
        named = dict(zip(_NAMES, values))
        numbers = named["aux_gradients"]
        named["aux_gradients"] = tuple([int(number) for number in numbers.split(",")]) if numbers else ()
        named["window"] = named.pop("window_left"), named.pop("window_right")
        for name in KINDS:
            named[name] = None if named[name] is None else from_text(named[name])
        return cls(Options(**named), needs_backward, bias_gradient, backend)


def _kinds() -> dict[str, str]:
    """Returns the types of an op's options by name, as torch's schema spells them."""
    spelled: dict[Any, str] = {bool: "bool", str: "str", float: "float", int | None: "SymInt?", float | None: "float?"}
    spelled |= {str | None: "str?", Expression | None: "str?", tuple[int, ...]: "str?"}
    hints = get_type_hints(Options) | get_type_hints(OpOptions)
    del hints["options"]
    kinds: dict[str, str] = {}
    for name, hint in hints.items():
        if name == "window":
            kinds |= {"window_left": "SymInt?", "window_right": "SymInt?"}
        else:
            kinds[name] = spelled[hint]
    return kinds


_NAMES = tuple(_kinds())
COUNT = len(_NAMES)
"""The number of an op's options."""
OPTIONS_SCHEMA = ", ".join(f"{kind} {name}" for name, kind in _kinds().items())
_TENSOR_SCHEMA = ", ".join(f"Tensor{'' if name in ('q', 'k', 'v') else '?'} {name}" for name in Inputs._fields)
SCHEMA = f"{_TENSOR_SCHEMA}, {OPTIONS_SCHEMA}"
"""The arguments of both ops as torch's schema spells them."""


def to_call(inputs: Inputs, rest: OpOptions) -> tuple[Any, ...]:
    """Returns the arguments of ``attn::forward``."""
    return *inputs, *rest.arguments


def tensors_of(call: Sequence[Any]) -> Inputs:
    """Returns what stands in the places of the tensors of a call."""
    return Inputs(*call[:TENSORS])


def from_call(call: Sequence[Any]) -> tuple[Inputs, OpOptions]:
    """Returns what the arguments of ``attn::forward`` say."""
    return tensors_of(call), OpOptions.of(call[TENSORS:])
