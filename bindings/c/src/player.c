/* The player: an entry's steps, one after the other, in one thread. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

static const char *const RUN = "te_program_run";

typedef struct {
    te_op *ops;
    uint64_t *words, *at;
    void **pointers;
    unsigned char *ours; /* slots whose memory was taken, and not given back */
    uint32_t *noticed;   /* of a slot: the streams that it is not given back before, as bits */
    te_bytes *bytes;     /* of the caller's tensors */
} te_bound_entry;

/* A program in a thread. */
struct te_bound {
    te_bound_entry *entries;
    te_product *products;
};

/* A run that is under way. */
typedef struct {
    te_program *program;
    const te_run *run;
    te_local *local;
    te_bound *bound;
    te_bound_entry *own;
    te_calls calls;
    const f_slot *slots;
    te_lane *lanes[MOST_WAYS];
    void *streams[MOST_WAYS];
    uint32_t busy; /* streams whose work the call's stream does not wait for yet */
} te_play;

static te_status no_memory(void) { return te_fail(TE_MEMORY, RUN, "enough memory", "free some", "too little"); }

/* ------------------------------------------------------------------------------------------------------- binding */

static void free_entry(te_bound_entry *own) {
    free(own->ops);
    free(own->words);
    free(own->at);
    free(own->pointers);
    free(own->ours);
    free(own->noticed);
    free(own->bytes);
    memset(own, 0, sizeof *own);
}

void te_bound_free(te_program *p, te_bound *bound) {
    for (uint64_t i = 0; bound->entries != NULL && i < p->file.count[T_ENTRIES]; i++) free_entry(&bound->entries[i]);
    for (uint64_t i = 0; bound->products != NULL && i < p->file.count[T_PRODUCTS]; i++)
        te_product_free(&p->runtime->doors, &bound->products[i]);
    free(bound->entries);
    free(bound->products);
    free(bound);
}

static te_status bound_of(te_program *p, te_local *local, te_bound **bound) {
    if (p->number < local->bound_count && local->bounds[p->number] != NULL) {
        *bound = local->bounds[p->number];
        return TE_OK;
    }
    te_bound *made = calloc(1, sizeof *made);
    if (made == NULL) return no_memory();
    made->entries = calloc(p->file.count[T_ENTRIES] + 1, sizeof *made->entries);
    made->products = calloc(p->file.count[T_PRODUCTS] + 1, sizeof *made->products);
    te_bound **more = NULL;
    (void)pthread_mutex_lock(&p->runtime->lock); /* who frees a program looks at all threads */
    if (made->entries != NULL && made->products != NULL) {
        const uint32_t count = p->number < local->bound_count ? local->bound_count : p->number + 1;
        more = realloc(local->bounds, count * sizeof *more);
        if (more != NULL) {
            memset(more + local->bound_count, 0, (count - local->bound_count) * sizeof *more);
            local->bounds = more;
            local->bound_count = count;
            more[p->number] = made;
        }
    }
    (void)pthread_mutex_unlock(&p->runtime->lock);
    if (more == NULL) {
        te_bound_free(p, made);
        return no_memory();
    }
    *bound = made;
    return TE_OK;
}

static void bind_steps(const te_program *p, const f_entry *e, const te_bound *bound, te_bound_entry *own) {
    uint64_t *words = own->words;
    void **pointers = own->pointers;
    for (uint32_t i = 0; i < e->step_count; i++) {
        const f_step *s = &p->file.steps[e->steps + i];
        te_op *op = &own->ops[i];
        *op = (te_op){.kind = s->kind, .target = s->target, .way = s->way, .other = s->other,
                      .patch_count = s->patch_count, .patches = p->file.patches + s->patches};
        memcpy(words, p->file.words + s->words, 8 * (size_t)s->word_count);
        op->words = words;
        op->pointers = pointers;
        if (s->kind <= K_TABLE) {
            for (int k = 0; k < SIZES; k++) op->sizes[k] = (unsigned)words[k];
            op->what = p->functions[s->target].function;
            for (uint32_t k = 0; k + SIZES < s->word_count; k++) pointers[k] = words + SIZES + k;
        }
        if (s->kind == K_PRODUCT) op->what = &bound->products[s->target];
        for (uint32_t k = 1; s->kind == K_ATTEND && k < s->word_count; k++) pointers[k] = words + k; /* a number's place */
        words += s->word_count;
        pointers += s->word_count;
    }
}

static te_status bind_entry(te_program *p, te_local *local, te_bound *bound, uint32_t entry) {
    te_bound_entry *own = &bound->entries[entry];
    const f_entry *e = &p->file.entries[entry];
    const size_t words = (size_t)p->entries[entry].words + 1, slots = (size_t)e->slot_count + 1;
    te_status status = TE_OK;
    for (uint32_t i = 0; i < e->step_count && status == TE_OK; i++) {
        const f_step *s = &p->file.steps[e->steps + i];
        if (s->kind == K_ATTEND) status = te_cudnn_of(p->runtime, local);
        if (s->kind != K_PRODUCT) continue;
        status = te_handle_of(p->runtime, local);
        if (status == TE_OK && bound->products[s->target].desc == NULL) {
            status = te_product_make(p, local->handle, s->target, &bound->products[s->target]);
            if (status != TE_OK) te_product_free(&p->runtime->doors, &bound->products[s->target]);
        }
    }
    if (status != TE_OK) return status;
    own->ops = calloc((size_t)e->step_count + 1, sizeof *own->ops);
    own->words = calloc(words, sizeof *own->words);
    own->pointers = calloc(words, sizeof *own->pointers);
    own->at = calloc(slots, sizeof *own->at);
    own->ours = calloc(slots, sizeof *own->ours);
    own->noticed = calloc(slots, sizeof *own->noticed);
    own->bytes = calloc(slots, sizeof *own->bytes);
    if (!own->ops || !own->words || !own->pointers || !own->at || !own->ours || !own->noticed || !own->bytes) {
        free_entry(own);
        return no_memory();
    }
    bind_steps(p, e, bound, own);
    return TE_OK;
}

/* ------------------------------------------------------------------------------------------------------- playing */

static te_status step_failed(const te_play *play, const te_op *op, int status) {
    const te_program *p = play->program;
    if (op->kind == K_FILL) return te_driver_failed(&p->runtime->doors, "cuMemsetD8Async", status);
    if (op->kind != K_PRODUCT) return te_driver_failed(&p->runtime->doors, "cuLaunchKernel", status);
    const f_product *f = &p->file.products[op->target];
    const te_product *product = op->what;
    return te_fail(TE_LIBRARY,
                   product->pointer_count && !product->set ? "cublasLtMatmulDescSetAttribute" : "cublasLtMatmul",
                   "status 0", "check that every tensor is alive and on the device", "status %d from %.*s", status,
                   (int)(f->text.length < 150 ? f->text.length : 150), p->file.text + f->text.start);
}

static uint64_t address_of(const te_play *play, const f_patch *patch) {
    return play->own->at[patch->slot] + patch->offset;
}

static te_status attend(const te_play *play, const te_op *op) {
    for (uint32_t i = 0; i < op->patch_count; i++)
        op->pointers[op->patches[i].number] = (void *)(uintptr_t)address_of(play, &op->patches[i]);
    return te_attend(play->program, play->local, op->target, op->pointers[0], op->pointers + 1, play->streams[op->way]);
}

static te_status copy(const te_play *play, const te_op *op) {
    const te_file *file = &play->program->file;
    const te_doors *d = &play->program->runtime->doors;
    const f_module *content = &file->contents[op->target];
    const int status = d->cuMemcpyHtoDAsync_v2(address_of(play, op->patches), file->data + content->start,
                                               (size_t)content->bytes, play->streams[op->way]);
    return status ? te_driver_failed(d, "cuMemcpyHtoDAsync", status) : TE_OK;
}

static te_status take(const te_play *play, const te_op *op) {
    te_program *p = play->program;
    const f_slot *slot = &play->slots[op->target];
    void *address;
    if (play->own->at[op->target]) return TE_OK; /* the caller's: an output, or in the block */
    if (slot->role == R_SCRATCH) {
        const f_entry *e = &p->file.entries[play->run->entry];
        const te_status status =
            te_scratch_of(p->runtime, play->lanes[op->way], p->slot_name_numbers[e->slots + op->target],
                          (size_t)slot->bytes, (slot->flags & S_ZEROED) != 0, &address);
        if (status != TE_OK) return status;
    } else {
        const te_status status =
            te_take(p->runtime, (size_t)slot->bytes, slot->alignment, play->streams[op->way], &address);
        if (status != TE_OK) return status;
        play->own->ours[op->target] = 1;
    }
    play->own->at[op->target] = (uint64_t)(uintptr_t)address;
    return TE_OK;
}

/* Give memory back once the streams that were noticed are done with it. */
static te_status drop(const te_play *play, uint32_t slot) {
    te_program *p = play->program;
    void *const stream = play->streams[play->slots[slot].way];
    te_status status = TE_OK;
    if (!play->own->ours[slot]) return TE_OK;
    for (uint32_t way = 0, left = play->own->noticed[slot]; left; way++, left >>= 1)
        if (left & 1) {
            const te_status one = te_order(p->runtime, play->local, play->streams[way], stream);
            if (one != TE_OK) status = one;
        }
    te_give(p->runtime, (void *)(uintptr_t)play->own->at[slot], stream);
    play->own->ours[slot] = 0;
    return status;
}

static te_status do_step(te_play *play, const te_op *op) {
    if (op->kind <= K_COPY && op->way) play->busy |= UINT32_C(1) << op->way;
    if (op->kind <= K_FILL) {
        const int status = te_step_do(&play->calls, op, play->own->at, play->streams[op->way]);
        return status ? step_failed(play, op, status) : TE_OK;
    }
    switch (op->kind) {
        case K_ATTEND: return attend(play, op);
        case K_COPY: return copy(play, op);
        case K_TAKE: return take(play, op);
        case K_DROP: return drop(play, op->target);
        case K_WAIT:
            if (!op->target) play->busy &= ~(UINT32_C(1) << op->other);
            return te_order(play->program->runtime, play->local, play->streams[op->other], play->streams[op->target]);
        default: play->own->noticed[op->patches->slot] |= UINT32_C(1) << op->target; return TE_OK;
    }
}

/* Memory for what is there from the beginning: the block's, or scratch memory; what begins as zeros is filled. */
static te_status lay_out(const te_play *play) {
    te_program *p = play->program;
    const te_run *run = play->run;
    const te_entry *e = &p->entries[run->entry];
    const f_entry *f = &p->file.entries[run->entry];
    for (uint32_t i = 0; run->block == NULL && i < e->scratch_count; i++) {
        const uint32_t slot = e->scratch[i];
        void *address;
        const te_status status =
            te_scratch_of(p->runtime, play->lanes[0], p->slot_name_numbers[f->slots + slot],
                          (size_t)play->slots[slot].bytes, (play->slots[slot].flags & S_ZEROED) != 0, &address);
        if (status != TE_OK) return status;
        play->own->at[slot] = (uint64_t)(uintptr_t)address;
    }
    if (run->block == NULL) return TE_OK;
    for (uint32_t i = f->inputs; i < f->slot_count; i++) {
        const f_slot *s = &play->slots[i];
        if (s->place == NOWHERE) continue;
        play->own->at[i] = (uint64_t)(uintptr_t)run->block + s->place;
        if (!(s->flags & S_ZEROED)) continue;
        const int status = p->runtime->doors.cuMemsetD8Async(play->own->at[i], 0, (size_t)s->bytes, play->streams[0]);
        if (status) return te_driver_failed(&p->runtime->doors, "cuMemsetD8Async", status);
    }
    return TE_OK;
}

static te_status find_streams(te_play *play, void *stream) {
    te_program *p = play->program;
    te_runtime *rt = p->runtime;
    play->streams[0] = stream;
    te_status status = te_lane_of(play->local, stream, &play->lanes[0]);
    for (uint32_t i = 1; status == TE_OK && i < p->file.count[T_WAYS]; i++) {
        status = te_lane_beside(rt, play->lanes[p->file.ways[i].parent], p->way_numbers[i], &play->lanes[i]);
        if (status == TE_OK) play->streams[i] = play->lanes[i]->stream;
    }
    return status;
}

static te_status play_steps(te_play *play) {
    const f_entry *e = &play->program->file.entries[play->run->entry];
    te_status status = lay_out(play);
    for (uint32_t i = 0; status == TE_OK && i < e->step_count; i++) {
        status = do_step(play, &play->own->ops[i]);
        if (status != TE_OK) te_at_step((int32_t)i);
    }
    for (uint32_t way = 1; way < MOST_WAYS; way++) /* behind a call its stream has all of its work behind it */
        if (play->busy >> way & 1) {
            const te_status one = te_order(play->program->runtime, play->local, play->streams[way], play->streams[0]);
            if (status == TE_OK) status = one;
        }
    return status;
}

/* Outputs that were allocated are the caller's; after an error all that was taken goes back. */
static void finish(const te_play *play, te_status status) {
    const te_entry *e = &play->program->entries[play->run->entry];
    const f_entry *f = &play->program->file.entries[play->run->entry];
    for (uint32_t i = 0; status == TE_OK && i < e->outputs; i++) {
        const uint32_t slot = e->numbers[i];
        if (!play->own->ours[slot]) continue;
        play->run->output[i]->data = (void *)(uintptr_t)play->own->at[slot];
        play->run->output[i]->byte_offset = 0;
        play->run->output[i]->device = (DLDevice){(DLDeviceType)play->program->runtime->options.device_type,
                                                  play->program->runtime->options.device_id};
        play->own->ours[slot] = 0;
    }
    for (uint32_t i = f->inputs; i < f->slot_count; i++) {
        if (!play->own->ours[i]) continue;
        if (play->slots[i].way) /* the call's stream, which waits for all others by now, may still use it */
            (void)te_order(play->program->runtime, play->local, play->streams[0], play->streams[play->slots[i].way]);
        te_give(play->program->runtime, (void *)(uintptr_t)play->own->at[i], play->streams[play->slots[i].way]);
        play->own->ours[i] = 0;
    }
}

static te_status check_run(const te_program *p, const te_run *run) {
    const char *to_do = "begin with te_run r = TE_RUN, and find the entry by te_program_find";
    if (p == NULL || run == NULL) return te_fail(TE_ARGUMENT, RUN, "a program and a te_run", to_do, "NULL");
    if (run->size < sizeof(te_run) || run->size > 4096)
        return te_fail(TE_ARGUMENT, RUN, "the size of te_run", to_do, "size %zu", run->size);
    if (run->entry < 0 || (uint64_t)run->entry >= p->file.count[T_ENTRIES])
        return te_fail(TE_ARGUMENT, RUN, "the number of an entry", to_do, "entry %d of %d", (int)run->entry,
                       (int)p->file.count[T_ENTRIES]);
    if (run->block == NULL) return TE_OK;
    const uint64_t wanted = p->file.entries[run->entry].block;
    if (run->block_bytes < wanted || (uintptr_t)run->block & 255)
        return te_fail(TE_ARGUMENT, RUN, "te_program_block_bytes, at a multiple of 256", "bring a larger block, or none",
                       "a block of %zu bytes at %p for %llu", run->block_bytes, run->block, (unsigned long long)wanted);
    return TE_OK;
}

te_status te_program_run(te_program *p, const te_run *run) {
    te_status status = check_run(p, run);
    te_play play = {.program = p, .run = run};
    bool entered;
    if (status != TE_OK || (status = te_local_of(p->runtime, &play.local)) != TE_OK) return status;
    if ((status = te_enter(p->runtime, &entered)) != TE_OK) return status;
    status = bound_of(p, play.local, &play.bound);
    if (status == TE_OK && play.bound->entries[run->entry].ops == NULL)
        status = bind_entry(p, play.local, play.bound, (uint32_t)run->entry);
    if (status == TE_OK) {
        const f_entry *e = &p->file.entries[run->entry];
        play.own = &play.bound->entries[run->entry];
        play.slots = p->file.slots + e->slots;
        const te_doors *d = &p->runtime->doors;
        play.calls = (te_calls){d->cuLaunchKernel, d->cuMemsetD8Async, d->cublasLtMatmul, d->cublasLtMatmulDescSetAttribute};
        memset(play.own->at, 0, 8 * (size_t)e->slot_count);
        if (p->file.count[T_WAYS] > 1) memset(play.own->noticed, 0, 4 * (size_t)e->slot_count);
        status = te_tensors_check(p, run, play.own->at, play.own->bytes);
    }
    if (status == TE_OK) status = find_streams(&play, run->stream == NULL ? p->runtime->options.stream : run->stream);
    if (status == TE_OK) {
        status = play_steps(&play);
        finish(&play, status);
    }
    te_leave(p->runtime, entered);
    return status;
}

static te_status prepare_entry(te_program *p, te_play *play, uint32_t entry) {
    const f_entry *f = &p->file.entries[entry];
    te_status status = TE_OK;
    if (play->bound->entries[entry].ops == NULL) status = bind_entry(p, play->local, play->bound, entry);
    for (uint32_t i = f->inputs; status == TE_OK && i < f->slot_count; i++) {
        const f_slot *s = &p->file.slots[f->slots + i];
        void *address;
        if (s->role == R_SCRATCH)
            status = te_scratch_of(p->runtime, play->lanes[s->way], p->slot_name_numbers[f->slots + i], (size_t)s->bytes,
                                   (s->flags & S_ZEROED) != 0, &address);
    }
    return status;
}

te_status te_program_prepare(te_program *p, int32_t entry, void *stream) {
    const char *op = "te_program_prepare";
    if (p == NULL) return te_fail(TE_ARGUMENT, op, "a program", "pass one", "NULL");
    if (entry < -1 || (entry >= 0 && (uint64_t)entry >= p->file.count[T_ENTRIES]))
        return te_fail(TE_ARGUMENT, op, "the number of an entry, or -1", "find it by te_program_find", "%d", (int)entry);
    te_play play = {.program = p};
    bool entered;
    te_status status = te_local_of(p->runtime, &play.local);
    if (status != TE_OK || (status = te_enter(p->runtime, &entered)) != TE_OK) return status;
    status = bound_of(p, play.local, &play.bound);
    if (status == TE_OK) status = find_streams(&play, stream == NULL ? p->runtime->options.stream : stream);
    for (uint32_t i = 0; status == TE_OK && i < p->file.count[T_ENTRIES]; i++)
        if (entry == -1 || (uint32_t)entry == i) status = prepare_entry(p, &play, i);
    te_leave(p->runtime, entered);
    return status;
}
