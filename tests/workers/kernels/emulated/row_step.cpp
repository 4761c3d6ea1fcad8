// row_step.cu on a CPU, called as one function.
#include "../../../../workers/kernels/decode_megakernel/row_step.cu"

int emulated::threads = THREADS;

static const Step* step_to_run;
static void run_fiber() { row_step(*step_to_run); }

extern "C" int run_row_step(const Step* step) {
    step_to_run = step;
    emulated::run_blocks(BLOCKS, sizeof(Block), run_fiber);
    return 0;
}
