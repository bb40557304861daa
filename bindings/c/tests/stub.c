/* A CUDA driver, a cuBLASLt and a cuDNN that are not there: found by dlopen in the place of the real ones, they note each call in a
 * log of lines and compute nothing. */
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STUB __attribute__((visibility("default")))

typedef struct {
    char name[64];
    uint64_t image;   /* 0: of any module */
    char letters[72]; /* of the arguments; "b123": a struct of so many bytes */
} hint;

typedef struct {
    char name[64];
    unsigned char image[32];
    size_t bytes;
    int shared;
} function;

typedef struct {
    int compute, scale, count;
    int attribute[24];
    uint64_t value[24];
} descriptor;

typedef struct {
    uint64_t dtype, rows, columns;
    int64_t ld;
} layout;

static char *text;
static size_t used, room;
static hint hints[4096];
static int hint_count, muted = 1, devices = 1, major = 9, minor = 0, alive;
static size_t version = 130100, cudnn_version = 91900;
static char failing[64];
static int fails_at, fails_with, refuses_algorithms;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local void *context;
static _Thread_local int depth;

/* --------------------------------------------------------------------------------------------- what tests ask for */

__attribute__((format(printf, 1, 2))) static void note(const char *format, ...) {
    va_list more;
    if (muted) return;
    (void)pthread_mutex_lock(&lock);
    if (room < used + 65536) {
        room = 2 * room + 131072;
        text = realloc(text, room);
    }
    va_start(more, format);
    used += (size_t)vsnprintf(text + used, 65536, format, more);
    va_end(more);
    (void)pthread_mutex_unlock(&lock);
}

STUB const char *stub_log(void) { return text == NULL ? "" : text; }
STUB void stub_clear(void) {
    used = 0;
    if (text != NULL) text[0] = '\0';
}
STUB void stub_mute(int on) { muted = on; }
STUB int stub_alive(void) { return alive; } /* what was made, and not destroyed */
STUB void stub_arguments(const char *name, uint64_t image, const char *letters) {
    int i = 0;
    while (i < hint_count && (strcmp(hints[i].name, name) != 0 || hints[i].image != image)) i++;
    if (i == 4096) return;
    hints[i].image = image;
    (void)snprintf(hints[i].name, sizeof hints[i].name, "%s", name);
    (void)snprintf(hints[i].letters, sizeof hints[i].letters, "%s", letters);
    if (i == hint_count) hint_count++;
}
STUB void stub_device(int count, int more, int less) {
    devices = count;
    major = more;
    minor = less;
}
STUB void stub_lt_version(size_t number, int refuses) {
    version = number;
    refuses_algorithms = refuses;
}
STUB void stub_cudnn_version(size_t number) { cudnn_version = number; }
/* The nth call of the function fails with a status; no call: NULL. */
STUB void stub_fail(const char *name, int nth, int status) {
    (void)snprintf(failing, sizeof failing, "%s", name == NULL ? "" : name);
    fails_at = nth;
    fails_with = status;
}
STUB void stub_note(const char *line) { note("%s\n", line); }
STUB void *stub_context(void) { return context; }

static int fails(const char *name) {
    if (!failing[0] || strcmp(failing, name) != 0 || --fails_at != 0) return 0;
    return fails_with;
}
#define MAY_FAIL()                                                                                                     \
    do {                                                                                                               \
        const int failed_ = fails(__func__);                                                                           \
        if (failed_) return failed_;                                                                                   \
    } while (0)

static void *made(size_t bytes) {
    (void)pthread_mutex_lock(&lock);
    alive++;
    (void)pthread_mutex_unlock(&lock);
    return calloc(1, bytes);
}
static void gone(void *what) {
    (void)pthread_mutex_lock(&lock);
    alive--;
    (void)pthread_mutex_unlock(&lock);
    free(what);
}

/* Memory of a host's that costs nothing. */
STUB void *stub_take(size_t bytes, size_t alignment, void *stream, void *user) {
    (void)bytes, (void)alignment, (void)stream;
    return user;
}
STUB void stub_drop(void *address, void *stream, void *user) { (void)address, (void)stream, (void)user; }

/* ------------------------------------------------------------------------------------------------------ the driver */

STUB int cuInit(unsigned flags) {
    MAY_FAIL();
    return flags ? 1 : 0;
}
STUB int cuGetErrorName(int status, const char **name) {
    (void)status;
    *name = "CUDA_ERROR_STUB";
    return 0;
}
STUB int cuGetErrorString(int status, const char **name) {
    (void)status;
    *name = "a stub was told to fail";
    return 0;
}
STUB int cuDeviceGetCount(int *count) {
    MAY_FAIL();
    *count = devices;
    return 0;
}
STUB int cuDeviceGetAttribute(int *value, int number, int device) {
    MAY_FAIL();
    *value = number == 75 ? major : number == 76 ? minor : 1;
    return device >= devices;
}
STUB int cuDevicePrimaryCtxRetain(void **out, int device) {
    MAY_FAIL();
    *out = (void *)(uintptr_t)(1000 + device);
    return 0;
}
STUB int cuDevicePrimaryCtxRelease_v2(int device) { return device >= devices; }
STUB int cuCtxGetCurrent(void **out) {
    *out = context;
    return 0;
}
STUB int cuCtxPushCurrent_v2(void *pushed) {
    MAY_FAIL();
    context = pushed;
    depth++;
    return 0;
}
STUB int cuCtxPopCurrent_v2(void **out) {
    *out = context;
    context = NULL;
    depth--;
    return 0;
}
STUB int cuMemPoolCreate(void **pool, const void *properties) {
    (void)properties;
    MAY_FAIL();
    *pool = made(1);
    return 0;
}
STUB int cuMemPoolDestroy(void *pool) {
    gone(pool);
    return 0;
}
STUB int cuMemPoolSetAttribute(void *pool, int number, void *value) {
    (void)pool;
    (void)value;
    return number != 4;
}
STUB int cuMemAllocFromPoolAsync(uint64_t *out, size_t bytes, void *pool, void *stream) {
    (void)pool;
    (void)stream;
    MAY_FAIL();
    if (bytes > (size_t)1 << 40) return 2;
    char *block = made(bytes + 1024);
    *out = ((uint64_t)(uintptr_t)block + 512) & ~UINT64_C(255);
    memcpy((void *)(uintptr_t)(*out - sizeof block), &block, sizeof block);
    note("alloc %zu stream %p\n", bytes, stream);
    return 0;
}
STUB int cuMemFreeAsync(uint64_t address, void *stream) {
    void *block;
    note("free %#llx stream %p\n", (unsigned long long)address, stream);
    memcpy(&block, (void *)(uintptr_t)(address - sizeof block), sizeof block);
    gone(block);
    return 0;
}
STUB int cuMemAlloc_v2(uint64_t *out, size_t bytes) { return cuMemAllocFromPoolAsync(out, bytes, NULL, NULL); }
STUB int cuMemFree_v2(uint64_t address) { return cuMemFreeAsync(address, NULL); }
STUB int cuMemcpyHtoD_v2(uint64_t to, const void *host, size_t bytes) {
    (void)to;
    (void)host;
    note("to device %zu\n", bytes);
    return 0;
}
STUB int cuMemcpyDtoH_v2(void *host, uint64_t from, size_t bytes) {
    (void)from;
    memset(host, 0x5a, bytes);
    return 0;
}
STUB int cuCtxSetCurrent(void *set) {
    context = set;
    return 0;
}
STUB int cuMemsetD8Async(uint64_t address, unsigned char value, size_t bytes, void *stream) {
    MAY_FAIL();
    note("fill %#llx %d %zu stream %p\n", (unsigned long long)address, value, bytes, stream);
    return 0;
}
STUB int cuMemcpyHtoDAsync_v2(uint64_t address, const void *host, size_t bytes, void *stream) {
    char line[1024] = "";
    MAY_FAIL();
    for (size_t i = 0, at = 0; i < bytes && at + 3 < sizeof line; i++)
        at += (size_t)snprintf(line + at, sizeof line - at, "%02x", ((const unsigned char *)host)[i]);
    note("copy %#llx %zu %s stream %p\n", (unsigned long long)address, bytes, line, stream);
    return 0;
}
STUB int cuStreamSynchronize(void *stream) {
    MAY_FAIL();
    note("synchronize %p\n", stream);
    return 0;
}
STUB int cuStreamCreate(void **out, unsigned flags) {
    (void)flags;
    MAY_FAIL();
    *out = made(1);
    return 0;
}
STUB int cuStreamDestroy_v2(void *stream) {
    gone(stream);
    return 0;
}
STUB int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    (void)event;
    (void)flags;
    MAY_FAIL();
    note("wait stream %p\n", stream);
    return 0;
}
STUB int cuEventCreate(void **out, unsigned flags) {
    (void)flags;
    MAY_FAIL();
    *out = made(1);
    return 0;
}
STUB int cuEventDestroy_v2(void *event) {
    gone(event);
    return 0;
}
STUB int cuEventRecord(void *event, void *stream) {
    (void)event;
    MAY_FAIL();
    note("record stream %p\n", stream);
    return 0;
}
STUB int cuThreadExchangeStreamCaptureMode(int *mode) {
    (void)mode;
    return 0;
}

/* A module is a text; of a function the text's beginning and length are noted. */
STUB int cuModuleLoadData(void **out, const void *image) {
    MAY_FAIL();
    const size_t bytes = strlen(image);
    char *copy = made(bytes + 1);
    memcpy(copy, image, bytes + 1);
    *out = copy;
    return 0;
}
STUB int cuModuleUnload(void *module) {
    gone(module);
    return 0;
}
static uint64_t digest_of(const char *image) {
    uint64_t digest = 14695981039346656037U;
    for (; *image; image++) digest = (digest ^ (unsigned char)*image) * 1099511628211U;
    return digest;
}
STUB int cuModuleGetFunction(void **out, void *module, const char *name) {
    static function functions[8192];
    static int count;
    MAY_FAIL();
    const uint64_t digest = digest_of(module);
    int found = 0;
    (void)pthread_mutex_lock(&lock);
    while (found < count && (memcmp(functions[found].image, &digest, 8) != 0 || strcmp(functions[found].name, name) != 0))
        found++;
    if (found == count && count < 8191) {
        (void)snprintf(functions[found].name, sizeof functions[found].name, "%s", name);
        memcpy(functions[found].image, &digest, 8);
        count++;
    }
    (void)pthread_mutex_unlock(&lock);
    *out = &functions[found];
    return 0;
}
STUB int cuFuncGetAttribute(int *value, int number, void *what) {
    (void)what;
    MAY_FAIL();
    *value = number == 1 ? 0 : 64;
    return 0;
}
STUB int cuFuncSetAttribute(void *what, int number, int value) {
    function *f = what;
    MAY_FAIL();
    f->shared = value;
    return number != 8;
}
STUB int cuLaunchKernel(void *what, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, void *stream, void **arguments, void **extra) {
    const function *f = what;
    char line[32768];
    size_t at = 0;
    uint64_t digest;
    MAY_FAIL();
    if (muted) return 0;
    memcpy(&digest, f->image, 8);
    const char *letters = NULL;
    for (int i = 0; i < hint_count; i++)
        if (strcmp(hints[i].name, f->name) == 0 && (!hints[i].image || hints[i].image == digest)) letters = hints[i].letters;
    if (extra != NULL || letters == NULL || (shared > 48 * 1024 && f->shared < (int)shared)) return 1;
    line[0] = '\0';
    if (letters[0] == 'b') {
        const size_t bytes = strtoul(letters + 1, NULL, 10);
        const unsigned char *table = arguments[0];
        for (size_t i = 0; i < bytes; i++) at += (size_t)snprintf(line + at, sizeof line - at, "%02x", table[i]);
    } else {
        for (size_t i = 0; letters[i]; i++) {
            uint64_t value;
            memcpy(&value, arguments[i], 8);
            if (letters[i] == 'i' || letters[i] == 'f') value &= UINT32_MAX;
            at += (size_t)snprintf(line + at, sizeof line - at, " %#llx", (unsigned long long)value);
        }
    }
    note("launch %s %016llx %u %u %u %u %u %u %u stream %p:%s\n", f->name, (unsigned long long)digest, gx, gy, gz, bx, by,
         bz, shared, stream, line);
    return 0;
}

/* -------------------------------------------------------------------------------------------------------- cuBLASLt */

STUB size_t cublasLtGetVersion(void) { return version; }
STUB int cublasLtCreate(void **out) {
    MAY_FAIL();
    *out = made(1);
    return 0;
}
STUB int cublasLtDestroy(void *handle) {
    gone(handle);
    return 0;
}
STUB int cublasLtMatmulDescCreate(void **out, int compute, int scale) {
    MAY_FAIL();
    descriptor *d = made(sizeof *d);
    d->compute = compute;
    d->scale = scale;
    *out = d;
    return 0;
}
STUB int cublasLtMatmulDescDestroy(void *what) {
    gone(what);
    return 0;
}
STUB int cublasLtMatmulDescSetAttribute(void *what, int attribute, const void *value, size_t bytes) {
    descriptor *d = what;
    int i = 0;
    uint64_t number = 0;
    MAY_FAIL();
    if (bytes > 8) return 7;
    memcpy(&number, value, bytes);
    while (i < d->count && d->attribute[i] < attribute) i++;
    if (i == d->count || d->attribute[i] != attribute) {
        if (d->count == 24) return 7;
        memmove(d->attribute + i + 1, d->attribute + i, (size_t)(d->count - i) * sizeof *d->attribute);
        memmove(d->value + i + 1, d->value + i, (size_t)(d->count - i) * sizeof *d->value);
        d->count++;
    }
    d->attribute[i] = attribute;
    d->value[i] = number;
    return 0;
}
STUB int cublasLtMatrixLayoutCreate(void **out, int dtype, uint64_t rows, uint64_t columns, int64_t ld) {
    MAY_FAIL();
    layout *l = made(sizeof *l);
    *l = (layout){(uint64_t)dtype, rows, columns, ld};
    *out = l;
    return 0;
}
STUB int cublasLtMatrixLayoutDestroy(void *what) {
    gone(what);
    return 0;
}
STUB int cublasLtMatmulPreferenceCreate(void **out) {
    *out = made(1);
    return 0;
}
STUB int cublasLtMatmulPreferenceDestroy(void *what) {
    gone(what);
    return 0;
}
STUB int cublasLtMatmulPreferenceSetAttribute(void *what, int attribute, const void *value, size_t bytes) {
    (void)what;
    (void)value;
    return attribute != 1 || bytes != 8;
}
STUB int cublasLtMatmulAlgoCheck(void *handle, void *desc, void *a, void *b, void *c, void *d, const void *algorithm,
                                 void *result) {
    const size_t workspace = 16;
    (void)handle, (void)desc, (void)a, (void)b, (void)c, (void)d;
    note("check\n");
    memcpy(result, algorithm, 64);
    memcpy((char *)result + 64, &workspace, sizeof workspace);
    return refuses_algorithms ? 15 : 0;
}
STUB int cublasLtMatmulAlgoGetHeuristic(void *handle, void *desc, void *a, void *b, void *c, void *d, void *preference,
                                        int wanted, void *results, int *count) {
    (void)handle, (void)desc, (void)a, (void)b, (void)c, (void)d, (void)preference;
    MAY_FAIL();
    note("heuristic\n");
    memset(results, 0, 96 * (size_t)wanted);
    memset(results, 0xa5, 64);
    *count = refuses_algorithms == 2 ? 0 : wanted;
    return 0;
}
static size_t layout_in_words(char *line, size_t size, const void *what) {
    const layout *l = what;
    return (size_t)snprintf(line, size, " (%llu %llu %llu %lld)", (unsigned long long)l->dtype, (unsigned long long)l->rows,
                            (unsigned long long)l->columns, (long long)l->ld);
}
STUB int cublasLtMatmul(void *handle, void *desc, const void *alpha, const void *a, void *al, const void *b, void *bl,
                        const void *beta, const void *c, void *cl, void *d, void *dl, const void *algorithm, void *workspace,
                        size_t bytes, void *stream) {
    const descriptor *known = desc;
    const unsigned char *algo = algorithm;
    char line[4096];
    size_t at = 0;
    int on_device = 0;
    (void)handle;
    MAY_FAIL();
    if (muted) return 0;
    for (int i = 0; i < known->count; i++) {
        at += (size_t)snprintf(line + at, sizeof line - at, " %d=%#llx", known->attribute[i],
                               (unsigned long long)known->value[i]);
        if (known->attribute[i] == 2 && known->value[i] == 1) on_device = 1;
    }
    void *const layouts[4] = {al, bl, cl, dl};
    for (int i = 0; i < 4; i++) at += layout_in_words(line + at, sizeof line - at, layouts[i]);
    if (on_device)
        at += (size_t)snprintf(line + at, sizeof line - at, " alpha %#llx %#llx", (unsigned long long)(uintptr_t)alpha,
                               (unsigned long long)(uintptr_t)beta);
    else
        at += (size_t)snprintf(line + at, sizeof line - at, " alpha %g %g", (double)*(const float *)alpha,
                               (double)*(const float *)beta);
    at += (size_t)snprintf(line + at, sizeof line - at, " algorithm ");
    for (int i = 0; i < 64; i++) at += (size_t)snprintf(line + at, sizeof line - at, "%02x", algo[i]);
    note("gemm %d %d%s: %#llx %#llx %#llx %#llx workspace %#llx %zu stream %p\n", known->compute, known->scale, line,
         (unsigned long long)(uintptr_t)a, (unsigned long long)(uintptr_t)b, (unsigned long long)(uintptr_t)c,
         (unsigned long long)(uintptr_t)d, (unsigned long long)(uintptr_t)workspace, bytes, stream);
    return 0;
}

/* ----------------------------------------------------------------------------------------------------------- cuDNN */

/* A plan is a text with "workspace": BYTES in it; tensors of the numbers from FIRST to LAST are passed by value. */
enum { PLAN = 5, PACK = 16, MOST = 64, FIRST_VALUE = 9000, LAST_VALUE = 9099 };

typedef struct {
    int kind, finished;
    char *plan;
    void *handle, *workspace, *pointers[MOST];
    int64_t ids[MOST], count, id_count;
} backend;

STUB size_t cudnnGetVersion(void) { return cudnn_version; }
STUB void cudnnGetLastErrorString(char *place, size_t size) { (void)snprintf(place, size, "a stub was told to fail"); }
STUB int cudnnCreate(void **out) {
    MAY_FAIL();
    *out = made(sizeof(void *));
    return 0;
}
STUB int cudnnDestroy(void *handle) {
    gone(handle);
    return 0;
}
STUB int cudnnSetStream(void *handle, void *stream) {
    MAY_FAIL();
    memcpy(handle, &stream, sizeof stream);
    return 0;
}
STUB int cudnnBackendCreateDescriptor(int kind, void **out) {
    MAY_FAIL();
    backend *b = made(sizeof *b);
    b->kind = kind;
    *out = b;
    return kind != PLAN && kind != PACK;
}
STUB int cudnnBackendDestroyDescriptor(void *what) {
    free(((backend *)what)->plan);
    gone(what);
    return 0;
}
STUB int cudnnBackendSetAttribute(void *what, int name, int type, int64_t count, const void *value) {
    backend *b = what;
    MAY_FAIL();
    if (b->finished) return 2000;
    if (name == 400 && type == 0 && count == 1) {
        memcpy(&b->handle, value, sizeof b->handle);
    } else if (name == 405 && type == 24 && b->plan == NULL) {
        b->plan = calloc(1, (size_t)count + 1);
        memcpy(b->plan, value, (size_t)count);
    } else if (name == 1000 && type == 3 && count <= MOST) {
        memcpy(b->ids, value, 8 * (size_t)count);
        b->id_count = count;
    } else if (name == 1001 && type == 6 && count <= MOST) {
        memcpy(b->pointers, value, 8 * (size_t)count);
        b->count = count;
    } else if (name == 1003 && type == 6 && count == 1) {
        memcpy(&b->workspace, value, sizeof b->workspace);
    } else {
        return 2000;
    }
    return 0;
}
STUB int cudnnBackendGetAttribute(void *what, int name, int type, int64_t room_, int64_t *count, void *value) {
    const backend *b = what;
    MAY_FAIL();
    if (!b->finished || name != 402 || type != 3 || room_ != 1) return 2000;
    const char *found = strstr(b->plan, "\"workspace\": ");
    const int64_t bytes = found == NULL ? 0 : strtoll(found + 13, NULL, 10);
    memcpy(value, &bytes, sizeof bytes);
    *count = 1;
    return 0;
}
STUB int cudnnBackendFinalize(void *what) {
    backend *b = what;
    MAY_FAIL();
    if (b->kind == PLAN && (b->handle == NULL || b->plan == NULL || b->plan[0] != '{')) return 2000;
    if (b->kind == PACK && b->count != b->id_count) return 2000;
    b->finished = 1;
    return 0;
}
STUB int cudnnBackendExecute(void *handle, void *what, void *with) {
    const backend *plan = what, *pack = with;
    char line[4096];
    size_t at = 0;
    void *stream;
    MAY_FAIL();
    if (!plan->finished || plan->kind != PLAN || !pack->finished || pack->kind != PACK) return 2000;
    if (muted) return 0;
    memcpy(&stream, handle, sizeof stream);
    for (int64_t i = 0; i < pack->count; i++) {
        uint64_t value = (uint64_t)(uintptr_t)pack->pointers[i];
        const int64_t id = pack->ids[i];
        if (id >= FIRST_VALUE && id <= LAST_VALUE) memcpy(&value, pack->pointers[i], sizeof value);
        at += (size_t)snprintf(line + at, sizeof line - at, " %lld=%#llx", (long long)id, (unsigned long long)value);
    }
    note("attend %016llx%s workspace %p stream %p\n", (unsigned long long)digest_of(plan->plan), line, pack->workspace,
         stream);
    return 0;
}
