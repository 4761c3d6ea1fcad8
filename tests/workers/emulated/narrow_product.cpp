// narrow_product.cu on a CPU: a kernel, found by its name, is called as a function.
#include "../../../workers/kernels/narrow_product.cu"

int emulated::threads = THREADS;

static Arguments arguments;
#define KERNELS(tiles) \
    {"qkv_" #tiles, [] { qkv_##tiles(arguments); }}, {"o_" #tiles, [] { o_##tiles(arguments); }}, \
        {"gate_up_" #tiles, [] { gate_up_##tiles(arguments); }}, {"down_" #tiles, [] { down_##tiles(arguments); }}

extern "C" int run_narrow_product(const char* name, int blocks, int shared_bytes, int cluster,
                                  const Arguments* step) {
    static const struct { const char* name; void (*run)(); } kernels[] = {KERNELS(1), KERNELS(2)};
    arguments = *step, emulated::cluster = cluster;
    for (const auto& one : kernels)
        if (!std::strcmp(name, one.name)) {
            emulated::run_blocks(blocks, shared_bytes, one.run);
            return 0;
        }
    return 1;
}
