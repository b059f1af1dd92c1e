/* Weighted sums and trimmed means of a block, rounded once. Knows numbers; not whose they are, no
   files, no Python.

   Sums are made in float64, row by row, and every product and sum is rounded by itself. A tile of
   columns is worked on at a time, so that it stays in the caches of a core. `hatch_build.py` knows
   what a compiler must be told.

   `compiled.py` loads this where it was built; numpy comes to the same bits where it was not. */

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if FLT_EVAL_METHOD != 0
#error "this processor would not round every product and every sum to float64"
#endif

#ifndef BUILT_FROM
#define BUILT_FROM 0
#endif

/* One copy for each generation of x86 processors, chosen by the loader: sums take half of the time
   where vectors are long. Others have one kind of vector, or no such loader; and clang gives the
   function another name for it. */
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && !defined(ONE_COPY)
#define FOR_EVERY_PROCESSOR                                                                        \
    __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EVERY_PROCESSOR
#endif

/* What is not inlined would be compiled once, for the oldest processor. */
#define PART static inline __attribute__((always_inline))

enum { TILE = 1024 };

/* `compiled.py` counts kinds in this order. */
enum kind { BF16, F16, F32, F64 };

static const size_t WIDTH[] = {2, 2, 4, 8};

PART float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

PART uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

PART int is_finite(double value) { return fabs(value) <= DBL_MAX; }

/* Rows begin anywhere, so numbers are copied out of them; a compiler makes a plain load of it. */

PART uint32_t short_at(const uint8_t *row, size_t i) {
    uint16_t bits;
    memcpy(&bits, row + sizeof bits * i, sizeof bits);
    return bits;
}

PART double bf16_at(const uint8_t *row, size_t i) { return float_of(short_at(row, i) << 16); }

PART double f16_at(const uint8_t *row, size_t i) {
    const uint32_t bits = short_at(row, i), exponent = bits & 0x7C00;
    /* Counted, not taken for a small float32: where somebody has a processor flush such to zero, they
       would be lost. Of what is not finite any NaN will do. */
    const float small = (float)(int32_t)(bits & 0x3FF) * 0x1p-24f;
    uint32_t size = exponent ? ((bits & 0x7FFF) << 13) + (112u << 23) : bits_of(small);
    size = exponent == 0x7C00 ? 0x7FC00000 : size;
    return float_of(size | (bits & 0x8000) << 16);
}

PART double f32_at(const uint8_t *row, size_t i) {
    float value;
    memcpy(&value, row + sizeof value * i, sizeof value);
    return value;
}

PART double f64_at(const uint8_t *row, size_t i) {
    double value;
    memcpy(&value, row + sizeof value * i, sizeof value);
    return value;
}

#define ADD(kind)                                                                                  \
    PART void add_##kind(double *restrict sums, const uint8_t *restrict row, double weight,        \
                         size_t count) {                                                           \
        for (size_t i = 0; i < count; i++) sums[i] += weight * kind##_at(row, i);                  \
    }

ADD(bf16)
ADD(f16)
ADD(f32)
ADD(f64)

/* The bits of float32 that a float64 is cut off to, the last one set where something was. Rounded
   once more, to fewer bits, they give what rounding the float64 would. */
PART uint32_t to_odd(double value) {
    const float single = (float)value;
    const double back = single;
    uint32_t bits = bits_of(single);
    bits -= fabs(back) > fabs(value);
    return bits | (back != value);
}

/* Each puts rounded sums and tells whether one of them is not finite. */

PART uint32_t put_bf16(const double *restrict sums, uint8_t *restrict out, size_t count) {
    uint32_t wrong = 0;
    for (size_t i = 0; i < count; i++) {
        const uint32_t bits = to_odd(sums[i]);
        const uint16_t rounded = (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
        /* Of both: rounding may carry a NaN through to zero, and a number up to infinity. */
        wrong |= ((bits & 0x7F800000) == 0x7F800000) | ((rounded & 0x7F80) == 0x7F80);
        memcpy(out + sizeof rounded * i, &rounded, sizeof rounded);
    }
    return wrong;
}

PART uint32_t put_f16(const double *restrict sums, uint8_t *restrict out, size_t count) {
    uint32_t wrong = 0;
    for (size_t i = 0; i < count; i++) {
        const uint32_t bits = to_odd(sums[i]), size = bits & 0x7FFFFFFF;
        /* Next to zero steps are of 2**-24, which is what the last place of 0.5 is. */
        const uint32_t small = bits_of(float_of(size) + 0.5f) - 0x3F000000;
        const uint32_t normal = (size - (112u << 23) + 0xFFF + (size >> 13 & 1)) >> 13;
        const uint32_t rounded = size < 113u << 23 ? small : normal;
        wrong |= (size >= 143u << 23) | (rounded >= 0x7C00);
        const uint16_t half = (uint16_t)(rounded | (bits >> 16 & 0x8000));
        memcpy(out + sizeof half * i, &half, sizeof half);
    }
    return wrong;
}

PART uint32_t put_f32(const double *restrict sums, uint8_t *restrict out, size_t count) {
    uint32_t wrong = 0;
    for (size_t i = 0; i < count; i++) {
        const uint32_t bits = bits_of((float)sums[i]);
        wrong |= (bits & 0x7F800000) == 0x7F800000;
        memcpy(out + sizeof bits * i, &bits, sizeof bits);
    }
    return wrong;
}

PART uint32_t put_f64(const double *restrict sums, uint8_t *restrict out, size_t count) {
    uint32_t wrong = 0;
    for (size_t i = 0; i < count; i++) wrong |= !is_finite(sums[i]);
    memcpy(out, sums, sizeof *sums * count);
    return wrong;
}

PART void add(double *sums, enum kind kind, const uint8_t *row, double weight, size_t count) {
    switch (kind) {
    case BF16: add_bf16(sums, row, weight, count); break;
    case F16: add_f16(sums, row, weight, count); break;
    case F32: add_f32(sums, row, weight, count); break;
    case F64: add_f64(sums, row, weight, count); break;
    }
}

PART uint32_t put(const double *sums, enum kind kind, uint8_t *out, size_t count) {
    switch (kind) {
    case BF16: return put_bf16(sums, out, count);
    case F16: return put_f16(sums, out, count);
    case F32: return put_f32(sums, out, count);
    case F64: return put_f64(sums, out, count);
    }
    return 1;
}

/* What is called from outside fills `out` with numbers of `kind`, made of `count` rows of `units`
   numbers each. Row r begins `stride * r` bytes behind `rows` and holds numbers of `kinds[r]`; `out`
   overlaps no row. Returned is 0 if all results are finite; otherwise `out` holds nothing of use. */

/* What this was compiled from; whoever has another source does not call it. */
const uint32_t weighlock_built_from = BUILT_FROM;

/* Sums of the rows times their weights. */
FOR_EVERY_PROCESSOR
int weighlock_weighted_sum(size_t count, const uint8_t *kinds, const double *weights,
                             const uint8_t *rows, size_t stride, size_t units, uint8_t kind,
                             uint8_t *out) {
    double sums[TILE];
    for (size_t first = 0; first < units; first += TILE) {
        const size_t some = units - first < TILE ? units - first : TILE;
        memset(sums, 0, sizeof *sums * some);
        for (size_t r = 0; r < count; r++) {
            const uint8_t *row = rows + stride * r + WIDTH[kinds[r]] * first;
            add(sums, (enum kind)kinds[r], row, weights[r], some);
        }
        if (put(sums, (enum kind)kind, out + WIDTH[kind] * first, some)) return 1;
    }
    return 0;
}

PART void swap_where_greater(double *restrict low, double *restrict high, size_t count) {
    for (size_t i = 0; i < count; i++) {
        const double one = low[i], other = high[i];
        low[i] = one < other ? one : other;
        high[i] = one < other ? other : one;
    }
}

/* Sort each column of `count` rows of `some` numbers: Batcher's exchange of pairs (Knuth, The Art of
   Computer Programming 5.2.2, algorithm M). Which pairs are compared does not depend on what is
   found, so that a whole tile is at once. */
PART void sort_columns(double *values, size_t count, size_t some) {
    size_t top = 1;
    while (top < count) top *= 2;
    for (size_t p = top / 2; p > 0; p /= 2) {
        size_t q = top / 2, r = 0, d = p;
        for (;;) {
            for (size_t i = 0; i + d < count; i++) {
                if ((i & p) == r)
                    swap_where_greater(values + some * i, values + some * (i + d), some);
            }
            if (q == p) break;
            d = q - p;
            q /= 2;
            r = p;
        }
    }
}

/* Means of each column without its `cut` smallest and its `cut` largest numbers, none of them beyond
   what is left. `work` has room for `tile` numbers of every row and of the results. If a number or
   a sum is not finite, no result counts. */
FOR_EVERY_PROCESSOR
int weighlock_trimmed_mean(size_t count, const uint8_t *kinds, size_t cut, const uint8_t *rows,
                             size_t stride, size_t units, uint8_t kind, uint8_t *out, double *work,
                             size_t tile) {
    const size_t left = count - 2 * cut;
    for (size_t first = 0; first < units; first += tile) {
        const size_t some = units - first < tile ? units - first : tile;
        memset(work, 0, sizeof *work * some * count);
        for (size_t r = 0; r < count; r++) {
            const uint8_t *row = rows + stride * r + WIDTH[kinds[r]] * first;
            add(work + some * r, (enum kind)kinds[r], row, 1.0, some);
        }
        uint32_t wrong = 0;
        for (size_t i = 0; i < some * count; i++) wrong |= !is_finite(work[i]);
        if (wrong) return 1;
        sort_columns(work, count, some);
        double *means = work + some * count;
        const double *least = work + some * cut, *largest = least + some * (left - 1);
        memcpy(means, least, sizeof *means * some);
        for (size_t r = 1; r < left; r++) {
            for (size_t i = 0; i < some; i++) means[i] += least[some * r + i];
        }
        for (size_t i = 0; i < some; i++) {
            wrong |= !is_finite(means[i]);
            const double mean = means[i] / (double)left;
            const double raised = mean < least[i] ? least[i] : mean;
            means[i] = (raised > largest[i] ? largest[i] : raised) + 0.0; /* one kind of zero */
        }
        if (wrong) return 1;
        if (put(means, (enum kind)kind, out + WIDTH[kind] * first, some)) return 1;
    }
    return 0;
}
