"""The arguments of ``attn::forward`` and ``attn::backward``: the fields of Inputs, then those of PlainOptions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

from attn_core.call.options import Options
from attn_core.call.tensors import Inputs
from attn_core.expressions.tree import Expression, from_text

TENSORS = len(Inputs._fields)
"""The number of tensors, which come before the options."""


class PlainOptions(NamedTuple):
    """Options as plain values: the window as two numbers, functions as text; and three arguments more."""

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
    mask_mod: str | None
    score_mod: str | None
    """The functions as ``Expression.text``."""
    aux_gradients: str | None
    """The numbers of ``Options.aux_gradients``, joined by commas; None for none."""
    invariant: str | None
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
        left, right = window
        return cls(
            **{name: getattr(options, name) for name in _UNCHANGED},
            window_left=left,
            window_right=right,
            mask_mod=_text(options.mask_mod),
            score_mod=_text(options.score_mod),
            aux_gradients=joined(options.aux_gradients),
            needs_backward=needs_backward,
            bias_gradient=bias_gradient,
            backend=backend,
        )

    def as_options(self) -> Options:
        """Returns the arguments of an op as Options again."""
        return Options(
            **{name: getattr(self, name) for name in _UNCHANGED},
            window=(self.window_left, self.window_right),
            mask_mod=_expression(self.mask_mod),
            score_mod=_expression(self.score_mod),
            aux_gradients=self.array_numbers,
        )

    @property
    def array_numbers(self) -> tuple[int, ...]:
        """``aux_gradients`` as numbers."""
        return () if self.aux_gradients is None else tuple(int(number) for number in self.aux_gradients.split(","))


_UNCHANGED = tuple(name for name in Options._fields if name not in ("window", "mask_mod", "score_mod", "aux_gradients"))
"""The options that an op takes as they are."""


def _text(tree: Expression | None) -> str | None:
    return None if tree is None else tree.text


def _expression(text: str | None) -> Expression | None:
    return None if text is None else from_text(text)


def joined(numbers: tuple[int, ...]) -> str | None:
    """Returns numbers of aux arrays as ``PlainOptions.aux_gradients``."""
    return ",".join(map(str, numbers)) or None


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
_TENSOR_SCHEMA = ", ".join(f"Tensor{'' if name in ('q', 'k', 'v') else '?'} {name}" for name in Inputs._fields)
SCHEMA = f"{_TENSOR_SCHEMA}, {OPTIONS_SCHEMA}"
"""The arguments of both ops as torch's schema spells them."""


def to_call(inputs: Inputs, plain: PlainOptions) -> tuple[Any, ...]:
    """Returns the arguments of ``attn::forward``."""
    return *inputs, *plain


def tensors_of(call: Sequence[Any]) -> Inputs:
    """Returns what stands in the places of the tensors of a call."""
    return Inputs(*call[:TENSORS])


def from_call(call: Sequence[Any]) -> tuple[Inputs, PlainOptions]:
    """Returns the arguments of ``attn::forward`` as Inputs and PlainOptions."""
    return tensors_of(call), PlainOptions(*call[TENSORS:])
