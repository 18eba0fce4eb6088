"""The Triton kernel of ``return_max_logit`` in Triton's interpreter, on the CPU, against the float64 reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton.runtime.interpreter")
import row_maximum_reference as row_maximum
import triton_interpreter
from other_process import OtherProcess
from spec_strategies import MISREAD, Call, make_call, misread

from attn_core.backends.contract import RowMaximumPass
from attn_core.backends.triton_jvp import backend as triton_jvp
from attn_core.call.tensors import Inputs
from attn_core.selection import row_maximum as choice
from torch_frontend import SeqInfo, attention

pytestmark = pytest.mark.sampled


@pytest.fixture(autouse=True, scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[OtherProcess | None]:
    """The process that runs these tests; None if this process does."""
    yield from triton_interpreter.process(__file__, tmp_path_factory, pytestconfig)


SIZES = {
    **{"batch": 2, "q_len": 37, "kv_len": 83, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "value_dim": 16},
    "dtype": "float16",
}
DOCUMENTS = {**SIZES, "lengths": ((33, 0, 67, 5), (20, 8, 90, 0))}
TABLES = {"bias_shape": (1, 2, 37, 83), "mask_shape": (2, 1, 37, 83), "alibi_shape": (2,)}
CASES: dict[str, dict[str, Any]] = {
    "plain": SIZES,
    "float32": {**SIZES, "dtype": "float32", "causal": True},
    "bfloat16": {**SIZES, "dtype": "bfloat16", "causal": True, "num_kv_heads": 2},
    "rows without keys": {**SIZES, "causal": True, "q_len": 83, "kv_len": 37},
    "top left": {**SIZES, "causal": True, "alignment": "top_left"},
    "window": {**SIZES, "window": (17, 5), "kv_len": 150},
    "a window beside the keys": {**SIZES, "window": (2, 1), "alignment": "top_left", "q_len": 83, "kv_len": 37},
    "softcap": {**SIZES, "softcap": 1.3},
    "softcap and bias": {**SIZES, "softcap": 1.3, "bias_shape": (2, 1, 37, 83), "hiding": True},
    "a bias of another dtype": {**SIZES, "bias_shape": (1, 1, 1, 83), "extras_dtype": "float32"},
    "mask": {**SIZES, "mask_shape": (2, 2, 37, 83), "causal": True},
    "slopes": {**SIZES, "alibi_shape": (2, 2), "causal": True, "extras_dtype": "float32"},
    "key ranges": {**SIZES, "key_ranges_shape": (2, 1, 83, 2, 2)},
    "tables": {**SIZES, **TABLES, "window": (30, 9), "key_ranges_shape": (1, 1, 83, 1, 2), "softcap": 9.0},
    "documents": {**DOCUMENTS, "causal": True},
    "documents, everything": {
        **{**DOCUMENTS, "window": (5, 2), "softcap": 2.0, "num_heads": 3, "num_kv_heads": 3, "dtype": "bfloat16"},
        **{"mask_shape": (1, 1, 105, 118), "alibi_shape": (3,), "key_ranges_shape": (1, 3, 118, 1, 2)},
    },
    "odd widths": {**SIZES, "head_dim": 21, "value_dim": 13, "dtype": "float32", "window": (40, 7)},
    "wide": {**SIZES, "head_dim": 192, "batch": 1, "num_heads": 1},
}


def tensors(call: Call) -> Inputs:
    """As the frontends pass a call: k stands for v."""

    def tensor(name: str) -> Any:
        array = getattr(call.inputs, name)
        if array is None:
            return None
        dtype = "int32" if name.startswith("cu_") else call.dtype_of(name)
        return torch.from_numpy(np.array(array)).to(getattr(torch, dtype))

    tables = ("mask", "bias", "alibi_slopes", "key_ranges", "cu_seqlens_q", "cu_seqlens_k")
    return Inputs(tensor("q"), tensor("k"), tensor("k"), **{name: tensor(name) for name in tables})


def computed(call: Call, inputs: Inputs | None = None) -> np.ndarray:
    spec = choice.spec_of(call.spec)
    assert triton_jvp.refuses(spec, "sm90", None) == ()
    return triton_jvp.row_maximum(spec, inputs or tensors(call)).double().numpy()


@pytest.mark.parametrize("name", CASES)
def test_the_kernel(name: str) -> None:
    call = make_call(**CASES[name])
    assert row_maximum.is_right(computed(call), *row_maximum.row_maximum(call.spec, call.inputs)), call


@pytest.mark.parametrize("fault", MISREAD)
def test_faults_are_caught(fault: str) -> None:
    call = make_call(**{**CASES["window"], "scale": 1.0, "softcap": 1.5})
    truth = row_maximum.row_maximum(call.spec, call.inputs)
    assert row_maximum.is_right(computed(call), *truth)
    assert not row_maximum.is_right(computed(misread(call, fault)), *truth)


def test_nan_reaches_the_rows_that_see_its_key() -> None:
    """In another document, behind the diagonal, under a mask, under a bias of -inf, and outside of the ranges."""
    for name in ("documents", "mask", "softcap and bias", "key ranges"):
        call = make_call(**CASES[name])
        right = computed(call)
        call.inputs.k[(90,) if call.spec.packed else (1, 7)] = np.nan
        truth, _ = row_maximum.row_maximum(call.spec, call.inputs)
        met, result = np.isnan(truth), computed(call)
        assert met.any() and not met.all() and np.array_equal(np.isnan(result), met), name
        assert np.array_equal(result[~met], right[~met]), name


def test_offsets_that_lie_lead_nowhere_outside() -> None:
    call = make_call(**CASES["documents"])
    inputs = tensors(call)
    for lie in ([0, 99, 3, 10**6, -7], [-5, 2**31 - 1, 40, 41, 2**31 - 1], [50, 40, 30, 20, 10]):
        offsets = torch.tensor(lie, dtype=torch.int32)
        rows = inputs.k.new_full((3 * len(inputs.k), *inputs.k.shape[1:]), torch.nan)
        rows[len(inputs.k) : 2 * len(inputs.k)] = inputs.k
        amid = rows[len(inputs.k) : 2 * len(inputs.k)]
        assert not np.isnan(computed(call, inputs._replace(k=amid, cu_seqlens_k=offsets))).any()


def test_any_strides() -> None:
    call = make_call(**CASES["tables"])
    inputs = tensors(call)
    q = inputs.q.transpose(1, 2).contiguous().transpose(1, 2)
    k = inputs.k.repeat_interleave(2, -1)[..., ::2]
    mask = inputs.mask.mT.contiguous().mT
    strided = inputs._replace(q=q, k=k, v=k, mask=mask, bias=inputs.bias.repeat_interleave(3, 1)[:, ::3])
    assert np.array_equal(computed(call, strided), computed(call, inputs))


def test_the_frontend_chooses_it(replace_fields: Any) -> None:
    """As on a GPU: this process lets it claim the CPU, too."""
    ran: list[bool] = []
    own = RowMaximumPass(
        claims=replace(triton_jvp.ROW_MAXIMUM, devices=("cpu",)),
        function=lambda *given: ran.append(True) or triton_jvp.row_maximum(*given),
        preference={"cpu": 10},
    )
    replace_fields(triton_jvp.BACKEND, row_maximum=own)
    q, k, v = (torch.randn(1, 38, heads, 16, generator=torch.Generator().manual_seed(1)) for heads in (4, 2, 2))
    documents = {"seq_info": SeqInfo.from_lengths([20, 15]), "causal": True, "window": 7}
    several = ({"causal": True}, documents, {"mask": torch.rand(38, 38) > 0.5}, {"alibi_slopes": torch.ones(4)})
    for options in several:
        *_, top = attention(q, k, v, return_max_logit=True, backend="sdpa_flash", **options)
        *_, other = attention(q, k, v, return_max_logit=True, backend="math", **options)
        torch.testing.assert_close(top, other, rtol=1e-5, atol=1e-6)
    assert len(ran) == len(several), "math has it from its forward"
