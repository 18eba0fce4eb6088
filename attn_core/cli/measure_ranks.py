"""One rank of ``attn tune --ranks``: times exchanges and attention. Started by torch's launcher; rank 0 writes."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

SIZES = {"cpu": (1 / 64, 1 / 4, 2, 8), "cuda": (1 / 16, 1, 8, 64, 256)}
"""The MiB that a rank receives. The time of the smallest counts as the latency."""
ROW = {"cpu": (768, 4, 2, 64), "cuda": (8192, 32, 8, 128)}
"""The attention whose rate is measured: tokens, heads, kv heads, head_dim; causal."""
FEW_TOKENS = 64
"""Of the call whose time is the time to start and end a kernel."""
REPEATS, TURN = 5, 0.03
"""The turns of each measurement, of which the median counts, and the seconds of a turn, about."""
MIB, GIB = 2.0**20, 2.0**30
Run = Callable[[], Any]
Clock = Callable[[], float]


def main(kind: str, path: Path) -> None:
    """Measures on all ranks."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    if kind == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    ranks = Ranks(kind)
    figures = {"links": ranks.links(), "memory_gib_s": ranks.memory(), **ranks.attention()}
    figures["overlap"] = ranks.overlap()
    figures |= ranks.host()
    figures["device_name"] = torch.cuda.get_device_name() if kind == "cuda" else "CPU"
    if dist.get_rank() == 0:
        path.write_text(json.dumps(figures), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


class Ranks:
    """The measurements of this rank, together with the others."""

    def __init__(self, kind: str) -> None:
        import torch
        import torch.distributed as dist

        from torch_frontend.context_parallel.mesh import find_axis

        self.kind = kind
        self.axis = find_axis(dist.group.WORLD.group_name)  # type: ignore[union-attr]
        self.dtype = torch.bfloat16 if kind == "cuda" else torch.float32
        self.element = 2 if kind == "cuda" else 4

    def links(self) -> dict[str, list[list[float]]]:
        """Returns ``[[MiB, GiB/s], ...]`` of each kind of exchange, in rising sizes that take rising times."""
        import torch

        from torch_frontend.context_parallel.exchange import exchanges
        from torch_frontend.context_parallel.exchange.exchanges import KVPair

        others = self.axis.size - 1

        def ring(size: float) -> Run:
            half = self._numbers(size / 2).view(1, -1, 1, 1)
            pair = KVPair.pack(self.axis, [[half], [half]])
            return lambda: pair.hop(self.axis, 1).wait()

        def all_gather(size: float) -> Run:
            tensor = self._numbers(size / others).view(1, -1, 1, 1)
            return lambda: exchanges.gather(self.axis, [tensor]).wait()

        def all_to_all(size: float) -> Run:
            even = [self._numbers(size / others).numel()] * self.axis.size
            message, ops = self._numbers(sum(even) * self.element), torch.ops._c10d_functional
            return lambda: ops.wait_tensor(ops.all_to_all_single(message, even, even, self.axis.name))

        links = {}
        for name, make in (("ring", ring), ("all_gather", all_gather), ("all_to_all", all_to_all)):
            rows, longest = [], 0.0
            for mib in SIZES[self.kind]:
                # Noise may make a larger message look shorter; the cost model refuses such rows.
                longest = max(longest * 1.0001, self._seconds(make(mib * MIB)))
                rows.append([mib, mib * MIB / GIB / longest])
            links[name] = rows
        return links

    def memory(self) -> float:
        """Returns the GiB/s of a copy, read and written bytes together."""
        size = (2**28 if self.kind == "cuda" else 2**24) * 4
        source = self._numbers(size)
        target = source.clone()
        return 2 * size / GIB / self._seconds(lambda: target.copy_(source))

    def attention(self) -> dict[str, float]:
        """Returns the rates of products, without the time for memory, and the microseconds of a tiny call."""
        import torch

        from attn_core.call.arithmetic import BACKWARD_WORK
        from torch_frontend import attention

        tokens, heads, kv_heads, dim = ROW[self.kind]

        def calls(tokens: int) -> tuple[Run, Run]:
            q, k, v = (self._heads(tokens, each, dim).requires_grad_() for each in (heads, kv_heads, kv_heads))
            dout = torch.ones_like(q)

            def forward() -> Any:
                with torch.no_grad():
                    return attention(q, k, v, causal=True)

            return forward, lambda: torch.autograd.grad(attention(q, k, v, causal=True), [q, k, v], dout)

        tiny = self._seconds(calls(FEW_TOKENS)[0])
        forward, both = map(self._seconds, calls(tokens))
        # The cost model's rates are those of 16-bit types; wider ones count as so much slower.
        products = 2.0 * heads * tokens * (tokens + 1) / 2 * 2 * dim * self.element / 2
        return {
            "forward_tflops": products / max(forward - tiny, forward / 10) / 1e12,
            "backward_tflops": BACKWARD_WORK * products / max(both - forward - tiny, forward / 10) / 1e12,
            "call_us": tiny * 1e6,
        }

    def overlap(self) -> float:
        """Returns the share of the shorter of an exchange and a kernel that prolongs the longer one: 0 to 1."""
        import torch

        from torch_frontend import attention
        from torch_frontend.context_parallel.exchange import exchanges

        tokens, heads, kv_heads, dim = ROW[self.kind]
        q, k, v = (self._heads(tokens, each, dim) for each in (heads, kv_heads, kv_heads))

        def compute() -> Any:
            with torch.no_grad():
                return attention(q, k, v, causal=True)

        alone = self._seconds(compute)
        # About as long as the kernel: then an error of either time is the smallest part of the answer.
        tensor = self._numbers(2**16).view(1, -1, 1, 1)
        while tensor.numel() < 2**27 and self._seconds(self._gathering(tensor)) < alone / 2:
            tensor = self._numbers(tensor.numel() * self.element * 4).view(1, -1, 1, 1)
        sending = self._seconds(self._gathering(tensor))

        def together() -> None:
            pending = exchanges.gather(self.axis, [tensor])
            compute()
            pending.wait()

        more = self._seconds(together) - max(alone, sending)
        return min(1.0, max(0.0, more / min(alone, sending)))

    def host(self) -> dict[str, Any]:
        """Returns the microseconds in which the host launches the parts of a call, and the factor of a backward."""
        from attn_core.cli.measure_host import host_figures, host_times

        # On a CPU a rank waits for the processes of other ranks within a call, and does not launch meanwhile. On a GPU
        # nothing waits before the end of a turn, and torch launches a backward from another thread.
        clock = time.thread_time if self.kind == "cpu" else time.perf_counter
        return host_figures(host_times(self._heads, ROW[self.kind][1:], partial(self._seconds, clock=clock)))

    def _gathering(self, tensor: Any) -> Run:
        from torch_frontend.context_parallel.exchange import exchanges

        return lambda: exchanges.gather(self.axis, [tensor]).wait()

    def _numbers(self, size: float) -> Any:
        """Returns a flat tensor of about ``size`` bytes. Not zeros: on these a GPU draws less power and is faster."""
        import torch

        return torch.rand(max(1, int(size) // self.element), device=self.kind).to(self.dtype)

    def _heads(self, tokens: int, heads: int, dim: int) -> Any:
        import torch

        return torch.randn(1, tokens, heads, dim, device=self.kind).to(self.dtype)

    def _seconds(self, run: Run, clock: Clock = time.perf_counter) -> float:
        """Returns the median seconds of a call by a clock, on the slowest rank."""
        import torch.distributed as dist

        for _ in range(2):
            run()
        calls = max(1, min(200, int(TURN / max(self._turn(run, 1, clock), 1e-6))))
        times = [self._turn(run, calls, clock) for _ in range(REPEATS)]
        dist.barrier()
        return statistics.median(times)

    def _turn(self, run: Run, calls: int, clock: Clock) -> float:
        import torch
        import torch.distributed as dist

        dist.barrier()
        self._synchronise()
        began = clock()
        for _ in range(calls):
            run()
        self._synchronise()
        seconds = torch.tensor((clock() - began) / calls, dtype=torch.float64, device=self.kind)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds)

    def _synchronise(self) -> None:
        import torch

        if self.kind == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
