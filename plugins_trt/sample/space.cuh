// What the thread blocks of one row share, and how each looks at its part of the vocabulary.
#pragma once
#include "sample/device.cuh"

// What a request says about a row beyond temperature, top_k and top_p; rows.py has the same layout.
struct RowOptions {
    i32 draws;        // 0: there is nothing here
    i32 logprobs;     // likeliest tokens to record beside the chosen one; -1 records nothing
    double min_p;     // 0: no limit
    double typical_p; // 1: no limit
    float repetition, presence, frequency;
    i32 biases;       // first entry of each list; a list has a token at most once
    i32 seen;
    i32 answered;
    i32 forbidden;
    i32 last;         // where the last list ends
    i32 mask;         // row of the masks; -1: every token is allowed
    i32 unused;

    static __device__ __forceinline__ RowOptions none() {
        return {0, -1, 0.0, 1.0, 1.0f, 0.0f, 0.0f, 0, 0, 0, 0, 0, -1, 0};
    }
};
static_assert(sizeof(RowOptions) == 64, "rows.py says so");

struct Entry {
    i32 id;
    i32 value;  // of biases a float, of answered tokens how often
};

constexpr int kMostRecorded = 64;

struct Logprobs {
    float chosen;   // raw logit of the chosen token
    float largest;  // raw logit
    u64 total;      // of exp(l - largest), in units of 2^-36
    i32 ids[kMostRecorded];  // in rank order
    float values[kMostRecorded];
};
static_assert(sizeof(Logprobs) == 528, "rows.py says so");

constexpr int kMostBlocks = 32;  // of a row
constexpr int kBinBits = 10;
constexpr int kBins = 1 << kBinBits;
constexpr int kOwnBins = kBins / kThreads;
constexpr u32 kListed = 512;
constexpr int kLimb = 18;
constexpr int kMostCounted = (1 << (32 - kLimb)) - 256;  // so that sums of limbs fit 32 bits
constexpr float kUnit = 68719476736.0f;  // 2^36
constexpr float kBinsPerUnit = 41.0f;    // so that the last bin's tokens weigh nothing: less than one unit
constexpr int kCounted = 256;            // bins where many tokens may be: in others they are counted if top_k asks
constexpr float kSmallest = 1.17549435e-38f;

struct Histogram {
    u64 masses[kBins];
    u32 counts[kBins];
};

// In device memory; zeros before the first launch, and so is the first histogram before each. Two of a kind are used in turn: what all have read before they met is
// written again after they have met once more.
struct Space {
    u32 arrived, generation;
    u32 listed[3];  // three, since they are read after the next list has been begun
    u32 unused;
    u64 parts[2][2][kMostBlocks];
    u64 orders[2][kListed];
    u64 weights[2][kListed];
    Histogram histograms[3];  // of the first level, and two for the others
};
static_assert(sizeof(Space) == 54296, "contract.py says so");

struct Sample {
    float* logits;              // [rows, vocabulary]; those of rows with options change
    const float* temperatures;  // [rows]; without options, rows below the smallest normal number are left alone
    const i32* top_ks;          // [rows]; 0: all
    const double* top_ps;       // [rows]; 1: all
    const double* numbers;      // [rows], in [0, 1)
    i32* ids;                   // [rows]; -1 where all is forbidden
    Space* space;               // [rows]
    const RowOptions* options;  // [rows], or null
    const Entry* entries;       // of all lists
    float* raw;                 // a word an entry
    const u32* masks;           // [masks, mask_words], a bit a token
    Logprobs* logprobs;         // [rows]
    i64 row_stride;
    i32 vocabulary;
    i32 mask_words;
    i32 largest_known;          // whether ids holds the largest logit's id of each row
    i32 unused;
};

struct Found {
    u64 order;
    u64 mass;  // up to and with it
};

// Where the search for a token stands: it is among the tokens of one bin, or between two orders.
struct Interval {
    int bin;        // of the first level; -1: between the orders
    u64 low, high;  // orders
    u64 mass;       // before it
    u32 count;      // before it
    u32 size;       // tokens in it
};

struct Bins {
    u32 counts[kBins];
    u32 low[kBins], high[kBins];  // limbs of the weights
};
struct List {
    u64 orders[kListed];
    u64 weights[kListed];
};

struct Shared {
    union {
        Bins bins;
        List list;
    };
    u64 warp_first[kThreads / 32], warp_second[kThreads / 32];
    Found found;
    Interval place;
    RowOptions options;
};
static_assert(sizeof(Shared) <= 13 * 1024, "launch.py asks for so much");

__device__ __forceinline__ u64 warp_sum_wide(u64 x) {
#pragma unroll
    for (int lane = 16; lane > 0; lane >>= 1) x += __shfl_xor_sync(kFull, x, lane);
    return x;
}
__device__ __forceinline__ u64 smaller(u64 a, u64 b) { return a < b ? a : b; }

// Smaller is of lower rank: falling logits, then rising ids.
__device__ __forceinline__ u64 order_of(float logit, int id) {
    u32 bits = __float_as_uint(logit + 0.0f);  // -0 counts as 0
    u32 rising = bits ^ ((u32)((i32)bits >> 31) | 0x80000000u);
    return (u64)(~rising) << 32 | (u32)id;
}
__device__ __forceinline__ float logit_of(u64 order) {
    u32 rising = ~(u32)(order >> 32);
    return __uint_as_float(rising ^ ((u32)((i32)(~rising) >> 31) | 0x80000000u));
}
