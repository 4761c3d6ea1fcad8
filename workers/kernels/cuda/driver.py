"""What kernels in cubins need of CUDA's driver: functions, tensor maps, and launches with clusters and dependence."""

import ctypes
from collections.abc import Sequence

import torch

MAX_DYNAMIC_SHARED_SIZE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
CLUSTER_DIMENSION, DEPENDENT_LAUNCH = 4, 6  # CU_LAUNCH_ATTRIBUTE_…
FLOAT16, BFLOAT16 = 6, 9  # CU_TENSOR_MAP_DATA_TYPE_…
SWIZZLE_128, PROMOTE_TO_256 = 3, 3
MAP_BYTES, MAP_ALIGNMENT = 128, 64


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
    """A kernel of a module; shared_bytes: what each of its blocks takes besides what it declares."""

    def __init__(self, module: "Module", name: str, threads: int, shared_bytes: int, cluster: int) -> None:
        self._module = module
        self._handle = module.function(name, shared_bytes)
        self._threads, self._shared_bytes = threads, shared_bytes
        self._attributes = (_Attribute * 2)(
            _Attribute(CLUSTER_DIMENSION, 0, (cluster, 1, 1)), _Attribute(DEPENDENT_LAUNCH, 0, (1,))
        )

    def launch(self, blocks: int, arguments: Sequence[ctypes.Structure | ctypes._SimpleCData]) -> None:
        """On the current stream; it may start before what is queued there has ended, see dependent_launch.py."""
        stream = torch.cuda.current_stream().cuda_stream
        grid, block = (blocks, 1, 1), (self._threads, 1, 1)
        launch = _Launch(grid, block, self._shared_bytes, stream, self._attributes, len(self._attributes))
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        self._module.check("cuLaunchKernelEx", ctypes.byref(launch), self._handle, pointers, None)


class Module:
    """A loaded cubin, for the current device, whose context exists; as long as the process lives."""

    def __init__(self, cubin: bytes) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._handle = ctypes.c_void_p()
        self.check("cuModuleLoadData", ctypes.byref(self._handle), cubin)

    def function(self, name: str, shared_bytes: int) -> ctypes.c_void_p:
        """The driver's handle of a kernel, whose blocks may take shared_bytes besides what they declare."""
        handle = ctypes.c_void_p()
        self.check("cuModuleGetFunction", ctypes.byref(handle), self._handle, name.encode())
        self.check("cuFuncSetAttribute", handle, MAX_DYNAMIC_SHARED_SIZE, shared_bytes)
        return handle

    def tensor_map(
        self, address: int, dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]
    ) -> TensorMap:
        """Of 16-bit numbers: sizes and box innermost first, box[0] of 128 bytes; strides in bytes, of all sizes but
        the first, which has none. What a box has outside is 0.
        """
        room = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
        place = -(-ctypes.addressof(room) // MAP_ALIGNMENT) * MAP_ALIGNMENT
        rank = len(sizes)
        self.check(
            "cuTensorMapEncodeTiled",
            *(ctypes.c_void_p(place), FLOAT16 if dtype == torch.float16 else BFLOAT16, rank, ctypes.c_void_p(address)),
            *((ctypes.c_uint64 * rank)(*sizes), (ctypes.c_uint64 * (rank - 1))(*strides)),
            *((ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*[1] * rank)),
            *(0, SWIZZLE_128, PROMOTE_TO_256, 0),
        )
        return TensorMap.from_buffer_copy((ctypes.c_char * MAP_BYTES).from_address(place))

    def check(self, function: str, *arguments: object) -> None:
        status = getattr(self._driver, function)(*arguments)
        if status:
            raise RuntimeError(f"{function} gave CUDA error {status}")
