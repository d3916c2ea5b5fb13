"""A GPU whose tensors have shapes and no values, on any machine: code that would wait for it raises.

Host tensors are real, device tensors fake; our kernels only check their arguments. Waits inside libraries are not
detected: FlashInfer's plan, cuBLAS, torch's allocator.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any, NoReturn
from weakref import finalize

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import KernelInterface

aten = torch.ops.aten
ALIGNMENT = 16  # bytes of a pointer, and divisor of a number, of which Triton makes use
CUDA = torch.device("cuda", 0)
BF16 = torch.bfloat16
READ_BY_HOST = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
COPIES = (aten._to_copy.default, aten.copy_.default)
ALLOCATIONS = (aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.detach)
PRODUCTS = (aten.mm, aten.addmm, aten._scaled_mm)
KERNEL_DTYPES = {
    "slot_mapping": torch.int64,
    "table": torch.int32,
    "starts": torch.int32,
}  # argument of a kernel |-> how the kernel reads it, contiguous


PINNED: dict[int, Tensor] = {}  # by address; kept, so that no address is used twice; a library may keep some too


class WaitsError(AssertionError):
    """The host waits for the GPU, or uses memory of the other side."""


class ShapeGpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """torch uses it within `on`, and must not wait for it within `step`."""

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.capability = capability
        self.num_replays = 0
        self.launched: list[str] = []  # kernels of torch and ours, in order
        self.variants: set[tuple[Any, ...]] = set()  # of our kernels that Triton compiles
        self.num_products = 0  # matrix products launched
        self.wide: list[tuple[torch.Size, ...]] = []  # operands of those of float32
        self.held_bytes = self.most_bytes = 0  # of tensors, now and at most; an allocator's fragments come on top
        self._held: dict[int, list[int]] = {}  # by memory: bytes, tensors that view it
        self.num_done = 0  # those known to be done when one step is launched ahead
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._step_begin = 0  # products launched before the last step
        self._pinned = PINNED
        self._is_step = self.is_captured = False

    @contextmanager
    def on(self) -> Iterator[None]:
        """Hides the machine's own GPU, if it has one."""
        with pytest.MonkeyPatch.context() as patch, cuda_guard():
            patch.setattr(torch.cuda, "is_available", lambda: False)
            patch.setattr(torch.cuda, "get_device_capability", lambda *_: self.capability)
            patch.setattr(torch.cuda, "Event", lambda *args, **kwargs: Event(self))
            patch.setattr(torch.cuda, "synchronize", lambda *args: wait("torch.cuda.synchronize"))
            patch.setattr(KernelInterface, "__getitem__", lambda kernel, grid: Launch(kernel, self))
            with self._fake, self:
                yield

    @contextmanager
    def step(self) -> Iterator[None]:
        """Launch a step. The step before it may be running; earlier ones are collected."""
        self.num_done, self._step_begin = self._step_begin, self.num_products
        self._is_step = True
        try:
            yield
        finally:
            self._is_step = False

    def finish(self) -> None:
        """All that was launched is done."""
        self.num_done = self._step_begin = self.num_products

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        """See engine.cuda.graphs.Capture. Each replay runs the captured code again."""

        def run() -> None:
            was_step, self._is_step, self.is_captured = self._is_step, True, True
            try:
                compute()
            finally:
                self._is_step, self.is_captured = was_step, False

        def replay() -> None:
            self.num_replays += 1
            run()

        run()
        return replay

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.ops.prim.device.default:
            return CUDA
        tensors = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, Tensor)]
        is_used = any(map(is_here, tensors))
        target = torch.device(given.get("device") or (CUDA if is_used and is_here(tensors[0]) else "cpu"))
        if target.type == "cpu" and not is_used:
            return self._run_on_host(func, args, given)
        if func.namespace == "aten" and func._can_decompose():  # inference mode leaves this to the dispatcher
            with self:
                return func.decompose(*args, **given)
        if self._is_step and func not in COPIES:
            check(func, args, tensors)
        elif self._is_step and (target.type == "cpu" or not all(map(is_here, tensors))):
            self._check_copy(func, tensors, bool(given.get("non_blocking") or True in args[2:3]))
        if target.type == "cpu":
            if func is not aten.copy_.default:
                raise NotImplementedError(f"{func} gives a tensor of the host that would have values of the device")
            return args[0]
        if func.overloadpacket in PRODUCTS:
            self.num_products += 1
            matrices = [one for one in tensors if one.ndim == 2]
            if any(one.dtype is torch.float32 for one in matrices) and func.overloadpacket is not aten._scaled_mm:
                self.wide.append(tuple(one.shape for one in matrices))
        if func.overloadpacket is aten._grouped_mm and (self.capability[0] not in (9, 10) or args[0].dtype != BF16):
            wait("aten._grouped_mm: elsewhere, and in other dtypes, it reads the ends of groups on the host")
        if not func.is_view and func.overloadpacket not in ALLOCATIONS:
            self.launched.append(str(func))
        if func is aten.mm.dtype:  # torch knows its shape only on a real GPU
            return torch.empty(args[0].shape[0], args[1].shape[1], dtype=args[2], device=CUDA)
        result = func(*args, **given)
        for made in tree_leaves(result):
            if is_here(made):
                self._hold(made)
        return result

    def _hold(self, tensor: Any) -> None:
        """Count the memory of a tensor until its last view is gone."""
        if hasattr(tensor, "is_counted"):
            return
        tensor.is_counted = True
        memory = tensor.untyped_storage()
        held = self._held.setdefault(memory._cdata, [memory.nbytes(), 0])
        if not held[1]:
            self.held_bytes += held[0]
            self.most_bytes = max(self.most_bytes, self.held_bytes)
        held[1] += 1
        finalize(tensor, self._release, memory._cdata)

    def _release(self, memory: int) -> None:
        held = self._held[memory]
        held[1] -= 1
        if not held[1]:
            self.held_bytes -= self._held.pop(memory)[0]

    def _run_on_host(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        is_pinned = kwargs.pop("pin_memory", False)
        with unset_fake_temporarily():
            result = func(*args, **kwargs)
        if is_pinned:
            self._pinned[result.data_ptr()] = result
        return result

    def _check_copy(self, func: Any, tensors: Sequence[Tensor], non_blocking: bool) -> None:
        """Check a copy between host and device."""
        if self.is_captured:
            wait(f"{func}: a graph would repeat a copy between host and device")
        if not any(self.is_pinned(tensor) for tensor in tensors if not is_here(tensor)):
            wait(f"{func} between the device and memory of the host that is not pinned")
        if not non_blocking:
            wait(f"{func} without non_blocking")


class Event:
    """A torch.cuda event, as far as the engine uses it."""

    def __init__(self, gpu: ShapeGpu) -> None:
        self._gpu = gpu

    def record(self) -> None:
        if self._gpu.is_captured:
            wait("Event.record in a graph")
        self._num_products = self._gpu.num_products

    def query(self) -> bool:
        return self._num_products <= self._gpu.num_done

    def synchronize(self) -> None:
        """Raises within a step, unless all work before the event is known to be done."""
        if self._gpu._is_step and self._num_products > self._gpu.num_done:
            wait(f"Event.synchronize, with {self._num_products - self._gpu.num_done} products before it on their way")


class Launch:
    """One of our kernels, with its grid."""

    def __init__(self, kernel: Any, gpu: ShapeGpu) -> None:
        self._kernel, self._gpu = kernel, gpu

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        name: str = self._kernel.fn.__name__
        self._gpu.launched.append(name)
        given = dict(zip(self._kernel.arg_names, args, strict=False)) | kwargs
        params, plain = signature(self._kernel.fn).parameters, self._kernel.kwargs["do_not_specialize"] or ()
        is_any = {key: key not in params or "constexpr" in str(params[key].annotation) for key in given}
        self._gpu.variants.add((name, *(find_variant(one, is_any[key], key in plain) for key, one in given.items())))
        for key, value in given.items():
            for leaf in tree_leaves(value):
                assert not isinstance(leaf, Tensor) or leaf.is_cuda, f"{key} is on {leaf.device}"
            if key in KERNEL_DTYPES:
                assert value.dtype is KERNEL_DTYPES[key] and value.stride(-1) == 1, (key, value)


def find_variant(value: Any, is_constant: bool, is_plain: bool) -> Any:
    """What Triton compiles an argument for. is_constant: for its value. is_plain: a number is of no interest."""
    if isinstance(value, tuple):
        return tuple(find_variant(one, is_constant, is_plain) for one in value)
    if isinstance(value, Tensor):
        return value.dtype, value.storage_offset() * value.dtype.itemsize % ALIGNMENT == 0
    if is_constant or not isinstance(value, int):
        return value if isinstance(value, int | str) else type(value)
    return value.bit_length() < 32, *(() if is_plain else (value == 1, value % ALIGNMENT == 0))


def check(func: Any, args: Sequence[Any], tensors: Sequence[Tensor]) -> None:
    """Check an operation on at least one device tensor."""
    if func.overloadpacket in INDEXING:
        if any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
            wait(f"{func} by a mask: the host reads how many are set")
    elif READ_BY_HOST.intersection(func.tags):
        wait(f"{func}: the host reads its result or its size")
    if any(tensor.dim() and not is_here(tensor) for tensor in tensors):
        wait(f"{func} of tensors of host and device")


def is_here(tensor: Tensor) -> bool:
    """Whether it is on the device; cheaper than its `device` property."""
    return isinstance(tensor, FakeTensor)


def wait(what: str) -> NoReturn:
    raise WaitsError(what)


@contextmanager
def cuda_guard() -> Iterator[None]:
    """Replaces the switch of the current device by tensor slices, which torch without CUDA lacks: does nothing."""
    guards = (ctypes.c_void_p * 2).in_dll(ctypes.CDLL(torch._C.__file__), "_ZN3c104impl26device_guard_impl_registryE")
    cpu, before = guards  # in the order of c10::DeviceType
    guards[1] = cpu
    try:
        yield
    finally:
        guards[1] = before
