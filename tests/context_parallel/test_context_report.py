"""Tests the page of measured context parallelism: it shows the times that the benchmarks wrote, and names missing
ones."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from benchmarks import context_parallel as report

SECONDS = {
    report.ONE: [4.0, 4.2, 4.4],
    "ring, zigzag": [2.5, 2.5, 2.5],
    "ring, zigzag, nothing sent": [2.25, 2.25, 2.25],
    "ulysses, contiguous": [2.1, 2.1, 2.1],
}
TORCH: dict[str, Any] = {
    "framework": "torch",
    "world": 2,
    "environment": {"date": "2020-02-02", "versions": {"torch": "9.9", "jax": None}},
    "speed": [
        {
            "shard": 8192,
            "tokens": 16384,
            "seconds": {"forward": SECONDS, "forward + backward": SECONDS},
            "memory": {"forward": {}, "forward + backward": {"ring, zigzag": 1.5e9}},
            "notes": {"forward": {report.ONE: "flash3"}, "forward + backward": {report.ONE: "flash4"}},
        }
    ],
    "long": [{"tokens": 7, "seconds": 1.5, "bytes beyond inputs": 2e9, "largest error of a row": 1e-5}],
}
JAX = {
    "framework": "jax",
    "world": 2,
    "environment": TORCH["environment"],
    "speed": [{"shard": 8192, "seconds": {"forward": {"ring, zigzag": [2.4], "ulysses, contiguous": [2.2]}}}],
}


def test_the_page_shows_every_figure() -> None:
    text = report.page(report.combined([TORCH, JAX]))
    assert "Measured on 2020-02-02, torch 9.9 (JAX, one process; torch)." in text
    assert "One GPU: flash3 forward, flash4 with backward." in text
    row = next(line for line in text.splitlines() if line.startswith("| ring, zigzag |"))
    assert row == "| ring, zigzag | 2500.00 | 0.840 | 250.00 | 2400.00 | 2500.00 | 0.840 | 250.00 |  | 1.50 |"
    assert "| 7 | 1.50 | 2.0 | 1.0e-05 |" in text


@pytest.mark.parametrize(
    ("fastest", "verdict"),
    [
        (2.1, "1.000 | >= 0.85 | met | not measured | 1.048 (ulysses, contiguous), met |"),
        (2.6, "0.808 | >= 0.85 | missed | not measured | 0.846"),
    ],
)
def test_a_goal_is_judged_by_its_own_strategies(fastest: float, verdict: str) -> None:
    torch = copy.deepcopy(TORCH)
    for seconds in torch["speed"][0]["seconds"].values():
        seconds["ulysses, contiguous"] = [fastest] * 3
    text = report.page(report.combined([torch, JAX]))
    assert f"| 8192 | forward | ulysses, contiguous | {verdict}" in text


def test_jax_in_one_and_in_several_processes_are_shown_together() -> None:
    several = {**JAX, "framework": "jax, a process a GPU"}
    several["speed"] = [{"shard": 8192, "seconds": {"forward": {"ulysses, contiguous": [2.31]}}}]
    text = report.page(report.combined([TORCH, JAX, several]))
    assert "| JAX, one process per GPU / torch, goal <= 1.05 | JAX, one process / torch, goal <= 1.05 |" in text
    assert "| 1.100 (ulysses, contiguous), missed | 1.048 (ulysses, contiguous), met |" in text
    row = next(line for line in text.splitlines() if line.startswith("| ulysses, contiguous |"))
    assert row.split(" | ")[4:6] == ["2310.00", "2200.00"]
    assert "| not measured | not measured |" in next(line for line in text.splitlines() if "8192 | forward + b" in line)


@pytest.mark.parametrize(("largest", "verdict"), [(2.9, "met"), (3.1, "missed")])
def test_errors_are_judged_by_their_bound(largest: float, verdict: str) -> None:
    errors = {"out": {"several": {"mean": 1.2, "max": largest}, "one": {"mean": 1.0, "max": 1.0}}}
    case = {"candidate": "ring, zigzag", "case": "{}", "backend": "flash4", "errors": errors}
    text = report.page(report.combined([{**TORCH, "errors": [{"found": [case]}]}]))
    assert f"Worst: 1.20, {largest:.2f}; goal <= 1.5, 3: {verdict}." in text


def test_the_fastest_strategy_is_shown_beside_the_peer() -> None:
    theirs = {"forward": {"torch context_parallel, allgather": [2.8], "torch context_parallel, alltoall": [2.52]}}
    text = report.page(report.combined([{**TORCH, "peers": [{"shard": 8192, "seconds": theirs}]}]))
    assert "| 8192 | forward | 2520.00 (alltoall) | 2100.00 (ulysses, contiguous) | 1.20 |" in text


def test_numbers_of_ranks_are_shown_separately() -> None:
    text = report.page(report.combined([{**TORCH, "world": 4}, TORCH]))
    assert text.index("## 2 GPUs") < text.index("## 4 GPUs")


def test_a_later_file_replaces_repeated_measurements() -> None:
    later = {"framework": "torch", "world": 2, "long": [{"error": "OutOfMemoryError"}]}
    found = report.combined([TORCH, {**later, "environment": TORCH["environment"]}])
    assert found["2"]["torch"]["speed"] == [{**TORCH["speed"][0], "environment": TORCH["environment"]}]
    assert "not run: OutOfMemoryError" in report.page(found)


def test_sizes_missing_in_a_later_file_stay() -> None:
    small, large = ({**TORCH["speed"][0], "shard": shard} for shard in (8192, 32768))
    before = {**TORCH, "speed": [large, {**small, "tokens": 1}]}
    other = {"date": "2021-01-01", "versions": {"torch": "10.0"}}
    found = report.combined([before, {**TORCH, "environment": other, "speed": [small]}])
    assert found["2"]["torch"]["speed"] == [
        {**small, "environment": other},
        {**large, "environment": TORCH["environment"]},
    ]
    text = report.page(found)
    assert "Measured on 2020-02-02, torch 9.9 (torch); on 2021-01-01, torch 10.0 (torch)." in text


def test_a_later_failure_replaces_only_its_own_size() -> None:
    small, large = ({**TORCH["speed"][0], "shard": shard} for shard in (8192, 32768))
    failed = {"shard": 8192, "error": "OutOfMemoryError"}
    found = report.combined([{**TORCH, "speed": [small, large]}, {**TORCH, "speed": [failed]}])["2"]["torch"]["speed"]
    assert [row.get("error") for row in found] == ["OutOfMemoryError", None]


def test_combined_files_can_be_combined_again() -> None:
    found = report.combined([TORCH, JAX, {**TORCH, "world": 4}])
    assert report.combined(report.apart(found)) == found


def test_the_stored_page_matches_the_stored_results() -> None:
    stored = json.loads(report.RESULTS.read_text(encoding="utf-8"))
    stale = "stale: run python -m benchmarks.context_parallel benchmarks/results/context-parallel.json --write"
    assert report.PAGE.read_text(encoding="utf-8") == report.page(stored), stale
