// The delayed-scaling step of many modules in one launch (te_core.ops.quantize.update_scales states the rule).
//
// The table of states is a kernel parameter: nothing is copied to the device before, and a captured graph holds its
// own. One block a state, one warp a column of its history [rows, columns]: the lanes take 32 rows at a time, always
// reading a row before the warp overwrites it. CAPACITY entries of 40 bytes: 100 fit the 4 KB of every device, 800
// the 32,764 bytes of CUDA 12.1 and later.
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
    int unused;
};
struct Table {
    State state[CAPACITY];
};

extern "C" __global__ void __launch_bounds__(128) scale_update(const __grid_constant__ Table table) {
    const State& s = table.state[blockIdx.x];
    const int lane = threadIdx.x & 31;
    for (int c = threadIdx.x >> 5; c < s.columns; c += 4) {
        float* column = s.history + c;
        const float last = column[0], scale = s.scale[c];
        float top = 0.f;
        __syncwarp();
        if (last != 0.f) {  // a NaN too
            for (int base = 0; base < s.rows; base += 32) {
                const int row = base + lane;
                float next = 0.f;
                if (row + 1 < s.rows) next = column[i64(row + 1) * s.columns];
                top = fmaxf(top, next);
                __syncwarp();  // all rows of this stretch are read before any is written
                if (row < s.rows) {
                    column[i64(row) * s.columns] = row == 0 ? 0.f : (row == s.rows - 1 ? last : next);
                }
                __syncwarp();
            }
        }
        if (lane == 0) s.used[c] = scale;
        const float amax = HISTORY_MAX ? fmaxf(warp_max(top), last) : last;
        if (lane == 0 && last != 0.f && amax > 0.f && !isinf(amax)) {
            const float next = __fdiv_rn(s.limit, amax);
            s.scale[c] = isinf(next) ? __uint_as_float(0x7f7fffffu) : next;
        }
    }
}
