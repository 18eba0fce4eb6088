"""The calls of ``benchmarks.soak`` in JAX under ``jax.jit``: new offsets, pages, masks and values for a few compiled
programs, and one new program in each block.

JAX keeps every program that it has compiled, without a limit. So ``jax.clear_caches()`` runs in every CLEARING-th
reading, whose memory is compared; the programs of the other calls then compile again. Compiling does not count in the
time of a call.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.soak_calls import HEADS, LONGEST
from jax_frontend import PagedKVCache, SeqInfo, attention

CLEARING = 8
DTYPES = {"cpu": ("float32",), "cuda": ("bfloat16",)}
DIMS = {"cpu": (8, 16, 32), "cuda": (64, 128)}
DOCUMENTS, SEQUENCES, PAGE = 6, 4, 16
"""The most packed documents; the sequences of the cache; the tokens of a page."""


class JitCalls:
    """Draws and runs calls of ``jax_frontend`` under ``jax.jit``; arguments and attributes as in ``EagerCalls``, but
    ``programs`` counts the new ones."""

    def __init__(self, device: str, seed: int = 0, kinds: tuple[str, ...] = (), repeat: int | None = None) -> None:
        self.device, self.random, self.repeat = device, Random(seed), repeat
        self.programs, self.cold, self.last = 0, True, list[Any]()
        self.tokens = LONGEST[device] * 2
        self.width = 8
        shares = {"dense": 80, "mask": 60, "packed": 200, "packed training": 60, "training": 40, "pages": 60}
        self.block = [kind for kind, share in shares.items() for _ in range(share) if not kinds or kind in kinds]
        numbers = np.random.default_rng(seed).standard_normal((2**17,), np.float32)
        self.numbers = numbers.astype(jnp.dtype(DTYPES[device][0]))
        heads, kv_heads, dim = 4, 2, 64
        self.rows = [
            [self.array(2, self.tokens // 2, number, dim) for number in (heads, kv_heads, kv_heads)] for _ in range(4)
        ]
        self.long = [[self.array(self.tokens, number, dim) for number in (heads, kv_heads, kv_heads)] for _ in range(4)]
        self._compile()
        self._fixed = jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, implementation="xla"))
        self._start_cache()

    def _compile(self) -> None:
        causal = partial(attention, causal=True)

        def packed(q: Any, k: Any, v: Any, info: Any) -> Any:
            return causal(q, k, v, seq_info=info)

        def total(call: Any) -> Any:
            return lambda *arguments: call(*arguments).astype(jnp.float32).sum()

        self._dense_program = jax.jit(causal)
        self._mask_program = jax.jit(lambda q, k, v, mask: attention(q, k, v, mask=mask))
        self._packed_program = jax.jit(packed)
        self._packed_gradients = jax.jit(jax.grad(total(packed), (0, 1, 2)))
        self._gradients = jax.jit(jax.grad(total(causal), (0, 1, 2)))

    def begin(self, number: int) -> int:
        """Begins a block with a program of a new shape; returns the number of its calls."""
        if self.repeat is not None:
            self.random.seed(number % self.repeat)
            self._start_cache()
        self._new_program()
        self.programs += 1
        compiled = 1
        if self.cold:
            for kind in sorted(set(self.block)):
                self.run(kind)
                compiled += 1
            self.calibrate()
            self.cold = False
        self.wait()
        return compiled

    def settle(self, reading: int) -> bool:
        """Clears JAX's caches before some readings; returns whether it did."""
        if reading % CLEARING:
            return False
        self.last.clear()
        jax.clear_caches()
        self.cold = True
        return True

    def run(self, kind: str) -> Any:
        """Draws and runs one call."""
        result = getattr(self, f"_{kind.replace(' ', '_')}")()
        self.last[:] = [result]
        return result

    def calibrate(self) -> None:
        """A fixed piece of work for JAX and for the interpreter, whose time says how fast the machine is now."""
        for _ in range(10):
            self.last[:] = [self._fixed(*self.rows[0])]
        table = {(number, str(number)): [number] * 4 for number in range(300)}
        sorted(table, key=lambda key: key[1])

    def wait(self) -> None:
        """Waits for the device."""
        jax.block_until_ready(self.last)

    # Values

    def array(self, *shape: int) -> Any:
        """Random numbers in a new array."""
        size = int(np.prod(shape))
        start = self.random.randint(0, len(self.numbers) // 2)
        return jnp.asarray(np.resize(self.numbers[start:], size).reshape(shape))

    def info(self) -> Any:
        """Documents of new lengths, as many tokens as fit; the shape of the offsets and the maximum are fixed."""
        longest, lengths = self.tokens // DOCUMENTS, list[int]()
        for _ in range(self.random.randint(1, DOCUMENTS)):
            lengths.append(self.random.randint(1, longest))
        return SeqInfo.from_lengths(lengths, array=jnp.asarray, max_len=longest, max_documents=DOCUMENTS)

    # Kinds of call

    def _new_program(self) -> Any:
        random, longest = self.random, LONGEST[self.device]
        heads, kv_heads = random.choice(HEADS[self.device])
        batch, q_len, kv_len, dim = (
            *(random.randint(1, 3), random.randint(1, longest)),
            *(random.randint(1, longest), random.choice(DIMS[self.device])),
        )
        q = self.array(batch, q_len, heads, dim)
        k, v = (self.array(batch, kv_len, kv_heads, dim) for _ in range(2))
        program = jax.jit(partial(attention, causal=random.random() < 0.5, return_lse=random.random() < 0.3))
        self.last[:] = [program(q, k, v)]

    def _dense(self) -> Any:
        return self._dense_program(*self.random.choice(self.rows))

    def _mask(self) -> Any:
        shape = (2, 1, self.tokens // 2, self.tokens // 2)
        mask = np.frombuffer(self.random.randbytes(shape[-1] ** 2 * 2), np.uint8).reshape(shape) > 80
        return self._mask_program(*self.random.choice(self.rows), mask)

    def _packed(self) -> Any:
        return self._packed_program(*self.random.choice(self.long), self.info())

    def _packed_training(self) -> Any:
        return self._packed_gradients(*self.random.choice(self.long), self.info())

    def _training(self) -> Any:
        return self._gradients(*self.random.choice(self.rows))

    def _start_cache(self) -> None:
        place: dict[str, Any] = {"dtype": jnp.dtype(DTYPES[self.device][0])}
        self.cache = PagedKVCache(
            num_layers=1, num_pages=8 * SEQUENCES, page_size=PAGE, kv_heads=2, head_dim=64, **place
        )
        self.names, self.started = deque[int](), 0
        for _ in range(SEQUENCES):
            self._add()

    def _add(self) -> None:
        self.started += 1
        self.cache.add(self.started)
        self.names.append(self.started)

    def _pages(self) -> Any:
        """One step of decoding. Now and then a sequence ends and another one starts, so pages change their owners."""
        if self.random.random() < 0.3 or self.cache.allocator.length(self.names[0]) >= 4 * PAGE:
            self.cache.free(self.names.popleft())
            self._add()
        step = self.cache.step(tuple(self.names), 1, width=self.width)
        q, k, v = self.random.choice(self.long)
        self.cache.update(0, k[:SEQUENCES], v[:SEQUENCES], step)
        return self.cache.attend(0, q[:SEQUENCES], step)
