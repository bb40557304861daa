/* Broken files: copies of a whole one, changed in a way that the seed says. */
#ifndef TE_BROKEN_H
#define TE_BROKEN_H

#include <stddef.h>
#include <stdint.h>

uint64_t next_random(uint64_t *seed);
/* Ours to free. Most are sealed again with a right digest, so that the loader looks behind it. */
unsigned char *broken_copy(const unsigned char *whole, size_t bytes, uint64_t *seed, size_t *size);
unsigned char *content_of(const char *path, size_t *bytes);

typedef struct te_runtime te_runtime;
/* Load it, and if that goes well play all entries on memory that is not there, by callbacks and in a block. Whether it
 * was loaded. */
int load_and_play(te_runtime *runtime, const unsigned char *content, size_t bytes);

#endif
