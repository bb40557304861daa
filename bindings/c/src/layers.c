/* Layers: te_core.embed says what a call is, a program does it again; on the CPU te_core computes each call. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

/* Whose memory a number means, as te_core/embed/recorded.py has it: each input, state, gradient of an output, slot. */
enum { OF_STATE = 64, OF_GRADIENT = 96, OF_SLOT = 128, STATES = 6, MOST_CALLED = 256, BUCKETS = 256 };

/* What layers, states and kept calls begin with. Those that live stand in a table, so that a freed one is known. */
typedef struct te_handle {
    struct te_handle *next;
    te_runtime *runtime;
    int kind;
} te_handle;
enum { LAYER = 1, SCALING, SAVED };

/* Where a tensor of a program lies, or to which of the caller's it belongs. */
typedef struct {
    const int64_t *words; /* number, offset; of outputs: number, caller's (-1: kept), code, bits, dimensions, sizes ... */
} te_part;

/* A call that was recorded. */
typedef struct te_recorded {
    struct te_recorded *next, *backward;
    uint64_t hash, number;
    size_t words, numbers;
    uint64_t *key;
    te_program *program;
    te_answer plan;
    te_part *parts; /* inputs, then outputs */
    int32_t inputs, outputs;
} te_recorded;

struct te_layer {
    te_handle handle;
    uint64_t number;
    te_layer_slot *slots;
    int32_t inputs, outputs;
    bool history;
    te_answer said; /* the slots' texts */
    te_recorded *calls;
};

struct te_scaling {
    te_handle handle;
    te_layer *layer;
    uint64_t number, at[STATES], update; /* the last one */
};

struct te_saved {
    te_handle handle;
    te_layer *layer;
    te_recorded *call; /* NULL: te_core's, by its number */
    te_bytes *bytes;   /* of the inputs */
    size_t inputs;
    uint64_t number, at[];
};

static atomic_uint_fast64_t updates;
static pthread_mutex_t living_lock = PTHREAD_MUTEX_INITIALIZER;
static te_handle *living[BUCKETS];

static te_handle **bucket(const void *handle) { return &living[((uintptr_t)handle >> 4) * 2654435761U / 4096 % BUCKETS]; }

static void born(te_handle *handle, te_runtime *runtime, int kind) {
    handle->runtime = runtime;
    handle->kind = kind;
    (void)pthread_mutex_lock(&living_lock);
    handle->next = *bucket(handle);
    *bucket(handle) = handle;
    (void)pthread_mutex_unlock(&living_lock);
}

/* Whether it lives and is of this kind; `end`: it does no more. */
static bool lives(const void *handle, int kind, bool end) {
    (void)pthread_mutex_lock(&living_lock);
    te_handle **at = bucket(handle);
    while (*at != NULL && *at != handle) at = &(*at)->next;
    const bool found = *at != NULL && (*at)->kind == kind;
    if (found && end) *at = (*at)->next;
    (void)pthread_mutex_unlock(&living_lock);
    return found;
}

static te_status dead(const char *operation, const char *what) {
    return te_fail(TE_ARGUMENT, operation, "what its function gave, and nobody freed", "correct the argument",
                   "%s that is NULL, was freed, or is none", what);
}

static te_status no_memory(const char *operation) {
    return te_fail(TE_MEMORY, operation, "enough memory", "free some", "too little");
}

static bool on_host(const te_layer *layer) { return layer->handle.runtime->options.device_type == kDLCPU; }

/* --------------------------------------------------------------------------------------------------- what a call is */

/* Words, by which calls are told apart; and where a call's tensors lie. */
typedef struct {
    uint64_t words[2048];
    size_t count, tensors;
    te_bytes bytes[MOST_CALLED];
} te_key;

static void put(te_key *key, uint64_t word) {
    if (key->count < sizeof key->words / sizeof *key->words) key->words[key->count++] = word;
}

static uint64_t aligned_to(uint64_t address) {
    const uint64_t low = address | 256;
    return low & (~low + 1);
}

/* Check what no recording looks at: memory, device, sizes; add what a recording depends on to the key. */
static te_status look(const char *operation, const te_runtime *rt, const char *name, const DLTensor *t, bool written,
                      te_key *key) {
    if (t->ndim < 0 || t->ndim > MOST_DIMENSIONS || (t->ndim && t->shape == NULL))
        return te_fail(TE_ARGUMENT, operation, "0 to 32 dimensions, and their sizes", "correct the tensor",
                       "%.100s of %d dimensions", name, (int)t->ndim);
    int64_t dense = 1;
    bool strided = false;
    for (int32_t i = t->ndim - 1; i >= 0; i--) {
        if (t->shape[i] < 0 || (t->shape[i] && dense > INT64_MAX / 8 / t->shape[i]))
            return te_fail(TE_ARGUMENT, operation, "sizes from 0 on that memory can have", "correct the tensor",
                           "%.100s of size %lld", name, (long long)t->shape[i]);
        strided |= t->strides != NULL && t->shape[i] > 1 && t->strides[i] != dense;
        dense *= t->shape[i];
    }
    if (dense && t->data == NULL && !written)
        return te_fail(TE_ARGUMENT, operation, "tensors with memory", "set data", "no data in %.100s", name);
    if (t->data != NULL && ((int)t->device.device_type != rt->options.device_type ||
                            (rt->options.device_type == kDLCUDA && t->device.device_id != rt->options.device_id)))
        return te_fail(TE_ARGUMENT, operation, "tensors of the runtime's device", "copy it there, or use that device's runtime",
                       "%.100s on device (%d, %d)", name, (int)t->device.device_type, (int)t->device.device_id);
    const te_status status = te_bytes_add(operation, name, t, written, key->bytes, &key->tensors);
    if (status != TE_OK) return status;
    const uint64_t dtype = (uint64_t)t->dtype.code << 24 | (uint64_t)t->dtype.bits << 16 | t->dtype.lanes;
    put(key, dtype << 16 | (uint64_t)t->ndim << 1 | strided);
    put(key, aligned_to((uint64_t)(uintptr_t)t->data + t->byte_offset));
    for (int32_t i = 0; i < t->ndim; i++) put(key, (uint64_t)t->shape[i]);
    for (int32_t i = 0; strided && i < t->ndim; i++) put(key, (uint64_t)t->strides[i]);
    return TE_OK;
}

static te_status look_at_all(const char *operation, const te_layer *layer, bool of_inputs, DLTensor *const *tensors,
                             int32_t count, bool written, te_key *key) {
    const int32_t most = of_inputs ? layer->inputs : layer->outputs;
    if (count < 1 || count > most || tensors == NULL)
        return te_fail(TE_ARGUMENT, operation, "at most as many tensors as te_layer_slots says", "leave the last ones out",
                       "%d %s for %d", (int)count, of_inputs ? "inputs" : "outputs", (int)most);
    for (int32_t i = 0; i < count; i++) {
        const char *name = layer->slots[of_inputs ? i : layer->inputs + i].name;
        put(key, tensors[i] != NULL);
        if (tensors[i] == NULL) continue;
        const te_status status = look(operation, layer->handle.runtime, name, tensors[i], written, key);
        if (status != TE_OK) return status;
    }
    return TE_OK;
}

static te_recorded *recorded_before(te_runtime *rt, te_recorded *const *list, const te_key *key, uint64_t *hash) {
    *hash = 14695981039346656037U;
    for (size_t i = 0; i < key->count; i++) *hash = (*hash ^ key->words[i]) * 1099511628211U;
    (void)pthread_mutex_lock(&rt->lock);
    te_recorded *found = *list;
    while (found != NULL && (found->hash != *hash || found->words != key->count ||
                             memcmp(found->key, key->words, 8 * key->count) != 0))
        found = found->next;
    (void)pthread_mutex_unlock(&rt->lock);
    return found;
}

static void recorded_free(te_recorded *call) {
    while (call != NULL) {
        te_recorded *next = call->next;
        recorded_free(call->backward);
        te_program_free(call->program);
        te_python_drop(call->number);
        free(call->plan.content);
        free(call->parts);
        free(call->key);
        free(call);
        call = next;
    }
}

/* The plan: number, numbers that there are, inputs, outputs, and their parts. */
static bool read_parts(te_recorded *call) {
    const int64_t *w = call->plan.words;
    call->number = (uint64_t)w[0];
    call->numbers = (size_t)w[1];
    call->inputs = (int32_t)w[2];
    call->outputs = (int32_t)w[3];
    call->parts = calloc((size_t)(call->inputs + call->outputs) + 1, sizeof *call->parts);
    if (call->parts == NULL) return false;
    w += 4;
    for (int32_t i = 0; i < call->inputs + call->outputs; i++) {
        call->parts[i].words = w;
        w += i < call->inputs ? 2 : 5 + w[4];
    }
    return true;
}

/* Have a call recorded. Another thread may have recorded the same meanwhile: then its is used. */
static te_status record(const char *operation, te_runtime *rt, te_recorded **list, const te_key *key, const char *what,
                        const uint64_t asked[ASKED], te_recorded **call) {
    te_recorded *made = calloc(1, sizeof *made), *other;
    if (made == NULL) return no_memory(operation);
    te_status status = te_python_ask(operation, what, asked, &made->plan);
    if (status == TE_OK && ((made->key = malloc(8 * key->count + 8)) == NULL || !read_parts(made)))
        status = no_memory(operation);
    if (status == TE_OK) status = te_program_load_memory(rt, made->plan.bytes, made->plan.size, &made->program);
    if (status != TE_OK) {
        recorded_free(made);
        return status;
    }
    memcpy(made->key, key->words, 8 * key->count);
    made->words = key->count;
    if ((other = recorded_before(rt, list, key, &made->hash)) != NULL) {
        recorded_free(made);
        made = other;
    } else {
        (void)pthread_mutex_lock(&rt->lock);
        made->next = *list;
        *list = made;
        (void)pthread_mutex_unlock(&rt->lock);
    }
    *call = made;
    return TE_OK;
}

/* An output of the caller's has the shape and type that the call gives. */
static te_status fits(const char *operation, const char *name, const DLTensor *t, const int64_t *part) {
    const int64_t *shape = part + 5;
    bool right = t->dtype.code == part[2] && t->dtype.bits == part[3] && t->dtype.lanes == 1 && t->ndim == part[4];
    int64_t dense = 1;
    for (int32_t i = t->ndim - 1; right && i >= 0; i--) {
        right = t->shape[i] == shape[i] && (t->strides == NULL || t->shape[i] < 2 || t->strides[i] == dense);
        dense *= t->shape[i];
    }
    if (right) return TE_OK;
    return te_fail(TE_ARGUMENT, operation, "the shape and dtype that the layer gives, dense", "correct the tensor",
                   "%.100s of %d dimensions, dtype (%d, %d), for %d, dtype (%d, %d), or of other sizes", name, (int)t->ndim,
                   t->dtype.code, t->dtype.bits, (int)part[4], (int)part[2], (int)part[3]);
}

static te_status play(const char *operation, const te_recorded *call, const te_layer *layer, bool backward, uint64_t *at,
                      DLTensor *const *output) {
    const te_slot *const *slots;
    te_run run = TE_RUN;
    te_status status = te_program_slots(call->program, 0, &slots, &run.inputs, &run.outputs);
    const int32_t all = call->inputs + call->outputs;
    const te_runtime_options *o = &call->program->runtime->options;
    for (int32_t i = 0; status == TE_OK && i < call->outputs; i++) {
        const int64_t *part = call->parts[call->inputs + i].words;
        if (part[1] < 0) continue;
        const char *name = layer->slots[part[1] + (backward ? 0 : layer->inputs)].name;
        if (output[part[1]] == NULL) status = dead(operation, name);
        if (status == TE_OK) status = fits(operation, name, output[part[1]], part);
    }
    DLTensor *tensors = calloc((size_t)all + 1, sizeof *tensors + sizeof(DLTensor *));
    DLTensor **given = (DLTensor **)(void *)(tensors + all + 1);
    if (tensors == NULL) return no_memory(operation);
    for (int32_t i = 0; status == TE_OK && i < all; i++) {
        const int64_t *part = call->parts[i].words;
        const te_slot *s = slots[i];
        uint64_t address = 0;
        if (i < call->inputs)
            address = at[part[0]] + (uint64_t)part[1];
        else if (part[1] >= 0 && output[part[1]]->data != NULL)
            address = (uint64_t)(uintptr_t)output[part[1]]->data + output[part[1]]->byte_offset;
        tensors[i] = (DLTensor){(void *)(uintptr_t)address, {(DLDeviceType)o->device_type, o->device_id}, s->ndim, s->dtype,
                                (int64_t *)(uintptr_t)s->shape, (int64_t *)(uintptr_t)s->strides, 0};
        given[i] = &tensors[i];
    }
    run.input = given;
    run.output = given + call->inputs;
    if (status == TE_OK) status = te_program_run(call->program, &run);
    for (int32_t i = call->inputs; status == TE_OK && i < all; i++) {
        const int64_t *part = call->parts[i].words;
        if (!backward) at[part[0]] = (uint64_t)(uintptr_t)tensors[i].data;
        if (part[1] < 0 || output[part[1]]->data != NULL) continue;
        output[part[1]]->data = tensors[i].data;
        output[part[1]]->byte_offset = 0;
        output[part[1]]->device = tensors[i].device;
    }
    free(tensors);
    return status;
}

/* ---------------------------------------------------------------------------------------------------------- layers */

static void *take(te_runtime *rt, size_t bytes, void *stream) {
    void *found;
    bool entered;
    if (te_enter(rt, &entered) != TE_OK) return NULL;
    if (te_take(rt, bytes, 256, stream, &found) != TE_OK) found = NULL;
    te_leave(rt, entered);
    return found;
}

static void give(te_runtime *rt, void *address, void *stream) { (void)te_output_free(rt, address, stream); }

static te_status introduce(te_runtime *rt) {
    te_answer answer;
    if (rt->python) return TE_OK;
    const te_runtime_options *o = &rt->options;
    const uint64_t asked[ASKED] = {(uint64_t)o->device_type, (uint64_t)o->device_id, (uint64_t)(uintptr_t)o->stream,
                                   (uint64_t)(uintptr_t)rt,  (uint64_t)(uintptr_t)&take, (uint64_t)(uintptr_t)&give,
                                   (uint64_t)(uintptr_t)&te_python_ended};
    const te_status status = te_python_ask("te_layer_open", "runtime", asked, &answer);
    if (status != TE_OK) return status;
    (void)pthread_mutex_lock(&rt->lock);
    const uint64_t number = rt->python ? (uint64_t)answer.words[0] : 0; /* another thread was first */
    if (!rt->python) rt->python = (uint64_t)answer.words[0];
    (void)pthread_mutex_unlock(&rt->lock);
    te_python_drop(number);
    free(answer.content);
    return TE_OK;
}

te_status te_layer_open(te_runtime *rt, const char *name, const char *options, te_layer **layer) {
    const char *op = "te_layer_open";
    if (layer != NULL) *layer = NULL;
    if (rt == NULL || name == NULL || layer == NULL)
        return te_fail(TE_ARGUMENT, op, "a runtime, a name, a place", "pass all three", "NULL");
    te_status status = introduce(rt);
    if (status != TE_OK) return status;
    te_layer *made = calloc(1, sizeof *made);
    if (made == NULL) return no_memory(op);
    const uint64_t asked[ASKED] = {rt->python, (uint64_t)(uintptr_t)name, (uint64_t)(uintptr_t)options};
    status = te_python_ask(op, "open", asked, &made->said);
    if (status != TE_OK) {
        free(made);
        return status;
    }
    const int64_t *w = made->said.words;
    const char *text = made->said.texts;
    made->number = (uint64_t)w[0];
    made->inputs = (int32_t)w[1];
    made->outputs = (int32_t)w[2];
    made->history = w[3] != 0;
    made->slots = calloc((size_t)(made->inputs + made->outputs), sizeof *made->slots);
    for (int32_t i = 0; made->slots != NULL && i < made->inputs + made->outputs; i++) {
        te_layer_slot *s = &made->slots[i];
        const char **texts[] = {&s->name, &s->shape, &s->dtypes};
        s->size = sizeof *s;
        for (int k = 0; k < 3; k++) {
            *texts[k] = text;
            text += strlen(text) + 1;
        }
        s->role = i < made->inputs ? TE_INPUT : TE_OUTPUT;
        s->optional = (w[4 + i] & 1) != 0;
        s->gradient = (w[4 + i] & 2) != 0;
    }
    born(&made->handle, rt, LAYER);
    if (made->slots == NULL) {
        te_layer_free(made);
        return no_memory(op);
    }
    *layer = made;
    return TE_OK;
}

te_status te_layer_slots(const te_layer *layer, const te_layer_slot **slots, int32_t *inputs, int32_t *outputs) {
    if (!lives(layer, LAYER, false)) return dead("te_layer_slots", "a layer");
    if (slots == NULL || inputs == NULL || outputs == NULL)
        return te_fail(TE_ARGUMENT, "te_layer_slots", "three places", "pass them", "NULL");
    *slots = layer->slots;
    *inputs = layer->inputs;
    *outputs = layer->outputs;
    return TE_OK;
}

/* Those of a runtime, or of a layer, that are left. */
static te_handle *left_of(const te_runtime *rt, const te_layer *layer, int kind) {
    te_handle *found = NULL;
    (void)pthread_mutex_lock(&living_lock);
    for (size_t i = 0; i < BUCKETS && found == NULL; i++)
        for (te_handle *h = living[i]; h != NULL && found == NULL; h = h->next) {
            const te_layer *of = kind == SCALING ? ((te_scaling *)h)->layer : kind == SAVED ? ((te_saved *)h)->layer : layer;
            if (h->kind == kind && h->runtime == rt && of == layer) found = h;
        }
    (void)pthread_mutex_unlock(&living_lock);
    return found;
}

void te_layer_free(te_layer *layer) {
    te_handle *left;
    if (!lives(layer, LAYER, true)) return;
    while ((left = left_of(layer->handle.runtime, layer, SAVED)) != NULL) te_saved_free((te_saved *)left);
    while ((left = left_of(layer->handle.runtime, layer, SCALING)) != NULL) te_scaling_free((te_scaling *)left);
    recorded_free(layer->calls);
    te_python_drop(layer->number);
    free(layer->slots);
    free(layer->said.content);
    free(layer);
}

void te_layers_free(te_runtime *rt) {
    te_handle *left;
    while ((left = left_of(rt, NULL, LAYER)) != NULL) te_layer_free((te_layer *)left);
    recorded_free(rt->updates);
    te_python_drop(rt->python);
}

te_status te_layer_save(te_layer *layer, const char *path) {
    te_answer answer;
    if (!lives(layer, LAYER, false)) return dead("te_layer_save", "a layer");
    if (path == NULL) return te_fail(TE_ARGUMENT, "te_layer_save", "a path", "pass one", "NULL");
    const uint64_t asked[ASKED] = {layer->number, (uint64_t)(uintptr_t)path};
    const te_status status = te_python_ask("te_layer_save", "save", asked, &answer);
    if (status == TE_OK) free(answer.content);
    return status;
}

/* ----------------------------------------------------------------------------------------------- forward and backward */

static te_status check_call(const char *operation, const te_layer *layer, const te_scaling *scaling) {
    if (!lives(layer, LAYER, false)) return dead(operation, "a layer");
    if (scaling == NULL) return TE_OK;
    if (!lives(scaling, SCALING, false)) return dead(operation, "a scaling");
    if (scaling->layer == layer) return TE_OK;
    return te_fail(TE_ARGUMENT, operation, "the state of this layer", "make one by te_scaling_create", "another layer's state");
}

static void release(te_saved *saved) {
    const te_recorded *call = saved->call;
    for (int32_t i = 0; call != NULL && i < call->outputs; i++) {
        const int64_t *part = call->parts[call->inputs + i].words;
        if (part[1] < 0) (void)te_output_free(saved->handle.runtime, (void *)(uintptr_t)saved->at[part[0]], NULL);
    }
    te_python_drop(saved->number);
    free(saved);
}

te_status te_forward(te_layer *layer, te_scaling *scaling, DLTensor *const *input, int32_t inputs, DLTensor *const *output,
                     int32_t outputs, te_saved **saved) {
    const char *op = "te_forward";
    te_key key;
    key.count = key.tensors = 0;
    if (saved != NULL) *saved = NULL;
    te_status status = check_call(op, layer, scaling);
    if (status != TE_OK) return status;
    put(&key, (uint64_t)(saved != NULL) | (uint64_t)(scaling != NULL) << 1 | (uint64_t)outputs << 2 | (uint64_t)inputs << 32);
    status = look_at_all(op, layer, true, input, inputs, false, &key);
    const size_t read = key.tensors;
    if (status == TE_OK) status = look_at_all(op, layer, false, output, outputs, true, &key);
    if (status != TE_OK) return status;
    te_runtime *rt = layer->handle.runtime;
    te_recorded *call = NULL;
    const uint64_t asked[ASKED] = {layer->number, scaling ? scaling->number : 0, (uint64_t)(uintptr_t)input,
                                   (uint64_t)inputs, (uint64_t)(uintptr_t)output, (uint64_t)outputs, saved != NULL};
    uint64_t hash;
    if (!on_host(layer) && (call = recorded_before(rt, &layer->calls, &key, &hash)) == NULL &&
        (status = record(op, rt, &layer->calls, &key, "record", asked, &call)) != TE_OK)
        return status;
    const size_t numbers = call == NULL ? 0 : call->numbers;
    te_saved *kept = calloc(1, sizeof *kept + 8 * numbers + read * sizeof *kept->bytes);
    if (kept == NULL) return no_memory(op);
    kept->bytes = memcpy(kept->at + numbers, key.bytes, read * sizeof *kept->bytes);
    kept->inputs = read;
    kept->layer = layer;
    kept->call = call;
    if (call == NULL) {
        te_answer answer;
        status = te_python_ask(op, "forward", asked, &answer);
        if (status == TE_OK) {
            kept->number = (uint64_t)answer.words[0];
            free(answer.content);
        }
    } else {
        for (int32_t i = 0; i < inputs; i++)
            if (input[i] != NULL) kept->at[i] = (uint64_t)(uintptr_t)input[i]->data + input[i]->byte_offset;
        for (int32_t i = 0; scaling != NULL && i < STATES; i++) kept->at[OF_STATE + i] = scaling->at[i];
        status = play(op, call, layer, false, kept->at, output);
    }
    kept->handle.runtime = rt;
    if (status != TE_OK) {
        free(kept);
    } else if (saved == NULL) {
        release(kept);
    } else {
        born(&kept->handle, rt, SAVED);
        *saved = kept;
    }
    return status;
}

static te_status play_backward(te_layer *layer, te_saved *saved, DLTensor *const *dy, int32_t outputs,
                               DLTensor *const *gradient, const uint64_t asked[ASKED], const te_key *key) {
    const char *op = "te_backward";
    te_recorded *call = saved->call, *made;
    te_status status = TE_OK;
    for (int32_t i = 0; status == TE_OK && i < call->outputs; i++) {
        const int64_t *part = call->parts[call->inputs + i].words;
        if (part[1] >= 0 && part[1] < outputs && dy[part[1]] != NULL)
            status = fits(op, layer->slots[layer->inputs + part[1]].name, dy[part[1]], part);
    }
    if (status != TE_OK) return status;
    uint64_t hash;
    if ((made = recorded_before(layer->handle.runtime, &call->backward, key, &hash)) == NULL)
        status = record(op, layer->handle.runtime, &call->backward, key, "record_backward", asked, &made);
    if (status != TE_OK) return status;
    for (int32_t i = 0; i < outputs; i++)
        if (dy[i] != NULL) saved->at[OF_GRADIENT + i] = (uint64_t)(uintptr_t)dy[i]->data + dy[i]->byte_offset;
    return play(op, made, layer, true, saved->at, gradient);
}

te_status te_backward(te_layer *layer, te_scaling *scaling, te_saved *saved, DLTensor *const *gradient_of_output,
                      int32_t outputs, DLTensor *const *gradient, int32_t inputs) {
    const char *op = "te_backward";
    te_key key;
    key.count = key.tensors = 0;
    te_status status = check_call(op, layer, scaling);
    if (status != TE_OK) return status;
    if (!lives(saved, SAVED, false) || saved->layer != layer) return dead(op, "what te_forward of this layer kept");
    key.tensors = saved->inputs;
    memcpy(key.bytes, saved->bytes, key.tensors * sizeof *key.bytes);
    status = look_at_all(op, layer, false, gradient_of_output, outputs, false, &key);
    if (status == TE_OK) status = look_at_all(op, layer, true, gradient, inputs, true, &key);
    if (status != TE_OK) return status;
    const uint64_t number = saved->call == NULL ? saved->number : saved->call->number;
    const uint64_t asked[ASKED] = {number, scaling ? scaling->number : 0, (uint64_t)(uintptr_t)gradient_of_output,
                                   (uint64_t)outputs, (uint64_t)(uintptr_t)gradient, (uint64_t)inputs};
    if (saved->call == NULL) {
        te_answer answer;
        status = te_python_ask(op, "backward", asked, &answer);
        if (status == TE_OK) free(answer.content);
    } else {
        for (int32_t i = 0; i < STATES; i++) saved->at[OF_STATE + i] = scaling == NULL ? 0 : scaling->at[i];
        status = play_backward(layer, saved, gradient_of_output, outputs, gradient, asked, &key);
    }
    if (status == TE_OK) te_saved_free(saved);
    return status;
}

void te_saved_free(te_saved *saved) {
    if (lives(saved, SAVED, true)) release(saved);
}

/* --------------------------------------------------------------------------------------------------------- scaling */

te_status te_scaling_create(te_layer *layer, te_scaling **scaling) {
    const char *op = "te_scaling_create";
    te_answer answer;
    if (scaling != NULL) *scaling = NULL;
    if (!lives(layer, LAYER, false) || scaling == NULL) return dead(op, scaling == NULL ? "a place" : "a layer");
    te_scaling *made = calloc(1, sizeof *made);
    if (made == NULL) return no_memory(op);
    const uint64_t asked[ASKED] = {layer->number};
    const te_status status = te_python_ask(op, "scaling", asked, &answer);
    if (status != TE_OK) {
        free(made);
        return status;
    }
    made->layer = layer;
    made->number = (uint64_t)answer.words[0];
    for (size_t i = 0; i < STATES; i++) made->at[i] = (uint64_t)answer.words[1 + i];
    free(answer.content);
    born(&made->handle, layer->handle.runtime, SCALING);
    *scaling = made;
    return TE_OK;
}

void te_scaling_free(te_scaling *scaling) {
    if (!lives(scaling, SCALING, true)) return;
    te_python_drop(scaling->number);
    free(scaling);
}

te_status te_scaling_update(te_runtime *rt, te_scaling *const *scalings, int32_t count) {
    const char *op = "te_scaling_update";
    te_key key;
    te_recorded *call = NULL;
    key.count = key.tensors = 0;
    if (rt == NULL || count < 0 || (count && scalings == NULL))
        return te_fail(TE_ARGUMENT, op, "a runtime and states", "pass both", "NULL, or %d states", (int)count);
    uint64_t *at = calloc((size_t)count * STATES + 1, 8), *numbers = calloc((size_t)count + 1, 8);
    te_status status = at == NULL || numbers == NULL || count > 2000 ? no_memory(op) : TE_OK;
    const uint64_t update = atomic_fetch_add(&updates, 1) + 1;
    int32_t used = 0;
    for (int32_t i = 0; status == TE_OK && i < count; i++) {
        if (!lives(scalings[i], SCALING, false) || scalings[i]->handle.runtime != rt) {
            status = dead(op, "a scaling of this runtime");
        } else if (scalings[i]->update == update) {
            status = te_fail(TE_ARGUMENT, op, "each state once", "leave the others out", "scalings[%d] a second time", (int)i);
        } else if (scalings[i]->layer->history) {
            scalings[i]->update = update;
            numbers[used] = scalings[i]->number;
            memcpy(at + STATES * used++, scalings[i]->at, sizeof scalings[i]->at);
            put(&key, scalings[i]->layer->number);
        }
    }
    const uint64_t asked[ASKED] = {rt->python, (uint64_t)(uintptr_t)numbers, (uint64_t)used};
    if (status == TE_OK && used && rt->options.device_type == kDLCPU) {
        te_answer answer;
        status = te_python_ask(op, "update", asked, &answer);
        if (status == TE_OK) free(answer.content);
    } else if (status == TE_OK && used) {
        uint64_t hash;
        call = recorded_before(rt, &rt->updates, &key, &hash);
        if (call == NULL) status = record(op, rt, &rt->updates, &key, "record_update", asked, &call);
        if (status == TE_OK) status = play(op, call, NULL, true, at, NULL);
    }
    free(at);
    free(numbers);
    return status;
}
