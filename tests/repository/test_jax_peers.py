"""Tests that the benchmark's calls of other JAX packages mean the same as ours, or are left out with the reason."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest

pytest.importorskip("torch")
jax = pytest.importorskip("jax")
import jax.numpy as jnp
import numpy as np

from attn_core import SeqInfo
from benchmarks import jax_peers
from benchmarks.tables import peers
from jax_frontend import attention

IDS = np.repeat(np.array([[1, 2, 3]], np.int32), [40, 67, 21], axis=1).repeat(2, axis=0)
"""Three documents in each of two rows of 128 tokens."""


def run(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], peers: dict[str, Any], training: bool) -> Any:
    sizes = ((2, 128, 4, 16), (2, 128, 2, 16), (2, 128, 2, 16), (2, 128, 4, 16))
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(key, size) for key, size in zip(keys, sizes)]
    out, pull = jax.vjp(lambda *leaves: attention(*leaves, **options), *arrays[:3])
    monkeypatch.setattr(jax_peers, "PEERS", peers)
    return jax_peers.programs(options, arrays, training, pull(arrays[3]) if training else out)


ON_A_CPU = {
    "jax.nn": partial(jax_peers.jax_nn, implementation="xla"),
    "Triton": partial(jax_peers.pallas_triton, interpret=True),
    **({"tokamax": partial(jax_peers.tokamax, implementation="xla")} if find_spec("tokamax") else {}),
}


@pytest.mark.parametrize("options", [{}, {"q_segment_ids": jnp.asarray(IDS)}], ids=["causal", "segment ids"])
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
def test_a_peer_computes_our_call(monkeypatch: pytest.MonkeyPatch, options: Any, training: bool) -> None:
    ran, reasons, differences = run(monkeypatch, {"causal": True, **options}, ON_A_CPU, training)
    assert set(ran) == set(ON_A_CPU) and not reasons
    assert max(differences.values()) < 2e-3, differences


def test_a_window_means_the_same_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    _, reasons, differences = run(monkeypatch, {"causal": True, "window": 17}, ON_A_CPU, False)
    assert set(reasons) == {"Triton"} and "takes no window" in reasons["Triton"]
    assert max(differences.values()) < 2e-3, differences


def test_another_meaning_shows_as_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"one key more": lambda options: jax_peers.jax_nn({**options, "window": 18}, "xla")}
    _, _, differences = run(monkeypatch, {"causal": True, "window": 17}, wrong, False)
    assert differences["one key more"] > 0.01


def test_a_call_that_no_peer_takes_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, options in {
        "offsets": {"causal": True, "seq_info": SeqInfo.from_lengths([128, 128])},
        "sinks": {"causal": True, "sinks": jnp.zeros(4)},
    }.items():
        arrays = [jnp.zeros((2, 128, 4, 16))] * 4
        monkeypatch.setattr(jax_peers, "PEERS", ON_A_CPU)
        ran, reasons, _ = jax_peers.programs(options, arrays, False, None)
        assert not ran and all(f"takes no {name}" in reason for reason in reasons.values())


def test_the_report_has_a_column_for_each_peer_that_ran() -> None:
    rows = [
        {"call": "a", "what": "forward", "seconds": {"torch": [1e-3], "jax": [1e-3], "x": [2e-3]}, "left_out": {}},
        {"call": "b", "what": "forward", "seconds": {"torch": [1e-3], "jax": [1e-3]}, "left_out": {"x": "takes no b"}},
        {"call": "c", "what": "decoding", "seconds": {"torch": [1e-3], "jax": [1e-3]}},
    ]
    lines = "\n".join(peers(rows)).splitlines()
    assert "| a | forward | 1.000 | 2.000 (ours 2.00 times as fast) |" in lines
    assert "| b | forward | 1.000 |  |" in lines and "- x: takes no b: b (forward)" in lines
    assert not any("| c |" in line for line in lines)
