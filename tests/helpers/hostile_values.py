"""Values that no caller should pass, by name, for tests that pass them everywhere.

Each table maps a name to a function of a good value, which returns a bad one in its place. Much of it is legal: a
view with strides of zero is a tensor like any other, and its result must be right.
"""

from __future__ import annotations

import enum
import math
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

Make = Callable[[Any], Any]

HUGE = 2**45
"""The length of arrays without memory of their own. No machine can allocate a result that long."""


class _NoBool:
    def __bool__(self) -> bool:
        raise ValueError("this object has no truth value")


class _NoEqual:
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise ValueError("this object cannot be compared")


class _Text(str):
    pass


class _Number(enum.IntEnum):
    three = 3


class _LikeArray:
    """Claims a shape and a dtype, but is no array."""

    shape, dtype, ndim, device = (2, 5, 4, 8), "float32", 4, "cpu"


def _always(value: Any) -> Make:
    return lambda good: value


def _numpy_of(good: Any) -> np.ndarray:
    if hasattr(good, "dtype") and hasattr(good, "shape"):
        return np.array(good)
    return np.arange(320, dtype=np.float32).reshape(2, 5, 4, 8) / 320


def _cast(dtype: str) -> Make:
    def make(good: Any) -> np.ndarray:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _numpy_of(good).astype(dtype)

    return make


SCALARS: dict[str, Make] = {
    **{
        f"{type(value).__name__} {value!r}"[:40]: _always(value)
        for value in (
            *(None, "", "junk", b"junk", [], [1, 2], {}, {"a": 1}, (), (1, 2, 3), True, False),
            *(0, 1, -1, 2, 3.5, 2**31 - 1, 2**31, -(2**31), 2**62, 2**63, 2**64, 10**30),
            *(math.nan, math.inf, -math.inf, 1e-320, 1e308, -2.5, 1j),
            *((3, -1), (None, None), (2.0, 1), (2**63, 0), ["q"], ("math",), "math", "jax_xla", "cpu", "bhsd"),
        )
    },
    **{f"numpy {type(value).__name__}": _always(value) for value in (np.int64(3), np.float32(2), np.bool_(True))},
    "object": _always(object()),
    "class": _always(int),
    "function": _always(len),
    "module": _always(math),
    "set": _always({1, 2}),
    "range": _always(range(3)),
    "slice": _always(slice(None)),
    "ellipsis": _always(...),
    "NotImplemented": _always(NotImplemented),
    "generator": lambda good: (each for each in (1, 2)),
    "exception": _always(ValueError("q")),
    "no truth value": _always(_NoBool()),
    "no comparison": _always(_NoEqual()),
    "subclass of str": _always(_Text("math")),
    "IntEnum": _always(_Number.three),
    "surrogate": _always("\ud800"),
    "NUL": _always("a\0b"),
    "claims to be an array": _always(_LikeArray()),
    "list of good": lambda good: [good],
    "dict of good": lambda good: {"q": good},
    "string of good": str,
}

NUMPY: dict[str, Make] = {
    **{
        f"numpy {dtype}": _cast(dtype)
        for dtype in (
            *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
            *("float16", "float32", "float64", "longdouble", "complex64", "complex128", "object", "U8", "S8"),
        )
    },
    "numpy datetime": _always(np.zeros((2, 5, 4, 8), "datetime64[s]")),
    "numpy structured": _always(np.zeros((2, 5, 4, 8), [("a", "f4"), ("b", "i4")])),
    "numpy big-endian": lambda good: _numpy_of(good).astype(">f4"),
    "numpy read-only": lambda good: np.broadcast_to(_numpy_of(good), _numpy_of(good).shape),
    "numpy negative strides": lambda good: np.flip(_numpy_of(good)),
    "numpy zero strides": lambda good: np.broadcast_to(np.float32(0.5), (2, 5, 4, 8)),
    "numpy without axes": _always(np.array(3)),
    "numpy huge": _always(np.broadcast_to(np.float32(0.5), (1, HUGE, 4, 8))),
    "numpy huge int32": _always(np.broadcast_to(np.int32(1), (HUGE,))),
    "numpy masked": lambda good: np.ma.masked_greater(_numpy_of(good), 0),
    "numpy matrix-like": lambda good: np.asmatrix(np.eye(3)),
    "numpy lying int32": _always(np.array([[-1, 2**31 - 1], [-(2**31), 7], [0, 10**6]], np.int32)),
    "numpy lying lengths": _always(np.array([2**31 - 1, -(2**31), -1], np.int32)),
    "numpy lying offsets": _always(np.array([5, -3, 2**31 - 1, 2], np.int32)),
}


def torch_values() -> dict[str, Make]:  # noqa: C901
    """Values that only torch can make. Imports torch."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    def tensor(good: Any) -> torch.Tensor:
        """The good value, or another tensor if it is none."""
        if isinstance(good, torch.Tensor) and good.device.type == "cpu" and good.layout is torch.strided:
            return good.detach().clone()
        return torch.linspace(-1, 1, 320).reshape(2, 5, 4, 8)

    def real(good: Any) -> torch.Tensor:
        made = tensor(good)
        return made if made.is_floating_point() else made.float()

    class Plain(torch.Tensor):
        """A subclass without a rule of its own."""

    class Lies(torch.Tensor):
        """A subclass that answers every function with nonsense."""

        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return (
                NotImplemented
                if function is torch.Tensor.add
                else super().__torch_function__(function, types, args, kwargs or {})
            )

    class Wraps:
        """No tensor, but its class has ``__torch_function__``."""

        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return "nonsense"

    def cast(dtype: torch.dtype) -> Make:
        return lambda good: tensor(good).to(dtype)

    def leaked_grad(good: Any) -> Any:
        leaks: list[Any] = []
        torch.func.grad(lambda x: (leaks.append(x), x.sum())[1])(real(good))
        return leaks[0]

    def leaked_vmap(good: Any) -> Any:
        leaks: list[Any] = []
        torch.func.vmap(lambda x: (leaks.append(x), x * 2)[1])(real(good)[None])
        return leaks[0]

    def leaked_functional(good: Any) -> Any:
        return torch._to_functional_tensor(real(good))

    def inference(good: Any) -> torch.Tensor:
        with torch.inference_mode():
            return tensor(good).clone()

    def no_storage(good: Any) -> torch.Tensor:
        made = tensor(good)
        made.untyped_storage().resize_(0)
        return made

    def part_of_a_storage(good: Any) -> torch.Tensor:
        made = tensor(good)
        made.untyped_storage().resize_(max(made.untyped_storage().nbytes() // 2, 1))
        return made

    def overlapping(good: Any) -> torch.Tensor:
        made = tensor(good)
        flat = made.reshape(-1)
        return flat.as_strided(made.shape, (1,) * made.dim()) if sum(made.shape) < flat.numel() else made

    def misaligned(good: Any) -> torch.Tensor:
        made = tensor(good)
        raw = torch.zeros(made.numel() * made.element_size() + 1, dtype=torch.uint8)
        wide = torch.zeros(made.numel() + 1, dtype=made.dtype)
        del raw  # torch has no view at an odd byte; an offset of one element breaks the alignment of vectors
        wide[1:] = made.reshape(-1)
        return wide[1:].view(made.shape)

    def apart(good: Any) -> torch.Tensor:
        made = tensor(good)
        wide = torch.full((*made.shape, 3), -7, dtype=made.dtype) if made.dtype != torch.bool else made[..., None]
        wide = wide.expand(*made.shape, 3).clone()
        wide[..., 1] = made
        return wide[..., 1]

    def filled(value: float) -> Make:
        return lambda good: torch.full_like(real(good), value)

    def quantised(good: Any) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.quantize_per_tensor(real(good).float(), 0.1, 0, torch.qint8)

    def masked(good: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.masked.masked_tensor(real(good), real(good) > 0)

    def nested(layout: torch.layout) -> Make:
        def make(good: Any) -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                rows = [torch.ones(3, 4, 8), torch.ones(2, 4, 8)]
                return torch.nested.nested_tensor(rows, layout=layout)

        return make

    def fake(good: Any) -> Any:
        return FakeTensorMode().from_tensor(tensor(good))

    def distributed(good: Any) -> Any:
        from torch.distributed.tensor import Replicate, distribute_tensor

        return distribute_tensor(real(good), one_rank_mesh(), [Replicate()])

    def huge(*shape: int, dtype: torch.dtype = torch.float32) -> Make:
        return lambda good: torch.ones((1,) * len(shape), dtype=dtype).expand(shape)

    def jax_array(good: Any) -> Any:
        import jax.numpy as jnp

        return jnp.ones((2, 5, 4, 8))

    integers = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64, torch.bool]
    floats = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64]
    return {
        **{str(dtype): cast(dtype) for dtype in (*integers, *floats)},
        "meta": lambda good: tensor(good).to("meta"),
        "fake": fake,
        "sparse": lambda good: tensor(good).to_sparse(),
        "sparse csr": lambda good: torch.eye(4).to_sparse_csr(),
        "mkldnn": lambda good: real(good).float().to_mkldnn(),
        "quantised": quantised,
        "subclass": lambda good: tensor(good).as_subclass(Plain),
        "subclass with __torch_function__": lambda good: tensor(good).as_subclass(Lies),
        "object with __torch_function__": lambda good: Wraps(),
        "Parameter": lambda good: torch.nn.Parameter(real(good)),
        "UninitializedParameter": lambda good: torch.nn.UninitializedParameter(),
        "requires grad": lambda good: real(good).requires_grad_(),
        "non-leaf": lambda good: real(good).requires_grad_() * 1.0,
        "nested, strided": nested(torch.strided),
        "nested, jagged": nested(torch.jagged),
        "MaskedTensor": masked,
        "DTensor": distributed,
        "conjugated view": lambda good: torch.complex(real(good).float(), real(good).float()).conj(),
        "negated view": lambda good: torch.complex(real(good).float(), real(good).float()).conj().imag,
        "of inference mode": inference,
        "storage of 0 bytes": no_storage,
        "half a storage": part_of_a_storage,
        "zero strides": lambda good: (
            tensor(good).reshape(-1)[:1].expand(tensor(good).numel()).view(tensor(good).shape)
            if tensor(good).numel() == 1
            else tensor(good)[..., :1].expand(tensor(good).shape)
        ),
        "overlapping": overlapping,
        "misaligned": misaligned,
        "strided channels": apart,
        "transposed": lambda good: tensor(good).mT.contiguous().mT if tensor(good).dim() > 1 else tensor(good),
        "leaked from grad": leaked_grad,
        "leaked from vmap": leaked_vmap,
        "functional": leaked_functional,
        "empty": lambda good: torch.empty(0),
        "without axes": lambda good: torch.tensor(3.0),
        "without axes, int32": lambda good: torch.tensor(3, dtype=torch.int32),
        "five axes": lambda good: tensor(good)[None, None],
        "first axis of 0": lambda good: tensor(good)[:0] if tensor(good).dim() else tensor(good),
        "last axis of 0": lambda good: tensor(good)[..., :0] if tensor(good).dim() else tensor(good),
        "NaN": filled(math.nan),
        "inf": filled(math.inf),
        "-inf": filled(-math.inf),
        "largest": filled(3e38),
        "smallest": filled(1e-40),
        "huge": huge(1, HUGE, 4, 8),
        "huge batch": huge(HUGE, 5, 4, 8),
        "2^62 elements": huge(2**20, 2**20, 2**11, 2**11),
        "huge table": huge(3, HUGE, dtype=torch.int32),
        "huge offsets": huge(HUGE, dtype=torch.int32),
        "lying table": lambda good: torch.tensor([[-1, 2**31 - 1], [-(2**31), 7], [0, 10**6]], dtype=torch.int32),
        "lying lengths": lambda good: torch.tensor([2**31 - 1, -(2**31), -1], dtype=torch.int32),
        "lying offsets": lambda good: torch.tensor([5, -3, 2**31 - 1, 2], dtype=torch.int32),
        "list of tensors": lambda good: [tensor(good), tensor(good)],
        "torch.Size": lambda good: torch.Size([2, 5]),
        "torch.dtype": lambda good: torch.float32,
        "torch.int32 as dtype": lambda good: torch.int32,
        "torch.device": lambda good: torch.device("meta"),
        "Generator": lambda good: torch.Generator(),
        "array of JAX": jax_array,
    }


@cache
def one_rank_mesh() -> Any:
    """A DeviceMesh of this process alone."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", (1,))


def jax_values() -> dict[str, Make]:  # noqa: C901
    """Values that only JAX can make. Imports JAX."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import sparse

    def array(good: Any) -> jax.Array:
        if isinstance(good, jax.Array) and not isinstance(good, jax.core.Tracer):
            return good
        return jnp.linspace(-1, 1, 320).reshape(2, 5, 4, 8)

    def cast(dtype: str) -> Make:
        return lambda good: array(good).astype(dtype)

    @cache
    def leaked(shape: tuple[int, ...], dtype: str) -> Any:
        leaks: list[Any] = []
        jax.jit(lambda x: (leaks.append(x), x)[1])(jnp.zeros(shape, dtype))
        return leaks[0]

    def leaked_vmap(good: Any) -> Any:
        leaks: list[Any] = []
        jax.vmap(lambda x: (leaks.append(x), x)[1])(array(good)[None])
        return leaks[0]

    def deleted(good: Any) -> jax.Array:
        made = jnp.array(array(good), copy=True)
        made.delete()
        return made

    donate = jax.jit(lambda x: x + 1, donate_argnums=0)

    def donated(good: Any) -> jax.Array:
        made = jnp.array(array(good), copy=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            donate(made)
        return made

    def filled(value: float) -> Make:
        return lambda good: jnp.full(array(good).shape, value, jnp.float32)

    def elsewhere(good: Any) -> jax.Array:
        return jax.device_put(array(good), jax.devices()[-1])

    def over_devices(good: Any) -> jax.Array:
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
        return jax.device_put(array(good), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))

    def shape_only(*shape: int) -> Make:
        return lambda good: jax.ShapeDtypeStruct(shape or array(good).shape, jnp.float32)

    def tensor(good: Any) -> Any:
        import torch

        return torch.ones(2, 5, 4, 8)

    dtypes = ("bool", "int8", "uint8", "int16", "int32", "uint32", "float32", "float16", "bfloat16", "complex64")
    return {
        **{f"jax {dtype}": cast(dtype) for dtype in (*dtypes, "float8_e4m3fn", "int4")},
        "leaked tracer": lambda good: leaked(array(good).shape, str(array(good).dtype)),
        "leaked from vmap": leaked_vmap,
        "deleted": deleted,
        "donated": donated,
        "key array": lambda good: jax.random.key(0),
        "raw key": lambda good: jax.random.PRNGKey(0),
        "shape only": shape_only(),
        "huge shape": shape_only(1, HUGE, 4, 8),
        "2^62 shape": shape_only(2**20, 2**20, 2**11, 2**11),
        "weak type": lambda good: jnp.asarray(2.0),
        "weak int": lambda good: jnp.asarray(2),
        "float0": lambda good: np.zeros(array(good).shape, jax.dtypes.float0),
        "BCOO": lambda good: sparse.BCOO.fromdense(array(good)),
        "another device": elsewhere,
        "several devices": over_devices,
        "tensor of torch": tensor,
        "without axes": lambda good: jnp.asarray(3.0, jnp.float32),
        "empty": lambda good: jnp.zeros(0),
        "five axes": lambda good: array(good)[None, None],
        "first axis of 0": lambda good: array(good)[:0] if array(good).ndim else array(good),
        "NaN": filled(math.nan),
        "inf": filled(math.inf),
        "largest": filled(3e38),
        "lying table": lambda good: jnp.array([[-1, 2**31 - 1], [-(2**31), 7], [0, 10**6]], jnp.int32),
        "lying lengths": lambda good: jnp.array([2**31 - 1, -(2**31), -1], jnp.int32),
        "lying offsets": lambda good: jnp.array([5, -3, 2**31 - 1, 2], jnp.int32),
        "jnp.float32": lambda good: jnp.float32,
        "jnp.int32": lambda good: jnp.int32,
        "numpy array": lambda good: np.asarray(array(good)),
        "Device": lambda good: jax.devices()[0],
        "PartitionSpec": lambda good: jax.sharding.PartitionSpec("d"),
        "partial": lambda good: partial(jnp.ones, 3),
    }


@cache
def values_for(framework: str) -> dict[str, Make]:
    """Every bad value for functions of a framework: ``"torch"``, ``"jax"`` or ``"core"``."""
    own = {"torch": torch_values, "jax": jax_values, "core": dict}[framework]
    return {**SCALARS, **NUMPY, **own()}
