// Runs a kernel of the sources that this is compiled with, one thread block after the other, or those of a row at once.
#include "common.cuh"

#include <algorithm>
#include <memory>
#include <sys/mman.h>

Thread* g_now;
bool g_lazy;

namespace {

constexpr int kRingBytes = 256 << 10;
constexpr std::size_t kStackBytes = 256 << 10;

struct Block {
    std::vector<unsigned char> memory;
    std::vector<Warp> warps;
    Barrier barrier;
    unsigned char* ring;

    explicit Block(int threads) : memory(kRingBytes + 1024), warps((threads + 31) / 32), barrier(threads) {
        ring = (unsigned char*)(((std::uintptr_t)memory.data() + 1023) / 1024 * 1024);
        std::memset(ring, 0xff, kRingBytes);  // not a number
    }
};

void (*g_launch)(const void*);
const void* g_args;
ucontext_t g_caller;
std::vector<Thread*> g_ready;
int g_running;
u32 g_draw;

// Memory that the stacks of all launches share, each with a page below it that nothing may touch.
unsigned char* stack_of(std::size_t index) {
    static std::vector<unsigned char*> stacks;
    while (stacks.size() <= index) {
        void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED || mprotect(memory, 4096, PROT_NONE) != 0) std::abort();
        stacks.push_back((unsigned char*)memory);
    }
    return stacks[index];
}

// Draws who is next; the caller of all where nobody can go on.
const ucontext_t* next() {
    if (g_ready.empty()) return &g_caller;
    g_draw ^= g_draw << 13, g_draw ^= g_draw >> 17, g_draw ^= g_draw << 5;
    std::swap(g_ready[g_draw % g_ready.size()], g_ready.back());
    g_now = g_ready.back();
    g_ready.pop_back();
    return &g_now->context;
}

void live() {
    g_launch(g_args);
    g_now->barrier->leave();
    --g_running;
    setcontext(next());
}

}  // namespace

void make_ready(Thread* thread) { g_ready.push_back(thread); }
void wait_for_turn() {
    Thread* self = g_now;
    const ucontext_t* other = next();
    if (other != &self->context) swapcontext(&self->context, other);
}

// `launch` calls the kernel; it is looked up by the caller. `together`: thread blocks of a row that run at once.
// Returns how many threads wait for others that never come.
extern "C" int run(
    void (*launch)(const void*), const void* args, int threads, int columns, int rows, int lazy, int together) {
    g_lazy = lazy != 0, g_launch = launch, g_args = args, g_draw = 2463534242u;
    for (int y = 0; y < rows; ++y)
        for (int first = 0; first < columns; first += together) {
            std::vector<std::unique_ptr<Block>> blocks;
            std::vector<std::unique_ptr<Thread>> all;
            for (int x = first; x < std::min(first + together, columns); ++x) {
                Block* block = blocks.emplace_back(std::make_unique<Block>(threads)).get();
                for (int t = 0; t < threads; ++t) {
                    unsigned char* stack = stack_of(all.size());
                    Thread* thread = all.emplace_back(std::make_unique<Thread>()).get();
                    thread->thread = {(unsigned)t, 0, 0};
                    thread->block = {(unsigned)x, (unsigned)y, 0};
                    thread->grid = {(unsigned)columns, (unsigned)rows, 1}, thread->size = {(unsigned)threads, 1, 1};
                    thread->warps = block->warps.data(), thread->barrier = &block->barrier, thread->ring = block->ring;
                    getcontext(&thread->context);
                    thread->context.uc_stack.ss_sp = stack;
                    thread->context.uc_stack.ss_size = kStackBytes;
                    makecontext(&thread->context, live, 0);
                    make_ready(thread);
                }
            }
            g_running = (int)all.size();
            swapcontext(&g_caller, next());
            if (g_running > 0) return g_running;
        }
    return 0;
}
