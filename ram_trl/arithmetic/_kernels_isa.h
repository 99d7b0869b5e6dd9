/*
 * The loops of _kernels.c, included once for every instruction set that is compiled: LEVEL(name) gives each copy its own
 * names. Chunks of some hundred elements stay in the first-level cache while simple loops, which compilers turn into
 * vector instructions, pass over them.
 */

/* Spread 8 bits over 8 bytes: 0xFF where the bit is set. */
static inline uint64_t LEVEL(spread)(unsigned bits) {
#ifdef __BMI2__
    return _pdep_u64(bits, 0x0101010101010101u) * 0xFF;
#else
    return SPREAD_TABLE[bits];
#endif
}

/* The next bytes of `source`, moved to the selected bytes in their order; others are 0. */
static inline uint64_t LEVEL(deposit)(uint64_t source, uint64_t selected) {
#ifdef __BMI2__
    return _pdep_u64(source, selected);
#else
    uint64_t result = 0;
    for (int byte = 0; byte < 8; byte++) {
        uint64_t chosen = selected >> (8 * byte) & 0xFF;
        result |= (source & chosen) << (8 * byte);
        source >>= chosen & 8;
    }
    return result;
#endif
}

/* The selected bytes of `source`, moved together at the low end. */
static inline uint64_t LEVEL(extract)(uint64_t source, uint64_t selected) {
#ifdef __BMI2__
    return _pext_u64(source, selected);
#else
    uint64_t result = 0;
    int position = 0;
    for (int byte = 0; byte < 8; byte++) {
        uint64_t chosen = selected >> (8 * byte) & 0xFF;
        result |= (source >> (8 * byte) & chosen) << position;
        position += chosen & 8;
    }
    return result;
#endif
}

/* The lowest bit of each of 8 bytes. */
static inline unsigned LEVEL(gather_bits)(uint64_t bytes) {
#ifdef __BMI2__
    return (unsigned)_pext_u64(bytes, 0x0101010101010101u);
#else
    return (unsigned)((bytes & 0x0101010101010101u) * 0x0102040810204080u >> 56);
#endif
}

/* Whether there are as many codes and escapes as a mask asks for; sets where each begins. */
static int LEVEL(open_payload)(const uint8_t *mask, Py_ssize_t mask_nbytes, const uint8_t *payload, Py_ssize_t nbytes,
                               Packed *packed) {
    Py_ssize_t num_codes = 0, num_escapes = 0, i = 0;
    for (; i + 8 <= mask_nbytes; i += 8) num_codes += __builtin_popcountll(load_u64(mask + i));
    for (; i < mask_nbytes; i++) num_codes += __builtin_popcount(mask[i]);
    if (num_codes > nbytes) return 0;
    /* counted in bytes, side by side, as long as a byte can count */
    for (Py_ssize_t start = 0; start < num_codes; start += 64 * 255) {
        Py_ssize_t stop = num_codes - start < 64 * 255 ? num_codes : start + 64 * 255;
        uint8_t counts[64] = {0};
        for (i = start; i + 64 <= stop; i += 64)
            for (int lane = 0; lane < 64; lane++) counts[lane] += payload[i + lane] == 0;
        for (; i < stop; i++) num_escapes += payload[i] == 0;
        for (int lane = 0; lane < 64; lane++) num_escapes += counts[lane];
    }
    *packed = (Packed){payload, payload + num_codes, payload + num_codes};
    return nbytes == num_codes + 2 * num_escapes;
}

/* Differences of one chunk, 0 where the mask is not set. */
static void LEVEL(expand)(Packed *packed, const uint8_t *mask, Py_ssize_t numel, int16_t *difference) {
    const uint8_t *next = packed->codes;
    Py_ssize_t i = 0;
#ifdef __AVX512VBMI2__
    for (; i + 64 <= numel && packed->codes_end - next >= 64; i += 64) {
        uint64_t bits = load_u64(mask + i / 8);
        __m512i codes = _mm512_maskz_expand_epi8(bits, _mm512_loadu_si512(next));
        uint64_t escaped = _mm512_mask_testn_epi8_mask(bits, codes, codes);
        next += __builtin_popcountll(bits);
        _mm512_storeu_si512(difference + i, _mm512_cvtepi8_epi16(_mm512_castsi512_si256(codes)));
        _mm512_storeu_si512(difference + i + 32, _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64(codes, 1)));
        for (; escaped; escaped &= escaped - 1, packed->escapes += 2)
            difference[i + __builtin_ctzll(escaped)] = load_i16(packed->escapes);
    }
#endif
    for (; i < numel; i += 8) {
        unsigned bits = mask[i / 8];
        uint64_t selected = LEVEL(spread)(bits);
        uint64_t eight = LEVEL(deposit)(load_up_to_8(next, packed->codes_end), selected);
        next += __builtin_popcount(bits);
#ifdef __SSE4_1__
        _mm_storeu_si128((__m128i *)(difference + i), _mm_cvtepi8_epi16(_mm_cvtsi64_si128((int64_t)eight)));
#else
        for (int byte = 0; byte < 8; byte++) difference[i + byte] = (int8_t)(eight >> (8 * byte));
#endif
        uint64_t filled = eight | ~selected;
        if (!has_zero_byte(filled)) continue;
        for (int byte = 0; byte < 8; byte++) {
            if (filled >> (8 * byte) & 0xFF) continue;
            difference[i + byte] = load_i16(packed->escapes);
            packed->escapes += 2;
        }
    }
    packed->codes = next;
}

/* The bits of a 16-bit float as an integer in the order of the numbers, in the upper half; its own inverse. */
static inline int32_t LEVEL(ordered)(int32_t upper) { return upper ^ (upper >> 31 & 0x7FFF0000); }

/* Wrapping addition of a difference to an ordered number. */
static inline int32_t LEVEL(moved)(int32_t ordered, int16_t difference) {
    return (int32_t)((uint32_t)ordered + ((uint32_t)difference << 16));
}

/* The value of a 16-bit float, its bits in the upper half. */
static inline float LEVEL(widen)(int32_t upper, int dtype) {
    if (dtype == BFLOAT16) return as_float((uint32_t)upper);
    uint32_t magnitude = (uint32_t)(upper & 0x7FFF0000) >> 3;
    /* The exponent's bias moves from 15 to 127. A denormal is made as a number with a leading one, which is taken away,
     * because some processes have the processor treat denormal operands as 0. */
    uint32_t denormal = as_bits(as_float(magnitude + (113u << 23)) - as_float(113u << 23));
    uint32_t result = magnitude < 1u << 23 ? denormal : magnitude + (112u << 23);
    result |= magnitude >= 31u << 23 ? INFINITY_BITS : 0;
    return as_float(result | ((uint32_t)upper & SIGN_BIT));
}

/* Nearest 16-bit float, ties to even, its bits in the upper half. Not for NaN. */
static inline int32_t LEVEL(narrow)(float value, int dtype) {
    uint32_t bits = as_bits(value);
    if (dtype == BFLOAT16) return (int32_t)((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000u);
    uint32_t magnitude = bits & ~SIGN_BIT;
    /* adding one half leaves a denormal's digits in the lowest places, rounded by the addition */
    uint32_t denormal = as_bits(as_float(magnitude) + 0.5f) - 0x3F000000u;
    uint32_t normal = (magnitude - (112u << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13;
    uint32_t result = magnitude < 113u << 23 ? denormal : normal;
    result = magnitude >= 0x477FF000u ? 0x7C00 : result;
    return (int32_t)(result << 16 | (bits & SIGN_BIT));
}

static inline int LEVEL(is_finite)(float value) { return (as_bits(value) & INFINITY_BITS) != INFINITY_BITS; }

/* The number in [0, 1) that a state of SplitMix64 gives; see rounding.py. */
static inline float LEVEL(drawn)(uint64_t state) {
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9u;
    state = (state ^ state >> 27) * 0x94D049BB133111EBu;
    return (float)(int32_t)((state ^ state >> 31) >> 40) * 0x1p-24f;
}

/* One of the two neighbours, by the random number that belongs to the element; see rounding.py. */
static inline int32_t LEVEL(narrow_stochastic)(float value, int dtype, uint64_t state) {
    int32_t nearest = LEVEL(narrow)(value, dtype);
    float low = LEVEL(widen)(nearest, dtype), error = value - low;
    int32_t neighbour = LEVEL(ordered)(LEVEL(moved)(LEVEL(ordered)(nearest), error > 0.0f ? 1 : -1));
    float high = LEVEL(widen)(neighbour, dtype);
    float probability = __builtin_fabsf(error) / __builtin_fabsf(high - low);
    int usable = error != 0.0f && LEVEL(is_finite)(high) && LEVEL(is_finite)(low);
    return usable && LEVEL(drawn)(state) < probability ? neighbour : nearest;
}

static inline float LEVEL(select)(int condition, float chosen, float other) {
    uint32_t mask = -(uint32_t)condition;
    return as_float((as_bits(chosen) & mask) | (as_bits(other) & ~mask));
}

/* The base's part of a chunk, before any agent. */
static inline void LEVEL(load_base)(const Merge *merge, Py_ssize_t start, Py_ssize_t numel, Chunk *chunk) {
    uint16_t halves[CHUNK];
    if (merge->base_dtype == FLOAT32) {
        memcpy(chunk->base, merge->base + 4 * start, (size_t)numel * 4);
    } else {
        memcpy(halves, merge->base + 2 * start, (size_t)numel * 2);
        if (merge->base_dtype == BFLOAT16)
            for (Py_ssize_t i = 0; i < numel; i++) chunk->base[i] = as_float((uint32_t)halves[i] << 16);
        else
            for (Py_ssize_t i = 0; i < numel; i++)
                chunk->base[i] = LEVEL(widen)((int32_t)((uint32_t)halves[i] << 16), FLOAT16);
        for (Py_ssize_t i = 0; i < numel; i++)
            chunk->ordered[i] = LEVEL(ordered)((int32_t)((uint32_t)halves[i] << 16));
    }
    for (Py_ssize_t i = 0; i < numel; i++) {
        chunk->merged[i] = chunk->base[i];
        chunk->sum[i] = chunk->weights[i] = 0.0f;
        chunk->owner[i] = NOBODY;
    }
}

/* One element of one agent: the inner part of equation 7, or of a sum. Returns the magnitude's bits. */
SPECIALISED uint32_t LEVEL(add_element)(Chunk *chunk, Py_ssize_t i, int32_t t, int is_sum, float value, float delta,
                                        float gain, float weight, float epsilon) {
    uint32_t magnitude = as_bits(delta) & ~SIGN_BIT;
    int active = as_float(magnitude) > epsilon;
    int32_t owner = chunk->owner[i] == NOBODY ? t : SEVERAL;
    chunk->owner[i] = (owner & -active) | (chunk->owner[i] & ~-active);
    if (is_sum) {
        chunk->merged[i] = LEVEL(select)(active, delta, chunk->merged[i]);
        chunk->sum[i] = __builtin_fmaf(weight, delta, chunk->sum[i]);
        return magnitude;
    }
    /* without a gain the value is taken, not computed: -0.0 stays */
    float own = gain != 0.0f ? __builtin_fmaf(gain, delta, value) : value;
    delta = LEVEL(select)(active, delta, 0.0f);
    chunk->merged[i] = LEVEL(select)(active, own, chunk->merged[i]);
    chunk->sum[i] = __builtin_fmaf(weight, delta, chunk->sum[i]);
    chunk->weights[i] += LEVEL(select)(active, weight, 0.0f);
    return magnitude;
}

/* Differences of an agent in one chunk, of all its layers. */
static inline void LEVEL(expand_layers)(Source *agent, Py_ssize_t start, Py_ssize_t numel, int16_t *difference) {
    int16_t more[CHUNK];
    LEVEL(expand)(&agent->next[0], agent->masks[0] + start / 8, numel, difference);
    if (agent->num_layers == 1) return;
    LEVEL(expand)(&agent->next[1], agent->masks[1] + start / 8, numel, more);
    for (Py_ssize_t i = 0; i < numel; i++) difference[i] = (int16_t)((uint16_t)difference[i] + (uint16_t)more[i]);
}

/* One agent in one chunk. */
SPECIALISED uint32_t LEVEL(add_agent)(Source *agent, int32_t t, int dtype, int is_sum, float epsilon, Py_ssize_t start,
                                      Py_ssize_t numel, Chunk *chunk) {
    float gain = agent->gain, weight = agent->weight;
    uint32_t largest = 0;
    if (agent->values) {
        float value[CHUNK], delta[CHUNK];
        memcpy(value, agent->values + 4 * start, (size_t)numel * 4);
        memcpy(delta, agent->deltas + 4 * start, (size_t)numel * 4);
        for (Py_ssize_t i = 0; i < numel; i++) {
            uint32_t magnitude = LEVEL(add_element)(chunk, i, t, is_sum, value[i], delta[i], gain, weight, epsilon);
            largest = magnitude > largest ? magnitude : largest;
        }
    } else {
        int16_t difference[CHUNK];
        LEVEL(expand_layers)(agent, start, numel, difference);
        for (Py_ssize_t i = 0; i < numel; i++) {
            float value = LEVEL(widen)(LEVEL(ordered)(LEVEL(moved)(chunk->ordered[i], difference[i])), dtype);
            float delta = value - chunk->base[i];
            uint32_t magnitude = LEVEL(add_element)(chunk, i, t, is_sum, value, delta, gain, weight, epsilon);
            largest = magnitude > largest ? magnitude : largest;
        }
    }
    return largest;
}

/* Take the mean where several agents changed an element, or the sum, and round. Leaves in the chunk what was applied,
 * along the direction of the agent's own change, and that change. */
SPECIALISED void LEVEL(finish)(Merge *merge, int dtype, int is_stochastic, int is_sum, Py_ssize_t start,
                               Py_ssize_t numel, Chunk *chunk) {
    uint16_t halves[CHUNK];
    uint32_t largest_merged = 0, largest_written = 0;
    uint64_t state = merge->key + (uint64_t)start * GAMMA;
    for (Py_ssize_t i = 0; i < numel; i++) {
        float own = is_sum ? chunk->merged[i] : chunk->sum[i], merged;
        if (is_sum) {
            merged = chunk->sum[i] + chunk->base[i];
        } else {
            float mean = chunk->sum[i] / chunk->weights[i] + chunk->base[i];
            merged = LEVEL(select)(chunk->owner[i] == SEVERAL, mean, chunk->merged[i]);
        }
        float written = merged;
        if (dtype == FLOAT32) {
            chunk->weights[i] = merged;
        } else {
            int32_t upper = is_stochastic ? LEVEL(narrow_stochastic)(merged, dtype, state + (uint64_t)i * GAMMA)
                                          : LEVEL(narrow)(merged, dtype);
            halves[i] = (uint16_t)((uint32_t)upper >> 16);
            written = LEVEL(widen)(upper, dtype);
        }
        uint32_t magnitude = as_bits(merged) & ~SIGN_BIT, rounded = as_bits(written) & ~SIGN_BIT;
        largest_merged = magnitude > largest_merged ? magnitude : largest_merged;
        largest_written = rounded > largest_written ? rounded : largest_written;
        chunk->merged[i] = as_float(as_bits(written - chunk->base[i]) ^ (as_bits(own) & SIGN_BIT));
        chunk->sum[i] = __builtin_fabsf(own);
    }
    if (dtype == FLOAT32)
        memcpy(merge->out + 4 * start, chunk->weights, (size_t)numel * 4);
    else
        memcpy(merge->out + 2 * start, halves, (size_t)numel * 2);
    if (largest_written >= INFINITY_BITS && merge->status < TOO_LARGE) merge->status = TOO_LARGE;
    if (largest_merged >= INFINITY_BITS) merge->status = NOT_FINITE;
}

/* Add the magnitudes of every agent's unique changes. */
static void LEVEL(add_magnitudes)(const Merge *merge, Py_ssize_t numel, Chunk *chunk) {
    for (Py_ssize_t i = numel; i % (2 * LANES); i++) chunk->owner[i] = NOBODY;
    for (Py_ssize_t t = 0; t < merge->num_agents; t++) {
        /* of a sum the change itself was left */
        float weight = merge->is_sum ? 1.0f : merge->agents[t].weight;
        /* two sums at a time: an addition need not wait for the one before */
        Floats applied[2] = {{0}}, intended[2] = {{0}};
        for (Py_ssize_t i = 0; i < numel; i += 2 * LANES) {
            for (int odd = 0; odd < 2; odd++) {
                Ints owned = *(Ints *)&chunk->owner[i + odd * LANES] == (int32_t)t;
                applied[odd] += (Floats)(*(Ints *)&chunk->merged[i + odd * LANES] & owned);
                intended[odd] += (Floats)(*(Ints *)&chunk->sum[i + odd * LANES] & owned);
            }
        }
        for (int lane = 0; lane < LANES; lane++) {
            merge->agents[t].applied += applied[0][lane] + applied[1][lane];
            merge->agents[t].intended += (intended[0][lane] + intended[1][lane]) / weight;
        }
    }
}

/* All chunks of a tile. What is known here, the compiler need not ask for every element. */
SPECIALISED void LEVEL(merge_chunks)(Merge *merge, int is_sum) {
    Chunk chunk;
    uint32_t largest_delta = 0;
    rewind_agents(merge);
    for (Py_ssize_t start = 0; start < merge->numel; start += CHUNK) {
        Py_ssize_t numel = merge->numel - start < CHUNK ? merge->numel - start : CHUNK;
        LEVEL(load_base)(merge, start, numel, &chunk);
        for (Py_ssize_t t = 0; t < merge->num_agents; t++) {
            Source *agent = &merge->agents[t];
            uint32_t largest;
            if (merge->base_dtype == BFLOAT16)
                largest = LEVEL(add_agent)(agent, (int32_t)t, BFLOAT16, is_sum, merge->epsilon, start, numel, &chunk);
            else
                largest = LEVEL(add_agent)(agent, (int32_t)t, FLOAT16, is_sum, merge->epsilon, start, numel, &chunk);
            largest_delta = largest > largest_delta ? largest : largest_delta;
        }
        if (merge->out_dtype == FLOAT32)
            LEVEL(finish)(merge, FLOAT32, 0, is_sum, start, numel, &chunk);
        else if (merge->is_stochastic)
            LEVEL(finish)(merge, merge->out_dtype, 1, is_sum, start, numel, &chunk);
        else if (merge->out_dtype == BFLOAT16)
            LEVEL(finish)(merge, BFLOAT16, 0, is_sum, start, numel, &chunk);
        else
            LEVEL(finish)(merge, FLOAT16, 0, is_sum, start, numel, &chunk);
        LEVEL(add_magnitudes)(merge, numel, &chunk);
    }
    merge->are_agents_finite = largest_delta < INFINITY_BITS;
}

/* Equation 7 for a whole tile, see ram.py for the definition; or a sum, see methods/method.py. */
static void LEVEL(merge)(Merge *merge) {
#ifdef __AVX512VBMI2__
    if (is_all_bfloat16(merge) && merge_bfloat16(merge)) {
        merge->are_agents_finite = 1;
        return;
    }
#endif
    if (merge->is_sum)
        LEVEL(merge_chunks)(merge, 1);
    else
        LEVEL(merge_chunks)(merge, 0);
}

/* Append elements to a layer: those that `selected` names, a byte each. The length is a multiple of 8. */
static void LEVEL(append)(Layer *layer, Py_ssize_t start, Py_ssize_t numel, const uint8_t *codes,
                          const uint8_t *selected, const int16_t *difference) {
    Py_ssize_t i = 0;
#ifdef __AVX512VBMI2__
    for (; i + 64 <= numel; i += 64) {
        uint64_t bits = _mm512_movepi8_mask(_mm512_loadu_si512(selected + i));
        __m512i some = _mm512_loadu_si512(codes + i);
        uint64_t escaped = _mm512_mask_testn_epi8_mask(bits, some, some);
        memcpy(layer->mask + (start + i) / 8, &bits, 8);
        _mm512_storeu_si512(layer->codes + layer->num_codes, _mm512_maskz_compress_epi8(bits, some));
        layer->num_codes += __builtin_popcountll(bits);
        for (; escaped; escaped &= escaped - 1)
            store_i16(layer->escapes + 2 * layer->num_escapes++, difference[i + __builtin_ctzll(escaped)]);
    }
#endif
    for (; i < numel; i += 8) {
        uint64_t eight = load_u64(codes + i), chosen = load_u64(selected + i), filled = eight | ~chosen;
        unsigned bits = LEVEL(gather_bits)(chosen);
        uint64_t packed = LEVEL(extract)(eight, chosen);
        layer->mask[(start + i) / 8] = (uint8_t)bits;
        memcpy(layer->codes + layer->num_codes, &packed, 8);
        layer->num_codes += __builtin_popcount(bits);
        if (!has_zero_byte(filled)) continue;
        for (int byte = 0; byte < 8; byte++)
            if (!(filled >> (8 * byte) & 0xFF))
                store_i16(layer->escapes + 2 * layer->num_escapes++, difference[i + byte]);
    }
}

/* Compare one chunk of 16-bit floats: differences, codes, and in which layer each is. Returns the bits of the agent's
 * largest magnitude. */
static inline uint16_t LEVEL(compare)(const uint16_t *base, const uint16_t *agent, int dtype, Py_ssize_t numel,
                                      float threshold, int16_t *difference, uint8_t *codes, uint8_t *is_large,
                                      uint8_t *is_small) {
    uint16_t largest = 0;
    for (Py_ssize_t i = 0; i < numel; i++) {
        uint16_t magnitude = agent[i] & 0x7FFF;
        largest = magnitude > largest ? magnitude : largest;
        int32_t before = (int32_t)((uint32_t)base[i] << 16), after = (int32_t)((uint32_t)agent[i] << 16);
        int32_t change = (int32_t)((uint32_t)LEVEL(ordered)(after) - (uint32_t)LEVEL(ordered)(before)) >> 16;
        float delta = LEVEL(widen)(after, dtype) - LEVEL(widen)(before, dtype);
        int large = __builtin_fabsf(delta) > threshold;
        difference[i] = (int16_t)change;
        codes[i] = (uint8_t)(change == (int8_t)change ? change : 0);
        is_large[i] = (uint8_t)-large;
        is_small[i] = (uint8_t)-(!large & (change != 0));
    }
    return largest;
}

/* Differences of 16-bit floats, split into two layers: magnitudes above the threshold, and the others. Returns whether
 * the agent is finite. */
static int LEVEL(encode)(const uint8_t *base_source, const uint8_t *agent_source, int dtype, Py_ssize_t numel,
                         float threshold, Layer layers[2]) {
    uint16_t base[CHUNK], agent[CHUNK], largest = 0, infinity = dtype == BFLOAT16 ? 0x7F80 : 0x7C00;
    int16_t difference[CHUNK];
    uint8_t codes[CHUNK], is_large[CHUNK], is_small[CHUNK];
    for (Py_ssize_t start = 0; start < numel; start += CHUNK) {
        Py_ssize_t size = numel - start < CHUNK ? numel - start : CHUNK;
        memcpy(base, base_source + 2 * start, (size_t)size * 2);
        memcpy(agent, agent_source + 2 * start, (size_t)size * 2);
        /* equal elements fill the last byte of the masks */
        for (; size % 8; size++) base[size] = agent[size] = 0;
        uint16_t magnitude =
            dtype == BFLOAT16
                ? LEVEL(compare)(base, agent, BFLOAT16, size, threshold, difference, codes, is_large, is_small)
                : LEVEL(compare)(base, agent, FLOAT16, size, threshold, difference, codes, is_large, is_small);
        largest = magnitude > largest ? magnitude : largest;
        LEVEL(append)(&layers[0], start, size, codes, is_large, difference);
        LEVEL(append)(&layers[1], start, size, codes, is_small, difference);
    }
    return largest < infinity;
}

/* Add one layer's differences to 16-bit floats, in place. */
static void LEVEL(apply)(uint8_t *target, Py_ssize_t numel, const uint8_t *mask, Packed packed) {
    uint16_t bits[CHUNK];
    int16_t difference[CHUNK];
    for (Py_ssize_t start = 0; start < numel; start += CHUNK) {
        Py_ssize_t size = numel - start < CHUNK ? numel - start : CHUNK;
        memcpy(bits, target + 2 * start, (size_t)size * 2);
        LEVEL(expand)(&packed, mask + start / 8, size, difference);
        for (Py_ssize_t i = 0; i < size; i++) {
            int32_t ordered = LEVEL(ordered)((int32_t)((uint32_t)bits[i] << 16));
            bits[i] = (uint16_t)((uint32_t)LEVEL(ordered)(LEVEL(moved)(ordered, difference[i])) >> 16);
        }
        memcpy(target + 2 * start, bits, (size_t)size * 2);
    }
}

/* Overlap counts of masks: 64 elements at a time are added bit by bit, digit d of their counts in digits[d]. */
static void LEVEL(count)(const uint8_t *const *masks, Py_ssize_t num_agents, Py_ssize_t nbytes, int64_t *changed,
                         int64_t *unique, int64_t *histogram) {
    uint64_t words[WORDS], digits[MAX_DIGITS][WORDS], matching[WORDS];
    int num_digits = 1;
    while (num_agents >> num_digits) num_digits++;
    for (Py_ssize_t start = 0; start < nbytes; start += 8 * WORDS) {
        size_t size = (size_t)(nbytes - start < 8 * WORDS ? nbytes - start : 8 * WORDS);
        memset(digits, 0, sizeof digits);
        for (Py_ssize_t t = 0; t < num_agents; t++) {
            memset(words, 0, sizeof words);
            memcpy(words, masks[t] + start, size);
            for (int w = 0; w < WORDS; w++) changed[t] += __builtin_popcountll(words[w]);
            for (int digit = 0; digit < num_digits; digit++)
                for (int w = 0; w < WORDS; w++) {
                    uint64_t carry = digits[digit][w] & words[w];
                    digits[digit][w] ^= words[w];
                    words[w] = carry;
                }
        }
        for (Py_ssize_t k = num_agents; k >= 1; k--) {
            for (int w = 0; w < WORDS; w++) matching[w] = ~(uint64_t)0;
            for (int digit = 0; digit < num_digits; digit++) {
                uint64_t wanted = k >> digit & 1 ? 0 : ~(uint64_t)0;
                for (int w = 0; w < WORDS; w++) matching[w] &= digits[digit][w] ^ wanted;
            }
            for (int w = 0; w < WORDS; w++) histogram[k] += __builtin_popcountll(matching[w]);
        }
        /* the last were the elements that exactly one agent changed */
        for (Py_ssize_t t = 0; t < num_agents; t++) {
            memset(words, 0, sizeof words);
            memcpy(words, masks[t] + start, size);
            for (int w = 0; w < WORDS; w++) unique[t] += __builtin_popcountll(words[w] & matching[w]);
        }
    }
}

/* One chunk of `update`. */
SPECIALISED void LEVEL(move)(const uint16_t *base, const int16_t *difference, int dtype, Py_ssize_t numel, float *value,
                             float *delta) {
    for (Py_ssize_t i = 0; i < numel; i++) {
        int32_t before = (int32_t)((uint32_t)base[i] << 16);
        int32_t after = LEVEL(ordered)(LEVEL(moved)(LEVEL(ordered)(before), difference[i]));
        value[i] = LEVEL(widen)(after, dtype);
        delta[i] = value[i] - LEVEL(widen)(before, dtype);
    }
}

/* What an agent makes of 16-bit floats, as float32: its values, and by what they differ. */
static void LEVEL(update)(const uint8_t *base, int dtype, Py_ssize_t numel, Source *agent, uint8_t *values,
                          uint8_t *deltas) {
    uint16_t halves[CHUNK];
    int16_t difference[CHUNK];
    float value[CHUNK + PADDING], delta[CHUNK];
    for (Py_ssize_t start = 0; start < numel; start += CHUNK) {
        Py_ssize_t size = numel - start < CHUNK ? numel - start : CHUNK;
        memcpy(halves, base + 2 * start, (size_t)size * 2);
        LEVEL(expand_layers)(agent, start, size, difference);
        if (dtype == BFLOAT16)
            LEVEL(move)(halves, difference, BFLOAT16, size, value, delta);
        else
            LEVEL(move)(halves, difference, FLOAT16, size, value, delta);
        memcpy(values + 4 * start, value, (size_t)size * 4);
        memcpy(deltas + 4 * start, delta, (size_t)size * 4);
    }
}

/* Magnitudes of unique changes in what was applied; of the agents the mask is a byte for each element. */
static void LEVEL(magnitudes)(Merge *merge, const uint8_t *applied) {
    Chunk chunk;
    float delta[CHUNK];
    uint8_t mask[CHUNK];
    for (Py_ssize_t start = 0; start < merge->numel; start += CHUNK) {
        Py_ssize_t numel = merge->numel - start < CHUNK ? merge->numel - start : CHUNK;
        memcpy(chunk.merged, applied + 4 * start, (size_t)numel * 4);
        for (Py_ssize_t i = 0; i < numel; i++) {
            chunk.owner[i] = NOBODY;
            chunk.sum[i] = 0.0f;
        }
        for (Py_ssize_t t = 0; t < merge->num_agents; t++) {
            memcpy(mask, merge->agents[t].masks[0] + start, (size_t)numel);
            memcpy(delta, merge->agents[t].deltas + 4 * start, (size_t)numel * 4);
            for (Py_ssize_t i = 0; i < numel; i++) {
                int active = mask[i] != 0;
                int32_t owner = chunk.owner[i] == NOBODY ? (int32_t)t : SEVERAL;
                chunk.owner[i] = (owner & -active) | (chunk.owner[i] & ~-active);
                chunk.sum[i] = LEVEL(select)(active, delta[i], chunk.sum[i]);
            }
        }
        for (Py_ssize_t i = 0; i < numel; i++) {
            chunk.merged[i] = as_float(as_bits(chunk.merged[i]) ^ (as_bits(chunk.sum[i]) & SIGN_BIT));
            chunk.sum[i] = __builtin_fabsf(chunk.sum[i]);
        }
        LEVEL(add_magnitudes)(merge, numel, &chunk);
    }
}

/* Numbers in [0, 1) at successive counters. */
static void LEVEL(uniform)(uint8_t *out, Py_ssize_t numel, uint64_t key) {
    float drawn[CHUNK];
    for (Py_ssize_t start = 0; start < numel; start += CHUNK) {
        Py_ssize_t size = numel - start < CHUNK ? numel - start : CHUNK;
        for (Py_ssize_t i = 0; i < size; i++) drawn[i] = LEVEL(drawn)(key + (uint64_t)(start + i) * GAMMA);
        memcpy(out + 4 * start, drawn, (size_t)size * 4);
    }
}

/* Count the upper halves of the bits of magnitudes, or the lower ones under one upper half; see selection.py. */
static void LEVEL(histogram)(const uint8_t *values, Py_ssize_t numel, int upper, int64_t *counts) {
    uint32_t bits[CHUNK];
    for (Py_ssize_t start = 0; start < numel; start += CHUNK) {
        Py_ssize_t size = numel - start < CHUNK ? numel - start : CHUNK, found = 0;
        memcpy(bits, values + 4 * start, (size_t)size * 4);
        /* what counts is moved together, as a branch for every element would be guessed wrong too often */
        for (Py_ssize_t i = 0; i < size; i++) {
            uint32_t magnitude = bits[i] & ~SIGN_BIT;
            bits[found] = upper < 0 ? magnitude >> 16 : magnitude & 0xFFFF;
            found += (magnitude != 0) & ((upper < 0) | ((int)(magnitude >> 16) == upper));
        }
        for (Py_ssize_t i = 0; i < found; i++) counts[bits[i]]++;
    }
}
