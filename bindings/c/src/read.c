/* Reading a program's file: from where nobody else may write, as te_core/cache.py has it. */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "internal.h"

static te_status refused(const char *path, const char *reason) {
    return te_fail(TE_ARGUMENT, "te_program_load", "a file that only its owner (you or root) may write to, in such a "
                   "folder: a program is code", "correct the path, or chmod go-w what you trust", "%.200s: %s", path,
                   reason);
}

/* Who else could have put something there. */
static const char *distrusted(const struct stat *found) {
    if (found->st_uid != geteuid() && found->st_uid != 0) return "somebody else owns it";
    if (found->st_mode & (S_IWGRP | S_IWOTH)) return "others may write to it";
    return NULL;
}

static te_status content_of(int handle, const char *path, unsigned char **content, size_t *bytes) {
    struct stat found;
    const char *reason = NULL;
    if (fstat(handle, &found) != 0) return refused(path, strerror(errno));
    if (!S_ISREG(found.st_mode)) reason = "it is no file";
    if (reason == NULL) reason = distrusted(&found);
    if (reason != NULL) return refused(path, reason);
    const size_t size = (size_t)found.st_size;
    unsigned char *made = malloc(size + 1);
    if (made == NULL) return te_fail(TE_MEMORY, "te_program_load", "enough memory", "free some", "%zu bytes", size);
    size_t have = 0;
    while (have < size) {
        const ssize_t more = read(handle, made + have, size - have);
        if (more < 0 && errno == EINTR) continue;
        if (more <= 0) {
            free(made);
            return refused(path, more < 0 ? strerror(errno) : "it became shorter");
        }
        have += (size_t)more;
    }
    *content = made;
    *bytes = size;
    return TE_OK;
}

te_status te_file_read(const char *path, unsigned char **content, size_t *bytes) {
    const char *slash = strrchr(path, '/');
    const size_t length = slash == NULL ? 0 : (size_t)(slash - path);
    char *folder = malloc(length + 2);
    if (folder == NULL) return te_fail(TE_MEMORY, "te_program_load", "enough memory", "free some", "%zu bytes", length);
    memcpy(folder, path, length);
    memcpy(folder + length, length ? "" : slash == NULL ? "." : "/", length ? 1 : 2);
    const int above = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    free(folder);
    if (above < 0) return refused(path, strerror(errno));
    struct stat found;
    te_status status = TE_OK;
    if (fstat(above, &found) != 0 || distrusted(&found) != NULL) status = refused(path, "others may write to its folder");
    if (status == TE_OK) {
        /* NONBLOCK: to open a FIFO would wait for a writer. */
        const int handle = openat(above, slash == NULL ? path : slash + 1, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
        status = handle < 0 ? refused(path, strerror(errno)) : content_of(handle, path, content, bytes);
        if (handle >= 0) (void)close(handle);
    }
    (void)close(above);
    return status;
}
