"""Tests the certificates in benchmarks/results."""

from __future__ import annotations

import pytest

from attn_core.cli.certify.calls import CHECKS
from attn_core.cli.certify.certificate import FAILED, count
from tools.pages import certificates

FOUND = certificates.certificates()


@pytest.mark.parametrize("name", FOUND)
def test_a_certificate_is_of_a_whole_run_without_failures(name: str) -> None:
    found = FOUND[name]
    assert not found["backends"] and not found["checks"] and found["not_run"]
    assert count(found, FAILED) == 0, [entry["reason"] for entry in found["entries"] if entry["result"] == FAILED]
    assert {entry["check"] for entry in found["entries"] if entry["backend"]} <= {*CHECKS}
    assert found["versions"]["torch"] and found["versions"]["jax"] and set(found["devices"]) == {"torch", "jax"}


def test_the_cpu_has_one() -> None:
    assert set(FOUND["cpu"]["devices"].values()) == {"cpu"} and FOUND["cpu"]["cpu_capability"]
    ran = {entry["backend"] for entry in FOUND["cpu"]["entries"] if entry["draws"]}
    assert ran >= {"math", "sdpa_flash", "flex", "jax_xla"}
