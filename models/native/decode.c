/* A step of few tokens of a Llama-like model on a CPU, decodes or a prompt's last ones, through all layers in one call.

Such a step is bound by the bytes of the weights and, operator by operator, by the calls: hundreds of them, for each of
which the threads are called together. Here they are called once, pass through all layers and meet six times in each.
Weights are 4-bit groups of 32 with an fp32 scale and offset (models/int4.py). Sums are fp32, and those of a row are
taken in the same order whatever rows are beside it. decoder.py has the other end of the structs.

Vectors are the compiler's own type: sixteen floats, which it cuts up where the CPU's are shorter. */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

typedef float f32x16 __attribute__((vector_size(64)));
typedef float f32x16u __attribute__((vector_size(64), aligned(4)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16u __attribute__((vector_size(32), aligned(2)));

#define GROUP 32
#define SPAN 64        /* columns whose nibbles lie together */
#define OUTPUTS 4      /* of a matrix at a time where rows are few: their sums do not wait for one another */

/* BF16: the type of the cache, of the head and of what goes into a product. Where the CPU multiplies it, products take
   its bits; elsewhere, and in fp32, they take floats. */
#ifdef BF16
typedef uint16_t stored;
#else
typedef float stored;
#endif
#if defined(BF16) && defined(__AVX512BF16__)
typedef uint16_t factor;
#else
typedef float factor;
#endif

/* w[n, k] = q * scale + offset. q: of each span sixteen uint16, whose nibble j at place i is column 16 j + i. */
typedef struct {
    int64_t rows, columns;
    const uint16_t *q;     /* [rows, columns / 64, 16] */
    const float *scale;    /* [rows, columns / 32, 2]: scale, offset */
} Matrix;

typedef struct {
    Matrix qkv, o, gate_up, down;
    const float *input_norm, *post_norm, *q_norm, *k_norm; /* the last two NULL where heads are not normed */
} Layer;

typedef struct {
    int64_t num_layers, hidden, heads, kv_heads, dim, inner;
    float eps, scale;
    const Layer *layers;
    const float *final_norm;
    int64_t vocab;
    const stored *head; /* [vocab, hidden] */
} Model;

/* What one call works on. */
typedef struct {
    int64_t rows; /* tokens: each has a row of its own, also where several are of one sequence */
    float *x;                    /* [rows, hidden]: embeddings, then what the layers make of them */
    stored *hidden;              /* [rows, hidden]: after the final norm; where logits are asked for, given */
    const float *cos, *sin;      /* [rows, dim], sin negative in its first half */
    stored *k_cache, *v_cache;   /* of the first layer: [blocks, block_size, kv_heads, dim] */
    int64_t layer_stride;        /* elements from one layer's to the next one's */
    int64_t block_size;
    const int64_t *slots;        /* [rows]: where the new key and value go */
    const int32_t *tables;       /* [rows, table_stride]: block ids */
    int64_t table_stride;
    const int32_t *lengths;      /* [rows]: how many tokens of its sequence a row attends to, itself the last */
    float *logits;               /* [rows, vocab] */
} Step;

/* What a step needs beside. */
typedef struct {
    const Model *model;
    const Step *step;
    float *y;                 /* [rows, y_width]: a product, of which each thread has columns of its own */
    float *qkv;               /* [rows, (heads + 2 * kv_heads) * dim] */
    factor *attended, *gated; /* [rows, heads * dim], [rows, inner] */
    int64_t longest;          /* room for the scores of one head */
    float *own;               /* of each thread `own_room`: scores of the heads of one KV head, then normed rows */
    int64_t own_room;
} Work;

/* ------------------------------------------------------------------------------------------------ vectors */

static inline f32x16 load(const float *p) { return *(const f32x16u *)p; }

static inline f32x16 load_bf16(const uint16_t *p) {
    return (f32x16)(__builtin_convertvector(*(const u16x16u *)p, u32x16) << 16);
}

static inline void put(float *p, f32x16 v) { *(f32x16u *)p = v; }

static inline void put_bf16(uint16_t *p, f32x16 v) { /* to nearest, ties to even; NaN stays one */
    u32x16 bits = (u32x16)v, up = bits + 0x7fff + ((bits >> 16) & 1), is_nan = (u32x16)(v != v);
    *(u16x16u *)p = __builtin_convertvector(((up & ~is_nan) | ((bits | 0x400000) & is_nan)) >> 16, u16x16u);
}

#ifdef BF16
#define load_stored load_bf16
#define put_stored put_bf16
#else
#define load_stored load
#define put_stored put
#endif

static inline float sum(f32x16 v) {
    typedef float f32x8 __attribute__((vector_size(32)));
    typedef float f32x4 __attribute__((vector_size(16)));
    union { f32x16 whole; f32x8 half[2]; } a = {v};
    union { f32x8 whole; f32x4 half[2]; } b = {a.half[0] + a.half[1]};
    f32x4 c = b.half[0] + b.half[1];
    return (c[0] + c[2]) + (c[1] + c[3]);
}

static inline f32x16 either(i32x16 holds, f32x16 yes, f32x16 no) { /* holds: -1 or 0, lane by lane */
    return (f32x16)(((i32x16)yes & holds) | ((i32x16)no & ~holds));
}

/* e^x to some 1e-7 of itself, x cut off at -87 and 88: 2^n e^r, a polynomial for |r| <= ln(2) / 2 (Cephes' expf). */
static inline f32x16 exp16(f32x16 x) {
    const f32x16 zero = {0}, least = zero - 87, most = zero + 88, half = zero + 0.5f;
    x = either(x < least, least, either(x > most, most, x));
    const f32x16 nearest = (f32x16)(((i32x16)x & INT32_MIN) | (i32x16)half); /* of x's sign */
    const i32x16 n = __builtin_convertvector(x * 1.44269504f + nearest, i32x16);
    const f32x16 whole = __builtin_convertvector(n, f32x16);
    const f32x16 r = x - whole * 0.693359375f + whole * 2.12194440e-4f; /* ln(2) in two parts */
    f32x16 p = r * 1.9875691e-4f + 1.3981999e-3f;
    p = p * r + 8.3334519e-3f;
    p = p * r + 4.1665796e-2f;
    p = p * r + 0.16666665f;
    p = p * r + 0.5f;
    return (p * r * r + r + 1) * (f32x16)((n + 127) << 23);
}

/* ln(1 + x) for -1 < x <= 0 to some 1e-7 of itself: the logarithm of the rounded 1 + x (Cephes' logf), made up for the
   rounding (Kahan). */
static inline f32x16 log1p16(f32x16 x) {
    const f32x16 zero = {0}, one = zero + 1, sum = one + x;
    i32x16 exponent = ((i32x16)sum >> 23) - 126;
    f32x16 m = (f32x16)(((i32x16)sum & 0x7fffff) | 0x3f000000); /* from 1/2 to 1 */
    const i32x16 small = m < zero + 0.70710678f;
    exponent += small; /* -1 where it holds */
    m = m - one + (f32x16)((i32x16)m & small);
    const f32x16 whole = __builtin_convertvector(exponent, f32x16), square = m * m;
    f32x16 p = m * 7.0376836292e-2f - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    const f32x16 log = m + (m * square * p - whole * 2.12194440e-4f - square * 0.5f) + whole * 0.693359375f;
    const i32x16 tiny = sum == one;
    return either(tiny, x, log * (x / either(tiny, one, sum - one)));
}

/* Sixteen weights of a group from the low nibbles of `bits`. */
static inline f32x16 weights(u32x16 bits, const float *scale) {
#ifdef __AVX512F__ /* looked up among the group's sixteen possible ones */
    const f32x16 numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (f32x16)_mm512_permutexvar_ps((__m512i)bits, (__m512)(numbers * scale[0] + scale[1]));
#else
    return __builtin_convertvector((i32x16)(bits & 15), f32x16) * scale[0] + scale[1];
#endif
}

/* 32 columns of weights or of the head as they are multiplied, and what they add to a sum with 32 of x. */
#if defined(BF16) && defined(__AVX512BF16__)
typedef __m512bh Factors;
static inline Factors factors(f32x16 first, f32x16 second) {
    return _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
}
static inline Factors stored_factors(const uint16_t *p) { return (__m512bh)_mm512_loadu_si512(p); }
static inline f32x16 add_product(f32x16 sum, Factors w, const uint16_t *x) {
    return (f32x16)_mm512_dpbf16_ps((__m512)sum, w, (__m512bh)_mm512_loadu_si512(x));
}
#define put_factors put_bf16
#else
typedef struct { f32x16 first, second; } Factors;
static inline Factors factors(f32x16 first, f32x16 second) { return (Factors){first, second}; }
static inline Factors stored_factors(const stored *p) { return (Factors){load_stored(p), load_stored(p + 16)}; }
static inline f32x16 add_product(f32x16 sum, Factors w, const float *x) {
    return sum + w.first * load(x) + w.second * load(x + 16);
}
#define put_factors put
#endif

/* ----------------------------------------------------------------------------------------------- products */

/* y[b, n] = x[b] . w[n] for R outputs from n on and B rows. */
#define PRODUCT(R, B)                                                                                              \
    static inline void product_##R##_##B(const Matrix *w, int64_t n, const factor *x, float *y, int64_t y_stride) { \
        const int64_t columns = w->columns, spans = columns / SPAN;                                                \
        f32x16 even[R][B] = {0}, odd[R][B] = {0};                                                                  \
        for (int64_t s = 0; s < spans; s++) {                                                                      \
            for (int r = 0; r < R; r++) {                                                                          \
                int64_t at = (n + r) * spans + s;                                                                  \
                u32x16 bits = __builtin_convertvector(*(const u16x16u *)(w->q + at * 16), u32x16);                 \
                const float *scale = w->scale + at * 4;                                                            \
                __builtin_prefetch(w->q + (at + R * spans) * 16);                                                  \
                __builtin_prefetch(scale + R * spans * 4);                                                         \
                Factors first = factors(weights(bits, scale), weights(bits >> 4, scale));                          \
                Factors second = factors(weights(bits >> 8, scale + 2), weights(bits >> 12, scale + 2));           \
                for (int b = 0; b < B; b++) {                                                                      \
                    even[r][b] = add_product(even[r][b], first, x + b * columns + s * SPAN);                       \
                    odd[r][b] = add_product(odd[r][b], second, x + b * columns + s * SPAN + GROUP);                \
                }                                                                                                  \
            }                                                                                                      \
        }                                                                                                          \
        for (int r = 0; r < R; r++)                                                                                \
            for (int b = 0; b < B; b++) y[b * y_stride + n + r] = sum(even[r][b] + odd[r][b]);                      \
    }

PRODUCT(4, 1)
PRODUCT(4, 2)
PRODUCT(2, 4)
PRODUCT(1, 8)

/* y[b, n] for n in [first, last), both multiples of OUTPUTS, and all rows of x [rows, columns]. */
static void product(const Matrix *w, int64_t first, int64_t last, const factor *x, int64_t rows, float *y,
                    int64_t y_stride) {
    for (int64_t b = 0; b < rows;) {
        const factor *from = x + b * w->columns;
        float *to = y + b * y_stride;
        if (rows - b >= 8) {
            for (int64_t n = first; n < last; n++) product_1_8(w, n, from, to, y_stride);
            b += 8;
        } else if (rows - b >= 4) {
            for (int64_t n = first; n < last; n += 2) product_2_4(w, n, from, to, y_stride);
            b += 4;
        } else if (rows - b >= 2) {
            for (int64_t n = first; n < last; n += 4) product_4_2(w, n, from, to, y_stride);
            b += 2;
        } else {
            for (int64_t n = first; n < last; n += 4) product_4_1(w, n, from, to, y_stride);
            b += 1;
        }
    }
}

/* y[b, n] = x[b] . head[n] for n in [first, last). */
static void head_product(const Model *m, int64_t first, int64_t last, const factor *x, int64_t rows, float *y) {
    const int64_t hidden = m->hidden;
    for (int64_t n = first; n < last; n++)
        for (int64_t b = 0; b < rows; b++) {
            f32x16 even = {0}, odd = {0};
            for (int64_t i = 0; i < hidden; i += SPAN) {
                if (b == 0) {
                    __builtin_prefetch(m->head + (n + 4) * hidden + i);
                    __builtin_prefetch(m->head + (n + 4) * hidden + i + GROUP);
                }
                even = add_product(even, stored_factors(m->head + n * hidden + i), x + b * hidden + i);
                odd = add_product(odd, stored_factors(m->head + n * hidden + i + GROUP), x + b * hidden + i + GROUP);
            }
            y[b * m->vocab + n] = sum(even + odd);
        }
}

static float norm_scale(const float *x, int64_t size, float eps) {
    f32x16 squares = {0};
    for (int64_t i = 0; i < size; i += 16) squares += load(x + i) * load(x + i);
    return 1 / sqrtf(sum(squares) / (float)size + eps);
}

static void norm_rows(const Step *s, const Model *m, const float *weight, factor *out) {
    for (int64_t b = 0; b < s->rows; b++) {
        const float *x = s->x + b * m->hidden;
        float scale = norm_scale(x, m->hidden, m->eps);
        factor *to = out + b * m->hidden;
        for (int64_t i = 0; i < m->hidden; i += 16) put_factors(to + i, load(x + i) * scale * load(weight + i));
    }
}

static float *floats(int64_t count) { return aligned_alloc(64, (count + 15) / 16 * 64); } /* of whole cache lines */

/* Where the part of thread `index` begins, of so many threads, in whole units. */
static inline int64_t share(int64_t total, int64_t unit, int index, int of) { return total / unit * index / of * unit; }

static int64_t y_width(const Model *m) { return m->hidden > 2 * m->inner ? m->hidden : 2 * m->inner; }

/* -------------------------------------------------------------------------------------------------- layer */

static void rotate(const float *x, const float *weight, const Model *m, const float *cos, const float *sin,
                   float *out) {
    int64_t half = m->dim / 2;
    float scale = weight ? norm_scale(x, m->dim, m->eps) : 1;
    float normed[m->dim];
    for (int64_t i = 0; i < m->dim; i++) normed[i] = weight ? x[i] * scale * weight[i] : x[i];
    for (int64_t i = 0; i < half; i++) {
        out[i] = normed[i] * cos[i] + normed[half + i] * sin[i];
        out[half + i] = normed[half + i] * cos[half + i] + normed[i] * sin[half + i];
    }
}

static inline float score(const factor *q, const stored *key, const Model *m) {
    f32x16 dot = {0};
    for (int64_t i = 0; i < m->dim; i += GROUP) dot = add_product(dot, stored_factors(key + i), q + i);
    return sum(dot) * m->scale;
}

/* Scores to shares that add up to one. scores[count] to the next multiple of 16 is room. */
static void softmax(float *scores, int64_t count) {
    float highest = -INFINITY;
    for (int64_t j = 0; j < count; j++) highest = scores[j] > highest ? scores[j] : highest;
    int64_t end = (count + 15) / 16 * 16;
    f32x16 total = {0};
    for (int64_t j = count; j < end; j++) scores[j] = highest;
    for (int64_t j = 0; j < end; j += 16) put(scores + j, exp16(load(scores + j) - highest));
    for (int64_t j = count; j < end; j++) scores[j] = 0;
    for (int64_t j = 0; j < end; j += 16) total += load(scores + j);
    float one = 1 / sum(total);
    for (int64_t j = 0; j < end; j += 16) put(scores + j, load(scores + j) * one);
}

/* What `heads` query heads (four at most, and known to the compiler) take of GROUP elements of the values; the shares
   of the next head lie `room` further. */
static inline __attribute__((always_inline)) void mix(const int heads, const Step *s, const Model *m,
                                                      const int32_t *table, const stored *values, const float *shares,
                                                      int64_t room, int64_t past, factor *out) {
    const int64_t size = s->block_size, step = m->kv_heads * m->dim;
    f32x16 mixed[4][2] = {0};
    for (int64_t j = 0; j <= past; j += size) {
        int64_t count = past - j < size ? past - j + 1 : size;
        const stored *value = values + table[j / size] * size * step;
        for (int64_t i = 0; i < count; i++, value += step) {
            f32x16 first = load_stored(value), second = load_stored(value + 16);
            for (int h = 0; h < heads; h++) {
                mixed[h][0] += shares[h * room + j + i] * first;
                mixed[h][1] += shares[h * room + j + i] * second;
            }
        }
    }
    for (int h = 0; h < heads; h++) {
        put_factors(out + h * m->dim, mixed[h][0]);
        put_factors(out + h * m->dim + 16, mixed[h][1]);
    }
}

/* Writes a row's new key and value of one KV head to the cache. */
static void store(const Work *w, const Layer *layer, int64_t l, int64_t row, int64_t kv) {
    const Model *m = w->model;
    const Step *s = w->step;
    const int64_t dim = m->dim, at = l * s->layer_stride + (s->slots[row] * m->kv_heads + kv) * dim;
    const float *k = w->qkv + (row * (m->heads + 2 * m->kv_heads) + m->heads + kv) * dim, *v = k + m->kv_heads * dim;
    float rotated[dim];

    rotate(k, layer->k_norm, m, s->cos + row * dim, s->sin + row * dim, rotated);
    for (int64_t i = 0; i < dim; i += 16) {
        put_stored(s->k_cache + at + i, load(rotated + i));
        put_stored(s->v_cache + at + i, load(v + i));
    }
}

/* Attention of a row's query heads that share a KV head; the row's own key and value are in the cache. */
static void attend(const Work *w, const Layer *layer, int64_t l, int64_t row, int64_t kv, float *scores) {
    const Model *m = w->model;
    const Step *s = w->step;
    const int64_t dim = m->dim, heads = m->heads / m->kv_heads, past = s->lengths[row] - 1, size = s->block_size;
    const int64_t step = m->kv_heads * dim, room = w->longest;
    const float *x = w->qkv + (row * (m->heads + 2 * m->kv_heads) + kv * heads) * dim;
    const int32_t *table = s->tables + row * s->table_stride;
    const stored *k_cache = s->k_cache + l * s->layer_stride + kv * dim;
    const stored *v_cache = s->v_cache + l * s->layer_stride + kv * dim;
    float rotated[dim];
    factor q[heads * dim];

    for (int64_t h = 0; h < heads; h++) {
        rotate(x + h * dim, layer->q_norm, m, s->cos + row * dim, s->sin + row * dim, rotated);
        for (int64_t i = 0; i < dim; i += 16) put_factors(q + h * dim + i, load(rotated + i));
    }
    for (int64_t j = 0; j <= past; j += size) {
        int64_t count = past - j < size ? past - j + 1 : size;
        const stored *key = k_cache + table[j / size] * size * step, *value = v_cache + (key - k_cache);
        const stored *next = j + size <= past ? k_cache + table[j / size + 1] * size * step : key;
        for (int64_t i = 0; i < count; i++) { /* what comes next is asked for: the CPU does not foresee these strides */
            for (int64_t c = 0; c < dim; c += 64 / (int64_t)sizeof(stored)) {
                __builtin_prefetch(next + i * step + c);
                __builtin_prefetch(value + i * step + c);
            }
            for (int64_t h = 0; h < heads; h++) scores[h * room + j + i] = score(q + h * dim, key + i * step, m);
        }
    }
    for (int64_t h = 0; h < heads; h++) softmax(scores + h * room, past + 1);
    factor *out = w->attended + (row * m->heads + kv * heads) * dim;
    for (int64_t h = 0, left; h < heads; h += left > 4 ? 4 : left) {
        left = heads - h;
#define MIX(n) mix(n, s, m, table, v_cache + i, scores + h * room, room, past, out + h * dim + i)
        for (int64_t i = 0; i < dim; i += GROUP) left == 1 ? MIX(1) : left == 2 ? MIX(2) : left == 3 ? MIX(3) : MIX(4);
    }
}

static void add_columns(const float *y, float *x, int64_t rows, int64_t size, int64_t first, int64_t last) {
    for (int64_t b = 0; b < rows; b++)
        for (int64_t i = first; i < last; i++) x[b * size + i] += y[b * size + i];
}

/* A thread's share of the layers. Rows' norms are taken by every thread for itself: cheaper than to meet once more. */
static void layers(const Work *w, int index, int of) {
    const Model *m = w->model;
    const Step *s = w->step;
    const int64_t rows = s->rows, hidden = m->hidden, inner = m->inner, width = (m->heads + 2 * m->kv_heads) * m->dim;
    const int64_t q0 = share(width, OUTPUTS, index, of), q1 = share(width, OUTPUTS, index + 1, of);
    const int64_t h0 = share(hidden, OUTPUTS, index, of), h1 = share(hidden, OUTPUTS, index + 1, of);
    const int64_t i0 = share(inner, 16, index, of), i1 = share(inner, 16, index + 1, of);
    const int64_t a0 = share(rows * m->kv_heads, 1, index, of), a1 = share(rows * m->kv_heads, 1, index + 1, of);
    float *y = w->y, *scores = w->own + index * w->own_room;
    factor *normed = (factor *)(scores + w->longest * (m->heads / m->kv_heads));

    for (int64_t l = 0; l < m->num_layers; l++) {
        const Layer *layer = m->layers + l;
        norm_rows(s, m, layer->input_norm, normed);
        product(&layer->qkv, q0, q1, normed, rows, w->qkv, width);
#pragma omp barrier
        for (int64_t i = a0; i < a1; i++) store(w, layer, l, i / m->kv_heads, i % m->kv_heads);
#pragma omp barrier
        for (int64_t i = a0; i < a1; i++) attend(w, layer, l, i / m->kv_heads, i % m->kv_heads, scores);
#pragma omp barrier
        product(&layer->o, h0, h1, w->attended, rows, y, hidden);
        add_columns(y, s->x, rows, hidden, h0, h1);
#pragma omp barrier
        norm_rows(s, m, layer->post_norm, normed);
        product(&layer->gate_up, i0, i1, normed, rows, y, 2 * inner);
        product(&layer->gate_up, inner + i0, inner + i1, normed, rows, y, 2 * inner);
        for (int64_t b = 0; b < rows; b++)
            for (int64_t i = i0; i < i1; i += 16) {
                f32x16 gate = load(y + b * 2 * inner + i);
                put_factors(w->gated + b * inner + i, gate / (1 + exp16(-gate)) * load(y + (b * 2 + 1) * inner + i));
            }
#pragma omp barrier
        product(&layer->down, h0, h1, w->gated, rows, y, hidden);
        add_columns(y, s->x, rows, hidden, h0, h1);
#pragma omp barrier
    }
    for (int64_t b = index; b < rows; b += of) {
        float scale = norm_scale(s->x + b * hidden, hidden, m->eps);
        for (int64_t i = 0; i < hidden; i += 16)
            put_stored(s->hidden + b * hidden + i, load(s->x + b * hidden + i) * scale * load(m->final_norm + i));
    }
}

/* Both return 0, or -1 where memory is short. */
int decode_layers(const Model *m, const Step *s, int threads) {
    Work w = {.model = m, .step = s};
    for (int64_t b = 0; b < s->rows; b++)
        if (s->lengths[b] > w.longest) w.longest = s->lengths[b];
    w.longest = (w.longest + 15) / 16 * 16;
    w.own_room = s->rows * m->hidden + w.longest * (m->heads / m->kv_heads);
    w.own_room = (w.own_room + 15) / 16 * 16;
    w.own = floats(threads * w.own_room);
    w.y = floats(s->rows * y_width(m));
    w.qkv = floats(s->rows * (m->heads + 2 * m->kv_heads) * m->dim);
    w.attended = (factor *)floats(s->rows * m->heads * m->dim);
    w.gated = (factor *)floats(s->rows * m->inner);
    int short_of = !w.own || !w.y || !w.qkv || !w.attended || !w.gated;
    if (!short_of) {
#pragma omp parallel num_threads(threads)
        layers(&w, omp_get_thread_num(), omp_get_num_threads());
    }
    free(w.own), free(w.y), free(w.qkv), free(w.attended), free(w.gated);
    return -short_of;
}

int decode_logits(const Model *m, const Step *s, int threads) {
    factor *x = (factor *)floats(s->rows * m->hidden);
    if (!x) return -1;
    for (int64_t i = 0; i < s->rows * m->hidden; i += 16) put_factors(x + i, load_stored(s->hidden + i));
#pragma omp parallel num_threads(threads)
    {
        int index = omp_get_thread_num(), of = omp_get_num_threads();
        head_product(m, share(m->vocab, 1, index, of), share(m->vocab, 1, index + 1, of), x, s->rows, s->logits);
    }
    free(x);
    return 0;
}

/* -------------------------------------------------------------------------------------------------- draws */

/* What one call draws from: the exponential race of engine/sampler.py with the noise of engine/noise.py. */
typedef struct {
    int64_t rows, vocab;
    const float *logits;       /* [rows, vocab] */
    const float *best;         /* [rows]: each row's largest */
    const float *temperatures; /* [rows] */
    const int32_t *hashes;     /* [vocab] */
    const int32_t *keys;       /* [rows, 2] */
    int64_t *drawn;            /* [rows] */
} Draw;

static inline f32x16 race(const float *logits, const int32_t *hashes, float best, float temperature,
                          const int32_t *key) {
    const f32x16 zero = {0}, lowest = zero - 80, highest_u = zero - (1 - 0x1p-24f);
    const f32x16 x = (load(logits) - best) / temperature;
    const f32x16 weight = exp16(either(x < lowest, lowest, x));
    u32x16 h = (u32x16)load((const float *)hashes) ^ (uint32_t)key[0];
    h = (h ^ (h >> 16)) * 0x7FEB352Du + (uint32_t)key[1];
    h = (h ^ (h >> 15)) * 0x846CA68Bu;
    h = (h ^ (h >> 16)) & 0x7FFFFFFFu;
    const f32x16 u = __builtin_convertvector((i32x16)h, f32x16) * -0x1p-31f - 0x1p-32f;
    return weight / -log1p16(either(u < highest_u, highest_u, u));
}

/* The winner among the tokens [first, last) of a row, the first of equal ones. */
static int64_t winner(const Draw *d, int64_t row, int64_t first, int64_t last, float *score) {
    const float *logits = d->logits + row * d->vocab;
    const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    f32x16 best = {0};
    i32x16 at = {0};
    for (int64_t n = first; n < last; n += 16) {
        float padded[16] = {0};
        int32_t hashes[16] = {0};
        int64_t count = last - n < 16 ? last - n : 16;
        const float *from = logits + n;
        const int32_t *hash = d->hashes + n;
        if (count < 16) {
            for (int64_t i = 0; i < count; i++) {
                padded[i] = from[i];
                hashes[i] = hash[i];
            }
            from = padded;
            hash = hashes;
        }
        f32x16 scores = race(from, hash, d->best[row], d->temperatures[row], d->keys + row * 2);
        const i32x16 wins = (scores > best) & (lanes < (i32x16){0} + (int32_t)count);
        best = either(wins, scores, best);
        at = ((lanes + (int32_t)n) & wins) | (at & ~wins);
    }
    int64_t won = first;
    *score = 0;
    for (int i = 0; i < 16; i++)
        if (best[i] > *score || (best[i] == *score && best[i] > 0 && at[i] < won)) {
            *score = best[i];
            won = at[i];
        }
    return won;
}

/* Fills drawn; what it holds for a row of logits that are not finite has no meaning. */
void draw(const Draw *d, int threads) {
    for (int64_t row = 0; row < d->rows; row++) {
        float scores[threads];
        int64_t won[threads];
        int parts = 1;
#pragma omp parallel num_threads(threads)
        {
            int index = omp_get_thread_num(), of = omp_get_num_threads();
            if (index == 0) parts = of;
            int64_t first = share(d->vocab, 1, index, of), last = share(d->vocab, 1, index + 1, of);
            won[index] = winner(d, row, first, last, scores + index);
        }
        int best = 0;
        for (int i = 1; i < parts; i++)
            if (scores[i] > scores[best]) best = i;
        d->drawn[row] = won[best];
    }
}
