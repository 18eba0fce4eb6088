"""Tests rows with a shared prefix, given by Unsloth's labels, against the float64 reference with the mask of the
labels."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import torch
from frameworks import EVERYWHERE, TORCH, Framework, as_numpy, spied
from reference_calls import reference_call

from attn_core import AttentionSpec, SeqInfo, ShapeError, SpecError
from attn_core.call.tensors import Inputs
from attn_core.correctness import reference
from attn_core.dropins import unsloth as arguments
from torch_frontend.dispatch import offsets

HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 6, 3, 11, 5
pytestmark = pytest.mark.words

PADDED = 64
both = pytest.mark.parametrize("framework", EVERYWHERE, ids=str)
Groups = tuple[tuple[int, tuple[int, ...]], ...]
LAYOUTS: dict[str, Groups] = {
    # groups of (length of the prefix, lengths of its suffixes)
    "one group": ((7, (3, 5, 1)),),
    "groups": ((7, (3, 5, 1)), (1, (2, 2)), (11, (13,))),
    "a prefix that nothing continues": ((3, ()), (5, (2, 7))),
    "no prefix": ((0, (3, 2)), (5, (4,))),
    "one token": ((1, ()),),
}


def labels(groups: Groups, array: Any = torch.from_numpy, signature: Any = None) -> Any:
    """The fields of Unsloth's PrefixSegInfo: a label for each token, padded, and a key of the layout."""
    group: list[int] = []
    suffix: list[int] = []
    for name, (prefix, suffixes) in enumerate(groups):
        group += [name] * (prefix + sum(suffixes))
        suffix += [-1] * prefix
        for length in suffixes:
            suffix += [max([*suffix, -1]) + 1] * length
    tokens = len(group)
    padding = [-99] * (PADDED - tokens)
    is_prefix = np.array([each == -1 for each in suffix] + [False] * len(padding))
    return SimpleNamespace(
        group_of_kv=array(np.array(group + padding)),
        is_prefix=array(is_prefix),
        suffix_of_kv=array(np.array(suffix + padding)),
        signature=("multi", PADDED, groups) if signature is None else signature,
        T=tokens,
        T_pad=PADDED,
    )


def visible(groups: Groups) -> np.ndarray:
    """The visible set of the labels, token by token."""
    segments = labels(groups, np.asarray)
    group, prefix, suffix = (
        each[: segments.T] for each in (segments.group_of_kv, segments.is_prefix, segments.suffix_of_kv)
    )
    same_suffix = (suffix[:, None] == suffix) & ~prefix[:, None]
    return np.tril((group[:, None] == group) & (prefix | same_suffix))


def arrays(tokens: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {"Q": (1, HEADS, tokens, HEAD_DIM), "K": (1, KV_HEADS, tokens, HEAD_DIM)}
    shapes["V"] = (1, KV_HEADS, tokens, VALUE_DIM)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def reference_of(groups: Groups, given: dict[str, np.ndarray], **fields: Any) -> tuple[AttentionSpec, Inputs]:
    rows = (array.swapaxes(1, 2) for array in given.values())
    return reference_call(*rows, mask=visible(groups)[None, None], **fields)


def settings(
    framework: Framework,
    tokens: int,
    segments: Any,
    bags: Any = None,
    bsz: int = 1,
    word: str = arguments.SDPA,
    **what: Any,
) -> dict[str, Any]:
    config = framework.frontend.unsloth.AttentionConfig(word, KV_HEADS, HEADS // KV_HEADS, **(bags or {}))
    sizes = {"bsz": bsz, "q_len": tokens // bsz, "kv_seq_len": tokens // bsz, "n_heads": HEADS, "head_dim": HEAD_DIM}
    return {
        "config": config,
        "context": framework.frontend.unsloth.AttentionContext(**sizes, prefix_seg_info=segments, **what),
    }


def run(framework: Framework, groups: Groups, given: dict[str, np.ndarray], segments: Any = None, **what: Any) -> Any:
    segments = labels(groups, framework.array) if segments is None else segments
    own = framework.arrays(given)
    return framework.frontend.run_attention(**settings(framework, given["Q"].shape[2], segments, **what), **own)


BAGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (None, {}),
    "scale": ({"flash_varlen_kwargs": {"softmax_scale": 0.7, "dropout_p": 0.0, "causal": True}}, {"scale": 0.7}),
    "softcap": ({"flash_dense_kwargs": {"softcap": 1.5, "dropout_p": 0.1}}, {"softcap": 1.5}),
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.on_gpus(
    only=lambda framework, word, layout, options: (
        (framework.name == "torch") == (word == arguments.SDPA) and (options == "softcap") == (layout == "groups")
    )
)
@pytest.mark.parametrize("options", BAGS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("word", [arguments.FLASH_VARLEN, arguments.SDPA])
@both
def test_a_suffix_sees_its_prefix_and_itself(framework: Framework, word: str, layout: str, options: str) -> None:
    groups, (bags, fields) = LAYOUTS[layout], BAGS[options]
    given = arrays(len(visible(groups)))
    right, _ = reference.forward(*reference_of(groups, given, **fields))
    actual = run(framework, groups, given, word=word, bags=bags)
    np.testing.assert_allclose(as_numpy(actual), right, atol=2e-5, rtol=0)


@both
def test_gradients_flow_through_both_parts(framework: Framework) -> None:
    groups = LAYOUTS["groups"]
    given = arrays(len(visible(groups)))
    segments = settings(framework, given["Q"].shape[2], labels(groups, framework.array))
    spec, inputs = reference_of(groups, given, needs_backward=True)
    out, lse = reference.forward(spec, inputs)
    right = reference.backward(spec, inputs, out, lse, out)
    call = partial(framework.frontend.run_attention, **segments)
    actual = framework.gradients(jax.jit(call) if framework.name == "jax" else call, given)[1:]
    for found, expected in zip(actual, right[:3], strict=True):
        np.testing.assert_allclose(found.swapaxes(1, 2), expected, atol=1e-4, rtol=0)


@both
def test_a_window_is_accepted_only_if_it_hides_nothing(framework: Framework) -> None:
    """The host ignores the window here, because it caps rows with a shared prefix at the window."""
    groups = LAYOUTS["groups"]  # 11 + 13 positions
    given = arrays(len(visible(groups)))
    plain = as_numpy(run(framework, groups, given))
    bags = {"flash_dense_kwargs": {"window_size": (24, 24)}}
    np.testing.assert_array_equal(as_numpy(run(framework, groups, given, bags=bags, sliding_window=24)), plain)
    with pytest.raises(SpecError, match=r"^window of 23 keys: expected 24 or more with context.prefix_seg_info"):
        run(framework, groups, given, sliding_window=23)


@pytest.mark.parametrize("signature", [None, "first", ["cannot be hashed"]])
def test_labels_are_read_once_for_each_signature(signature: Any) -> None:
    groups = LAYOUTS["one group"]
    given = arrays(len(visible(groups)))
    right, _ = reference.forward(*reference_of(groups, given))
    for _ in range(2):
        segments = labels(groups, signature=signature)
        segments.signature = signature
        np.testing.assert_allclose(as_numpy(run(TORCH, groups, given, segments)), right, atol=2e-5, rtol=0)
    segments.group_of_kv = None  # not read again
    if signature == "first":
        np.testing.assert_allclose(as_numpy(run(TORCH, groups, given, segments)), right, atol=2e-5, rtol=0)
    else:
        with pytest.raises(ShapeError, match=r"^context.prefix_seg_info.group_of_kv: expected a label for each"):
            run(TORCH, groups, given, segments)


def test_a_layout_first_used_without_gradients_can_be_trained(device: str) -> None:
    """GRPO computes log-probabilities in inference mode first."""
    groups = ((4, (3, 2)),)
    framework = next(each for each in (TORCH, EVERYWHERE[2].values[0]) if each.device == device)
    given = arrays(9)
    with torch.inference_mode():
        first = run(framework, groups, given)
    own = {name: framework.array(array).requires_grad_() for name, array in given.items()}
    segments = settings(framework, 9, labels(groups, framework.array))
    out = framework.frontend.run_attention(**segments, **own)
    out.sum().backward()
    np.testing.assert_allclose(as_numpy(out), as_numpy(first), atol=1e-6, rtol=0)


def test_cached_offsets_on_a_device_are_no_inference_tensors() -> None:
    """Autograd could not save inference tensors for a backward."""
    info, tokens = SeqInfo.from_lengths([4, 5]), torch.empty(9, 1, 1, device="meta")
    with torch.inference_mode():
        offsets.attach_complete(info, Inputs(tokens, tokens, tokens))
    kept, _ = offsets.attach_complete(info, Inputs(tokens, tokens, tokens))
    assert not (kept.cu_seqlens_q.is_inference() or kept.cu_seqlens_k.is_inference())


REFUSED: dict[str, dict[str, Any]] = {
    "^dropout_p=0.5: expected 0 with context.p": {"bags": {"flash_varlen_kwargs": {"dropout_p": 0.5}}},
    "^context.attention_mask: expected None with context.": {"attention_mask": np.ones((1, 16), bool)},
    "^context.causal_mask: expected None with context.prefix": {"causal_mask": np.ones((16, 16), bool)},
    "^alibi_slopes: expected None with context.prefix_seg_info, got": {
        "bags": {"flash_dense_kwargs": {"alibi_slopes": np.ones(HEADS, np.float32)}}
    },
    "^context.seq_info: expected None with context.prefix_seg_info, got SeqInfo": {
        "seq_info": SeqInfo.from_lengths([16])
    },
    "^causal=False: expected True with context": {"bags": {"flash_varlen_kwargs": {"causal": False}}},
    r"^context.prefix_seg_info.T=15: expected the 16 tokens of Q": {"segments": labels(((7, (3, 5)),))},
}


@pytest.mark.parametrize("says", REFUSED)
@both
def test_refused_by_name_before_anything_runs(framework: Framework, says: str) -> None:
    groups = LAYOUTS["one group"]
    with spied() as ran, pytest.raises(SpecError, match=says):
        run(framework, groups, arrays(16), **framework.arrays(REFUSED[says]))
    assert ran == []


SCATTERED = {
    "a suffix in two pieces": ([0, 0, 0, 0], [-1, 0, 1, 0]),
    "a group in two pieces": ([0, 1, 0, 0], [-1, -1, 0, 1]),
    "a prefix behind its suffix": ([0, 0, 0, 0], [0, 0, -1, -1]),
}


@pytest.mark.parametrize("name", SCATTERED)
def test_labels_of_another_layout_are_refused(name: str) -> None:
    group, suffix = map(np.array, SCATTERED[name])
    segments = SimpleNamespace(group_of_kv=group, is_prefix=suffix == -1, suffix_of_kv=suffix, signature=None, T=4)
    with pytest.raises(SpecError, match=r"^context.prefix_seg_info: expected the tokens of each group next to"):
        run(TORCH, (), arrays(4), segments)


@both
def test_a_cache_with_a_shared_prefix_is_refused(framework: Framework) -> None:
    given = {name: array[:, :, -5:] if name == "Q" else array for name, array in arrays(16).items()}
    segments = settings(framework, 16, labels(LAYOUTS["one group"], framework.array))
    segments["context"].q_len = 5
    own = {name: framework.array(array) for name, array in given.items()}
    with pytest.raises(ShapeError, match=r"^context.kv_seq_len=16: expected q_len=5 with context.prefix_seg_info"):
        framework.frontend.run_attention(**segments, **own)


@both
def test_the_layout_in_the_keywords_of_a_forward(framework: Framework) -> None:
    resolve, segments = framework.frontend.unsloth.resolve_prefix_seg_info, object()
    assert resolve({}, None, None) is None and resolve({"prefix_seg_info": None}, object(), object()) is None
    assert resolve({"prefix_seg_info": segments}, None, None) is segments
    with pytest.raises(SpecError, match=r"^past_key_value: expected None with prefix_seg_info, got tuple"):
        resolve({"prefix_seg_info": segments}, (), None)
    with pytest.raises(SpecError, match=r"^attention_mask: expected None with prefix_seg_info, got object"):
        resolve({"prefix_seg_info": segments}, None, object())
