/* What the files of the player share. */
#ifndef TE_INTERNAL_H
#define TE_INTERNAL_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "te_core.h"

/* ------------------------------------------------------------------------------- the file (docs/program_file.md) */

enum { T_TEXT, T_DATA, T_FACTS, T_MODULES, T_FUNCTIONS, T_PRODUCTS, T_ATTRIBUTES, T_CONTENTS, T_PLANS, T_WAYS };
enum { T_ENTRIES = T_WAYS + 1, T_SLOTS, T_NUMBERS, T_STEPS, T_WORDS, T_PATCHES, T_PIECES, T_COUNT };
enum { F_VERSION = 2, F_HEAD = 56, F_HEADER = (F_HEAD + 16 * T_COUNT + 15) / 16 * 16 };
enum { K_LAUNCH, K_TABLE, K_PRODUCT, K_FILL, K_ATTEND, K_COPY, K_TAKE, K_DROP, K_WAIT, K_NOTICE, K_COUNT };
enum { R_INPUT, R_STATE, R_OUTPUT, R_SAVED, R_SCRATCH, R_TEMPORARY, R_COUNT };
enum { S_WRITTEN = 1, S_ZEROED = 2, S_STRIDED = 4 };
enum { P_DEVICE_ALPHA = 1, P_ADDS = 2 };
enum { A_READ, A_VALUE, A_WRITTEN }; /* a tensor of a plan: an address, or a number in the word */
enum { MOST_WAYS = 32, MOST_ARGUMENTS = 64, MOST_DIMENSIONS = 32, SIZES = 7, MOST_POINTERS = 8, ALGORITHM = 64, MOST_OPERANDS = 64 };
#define NOWHERE UINT64_MAX

typedef struct {
    uint32_t start, length;
} f_text;
typedef struct {
    f_text key, value;
} f_fact;
typedef struct {
    uint64_t start, bytes;
} f_module; /* and other content in data */
typedef struct {
    f_text name, letters;
    uint32_t module, reserved;
} f_function;
typedef struct {
    uint32_t dtype, reserved;
    uint64_t rows, columns;
    int64_t ld;
} f_layout;
typedef struct {
    uint32_t compute, scale, attributes, attribute_count, pointers, pointer_count, flags, reserved;
    uint64_t algorithm, workspace;
    f_layout layouts[3];
    f_text text;
} f_product;
typedef struct {
    uint32_t attribute, bytes;
    uint64_t value;
} f_attribute;
typedef struct {
    uint32_t content, numbers, tensors, reserved; /* numbers: the tensors' own, then what each of them is */
    uint64_t workspace;
    f_text text;
} f_plan;
typedef struct {
    f_text name;
    uint32_t parent, reserved;
} f_way;
typedef struct {
    f_text name, what, call;
    uint32_t slots, slot_count, steps, step_count, pieces, piece_count, inputs, reserved;
    uint64_t block, peak;
} f_entry;
typedef struct {
    f_text name;
    uint32_t role, flags, code, bits, dims, ndim, way, alignment;
    uint64_t bytes, place;
} f_slot;
typedef struct {
    uint32_t kind, target, way, other, words, word_count, patches, patch_count;
} f_step;
typedef struct {
    uint32_t number, slot;
    uint64_t offset;
} f_patch;
typedef struct {
    f_text name;
    uint32_t slot, flags, code, bits, dims, ndim;
    uint64_t offset;
} f_piece;

/* The tables of a file, every number in which has been checked. */
typedef struct {
    unsigned char *content; /* ours */
    size_t bytes;
    uint64_t count[T_COUNT];
    const char *text;
    const unsigned char *data;
    const f_fact *facts;
    const f_module *modules;
    const f_function *functions;
    const f_product *products;
    const f_attribute *attributes;
    const f_module *contents;
    const f_plan *plans;
    const f_way *ways;
    const f_entry *entries;
    const f_slot *slots;
    const int64_t *numbers;
    const f_step *steps;
    const uint64_t *words;
    const f_patch *patches;
    const f_piece *pieces;
} te_file;

/* Check the content, which is the file's from here on. */
te_status te_file_check(te_file *file, unsigned char *content, size_t bytes);
te_status te_file_check_entries(const te_file *file);
te_status te_file_read(const char *path, unsigned char **content, size_t *bytes);
void te_sha256(const unsigned char *content, size_t bytes, unsigned char digest[32]);

/* --------------------------------------------------------------------------------------------------------- errors */

/* Note an error of the thread's; returns the status. `got` is a format. */
te_status te_fail(te_status status, const char *operation, const char *allowed, const char *to_do, const char *got, ...)
    __attribute__((format(printf, 5, 6)));
void te_at_step(int32_t step);

/* ---------------------------------------------------------------------------------------------------------- doors */

typedef struct {
    int alloc_type, handle_types, location_type, location_id;
    void *security;
    size_t most;
    unsigned char reserved[56];
} te_pool_properties;

typedef struct {
    unsigned char algorithm[ALGORITHM];
    size_t workspace;
    int status;
    float waves;
    int reserved[4];
} te_heuristic;

/* Name, arguments. What has a version in its name is called by it. */
#define TE_DRIVER(X)                                                                                                   \
    X(cuInit, (unsigned))                                                                                              \
    X(cuGetErrorName, (int, const char **))                                                                            \
    X(cuGetErrorString, (int, const char **))                                                                          \
    X(cuDeviceGetCount, (int *))                                                                                       \
    X(cuDeviceGetAttribute, (int *, int, int))                                                                         \
    X(cuDevicePrimaryCtxRetain, (void **, int))                                                                        \
    X(cuDevicePrimaryCtxRelease_v2, (int))                                                                             \
    X(cuCtxGetCurrent, (void **))                                                                                      \
    X(cuCtxPushCurrent_v2, (void *))                                                                                   \
    X(cuCtxPopCurrent_v2, (void **))                                                                                   \
    X(cuMemPoolCreate, (void **, const te_pool_properties *))                                                          \
    X(cuMemPoolDestroy, (void *))                                                                                      \
    X(cuMemPoolSetAttribute, (void *, int, void *))                                                                    \
    X(cuMemAllocFromPoolAsync, (uint64_t *, size_t, void *, void *))                                                   \
    X(cuMemFreeAsync, (uint64_t, void *))                                                                              \
    X(cuMemAlloc_v2, (uint64_t *, size_t))                                                                             \
    X(cuMemFree_v2, (uint64_t))                                                                                        \
    X(cuMemsetD8Async, (uint64_t, unsigned char, size_t, void *))                                                      \
    X(cuMemcpyHtoDAsync_v2, (uint64_t, const void *, size_t, void *))                                                  \
    X(cuStreamSynchronize, (void *))                                                                                   \
    X(cuStreamCreate, (void **, unsigned))                                                                             \
    X(cuStreamDestroy_v2, (void *))                                                                                    \
    X(cuStreamWaitEvent, (void *, void *, unsigned))                                                                   \
    X(cuEventCreate, (void **, unsigned))                                                                              \
    X(cuEventDestroy_v2, (void *))                                                                                     \
    X(cuEventRecord, (void *, void *))                                                                                 \
    X(cuThreadExchangeStreamCaptureMode, (int *))                                                                      \
    X(cuModuleLoadData, (void **, const void *))                                                                       \
    X(cuModuleUnload, (void *))                                                                                        \
    X(cuModuleGetFunction, (void **, void *, const char *))                                                            \
    X(cuFuncGetAttribute, (int *, int, void *))                                                                        \
    X(cuFuncSetAttribute, (void *, int, int))                                                                          \
    X(cuLaunchKernel, (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,  \
                       void **))

#define TE_CUBLASLT(X)                                                                                                 \
    X(cublasLtCreate, (void **))                                                                                       \
    X(cublasLtDestroy, (void *))                                                                                       \
    X(cublasLtMatmulDescCreate, (void **, int, int))                                                                   \
    X(cublasLtMatmulDescDestroy, (void *))                                                                             \
    X(cublasLtMatmulDescSetAttribute, (void *, int, const void *, size_t))                                             \
    X(cublasLtMatrixLayoutCreate, (void **, int, uint64_t, uint64_t, int64_t))                                         \
    X(cublasLtMatrixLayoutDestroy, (void *))                                                                           \
    X(cublasLtMatmulPreferenceCreate, (void **))                                                                       \
    X(cublasLtMatmulPreferenceDestroy, (void *))                                                                       \
    X(cublasLtMatmulPreferenceSetAttribute, (void *, int, const void *, size_t))                                       \
    X(cublasLtMatmulAlgoCheck, (void *, void *, void *, void *, void *, void *, const void *, te_heuristic *))         \
    X(cublasLtMatmulAlgoGetHeuristic, (void *, void *, void *, void *, void *, void *, void *, int, te_heuristic *,    \
                                       int *))                                                                        \
    X(cublasLtMatmul, (void *, void *, const void *, const void *, void *, const void *, void *, const void *,         \
                       const void *, void *, void *, void *, const void *, void *, size_t, void *))

#define TE_CUDNN(X)                                                                                                    \
    X(cudnnCreate, (void **))                                                                                          \
    X(cudnnDestroy, (void *))                                                                                          \
    X(cudnnSetStream, (void *, void *))                                                                                \
    X(cudnnBackendCreateDescriptor, (int, void **))                                                                    \
    X(cudnnBackendDestroyDescriptor, (void *))                                                                         \
    X(cudnnBackendSetAttribute, (void *, int, int, int64_t, const void *))                                             \
    X(cudnnBackendGetAttribute, (void *, int, int, int64_t, int64_t *, void *))                                        \
    X(cudnnBackendFinalize, (void *))                                                                                  \
    X(cudnnBackendExecute, (void *, void *, void *))

typedef struct {
    void *library, *lt_library, *cudnn_library;
#define X(name, arguments) int(*name) arguments;
    TE_DRIVER(X)
    TE_CUBLASLT(X)
    TE_CUDNN(X)
#undef X
    size_t (*cudnnGetVersion)(void);
    void (*cudnnGetLastErrorString)(char *, size_t);
    size_t (*cublasLtGetVersion)(void);
} te_doors;

te_status te_doors_open(te_doors *doors, const char *path);
te_status te_doors_open_lt(te_doors *doors, const char *path);
te_status te_doors_open_cudnn(te_doors *doors, const char *path);
void te_doors_close(te_doors *doors);
/* The status of a call of the driver's in words. */
te_status te_driver_failed(const te_doors *doors, const char *call, int status);

/* ---------------------------------------------------------------------------------------------------------- steps */

/* What steps call. */
typedef struct {
    int (*cuLaunchKernel)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                          void **);
    int (*cuMemsetD8Async)(uint64_t, unsigned char, size_t, void *);
    int (*cublasLtMatmul)(void *, void *, const void *, const void *, void *, const void *, void *, const void *,
                          const void *, void *, void *, void *, const void *, void *, size_t, void *);
    int (*cublasLtMatmulDescSetAttribute)(void *, int, const void *, size_t);
} te_calls;

/* A product in a thread: its descriptors, as far as they were made, and where their pointers lead. */
typedef struct {
    void *handle, *desc, *layouts[3];
    const void *algorithm;
    size_t workspace;
    uint32_t flags, pointer_count;
    int attributes[MOST_POINTERS];
    uint64_t last[MOST_POINTERS], set;
} te_product;

/* A step as the thread does it: its words are the thread's, and so are the addresses that are written into them. */
typedef struct {
    uint32_t kind, target, way, other, patch_count;
    unsigned sizes[SIZES];
    const f_patch *patches;
    uint64_t *words;
    void **pointers; /* of the words, as a launch takes them */
    void *what;      /* a function, or a te_product */
} te_op;

/* Do a launch, a product or a fill. `at`: the addresses that patches name. The status is that of the library's call. */
int te_step_do(const te_calls *calls, const te_op *op, const uint64_t *at, void *stream);

/* Steps of te_core's own loop (te_core/tape/native.py lays out the same): streams are found as addresses are. */
typedef struct {
    uint64_t sizes; /* STRETCH_SIZES of who made it */
    te_calls calls;
    const te_op *ops;
    uint64_t count, failed;
} te_stretch;
#define STRETCH_SIZES (sizeof(te_stretch) << 32 | sizeof(te_op) << 16 | sizeof(te_product))
/* The status of the call that failed, 0 if none did, -1 for a stretch of another layout. */
TE_API int te_stretch_play(te_stretch *stretch, const uint64_t *at);

/* -------------------------------------------------------------------------------------------------------- runtime */

typedef struct {
    void *address;
    size_t bytes;
} te_scratch;

/* A stream of a thread's calls: its scratch memory by the number of its name, and the streams beside it. */
typedef struct te_lane {
    struct te_lane *next;
    void *stream;
    bool made; /* by us */
    te_scratch *scratch;
    uint32_t scratch_count;
    struct te_lane *beside; /* by name, the streams beside this one */
    struct te_lane *sibling;
    uint32_t name;
} te_lane;

typedef struct te_bound te_bound;

/* What belongs to a thread. */
typedef struct te_local {
    struct te_local *next;
    const void *thread;
    void *handle; /* cuBLASLt's */
    void *cudnn, *cudnn_stream;
    void *event;
    te_lane *lanes;
    te_bound **bounds; /* by the program's number */
    uint32_t bound_count;
} te_local;

/* Memory that was outgrown: a captured graph may point at it. */
typedef struct te_outgrown {
    struct te_outgrown *next;
    void *address, *stream;
} te_outgrown;

struct te_runtime {
    te_runtime_options options;
    uint64_t serial;
    te_doors doors;
    void *context, *pool;
    int capability[2];
    bool pooled;
    pthread_mutex_t lock;
    te_local *locals;
    te_program *programs;
    te_outgrown *outgrown;
    char **names; /* of scratch memory and streams */
    uint32_t name_count, program_count;
    uint64_t python; /* its number in te_core.embed; 0: none */
    struct te_recorded *updates; /* of scaling states */
};

/* Make the device's context current if it is not. */
te_status te_enter(te_runtime *runtime, bool *entered);
void te_leave(te_runtime *runtime, bool entered);
te_status te_local_of(te_runtime *runtime, te_local **local);
te_status te_lane_of(te_local *local, void *stream, te_lane **lane);
te_status te_lane_beside(te_runtime *runtime, te_lane *lane, uint32_t name, te_lane **beside);
te_status te_scratch_of(te_runtime *runtime, te_lane *lane, uint32_t name, size_t bytes, bool zeroed, void **address);
te_status te_take(te_runtime *runtime, size_t bytes, size_t alignment, void *stream, void **address);
void te_give(te_runtime *runtime, void *address, void *stream);
te_status te_order(te_runtime *runtime, te_local *local, void *producer, void *consumer);
te_status te_handle_of(te_runtime *runtime, te_local *local);
te_status te_cudnn_of(te_runtime *runtime, te_local *local);
te_status te_name_of(te_runtime *runtime, const char *text, uint32_t length, uint32_t *number);

/* -------------------------------------------------------------------------------------------------------- program */

typedef struct {
    char *name;
    te_slot *slots;
    const te_slot **given; /* inputs, then outputs */
    uint32_t *numbers;     /* of the outputs: their slots */
    uint32_t *scratch;     /* slots of scratch memory on the call's stream */
    uint32_t outputs, scratch_count, takes, words;
} te_entry;

typedef struct {
    void *function;
    uint32_t arguments; /* 0: a table */
    bool table;
} te_function;

struct te_program {
    te_runtime *runtime;
    te_program *next;
    uint32_t number;
    te_file file;
    char **facts; /* key, value, key ... */
    const char **names;
    char **slot_names;
    te_entry *entries;
    void **modules, **plans;
    te_function *functions;
    unsigned char *algorithms;   /* of the products, ALGORITHM bytes each: the file's, or such as this version takes */
    size_t *workspaces;          /* and what they need */
    uint32_t *slot_name_numbers; /* of scratch memory */
    uint32_t *way_numbers;
};

void te_bound_free(te_program *program, te_bound *bound);

/* The bytes [from, to) of a tensor; {0, 0} where it has none. */
typedef struct {
    uint64_t from, to;
    const char *name;
} te_bytes;
/* Add a tensor with right sizes to those of a call, first what it reads: what it writes lies apart from all before. */
te_status te_bytes_add(const char *operation, const char *name, const DLTensor *t, bool written, te_bytes *all, size_t *count);
/* Check the tensors of a run, and say their addresses by slot. `all` has room for each, and the block. */
te_status te_tensors_check(const te_program *program, const te_run *run, uint64_t *at, te_bytes *all);
te_status te_program_mend(te_program *program);

te_status te_plans_make(te_program *program);
void te_plans_free(te_program *program);
/* Run a plan in the thread: an address or a place of a number for each tensor. */
te_status te_attend(te_program *program, te_local *local, uint32_t plan, void *workspace, void **pointers, void *stream);

te_status te_product_make(te_program *program, void *handle, uint32_t number, te_product *product);
void te_product_free(const te_doors *doors, te_product *product);

/* --------------------------------------------------------------------------------------------- layers (te_core.embed) */

/* What te_core.embed answered: numbers, texts with a zero behind each, and bytes. */
typedef struct {
    char *content; /* to be freed */
    const int64_t *words;
    const char *texts, *bytes;
    size_t word_count, text_count, size;
} te_answer;

enum { ASKED = 8 };
/* Ask te_core.embed, with the interpreter's lock held. */
te_status te_python_ask(const char *operation, const char *what, const uint64_t asked[ASKED], te_answer *answer);
/* The interpreter ends: nobody asks it any more. */
void te_python_ended(void);
/* Let go of what te_core.embed knows by a number; behind te_close, too. */
void te_python_drop(uint64_t number);
/* Free all layers, states and kept calls of a runtime. */
void te_layers_free(te_runtime *runtime);

#endif
