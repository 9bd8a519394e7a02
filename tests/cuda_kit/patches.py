"""Torch's functions that make, move and read tensors, for as long as there are fake devices."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _device as torch_device

from tests.cuda_kit.streams import DeviceLike, Streams
from tests.cuda_kit.tensors import HOST, Target, Tensors

FACTORIES = (
    "empty", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "rand", "randn", "randint",
    "randperm", "eye", "linspace", "empty_strided",
)  # fmt: skip
LIKES = (
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
)  # fmt: skip
METHODS = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")


def patch(monkeypatch: pytest.MonkeyPatch, tensors: Tensors, streams: Streams) -> None:
    """Let torch's functions and tensors know the fake devices."""
    # Torch keeps the set of functions that `with torch.device(…)` concerns; these ask it.
    constructors = torch_device._device_constructors.__wrapped__()
    constructors -= {getattr(torch, name) for name in FACTORIES}
    monkeypatch.setattr(torch_device, "_device_constructors", lambda: constructors)
    for name in FACTORIES:
        made = _factory(getattr(torch, name), tensors, streams, default=_device_of_context)
        monkeypatch.setattr(torch, name, made)
    for name in LIKES:
        monkeypatch.setattr(torch, name, _factory(getattr(torch, name), tensors, streams))
    for name in METHODS:
        made = _factory(getattr(torch.Tensor, name), tensors, streams)
        monkeypatch.setattr(torch.Tensor, name, made)
    moved = functools.partial(_to, torch.Tensor.to, tensors, streams)
    to_list, numpy = torch.Tensor.tolist, torch.Tensor.numpy
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        tensors.resized(storage, num_bytes)
        return resize(storage, num_bytes)

    def to(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return moved(tensor, *args, **options)

    def tolist(tensor: torch.Tensor) -> Any:
        tensors.read_by_host(tensor, "tolist")
        return to_list(tensor)

    def to_numpy(tensor: torch.Tensor, **options: Any) -> Any:
        if tensors.device_of(tensor) != HOST:
            raise TypeError("can't convert cuda device type tensor to numpy")
        tensors.read_by_host(tensor, "numpy")
        return numpy(tensor, **options)

    members: dict[str, Any] = {
        "device": property(tensors.device_of),
        "is_cuda": property(lambda tensor: tensors.device_of(tensor).type == "cuda"),
        "is_cpu": property(lambda tensor: tensors.device_of(tensor).type == "cpu"),
        "is_pinned": lambda tensor, *_: tensors.buffer_of(tensor).is_pinned,
        "pin_memory": lambda tensor: _placed(
            torch.Tensor.clone, tensor, tensors=tensors, target=Target(HOST, is_pinned=True)
        ),
        "to": to,
        "cpu": lambda tensor: moved(tensor, "cpu"),
        "cuda": lambda tensor, device=None, **options: moved(
            tensor, streams.resolve(device), **options
        ),
        "tolist": tolist,
        "numpy": to_numpy,
    }
    for name, member in members.items():
        monkeypatch.setattr(torch.Tensor, name, member)
    monkeypatch.setattr(torch.UntypedStorage, "resize_", resize_)


def _device_of_context() -> DeviceLike:
    """Return the device of the innermost `with torch.device(…)`, None outside."""
    modes = reversed(torch.overrides._get_current_function_mode_stack())
    return next((ctx.device for ctx in modes if isinstance(ctx, torch_device.DeviceContext)), None)


def _factory(
    original: Callable[..., Any],
    tensors: Tensors,
    streams: Streams,
    default: Callable[[], DeviceLike] = lambda: None,
) -> Any:
    @functools.wraps(original)
    def make(
        *args: Any, device: DeviceLike = None, pin_memory: bool = False, **options: Any
    ) -> Any:
        device = default() if device is None else device
        if device is None and not pin_memory:
            return original(*args, **options)
        target = Target(HOST if device is None else streams.resolve(device), pin_memory)
        if target.device.type not in {"cpu", "cuda"}:
            return original(*args, device=device, **options)
        return _placed(original, *args, tensors=tensors, target=target, **options)

    return make


def _placed(
    original: Callable[..., torch.Tensor],
    *args: Any,
    tensors: Tensors,
    target: Target,
    **options: Any,
) -> torch.Tensor:
    with tensors.placing(target):
        made = original(*args, **options)
    if tensors.device_of(made) != target.device:  # torch.tensor fills memory without an operation
        tensors.constant(made, target)
    return made


def _to(
    original: Callable[..., torch.Tensor],
    tensors: Tensors,
    streams: Streams,
    tensor: torch.Tensor,
    *args: Any,
    copy: bool = False,
    **options: Any,
) -> torch.Tensor:
    if args and isinstance(args[0], torch.Tensor):
        args = (tensors.device_of(args[0]), args[0].dtype, *args[1:])
    parsed: tuple[Any, ...] = torch._C._nn._parse_to(*args, **options)
    device, dtype, non_blocking, layout = parsed
    here = tensors.device_of(tensor)
    there = here if device is None else streams.resolve(device)
    dtype = tensor.dtype if dtype is None else dtype
    if there.type not in {"cpu", "cuda"} or here.type == "meta":
        return original(tensor, there, dtype, non_blocking=non_blocking, copy=copy)
    kept = {} if layout is None else {"memory_format": layout}
    if there == here:
        return original(tensor, dtype, non_blocking=non_blocking, copy=copy, **kept)
    # As torch: a copy to the host that nobody waits for goes to pinned memory.
    target = Target(there, is_pinned=non_blocking and there == HOST)
    with tensors.placing(target):
        return original(tensor, dtype, non_blocking=non_blocking, copy=True, **kept)
