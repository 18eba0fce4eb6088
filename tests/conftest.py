"""Configures the tests: hypothesis profiles, devices, compiled programs, and skips GPU tests on machines without a GPU.

``ci`` (the default profile) is bounded and always draws the same examples; ``--hypothesis-profile=thorough`` draws many
more, different ones each time. Neither has a deadline, because a first call may compile. ``--random-order`` shuffles
the tests. A run fails if it leaves a process behind (``left_behind``).

JAX has four CPU devices, for the tests that need several. On a machine without a GPU JAX also compiles the quick way
(``xla_compiler``), except for the programs by which claims are judged (``both_frontends``, ``paged_cases``).
A flag that XLA_FLAGS already contains keeps its value.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import date
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import compiled_programs
import left_behind
import pytest
import xla_compiler
from case_names import pytest_make_parametrize_id  # noqa: F401 (a hook)
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci",
    max_examples=40,
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "thorough", max_examples=1500, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci")

# Before JAX starts, in this process and in the processes that tests start.
os.environ["XLA_FLAGS"] = xla_compiler.flags(quick=not Path("/dev/nvidiactl").exists())


# A table that the user wrote with attn tune must not decide in the tests.
os.environ["XDG_CONFIG_HOME"] = str(Path(tempfile.gettempdir()) / "attn-core-tests-config")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)], scope="module")
def device(request: pytest.FixtureRequest) -> str:
    """The kind of device: a test with this argument runs on the CPU and, marked ``cuda``, on a GPU."""
    return str(request.param)


@pytest.fixture
def four_devices() -> Iterator[None]:
    """Four CPU devices of JAX (``cpu_meshes.devices``). On a machine with GPUs calls go to the first of them, too."""
    jax = pytest.importorskip("jax")
    import cpu_meshes

    if reason := cpu_meshes.missing(4):
        pytest.skip(reason)
    with nullcontext() if jax.default_backend() == "cpu" else jax.default_device(cpu_meshes.devices()[0]):
        yield


@pytest.fixture(scope="session")
def compiled_operators(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The cache folder and the library of torch's operators in it, compiled as a user would; once for a process.

    XLA refuses a second library of the same custom calls.
    """
    import jax_frontend
    from jax_frontend.bridge import operator_lane

    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        path = jax_frontend.compile_operator_lane()
        operator_lane.register()
    return folder, path


@pytest.fixture
def library(compiled_operators: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The compiled library of torch's operators, in the user's cache folder."""
    folder, path = compiled_operators
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return path


@pytest.fixture
def scalar_inductor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch.compile's usual compiler with an empty cache of its own, and without vector instructions.

    Its shared cache outlives an op's schema, and has programs that were compiled with other instructions. In an empty
    cache it would first build two programs that test for vector instructions.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # Not config.cpp.vec_isa_ok: this function remembers its result, and later tests of the process would get it.
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list", list)


def pytest_runtest_logfinish() -> None:
    """Runs after the teardown of every test."""
    compiled_programs.free()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sweep", action="store_true", help="all tests that rotate or are slow, not a seventh of them")
    parser.addoption("--rotate", action="store_true", help="a seventh of them also in files that are named")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(left_behind)
    os.environ.setdefault("SWEEP_DAY", str(date.today().toordinal()))  # one day for all processes, even past midnight


DAYS = 7
"""The days after which every case of a family has run."""


def resting(items: list[pytest.Item], day: int) -> list[pytest.Item]:
    """The cases that do not run today: six sevenths of each family of seven or more, and all but one of three to six.

    A family is one test function marked ``rotates``, with all its parameters; and all tests marked ``slow`` are one.
    Tests of one or two cases in a file that is marked as a whole are one family, too. Other cases run on each day, so a
    family never rests, and each case runs every seventh day.
    """
    families: dict[str, list[pytest.Item]] = {}
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow"):
            families.setdefault("slow", []).append(item)
        elif item.get_closest_marker("rotates"):
            families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, family in families.items():
        if len(family) < 3 and name != "slow" and next(family[0].iter_markers_with_node("rotates"))[0] is not family[0]:
            files.setdefault(name.partition("::")[0], []).extend(family)
    large = [sorted(family, key=lambda item: item.nodeid) for family in families.values() if len(family) > 2]
    large += [sorted(family, key=lambda item: item.nodeid) for family in files.values() if len(family) > 2]
    return [item for family in large for n, item in enumerate(family) if (n - day) % min(DAYS, len(family))]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # A file that somebody names runs whole, and so does a GPU's suite, which runs rarely.
    named = any(".py" in argument for argument in config.args) or "cuda" in config.getoption("markexpr")
    if config.getoption("--rotate") or not (config.getoption("--sweep") or named):
        left_out = set(resting(items, int(os.environ["SWEEP_DAY"])))
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)  # first: a slow one at the end would run alone
    for item in items:
        if item.get_closest_marker("cuda") and (reason := no_gpu()):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Freezes the objects of imports and collection: they live until the end, so no garbage collection visits them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(
        50_000, 10, 10
    )  # the default of 700 has traces collect all the time: 7 % of the time of JAX's tests


@cache
def no_gpu() -> str | None:
    """Why the tests marked ``cuda`` cannot run here, or None if they can."""
    if find_spec("torch") is None:
        return "needs an NVIDIA GPU: torch is not installed"
    import torch

    if torch.cuda.is_available():
        return None
    return f"needs an NVIDIA GPU: torch {torch.__version__} sees none"
