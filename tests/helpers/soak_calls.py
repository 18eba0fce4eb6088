"""The calls of ``soak``: every size, option, offset and page is drawn anew for each call."""

from __future__ import annotations

import warnings
from collections import deque
from random import Random
from typing import Any

import torch
import torch.nn.functional as functional

import torch_frontend
from attn_core.errors import LayoutWarning
from torch_frontend import PagedKVCache, SeqInfo, attention, attention_qkvpacked, use_backend

Tensor = torch.Tensor

DTYPES = {"cpu": (torch.float32, torch.float32, torch.bfloat16), "cuda": (torch.bfloat16, torch.bfloat16)}
HEADS = {"cpu": ((1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (4, 4), (6, 2)), "cuda": ((4, 4), (8, 2))}
DIMS = {"cpu": (8, 16, 24, 32, 64), "cuda": (64, 128)}
LONGEST = {"cpu": 48, "cuda": 512}
"""The longest rows. Few heads and widths on a GPU, because some backends compile for seconds for each of them."""
SOFTCAPS = {"cpu": None, "cuda": (20.0, 50.0)}
"""None: any number. On a GPU two, because FlashAttention-4 compiles a kernel for each."""
SEQUENCES = 6
"""Sequences in a cache of pages at one time."""


class EagerCalls:
    """Draws and runs calls of ``torch_frontend``.

    Args:
        kinds: only these kinds of call; all if empty.
        repeat: draw the same calls again after this many blocks. Caches fill within a few thousand calls then.

    Attributes:
        block: the kinds of call, each as often as a block of calls has it. Blocks are alike, so that their times are.
        programs: the compiled programs that a reading must account for; none here.
    """

    def __init__(self, device: str, seed: int = 0, kinds: tuple[str, ...] = (), repeat: int | None = None) -> None:
        self.device, self.random, self.repeat, self.programs = device, Random(seed), repeat, 0
        torch.manual_seed(seed)
        # Python remembers each text that it warned with, and this one has the shapes.
        warnings.simplefilter("ignore", LayoutWarning)
        sizes = 2**18 if device == "cpu" else 2**24
        self.pools = {dtype: torch.randn(sizes, dtype=dtype, device=device) for dtype in {*DTYPES[device]}}
        self.bits = torch.rand(sizes, device=device) > 0.3
        self.slopes = torch.rand(64, device=device)
        self.generator = torch.Generator()
        self.cache, self.names, self.started = self._new_cache(), deque[int](), 0
        shares = {
            **{"plain": 3, "options": 3, "mask": 2, "bias": 2, "per head": 2, "packed": 3, "training": 3},
            **{"packed training": 1, "pages": 3, "layout": 1, "packed qkv": 1, "override": 1, "refusal": 1},
        }
        if device == "cuda":  # FlexAttention would run some of these, and compiles for seconds
            shares |= {"override": 0, "bias": 1}
        self.block = [kind for kind, share in shares.items() for _ in range(share) if not kinds or kind in kinds]
        self._fixed = [torch.randn(2, 4, 64, 32, device=device) for _ in range(3)]

    def begin(self, number: int) -> int:
        """Begins a block; returns the number of calls that this took."""
        if self.repeat is not None:
            self.random.seed(number % self.repeat)
            self.cache, self.names, self.started = self._new_cache(), deque(), 0
        return 0

    def settle(self, reading: int) -> bool:
        """Nothing is kept that a reading should not see."""
        return True

    def run(self, kind: str) -> Any:
        """Draws and runs one call."""
        return getattr(self, f"_{kind.replace(' ', '_')}")()

    def calibrate(self) -> None:
        """A fixed piece of work for torch and for the interpreter, whose time says how fast the machine is now."""
        for _ in range(10):
            functional.scaled_dot_product_attention(*self._fixed)
        table = {(number, str(number)): [number] * 4 for number in range(300)}
        sorted(table, key=lambda key: key[1])

    def wait(self) -> None:
        """Waits for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    # Values

    def length(self) -> int:
        return self.random.randint(1, LONGEST[self.device])

    def tensor(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A view of random numbers: 16-byte aligned, as the allocator of torch gives it."""
        size, pool = torch.Size(shape).numel(), self.pools[dtype]
        start = 64 * self.random.randint(0, (len(pool) - size) // 64)
        return pool[start : start + size].view(shape)

    def qkv(self, batch: int = 0, q_len: int = 0, kv_len: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of new sizes; packed without a batch."""
        random, dtype = self.random, self.random.choice(DTYPES[self.device])
        heads, kv_heads = random.choice(HEADS[self.device])
        dim, lead = random.choice(DIMS[self.device]), (batch,) if batch else ()
        q = self.tensor(*lead, q_len, heads, dim, dtype=dtype)
        return q, *(self.tensor(*lead, kv_len, kv_heads, dim, dtype=dtype) for _ in range(2))

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.qkv(self.random.randint(1, 3), self.length(), self.length())

    def options(self) -> dict[str, Any]:
        """Options of new values."""
        random = self.random
        options: dict[str, Any] = {"causal": random.random() < 0.5, "return_lse": random.random() < 0.3}
        options["alignment"] = random.choice(("bottom_right", "top_left"))
        if random.random() < 0.3:
            options["window"] = (random.randint(0, 40), random.choice((0, 3, None)))
        caps = SOFTCAPS[self.device]
        if random.random() < 0.2:
            options["softcap"] = random.choice(caps) if caps else random.uniform(5, 60)
        if random.random() < 0.3 and not caps:
            options["scale"] = random.uniform(0.05, 0.5)
        if random.random() < 0.1 and self.device == "cpu":
            options |= {"dropout": random.uniform(0.05, 0.5), "dropout_rng": self.generator}
        return options

    def lengths(self) -> list[int]:
        return [self.random.randint(1, LONGEST[self.device] // 2) for _ in range(self.random.randint(1, 5))]

    def packed(self) -> tuple[tuple[Tensor, Tensor, Tensor], SeqInfo]:
        lengths = self.lengths()
        on_host = self.device == "cpu" and self.random.random() < 0.5
        # Offsets of numpy, or a tensor.
        info = SeqInfo.from_lengths(lengths, array=None if on_host else self._offsets)
        return self.qkv(0, sum(lengths), sum(lengths)), info

    def _offsets(self, offsets: Any) -> Tensor:
        return torch.from_numpy(offsets).to(self.device)

    # Kinds of call

    @torch.no_grad()
    def _plain(self) -> Any:
        return attention(*self.rows(), causal=self.random.random() < 0.5)

    @torch.no_grad()
    def _options(self) -> Any:
        return attention(*self.rows(), **self.options())

    def _table_shape(self, q: Tensor, k: Tensor) -> tuple[int, ...]:
        sizes = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        return *(self.random.choice((1, size)) for size in sizes[:3]), sizes[3]

    @torch.no_grad()
    def _mask(self) -> Any:
        q, k, v = self.rows()
        shape = self._table_shape(q, k)
        mask = self.bits[: torch.Size(shape).numel()].view(shape)
        return attention(q, k, v, mask=mask, causal=self.random.random() < 0.3)

    @torch.no_grad()
    def _bias(self) -> Any:
        q, k, v = self.rows()
        return attention(q, k, v, bias=self.tensor(*self._table_shape(q, k), dtype=q.dtype))

    @torch.no_grad()
    def _per_head(self) -> Any:
        q, k, v = self.rows()
        name = self.random.choice(("alibi_slopes", "sinks"))
        values = self.slopes[: q.shape[2]]
        return attention(q, k, v, **{name: values if name == "alibi_slopes" else values.to(q.dtype)}, causal=True)

    @torch.no_grad()
    def _packed(self) -> Any:
        qkv, info = self.packed()
        window = self.random.choice((None, self.random.randint(1, 40)))
        return attention(*qkv, seq_info=info, causal=True, window=window)

    def _gradients(self, qkv: tuple[Tensor, ...], **options: Any) -> Any:
        leaves = [tensor.detach().requires_grad_() for tensor in qkv]
        out = attention(*leaves, **options)
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    def _training(self) -> Any:
        qkv, table = self.rows(), {}
        if self.random.random() < 0.3:
            shape = self._table_shape(*qkv[:2])
            table["mask"] = self.bits[: torch.Size(shape).numel()].view(shape)
        return self._gradients(qkv, causal=self.random.random() < 0.5, **table)

    def _packed_training(self) -> Any:
        qkv, info = self.packed()
        return self._gradients(qkv, seq_info=info, causal=True)

    def _new_cache(self) -> PagedKVCache:
        place: dict[str, Any] = {"dtype": DTYPES[self.device][0], "device": self.device}
        return PagedKVCache(num_layers=1, num_pages=64, page_size=16, kv_heads=2, head_dim=64, **place)

    @torch.no_grad()
    def _pages(self) -> Any:
        """One step of a cache: a sequence starts, ends, is forked or is read on, and everything is in its pages."""
        random = self.random
        if random.random() < 0.002:  # the old cache must go with its tables
            self.cache, self.names = self._new_cache(), deque()
        cache = self.cache
        if len(self.names) == SEQUENCES:
            cache.free(self.names.popleft())
        self.started += 1
        if self.names and random.random() < 0.3:
            cache.fork(self.names[-1], self.started)
        else:
            cache.add(self.started)
        self.names.append(self.started)
        new = [random.randint(1, 20) if name == self.started else 1 for name in self.names]
        step = cache.step(tuple(self.names), new)
        dtype, tokens = DTYPES[self.device][0], sum(new)
        cache.update(0, *(self.tensor(tokens, 2, 64, dtype=dtype) for _ in range(2)), step)
        return cache.attend(0, self.tensor(tokens, 4, 64, dtype=dtype), step)

    @torch.no_grad()
    def _layout(self) -> Any:
        q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in self.rows())
        if self.random.random() < 0.5 and q.shape[1] == k.shape[1]:
            return torch_frontend.scaled_dot_product_attention(q, k, v)
        return attention(q, k, v, causal=True, layout="bhsd")

    @torch.no_grad()
    def _packed_qkv(self) -> Any:
        heads, dtype = self.random.choice(HEADS[self.device])[0], DTYPES[self.device][0]
        sizes = (self.random.randint(1, 3), self.length(), 3, heads, self.random.choice(DIMS[self.device]))
        return attention_qkvpacked(self.tensor(*sizes, dtype=dtype), causal=True)

    @torch.no_grad()
    def _override(self) -> Any:
        with use_backend("math"):
            return attention(*self.rows(), causal=True)

    def _refusal(self) -> Any:
        """An error, and the explanation of a choice: both make texts that nothing may keep."""
        q, k, v = self.rows()
        try:
            return attention(q, k[:, :-1], v, scale=self.random.random())
        except torch_frontend.NoBackendError:
            raise
        except ValueError:
            return str(torch_frontend.explain(q, k, v, causal=True))
