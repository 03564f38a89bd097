// What a forward pass of the local engine does between its matrix products, on a CPU in float32.
//
// One call takes queries, keys and values of new tokens of many conversations, norms and rotates them, writes keys and
// values into the blocks of the KV cache and attends to what each token sees: first the prefix of its conversation, then
// the conversation's own blocks. Softmax is computed online (Milakov and Gimelshein 2018), so parts are merged exactly.
// Vectors are those of GCC and Clang, so the same source serves AVX-512, AVX2, SSE and NEON; other loops are left to the
// compiler. HEAD_SIZE is given when it is compiled.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__AVX512F__)
constexpr int WIDEST = 16;
#elif defined(__AVX__)
constexpr int WIDEST = 8;
#else
constexpr int WIDEST = 4;
#endif

constexpr int SIZE = HEAD_SIZE;                                                       // of a head; a multiple of 8
constexpr int LANES = SIZE % WIDEST == 0 ? WIDEST : std::min(WIDEST, 8);              // of a vector
constexpr int VECTORS = SIZE / LANES;                                                 // of a head
constexpr int PLACES = 32;                                                            // computed at once; any block holds a multiple
constexpr int TILE = WIDEST == 16 ? 8 : 4;                                            // queries computed at once
constexpr int FEW = 4;                                                                // fewer queries read keys as they lie
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

typedef float Vector __attribute__((vector_size(LANES * 4)));
typedef int32_t Order __attribute__((vector_size(LANES * 4)));

static inline Vector load(const float* from) {
    Vector to;
    memcpy(&to, from, sizeof to);
    return to;
}

static inline void store(float* to, Vector from) { memcpy(to, &from, sizeof from); }

static inline Vector same(float x) { return x - Vector{}; }

template <class Which> static inline Vector choose(Vector a, Vector b, Which which) {
#if defined(__clang__)
    alignas(64) float both[2 * LANES], chosen[LANES];
    store(both, a), store(both + LANES, b);
    for (int i = 0; i < LANES; i++) chosen[i] = both[which(i)];
    return load(chosen);
#else
    Order order;
    for (int i = 0; i < LANES; i++) order[i] = which(i);
    return __builtin_shuffle(a, b, order);
#endif
}

static inline Vector low(Vector a, Vector b) { return choose(a, b, [](int i) { return i / 2 + i % 2 * LANES; }); }
static inline Vector high(Vector a, Vector b) { return choose(a, b, [](int i) { return i / 2 + i % 2 * LANES + LANES / 2; }); }
static inline Vector even(Vector a, Vector b) { return choose(a, b, [](int i) { return 2 * i; }); }
static inline Vector odd(Vector a, Vector b) { return choose(a, b, [](int i) { return 2 * i + 1; }); }

// e^x for x <= 0, within 1.5 units of the last place (Cephes); a plain loop over it is vectorised
static inline float exponential(float x) {
    x = std::max(x, -87.3f);
    float n = __builtin_rintf(x * 1.44269504088896341f);
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + (r + 1.0f);
    int32_t power = ((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &power, sizeof scale);
    return p * scale;
}

// LANES rows of `from` as LANES columns of `to`: a perfect shuffle for each bit of a row's number
static inline void transpose(const float* from, size_t from_step, float* to, size_t to_step) {
    Vector rows[LANES], next[LANES];
    for (int i = 0; i < LANES; i++) rows[i] = load(from + i * from_step);
    for (int bit = 1; bit < LANES; bit *= 2) {
        for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = low(rows[i], rows[i + LANES / 2]);
            next[2 * i + 1] = high(rows[i], rows[i + LANES / 2]);
        }
        for (int i = 0; i < LANES; i++) rows[i] = next[i];
    }
    for (int i = 0; i < LANES; i++) store(to + i * to_step, rows[i]);
}

// The scores of one query for PLACES keys as they lie
static void score_one(const float* query, const float* keys, float* scores) {
    for (int place = 0; place < PLACES; place += LANES) {
        Vector sums[LANES];
        for (int i = 0; i < LANES; i++) {
            const float* key = keys + (size_t)(place + i) * SIZE;
            sums[i] = load(query) * load(key);
            for (int v = 1; v < VECTORS; v++) sums[i] += load(query + v * LANES) * load(key + v * LANES);
        }
        for (int left = LANES / 2; left; left /= 2)  // sums of neighbours, until each vector's sum is one number
            for (int i = 0; i < left; i++) sums[i] = even(sums[2 * i], sums[2 * i + 1]) + odd(sums[2 * i], sums[2 * i + 1]);
        store(scores + place, sums[0]);
    }
}

// The scores of N queries for PLACES keys that are transposed
template <int N> static void score(const float* const* queries, const float* keys, float (*scores)[PLACES]) {
    constexpr int WIDE = std::min(2, PLACES / LANES);
    for (int place = 0; place < PLACES; place += WIDE * LANES) {
        Vector sums[N][WIDE] = {};
        for (int d = 0; d < SIZE; d++)
            for (int i = 0; i < N; i++)
                for (int w = 0; w < WIDE; w++) sums[i][w] += queries[i][d] * load(keys + d * PLACES + place + w * LANES);
        for (int i = 0; i < N; i++)
            for (int w = 0; w < WIDE; w++) store(scores[i] + place + w * LANES, sums[i][w]);
    }
}

// Turns the first `count` scores into shares of the greatest so far, and the others into 0; returns the factor of what
// was summed before
static float share(float* scores, int count, float& greatest, float& sum) {
    float top = greatest, total = 0;
#pragma omp simd reduction(max : top)
    for (int i = 0; i < PLACES; i++) top = std::max(top, i < count ? scores[i] : NOTHING);
#pragma omp simd reduction(+ : total)
    for (int i = 0; i < PLACES; i++) {
        scores[i] = i < count ? exponential(scores[i] - top) : 0;
        total += scores[i];
    }
    float factor = exponential(greatest - top);  // of nothing at first
    greatest = top;
    sum = sum * factor + total;
    return factor;
}

// Adds `places` values, by their shares, to the outputs of N queries: V vectors of a head at a time
template <int N, int V>
static inline void add_part(const float* values, int places, const float (*shares)[PLACES], const float* factors, float* const* outputs) {
    constexpr int CHAINS = N * V < 4 ? 2 : 1;  // that do not wait for one another
    Vector sums[CHAINS][N][V] = {};
    for (int i = 0; i < N; i++)
        for (int v = 0; v < V; v++) sums[0][i][v] = factors[i] * load(outputs[i] + v * LANES);
    for (int place = 0; place < places; place += CHAINS)  // beyond `places` shares are 0
        for (int c = 0; c < CHAINS; c++)
            for (int v = 0; v < V; v++) {
                Vector value = load(values + (size_t)(place + c) * SIZE + v * LANES);
                for (int i = 0; i < N; i++) sums[c][i][v] += shares[i][place + c] * value;
            }
    for (int i = 0; i < N; i++)
        for (int v = 0; v < V; v++) {
            for (int c = 1; c < CHAINS; c++) sums[0][i][v] += sums[c][i][v];
            store(outputs[i] + v * LANES, sums[0][i][v]);
        }
}

template <int N>
static void add(const float* values, int places, const float (*shares)[PLACES], const float* factors, const float* const* outputs) {
    constexpr int V = std::min(VECTORS, N == 1 ? 4 : 2);
    float* to[N];
    for (int vector = 0; vector < VECTORS; vector += V) {
        for (int i = 0; i < N; i++) to[i] = const_cast<float*>(outputs[i]) + vector * LANES;
        if (vector + V <= VECTORS)
            add_part<N, V>(values + vector * LANES, places, shares, factors, to);
        else
            add_part<N, std::max(1, VECTORS % V)>(values + vector * LANES, places, shares, factors, to);
    }
}

struct Pool {
    float *keys, *values;  // [blocks, key heads, length, SIZE]
    int32_t length;
};

// New tokens [first, end) of one conversation, or of a prefix that is prefilled; in int32, as numpy lays them out
struct Row {
    int32_t first, end;
    int32_t pool, blocks, length;       // where its own blocks are listed, and how many tokens they hold with the new ones
    int32_t prefix_blocks, prefix_length;  // what stands before
};

// Queries of one key head: the softmax so far
struct Softmax {
    std::vector<const float*> query, output;
    std::vector<float> greatest, sum;
};

template <int N> static void attend_tile(Softmax& softmax, int i, const float* keys, const float* values, int places, const int* counts) {
    alignas(64) float scores[N][PLACES];
    float factors[N];
    score<N>(&softmax.query[i], keys, scores);
    for (int n = 0; n < N; n++) {
        int count = std::min(counts[n], PLACES);
        if (count > 0)
            factors[n] = share(scores[n], count, softmax.greatest[i + n], softmax.sum[i + n]);
        else
            factors[n] = 1, memset(scores[n], 0, sizeof scores[n]);
    }
    add<N>(values, places, scores, factors, &softmax.output[i]);
}

// Queries [begin, end) attend to blocks; counts: of each, how many places of the first block on it sees
static void attend_blocks(Softmax& softmax, int begin, int end, const Pool& pool, const int32_t* blocks, int head, int heads, const int* counts) {
    alignas(64) float transposed[SIZE * PLACES];
    int counted[TILE], longest = *std::max_element(counts + begin, counts + end);
    for (int place = 0; place < longest; place += PLACES) {
        size_t start = (((size_t)blocks[place / pool.length] * heads + head) * pool.length + place % pool.length) * SIZE;
        const float *keys = pool.keys + start, *values = pool.values + start;
        int places = std::min(PLACES, longest - place);
        if (end - begin < FEW) {
            for (int i = begin; i < end; i++) {
                alignas(64) float scores[1][PLACES];
                int count = std::min(counts[i] - place, PLACES);
                if (count <= 0) continue;
                score_one(softmax.query[i], keys, scores[0]);
                float factor = share(scores[0], count, softmax.greatest[i], softmax.sum[i]);
                add<1>(values, places, scores, &factor, &softmax.output[i]);
            }
            continue;
        }
        for (int p = 0; p < PLACES; p += LANES)
            for (int d = 0; d < SIZE; d += LANES) transpose(keys + (size_t)p * SIZE + d, SIZE, transposed + d * PLACES + p, PLACES);
        for (int i = begin; i < end;) {
            int left = end - i, tile = left >= TILE ? TILE : left >= 4 ? 4 : 1, seen = 0;
            for (int n = 0; n < tile; n++) seen = std::max(seen, counted[n] = counts[i + n] - place);
            if (seen > 0) {
                int here = std::min(seen, places);
                if (tile == TILE) attend_tile<TILE>(softmax, i, transposed, values, here, counted);
                else if (tile == 4) attend_tile<4>(softmax, i, transposed, values, here, counted);
                else attend_tile<1>(softmax, i, transposed, values, here, counted);
            }
            i += tile;
        }
    }
}

// One head of one token: normed by its root mean square where weights are given, rotated where angles are, scaled
static inline void turn(const float* from, const float* weight, float eps, const float* cosine, const float* sine, float scale, float* to) {
    constexpr int HALF = SIZE / 2;
    float squares = 0, head[SIZE];
#pragma omp simd reduction(+ : squares)
    for (int d = 0; d < SIZE; d++) squares += from[d] * from[d];
    float inverse = weight ? 1 / std::sqrt(squares / SIZE + eps) : 1;
    for (int d = 0; d < SIZE; d++) head[d] = from[d] * inverse * (weight ? weight[d] : 1) * scale;
    if (!cosine) {
        memcpy(to, head, sizeof head);
        return;
    }
    for (int d = 0; d < HALF; d++) {
        to[d] = head[d] * cosine[d] - head[d + HALF] * sine[d];
        to[d + HALF] = head[d + HALF] * cosine[d + HALF] + head[d] * sine[d + HALF];
    }
}

extern "C" {

// query [tokens, heads, SIZE], key and value [tokens, groups, SIZE], each token `step` numbers after the one before;
// cosine, sine [tokens, SIZE] or null; norm [heads + groups, SIZE] or null; row_of: of each token; bundles: numbers of
// first tokens, ascending, and of the last's end: tokens of one prefix, computed by one thread; output like query
void mtgrpo_attend(
    const float* query, const float* key, const float* value, int64_t query_step, int64_t key_step, int64_t value_step,
    const float* cosine, const float* sine, const float* norm, float eps, float scale,
    float* own_keys, float* own_values, int64_t own_length, float* prefix_keys, float* prefix_values, int64_t prefix_length,
    int64_t heads, int64_t groups, int64_t tokens, const Row* rows, const int32_t* row_of, const int32_t* block_lists,
    const int32_t* bundles, int64_t bundle_count, float* output) {
    const Pool pools[2] = {{own_keys, own_values, (int32_t)own_length}, {prefix_keys, prefix_values, (int32_t)prefix_length}};
    const int shared = heads / groups;  // query heads of a key head
    static thread_local std::vector<float> turned;
    turned.resize((size_t)tokens * heads * SIZE);
    float* const queries = turned.data();
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t token = 0; token < tokens; token++) {
            const Row& row = rows[row_of[token]];
            const Pool& pool = pools[row.pool];
            const float *c = cosine ? cosine + token * SIZE : nullptr, *s = sine ? sine + token * SIZE : nullptr;
            int32_t place = row.length - (row.end - token);
            size_t block = block_lists[row.blocks + place / pool.length];
            for (int64_t g = 0; g < groups; g++) {
                size_t to = ((block * groups + g) * pool.length + place % pool.length) * SIZE;
                turn(key + token * key_step + g * SIZE, norm ? norm + (heads + g) * SIZE : nullptr, eps, c, s, 1, pool.keys + to);
                memcpy(pool.values + to, value + token * value_step + g * SIZE, SIZE * sizeof(float));
            }
            for (int64_t h = 0; h < heads; h++)
                turn(query + token * query_step + h * SIZE, norm ? norm + h * SIZE : nullptr, eps, c, s, scale, queries + (token * heads + h) * SIZE);
        }
        Softmax softmax;
        std::vector<int> counts;
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < groups * bundle_count; item++) {
            const int g = item / bundle_count, begin = bundles[item % bundle_count], end = bundles[item % bundle_count + 1];
            const int number = (end - begin) * shared;
            softmax.query.resize(number), softmax.output.resize(number), counts.resize(number);
            softmax.greatest.assign(number, NOTHING), softmax.sum.assign(number, 0);
            for (int i = 0; i < number; i++) {
                size_t at = ((begin + i / shared) * heads + g * shared + i % shared) * SIZE;
                softmax.query[i] = queries + at, softmax.output[i] = output + at;
                memset(output + at, 0, SIZE * sizeof(float));
            }
            const Row& first = rows[row_of[begin]];
            if (first.prefix_length) {
                std::fill(counts.begin(), counts.end(), first.prefix_length);
                attend_blocks(softmax, 0, number, pools[1], block_lists + first.prefix_blocks, g, groups, counts.data());
            }
            for (int token = begin; token < end;) {
                const Row& row = rows[row_of[token]];
                const int until = std::min(row.end, end), from = (token - begin) * shared, to = (until - begin) * shared;
                for (int i = from; i < to; i++) counts[i] = row.length - (row.end - 1 - (begin + i / shared));
                attend_blocks(softmax, from, to, pools[row.pool], block_lists + row.blocks, g, groups, counts.data());
                token = until;
            }
            for (int i = 0; i < number; i++) {
                float* to = const_cast<float*>(softmax.output[i]);
                for (int d = 0; d < SIZE; d++) to[d] /= softmax.sum[i];
            }
        }
    }
}

// x [rows, width] += more, unless that is null; output = x / rms(x) * weight
void mtgrpo_add_norm(float* x, const float* more, const float* weight, float eps, float* output, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static) if (rows * width > 16384)
    for (int64_t row = 0; row < rows; row++) {
        float *to = x + row * width, squares = 0;
        if (more)
            for (int64_t i = 0; i < width; i++) to[i] += more[row * width + i];
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < width; i++) squares += to[i] * to[i];
        float inverse = 1 / std::sqrt(squares / width + eps);
        for (int64_t i = 0; i < width; i++) output[row * width + i] = to[i] * inverse * weight[i];
    }
}

// gate and up [rows, 2, width]; output [rows, width] = gate * sigmoid(gate) * up
void mtgrpo_silu_multiply(const float* gate_up, float* output, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static) if (rows * width > 8192)
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = gate_up + row * 2 * width, *up = gate + width;
        for (int64_t i = 0; i < width; i++) {
            float fading = exponential(-std::fabs(gate[i])), sigmoid = (gate[i] < 0 ? fading : 1) / (1 + fading);
            output[row * width + i] = gate[i] * sigmoid * up[i];
        }
    }
}

// For each row of logits [rows, width], which are overwritten, the first token at which the cumulative probability exceeds
// `uniform` of the whole, and its log-probability; at temperature 0 the likeliest token, as at temperature 1
void mtgrpo_sample(
    float* logits, int64_t rows, int64_t width, const float* temperatures, const double* uniforms, int64_t* tokens, float* logprobs) {
    constexpr int64_t BLOCK = 64;  // whose sum is kept
#pragma omp parallel
    {
        std::vector<double> sums((width + BLOCK - 1) / BLOCK);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            float *x = logits + row * width, top = NOTHING, factor = temperatures[row] ? 1 / temperatures[row] : 1;
#pragma omp simd reduction(max : top)
            for (int64_t i = 0; i < width; i++) top = std::max(top, x[i]);
            int64_t token = temperatures[row] ? 0 : std::find(x, x + width, top) - x;
            double total = 0, passed = 0;
            for (int64_t block = 0; block * BLOCK < width; block++) {
                float sum = 0;
                const int64_t end = std::min(width, (block + 1) * BLOCK);
#pragma omp simd reduction(+ : sum)
                for (int64_t i = block * BLOCK; i < end; i++) {
                    float below = (x[i] - top) * factor;
                    x[i] = below < -87 ? 0 : exponential(below);
                    sum += x[i];
                }
                total += sums[block] = sum;
            }
            if (temperatures[row]) {
                const double point = uniforms[row] * total;
                int64_t block = 0, last = 0;
                while (block + 1 < (int64_t)sums.size() && passed + sums[block] <= point) passed += sums[block++];
                while (block && !sums[block]) block--;  // rounding may lead to the very end
                const int64_t end = std::min(width, (block + 1) * BLOCK);
                for (token = last = block * BLOCK; token < end && (passed += x[token]) <= point; token++)
                    if (x[token]) last = token;
                if (token == end) token = last;
            }
            tokens[row] = std::min(token, width - 1);
            logprobs[row] = std::log(x[tokens[row]] / total);
        }
    }
}
}
