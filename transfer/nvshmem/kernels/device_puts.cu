// KV into pages of a PE whose memory this process cannot map, by puts that the GPU itself issues.
//
// A target is named by its symmetric address: where the same object stands in this PE's own memory. Pools are
// [num_pages, layers, planes, num_kv_heads, page_size, head_dim]; a row is one head's K or V of one position. No put is
// complete before a later quiet or post of this PE. Every parameter is 64 bits wide, as the launcher passes it.

#include <cstdint>

#include <nvshmem.h>
#include <nvshmemx.h>

namespace {

constexpr int64_t WARP = 32;
constexpr int64_t ALIGNMENT = 16;  // of each part of a run that is cut

__device__ int64_t first_warp() { return (blockIdx.x * int64_t(blockDim.x) + threadIdx.x) / WARP; }

__device__ int64_t num_warps() { return gridDim.x * int64_t(blockDim.x) / WARP; }

// Where row `row` of a slot is in a pool, in bytes.
__device__ int64_t offset_of(int64_t slot, int64_t row, int64_t page_bytes, int64_t page_size, int64_t row_bytes) {
    return slot / page_size * page_bytes + (row * page_size + slot % page_size) * row_bytes;
}

}  // namespace

// sizes[i] bytes from source + source_offsets[i] to target + target_offsets[i]. Grid (x, y): the blocks of one x divide its runs.
extern "C" __global__ void put_runs(char* target, const char* source, const int64_t* target_offsets,
                                    const int64_t* source_offsets, const int64_t* sizes, int64_t num_runs, int64_t pe) {
    for (int64_t run = blockIdx.x; run < num_runs; run += gridDim.x) {
        int64_t part = (sizes[run] + gridDim.y - 1) / gridDim.y;
        part = (part + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        const int64_t begin = part * blockIdx.y;
        const int64_t left = sizes[run] - begin;
        if (left > 0) {
            nvshmemx_putmem_nbi_block(target + target_offsets[run] + begin, source + source_offsets[run] + begin,
                                      left < part ? left : part, int(pe));
        }
    }
}

// All `rows` rows of source_slots[i] of one pool to target_slots[i] of the other, a warp a row.
extern "C" __global__ void put_slots(char* target, const char* source, const int32_t* target_slots,
                                     const int32_t* source_slots, int64_t num_slots, int64_t rows, int64_t page_size,
                                     int64_t row_bytes, int64_t pe) {
    const int64_t page_bytes = rows * page_size * row_bytes;
    for (int64_t item = first_warp(); item < num_slots * rows; item += num_warps()) {
        const int64_t slot = item / rows, row = item % rows;
        nvshmemx_putmem_nbi_warp(target + offset_of(target_slots[slot], row, page_bytes, page_size, row_bytes),
                                 source + offset_of(source_slots[slot], row, page_bytes, page_size, row_bytes), row_bytes,
                                 int(pe));
    }
}

// source, [planes, num_tokens, num_kv_heads] rows, to one layer of slots[i]; first_row: the layer's in a page. A warp a
// row.
extern "C" __global__ void put_tokens(char* target, const char* source, const int32_t* slots, int64_t planes,
                                      int64_t num_tokens, int64_t heads, int64_t first_row, int64_t page_bytes,
                                      int64_t page_size, int64_t row_bytes, int64_t pe) {
    for (int64_t item = first_warp(); item < planes * num_tokens * heads; item += num_warps()) {
        const int64_t head = item % heads, token = item / heads % num_tokens, plane = item / heads / num_tokens;
        const int64_t row = first_row + plane * heads + head;
        nvshmemx_putmem_nbi_warp(target + offset_of(slots[token], row, page_bytes, page_size, row_bytes),
                                 source + item * row_bytes, row_bytes, int(pe));
    }
}

// One thread: all puts of this PE are complete where they went.
extern "C" __global__ void quiet() { nvshmem_quiet(); }

// One thread: behind all puts of this PE, the payload, and behind that the signal.
extern "C" __global__ void post_row(int64_t* signals, int64_t num_signals, int64_t row, int64_t signal, int64_t payload,
                                    int64_t pe) {
    nvshmem_quiet();
    nvshmem_int64_p(signals + num_signals + row, payload, int(pe));
    nvshmem_fence();
    nvshmemx_signal_op(reinterpret_cast<uint64_t*>(signals + row), uint64_t(signal), NVSHMEM_SIGNAL_SET, int(pe));
}
