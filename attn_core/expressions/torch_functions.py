"""An expression as a function that torch's compiler takes without making symbols of its numbers.

The compiler makes symbols of numbers that it finds in data, and FlexAttention's kernels take none. So the function
keeps its numbers as text, which the compiler reads as constants.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from attn_core.expressions.constants import in_base_2
from attn_core.expressions.on_torch import vocabulary
from attn_core.expressions.rendering import Step, run, steps_of
from attn_core.expressions.tree import Expression, Kind


class TorchFunction(NamedTuple):
    """The function of an expression.

    Attributes:
        digest: of the expression; a compiled program is known by it.
        function: ``(score, b, h, q, k, aux) -> value``, as ``evaluate_torch``; a mask function gets None as score.
    """

    digest: str
    function: Callable[..., Any]

    def __repr__(self) -> str:  # without the function's address: names of programs are made of it
        return f"TorchFunction({self.digest})"


class _TextStep(NamedTuple):
    """A ``Step`` with its numbers as text."""

    op: str
    kind: Kind
    value: str
    operands: tuple[str, ...]
    constants: tuple[str, ...]
    negative: tuple[bool, ...]


@lru_cache(maxsize=256)
def torch_function(tree: Expression, base_2: bool = False) -> TorchFunction:
    """Returns the function of an expression; cached. base_2: whether its constants are those ``in_base_2``."""
    rows = tuple(_as_text(step, base_2) for step in steps_of(tree))

    def function(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
        import torch

        # In float32 at least: FlexAttention on a CPU has scores of half precision.
        floats = torch.float64 if score is not None and score.dtype == torch.float64 else torch.float32
        score, words = None if score is None else score.to(floats), vocabulary(b.device, floats)
        places = [index.to(torch.int32) for index in (b, h, q, k)]
        return run([_as_step(row) for row in rows], words, places, score, aux)

    return TorchFunction(tree.digest, function)


def _as_text(step: Step, base_2: bool) -> _TextStep:
    value = "" if step.value is None else str(in_base_2(step.value) if base_2 else step.value)
    # Those of a lookup are ints; of other operations nobody reads them.
    constants = tuple("" if each is None or step.op != "lookup" else str(each) for each in step.constants)
    return _TextStep(step.op, step.kind, value, tuple(map(str, step.operands)), constants, step.negative)


def _as_step(row: _TextStep) -> Step:
    value: Any = None
    if row.op == "lookup" or (row.op == "constant" and row.kind == "int"):
        value = int(row.value)
    elif row.op == "constant":
        value = float(row.value) if row.kind == "float" else row.value == "True"
    operands = tuple([int(operand) for operand in row.operands])
    constants = tuple([int(each) if each else None for each in row.constants])
    return Step(row.op, row.kind, value, operands, constants, row.negative)
