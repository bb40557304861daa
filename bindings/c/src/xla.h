/* XLA's FFI, as far as the handler of te_jax reads it, and that handler.
 *
 * The structures are those of versions 0.3 and 0.4 (JAX 0.10 and 0.11). A test compares them with the header that jaxlib
 * ships (tests/xla_layout.c). */
#ifndef TE_XLA_H
#define TE_XLA_H

#include "te_core.h"

enum { XLA_MAJOR = 0, XLA_OLDEST = 3, XLA_NEWEST = 4 };
enum { XLA_INITIALIZE = 2, XLA_EXECUTE = 3, XLA_METADATA = 1, XLA_SCALAR = 3, XLA_CAPTURED = 1, XLA_INTERNAL = 13 };
enum { XLA_CREATE_ERROR = 0, XLA_DESTROY_ERROR = 2, XLA_GET_STREAM = 4, XLA_GET_DEVICE = 17, XLA_FUNCTIONS = 18 };

typedef struct xla_extension {
    size_t size;
    int type;
    struct xla_extension *next;
} xla_extension;
/* A structure of XLA's: nearly all begin with their size and a list of extensions. */
#define XLA(name, fields)            \
    typedef struct {                 \
        size_t size;                 \
        xla_extension *extension;    \
        fields                       \
    } name
XLA(xla_version, int major; int minor;);
XLA(xla_buffer, int dtype; void *data; int64_t rank; int64_t *dims;);
XLA(xla_buffers, int64_t count; int *types; void **items;);
XLA(xla_attributes, int64_t count; int *types; void **names; void **items;);
XLA(xla_api, xla_version version; const void *internal; void *(*functions[XLA_FUNCTIONS])(void *arguments););
XLA(xla_frame, const xla_api *api; void *context; int stage; xla_buffers operands; xla_buffers results;
    xla_attributes attributes; void *future;);
/* What its functions are given, which return an error, or NULL. */
XLA(xla_create_error, const char *message; int code;);
XLA(xla_destroy_error, void *error;);
XLA(xla_get_stream, void *context; void *stream;);
XLA(xla_get_device, void *context; int32_t device;);
typedef struct {
    int dtype;
    void *value;
} xla_scalar;
typedef struct {
    size_t size;
    xla_version version;
    uint32_t traits;
    int64_t state_type;
} xla_metadata;
typedef struct {
    xla_extension base;
    xla_metadata *metadata;
} xla_question;

/* Let calls of XLA's find work by the number that they carry: a program of one entry, whose slots lie in the buffers of the
 * call, its operands and then its results. The work stays: an XLA program may outlive all that made it. Paths of
 * libraries, NULL where the program needs none. */
TE_API te_status te_xla_add(int64_t digest, const void *content, size_t bytes, int32_t buffers, int32_t slots,
                            const int32_t *buffer, const uint64_t *offset, const char *libcublaslt,
                            const char *libcudnn);
/* Load its program onto a device, so that no call has to. */
TE_API te_status te_xla_load(int64_t digest, int32_t device);
/* How often XLA has called it, or recorded it in a command buffer; -1: the work is not known. */
TE_API int64_t te_xla_calls(int64_t digest);
/* XLA's handler, in all stages: NULL, or an error of XLA's. It may be part of command buffers. */
TE_API void *te_xla_tape(xla_frame *frame);

#endif
