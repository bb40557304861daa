/* Products: descriptors of cuBLASLt, and what happens where its version is another one than the file's. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

enum { PREFERENCE_WORKSPACE = 1 };

static te_status failed(const char *call, int status) {
    return te_fail(status == 3 ? TE_MEMORY : TE_LIBRARY, call, "status 0",
                   "check that every tensor is alive and on the runtime's device", "status %d", status);
}

te_status te_product_make(te_program *p, void *handle, uint32_t number, te_product *made) {
    const te_doors *d = &p->runtime->doors;
    const f_product *f = &p->file.products[number];
    int status = d->cublasLtMatmulDescCreate(&made->desc, (int)f->compute, (int)f->scale);
    if (status) return failed("cublasLtMatmulDescCreate", status);
    for (int i = 0; i < 3; i++) {
        const f_layout *l = &f->layouts[i];
        status = d->cublasLtMatrixLayoutCreate(&made->layouts[i], (int)l->dtype, l->rows, l->columns, l->ld);
        if (status) return failed("cublasLtMatrixLayoutCreate", status);
    }
    for (uint32_t i = 0; i < f->attribute_count + f->pointer_count; i++) { /* pointers follow the attributes */
        const f_attribute *a = &p->file.attributes[f->attributes + i];
        status = d->cublasLtMatmulDescSetAttribute(made->desc, (int)a->attribute, &a->value, a->bytes);
        if (status) return failed("cublasLtMatmulDescSetAttribute", status);
    }
    made->handle = handle;
    made->algorithm = p->algorithms + (size_t)ALGORITHM * number;
    made->workspace = p->workspaces[number];
    made->flags = f->flags;
    made->pointer_count = f->pointer_count;
    for (uint32_t i = 0; i < f->pointer_count; i++)
        made->attributes[i] = (int)p->file.attributes[f->pointers + i].attribute;
    made->set = 0;
    return TE_OK;
}

void te_product_free(const te_doors *d, te_product *made) {
    for (int i = 0; i < 3; i++)
        if (made->layouts[i] != NULL) (void)d->cublasLtMatrixLayoutDestroy(made->layouts[i]);
    if (made->desc != NULL) (void)d->cublasLtMatmulDescDestroy(made->desc);
    memset(made, 0, sizeof *made);
}

/* The least workspace that steps give the product. */
static size_t room_of(const te_file *file, uint32_t product) {
    uint64_t room = UINT64_MAX;
    for (uint64_t e = 0; e < file->count[T_ENTRIES]; e++) {
        const f_entry *entry = &file->entries[e];
        for (uint32_t i = 0; i < entry->step_count; i++) {
            const f_step *s = &file->steps[entry->steps + i];
            uint64_t here = 0;
            if (s->kind != K_PRODUCT || s->target != product) continue;
            for (uint32_t k = 0; k < s->patch_count; k++) {
                const f_patch *one = &file->patches[s->patches + k];
                if (one->number == 0) here = file->slots[entry->slots + one->slot].bytes - one->offset;
            }
            if (here < room) room = here;
        }
    }
    return room == UINT64_MAX ? 0 : (size_t)room;
}

/* The file's algorithm, if this version takes it; else the first that it offers. */
static te_status mend(te_program *p, te_local *local, uint32_t number, const char *versions) {
    const te_doors *d = &p->runtime->doors;
    const f_product *f = &p->file.products[number];
    const uint64_t room = room_of(&p->file, number);
    te_product made = {0};
    te_heuristic found = {0};
    void *preference = NULL;
    int count = 0;
    te_status status = te_product_make(p, local->handle, number, &made);
    if (status != TE_OK) goto done;
    void *const out = made.layouts[2];
    const int kept = d->cublasLtMatmulAlgoCheck(local->handle, made.desc, made.layouts[0], made.layouts[1], out, out,
                                                p->file.data + f->algorithm, &found);
    if (kept == 0 && found.workspace <= room) {
        p->workspaces[number] = found.workspace;
        goto done;
    }
    int refused = d->cublasLtMatmulPreferenceCreate(&preference);
    if (!refused)
        refused = d->cublasLtMatmulPreferenceSetAttribute(preference, PREFERENCE_WORKSPACE, &room, sizeof room);
    if (!refused)
        refused = d->cublasLtMatmulAlgoGetHeuristic(local->handle, made.desc, made.layouts[0], made.layouts[1], out, out,
                                                    preference, 1, &found, &count);
    if (refused || count < 1 || found.status || found.workspace > room) {
        status = te_fail(TE_STALE, "te_program_load", "a version of cuBLASLt that has an algorithm for each product",
                         "record the program again, or load the version that it was recorded for", "%s: %.*s", versions,
                         (int)(f->text.length < 150 ? f->text.length : 150), p->file.text + f->text.start);
    } else {
        memcpy(p->algorithms + ALGORITHM * number, found.algorithm, ALGORITHM);
        p->workspaces[number] = found.workspace;
    }
done:
    if (preference != NULL) (void)d->cublasLtMatmulPreferenceDestroy(preference);
    te_product_free(d, &made);
    return status;
}

te_status te_program_mend(te_program *p) {
    const te_file *file = &p->file;
    const char *asked = te_program_fact(p, "cublasLt");
    char have[32], versions[96];
    te_local *local;
    for (uint64_t i = 0; i < file->count[T_PRODUCTS]; i++) {
        memcpy(p->algorithms + ALGORITHM * i, file->data + file->products[i].algorithm, ALGORITHM);
        p->workspaces[i] = (size_t)file->products[i].workspace;
    }
    (void)snprintf(have, sizeof have, "%zu", p->runtime->doors.cublasLtGetVersion());
    if (asked != NULL && strcmp(asked, have) == 0) return TE_OK;
    (void)snprintf(versions, sizeof versions, "cuBLASLt %s, recorded for %.20s", have, asked == NULL ? "none" : asked);
    te_status status = te_local_of(p->runtime, &local);
    if (status == TE_OK) status = te_handle_of(p->runtime, local);
    for (uint32_t i = 0; status == TE_OK && i < file->count[T_PRODUCTS]; i++) status = mend(p, local, i, versions);
    return status;
}
