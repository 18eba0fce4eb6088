"""Tests backends of other packages: the two of examples/backends pass the generated tests, and a bad one is named."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")
import numpy as np
from frameworks import BOTH, Framework, registered, spied
from own_process import in_its_own_process
from spec_strategies import make_call
from typer.testing import CliRunner

import attn_core
import torch_frontend
from attn_core import Backend, SpecError, backends
from attn_core.backends import registration
from attn_core.backends.contract import Timing
from attn_core.cli.app import app
from examples.backends import toy
from examples.backends.splash import attn_splash
from tests.correctness import test_conformance as conformance
from tests.correctness import test_mask_probe as probe
from tests.correctness import test_nan_containment as nan_containment

ROOT = Path(__file__).resolve().parents[2]
TOY, SPLASH = toy.BACKEND, attn_splash.BACKEND
LANES = [
    pytest.param(TOY, "torch", id="toy-torch"),
    pytest.param(TOY, "jax", id="toy-jax"),
    pytest.param(SPLASH, "jax", id="splash-jax", marks=pytest.mark.slow),  # interpreted, and compiled for each shape
]


# The generated tests


@pytest.fixture
def plug_in(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A plug-in, registered during the test."""
    with registered(request.param):
        yield request.param


def on_lanes(test: Any) -> Any:
    """Runs a test on both plug-ins in each framework that reaches them."""
    return pytest.mark.parametrize(("plug_in", "framework"), LANES, indirect=["plug_in"])(test)


@on_lanes
def test_drawn_calls_and_corners_match_the_claims(plug_in: Backend, framework: str) -> None:
    conformance.test_drawn_calls_match_the_claims(plug_in.name, "cpu", framework)


@on_lanes
def test_calls_outside_the_claims_are_refused(plug_in: Backend, framework: str) -> None:
    conformance.test_calls_outside_the_claims_are_refused(plug_in.name, framework, "cpu")


@on_lanes
@pytest.mark.parametrize("lengths", ["more keys", "more queries", "as many"])
def test_the_visible_set(plug_in: Backend, framework: str, lengths: str) -> None:
    every = probe.combinations(framework, plug_in.name, lengths)
    probe.check_all(framework, plug_in.name, "cpu", every)


@on_lanes
def test_the_visible_set_across_blocks(plug_in: Backend, framework: str) -> None:
    probe.test_the_visible_set_across_blocks(plug_in.name, "cpu", framework)


@on_lanes
def test_finite_inputs_give_no_nan(plug_in: Backend, framework: str) -> None:
    nan_containment.test_finite_inputs_give_no_nan(plug_in.name, "cpu", framework)
    nan_containment.test_scores_close_to_the_end_of_float32_give_no_nan("rows, causal", plug_in.name, "cpu", framework)


@on_lanes
@pytest.mark.parametrize("name", conformance.FAULTS)
def test_planted_faults_are_caught(plug_in: Backend, framework: str, name: str) -> None:
    changes, fault = conformance.FAULTS[name]
    call = make_call(**changes, needs_backward=True)
    if attn_core.explain(call.spec, attn_core.Target(framework, "cpu"), plug_in.name).backend is None:
        pytest.skip(f"{plug_in.name} does not run this")
    assert conformance.conforms(framework, call, plug_in.name, "cpu")
    with (
        conformance.planted_fault(plug_in.name, fault, "both"),
        pytest.raises(AssertionError, match="WRONG"),
    ):
        conformance.conforms(framework, call, plug_in.name, "cpu")


def test_splash_lowers_for_a_tpu() -> None:
    import jax
    import jax.numpy as jnp

    call = make_call(**conformance.BANDED, needs_backward=True, return_lse=False)
    arrays = [jnp.asarray(call.inputs._asdict()[name], "float32") for name in "qkv"]
    with registered(SPLASH):
        on_tpu = backends.load("jax_splash", "tpu")

    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        inputs = backends.Inputs(q, k, v)
        out, lse = on_tpu.forward(call.spec, inputs)
        return out, lse, on_tpu.backward(call.spec, inputs, out, lse, dout, None)

    program = jax.export.export(jax.jit(both), platforms=["tpu"])(*arrays, jnp.asarray(call.dout, "float32"))
    # Two forwards, which XLA merges, and the kernels of dq, and of dk and dv.
    assert program.mlir_module().count("tpu_custom_call") == 4


# Registration


def tensors(framework: Framework) -> list[Any]:
    """q, k and v of a call that JAX would not run by its own operations because it is tiny."""
    numbers = np.random.default_rng(0).standard_normal((3, 4, 65, 8, 8), np.float32)
    return [framework.array(part) for part in numbers]


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_a_backend_that_is_registered_after_a_call_is_seen(framework: Framework) -> None:
    frontend, qkv = framework.frontend, tensors(framework)

    def chosen() -> list[str]:
        with spied() as ran:
            frontend.attention(*qkv, causal=True)
        return [frontend.explain(*qkv, causal=True).backend, *ran]

    before = chosen()
    frontend.attention(*qkv, causal=True)
    assert "toy" not in before + [*frontend.available_backends()]
    with registered(TOY):
        assert frontend.explain(*qkv, causal=True, backend="toy").backend == "toy"
        assert chosen() == before, "only a rank makes a backend part of automatic choice"
        assert "toy" in frontend.available_backends()
        assert any(line.split()[0] == "toy" for line in frontend.explain(*qkv).text(everything=True).splitlines())
    with registered(replace(TOY, preference={"cpu": 1})):
        assert chosen() == ["toy", "toy"]
    assert chosen() == before


def test_registering_twice_is_registering_once() -> None:
    with registered(TOY, TOY):
        assert backends.names().count("toy") == 1
    attn_core.register_backend(backends.load("math"))
    assert backends.names().count("math") == 1


def test_records_for_kinds_of_devices_and_variants() -> None:
    with registered(SPLASH):
        assert backends.records("jax_splash") == {"cpu": SPLASH, "tpu": SPLASH.on["tpu"]}
        assert attn_core.Target("jax", "tpu").claims("jax_splash")[0].unproven
    other = replace(TOY, name="toy_too")
    with registered(replace(TOY, variants=(other,), in_pages="toy_too"), other):
        assert backends.names()[-2:] == ("toy", "toy_too")
    with pytest.raises(SpecError, match="plug-in 'toy_too': in_pages: backend='none': unknown backend"):
        attn_core.register_backend(replace(TOY, variants=(replace(other, in_pages="none"),)))


EVERY = [
    pytest.param(record, id=f"{name}{kind and '-'}{kind}")
    for name in backends.names()
    for kind, record in backends.records(name).items()
]


@pytest.mark.parametrize("record", EVERY)
def test_every_backend_of_this_package_would_be_accepted(record: Backend) -> None:
    registration.check(record)


def refusing(spec: Any, device: str, build: Any) -> tuple[str, ...]:
    return ("not today",) if spec.causal else ()


def raising(spec: Any) -> dict[str, Any]:
    raise KeyError("scale")


CLAIMS = TOY.forward_claims
BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a member of another type": ({"lower": {"scale": 1}}, ("lower: expected", "got {'scale': 1}")),
    "a list": ({"writes_into": ["forward"]}, ("writes_into: expected", "got ['forward']")),
    "no forward": ({"forward": None}, ("forward: expected", "got None")),
    "claims that are none": ({"forward_claims": "all"}, ("forward_claims: expected Support",)),
    "a name with a hyphen": ({"name": "my-kernel"}, ("'my-kernel'", "name: expected lower-case letters")),
    "a taken name": ({"name": "math"}, ("name: taken by the backend in", "backends/math/__init__.py; choose another")),
    "another framework": ({"framework": "numpy"}, ("framework='numpy': expected 'torch' or 'jax'",)),
    "no backward": ({"backward": None}, ("backward: expected backward and backward_claims together",)),
    "no jvp": ({"forward_mode": backends.ForwardModePass(claims=CLAIMS, jvp=None)}, ("forward_mode: expected a jvp",)),
    "a direction": ({"writes_into": ("sideways",)}, ("writes_into=('sideways',): expected some of forward, backward",)),
    "a flag": ({"torch_flag": "eager"}, ("torch_flag='eager': expected one of flash, mem_efficient, cudnn, math",)),
    "a rank on a device": ({"preference": {"sm90": 1}}, ("preference: 'sm90': expected a kind of device",)),
    "a rank that is none": ({"preference": {"cpu": "first"}}, ("preference: expected", "got {'cpu': 'first'}")),
    "an unknown dtype": (
        {"forward_claims": replace(CLAIMS, dtypes=("float8",))},
        ("forward_claims.dtypes='float8': expected some of float64, float32",),
    ),
    "an unknown device": (
        {"forward_claims": replace(CLAIMS, devices=("gpu",))},
        ("forward_claims.devices='gpu': expected a device such as cpu, sm90",),
    ),
    "a claim that refuses refuses": (
        {"refuses": refusing},
        ("forward_claims.causal: claimed on cpu, but refuses says of", "not today", "claim less in forward_claims"),
    ),
    "a claim that lower does not know": (
        {"lower": raising},
        ("forward_claims.dtypes='float64': claimed on cpu, but refuses or lower raises KeyError",),
    ),
    "a claim that needs another": (
        {"backward_claims": replace(CLAIMS, bias_gradient=True)},
        ("backward_claims.bias_gradient: claimed on cpu, but no other claim covers", "bias of shape"),
    ),
    "an unknown backend for pages": (
        {"in_pages": "mth"},
        ("in_pages: backend='mth': unknown backend; did you mean math",),
    ),
    **{
        f"an unknown backend of {member}": (
            {"timing": Timing(**{member: value})},
            (f"timing.{member}: backend='triton': unknown backend; did you mean triton_splitkv?",),
        )
        for member, value in {
            "behind": "triton",
            "behind_without_time": "triton",
            "model_of": ("math", "triton"),
        }.items()
    },
    "a record for CPUs twice": ({"on": {"cpu": TOY}}, ("on['cpu']: expected the record for another kind than cpu",)),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_record_is_refused_by_plug_in_member_and_file(name: str) -> None:
    changes, words = BAD[name]
    bad = replace(TOY, **changes)
    with pytest.raises(SpecError) as refusal:
        attn_core.register_backend(bad)
    message = str(refusal.value)
    file = "a file without a name" if name == "no forward" else "examples/backends/toy.py"
    for word in (f"plug-in {bad.name!r}: ", *words, file):
        assert word in message
    assert "toy" not in backends.names()


@pytest.mark.parametrize("value", [toy, CLAIMS, None, "toy"], ids=["module", "claims", "None", "name"])
def test_what_is_no_backend_is_refused(value: Any) -> None:
    with pytest.raises(SpecError, match=r"^backend=.*: expected an attn_core\.Backend, got "):
        attn_core.register_backend(value)


# Entry points

PLUG_INS = {
    "toy": "toy:BACKEND",
    "two": "several:several",
    "raises": "raises:BACKEND",
    "lacks": "lacks:BACKEND",
    "lies": "lies:BACKEND",
    "math": "taken:BACKEND",
    "nothing": "missing:BACKEND",
}
SOURCES = {
    "several": """
from attn_core import backends
import dataclasses, toy
def several():  # it asks for names while plug-ins are read
    assert "math" in backends.names()
    return [dataclasses.replace(toy.BACKEND, name=name) for name in ("one_toy", "two_toy")]
""",
    "raises": "raise RuntimeError('no such driver')",
    "lacks": "from attn_core import Backend\nBACKEND = Backend(name='lacks', framework='torch')",
    "lies": """
import dataclasses, toy
claims = dataclasses.replace(toy.CLAIMS, packed=True)
def forward(spec, inputs): ...
def refuses(spec, device, build):
    return ("no documents",) if spec.packed else ()
BACKEND = dataclasses.replace(toy.BACKEND, name="lies", forward=forward, refuses=refuses, forward_claims=claims)
""",
    "taken": "import dataclasses, toy\nBACKEND = dataclasses.replace(toy.BACKEND, name='math')",
}
SCRIPT = """
import json, logging, sys
import attn_core
assert not {"toy", "torch", "jax"} & set(sys.modules), "plug-ins are read when names are needed"
records = []
handler = logging.Handler()
handler.emit = lambda record: records.append(record.getMessage())
logging.getLogger("attn_core").addHandler(handler)
from attn_core import backends
names = backends.names()
errors = {}
for name in ("raises", "lacks", "lies", "nothing", "unknown"):
    try:
        backends.load(name)
    except attn_core.SpecError as error:
        errors[name] = str(error)
assert "torch" not in sys.modules
import torch, torch_frontend
q = torch.ones(1, 2, 1, 8)
print(json.dumps({
    "names": names, "errors": errors, "records": records, "broken": backends.broken_plug_ins(),
    "out": torch_frontend.attention(q, q, q, backend="two_toy").shape,
    "chosen": torch_frontend.explain(q, q, q).backend,
}))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as pip leaves it: the modules of plug-ins, and the entry points of their package."""
    folder = tmp_path_factory.mktemp("site")
    for name, text in {**SOURCES, "toy": Path(toy.__file__).read_text(encoding="utf-8")}.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    info = folder / "plug_ins-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plug-ins\nVersion: 1.0\n", encoding="utf-8")
    lines = "".join(f"{name} = {value}\n" for name, value in PLUG_INS.items())
    (info / "entry_points.txt").write_text(f"[attn_core.backends]\n{lines}", encoding="utf-8")
    return folder


def test_entry_points_bring_backends_and_a_broken_one_is_named(site: Path) -> None:
    process = in_its_own_process(f"import sys; sys.path.insert(0, {str(site)!r})\n{SCRIPT}")
    assert process.returncode == 0, process.stderr
    seen = json.loads(process.stdout)
    assert {"toy", "one_toy", "two_toy", "math"} <= {*seen["names"]}
    assert not {"raises", "lacks", "lies", "nothing"} & {*seen["names"]}
    assert seen["out"] == [1, 2, 1, 8] and seen["chosen"] not in ("toy", None)
    words = {
        "raises": ("raises:BACKEND", "no such driver", str(site / "raises.py")),
        "lacks": ("lacks:BACKEND", "missing", "'lower'", str(site / "lacks.py")),
        "lies": ("lies:BACKEND", "forward_claims.packed", "no documents", str(site / "lies.py")),
        "math": ("taken:BACKEND", "name: taken by the backend in", "math/__init__.py", str(site / "toy.py")),
        "nothing": ("missing:BACKEND", "No module named 'missing'"),
    }
    assert seen["broken"].keys() == words.keys()
    for name, parts in words.items():
        assert all(part in seen["broken"][name] for part in (f"plug-in {name!r} of plug-ins", *parts)), seen["broken"]
        assert sum(seen["broken"][name] in record for record in seen["records"]) == 1, "one warning for each"
        if name != "math":  # the name of a backend that works
            assert seen["errors"][name] == f"backend={name!r}: {seen['broken'][name]}"
    assert "unknown backend" in seen["errors"]["unknown"]


@pytest.mark.slow
def test_doctor_lists_a_broken_plug_in(site: Path) -> None:
    run = "import sys; from attn_core.cli import main; sys.argv = ['attn', 'doctor']; main()"
    process = in_its_own_process(f"import sys; sys.path.insert(0, {str(site)!r})\n{run}", COLUMNS="80")
    said = " ".join(process.stdout.split())
    assert process.returncode == 1, process.stderr
    assert "BROKEN: installed, but not working: plug-in raises" in said and "no such driver" in said
    assert re.search(r"one_toy\s+torch and JAX on cpu: 0\.", said)


# The command line


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", "--causal", "--backend", "toy"),
        ("compare", "--causal", "--backward", "--q-len", "7", "--kv-len", "11"),
        ("certify", "--backend", "toy"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_the_command_line_takes_a_plug_in(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with registered(TOY):
        done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    assert "toy" in done.output


# What a plug-in may use, and what it touches


@pytest.mark.parametrize("module", [toy, attn_splash], ids=["toy", "splash"])
def test_a_plug_in_imports_public_names_alone(module: Any) -> None:
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    public = {"attn_core": attn_core.__all__, "attn_core.backends": backends.__all__}
    imported = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    ours = [node for node in imported if "attn_core" in ast.unparse(node) or "_frontend" in ast.unparse(node)]
    assert len(ours) == 2
    for node in ours:
        assert isinstance(node, ast.ImportFrom) and {name.name for name in node.names} <= {*public[node.module or ""]}


def test_the_page_about_backends_is_short() -> None:
    page = ROOT / "docs/explanation/adding_a_backend.md"
    assert len(page.read_text(encoding="utf-8").split()) <= 900


def test_the_toy_touches_one_file() -> None:
    folders = ("attn_core", "torch_frontend", "jax_frontend", "tools", "benchmarks", "examples")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")] + [ROOT / "pyproject.toml"]
    naming = [path for path in files if re.search(r"\btoy\b", path.read_text(encoding="utf-8"))]
    assert naming == [Path(toy.__file__)]
    assert torch_frontend.available_backends().keys() == {*backends.names()}
