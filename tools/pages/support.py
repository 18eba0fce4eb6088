"""Writes docs/reference/support.md: every backend's claims as tables, from the Support data; imports no kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from attn_core import backends
from attn_core.backends import Backend
from attn_core.backends.support import Support
from attn_core.call.spec import AttentionSpec

BOTH, FORWARD_ONLY, NONE = "✓", "forward", "—"

GROUPS = {
    "Shapes and masks": {
        "grouped_heads": "fewer kv heads than heads (GQA, MQA)",
        "value_dim": "value_dim ≠ head_dim",
        "causal": "`causal`",
        "window": "`window`",
        "packed": "packed documents (`seq_info`)",
        "mask": "boolean `mask`",
        "key_ranges": "`key_ranges`",
        "mask_mod": "`mask_mod`",
    },
    "Scores": {
        "softcap": "`softcap`",
        "score_mod": "`score_mod`",
        "bias": "additive `bias`",
        "alibi": "`alibi_slopes`",
        "sinks": "`sinks`",
    },
    "Results, gradients and dropout": {
        "lse": "`return_lse=True`",
        "lse_gradient": "gradient of the log-sum-exp",
        "bias_gradient": "gradient of the bias",
        "aux_gradients": "gradient of a score function's arrays",
        "deterministic": "`deterministic=True`",
        "invariant": '`invariant="batch"`',
        "invariant prefix": '`invariant="prefix"`',
        "dropout": "`dropout`",
        "portable_dropout": "portable dropout: drops the same weights as the others named here",
    },
    "Other calls, and restrictions": {
        "paged": "keys and values in pages",
        "paged_alibi": "`alibi_slopes` with pages",
        "paged_starts": "`kv_starts` with pages",
        "partial": "a part of each row's keys (context parallelism)",
        "symbolic": "symbolic sizes (`jax.export`)",
        "approximate": "approximate: by name only",
        "unproven": "never run on such a device by this project: by name only",
    },
}
_NAMED = {claim for group in GROUPS.values() for claim in group}
GROUPS["Results, gradients and dropout"] |= {
    field.name: f"`{field.name}`" for field in fields(Support) if field.default is False and field.name not in _NAMED
}
"""Every boolean claim of Support and its name in the tables, a table for each group."""
FEATURES = {claim: name for group in GROUPS.values() for claim, name in group.items()}

CUDA = ("sm70", "sm75", "sm80", "sm90")
"""Capabilities of GPUs, the oldest first."""
PLAIN_CALL = AttentionSpec(
    batch=1, q_len=128, kv_len=128, num_heads=1, num_kv_heads=1, head_dim=64, value_dim=64, dtype="float16"
)

HEAD = """# What each backend supports

Which kernels can run what. `make support` writes this page from what the backends declare, and tests compare each
declaration with a reference. A backend that a row does not name refuses such a call, with the reason.
[Which kernels for which GPU](devices.md) has the cards; the [Glossary](glossary.md) has the words.

A row is about one feature at a time. For one call, `attn explain` with the call's options shows what can run it and,
with `--all`, every reason:

```bash
attn explain --heads 32 --kv-heads 8 --head-dim 128 --causal --softcap 50 --device sm90 --assume-installed
```
"""


def render() -> str:
    """Returns the whole page as Markdown."""
    named = built()
    features = [f"## {title}\n\n{_features(named, group)}" for title, group in GROUPS.items()]
    sections = [HEAD, *features, "## Limits\n\n" + _limits(named), _preference()]
    return "\n".join(sections)


def built() -> dict[str, Backend]:
    """Returns every record of every backend by its name in the tables."""
    return {
        f"`{name}`" + (f" ({kind})" if kind else ""): backend
        for name in backends.names()
        for kind, backend in backends.records(name).items()
    }


def _features(named: dict[str, Backend], group: dict[str, str]) -> str:
    rows = [["", "forward and backward", "forward only"]]
    for claim, title in group.items():
        rows.append([title, *(_names_of(named, claim, mark) for mark in (BOTH, FORWARD_ONLY))])
    return table_of(rows)


def _names_of(named: dict[str, Backend], claim: str, mark: str) -> str:
    return ", ".join(name for name, backend in named.items() if cell(backend, claim) == mark) or NONE


def cell(backend: Backend, claim: str) -> str:
    """Returns BOTH, FORWARD_ONLY or NONE for a claim of a backend."""
    forward = _claims(backend.forward_claims, claim)
    backward = backend.backward_claims is not None and _claims(backend.backward_claims, claim)
    if claim in ("bias_gradient", "aux_gradients", "lse_gradient"):  # these are claims about the backward alone
        return BOTH if backward else NONE
    return BOTH if forward and backward else FORWARD_ONLY if forward else NONE


def _claims(support: Support, claim: str) -> bool:
    """Returns whether a backend has a claim. ``invariant prefix`` is the further promise of ``invariant``."""
    if claim == "invariant prefix":
        return "prefix" in support.invariant
    return bool(getattr(support, claim))


def _limits(named: dict[str, Backend]) -> str:
    rows = [["backend", "tensors of", "needs", "devices", "dtypes", "head_dim", "alignments", "forward mode"]]
    for name, backend in named.items():
        forward = backend.forward_claims
        rows.append(
            [
                name,
                backend.framework,
                f"`{backend.requires}`",
                devices(backend),
                ", ".join(forward.dtypes),
                head_dims(forward),
                ", ".join(forward.alignments) or NONE,
                "yes" if backend.forward_mode is not None else "no",
            ]
        )
    return table_of(rows)


def devices(backend: Backend) -> str:
    """Returns the devices that a backend claims; of "cuda" also the oldest that it takes, if it refuses any."""

    def is_refused(device: str) -> bool:
        return any(reason.startswith(f"device {device}:") for reason in backend.refuses(PLAIN_CALL, device, None))

    names = ", ".join(backend.forward_claims.devices)
    if names != "cuda":
        return names
    oldest = next(device for device in CUDA if not is_refused(device))
    return names if oldest == CUDA[0] else f"{names} from {oldest}"


def head_dims(support: Support) -> str:
    """Returns the head dimensions that a backend takes, as text."""
    limit = "any" if support.max_head_dim is None else f"up to {support.max_head_dim}"
    return limit if support.head_dim_multiple == 1 else f"{limit}, a multiple of {support.head_dim_multiple}"


def _preference() -> str:
    lines = _orders(backends.usual_order)
    lines.append(
        "\nThe first that can run the call is chosen. On a device that was measured, the order depends on the call\n"
        "and follows the measurements. `any` is every device without a line of its own: a TPU, or a GPU of AMD,\n"
        "Apple or Intel. Backends that no line names run only if you request them by name.\n\n"
        "In forward mode, one of these computes the tangents:\n"
    )
    lines += _orders(backends.forward_mode_order)
    lines.append(
        "\nThe same ones, in this order, compute the largest logits beside a kernel that does not return them."
    )
    return "## Order of automatic choice\n\n" + "\n".join(lines)


def _orders(order: Callable[[str, str], tuple[str, ...]]) -> list[str]:
    return [
        f"- {framework} on {kind}: " + ", ".join(f"`{name}`" for name in order(framework, kind))
        for kind in backends.kinds_in_order()
        for framework in ("torch", "jax")
    ]


def table_of(rows: list[list[str]]) -> str:
    """Returns rows as a Markdown table; the first row is the head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines) + "\n"
