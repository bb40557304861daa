/* A runtime: its device, its memory, and what belongs to each thread and stream that calls. */
#define _POSIX_C_SOURCE 200809L
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

enum { MAJOR = 75, MINOR = 76, POOLS = 115, NON_BLOCKING = 1, NO_TIMING = 2, KEEP = 4, RELAXED = 2 };

static atomic_uint_fast64_t serials = 1;

/* What the thread used last: found again without a lock. Its address tells threads apart. */
static _Thread_local struct {
    uint64_t serial;
    te_local *local;
} mine;

static te_status no_memory(const char *operation, size_t bytes) {
    return te_fail(TE_MEMORY, operation, "enough memory", "free some", "%zu bytes of the host's", bytes);
}

static te_status open_device(te_runtime *rt) {
    const te_doors *d = &rt->doors;
    const int index = rt->options.device_id;
    int count = 0, pools = 0, status = d->cuInit(0);
    if (status) return te_driver_failed(d, "cuInit", status);
    if ((status = d->cuDeviceGetCount(&count))) return te_driver_failed(d, "cuDeviceGetCount", status);
    if (index < 0 || index >= count)
        return te_fail(TE_ARGUMENT, "te_runtime_create", "the number of a visible device", "correct device_id",
                       "device %d of %d", index, count);
    if ((status = d->cuDeviceGetAttribute(&rt->capability[0], MAJOR, index)) ||
        (status = d->cuDeviceGetAttribute(&rt->capability[1], MINOR, index)) ||
        (status = d->cuDeviceGetAttribute(&pools, POOLS, index)))
        return te_driver_failed(d, "cuDeviceGetAttribute", status);
    rt->pooled = pools != 0;
    if ((status = d->cuDevicePrimaryCtxRetain(&rt->context, index)))
        return te_driver_failed(d, "cuDevicePrimaryCtxRetain", status);
    return TE_OK;
}

static te_status make_pool(te_runtime *rt) {
    if (rt->options.alloc != NULL || !rt->pooled) return TE_OK;
    te_pool_properties properties = {0};
    uint64_t all = UINT64_MAX; /* freed memory stays in the pool, or each wait would unmap it */
    bool entered;
    properties.alloc_type = properties.location_type = 1;
    properties.location_id = rt->options.device_id;
    if (te_enter(rt, &entered) != TE_OK) return te_error()->status;
    int status = rt->doors.cuMemPoolCreate(&rt->pool, &properties);
    if (!status) status = rt->doors.cuMemPoolSetAttribute(rt->pool, KEEP, &all);
    te_leave(rt, entered);
    return status ? te_driver_failed(&rt->doors, "cuMemPoolCreate", status) : TE_OK;
}

te_status te_runtime_create(const te_runtime_options *options, te_runtime **runtime) {
    const char *op = "te_runtime_create", *do_ = "begin with te_runtime_options o = TE_RUNTIME_OPTIONS";
    if (options == NULL || runtime == NULL) return te_fail(TE_ARGUMENT, op, "options and a place", do_, "NULL");
    *runtime = NULL;
    /* Of an earlier header: what it lacks is NULL. Of a later one: what is added is not known here. */
    const bool earlier = options->size == offsetof(te_runtime_options, libcudnn);
    if ((options->size < sizeof *options && !earlier) || options->size > 4096)
        return te_fail(TE_ARGUMENT, op, "the size of te_runtime_options", do_, "size %zu", options->size);
    te_runtime *rt = calloc(1, sizeof *rt);
    if (rt == NULL) return no_memory(op, sizeof *rt);
    (void)pthread_mutex_init(&rt->lock, NULL);
    memcpy(&rt->options, options, earlier ? options->size : sizeof *options);
    rt->serial = atomic_fetch_add(&serials, 1);
    te_status status = TE_OK;
    const bool host = rt->options.device_type == kDLCPU;
    if (rt->options.device_type != kDLCUDA && !host)
        status = te_fail(TE_UNSUPPORTED, op, "kDLCUDA, and kDLCPU for layers", "correct device_type", "device type %d",
                         (int)rt->options.device_type);
    else if ((rt->options.alloc == NULL) != (rt->options.free == NULL))
        status = te_fail(TE_ARGUMENT, op, "alloc and free, or neither", "set both", "one of alloc and free");
    if (status == TE_OK && !host) status = te_doors_open(&rt->doors, rt->options.libcuda);
    if (status == TE_OK && !host) status = open_device(rt);
    if (status == TE_OK && !host) status = make_pool(rt);
    if (status == TE_OK && !host && rt->options.libcublaslt != NULL) { /* the text need not live longer */
        status = te_doors_open_lt(&rt->doors, rt->options.libcublaslt);
        rt->options.libcublaslt = NULL;
    }
    if (status == TE_OK && !host && rt->options.libcudnn != NULL) {
        status = te_doors_open_cudnn(&rt->doors, rt->options.libcudnn);
        rt->options.libcudnn = NULL;
    }
    if (status == TE_OK)
        *runtime = rt;
    else
        te_runtime_destroy(rt);
    return status;
}

static void free_lanes(te_runtime *rt, te_lane *lane) {
    while (lane != NULL) {
        te_lane *next = lane->next;
        for (uint32_t i = 0; i < lane->scratch_count; i++)
            if (lane->scratch[i].address != NULL) te_give(rt, lane->scratch[i].address, lane->stream);
        if (lane->made) (void)rt->doors.cuStreamDestroy_v2(lane->stream);
        free(lane->scratch);
        free(lane);
        lane = next;
    }
}

void te_runtime_destroy(te_runtime *rt) {
    bool entered = false;
    if (rt == NULL) return;
    te_layers_free(rt);
    while (rt->programs != NULL) te_program_free(rt->programs);
    const bool there = rt->context != NULL && te_enter(rt, &entered) == TE_OK;
    while (there && rt->outgrown != NULL) {
        te_outgrown *one = rt->outgrown;
        rt->outgrown = one->next;
        te_give(rt, one->address, one->stream);
        free(one);
    }
    while (rt->locals != NULL) {
        te_local *local = rt->locals;
        rt->locals = local->next;
        if (there) free_lanes(rt, local->lanes);
        if (there && local->event != NULL) (void)rt->doors.cuEventDestroy_v2(local->event);
        if (there && local->handle != NULL) (void)rt->doors.cublasLtDestroy(local->handle);
        if (there && local->cudnn != NULL) (void)rt->doors.cudnnDestroy(local->cudnn);
        free(local->bounds);
        free(local);
    }
    if (there && rt->pool != NULL) (void)rt->doors.cuMemPoolDestroy(rt->pool);
    if (there) te_leave(rt, entered);
    if (rt->context != NULL) (void)rt->doors.cuDevicePrimaryCtxRelease_v2(rt->options.device_id);
    for (uint32_t i = 0; i < rt->name_count; i++) free(rt->names[i]);
    free(rt->names);
    te_doors_close(&rt->doors);
    (void)pthread_mutex_destroy(&rt->lock);
    free(rt);
}

te_status te_enter(te_runtime *rt, bool *entered) {
    void *now = NULL;
    *entered = false;
    if (rt->options.device_type == kDLCPU) return TE_OK;
    int status = rt->doors.cuCtxGetCurrent(&now);
    if (!status && now == rt->context) return TE_OK;
    if (!status) status = rt->doors.cuCtxPushCurrent_v2(rt->context);
    if (status) return te_driver_failed(&rt->doors, "cuCtxPushCurrent", status);
    *entered = true;
    return TE_OK;
}

void te_leave(te_runtime *rt, bool entered) {
    void *was;
    if (entered) (void)rt->doors.cuCtxPopCurrent_v2(&was);
}

te_status te_synchronize(te_runtime *rt, void *stream) {
    bool entered;
    if (rt == NULL) return te_fail(TE_ARGUMENT, "te_synchronize", "a runtime", "pass one", "NULL");
    if (rt->options.device_type == kDLCPU) return TE_OK; /* its calls are done when they return */
    if (te_enter(rt, &entered) != TE_OK) return te_error()->status;
    const int status = rt->doors.cuStreamSynchronize(stream == NULL ? rt->options.stream : stream);
    te_leave(rt, entered);
    return status ? te_driver_failed(&rt->doors, "cuStreamSynchronize", status) : TE_OK;
}

/* ------------------------------------------------------------------------------------------- threads and streams */

te_status te_local_of(te_runtime *rt, te_local **local) {
    if (mine.serial == rt->serial) {
        *local = mine.local;
        return TE_OK;
    }
    (void)pthread_mutex_lock(&rt->lock);
    te_local *found = rt->locals;
    while (found != NULL && found->thread != &mine) found = found->next; /* a thread that ended leaves its own to the next */
    if (found == NULL && (found = calloc(1, sizeof *found)) != NULL) {
        found->thread = &mine;
        found->next = rt->locals;
        rt->locals = found;
    }
    (void)pthread_mutex_unlock(&rt->lock);
    if (found == NULL) return no_memory("a thread's first call", sizeof *found);
    mine.serial = rt->serial;
    mine.local = *local = found;
    return TE_OK;
}

te_status te_handle_of(te_runtime *rt, te_local *local) {
    int mode = RELAXED; /* a capture would refuse the allocations in it */
    if (local->handle != NULL) return TE_OK;
    (void)rt->doors.cuThreadExchangeStreamCaptureMode(&mode);
    const int status = rt->doors.cublasLtCreate(&local->handle);
    (void)rt->doors.cuThreadExchangeStreamCaptureMode(&mode);
    if (status) return te_fail(TE_LIBRARY, "cublasLtCreate", "status 0", "see cuBLAS's documentation", "status %d", status);
    return TE_OK;
}

te_status te_lane_of(te_local *local, void *stream, te_lane **lane) {
    te_lane *found = local->lanes;
    while (found != NULL && (found->stream != stream || found->made)) found = found->next;
    if (found == NULL) {
        if ((found = calloc(1, sizeof *found)) == NULL) return no_memory("a stream's first call", sizeof *found);
        found->stream = stream;
        found->next = local->lanes;
        local->lanes = found;
    }
    *lane = found;
    return TE_OK;
}

te_status te_lane_beside(te_runtime *rt, te_lane *lane, uint32_t name, te_lane **beside) {
    te_lane *found = lane->beside;
    while (found != NULL && found->name != name) found = found->sibling;
    if (found == NULL) {
        int mode = RELAXED;
        te_local *local;
        if (te_local_of(rt, &local) != TE_OK) return te_error()->status;
        if ((found = calloc(1, sizeof *found)) == NULL) return no_memory("a stream beside another", sizeof *found);
        (void)rt->doors.cuThreadExchangeStreamCaptureMode(&mode);
        const int status = rt->doors.cuStreamCreate(&found->stream, NON_BLOCKING);
        (void)rt->doors.cuThreadExchangeStreamCaptureMode(&mode);
        if (status) {
            free(found);
            return te_driver_failed(&rt->doors, "cuStreamCreate", status);
        }
        found->made = true;
        found->name = name;
        found->sibling = lane->beside;
        lane->beside = found;
        found->next = local->lanes;
        local->lanes = found;
    }
    *beside = found;
    return TE_OK;
}

te_status te_order(te_runtime *rt, te_local *local, void *producer, void *consumer) {
    if (producer == NULL) producer = (void *)1; /* the default stream's handle, by which the two can be compared */
    if (consumer == NULL) consumer = (void *)1;
    if (producer == consumer) return TE_OK;
    int status = local->event == NULL ? rt->doors.cuEventCreate(&local->event, NO_TIMING) : 0;
    if (status) return te_driver_failed(&rt->doors, "cuEventCreate", status);
    if ((status = rt->doors.cuEventRecord(local->event, producer)))
        return te_driver_failed(&rt->doors, "cuEventRecord", status);
    if ((status = rt->doors.cuStreamWaitEvent(consumer, local->event, 0)))
        return te_driver_failed(&rt->doors, "cuStreamWaitEvent", status);
    return TE_OK;
}

/* --------------------------------------------------------------------------------------------------------- memory */

te_status te_take(te_runtime *rt, size_t bytes, size_t alignment, void *stream, void **address) {
    const te_runtime_options *o = &rt->options;
    void *found = NULL;
    if (bytes == 0) bytes = 1;
    if (o->alloc != NULL) {
        found = o->alloc(bytes, alignment, stream, o->user);
        if (found == NULL)
            return te_fail(TE_MEMORY, "alloc", "memory", "give the runtime's alloc more", "NULL for %zu bytes", bytes);
        if ((uintptr_t)found & (alignment - 1)) {
            o->free(found, stream, o->user);
            return te_fail(TE_MEMORY, "alloc", "multiples of the alignment", "correct the runtime's alloc",
                           "%p for an alignment of %zu", found, alignment);
        }
    } else if (o->device_type == kDLCPU) {
        if (posix_memalign(&found, 256, bytes) != 0) return no_memory("alloc", bytes);
    } else {
        uint64_t got = 0;
        int mode = RELAXED;
        (void)rt->doors.cuThreadExchangeStreamCaptureMode(&mode);
        const int status = rt->pool != NULL ? rt->doors.cuMemAllocFromPoolAsync(&got, bytes, rt->pool, stream)
                                            : rt->doors.cuMemAlloc_v2(&got, bytes);
        (void)rt->doors.cuThreadExchangeStreamCaptureMode(&mode);
        if (status) return te_driver_failed(&rt->doors, "allocate memory", status);
        found = (void *)(uintptr_t)got;
    }
    *address = found;
    return TE_OK;
}

void te_give(te_runtime *rt, void *address, void *stream) {
    int mode = RELAXED;
    if (rt->options.free != NULL) {
        rt->options.free(address, stream, rt->options.user);
        return;
    }
    if (rt->options.device_type == kDLCPU) {
        free(address);
        return;
    }
    (void)rt->doors.cuThreadExchangeStreamCaptureMode(&mode);
    if (rt->pool != NULL)
        (void)rt->doors.cuMemFreeAsync((uint64_t)(uintptr_t)address, stream);
    else
        (void)rt->doors.cuMemFree_v2((uint64_t)(uintptr_t)address);
    (void)rt->doors.cuThreadExchangeStreamCaptureMode(&mode);
}

te_status te_output_free(te_runtime *rt, void *address, void *stream) {
    bool entered;
    if (rt == NULL) return te_fail(TE_ARGUMENT, "te_output_free", "a runtime", "pass one", "NULL");
    if (address == NULL) return TE_OK;
    if (te_enter(rt, &entered) != TE_OK) return te_error()->status;
    te_give(rt, address, stream == NULL ? rt->options.stream : stream);
    te_leave(rt, entered);
    return TE_OK;
}

te_status te_scratch_of(te_runtime *rt, te_lane *lane, uint32_t name, size_t bytes, bool zeroed, void **address) {
    if (name >= lane->scratch_count) {
        te_scratch *more = realloc(lane->scratch, (name + 1) * sizeof *more);
        if (more == NULL) return no_memory("scratch memory", (name + 1) * sizeof *more);
        memset(more + lane->scratch_count, 0, (name + 1 - lane->scratch_count) * sizeof *more);
        lane->scratch = more;
        lane->scratch_count = name + 1;
    }
    te_scratch *s = &lane->scratch[name];
    if (s->address == NULL || s->bytes < bytes) {
        size_t size = bytes < 1 << 16 ? 1 << 16 : bytes;
        te_outgrown *old = NULL;
        void *made;
        if (s->address != NULL) {
            if (size < 2 * s->bytes) size = 2 * s->bytes;
            if ((old = malloc(sizeof *old)) == NULL) return no_memory("scratch memory", sizeof *old);
        }
        te_status status = te_take(rt, size, 256, lane->stream, &made);
        if (status == TE_OK && zeroed) {
            const int failed = rt->doors.cuMemsetD8Async((uint64_t)(uintptr_t)made, 0, size, lane->stream);
            if (failed) {
                te_give(rt, made, lane->stream);
                status = te_driver_failed(&rt->doors, "cuMemsetD8Async", failed);
            }
        }
        if (status != TE_OK) {
            free(old);
            return status;
        }
        if (old != NULL) {
            (void)pthread_mutex_lock(&rt->lock);
            *old = (te_outgrown){rt->outgrown, s->address, lane->stream};
            rt->outgrown = old;
            (void)pthread_mutex_unlock(&rt->lock);
        }
        *s = (te_scratch){made, size};
    }
    *address = s->address;
    return TE_OK;
}

te_status te_name_of(te_runtime *rt, const char *text, uint32_t length, uint32_t *number) {
    te_status status = TE_OK;
    uint32_t i = 0;
    (void)pthread_mutex_lock(&rt->lock);
    while (i < rt->name_count && (strlen(rt->names[i]) != length || memcmp(rt->names[i], text, length) != 0)) i++;
    if (i == rt->name_count) {
        char **more = realloc(rt->names, (i + 1) * sizeof *more), *name = malloc((size_t)length + 1);
        if (more != NULL) rt->names = more;
        if (more == NULL || name == NULL) {
            free(name);
            status = no_memory("a name", length);
        } else {
            memcpy(name, text, length);
            name[length] = '\0';
            rt->names[rt->name_count++] = name;
        }
    }
    (void)pthread_mutex_unlock(&rt->lock);
    *number = i;
    return status;
}
