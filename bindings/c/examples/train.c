/* train [cpu|cuda [STEPS [FILE]]]: a linear and an MLP, trained in FP8 by delayed scaling; the loss of each step.
 *
 * 50 steps take 3 seconds on a CPU core, most of them to start an interpreter. `... | python examples/curve.py c.png`
 * draws the losses. The same source on both devices. With FILE, what was recorded of the MLP is written there: a program, on a GPU. Losses
 * are those of the same layers in te_core and te_torch, bit for bit: sums are float32, in the order of memory. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "te_core.h"

enum { ROWS = 32, WIDTH = 64, INNER = 128, VALUES = ROWS * WIDTH };

static const float RATE = 0.5F;
static int (*retain)(void **, int), (*set_current)(void *), (*take)(uint64_t *, size_t);
static int (*to_device)(uint64_t, const void *, size_t), (*to_host)(void *, uint64_t, size_t);
static int on_gpu;

static void check(te_status status) {
    if (status == TE_OK) return;
    fprintf(stderr, "%s\n", te_error()->message);
    exit(1);
}

static void must(int bad, const char *what) {
    if (!bad) return;
    fprintf(stderr, "train: %s\n", what);
    exit(1);
}

static void open_driver(void) {
    int (*init)(unsigned);
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *context;
    must(driver == NULL, "no libcuda.so.1");
    *(void **)&init = dlsym(driver, "cuInit");
    *(void **)&retain = dlsym(driver, "cuDevicePrimaryCtxRetain");
    *(void **)&set_current = dlsym(driver, "cuCtxSetCurrent");
    *(void **)&take = dlsym(driver, "cuMemAlloc_v2");
    *(void **)&to_device = dlsym(driver, "cuMemcpyHtoD_v2");
    *(void **)&to_host = dlsym(driver, "cuMemcpyDtoH_v2");
    must(!init || !retain || !set_current || !take || !to_device || !to_host, "a driver without its functions");
    must(init(0) || retain(&context, 0) || set_current(context), "no GPU");
}

/* A tensor of float32, its values on the host, and its gradient. */
typedef struct {
    DLTensor t;
    float *values;
    size_t count;
    int64_t shape[2];
} array;

static void new_array(array *a, int64_t rows, int64_t columns) {
    a->shape[0] = rows;
    a->shape[1] = columns;
    a->count = (size_t)(rows * (columns ? columns : 1));
    a->values = calloc(a->count, sizeof *a->values);
    a->t = (DLTensor){a->values, {on_gpu ? kDLCUDA : kDLCPU, 0}, columns ? 2 : 1, {2, 32, 1}, a->shape, NULL, 0};
    must(a->values == NULL, "no memory");
    if (!on_gpu) return;
    uint64_t address = 0;
    must(take(&address, a->count * sizeof *a->values), "no memory of the device");
    a->t.data = (void *)(uintptr_t)address;
}

static void put(const array *a) { /* the example computes on the host: an engine has a kernel for it */
    if (on_gpu) must(to_device((uint64_t)(uintptr_t)a->t.data, a->values, a->count * sizeof *a->values), "no copy");
}

static void get(const array *a) {
    if (on_gpu) must(to_host(a->values, (uint64_t)(uintptr_t)a->t.data, a->count * sizeof *a->values), "no copy");
}

/* Numbers from -0.5 to 0.5, the same everywhere, times a factor, plus an offset. */
static void draw(const array *a, uint32_t seed, float factor, float offset) {
    for (size_t i = 0; i < a->count; i++) {
        seed = seed * 1664525U + 1013904223U;
        a->values[i] = ((float)(seed >> 8) / 16777216.0F - 0.5F) * factor + offset;
    }
    put(a);
}

static float loss_of(const array *y, const array *target, const array *dy) {
    float sum = 0.0F;
    for (size_t i = 0; i < y->count; i++) {
        const float left = y->values[i] - target->values[i], square = left * left;
        sum += square;
        dy->values[i] = left * (2.0F / VALUES);
    }
    return sum / VALUES;
}

static void step(const array *w, const array *gradient) {
    get(gradient);
    for (size_t i = 0; i < w->count; i++) {
        const float change = RATE * gradient->values[i];
        w->values[i] -= change;
    }
    put(w);
}

static double now_us(void) {
    struct timespec now;
    (void)timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static int later(const void *one, const void *other) {
    return *(const double *)one > *(const double *)other ? 1 : -1;
}

int main(int count, char **words) {
    on_gpu = count > 1 && strcmp(words[1], "cuda") == 0;
    const int steps = count > 2 ? atoi(words[2]) : 50;
    if (on_gpu) open_driver();

    te_runtime_options options = TE_RUNTIME_OPTIONS;
    options.device_type = on_gpu ? kDLCUDA : kDLCPU;
    te_runtime *runtime;
    te_layer *linear, *mlp;
    te_scaling *scaling[2];
    check(te_runtime_create(&options, &runtime));
    check(te_layer_open(runtime, "linear", "{\"recipe\": \"DelayedScaling\", \"needs\": [\"weight\", \"bias\"]}", &linear));
    check(te_layer_open(runtime, "layernorm_mlp", "{\"activation\": \"gelu\", \"recipe\": \"DelayedScaling\"}", &mlp));
    check(te_scaling_create(linear, &scaling[0]));
    check(te_scaling_create(mlp, &scaling[1]));

    /* x, weight, bias; then h, gamma, beta, w1, b1, w2, b2: in the order of te_layer_slots */
    static const int64_t sizes[][2] = {{ROWS, WIDTH}, {WIDTH, WIDTH}, {WIDTH, 0}, {ROWS, WIDTH}, {WIDTH, 0},
                                       {WIDTH, 0},    {INNER, WIDTH}, {INNER, 0}, {WIDTH, INNER}, {WIDTH, 0}};
    enum { ALL = sizeof sizes / sizeof *sizes, FIRST = 3 };
    array given[ALL], gradient[ALL], y, target, dy;
    DLTensor *in[ALL], *grads[ALL];
    for (int i = 0; i < ALL; i++) {
        new_array(&given[i], sizes[i][0], sizes[i][1]);
        new_array(&gradient[i], sizes[i][0], sizes[i][1]);
        in[i] = &given[i].t;
        grads[i] = &gradient[i].t;
        if (i != FIRST) draw(&given[i], (uint32_t)i + 1, i ? 0.25F : 2.0F, i == 4 ? 1.0F : 0.0F);
    }
    grads[0] = NULL; /* nobody wants the gradient of x: it is not computed */
    new_array(&y, ROWS, WIDTH);
    new_array(&dy, ROWS, WIDTH);
    new_array(&target, ROWS, WIDTH);
    draw(&target, 99, 1.0F, 0.0F);

    DLTensor *hidden = in[FIRST], *out = &y.t, *of_out = &dy.t, *of_hidden = grads[FIRST];
    double *took = calloc((size_t)steps + 1, sizeof *took);
    must(steps < 1 || took == NULL, "no steps");
    for (int i = 0; i < steps; i++) {
        te_saved *first, *second;
        double begin = now_us();
        check(te_forward(linear, scaling[0], in, FIRST, &hidden, 1, &first));
        check(te_forward(mlp, scaling[1], in + FIRST, ALL - FIRST, &out, 1, &second));
        took[i] = now_us() - begin;
        check(te_synchronize(runtime, NULL));
        get(&y);
        const float loss = loss_of(&y, &target, &dy);
        printf("step %d loss %.9g\n", i, (double)loss); /* nine digits say all of a float32 */
        put(&dy);
        begin = now_us();
        check(te_backward(mlp, scaling[1], second, &of_out, 1, grads + FIRST, ALL - FIRST));
        check(te_backward(linear, scaling[0], first, &of_hidden, 1, grads, FIRST));
        check(te_scaling_update(runtime, scaling, 2));
        took[i] += now_us() - begin;
        check(te_synchronize(runtime, NULL));
        for (int k = 1; k < ALL; k++)
            if (k != FIRST) step(&given[k], &gradient[k]);
    }
    qsort(took, (size_t)steps, sizeof *took, later);
    fprintf(stderr, "%.1f us of the host's time for the layers of a step\n", took[steps / 2]);
    if (count > 3) check(te_layer_save(mlp, words[3]));
    te_runtime_destroy(runtime); /* and its layers, and their states */
    te_close();
    return 0;
}
