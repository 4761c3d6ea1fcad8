"""The memory that a worker takes of its GPU beyond weights and pages."""

# Memory that is allocated after the pages, and cannot be measured before:
FLASHINFER_BYTES = 256 << 20  # FlashInfer's workspace
NVSHMEM_BYTES = 1 << 30  # NVSHMEM's own state, and its heap growing in steps of 512 MiB
MARGIN_BYTES = 2 << 30  # CUDA graphs with their buffers, code of kernels, fragments in torch's allocator
RESERVED_BYTES = FLASHINFER_BYTES + NVSHMEM_BYTES + MARGIN_BYTES
GPU_MEMORY_UTILIZATION = 0.9  # of a GPU's memory, where cache.gpu_memory_utilization is null
