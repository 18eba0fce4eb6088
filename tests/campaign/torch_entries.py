"""The entry points of torch that a campaign calls. The twin of jax_entries."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from attn_core.call.spec import AttentionSpec
from attn_core.cli.devices import torch_device
from attn_core.cli.in_torch import cotangents_of, named_results, tensors_of
from attn_core.cli.trial import Trial, keywords_of
from attn_core.context_parallel.ranges import MOST_TILES
from tests.campaign import pages, segments
from tests.campaign.entries import LACK_RANGES, Arrays, Entry, ranges_refuse, without
from tests.campaign.pages import pages_of

Tensors = dict[str, Any]
Call = Callable[..., Any]


def words(seed: int) -> list[int]:
    """Returns the two words that ``attention`` draws from a generator with this seed."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (2,), generator=generator, device="cpu").tolist()


def run(call: Call, trial: Trial, backend: str | None, device: str) -> Arrays:
    """Runs a call of (tensors, trial, backend), which returns the results of ``attention``; see ``Entry.run``."""
    import torch

    where = torch_device(device)
    tensors = tensors_of(trial, where)
    results = call(tensors, trial, backend)
    named = named_results(trial, results, tensors, cotangents_of(trial, where))
    return {name: tensor.detach().to("cpu", torch.float64).numpy() for name, tensor in named.items()}


def keywords(trial: Trial, backend: str | None) -> dict[str, Any]:
    """Returns the keyword arguments of ``attention`` other than tensors."""
    import torch

    options = keywords_of(trial.spec, trial.seq_info) | {"backend": backend, "dropout": trial.spec.dropout}
    if trial.spec.dropout:
        options["dropout_rng"] = torch.Generator().manual_seed(trial.seed)
    return options


def _attention(tensors: Tensors, trial: Trial, backend: str | None) -> Any:
    import torch_frontend

    return torch_frontend.attention(**tensors, **keywords(trial, backend))


def _ranges_on_host(tensors: Tensors, trial: Trial, backend: str | None) -> Any:
    """Backends without key ranges compute them in parts, if they are a few bands."""
    import torch_frontend

    kind = "cuda" if tensors["q"].is_cuda else "cpu"
    options = keywords(trial, backend) | {"backend": LACK_RANGES[kind], "key_ranges": trial.inputs.key_ranges}
    return torch_frontend.attention(**tensors | options)


def _heads_first(tensors: Tensors, trial: Trial, backend: str | None) -> Any:
    import torch_frontend

    exchanged = tensors | {name: tensors[name].transpose(-3, -2) for name in ("q", "k", "v")}
    results = torch_frontend.attention(**exchanged, **keywords(trial, backend), layout="bhsd")
    out, *lse = results if trial.spec.return_lse else (results,)
    return (out.transpose(-3, -2), *lse) if lse else out.transpose(-3, -2)


def _one_row(tensors: Tensors, trial: Trial, backend: str | None) -> Any:
    import torch_frontend

    rows = tensors | {name: tensors[name][None] for name in ("q", "k", "v")}
    results = torch_frontend.attention(**rows, **keywords(trial, backend))
    out, *lse = results if trial.spec.return_lse else (results,)
    return (out[0], *lse) if lse else out[0]


def _strided(tensors: Tensors, trial: Trial, backend: str | None) -> Any:
    """q, k and v are views with NaN between their values."""
    import torch

    import torch_frontend

    views = {}
    for name in ("q", "k", "v"):
        tensor = tensors[name]
        wide = torch.stack((tensor, torch.full_like(tensor, torch.nan)), -1).flatten(-2)
        views[name] = wide[..., ::2]
    return torch_frontend.attention(**tensors | views, **keywords(trial, backend))


_compiled: dict[tuple[AttentionSpec, str | None], Call] = {}
"""The compiled function of the last structure. One at a time, because torch stops compiling after eight."""


def _in_graph(tensors: Tensors, trial: Trial, backend: str | None) -> Any:
    import torch

    import torch_frontend

    key = (trial.spec, backend)
    if key not in _compiled:
        _compiled.clear()
        torch._dynamo.reset()  # type: ignore[no-untyped-call]
        # Without Inductor, which compiles for seconds: its own code is not under test.
        _compiled[key] = torch.compile(torch_frontend.attention, fullgraph=True, backend="aot_eager", dynamic=False)
    return _compiled[key](**tensors, **keywords(trial, backend))


def _exported(tensors: Tensors, trial: Trial, backend: str | None) -> Any:
    """The call runs as the program that ``torch.export`` wrote."""
    import torch

    import torch_frontend

    options = keywords(trial, backend)

    class Call(torch.nn.Module):
        def forward(self, tensors: Tensors) -> Any:
            return torch_frontend.attention(**tensors, **options)

    return torch.export.export(Call(), (tensors,)).module()(tensors)


def _scaled_dot_product_attention(tensors: Tensors, trial: Trial, backend: str | None) -> Any:
    import torch_frontend

    spec = trial.spec
    q, k, v = (tensors[name].transpose(1, 2) for name in ("q", "k", "v"))
    table = tensors["mask"] if tensors["bias"] is None else tensors["bias"]
    out = torch_frontend.scaled_dot_product_attention(
        q, k, v, table, is_causal=spec.causal, scale=spec.scale, enable_gqa=spec.num_heads != spec.num_kv_heads
    )
    return out.transpose(1, 2)


def no_gradient_as_in_torch(spec: AttentionSpec) -> str | None:
    """Refuses the one gradient that torch's own function leaves out, and so do the functions that stand in for it."""
    return "no gradient of an empty call's bias" if spec.empty and spec.bias_gradient else None


def _sdpa_refuses(spec: AttentionSpec) -> str | None:
    if spec.causal and spec.q_len != spec.kv_len and spec.alignment != "top_left":
        return "is_causal is top-left"
    if spec.mask_shape is not None and spec.bias_shape is not None:
        return "one attn_mask"
    if spec.causal and (spec.mask_shape is not None or spec.bias_shape is not None):
        return "is_causal or attn_mask"
    lacks = without("window", "softcap", "alibi", "packed", "sinks", "dropout", "lse", "deterministic")
    return no_gradient_as_in_torch(spec) or lacks(spec)


def _paged(tensors: Tensors, trial: Trial, backend: str | None) -> Any:
    import torch

    import torch_frontend

    spec, laid_out, q = trial.spec, pages_of(trial), tensors["q"]
    k_pages, v_pages = (torch.from_numpy(pool).to(q.device, q.dtype) for pool in (laid_out.k, laid_out.v))
    options: dict[str, Any] = {name: getattr(spec, name) for name in pages.OPTIONS}
    options |= {name: torch.from_numpy(table).to(q.device) for name, table in laid_out.tables.items()}
    options |= {"max_len_q": laid_out.max_len_q, "sinks": tensors["sinks"], "backend": backend}
    return torch_frontend.paged_attention(q, k_pages, v_pages, **options)


def _in_segments(tensors: Tensors, trial: Trial, backend: str | None) -> Any:
    """Documents are segment ids and positions."""
    import torch

    import torch_frontend

    where = tensors["q"].device
    said = {name: torch.from_numpy(array).to(where) for name, array in segments.arrays_of(trial).items()}
    options = keywords(trial, backend) | {"seq_info": None}
    said |= {name: said[name].long() for name in segments.ORDERS}
    return segments.attend(torch_frontend.attention, torch.take_along_dim, tensors | said, options)


def _qkvpacked(tensors: Tensors, trial: Trial, backend: str | None) -> Any:
    import torch

    import torch_frontend

    qkv = torch.stack([tensors[name] for name in ("q", "k", "v")], -3)
    others = {name: tensor for name, tensor in tensors.items() if name not in ("q", "k", "v")}
    return torch_frontend.attention_qkvpacked(qkv, **others, **keywords(trial, backend))


def _qkvpacked_refuses(spec: AttentionSpec) -> str | None:
    same = spec.num_heads == spec.num_kv_heads and spec.head_dim == spec.value_dim and spec.q_len == spec.kv_len
    return _lacks()(spec) if same else "q, k and v of one shape"


def _packed_alone(spec: AttentionSpec) -> str | None:
    return None if spec.packed else "packed documents alone"


_lacks = partial(without, key_ranges=True, functions=True)
"""What ``attention`` itself lacks."""

ENTRIES = (
    Entry("torch attention", partial(run, _attention), _lacks(), words=words),
    Entry(
        "torch attention, heads first",
        partial(run, _heads_first),
        _lacks(),
        words=words,
    ),
    Entry(
        "torch attention, ranges on the host",
        partial(run, _ranges_on_host),
        ranges_refuse,
        requests=False,
        words=words,
        parts=MOST_TILES,
    ),
    Entry("torch attention, one row", partial(run, _one_row), _packed_alone, words=words),
    Entry("torch attention, strided", partial(run, _strided), _lacks(), words=words),
    Entry("torch attention_qkvpacked", partial(run, _qkvpacked), _qkvpacked_refuses, words=words),
    Entry("torch attention, segments", partial(run, _in_segments), segments.refuses, masks=True),
    Entry("torch paged_attention", partial(run, _paged), pages.refuses, requests=False),
    Entry(
        "torch attention, compiled",
        partial(run, _in_graph),
        _lacks("dropout"),
        shared=True,
    ),
    Entry(
        "torch attention, exported",
        partial(run, _exported),
        without("dropout", "gradients"),
        shared=True,
        share=0.05,  # each case is exported anew
    ),
    Entry(
        "torch scaled_dot_product_attention",
        partial(run, _scaled_dot_product_attention),
        _sdpa_refuses,
        requests=False,
    ),
)
