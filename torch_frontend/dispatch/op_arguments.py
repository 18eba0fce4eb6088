"""The arguments of the ops on a call: tensors of their own, the fields of Inputs, then options as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar, get_type_hints

import torch

from attn_core.call.functions import KINDS
from attn_core.call.options import Options
from attn_core.call.tensors import Inputs
from attn_core.expressions.tree import Expression, from_text
from attn_core.selection import override
from torch_frontend.dispatch import sdpa_flags

T = TypeVar("T")
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
    def arguments(self) -> tuple[object, ...]:
        """The arguments of an op: the window as two numbers, functions and the numbers of arrays as text."""
        values: list[Any] = []
        named: dict[str, Any] = self.options._asdict()
        # torch's schemas have numbers, flags and text, so everything else becomes one of them.
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
"""The arguments of a call as torch's schema spells them."""


class Op(NamedTuple):
    """An op of the namespace ``attn`` on a call. Its arguments are tensors of its own, then those of the call."""

    name: str
    own: tuple[str, ...]
    """The names of its own tensors."""
    results: tuple[str, ...]
    """The names of its results, all tensors."""
    sums_over_batch: bool = False
    """Whether a result may be a sum over the batch: the gradient of a bias, of sinks or of an array."""

    @property
    def schema(self) -> str:
        """The op as torch's schema spells it. Gradients and tangents may be absent."""
        own = "".join([f"Tensor{'?' if name.startswith('d') else ''} {name}, " for name in self.own])
        return f"{self.name}({own}{SCHEMA}) -> ({', '.join(['Tensor'] * len(self.results))})"

    def call_of(self, arguments: Sequence[T]) -> Sequence[T]:
        """Returns those of the op's arguments that are the call's."""
        return arguments[len(self.own) :]

    def run(self, *arguments: object) -> Any:
        """Runs the op."""
        return getattr(torch.ops.attn, self.name)(*arguments)


def to_call(inputs: Inputs, rest: OpOptions) -> tuple[object, ...]:
    """Returns the arguments of ``attn::forward``."""
    return *inputs, *rest.arguments


def tensors_of(call: Sequence[object]) -> Inputs:
    """Returns what stands in the places of the tensors of a call."""
    return Inputs(*call[:TENSORS])


def from_call(call: Sequence[object]) -> tuple[Inputs, OpOptions]:
    """Returns what the arguments of ``attn::forward`` say."""
    return tensors_of(call), OpOptions.of(call[TENSORS:])


# The backends that may run an op, as one string, because torch.jit accepts no list of names

FROM_CONTEXT = "use_backend"
"""As the first backend name: the names that ``use_backend`` requests when the op runs replace the rest."""

_SWITCHES = "sdpa_kernel"
"""A first line that begins so has torch's flags in the rest: those of the trace, because a block inside of it has no
effect any more when the op runs."""


def join_names(names: tuple[str, ...] | None, switches: sdpa_flags.Switches | None = None) -> str | None:
    """Joins backend names, and torch's flags if one is off, into the string that an op accepts."""
    flags = () if switches is None else (_SWITCHES + sdpa_flags.as_text(switches),)
    return "\n".join((*flags, *(names or ()))) or None


def requested_now(joined: str | None) -> tuple[tuple[str, ...] | None, sdpa_flags.Switches | None]:
    """Returns the backends that are requested when an op runs, and torch's flags then and in the trace together."""
    names, flags = tuple(joined.split("\n")) if joined else (), ""
    if names and names[0].startswith(_SWITCHES):
        flags, names = names[0].removeprefix(_SWITCHES), names[1:]
    requested = names or override.requested()
    # A drop-in's preference gives way to use_backend, as in an eager call.
    if requested and requested[0] == FROM_CONTEXT:
        requested = override.requested() or requested[1:]
    return requested, sdpa_flags.both(flags, sdpa_flags.now())
