/* te_core in C: play programs that te_core.record wrote, without Python; and call layers, which te_core in an embedded
 * interpreter decides and records (docs/c.md).
 *
 * te_layer_open starts an interpreter; nothing else does. Nothing prints, exits, or waits for the device, but
 * te_synchronize, which waits, and te_scaling_create, which copies to the device.
 * What a call writes (outputs, gradients, a block) lies in memory where no other tensor of the call lies, whole or in part:
 * no output in place of an input. Nor does a gradient lie where forward's inputs do. Inputs may share memory.
 * Every function that can fail returns a te_status; te_error() then says what was asked, what came, what is allowed and
 * what to do. A call that failed leaves everything usable. New fields of structs come at their ends.
 *
 * Of each function a comment says what it does, what each argument is, what comes back (`Gives`; a te_status where there
 * is no such line) and which errors there are (`Fails`). NULL for a pointer is TE_ARGUMENT, unless the argument says what
 * NULL means.
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

#if !defined(DLPACK_VERSION) && !defined(DLPACK_MAJOR_VERSION)
/* DLPack's kinds of devices, where dlpack.h was not included before, as below. */
typedef enum { kDLCPU = 1, kDLCUDA = 2 } DLDeviceType;
/* DLPack's device: the kind and its number. */
typedef struct {
    DLDeviceType device_type;
    int32_t device_id;
} DLDevice;
/* DLPack's type of an element. */
typedef struct {
    uint8_t code; /* 0 int, 1 uint, 2 float, 4 bfloat, 6 bool, 10 e4m3, 12 e5m2, 14 e8m0 */
    uint8_t bits;
    uint16_t lanes;
} DLDataType;
/* DLPack's tensor: memory that somebody else owns, and how the elements lie there. */
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

/* What became of a call. */
typedef enum {
    TE_OK = 0,
    TE_ARGUMENT = 1,    /* an argument is wrong: see te_error() */
    TE_UNSUPPORTED = 2, /* this device, library or file cannot do it */
    TE_LIBRARY = 3,     /* a library is missing, or reported a failure */
    TE_BROKEN = 4,      /* a file is no program, or damaged */
    TE_STALE = 5,       /* a file was recorded for other versions, and cannot be mended */
    TE_MEMORY = 6       /* an allocation failed */
} te_status;

/* What went wrong: four parts, as the errors of te_core in Python have them. */
typedef struct {
    size_t size;
    te_status status;
    const char *operation, *got, *allowed, *to_do;
    const char *message; /* all four in a sentence each */
    int32_t step;        /* of the entry, by python -m te_core.program; -1: none */
} te_error_info;
/* Say what went wrong last in the calling thread.
 * Gives: The error, whose texts stay until the thread's next call that fails; `status` is TE_OK where nothing has failed.
 */
TE_API const te_error_info *te_error(void);

/* A function of yours that allocates memory of the device, for work that is put on the stream; `user` is that of
 * te_runtime_options. It gives an address at a multiple of `alignment`, or NULL where there is none left. */
typedef void *(*te_alloc)(size_t bytes, size_t alignment, void *stream, void *user);
/* A function of yours that takes memory back, once the work now on the stream is done. */
typedef void (*te_free)(void *address, void *stream, void *user);

/* A device with its libraries and memory. */
typedef struct te_runtime te_runtime;
/* A program file that is loaded. */
typedef struct te_program te_program;

/* How a runtime is made; begin with TE_RUNTIME_OPTIONS. */
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
/* Options for device 0, CUDA's default stream, and a pool of memory of the driver's. */
#define TE_RUNTIME_OPTIONS {sizeof(te_runtime_options), 2, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL}

/* Make a runtime: open the driver and take the device's primary context.
 * options: Where it runs; read during the call only.
 * runtime: Where the new runtime is stored, NULL if it fails.
 * Fails: TE_ARGUMENT for a device that is not there, a wrong `size`, or one of `alloc` and `free` alone; TE_UNSUPPORTED
 *     for another device type; TE_LIBRARY where a library is missing or too old; TE_MEMORY.
 */
TE_API te_status te_runtime_create(const te_runtime_options *options, te_runtime **runtime);
/* Free a runtime with its layers and programs, and give scratch memory back on the streams that used it. No other thread
 * may be in a call.
 * runtime: The runtime; NULL does nothing.
 */
TE_API void te_runtime_destroy(te_runtime *runtime);
/* Wait until the work on a stream is done.
 * runtime: The runtime.
 * stream: The stream; NULL is the runtime's.
 * Fails: TE_ARGUMENT; TE_LIBRARY where the driver reports a failure, also one of work before.
 */
TE_API te_status te_synchronize(te_runtime *runtime, void *stream);

/* What a tensor is to a call: given, given and kept up to date (scales, maxima), made, or kept for backward. */
typedef enum { TE_INPUT = 0, TE_STATE = 1, TE_OUTPUT = 2, TE_SAVED = 3 } te_role;

/* A tensor that an entry of a program is given. */
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
 * or root) may write to, or whose folder is such. A program is immutable, and threads may share it.
 * runtime: A runtime on a GPU, which has to outlive the program.
 * path: A file that te_core.record or te_layer_save wrote.
 * program: Where the program is stored, NULL if it fails.
 * Fails: TE_ARGUMENT for a file that cannot be read, or that others may write to; TE_BROKEN for a damaged one; TE_STALE
 *     for one of another architecture or version; TE_UNSUPPORTED on the CPU; TE_LIBRARY; TE_MEMORY.
 */
TE_API te_status te_program_load(te_runtime *runtime, const char *path, te_program **program);
/* Load a program whose file was read before, and for whose origin the caller answers.
 * runtime: A runtime on a GPU, which has to outlive the program.
 * content: The bytes of the file, which are copied.
 * bytes: How many these are.
 * program: Where the program is stored, NULL if it fails.
 * Fails: As te_program_load, but for what it says of files.
 */
TE_API te_status te_program_load_memory(te_runtime *runtime, const void *content, size_t bytes, te_program **program);
/* Free a program. No other thread may be in a call of it, and no CUDA graph may hold its work.
 * program: The program; NULL does nothing.
 */
TE_API void te_program_free(te_program *program);

/* List the names of a program's entries.
 * program: The program.
 * names: Where the list is stored, in the order of the entries' numbers; it lives as long as the program.
 * count: Where their number is stored.
 * Fails: TE_ARGUMENT.
 */
TE_API te_status te_program_entries(const te_program *program, const char *const **names, int32_t *count);
/* Find an entry by its name.
 * program: The program.
 * name: A name that te_program_entries lists.
 * entry: Where its number is stored.
 * Fails: TE_ARGUMENT, also for a name that no entry has.
 */
TE_API te_status te_program_find(const te_program *program, const char *name, int32_t *entry);
/* List the tensors of an entry: inputs and states first, as te_run's inputs; then outputs and saved ones, as its outputs.
 * program: The program.
 * entry: The entry's number.
 * slots: Where the list is stored; it lives as long as the program.
 * inputs: Where the number of inputs and states is stored.
 * outputs: Where the number of outputs and saved tensors is stored.
 * Fails: TE_ARGUMENT.
 */
TE_API te_status te_program_slots(const te_program *program, int32_t entry, const te_slot *const **slots,
                                  int32_t *inputs, int32_t *outputs);
/* Say how large a `block` of te_run has to be for a call that allocates nothing.
 * program: The program.
 * entry: The entry's number.
 * bytes: Where the size is stored.
 * Fails: TE_ARGUMENT.
 */
TE_API te_status te_program_block_bytes(const te_program *program, int32_t entry, size_t *bytes);
/* Say for which version of something a program was recorded.
 * program: The program.
 * name: "te_core", "cublasLt", "cudnn", "driver", "device" or "architecture".
 * Gives: The version as text, which lives as long as the program; NULL where the file does not say.
 */
TE_API const char *te_program_fact(const te_program *program, const char *name);

/* A call of an entry; begin with TE_RUN. */
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
/* A call without tensors, on the runtime's stream, which takes memory as it was recorded. */
#define TE_RUN {sizeof(te_run), 0, 0, 0, NULL, NULL, NULL, NULL, 0}

/* Put the work of an entry on the stream, and return without waiting for it.
 * program: The program.
 * run: Entry, tensors and stream; read during the call only.
 * Fails: TE_ARGUMENT for tensors that te_program_slots does not say, or too small a block; TE_MEMORY where `alloc` gives
 *     none; TE_LIBRARY where the driver or a library refuses a step, whose number te_error() has.
 */
TE_API te_status te_program_run(te_program *program, const te_run *run);
/* Give an output back that a call has allocated, once the work now on the stream is done.
 * runtime: The runtime.
 * address: The output's `data`; NULL does nothing.
 * stream: The stream that used it last; NULL is the runtime's.
 * Fails: TE_ARGUMENT; TE_LIBRARY.
 */
TE_API te_status te_output_free(te_runtime *runtime, void *address, void *stream);
/* Make what the calling thread's first call of an entry would make. Call it before a CUDA graph is captured.
 * program: The program.
 * entry: The entry's number; -1 is all entries.
 * stream: The stream of that call; NULL is the runtime's.
 * Fails: TE_ARGUMENT; TE_LIBRARY; TE_MEMORY.
 */
TE_API te_status te_program_prepare(te_program *program, int32_t entry, void *stream);

/* ------------------------------------------------------------------------------------------ layers, by te_core in Python
 *
 * On a GPU the interpreter runs when shapes are new, and the player does what it has recorded. On the CPU every call goes
 * through the interpreter and its lock. The interpreter is the one of the process, or else libpython's: it is opened
 * without signal handlers, and never finalized. Free-threaded builds, sub-interpreters and forked children are refused.
 */

/* Which interpreter layers use; begin with TE_PYTHON_OPTIONS. */
typedef struct {
    size_t size;
    const char *libpython;   /* a path, or a name that dlopen knows; NULL: the environment's */
    const char *environment; /* a folder with lib/python3.x, or its python; NULL: TE_CORE_PYTHON of the environment, else
                                the folder that this library lies in, of an installed te_core */
    int32_t forbidden;       /* 1: layers are refused, and no interpreter is ever started */
} te_python_options;
/* The process's own interpreter, or else the one of the environment. */
#define TE_PYTHON_OPTIONS {sizeof(te_python_options), NULL, NULL, 0}

/* What became of the interpreter. */
typedef enum {
    TE_PYTHON_NONE = 0,      /* none yet */
    TE_PYTHON_HOST = 1,      /* the process's own */
    TE_PYTHON_OURS = 2,      /* started by te_layer_open */
    TE_PYTHON_FORBIDDEN = 3, /* by te_python */
    TE_PYTHON_CLOSED = 4,    /* by te_close, or because the host's Python ends */
    TE_PYTHON_FORKED = 5     /* by the parent of this process */
} te_python_kind;

/* Choose the interpreter, before the first layer is opened. While it starts PYTHONHOME and PYTHONPATH are set.
 * options: Which one; its texts are copied.
 * Fails: TE_ARGUMENT, also where an interpreter was found already, or behind te_close.
 */
TE_API te_status te_python(const te_python_options *options);
/* Say what became of the interpreter.
 * Gives: Whose it is, or why there is none.
 */
TE_API te_python_kind te_python_state(void);
/* Let no call enter the interpreter from here on: what needs it is refused, what was recorded runs as before. */
TE_API void te_close(void);

/* A layer with its options. */
typedef struct te_layer te_layer;
/* Scales and largest values of one layer, for a recipe that has a history of them, such as DelayedScaling. */
typedef struct te_scaling te_scaling;
/* What a forward keeps for its backward. */
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

/* Open a layer: the first one finds or starts the interpreter.
 * runtime: The runtime on whose device and stream the layer works, and which has to outlive it.
 * name: A layer of te_core.functional, such as "layernorm_mlp"; "grouped_linear" is not offered.
 * options: The layer's options as JSON, with "recipe": a recipe's name, or {"DelayedScaling": {"amax_history_len": 16}};
 *     and "needs": the inputs whose gradients may be asked for. NULL is "{}".
 * layer: Where the layer is stored, NULL if it fails.
 * Fails: TE_ARGUMENT for an unknown name or option; TE_UNSUPPORTED for what this device cannot do, and where no
 *     interpreter may be used; TE_LIBRARY where no Python with te_core is found; TE_MEMORY.
 */
TE_API te_status te_layer_open(te_runtime *runtime, const char *name, const char *options, te_layer **layer);
/* Free a layer, with what its forwards have kept and its scalings.
 * layer: The layer; NULL, or one that was freed, does nothing.
 */
TE_API void te_layer_free(te_layer *layer);
/* List what a layer takes and gives: inputs, then outputs, in the order in which te_forward takes them.
 * layer: The layer.
 * slots: Where the list is stored; it lives as long as the layer.
 * inputs: Where the number of inputs is stored.
 * outputs: Where the number of outputs is stored.
 * Fails: TE_ARGUMENT.
 */
TE_API te_status te_layer_slots(const te_layer *layer, const te_layer_slot **slots, int32_t *inputs, int32_t *outputs);

/* Compute a layer. Work is on the stream of the runtime: make a runtime for each stream.
 * layer: The layer.
 * scaling: State of a recipe with a history, which needs it; NULL for other recipes.
 * input: Tensors in the order of te_layer_slots, NULL for one that is left out.
 * inputs: How many; the last ones need not be named.
 * output: A tensor for each output that the options ask for; one whose data is NULL is allocated, and then the caller's
 *     (te_output_free).
 * outputs: How many.
 * saved: Where is stored what backward reads; inputs and outputs stay as they are until then. NULL keeps nothing.
 * Fails: TE_ARGUMENT for tensors that do not fit; TE_UNSUPPORTED; TE_LIBRARY; TE_MEMORY.
 */
TE_API te_status te_forward(te_layer *layer, te_scaling *scaling, DLTensor *const *input, int32_t inputs,
                            DLTensor *const *output, int32_t outputs, te_saved **saved);
/* Compute gradients of a forward.
 * layer: The layer.
 * scaling: The state that forward had.
 * saved: What forward kept; freed unless the call fails.
 * gradient_of_output: Gradients of forward's outputs; behind the first one NULL for an output that was not used.
 * outputs: How many.
 * gradient: Where gradients of forward's inputs are written; one that is NULL is not computed, and one whose data is NULL
 *     is allocated, and then the caller's.
 * inputs: How many.
 * Fails: As te_forward, and TE_ARGUMENT for what another layer kept, or what was freed.
 */
TE_API te_status te_backward(te_layer *layer, te_scaling *scaling, te_saved *saved, DLTensor *const *gradient_of_output,
                             int32_t outputs, DLTensor *const *gradient, int32_t inputs);
/* Free what no backward will read.
 * saved: What forward kept; NULL, or what was freed, does nothing.
 */
TE_API void te_saved_free(te_saved *saved);

/* Make the state of a layer whose recipe has a history; the state of another recipe is empty.
 * layer: The layer, which has to outlive the state.
 * scaling: Where the state is stored, NULL if it fails.
 * Fails: TE_ARGUMENT; TE_UNSUPPORTED where no interpreter may be used; TE_LIBRARY; TE_MEMORY.
 */
TE_API te_status te_scaling_create(te_layer *layer, te_scaling **scaling);
/* Compute the next scales from the largest values since the last update. Call it once behind each step.
 * runtime: The runtime of these layers.
 * scalings: States of its layers.
 * count: How many, at most 2000.
 * Fails: TE_ARGUMENT, also for a state of another runtime; TE_UNSUPPORTED; TE_LIBRARY; TE_MEMORY.
 */
TE_API te_status te_scaling_update(te_runtime *runtime, te_scaling *const *scalings, int32_t count);
/* Free a state.
 * scaling: The state; NULL, or one that was freed, does nothing.
 */
TE_API void te_scaling_free(te_scaling *scaling);

/* Write what was recorded for a layer into a program file, for te_program_load: entries "forward", "backward" and
 * "update", for further shapes "forward.2" and so on.
 * layer: A layer on a GPU that has been called.
 * path: The file, which is replaced.
 * Fails: TE_ARGUMENT where nothing was recorded, or the file cannot be written; TE_UNSUPPORTED for a layer on the CPU, and
 *     where no interpreter may be used; TE_LIBRARY; TE_MEMORY.
 */
TE_API te_status te_layer_save(te_layer *layer, const char *path);

#ifdef __cplusplus
}
#endif
#endif
