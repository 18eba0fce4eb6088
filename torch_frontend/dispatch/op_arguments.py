"""The arguments of the ops ``attn::forward`` and ``attn::backward``: plain values in the order of their schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

from attn_core.call.options import Options
from attn_core.call.tensors import Inputs

FIRST_TENSORS = tuple(name for name in Inputs._fields if name != "key_ranges")
"""The tensors before the options. key_ranges came later: at the end and with a default, so that programs which a
compiler or ``torch.export`` stored before still run."""
TENSORS = len(FIRST_TENSORS)

_WINDOW = Options._fields.index("window")


class PlainOptions(NamedTuple):
    """The options among the arguments: Options in their order, the window as two numbers, and three more."""

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

    @classmethod
    def from_options(
        cls, options: Options, needs_backward: bool, bias_gradient: bool, backend: str | None
    ) -> PlainOptions:
        """Returns checked options, their window a pair, as the arguments of an op."""
        window: Any = options.window
        values: list[Any] = [*options[:_WINDOW], *window, *options[_WINDOW + 1 :]]
        values += [needs_backward, bias_gradient, backend]
        return cls(*values)

    def as_options(self) -> Options:
        """Returns the arguments of an op as Options again."""
        window = (self.window_left, self.window_right)
        values: list[Any] = [*self[:_WINDOW], window, *self[_WINDOW + 2 : -3]]  # the last three are no options
        return Options(*values)


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
    return ", ".join(f"{spelled[kind]} {name}" for name, kind in get_type_hints(PlainOptions).items())


OPTIONS_SCHEMA = _options_schema()


_TENSOR_SCHEMA = ", ".join(f"Tensor{'' if name in ('q', 'k', 'v') else '?'} {name}" for name in FIRST_TENSORS)
SCHEMA = f"{_TENSOR_SCHEMA}, {OPTIONS_SCHEMA}, Tensor? key_ranges=None"
"""The arguments of both ops as torch's schema spells them."""


def to_call(inputs: Inputs, plain: PlainOptions) -> tuple[Any, ...]:
    """Returns the arguments of ``attn::forward``."""
    *first, key_ranges, rng = inputs
    return *first, rng, *plain, key_ranges


def tensors_of(call: Sequence[Any]) -> Inputs:
    """Returns what stands in the places of the tensors of a call. torch leaves out a last argument of None."""
    last = call[TENSORS + len(PlainOptions._fields) :]
    tensors: list[Any] = [*call[: TENSORS - 1], last[0] if last else None, call[TENSORS - 1]]
    return Inputs(*tensors)


def from_call(call: Sequence[Any]) -> tuple[Inputs, PlainOptions]:
    """Returns the arguments of ``attn::forward`` as Inputs and PlainOptions."""
    return tensors_of(call), PlainOptions(*call[TENSORS : TENSORS + len(PlainOptions._fields)])
