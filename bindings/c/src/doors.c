/* The libraries that the player calls: found by dlopen, one function after the other. */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

static te_status not_there(const char *what, const char *found, const char *to_do) {
    return te_fail(TE_LIBRARY, what, "a library of NVIDIA's with all the functions of CUDA 12.8 or later", to_do,
                   "%.250s", found == NULL ? "nothing" : found);
}

/* ISO C knows no way from an object's address to a function's; POSIX demands that this works. */
static bool find(void *library, const char *name, void *place) {
    void *found = dlsym(library, name);
    memcpy(place, &found, sizeof found);
    return found != NULL;
}

te_status te_doors_open(te_doors *doors, const char *path) {
    const char *to_do = "install the NVIDIA driver, or name libcuda.so.1 by te_runtime_options or TE_LIBCUDA";
    if (path == NULL) path = getenv("TE_LIBCUDA");
    if (path == NULL) path = "libcuda.so.1";
    doors->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (doors->library == NULL) return not_there("load the CUDA driver", dlerror(), to_do);
#define X(name, arguments)                                                                                             \
    if (!find(doors->library, #name, &doors->name)) return not_there("load the CUDA driver", "no " #name, to_do);
    TE_DRIVER(X)
#undef X
    return TE_OK;
}

/* A library without one of the functions counts as none: the next call looks again. */
static bool kept(void *library, const char *missing, void **place) {
    if (missing == NULL) *place = library;
    else (void)dlclose(library);
    return missing == NULL;
}

te_status te_doors_open_lt(te_doors *doors, const char *path) {
    const char *to_do = "install cuBLAS, or name libcublasLt by te_runtime_options or TE_LIBCUBLASLT";
    if (path == NULL) path = getenv("TE_LIBCUBLASLT");
    void *library = dlopen(path == NULL ? "libcublasLt.so.13" : path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL && path == NULL) library = dlopen("libcublasLt.so.12", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) return not_there("load cuBLASLt", dlerror(), to_do);
    const char *missing = find(library, "cublasLtGetVersion", &doors->cublasLtGetVersion) ? NULL : "no cublasLtGetVersion";
#define X(name, arguments)                                                                                             \
    if (!find(library, #name, &doors->name)) missing = "no " #name;
    TE_CUBLASLT(X)
#undef X
    return kept(library, missing, &doors->lt_library) ? TE_OK : not_there("load cuBLASLt", missing, to_do);
}

te_status te_doors_open_cudnn(te_doors *doors, const char *path) {
    const char *to_do = "install cuDNN 9, or name libcudnn.so.9 by te_runtime_options or TE_LIBCUDNN";
    if (path == NULL) path = getenv("TE_LIBCUDNN");
    void *library = dlopen(path == NULL ? "libcudnn.so.9" : path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) return not_there("load cuDNN", dlerror(), to_do);
    const char *missing = find(library, "cudnnGetVersion", &doors->cudnnGetVersion) ? NULL : "no cudnnGetVersion";
    if (!find(library, "cudnnGetLastErrorString", &doors->cudnnGetLastErrorString)) missing = "no cudnnGetLastErrorString";
#define X(name, arguments)                                                                                             \
    if (!find(library, #name, &doors->name)) missing = "no " #name;
    TE_CUDNN(X)
#undef X
    return kept(library, missing, &doors->cudnn_library) ? TE_OK : not_there("load cuDNN", missing, to_do);
}

void te_doors_close(te_doors *doors) {
    if (doors->cudnn_library != NULL) (void)dlclose(doors->cudnn_library);
    if (doors->lt_library != NULL) (void)dlclose(doors->lt_library);
    if (doors->library != NULL) (void)dlclose(doors->library);
}

te_status te_driver_failed(const te_doors *doors, const char *call, int status) {
    const char *name = NULL, *text = NULL;
    (void)doors->cuGetErrorName(status, &name);
    (void)doors->cuGetErrorString(status, &text);
    return te_fail(status == 2 ? TE_MEMORY : TE_LIBRARY, call, "success",
                   "see the message; an earlier kernel's fault may be reported here", "%s (%d): %s",
                   name == NULL ? "?" : name, status, text == NULL ? "" : text);
}
