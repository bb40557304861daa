/* te_core in C: play programs that te_core.record wrote, without Python; and call layers, which te_core in an embedded
 * interpreter decides and records (docs/c.md).
 *
 * te_layer_open starts an interpreter; nothing else does. Nothing prints, exits, or waits for the device, but
 * te_synchronize, which waits, and te_scaling_create, which copies to the device.
 * Every function that can fail returns a te_status; te_error() then says what was asked, what came, what is allowed and
 * what to do. A call that failed leaves everything usable. New fields of structs come at their ends.
 */
#ifndef TE_CORE_H
#define TE_CORE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifndef TE_API
#if defined(__GNUC__)
#define TE_API __attribute__((visibility("default")))
#else
#define TE_API
#endif
#endif

/* DLPack's structures, where dlpack.h was not included before. */
#if !defined(DLPACK_VERSION) && !defined(DLPACK_MAJOR_VERSION)
typedef enum { kDLCPU = 1, kDLCUDA = 2 } DLDeviceType;
typedef struct {
    DLDeviceType device_type;
    int32_t device_id;
} DLDevice;
typedef struct {
    uint8_t code; /* 0 int, 1 uint, 2 float, 4 bfloat, 6 bool, 10 e4m3, 12 e5m2, 14 e8m0 */
    uint8_t bits;
    uint16_t lanes;
} DLDataType;
typedef struct {
    void *data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL: dense */
    uint64_t byte_offset;
} DLTensor;
#endif

typedef enum {
    TE_OK = 0,
    TE_ARGUMENT = 1,    /* an argument is wrong: see te_error() */
    TE_UNSUPPORTED = 2, /* this device, library or file cannot do it */
    TE_LIBRARY = 3,     /* a library is missing, or reported a failure */
    TE_BROKEN = 4,      /* a file is no program, or damaged */
    TE_STALE = 5,       /* a file was recorded for other versions, and cannot be mended */
    TE_MEMORY = 6       /* an allocation failed */
} te_status;

/* What went wrong last in the calling thread; its texts stay until the thread's next call that fails. */
typedef struct {
    size_t size;
    te_status status;
    const char *operation, *got, *allowed, *to_do;
    const char *message; /* all four in a sentence each */
    int32_t step;        /* of the entry, by python -m te_core.program; -1: none */
} te_error_info;
TE_API const te_error_info *te_error(void);

/* Memory of the device, for work that is put on the stream. NULL says that there is none. */
typedef void *(*te_alloc)(size_t bytes, size_t alignment, void *stream, void *user);
/* Give it back, once the work now on the stream is done. */
typedef void (*te_free)(void *address, void *stream, void *user);

typedef struct te_runtime te_runtime;
typedef struct te_program te_program;

typedef struct {
    size_t size;
    int32_t device_type; /* kDLCUDA; kDLCPU for layers alone: alloc and free then give the host's memory */
    int32_t device_id;
    void *stream; /* of calls that name none */
    te_alloc alloc; /* with free; NULL: a pool of the driver's */
    te_free free;
    void *user;
    const char *libcuda;     /* a path; NULL: TE_LIBCUDA of the environment, else libcuda.so.1 */
    const char *libcublaslt; /* a path; NULL: TE_LIBCUBLASLT, else libcublasLt.so.13, else .12 */
    const char *libcudnn;    /* a path; NULL: TE_LIBCUDNN, else libcudnn.so.9 */
} te_runtime_options;
#define TE_RUNTIME_OPTIONS {sizeof(te_runtime_options), 2, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL}

TE_API te_status te_runtime_create(const te_runtime_options *options, te_runtime **runtime);
/* Gives back scratch memory on its streams, and frees all programs. No other thread may be in a call. */
TE_API void te_runtime_destroy(te_runtime *runtime);
/* Wait for the work on a stream; NULL: the runtime's. */
TE_API te_status te_synchronize(te_runtime *runtime, void *stream);

typedef enum { TE_INPUT = 0, TE_STATE = 1, TE_OUTPUT = 2, TE_SAVED = 3 } te_role;

/* A tensor that a call is given. */
typedef struct {
    size_t size;
    const char *name;
    te_role role;
    DLDataType dtype; /* FP8 may come as uint8, too */
    int32_t ndim;
    const int64_t *shape;
    const int64_t *strides; /* NULL: dense */
    size_t bytes;
    size_t alignment; /* of its address */
    int32_t written;  /* whether the call may write it */
} te_slot;

/* Load a program, and its kernels onto the device. A program is code: a file is refused that anybody but its owner (you
 * or root) may write to, or whose folder is such. A program is immutable, and threads may share it. */
TE_API te_status te_program_load(te_runtime *runtime, const char *path, te_program **program);
TE_API te_status te_program_load_memory(te_runtime *runtime, const void *content, size_t bytes, te_program **program);
/* No other thread may be in a call of the program. */
TE_API void te_program_free(te_program *program);

/* The entries' names, by number. */
TE_API te_status te_program_entries(const te_program *program, const char *const **names, int32_t *count);
TE_API te_status te_program_find(const te_program *program, const char *name, int32_t *entry);
/* The tensors of an entry: inputs and states first, as te_run's inputs; then outputs and saved ones, as its outputs. */
TE_API te_status te_program_slots(const te_program *program, int32_t entry, const te_slot *const **slots,
                                  int32_t *inputs, int32_t *outputs);
/* What a call needs besides, if it is to take no memory. */
TE_API te_status te_program_block_bytes(const te_program *program, int32_t entry, size_t *bytes);
/* What versions it was recorded for: "te_core", "cublasLt", "cudnn", "driver", "device", "architecture"; NULL: not said. */
TE_API const char *te_program_fact(const te_program *program, const char *name);

typedef struct {
    size_t size;
    int32_t entry;
    int32_t inputs; /* how many */
    int32_t outputs;
    DLTensor *const *input;
    DLTensor *const *output; /* whose data is NULL is allocated; it is then the caller's */
    void *stream;            /* NULL: the runtime's; (void *)1 names CUDA's default stream in any case */
    void *block;             /* memory for all else, aligned to 256 bytes; NULL: it is taken and dropped as recorded */
    size_t block_bytes;
} te_run;
#define TE_RUN {sizeof(te_run), 0, 0, 0, NULL, NULL, NULL, NULL, 0}

/* Put the work of an entry on the stream. */
TE_API te_status te_program_run(te_program *program, const te_run *run);
/* Give an output back that a call has allocated, once the work now on the stream is done; NULL: the runtime's. */
TE_API te_status te_output_free(te_runtime *runtime, void *address, void *stream);
/* Make what the calling thread's first call of an entry (-1: all) would make: before a capture of a CUDA graph. */
TE_API te_status te_program_prepare(te_program *program, int32_t entry, void *stream);

/* ------------------------------------------------------------------------------------------ layers, by te_core in Python
 *
 * On a GPU the interpreter runs when shapes are new, and the player does what it has recorded. On the CPU every call goes
 * through the interpreter and its lock. The interpreter is the one of the process, or else libpython's: it is opened
 * without signal handlers, and never finalized. Free-threaded builds, sub-interpreters and forked children are refused.
 */

typedef struct {
    size_t size;
    const char *libpython;   /* a path, or a name that dlopen knows; NULL: the environment's */
    const char *environment; /* a folder with lib/python3.x, or its python; NULL: TE_CORE_PYTHON of the environment, else
                                the folder that this library lies in, of an installed te_core */
    int32_t forbidden;       /* 1: layers are refused, and no interpreter is ever started */
} te_python_options;
#define TE_PYTHON_OPTIONS {sizeof(te_python_options), NULL, NULL, 0}

typedef enum {
    TE_PYTHON_NONE = 0,      /* none yet */
    TE_PYTHON_HOST = 1,      /* the process's own */
    TE_PYTHON_OURS = 2,      /* started by te_layer_open */
    TE_PYTHON_FORBIDDEN = 3, /* by te_python */
    TE_PYTHON_CLOSED = 4,    /* by te_close, or because the host's Python ends */
    TE_PYTHON_FORKED = 5     /* by the parent of this process */
} te_python_kind;

/* Say which interpreter, before the first layer is opened. To start it changes PYTHONHOME and PYTHONPATH for a moment. */
TE_API te_status te_python(const te_python_options *options);
TE_API te_python_kind te_python_state(void);
/* No call enters the interpreter from here on: what needs it is refused, what was recorded plays on. */
TE_API void te_close(void);

typedef struct te_layer te_layer;
typedef struct te_scaling te_scaling;
typedef struct te_saved te_saved;

/* What a layer takes and gives, by name. */
typedef struct {
    size_t size;
    const char *name;
    const char *shape;  /* sizes by letters, which mean the same in all slots: "... K"; "": of outputs */
    const char *dtypes; /* "x": the first input's; "any", "weight": float32, bfloat16, float16; else their names */
    te_role role;       /* TE_INPUT or TE_OUTPUT */
    int32_t optional;   /* an input that may be NULL; an output that an option asks for */
    int32_t gradient;   /* backward gives one */
} te_layer_slot;

/* A layer of te_core's table by name. `options`: JSON, or NULL; the layer's options, and "recipe": a recipe's name, or
 * {"DelayedScaling": {"amax_history_len": 16, ...}}; and "needs": the inputs whose gradients may be asked for. */
TE_API te_status te_layer_open(te_runtime *runtime, const char *name, const char *options, te_layer **layer);
TE_API void te_layer_free(te_layer *layer);
/* Inputs, then outputs: the order in which te_forward takes them. */
TE_API te_status te_layer_slots(const te_layer *layer, const te_layer_slot **slots, int32_t *inputs, int32_t *outputs);

/* `input`: in the order of te_layer_slots, NULL for one that is left out; the last ones need not be named. `output`: one for each that the options ask for;
 * whose data is NULL is allocated, and then the caller's (te_output_free). `saved`, if not NULL, keeps what backward reads:
 * inputs and outputs stay as they are until then. A recipe with a history needs a `scaling`. Work is on the stream of
 * the runtime; a runtime for each stream. */
TE_API te_status te_forward(te_layer *layer, te_scaling *scaling, DLTensor *const *input, int32_t inputs,
                            DLTensor *const *output, int32_t outputs, te_saved **saved);
/* `gradient_of_output`: as forward's outputs, NULL behind the first for one that was not used. `gradient`: as forward's
 * inputs; one that is NULL is not computed. Releases `saved`, unless it fails. */
TE_API te_status te_backward(te_layer *layer, te_scaling *scaling, te_saved *saved, DLTensor *const *gradient_of_output,
                             int32_t outputs, DLTensor *const *gradient, int32_t inputs);
/* Let go of what no backward will read. */
TE_API void te_saved_free(te_saved *saved);

/* Scales and maxima of one layer whose recipe has a history; of another recipe it is empty. */
TE_API te_status te_scaling_create(te_layer *layer, te_scaling **scaling);
/* The next scales, behind each step, from the maxima since the last update. */
TE_API te_status te_scaling_update(te_runtime *runtime, te_scaling *const *scalings, int32_t count);
TE_API void te_scaling_free(te_scaling *scaling);

/* Write what was recorded for the layer into a program file, for te_program_load: entries "forward", "backward" and
 * "update", for further shapes "forward.2" and so on. */
TE_API te_status te_layer_save(te_layer *layer, const char *path);

#ifdef __cplusplus
}
#endif
#endif
