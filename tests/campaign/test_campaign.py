"""Tests campaigns: draws, relations, entries, planted faults, shrinking, resuming and replaying."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from multiprocessing import active_children
from pathlib import Path
from signal import SIGKILL
from typing import Any

import numpy as np
import pytest

from attn_core import AttentionSpec, backends
from attn_core.cli.trial import Trial
from attn_core.correctness.accuracy import expect
from attn_core.errors import SpecError
from tests.campaign import coverage
from tests.campaign.__main__ import main
from tests.campaign.case import Case, case_of, text_of
from tests.campaign.draw import Place, new_lengths, structure
from tests.campaign.entries import entries_of
from tests.campaign.judge import trial_of, verdict_of
from tests.campaign.loop import BLOCK, Campaign, Part, State, run_in_processes, running_file
from tests.campaign.relations import RELATIONS
from tests.campaign.same_bits import PAIRS
from tests.campaign.shrink import shrunk

pytest.importorskip("torch")
pytest.importorskip("jax")

CPU = {"torch": "cpu", "jax": "cpu"}
PLACES = [Place(3, number, number) for number in range(300)]
SPEC = AttentionSpec(
    batch=2,
    q_len=5,
    kv_len=7,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    value_dim=8,
    dtype="float32",
    causal=True,
    return_lse=True,
    needs_backward=True,
)


def drawn(count: int, packed: bool | None = None) -> list[Case]:
    cases = []
    for place in PLACES[:count]:
        spec, lengths = structure(place, "cpu", packed=packed)
        cases.append(Case("torch attention", spec, None, place.number, lengths))
    return cases


# cases as data


def test_a_case_survives_its_text() -> None:
    for case in drawn(60):
        assert case_of(text_of(case)) == case
        assert "\n" not in text_of(case)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"entry": "torch attention"}',
        '{"entry": "torch attention", "spec": {}, "run": "rm"}',
        '{"entry": "torch attention", "spec": {"no": 1}}',
    ],
)
def test_a_text_that_is_no_case_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="one JSON object as a campaign prints it"):
        case_of(text)


# draws


def test_draws_are_the_same_everywhere_and_reach_every_feature() -> None:
    assert drawn(20) == drawn(20)
    counts: coverage.Counts = {}
    for case in drawn(300):
        coverage.add(counts, "all", case.spec)
    assert all(counts["all"].get(feature) for feature in coverage.FEATURES)


def test_documents_of_a_shared_structure_stay_within_it() -> None:
    for case in drawn(60, packed=True):
        spec = case.spec
        for number in range(5):
            queries, keys = new_lengths(spec, Place(3, 0, number))
            assert len(queries) == len(keys) == spec.documents
            assert sum(queries) <= spec.q_len and sum(keys) <= spec.kv_len
            assert max(queries) <= spec.max_len_q and max(keys) <= spec.max_len_k  # type: ignore[operator]


# relations, with the float64 reference in the place of a kernel


def by_reference(trial: Trial) -> dict[str, np.ndarray]:
    expected = expect(trial.spec, trial.inputs, dout=trial.dout if trial.learned else None, dlse=trial.dlse)
    names = {"out", *(("lse",) if trial.spec.return_lse else ()), *(f"d{name}" for name in trial.learned)}
    return {name: array for name, array in expected.truth.items() if name in names}


def checked(name: str) -> list[AttentionSpec]:
    """The specs of the drawn cases whose result a relation keeps."""
    relation, specs = RELATIONS[name], []
    for case in (*drawn(300), Case("torch attention", SPEC)):
        if not relation.takes(case.spec):
            continue
        trial = trial_of(case)
        trials, join = relation.rewrite(trial)
        results, expected = join([by_reference(each) for each in trials]), by_reference(trial)
        assert results.keys() == expected.keys()
        for quantity, truth in expected.items():
            np.testing.assert_allclose(results[quantity], truth, 1e-12, 1e-14, err_msg=f"{quantity} of {case}")
        assert not any(_same(trial, each) for each in trials)
        specs.append(case.spec)
    assert len(specs) >= 5
    return specs


@pytest.mark.sampled
@pytest.mark.parametrize("name", [name for name in RELATIONS if name != "documents apart"])
def test_a_relation_keeps_the_result(name: str) -> None:
    checked(name)


def test_packed_documents_equal_separate_calls() -> None:
    assert any(
        spec.softcap and spec.sinks and spec.return_lse and spec.needs_backward for spec in checked("documents apart")
    )


def _same(one: Trial, other: Trial) -> bool:
    return one.spec == other.spec and all(
        np.array_equal(getattr(one.inputs, name), getattr(other.inputs, name)) for name in "qkv"
    )


# entries


@pytest.mark.sampled
@pytest.mark.parametrize("name", [name for framework in CPU for name in entries_of(framework)])
def test_an_entry_runs_calls_rightly(name: str) -> None:
    entry, ran = entries_of(name.partition(" ")[0])[name], 0
    for case in drawn(300, packed=True if name.endswith("one row") else None):
        case = replace(case, entry=name)
        if case.spec.dropout or entry.refuses(case.spec) is not None:
            continue
        verdict = verdict_of(case, "cpu")
        assert verdict.fault is None, f"{verdict.fault}: --replay '{case}'"
        ran += verdict.skipped is None
        if ran == 3:
            break
    assert ran == 3


# planted faults


def _wrong_window(spec: AttentionSpec, inputs: Any, *into: Any) -> Any:
    left = spec.window[0]
    wider = spec if left is None else replace(spec, window=(left + 1, spec.window[1]))
    return _wrong_window.right(wider, inputs, *into)  # type: ignore[attr-defined]


def test_a_planted_fault_is_found_and_shrunk(replace_fields: Any, capsys: pytest.CaptureFixture[str]) -> None:
    math = backends.load("math", "cpu")
    _wrong_window.right = math.forward  # type: ignore[attr-defined]
    replace_fields(math, forward=_wrong_window)
    run = Campaign(5, {"torch": "cpu"}, ("torch attention, strided",))
    for _, case in islice(run.cases(0), 400):
        run._count(case, verdict_of(case, "cpu"))
        if run.state["faults"]:
            break
    (fault,) = run.state["faults"]
    small = case_of(fault["shrunk"]).spec
    assert small.window[0] is not None and "WRONG" in fault["fault"]
    assert (small.softcap, small.mask_shape, small.bias_shape, small.sinks, small.needs_backward) == (
        None,
        None,
        None,
        False,
        False,
    )
    assert small.batch * small.num_heads * small.q_len * small.kv_len <= 64
    assert main(["--device", "cpu", "--replay", fault["shrunk"]]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_a_wrong_number_does_not_shrink_to_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend gives wrong numbers with a softcap, and cannot run at all without one."""
    from tests.campaign import judge

    def verdict(case: Case, device: str) -> judge.Verdict:
        return judge.Verdict(
            fault="raised ValueError: no" if case.spec.softcap is None else "out: 3 of the bound WRONG"
        )

    monkeypatch.setattr(judge, "verdict_of", verdict)
    case = Case("torch attention", replace(SPEC, softcap=5.0, causal=True), "math", 3)
    wrong, raised = "dv: 16.2 of the bound, error 6.10e-01 WRONG", "raised ValueError: other words"
    assert shrunk(case, judge.fails_alike(wrong, "cpu")).spec.softcap == 5.0
    assert shrunk(case, judge.fails_alike(raised, "cpu")).spec.softcap is None


def test_shrinking_keeps_a_failing_case_failing() -> None:
    def fails(case: Case) -> bool:
        return case.spec.softcap is not None and case.spec.q_len >= 3

    case = Case("torch attention", replace(SPEC, softcap=5.0, sinks=True, window=(3, 0)))
    small = shrunk(case, fails).spec
    assert (small.q_len, small.kv_len, small.batch, small.num_heads, small.softcap) == (3, 1, 1, 1, 5.0)
    assert not small.sinks and small.window == (None, None) and not small.needs_backward


# the loop


def test_a_campaign_writes_its_counts_and_goes_on_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "campaign.json"
    options = ["--minutes", "0.005", "--device", "cpu", "--only", "torch attention, heads", "--json", str(path)]
    assert main([*options, "--seed", "7"]) == 0
    first = json.loads(path.read_text())
    assert first["calls"] > 0 and first["faults"] == [] and first["next"] > 0
    assert f"{first['calls']} calls" in capsys.readouterr().out
    assert main([*options, "--seed", "7", "--resume"]) == 0
    second = json.loads(path.read_text())
    assert second["next"] > first["next"] and second["calls"] > first["calls"]
    assert main([*options, "--seed", "8", "--resume"]) == 2
    assert "seed" in capsys.readouterr().err


def test_a_campaign_ends_after_so_many_calls(tmp_path: Path) -> None:
    path = tmp_path / "campaign.json"
    assert main(["--device", "cpu", "--calls", "7", "--only", "torch attention, heads", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["calls"] == 7
    assert [each.name for each in tmp_path.iterdir()] == ["campaign.json"]


@pytest.mark.parametrize(
    "options", [["--calls", "7", "--processes", "2"], ["--resume"], ["--only", "no such entry"], ["--json", "no/such"]]
)
def test_options_that_cannot_be_followed_are_refused(options: list[str]) -> None:
    assert main(["--device", "cpu", "--minutes", "0.01", *options]) == 2


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1}'])
def test_a_file_of_no_campaign_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "campaign.json"
    path.write_text(content)
    assert main(["--device", "cpu", "--minutes", "0.01", "--resume", "--json", str(path)]) == 2
    assert path.read_text() == content


@pytest.mark.slow
def test_processes_share_the_blocks_and_add_up(tmp_path: Path) -> None:
    parts = [Campaign(11, CPU, part=Part(number, 3)) for number in range(3)]
    blocks = [{number // BLOCK for number, _ in islice(part.cases(0), 5 * BLOCK)} for part in parts]
    assert not blocks[0] & blocks[1] and not blocks[1] & blocks[2]
    path = tmp_path / "campaign.json"
    options = ["--device", "cpu", "--seed", "7", "--only", "torch attention, heads", "--json", str(path)]
    assert main(["--minutes", "0.01", *options, "--processes", "2"]) == 0
    states = [json.loads((tmp_path / f"campaign.json.{number}").read_text()) for number in range(2)]
    total = json.loads(path.read_text())
    assert total["calls"] == states[0]["calls"] + states[1]["calls"] > 0
    assert total["by entry"]["torch attention, heads first"]["calls"] == total["calls"]


@pytest.mark.slow
def test_a_process_that_dies_is_started_again_and_its_case_is_a_fault(tmp_path: Path) -> None:
    path, run = tmp_path / "campaign.json", Campaign(7, CPU, ("torch attention, heads",))
    killed: list[Any] = []
    running = running_file(tmp_path / "campaign.json.0")

    def kill_one(state: State) -> None:
        """Kills a process in a call, and stops the campaign when its successor is in a later one."""
        text = running.read_text().strip("\0") if running.exists() else ""
        if not text:
            return
        number = int(text.partition(" ")[0])
        for child in active_children():
            if child.name == "campaign 0" and not killed:
                killed.extend((child, number))
                child.kill()
            elif child.name == "campaign 0" and child is not killed[0] and number > killed[1]:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_processes(run, 2, 400.0, path, False, kill_one)
    assert killed[0].exitcode == -SIGKILL
    assert [fault["fault"] for fault in run.state["faults"]] == ["the process died"]
    assert json.loads(path.read_text()) == run.state


def test_the_case_in_which_a_process_died_is_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "campaign.json"
    run = Campaign(7, CPU, ("torch attention",))
    path.write_text(json.dumps(run.state))
    case = Case("torch attention", SPEC, "math", 3)
    (tmp_path / "campaign.json.running").write_bytes(f"17 {text_of(case)}".encode().ljust(4096, b"\0"))
    run.resume(path)
    assert run.state["next"] == 18
    assert run.state["faults"] == [{"fault": "the process died", "case": text_of(case), "shrunk": text_of(case)}]


@pytest.mark.slow
def test_every_entry_and_relation_gets_its_turn() -> None:
    run = Campaign(11, CPU)
    cases = [case for _, case in islice(run.cases(0), 250 * BLOCK)]
    assert {case.entry for case in cases} == set(run.entries)
    assert {case.relation for case in cases} == {None, *RELATIONS, *PAIRS}
    assert [case for _, case in islice(run.cases(0), 50)] == cases[:50]


def test_holes_name_claims_that_no_call_had() -> None:
    counts: coverage.Counts = {}
    coverage.add(counts, "math in torch", SPEC)
    (hole,) = coverage.holes_of_backends(counts, "cpu")
    assert hole.startswith("math in torch: window, softcap, mask") and "causal" not in hole


def test_replay_says_whether_a_case_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--replay", text_of(Case("torch attention", SPEC, "math"))]) == 0
    assert "right: the largest error is" in capsys.readouterr().out
    assert main(["--device", "cpu", "--replay", text_of(Case("torch attention", SPEC, "flash3"))]) == 2
    assert "cannot run here" in capsys.readouterr().out
    for text in ("", "{", "7", '{"entry": "no such", "spec": {}}'):
        assert main(["--device", "cpu", "--replay", text]) == 2


def test_an_interrupt_is_no_fault(tmp_path: Path) -> None:
    path, run = tmp_path / "campaign.json", Campaign(7, CPU, ("torch attention, heads",))

    def interrupt(state: State) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.run(10.0, path, interrupt)
    again = Campaign(7, CPU, ("torch attention, heads",))
    again.resume(path)
    assert again.state["faults"] == [] and again.state["next"] == run.state["next"] > 0
