"""GPU memory outside torch's allocator that other processes can open: libcudart through ctypes.

Has not run on a GPU yet; tests use a library with the same functions over host memory (tests/support/fake_cudart.cpp).
"""

import ctypes
import weakref
from collections.abc import Iterable
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import torch

IPC_HANDLE_BYTES = 64
LAZY_ENABLE_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
DEVICE_MEMORY = 2  # cudaMemoryTypeDevice
COPY_DEFAULT = 4  # cudaMemcpyDefault: the driver knows from the addresses which device has them
NATIVE_ATOMICS = 3  # cudaDevP2PAttrNativeAtomicSupported


class CudaError(RuntimeError):
    """A call of libcudart failed; the message contains CUDA's error text."""


class Span(NamedTuple):
    """Bytes to copy, at addresses that the device can read and write."""

    source: int
    target: int
    num_bytes: int


class _Handle(ctypes.Structure):  # cudaIpcMemHandle_t, passed by value
    _fields_ = (("reserved", c_ubyte * IPC_HANDLE_BYTES),)


class _Attributes(ctypes.Structure):  # cudaPointerAttributes of CUDA 13, larger than in CUDA 12
    _fields_ = (
        ("type", c_int), ("device", c_int), ("device_pointer", c_void_p), ("host_pointer", c_void_p),
        ("reserved", c_ubyte * 64),
    )  # fmt: skip


_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cudaSetDevice": (c_int,),
    "cudaMalloc": (POINTER(c_void_p), c_size_t),
    "cudaFree": (c_void_p,),
    "cudaIpcGetMemHandle": (POINTER(_Handle), c_void_p),
    "cudaIpcOpenMemHandle": (POINTER(c_void_p), _Handle, c_uint),
    "cudaIpcCloseMemHandle": (c_void_p,),
    "cudaMemcpyAsync": (c_void_p, c_void_p, c_size_t, c_int, c_void_p),
    "cudaPointerGetAttributes": (POINTER(_Attributes), c_void_p),
    "cudaDeviceGetP2PAttribute": (POINTER(c_int), c_int, c_int, c_int),
}


class Cudart:
    """Calls for one device, from any thread. Each raises CudaError when CUDA fails."""

    def __init__(self, path: str, device_index: int) -> None:
        """Raises OSError when there is no such library."""
        self._library = ctypes.CDLL(path)
        self._library.cudaGetErrorString.restype = c_char_p
        for name, arguments in _ARGUMENTS.items():
            getattr(self._library, name).argtypes = arguments
        self._device_index = device_index

    def allocate(self, num_bytes: int) -> int:
        """The address of new, uninitialised memory."""
        return self._get_address("cudaMalloc", num_bytes)

    def free(self, address: int) -> None:
        self._call("cudaFree", address)

    def export(self, address: int) -> bytes:
        """The handle that lets another process open the allocation that begins at `address`."""
        handle = _Handle()
        self._call("cudaIpcGetMemHandle", byref(handle), address)
        return bytes(handle.reserved)

    def open(self, handle: bytes, num_bytes: int) -> int:
        """Map another process's allocation, with peer access if it is on another GPU; returns its address here.

        Not for memory of this process. Opening twice gives the same address, to be closed twice. CudaError also if it
        is visibly shorter than `num_bytes`: a read beyond its end would break this process's CUDA context.
        """
        if len(handle) != IPC_HANDLE_BYTES:
            raise CudaError(f"an IPC handle has {IPC_HANDLE_BYTES} bytes, not {len(handle)}")
        opened = self._get_address("cudaIpcOpenMemHandle", _Handle.from_buffer_copy(handle), LAZY_ENABLE_PEER_ACCESS)
        try:
            last = _Attributes()
            self._call("cudaPointerGetAttributes", byref(last), opened + num_bytes - 1)
            if last.type != DEVICE_MEMORY:
                raise CudaError(f"the memory opened by an IPC handle has fewer than {num_bytes} bytes")
        except CudaError:
            self.close(opened)
            raise
        return opened

    def close(self, address: int) -> None:
        """Unmap what `open` returned. No copy from there may be in progress."""
        self._call("cudaIpcCloseMemHandle", address)

    def copy(self, spans: Iterable[Span], stream: int) -> None:
        """Copy the spans on a stream, one after the other, mostly by a copy engine. Does not wait.

        stream: cudaStream_t of this device.
        """
        self._check("cudaSetDevice", self._device_index)
        for source, target, num_bytes in spans:
            self._check("cudaMemcpyAsync", target, source, num_bytes, COPY_DEFAULT, stream)

    def has_atomics(self, own: int, peer: int) -> bool:
        """Whether the GPU of index `own` can execute atomic operations in the memory of `peer`: over NVLink."""
        found = c_int()
        self._call("cudaDeviceGetP2PAttribute", byref(found), NATIVE_ATOMICS, own, peer)
        return bool(found.value)

    def _get_address(self, name: str, *arguments: Any) -> int:
        address = c_void_p()
        self._call(name, byref(address), *arguments)
        return address.value or 0

    def _call(self, name: str, *arguments: Any) -> None:
        self._check("cudaSetDevice", self._device_index)  # the current device is per thread
        self._check(name, *arguments)

    def _check(self, name: str, *arguments: Any) -> None:
        error = getattr(self._library, name)(*arguments)
        if error:
            self._library.cudaGetLastError()  # clears the error, or torch reports it after its next launch
            words = self._library.cudaGetErrorString(error).decode()
            raise CudaError(f"{name}: {words} (error {error})")


class DeviceBytes:
    """Owns an allocation. Tensors made from it keep it alive. Freed with the last of them, or when the process ends."""

    def __init__(self, cudart: Cudart, num_bytes: int) -> None:
        self.address = cudart.allocate(num_bytes)
        self.num_bytes = num_bytes
        weakref.finalize(self, cudart.free, self.address).atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


def find_cudart() -> str:
    """The libcudart that torch has loaded, so that both share contexts; else a name for the linker."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        name = line.split(maxsplit=5)[5:]
        if name and Path(name[0]).name.startswith("libcudart"):
            return name[0]
    return f"libcudart.so.{(torch.version.cuda or '13').partition('.')[0]}"
