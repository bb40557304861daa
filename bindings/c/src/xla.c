/* XLA's calls of te_core: the FFI handler that plays a program on the buffers and the stream of a call.
 *
 * A call brings all memory: temporaries lie in one of its results, for what XLA's allocator for handlers gives is free
 * again when a call returns, while a command buffer that was recorded in it still runs. Once a thread knows the program, a
 * call takes no lock. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"
#include "xla.h"

enum { BUCKETS = 1024, MOST_DEVICES = 64, MOST_SLOTS = 512, TEXT = 2048 };

static const char *const CALL = "a call of XLA's";

typedef struct te_work {
    struct te_work *next; /* in its bucket */
    int64_t digest;
    unsigned char *content;
    size_t bytes;
    int32_t buffers, slots;
    int32_t *buffer; /* of each slot: in which buffer it lies, and where */
    uint64_t *offset;
    char *libcublaslt, *libcudnn;
    _Atomic(te_program *) programs[MOST_DEVICES];
    atomic_int_fast64_t calls;
} te_work;

static _Atomic(te_work *) works[BUCKETS];
static te_runtime *runtimes[MOST_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* for what is added */

static _Atomic(te_work *) *bucket_of(int64_t digest) { return &works[(uint64_t)digest % BUCKETS]; }

static te_work *work_of(int64_t digest) {
    te_work *found = atomic_load_explicit(bucket_of(digest), memory_order_acquire);
    while (found != NULL && found->digest != digest) found = found->next;
    return found;
}

static void *copied(const void *from, size_t bytes) {
    void *made = bytes < PTRDIFF_MAX ? malloc(bytes + 1) : NULL;
    if (made != NULL) memcpy(made, from, bytes);
    return made;
}

static void free_work(te_work *work) {
    free(work->content);
    free(work->buffer);
    free(work->offset);
    free(work->libcublaslt);
    free(work->libcudnn);
    free(work);
}

/* Work that is known already stays as it is. */
static void publish(te_work *made) {
    (void)pthread_mutex_lock(&lock);
    const bool known = work_of(made->digest) != NULL;
    if (!known) {
        made->next = atomic_load(bucket_of(made->digest));
        atomic_store_explicit(bucket_of(made->digest), made, memory_order_release);
    }
    (void)pthread_mutex_unlock(&lock);
    if (known) free_work(made);
}

te_status te_xla_add(int64_t digest, const void *content, size_t bytes, int32_t buffers, int32_t slots,
                     const int32_t *buffer, const uint64_t *offset, const char *libcublaslt, const char *libcudnn) {
    const char *op = "te_xla_add", *to_do = "correct the work";
    if (content == NULL || buffer == NULL || offset == NULL)
        return te_fail(TE_ARGUMENT, op, "a program, and where its slots lie", to_do, "NULL");
    if (slots < 0 || slots > MOST_SLOTS)
        return te_fail(TE_UNSUPPORTED, op, "at most 512", "call it in Python", "%d slots", (int)slots);
    for (int32_t i = 0; i < slots; i++)
        if (buffer[i] < 0 || buffer[i] >= buffers)
            return te_fail(TE_ARGUMENT, op, "numbers of the call's buffers", to_do, "buffer %d of %d for slot %d",
                           (int)buffer[i], (int)buffers, (int)i);
    te_work *made = calloc(1, sizeof *made);
    if (made == NULL) return te_fail(TE_MEMORY, op, "enough memory", "free some", "%zu bytes", bytes);
    made->digest = digest, made->bytes = bytes, made->buffers = buffers, made->slots = slots;
    made->content = copied(content, bytes);
    made->buffer = copied(buffer, (size_t)slots * sizeof *buffer);
    made->offset = copied(offset, (size_t)slots * sizeof *offset);
    if (libcublaslt != NULL) made->libcublaslt = copied(libcublaslt, strlen(libcublaslt) + 1);
    if (libcudnn != NULL) made->libcudnn = copied(libcudnn, strlen(libcudnn) + 1);
    if (!made->content || !made->buffer || !made->offset || (libcublaslt && !made->libcublaslt) ||
        (libcudnn && !made->libcudnn)) {
        free_work(made);
        return te_fail(TE_MEMORY, op, "enough memory", "free some", "%zu bytes", bytes);
    }
    publish(made);
    return TE_OK;
}

int64_t te_xla_calls(int64_t digest) {
    te_work *work = work_of(digest);
    return work == NULL ? -1 : (int64_t)atomic_load(&work->calls);
}

/* ------------------------------------------------------------------------------------------------------- devices */

static void *no_memory(size_t bytes, size_t alignment, void *stream, void *user) {
    (void)bytes, (void)alignment, (void)stream, (void)user;
    return NULL; /* XLA brings all of it */
}

static void no_free(void *address, void *stream, void *user) { (void)address, (void)stream, (void)user; }

static te_status load(const te_work *work, int32_t device, te_program **program) {
    const te_slot *const *slots;
    int32_t inputs = 0, outputs = 0;
    te_status status = TE_OK;
    if (runtimes[device] == NULL) {
        te_runtime_options options = TE_RUNTIME_OPTIONS;
        options.device_id = device;
        options.alloc = no_memory;
        options.free = no_free;
        status = te_runtime_create(&options, &runtimes[device]);
    }
    if (status == TE_OK && work->libcublaslt != NULL && runtimes[device]->doors.lt_library == NULL)
        status = te_doors_open_lt(&runtimes[device]->doors, work->libcublaslt);
    if (status == TE_OK && work->libcudnn != NULL && runtimes[device]->doors.cudnn_library == NULL)
        status = te_doors_open_cudnn(&runtimes[device]->doors, work->libcudnn);
    if (status == TE_OK) status = te_program_load_memory(runtimes[device], work->content, work->bytes, program);
    if (status != TE_OK) return status;
    if (te_program_slots(*program, 0, &slots, &inputs, &outputs) == TE_OK && inputs == work->slots && !outputs)
        return TE_OK;
    te_program_free(*program);
    return te_fail(TE_ARGUMENT, "te_xla_load", "a program of one entry, whose slots are all inputs", "correct the work",
                   "%d inputs and %d outputs for %d slots", (int)inputs, (int)outputs, (int)work->slots);
}

static te_status program_on(te_work *work, int32_t device, te_program **program) {
    te_status status = TE_OK;
    if (device < 0 || device >= MOST_DEVICES)
        return te_fail(TE_UNSUPPORTED, CALL, "devices 0 to 63", "call it in Python", "device %d", (int)device);
    *program = atomic_load_explicit(&work->programs[device], memory_order_acquire);
    if (*program != NULL) return TE_OK;
    (void)pthread_mutex_lock(&lock);
    *program = atomic_load(&work->programs[device]);
    if (*program == NULL && (status = load(work, device, program)) == TE_OK)
        atomic_store_explicit(&work->programs[device], *program, memory_order_release);
    (void)pthread_mutex_unlock(&lock);
    return status;
}

static te_status find(int64_t digest, te_work **work) {
    if ((*work = work_of(digest)) != NULL) return TE_OK;
    return te_fail(TE_ARGUMENT, CALL, "programs that this process has lowered",
                   "trace the function again here: jax.jit(f).lower(...) of the same f",
                   "a program with work %#llx that this process does not know", (unsigned long long)digest);
}

te_status te_xla_load(int64_t digest, int32_t device) {
    te_work *work;
    te_program *program;
    const te_status status = find(digest, &work);
    return status == TE_OK ? program_on(work, device, &program) : status;
}

/* --------------------------------------------------------------------------------------------------------- calls */

/* XLA asks which version the handler speaks: its own, if the handler knows that one; of a later one XLA takes older ones,
 * and refuses what it does not take. */
static bool answered(const xla_frame *frame) {
    if (frame->extension == NULL || frame->extension->type != XLA_METADATA) return false;
    xla_metadata *told = ((xla_question *)(void *)frame->extension)->metadata;
    const int minor = frame->api == NULL || frame->api->version.major != XLA_MAJOR ? XLA_NEWEST : frame->api->version.minor;
    told->version.major = XLA_MAJOR;
    told->version.minor = minor < XLA_OLDEST ? XLA_OLDEST : minor > XLA_NEWEST ? XLA_NEWEST : minor;
    told->traits = XLA_CAPTURED;
    return true;
}

/* What a function of XLA's says of the call. */
static te_status ask(const xla_frame *frame, int function, void *arguments) {
    void *error = frame->api->functions[function](arguments);
    if (error == NULL) return TE_OK;
    xla_destroy_error destroy = {sizeof destroy, NULL, error};
    (void)frame->api->functions[XLA_DESTROY_ERROR](&destroy);
    return te_fail(TE_LIBRARY, CALL, "a device and a stream of XLA's", "report it", "XLA does not tell its %s",
                   function == XLA_GET_DEVICE ? "device" : "stream");
}

static te_status play(const xla_frame *frame, const te_work *work, te_program *program, int32_t device, void *stream) {
    DLTensor tensors[MOST_SLOTS], *inputs[MOST_SLOTS];
    const te_slot *const *slots;
    const int64_t operands = frame->operands.count, all = operands + frame->results.count;
    int32_t count, outputs;
    te_run run = TE_RUN;
    if (all != work->buffers)
        return te_fail(TE_ARGUMENT, CALL, "operands and results as lowered", "trace the function again", "%lld for %d",
                       (long long)all, (int)work->buffers);
    const te_status status = te_program_slots(program, 0, &slots, &count, &outputs);
    if (status != TE_OK) return status;
    for (int32_t i = 0; i < count; i++) {
        const int64_t number = work->buffer[i];
        const xla_buffer *buffer = number < operands ? frame->operands.items[number] : frame->results.items[number - operands];
        const te_slot *s = slots[i];
        tensors[i] = (DLTensor){buffer->data, {kDLCUDA, device}, s->ndim, s->dtype, (int64_t *)s->shape,
                                (int64_t *)s->strides, work->offset[i]};
        inputs[i] = &tensors[i];
    }
    run.inputs = count;
    run.input = inputs;
    run.stream = stream;
    return te_program_run(program, &run);
}

static te_status do_stage(const xla_frame *frame) {
    xla_get_device device = {sizeof device, NULL, frame->context, 0};
    xla_get_stream stream = {sizeof stream, NULL, frame->context, NULL};
    te_work *work;
    te_program *program;
    if (frame->attributes.count != 1 || frame->attributes.types[0] != XLA_SCALAR)
        return te_fail(TE_ARGUMENT, CALL, "one number, its digest", "lower it by te_jax", "%lld attributes",
                       (long long)frame->attributes.count);
    te_status status = find(*(const int64_t *)((const xla_scalar *)frame->attributes.items[0])->value, &work);
    if (status == TE_OK) status = ask(frame, XLA_GET_DEVICE, &device);
    if (status == TE_OK) status = ask(frame, XLA_GET_STREAM, &stream);
    if (status == TE_OK) status = program_on(work, device.device, &program);
    if (status != TE_OK) return status;
    if (frame->stage == XLA_INITIALIZE) return te_program_prepare(program, 0, stream.stream);
    (void)atomic_fetch_add_explicit(&work->calls, 1, memory_order_relaxed);
    return play(frame, work, program, device.device, stream.stream);
}

void *te_xla_tape(xla_frame *frame) {
    if (answered(frame) || (frame->stage != XLA_INITIALIZE && frame->stage != XLA_EXECUTE)) return NULL;
    if (do_stage(frame) == TE_OK) return NULL;
    char text[TEXT];
    (void)snprintf(text, sizeof text, "te_jax: %s", te_error()->message);
    xla_create_error error = {sizeof error, NULL, text, XLA_INTERNAL};
    return frame->api->functions[XLA_CREATE_ERROR](&error);
}
