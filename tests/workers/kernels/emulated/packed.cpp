// packed.cu on a CPU: a kernel, found by its name, is called as a function.
#include "../../../../workers/kernels/skinny_gemm/packed.cu"

int emulated::threads = 32 * WARPS;

static Arguments arguments;
#undef KERNEL
#define KERNEL(tiles, octets, e2m1) {"packed_gemm_" #tiles "_" #octets "_" #e2m1, [] { multiply_rows<tiles, octets, e2m1>(arguments); }},

extern "C" int run_packed_gemm(const char* name, int blocks, int shared_bytes, const Arguments* launched) {
    static const struct { const char* name; void (*run)(); } kernels[] = {KERNELS};
    arguments = *launched;
    for (const auto& one : kernels)
        if (!std::strcmp(name, one.name)) {
            emulated::run_blocks(blocks, shared_bytes, one.run);
            return 0;
        }
    return 1;
}
