/* embedding SCENARIO: layers on the CPU in a process of C's, whose interpreter the library starts. Prints "ok". */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "te_core.h"

enum { ROWS = 4, WIDTH = 16, THREADS = 4, STEPS = 5 };

#define EXPECT(what)                                                                                                   \
    do {                                                                                                               \
        if (!(what)) {                                                                                                 \
            fprintf(stderr, "line %d: %s, te_error: %s\n", __LINE__, #what, te_error()->message);                      \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)
#define REFUSED(call, as, said)                                                                                        \
    do {                                                                                                               \
        EXPECT((call) == (as));                                                                                        \
        EXPECT(te_error()->status == (as) && strstr(te_error()->message, said) != NULL);                               \
        EXPECT(te_error()->operation[0] && te_error()->got[0] && te_error()->allowed[0] && te_error()->to_do[0]);      \
    } while (0)

typedef struct {
    DLTensor t;
    int64_t shape[2];
    float values[WIDTH * WIDTH];
} array;

static DLTensor *new_array(array *a, int64_t rows, int64_t columns, float value) {
    a->shape[0] = rows;
    a->shape[1] = columns;
    for (int i = 0; i < WIDTH * WIDTH; i++) a->values[i] = value * (float)(i % 7 - 3);
    a->t = (DLTensor){a->values, {kDLCPU, 0}, columns ? 2 : 1, {2, 32, 1}, a->shape, NULL, 0};
    return &a->t;
}

static int living; /* blocks of `alloc` */
static int last = 1 << 30; /* how many blocks `alloc` still gives */

static void *alloc(size_t bytes, size_t alignment, void *stream, void *user) {
    void *found = NULL;
    (void)stream, (void)user;
    if (last-- <= 0 || posix_memalign(&found, alignment, bytes) != 0) return NULL;
    living++;
    return found;
}

static void give(void *address, void *stream, void *user) {
    (void)stream, (void)user;
    living--;
    free(address);
}

static te_runtime *new_runtime(int with_callbacks) {
    te_runtime_options o = TE_RUNTIME_OPTIONS;
    te_runtime *rt = NULL;
    o.device_type = kDLCPU;
    if (with_callbacks) {
        o.alloc = alloc;
        o.free = give;
    }
    EXPECT(te_runtime_create(&o, &rt) == TE_OK);
    return rt;
}

static const char *const DELAYED = "{\"recipe\": {\"DelayedScaling\": {\"amax_history_len\": 4}}}";

/* A linear's steps; the last gradient of its bias. */
static void run_linear(te_runtime *rt, float *left) {
    static _Thread_local array x, w, b, y, dx, dw, db;
    te_layer *layer;
    te_scaling *scaling;
    EXPECT(te_layer_open(rt, "linear", DELAYED, &layer) == TE_OK && te_scaling_create(layer, &scaling) == TE_OK);
    DLTensor *in[] = {new_array(&x, ROWS, WIDTH, 0.25F), new_array(&w, WIDTH, WIDTH, 0.5F), new_array(&b, WIDTH, 0, 1.0F)};
    DLTensor *out = new_array(&y, ROWS, WIDTH, 0.0F);
    DLTensor *grads[] = {new_array(&dx, ROWS, WIDTH, 9.0F), new_array(&dw, WIDTH, WIDTH, 9.0F), new_array(&db, WIDTH, 0, 9.0F)};
    for (int i = 0; i < STEPS; i++) {
        te_saved *saved;
        EXPECT(te_forward(layer, scaling, in, 3, &out, 1, &saved) == TE_OK);
        EXPECT(te_backward(layer, scaling, saved, &out, 1, grads, 3) == TE_OK);
        EXPECT(te_scaling_update(rt, &scaling, 1) == TE_OK);
    }
    memcpy(left, dw.values, sizeof dw.values);
    te_scaling_free(scaling);
    te_layer_free(layer);
}

static te_runtime *shared;
static float found[THREADS][WIDTH * WIDTH];

static void *thread(void *number) {
    te_runtime *own = new_runtime(0); /* half of them share a runtime */
    const int i = *(int *)number;
    run_linear(i % 2 ? own : shared, found[i]);
    te_runtime_destroy(own);
    return NULL;
}

static void threads(void) {
    pthread_t all[THREADS];
    int numbers[THREADS];
    shared = new_runtime(0);
    for (int i = 0; i < THREADS; i++) {
        numbers[i] = i;
        EXPECT(pthread_create(&all[i], NULL, thread, &numbers[i]) == 0);
    }
    for (int i = 0; i < THREADS; i++) EXPECT(pthread_join(all[i], NULL) == 0);
    for (int i = 1; i < THREADS; i++) EXPECT(memcmp(found[0], found[i], sizeof found[0]) == 0);
    EXPECT(te_python_state() == TE_PYTHON_OURS && found[0][1] != 9.0F);
    te_runtime_destroy(shared);
}

static void wrong(void) {
    te_runtime *rt = new_runtime(0);
    te_layer *layer = (void *)1, *other;
    te_scaling *scaling;
    te_saved *saved;
    array x, w, y, b, dx;
    const te_layer_slot *slots;
    int32_t inputs, outputs;
    REFUSED(te_layer_open(rt, "lineal", NULL, &layer), TE_ARGUMENT, "did you mean linear?");
    EXPECT(layer == NULL);
    REFUSED(te_layer_open(rt, "linear", "{\"turned\": ", &layer), TE_ARGUMENT, "no JSON");
    REFUSED(te_layer_open(rt, "linear", "[]", &layer), TE_ARGUMENT, "options = []");
    for (size_t deep = 10; deep < 1000000; deep *= 10) {
        char *nested = calloc(2 * deep + 16, 1);
        memcpy(nested, "{\"needs\":", 9);
        memset(nested + 9, '[', deep);
        memset(nested + 9 + deep, ']', deep);
        nested[9 + 2 * deep] = '}';
        REFUSED(te_layer_open(rt, "linear", nested, &layer), TE_ARGUMENT, "nested");
        free(nested);
    }
    REFUSED(te_layer_open(rt, "linear", "{\"recipe\": \"Fast\"}", &layer), TE_ARGUMENT, "DelayedScaling");
    REFUSED(te_layer_open(rt, "linear", "{\"speed\": 3}", &layer), TE_ARGUMENT, "speed");
    REFUSED(te_layer_open(rt, "linear", "{\"needs\": [\"y\"]}", &layer), TE_ARGUMENT, "needs");
    REFUSED(te_layer_open(rt, "grouped_linear", NULL, &layer), TE_UNSUPPORTED, "sizes with each call");
    REFUSED(te_layer_open(NULL, "linear", NULL, &layer), TE_ARGUMENT, "NULL");
    EXPECT(te_layer_open(rt, "linear", DELAYED, &layer) == TE_OK && te_layer_open(rt, "linear", NULL, &other) == TE_OK);
    EXPECT(te_layer_slots(layer, &slots, &inputs, &outputs) == TE_OK && inputs == 3 && outputs == 1);
    EXPECT(strcmp(slots[1].name, "weight") == 0 && slots[2].optional && slots[1].gradient && slots[3].role == TE_OUTPUT);

    DLTensor *in[] = {new_array(&x, ROWS, WIDTH, 1.0F), new_array(&w, WIDTH, WIDTH, 1.0F)}, *none[] = {NULL, NULL};
    DLTensor *out = new_array(&y, ROWS, WIDTH, 0.0F);
    (void)new_array(&b, WIDTH, 0, 0.0F), (void)new_array(&dx, ROWS, WIDTH, 0.0F);
    REFUSED(te_forward(layer, NULL, in, 2, &out, 1, &saved), TE_ARGUMENT, "te_scaling_create");
    EXPECT(te_scaling_create(layer, &scaling) == TE_OK);
    REFUSED(te_forward(other, scaling, in, 2, &out, 1, &saved), TE_ARGUMENT, "another layer's state");
    REFUSED(te_forward(layer, scaling, none, 2, &out, 1, &saved), TE_ARGUMENT, "no x, weight");
    REFUSED(te_forward(layer, scaling, NULL, 2, &out, 1, &saved), TE_ARGUMENT, "2 inputs");
    REFUSED(te_forward(layer, scaling, in, 9, &out, 1, &saved), TE_ARGUMENT, "9 inputs for 3");
    REFUSED(te_forward(layer, scaling, in, 2, none, 1, &saved), TE_ARGUMENT, "y");
    x.t.dtype.bits = 64;
    REFUSED(te_forward(layer, scaling, in, 2, &out, 1, &saved), TE_ARGUMENT, "float64");
    x.t.dtype = (DLDataType){99, 32, 1};
    REFUSED(te_forward(layer, scaling, in, 2, &out, 1, &saved), TE_ARGUMENT, "99");
    x.t.dtype = w.t.dtype;
    x.t.ndim = -1;
    REFUSED(te_forward(layer, scaling, in, 2, &out, 1, &saved), TE_ARGUMENT, "-1 dimensions");
    x.t.ndim = 2;
    x.shape[1] = 8;
    REFUSED(te_forward(layer, scaling, in, 2, &out, 1, &saved), TE_ARGUMENT, "weight");
    x.shape[1] = WIDTH;
    x.t.device.device_type = kDLCUDA;
    REFUSED(te_forward(layer, scaling, in, 2, &out, 1, &saved), TE_ARGUMENT, "device (2, 0)");
    x.t.device.device_type = kDLCPU;
    x.t.data = NULL;
    REFUSED(te_forward(layer, scaling, in, 2, &out, 1, &saved), TE_ARGUMENT, "no data in x");
    x.t.data = x.values;
    for (int bit = 40; bit < 64; bit++) {
        x.t.byte_offset = UINT64_C(1) << bit;
        REFUSED(te_forward(layer, scaling, in, 2, &out, 1, &saved), TE_ARGUMENT, "x at");
    }
    x.t.byte_offset = 0;
    int64_t far[] = {INT64_MAX / 2, 1}, back[] = {-(INT64_C(1) << 50), 1};
    x.t.strides = far;
    REFUSED(te_forward(layer, scaling, in, 2, &out, 1, &saved), TE_ARGUMENT, "x at");
    x.t.strides = back;
    REFUSED(te_forward(layer, scaling, in, 2, &out, 1, &saved), TE_ARGUMENT, "x at");
    x.t.strides = NULL;
    y.t.data = x.values; /* backward would read y for x */
    REFUSED(te_forward(layer, scaling, in, 2, &out, 1, &saved), TE_ARGUMENT, "y in the memory of x");
    y.t.data = w.values + WIDTH;
    REFUSED(te_forward(layer, scaling, in, 2, &out, 1, &saved), TE_ARGUMENT, "y in the memory of weight");
    y.t.data = y.values;
    y.shape[0] = 3;
    REFUSED(te_forward(layer, scaling, in, 2, &out, 1, &saved), TE_ARGUMENT, "y");
    y.shape[0] = ROWS;

    EXPECT(te_forward(layer, scaling, in, 2, &out, 1, &saved) == TE_OK);
    REFUSED(te_backward(other, NULL, saved, &out, 1, in, 2), TE_ARGUMENT, "what te_forward of this layer kept");
    REFUSED(te_backward(layer, scaling, saved, none, 1, none, 2), TE_ARGUMENT, "gradients");
    DLTensor *grads[] = {&y.t, NULL, &b.t};
    REFUSED(te_backward(layer, scaling, saved, &out, 1, grads, 2), TE_ARGUMENT, "x in the memory of y");
    grads[0] = &x.t;
    REFUSED(te_backward(layer, scaling, saved, &out, 1, grads, 2), TE_ARGUMENT, "te_backward: got a place for x in the memory of x");
    grads[0] = &dx.t;
    dx.t.data = b.values;
    REFUSED(te_backward(layer, scaling, saved, &out, 1, grads, 3), TE_ARGUMENT, "bias in the memory of x");
    grads[0] = NULL; /* there was no bias */
    REFUSED(te_backward(layer, scaling, saved, &out, 1, grads, 3), TE_ARGUMENT, "bias");
    EXPECT(te_backward(layer, scaling, saved, &out, 1, none, 2) == TE_OK);
    REFUSED(te_backward(layer, scaling, saved, &out, 1, none, 2), TE_ARGUMENT, "was freed");
    te_scaling *twice[] = {scaling, scaling};
    REFUSED(te_scaling_update(rt, twice, 2), TE_ARGUMENT, "scalings[1] a second time");
    EXPECT(te_scaling_update(rt, twice, 1) == TE_OK && te_scaling_update(rt, twice, 1) == TE_OK);
    REFUSED(te_layer_save(layer, "/nowhere/x.te"), TE_UNSUPPORTED, "a layer on the CPU");
    te_scaling_free(scaling);
    te_scaling_free(scaling); /* does nothing */
    te_saved_free(saved);
    REFUSED(te_forward(layer, scaling, in, 2, &out, 1, &saved), TE_ARGUMENT, "a scaling that is NULL, was freed");
    REFUSED(te_scaling_update(rt, &scaling, 1), TE_ARGUMENT, "a scaling of this runtime");
    te_runtime_destroy(rt); /* and its layers */
    REFUSED(te_forward(layer, NULL, in, 2, &out, 1, &saved), TE_ARGUMENT, "a layer that is NULL, was freed");
    te_layer_free(layer);
}

/* Outputs without memory are allocated by the callbacks, all or none; nothing is left behind. */
static void memory(void) {
    te_runtime *rt = new_runtime(1);
    te_layer *layer;
    te_saved *saved;
    array x, w, b, dx, dw, db, y;
    DLTensor *in[] = {new_array(&x, ROWS, WIDTH, 1.0F), new_array(&w, WIDTH, 0, 1.0F), new_array(&b, WIDTH, 0, 1.0F)};
    DLTensor *grads[] = {new_array(&dx, ROWS, WIDTH, 1.0F), new_array(&dw, WIDTH, 0, 1.0F), new_array(&db, WIDTH, 0, 1.0F)};
    DLTensor *out = new_array(&y, ROWS, WIDTH, 1.0F);
    EXPECT(te_layer_open(rt, "layernorm", NULL, &layer) == TE_OK);
    out->data = NULL;
    EXPECT(te_forward(layer, NULL, in, 3, &out, 1, &saved) == TE_OK && out->data != NULL && living == 1);
    for (int i = 0; i < 3; i++) grads[i]->data = NULL;
    last = 2;
    REFUSED(te_backward(layer, NULL, saved, &out, 1, grads, 3), TE_MEMORY, "bytes of the runtime's memory");
    EXPECT(living == 1 && grads[0]->data == NULL);
    last = 3;
    EXPECT(te_backward(layer, NULL, saved, &out, 1, grads, 3) == TE_OK && living == 4);
    for (int i = 0; i < 3; i++) EXPECT(te_output_free(rt, grads[i]->data, NULL) == TE_OK);
    EXPECT(te_output_free(rt, out->data, NULL) == TE_OK && living == 0);
    te_runtime_destroy(rt);
}

static void forked(void) {
    te_runtime *rt = new_runtime(0);
    float left[WIDTH * WIDTH];
    te_layer *layer;
    run_linear(rt, left);
    const pid_t child = fork();
    if (child == 0) {
        EXPECT(te_python_state() == TE_PYTHON_FORKED);
        REFUSED(te_layer_open(rt, "linear", NULL, &layer), TE_UNSUPPORTED, "a forked child");
        te_runtime_destroy(rt);
        _exit(0);
    }
    int status = 1;
    EXPECT(waitpid(child, &status, 0) == child && status == 0);
    run_linear(rt, left); /* the parent goes on */
    te_runtime_destroy(rt);
}

static void closed(void) {
    te_runtime *rt = new_runtime(0);
    te_python_options o = TE_PYTHON_OPTIONS;
    te_layer *layer, *other;
    EXPECT(te_python_state() == TE_PYTHON_NONE);
    REFUSED(te_python(NULL), TE_ARGUMENT, "NULL");
    o.size = 1;
    REFUSED(te_python(&o), TE_ARGUMENT, "size 1");
    o.size = sizeof o;
    o.forbidden = 1;
    EXPECT(te_python(&o) == TE_OK && te_python_state() == TE_PYTHON_FORBIDDEN);
    REFUSED(te_layer_open(rt, "linear", NULL, &layer), TE_UNSUPPORTED, "te_python forbids");
    o.forbidden = 0;
    o.libpython = "/nowhere/libpython3.11.so";
    EXPECT(te_python(&o) == TE_OK && te_python_state() == TE_PYTHON_NONE);
    REFUSED(te_layer_open(rt, "linear", NULL, &layer), TE_LIBRARY, "/nowhere/libpython3.11.so");
    o.libpython = NULL;
    o.environment = "/nowhere";
    EXPECT(te_python(&o) == TE_OK);
    REFUSED(te_layer_open(rt, "linear", NULL, &layer), TE_LIBRARY, "/nowhere, which is no environment");
    o.environment = getenv("TE_CORE_PYTHON");
    EXPECT(te_python(&o) == TE_OK && te_layer_open(rt, "linear", NULL, &layer) == TE_OK);
    EXPECT(te_python_state() == TE_PYTHON_OURS);
    REFUSED(te_python(&o), TE_ARGUMENT, "found already");
    EXPECT(getenv("PYTHONHOME") == NULL);
    te_close();
    EXPECT(te_python_state() == TE_PYTHON_CLOSED);
    REFUSED(te_layer_open(rt, "linear", NULL, &other), TE_UNSUPPORTED, "behind te_close");
    te_layer_free(layer);
    te_runtime_destroy(rt);
}

int main(int count, char **words) {
    static const struct {
        const char *name;
        void (*run)(void);
    } scenarios[] = {{"threads", threads}, {"wrong", wrong}, {"memory", memory}, {"forked", forked}, {"closed", closed}};
    for (size_t i = 0; count == 2 && i < sizeof scenarios / sizeof *scenarios; i++)
        if (strcmp(words[1], scenarios[i].name) == 0) {
            scenarios[i].run();
            return printf("ok\n") < 0;
        }
    return 2;
}
