/* The entries of a file: slots, and steps that reach them only while they are there. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

static te_status broken(const char *what, uint32_t entry, uint64_t number) {
    return te_fail(TE_BROKEN, "te_program_load", "a whole file of te_core.record, format 2",
                   "record the program again", "%s (entry %u, %llu)", what, entry, (unsigned long long)number);
}
#define CHECK(holds, what, number)                                                                                     \
    do {                                                                                                               \
        if (!(holds)) return broken(what, at->number_, (uint64_t)(number));                                            \
    } while (0)

/* An entry as its steps are gone through: which slots have memory. */
typedef struct {
    const te_file *file;
    const f_entry *e;
    const f_slot *slots;
    unsigned char *there;
    uint32_t number_;
    uint64_t words, patches; /* of the steps so far: each has its own, so that a check takes no longer than the file */
} te_walk;

static bool range(uint64_t first, uint64_t count, uint64_t of) { return first <= of && count <= of - first; }

static bool text_fits(const te_file *file, f_text text) {
    return text.length <= 1 << 16 && range(text.start, text.length, file->count[T_TEXT]) &&
           memchr(file->text + text.start, 0, text.length) == NULL;
}

/* The bytes of a dense tensor; UINT64_MAX: they are no number. */
static uint64_t bytes_of(const int64_t *shape, uint32_t ndim, uint32_t bits) {
    uint64_t elements = 1;
    for (uint32_t i = 0; i < ndim; i++)
        if (shape[i] == 0) return 0;
    for (uint32_t i = 0; i < ndim; i++) {
        if (shape[i] < 0 || elements > (UINT64_C(1) << 56) / (uint64_t)shape[i]) return UINT64_MAX;
        elements *= (uint64_t)shape[i];
    }
    return (elements * bits + 7) / 8;
}

static bool dtype_fits(uint32_t code, uint32_t bits) {
    return code <= 255 && (bits == 4 || bits == 8 || bits == 16 || bits == 32 || bits == 64);
}

static te_status check_slots(const te_walk *at) {
    const te_file *file = at->file;
    for (uint32_t i = 0; i < at->e->slot_count; i++) {
        const f_slot *s = &at->slots[i];
        CHECK(text_fits(file, s->name), "a slot's name", i);
        CHECK(s->role < R_COUNT && s->flags <= (S_WRITTEN | S_ZEROED | S_STRIDED), "a slot's role", i);
        CHECK((i < at->e->inputs) == (s->role == R_INPUT || s->role == R_STATE), "a slot among inputs", i);
        CHECK(dtype_fits(s->code, s->bits) && s->ndim <= MOST_DIMENSIONS, "a slot's dtype", i);
        const uint64_t numbers = (uint64_t)s->ndim * (s->flags & S_STRIDED ? 2 : 1);
        CHECK(range(s->dims, numbers, file->count[T_NUMBERS]), "a slot's shape", i);
        CHECK(s->bytes == bytes_of(file->numbers + s->dims, s->ndim, s->bits), "a slot's bytes", i);
        for (uint32_t k = 0; s->flags & S_STRIDED && k < s->ndim; k++)
            CHECK(file->numbers[s->dims + s->ndim + k] >= 0, "a slot's strides", i);
        CHECK(s->alignment && s->alignment <= 4096 && !(s->alignment & (s->alignment - 1)), "an alignment", i);
        CHECK(s->way < file->count[T_WAYS], "a slot's stream", i);
        CHECK(s->place == NOWHERE || (range(s->place, s->bytes, at->e->block) && s->place % 256 == 0),
              "a slot's place in the block", i);
        CHECK(!(s->flags & S_ZEROED) || s->role == R_SCRATCH, "memory that begins as zeros", i);
    }
    CHECK(at->e->block <= UINT64_C(1) << 60, "a block's bytes", at->e->block);
    return TE_OK;
}

/* The bytes that a step reaches from an address are not known, but for products and fills; the address is the slot's.
 * Of strided inputs the slot's bytes are those of the elements, without gaps. */
static te_status check_patch(const te_walk *at, const f_patch *p, uint64_t bytes, uint64_t step) {
    CHECK(p->slot < at->e->slot_count, "a step with memory of no slot", step);
    const f_slot *s = &at->slots[p->slot];
    CHECK(at->there[p->slot], "a step with memory that is not there", step);
    CHECK(range(p->offset, bytes, s->bytes), "a step with memory outside of a slot", step);
    CHECK(s->place != NOWHERE || s->role < R_SCRATCH, "a step with memory that has no place", step);
    return TE_OK;
}

static te_status check_launch(const te_walk *at, const f_step *s, uint64_t step) {
    const te_file *file = at->file;
    CHECK(s->target < file->count[T_FUNCTIONS], "a launch of no function", step);
    const f_text letters = file->functions[s->target].letters;
    const char *letter = file->text + letters.start;
    const uint64_t *words = file->words + s->words;
    const bool table = letters.length == 1 && letter[0] == 'b';
    CHECK((s->kind == K_TABLE) == table, "a launch with arguments of another kind", step);
    const uint64_t more = table ? ((uint64_t)s->other + 7) / 8 : letters.length;
    CHECK(s->word_count == SIZES + more && (!table || (s->other && s->other <= 32764)), "a launch's arguments", step);
    for (int i = 0; i < SIZES; i++) CHECK(words[i] <= INT32_MAX && (words[i] || i == 6), "a launch's sizes", step);
    for (uint32_t i = 0; !table && i < letters.length; i++)
        CHECK((letter[i] != 'p' && letter[i] != 'r') || !words[SIZES + i], "an address in a file", step);
    for (uint32_t i = 0; i < s->patch_count; i++) {
        const f_patch *p = &file->patches[s->patches + i];
        if (table) {
            CHECK(p->number % 8 == 0 && range(p->number, 8, s->other), "an address outside of a table", step);
        } else {
            CHECK(p->number >= SIZES && p->number < s->word_count, "an address for no argument", step);
            CHECK(strchr("pr", letter[p->number - SIZES]) != NULL, "an address for a number", step);
        }
        if (check_patch(at, p, 0, step) != TE_OK) return TE_BROKEN;
    }
    return TE_OK;
}

static te_status check_product(const te_walk *at, const f_step *s, uint64_t step) {
    const te_file *file = at->file;
    CHECK(s->target < file->count[T_PRODUCTS], "a product of no number", step);
    const f_product *p = &file->products[s->target];
    CHECK(s->word_count == 5 + p->pointer_count, "a product's arguments", step);
    for (uint32_t i = 0; i < s->word_count; i++) CHECK(!file->words[s->words + i], "an address in a file", step);
    uint32_t found = 0;
    for (uint32_t i = 0; i < s->patch_count; i++) {
        const f_patch *one = &file->patches[s->patches + i];
        CHECK(one->number < s->word_count, "an address for no argument", step);
        found |= UINT32_C(1) << one->number;
        if (check_patch(at, one, one->number == 0 ? p->workspace : one->number == 4 ? 8 : 0, step) != TE_OK)
            return TE_BROKEN;
    }
    CHECK(!p->workspace || found & 1, "a product without its workspace", step);
    CHECK(!(p->flags & P_DEVICE_ALPHA) == !(found & 16), "a product's alpha", step);
    CHECK((found & 14) == 14, "a product without an operand", step);
    return TE_OK;
}

static te_status check_attention(const te_walk *at, const f_step *s, uint64_t step) {
    const te_file *file = at->file;
    CHECK(s->target < file->count[T_PLANS], "attention of no plan", step);
    const f_plan *plan = &file->plans[s->target];
    const int64_t *kinds = file->numbers + plan->numbers + plan->tensors;
    CHECK(s->word_count == 1 + plan->tensors, "attention's arguments", step);
    uint64_t found = 0;
    for (uint32_t i = 0; i < s->patch_count; i++) {
        const f_patch *one = &file->patches[s->patches + i];
        CHECK(one->number < s->word_count, "an address for no argument", step);
        CHECK(!one->number || kinds[one->number - 1] != A_VALUE, "an address for a number", step);
        if (one->number) found |= UINT64_C(1) << (one->number - 1);
        if (check_patch(at, one, one->number ? 0 : plan->workspace, step) != TE_OK) return TE_BROKEN;
    }
    bool workspace = false;
    for (uint32_t i = 0; i < s->patch_count; i++) workspace |= file->patches[s->patches + i].number == 0;
    CHECK(workspace || !plan->workspace, "attention without its workspace", step);
    CHECK(!file->words[s->words], "an address in a file", step);
    for (uint32_t i = 0; i < plan->tensors; i++) {
        if (kinds[i] == A_VALUE) continue;
        CHECK(found >> i & 1, "attention without a tensor", step);
        CHECK(!file->words[s->words + 1 + i], "an address in a file", step);
    }
    return TE_OK;
}

static te_status check_copy(const te_walk *at, const f_step *s, uint64_t step) {
    const te_file *file = at->file;
    const f_patch *p = &file->patches[s->patches];
    CHECK(s->target < file->count[T_CONTENTS], "a copy of nothing", step);
    CHECK(s->word_count == 1 && s->patch_count == 1 && p->number == 0, "a copy's address", step);
    CHECK(!file->words[s->words], "an address in a file", step);
    return check_patch(at, p, file->contents[s->target].bytes, step);
}

static te_status check_memory(const te_walk *at, const f_step *s, uint64_t step) {
    CHECK(s->target < at->e->slot_count, "memory of no slot", step);
    const f_slot *slot = &at->slots[s->target];
    const bool scratch = slot->role == R_SCRATCH && slot->way;
    if (s->kind == K_TAKE) {
        CHECK(!at->there[s->target] && (scratch || slot->role == R_OUTPUT || slot->role == R_SAVED ||
                                        slot->role == R_TEMPORARY), "memory that is taken again", step);
        CHECK(slot->place != NOWHERE || slot->role != R_TEMPORARY, "memory without a place", step);
        CHECK(s->way == slot->way, "memory of another stream", step);
    } else {
        CHECK(at->there[s->target] == 1 && slot->role == R_TEMPORARY, "memory that is let go of again", step);
    }
    at->there[s->target] = s->kind == K_TAKE ? 1 : 0;
    return TE_OK;
}

static te_status check_step(te_walk *at, const f_step *s, uint64_t step) {
    const te_file *file = at->file;
    CHECK(s->words == at->words && s->patches == at->patches, "a step with words of another one", step);
    at->words += s->word_count;
    at->patches += s->patch_count;
    CHECK(s->kind < K_COUNT && s->way < file->count[T_WAYS], "a step of no kind", step);
    CHECK(range(s->words, s->word_count, file->count[T_WORDS]), "a step's words", step);
    CHECK(range(s->patches, s->patch_count, file->count[T_PATCHES]), "a step's addresses", step);
    switch (s->kind) {
        case K_LAUNCH:
        case K_TABLE: return check_launch(at, s, step);
        case K_PRODUCT: return check_product(at, s, step);
        case K_FILL: {
            const uint64_t *words = file->words + s->words;
            const f_patch *p = &file->patches[s->patches];
            CHECK(s->word_count == 3 && s->patch_count == 1 && p->number == 2, "a fill's address", step);
            CHECK(words[0] <= 255 && words[2] == 0, "an address in a file", step);
            return check_patch(at, p, words[1], step);
        }
        case K_ATTEND: return check_attention(at, s, step);
        case K_COPY: return check_copy(at, s, step);
        case K_TAKE:
        case K_DROP: return check_memory(at, s, step);
        case K_WAIT: CHECK(s->target < file->count[T_WAYS] && s->other < file->count[T_WAYS], "a wait", step); break;
        default:
            CHECK(s->target < file->count[T_WAYS] && s->patch_count == 1, "a notice", step);
            return check_patch(at, &file->patches[s->patches], 0, step);
    }
    return TE_OK;
}

static te_status check_walk(te_walk *at) {
    const te_file *file = at->file;
    const f_entry *e = at->e;
    for (uint32_t i = 0; i < e->slot_count; i++)
        at->there[i] = i < e->inputs || (at->slots[i].role == R_SCRATCH && !at->slots[i].way) ? 2 : 0;
    for (uint32_t i = 0; i < e->step_count; i++)
        if (check_step(at, &file->steps[e->steps + i], i) != TE_OK) return TE_BROKEN;
    for (uint32_t i = 0; i < e->slot_count; i++)
        CHECK(at->there[i] || (at->slots[i].role != R_OUTPUT && at->slots[i].role != R_SAVED), "a result that is not taken", i);
    for (uint32_t i = 0; i < e->piece_count; i++) {
        const f_piece *p = &file->pieces[e->pieces + i];
        const uint64_t numbers = (uint64_t)p->ndim * (p->flags & S_STRIDED ? 2 : 1);
        CHECK(text_fits(file, p->name) && p->slot < e->slot_count, "a piece of no slot", i);
        CHECK(p->ndim <= MOST_DIMENSIONS && range(p->dims, numbers, file->count[T_NUMBERS]), "a piece's shape", i);
        CHECK(p->offset <= at->slots[p->slot].bytes, "a piece outside of its slot", i);
    }
    return TE_OK;
}

te_status te_file_check_entries(const te_file *file) {
    uint64_t slots = 0, steps = 0, pieces = 0, words = 0, patches = 0;
    for (uint32_t i = 0; i < file->count[T_ENTRIES]; i++) {
        const f_entry *e = &file->entries[i];
        te_walk walk = {file, e, NULL, NULL, i, words, patches}, *at = &walk;
        CHECK(i < 4096 && e->slots == slots && e->steps == steps && e->pieces == pieces, "an entry with another's", i);
        CHECK(text_fits(file, e->name) && text_fits(file, e->what) && text_fits(file, e->call), "a name", i);
        CHECK(range(e->slots, e->slot_count, file->count[T_SLOTS]) && e->inputs <= e->slot_count, "slots", i);
        CHECK(range(e->steps, e->step_count, file->count[T_STEPS]), "steps", i);
        CHECK(range(e->pieces, e->piece_count, file->count[T_PIECES]), "pieces", i);
        CHECK(e->slot_count <= 1 << 17 && e->step_count <= 1 << 20, "too many steps", i);
        for (uint32_t k = 0; k < i; k++) {
            const f_text one = file->entries[k].name;
            CHECK(one.length != e->name.length || memcmp(file->text + one.start, file->text + e->name.start, one.length),
                  "two entries of a name", i);
        }
        walk.slots = file->slots + e->slots;
        if (check_slots(at) != TE_OK) return TE_BROKEN;
        walk.there = malloc((size_t)e->slot_count + 1);
        if (walk.there == NULL)
            return te_fail(TE_MEMORY, "te_program_load", "enough memory", "free some", "%u slots", e->slot_count);
        const te_status status = check_walk(at);
        free(walk.there);
        if (status != TE_OK) return status;
        slots += e->slot_count;
        steps += e->step_count;
        pieces += e->piece_count;
        words = walk.words;
        patches = walk.patches;
    }
    /* Nothing is left that was not looked at. */
    const uint64_t *count = file->count;
    if (slots != count[T_SLOTS] || steps != count[T_STEPS] || pieces != count[T_PIECES] || words != count[T_WORDS] ||
        patches != count[T_PATCHES])
        return broken("records of no entry", 0, count[T_STEPS]);
    return TE_OK;
}
