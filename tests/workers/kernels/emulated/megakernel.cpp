// megakernel.cu on a CPU, called as one function.
#include "../../../../workers/kernels/decode_megakernel/megakernel.cu"

int emulated::threads = THREADS;

static const Arguments* arguments;
static void run_fiber() { decode_megakernel(*arguments); }

extern "C" int run_megakernel(const Arguments* args) {
    arguments = args;
    emulated::run_blocks(BLOCKS, sizeof(Block), run_fiber);
    return 0;
}

extern "C" void widen_fours(const unsigned* fours, unsigned* pairs, int count) {
    for (int index = 0; index < count; index++) {
        uint2 both = widen_four(fours[index]);
        pairs[2 * index] = both.x, pairs[2 * index + 1] = both.y;
    }
}
