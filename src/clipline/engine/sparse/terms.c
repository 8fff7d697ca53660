/* Products of sparse rows by a weight, and rows that are sums of a few terms: measured, and added to a total. native.py
   compiles it, with REAL the type of weights and updates, float or double.

   Row r of `rows` is the sum of factors[i] times the `width` numbers at terms[i] for starts[r] <= i < starts[r + 1], and
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
#define SOON 24  /* terms that are asked for before they are added up */
typedef REAL Vector __attribute__((vector_size(64), aligned(sizeof(REAL)), may_alias));

/* Ask the memory for a row that will be read. */
static inline void ask(const REAL *row, int64_t width) {
    for (int64_t k = 0; k < width; k += LINE) __builtin_prefetch(row + k, 0, 2);
}

/* row = the numbers of the terms from `begin` on, added up, two terms at a time: fewer ways to the row. */
static APART void form(REAL *restrict row, const REAL *const *terms, const REAL *restrict factors, int64_t count,
                       int64_t begin, int64_t numbers) {
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

/* sums[user] += squares of the user's rows over units[user], in float64, and lost[user] += what that has rounded off.
   A row of one term is measured while it is formed: f * one is the same number everywhere. */
int64_t squares(int64_t rows, int64_t width, const int64_t *starts, const REAL *const *terms, const REAL *factors,
                const int64_t *owners, const double *units, double *sums, double *lost) {
    REAL row[BLOCK];
    for (int64_t r = 0; r < rows; r++) {
        const int64_t user = owners[r], first = starts[r], count = starts[r + 1] - first;
        const double over = units[user];
        for (int64_t i = first + SOON; i < starts[r + 1] + SOON && i < starts[rows]; i++) ask(terms[i], width);
        for (int64_t begin = 0; begin < width; begin += BLOCK) {
            const int64_t numbers = width - begin < BLOCK ? width - begin : BLOCK;
            double sum;
            if (count == 1 && over == 1)
                sum = squared(factors[first], terms[first] + begin, numbers);
            else {
                form(row, terms + first, factors + first, count, begin, numbers);
                for (int64_t k = 0; k < numbers && over != 1; k++) row[k] = (REAL)(row[k] / over); /* both are double */
                sum = squared(1, row, numbers);
            }
            const double before = sums[user], after = before + sum;
            lost[user] += before >= sum ? (before - after) + sum : (sum - after) + before;
            sums[user] = after;
        }
    }
    return 0;
}

/* total[places[r]] += scale[user] * row r, in float64; a user whose scale is 0 takes no part, whatever the row. */
int64_t add(int64_t rows, int64_t width, const int64_t *starts, const REAL *const *terms, const REAL *factors,
            const int64_t *owners, const int64_t *places, const double *scale, double *total) {
    REAL row[BLOCK];
    for (int64_t r = 0; r < rows; r++) {
        const int64_t first = starts[r], count = starts[r + 1] - first;
        const double own = scale[owners[r]];
        if (!(own > 0)) continue;
        for (int64_t i = first + SOON; i < starts[r + 1] + SOON && i < starts[rows]; i++) ask(terms[i], width);
        for (int64_t begin = 0; begin < width; begin += BLOCK) {
            const int64_t numbers = width - begin < BLOCK ? width - begin : BLOCK;
            double *restrict sum = total + places[r] * width + begin;
            form(row, terms + first, factors + first, count, begin, numbers);
            for (int64_t k = 0; k < numbers; k++) sum[k] += own * (double)row[k];
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
            ask(weight + numbers[asked] * width, width);
        for (int64_t begin = 0; begin < width && width >= STRIP; begin += STRIP) {
            const int64_t at = width - begin < STRIP ? width - STRIP : begin; /* some numbers of the last twice */
            strip(out + e * width + at, weight + at, numbers + first, factors + first, last - first, table + at, found,
                  packed, olds, width);
        }
        for (int64_t k = 0; k < width && width < STRIP; k++) {
            REAL sum = 0;
            for (int64_t i = first; i < last; i++) sum += factors[i] * weight[numbers[i] * width + k];
            for (int64_t o = 0; o < olds; o++) sum += packed[o] * table[found[o] * width + k];
            out[e * width + k] = sum;
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

/* Terms of users, in parts: how many, whose, and where their numbers, sources and factors and the table lie. */
typedef struct {
    int64_t count, user;
    const int64_t *numbers, *sources;
    const REAL *factors, *table;
} Part;

/* Bring terms, in parts with those of a user after those of the one before, into the order of rows, and in a row of
   users. The answer is how many pairs of row and user there are: rows, owners and starts say of each which, whose and
   where its terms and factors begin. ends (height + 1) is for work. */
int64_t arrange(int64_t parts, const Part *part, int64_t height, int64_t width, int64_t *ends, const REAL **terms,
                REAL *factors, int64_t *rows, int64_t *owners, int64_t *starts) {
    int64_t pairs = 0;
    for (int64_t n = 0; n <= height; n++) ends[n] = 0;
    for (int64_t p = 0; p < parts; p++)
        for (int64_t c = 0; c < part[p].count; c++) ends[part[p].numbers[c] + 1]++;
    for (int64_t n = 0; n < height; n++) ends[n + 1] += ends[n]; /* for now where each begins */
    for (int64_t p = 0; p < parts; p++)
        for (int64_t c = 0; c < part[p].count; c++) {
            const int64_t place = ends[part[p].numbers[c]]++;
            terms[place] = part[p].table + part[p].sources[c] * width;
            factors[place] = part[p].factors[c];
            owners[place] = part[p].user;
        }
    for (int64_t n = 0, place = 0; n < height; n++)
        for (const int64_t begin = place; place < ends[n]; place++)
            if (place == begin || owners[place] != owners[pairs - 1]) { /* pairs <= place: what is read is not yet written */
                rows[pairs] = n;
                owners[pairs] = owners[place];
                starts[pairs++] = place;
            }
    starts[pairs] = pairs ? ends[height - 1] : 0;
    return pairs;
}
