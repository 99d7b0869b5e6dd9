/*
 * The merge of _kernels_isa.h once more, for what is merged most: agents of bfloat16, packed, over a base of bfloat16,
 * rounded to nearest bfloat16, on processors with AVX-512. A group of 64 elements stays in registers from the base's
 * bits to the merged ones, where the general loops go through the first-level cache after every agent. The bits of the
 * results and of the sums are the same. `out` must not be `base`: what is not finite here is merged again.
 */

/* Vectors of a group, of 16 elements each. */
#define VECTORS 4
#define GROUP (16 * VECTORS)

/* What the agents seen so far make of a group, as in a chunk. A bit for every element that any agent changed, and that
 * several did. */
typedef struct {
    __m512 base[VECTORS], merged[VECTORS], sum[VECTORS], weights[VECTORS];
    __m512i ordered[VECTORS];
    uint64_t any, several;
} Group;

static inline __m512 absolute_512(__m512 value) {
    return _mm512_castsi512_ps(
        _mm512_andnot_si512(_mm512_set1_epi32((int32_t)SIGN_BIT), _mm512_castps_si512(value)));
}

/* `ordered` of 16 numbers: the lower bits of the upper half are turned around where the sign is set. */
static inline __m512i ordered_512(__m512i upper) {
    const int xor_of_and = 0x78;
    return _mm512_ternarylogic_epi32(upper, _mm512_srai_epi32(upper, 31), _mm512_set1_epi32(0x7FFF0000), xor_of_and);
}

/* `narrow` of 16 numbers. */
static inline __m512i narrow_512(__m512 value) {
    __m512i bits = _mm512_castps_si512(value);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    return _mm512_and_si512(rounded, _mm512_set1_epi32((int32_t)0xFFFF0000u));
}

/* The lowest bits of a mask, for as many elements of vector v as there are. */
static inline __mmask16 inside_512(Py_ssize_t numel, int v) {
    Py_ssize_t left = numel - 16 * v;
    return left >= 16 ? 0xFFFF : left <= 0 ? 0 : (__mmask16)((1u << left) - 1);
}

/* Elements beyond the last are zeros, which no agent changes. */
static inline void load_group(const uint8_t *base, Py_ssize_t numel, Group *group) {
    group->any = group->several = 0;
    for (int v = 0; v < VECTORS; v++) {
        __m256i halves = _mm256_maskz_loadu_epi16(inside_512(numel, v), base + 32 * v);
        __m512i upper = _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
        group->base[v] = group->merged[v] = _mm512_castsi512_ps(upper);
        group->ordered[v] = ordered_512(upper);
        group->sum[v] = group->weights[v] = _mm512_setzero_ps();
    }
}

/* Differences of a group in the upper halves, 0 where the mask is not set. */
static inline void expand_group(Packed *packed, uint64_t mask, __m512i difference[VECTORS]) {
    Py_ssize_t available = packed->codes_end - packed->codes;
    __mmask64 inside = available >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << available) - 1;
    __m512i codes = _mm512_maskz_expand_epi8(mask, _mm512_maskz_loadu_epi8(inside, packed->codes));
    __mmask64 escaped = _mm512_mask_testn_epi8_mask(mask, codes, codes);
    packed->codes += __builtin_popcountll(mask);
    if (!escaped) {
        /* a byte is put at the top of its element and shifted by a byte: the upper half has it with its sign */
        __m512i places = _mm512_set_epi32(15 << 24, 14 << 24, 13 << 24, 12 << 24, 11 << 24, 10 << 24, 9 << 24, 8 << 24,
                                          7 << 24, 6 << 24, 5 << 24, 4 << 24, 3 << 24, 2 << 24, 1 << 24, 0);
        for (int v = 0; v < VECTORS; v++) {
            difference[v] = _mm512_srai_epi32(_mm512_maskz_permutexvar_epi8(0x8888888888888888u, places, codes), 8);
            places = _mm512_add_epi32(places, _mm512_set1_epi32(16 << 24));
        }
        return;
    }
    __m512i halves[2] = {_mm512_cvtepi8_epi16(_mm512_castsi512_si256(codes)),
                         _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64(codes, 1))};
    for (int half = 0; half < 2; half++) {
        __mmask32 here = (__mmask32)(escaped >> 32 * half);
        halves[half] = _mm512_mask_expandloadu_epi16(halves[half], here, packed->escapes);
        packed->escapes += 2 * __builtin_popcount(here);
    }
    for (int v = 0; v < VECTORS; v++) {
        __m256i quarter = v % 2 ? _mm512_extracti64x4_epi64(halves[v / 2], 1) : _mm512_castsi512_si256(halves[v / 2]);
        difference[v] = _mm512_slli_epi32(_mm512_cvtepu16_epi32(quarter), 16);
    }
}

/* One agent in one group, as in add_element. A NaN is taken for a change, so that it is seen in the end. */
SPECIALISED void add_to_group(Source *agent, const uint64_t masks[2], int is_sum, __m512 epsilon, Group *group) {
    const __m512 gain = _mm512_set1_ps(agent->gain), weight = _mm512_set1_ps(agent->weight);
    const __mmask16 has_gain = agent->gain != 0.0f ? 0xFFFF : 0;
    __mmask16 active[VECTORS];
    __m512i difference[VECTORS];
    expand_group(&agent->next[0], masks[0], difference);
    if (agent->num_layers == 2) {
        __m512i more[VECTORS];
        expand_group(&agent->next[1], masks[1], more);
        for (int v = 0; v < VECTORS; v++) difference[v] = _mm512_add_epi32(difference[v], more[v]);
    }
    for (int v = 0; v < VECTORS; v++) {
        __m512 value = _mm512_castsi512_ps(ordered_512(_mm512_add_epi32(group->ordered[v], difference[v])));
        __m512 delta = _mm512_sub_ps(value, group->base[v]);
        active[v] = _mm512_cmp_ps_mask(absolute_512(delta), epsilon, _CMP_NLE_UQ);
        if (is_sum) {
            group->merged[v] = _mm512_mask_mov_ps(group->merged[v], active[v], delta);
            group->sum[v] = _mm512_fmadd_ps(weight, delta, group->sum[v]);
            continue;
        }
        __m512 own = _mm512_mask3_fmadd_ps(gain, delta, value, has_gain);
        group->merged[v] = _mm512_mask_mov_ps(group->merged[v], active[v], own);
        group->sum[v] = _mm512_fmadd_ps(weight, _mm512_maskz_mov_ps(active[v], delta), group->sum[v]);
        group->weights[v] = _mm512_mask_add_ps(group->weights[v], active[v], group->weights[v], weight);
    }
    agent->active =
        _mm512_kunpackd(_mm512_kunpackw(active[3], active[2]), _mm512_kunpackw(active[1], active[0]));
    group->several |= group->any & agent->active;
    group->any |= agent->active;
}

/* As `finish`: take the mean where several agents changed an element, or the sum, round and write; leaves in the group
 * what was applied, along the direction of the agent's own change, and that change. Returns the largest magnitudes so
 * far. */
SPECIALISED __m512i finish_group(uint8_t *out, Py_ssize_t numel, int is_sum, Group *group, __m512i largest) {
    for (int v = 0; v < VECTORS; v++) {
        __m512 own = is_sum ? group->merged[v] : group->sum[v], merged;
        if (is_sum) {
            merged = _mm512_add_ps(group->sum[v], group->base[v]);
        } else {
            __m512 mean = _mm512_add_ps(_mm512_div_ps(group->sum[v], group->weights[v]), group->base[v]);
            merged = _mm512_mask_mov_ps(group->merged[v], (__mmask16)(group->several >> 16 * v), mean);
        }
        __m512i upper = narrow_512(merged);
        __m512 applied = _mm512_sub_ps(_mm512_castsi512_ps(upper), group->base[v]);
        __m512 sign = _mm512_and_ps(own, _mm512_set1_ps(-0.0f));
        _mm256_mask_storeu_epi16(out + 32 * v, inside_512(numel, v),
                                 _mm512_cvtepi32_epi16(_mm512_srli_epi32(upper, 16)));
        group->merged[v] = _mm512_xor_ps(applied, sign);
        group->sum[v] = absolute_512(own);
        /* a difference beyond float32 is seen in the sum alone */
        largest = _mm512_max_epu32(largest, _mm512_castps_si512(absolute_512(merged)));
        largest = _mm512_max_epu32(largest, _mm512_castps_si512(group->sum[v]));
    }
    return largest;
}

/* Add the magnitudes of one agent's unique changes to those of the chunk. */
static inline void add_unique(const Group *group, Source *agent) {
    uint64_t unique = agent->active & ~group->several;
    __m512 applied = _mm512_loadu_ps(agent->applied_lanes), intended = _mm512_loadu_ps(agent->intended_lanes);
    for (int v = 0; v < VECTORS; v++) {
        __mmask16 here = (__mmask16)(unique >> 16 * v);
        applied = _mm512_mask_add_ps(applied, here, applied, group->merged[v]);
        intended = _mm512_mask_add_ps(intended, here, intended, group->sum[v]);
    }
    _mm512_storeu_ps(agent->applied_lanes, applied);
    _mm512_storeu_ps(agent->intended_lanes, intended);
}

static int is_all_bfloat16(const Merge *merge) {
    if (merge->base_dtype != BFLOAT16 || merge->out_dtype != BFLOAT16 || merge->is_stochastic) return 0;
    for (Py_ssize_t t = 0; t < merge->num_agents; t++)
        if (!merge->agents[t].num_layers) return 0;
    return 1;
}

/* All groups of a tile. Returns whether all of it is finite. */
SPECIALISED int merge_groups(Merge *merge, int is_sum) {
    const __m512 epsilon = _mm512_set1_ps(merge->epsilon);
    __m512i largest = _mm512_setzero_si512();
    rewind_agents(merge);
    for (Py_ssize_t start = 0; start < merge->numel; start += CHUNK) {
        Py_ssize_t end = merge->numel - start < CHUNK ? merge->numel : start + CHUNK;
        for (Py_ssize_t t = 0; t < merge->num_agents; t++) {
            memset(merge->agents[t].applied_lanes, 0, sizeof merge->agents[t].applied_lanes);
            memset(merge->agents[t].intended_lanes, 0, sizeof merge->agents[t].intended_lanes);
        }
        for (Py_ssize_t i = start; i < end; i += GROUP) {
            Group group;
            __mmask8 mask_bytes = end - i >= GROUP ? 0xFF : (__mmask8)((1u << (end - i + 7) / 8) - 1);
            load_group(merge->base + 2 * i, end - i, &group);
            for (Py_ssize_t t = 0; t < merge->num_agents; t++) {
                Source *agent = &merge->agents[t];
                uint64_t masks[2] = {0, 0};
                for (int layer = 0; layer < agent->num_layers; layer++) {
                    __m128i mask = _mm_maskz_loadu_epi8(mask_bytes, agent->masks[layer] + i / 8);
                    masks[layer] = (uint64_t)_mm_cvtsi128_si64(mask);
                }
                add_to_group(agent, masks, is_sum, epsilon, &group);
            }
            largest = finish_group(merge->out + 2 * i, end - i, is_sum, &group, largest);
            for (Py_ssize_t t = 0; t < merge->num_agents; t++) add_unique(&group, &merge->agents[t]);
        }
        for (Py_ssize_t t = 0; t < merge->num_agents; t++) {
            Source *agent = &merge->agents[t];
            /* of a sum the change itself was left */
            float weight = is_sum ? 1.0f : agent->weight;
            for (int lane = 0; lane < LANES; lane++) {
                agent->applied += agent->applied_lanes[lane] + agent->applied_lanes[LANES + lane];
                agent->intended += (agent->intended_lanes[lane] + agent->intended_lanes[LANES + lane]) / weight;
            }
        }
    }
    /* from here on numbers are rounded to infinity */
    return _mm512_reduce_max_epu32(largest) < INFINITY_BITS - 0x8000;
}

/* As `merge`. Returns whether all of it is finite; if it is not, the general loops can say why. */
static int merge_bfloat16(Merge *merge) { return merge->is_sum ? merge_groups(merge, 1) : merge_groups(merge, 0); }
