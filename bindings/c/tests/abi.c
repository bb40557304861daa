/* Prints what callers are built against: sizes, offsets, values. bindings/c/abi.txt has it; a test compares. */
#include <stdio.h>

#include "te_core.h"

#define SIZE(type) printf("sizeof %s = %zu\n", #type, sizeof(type))
#define AT(type, field) printf("  %s.%s at %zu\n", #type, #field, offsetof(type, field))
#define VALUE(name) printf("%s = %d\n", #name, (int)name)

int main(void) {
    SIZE(DLTensor);
    AT(DLTensor, data), AT(DLTensor, device), AT(DLTensor, ndim), AT(DLTensor, dtype), AT(DLTensor, shape);
    AT(DLTensor, strides), AT(DLTensor, byte_offset);
    SIZE(te_runtime_options);
    AT(te_runtime_options, size), AT(te_runtime_options, device_type), AT(te_runtime_options, device_id);
    AT(te_runtime_options, stream), AT(te_runtime_options, alloc), AT(te_runtime_options, free);
    AT(te_runtime_options, user), AT(te_runtime_options, libcuda), AT(te_runtime_options, libcublaslt);
    AT(te_runtime_options, libcudnn);
    SIZE(te_error_info);
    AT(te_error_info, size), AT(te_error_info, status), AT(te_error_info, operation), AT(te_error_info, got);
    AT(te_error_info, allowed), AT(te_error_info, to_do), AT(te_error_info, message), AT(te_error_info, step);
    SIZE(te_slot);
    AT(te_slot, size), AT(te_slot, name), AT(te_slot, role), AT(te_slot, dtype), AT(te_slot, ndim), AT(te_slot, shape);
    AT(te_slot, strides), AT(te_slot, bytes), AT(te_slot, alignment), AT(te_slot, written);
    SIZE(te_run);
    AT(te_run, size), AT(te_run, entry), AT(te_run, inputs), AT(te_run, outputs), AT(te_run, input);
    AT(te_run, output), AT(te_run, stream), AT(te_run, block), AT(te_run, block_bytes);
    SIZE(te_python_options);
    AT(te_python_options, size), AT(te_python_options, libpython), AT(te_python_options, environment);
    AT(te_python_options, forbidden);
    SIZE(te_layer_slot);
    AT(te_layer_slot, size), AT(te_layer_slot, name), AT(te_layer_slot, shape), AT(te_layer_slot, dtypes);
    AT(te_layer_slot, role), AT(te_layer_slot, optional), AT(te_layer_slot, gradient);
    VALUE(TE_OK), VALUE(TE_ARGUMENT), VALUE(TE_UNSUPPORTED), VALUE(TE_LIBRARY), VALUE(TE_BROKEN), VALUE(TE_STALE);
    VALUE(TE_MEMORY), VALUE(TE_INPUT), VALUE(TE_STATE), VALUE(TE_OUTPUT), VALUE(TE_SAVED);
    VALUE(TE_PYTHON_NONE), VALUE(TE_PYTHON_HOST), VALUE(TE_PYTHON_OURS), VALUE(TE_PYTHON_FORBIDDEN);
    VALUE(TE_PYTHON_CLOSED), VALUE(TE_PYTHON_FORKED);
    return 0;
}
