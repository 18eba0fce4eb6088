"""Tests ``attn tune --ranks`` over gloo from end to end, and that choices follow its file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from attn_core.call.options import Options, check_options
from attn_core.cli import tune as command
from attn_core.cli import tune_ranks
from attn_core.cli.app import app
from attn_core.cli.measure_host import HostTime, host_figures
from attn_core.context_parallel.cost.machine import Constants
from attn_core.context_parallel.cost.tuned import constants_in_force, tuned_constants, tuned_path
from attn_core.context_parallel.request import Request, explain_request
from attn_core.selection import Target
from attn_core.selection.tables import device_name, versions

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

PLAN = ("context-plan", "--q-len", "4096", "--causal", "--ranks", "2", "--device", "cpu", "--dtype", "float32")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    _forget()
    yield tmp_path
    _forget()


def _forget() -> None:
    constants_in_force.cache_clear()
    explain_request.cache_clear()


def attn(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})


def table(**changes: Any) -> dict[str, Any]:
    """A file's content for this machine: the package's figures with changes."""
    links = {kind: [list(row) for row in rows] for kind, rows in Constants.of("cpu").links}
    base = {name: getattr(Constants.of("cpu"), name) for name in Constants.__dataclass_fields__}
    about = {"format": 1, "ranks": 2, "date": "2026-01-02", "versions": versions(), "device_name": device_name("cpu")}
    return {**base, "links": links, "device": "cpu", **about, **changes}


def write(content: Any) -> Path:
    path = tuned_path("cpu")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    _forget()
    return path


@pytest.mark.slow
def test_ranks_measure_this_machine_and_choices_follow(folder: Path) -> None:
    done = attn("tune", "--ranks", "2", "--device", "cpu")
    assert done.exit_code == 0, done.output
    path = folder / "attn-core/ranks-cpu.json"
    assert f"wrote {path}" in done.stdout.replace("\n", " ")
    content = json.loads(path.read_text(encoding="utf-8"))
    constants = tuned_constants(content)
    assert content["ranks"] == 2 and content["network_gib_s"] == Constants.of("cpu").network_gib_s
    measured, kept = (content["sources"][name] for name in ("measured", "not measured, as in the package"))
    assert "links" in measured and "host_us" in measured and "host_backward" in measured
    assert kept == "backward_traffic, network_gib_s, ranks_per_host, softcap, wide"
    assert f"not measured, so as for {Constants.of('cpu').device_name}: {kept}" in " ".join(done.stdout.split())
    # One factor on the package's figures; a CPU launches faster than a tenth of a second, and not in no time.
    factors = [one / other for one, other in zip(constants.host_us, Constants.of("cpu").host_us, strict=True)]
    assert max(factors) == pytest.approx(min(factors)) and 0.02 < factors[0] < 50
    assert 0.2 < constants.host_backward < 20
    # A CPU is far below the GPU whose figures the package has.
    assert 1e-4 < constants.forward_tflops < 20 and 1e-4 < constants.backward_tflops < 20
    assert 0.5 < constants.memory_gib_s < 1000 and 0 <= constants.overlap <= 1
    for kind in ("ring", "all_gather", "all_to_all"):
        assert 1e-6 < constants.link_seconds(kind, 1) < 1, "the latency"
        assert constants.link_seconds(kind, 2**20) < constants.link_seconds(kind, 2**24)
    assert "2 ranks, as attn tune measured them on" in " ".join(attn(*PLAN).stdout.split())


def test_the_time_of_the_host_is_one_factor_on_the_figures_of_the_package() -> None:
    """Of three calls, of which one was disturbed."""
    package = Constants.of("sm90")
    parts = {each: package.host_seconds(*each, backward=False) for each in ((2, 2), (2, 1), (1, 5))}
    times = [HostTime(each, 0.7 * seconds, 0.7 * seconds * 3.1) for each, seconds in parts.items()]
    for at in range(3):
        disturbed = [
            each._replace(forward=1.0, both=1.5) if at == number else each for number, each in enumerate(times)
        ]
        figures = host_figures(disturbed)
        assert figures["host_us"] == pytest.approx([0.7 * us for us in package.host_us])
        assert figures["host_backward"] == pytest.approx(2.1)
    constants = tuned_constants(table(**host_figures(times)))
    assert constants.host_seconds(2, 1, backward=True) == pytest.approx(0.7 * 2.1 * parts[2, 1])


def test_a_plan_says_which_figures_it_used() -> None:
    assert "estimates by the figures of NVIDIA H200)" in attn(*PLAN).stdout
    write(table())
    said = " ".join(attn(*PLAN).stdout.split())
    assert (
        f"estimates by the figures of {device_name('cpu')}, 2 ranks, as attn tune measured them on 2026-01-02)" in said
    )


def test_the_strategy_of_a_call_follows_the_file() -> None:
    shards = tuple(((1, 2048, heads, 64), "float32") for heads in (8, 8, 8))
    where = {"axes": ("cp",), "sizes": (4,), "device": "cpu", "needs_backward": False, "requested": None}
    request = Request(
        (*shards, None), (8192, 8192), None, check_options(Options(causal=True)), "", "zigzag", 1, **where
    )
    chosen = set()  # over four ranks, because two gather keys by a hop of a ring
    for fast in ("ring", "all_to_all"):
        slow = {kind: [[1, 1e-3], [64, 1e-3]] for kind in ("ring", "all_gather", "all_to_all")}
        write(table(links={**slow, fast: [[1, 1e3], [64, 1e3]]}))
        explained = explain_request(request, Target.here("torch", "cpu"))
        chosen.add(explained.choice.strategy)
        assert "as attn tune measured them on 2026-01-02" in str(explained)
    assert chosen == {"ring", "ulysses"}


def test_only_torch_waits_for_the_host() -> None:
    pytest.importorskip("jax")
    shards = tuple(((1, 2048, heads, 64), "float32") for heads in (8, 8, 8))
    where = {"axes": ("cp",), "sizes": (2,), "device": "cpu", "needs_backward": False, "requested": None}
    request = Request(
        (*shards, None), (4096, 4096), None, check_options(Options(causal=True)), "", "zigzag", 1, **where
    )
    torch, jax = (explain_request(request, Target.here(name, "cpu")).choice.estimate for name in ("torch", "jax"))
    assert torch is not None and torch.forward.host > 0
    assert jax is not None and jax.forward.host == jax.backward.host == 0


def test_a_file_takes_the_factors_that_it_lacks_from_the_package() -> None:
    content = table(host_us=[1, 2, 3])
    content.pop("softcap", None)
    constants, package = tuned_constants(content), Constants.of("cpu")
    assert constants.softcap == package.softcap != (1.0, 1.0)
    assert constants.wide == package.wide and constants.host_us == (1, 2, 3)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "it is not a file of attn tune --ranks"),
        (table(format=7), "its format is 7, not 1"),
        (table(device_name="another machine"), "it was measured on another machine"),
        (table(versions={"torch": "1.0"}), "it was measured with torch 1.0"),
        (table(forward_tflops=0), "forward_tflops=0: expected more than 0"),
        (table(call_us=float("nan")), "expected finite numbers"),
        (table(host_us=[1, float("nan"), 2]), "expected finite numbers"),
        (table(links={"ring": [[1, 2]]}), "links: expected ring, all_gather, all_to_all, got ring"),
    ],
    ids=["damaged", "format", "machine", "versions", "zero", "nan", "nan in a list", "links"],
)
def test_a_file_that_cannot_be_used_is_ignored_with_one_warning(content: Any, why: str) -> None:
    path = write(content)
    with pytest.warns(UserWarning, match="ignored, because") as caught:
        assert constants_in_force("cpu") == Constants.of("cpu")
    assert why in str(caught[0].message) and str(path) in str(caught[0].message)


def test_ranks_that_fail_write_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_ranks, "LAUNCHER", ("-c", "print('rank 1 broke'); raise SystemExit(3)"))
    done = attn("tune", "--ranks", "2", "--device", "cpu")
    assert done.exit_code == 1 and "rank 1 broke" in done.stderr and "nothing was written" in done.stderr
    assert not tuned_path("cpu").exists()


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "device_of", lambda device, framework: "sm90")
    monkeypatch.setattr(tune_ranks, "_gpus", lambda: 1)
    done = attn("tune", "--ranks", "2")
    assert done.exit_code == 2 and "--ranks=2: expected at most the 1 GPUs of this machine" in done.stderr
