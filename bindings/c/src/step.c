/* Steps that run something: a launch, a product, a fill. The player does those of a program; te_core's own loop in Python
 * hands over stretches of them, with memory, streams and descriptors that stay Python's. */
#include <string.h>

#include "internal.h"

static const float ONE = 1.0F, ZERO = 0.0F;

/* Set the attributes that say where scales and a bias are. */
static int point(const te_calls *calls, te_product *product, const uint64_t *pointers) {
    const bool set = product->set != 0;
    if (set && memcmp(pointers, product->last, 8 * (size_t)product->pointer_count) == 0) return 0;
    product->set = 0; /* until all are set */
    for (uint32_t i = 0; i < product->pointer_count; i++) {
        if (set && pointers[i] == product->last[i]) continue; /* a bias stays where it is while scales move */
        const int status =
            calls->cublasLtMatmulDescSetAttribute(product->desc, product->attributes[i], &pointers[i], 8);
        if (status) return status;
        product->last[i] = pointers[i];
    }
    product->set = 1;
    return 0;
}

static int multiply(const te_calls *calls, te_product *product, const uint64_t *words, void *stream) {
    const int status = product->pointer_count ? point(calls, product, words + 5) : 0;
    if (status) return status;
    const void *alpha = &ONE, *beta = product->flags & P_ADDS ? &ONE : &ZERO;
    if (product->flags & P_DEVICE_ALPHA) {
        alpha = (const void *)(uintptr_t)words[4];
        beta = (const void *)(uintptr_t)(words[4] + 4);
    }
    void *const out = (void *)(uintptr_t)words[3];
    return calls->cublasLtMatmul(product->handle, product->desc, alpha, (const void *)(uintptr_t)words[2],
                                 product->layouts[0], (const void *)(uintptr_t)words[1], product->layouts[1], beta, out,
                                 product->layouts[2], out, product->layouts[2], product->algorithm,
                                 (void *)(uintptr_t)words[0], product->workspace, stream);
}

int te_step_do(const te_calls *calls, const te_op *op, const uint64_t *at, void *stream) {
    uint64_t *const words = op->words;
    for (uint32_t i = 0; i < op->patch_count; i++) {
        const f_patch *patch = &op->patches[i];
        words[op->kind == K_TABLE ? SIZES + patch->number / 8 : patch->number] = at[patch->slot] + patch->offset;
    }
    const unsigned *n = op->sizes;
    if (op->kind == K_PRODUCT) return multiply(calls, op->what, words, stream);
    if (op->kind == K_FILL) return calls->cuMemsetD8Async(words[2], (unsigned char)words[0], (size_t)words[1], stream);
    return calls->cuLaunchKernel(op->what, n[0], n[1], n[2], n[3], n[4], n[5], n[6], stream, op->pointers, NULL);
}

int te_stretch_play(te_stretch *stretch, const uint64_t *at) {
    if (stretch->sizes != STRETCH_SIZES) return -1;
    for (uint64_t i = 0; i < stretch->count; i++) {
        const te_op *op = &stretch->ops[i];
        const int status = te_step_do(&stretch->calls, op, at, (void *)(uintptr_t)at[op->way]);
        if (status) {
            stretch->failed = i;
            return status;
        }
    }
    return 0;
}
