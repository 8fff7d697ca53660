/* Products of sparse rows by a weight, and rows that are sums of a few terms: measured, and added to a total. native.py
   compiles it, with REAL the type of weights and updates, float or double.

   Row r of `rows` is the sum of factors[i] * table[sources[i]] for starts[r] <= i < starts[r + 1], `width` numbers, and
   belongs to user owners[r]. There is one copy of `form`: a row is measured and added by the same instructions, so that
   what is summed is to the last bit what was measured. */

#include <stdint.h>

#ifdef __clang__
#define APART __attribute__((noinline))
#else
#define APART __attribute__((noinline, noclone))
#endif
#define BLOCK 512 /* numbers of a row that are formed at a time */
#define LINE (64 / (int64_t)sizeof(REAL)) /* numbers in a line of the cache, and in a vector */
#define VECTORS 8
#define STRIP (VECTORS * LINE) /* numbers of a product that are added up at a time, in registers */
#define AHEAD 40 /* rows of the weight that are asked of the memory before they are multiplied */
typedef REAL Vector __attribute__((vector_size(64), aligned(sizeof(REAL)), may_alias));

/* row += the terms, two at a time: fewer ways to the row. */
static inline __attribute__((always_inline)) void add_terms(REAL *restrict row, const REAL *restrict table,
                                                            const int64_t *restrict sources,
                                                            const REAL *restrict factors, int64_t terms, int64_t width,
                                                            int64_t count) {
    int64_t i = 0;
    for (; i + 2 <= terms; i += 2) {
        const REAL *restrict one = table + sources[i] * width, *restrict two = table + sources[i + 1] * width;
        const REAL f = factors[i], g = factors[i + 1];
        for (int64_t k = 0; k < count; k++) row[k] = row[k] + f * one[k] + g * two[k];
    }
    if (i < terms) {
        const REAL *restrict one = table + sources[i] * width;
        const REAL f = factors[i];
        for (int64_t k = 0; k < count; k++) row[k] += f * one[k];
    }
}

static APART void form(REAL *restrict row, const REAL *restrict table,
                                           const int64_t *restrict sources, const REAL *restrict factors,
                                           int64_t terms, int64_t width, int64_t count) {
    if (terms == 0) {
        for (int64_t k = 0; k < count; k++) row[k] = 0;
        return;
    }
    const REAL *restrict one = table + sources[0] * width;
    const REAL f = factors[0];
    for (int64_t k = 0; k < count; k++) row[k] = f * one[k];
    add_terms(row, table, sources + 1, factors + 1, terms - 1, width, count);
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

/* sums[user] += squares of the user's rows over units[user], in float64, and lost[user] += what that has rounded off.
   A row of one term is measured while it is formed: f * one is the same number everywhere. */
int64_t squares(int64_t rows, int64_t width, const int64_t *starts, const int64_t *sources, const REAL *factors,
             const REAL *table, const int64_t *owners, const double *units, double *sums, double *lost) {
    REAL row[BLOCK];
    for (int64_t r = 0; r < rows; r++) {
        const int64_t user = owners[r], first = starts[r], terms = starts[r + 1] - first;
        const double over = units[user];
        for (int64_t begin = 0; begin < width; begin += BLOCK) {
            const int64_t count = width - begin < BLOCK ? width - begin : BLOCK;
            double sum;
            if (terms == 1 && over == 1)
                sum = squared(factors[first], table + sources[first] * width + begin, count);
            else {
                form(row, table + begin, sources + first, factors + first, terms, width, count);
                for (int64_t k = 0; k < count && over != 1; k++) row[k] = (REAL)(row[k] / over); /* only where both are double */
                sum = squared(1, row, count);
            }
            const double before = sums[user], after = before + sum;
            lost[user] += before >= sum ? (before - after) + sum : (sum - after) + before;
            sums[user] = after;
        }
    }
    return 0;
}

/* total[places[r]] += scale[user] * row r, in float64; a user whose scale is 0 takes no part, whatever the row. */
int64_t add(int64_t rows, int64_t width, const int64_t *starts, const int64_t *sources, const REAL *factors,
         const REAL *table, const int64_t *owners, const int64_t *places, const double *scale, double *total) {
    REAL row[BLOCK];
    for (int64_t r = 0; r < rows; r++) {
        const int64_t first = starts[r], terms = starts[r + 1] - first;
        const double own = scale[owners[r]];
        if (!(own > 0)) continue;
        for (int64_t begin = 0; begin < width; begin += BLOCK) {
            const int64_t count = width - begin < BLOCK ? width - begin : BLOCK;
            double *restrict sum = total + places[r] * width + begin;
            form(row, table + begin, sources + first, factors + first, terms, width, count);
            for (int64_t k = 0; k < count; k++) sum[k] += own * (double)row[k];
        }
    }
    return 0;
}

/* STRIP numbers of `out`: the words' rows of the weight, then the rows of the table that were found. */
static APART void strip(REAL *restrict out, const REAL *weight, const int64_t *numbers, const REAL *factors,
                        int64_t words, const REAL *table, const int64_t *found, const REAL *packed, int64_t olds,
                        int64_t width) {
    Vector sums[VECTORS] = {0};
    for (int64_t i = 0; i < words; i++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sums[v] += factors[i] * ((const Vector *)(weight + numbers[i] * width))[v];
    for (int64_t o = 0; o < olds; o++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sums[v] += packed[o] * ((const Vector *)(table + found[o] * width))[v];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) ((Vector *)out)[v] = sums[v];
}

/* out[e] = sum over j of values[e, j] times row features[e, j] of the weight as it is by now: `weight`, (height, width),
   and in row n the terms c = heads[n], next[c] ... until one is below 0: old_factors[c] * table[old_sources[c]].

   A value of 0 is skipped. What is not goes to numbers (the row), sources (e) and factors (the value), and its count is
   the answer; a row number beyond the last counts as the last. For work there are seen, all 0, found, products and
   packed, a number for each row of the table. */
int64_t product(int64_t batch, int64_t bag, int64_t height, int64_t width, const int64_t *features, const REAL *values,
                const REAL *weight, const int64_t *heads, const int64_t *next, const int64_t *old_sources,
                const REAL *old_factors, const REAL *table, int64_t *seen, int64_t *found, REAL *products,
                REAL *packed, REAL *out, int64_t *numbers, int64_t *sources, REAL *factors) {
    int64_t count = 0, asked = 0;
    for (int64_t e = 0; e < batch; e++)
        for (int64_t j = e * bag; j < (e + 1) * bag; j++) {
            if (values[j] == 0) continue;
            const int64_t number = features[j] < height ? features[j] : height - 1;
            numbers[count] = number < 0 ? 0 : number;
            sources[count] = e;
            factors[count++] = values[j];
        }
    for (int64_t e = 0, first = 0, last; e < batch; e++, first = last) {
        int64_t olds = 0;
        for (last = first; last < count && sources[last] == e; last++) /* of each row of the table, how much of it */
            for (int64_t c = heads[numbers[last]]; c >= 0; c = next[c]) {
                const int64_t old = old_sources[c];
                if (seen[old] != e + 1) {
                    seen[old] = e + 1;
                    found[olds++] = old;
                    products[old] = 0;
                }
                products[old] += factors[last] * old_factors[c];
            }
        for (int64_t o = 0; o < olds; o++) packed[o] = products[found[o]];
        for (asked = asked < last ? last : asked; asked < count && asked < last + AHEAD; asked++)
            for (int64_t k = 0; k < width; k += LINE) __builtin_prefetch(weight + numbers[asked] * width + k, 0, 2);
        for (int64_t begin = 0; begin < width && width >= STRIP; begin += STRIP) {
            const int64_t at = width - begin < STRIP ? width - STRIP : begin; /* some numbers of the last twice */
            strip(out + e * width + at, weight + at, numbers + first, factors + first, last - first, table + at, found,
                  packed, olds, width);
        }
        if (width < STRIP) {
            form(out + e * width, weight, numbers + first, factors + first, last - first, width, width);
            add_terms(out + e * width, table, found, packed, olds, width, width);
        }
    }
    return count;
}

/* Hang the terms on chains, one for each row; heads are below 0 before. */
int64_t hang(int64_t count, const int64_t *numbers, int64_t *heads, int64_t *next) {
    for (int64_t c = 0; c < count; c++) {
        next[c] = heads[numbers[c]];
        heads[numbers[c]] = c;
    }
    return 0;
}

/* Bring terms, those of a user after those of the one before, into the order of rows, and in a row of users. The answer
   is how many pairs of row and user there are: rows, owners and starts say of each which, whose and where it begins.
   ends (height + 1) and order (count) are for work. */
int64_t arrange(int64_t count, int64_t height, const int64_t *numbers, const int64_t *users, const int64_t *sources,
                const REAL *factors, int64_t *ends, int64_t *order, int64_t *arranged_sources, REAL *arranged_factors,
                int64_t *rows, int64_t *owners, int64_t *starts) {
    int64_t pairs = 0;
    for (int64_t n = 0; n <= height; n++) ends[n] = 0;
    for (int64_t c = 0; c < count; c++) ends[numbers[c] + 1]++;
    for (int64_t n = 0; n < height; n++) ends[n + 1] += ends[n];
    for (int64_t c = 0; c < count; c++) order[ends[numbers[c]]++] = c;
    for (int64_t place = 0; place < count; place++) {
        const int64_t c = order[place];
        arranged_sources[place] = sources[c];
        arranged_factors[place] = factors[c];
        if (pairs == 0 || rows[pairs - 1] != numbers[c] || owners[pairs - 1] != users[c]) {
            rows[pairs] = numbers[c];
            owners[pairs] = users[c];
            starts[pairs++] = place;
        }
    }
    starts[pairs] = count;
    return pairs;
}
