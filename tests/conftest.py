"""Configures the tests: hypothesis profiles, devices, compiled programs, and skips GPU tests on machines without a GPU.

``ci`` (the profile of ``--all`` and of a file that is named) is bounded and always draws the same examples; ``sample``
draws the first of them, for ``make test``; ``--hypothesis-profile=thorough`` draws many more, different ones each time.
None has a deadline, because a first call may compile. ``--random-order`` shuffles the tests. A run fails if it leaves a
process behind (``left_behind``).

JAX has four CPU devices, for the tests that need several. On a machine without a GPU JAX also compiles the quick way
(``xla_compiler``), except for the programs by which claims are judged (``both_frontends``, ``paged_cases``).
A flag that XLA_FLAGS already contains keeps its value.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import compiled_programs
import left_behind
import pytest
import suite_outcome
import triton_interpreter
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
settings.register_profile("sample", settings.get_profile("ci"), max_examples=10)
settings.register_profile("gpu", settings.get_profile("ci"), max_examples=10)  # kernels compile for seconds
settings.load_profile("ci")

# Before JAX starts, in this process and in the processes that tests start.
os.environ["XLA_FLAGS"] = xla_compiler.flags(quick=not Path("/dev/nvidiactl").exists())


# A table that the user wrote with attn tune must not decide in the tests, nor what the user compiled before. Workers
# share the folder of the process that starts them.
os.environ["XDG_CONFIG_HOME"] = str(Path(tempfile.gettempdir()) / "attn-core-tests-config")
if "PYTEST_XDIST_WORKER" not in os.environ:
    CACHE = tempfile.TemporaryDirectory(prefix="attn-core-tests-cache-")
    os.environ["XDG_CACHE_HOME"] = CACHE.name


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


@pytest.fixture
def replace_fields() -> Iterator[Callable[..., None]]:
    """``replace_fields(record, **fields)``: ``frameworks.replaced`` until the end of the test."""
    from frameworks import replaced

    with ExitStack() as stack:
        yield lambda record, **fields: stack.enter_context(replaced(record, **fields))


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
    parser.addoption("--all", action="store_true", help="all tests, not a sample of them")
    parser.addoption("--sample", action="store_true", help="a sample also of files that are named")
    parser.addoption(
        "--outcome", metavar="FILE", type=Path, help="write what the run found; the longest tests go first"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(left_behind)
    config.pluginmanager.register(triton_interpreter)
    if is_sample(config) and not config.getoption("--hypothesis-profile"):
        settings.load_profile("sample")
    if "cuda" in config.getoption("markexpr") and Path("/dev/nvidiactl").exists():
        os.environ |= jax_cache()
    path = config.getoption("--outcome")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(suite_outcome.Outcome(path))


def jax_cache() -> dict[str, str]:
    """Environment in which all workers share JAX's compiled programs, many of which they would each compile.

    Two workers may compile a program at once, and one may read what the other has not written completely; JAX then
    warns, and compiles. XLA times no kernels in the tests, so it has no results of that to share.
    """
    prefix = "JAX_PERSISTENT_CACHE"
    return {
        "JAX_COMPILATION_CACHE_DIR": str(Path(os.environ["XDG_CACHE_HOME"]) / "jax"),
        f"{prefix}_MIN_COMPILE_TIME_SECS": "0",
        f"{prefix}_MIN_ENTRY_SIZE_BYTES": "-1",
        f"{prefix}_ENABLE_XLA_CACHES": "none",
    }


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files without tests for GPUs, if only these run: each worker would import all the others, too."""
    if collection_path.suffix != ".py" or config.getoption("markexpr") not in ("cuda", "two_gpus"):
        return None
    return None if GPU_WORDS.search(collection_path.read_text(encoding="utf-8")) else True


GPU_WORDS = re.compile(r"\bmark\.(cuda|two_gpus)|EVERYWHERE|\bclaimed\(|\bDEVICES\b|def \w+\([^)]*\bdevice\b")
"""What a file with tests for GPUs has: the marker, a list of cases that has it, or the argument ``device``."""


GPU_FILES = pytest.StashKey[set[Path]]()
"""The files in which a test for GPUs was collected: ``pytest_ignore_collect`` must leave out none of them."""


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda"):
        item.config.stash.setdefault(GPU_FILES, set()).add(item.path)


EVERY = 20
"""One of so many cases of a test is in the sample, which ``make test`` runs."""
EVERY_TEST = 7
"""One of so many tests of a file is in the sample, if each has one or two cases and the file is marked as a whole."""
EVERY_ON_GPUS = 5
"""One of so many cases that differ in words runs in a GPU's suite; not a number of values that a parameter has."""


def names_a_file(config: pytest.Config) -> bool:
    return any(".py" in argument for argument in config.args)


def is_sample(config: pytest.Config) -> bool:
    """Whether a run is the sample: neither ``--all``, nor of files that somebody names, nor a GPU's suite."""
    whole = config.getoption("--all") or names_a_file(config) or "cuda" in config.getoption("markexpr")
    return bool(config.getoption("--sample") or not whole)


def left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """The cases that are not in the sample: those marked ``slow``, and all but some of each family, by their names.

    A family is one test function marked ``sampled``, with all its parameters. Tests of one or two cases in a file that
    is marked as a whole are one family, too. A commit always has the same sample.
    """
    families: dict[str, list[pytest.Item]] = {}
    files: dict[str, list[pytest.Item]] = {}
    left = []
    for item in items:
        if item.get_closest_marker("slow"):
            left.append(item)
        elif item.get_closest_marker("sampled"):
            families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, family in families.items():
        if len(family) > 2:
            left += all_but_one_of(EVERY, family, cpu_first=True)
        elif next(family[0].iter_markers_with_node("sampled"))[0] is not family[0]:
            files.setdefault(name.partition("::")[0], []).extend(family)
    return left + [item for tests in files.values() if len(tests) > 2 for item in all_but_one_of(EVERY_TEST, tests)]


def all_but_one_of(number: int, items: list[pytest.Item], cpu_first: bool = False) -> list[pytest.Item]:
    """All items but one of each ``number`` of them, in the order of names, or those for GPUs behind all others."""
    ordered = sorted(items, key=lambda item: (cpu_first and item.get_closest_marker("cuda") is not None, item.nodeid))
    return [item for at, item in enumerate(ordered) if at % number]


def left_out_on_gpus(items: list[pytest.Item]) -> list[pytest.Item]:
    """The cases that a GPU's suite leaves out.

    The cases for whose parameters the function ``only`` of a marker ``on_gpus`` is false; and all but every fifth case,
    in the order of names, of each other test marked ``words``.
    """
    families: dict[str, list[pytest.Item]] = {}
    others = []
    for item in items:
        if not item.get_closest_marker("cuda"):
            continue
        if marker := item.get_closest_marker("on_gpus"):
            others += [] if marker.kwargs["only"](**item.callspec.params) else [item]  # type: ignore[attr-defined]
        elif item.get_closest_marker("words"):
            families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return others + [item for family in families.values() for item in all_but_one_of(EVERY_ON_GPUS, family)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    deselected: set[pytest.Item] = set()
    if is_sample(config):
        deselected = set(left_out(items))
    elif "cuda" in config.getoption("markexpr") and not names_a_file(config):  # a file that somebody names runs whole
        deselected = set(left_out_on_gpus(items))
    if deselected:
        config.hook.pytest_deselected(items=[item for item in items if item in deselected])
        items[:] = [item for item in items if item not in deselected]
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)  # first: a slow one at the end would run alone
    if path := config.getoption("--outcome"):
        suite_outcome.longest_first(items, path)
    for item in items:
        if item.get_closest_marker("cuda") and (reason := no_gpu(2 if item.get_closest_marker("two_gpus") else 1)):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Freezes the objects of imports and collection: they live until the end, so no garbage collection visits them.

    pytest attaches its handler to loggers that pass nothing on. With one, torch would write each compilation's graphs
    and code into this logger, for the report of each test.
    """
    logging.getLogger("torch.__trace").propagate = True
    gc.collect()
    gc.freeze()
    gc.set_threshold(
        50_000, 10, 10
    )  # the default of 700 has traces collect all the time: 7 % of the time of JAX's tests


@cache
def no_gpu(count: int) -> str | None:
    """Why tests of so many GPUs cannot run here, or None if they can."""
    needs = "needs an NVIDIA GPU" if count == 1 else f"needs {count} NVIDIA GPUs"
    if find_spec("torch") is None:
        return f"{needs}: torch is not installed"
    import torch

    here = torch.cuda.device_count()
    return None if here >= count else f"{needs}: torch {torch.__version__} sees {here or 'none'}"
