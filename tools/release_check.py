"""Checks that a release would work for its users: ``make release-check``. Needs an index of packages, and minutes.

Builds the wheel and the sdist with the tools that constraints.txt pins; checks their metadata; builds the wheel again
from the sdist; installs the wheel alone into an empty environment for each extra, and there imports what the extra
gives and what it does not give. The files stay in ``dist/``.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes
from pathlib import Path
from typing import NamedTuple

from tools.environments import ROOT, build, run
from tools.lock import CONSTRAINTS

DIST = ROOT / "dist"
PACKAGES = ("attn_core", "torch_frontend", "jax_frontend")


class Extra(NamedTuple):
    """What must run, and what must name a missing package, if only this extra is installed."""

    runs: tuple[str, ...]
    refuses: tuple[str, ...]


TORCH = "import torch_frontend, torch; torch_frontend.attention(*torch.ones(3, 1, 2, 4, 8), causal=True)"
JAX = "import jax_frontend, jax.numpy as jnp; jax_frontend.attention(*jnp.ones((3, 1, 2, 4, 8)), causal=True)"
CORE = (
    "from attn_core import AttentionSpec, Target, explain\n"
    "sizes = dict(batch=1, q_len=2, kv_len=2, num_heads=4, num_kv_heads=4, head_dim=8, value_dim=8)\n"
    "assert explain(AttentionSpec(**sizes, dtype='float32'), Target('torch', 'cpu')).refusals"
)
LAYERS = "import jax_frontend.linen, jax_frontend.nnx"
TRANSFORMERS = "from torch_frontend import huggingface; huggingface.register()"
EQUINOX = "import jax_frontend.equinox"
COMMANDS = "from attn_core.cli import main; import sys; sys.argv = ['attn', '--version']; main()"

EXTRAS = {
    "": Extra(runs=(CORE,), refuses=(TORCH, JAX, COMMANDS)),
    "cli": Extra(runs=(CORE, COMMANDS), refuses=(TORCH, JAX)),
    "torch": Extra(runs=(TORCH,), refuses=(JAX, TRANSFORMERS, COMMANDS)),
    "hf": Extra(runs=(TORCH, TRANSFORMERS), refuses=(JAX,)),
    "diffusers": Extra(runs=(TORCH, "from torch_frontend import diffusers; diffusers.install()"), refuses=(JAX,)),
    "jax": Extra(runs=(JAX, LAYERS), refuses=(TORCH, EQUINOX, COMMANDS)),
    "equinox": Extra(runs=(JAX, EQUINOX), refuses=(TORCH,)),
}
"""The extras for users without a GPU. dev, docs, demo and release are for this repository."""


@contextmanager
def step(title: str) -> Iterator[None]:
    print(f"{title} ... ", end="", flush=True)
    yield
    print("ok", flush=True)


def files_of(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


def check_wheel(wheel: Path) -> None:
    """Raises AssertionError unless the wheel has all sources, nothing else, and a description without dead links."""
    names = files_of(wheel)
    sources = {path.relative_to(ROOT).as_posix() for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    assert sources <= set(names), f"missing in the wheel: {sorted(sources - set(names))}"
    assert all(f"{name}/py.typed" in names for name in PACKAGES), "py.typed is missing"
    roots = {name.partition("/")[0] for name in names}
    assert len(roots - set(PACKAGES)) == 1, f"more than the packages: {roots}"
    with zipfile.ZipFile(wheel) as archive:
        metadata = message_from_bytes(archive.read(next(name for name in names if name.endswith("/METADATA"))))
    assert "](docs/" not in str(metadata.get_payload()), "the description has links into the repository"
    version = run(sys.executable, "-c", "import attn_core; print(attn_core.__version__)").strip()
    assert metadata["Version"] == version, f"the wheel is {metadata['Version']}, attn_core {version}"


def check_sdist(python: str, sdist: Path, wheel: Path, folder: Path) -> None:
    """Raises AssertionError unless the sdist builds a wheel with the same files."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    run(python, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder / "rebuilt"), str(unpacked))
    (rebuilt,) = (folder / "rebuilt").iterdir()
    assert files_of(rebuilt) == files_of(wheel), "the wheel of the sdist has other files"


def check_extra(name: str, wheel: Path, folder: Path, pip_args: list[str]) -> None:
    """Raises AssertionError or CalledProcessError unless the wheel with one extra does what EXTRAS says."""
    python = build(folder / "venv", sys.executable, f"{wheel}[{name}]" if name else str(wheel), pip_args=pip_args)
    run(python, "-m", "pip", "check", folder=folder)
    for statement in EXTRAS[name].runs:
        run(python, "-c", statement, folder=folder)  # in another folder, or the sources would be imported
    for statement in EXTRAS[name].refuses:
        done = subprocess.run([python, "-c", statement], cwd=folder, capture_output=True, text=True, check=False)
        last = (done.stderr.splitlines() or [""])[-1]
        assert done.returncode and "is not installed; pip install 'attn-core[" in last, f"{statement}: {last}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extras", default=",".join(EXTRAS), help="names with commas; '' alone is the wheel alone")
    parser.add_argument("--pip-args", default="", type=shlex.split, help="options of pip install")
    arguments = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as temporary:
            check(Path(temporary), arguments.extras.split(","), arguments.pip_args or [])
    except (AssertionError, subprocess.CalledProcessError) as error:
        sys.exit(f"failed\n{error}\n{getattr(error, 'stdout', None) or ''}")


def check(folder: Path, extras: list[str], pip_args: list[str]) -> None:
    with step("an environment with the tools"):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        needed = [*project["build-system"]["requires"], *project["project"]["optional-dependencies"]["release"]]
        pinned = [*pip_args, "-c", str(CONSTRAINTS)]
        python = build(folder / "tools", sys.executable, *needed, pip_args=pinned)
    with step("the wheel and the sdist"):
        for old in DIST.glob("*"):
            old.unlink()
        run(python, "-m", "build", "--no-isolation", "--sdist", "--wheel", "--outdir", str(DIST), str(ROOT))
        (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
        check_wheel(wheel)
    with step("twine check --strict"):
        run(python, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
    with step("the wheel of the sdist"):
        (folder / "sdist").mkdir()
        check_sdist(python, sdist, wheel, folder / "sdist")
    for name in extras:
        with step(f"attn-core[{name}] alone" if name else "attn-core alone"), tempfile.TemporaryDirectory() as empty:
            check_extra(name, wheel, Path(empty), pip_args)
    print(f"{wheel.name} and {sdist.name} are in {DIST.relative_to(ROOT)}/")


if __name__ == "__main__":
    main()
