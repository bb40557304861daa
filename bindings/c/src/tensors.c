/* Tensors that a call is given: each is what the entry was recorded with. */
#define _DEFAULT_SOURCE
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "internal.h"

static const char *const RUN = "te_program_run";

static void shape_in_words(char *text, size_t room, const int64_t *shape, int32_t ndim) {
    size_t at = (size_t)snprintf(text, room, "[");
    for (int32_t i = 0; i < ndim && at + 1 < room; i++)
        at += (size_t)snprintf(text + at, room - at, "%s%lld", i ? ", " : "", (long long)shape[i]);
    if (at + 1 < room) (void)snprintf(text + at, room - at, "]");
}

static te_status wrong(const te_slot *s, const char *what, const DLTensor *t) {
    char wanted[160], came[160];
    const int32_t ndim = t->ndim >= 0 && t->ndim <= MOST_DIMENSIONS && (t->shape != NULL || !t->ndim) ? t->ndim : 0;
    shape_in_words(wanted, sizeof wanted, s->shape, s->ndim);
    shape_in_words(came, sizeof came, t->shape, ndim);
    char allowed[192];
    (void)snprintf(allowed, sizeof allowed, "dtype (%d, %d), shape %.120s, aligned to %zu", s->dtype.code, s->dtype.bits,
                   wanted, s->alignment);
    return te_fail(TE_ARGUMENT, RUN, allowed, "pass what te_program_slots says, or record another entry",
                   "%.60s of another %s: dtype (%d, %d, %d), shape %.120s", s->name, what, t->dtype.code, t->dtype.bits,
                   t->dtype.lanes, came);
}

static bool narrow(uint8_t code) { return code == 10 || code == 12 || code == 14; }

static bool dense_or_as_recorded(const te_slot *s, const DLTensor *t) {
    if (t->strides == NULL) return s->strides == NULL;
    int64_t expected = 1;
    for (int32_t i = s->ndim - 1; i >= 0; i--) {
        const int64_t wanted = s->strides != NULL ? s->strides[i] : expected;
        if (s->shape[i] > 1 && t->strides[i] != wanted) return false;
        expected *= s->shape[i];
    }
    return true;
}

/* Whether the page of an address is there, as te_core/dlpack.py has it. */
static bool mapped(uint64_t at) {
    unsigned char page;
    return mincore((void *)(uintptr_t)(at & ~((uint64_t)sysconf(_SC_PAGESIZE) - 1)), 1, &page) == 0 || errno != ENOMEM;
}

/* Where the bytes of a tensor lie, if memory can have them. */
static bool reach(const DLTensor *t, te_bytes *found) {
    const int64_t item = (t->dtype.bits * t->dtype.lanes + 7) / 8;
    int64_t dense = item, step, low = 0, high = item;
    for (int32_t i = 0; i < t->ndim; i++)
        if (!t->shape[i]) return true;
    bool fits = t->byte_offset <= INT64_MAX && (uint64_t)(uintptr_t)t->data <= INT64_MAX - t->byte_offset;
    for (int32_t i = t->ndim - 1; fits && i >= 0; i--) {
        if (t->shape[i] == 1) continue;
        step = dense;
        fits = (t->strides == NULL || !__builtin_mul_overflow(t->strides[i], item, &step)) &&
               !__builtin_mul_overflow(t->shape[i] - 1, step, &step) &&
               !__builtin_add_overflow(step < 0 ? low : high, step, step < 0 ? &low : &high) &&
               !__builtin_mul_overflow(dense, t->shape[i], &dense);
    }
    const int64_t at = fits ? (int64_t)((uint64_t)(uintptr_t)t->data + t->byte_offset) : 0;
    if (!fits || at < -low || at > INT64_MAX - high) return false;
    found->from = (uint64_t)(at + low);
    found->to = (uint64_t)(at + high);
    return t->device.device_type != kDLCPU || (mapped(found->from) && mapped(found->to - 1));
}

te_status te_bytes_add(const char *operation, const char *name, const DLTensor *t, bool written, te_bytes *all, size_t *count) {
    te_bytes made = {0, 0, name};
    if (t->data == NULL) return TE_OK;
    if (!reach(t, &made))
        return te_fail(TE_ARGUMENT, operation, "addresses that this process has", "correct sizes, strides or byte_offset",
                       "%.100s at %p with byte_offset %llu", name, t->data, (unsigned long long)t->byte_offset);
    for (const te_bytes *other = all; written && other < all + *count; other++)
        if (made.from < other->to && other->from < made.to)
            return te_fail(TE_ARGUMENT, operation, "memory of its own for what a call writes", "pass other memory",
                           "a place for %.100s in the memory of %.100s", name, other->name);
    all[(*count)++] = made;
    return TE_OK;
}

/* Check a tensor; its address. */
static te_status check_one(const te_program *p, const te_slot *s, const DLTensor *t, bool written, uint64_t *address,
                           te_bytes *all, size_t *count) {
    const te_runtime_options *o = &p->runtime->options;
    if (t == NULL)
        return te_fail(TE_ARGUMENT, RUN, "a tensor for each slot", "pass it", "no tensor for %.100s", s->name);
    if (t->ndim != s->ndim || (s->ndim && (t->shape == NULL || memcmp(t->shape, s->shape, 8 * (size_t)s->ndim) != 0)))
        return wrong(s, "shape", t);
    const bool same = t->dtype.code == s->dtype.code || (narrow(s->dtype.code) && t->dtype.code == 1);
    if (!same || t->dtype.bits != s->dtype.bits || t->dtype.lanes != 1) return wrong(s, "dtype", t);
    if (s->bytes && !dense_or_as_recorded(s, t)) return wrong(s, "strides", t);
    *address = 0;
    if (t->data == NULL) return TE_OK;
    if ((int)t->device.device_type != o->device_type || t->device.device_id != o->device_id)
        return te_fail(TE_ARGUMENT, RUN, "tensors of the runtime's device", "copy it there, or use that device's runtime",
                       "%.60s on device (%d, %d)", s->name, (int)t->device.device_type, (int)t->device.device_id);
    const te_status status = te_bytes_add(RUN, s->name, t, written, all, count);
    if (status != TE_OK) return status;
    *address = (uint64_t)(uintptr_t)t->data + t->byte_offset;
    if (s->bytes && *address & (s->alignment - 1)) return wrong(s, "alignment", t);
    return TE_OK;
}

te_status te_tensors_check(const te_program *p, const te_run *run, uint64_t *at, te_bytes *all) {
    size_t count = 0;
    const te_entry *e = &p->entries[run->entry];
    const uint32_t inputs = p->file.entries[run->entry].inputs;
    if (run->inputs != (int32_t)inputs || run->outputs != (int32_t)e->outputs || (inputs && run->input == NULL) ||
        (e->outputs && run->output == NULL))
        return te_fail(TE_ARGUMENT, RUN, "as many tensors as te_program_slots says", "pass all of them",
                       "%d inputs and %d outputs for %u and %u", (int)run->inputs, (int)run->outputs, inputs, e->outputs);
    for (uint32_t i = 0; i < inputs; i++) {
        const te_status status = check_one(p, e->given[i], run->input[i], false, &at[i], all, &count);
        if (status != TE_OK) return status;
        if (!at[i] && e->given[i]->bytes)
            return te_fail(TE_ARGUMENT, RUN, "memory for each input", "set data", "no data in %.100s", e->given[i]->name);
    }
    for (uint32_t i = 0; i < e->outputs; i++) {
        const te_status status =
            check_one(p, e->given[inputs + i], run->output[i], true, &at[e->numbers[i]], all, &count);
        if (status != TE_OK) return status;
    }
    int64_t bytes = (int64_t)p->file.entries[run->entry].block;
    const DLTensor block = {run->block, {kDLCUDA, 0}, 1, {1, 8, 1}, &bytes, NULL, 0};
    return te_bytes_add(RUN, "the block", &block, true, all, &count);
}
