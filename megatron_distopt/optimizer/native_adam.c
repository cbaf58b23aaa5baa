/* Adam over state in any of the forms, for CPUs: every block is read, updated and rounded back while it is in registers
 * and in the fastest cache. native_adam.py calls it, and compares it with torch's fused kernel before it is trusted.
 *
 * Formula and roundings are those of torch's fused Adam and AdamW for CPUs. What its compiler fuses into one rounding is
 * fused here: in vectors the last product of the second moment, and in the elements behind the last whole vector the
 * other one. With AVX-512 its vectors have 16 elements, but what its compiler makes of the loop over those behind them
 * has vectors of 8, with the roundings of the others.
 */
#include "native_codes.c"

enum { PLAIN, CODES, REMAINDER };
enum { VECTOR_NUMEL = 8 };

/* How the values of a flat param are kept. */
typedef struct {
    void *values;       /* numbers of `form.nbytes`, codes or remainders */
    uint8_t *exponents; /* by block, of codes */
    uint16_t *model;    /* the bf16 param that a main param is rounded into, or NULL */
    int32_t kind;
    int32_t is_random; /* whether it is rounded at random */
    Form form;
} Kept;

/* One update; what is multiplied has been rounded to fp32 by the caller, as torch does. */
typedef struct {
    float divisor;      /* of the gradients */
    float decay;        /* what is left of a main param, or, if decay is added to the gradient, how much of it is */
    float first_weight; /* 1 - beta1 */
    float beta2;
    float second_weight; /* 1 - beta2 */
    float second_root;   /* root of the bias correction of the second moment */
    float eps;
    float step_size;
    int32_t is_decoupled;
    uint32_t seed;        /* of the random bits */
} Update;

/* Of one block: where the values lie that are updated. */
typedef struct {
    float *main, *first, *second;
} Values;

static INLINE float *read_values(const Kept *kept, const Kept *second, int64_t block, Part part, float *memory) {
    float *values = memory + part.offset;
    if (kept->kind == CODES) {
        uint16_t wide[BLOCK];
        load_codes(kept->values, part, kept->form.nbytes, wide);
        decode_block(wide, kept->exponents[block], kept->form, memory);
    } else if (kept->kind == REMAINDER) {
        read_remainder(kept->model, kept->values, second->values, second->form.nbytes, part.first, (uint32_t *)values,
                       part.numel);
    } else if (kept->form.nbytes == 4 && !kept->form.has_ties) {
        values = (float *)kept->values + part.first;
    } else {
        read_plain(kept->values, kept->form.nbytes, kept->form.has_ties, part.first, (uint32_t *)values, part.numel);
    }
    return values;
}

/* `memory` is the whole block, with zeros around the values; it is overwritten. */
static INLINE void write_values(const Kept *kept, const Kept *second, int64_t block, Part part, const float *values,
                                float *memory, const uint32_t *noise) {
    if (!kept->is_random) noise = NULL;
    if (kept->kind == CODES) {
        uint16_t random[BLOCK], made[BLOCK];
        for (int i = 0; noise && i < BLOCK; i++) random[i] = (uint16_t)noise[i];
        kept->exponents[block] = encode_block(memory, noise ? random : NULL, kept->form, made);
        store_codes(made, part, kept->form.nbytes, kept->values);
    } else if (kept->kind == REMAINDER) {
        write_remainder((const uint32_t *)values, kept->model, kept->values, second->values, second->form.nbytes,
                        part.first, part.numel);
    } else if (kept->form.nbytes != 4 || kept->form.has_ties) {
        write_plain((const uint32_t *)values, noise ? noise + part.offset : NULL, kept->form.nbytes, 0, kept->values,
                    part.first, part.numel);
    }
}

static INLINE void update_vectors(const Update *update, const float *restrict grads,
                                                                 Values at, float *restrict roots, int numel) {
    float *restrict main = at.main, *restrict first = at.first, *restrict second = at.second;
    const Update by = *update;
    const float decay = by.is_decoupled ? by.decay : 1.0f;
    const int is_small = by.first_weight < 0.5f;
    const float weight = is_small ? by.first_weight : by.first_weight - 1.0f;
    for (int i = 0; i < numel; i++) {
        float grad = grads[i], before = first[i];
        first[i] = fmaf(weight, grad - before, is_small ? before : grad);
        second[i] = fmaf(by.second_weight * grad, grad, second[i] * by.beta2);
        roots[i] = sqrtf(second[i]);
        main[i] = main[i] * decay + -by.step_size * first[i] / (roots[i] / by.second_root + by.eps);
    }
}

static void update_rest(const Update *by, const float *grads, Values at, float *roots, int64_t start, int64_t stop) {
    for (int64_t i = start; i < stop; i++) {
        float grad = grads[i], before = at.first[i];
        at.main[i] *= by->is_decoupled ? by->decay : 1.0f;
        at.first[i] = by->first_weight < 0.5f ? fmaf(by->first_weight, grad - before, before)
                                              : fmaf(-(grad - before), 1.0f - by->first_weight, grad);
        at.second[i] = fmaf(at.second[i], by->beta2, by->second_weight * grad * grad);
        roots[i] = sqrtf(at.second[i]);
        at.main[i] -= by->step_size * at.first[i] / (roots[i] / by->second_root + by->eps);
    }
}

/* Divides in place, as torch does, and returns the gradients with the decay that is not decoupled. */
static INLINE const float *divide(const Update *by, float *grads, const float *main, float *memory, int64_t numel) {
    for (int64_t i = 0; by->divisor != 1.0f && i < numel; i++) grads[i] /= by->divisor;
    if (by->is_decoupled || by->decay == 0.0f) return grads;
    for (int64_t i = 0; i < numel; i++) memory[i] = fmaf(main[i], by->decay, grads[i]);
    return memory;
}

static INLINE void update_block(const Update *by, const Kept *main, const Kept *first, const Kept *second,
                         float *all_grads, int64_t block, Part part, int64_t vectors) {
    float memory[4][BLOCK], decayed[BLOCK];
    uint32_t noise[BLOCK];
    if (part.numel < BLOCK) memset(memory, 0, sizeof memory);
    Values at = {read_values(main, second, block, part, memory[0]), read_values(first, second, block, part, memory[1]),
                 read_values(second, second, block, part, memory[2])};
    float *roots = memory[3] + part.offset;
    const float *grads = divide(by, all_grads + part.first, at.main, decayed, part.numel);
    if (vectors == BLOCK) {
        update_vectors(by, grads, at, roots, BLOCK);
    } else {
        update_vectors(by, grads, at, roots, (int)vectors);
        update_rest(by, grads, at, roots, vectors, part.numel);
    }
    if (main->is_random || second->is_random) make_noise(noise, BLOCK, (uint32_t)(part.first - part.offset), by->seed);
    write_values(first, second, block, part, at.first, memory[1], NULL);
    write_values(second, second, block, part, at.second, second->form.is_root ? memory[3] : memory[2], noise);
    for (int i = 0; main->is_random && i < BLOCK; i++) noise[i] >>= 15;
    write_values(main, second, block, part, at.main, memory[0], noise);
    if (main->kind != REMAINDER && main->model)
        write_plain((const uint32_t *)at.main, NULL, 2, 0, main->model, part.first, part.numel);
}

/* Updates a flat param of `numel` elements; `head` values of its first block are not its own. */
void distopt_adam(const Update *update, const Kept *main, const Kept *first, const Kept *second, float *grads,
                  int64_t head, int64_t numel, int32_t threads) {
    int64_t num_blocks = (head + numel + BLOCK - 1) / BLOCK, in_vectors = numel - numel % VECTOR_NUMEL;
    FOR_BLOCKS
    for (int64_t block = 0; block < num_blocks; block++) {
        Part part = part_of(block, head, numel);
        int64_t vectors = in_vectors - part.first;
        vectors = vectors < 0 ? 0 : vectors > part.numel ? part.numel : vectors;
        if (vectors == BLOCK) { /* Loops whose length the compiler knows. */
            update_block(update, main, first, second, grads, block, (Part){part.first, BLOCK, 0}, BLOCK);
        } else {
            update_block(update, main, first, second, grads, block, part, vectors);
        }
    }
}
