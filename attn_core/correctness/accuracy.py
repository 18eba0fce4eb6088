"""Judges results: every element must lie within its own bound around the float64 reference.

The bounds are in ``bounds``. No tolerance can detect one key more or less among thousands; ``mask_probe`` detects it
exactly. The tests, ``attn doctor`` and ``attn compare`` use both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from attn_core.call.functions import aux_of
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs
from attn_core.correctness import reference
from attn_core.correctness.bounds import gradient_bounds, lse_bound, out_bound
from attn_core.correctness.magnitudes import magnitudes
from attn_core.correctness.probe import MaskProbe, mask_probe
from attn_core.correctness.reference import Array
from attn_core.errors import ShapeError, SpecError

__all__ = ["Accuracy", "Expected", "MaskProbe", "Quantity", "check", "expect", "mask_probe"]


@dataclass(frozen=True)
class Quantity:
    """One result compared with the reference: the largest ``error / bound`` of its elements, and the largest error."""

    name: str
    use: float
    error: float

    def __str__(self) -> str:
        verdict = "" if self.use <= 1 else " WRONG"
        return f"{self.name}: {self.use:.3g} of the bound, error {self.error:.2e}{verdict}"


@dataclass(frozen=True)
class Accuracy:
    """The comparison of one call's results with the reference, one Quantity per result."""

    quantities: tuple[Quantity, ...]

    @property
    def ok(self) -> bool:
        """Whether every element of every quantity is within its bound."""
        return self.worst <= 1

    @property
    def worst(self) -> float:
        """The largest ``error / bound``. Above 1 is wrong; infinity means a NaN or Inf that the reference lacks."""
        return max((quantity.use for quantity in self.quantities), default=0.0)

    def __getitem__(self, name: str) -> Quantity:
        return next(quantity for quantity in self.quantities if quantity.name == name)

    def __str__(self) -> str:
        return "\n".join(map(str, self.quantities))


@dataclass(frozen=True, eq=False)
class Expected:
    """The reference's results for one call, and the error bound of each element.

    Attributes:
        truth, bound: arrays of the same shapes, by the names out, lse, dq, dk, dv, dbias, dsinks, daux0 to daux3; in
            forward mode out, lse, dout, dlse.
    """

    truth: dict[str, Array]
    bound: dict[str, Array]

    def judge(self, *, out: Any, lse: Any = None, gradients: Gradients | None = None) -> Accuracy:
        """Compares results with the expected ones. Arrays are anything that numpy casts to float64.

        Args:
            lse, gradients: compared unless None.

        Raises:
            ShapeError: if a result has the wrong shape, or a gradient of the call is None.
            SpecError: if there are gradients, but ``expect`` was called without dout.
        """
        results = {"out": out} | ({} if lse is None else {"lse": lse})
        if gradients is not None:
            if "dq" not in self.truth:
                raise SpecError("dout=None: expected the gradient of out with which the gradients were computed")
            results |= {name: result for name, result in gradients._asdict().items() if name in self.truth}
        return self.compare(results)

    def compare(self, results: dict[str, Any]) -> Accuracy:
        """Compares results, by their names in ``truth``, with the expected ones.

        Raises:
            ShapeError: if a result has the wrong shape.
        """
        return Accuracy(tuple(self._compare(name, result) for name, result in results.items()))

    def _compare(self, name: str, result: Any) -> Quantity:
        truth, bound = self.truth[name], self.bound[name]
        if result is None or np.shape(result) != truth.shape:
            shape = None if result is None else list(np.shape(result))
            raise ShapeError(f"{name}: expected shape {list(truth.shape)}, got {shape}")
        result = np.asarray(result, np.float64)
        with np.errstate(all="ignore"):
            # Equal values have error 0 even if both are infinite, where the difference would be NaN (lse = -inf).
            error = np.where(result == truth, 0.0, abs(result - truth))
            # A NaN error compares as neither larger nor smaller, so max() could miss it: count it as infinite.
            error = np.where(np.isfinite(result) | (error == 0.0), error, np.inf)
            use = np.where(error == 0.0, 0.0, np.where(np.isfinite(truth), error / bound, np.inf))
        judged = ~np.isnan(truth)  # a NaN of the reference comes from NaN inputs, for which any result is allowed
        return Quantity(name, *(float(array.max(initial=0.0, where=judged)) for array in (use, error)))


def check(
    spec: AttentionSpec,
    inputs: Inputs,
    *,
    out: Any,
    lse: Any = None,
    gradients: Gradients | None = None,
    dout: Any = None,
    dlse: Any = None,
) -> Accuracy:
    """Compares one call's results with the reference on the same inputs. All arrays are cast to float64 by numpy.

    To compare several backends on the same inputs, call ``expect`` once: it computes the reference.
    """
    return expect(spec, inputs, dout=dout, dlse=dlse).judge(out=out, lse=lse, gradients=gradients)


def expect(spec: AttentionSpec, inputs: Inputs, *, dout: Any = None, dlse: Any = None) -> Expected:
    """Returns the reference's results and bounds for one call, with gradients if dout is not None."""
    out, lse = reference.forward(spec, inputs)
    with np.errstate(all="ignore"):
        call = reference.softmax(spec, inputs)
        sizes = magnitudes(spec, call)
        truth: dict[str, Array] = {"out": out, "lse": lse}
        bound = {"out": out_bound(spec, call, sizes, out), "lse": lse_bound(spec, sizes)}
    if dout is not None:
        gradients = reference.backward(spec, inputs, out, lse, dout, dlse)._asdict()
        truth |= {name: gradient for name, gradient in gradients.items() if gradient is not None}
        with np.errstate(all="ignore"):
            bound |= gradient_bounds(spec, call, sizes, truth, dout, dlse, aux_of(inputs))
    return Expected(truth, bound)
