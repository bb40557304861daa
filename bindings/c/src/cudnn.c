/* Attention: plans of cuDNN's, as its frontend stores them, made and run by the functions of cuDNN's backend. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

/* cuDNN's numbers: kinds of descriptors, their attributes, types of attributes. */
enum { EXECUTION_PLAN = 5, VARIANT_PACK = 16 };
enum { PLAN_HANDLE = 400, PLAN_WORKSPACE = 402, PLAN_JSON = 405 };
enum { PACK_IDS = 1000, PACK_POINTERS = 1001, PACK_WORKSPACE = 1003 };
enum { HANDLE = 0, INT64 = 3, VOID_POINTER = 6, CHARACTER = 24 };
enum { RELAXED = 2, MOST_SAID = 256 };

static te_status failed(const te_doors *d, te_status status, const char *call, const char *to_do, int code) {
    char said[MOST_SAID] = "";
    d->cudnnGetLastErrorString(said, sizeof said);
    said[MOST_SAID - 1] = '\0';
    return te_fail(status, call, "status 0", to_do, "status %d: %s", code, said);
}

te_status te_cudnn_of(te_runtime *rt, te_local *local) {
    int mode = RELAXED; /* a capture would refuse the allocations in it */
    if (local->cudnn != NULL) return TE_OK;
    (void)rt->doors.cuThreadExchangeStreamCaptureMode(&mode);
    const int status = rt->doors.cudnnCreate(&local->cudnn);
    (void)rt->doors.cuThreadExchangeStreamCaptureMode(&mode);
    if (status) {
        local->cudnn = NULL;
        return failed(&rt->doors, TE_LIBRARY, "cudnnCreate", "see cuDNN's documentation", status);
    }
    local->cudnn_stream = NULL;
    return TE_OK;
}

/* A plan of the file's; it serves the handles of all threads. */
static te_status make(te_program *p, te_local *local, uint32_t number) {
    const te_doors *d = &p->runtime->doors;
    const f_plan *f = &p->file.plans[number];
    const f_module *content = &p->file.contents[f->content];
    const char *to_do = "record the program again, on this device";
    void **plan = &p->plans[number];
    int64_t count = 0, workspace = 0;
    int status = d->cudnnBackendCreateDescriptor(EXECUTION_PLAN, plan);
    if (!status) status = d->cudnnBackendSetAttribute(*plan, PLAN_HANDLE, HANDLE, 1, &local->cudnn);
    if (!status)
        status = d->cudnnBackendSetAttribute(*plan, PLAN_JSON, CHARACTER, (int64_t)content->bytes,
                                             p->file.data + content->start);
    if (!status) status = d->cudnnBackendFinalize(*plan);
    if (!status) status = d->cudnnBackendGetAttribute(*plan, PLAN_WORKSPACE, INT64, 1, &count, &workspace);
    if (status) return failed(d, TE_STALE, "load a plan of cuDNN", to_do, status);
    if (workspace > 0 && (uint64_t)workspace > f->workspace)
        return te_fail(TE_STALE, "load a plan of cuDNN", "the workspace that the file has", to_do, "%lld bytes for %llu",
                       (long long)workspace, (unsigned long long)f->workspace);
    return TE_OK;
}

te_status te_plans_make(te_program *p) {
    const char *asked = te_program_fact(p, "cudnn");
    char have[32];
    te_local *local;
    (void)snprintf(have, sizeof have, "%zu", p->runtime->doors.cudnnGetVersion());
    if (asked == NULL || strcmp(asked, have) != 0) /* cuDNN promises a plan to its own version only */
        return te_fail(TE_STALE, "te_program_load", "the version of cuDNN that the program was recorded for",
                       "record the program again, or name that version's libcudnn.so.9", "cuDNN %s, recorded for %.20s",
                       have, asked == NULL ? "none" : asked);
    te_status status = te_local_of(p->runtime, &local);
    if (status == TE_OK) status = te_cudnn_of(p->runtime, local);
    for (uint32_t i = 0; status == TE_OK && i < p->file.count[T_PLANS]; i++) status = make(p, local, i);
    return status;
}

void te_plans_free(te_program *p) {
    for (uint64_t i = 0; p->plans != NULL && i < p->file.count[T_PLANS]; i++)
        if (p->plans[i] != NULL) (void)p->runtime->doors.cudnnBackendDestroyDescriptor(p->plans[i]);
}

te_status te_attend(te_program *p, te_local *local, uint32_t number, void *workspace, void **pointers, void *stream) {
    const te_doors *d = &p->runtime->doors;
    const f_plan *f = &p->file.plans[number];
    const char *to_do = "check that every tensor is alive and on the device";
    void *pack = NULL;
    int status = 0;
    if (local->cudnn_stream != stream) {
        status = d->cudnnSetStream(local->cudnn, stream);
        local->cudnn_stream = status ? (void *)local : stream; /* no stream, so that it is set again */
    }
    if (!status) status = d->cudnnBackendCreateDescriptor(VARIANT_PACK, &pack);
    if (!status) status = d->cudnnBackendSetAttribute(pack, PACK_WORKSPACE, VOID_POINTER, 1, &workspace);
    if (!status) status = d->cudnnBackendSetAttribute(pack, PACK_POINTERS, VOID_POINTER, f->tensors, (const void *)pointers);
    if (!status) status = d->cudnnBackendSetAttribute(pack, PACK_IDS, INT64, f->tensors, p->file.numbers + f->numbers);
    if (!status) status = d->cudnnBackendFinalize(pack);
    if (!status) status = d->cudnnBackendExecute(local->cudnn, p->plans[number], pack);
    const te_status found = status ? failed(d, TE_LIBRARY, "cudnnBackendExecute", to_do, status) : TE_OK;
    if (pack != NULL) (void)d->cudnnBackendDestroyDescriptor(pack);
    return found;
}
