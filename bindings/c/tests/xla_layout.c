/* Fails to compile where what src/xla.h declares differs from the header that jaxlib ships:
 * cc -fsyntax-only -I include -I INCLUDE_OF_JAXLIB tests/xla_layout.c. It needs nothing else of the FFI. */
#include <assert.h>

#include "../src/xla.h"
#include "xla/ffi/api/c_api.h"

#define SIZE(ours, theirs) static_assert(sizeof(ours) == sizeof(theirs), #theirs)
#define AT(ours, field, theirs, other)                                                                                 \
    static_assert(offsetof(ours, field) == offsetof(theirs, other) &&                                                  \
                      sizeof(((ours *)0)->field) == sizeof(((theirs *)0)->other),                                      \
                  #theirs "." #other)
#define FUNCTION(number, name)                                                                                         \
    static_assert(offsetof(xla_api, functions) + (number) * sizeof(void *) == offsetof(XLA_FFI_Api, name), #name)

static_assert(XLA_MAJOR == XLA_FFI_API_MAJOR, "major version");
static_assert(XLA_OLDEST <= XLA_FFI_API_MINOR && XLA_FFI_API_MINOR <= XLA_NEWEST, "minor version");
static_assert((int)XLA_INITIALIZE == (int)XLA_FFI_ExecutionStage_INITIALIZE, "stage");
static_assert((int)XLA_EXECUTE == (int)XLA_FFI_ExecutionStage_EXECUTE, "stage");
static_assert((int)XLA_METADATA == (int)XLA_FFI_Extension_Metadata, "extension");
static_assert((int)XLA_SCALAR == (int)XLA_FFI_AttrType_SCALAR, "attribute");
static_assert((int)XLA_INTERNAL == (int)XLA_FFI_Error_Code_INTERNAL, "error");
static_assert((int)XLA_CAPTURED == (int)XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE, "trait");

FUNCTION(XLA_CREATE_ERROR, XLA_FFI_Error_Create);
FUNCTION(XLA_DESTROY_ERROR, XLA_FFI_Error_Destroy);
FUNCTION(XLA_GET_STREAM, XLA_FFI_Stream_Get);
FUNCTION(XLA_GET_DEVICE, XLA_FFI_DeviceOrdinal_Get);

SIZE(xla_version, XLA_FFI_Api_Version);
AT(xla_version, major, XLA_FFI_Api_Version, major_version);
AT(xla_version, minor, XLA_FFI_Api_Version, minor_version);
SIZE(xla_metadata, XLA_FFI_Metadata);
AT(xla_metadata, version, XLA_FFI_Metadata, api_version);
AT(xla_metadata, traits, XLA_FFI_Metadata, traits);
SIZE(xla_question, XLA_FFI_Metadata_Extension);
AT(xla_question, base.type, XLA_FFI_Metadata_Extension, extension_base.type);
AT(xla_question, metadata, XLA_FFI_Metadata_Extension, metadata);
SIZE(xla_buffer, XLA_FFI_Buffer);
AT(xla_buffer, data, XLA_FFI_Buffer, data);
SIZE(xla_buffers, XLA_FFI_Args);
AT(xla_buffers, count, XLA_FFI_Args, size);
AT(xla_buffers, items, XLA_FFI_Args, args);
SIZE(xla_buffers, XLA_FFI_Rets);
AT(xla_buffers, items, XLA_FFI_Rets, rets);
SIZE(xla_attributes, XLA_FFI_Attrs);
AT(xla_attributes, count, XLA_FFI_Attrs, size);
AT(xla_attributes, types, XLA_FFI_Attrs, types);
AT(xla_attributes, items, XLA_FFI_Attrs, attrs);
SIZE(xla_scalar, XLA_FFI_Scalar);
AT(xla_scalar, value, XLA_FFI_Scalar, value);
SIZE(xla_frame, XLA_FFI_CallFrame);
AT(xla_frame, extension, XLA_FFI_CallFrame, extension_start);
AT(xla_frame, api, XLA_FFI_CallFrame, api);
AT(xla_frame, context, XLA_FFI_CallFrame, ctx);
AT(xla_frame, stage, XLA_FFI_CallFrame, stage);
AT(xla_frame, operands, XLA_FFI_CallFrame, args);
AT(xla_frame, results, XLA_FFI_CallFrame, rets);
AT(xla_frame, attributes, XLA_FFI_CallFrame, attrs);
AT(xla_api, version, XLA_FFI_Api, api_version);
SIZE(xla_create_error, XLA_FFI_Error_Create_Args);
AT(xla_create_error, message, XLA_FFI_Error_Create_Args, message);
AT(xla_create_error, code, XLA_FFI_Error_Create_Args, errc);
SIZE(xla_destroy_error, XLA_FFI_Error_Destroy_Args);
AT(xla_destroy_error, error, XLA_FFI_Error_Destroy_Args, error);
SIZE(xla_get_stream, XLA_FFI_Stream_Get_Args);
AT(xla_get_stream, context, XLA_FFI_Stream_Get_Args, ctx);
AT(xla_get_stream, stream, XLA_FFI_Stream_Get_Args, stream);
SIZE(xla_get_device, XLA_FFI_DeviceOrdinal_Get_Args);
AT(xla_get_device, device, XLA_FFI_DeviceOrdinal_Get_Args, device_ordinal);
