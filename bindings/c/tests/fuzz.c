/* fuzz STUB FILE COUNT SEED: so many broken files are loaded, and played where they load. Sanitizers watch. */
#include <stdio.h>
#include <stdlib.h>

#include "broken.h"
#include "te_core.h"

int main(int count, char **words) {
    if (count != 5) return 2;
    size_t bytes = 0;
    unsigned char *whole = content_of(words[2], &bytes);
    te_runtime_options options = TE_RUNTIME_OPTIONS;
    te_runtime *runtime;
    options.libcuda = options.libcublaslt = options.libcudnn = words[1];
    if (whole == NULL || te_runtime_create(&options, &runtime) != TE_OK) return 3;
    const long many = strtol(words[3], NULL, 10);
    const uint64_t first = strtoull(words[4], NULL, 10);
    long loaded = 0;
    if (!load_and_play(runtime, whole, bytes)) return 4;
    for (long i = 0; i < many; i++) {
        uint64_t seed = first * 1000000007U + (uint64_t)i;
        size_t size;
        unsigned char *broken = broken_copy(whole, bytes, &seed, &size);
        loaded += load_and_play(runtime, broken, size);
        free(broken);
    }
    if (!load_and_play(runtime, whole, bytes)) return 5; /* nothing was left broken */
    te_runtime_destroy(runtime);
    free(whole);
    printf("%ld broken files, of which %ld load and play\n", many, loaded);
    return 0;
}
