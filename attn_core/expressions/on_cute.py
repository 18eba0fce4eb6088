"""Evaluates expressions in kernels of the CuTe DSL, for one pair of a query and a key at a time.

Ints are ``cutlass.Int32``, floats ``Float32``, bools ``Boolean``. ``tanh``, ``exp`` and the like are made of the GPU's
approximate instructions (absolute error of tanh up to 2**-17, of a logarithm up to 2**-22), and a division by a
constant multiplies by its reciprocal: a true division would be a subroutine for every score.
Upstream: nvidia-cutlass-dsl 4.8, ``cutlass.base_dsl.typing``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_core.expressions.rendering import ARITHMETIC, Vocabulary, in_base_2, run, steps_inside
from attn_core.expressions.tree import Expression, Kind

if TYPE_CHECKING:
    from cutlass import Numeric


LOG2_E = 1.4426950408889634


class CuteArray(NamedTuple):
    """A dense aux array in a kernel, of fewer than 2**31 elements.

    Attributes:
        pointer: ``cute.Pointer`` to its first element; bools are stored as whole bytes.
        shape: the sizes of its axes.
        kind: of its elements.
    """

    pointer: Any
    shape: tuple[Any, ...]
    kind: Kind


@lru_cache(maxsize=1)
def vocabulary() -> Vocabulary:  # noqa: C901
    """Returns the operations on scalars of the CuTe DSL, which it needs.

    In a host function of the DSL, which a test runs on a CPU, instructions of a GPU are not available.
    """
    import cutlass

    types = {"bool": cutlass.Boolean, "int": cutlass.Int32, "float": cutlass.Float32}

    def constant(value: bool | float, kind: Kind) -> Numeric:
        return types[kind](in_base_2(value))

    def known(value: Numeric) -> bool:
        return isinstance(value.value, (bool, int, float))

    def where(condition: Numeric, a: Numeric, b: Numeric) -> Numeric:
        if known(condition):
            return a if condition.value else b
        return type(a)(cutlass.select_(condition, a, b))

    def minimum(a: Numeric, b: Numeric) -> Numeric:
        # NaN wins, as in numpy and torch: it is neither less than another number nor equal to itself.
        first = a < b if isinstance(a, cutlass.Int32) else (a < b) | (a != a)
        return where(first, a, b)

    def maximum(a: Numeric, b: Numeric) -> Numeric:
        first = b < a if isinstance(a, cutlass.Int32) else (b < a) | (a != a)
        return where(first, a, b)

    def divide(a: Numeric, b: Numeric) -> Numeric:
        return a * cutlass.Float32(1.0 / b.value) if known(b) and b.value else a / b

    def remainder(a: Numeric, b: Numeric) -> Numeric:
        return a - a // b * b  # the DSL's own % rounds to zero

    def read(array: CuteArray, indices: list[Numeric]) -> Numeric:
        pointer = array.pointer
        if indices:
            row: Any = 0
            for index, size in zip(indices[:-1], array.shape[:-1], strict=True):
                row = row * size + index
            # The row's address first, because it is the same for many pairs; then one instruction for each pair.
            pointer = pointer + row * array.shape[-1] + cutlass.Int64(cutlass.Uint32(indices[-1]))
        value = cutlass.cute.make_tensor(pointer, cutlass.cute.make_layout(1))[0]
        return value != 0 if array.kind == "bool" else value

    def bound(index: Numeric, size: int) -> Numeric:
        # One comparison without a sign: a negative index, of a pair behind the rows, becomes the last place.
        index, last = cutlass.Uint32(index), cutlass.Uint32(size - 1)
        return cutlass.Int32(where(last < index, last, index))

    zero = {name: types[name](0) for name in ("int", "float")}
    functions: dict[str, Callable[..., Any]] = {
        **ARITHMETIC,
        "where": where,
        "minimum": minimum,
        "maximum": maximum,
        "divide": divide,
        "remainder": remainder,
        "abs": lambda value: where(value < zero["int" if isinstance(value, cutlass.Int32) else "float"], -value, value),
        "not": lambda value: value == cutlass.Boolean(False),
        **_of_floats(where),
    }
    return Vocabulary(
        functions=functions, constant=constant, cast=lambda value, kind: types[kind](value), read=read, bound=bound
    )


def evaluate_cute(
    tree: Expression,
    indices: Sequence[Numeric],
    score: Numeric | None = None,
    aux: Sequence[CuteArray] = (),
    inside: tuple[int, ...] = (),
) -> Numeric:
    """Returns the value of an expression for one pair, inside a kernel.

    Args:
        tree: a mask or score expression.
        indices: b, h, q and k, ``cutlass.Int32``.
        score: ``cutlass.Float32``, or None for an expression without a score.
        aux: the arrays of the lookups, by their numbers.
        inside: ``lookups_inside`` of the call. These lookups take fewer instructions.
    """
    return run(steps_inside(tree, inside), vocabulary(), indices, score, aux)


def tanh_approx(value: Numeric) -> Numeric:
    """Returns the hyperbolic tangent of a ``cutlass.Float32`` in a kernel, as one instruction."""
    return _instruction("tanh.approx.f32 $0, $1;", value)


def _of_floats(where: Callable[..., Numeric]) -> dict[str, Callable[..., Numeric]]:
    """The functions of one float, of ``where`` and the GPU's instructions."""
    from cutlass import Float32

    one = Float32(1.0)

    def exp(x: Numeric) -> Numeric:
        return exp2(x * Float32(LOG2_E))

    def exp2(x: Numeric) -> Numeric:
        return _instruction("ex2.approx.ftz.f32 $0, $1;", x)

    def log(x: Numeric) -> Numeric:
        return _instruction("lg2.approx.ftz.f32 $0, $1;", x) * Float32(1.0 / LOG2_E)

    def near_zero(
        x: Numeric, series: Numeric, otherwise: Numeric
    ) -> Numeric:  # where the difference from 1 loses the digits
        return where((x < Float32(0.25)) & (Float32(-0.25) < x), series, otherwise)

    def expm1(x: Numeric) -> Numeric:
        series = one
        for divisor in (7, 6, 5, 4, 3, 2):  # Taylor's
            series = one + series * x * Float32(1.0 / divisor)
        return near_zero(x, x * series, exp(x) - one)

    def log1p(x: Numeric) -> Numeric:
        share = x * reciprocal(x + Float32(2.0))  # log(1 + x) is 2 artanh(x / (x + 2))
        square, series = share * share, Float32(1.0 / 9.0)
        for divisor in (7, 5, 3, 1):
            series = Float32(1.0 / divisor) + square * series
        return near_zero(x, Float32(2.0) * share * series, log(one + x))

    def reciprocal(x: Numeric) -> Numeric:
        return _instruction("rcp.approx.ftz.f32 $0, $1;", x)

    def sigmoid(x: Numeric) -> Numeric:
        return reciprocal(one + exp(-x))  # the reciprocal of infinity is 0

    functions = (exp, exp2, expm1, log, log1p, sigmoid)
    return {"tanh": tanh_approx, **{function.__name__: function for function in functions}}


def _instruction(text: str, value: Numeric) -> Numeric:
    """Returns the result of a PTX instruction from one float to another."""
    from cutlass import Float32
    from cutlass._mlir.dialects import llvm
    from cutlass.cutlass_dsl import T

    result = llvm.inline_asm(
        T.f32(),
        [Float32(value).ir_value()],
        text,
        "=f,f",
        has_side_effects=False,  # so that two equal uses become one instruction
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return Float32(result)
