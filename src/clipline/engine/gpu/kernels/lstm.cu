// The LSTM recurrence in bfloat16, with the recurrent weights in shared memory for all time steps.
//
// A group is one user with at most 16 sequences. SLICES blocks of threads share a group: each keeps the weights of
// UNITS units on chip, computes these units in every step, and passes their numbers to the others of its group through
// a small buffer in global memory (`exchange`) and a counter. So weights are read once, and not once a step.
//
// Blocks take their place by a ticket, in the order in which they start. When a block runs, all blocks with lower
// tickets have started, so that only the group that started last can be incomplete: groups never wait for each other.
// That group gets its last blocks when others have ended, if incomplete groups of all launches at once, one each, leave a
// multiprocessor free: `units_on_chip` sees to that.
//
// Constants from the caller: HIDDEN (even), UNITS (a multiple of 8), ROWS (8 or 16: sequences in a group).

typedef unsigned int u32;
typedef unsigned short u16;

#define THREADS 256
#define SLICES ((HIDDEN + UNITS - 1) / UNITS)
#define CHUNKS(depth) (((depth) + 31) / 32)                                       // of 32 numbers: two products
#define STRIDE(depth) (CHUNKS(depth) * 64 + (CHUNKS(depth) % 2 == 0 ? 64 : 0))  // bytes of a row: no bank conflicts
#define MINE ((ROWS * UNITS / 2 + THREADS - 1) / THREADS)                         // pairs of units of a thread

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float2 unpacked(u32 pair) { return make_float2(low(pair), high(pair)); }
__device__ __forceinline__ u32 packed(float first, float second) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }
__device__ __forceinline__ float tanh_of(float x) { return 2.0f * sigmoid(2.0f * x) - 1.0f; }

// Loads that see what other blocks wrote: past the first-level cache.
__device__ __forceinline__ uint4 load_shared_by_blocks(const u16* from) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}

__device__ __forceinline__ void arrive(u32* counter) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ __forceinline__ void wait_for(const u32* counter, u32 least) {
    u32 seen;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    } while (seen < least);
}

__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Copy a row of `DEPTH` numbers to shared memory, by all threads of a warp; what is left of its last chunk is zero.
template <int DEPTH>
__device__ __forceinline__ void copy_row(char* to, const u16* from, bool exists, int lane) {
    constexpr int BYTES = DEPTH % 8 == 0 ? 16 : DEPTH % 4 == 0 ? 8 : 4;
    constexpr int EACH = BYTES / 2;
    for (int k = lane * EACH; k < CHUNKS(DEPTH) * 32; k += 32 * EACH) {
        const int size = exists && k < DEPTH ? BYTES : 0;
        const u32 where = (u32)__cvta_generic_to_shared(to + 2 * k);
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(where), "l"(size ? from + k : from), "n"(BYTES), "r"(size) : "memory");
    }
}

// Copy UNITS columns of the 4 HIDDEN rows of the weights to shared memory; what is left of the last chunk is zero. Pieces
// of 16 bytes change places within a row (`segment_of`), so that a warp reads 8 rows without bank conflicts.
__device__ __forceinline__ int segment_of(int row, int segment) { return segment ^ (row / 8 % (UNITS / 8)); }

__device__ __forceinline__ void copy_columns(char* to, const u16* from, int first_unit) {
    constexpr int BYTES = HIDDEN % 8 == 0 ? 16 : HIDDEN % 4 == 0 ? 8 : 4;
    constexpr int PIECES = UNITS * 2 / BYTES, EACH = BYTES / 2;
    for (int i = threadIdx.x; i < CHUNKS(4 * HIDDEN) * 32 * PIECES; i += THREADS) {
        const int row = i / PIECES, column = i % PIECES * EACH;
        const int size = row < 4 * HIDDEN && first_unit + column < HIDDEN ? BYTES : 0;
        const u32 where = (u32)__cvta_generic_to_shared(to + row * UNITS * 2 + segment_of(row, column / 8) * 16 + column % 8 * 2);
        const u16* piece = size ? from + (long long)row * HIDDEN + first_unit + column : from;
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(where), "l"(piece), "n"(BYTES), "r"(size) : "memory");
    }
}

__device__ __forceinline__ void copies_done() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
}

// Weights of 32 numbers in depth for 8 columns, in the order of two products: stored as (columns, depth), by `copy_row`,
// or as (depth, columns), by `copy_columns`. A lane has depths 8 quarter + {0, ..., 7} of one column.
template <int DEPTH, bool DEPTH_FIRST>
__device__ __forceinline__ uint4 weights_of(const char* weights, int chunk, int column, int lane) {
    uint4 w;
    if (DEPTH_FIRST) {
        const int row = chunk * 32 + lane % 8 / 2 * 8 + lane % 2 + lane / 8 * 2;
        const u32 where = (u32)__cvta_generic_to_shared(weights + row * UNITS * 2 + segment_of(row, column / 8) * 16);
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "r"(where) : "memory");
    } else {
        w = *(const uint4*)(weights + (column + lane / 4) * STRIDE(DEPTH) + chunk * 64 + lane % 4 * 16);
    }
    return w;
}

// partial[part][row][column] = numbers (ROWS, DEPTH) by weights (COLUMNS, DEPTH), over a part of the depth for each of
// PARTS groups of warps. The order of numbers within a chunk of 32 is permuted alike on both sides, for wide loads.
template <int COLUMNS, int DEPTH, int PARTS, bool DEPTH_FIRST>
__device__ __forceinline__ void product(const char* weights, const u16* numbers, float* partial, int rows) {
    constexpr int TILES = COLUMNS / 8 / (THREADS / 32 / PARTS), MOST = (CHUNKS(DEPTH) + PARTS - 1) / PARTS;
    constexpr int WIDTH = CHUNKS(DEPTH) * 32;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, quarter = lane % 4;
    const int part = warp % PARTS, first = warp / PARTS * TILES * 8;
    uint4 top[MOST], bottom[MOST];
#pragma unroll
    for (int i = 0; i < MOST; i++) {
        const int chunk = part + i * PARTS;
        top[i] = bottom[i] = make_uint4(0, 0, 0, 0);
        if (chunk < CHUNKS(DEPTH)) {
            const u16* from = numbers + chunk * 32 + quarter * 8;
            if (row < rows) top[i] = load_shared_by_blocks(from + row * WIDTH);
            if (ROWS > 8 && row + 8 < rows) bottom[i] = load_shared_by_blocks(from + (row + 8) * WIDTH);
        }
    }
    float sums[TILES][4];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) sums[tile][0] = sums[tile][1] = sums[tile][2] = sums[tile][3] = 0.0f;
#pragma unroll
    for (int i = 0; i < MOST; i++) {
        const int chunk = part + i * PARTS;
        if (chunk < CHUNKS(DEPTH)) {
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                const uint4 w = weights_of<DEPTH, DEPTH_FIRST>(weights, chunk, first + tile * 8, lane);
                multiply(sums[tile], top[i].x, bottom[i].x, top[i].y, bottom[i].y, w.x, w.y);
                multiply(sums[tile], top[i].z, bottom[i].z, top[i].w, bottom[i].w, w.z, w.w);
            }
        }
    }
    float* own = partial + part * ROWS * (COLUMNS + 8);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        const int column = first + tile * 8 + quarter * 2;
        *(float2*)(own + row * (COLUMNS + 8) + column) = make_float2(sums[tile][0], sums[tile][1]);
        if (ROWS > 8) *(float2*)(own + (row + 8) * (COLUMNS + 8) + column) = make_float2(sums[tile][2], sums[tile][3]);
    }
}

template <int COLUMNS, int PARTS>
__device__ __forceinline__ float2 total(const float* partial, int row, int column) {
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        const float2 one = *(const float2*)(partial + (part * ROWS + row) * (COLUMNS + 8) + column);
        sum.x += one.x;
        sum.y += one.y;
    }
    return sum;
}

struct Place {  // of a block
    int user, first_row, rows, first_unit;
    u32* counter;
    u16* exchange;
};

__device__ __forceinline__ Place place_of(u32* sync, u16* exchange, int batch, int width) {
    __shared__ u32 ticket;
    if (threadIdx.x == 0) ticket = atomicAdd(sync, 1u);
    __syncthreads();
    const int group = ticket / SLICES, row_blocks = (batch + ROWS - 1) / ROWS;
    Place place;
    place.user = group / row_blocks;
    place.first_row = group % row_blocks * ROWS;
    place.rows = min(ROWS, batch - place.first_row);
    place.first_unit = ticket % SLICES * UNITS;
    place.counter = sync + 32 * (1 + group);
    place.exchange = exchange + (long long)group * 2 * ROWS * width;
    return place;
}

// Two units of one sequence, which one thread computes: a thread has MINE of them.
struct Pair {
    int row, unit;
    bool works;  // false beyond the last unit or sequence
};

__device__ __forceinline__ Pair pair_of(int i, const Place& place) {
    const int number = threadIdx.x + i * THREADS;
    Pair pair;
    pair.row = number / (UNITS / 2);
    pair.unit = place.first_unit + number % (UNITS / 2) * 2;
    pair.works = pair.row < place.rows && pair.unit < HIDDEN;
    return pair;
}

// What the backward pass of a pair reads of one step.
struct Saved {
    u32 gate[4], grad;
    float2 before;  // cells of the step before
    bool active;
};

__device__ __forceinline__ Saved saved_at(
    const u16* grad, const u16* gates, const float* cells, const unsigned char* active, long long row, int unit, int t, int batch) {
    Saved saved;
#pragma unroll
    for (int gate = 0; gate < 4; gate++) saved.gate[gate] = *(const u32*)(gates + row * 4 * HIDDEN + gate * HIDDEN + unit);
    saved.grad = *(const u32*)(grad + row * HIDDEN + unit);
    saved.before = make_float2(0.0f, 0.0f);
    if (t > 0) saved.before = *(const float2*)(cells + (row - batch) * HIDDEN + unit);
    saved.active = active[row];
    return saved;
}

#define FORWARD_PARTS 4
#define BACKWARD_PARTS 8

// gate_inputs and gates (users, time, batch, 4 HIDDEN), weight (users, 4 HIDDEN, HIDDEN), active (users, time, batch),
// outputs and cells (users, time, batch, HIDDEN); exchange and sync begin as zeros.
extern "C" __global__ void __launch_bounds__(THREADS, 1) lstm_forward(
    const u16* gate_inputs, const u16* weight, const unsigned char* active, u16* outputs, u16* gates, float* cells,
    u16* exchange, u32* sync, int time, int batch) {
    extern __shared__ __align__(16) char memory[];
    constexpr int WIDTH = CHUNKS(HIDDEN) * 32, COLUMNS = 4 * UNITS;
    char* weights = memory;
    float* partial = (float*)(memory + COLUMNS * STRIDE(HIDDEN));
    const Place place = place_of(sync, exchange, batch, WIDTH);
    for (int column = threadIdx.x / 32; column < COLUMNS; column += THREADS / 32) {
        const int gate = column / UNITS, unit = place.first_unit + column % UNITS;
        const bool exists = unit < HIDDEN;
        const u16* from = weight + (((long long)place.user * 4 + gate) * HIDDEN + (exists ? unit : 0)) * HIDDEN;
        copy_row<HIDDEN>(weights + column * STRIDE(HIDDEN), from, exists, threadIdx.x % 32);
    }
    copies_done();
    float2 cell[MINE], state[MINE];
#pragma unroll
    for (int i = 0; i < MINE; i++) cell[i] = state[i] = make_float2(0.0f, 0.0f);
    for (int t = 0; t < time; t++) {
        const long long here = ((long long)place.user * time + t) * batch + place.first_row;
        u32 inputs[MINE][4];
        bool is_active[MINE];
#pragma unroll
        for (int i = 0; i < MINE; i++) {  // before waiting: these do not depend on other blocks
            const Pair pair = pair_of(i, place);
            is_active[i] = pair.works && active[here + pair.row];
#pragma unroll
            for (int gate = 0; gate < 4; gate++)
                inputs[i][gate] = pair.works ? *(const u32*)(gate_inputs + (here + pair.row) * 4 * HIDDEN + gate * HIDDEN + pair.unit) : 0;
        }
        if (t > 0) {
            if (threadIdx.x == 0) wait_for(place.counter, (u32)SLICES * t);
            __syncthreads();
            product<COLUMNS, HIDDEN, FORWARD_PARTS, false>(weights, place.exchange + (t - 1) % 2 * ROWS * WIDTH, partial, place.rows);
            __syncthreads();
        }
        float2 z[MINE][4];
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            const Pair pair = pair_of(i, place);
            if (!pair.works) continue;
#pragma unroll
            for (int gate = 0; gate < 4; gate++) {
                float2 sum = unpacked(inputs[i][gate]);
                if (t > 0) {
                    const float2 product = total<COLUMNS, FORWARD_PARTS>(partial, pair.row, gate * UNITS + pair.unit - place.first_unit);
                    sum = make_float2(sum.x + product.x, sum.y + product.y);
                }
                z[i][gate] = gate == 2 ? make_float2(tanh_of(sum.x), tanh_of(sum.y)) : make_float2(sigmoid(sum.x), sigmoid(sum.y));
            }
            if (is_active[i]) {
                cell[i].x = z[i][1].x * cell[i].x + z[i][0].x * z[i][2].x;
                cell[i].y = z[i][1].y * cell[i].y + z[i][0].y * z[i][2].y;
                state[i] = make_float2(z[i][3].x * tanh_of(cell[i].x), z[i][3].y * tanh_of(cell[i].y));
            }
            *(u32*)(place.exchange + (t % 2 * ROWS + pair.row) * WIDTH + pair.unit) = packed(state[i].x, state[i].y);
        }
        __syncthreads();
        if (threadIdx.x == 0) arrive(place.counter);
#pragma unroll
        for (int i = 0; i < MINE; i++) {  // while other blocks arrive
            const Pair pair = pair_of(i, place);
            if (!pair.works) continue;
#pragma unroll
            for (int gate = 0; gate < 4; gate++)
                *(u32*)(gates + (here + pair.row) * 4 * HIDDEN + gate * HIDDEN + pair.unit) = packed(z[i][gate].x, z[i][gate].y);
            *(float2*)(cells + (here + pair.row) * HIDDEN + pair.unit) = cell[i];
            *(u32*)(outputs + (here + pair.row) * HIDDEN + pair.unit) = packed(state[i].x, state[i].y);
        }
    }
}

// grad (users, time, batch, HIDDEN), grad_gate_inputs as gates; the rest as above.
extern "C" __global__ void __launch_bounds__(THREADS, 1) lstm_backward(
    const u16* grad, const u16* gates, const float* cells, const u16* weight, const unsigned char* active,
    u16* grad_gate_inputs, u16* exchange, u32* sync, int time, int batch) {
    extern __shared__ __align__(16) char memory[];
    constexpr int WIDTH = CHUNKS(4 * HIDDEN) * 32;
    char* weights = memory;
    float* partial = (float*)(memory + CHUNKS(4 * HIDDEN) * 32 * UNITS * 2);
    const Place place = place_of(sync, exchange, batch, WIDTH);
    copy_columns(weights, weight + (long long)place.user * 4 * HIDDEN * HIDDEN, place.first_unit);
    copies_done();
    float2 grad_cell[MINE], grad_state[MINE], cell[MINE];
    Saved saved[MINE];
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        grad_cell[i] = grad_state[i] = cell[i] = make_float2(0.0f, 0.0f);
        const Pair pair = pair_of(i, place);
        if (pair.works) {
            const long long where = ((long long)place.user * time + time - 1) * batch + place.first_row + pair.row;
            cell[i] = *(const float2*)(cells + where * HIDDEN + pair.unit);
            saved[i] = saved_at(grad, gates, cells, active, where, pair.unit, time - 1, batch);
        }
    }
    for (int t = time - 1; t >= 0; t--) {
        const long long here = ((long long)place.user * time + t) * batch + place.first_row;
        const int turn = time - 1 - t;
        u32 dz[MINE][4];
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            const Pair pair = pair_of(i, place);
            if (!pair.works) continue;
            const Saved now = saved[i];
            const float2 out = make_float2(grad_state[i].x + low(now.grad), grad_state[i].y + high(now.grad));
            if (now.active) {
                const float2 in = unpacked(now.gate[0]), forget = unpacked(now.gate[1]);
                const float2 candidate = unpacked(now.gate[2]), open = unpacked(now.gate[3]);
                const float2 squashed = make_float2(tanh_of(cell[i].x), tanh_of(cell[i].y));
                const float x = grad_cell[i].x + out.x * open.x * (1 - squashed.x * squashed.x);
                const float y = grad_cell[i].y + out.y * open.y * (1 - squashed.y * squashed.y);
                dz[i][0] = packed(x * candidate.x * in.x * (1 - in.x), y * candidate.y * in.y * (1 - in.y));
                dz[i][1] = packed(x * now.before.x * forget.x * (1 - forget.x), y * now.before.y * forget.y * (1 - forget.y));
                dz[i][2] = packed(x * in.x * (1 - candidate.x * candidate.x), y * in.y * (1 - candidate.y * candidate.y));
                dz[i][3] = packed(out.x * squashed.x * open.x * (1 - open.x), out.y * squashed.y * open.y * (1 - open.y));
                grad_cell[i] = make_float2(x * forget.x, y * forget.y);
                grad_state[i] = make_float2(0.0f, 0.0f);
            } else {
                dz[i][0] = dz[i][1] = dz[i][2] = dz[i][3] = 0;
                grad_state[i] = out;  // a held state passes its gradient on
            }
            cell[i] = now.before;
#pragma unroll
            for (int gate = 0; gate < 4; gate++)
                *(u32*)(place.exchange + (turn % 2 * ROWS + pair.row) * WIDTH + gate * HIDDEN + pair.unit) = dz[i][gate];
        }
        __syncthreads();
        if (threadIdx.x == 0) arrive(place.counter);
#pragma unroll
        for (int i = 0; i < MINE; i++) {  // while other blocks arrive
            const Pair pair = pair_of(i, place);
            if (!pair.works) continue;
#pragma unroll
            for (int gate = 0; gate < 4; gate++)
                *(u32*)(grad_gate_inputs + (here + pair.row) * 4 * HIDDEN + gate * HIDDEN + pair.unit) = dz[i][gate];
            if (t > 0) saved[i] = saved_at(grad, gates, cells, active, here - batch + pair.row, pair.unit, t - 1, batch);
        }
        if (t == 0) break;
        if (threadIdx.x == 0) wait_for(place.counter, (u32)SLICES * (turn + 1));
        __syncthreads();
        product<UNITS, 4 * HIDDEN, BACKWARD_PARTS, true>(weights, place.exchange + turn % 2 * ROWS * WIDTH, partial, place.rows);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            const Pair pair = pair_of(i, place);
            if (!pair.works) continue;
            const float2 sum = total<UNITS, BACKWARD_PARTS>(partial, pair.row, pair.unit - place.first_unit);
            grad_state[i].x += sum.x;
            grad_state[i].y += sum.y;
        }
    }
}
