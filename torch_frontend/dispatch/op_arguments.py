"""The arguments of the ops ``attn::forward`` and ``attn::backward``: plain values in the order of their schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

from attn_core.call.functions import AUX
from attn_core.call.options import Options
from attn_core.call.tensors import Inputs
from attn_core.expressions.tree import from_text

LATER = ("key_ranges", *AUX)
"""The tensors that came later: at the end and with a default, so that programs which a compiler or ``torch.export``
stored before still run."""
FIRST_TENSORS = tuple(name for name in Inputs._fields if name not in LATER)
"""The tensors before the options."""
TENSORS = len(FIRST_TENSORS)

_WINDOW = Options._fields.index("window")


class PlainOptions(NamedTuple):
    """The options among the arguments: Options in their order, the window as two numbers, three more, the functions."""

    causal: bool
    alignment: str
    window_left: int | None
    window_right: int | None
    softcap: float | None
    scale: float | None
    max_len_q: int | None
    max_len_k: int | None
    dropout: float
    deterministic: bool
    return_lse: bool
    needs_backward: bool
    bias_gradient: bool
    backend: str | None
    """Names in order of preference, joined by ``join_names``, because torch.jit accepts no list of names."""
    mask_mod: str | None = None
    score_mod: str | None = None
    """The functions as ``Expression.text``. They came later, so they follow key_ranges in the schema."""
    aux_gradients: str | None = None
    """The numbers of ``Options.aux_gradients``, joined by commas; None for none."""
    invariant: str | None = None

    @classmethod
    def from_options(
        cls, options: Options, needs_backward: bool, bias_gradient: bool, backend: str | None
    ) -> PlainOptions:
        """Returns checked options, their window a pair, as the arguments of an op."""
        window: Any = options.window
        values: list[Any] = [*options[:_WINDOW], *window, *options[_WINDOW + 1 : -4]]
        values += [needs_backward, bias_gradient, backend]
        values += [None if tree is None else tree.text for tree in (options.mask_mod, options.score_mod)]
        values += [joined(options.aux_gradients), options.invariant]
        return cls(*values)

    def as_options(self) -> Options:
        """Returns the arguments of an op as Options again."""
        window = (self.window_left, self.window_right)
        values: list[Any] = [*self[:_WINDOW], window, *self[_WINDOW + 2 : OPTIONS - 3]]  # then three that are none
        values += [None if text is None else from_text(text) for text in (self.mask_mod, self.score_mod)]
        values += [self.array_numbers, self.invariant]
        return Options(*values)

    @property
    def array_numbers(self) -> tuple[int, ...]:
        """``aux_gradients`` as numbers."""
        return () if self.aux_gradients is None else tuple(int(number) for number in self.aux_gradients.split(","))


def joined(numbers: tuple[int, ...]) -> str | None:
    """Returns numbers of aux arrays as ``PlainOptions.aux_gradients``."""
    return ",".join(map(str, numbers)) or None


OPTIONS = len(PlainOptions._fields) - 4
"""How many of them the schema has before ``LATER``."""


def _options_schema() -> str:
    """Returns the fields of PlainOptions as torch's schema spells them."""
    spelled = {
        bool: "bool",
        str: "str",
        float: "float",
        int | None: "SymInt?",
        float | None: "float?",
        str | None: "str?",
    }
    hints = list(get_type_hints(PlainOptions).items())[:OPTIONS]
    return ", ".join(f"{spelled[kind]} {name}" for name, kind in hints)


OPTIONS_SCHEMA = _options_schema()


_TENSOR_SCHEMA = ", ".join(f"Tensor{'' if name in ('q', 'k', 'v') else '?'} {name}" for name in FIRST_TENSORS)
_LATER = ["Tensor? key_ranges", "str? mask_mod", "str? score_mod", *(f"Tensor? {name}" for name in AUX)]
_LATER += ["str? aux_gradients", "str? invariant"]
SCHEMA = ", ".join([_TENSOR_SCHEMA, OPTIONS_SCHEMA, *(f"{each}=None" for each in _LATER)])
"""The arguments of both ops as torch's schema spells them."""


def to_call(inputs: Inputs, plain: PlainOptions) -> tuple[Any, ...]:
    """Returns the arguments of ``attn::forward``."""
    first, later = inputs[: TENSORS - 1], inputs[TENSORS - 1 : -1]
    return *first, inputs.rng, *plain[:OPTIONS], later[0], *plain[OPTIONS:-2], *later[1:], *plain[-2:]


def tensors_of(call: Sequence[Any]) -> Inputs:
    """Returns what stands in the places of the tensors of a call. torch leaves out last arguments of None."""
    last = _last(call)
    tensors: list[Any] = [*call[: TENSORS - 1], last[0], *last[3:-2], call[TENSORS - 1]]
    return Inputs(*tensors)


def _last(call: Sequence[Any]) -> list[Any]:
    """Returns key_ranges, both functions, the aux arrays, which of these have a gradient, and invariant."""
    last = [*call[TENSORS + OPTIONS :]]
    return last + [None] * (len(_LATER) - len(last))


def from_call(call: Sequence[Any]) -> tuple[Inputs, PlainOptions]:
    """Returns the arguments of ``attn::forward`` as Inputs and PlainOptions."""
    last = _last(call)
    values = [*call[TENSORS : TENSORS + OPTIONS], *last[1:3], *last[-2:]]
    return tensors_of(call), PlainOptions(*values)
