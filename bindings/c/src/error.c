/* What went wrong, of each thread: four parts, as the errors of te_core have. */
#include <stdarg.h>
#include <stdio.h>

#include "internal.h"

typedef struct {
    te_error_info info;
    char operation[96], got[320], allowed[192], to_do[192], message[880];
} te_last;

static _Thread_local te_last last;

te_status te_fail(te_status status, const char *operation, const char *allowed, const char *to_do, const char *got,
                  ...) {
    va_list more;
    va_start(more, got);
    (void)vsnprintf(last.got, sizeof last.got, got, more);
    va_end(more);
    (void)snprintf(last.operation, sizeof last.operation, "%s", operation);
    (void)snprintf(last.allowed, sizeof last.allowed, "%s", allowed);
    (void)snprintf(last.to_do, sizeof last.to_do, "%s", to_do);
    last.info.status = status;
    last.info.step = -1;
    return status;
}

void te_at_step(int32_t step) { last.info.step = step; }

const te_error_info *te_error(void) {
    te_last *l = &last;
    char where[32] = "";
    if (l->info.status != TE_OK && l->info.step >= 0)
        (void)snprintf(where, sizeof where, " in step %d", (int)l->info.step);
    if (l->info.status == TE_OK) {
        l->info.step = -1;
        l->message[0] = '\0';
    } else {
        (void)snprintf(l->message, sizeof l->message, "%.95s%s: got %.319s. Allowed: %.191s. To do: %.191s.",
                       l->operation, where, l->got, l->allowed, l->to_do);
    }
    l->info.size = sizeof l->info;
    l->info.operation = l->operation;
    l->info.got = l->got;
    l->info.allowed = l->allowed;
    l->info.to_do = l->to_do;
    l->info.message = l->message;
    return &l->info;
}
