"""Writes docs/reference/devices.md: which kernels run on which GPU, from the backends' claims; imports no kernel."""

from __future__ import annotations

from dataclasses import replace
from textwrap import fill
from typing import NamedTuple

from attn_core import backends
from attn_core.backends.support import half_dtype
from attn_core.call.spec import AttentionSpec, PagedKV
from attn_core.cli.advice import Machine, commands_of, package_for
from attn_core.selection import Target, refusals, tables
from tools.pages.support import BOTH, FORWARD_ONLY, NONE, table_of


class Device(NamedTuple):
    """A row of the page: the cards' names, the device as ``attn explain`` names it, and the calls' framework."""

    cards: str
    name: str
    framework: str = "torch"


DEVICES = (
    Device("V100", "sm70"),
    Device("T4", "sm75"),
    Device("A100", "sm80"),
    Device("RTX 3090", "sm86"),
    Device("RTX 4090, L40S", "sm89"),
    Device("H100, H200", "sm90"),
    Device("B200", "sm100"),
    Device("RTX 5090", "sm120"),
    Device("MI250", "gfx90a"),
    Device("MI300", "gfx942"),
    Device("any CPU", "cpu"),
    Device("Apple GPU", "mps"),
    Device("Intel GPU", "xpu"),
    Device("TPU", "tpu", framework="jax"),
)

CALL_NAMES = ("training", "inference", "decoding", "decoding from pages")
IN_FIRST_TABLE = ("training", "decoding from pages")
"""The static order of inference and of decoding differs little from that of training."""
SHOWN = 3
"""So many of the backends that automatic choice may take are shown; the rest is in the second table."""

BY_NAME = "by name"
MARKS = {BOTH: "forward and backward", FORWARD_ONLY: "forward only", BY_NAME: "only by name"}
"""The columns of the second table."""

PACKAGES = {"flash4": "flash-attn-4", "flash3": "tokenspeed-fa3", "flash2": "flash-attn"}
"""The package with a backend's kernel, for the backends that do not come with torch or JAX.

Only those that can make automatic choice faster: ``xformers`` launches kernels that torch has, too."""

HEAD = f"""# Which kernels for which GPU

`make support` writes this page from what the backends declare. A declaration is not a measurement: this project has run
GPU kernels only on an H100 and an H200. [What each backend supports](support.md) lists the features.

## What to install

`attn explain --device` takes the name in the second column. The next two columns have the first kernels of automatic
choice, up to {SHOWN}, after the last column's commands; without a package the next one runs. `math` and `jax_xla` take
every option, but are not fused kernels.
"""

CALLS = """
- Training and decoding are causal calls in half precision (float16 on a V100 and a T4, else bfloat16) with a head_dim
  of 128 and four query heads for each kv head, in torch, on a TPU in JAX. For other calls ask `attn explain`.
- On V100 and T4 dropout, softcap, ALiBi and bfloat16 run on `math`, except from pages.
- In JAX without torch install `'.[jax-cuda13]'` on an H100 or H200.
- On a measured card (H100, H200, or yours after `attn tune`) the order depends on the call. On others it is fixed, but
  for figures that others published:
"""

MORE = """
- Heads of 256 stay on `flash2` on a B200: FlashAttention 4 gave [wrong
  gradients](https://github.com/NVIDIA/TransformerEngine/issues/3216).
- GPUs of AMD, Apple and Intel, and TPUs run the framework's own operations.
- `tokenspeed-fa3` has no backward, so `flash3` is for inference; [other
  builds](../get_started/install.md#packages-with-kernels) have one.

```bash
attn explain --heads 32 --kv-heads 8 --head-dim 128 --q-len 4096 --causal --dtype bfloat16 --device sm89
```

## Every backend on every card

What can run one of the calls above. A backend runs by name only if it is approximate, a variant of another, or was
never run on such a device by this project.
"""


def render() -> str:
    """Returns the whole page as Markdown."""
    install = [["card", "device", *IN_FIRST_TABLE, "install"], *(_row(device) for device in DEVICES)]
    everything = [["card", *MARKS.values()], *(_everything(device) for device in DEVICES)]
    figures = "\n".join(_line(row) for row in tables.published() if row.first)
    return "\n".join([HEAD, table_of(install) + CALLS + figures + MORE, table_of(everything)])


def _line(row: tables.Figures) -> str:
    calls = [f"`{name}={value}`" for name, value in row.calls.items()]
    first = ", ".join(f"`{name}`" for name in row.first)
    sources = ", ".join(f"[{date}]({link})" for link, date in row.sources.items())
    line = f"{', '.join([f'`{row.device}`', *calls])}: {first} before `{row.ahead_of}`; {row.figures} ({sources})."
    whole = {"break_long_words": False, "break_on_hyphens": False}
    return fill(line, 120, initial_indent="  - ", subsequent_indent="    ", **whole)


def _everything(device: Device) -> list[str]:
    marks = {name: mark_of(name, device) for name in backends.names()}
    lists = [[f"`{name}`" for name in marks if marks[name] == mark] for mark in MARKS]
    return [device.cards, *(", ".join(names) or NONE for names in lists)]


def _row(device: Device) -> list[str]:
    target = Target(device.framework, device.name)
    chosen = [[name for name in _order(target, call) if runs(name, device, call)][:SHOWN] for call in IN_FIRST_TABLE]
    chosen_by_name = {name for name in PACKAGES if runs(name, device, "training")}
    # Packages whose kernels run by name alone are shown if there are no others.
    useful = {name for names in chosen for name in names if name in PACKAGES} or chosen_by_name
    training, decoding = chosen
    training = [name for name in training if not _lacks_backward(name, device)]
    lists = [", ".join(f"`{name}`" for name in names) or NONE for names in (training, decoding)]
    commands = "<br>".join(f"`{_install(package, device)}`" for name, package in PACKAGES.items() if name in useful)
    return [device.cards, f"`{device.name}`", *lists, commands or "nothing more"]


def _lacks_backward(name: str, device: Device) -> bool:
    """Returns whether the package that the page names for a backend has no backward, though other builds do."""
    package = package_for(PACKAGES.get(name, ""), device.name)
    return package is not None and "backward" in package.get("builds", {}).get(name, {}).get("without", ())


def _install(name: str, device: Device) -> str:
    """Returns the last command that ``attn doctor`` advises for a package on a device, which installs it."""
    package = package_for(name, device.name)
    return "" if package is None else commands_of(package, Machine(device=device.name))[-1]


def mark_of(name: str, device: Device) -> str:
    """Returns one of MARKS, or NONE, for a backend on a device."""
    if not any(runs(name, device, call) for call in CALL_NAMES):
        return NONE
    target = _target(name, device)
    if not any(name in _order(target, call) for call in CALL_NAMES):
        return BY_NAME
    return BOTH if runs(name, device, "training") else FORWARD_ONLY


def runs(name: str, device: Device, call: str) -> bool:
    """Returns whether a backend can run one of CALL_NAMES on a device, in JAX if its tensors are JAX's."""
    return not refusals(name, _spec(half_dtype(device.name), call), _target(name, device))


def _target(name: str, device: Device) -> Target:
    return Target(backends.load(name).framework, device.name)


def _order(target: Target, call: str) -> tuple[str, ...]:
    """Returns the order of automatic choice without tables, which no measurement on this machine can change."""
    in_pages = call == "decoding from pages"
    usual = backends.usual_order(target.framework, target.kind, paged=in_pages, few_queries=in_pages)
    figures = tables.figures_for(_spec(half_dtype(target.device), call), target.device)
    return usual if figures is None else figures.ordered(usual)


def _spec(dtype: str, call: str) -> AttentionSpec:
    """Returns one of CALL_NAMES as a spec. Decoding has one query for each of eight sequences."""
    spec = AttentionSpec(
        batch=8,
        q_len=1 if call == "decoding" else 4096,
        kv_len=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        value_dim=128,
        dtype=dtype,
        causal=True,
        needs_backward=call == "training",
    )
    if call != "decoding from pages":
        return spec
    pool = PagedKV(num_pages=128, page_size=256, width=16)
    return replace(spec, batch=1, q_len=8, documents=8, max_len_q=1, max_len_k=4096, paged=pool)
