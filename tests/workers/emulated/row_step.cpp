// row_step.cu on a CPU, called as one function.
#include "../../../workers/kernels/row_step.cu"

int emulated::threads = THREADS;

static const Step* step_to_run;
static void run_fiber() {
    row_step(*step_to_run);
    emulated::current->done = true;
    emulated::give_way();
}

extern "C" int run_row_step(const Step* step) {
    using namespace emulated;
    step_to_run = step;
    switches = 0;
    std::vector<BlockState> blocks(BLOCKS);
    std::vector<WarpState> warps(BLOCKS * WARPS);
    std::vector<Fiber> fibers(BLOCKS * THREADS);
    for (BlockState& block : blocks) {
        block.memory = std::make_unique<unsigned char[]>(sizeof(Block) + 128);
        std::memset(block.memory.get(), 0xff, sizeof(Block) + 128);  // NaN
    }
    for (int index = 0; index < (int)fibers.size(); index++) {
        Fiber& fiber = fibers[index];
        fiber.thread = index % THREADS, fiber.block = index / THREADS;
        fiber.of_block = &blocks[fiber.block], fiber.of_warp = &warps[index / 32];
        fiber.memory = (unsigned char*)(((unsigned long long)fiber.of_block->memory.get() + 127) / 128 * 128);
        fiber.stack.resize(64 << 10);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, run_fiber, 0);
    }
    for (bool busy = true; busy;) {
        busy = false;
        for (Fiber& fiber : fibers) {
            if (fiber.done) continue;
            busy = true;
            go_on(fiber);
        }
    }
    return 0;
}
