// Runs a kernel of the sources that this is compiled with, one thread block after the other.
#include "common.cuh"

#include <thread>

thread_local Place threadIdx, blockIdx, gridDim;
thread_local std::vector<Copy> t_open;
thread_local std::vector<std::vector<Copy>> t_groups;
Warp* g_warps;
std::barrier<>* g_block;
unsigned char* g_ring;
bool g_lazy;

constexpr int kRingBytes = 256 << 10;

// `launch` calls the kernel; it is looked up by the caller.
extern "C" void run(void (*launch)(const void*), const void* args, int threads, int columns, int rows, int lazy) {
    std::vector<unsigned char> memory(kRingBytes + 1024);
    g_ring = (unsigned char*)(((std::uintptr_t)memory.data() + 1023) / 1024 * 1024);
    g_lazy = lazy != 0;
    for (int y = 0; y < rows; ++y)
        for (int x = 0; x < columns; ++x) {
            std::memset(g_ring, 0xff, kRingBytes);  // not a number
            std::vector<Warp> warps((threads + 31) / 32);
            std::barrier<> block(threads);
            g_warps = warps.data(), g_block = &block;
            std::vector<std::thread> running;
            for (int t = 0; t < threads; ++t)
                running.emplace_back([=] {
                    threadIdx = {(unsigned)t, 0, 0};
                    blockIdx = {(unsigned)x, (unsigned)y, 0};
                    gridDim = {(unsigned)columns, (unsigned)rows, 1};
                    launch(args);
                    g_block->arrive_and_drop();  // a thread that returned is waited for no longer
                });
            for (std::thread& thread : running) thread.join();
        }
}
