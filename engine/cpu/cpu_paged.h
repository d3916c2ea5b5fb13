// What kernels of paged attention share: a batch, a layer, a thread's memory.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "cpu_products.h"

// Fixed for all layers of one batch; mirrored field by field in cpu_paged.py.
struct BatonBatch {
    void* pool;                    // runs of page_tokens rows of head_dim; the strides below locate a run
    const int32_t* cu_seqlens_q;   // [B + 1]
    const int32_t* seq_lens;       // [B]
    const int32_t* page_table;     // [B, page_table_width]
    const int64_t* slot_mapping;   // [num_tokens]: page * page_tokens + row in the page
    const int32_t* blocks;         // [num_blocks, 2]: sequence, first query position among its new tokens
    const int32_t* ancestors;      // [num_tokens]: of a tree's tokens, the new tokens that each sees, by bits; null: none
    int64_t page_table_width, num_tokens, num_blocks, block_tokens;
    int64_t page_stride, head_stride, layer_stride;  // in elements
    int64_t kv_stride;  // from keys to values; 0: a value is the first value_dim of its key
    int64_t num_heads, num_kv_heads, page_tokens, head_dim, value_dim;
    float scale, softcap;  // softcap: 0 for none
};

// One layer's tensors, [T, heads, head_dim], out: [T, heads, value_dim]; strides in elements.
struct BatonLayer {
    const void *query, *key, *value;  // key and value: null if they are in the pool
    void* out;  // contiguous
    int64_t query_token, query_head, key_token, key_head, value_token, value_head;
    int64_t layer, window;  // window: keys a query sees, itself included
    const float* sinks;     // [num_heads] logits that join the softmax and have no value; null: none
};

namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// 2^x for x <= 0; exactly 0 below -100, so that no product with it is a (slow) denormal.
inline Floats exp2_nonpositive(Floats x) { return exp2_in_range(x < -100.0f ? Floats{} - 127.0f : x); }

// An item of work: some of a sequence's queries with one KV head.
struct Block {
    int64_t head, next_head;               // next: the sequence's head that this thread will probably process next
    int64_t token, position, num_queries;  // token and position: the first query's, in the batch and in its sequence
    int64_t first_new;                     // position of the sequence's first new token
    const int32_t* pages;

    Block(const BatonBatch& batch, int64_t item, int num_threads) {
        const int32_t* const block = batch.blocks + item / batch.num_kv_heads * 2;
        const int64_t sequence = block[0], first = block[1], begin = batch.cu_seqlens_q[sequence];
        const int64_t query_len = batch.cu_seqlens_q[sequence + 1] - begin;
        head = item % batch.num_kv_heads, next_head = head + num_threads;
        first_new = batch.seq_lens[sequence] - query_len;
        token = begin + first, position = first_new + first;
        num_queries = std::min(batch.block_tokens, query_len - first);
        pages = batch.page_table + sequence * batch.page_table_width;
    }
};

// One thread's memory, kept between calls; grows to the largest block so far.
struct Scratch {
    char* memory = nullptr;
    size_t capacity = 0, used = 0;
    ~Scratch() { std::free(memory); }
    void reserve(size_t bytes) {
        used = 0;
        if (bytes <= capacity) return;
        std::free(memory);
        capacity = round_up(bytes, 4096);
        memory = (char*)std::aligned_alloc(64, capacity);
        if (!memory) std::abort();
    }
    template <class T> T* take(size_t count) {
        T* at = (T*)(memory + used);
        used += round_up(count * sizeof(T), 64);
        return at;
    }
};
inline thread_local Scratch scratch;

}  // namespace
