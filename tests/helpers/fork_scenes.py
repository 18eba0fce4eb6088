"""Scenes of ``tests/faults/test_forks.py``: each runs in a process of its own and prints one JSON object."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

SECONDS = 250.0
"""How long a child may take before it counts as one that hangs: a loaded machine is slow, too."""


def in_child(call: Callable[[], Any]) -> Any:
    """Forks, and returns what the call returns there, the text of its error, or "hangs"."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of every fork
        child = os.fork()
    if child == 0:
        try:
            said = call()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, json.dumps(said).encode())
        os._exit(0)
    os.close(write)
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        if os.waitpid(child, os.WNOHANG)[0]:
            with os.fdopen(read) as text:
                return json.loads(text.read() or '"died"')
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return "hangs"


def in_process(method: str, call: Callable[..., Any]) -> Any:
    """What a call puts into the queue of a process of multiprocessing, or "hangs"."""
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        process = context.Process(target=call, args=(queue,))
        process.start()
    try:
        said = queue.get(timeout=SECONDS)
    except Exception:
        said = "hangs"
    process.kill()
    process.join()
    return said


# JAX


def jax_sum() -> float:
    import jax.numpy as jnp

    from jax_frontend import attention

    x = jnp.ones((1, 5, 2, 16))
    return float(attention(x, x, x, softcap=3.0).sum())


def put_jax_sum(queue: Any) -> None:
    try:
        queue.put(jax_sum())
    except Exception as error:
        queue.put(f"{type(error).__name__}: {error}")


def scene_jax() -> dict[str, Any]:
    import jax.numpy as jnp

    import jax_frontend

    before = in_child(jax_sum)  # JAX is imported here and has not started
    here, x = jax_sum(), jnp.ones((1, 5, 2, 16))
    calls = {
        "attention": lambda: str(jax_frontend.attention(x, x, x)),
        "heads first": lambda: str(jax_frontend.attention(x, x, x, layout="bhsd")),
        "jax.nn's": lambda: str(jax_frontend.dot_product_attention(x, x, x, query_seq_lengths=x)),
        "packed": lambda: str(jax_frontend.attention_qkvpacked(x)),
        "append": lambda: str(jax_frontend.append_kv(x, x, x, x, block_table=x, seq_lens=x)),
        "paged": lambda: str(jax_frontend.paged_attention(x, x, x, block_table=x, seq_lens=x)),
    }
    return {
        **{"before": before, "here": here, "grandchild": in_child(lambda: in_child(jax_sum))},
        "refused": {name: in_child(call) for name, call in calls.items()},
        "explained": in_child(lambda: jax_frontend.explain(x, x, x).backend),
        **{method: in_process(method, put_jax_sum) for method in ("fork", "spawn")},
        "after": jax_sum(),
    }


# torch


class Rows:
    """A data set whose rows are results of attention."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, at: int) -> Any:
        import torch

        from torch_frontend import attention

        x = torch.full((1, 300, 2, 16), float(at + 1))
        return attention(x, x, x, causal=True)[0, -1, 0, 0]


def scene_torch() -> dict[str, Any]:
    import torch
    from torch.utils.data import DataLoader

    from torch_frontend import attention

    torch.set_num_threads(2)
    here = [float(Rows()[at]) for at in range(len(Rows()))]  # starts torch's threads, which a child does not have
    loaded = {
        method: [float(value) for value in DataLoader(Rows(), None, num_workers=1, multiprocessing_context=method)]
        for method in ("fork", "spawn")
    }

    def after_one_thread(shape: tuple[int, ...] = (2, 300, 4, 16)) -> float:
        torch.set_num_threads(1)
        x = torch.ones(shape, requires_grad=True)
        attention(x, x, x, causal=True).sum().backward()
        return float(x.grad.sum())

    return {"here": here, **loaded, "one thread": in_child(after_one_thread)}


def scene_locks() -> dict[str, Any]:
    """Forks while another thread holds every lock of ours, and is in the middle of a property of a selection."""
    import torch

    import torch_frontend.diffusers
    import torch_frontend.unsloth
    from attn_core import AttentionSpec, Target, explain
    from attn_core.backends.flex import program
    from attn_core.backends.shared import first_calls
    from attn_core.backends.shared.caches import cached_once
    from attn_core.selection import choice

    torch.set_num_threads(1)
    held, leave = threading.Event(), threading.Event()
    right = choice.refusals

    def slow(*given: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            held.set()
            leave.wait()
        return right(*given)

    @cached_once
    def made() -> str:
        if threading.current_thread() is not threading.main_thread():
            choice.refusals = slow
            spec = AttentionSpec(batch=1, q_len=5, kv_len=5, num_heads=1, num_kv_heads=1, head_dim=8, value_dim=8,
                                 dtype="float32")  # fmt: skip
            return str(explain(spec, Target("torch", "cpu")).refusals)
        return "made"

    def hold() -> None:
        ours = torch_frontend.diffusers._replacement
        with first_calls._compiling, program._lock, ours._lock, torch_frontend.unsloth._replacement._lock:
            made()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()

    def use_all() -> list[Any]:
        choice.refusals = right
        x = torch.ones(1, 5, 1, 8)
        selection = torch_frontend.explain(x, x, x)
        with torch_frontend.diffusers.installed():
            replaced = torch_frontend.diffusers.is_installed()
        torch_frontend.unsloth.uninstall()
        flex = torch_frontend.attention(x, x, x, backend="flex")
        free = first_calls._compiling.acquire(timeout=SECONDS)
        return [made(), len(selection.refusals) > 0, replaced, free, float(flex.sum())]

    said = in_child(use_all)
    leave.set()
    thread.join()
    return {"child": said}


if __name__ == "__main__":
    print(json.dumps(globals()[f"scene_{sys.argv[1]}"]()))
