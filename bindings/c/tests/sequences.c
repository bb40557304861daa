/* sequences STUB FILE COUNT SEED: so many random sequences of calls, of which many are wrong, on callbacks that fail now and
 * then. Each is refused or done; nothing leaks, and right calls work behind it. Sanitizers watch. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "broken.h"
#include "te_core.h"

enum { HANDLES = 3, TENSORS = 40, SLACK = 64 };

static uint64_t seed;
static int alive, chance;

static uint64_t any(uint64_t below) { return next_random(&seed) % below; }

static void *take(size_t bytes, size_t alignment, void *stream, void *user) {
    (void)stream, (void)user;
    if (chance && any(40) == 0) return NULL;
    alive++;
    char *made = aligned_alloc(4096, (bytes < 4096 ? 8192 : 8192 + (alignment & 4096)));
    return made + (chance && any(60) == 0 ? 1 : 0);
}

static void drop(void *address, void *stream, void *user) {
    (void)stream, (void)user;
    alive--;
    free((void *)((uintptr_t)address & ~(uintptr_t)4095));
}

static const char *const names[] = {"forward", "backward", "update", "there_and_back", "marks",
                                    "attention", "attention backward", "sideward", ""};

/* A run of an entry, in which something may be wrong. */
static void run_one(te_runtime *rt, te_program *p) {
    const te_slot *const *slots;
    int32_t entry = 0, inputs = 0, outputs = 0;
    DLTensor tensors[TENSORS];
    DLTensor *pointers[TENSORS + SLACK] = {NULL};
    te_run run = TE_RUN;
    if (te_program_find(p, names[any(9)], &entry) != TE_OK) entry = (int32_t)any(11) - 2;
    run.entry = entry;
    if (te_program_slots(p, entry, &slots, &inputs, &outputs) == TE_OK)
        for (int32_t i = 0; i < inputs + outputs; i++) {
            const te_slot *s = slots[i];
            tensors[i] = (DLTensor){(void *)(uintptr_t)(i < inputs ? 0x7f0000000000 + 8192 * i : 0), {kDLCUDA, 0}, s->ndim,
                                    s->dtype, (int64_t *)(uintptr_t)s->shape, NULL, 0};
            pointers[i] = &tensors[i];
        }
    run.inputs = inputs;
    run.outputs = outputs;
    run.input = pointers;
    run.output = pointers + inputs;
    run.stream = (void *)(uintptr_t)any(4);
    int64_t strides[32] = {0};
    DLTensor *t = inputs + outputs ? &tensors[any((uint64_t)(inputs + outputs))] : NULL;
    switch (t == NULL || any(3) ? 99 : any(16)) {
        case 0: t->data = NULL; break;
        case 1: t->ndim = (int32_t)any(70) - 3; break;
        case 2: t->shape = NULL; break;
        case 3: t->strides = strides; break;
        case 4: t->dtype.code = (uint8_t)any(20); break;
        case 5: t->dtype.bits = (uint8_t)any(70); break;
        case 6: t->device.device_id = 1; break;
        case 7: t->byte_offset = any(300); break;
        case 8: pointers[any((uint64_t)(inputs + outputs))] = NULL; break;
        case 9: run.inputs += (int32_t)any(3) - 1; break;
        case 10: run.outputs += (int32_t)any(3) - 1; break;
        case 11: run.input = NULL; break;
        case 12: run.output = NULL; break;
        case 13: run.size = any(100); break;
        case 14: run.block = (void *)(uintptr_t)(0x7e0000000000 + any(2) * 128); break;
        case 15:
            run.block = (void *)(uintptr_t)0x7e0000000000;
            (void)te_program_block_bytes(p, entry, &run.block_bytes);
            break;
        default: break;
    }
    const te_status status = te_program_run(p, &run);
    const te_error_info *said = te_error();
    if (status != TE_OK && (said->status != status || !said->to_do[0])) exit(6);
    for (int32_t i = inputs; i < inputs + outputs; i++) /* what was allocated is ours, if it went well */
        if (status == TE_OK && pointers[i] != NULL && pointers[i]->data != NULL) (void)te_output_free(rt, pointers[i]->data, run.stream);
}

static void sequence(const char *stub, const unsigned char *whole, size_t bytes) {
    te_runtime *rt = NULL;
    te_program *programs[HANDLES] = {NULL};
    te_runtime_options o = TE_RUNTIME_OPTIONS;
    o.libcuda = o.libcublaslt = o.libcudnn = stub;
    o.alloc = take;
    o.free = drop;
    if (any(8) == 0) o.size = any(200);
    if (any(16) == 0) o.device_id = (int32_t)any(5) - 2;
    chance = (int)any(2);
    const te_status made = te_runtime_create(&o, &rt);
    if ((made == TE_OK) != (rt != NULL)) exit(7);
    for (int i = 0; i < 24; i++) {
        const uint64_t at = any(HANDLES);
        te_program **p = &programs[at];
        const char *const *entries;
        int32_t count;
        switch (any(9)) {
            case 0:
                te_program_free(*p);
                *p = NULL;
                break;
            case 1:
            case 2:
                if (*p == NULL) (void)te_program_load_memory(rt, whole, any(5) ? bytes : any(bytes), p);
                break;
            case 3: (void)te_program_prepare(*p, (int32_t)any(8) - 2, (void *)(uintptr_t)any(3)); break;
            case 4: (void)te_program_entries(*p, any(9) ? &entries : NULL, &count); break;
            case 5: (void)te_program_fact(*p, any(2) ? "driver" : NULL); break;
            case 6: (void)te_synchronize(rt, NULL); break;
            default:
                if (*p != NULL) run_one(rt, *p);
        }
    }
    te_runtime_destroy(rt);
    if (alive) exit(8);
}

int main(int count, char **words) {
    if (count != 5) return 2;
    size_t bytes = 0;
    unsigned char *whole = content_of(words[2], &bytes);
    if (whole == NULL) return 2;
    const long many = strtol(words[3], NULL, 10);
    for (long i = 0; i < many; i++) {
        seed = strtoull(words[4], NULL, 10) * 1000003 + (uint64_t)i;
        sequence(words[1], whole, bytes);
    }
    free(whole);
    printf("%ld sequences of calls\n", many);
    return 0;
}
