// The delayed-scaling step of many modules in one launch (te_core.ops.quantize.update_scales states the rule).
//
// The table of states is a kernel parameter: nothing is copied to the device before, and a captured graph holds its
// own. A team of 128 threads takes a column of a state's history [rows, columns], a block four; each state has as many
// blocks as the widest one wants (experts have hundreds of columns). A team takes 1024 rows at a time with all loads in
// flight, and reads them before it overwrites any: latency is the whole cost of this kernel.
// CAPACITY entries of 40 bytes: 100 fit the 4 KB of every device, 800 the 32,764 bytes of CUDA 12.1 and later.
//
// -D CAPACITY=…  HISTORY_MAX=0|1 (amax of the whole history, or the most recent)
// compile-check: CAPACITY=100 HISTORY_MAX=1
// compile-check: CAPACITY=800 HISTORY_MAX=0
#include "common/numeric.cuh"

struct State {
    float* scale;    // [columns]
    float* history;  // [rows, columns]; casts raise row 0
    float* used;     // [columns]: receives the scale from before
    int columns, rows;
    float limit;  // the format's maximum * 2^-margin
    int blocks;  // of each state of the launch
};
struct Table {
    State state[CAPACITY];
};

constexpr int TEAM = 128, TEAMS = 4, IN_FLIGHT = 8;

extern "C" __global__ void __launch_bounds__(TEAM * TEAMS) scale_update(const __grid_constant__ Table table) {
    __shared__ float tops[TEAMS][TEAM / 32];
    const int blocks = table.state[0].blocks;
    const State& s = table.state[blockIdx.x / blocks];
    const int team = threadIdx.x / TEAM, place = threadIdx.x % TEAM;
    for (int first = blockIdx.x % blocks * TEAMS; first < s.columns; first += blocks * TEAMS) {
        const int c = first + team;
        const bool mine = c < s.columns;
        float* column = s.history + (mine ? c : 0);
        const float last = mine ? column[0] : 0.f;
        const float scale = mine ? s.scale[c] : 0.f;
        const int rows = last != 0.f ? s.rows : 0;  // a NaN counts as a maximum: its column rolls
        float top = 0.f;
        for (int base = 0; base < s.rows; base += TEAM * IN_FLIGHT) {
            float next[IN_FLIGHT];
#pragma unroll
            for (int k = 0; k < IN_FLIGHT; ++k) {
                const int row = base + k * TEAM + place;
                next[k] = row + 1 < rows ? column[i64(row + 1) * s.columns] : 0.f;
            }
            __syncthreads();  // every row of this stretch, and row 0, is read before any is written
#pragma unroll
            for (int k = 0; k < IN_FLIGHT; ++k) {
                const int row = base + k * TEAM + place;
                top = fmaxf(top, next[k]);
                if (row < rows) column[i64(row) * s.columns] = row == 0 ? 0.f : (row == rows - 1 ? last : next[k]);
            }
        }
        top = warp_max(top);
        if (place % 32 == 0) tops[team][place / 32] = top;
        __syncthreads();
        if (place == 0 && mine) {
            s.used[c] = scale;
            float amax = last;
            if (HISTORY_MAX) {
                for (int w = 0; w < TEAM / 32; ++w) amax = fmaxf(amax, tops[team][w]);
            }
            if (last != 0.f && amax > 0.f && !isinf(amax)) {
                const float updated = __fdiv_rn(s.limit, amax);
                s.scale[c] = isinf(updated) ? __uint_as_float(0x7f7fffffu) : updated;
            }
        }
    }
}
