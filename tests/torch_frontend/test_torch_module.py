"""Tests the torch attention layer: options, packed documents, and equality with the Flax layers on the same weights."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from rotary import rope_in_jax, rope_in_torch

from attn_core import masks
from attn_core.call.key_ranges import visible_in_ranges
from attn_core.call.seq_info import SeqInfo
from attn_core.errors import DTypeError, ShapeError, SpecError
from attn_core.paged.step import Step
from torch_frontend import module
from torch_frontend.module import Attention, token_places

pytestmark = pytest.mark.sampled

BATCH, SEQ, KV_SEQ, HEADS, KV_HEADS, DIM, VALUE_DIM, FEATURES, OUT = 2, 7, 5, 6, 3, 4, 8, 13, 11
SIZES = {"num_kv_heads": KV_HEADS, "head_dim": DIM, "value_dim": VALUE_DIM, "out_features": OUT}
TOLERANCE = {"rtol": 1e-5, "atol": 5e-5}


def normal(seed, *shape, device="cpu"):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).to(device)


def as_numpy(tensor):
    return tensor.detach().cpu().numpy()


OPTIONS = [
    {},
    {"causal": True, "window": 3},
    {"window": (2, 1), "softcap": 0.7},
    {"causal": True, "alignment": "top_left", "scale": 0.8},
    {"sinks": True, "use_bias": False},
    {"rotary": rope_in_torch, "causal": True},
]


def layer_of(device="cpu", **options):
    layer = Attention(HEADS, FEATURES, **{**SIZES, "device": device, **options})
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.copy_(0.5 * normal(100 + seed, *parameter.shape))
    return layer


def flax_tree(named):
    """Torch parameters (or their gradients) by name, in the tree of the Flax layers."""
    tree = {}
    for theirs, ours, shape in (
        ("query", "q_proj", (HEADS, DIM)),
        ("key", "k_proj", (KV_HEADS, DIM)),
        ("value", "v_proj", (KV_HEADS, VALUE_DIM)),
    ):
        tree[theirs] = {"kernel": named[f"{ours}.weight"].T.reshape(FEATURES, *shape)}  # [out, in] -> [in, heads, dim]
        if f"{ours}.bias" in named:
            tree[theirs]["bias"] = named[f"{ours}.bias"].reshape(shape)
    tree["out"] = {"kernel": named["o_proj.weight"].T.reshape(HEADS, VALUE_DIM, OUT)}
    if "o_proj.bias" in named:
        tree["out"]["bias"] = named["o_proj.bias"]
    if "sink_logits" in named:
        tree["sink_logits"] = named["sink_logits"]
    return tree


def on(device):
    """A function that moves an array from the host to the device."""
    return lambda array: torch.from_numpy(array).to(device)


@pytest.mark.on_gpus(only=lambda options, packed, **_: (packed and "softcap" in options) or "sinks" in options)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "plain")
@pytest.mark.parametrize("packed", [False, True])
def test_torch_and_flax_agree_forward_and_backward(options, packed, device):
    pytest.importorskip("flax")
    import jax
    import jax.numpy as jnp
    from frameworks import jax_on

    from jax_frontend import linen

    lengths = [4, 0, 3]
    x = normal(0, *(() if packed else (BATCH,)), SEQ, FEATURES, device=device)
    layer = layer_of(device, **options)
    out = layer(x, seq_info=SeqInfo.from_lengths(lengths, array=on(device)) if packed else None)
    out.sin().sum().backward()
    params = flax_tree({name: as_numpy(parameter) for name, parameter in layer.named_parameters()})
    grads = flax_tree({name: as_numpy(parameter.grad) for name, parameter in layer.named_parameters()})

    jax_rope = {"rotary": rope_in_jax} if "rotary" in options else {}
    twin = linen.Attention(HEADS, **SIZES, **{**options, **jax_rope})

    def loss(params, x, info):
        out = twin.apply({"params": params}, x, seq_info=info)
        return jnp.sum(jnp.sin(out)), out

    with jax_on(device):
        info = SeqInfo.from_lengths(lengths, array=jnp.asarray) if packed else None
        program = jax.jit(jax.value_and_grad(loss, has_aux=True))
        (_, jax_out), jax_grads = program(params, jnp.asarray(as_numpy(x)), info)
    np.testing.assert_allclose(as_numpy(out), jax_out, **TOLERANCE)
    paths = jax.tree.leaves_with_path(jax_grads)
    for (path, actual), expected in zip(paths, jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(
            actual, expected, rtol=1e-4, atol=3e-5 if device == "cpu" else 1e-4, err_msg=jax.tree_util.keystr(path)
        )


def test_option_names_are_those_of_the_flax_layers():
    pytest.importorskip("flax")
    from jax_frontend import nnx

    of_flax = set(inspect.signature(nnx.Attention.__init__).parameters)
    of_torch = set(inspect.signature(Attention.__init__).parameters)
    initialisers = {name for name in of_flax if name.endswith("_init") and not name.startswith("__")}
    flax_only = {"deterministic", "param_dtype", "rngs", "keep_rngs"} | initialisers
    # torch has use_context_parallel
    flax_only |= {"decode", "normalize_qk", "precision"}  # options of Flax's own layers
    flax_only |= {"context_axis", "context_strategy", "context_layout", "context_length"}
    assert of_torch - {"device"} == of_flax - flax_only
    calls = [set(inspect.signature(call).parameters) for call in (Attention.forward, nnx.Attention.__call__)]
    assert calls[0] == calls[1] - {"deterministic", "rngs", "decode"}


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "plain")
def test_packed_documents_equal_separate_rows(options, device):
    lengths = [3, 0, 5, 1]
    documents = [normal(seed, 1, length, FEATURES, device=device) for seed, length in enumerate(lengths)]
    packed, layer = torch.cat(documents, dim=1), layer_of(device, **options)
    apart = torch.cat([layer(row) for row in documents if row.numel()], dim=1)
    info = SeqInfo.from_lengths(lengths)
    torch.testing.assert_close(layer(packed, seq_info=info), apart, **TOLERANCE)
    torch.testing.assert_close(layer(packed[0], seq_info=info), apart[0], **TOLERANCE)
    triple = (None, on(device)(info.cu_seqlens_q), info.max_len_q)
    torch.testing.assert_close(layer(packed, seq_info=triple), apart, **TOLERANCE)


def test_cross_attention_dense_and_packed(device):
    layer = Attention(HEADS, FEATURES, in_kv_features=17, **SIZES, device=device)
    x, context = normal(0, 5, FEATURES, device=device), normal(1, 9, 17, device=device)
    apart = torch.cat([layer(x[None, :2], context[None, :5])[0], layer(x[None, 2:], context[None, 5:])[0]])
    torch.testing.assert_close(layer(x, context, seq_info=SeqInfo.from_lengths([2, 3], [5, 4])), apart, **TOLERANCE)


def test_rotary_sees_positions_and_is_applied(device):
    calls = []

    def recording(q, k, positions):
        calls.append((tuple(q.shape), tuple(k.shape), positions.tolist()))
        return rope_in_torch(q, k, positions)

    layer, x = layer_of(device, rotary=recording), normal(0, BATCH, SEQ, FEATURES, device=device)
    counted = layer(x)
    assert calls[-1] == ((BATCH, SEQ, HEADS, DIM), (BATCH, SEQ, KV_HEADS, DIM), [list(range(SEQ))] * BATCH)
    layer(x.reshape(-1, FEATURES), seq_info=SeqInfo.from_lengths([3, 0, 10, 1]))
    assert calls[-1][2] == [[*range(3), *range(10), 0]]
    assert not torch.allclose(counted, layer_of(device)(x), atol=1e-3)
    shifted = layer(x, positions=torch.arange(SEQ, device=device) + 40)  # only differences of positions matter
    torch.testing.assert_close(shifted, counted, rtol=1e-3, atol=1e-4)
    stretched = layer(x, positions=torch.stack([torch.arange(SEQ), 2 * torch.arange(SEQ)]).to(device))
    torch.testing.assert_close(stretched[0], counted[0], **TOLERANCE)
    assert not torch.allclose(stretched[1], counted[1], atol=1e-3)
    half = Attention(HEADS, FEATURES, rotary=rope_in_torch, dtype=torch.bfloat16, **SIZES, device=device)
    assert half(x.bfloat16()).dtype == torch.bfloat16


PASSED = {
    "causal": True,
    "alignment": "top_left",
    "window": (4, 2),
    "softcap": 3.5,
    "scale": 0.125,
    "bitwise_deterministic": True,
    "backend": ("math", "sdpa_flash"),
    "dropout_rate": 0.25,
}
RANGES = masks.prefix_lm([3], SEQ)
CALLED = {
    "mask": torch.ones(SEQ, SEQ, dtype=torch.bool),
    "key_ranges": RANGES,
    "mask_mod": lambda b, h, q, k: k <= q,
    "score_mod": lambda score, b, h, q, k: score * 2,
    "bias": normal(3, SEQ, SEQ),
    "alibi_slopes": normal(4, HEADS),
}


@pytest.mark.parametrize("name", [*PASSED, *CALLED])
def test_every_option_reaches_attention(name, monkeypatch):
    seen = {}

    def recorder(q, k, v, **keywords):
        seen.update(keywords)
        return torch.zeros(*q.shape[:-1], v.shape[-1])

    monkeypatch.setattr(module, "attention", recorder)
    option = {name: PASSED[name]} if name in PASSED else {}
    call = {name: CALLED[name]} if name in CALLED else {}
    layer_of(**option)(normal(0, BATCH, SEQ, FEATURES), **call)
    keyword = {"bitwise_deterministic": "deterministic", "dropout_rate": "dropout"}.get(name, name)
    assert seen[keyword] is {**option, **call}[name]


@pytest.mark.parametrize("mode", ["training", "training without gradients", "inference"])
def test_key_ranges_hide_what_their_mask_hides(mode, device):
    layer, x = layer_of(device), normal(0, BATCH, SEQ, FEATURES, device=device)
    layer.train(mode != "inference")
    seen = torch.from_numpy(visible_in_ranges(RANGES, SEQ, HEADS)).to(device)
    assert not seen.all()
    with torch.set_grad_enabled(mode == "training"):
        results = [layer(x, key_ranges=RANGES), layer(x, mask=seen)]
    torch.testing.assert_close(*results, **TOLERANCE)
    assert not torch.allclose(results[0], layer(x), atol=1e-3)
    if mode == "training":
        gradients = [torch.autograd.grad(out.square().sum(), [*layer.parameters()]) for out in results]
        # The gradient of the keys' bias is 0 without rounding: it adds to all scores of a row.
        rounding = 1e-6 * max(float(each.abs().max()) for each in gradients[1])
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=rounding)


def test_functions_and_their_arrays(device):
    layer, x = layer_of(device), normal(0, BATCH, SEQ, FEATURES, device=device)
    of = torch.arange(SEQ, dtype=torch.int32, device=device) // 3
    results = [
        layer(x, mask_mod=lambda b, h, q, k, of: of[q] == of[k], aux=(of,)),
        layer(x, mask=of[:, None] == of[None, :]),
    ]
    torch.testing.assert_close(*results, **TOLERANCE)


def test_dropout_only_while_training(device):
    layer, x = layer_of(device, dropout_rate=0.4), normal(0, BATCH, SEQ, FEATURES, device=device)
    assert not torch.allclose(layer(x), layer(x), atol=1e-3)
    layer.eval()
    torch.testing.assert_close(layer(x), layer_of(device)(x), **TOLERANCE)


def test_sinks_are_learned(device):
    layer, x = layer_of(device, sinks=True), normal(0, BATCH, SEQ, FEATURES, device=device)
    layer(x).sum().backward()
    assert layer.sink_logits.grad.abs().min() > 0
    assert "sink_logits" in layer.state_dict() and "sink_logits" not in layer_of(device).state_dict()


def test_compiles_in_one_graph(device):
    layer, x = (
        layer_of(device, rotary=rope_in_torch, causal=True, window=3),
        normal(0, BATCH, SEQ, FEATURES, device=device),
    )
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x), **TOLERANCE)


@pytest.mark.usefixtures("scalar_inductor")
def test_compiled_positions_of_packed_tokens(device):
    """With a compiler that generates kernels: on a GPU, some compile searchsorted so that it ignores a view's start."""
    offsets = torch.tensor([0, 3, 3, 7, 9], dtype=torch.int32, device=device)  # token 9 belongs to no document
    lengths = torch.tensor([5, 0, 8, 2], dtype=torch.int32, device=device)

    def both(x, offsets, lengths):
        info = SeqInfo.unchecked(offsets, offsets, 4, 4)
        step = Step(lengths[:, None], lengths, offsets, 4)
        return module.token_positions(None, info, x), token_places(step, x[0, :, 0])

    x = torch.zeros(1, 10, HEADS, DIM, device=device)
    torch._dynamo.reset()
    for function in (both, torch.compile(both, fullgraph=True)):
        positions, places = function(x, offsets, lengths)
        assert positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0, 1, 2]]
        assert places.tolist() == [2, 3, 4, 4, 5, 6, 7, 0, 1, 2]


def test_its_text_names_its_options():
    layer = layer_of(causal=True, window=3)
    assert layer.extra_repr() == "heads=6/3, head_dim=4/8, causal, window=3"


@pytest.mark.parametrize(
    ("options", "call", "error", "words"),
    [
        ({"num_kv_heads": 4}, {}, ShapeError, "num_kv_heads=4"),
        ({"head_dim": None}, {}, ShapeError, "needs head_dim="),
        ({"window": 3}, {}, SpecError, "window=3"),
        ({"dropout_rate": -0.5}, {}, SpecError, "dropout=-0.5"),
        ({"backend": "sdpa"}, {}, SpecError, "backend='sdpa'"),
        ({}, {"positions": torch.arange(SEQ)}, SpecError, "positions: expected None"),
        ({"rotary": rope_in_torch}, {"positions": torch.arange(SEQ + 1)}, ShapeError, "positions: expected"),
        (
            {"rotary": rope_in_torch},
            {"context": normal(1, BATCH, KV_SEQ, FEATURES)},
            SpecError,
            "rotary: expected self-",
        ),
        ({}, {"context": normal(1, BATCH + 1, KV_SEQ, FEATURES)}, ShapeError, "context: expected"),
        (
            {},
            {"context": normal(1, BATCH, KV_SEQ, FEATURES + 1)},
            ShapeError,
            "context: expected the layer's 13 features",
        ),
        ({"in_kv_features": 17}, {}, ShapeError, "context: expected an input with the layer's 17 key features"),
        ({}, {"mask": torch.ones(SEQ, SEQ)}, DTypeError, "mask: expected dtype bool"),
        ({}, {"seq_info": SeqInfo.from_lengths([SEQ])}, ShapeError, "one row of packed documents"),
    ],
)
def test_refusals_name_the_argument(options, call, error, words):
    with pytest.raises(error, match=words):
        Attention(HEADS, FEATURES, **{**SIZES, **options})(normal(0, BATCH, SEQ, FEATURES), **call)


def test_inputs_of_a_wrong_shape_are_named():
    layer = layer_of()
    with pytest.raises(ShapeError, match="x: expected the layer's 13 features"):
        layer(normal(0, BATCH, SEQ, FEATURES + 1))
    with pytest.raises(ShapeError, match="need seq_info="):
        layer(normal(0, SEQ, FEATURES))
