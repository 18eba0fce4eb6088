"""Runs a trial through jax_frontend, inside jit. The twin of in_torch."""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from attn_core.cli.trial import Outcome, Trial, dtype_of


def run(trial: Trial, backend: str, device: str = "cpu", repeats: int = 5) -> Outcome:
    """Runs one backend. Returns its arrays and median time (milliseconds, with gradients if the spec needs them)."""
    import jax

    where = jax.devices("gpu" if device.startswith("sm") else "cpu")[0]
    # JAX turns float64 into float32 unless x64 is enabled.
    with jax.enable_x64(trial.spec.dtype == "float64"), jax.default_device(where):
        constants = {name: _array(trial, name) for name in ("q", "k", "v", "mask", "bias", "alibi_slopes", "sinks")}
        learned = {name: constants.pop(name) for name in trial.learned}
        cotangents = _cotangents(trial)
        call = jax.jit(_call(trial, backend))
        times = []
        # One more than requested, because the first call compiles and is not counted.
        for _ in range(repeats + 1):
            began = perf_counter()
            # JAX returns before the kernel ends: wait, so that its time counts.
            results = jax.block_until_ready(call(learned, constants, cotangents))
            times.append(perf_counter() - began)
        # float64 represents every value of the other dtypes, so the comparison of bits loses nothing.
        arrays = {name: np.asarray(array).astype(np.float64) for name, array in results.items()}
    return Outcome(arrays, 1e3 * median(times[1:] or times))


def _call(trial: Trial, backend: str) -> Any:
    """Returns a function of (learned inputs, other inputs, cotangents) that returns the named results."""
    import jax

    from jax_frontend import attention

    def call(learned: dict[str, Any], constants: dict[str, Any], cotangents: tuple[Any, ...]) -> dict[str, Any]:
        def forward(learned: dict[str, Any]) -> tuple[Any, ...]:
            results = attention(**learned, **constants, **trial.keywords, backend=backend)
            return results if trial.spec.return_lse else (results,)

        if not trial.learned:
            return dict(zip(("out", "lse"), forward(learned)))
        results, pull = jax.vjp(forward, learned)
        (gradients,) = pull(cotangents)
        return dict(zip(("out", "lse"), results)) | {f"d{name}": gradients[name] for name in trial.learned}

    return call


def _cotangents(trial: Trial) -> tuple[Any, ...]:
    import jax.numpy as jnp

    dout = jnp.asarray(trial.dout, trial.spec.dtype)
    return (dout,) if trial.dlse is None else (dout, jnp.asarray(trial.dlse, trial.spec.lse_dtype))


def _array(trial: Trial, name: str) -> Any:
    import jax.numpy as jnp

    array = getattr(trial.inputs, name)
    if array is None:
        return None
    return jnp.asarray(array, "bool" if array.dtype == np.bool_ else dtype_of(trial, name))
