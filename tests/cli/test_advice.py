"""Tests the advice of ``attn doctor`` on machines that are only described: what is advised, and what never is."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import attn_core
from attn_core import backends
from attn_core.cli import advice as finder
from attn_core.cli.advice import (
    APPLIES,
    CALLS,
    PACKAGES,
    PROBLEMS,
    Advice,
    Machine,
    advise,
    backends_of,
    find_machine,
    gfx_name,
    nvidia_gpus,
    problems,
    requirements,
)
from attn_core.cli.devices import devices_of
from attn_core.selection import Target

DEVICES = (
    "sm70",
    "sm75",
    "sm80",
    "sm86",
    "sm89",
    "sm90",
    "sm100",
    "sm120",
    "gfx90a",
    "gfx942",
    "mps",
    "xpu",
    "cpu",
    "tpu",
)

KERNELS = {
    "sm70": [],
    "sm75": [],
    "sm80": ["flash-attn"],
    "sm86": ["flash-attn"],
    "sm89": ["flash-attn"],
    "sm90": ["flash-attn-4", "tokenspeed-fa3", "flash-attn"],
    "sm100": ["flash-attn-4", "flash-attn"],
    "sm120": ["flash-attn"],
    "gfx90a": [],
    "gfx942": [],
    "mps": [],
    "xpu": [],
    "cpu": [],
    "tpu": [],
}
"""What to install next on each device with a working torch, best first."""

NEVER = {
    "sm70": {
        "flash-attn",
        "flash-attn-4",
        "tokenspeed-fa3",
        "dew-flash-attn-cu13",
        "xformers",
        "sageattention",
        "triton",
    },
    "sm75": {
        "flash-attn",
        "flash-attn-4",
        "tokenspeed-fa3",
        "dew-flash-attn-cu13",
        "sageattention",
        "triton",
    },
    "sm80": {"flash-attn-4", "tokenspeed-fa3", "dew-flash-attn-cu13"},
    "sm86": {"flash-attn-4", "tokenspeed-fa3", "dew-flash-attn-cu13"},
    "sm89": {"flash-attn-4", "tokenspeed-fa3", "dew-flash-attn-cu13"},
    "sm90": set(),
    "sm100": {"tokenspeed-fa3", "dew-flash-attn-cu13", "xformers", "sageattention"},
    "sm120": {"flash-attn-4", "tokenspeed-fa3", "dew-flash-attn-cu13", "xformers", "sageattention"},
    "gfx90a": {package["name"] for package in PACKAGES} - {"torch", "flash-attn"},
    "gfx942": {package["name"] for package in PACKAGES} - {"torch", "flash-attn"},
    "mps": {package["name"] for package in PACKAGES} - {"torch"},
    "xpu": {package["name"] for package in PACKAGES} - {"torch"},
    "cpu": {package["name"] for package in PACKAGES} - {"torch", "jax"},
    "tpu": {package["name"] for package in PACKAGES} - {"jax"},
}
"""What must be advised on no machine with the device: the package has no kernel for it."""


def with_torch(device: str, *more: str, cuda: tuple[int, ...] = (13, 0), **facts: object) -> Machine:
    packages = dict.fromkeys(("torch", *more), "2.13.0") | ({"triton": "3.6.0"} if device.startswith("sm") else {})
    build = {"cuda": {"torch_cuda": cuda}, "rocm": {"torch_hip": True}}.get(backends.kind_of(device), {})
    return Machine(device=device, packages=packages, **(build | facts))


def named(machine: Machine, *levels: str) -> list[str]:
    return [advice.package for advice in advise(machine) if advice.level in (levels or ("next",))]


def of(machine: Machine, package: str) -> Advice:
    return next(advice for advice in advise(machine) if advice.package == package)


def machines(device: str) -> list[Machine]:
    bare = Machine(device=device)
    return [bare, with_torch(device), with_torch(device, "jax"), Machine(device=device, packages={"jax": "0.11"})]


@pytest.mark.parametrize("device", DEVICES)
def test_what_to_install_next_beside_torch(device: str) -> None:
    assert named(with_torch(device)) == KERNELS[device]


@pytest.mark.parametrize("device", DEVICES)
def test_no_package_without_a_kernel_for_the_device(device: str) -> None:
    for machine in machines(device):
        assert not NEVER[device] & set(named(machine, "next", "optional", "avoid"))


@pytest.mark.parametrize("device", DEVICES)
def test_every_advised_backend_claims_the_device_and_names_the_package(device: str) -> None:
    for machine in machines(device):
        for advice in advise(machine):
            assert advice.backends
            for name in advice.backends:
                assert backends.load(name, machine.kind).forward_claims.runs_on(device)
                assert advice.package in requirements(name, machine.kind)


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_advised_is_not_advised_again(device: str) -> None:
    for machine in machines(device):
        after = machine
        for package in named(machine):
            after = after.plus(package)
        assert named(after) == []


@pytest.mark.parametrize("device", DEVICES)
def test_following_the_advice_leads_to_no_known_problem(device: str) -> None:
    for machine in machines(device):
        after = machine
        for package in named(machine):
            after = after.plus(package)
        new = {problem.name for problem in problems(after)} - {problem.name for problem in problems(machine)}
        assert new <= {"bridge-missing"}  # JAX's commands install the bridge as well


@pytest.mark.parametrize("device", ["sm80", "sm90", "sm100", "sm120"])
def test_automatic_choice_runs_the_calls_on_the_advised_package(device: str) -> None:
    advised = [advice for advice in advise(with_torch(device)) if advice.level == "next"]
    assert advised and all(advice.calls for advice in advised)
    # Only torch's own kernels and the first package: what it is said to run, it runs.
    own = backends_of("torch", device) + backends_of("triton", device) + advised[0].backends
    missing = tuple((name, "not installed") for name in backends.names() if name not in own)
    for call in advised[0].calls:
        assert attn_core.explain(CALLS[call], Target("torch", device, missing)).backend in advised[0].backends


FRAMEWORKS: Mapping[str, list[str]] = {
    **{"tpu": ["jax"]},
    **{device: ["torch"] for device in ("gfx90a", "gfx942", "mps", "xpu")},
}


@pytest.mark.parametrize("device", DEVICES)
def test_frameworks_come_first_on_an_empty_machine(device: str) -> None:
    frameworks = FRAMEWORKS.get(device, ["torch", "jax"])
    assert named(Machine(device=device)) == frameworks + KERNELS[device]


def test_torch_users_are_not_sent_to_jax_but_jax_users_may_add_torch() -> None:
    assert "jax" not in named(with_torch("sm90"), "next", "optional", "avoid")
    advice = advise(Machine(device="sm80", packages={"jax": "0.11"}, jax_cuda=13))
    assert [(one.package, one.level) for one in advice] == [("torch", "optional")]
    assert advice[0].commands[-1] == "pip install 'jax-tvm-ffi>=0.1.3'"


@pytest.mark.parametrize("cuda", [12, 13])
def test_a_kernel_for_jax_alone(cuda: int) -> None:
    jax = Machine(device="sm90", packages={"jax": "0.11.2"}, jax_cuda=cuda)
    kernel, torch = advise(jax)
    assert (kernel.package, kernel.level, kernel.backends) == ("dew-flash-attn-cu13", "next", ("flash3_xla",))
    assert kernel.commands == (f"pip install 'dew-flash-attn-cu{cuda}>=0.3.6'",)
    assert {"prompts", "training", "packed documents"} <= {*kernel.calls} and torch.level == "optional"
    for name in ("dew-flash-attn-cu12", "dew-flash-attn-cu13"):
        assert named(jax.plus(name), "next", "optional") == ["torch"]
    assert "dew-flash-attn-cu13" not in named(with_torch("sm90"), "next", "optional", "avoid")
    assert of(with_torch("sm90", "jax", jax_cuda=13), "dew-flash-attn-cu13").level == "optional"


@pytest.mark.parametrize(
    ("machine", "package", "command"),
    [
        (
            Machine(device="sm70"),
            "torch",
            "pip install 'torch>=2.11' --index-url https://download.pytorch.org/whl/cu126",
        ),
        (Machine(device="sm70"), "jax", "pip install 'jax[cuda12]>=0.10'"),
        (Machine(device="sm90"), "torch", "pip install 'torch>=2.11'"),
        (Machine(device="sm90"), "jax", "pip install 'jax[cuda13]>=0.10'"),
        (Machine(device="cpu"), "torch", "pip install 'torch>=2.11' --index-url https://download.pytorch.org/whl/cpu"),
        (Machine(device="cpu"), "jax", "pip install 'jax>=0.10'"),
        (with_torch("sm90"), "flash-attn-4", "pip install 'flash-attn-4[cu13]>=4.0.0b30'"),
        (with_torch("sm90", cuda=(12, 8)), "flash-attn-4", "pip install 'flash-attn-4>=4.0.0b30'"),
        (with_torch("sm90"), "tokenspeed-fa3", "pip install tokenspeed-fa3"),
        (with_torch("sm89"), "flash-attn", "export MAX_JOBS=4 FLASH_ATTN_CUDA_ARCHS=80"),
        (with_torch("sm120"), "flash-attn", "export MAX_JOBS=4 FLASH_ATTN_CUDA_ARCHS=120"),
        (with_torch("gfx942"), "flash-attn", "MAX_JOBS=4 pip install --no-build-isolation 'flash-attn>=2.6.2,<3'"),
    ],
)
def test_commands(machine: Machine, package: str, command: str) -> None:
    assert command in of(machine, package).commands


def test_commands_are_short_enough_to_copy_and_shells_can_read_them() -> None:
    for device in DEVICES:
        for machine in machines(device):
            for advice in advise(machine):
                for command in advice.commands:
                    assert "{" not in command and shlex.split(command)
                    # The indices of torch are the exception.
                    assert len(command) <= 72 or "--index-url" in command


def test_flash_attn_overwrites_flash_attn_4_which_is_then_installed_again() -> None:
    last = of(with_torch("sm90", "flash-attn-4"), "flash-attn").commands[-1]
    assert last == "pip install --force-reinstall --no-deps 'flash-attn-4[cu13]>=4.0.0b30'"
    assert all("--force-reinstall" not in line for line in of(with_torch("sm80"), "flash-attn").commands)


def test_amd_advice_names_the_switch_to_triton() -> None:
    assert "FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE" in of(with_torch("gfx942"), "flash-attn").note


def test_a_build_of_a_backend_replaces_the_other_builds() -> None:
    for build in ("flash-attn-3", "fa3-fwd", "tokenspeed-fa3"):
        assert "tokenspeed-fa3" not in named(with_torch("sm90", build), "next", "optional", "avoid")


def test_a_wheel_for_another_cuda_is_not_advised_without_its_runtime() -> None:
    assert of(with_torch("sm90", cuda=(12, 8)), "tokenspeed-fa3").level == "avoid"
    assert of(with_torch("sm90", cuda=(12, 8), cuda_runtimes=(13,)), "tokenspeed-fa3").level == "next"
    assert of(with_torch("sm80"), "xformers").level == "avoid"
    assert of(with_torch("sm80", cuda=(12, 8)), "xformers").level == "optional"


def test_xformers_is_not_advised_beside_flash_attn_4_alone() -> None:
    beside = with_torch("sm90", "flash-attn-4", "fa3-fwd", cuda=(12, 8))
    assert of(beside, "xformers").level == "avoid"


def test_flash_attn_4_is_not_advised_beside_xformers_that_it_would_break() -> None:
    with_xformers = with_torch("sm90", "xformers", cuda=(12, 8))
    assert of(with_xformers, "flash-attn-4").level == "avoid"
    assert "xformers" in of(with_xformers, "flash-attn-4").why
    assert of(with_torch("sm90", "xformers", "flash-attn", cuda=(12, 8)), "flash-attn-4").level == "next"


# known-bad combinations

BAD = {
    "torch-without-gpu": Machine(device="sm90", packages={"torch": "2.13.0+cpu"}),
    "torch-too-old": Machine(device="sm90", packages={"torch": "2.9.1"}, torch_cuda=(13, 0)),
    "jax-too-old": Machine(device="cpu", packages={"jax": "0.4.38"}),
    "gpu-too-old-for-cuda": with_torch("sm70", cuda=(12, 8)),
    "gpu-too-old-for-jax-cuda": Machine(device="sm70", packages={"jax": "0.11"}, jax_cuda=13),
    "driver-too-old-for-cuda-13": with_torch("sm90", driver="575.57.08"),
    "jax-without-cuda": Machine(device="sm90", packages={"jax": "0.11"}),
    "cuda-versions-differ": with_torch("sm90", "jax", "jax-tvm-ffi", cuda=(12, 8), jax_cuda=13),
    "bridge-missing": Machine(device="cpu", packages={"torch": "2.13.0", "jax": "0.11"}),
    "flash-attn-4-breaks-xformers": with_torch("sm90", "flash-attn-4", "xformers", cuda=(12, 8)),
    "cuda-runtime-missing": with_torch("sm90", "xformers"),
    "xformers-beside-forward-only-fa3": with_torch("sm90", "xformers", "tokenspeed-fa3", cuda_runtimes=(12, 13)),
}

GOOD = [
    Machine(device="cpu", packages={"torch": "2.13.0+cpu", "jax": "0.10.2", "jax-tvm-ffi": "0.1.3"}),
    Machine(device="tpu", packages={"jax": "0.11.2"}),
    with_torch("sm70", cuda=(12, 6)),
    with_torch("sm90", "jax", "jax-tvm-ffi", "flash-attn-4", "tokenspeed-fa3", jax_cuda=13, driver="580.95.05"),
    with_torch("sm90", driver="575.57.08", cuda=(12, 8)),
    with_torch("sm90", "flash-attn", "flash-attn-4", "xformers", cuda_runtimes=(12, 13)),
    with_torch("gfx942", "flash-attn"),
]


def test_every_known_bad_combination_has_a_case() -> None:
    assert set(BAD) == set(APPLIES) == {entry["name"] for entry in PROBLEMS}


@pytest.mark.parametrize("name", BAD)
def test_a_known_bad_combination_is_seen_alone(name: str) -> None:
    assert [problem.name for problem in problems(BAD[name])] == [name]


@pytest.mark.parametrize("name", BAD)
def test_a_problem_says_what_to_do(name: str) -> None:
    problem = problems(BAD[name])[0]
    assert not re.search(r"[{}]|None", problem.text)
    assert problem.commands or re.search(r"Update|call ", problem.text)
    assert all(len(command) <= 72 or "--index-url" in command for command in problem.commands)


@pytest.mark.parametrize("machine", GOOD)
def test_good_machines_have_no_problem(machine: Machine) -> None:
    assert problems(machine) == ()


def test_the_missing_runtime_is_put_on_the_loader_s_path() -> None:
    assert problems(BAD["cuda-runtime-missing"])[0].commands == (
        "pip install 'nvidia-cuda-runtime-cu12<13'",
        "dir=$(python -c 'import nvidia.cuda_runtime as r; print(*r.__path__)')",
        "export LD_LIBRARY_PATH=$dir/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}",
    )


def test_the_remedy_names_the_other_framework_s_cuda() -> None:
    assert problems(BAD["cuda-versions-differ"])[0].commands == (
        "pip uninstall -y jax-cuda13-plugin jax-cuda13-pjrt",
        "pip install 'jax[cuda12]>=0.10'",
    )


# finding the machine


def test_nvidia_smi_is_read() -> None:
    listing = "NVIDIA H200, 9.0, 580.95.05\nNVIDIA RTX PRO 6000, 12.0, 580.95.05\n"
    assert [gpu[1] for gpu in nvidia_gpus(listing)] == ["sm90", "sm120"]
    assert nvidia_gpus(listing)[0] == ("NVIDIA H200", "sm90", "580.95.05")
    assert nvidia_gpus("NVIDIA-SMI has failed because it couldn't communicate, with, the driver") == []
    assert nvidia_gpus("") == []


@pytest.mark.parametrize(
    ("line", "name"),
    [("gfx_target_version 90402", "gfx942"), ("gfx_target_version 90010", "gfx90a"), ("gfx_target_version 0", None)],
)
def test_amd_gpus_are_read(line: str, name: str | None) -> None:
    assert gfx_name(f"cpu_cores_count 0\n{line}\nvendor_id 4098\n") == name


def test_a_gpu_that_no_framework_sees_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    node = tmp_path / "1"
    node.mkdir()
    (node / "properties").write_text("gfx_target_version 90402\n", encoding="utf-8")
    listing = "NVIDIA H200, 9.0, 580.95.05\n"
    packages = {"torch": "2.13.0+cpu", "jax": None, "jax-cuda12-plugin": "0.11"}
    monkeypatch.setattr(finder, "TOPOLOGY", tmp_path / "absent")
    monkeypatch.setattr(finder, "_output", lambda *command: listing)
    machine = find_machine(packages, ["cpu"])
    assert (machine.device, machine.gpus, machine.driver) == ("sm90", ("NVIDIA H200",), "580.95.05")
    assert machine.jax_cuda == 12 and not machine.has("jax")
    monkeypatch.setattr(finder, "_output", lambda *command: "")
    assert find_machine(packages, ["cpu"]).device == "cpu"
    assert find_machine(packages, ["cpu", "tpu"]).device == "tpu"
    monkeypatch.setattr(finder, "TOPOLOGY", tmp_path)
    assert find_machine(packages, ["cpu"]).device == "gfx942"


@pytest.mark.parametrize(
    ("cuda", "hip", "expected"),
    [("13.0", None, ((13, 0), False)), (None, "7.1", (None, True)), (None, None, (None, False))],
)
def test_the_build_of_torch_is_read(
    cuda: str | None, hip: str | None, expected: tuple[object, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = ModuleType("torch")
    torch.version = SimpleNamespace(cuda=cuda, hip=hip)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    machine = find_machine({"torch": "2.13.0"}, ["cpu"])
    assert (machine.torch_cuda, machine.torch_hip) == expected


def test_xformers_says_which_cuda_it_is_built_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(finder, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    assert find_machine({}, ["cpu"]).wheel_cuda == finder.WHEEL_CUDA
    (tmp_path / "cpp_lib.json").write_text(json.dumps({"version": {"cuda": 1300}}), encoding="utf-8")
    assert find_machine({}, ["cpu"]).wheel_cuda["xformers"] == 13


@pytest.mark.parametrize(("hip", "device"), [(None, "sm90"), ("7.1", "gfx942")])
def test_amd_gpus_have_the_name_of_their_architecture(
    hip: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(major=9, minor=0, gcnArchName="gfx942:sramecc+:xnack-")
    torch = ModuleType("torch")
    torch.version = SimpleNamespace(hip=hip)  # type: ignore[attr-defined]
    torch.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        is_available=lambda: True, device_count=lambda: 2, get_device_properties=lambda index: properties
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert devices_of("torch") == ("cpu", device)
