/* Converts optimizer state between fp32 and the forms in which it is kept, for CPUs: one pass where torch's operators
 * need twenty. native.py compiles this file and calls it; codes.py and kept.py explain the forms, and their operators
 * give the same bits. fp32 and bf16 numbers are handled as their bits, so that every compiler rounds as IEEE 754 says.
 *
 * Loops are plain: a compiler turns them into vector instructions at -O3. `parallel` runs on the threads of torch, if
 * its OpenMP library is there when this one is loaded, and on the calling thread otherwise.
 */
#include <stdint.h>
#include <string.h>
#include <math.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

#define BLOCK 128
#define SIGN 0x80000000u
#define MAGNITUDE 0x7FFFFFFFu
#define INF 0x7F800000u
#define LEAST_EXPONENT 20
#define NAN_EXPONENT 255
#define TIE 0x8000 /* halfway between two bf16 numbers, in units of the last place of fp32 */

#define PRAGMA(text) _Pragma(#text)
/* For loops over blocks or chunks, of which each has loops of its own. */
#define INLINE inline __attribute__((always_inline))
#define FOR_BLOCKS PRAGMA(omp parallel for num_threads(threads) if (parallel : threads > 1) schedule(static))
#define CHUNK 4096
#define REST (numel - at < CHUNK ? numel - at : CHUNK)

typedef struct {
    int32_t nbytes; /* of a code: 1 or 2 */
    int32_t shift;  /* how many of the lowest bits of fp16 are cut off */
    int32_t top;    /* exponent in fp16 of the largest value of a block */
    int32_t is_root;
    int32_t has_ties; /* whether the signs of the codes belong to somebody else */
} Form;

static inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float power_of_two(int32_t exponent) { return as_float((uint32_t)exponent << 23); }

/* To nearest, ties to even. Adding 0.5 lets the addition round what is subnormal in fp16. */
static inline uint32_t fp16_of(uint32_t bits) {
    uint32_t size = bits & MAGNITUDE;
    uint32_t finite = size < 0x47800000u ? size : 0x47800000u;
    uint32_t normal = (finite - 0x38000000u + 0xFFFu + ((finite >> 13) & 1u)) >> 13;
    uint32_t subnormal = as_bits(as_float(finite) + 0.5f) - 0x3F000000u;
    uint32_t rounded = finite < 0x38800000u ? subnormal : normal;
    rounded = size > INF ? 0x7E00u : rounded;
    return rounded | ((bits & SIGN) >> 16);
}

static inline float fp32_of(uint32_t fp16) {
    uint32_t size = fp16 & 0x7FFFu;
    uint32_t normal = (size << 13) + 0x38000000u;
    uint32_t subnormal = as_bits((float)(int32_t)size * 0x1p-24f);
    uint32_t bits = size < 0x400u ? subnormal : normal;
    bits = size < 0x7C00u ? bits : normal + 0x38000000u;
    return as_float(bits | ((fp16 & 0x8000u) << 16));
}

/* A block to fp16 and back; CPUs of x86 have an instruction for each that gives the same bits. */
static INLINE void narrow(const float *values, uint16_t *fp16) {
#ifdef __F16C__
    for (int i = 0; i < BLOCK; i += 8) {
        __m128i eight = _mm256_cvtps_ph(_mm256_loadu_ps(values + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm_storeu_si128((__m128i *)(fp16 + i), eight);
    }
#else
    for (int i = 0; i < BLOCK; i++) fp16[i] = (uint16_t)fp16_of(as_bits(values[i]));
#endif
}

static INLINE void widen(const uint16_t *fp16, float *values) {
#ifdef __F16C__
    for (int i = 0; i < BLOCK; i += 8)
        _mm256_storeu_ps(values + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(fp16 + i))));
#else
    for (int i = 0; i < BLOCK; i++) values[i] = fp32_of(fp16[i]);
#endif
}

/* To nearest, ties to even. */
static inline uint32_t bf16_of(uint32_t bits) {
    uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return (bits & MAGNITUDE) > INF ? 0x7FC0u : rounded;
}

static inline uint32_t bf16_at_random(uint32_t bits, uint32_t noise) {
    uint32_t rounded = (bits + (noise & 0xFFFFu)) >> 16;
    return (bits & MAGNITUDE) < INF ? rounded : bf16_of(bits);
}

/* The stretch of a block: elements [first, stop) of the call, which begin at place `offset` of the block. */
typedef struct {
    int64_t first, numel;
    int64_t offset;
} Part;

static inline Part part_of(int64_t block, int64_t head, int64_t numel) {
    int64_t first = block * BLOCK - head, stop = first + BLOCK;
    int64_t from = first < 0 ? 0 : first;
    return (Part){from, (stop < numel ? stop : numel) - from, from - first};
}

static INLINE void decode_block(const uint16_t *codes, uint8_t exponent, Form form, float *values) {
    float scale = exponent == NAN_EXPONENT ? as_float(0x7FC00000u) : power_of_two(exponent + 15 - form.top);
    uint16_t bits[BLOCK];
    uint16_t sign = form.is_root ? 0 : 0x8000u;
    if (form.nbytes == 2) {
        for (int i = 0; i < BLOCK; i++) bits[i] = codes[i] & (sign | 0x7FFFu);
    } else {
        for (int i = 0; i < BLOCK; i++) bits[i] = ((codes[i] << 8) & sign) | ((codes[i] & 0x7Fu) << form.shift);
    }
    widen(bits, values);
    if (form.is_root) {
        for (int i = 0; i < BLOCK; i++) values[i] = values[i] * scale * (values[i] * scale);
    } else {
        for (int i = 0; i < BLOCK; i++) values[i] *= scale;
    }
}

static INLINE uint8_t exponent_of(const float *values, Form form) {
    uint32_t largest = 0;
    for (int i = 0; i < BLOCK; i++) {
        uint32_t size = as_bits(values[i]) & MAGNITUDE;
        largest = size > largest ? size : largest;
    }
    largest = largest < INF ? largest : INF;
    uint32_t exponent = (largest + ((1u << (13 + form.shift)) - 1u)) >> 23;
    if (exponent > 238u + (uint32_t)form.top) return NAN_EXPONENT;
    return (uint8_t)(exponent < LEAST_EXPONENT ? LEAST_EXPONENT : exponent);
}

/* `values` are overwritten, and roots already where the form has them; `noise` is NULL to round to nearest. */
static INLINE uint8_t encode_block(float *values, const uint16_t *noise, Form form, uint16_t *codes) {
    uint8_t exponent = exponent_of(values, form);
    float inverse = power_of_two(form.top - 15 + 254 - (exponent < 254 ? exponent : 254));
    for (int i = 0; i < BLOCK; i++) values[i] *= inverse;
    narrow(values, codes);
    if (form.nbytes == 1) {
        uint16_t below = (uint16_t)((1u << form.shift) - 1u), half = (uint16_t)((1u << form.shift) >> 1);
        for (int i = 0; i < BLOCK; i++) {
            uint16_t bits = codes[i] + (noise ? (noise[i] & below) : half);
            codes[i] = ((bits >> 8) & 0x80u) | ((bits >> form.shift) & 0x7Fu);
        }
    }
    if (form.is_root) { /* Nothing but zero becomes zero. */
        for (int i = 0; i < BLOCK; i++) codes[i] += (codes[i] == 0) & (values[i] > 0.0f);
    }
    return exponent;
}

static INLINE void load_codes(const void *codes, Part part, int nbytes, uint16_t *into) {
    if (part.numel < BLOCK) memset(into, 0, 2 * BLOCK);
    if (nbytes == 2) {
        memcpy(into + part.offset, (const uint16_t *)codes + part.first, 2 * part.numel);
    } else if (part.numel == BLOCK) {
        for (int i = 0; i < BLOCK; i++) into[i] = ((const uint8_t *)codes)[part.first + i];
    } else {
        for (int i = 0; i < part.numel; i++) into[part.offset + i] = ((const uint8_t *)codes)[part.first + i];
    }
}

static INLINE void store_codes(const uint16_t *from, Part part, int nbytes, void *codes) {
    if (nbytes == 2) {
        memcpy((uint16_t *)codes + part.first, from + part.offset, 2 * part.numel);
    } else if (part.numel == BLOCK) {
        for (int i = 0; i < BLOCK; i++) ((uint8_t *)codes)[part.first + i] = (uint8_t)from[i];
    } else {
        for (int i = 0; i < part.numel; i++) ((uint8_t *)codes)[part.first + i] = (uint8_t)from[part.offset + i];
    }
}

/* Reads `numel` values from codes; `head` values of the first block lie before them. */
void distopt_decode(const void *codes, const uint8_t *exponents, Form form, int64_t head, float *values, int64_t numel,
                    int32_t threads) {
    int64_t num_blocks = (head + numel + BLOCK - 1) / BLOCK;
    FOR_BLOCKS
    for (int64_t block = 0; block < num_blocks; block++) {
        Part part = part_of(block, head, numel);
        uint16_t wide[BLOCK];
        float decoded[BLOCK];
        load_codes(codes, part, form.nbytes, wide);
        decode_block(wide, exponents[block], form, decoded);
        memcpy(values + part.first, decoded + part.offset, 4 * part.numel);
    }
}

/* Rounds `numel` values, which are whole blocks but for the ends of the state, to codes. */
void distopt_encode(const float *values, const uint32_t *noise, Form form, int64_t head, void *codes,
                    uint8_t *exponents, int64_t numel, int32_t threads) {
    int64_t num_blocks = (head + numel + BLOCK - 1) / BLOCK;
    uint16_t sign = form.nbytes == 2 ? 0x8000u : 0x80u;
    FOR_BLOCKS
    for (int64_t block = 0; block < num_blocks; block++) {
        Part part = part_of(block, head, numel);
        float padded[BLOCK] = {0};
        uint16_t random[BLOCK] = {0}, made[BLOCK], known[BLOCK];
        memcpy(padded + part.offset, values + part.first, 4 * part.numel);
        for (int i = 0; form.is_root && i < BLOCK; i++) padded[i] = sqrtf(padded[i]);
        if (noise && part.numel == BLOCK) {
            for (int i = 0; i < BLOCK; i++) random[i] = (uint16_t)noise[part.first + i];
        } else if (noise) {
            for (int i = 0; i < part.numel; i++) random[part.offset + i] = (uint16_t)noise[part.first + i];
        }
        exponents[block] = encode_block(padded, noise ? random : NULL, form, made);
        if (form.has_ties) {
            load_codes(codes, part, form.nbytes, known);
            for (int i = 0; i < BLOCK; i++) made[i] |= known[i] & sign;
        }
        store_codes(made, part, form.nbytes, codes);
    }
}

/* Reads fp32 or bf16 numbers (`nbytes` 4 or 2), without their signs where these are ties. */
static INLINE void read_plain(const void *kept, int32_t nbytes, int32_t has_ties, int64_t first, uint32_t *values,
                              int64_t numel) {
    uint32_t mask = has_ties ? MAGNITUDE : ~0u;
    const uint32_t *wide = (const uint32_t *)kept + first;
    const uint16_t *narrow = (const uint16_t *)kept + first;
    if (nbytes == 4) {
        for (int64_t i = 0; i < numel; i++) values[i] = wide[i] & mask;
    } else {
        for (int64_t i = 0; i < numel; i++) values[i] = ((uint32_t)narrow[i] << 16) & mask;
    }
}

/* Rounds to fp32 or bf16 numbers, whose signs stay where these are ties; `noise` is NULL to round to nearest. */
static INLINE void write_plain(const uint32_t *values, const uint32_t *noise, int32_t nbytes, int32_t has_ties,
                               void *kept, int64_t first, int64_t numel) {
    uint32_t sign = has_ties ? SIGN : 0;
    uint32_t *wide = (uint32_t *)kept + first;
    uint16_t *narrow = (uint16_t *)kept + first, sign16 = (uint16_t)(sign >> 16);
    if (nbytes == 4) {
        for (int64_t i = 0; i < numel; i++) wide[i] = (values[i] & ~sign) | (wide[i] & sign);
    } else if (noise) {
        for (int64_t i = 0; i < numel; i++)
            narrow[i] = (bf16_at_random(values[i], noise[i]) & ~sign16) | (narrow[i] & sign16);
    } else {
        for (int64_t i = 0; i < numel; i++) narrow[i] = (bf16_of(values[i]) & ~sign16) | (narrow[i] & sign16);
    }
}

#define READ_REMAINDER(type, bits)                                                         \
    for (int64_t i = 0; i < numel; i++) {                                                  \
        uint32_t tie = (uint32_t)(((const type *)second)[first + i] >> ((bits)-1));        \
        values[i] = ((uint32_t)model[i] << 16) + (uint32_t)(int32_t)low[i] + (tie << 16);  \
    }

/* Reads main params from bf16 params, remainders and the signs of a second moment of `nbytes` an element. */
static INLINE void read_remainder(const uint16_t *model, const int16_t *low, const void *second, int32_t nbytes,
                                  int64_t first, uint32_t *values, int64_t numel) {
    model += first, low += first;
    if (nbytes == 1) {
        READ_REMAINDER(uint8_t, 8)
    } else if (nbytes == 2) {
        READ_REMAINDER(uint16_t, 16)
    } else {
        READ_REMAINDER(uint32_t, 32)
    }
}

#define WRITE_REMAINDER(type, bits)                                                              \
    for (int64_t i = 0; i < numel; i++) {                                                        \
        uint32_t rounded = bf16_of(values[i]);                                                   \
        uint32_t isnan = (values[i] & MAGNITUDE) > INF;                                          \
        uint32_t difference = isnan ? 0 : values[i] - (rounded << 16);                           \
        type signless = ((type *)second)[first + i] & (type)(((type)1 << ((bits)-1)) - 1);       \
        ((type *)second)[first + i] = signless | (type)((type)(difference == TIE) << ((bits)-1)); \
        model[i] = (uint16_t)rounded;                                                            \
        low[i] = (int16_t)difference;                                                            \
    }

/* The inverse of `read_remainder`. */
static INLINE void write_remainder(const uint32_t *values, uint16_t *model, int16_t *low, void *second,
                                   int32_t nbytes, int64_t first, int64_t numel) {
    model += first, low += first;
    if (nbytes == 1) {
        WRITE_REMAINDER(uint8_t, 8)
    } else if (nbytes == 2) {
        WRITE_REMAINDER(uint16_t, 16)
    } else {
        WRITE_REMAINDER(uint32_t, 32)
    }
}

/* See `random_bits` in codes.py; `seed` is what it adds to the numbers of elements. */
static INLINE void make_noise(uint32_t *bits, int64_t numel, uint32_t start, uint32_t seed) {
    uint32_t next = start * 0x9E3779B1u + seed;
    for (int64_t i = 0; i < numel; i++) {
        uint32_t mixed = next;
        next += 0x9E3779B1u;
        mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6Bu;
        mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35u;
        bits[i] = (mixed ^ (mixed >> 16)) & 0x7FFFFFFFu;
    }
}

/* What native.py calls: the functions above on many elements, some at a time. */
void distopt_read_plain(const void *kept, int32_t nbytes, int32_t has_ties, uint32_t *values, int64_t numel,
                        int32_t threads) {
    FOR_BLOCKS
    for (int64_t at = 0; at < numel; at += CHUNK) read_plain(kept, nbytes, has_ties, at, values + at, REST);
}

void distopt_write_plain(const uint32_t *values, const uint32_t *noise, int32_t nbytes, int32_t has_ties, void *kept,
                         int64_t numel, int32_t threads) {
    FOR_BLOCKS
    for (int64_t at = 0; at < numel; at += CHUNK)
        write_plain(values + at, noise ? noise + at : NULL, nbytes, has_ties, kept, at, REST);
}

void distopt_read_remainder(const uint16_t *model, const int16_t *low, const void *second, int32_t nbytes,
                            uint32_t *values, int64_t numel, int32_t threads) {
    FOR_BLOCKS
    for (int64_t at = 0; at < numel; at += CHUNK) read_remainder(model, low, second, nbytes, at, values + at, REST);
}

void distopt_update_remainder(const uint32_t *values, uint16_t *model, int16_t *low, void *second, int32_t nbytes,
                              int64_t numel, int32_t threads) {
    FOR_BLOCKS
    for (int64_t at = 0; at < numel; at += CHUNK) write_remainder(values + at, model, low, second, nbytes, at, REST);
}

void distopt_random_bits(uint32_t *bits, int64_t numel, uint32_t start, uint32_t seed, int32_t threads) {
    FOR_BLOCKS
    for (int64_t at = 0; at < numel; at += CHUNK) make_noise(bits + at, REST, start + (uint32_t)at, seed);
}
