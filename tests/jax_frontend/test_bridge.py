"""Tests the bridge itself: tokens, threads, errors inside a callback, memory, and side effects."""

import gc
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import cpu_meshes
import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
import torch
from own_process import in_its_own_process

from attn_core import AttentionSpec, Target, backends
from attn_core.call.tensors import Inputs
from attn_core.context_parallel.call import build_call
from attn_core.context_parallel.on_torch import step as step_torch
from attn_core.context_parallel.on_torch import tiles
from jax_frontend import attention
from jax_frontend.bridge import bridged_call, bridged_run, targets

SPEC = AttentionSpec(
    batch=1, q_len=5, kv_len=5, num_heads=2, num_kv_heads=2, head_dim=16, value_dim=16, dtype="float32"
)
CALL = targets.BridgedCall("forward", "math", "cpu", SPEC, ("q", "k", "v"))


def test_a_token_is_short_and_equal_in_every_process():
    token = targets.token_of(CALL)
    assert len(token) == targets.TOKEN_LENGTH == 7, "tvm-ffi keeps 7 characters inside the value, and frees longer ones"
    assert token == targets.token_of(CALL) != targets.token_of(CALL._replace(backend="flex"))
    script = (
        "from attn_core import AttentionSpec; from jax_frontend.bridge import targets\n"
        f"print(targets.token_of(targets.BridgedCall('forward', 'math', 'cpu', {SPEC!r}, ('q', 'k', 'v'))))"
    )
    for seed in ("0", "1"):
        actual = in_its_own_process(script, PYTHONHASHSEED=seed)
        assert actual.stdout.strip() == token, actual.stderr


def test_two_calls_never_share_a_token(monkeypatch):
    token = targets.token_of(CALL)
    other = targets.token_of(CALL._replace(backend="flex"))
    monkeypatch.setitem(targets._calls, token, targets._calls[other])
    salted = targets.token_of(CALL)
    assert salted not in (token, other) and salted == targets.token_of(CALL)
    monkeypatch.delitem(targets._calls, salted)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_kernel_beside_an_exchange_gives_it_a_head_start(monkeypatch, replace_fields, direction):
    order, math = [], backends.load("math", "cpu")
    kernel = getattr(math, direction)
    monkeypatch.setattr(tiles, "head_start", lambda device: order.append(str(device)))
    replace_fields(math, **{direction: lambda *given: [order.append("kernel"), kernel(*given)][1]})
    q, out, lse = torch.ones(1, 5, 2, 16), torch.empty(1, 5, 2, 16), torch.zeros(1, 2, 5)
    gradients = [torch.empty_like(q) for _ in range(3)]
    values = (q, q, q, out, lse) if direction == "forward" else (q, q, q, q, lse, q, *gradients)
    extras = () if direction == "forward" else ("out", "lse", "dout")
    call = CALL._replace(direction=direction, extras=extras)
    targets._callback(targets.token_of(call))(values)
    assert order == ["kernel"]
    targets._callback(targets.token_of(call._replace(overlaps_exchange=True)))(values)
    assert order == ["kernel", "cpu", "kernel"]


def test_a_step_of_context_parallelism_waits_only_in_parts_that_compute(monkeypatch):
    """A contiguous causal row over two parts: in the second step the first part sees none of the other part's keys."""
    started = []
    monkeypatch.setattr(tiles, "head_start", lambda device: started.append(str(device)))
    spec = replace(SPEC, q_len=10, kv_len=10, causal=True, return_lse=True)
    call = build_call(spec, None, "ring", "contiguous", (2,), 1, Target("jax", "cpu"), ("math",))
    step = bridged_call.BridgedStep(step_torch.StepCall(call, 1, stacked=False), "cpu", True)
    q, out, lse = torch.ones(1, 5, 2, 16), torch.full((1, 5, 2, 16), 7.0), torch.zeros(1, 2, 5)
    scratch = torch.empty(step.step.scratch("cpu")), torch.empty(lse.numel())
    run = bridged_run.run_of(step)
    for part, computes in ((0, False), (1, True)):
        run((q, q, q, out, lse, torch.tensor(part), out, lse, *scratch, "token"))
        assert started == ["cpu"] * computes and bool((out == 7).all()) != computes


def test_results_do_not_alias_and_inputs_are_not_written():
    q = jnp.asarray(np.random.default_rng(0).standard_normal((1, 5, 2, 16)), jnp.float32)
    before = np.asarray(q).copy()
    call = jax.jit(partial(attention, causal=True, backend="sdpa_flash"))
    first = np.asarray(call(q, q, q)).copy()
    kept = call(q, q, q)
    call(q * 2, q, q)
    assert np.array_equal(np.asarray(kept), first) and np.array_equal(np.asarray(q), before)


def test_repeated_calls_keep_no_memory_and_register_nothing():
    q = jnp.ones((1, 5, 2, 16))
    call = jax.jit(jax.value_and_grad(lambda x: attention(x, x, x, causal=True, backend="sdpa_flash").sum()))
    for _ in range(500):
        call(q)[0].block_until_ready()
    known, process = len(targets._calls), psutil.Process()
    before = process.memory_info().rss
    for _ in range(10_000):
        call(q)[0].block_until_ready()
    assert process.memory_info().rss - before < 2 * 2**20
    assert len(targets._calls) == known and targets._register_targets.cache_info().currsize == 1


def softcapped(softcap):
    return jax.jit(partial(attention, causal=True, softcap=softcap, backend="math"))


def test_programs_outlive_their_cached_callbacks(monkeypatch):
    """There are more programs than cached callbacks. They run in turn, and each finds its own call again."""
    monkeypatch.setattr(targets, "_callbacks", {})
    monkeypatch.setattr(targets, "CALLBACKS", 3)
    q = jnp.asarray(np.random.default_rng(2).standard_normal((1, 5, 2, 16)), jnp.float32)
    programs = [softcapped(1.0 + at) for at in range(7)]
    expected = [np.asarray(program(q, q, q)) for program in programs]
    assert len({result.tobytes() for result in expected}) == len(programs)
    for _ in range(3):
        for program, result in zip(programs, expected, strict=True):
            assert np.array_equal(np.asarray(program(q, q, q)), result)
            assert len(targets._callbacks) == 3


def test_the_cache_of_callbacks_is_bounded_under_threads(monkeypatch):
    monkeypatch.setattr(targets, "_callbacks", {})
    tokens = [targets.token_of(CALL._replace(spec=replace(SPEC, softcap=2.0 + at))) for at in range(1500)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: list(map(targets._callback, tokens)), range(4)))
    assert len(targets._callbacks) <= 1024


def documents_step(at):
    """A step of context parallelism over documents that depend on ``at``: a plan of many tiles."""
    offsets = (0, *(100 * each + at for each in range(1, 9)), 1024)
    row = replace(SPEC, q_len=1024, kv_len=1024, causal=True, return_lse=True, documents=9)
    row = replace(row, max_len_q=1024, max_len_k=1024)
    call = build_call(row, offsets, "ring", "zigzag", (4,), 1, Target("jax", "cpu"), ("math",))
    return bridged_call.BridgedStep(step_torch.StepCall(call, 1, stacked=False), "cpu", False)


def softcapped_call(at):
    return CALL._replace(spec=replace(SPEC, softcap=0.5 / (at + 1)))


@pytest.mark.parametrize(("make", "most"), [(softcapped_call, 600), (documents_step, 3000)])
def test_the_stored_description_of_a_call_is_small_and_complete(make, most):
    """The description stays for ever, because nothing tells when the last program with its token is gone: it may be
    a file."""
    tokens = [targets.token_of(make(at)) for at in range(4)]
    assert len(set(tokens)) == 4
    assert all(len(pickle.dumps(targets._calls[token])) < most for token in tokens)
    assert [targets.call_of(token) for token in tokens] == [make(at) for at in range(4)]


def test_threads_get_their_own_results():
    arrays = [jnp.asarray(np.random.default_rng(i).standard_normal((1, 5, 2, 16)), jnp.float32) for i in range(8)]
    call = jax.jit(partial(attention, causal=True, backend="sdpa_flash"))
    expected = [np.asarray(call(a, a, a)) for a in arrays]

    def is_right(index):
        return all(np.array_equal(np.asarray(call(*(arrays[index],) * 3)), expected[index]) for _ in range(200))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(is_right, range(8))) == [True] * 8


def test_traced_offsets_are_checked_before_anything_is_read():
    x = jnp.ones((7, 2, 16))

    @jax.jit
    def call(x, offsets):
        return attention(x, x, x, causal=True, seq_info=(None, offsets, 7), backend="sdpa_flash")

    assert call(x, jnp.asarray([0, 3, 7], jnp.int32)).shape == x.shape
    for lie in ([0, 3, 9], [0, 5, 3], [1, 3, 7]):
        # jaxlib chooses between the two error types
        with pytest.raises((ValueError, RuntimeError), match="cu_seqlens_q"):
            call(x, jnp.asarray(lie, jnp.int32)).block_until_ready()


def test_the_callers_torch_state_does_not_reach_the_callback():
    q = jnp.asarray(np.random.default_rng(1).standard_normal((1, 5, 2, 16)), jnp.float32)
    call = jax.jit(partial(attention, causal=True, softcap=5.0, backend="math"))
    expected = np.asarray(call(q, q, q))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        assert np.array_equal(np.asarray(call(q, q, q)), expected)


def test_the_kernel_reads_xla_buffers_without_a_copy(replace_fields):
    seen = []
    record = backends.load("math")
    original = record.forward

    def spy(spec, inputs):
        seen.append([tensor.data_ptr() for tensor in inputs[:3]])
        return original(spec, inputs)

    replace_fields(record, forward=spy)
    arrays = [jnp.full((1, 5, 2, 16), float(i)) for i in range(3)]
    spec_call = targets.BridgedCall("forward", "math", "cpu", SPEC, ("q", "k", "v"))
    shapes = (jax.ShapeDtypeStruct(SPEC.out_shape, jnp.float32), jax.ShapeDtypeStruct(SPEC.lse_shape, jnp.float32))
    jax.jit(lambda *a: targets.run(spec_call, shapes, *a))(*arrays)[0].block_until_ready()
    assert seen == [[a.unsafe_buffer_pointer() for a in arrays]]
    assert isinstance(Inputs(*arrays).q, jax.Array)


@pytest.mark.parametrize("holder", ["a cycle of references", "another thread", "somebody for good"])
def test_a_kernel_may_hold_its_operands_a_little_longer(replace_fields, holder):
    """XLA fails a call whose buffers are held. A compiler leaves cycles, and a thread is late."""
    record, held = backends.load("math", "cpu"), []
    forward = record.forward

    def holding(spec, inputs):
        kept = [inputs.q.detach()]
        if holder == "a cycle of references":
            kept.append(kept)
        else:
            held.append(kept)
        if holder == "another thread":
            threading.Timer(0.01, held.clear).start()
        return forward(spec, inputs)

    replace_fields(record, forward=holding)
    q = jnp.ones((1, 3, 2, 8))
    program = jax.jit(partial(attention, backend="math", scale=0.123))
    gc.disable()
    try:
        if holder == "somebody for good":
            with pytest.raises(jax.errors.JaxRuntimeError, match="Leaked"):
                program(q, q, q).block_until_ready()
        else:
            np.testing.assert_array_equal(program(q, q, q), q)
    finally:
        gc.enable()
        held.clear()


def test_several_devices_of_one_process(four_devices):
    call = jax.jit(partial(attention, causal=True, backend="sdpa_flash"))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 33, 2, 16)), jnp.float32)
    expected = np.asarray(call(x, x, x))
    by_device = [jax.device_put(x, device) for device in cpu_meshes.devices()]
    assert len(by_device) == 4
    for _ in range(20):
        for out in [call(y, y, y) for y in by_device]:
            assert np.array_equal(np.asarray(out), expected)


def test_a_process_may_end_while_calls_are_pending():
    script = """
import jax, jax.numpy as jnp
from jax_frontend import attention
call = jax.jit(lambda x: attention(x, x, x, softcap=3.0, backend="math") + 1)
x = jnp.ones((1, 512, 4, 64))
call(x).block_until_ready()
for _ in range(20):
    call(x)  # nobody waits for these
"""
    actual = in_its_own_process(script)
    assert (actual.returncode, actual.stderr) == (0, "")


def test_without_torch_jax_runs_its_own_attention():
    script = """
import sys

class Absent:
    def find_spec(self, name, *rest):
        if name.partition(".")[0] in ("torch", "jax_tvm_ffi", "tvm_ffi"):
            raise ImportError(f"{name} is not installed")

sys.meta_path.insert(0, Absent())
import jax, jax.numpy as jnp
from jax_frontend import attention, available_backends, explain
x = jnp.ones((1, 5, 2, 8))
chosen = explain(x, x, x, causal=True)
assert chosen.backend == "jax_xla" and "torch is not installed" in str(chosen), chosen
assert "torch is not installed" in available_backends()["math"].reason
assert jax.jit(jax.grad(lambda x: attention(x, x, x, causal=True, softcap=3.0).sum()))(x).shape == x.shape
print("ok")
"""
    actual = in_its_own_process(script)
    assert actual.stdout.strip() == "ok", actual.stderr
