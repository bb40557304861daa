/* play FILE [ENTRY [INPUTS [OUTPUTS]]]: run an entry of a program on the first GPU, and say what it takes and gives.
 *
 * INPUTS and OUTPUTS are folders: an input is read from INPUTS/<its name> where there is such a file and is zeros
 * otherwise; outputs, and inputs that the entry may write, are written to OUTPUTS/<their names>. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "te_core.h"

enum { CALLS = 100 };

/* The little that a host without CUDA's headers needs of the driver. */
static int (*init)(unsigned), (*retain)(void **, int), (*set_current)(void *), (*take)(uint64_t *, size_t);
static int (*to_device)(uint64_t, const void *, size_t), (*to_host)(void *, uint64_t, size_t);

static void check(te_status status) {
    if (status == TE_OK) return;
    fprintf(stderr, "%s\n", te_error()->message);
    exit(1);
}

static void must(int bad, const char *what) {
    if (!bad) return;
    fprintf(stderr, "play: %s\n", what);
    exit(1);
}

static void open_driver(void) {
    const char *path = getenv("TE_LIBCUDA");
    void *driver = dlopen(path == NULL ? "libcuda.so.1" : path, RTLD_NOW), *context;
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

/* A tensor for a slot, with memory. */
static void *fill(DLTensor *t, const te_slot *s, const char *folder) {
    char path[4096];
    char *host = calloc(1, s->bytes + 1);
    uint64_t address = 0;
    must(host == NULL || take(&address, s->bytes ? s->bytes : 1), "no memory");
    if (folder != NULL) {
        (void)snprintf(path, sizeof path, "%s/%s", folder, s->name);
        FILE *file = fopen(path, "rb");
        if (file != NULL) {
            must(fread(host, 1, s->bytes, file) != s->bytes, "an input's file is too short");
            (void)fclose(file);
        }
    }
    must(s->bytes && to_device(address, host, s->bytes), "no copy to the device");
    t->data = (void *)(uintptr_t)address;
    t->device.device_type = kDLCUDA;
    t->device.device_id = 0;
    t->ndim = s->ndim;
    t->dtype = s->dtype;
    t->shape = (int64_t *)(uintptr_t)s->shape;
    t->strides = (int64_t *)(uintptr_t)s->strides;
    t->byte_offset = 0;
    return host;
}

static void report(const DLTensor *t, const te_slot *s, unsigned char *host, const char *folder) {
    char path[4096];
    must(s->bytes && to_host(host, (uint64_t)(uintptr_t)t->data, s->bytes), "no copy from the device");
    if (folder != NULL) {
        (void)snprintf(path, sizeof path, "%s/%s", folder, s->name);
        FILE *file = fopen(path, "wb");
        must(file == NULL || fwrite(host, 1, s->bytes, file) != s->bytes || fclose(file), "an output cannot be written");
    }
    printf("%s: %zu bytes, first", s->name, s->bytes);
    for (size_t i = 0; i < 8 && i < s->bytes; i++) printf(" %02x", host[i]);
    printf("\n");
}

int main(int count, char **words) {
    must(count < 2, "play FILE [ENTRY [INPUTS [OUTPUTS]]]");
    const char *from = count > 3 ? words[3] : NULL, *to = count > 4 ? words[4] : NULL;
    te_runtime_options options = TE_RUNTIME_OPTIONS;
    te_runtime *runtime;
    te_program *program;
    te_run run = TE_RUN;
    const te_slot *const *slots;
    const char *const *names;
    int32_t entries;

    open_driver();
    check(te_runtime_create(&options, &runtime));
    check(te_program_load(runtime, words[1], &program));
    check(te_program_entries(program, &names, &entries));
    must(!entries, "a program without entries");
    if (count > 2) check(te_program_find(program, words[2], &run.entry));
    check(te_program_slots(program, run.entry, &slots, &run.inputs, &run.outputs));

    const int32_t all = run.inputs + run.outputs;
    DLTensor *tensors = calloc((size_t)all + 1, sizeof *tensors);
    DLTensor **pointers = calloc((size_t)all + 1, sizeof *pointers);
    void **host = calloc((size_t)all + 1, sizeof *host);
    must(!tensors || !pointers || !host, "no memory");
    for (int32_t i = 0; i < all; i++) {
        host[i] = fill(&tensors[i], slots[i], i < run.inputs ? from : NULL);
        pointers[i] = &tensors[i];
    }
    run.input = pointers;
    run.output = pointers + run.inputs;
    check(te_program_run(program, &run));
    check(te_synchronize(runtime, NULL));
    for (int32_t i = 0; i < all; i++)
        if (slots[i]->written) report(&tensors[i], slots[i], host[i], to);

    struct timespec begin, end;
    (void)timespec_get(&begin, TIME_UTC);
    for (int i = 0; i < CALLS; i++) check(te_program_run(program, &run));
    (void)timespec_get(&end, TIME_UTC);
    check(te_synchronize(runtime, NULL));
    const double ns = (double)(end.tv_sec - begin.tv_sec) * 1e9 + (double)(end.tv_nsec - begin.tv_nsec);
    printf("%s: %.2f us of the host's time a call\n", names[run.entry], ns / 1e3 / CALLS);
    for (int32_t i = 0; i < all; i++) free(host[i]);
    free(tensors);
    free(pointers);
    free(host);
    te_program_free(program);
    te_runtime_destroy(runtime);
    return 0;
}
