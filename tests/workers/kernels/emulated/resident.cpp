// resident.cu on a CPU: a kernel, found by its name and the shared memory that it takes, is called as a function.
#include "../../../../workers/kernels/skinny_gemm/resident.cu"

int emulated::threads = THREADS;

static Arguments arguments;
#define NAMED(kernel) {#kernel, kernel##_product::BYTES, [] { kernel(arguments); }}
#define KERNELS(tiles) NAMED(qkv_##tiles), NAMED(o_##tiles), NAMED(gate_up_##tiles), NAMED(down_##tiles)

extern "C" int run_resident_gemm(const char* name, int blocks, int shared_bytes, int cluster,
                                  const Arguments* launched) {
    static const struct { const char* name; int bytes; void (*run)(); } kernels[] = {KERNELS(1), KERNELS(2)};
    arguments = *launched, emulated::cluster = cluster;
    for (const auto& one : kernels)
        if (!std::strcmp(name, one.name) && shared_bytes == one.bytes) {
            emulated::run_blocks(blocks, shared_bytes, one.run);
            return 0;
        }
    return 1;
}
