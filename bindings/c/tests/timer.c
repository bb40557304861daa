/* Nanoseconds of the host's time that a call of te_program_run takes, without what a call from Python costs. */
#include <time.h>

__attribute__((visibility("default"))) double te_time(int (*play)(void *, const void *), void *program, const void *run,
                                                      int calls) {
    struct timespec begin, end;
    (void)timespec_get(&begin, TIME_UTC);
    for (int i = 0; i < calls; i++)
        if (play(program, run)) return -1;
    (void)timespec_get(&end, TIME_UTC);
    return ((double)(end.tv_sec - begin.tv_sec) * 1e9 + (double)(end.tv_nsec - begin.tv_nsec)) / calls;
}
