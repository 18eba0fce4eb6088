"""The mask probe: a key that must not be seen has no effect, bit for bit; one that must be seen has one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from attn_core.call.functions import aux_of
from attn_core.call.spec import AttentionSpec
from attn_core.cli.campaign.case import Case
from attn_core.cli.campaign.judge import trial_of
from attn_core.cli.certify.check import Finding, differing, run_call
from attn_core.cli.certify.subject import Subject
from attn_core.cli.trial import Trial
from attn_core.correctness.probe import MaskProbe, mask_probe

MOST_CALLS = 12
"""Probes of one draw: each shows ``value_dim`` pairs of a key and a kv head."""


def forward_alone(subject: Subject, spec: AttentionSpec) -> AttentionSpec:
    """Returns the spec without gradients, which show no mask."""
    return replace(spec, needs_backward=False, bias_gradient=False, aux_gradients=())


def can_be_probed(spec: AttentionSpec) -> bool:
    """Returns whether a few probes show every pair."""
    calls = -(-spec.kv_len * spec.num_kv_heads // spec.value_dim)
    return not spec.empty and 0 < calls <= MOST_CALLS


def sees_its_mask(subject: Subject, case: Case) -> Finding:
    """Compares the visible pairs with the spec's mask, then changes keys that one row of queries does not see."""
    trial = trial_of(case)
    probe = _probe_of(trial)
    outs = [run_call(subject, case, trial._replace(inputs=_wide(each)))["out"] for each in probe.inputs()]
    wrong = probe.differences(outs)
    if wrong:
        return Finding(f"{len(wrong)} pairs: {wrong[0]}")
    # Quantised keys share their scale with the keys of their block, hidden ones among them.
    return Finding() if subject.claims.approximate else Finding(_effect_of_hidden_keys(subject, case, trial, probe))


def _wide(inputs: Any) -> Any:
    return inputs._replace(**{name: getattr(inputs, name).astype(np.float64) for name in "qkv"})


def _probe_of(trial: Trial) -> MaskProbe:
    inputs = trial.inputs
    names = ("mask", "cu_seqlens_q", "cu_seqlens_k", "key_ranges")
    return mask_probe(trial.spec, **{name: getattr(inputs, name) for name in names}, aux=aux_of(inputs))


def _effect_of_hidden_keys(subject: Subject, case: Case, trial: Trial, probe: MaskProbe) -> str | None:
    """Returns the results of a row of queries that changed with keys that no head of the row sees, or None."""
    spec, inputs = trial.spec, trial.inputs
    row = trial.seed % spec.q_len
    seen = np.asarray(probe.expected[:, :, row].any(axis=1))  # [batch, kv_heads, kv_len]
    hidden = ~seen.swapaxes(1, 2)[..., None]
    if not hidden.any():
        return None
    random = np.random.default_rng(trial.seed + 1)
    # Integers of both signs up to 6, which every dtype represents, so larger than what the other rows see.
    changed = {
        name: np.where(hidden.reshape(*getattr(inputs, name).shape[:-1], 1), _integers(random, array.shape), array)
        for name, array in (("k", inputs.k), ("v", inputs.v))
    }
    both = (run_call(subject, case, each) for each in (trial, trial._replace(inputs=inputs._replace(**changed))))
    rows = [{name: _row(name, array, row, spec) for name, array in arrays.items()} for arrays in both]
    wrong = differing(*rows)
    return f"query {row} changes with keys that it does not see: {', '.join(wrong)}" if wrong else None


def _integers(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return random.integers(-6, 7, shape).astype(np.float64)


def _row(name: str, array: np.ndarray, row: int, spec: AttentionSpec) -> np.ndarray:
    if name == "lse":
        return np.ascontiguousarray(array[..., row])
    return np.ascontiguousarray(array[row] if spec.packed else array[:, row])
