/* The tables of a file: each number is checked against what it counts, before anything uses it. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

static const size_t RECORD[T_COUNT] = {
    1, 1, sizeof(f_fact), sizeof(f_module), sizeof(f_function), sizeof(f_product), sizeof(f_attribute), sizeof(f_module),
    sizeof(f_plan), sizeof(f_way), sizeof(f_entry), sizeof(f_slot), sizeof(int64_t), sizeof(f_step), sizeof(uint64_t),
    sizeof(f_patch), sizeof(f_piece)};
_Static_assert(sizeof(f_product) == 152 && sizeof(f_entry) == 72 && sizeof(f_slot) == 56 && sizeof(f_step) == 32,
               "records are laid out as te_core/tape/program_file.py packs them");
_Static_assert(sizeof(f_piece) == 40 && sizeof(f_function) == 24 && sizeof(f_patch) == 16 && sizeof(f_plan) == 32, "the same");

static te_status broken(const char *what, uint64_t number) {
    return te_fail(TE_BROKEN, "te_program_load", "a whole file of te_core.record, format 2",
                   "record the program again", "%s (%llu)", what, (unsigned long long)number);
}
#define CHECK(holds, what, number)                                                                                     \
    do {                                                                                                               \
        if (!(holds)) return broken(what, (uint64_t)(number));                                                         \
    } while (0)

static uint32_t u32(const unsigned char *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}
static uint64_t u64(const unsigned char *p) { return u32(p) | (uint64_t)u32(p + 4) << 32; }

static bool range(uint64_t first, uint64_t count, uint64_t of) { return first <= of && count <= of - first; }

static te_status check_text(const te_file *file, f_text text) {
    CHECK(text.length <= 4096 && range(text.start, text.length, file->count[T_TEXT]), "a text that lies nowhere", text.start);
    CHECK(memchr(file->text + text.start, 0, text.length) == NULL, "a text with a zero in it", text.start);
    return TE_OK;
}
#define CHECK_TEXT(text)                                                                                               \
    do {                                                                                                               \
        if (check_text(file, text) != TE_OK) return TE_BROKEN;                                                         \
    } while (0)

static te_status check_code(const te_file *file) {
    for (uint64_t i = 0; i < file->count[T_FACTS]; i++) {
        CHECK_TEXT(file->facts[i].key);
        CHECK_TEXT(file->facts[i].value);
    }
    for (uint64_t i = 0; i < file->count[T_MODULES]; i++) {
        const f_module *m = &file->modules[i];
        CHECK(m->bytes > 0 && m->bytes < UINT64_MAX && range(m->start, m->bytes + 1, file->count[T_DATA]),
              "a module that lies nowhere", i);
        CHECK(m->start % 16 == 0 && file->data[m->start + m->bytes] == 0, "a module without an end", i);
    }
    for (uint64_t i = 0; i < file->count[T_FUNCTIONS]; i++) {
        const f_function *f = &file->functions[i];
        CHECK_TEXT(f->name);
        CHECK_TEXT(f->letters);
        CHECK(f->module < file->count[T_MODULES], "a function of no module", i);
        CHECK(f->letters.length <= MOST_ARGUMENTS, "a function of too many arguments", i);
        const char *letters = file->text + f->letters.start;
        for (uint32_t k = 0; k < f->letters.length; k++)
            CHECK(strchr("prqif", letters[k]) != NULL || (letters[k] == 'b' && f->letters.length == 1),
                  "a function's argument of no kind", i);
    }
    CHECK(range(0, file->count[T_WAYS], MOST_WAYS) && file->count[T_WAYS] > 0, "streams", file->count[T_WAYS]);
    for (uint64_t i = 0; i < file->count[T_WAYS]; i++) {
        CHECK_TEXT(file->ways[i].name);
        CHECK(i == 0 || file->ways[i].parent < i, "a stream beside none", i);
    }
    return TE_OK;
}

static te_status check_products(const te_file *file) {
    uint64_t attributes = 0;
    for (uint64_t i = 0; i < file->count[T_PRODUCTS]; i++) {
        const f_product *p = &file->products[i];
        CHECK_TEXT(p->text);
        CHECK(p->attributes == attributes && p->pointers == attributes + p->attribute_count, "another's attributes", i);
        attributes += (uint64_t)p->attribute_count + p->pointer_count;
        CHECK(range(p->attributes, p->attribute_count, file->count[T_ATTRIBUTES]), "a product's attributes", i);
        CHECK(range(p->pointers, p->pointer_count, file->count[T_ATTRIBUTES]), "a product's pointers", i);
        CHECK(p->pointer_count <= MOST_POINTERS && p->flags <= (P_DEVICE_ALPHA | P_ADDS), "a product's pointers", i);
        CHECK(p->algorithm % 16 == 0 && range(p->algorithm, ALGORITHM, file->count[T_DATA]), "an algorithm", i);
        CHECK(p->compute <= INT32_MAX && p->scale <= INT32_MAX, "a product's types", i);
        for (int k = 0; k < 3; k++)
            CHECK(p->layouts[k].dtype <= INT32_MAX && p->layouts[k].rows <= INT64_MAX && p->layouts[k].ld >= 0,
                  "a product's layout", i);
    }
    CHECK(attributes == file->count[T_ATTRIBUTES], "attributes of no product", attributes);
    for (uint64_t i = 0; i < attributes; i++) {
        const uint32_t bytes = file->attributes[i].bytes;
        CHECK(bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8, "an attribute's bytes", i);
        CHECK(file->attributes[i].attribute <= INT32_MAX, "an attribute", i);
    }
    return TE_OK;
}

static te_status check_plans(const te_file *file) {
    for (uint64_t i = 0; i < file->count[T_CONTENTS]; i++) {
        const f_module *c = &file->contents[i];
        CHECK(c->bytes && range(c->start, c->bytes, file->count[T_DATA]), "content that lies nowhere", i);
    }
    for (uint64_t i = 0; i < file->count[T_PLANS]; i++) {
        const f_plan *p = &file->plans[i];
        CHECK_TEXT(p->text);
        CHECK(p->content < file->count[T_CONTENTS], "a plan without content", i);
        CHECK(p->tensors && p->tensors <= MOST_OPERANDS, "a plan's tensors", i);
        CHECK(range(p->numbers, 2 * (uint64_t)p->tensors, file->count[T_NUMBERS]), "a plan's tensors", i);
        for (uint32_t k = 0; k < p->tensors; k++) {
            const int64_t kind = file->numbers[p->numbers + p->tensors + k];
            CHECK(kind >= A_READ && kind <= A_WRITTEN, "a plan's tensor of no kind", i);
        }
    }
    return TE_OK;
}

te_status te_file_check(te_file *file, unsigned char *content, size_t bytes) {
    const union {
        uint32_t number;
        unsigned char first;
    } order = {1};
    unsigned char digest[32];
    file->content = content;
    file->bytes = bytes;
    CHECK(order.first == 1, "a file on a machine that is not little-endian", 0);
    CHECK(bytes >= F_HEADER && memcmp(content, "TEPROGRM", 8) == 0, "a file that is no program", bytes);
    CHECK(u32(content + 8) == F_VERSION, "a program of another version", u32(content + 8));
    CHECK(u32(content + 12) == F_HEADER && u64(content + 16) == bytes, "a file of another size", bytes);
    te_sha256(content + F_HEAD, bytes - F_HEAD, digest);
    CHECK(memcmp(digest, content + 24, sizeof digest) == 0, "a damaged file, by its digest", bytes);
    const unsigned char *tables[T_COUNT];
    for (int i = 0; i < T_COUNT; i++) {
        const uint64_t start = u64(content + F_HEAD + 16 * i), count = u64(content + F_HEAD + 16 * i + 8);
        CHECK(start % 16 == 0 && start >= F_HEADER && start <= bytes, "a table that lies nowhere", i);
        CHECK(count <= (bytes - start) / RECORD[i] && count <= UINT32_MAX, "a table that is too long", i);
        tables[i] = content + start;
        file->count[i] = count;
    }
    file->text = (const char *)tables[T_TEXT];
    file->data = tables[T_DATA];
    file->facts = (const void *)tables[T_FACTS];
    file->modules = (const void *)tables[T_MODULES];
    file->functions = (const void *)tables[T_FUNCTIONS];
    file->products = (const void *)tables[T_PRODUCTS];
    file->attributes = (const void *)tables[T_ATTRIBUTES];
    file->contents = (const void *)tables[T_CONTENTS];
    file->plans = (const void *)tables[T_PLANS];
    file->ways = (const void *)tables[T_WAYS];
    file->entries = (const void *)tables[T_ENTRIES];
    file->slots = (const void *)tables[T_SLOTS];
    file->numbers = (const void *)tables[T_NUMBERS];
    file->steps = (const void *)tables[T_STEPS];
    file->words = (const void *)tables[T_WORDS];
    file->patches = (const void *)tables[T_PATCHES];
    file->pieces = (const void *)tables[T_PIECES];
    te_status status = check_code(file);
    if (status == TE_OK) status = check_products(file);
    if (status == TE_OK) status = check_plans(file);
    return status == TE_OK ? te_file_check_entries(file) : status;
}
