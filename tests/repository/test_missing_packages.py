"""Tests what an import says if a package is not installed, and that all packages state one version."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import attn_core
from attn_core.errors import MissingExtraError, needs_extra

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter at the root of the project."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )


WITHOUT = """
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name == {package!r}:  # the error that Python raises for a package that is not installed
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Without())
"""
CAUGHT = """
try:
    {statement}
except ImportError as error:
    print(type(error).__name__, isinstance(error, ModuleNotFoundError), error.name)
    print(error)
"""


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("statement", "subject", "package", "extra"),
    [
        ("import torch_frontend", "torch_frontend", "torch", "torch"),
        ("from torch_frontend import attention", "torch_frontend", "torch", "torch"),
        ("import jax_frontend", "jax_frontend", "jax", "jax"),
        ("import jax_frontend.linen", "jax_frontend.linen", "flax", "jax"),
        ("import jax_frontend.nnx", "jax_frontend.nnx", "flax", "jax"),
        ("import jax_frontend.equinox", "jax_frontend.equinox", "equinox", "equinox"),
        (
            "from torch_frontend import huggingface; huggingface.register()",
            "torch_frontend.huggingface",
            "transformers",
            "hf",
        ),
    ],
)
def test_a_missing_package_is_named_with_the_extra_that_installs_it(
    statement: str, subject: str, package: str, extra: str
) -> None:
    for framework in ("torch", "jax"):  # the other parts need their framework
        if framework in statement and package != framework:
            pytest.importorskip(framework)
    done = python(WITHOUT.format(package=package) + CAUGHT.format(statement=statement))
    assert done.stdout.splitlines() == [
        f"MissingExtraError True {package}",
        f"{subject} needs {package}, which is not installed; pip install 'attn-core[{extra}]'",
    ], done.stderr
    assert any(requirement.startswith(f"{package}>=") for requirement in EXTRAS[extra])


def test_the_traceback_ends_with_the_one_line_and_shows_no_second_error() -> None:
    done = python(WITHOUT.format(package="jax") + "import jax_frontend")
    assert done.returncode == 1
    expected = "attn_core.errors.MissingExtraError: jax_frontend needs jax, which is not installed; "
    assert done.stderr.splitlines()[-1] == f"{expected}pip install 'attn-core[jax]'"
    assert done.stderr.count("Traceback") == 1


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_the_command_line_names_a_missing_package(missing: str) -> None:
    done = python(WITHOUT.format(package=missing) + "from attn_core.cli import main\nmain()")
    assert done.returncode == 1
    expected = f"attn: the command line needs {missing}, which is not installed; pip install 'attn-core[cli]'\n"
    assert done.stderr == expected


def test_an_error_inside_an_installed_package_stays_as_it_is() -> None:
    broken = ModuleNotFoundError("No module named 'torch._C'", name="torch._C")
    with pytest.raises(ModuleNotFoundError) as caught, needs_extra("torch_frontend", "torch", "torch"):
        raise broken
    assert caught.value is broken and not isinstance(broken, MissingExtraError)


@pytest.mark.parametrize("frontend", ["torch_frontend", "jax_frontend"])
def test_a_frontend_states_the_version_of_attn_core(frontend: str) -> None:
    pytest.importorskip(frontend.removesuffix("_frontend"))
    assert import_module(frontend).__version__ == attn_core.__version__
