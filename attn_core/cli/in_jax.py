"""Runs a trial through jax_frontend, inside jit. The twin of in_torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from attn_core.call.masks import band
from attn_core.call.seq_info import SeqInfo
from attn_core.call.spec import AttentionSpec
from attn_core.cli.devices import jax_device
from attn_core.cli.timing import Calls
from attn_core.cli.trial import Arrays, Trial, arrays_of_call, as_keywords, dtype_of, is_plain, keywords_of

if TYPE_CHECKING:
    import jax


OWN = {"jax.nn": "xla", "jax.nn cudnn": "cudnn"}
"""The names under which jax.nn.dot_product_attention is timed, each with its implementation."""

PAUSE = 0.005
"""Seconds between two backends on a CPU. After a call of torch, OpenMP's threads spin on XLA's cores for some of it."""


def run(trial: Trial, backend: str, device: str = "cpu") -> Arrays:
    """Runs one backend. Returns its results."""
    import jax

    # JAX turns float64 into float32 unless x64 is enabled.
    with jax.enable_x64(trial.spec.dtype == "float64"), jax.default_device(jax_device(device)):
        results = _program(trial.spec, trial.seq_info, backend)(*arrays_of(trial), cotangents_of(trial), {})
        # float64 represents every value of the other dtypes, so the comparison of bits loses nothing.
        return {name: np.asarray(array).astype(np.float64) for name, array in results.items()}


@lru_cache(maxsize=128)  # so that the calls of one structure compile once
def _program(spec: AttentionSpec, seq_info: SeqInfo | None, name: str) -> Callable[..., dict[str, jax.Array]]:
    """Returns a jitted function that runs a backend, or JAX's own function by a name of OWN.

    It takes the arrays without gradients, those with, the cotangents, and the offsets of documents as fields of
    SeqInfo, if the program must not know them. It returns the named results.
    """
    import jax

    from jax_frontend import attention, paged_attention

    attend: Any = attention if spec.paged is None else paged_attention

    def call(
        constants: dict[str, jax.Array | None],
        learned: dict[str, jax.Array],
        cotangents: tuple[jax.Array, ...],
        offsets: Mapping[str, Any],
    ) -> dict[str, jax.Array]:
        info = seq_info if seq_info is None else replace(seq_info, **offsets)

        def forward(learned: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
            arrays = as_keywords(learned | constants)
            if name in OWN:
                return (_jax_nn(spec, OWN[name], arrays),)
            results = attend(**arrays, **keywords_of(spec, info), backend=name)
            return results if spec.return_lse else (results,)

        return results_of(forward, learned, cotangents)

    return jax.jit(call)


@contextmanager
def timed_calls(trial: Trial, device: str) -> Iterator[Calls]:
    """Yields a trial's call on a backend by name, or JAX's own function by a name of OWN: ``(out, *gradients)``."""
    import jax
    import jax.numpy as jnp

    with jax.enable_x64(trial.spec.dtype == "float64"), jax.default_device(jax_device(device)):
        arrays, cotangents, info = arrays_of(trial), cotangents_of(trial), trial.seq_info
        # On the device and not known to the program, as in a training step.
        names = () if info is None else ("cu_seqlens_q", "cu_seqlens_k")
        offsets = {name: jnp.asarray(getattr(info, name)) for name in names}

        def call(name: str) -> tuple[jax.Array, ...]:
            named = _program(trial.spec, info, name)(*arrays, cotangents, offsets)
            results = tuple(result for each, result in named.items() if each != "lse")
            return jax.block_until_ready(results) if device == "cpu" else results  # type: ignore[no-any-return]

        yield Calls(call, pause=PAUSE) if device == "cpu" else Calls(call, jax.block_until_ready)


def own_functions(spec: AttentionSpec, device: str) -> tuple[str, ...]:
    """Returns the names of OWN if jax.nn.dot_product_attention has arguments for the call."""
    if not is_plain(spec) or spec.value_dim != spec.head_dim:
        return ()
    # is_causal and local_window_size are aligned top left.
    if spec.q_len != spec.kv_len and not band(spec).hides_nothing(spec.q_len, spec.kv_len):
        return ()
    return ("jax.nn",) if device == "cpu" else tuple(OWN)


def _jax_nn(spec: AttentionSpec, implementation: str, arrays: dict[str, Any]) -> jax.Array:
    """Runs jax.nn's own attention, as a program without this package would call it."""
    import jax

    left, right = spec.window
    bounded = (spec.kv_len if left is None else left, spec.kv_len if right is None else right)
    square = spec.q_len == spec.kv_len
    keywords: dict[str, Any] = {name: arrays[name] for name in ("mask", "bias")}
    keywords |= {"implementation": implementation, "scale": spec.scale, "is_causal": spec.causal and square}
    keywords["local_window_size"] = bounded if spec.window != (None, None) and square else None
    # XLA would round float32 products to TF32 on a GPU. Our backends do not.
    with jax.default_matmul_precision("highest" if spec.dtype == "float32" else "default"):
        return jax.nn.dot_product_attention(arrays["q"], arrays["k"], arrays["v"], **keywords)


def arrays_of(trial: Trial) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arrays of a call by their fields in ``Inputs``, None if absent: without gradients, and with."""
    constants = {name: _array(trial, name) for name in arrays_of_call(trial)}
    learned = {name: constants.pop(name) for name in trial.learned}
    return constants, learned


def results_of(
    forward: Callable[[dict[str, jax.Array]], tuple[jax.Array, ...]],
    learned: dict[str, jax.Array],
    cotangents: tuple[jax.Array, ...],
) -> dict[str, jax.Array]:
    """Returns the results of a function by name, and the gradients of the learned inputs."""
    import jax

    if not learned:
        return dict(zip(("out", "lse"), forward(learned)))
    results, pull = jax.vjp(forward, learned)
    (gradients,) = pull(cotangents)
    return dict(zip(("out", "lse"), results)) | {f"d{name}": gradient for name, gradient in gradients.items()}


def cotangents_of(trial: Trial) -> tuple[jax.Array, ...]:
    """Returns the gradient of the output, and that of the log-sum-exp if there is one."""
    import jax.numpy as jnp

    dout = jnp.asarray(trial.dout, trial.spec.dtype)
    return (dout,) if trial.dlse is None else (dout, jnp.asarray(trial.dlse, trial.spec.lse_dtype))


def _array(trial: Trial, name: str) -> Any:
    import jax.numpy as jnp

    array = getattr(trial.inputs, name)
    return None if array is None else jnp.asarray(array, dtype_of(trial, name))
