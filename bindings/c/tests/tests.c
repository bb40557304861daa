/* tests STUB FILE: the player on stubs of the driver and cuBLASLt. What each step asks for is compared with Python's replay
 * in tests/core/test_program_c.py; here is what the C API promises besides. */
#define _POSIX_C_SOURCE 200809L
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "broken.h"
#include "internal.h"

static const char *stub_path;
static unsigned char *whole;
static size_t whole_bytes;

static void (*stub_clear)(void);
static void (*stub_mute)(int);
static const char *(*stub_log)(void);
static int (*stub_alive)(void);
static void (*stub_arguments)(const char *, uint64_t, const char *);
static void (*stub_fail)(const char *, int, int);
static void (*stub_lt_version)(size_t, int);
static void (*stub_cudnn_version)(size_t);
static void (*stub_device)(int, int, int);
static void *(*stub_context)(void);

#define EXPECT(holds)                                                                                                  \
    do {                                                                                                               \
        if (!(holds)) {                                                                                                \
            fprintf(stderr, "%s:%d: not so: %s\n  te_error: %s\n", __FILE__, __LINE__, #holds, te_error()->message);  \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)
#define EXPECT_SAID(status_, text) expect_said(status_, text, __LINE__)

static void expect_said(te_status status, const char *text, int line) {
    const te_error_info *e = te_error();
    if (e->status == status && strstr(e->message, text) != NULL && e->operation[0] && e->got[0] && e->allowed[0] && e->to_do[0])
        return;
    fprintf(stderr, "line %d: wanted status %d and \"%s\", got %d and %s\n", line, status, text, e->status, e->message);
    exit(1);
}

/* ----------------------------------------------------------------------------------------- a host that has memory */

typedef struct {
    void *blocks[512], *streams[512];
    int count, most, calls, null_at, crooked_at, faults;
} arena;

static void *arena_alloc(size_t bytes, size_t alignment, void *stream, void *user) {
    arena *a = user;
    if (++a->calls == a->null_at) return NULL;
    char *made = aligned_alloc(4096, (bytes < 4096 ? 4096 : bytes + 4095) / 4096 * 4096);
    if (alignment > 4096 || a->count == 512) a->faults++;
    if (a->calls == a->crooked_at) made += alignment / 2;
    a->blocks[a->count] = made;
    a->streams[a->count++] = stream;
    if (a->count > a->most) a->most = a->count;
    return made;
}

static void arena_free(void *address, void *stream, void *user) {
    arena *a = user;
    for (int i = 0; i < a->count; i++)
        if (a->blocks[i] == address) {
            if (a->streams[i] != stream) a->faults++;
            a->count--;
            a->blocks[i] = a->blocks[a->count];
            a->streams[i] = a->streams[a->count];
            free((void *)((uintptr_t)address & ~(uintptr_t)4095));
            return;
        }
    a->faults++;
}

static te_runtime *runtime_with(arena *a) {
    te_runtime_options o = TE_RUNTIME_OPTIONS;
    te_runtime *rt;
    o.stream = (void *)5;
    o.libcuda = o.libcublaslt = o.libcudnn = stub_path;
    if (a != NULL) {
        o.alloc = arena_alloc;
        o.free = arena_free;
        o.user = a;
    }
    EXPECT(te_runtime_create(&o, &rt) == TE_OK);
    return rt;
}

static te_program *program_in(te_runtime *rt) {
    te_program *p;
    EXPECT(te_program_load_memory(rt, whole, whole_bytes, &p) == TE_OK);
    return p;
}

/* A call with right tensors. */
typedef struct {
    te_run run;
    DLTensor tensors[32], *pointers[32];
    int32_t inputs, outputs;
} call;

static call call_of(te_program *p, const char *name) {
    call c = {.run = TE_RUN};
    const te_slot *const *slots;
    EXPECT(te_program_find(p, name, &c.run.entry) == TE_OK);
    EXPECT(te_program_slots(p, c.run.entry, &slots, &c.inputs, &c.outputs) == TE_OK && c.inputs + c.outputs <= 32);
    for (int32_t i = 0; i < c.inputs + c.outputs; i++) {
        const te_slot *s = slots[i];
        void *data = (void *)(uintptr_t)(i < c.inputs ? 0x7f0000000000 + 65536 * i : 0);
        c.tensors[i] = (DLTensor){data, {kDLCUDA, 0}, s->ndim, s->dtype, (int64_t *)(uintptr_t)s->shape, NULL, 0};
    }
    return c;
}

static te_status played(te_program *p, call *c) {
    for (int32_t i = 0; i < 32; i++) c->pointers[i] = &c->tensors[i];
    c->run.inputs = c->inputs;
    c->run.outputs = c->outputs;
    c->run.input = c->pointers;
    c->run.output = c->pointers + c->inputs;
    return te_program_run(p, &c->run);
}

static void give_outputs(te_program *p, call *c) {
    for (int32_t i = c->inputs; i < c->inputs + c->outputs; i++) {
        EXPECT(c->tensors[i].data != NULL);
        EXPECT(te_output_free(p->runtime, c->tensors[i].data, NULL) == TE_OK);
        c->tensors[i].data = NULL;
    }
}

static int lines_with(const char *word) {
    int count = 0;
    for (const char *at = stub_log(); (at = strstr(at, word)) != NULL; at++) count++;
    return count;
}

/* ---------------------------------------------------------------------------------------------------------- tests */

static void test_runtimes_that_cannot_be(void) {
    te_runtime *rt = (void *)1;
    te_runtime_options o = TE_RUNTIME_OPTIONS;
    EXPECT(te_runtime_create(NULL, &rt) == TE_ARGUMENT && te_runtime_create(&o, NULL) == TE_ARGUMENT);
    o.libcuda = "/nowhere/libcuda.so.1";
    EXPECT(te_runtime_create(&o, &rt) == TE_LIBRARY && rt == NULL);
    EXPECT_SAID(TE_LIBRARY, "/nowhere/libcuda.so.1");
    o.libcuda = stub_path;
    o.size = 3;
    EXPECT(te_runtime_create(&o, &rt) == TE_ARGUMENT);
    EXPECT_SAID(TE_ARGUMENT, "size 3");
    o.size = sizeof o - 4; /* half a pointer */
    EXPECT(te_runtime_create(&o, &rt) == TE_ARGUMENT);
    o.size = sizeof o + 8; /* of a later header */
    EXPECT(te_runtime_create(&o, &rt) == TE_OK);
    te_runtime_destroy(rt);
    o.libcudnn = "/nowhere/libcudnn.so.9";
    o.size = offsetof(te_runtime_options, libcudnn); /* of an earlier one: what lies behind is not read */
    EXPECT(te_runtime_create(&o, &rt) == TE_OK);
    te_runtime_destroy(rt);
    o.size = sizeof o;
    EXPECT(te_runtime_create(&o, &rt) == TE_LIBRARY);
    EXPECT_SAID(TE_LIBRARY, "/nowhere/libcudnn.so.9");
    o.libcudnn = NULL;
    o.size = sizeof o;
    o.device_id = 1;
    EXPECT(te_runtime_create(&o, &rt) == TE_ARGUMENT);
    EXPECT_SAID(TE_ARGUMENT, "device 1 of 1");
    o.device_id = 0;
    o.device_type = 99;
    EXPECT(te_runtime_create(&o, &rt) == TE_UNSUPPORTED);
    o.device_type = kDLCPU;
    te_program *program;
    EXPECT(te_runtime_create(&o, &rt) == TE_OK && te_synchronize(rt, NULL) == TE_OK);
    EXPECT(te_program_load_memory(rt, "", 1, &program) == TE_UNSUPPORTED);
    te_runtime_destroy(rt);
    o.device_type = kDLCUDA;
    o.alloc = arena_alloc;
    EXPECT(te_runtime_create(&o, &rt) == TE_ARGUMENT);
    EXPECT_SAID(TE_ARGUMENT, "one of alloc and free");
    te_runtime_destroy(NULL);
    te_program_free(NULL);
}

static void test_questions(void) {
    te_runtime *rt = runtime_with(NULL);
    te_program *p = program_in(rt);
    const char *const *names;
    int32_t count, entry;
    size_t bytes;
    EXPECT(te_program_entries(p, &names, &count) == TE_OK && count == 7);
    EXPECT(strcmp(names[0], "forward") == 0 && strcmp(names[1], "backward") == 0);
    EXPECT(te_output_free(NULL, NULL, NULL) == TE_ARGUMENT && te_output_free(rt, NULL, NULL) == TE_OK);
    EXPECT(te_program_find(p, "sideward", &entry) == TE_ARGUMENT);
    EXPECT_SAID(TE_ARGUMENT, "sideward");
    EXPECT(te_program_block_bytes(p, 7, &bytes) == TE_ARGUMENT && te_program_block_bytes(p, -1, &bytes) == TE_ARGUMENT);
    EXPECT(te_program_block_bytes(p, 0, &bytes) == TE_OK && bytes % 256 == 0);
    EXPECT(strcmp(te_program_fact(p, "architecture"), "9.0") == 0 && te_program_fact(p, "weather") == NULL);
    const call c = call_of(p, "forward");
    EXPECT(c.inputs == 7 && c.outputs == 3);
    te_runtime_destroy(rt); /* and its programs */
}

static void test_memory_by_callbacks(void) {
    arena a = {0};
    te_runtime *rt = runtime_with(&a);
    te_program *p = program_in(rt);
    call forward = call_of(p, "forward"), backward = call_of(p, "backward");
    int scratch = 1;
    for (int i = 0; i < 3; i++) {
        EXPECT(played(p, &forward) == TE_OK && stub_context() == NULL);
        EXPECT(forward.tensors[7].device.device_type == kDLCUDA && a.count == 3 + scratch);
        EXPECT(played(p, &backward) == TE_OK);
        give_outputs(p, &forward);
        give_outputs(p, &backward);
        EXPECT(a.faults == 0 && a.count >= scratch && (i == 0 || a.count == scratch));
        scratch = a.count; /* of both entries: it stays */
    }
    /* Outputs with memory are written there. */
    const int calls = a.calls;
    for (int32_t i = 7; i < 10; i++) forward.tensors[i].data = (void *)(uintptr_t)(0x7d0000000000 + 65536 * i);
    EXPECT(played(p, &forward) == TE_OK && a.calls == calls && forward.tensors[8].data == (void *)(uintptr_t)(0x7d0000000000 + 65536 * 8));
    te_program_free(p);
    te_runtime_destroy(rt);
    EXPECT(a.count == 0 && a.faults == 0);
}

static void test_memory_in_one_block(void) {
    arena a = {0};
    te_runtime *rt = runtime_with(&a);
    te_program *p = program_in(rt);
    call c = call_of(p, "backward");
    for (int32_t i = c.inputs; i < c.inputs + c.outputs; i++) c.tensors[i].data = (void *)(uintptr_t)(0x7d0000000000 + 65536 * i);
    EXPECT(te_program_block_bytes(p, c.run.entry, &c.run.block_bytes) == TE_OK);
    c.run.block = (void *)(uintptr_t)0x7c0000000000;
    EXPECT(played(p, &c) == TE_OK && a.calls == 0);
    c.run.block_bytes--;
    EXPECT(played(p, &c) == TE_ARGUMENT);
    EXPECT_SAID(TE_ARGUMENT, "a block of");
    c.run.block_bytes += 257;
    c.run.block = (void *)(uintptr_t)0x7c0000000080;
    EXPECT(played(p, &c) == TE_ARGUMENT && a.calls == 0);
    te_runtime_destroy(rt);
}

/* Work on another stream is behind the call's stream when the call returns, whatever failed. */
static void test_streams_beside(void) {
    te_runtime *rt = runtime_with(NULL);
    te_program *p = program_in(rt);
    for (int n = 0; n < 9; n++) {
        call c = call_of(p, "there_and_back"), zeroed = call_of(p, "marks");
        stub_fail("cuLaunchKernel", n, 700);
        stub_clear();
        const te_status status = played(p, &c);
        EXPECT(status == (n && n < 4 ? TE_LIBRARY : TE_OK) && (status == TE_OK || te_error()->step >= 0));
        if (status == TE_OK) give_outputs(p, &c);
        EXPECT(lines_with("record") == lines_with("wait") && lines_with("alloc") == lines_with("free"));
        if (n == 3) EXPECT(strstr(strstr(stub_log(), "wait stream 0x5\n"), "record stream 0x5\n") != NULL);
        if (n > 1 && n < 4) EXPECT(strstr(stub_log(), "wait stream 0x5\n") != NULL);
        stub_fail(NULL, 0, 0);
        stub_clear();
        EXPECT(played(p, &zeroed) == TE_OK && lines_with("fill") == (n ? 0 : 2));
        give_outputs(p, &zeroed);
    }
    te_runtime_destroy(rt);
}

static void test_wrong_tensors(void) {
    arena a = {0};
    te_runtime *rt = runtime_with(&a);
    te_program *p = program_in(rt);
    call c = call_of(p, "forward");
    int64_t other[2] = {48, 65}, strides[2] = {128, 1}, dense[2] = {64, 1};
    for (int kind = 0; kind < 19; kind++) {
        call wrong = c;
        DLTensor *x = &wrong.tensors[0];
        te_status wanted = TE_ARGUMENT;
        switch (kind) {
            case 0: x->dtype.bits = 32; break;
            case 1: x->dtype.code = 1; break;
            case 2: x->shape = other; break;
            case 3: x->ndim = 1; break;
            case 4: x->strides = strides; break;
            case 5: x->data = (char *)x->data + 128; break;
            case 6: x->byte_offset = 2; break;
            case 7: x->device.device_id = 1; break;
            case 8: x->device.device_type = kDLCPU; break;
            case 9: x->data = NULL; break;
            case 10: wrong.inputs = 6; break;
            case 11: wrong.tensors[7].dtype.lanes = 2; break;
            case 12: x->shape = NULL; break;
            case 13: x->byte_offset = UINT64_C(1) << 63; break;
            case 14: x->byte_offset = UINT64_MAX - 255; break;
            case 15: wrong.tensors[7].data = x->data; break;
            case 16: wrong.tensors[7].data = (char *)x->data + 256; break; /* the end of x */
            case 17: wrong.tensors[8].data = wrong.tensors[7].data = (void *)0x7d0000000000; break;
            default: x->strides = dense; wanted = TE_OK; break; /* as they are said to be */
        }
        EXPECT(played(p, &wrong) == wanted);
        if (wanted == TE_OK) give_outputs(p, &wrong);
        if (kind == 2) EXPECT_SAID(TE_ARGUMENT, "x of another shape: dtype (4, 16, 1), shape [48, 65]");
        if (kind == 13) EXPECT_SAID(TE_ARGUMENT, "byte_offset 9223372036854775808");
        if (kind > 14 && kind < 18) EXPECT_SAID(TE_ARGUMENT, "in the memory of");
        EXPECT(stub_context() == NULL && played(p, &c) == TE_OK);
        give_outputs(p, &c);
    }
    EXPECT(te_program_block_bytes(p, c.run.entry, &c.run.block_bytes) == TE_OK);
    c.run.block = c.tensors[1].data;
    EXPECT(played(p, &c) == TE_ARGUMENT);
    EXPECT_SAID(TE_ARGUMENT, "a place for the block in the memory of");
    c.run.block = NULL;
    c.run.entry = 9;
    EXPECT(played(p, &c) == TE_ARGUMENT);
    c.run.size = 8;
    EXPECT(played(p, &c) == TE_ARGUMENT && te_program_run(p, NULL) == TE_ARGUMENT && te_program_run(NULL, &c.run) == TE_ARGUMENT);
    te_runtime_destroy(rt);
    EXPECT(a.count == 0 && a.faults == 0);
}

/* The nth allocation fails, or is crooked, for each n: what was taken goes back, and the next call works. */
static void test_memory_that_is_not_there(void) {
    for (int crooked = 0; crooked < 2; crooked++)
        for (int n = 1;; n++) {
            arena a = {0};
            te_runtime *rt = runtime_with(&a);
            te_program *p = program_in(rt);
            call c = call_of(p, "backward");
            *(crooked ? &a.crooked_at : &a.null_at) = n;
            const te_status status = played(p, &c);
            EXPECT(status == TE_OK || status == TE_MEMORY);
            if (status == TE_OK) {
                give_outputs(p, &c);
                EXPECT(n > 3);
            } else {
                EXPECT_SAID(TE_MEMORY, crooked ? "for an alignment of" : "NULL for");
                EXPECT(te_error()->step >= 0 || n <= 2); /* first comes scratch memory, before any step */
                EXPECT(a.count == (n <= 2 ? n - 1 : 2) && a.faults == 0 && played(p, &c) == TE_OK);
                give_outputs(p, &c);
            }
            te_runtime_destroy(rt);
            EXPECT(a.count == 0 && a.faults == 0);
            if (status == TE_OK) break;
        }
}

/* Every function of the libraries fails once, at each of its first calls. */
static void test_libraries_that_fail(void) {
    static const char *const names[] = {
        "cuInit", "cuDeviceGetCount", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2",
        "cuMemPoolCreate", "cuMemAllocFromPoolAsync", "cuModuleLoadData", "cuModuleGetFunction", "cuFuncGetAttribute",
        "cuLaunchKernel", "cublasLtCreate", "cublasLtMatmulDescCreate", "cublasLtMatrixLayoutCreate",
        "cublasLtMatmulDescSetAttribute", "cublasLtMatmul", "cuMemcpyHtoDAsync_v2", "cudnnCreate", "cudnnSetStream",
        "cudnnBackendCreateDescriptor", "cudnnBackendSetAttribute", "cudnnBackendGetAttribute", "cudnnBackendFinalize",
        "cudnnBackendExecute"};
    const int alive = stub_alive();
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        int failed = 0;
        for (int n = 1; n < 12; n++) {
            te_runtime_options o = TE_RUNTIME_OPTIONS;
            te_runtime *rt = NULL;
            te_program *p = NULL;
            o.stream = (void *)5;
            o.libcuda = o.libcublaslt = o.libcudnn = stub_path;
            stub_fail(names[i], n, 2);
            te_status status = te_runtime_create(&o, &rt);
            if (status == TE_OK) status = te_program_load_memory(rt, whole, whole_bytes, &p);
            if (status == TE_OK) {
                const bool attends = strstr(names[i], "cudnn") != NULL || strstr(names[i], "Memcpy") != NULL;
                call c = call_of(p, attends ? "attention backward" : "backward");
                status = played(p, &c);
                stub_fail(NULL, 0, 0);
                if (status == TE_OK) give_outputs(p, &c);
                EXPECT(played(p, &c) == TE_OK);
                give_outputs(p, &c);
            }
            stub_fail(NULL, 0, 0);
            failed += status != TE_OK;
            te_runtime_destroy(rt);
            EXPECT(stub_alive() == alive && stub_context() == NULL);
        }
        if (!failed) fprintf(stderr, "%s\n", names[i]);
        EXPECT(failed);
    }
}

static void test_other_versions(void) {
    te_runtime *rt = runtime_with(NULL);
    te_program *p;
    call c;
    stub_lt_version(130200, 0); /* it takes the algorithms with 16 bytes of workspace, which one product does not have */
    stub_clear();
    p = program_in(rt);
    c = call_of(p, "forward");
    EXPECT(lines_with("check") == 3 && lines_with("heuristic") == 1 && played(p, &c) == TE_OK && lines_with(" 16 stream") == 1);
    give_outputs(p, &c);
    te_program_free(p);
    stub_lt_version(130200, 1); /* it has others */
    stub_clear();
    p = program_in(rt);
    c = call_of(p, "forward");
    EXPECT(lines_with("heuristic") == 3 && played(p, &c) == TE_OK && lines_with("algorithm a5a5a5") == 1);
    give_outputs(p, &c);
    te_program_free(p);
    stub_lt_version(130200, 2); /* it has none */
    EXPECT(te_program_load_memory(rt, whole, whole_bytes, &p) == TE_STALE && p == NULL);
    EXPECT_SAID(TE_STALE, "cuBLASLt 130200, recorded for 130100");
    stub_lt_version(130100, 0);
    stub_cudnn_version(92000); /* which promises nothing of another version's plans */
    EXPECT(te_program_load_memory(rt, whole, whole_bytes, &p) == TE_STALE && p == NULL);
    EXPECT_SAID(TE_STALE, "cuDNN 92000, recorded for 91900");
    stub_cudnn_version(91900);
    te_runtime_destroy(rt);
    stub_device(1, 10, 0);
    rt = runtime_with(NULL);
    EXPECT(te_program_load_memory(rt, whole, whole_bytes, &p) == TE_STALE);
    EXPECT_SAID(TE_STALE, "kernels for 9.0 on a device of 10.0");
    te_runtime_destroy(rt);
    stub_device(1, 9, 0);
}

/* Each thread's handle follows the streams of its calls; a plan serves all of them. */
static void test_attention(void) {
    te_runtime *rt = runtime_with(NULL);
    te_program *p = program_in(rt);
    call c = call_of(p, "attention");
    stub_clear();
    for (uintptr_t stream = 5; stream < 8; stream++) {
        c.run.stream = (void *)(stream / 2);
        EXPECT(played(p, &c) == TE_OK);
        give_outputs(p, &c);
    }
    EXPECT(lines_with("attend ") == 3 && lines_with(" 9000=0x3e000000 ") == 3 && lines_with("copy ") == 3);
    int on[2] = {0, 0};
    for (const char *at = stub_log(); (at = strstr(at, "attend ")) != NULL; at++) {
        const char *stream = strstr(at, " stream 0x");
        EXPECT(stream != NULL);
        on[stream[10] == '3']++;
    }
    EXPECT(on[0] == 1 && on[1] == 2);
    te_runtime_destroy(rt);
}

static void test_damaged_files(void) {
    te_runtime *rt = runtime_with(NULL);
    te_program *p;
    unsigned char *copy = malloc(whole_bytes);
    for (size_t n = 0; n < whole_bytes; n += n < 600 ? 1 : 37) EXPECT(te_program_load_memory(rt, whole, n, &p) == TE_BROKEN);
    memcpy(copy, whole, whole_bytes);
    for (size_t at = 0; at < whole_bytes; at += at < 600 ? 1 : 41) {
        copy[at] ^= 16;
        EXPECT(te_program_load_memory(rt, copy, whole_bytes, &p) == TE_BROKEN && p == NULL);
        copy[at] ^= 16;
    }
    EXPECT_SAID(TE_BROKEN, "a damaged file, by its digest");
    for (uint64_t i = 0; i < 300; i++) {
        uint64_t seed = i;
        size_t size;
        unsigned char *broken = broken_copy(whole, whole_bytes, &seed, &size);
        (void)load_and_play(rt, broken, size);
        free(broken);
    }
    EXPECT(load_and_play(rt, whole, whole_bytes));
    free(copy);
    te_runtime_destroy(rt);
}

static void test_files_that_others_may_write(void) {
    char folder[] = "/tmp/te-c-XXXXXX", path[64], link_path[64], pipe_path[64];
    te_runtime *rt = runtime_with(NULL);
    te_program *p;
    EXPECT(mkdtemp(folder) != NULL);
    (void)snprintf(path, sizeof path, "%s/linear.te", folder);
    (void)snprintf(link_path, sizeof link_path, "%s/none.te", folder);
    (void)snprintf(pipe_path, sizeof pipe_path, "%s/pipe.te", folder);
    FILE *file = fopen(path, "wb");
    EXPECT(file != NULL && fwrite(whole, 1, whole_bytes, file) == whole_bytes && fclose(file) == 0);
    EXPECT(chmod(path, 0600) == 0 && te_program_load(rt, path, &p) == TE_OK);
    te_program_free(p);
    EXPECT(chmod(path, 0620) == 0 && te_program_load(rt, path, &p) == TE_ARGUMENT && p == NULL);
    EXPECT_SAID(TE_ARGUMENT, "others may write to it");
    EXPECT(chmod(path, 0600) == 0 && chmod(folder, 0777) == 0 && te_program_load(rt, path, &p) == TE_ARGUMENT);
    EXPECT_SAID(TE_ARGUMENT, "its folder");
    EXPECT(chmod(folder, 0700) == 0 && te_program_load(rt, link_path, &p) == TE_ARGUMENT);
    EXPECT(te_program_load(rt, folder, &p) == TE_ARGUMENT && te_program_load(rt, NULL, &p) == TE_ARGUMENT);
    EXPECT(mkfifo(pipe_path, 0600) == 0 && te_program_load(rt, pipe_path, &p) == TE_ARGUMENT);
    EXPECT_SAID(TE_ARGUMENT, "it is no file");
    EXPECT(unlink(pipe_path) == 0 && unlink(path) == 0 && rmdir(folder) == 0);
    te_runtime_destroy(rt);
}

static void test_prepared_before(void) {
    te_runtime *rt = runtime_with(NULL);
    te_program *p = program_in(rt);
    call c = call_of(p, "backward");
    EXPECT(te_program_prepare(p, -1, (void *)9) == TE_OK && te_program_prepare(p, 7, NULL) == TE_ARGUMENT);
    for (int32_t i = c.inputs; i < c.inputs + c.outputs; i++) c.tensors[i].data = (void *)(uintptr_t)(0x7d0000000000 + 65536 * i);
    const int alive = stub_alive();
    c.run.stream = (void *)9;
    stub_clear();
    EXPECT(played(p, &c) == TE_OK && stub_alive() == alive && lines_with("stream 0x9") == lines_with("stream "));
    EXPECT(te_synchronize(rt, NULL) == TE_OK && lines_with("synchronize 0x5") == 1 && te_synchronize(NULL, NULL) == TE_ARGUMENT);
    te_runtime_destroy(rt);
}

typedef struct {
    te_program *program;
    int number, good;
} worker;

static void *work(void *given) {
    worker *w = given;
    for (int i = 0; i < 40; i++) {
        static const char *const names[] = {"forward", "backward", "marks", "attention backward"};
        call c = call_of(w->program, names[i % 4]);
        c.run.stream = (void *)(uintptr_t)(16 + 2 * w->number + i % 2);
        if (played(w->program, &c) != TE_OK) return NULL;
        for (int32_t k = c.inputs; k < c.inputs + c.outputs; k++) te_give(w->program->runtime, c.tensors[k].data, c.run.stream);
        c.tensors[0].ndim = 9;
        if (played(w->program, &c) != TE_ARGUMENT) return NULL;
    }
    w->good = 1;
    return NULL;
}

static void test_threads(void) {
    te_runtime *rt = runtime_with(NULL);
    te_program *p = program_in(rt), *other = program_in(rt);
    pthread_t threads[8];
    worker workers[8];
    const int alive = stub_alive();
    stub_mute(1);
    for (int i = 0; i < 8; i++) {
        workers[i] = (worker){i % 2 ? p : other, i, 0};
        EXPECT(pthread_create(&threads[i], NULL, work, &workers[i]) == 0);
    }
    for (int i = 0; i < 8; i++) EXPECT(pthread_join(threads[i], NULL) == 0 && workers[i].good);
    stub_mute(0);
    EXPECT(stub_alive() > alive);
    te_runtime_destroy(rt);
}

/* That the process ever had; a sanitizer's own memory is no matter of ours. */
static long most_kilobytes(void) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return 0;
#else
    struct rusage used;
    return getrusage(RUSAGE_SELF, &used) == 0 ? used.ru_maxrss : -1;
#endif
}

static void test_flat_memory(void) {
    te_runtime *rt = runtime_with(NULL);
    te_program *p = program_in(rt);
    call calls[] = {call_of(p, "forward"), call_of(p, "backward"), call_of(p, "attention backward"), call_of(p, "marks")};
    int alive = 0;
    long most = 0;
    stub_mute(1);
    for (int i = 0; i < 100000; i++) {
        call *c = &calls[i % 4];
        EXPECT(played(p, c) == TE_OK);
        give_outputs(p, c);
        if (i == 1000) alive = stub_alive(), most = most_kilobytes();
    }
    EXPECT(stub_alive() == alive && most_kilobytes() - most < 1024);
    stub_mute(0);
    te_runtime_destroy(rt);
}

static void *door(void *library, const char *name) {
    void *found = dlsym(library, name);
    if (found == NULL) exit(2);
    return found;
}

int main(int count, char **words) {
    if (count != 3) return 2;
    stub_path = words[1];
    whole = content_of(words[2], &whole_bytes);
    void *library = dlopen(stub_path, RTLD_NOW);
    if (whole == NULL || library == NULL) return 2;
#define FIND(name) *(void **)(&(name)) = door(library, #name)
    FIND(stub_clear), FIND(stub_mute), FIND(stub_log), FIND(stub_alive), FIND(stub_arguments), FIND(stub_fail);
    FIND(stub_lt_version), FIND(stub_cudnn_version), FIND(stub_device), FIND(stub_context);
    te_runtime *first = runtime_with(NULL); /* what the stub is told of arguments stands in the file */
    te_program *p = program_in(first);
    for (uint64_t i = 0; i < p->file.count[T_FUNCTIONS]; i++) {
        const f_function *f = &p->file.functions[i];
        char name[64], letters[80];
        (void)snprintf(name, sizeof name, "%.*s", (int)f->name.length, p->file.text + f->name.start);
        (void)snprintf(letters, sizeof letters, "%.*s", (int)f->letters.length, p->file.text + f->letters.start);
        for (uint64_t k = 0; k < p->file.count[T_STEPS]; k++) /* of a table: its bytes */
            if (p->file.steps[k].kind == K_TABLE && p->file.steps[k].target == i)
                (void)snprintf(letters, sizeof letters, "b%u", p->file.steps[k].other);
        stub_arguments(name, 0, letters);
    }
    te_runtime_destroy(first);
    stub_mute(0);
    const int alive = stub_alive();
    test_runtimes_that_cannot_be();
    test_questions();
    test_memory_by_callbacks();
    test_memory_in_one_block();
    test_streams_beside();
    test_wrong_tensors();
    test_memory_that_is_not_there();
    test_libraries_that_fail();
    test_other_versions();
    test_attention();
    test_damaged_files();
    test_files_that_others_may_write();
    test_prepared_before();
    test_threads();
    test_flat_memory();
    EXPECT(stub_alive() == alive);
    free(whole);
    puts("15 tests passed");
    return 0;
}
