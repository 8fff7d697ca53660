/* Sparse products with a weight, and rows that are sums of a few terms: their norms, and their sum into a total.
   native.py compiles this file, with REAL the type of weights and updates, float or double, and names the plain twin,
   the test that holds the two equal and what it buys.

   Row r is the sum of factors[i] times the `width` numbers at terms[i] for starts[r] <= i < starts[r + 1]; it belongs
   to user owners[r]. There is a single compiled copy of `form_row`: rows are measured and summed by the same
   instructions, so that what is summed equals what was measured to the last bit. */

#include <stdint.h>

#ifdef __clang__
#define NOINLINE __attribute__((noinline))
#else
#define NOINLINE __attribute__((noinline, noclone))
#endif
#define BLOCK 512 /* numbers of a row formed at a time */
#define LINE (64 / (int64_t)sizeof(REAL)) /* numbers in a cache line, and in a vector */
#define VECTORS 8
#define STRIP (VECTORS * LINE) /* numbers of a product accumulated at a time, in registers */
#define PREFETCH_ROWS 40 /* rows of the weight to prefetch ahead of the product */
#define PREFETCH_TERMS 24 /* terms to prefetch ahead of the sum */
typedef REAL Vector __attribute__((vector_size(64), aligned(sizeof(REAL)), may_alias));

/* Prefetch a row that will be read. */
static inline void prefetch_row(const REAL *row, int64_t width) {
    for (int64_t k = 0; k < width; k += LINE) __builtin_prefetch(row + k, 0, 2);
}

/* row = the sum of the terms, columns `begin` on; two terms at a time, which halves the traffic to the row. */
static NOINLINE void form_row(REAL *restrict row, const REAL *const *terms, const REAL *restrict factors,
                              int64_t count, int64_t begin, int64_t numbers) {
    if (count == 0) {
        for (int64_t k = 0; k < numbers; k++) row[k] = 0;
        return;
    }
    const REAL *restrict one = terms[0] + begin;
    REAL f = factors[0];
    for (int64_t k = 0; k < numbers; k++) row[k] = f * one[k];
    int64_t i = 1;
    for (; i + 2 <= count; i += 2) {
        const REAL *restrict two = terms[i + 1] + begin;
        const REAL g = factors[i + 1];
        one = terms[i] + begin, f = factors[i];
        for (int64_t k = 0; k < numbers; k++) row[k] = row[k] + f * one[k] + g * two[k];
    }
    if (i < count) {
        one = terms[i] + begin, f = factors[i];
        for (int64_t k = 0; k < numbers; k++) row[k] += f * one[k];
    }
}

/* The sum of squares of f times `count` numbers, at most BLOCK. */
static inline double squared(REAL f, const REAL *restrict numbers, int64_t count) {
    double lanes[16] = {0}, sum = 0;
    int64_t k = 0;
    for (; k + 16 <= count; k += 16)
        for (int j = 0; j < 16; j++) {
            const REAL one = f * numbers[k + j];
            lanes[j] += (double)one * (double)one;
        }
    for (; k < count; k++) {
        const REAL one = f * numbers[k];
        sum += (double)one * (double)one;
    }
    for (int j = 0; j < 16; j++) sum += lanes[j];
    return sum;
}

/* sums[user] += squares of the user's rows divided by units[user], in float64; lost[user] += the rounding error of that
   addition (compensated summation). A row of a single term is not formed: f * one rounds the same everywhere. */
int64_t squares(int64_t rows, int64_t width, const int64_t *starts, const REAL *const *terms, const REAL *factors,
                const int64_t *owners, const double *units, double *sums, double *lost) {
    REAL row[BLOCK];
    for (int64_t r = 0; r < rows; r++) {
        const int64_t user = owners[r], first = starts[r], count = starts[r + 1] - first;
        const double over = units[user];
        for (int64_t i = first + PREFETCH_TERMS; i < starts[r + 1] + PREFETCH_TERMS && i < starts[rows]; i++)
            prefetch_row(terms[i], width);
        for (int64_t begin = 0; begin < width; begin += BLOCK) {
            const int64_t numbers = width - begin < BLOCK ? width - begin : BLOCK;
            double sum;
            if (count == 1 && over == 1)
                sum = squared(factors[first], terms[first] + begin, numbers);
            else {
                form_row(row, terms + first, factors + first, count, begin, numbers);
                for (int64_t k = 0; k < numbers && over != 1; k++)
                    row[k] = (REAL)(row[k] / over); /* only where REAL is double */
                sum = squared(1, row, numbers);
            }
            const double before = sums[user], after = before + sum;
            lost[user] += before >= sum ? (before - after) + sum : (sum - after) + before;
            sums[user] = after;
        }
    }
    return 0;
}

/* Row row_numbers[r] of total += scale[user] * row r, in float64. A user whose scale is 0 adds nothing,
   whatever the row. */
int64_t add(int64_t rows, int64_t width, const int64_t *starts, const REAL *const *terms, const REAL *factors,
            const int64_t *owners, const int64_t *row_numbers, const double *scale, double *total) {
    REAL row[BLOCK];
    for (int64_t r = 0; r < rows; r++) {
        const int64_t first = starts[r], count = starts[r + 1] - first;
        const double user_scale = scale[owners[r]];
        if (!(user_scale > 0)) continue;
        for (int64_t i = first + PREFETCH_TERMS; i < starts[r + 1] + PREFETCH_TERMS && i < starts[rows]; i++)
            prefetch_row(terms[i], width);
        for (int64_t begin = 0; begin < width; begin += BLOCK) {
            const int64_t numbers = width - begin < BLOCK ? width - begin : BLOCK;
            double *restrict sum = total + row_numbers[r] * width + begin;
            form_row(row, terms + first, factors + first, count, begin, numbers);
            for (int64_t k = 0; k < numbers; k++) sum[k] += user_scale * (double)row[k];
        }
    }
    return 0;
}

/* STRIP numbers of `out`: the rows of the weight for this example, then the rows of the table that were found. */
static NOINLINE void strip(REAL *restrict out, const REAL *weight, const int64_t *numbers, const REAL *factors,
                           int64_t entries, const REAL *table, const int64_t *found, const REAL *packed,
                           int64_t old_count, int64_t width) {
    Vector sums[VECTORS] = {0};
    for (int64_t i = 0; i < entries; i++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sums[v] += factors[i] * ((const Vector *)(weight + numbers[i] * width))[v];
    for (int64_t o = 0; o < old_count; o++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sums[v] += packed[o] * ((const Vector *)(table + found[o] * width))[v];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) ((Vector *)out)[v] = sums[v];
}

/* out[e] = sum over j of values[e, j] times row features[e, j] of the current weight: `weight` (height, width) plus, in
   row n, the linked list of terms c = heads[n], next[c], ... until one is negative, each old_factors[c] *
   table[old_sources[c]].

   Values of 0 are skipped. The other entries are written to numbers (the row), sources (e) and factors (the value);
   their count is returned. A feature beyond the last row counts as the last. Scratch space, one entry for each row of
   the table: seen (all 0), found, products, packed. */
int64_t bag_product(int64_t batch, int64_t bag, int64_t height, int64_t width, const int64_t *features,
                    const REAL *values, const REAL *weight, const int64_t *heads, const int64_t *next,
                    const int64_t *old_sources, const REAL *old_factors, const REAL *table, int64_t *seen,
                    int64_t *found, REAL *products, REAL *packed, REAL *out, int64_t *numbers, int64_t *sources,
                    REAL *factors) {
    int64_t count = 0, fetched = 0;
    for (int64_t e = 0; e < batch; e++)
        for (int64_t j = e * bag; j < (e + 1) * bag; j++) {
            if (values[j] == 0) continue;
            const int64_t number = features[j] < height ? features[j] : height - 1;
            numbers[count] = number < 0 ? 0 : number;
            sources[count] = e;
            factors[count++] = values[j];
        }
    for (int64_t e = 0, first = 0, last; e < batch; e++, first = last) {
        int64_t old_count = 0;
        for (last = first; last < count && sources[last] == e; last++) /* the coefficient of each row of the table */
            for (int64_t c = heads[numbers[last]]; c >= 0; c = next[c]) {
                const int64_t old = old_sources[c];
                if (seen[old] != e + 1) {
                    seen[old] = e + 1;
                    found[old_count++] = old;
                    products[old] = 0;
                }
                products[old] += factors[last] * old_factors[c];
            }
        for (int64_t o = 0; o < old_count; o++) packed[o] = products[found[o]];
        for (fetched = fetched < last ? last : fetched; fetched < count && fetched < last + PREFETCH_ROWS; fetched++)
            prefetch_row(weight + numbers[fetched] * width, width);
        for (int64_t begin = 0; begin < width && width >= STRIP; begin += STRIP) {
            const int64_t at = width - begin < STRIP ? width - STRIP : begin; /* the last strip overlaps */
            strip(out + e * width + at, weight + at, numbers + first, factors + first, last - first, table + at, found,
                  packed, old_count, width);
        }
        for (int64_t k = 0; k < width && width < STRIP; k++) {
            REAL sum = 0;
            for (int64_t i = first; i < last; i++) sum += factors[i] * weight[numbers[i] * width + k];
            for (int64_t o = 0; o < old_count; o++) sum += packed[o] * table[found[o] * width + k];
            out[e * width + k] = sum;
        }
    }
    return count;
}

/* Link the terms of each row of the weight into a list; heads must be negative before. */
int64_t link_terms(int64_t count, const int64_t *numbers, int64_t *heads, int64_t *next) {
    for (int64_t c = 0; c < count; c++) {
        next[c] = heads[numbers[c]];
        heads[numbers[c]] = c;
    }
    return 0;
}

/* A part of the terms of one user. */
typedef struct {
    int64_t count, user;
    const int64_t *numbers, *sources;
    const REAL *factors, *table;
} Part;

/* Counting sort of the terms by row, then by user; parts must come in the order of users. Returns the number of pairs
   of row and user; rows, owners and starts give the row and user of each pair and where its terms and factors begin.
   ends (height + 1) is scratch space. */
int64_t sort_terms(int64_t parts, const Part *part, int64_t height, int64_t width, int64_t *ends, const REAL **terms,
                REAL *factors, int64_t *rows, int64_t *owners, int64_t *starts) {
    int64_t pairs = 0;
    for (int64_t n = 0; n <= height; n++) ends[n] = 0;
    for (int64_t p = 0; p < parts; p++)
        for (int64_t c = 0; c < part[p].count; c++) ends[part[p].numbers[c] + 1]++;
    for (int64_t n = 0; n < height; n++) ends[n + 1] += ends[n]; /* for now: where each row begins */
    for (int64_t p = 0; p < parts; p++)
        for (int64_t c = 0; c < part[p].count; c++) {
            const int64_t slot = ends[part[p].numbers[c]]++;
            terms[slot] = part[p].table + part[p].sources[c] * width;
            factors[slot] = part[p].factors[c];
            owners[slot] = part[p].user;
        }
    for (int64_t n = 0, slot = 0; n < height; n++)
        for (const int64_t begin = slot; slot < ends[n]; slot++)
            if (slot == begin || owners[slot] != owners[pairs - 1]) { /* pairs <= slot: not overwritten yet */
                rows[pairs] = n;
                owners[pairs] = owners[slot];
                starts[pairs++] = slot;
            }
    starts[pairs] = pairs ? ends[height - 1] : 0;
    return pairs;
}
