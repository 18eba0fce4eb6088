"""Kernels that add one logit per head to the softmax of a finished forward, and sum its gradient.

This module imports the CuTe DSL, so others import it only when they run. Upstream: nvidia-cutlass-dsl 4.8.
"""

# No "from __future__ import annotations": the DSL reads the annotations of its functions.
import cutlass
from cutlass import Float32, cute

LANES = 32
"""Threads of a warp."""
WARPS = 8
WIDTH = 4
"""Channels that a thread reads at once: 8 bytes. Head dimensions are multiples of 8."""
ROWS = 8
"""Rows of queries that a warp of ``SinkGradient`` sums one after the other."""


class AddSinks:
    """The forward's kernel: a warp scales one row of the output in place, and writes the row's log-sum-exp."""

    @cute.jit
    def __call__(self, out, lse, sinks, new_lse, stream):  # type: ignore[no-untyped-def]
        """Launches the kernel.

        Args:
            out: ``[batch, q_len, heads, dim]``, packed ``[tokens, heads, dim]``; scaled in place.
            lse: float32 ``[batch, heads, q_len]``, packed ``[heads, tokens]``: without sinks.
            sinks: float32 ``[heads]``.
            new_lse: as lse; receives the log-sum-exp with sinks, -inf in a row that sees no key.
        """
        rows = cute.size(lse)
        blocks = (rows + WARPS - 1) // WARPS
        self.kernel(out, lse, sinks, new_lse).launch(grid=[blocks, 1, 1], block=[WARPS * LANES, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, out, lse, sinks, new_lse):  # type: ignore[no-untyped-def]
        """Scales a row by exp(lse - new lse), the share of the weights that its keys keep beside the sink."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = thread // LANES
        lane = thread - warp * LANES
        row = block * WARPS + warp
        if row < cute.size(lse):
            head, of_out, of_lse = places(out, row)
            single, sink = lse[of_lse], sinks[head]
            total = logaddexp(single, sink)
            # Of a row that sees no key the share would be exp(-inf - sink), and it has output 0 already. But with a
            # sink of -inf, too, it would be exp(-inf + inf), which is NaN.
            share = Float32(cutlass.select_(single == -Float32.inf, Float32(0.0), cute.math.exp(single - total)))
            row_of_out = out[(*of_out, None)]
            for channel in cutlass.range(lane * WIDTH, row_of_out.shape[0], LANES * WIDTH):
                few = channels(row_of_out, channel)
                few.store((few.load().to(Float32) * share).to(out.element_type))
            if lane == 0:  # all lanes have the same number
                new_lse[of_lse] = Float32(cutlass.select_(single == -Float32.inf, single, total))


class SinkGradient:
    """The backward's first kernel: a warp sums ROWS rows of a head, in order, and writes its sum."""

    def __init__(self, with_dlse: bool) -> None:
        self.with_dlse = with_dlse

    @cute.jit
    def __call__(self, out, lse, dout, dlse, sinks, sums, stream):  # type: ignore[no-untyped-def]
        """Launches the kernel.

        Args:
            out, dout: ``[batch, q_len, heads, dim]``, packed ``[tokens, heads, dim]``; out with sinks.
            lse, dlse: float32 ``[batch, heads, q_len]``, packed ``[heads, tokens]``; lse with sinks; dlse may be None.
            sinks: float32 ``[heads]``.
            sums: float32 ``[heads, batch, q_len / ROWS rounded up]``, packed with a batch of 1.
        """
        parts = cute.size(sums)
        blocks = (parts + WARPS - 1) // WARPS
        self.kernel(out, lse, dout, dlse, sinks, sums).launch(
            grid=[blocks, 1, 1], block=[WARPS * LANES, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, out, lse, dout, dlse, sinks, sums):  # type: ignore[no-untyped-def]
        """Sums -exp(sink - lse) (dout.out - dlse) over ROWS rows; the exponential is the sink's weight in a row."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = thread // LANES
        lane = thread - warp * LANES
        _, batch, groups = sums.shape
        part = block * WARPS + warp
        if part < cute.size(sums):
            # A part is a place in ``sums``, whose last axis changes fastest.
            group = part % groups
            b = part // groups % batch
            head = part // groups // batch
            tokens = lse.shape[cute.rank(lse) - 1]
            sink, total = sinks[head], Float32(0.0)
            for at in cutlass.range(ROWS):
                token = group * ROWS + at
                if token < tokens:
                    of_out, of_lse = (token, head), (head, token)
                    if cutlass.const_expr(cute.rank(out) == 4):
                        of_out, of_lse = (b, *of_out), (b, *of_lse)  # type: ignore[assignment]
                    values, gradients, product = out[(*of_out, None)], dout[(*of_out, None)], Float32(0.0)
                    # The lanes share a row's channels: each adds its own, and the warp adds the lanes' sums.
                    for channel in cutlass.range(lane * WIDTH, values.shape[0], LANES * WIDTH):
                        few = channels(values, channel).load().to(Float32)
                        few = few * channels(gradients, channel).load().to(Float32)
                        product += few.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
                    product = cute.arch.warp_reduction_sum(product)
                    if cutlass.const_expr(self.with_dlse):
                        product = product - dlse[of_lse]
                    whole = lse[of_lse]
                    weighted = product * cute.math.exp(sink - whole)
                    # A row that sees no key adds nothing, whatever its gradient is.
                    total -= Float32(cutlass.select_(whole == -Float32.inf, Float32(0.0), weighted))
            if lane == 0:
                sums[head, b, group] = total


class SumOfSinks:
    """The backward's second kernel: a warp sums the parts of a head, always in the same order."""

    @cute.jit
    def __call__(self, sums, dsinks, stream):  # type: ignore[no-untyped-def]
        """Launches the kernel. dsinks: float32 ``[heads]``; sums: of ``SinkGradient``."""
        self.kernel(sums, dsinks).launch(grid=[dsinks.shape[0], 1, 1], block=[LANES, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, sums, dsinks):  # type: ignore[no-untyped-def]
        # One warp for each head: the sums are few, and without atomics the order never changes.
        lane, _, _ = cute.arch.thread_idx()
        head, _, _ = cute.arch.block_idx()
        groups = sums.shape[2]
        total = Float32(0.0)
        for part in cutlass.range(lane, sums.shape[1] * groups, LANES, unroll=4):
            total += sums[head, part // groups, part % groups]
        total = cute.arch.warp_reduction_sum(total)
        if lane == 0:
            dsinks[head] = total


@cute.jit
def channels(row, first):  # type: ignore[no-untyped-def]
    """Returns WIDTH channels of a row, which one instruction reads or writes."""
    return cute.make_tensor((row.iterator + first).align(8), cute.make_layout(WIDTH))


@cute.jit
def places(out, row):  # type: ignore[no-untyped-def]
    """Returns the head of a row, its place in out and its place in the log-sum-exp. Heads change fastest, as in out."""
    if cutlass.const_expr(cute.rank(out) == 3):
        heads = out.shape[1]
        token = row // heads
        head = row - token * heads
        return head, (token, head), (head, token)
    tokens, heads = out.shape[1], out.shape[2]
    token = row // heads
    head = row - token * heads
    b = token // tokens
    token = token - b * tokens
    return head, (b, token, head), (b, head, token)


@cute.jit
def logaddexp(a, b):  # type: ignore[no-untyped-def]
    """Returns log(exp(a) + exp(b)); -inf if both are -inf."""
    top = Float32(cutlass.select_(a < b, b, a))
    base = Float32(cutlass.select_(top == -Float32.inf, Float32(0.0), top))
    return top + cute.math.log(cute.math.exp(a - base) + cute.math.exp(b - base))
