"""How long a call takes in JAX on a GPU, from the models that were measured in torch; apart from the order itself.

XLA launches some kernels itself, and reaches the others through a callback into Python, which costs the host more than
torch does. All times are microseconds.
"""

from __future__ import annotations

from attn_core import backends
from attn_core.call.spec import AttentionSpec

CALLBACK = {
    False: {"flash2": 50.0, "flash3": 90.0, "sdpa_flash": 90.0, "": 125.0},
    True: {"flash2": 200.0, "sdpa_flash": 420.0, "": 600.0},
}
"""Host microseconds in JAX on a GPU if XLA calls Python, forward (False) and training (True); "" for other backends.

From single jitted calls (seed 8 of ``benchmarks/jax_calls.py`` of revision 1a60ea3e) on an H200 host on 2026-11-24,
less JAX's own time for such a call. Most ran without XLA's autotuning, which compiles for minutes."""

CALLBACK_TABLE = {False: 250.0, True: 500.0}
"""More of them for a mask or a bias, which the callback prepares."""

XLA_LAUNCH = {
    False: {"jax_cudnn": 20.0, "jax_xla": 25.0, "": 10.0},
    True: {"jax_cudnn": 140.0, "jax_xla": 45.0, "": 20.0},
}
"""The same if XLA launches the kernels itself."""

OPERATORS, OPERATORS_TABLE = {False: 45.0, True: 220.0}, {False: 60.0, True: 120.0}
"""The same if XLA runs operators of torch itself; and more for a mask or a bias. Of an H200 host on 2026-11-27."""

XLA_SCORE = {False: 60e-6, True: 150e-6}
"""Device microseconds of ``jax_xla`` on a GPU for each score, hidden or not, from the same calls.

They took 20 to 70 for a million scores forward. Calls of few scores took the most, and only they can be the fastest
this way."""

HIDDEN_BY_HOST = 0.5
"""In training, a kernel that XLA launches takes about this share of the predicted time if torch's host takes as long.

There the fit saw the host's time alone. The share grows to 1 for kernels that take twice as long as the host. From
jitted calls on an H200 and an H100."""

CAUSAL_BESIDE_TABLE = 0.5
"""``jax_cudnn`` applies causal beside a mask or bias in the kernel, so it takes about this share of torch's time.

torch's op needs causal in the mask, and computes all pairs. A call of 4 rows of 10816 tokens on an H200 took 11.5 ms,
and sdpa_efficient 32.8 ms."""


def predicted(
    name: str, caution: float, host_in_torch: float, device_time: float, spec: AttentionSpec, device: str
) -> float:
    """Returns the predicted time of a backend, with caution.

    Args:
        caution: the factor by which the backend's predicted times count as longer.
        host_in_torch, device_time: the predicted times of the host in torch and of the device, with caution.
    """
    has_table = spec.mask_shape is not None or spec.bias_shape is not None
    if name == "jax_cudnn" and spec.causal and has_table:
        device_time *= CAUSAL_BESIDE_TABLE
    callback, launch = CALLBACK[spec.needs_backward], XLA_LAUNCH[spec.needs_backward]
    slowest = callback.get(name, callback[""])
    slowest += has_table * CALLBACK_TABLE[spec.needs_backward]
    if device_time >= max(caution * slowest, 2 * host_in_torch):
        return device_time  # the device surely takes longer than the host
    if not _launched_by_xla(name, spec, device):
        return max(caution * slowest, device_time)
    if backends.load(name, backends.kind_of(device)).OPERATOR_FUNCTIONS is not None:
        on_host = OPERATORS[spec.needs_backward] + has_table * OPERATORS_TABLE[spec.needs_backward]
        return max(caution * on_host, device_time)
    if spec.needs_backward and host_in_torch:
        device_time *= min(1.0, max(HIDDEN_BY_HOST, device_time / (2 * host_in_torch)))
    return max(caution * launch.get(name, launch[""]), device_time)


def predicted_of_xla(spec: AttentionSpec) -> float:
    """Returns the predicted time of ``jax_xla``, which has no model: torch does not run it."""
    scores = spec.batch * spec.num_heads * spec.q_len * spec.kv_len
    return max(XLA_LAUNCH[spec.needs_backward]["jax_xla"], XLA_SCORE[spec.needs_backward] * scores)


def _launched_by_xla(name: str, spec: AttentionSpec, device: str) -> bool:
    """Returns whether a JAX program runs a fused kernel of this backend without Python."""
    # jax_cudnn is JAX's own call of cuDNN, so XLA launches it without a program of ours.
    if name == "jax_cudnn":
        return True
    return backends.load(name, backends.kind_of(device)).program_refuses(spec, device) == ()
