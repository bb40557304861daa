/* A program: a checked file, with its kernels on the device. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

enum { STATIC_SHARED = 1, MOST_DYNAMIC = 8, SHARED = 48 * 1024, RELAXED = 2 };

static const char *const LOAD = "te_program_load";

static te_status no_memory(void) { return te_fail(TE_MEMORY, LOAD, "enough memory", "free some", "too little"); }

static char *copied(const te_file *file, f_text text) {
    char *made = malloc((size_t)text.length + 1);
    if (made == NULL) return NULL;
    memcpy(made, file->text + text.start, text.length);
    made[text.length] = '\0';
    return made;
}

const char *te_program_fact(const te_program *p, const char *name) {
    if (p == NULL || name == NULL) return NULL;
    for (uint64_t i = 0; i < p->file.count[T_FACTS]; i++)
        if (strcmp(p->facts[2 * i], name) == 0) return p->facts[2 * i + 1];
    return NULL;
}

/* ---------------------------------------------------------------------------------------------------- its tables */

static te_status name_all(te_program *p) {
    const te_file *file = &p->file;
    for (uint64_t i = 0; i < file->count[T_FACTS]; i++) {
        p->facts[2 * i] = copied(file, file->facts[i].key);
        p->facts[2 * i + 1] = copied(file, file->facts[i].value);
        if (p->facts[2 * i] == NULL || p->facts[2 * i + 1] == NULL) return no_memory();
    }
    for (uint64_t i = 0; i < file->count[T_WAYS]; i++) {
        const f_text name = file->ways[i].name;
        if (te_name_of(p->runtime, file->text + name.start, name.length, &p->way_numbers[i]) != TE_OK) return TE_MEMORY;
    }
    for (uint64_t i = 0; i < file->count[T_SLOTS]; i++) {
        const f_text name = file->slots[i].name;
        if ((p->slot_names[i] = copied(file, name)) == NULL) return no_memory();
        if (file->slots[i].role == R_SCRATCH &&
            te_name_of(p->runtime, file->text + name.start, name.length, &p->slot_name_numbers[i]) != TE_OK)
            return TE_MEMORY;
    }
    return TE_OK;
}

static te_status set_entry(te_program *p, uint32_t number) {
    const te_file *file = &p->file;
    const f_entry *e = &file->entries[number];
    te_entry *made = &p->entries[number];
    const f_slot *slots = file->slots + e->slots;
    const size_t room = (size_t)e->slot_count + 1;
    p->names[number] = made->name = copied(file, e->name);
    made->slots = calloc(room, sizeof *made->slots);
    made->given = calloc(room, sizeof *made->given);
    made->numbers = calloc(room, sizeof *made->numbers);
    made->scratch = calloc(room, sizeof *made->scratch);
    if (made->name == NULL || made->slots == NULL || made->given == NULL || made->numbers == NULL || made->scratch == NULL)
        return no_memory();
    for (uint32_t i = 0; i < e->slot_count; i++) {
        const f_slot *s = &slots[i];
        const bool given = s->role <= R_SAVED;
        if (s->role == R_SCRATCH && !s->way) made->scratch[made->scratch_count++] = i;
        if (!given) continue;
        if (i >= e->inputs) made->numbers[made->outputs++] = i;
        made->slots[i] = (te_slot){sizeof(te_slot), p->slot_names[e->slots + i], (te_role)s->role,
                                   {(uint8_t)s->code, (uint8_t)s->bits, 1}, (int32_t)s->ndim, file->numbers + s->dims,
                                   s->flags & S_STRIDED ? file->numbers + s->dims + s->ndim : NULL, (size_t)s->bytes,
                                   s->alignment, (s->flags & S_WRITTEN) != 0};
        made->given[i < e->inputs ? i : e->inputs + made->outputs - 1] = &made->slots[i];
    }
    for (uint32_t i = 0; i < e->step_count; i++) made->words += file->steps[e->steps + i].word_count;
    return TE_OK;
}

/* ------------------------------------------------------------------------------------------------------- kernels */

/* The most dynamic bytes that a launch of each function asks for. */
static void shared_bytes(const te_file *file, uint64_t *most) {
    for (uint64_t i = 0; i < file->count[T_STEPS]; i++) {
        const f_step *s = &file->steps[i];
        if (s->kind > K_TABLE) continue;
        const uint64_t bytes = file->words[s->words + 6];
        if (bytes > most[s->target]) most[s->target] = bytes;
    }
}

static te_status load_code(te_program *p, const uint64_t *most) {
    const te_file *file = &p->file;
    const te_doors *d = &p->runtime->doors;
    int status = 0;
    for (uint64_t i = 0; i < file->count[T_MODULES]; i++)
        if ((status = d->cuModuleLoadData(&p->modules[i], file->data + file->modules[i].start)))
            return te_driver_failed(d, "cuModuleLoadData", status);
    for (uint64_t i = 0; i < file->count[T_FUNCTIONS]; i++) {
        const f_function *f = &file->functions[i];
        te_function *made = &p->functions[i];
        char *name = copied(file, f->name);
        int fixed = 0;
        if (name == NULL) return no_memory();
        status = d->cuModuleGetFunction(&made->function, p->modules[f->module], name);
        free(name);
        if (status) return te_driver_failed(d, "cuModuleGetFunction", status);
        made->arguments = f->letters.length;
        made->table = f->letters.length == 1 && file->text[f->letters.start] == 'b';
        if ((status = d->cuFuncGetAttribute(&fixed, STATIC_SHARED, made->function)))
            return te_driver_failed(d, "cuFuncGetAttribute", status);
        if (most[i] + (uint64_t)fixed > SHARED &&
            (status = d->cuFuncSetAttribute(made->function, MOST_DYNAMIC, (int)most[i])))
            return te_driver_failed(d, "cuFuncSetAttribute", status);
    }
    return TE_OK;
}

static te_status put_on_device(te_program *p) {
    te_runtime *rt = p->runtime;
    int mode = RELAXED; /* allowed while the thread captures a graph, too: what is loaded belongs to none */
    bool entered;
    uint64_t *most = calloc(p->file.count[T_FUNCTIONS] + 1, sizeof *most);
    if (most == NULL) return no_memory();
    shared_bytes(&p->file, most);
    te_status status = te_enter(rt, &entered);
    if (status == TE_OK) {
        (void)rt->doors.cuThreadExchangeStreamCaptureMode(&mode);
        status = load_code(p, most);
        if (status == TE_OK && p->file.count[T_PRODUCTS]) status = te_program_mend(p);
        if (status == TE_OK && p->file.count[T_PLANS]) status = te_plans_make(p);
        (void)rt->doors.cuThreadExchangeStreamCaptureMode(&mode);
        te_leave(rt, entered);
    }
    free(most);
    return status;
}

static te_status fits_device(const te_program *p) {
    const te_runtime *rt = p->runtime;
    const char *asked = te_program_fact(p, "architecture");
    char have[32];
    (void)snprintf(have, sizeof have, "%d.%d", rt->capability[0], rt->capability[1]);
    if (p->file.count[T_MODULES] + p->file.count[T_PLANS] == 0 || (asked != NULL && strcmp(asked, have) == 0)) return TE_OK;
    return te_fail(TE_STALE, LOAD, "a program for this device's architecture", "record it again on such a device",
                   "kernels for %.20s on a device of %s", asked == NULL ? "no architecture" : asked, have);
}

static te_status made_of(te_program *p, unsigned char *content, size_t bytes) {
    te_status status = te_file_check(&p->file, content, bytes);
    if (status != TE_OK) return status;
    const uint64_t *count = p->file.count;
    p->facts = calloc(2 * count[T_FACTS] + 1, sizeof *p->facts);
    p->names = calloc(count[T_ENTRIES] + 1, sizeof *p->names);
    p->slot_names = calloc(count[T_SLOTS] + 1, sizeof *p->slot_names);
    p->entries = calloc(count[T_ENTRIES] + 1, sizeof *p->entries);
    p->modules = calloc(count[T_MODULES] + 1, sizeof *p->modules);
    p->plans = calloc(count[T_PLANS] + 1, sizeof *p->plans);
    p->functions = calloc(count[T_FUNCTIONS] + 1, sizeof *p->functions);
    p->algorithms = calloc(count[T_PRODUCTS] + 1, ALGORITHM);
    p->workspaces = calloc(count[T_PRODUCTS] + 1, sizeof *p->workspaces);
    p->slot_name_numbers = calloc(count[T_SLOTS] + 1, sizeof *p->slot_name_numbers);
    p->way_numbers = calloc(count[T_WAYS] + 1, sizeof *p->way_numbers);
    if (!p->facts || !p->names || !p->slot_names || !p->entries || !p->modules || !p->plans || !p->functions || !p->algorithms ||
        !p->workspaces || !p->slot_name_numbers || !p->way_numbers)
        return no_memory();
    status = name_all(p);
    for (uint32_t i = 0; status == TE_OK && i < count[T_ENTRIES]; i++) status = set_entry(p, i);
    if (status == TE_OK) status = fits_device(p);
    te_doors *doors = &p->runtime->doors;
    (void)pthread_mutex_lock(&p->runtime->lock);
    if (status == TE_OK && count[T_PRODUCTS] && doors->lt_library == NULL) status = te_doors_open_lt(doors, NULL);
    if (status == TE_OK && count[T_PLANS] && doors->cudnn_library == NULL) status = te_doors_open_cudnn(doors, NULL);
    (void)pthread_mutex_unlock(&p->runtime->lock);
    return status == TE_OK ? put_on_device(p) : status;
}

static te_status load(te_runtime *rt, unsigned char *content, size_t bytes, te_program **program) {
    const bool host = rt->options.device_type == kDLCPU;
    te_program *p = host ? NULL : calloc(1, sizeof *p);
    if (p == NULL) {
        free(content);
        if (!host) return no_memory();
        return te_fail(TE_UNSUPPORTED, LOAD, "a runtime on a GPU", "open layers on the CPU", "a runtime on the CPU");
    }
    p->runtime = rt;
    p->file.content = content;
    (void)pthread_mutex_lock(&rt->lock);
    p->number = rt->program_count++;
    p->next = rt->programs;
    rt->programs = p;
    (void)pthread_mutex_unlock(&rt->lock);
    const te_status status = made_of(p, content, bytes);
    if (status == TE_OK)
        *program = p;
    else
        te_program_free(p);
    return status;
}

te_status te_program_load_memory(te_runtime *rt, const void *content, size_t bytes, te_program **program) {
    if (program != NULL) *program = NULL;
    if (rt == NULL || content == NULL || program == NULL)
        return te_fail(TE_ARGUMENT, LOAD, "a runtime, the content, a place", "pass all three", "NULL");
    unsigned char *copy = bytes < PTRDIFF_MAX ? malloc(bytes + 1) : NULL;
    if (copy == NULL) return no_memory();
    memcpy(copy, content, bytes);
    return load(rt, copy, bytes, program);
}

te_status te_program_load(te_runtime *rt, const char *path, te_program **program) {
    unsigned char *content = NULL;
    size_t bytes = 0;
    if (program != NULL) *program = NULL;
    if (rt == NULL || path == NULL || program == NULL)
        return te_fail(TE_ARGUMENT, LOAD, "a runtime, a path, a place", "pass all three", "NULL");
    const te_status status = te_file_read(path, &content, &bytes);
    return status == TE_OK ? load(rt, content, bytes, program) : status;
}

void te_program_free(te_program *p) {
    if (p == NULL) return;
    te_runtime *rt = p->runtime;
    bool entered = false;
    (void)pthread_mutex_lock(&rt->lock);
    for (te_program **at = &rt->programs; *at != NULL; at = &(*at)->next)
        if (*at == p) {
            *at = p->next;
            break;
        }
    for (te_local *local = rt->locals; local != NULL; local = local->next)
        if (p->number < local->bound_count && local->bounds[p->number] != NULL) {
            te_bound_free(p, local->bounds[p->number]);
            local->bounds[p->number] = NULL;
        }
    (void)pthread_mutex_unlock(&rt->lock);
    const bool there = te_enter(rt, &entered) == TE_OK;
    for (uint64_t i = 0; there && p->modules != NULL && i < p->file.count[T_MODULES]; i++)
        if (p->modules[i] != NULL) (void)rt->doors.cuModuleUnload(p->modules[i]);
    if (there) te_plans_free(p);
    if (there) te_leave(rt, entered);
    for (uint64_t i = 0; p->facts != NULL && i < 2 * p->file.count[T_FACTS]; i++) free(p->facts[i]);
    for (uint64_t i = 0; p->slot_names != NULL && i < p->file.count[T_SLOTS]; i++) free(p->slot_names[i]);
    for (uint64_t i = 0; p->entries != NULL && i < p->file.count[T_ENTRIES]; i++) {
        te_entry *e = &p->entries[i];
        free(e->name);
        free(e->slots);
        free((void *)e->given);
        free(e->numbers);
        free(e->scratch);
    }
    free(p->facts);
    free((void *)p->names);
    free(p->slot_names);
    free(p->entries);
    free(p->modules);
    free(p->plans);
    free(p->functions);
    free(p->algorithms);
    free(p->workspaces);
    free(p->slot_name_numbers);
    free(p->way_numbers);
    free(p->file.content);
    free(p);
}

/* ------------------------------------------------------------------------------------------------------ questions */

te_status te_program_entries(const te_program *p, const char *const **names, int32_t *count) {
    if (p == NULL || names == NULL || count == NULL)
        return te_fail(TE_ARGUMENT, "te_program_entries", "a program and places", "pass all three", "NULL");
    *names = p->names;
    *count = (int32_t)p->file.count[T_ENTRIES];
    return TE_OK;
}

te_status te_program_find(const te_program *p, const char *name, int32_t *entry) {
    if (p == NULL || name == NULL || entry == NULL)
        return te_fail(TE_ARGUMENT, "te_program_find", "a program, a name, a place", "pass all three", "NULL");
    for (uint64_t i = 0; i < p->file.count[T_ENTRIES]; i++)
        if (strcmp(p->names[i], name) == 0) {
            *entry = (int32_t)i;
            return TE_OK;
        }
    return te_fail(TE_ARGUMENT, "te_program_find", "a name of te_program_entries", "correct the name", "\"%.100s\"", name);
}

static te_status check_entry(const te_program *p, int32_t entry, const char *operation) {
    if (p == NULL) return te_fail(TE_ARGUMENT, operation, "a program", "pass one", "NULL");
    if (entry < 0 || (uint64_t)entry >= p->file.count[T_ENTRIES])
        return te_fail(TE_ARGUMENT, operation, "the number of an entry", "find it by te_program_find", "entry %d of %d",
                       (int)entry, (int)p->file.count[T_ENTRIES]);
    return TE_OK;
}

te_status te_program_slots(const te_program *p, int32_t entry, const te_slot *const **slots, int32_t *inputs,
                           int32_t *outputs) {
    const te_status status = check_entry(p, entry, "te_program_slots");
    if (status != TE_OK) return status;
    if (slots == NULL || inputs == NULL || outputs == NULL)
        return te_fail(TE_ARGUMENT, "te_program_slots", "three places", "pass them", "NULL");
    *slots = p->entries[entry].given;
    *inputs = (int32_t)p->file.entries[entry].inputs;
    *outputs = (int32_t)p->entries[entry].outputs;
    return TE_OK;
}

te_status te_program_block_bytes(const te_program *p, int32_t entry, size_t *bytes) {
    const te_status status = check_entry(p, entry, "te_program_block_bytes");
    if (status != TE_OK) return status;
    if (bytes == NULL) return te_fail(TE_ARGUMENT, "te_program_block_bytes", "a place", "pass one", "NULL");
    *bytes = (size_t)p->file.entries[entry].block;
    return TE_OK;
}
