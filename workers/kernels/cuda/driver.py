"""CUDA's driver, for kernels in cubins: functions, tensor maps, and launches with clusters and dependence."""

import ctypes
from collections.abc import Sequence

import torch

MAX_DYNAMIC_SHARED_SIZE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
COOPERATIVE, CLUSTER_DIMENSION, DEPENDENT_LAUNCH = 2, 4, 6  # CU_LAUNCH_ATTRIBUTE_…
FLOAT16, BFLOAT16 = 6, 9  # CU_TENSOR_MAP_DATA_TYPE_…
SWIZZLE_128, PROMOTE_TO_256 = 3, 3
MAP_BYTES, MAP_ALIGNMENT = 128, 64
LIBRARY = "libcuda.so.1"


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Launch(ctypes.Structure):
    _fields_ = (
        *(("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint)),
        *(("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint)),
    )


class TensorMap(ctypes.Structure):
    """CUtensorMap: how a copy engine finds boxes of a tensor; a kernel's argument by value."""

    _fields_ = (("words", ctypes.c_uint64 * (MAP_BYTES // 8)),)


class Function:
    """A kernel of a module, and how its blocks are launched."""

    def __init__(
        self,
        module: "Module",
        name: str,
        *,
        threads: int,
        shared_bytes: int,
        cluster: int = 1,
        cooperative: bool = False,
    ) -> None:
        """threads: of a block. shared_bytes: what a block takes besides what it declares. cluster: blocks of one.

        cooperative: all blocks run at once, after what is queued before. Other kernels may start earlier, see
        dependent_launch.py.
        """
        self._module, self._handle = module, ctypes.c_void_p()
        module.check("cuModuleGetFunction", ctypes.byref(self._handle), module.handle, name.encode())
        module.check("cuFuncSetAttribute", self._handle, MAX_DYNAMIC_SHARED_SIZE, shared_bytes)
        self._threads, self._shared_bytes = threads, shared_bytes
        attributes = (
            [_Attribute(id=COOPERATIVE, value=(1,))]
            if cooperative
            else [_Attribute(id=CLUSTER_DIMENSION, value=(cluster, 1, 1)), _Attribute(id=DEPENDENT_LAUNCH, value=(1,))]
        )
        self._attributes = (_Attribute * len(attributes))(*attributes)

    def launch(self, blocks: int, arguments: Sequence[ctypes.Structure | ctypes._SimpleCData]) -> None:
        """Launches the kernel on the current stream. arguments: in the order of the kernel's parameters."""
        launch = _Launch(
            grid=(blocks, 1, 1),
            block=(self._threads, 1, 1),
            shared_bytes=self._shared_bytes,
            stream=torch.cuda.current_stream().cuda_stream,
            attributes=self._attributes,
            count=len(self._attributes),
        )
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        self._module.check("cuLaunchKernelEx", ctypes.byref(launch), self._handle, pointers, None)


class Driver:
    """Calls for the current device, whose context exists."""

    def __init__(self, library: str = LIBRARY) -> None:
        self._library = ctypes.CDLL(library)

    def check(self, function: str, *arguments: object) -> None:
        """Calls the driver. RuntimeError where the call fails."""
        status = getattr(self._library, function)(*arguments)
        if status:
            raise RuntimeError(f"{function} gave CUDA error {status}")


class Module(Driver):
    """A loaded cubin, for the current device; as long as the process lives."""

    def __init__(self, cubin: bytes) -> None:
        super().__init__()
        self.handle = ctypes.c_void_p()
        self.check("cuModuleLoadData", ctypes.byref(self.handle), cubin)

    def tensor_map(
        self, address: int, dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]
    ) -> TensorMap:
        """Makes a map of 16-bit numbers. sizes and box: innermost first, box[0] of 128 bytes. strides: in bytes, of all
        sizes but the first, which has none. Outside of the tensor a box is 0.
        """
        room = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
        aligned = -(-ctypes.addressof(room) // MAP_ALIGNMENT) * MAP_ALIGNMENT
        rank = len(sizes)
        encode = {
            "tensor_map": ctypes.c_void_p(aligned),
            "data_type": FLOAT16 if dtype == torch.float16 else BFLOAT16,
            "rank": rank,
            "address": ctypes.c_void_p(address),
            "sizes": (ctypes.c_uint64 * rank)(*sizes),
            "strides": (ctypes.c_uint64 * (rank - 1))(*strides),
            "box": (ctypes.c_uint32 * rank)(*box),
            "element_strides": (ctypes.c_uint32 * rank)(*[1] * rank),
            "interleave": 0,
            "swizzle": SWIZZLE_128,
            "l2_promotion": PROMOTE_TO_256,
            "out_of_bounds_fill": 0,
        }
        self.check("cuTensorMapEncodeTiled", *encode.values())  # in the order of its parameters
        return TensorMap.from_buffer_copy((ctypes.c_char * MAP_BYTES).from_address(aligned))
