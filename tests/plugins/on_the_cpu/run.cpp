// Runs a kernel of the sources that this is compiled with, one thread block after the other, or those of a row at once.
#include "common.cuh"

#include <memory>
#include <thread>

thread_local Place threadIdx, blockIdx, gridDim;
thread_local std::vector<Copy> t_open;
thread_local std::vector<std::vector<Copy>> t_groups;
thread_local Warp* g_warps;
thread_local std::barrier<>* g_block;
thread_local unsigned char* g_ring;
bool g_lazy;

constexpr int kRingBytes = 256 << 10;

struct Block {
    std::vector<unsigned char> memory;
    std::vector<Warp> warps;
    std::barrier<> barrier;
    unsigned char* ring;

    explicit Block(int threads) : memory(kRingBytes + 1024), warps((threads + 31) / 32), barrier(threads) {
        ring = (unsigned char*)(((std::uintptr_t)memory.data() + 1023) / 1024 * 1024);
        std::memset(ring, 0xff, kRingBytes);  // not a number
    }
};

// `launch` calls the kernel; it is looked up by the caller. `together`: thread blocks of a row that run at once.
extern "C" void run(
    void (*launch)(const void*), const void* args, int threads, int columns, int rows, int lazy, int together) {
    g_lazy = lazy != 0;
    for (int y = 0; y < rows; ++y)
        for (int first = 0; first < columns; first += together) {
            std::vector<std::unique_ptr<Block>> blocks;
            std::vector<std::thread> running;
            for (int x = first; x < std::min(first + together, columns); ++x) {
                Block* block = blocks.emplace_back(std::make_unique<Block>(threads)).get();
                for (int t = 0; t < threads; ++t)
                    running.emplace_back([=] {
                        threadIdx = {(unsigned)t, 0, 0};
                        blockIdx = {(unsigned)x, (unsigned)y, 0};
                        gridDim = {(unsigned)columns, (unsigned)rows, 1};
                        g_warps = block->warps.data(), g_block = &block->barrier, g_ring = block->ring;
                        launch(args);
                        block->barrier.arrive_and_drop();  // a thread that returned is waited for no longer
                    });
            }
            for (std::thread& thread : running) thread.join();
        }
}
