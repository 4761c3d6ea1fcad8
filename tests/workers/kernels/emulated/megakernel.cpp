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
