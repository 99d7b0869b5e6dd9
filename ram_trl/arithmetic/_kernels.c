/*
 * The element-wise work on one tile as fused loops: what codec.py, masks.py, ram.py and rounding.py define with torch
 * and numpy, bit for bit, without intermediate arrays. kernels.py is the door to it; the definitions decide what is
 * right.
 *
 * Every function takes objects with the buffer protocol, checks their lengths, and releases the GIL while it computes.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

/* Elements of a chunk; a multiple of 64 that keeps the scratch arrays of one chunk in the first-level cache. */
#define CHUNK 1024
/* Floats that are summed side by side; the same everywhere, so that sums do not depend on the processor. */
#define LANES 8
/* Room after the arrays of a chunk: addresses that differ by a multiple of 4096 bytes make a processor wait. */
#define PADDING 16
/* 64-bit words of masks that are counted together. */
#define WORDS 64
#define MAX_DIGITS 16
/* An agent's elements are counted in bytes, and so are its thresholds. */
#define MAX_MEASURED 255
#define MAX_THRESHOLDS 63

#define ALIGNED __attribute__((aligned(64)))
/* A function of which every call with other constants is to be a loop of its own. */
#define SPECIALISED static inline __attribute__((always_inline))

typedef float Floats __attribute__((vector_size(4 * LANES), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), may_alias));

enum { BFLOAT16, FLOAT16, FLOAT32 };

/* Whether the result holds what its dtype can. */
enum { FINITE, TOO_LARGE, NOT_FINITE };

/* Owners of an element that no agent changed, and that more than one did. */
enum { NOBODY = -1, SEVERAL = -2 };

#define INFINITY_BITS 0x7F800000u
#define SIGN_BIT 0x80000000u
/* Increment of SplitMix64. */
#define GAMMA 0x9E3779B97F4A7C15u

/* Differences of the masked elements: a code each, 0 for the next of the escapes. */
typedef struct {
    const uint8_t *codes, *codes_end, *escapes;
} Packed;

/* What one agent makes of a tile: differences from the base in one layer or two, or values and deltas in float32. */
typedef struct {
    int num_layers;
    const uint8_t *masks[2];
    /* all of its differences, and those that are not merged yet */
    Packed packed[2], next[2];
    const uint8_t *values, *deltas;
    float gain, weight;
    /* magnitudes of its unique changes, in the result and in the agent */
    double applied, intended;
    /* of the chunk at hand, side by side; and where it changed the group of elements at hand */
    float applied_lanes[2 * LANES], intended_lanes[2 * LANES];
    uint64_t active;
} Source;

typedef struct {
    const uint8_t *base;
    uint8_t *out;
    int base_dtype, out_dtype;
    Py_ssize_t numel, num_agents;
    Source *agents;
    float epsilon;
    /* whether the changes are added up, each times its agent's weight, however small they are */
    int is_sum;
    int is_stochastic;
    /* state of the generator at the tile's first element */
    uint64_t key;
    /* results */
    int status, are_agents_finite;
} Merge;

/* What the agents seen so far make of a chunk. Of a sum `merged` is the change of the last agent that is active. */
typedef struct {
    ALIGNED float base[CHUNK + PADDING], merged[CHUNK + PADDING], sum[CHUNK + PADDING], weights[CHUNK + PADDING];
    ALIGNED int32_t owner[CHUNK + PADDING], ordered[CHUNK + PADDING];
} Chunk;

typedef struct {
    uint8_t *mask, *codes, *escapes;
    Py_ssize_t num_codes, num_escapes;
} Layer;

/* One agent's part of a chunk that is measured; flags are bytes of 0 or 1. */
typedef struct {
    ALIGNED double row[CHUNK];
    ALIGNED int32_t bits[CHUNK];
    /* by how many thresholds it is exceeded */
    ALIGNED uint8_t beyond[CHUNK], active[CHUNK], unique[CHUNK], rising[CHUNK], moved[CHUNK];
} Measured;

/* What is added up over a tile: fields of `Statistics`, for these agents. */
typedef struct {
    Py_ssize_t num_agents, num_thresholds;
    /* of every agent, and what a merge adds */
    const float **deltas;
    /* bits of thresholds, which are in their order */
    int32_t thresholds[MAX_THRESHOLDS];
    Measured *chunks;
    int64_t *moved, *active, *unique, *overlaps, *both, *same_sign;
    double *l1, *squares, *largest, *products;
} Measure;

static inline uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint64_t load_u64(const uint8_t *source) {
    uint64_t value;
    memcpy(&value, source, 8);
    return value;
}

static inline int16_t load_i16(const uint8_t *source) {
    int16_t value;
    memcpy(&value, source, 2);
    return value;
}

static inline void store_i16(uint8_t *target, int16_t value) { memcpy(target, &value, 2); }

static inline uint64_t load_up_to_8(const uint8_t *source, const uint8_t *end) {
    uint64_t value = 0;
    if (end - source >= 8) return load_u64(source);
    memcpy(&value, source, (size_t)(end - source));
    return value;
}

static inline int has_zero_byte(uint64_t bytes) {
    return ((bytes - 0x0101010101010101u) & ~bytes & 0x8080808080808080u) != 0;
}

static void rewind_agents(Merge *merge) {
    for (Py_ssize_t t = 0; t < merge->num_agents; t++) {
        memcpy(merge->agents[t].next, merge->agents[t].packed, sizeof merge->agents[t].next);
        merge->agents[t].applied = merge->agents[t].intended = 0.0;
    }
}

static uint64_t SPREAD_TABLE[256];

#define LEVEL(name) name##_baseline
#include "_kernels_isa.h"
#include "_kernels_measure.h"
#undef LEVEL

#if defined(__x86_64__) && !defined(__clang__) && __GNUC__ >= 9
#define HAS_LEVELS 1
#pragma GCC push_options
#pragma GCC target("avx2,bmi,bmi2,fma,popcnt")
#define LEVEL(name) name##_v3
#include "_kernels_isa.h"
#include "_kernels_measure.h"
#undef LEVEL
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,bmi,bmi2,fma,popcnt")
#pragma GCC target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx512vpopcntdq,prefer-vector-width=512")
#include "_kernels_avx512.h"
#define LEVEL(name) name##_v4
#include "_kernels_isa.h"
#include "_kernels_measure.h"
#undef LEVEL
#pragma GCC pop_options
#endif

typedef struct {
    const char *name;
    void (*merge)(Merge *);
    int (*encode)(const uint8_t *, const uint8_t *, int, Py_ssize_t, float, Layer[2]);
    void (*apply)(uint8_t *, Py_ssize_t, const uint8_t *, Packed);
    void (*count)(const uint8_t *const *, Py_ssize_t, Py_ssize_t, int64_t *, int64_t *, int64_t *);
    int (*open_payload)(const uint8_t *, Py_ssize_t, const uint8_t *, Py_ssize_t, Packed *);
    void (*update)(const uint8_t *, int, Py_ssize_t, Source *, uint8_t *, uint8_t *);
    void (*magnitudes)(Merge *, const uint8_t *);
    void (*uniform)(uint8_t *, Py_ssize_t, uint64_t);
    void (*histogram)(const uint8_t *, Py_ssize_t, int, int64_t *);
    void (*measure)(const Measure *, Py_ssize_t);
} Level;

#define LEVEL_ENTRY(name)                                                                                             \
    {#name,         merge_##name,      encode_##name,  apply_##name,    count_##name, open_payload_##name,            \
     update_##name, magnitudes_##name, uniform_##name, histogram_##name, measure_##name}
static const Level LEVELS[] = {
    LEVEL_ENTRY(baseline),
#ifdef HAS_LEVELS
    LEVEL_ENTRY(v3),
    LEVEL_ENTRY(v4),
#endif
};
static int num_levels = 1;
static const Level *level = LEVELS;

/* Whether a mask has a bit for every element, 0 beyond the last, and the payload fits it. */
static int open_packed(const Py_buffer *mask, const Py_buffer *payload, Py_ssize_t numel, Packed *packed) {
    const uint8_t *bits = mask->buf;
    return mask->len == (numel + 7) / 8 && !(numel % 8 && bits[numel / 8] >> numel % 8) &&
           level->open_payload(bits, mask->len, payload->buf, payload->len, packed);
}

static PyObject *damaged(void) {
    PyErr_SetString(PyExc_ValueError, "mask, codes and escapes do not fit each other");
    return NULL;
}

/* For each agent the applied and the intended magnitude of its unique changes. */
static PyObject *sums_of(const Merge *merge) {
    PyObject *pairs = PyList_New(merge->num_agents);
    for (Py_ssize_t t = 0; pairs && t < merge->num_agents; t++) {
        PyObject *pair = Py_BuildValue("(dd)", merge->agents[t].applied, merge->agents[t].intended);
        if (!pair)
            Py_CLEAR(pairs);
        else
            PyList_SET_ITEM(pairs, t, pair);
    }
    return pairs;
}

PyDoc_STRVAR(merge_doc,
             "merge(out, out_dtype, base, base_dtype, agents, epsilon, key, is_sum=False)\n--\n\n"
             "Merge one tile. `agents` are (is_packed, mask or values, payload or deltas, gain, weight), and of a second\n"
             "layer mask and payload; `key` is None to round to nearest; `is_sum`: all changes are added up, each times\n"
             "the weight. Returns 0 (1: values beyond the dtype, 2: not finite), whether the agents are finite, and\n"
             "for each of them the applied and the intended magnitude of its unique changes. Raises ValueError for\n"
             "damaged masks and payloads.");

static PyObject *py_merge(PyObject *self, PyObject *args) {
    Py_buffer out, base, *buffers = NULL;
    PyObject *agents, *key, *fast = NULL, *magnitudes = NULL, *result = NULL;
    Source *sources = NULL;
    Py_ssize_t num_agents = 0, opened = 0;
    int is_damaged = 0;
    Merge merge = {0};
    if (!PyArg_ParseTuple(args, "w*iy*iOfO|p", &out, &merge.out_dtype, &base, &merge.base_dtype, &agents,
                          &merge.epsilon, &key, &merge.is_sum))
        return NULL;
    merge.base = base.buf;
    merge.out = out.buf;
    merge.numel = base.len / (merge.base_dtype == FLOAT32 ? 4 : 2);
    if (out.len != merge.numel * (merge.out_dtype == FLOAT32 ? 4 : 2)) {
        PyErr_SetString(PyExc_AssertionError, "base and out must hold the same number of elements");
        goto done;
    }
    merge.is_stochastic = key != Py_None;
    if (merge.is_stochastic) merge.key = PyLong_AsUnsignedLongLongMask(key);
    if (PyErr_Occurred() || !(fast = PySequence_Fast(agents, "agents must be a sequence"))) goto done;
    merge.num_agents = num_agents = PySequence_Fast_GET_SIZE(fast);
    merge.agents = sources = PyMem_Calloc((size_t)num_agents + 1, sizeof *sources);
    buffers = PyMem_Calloc(4 * (size_t)num_agents + 1, sizeof *buffers);
    if (!sources || !buffers) {
        PyErr_NoMemory();
        goto done;
    }
    for (; opened < num_agents; opened++) {
        Source *agent = &sources[opened];
        Py_buffer *parts = &buffers[4 * opened];
        PyObject *item = PySequence_Fast_GET_ITEM(fast, opened);
        int is_packed;
        if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) == 6) {
            PyErr_SetString(PyExc_TypeError, "an agent must be a tuple of five, or of seven");
            goto done;
        }
        if (!PyArg_ParseTuple(item, "py*y*ff|y*y*", &is_packed, &parts[0], &parts[1], &agent->gain, &agent->weight,
                              &parts[2], &parts[3]))
            goto done;
        if (is_packed) {
            agent->num_layers = PyTuple_GET_SIZE(item) == 7 ? 2 : 1;
            is_damaged |= merge.base_dtype == FLOAT32;
            for (int layer = 0; layer < agent->num_layers && !is_damaged; layer++) {
                agent->masks[layer] = parts[2 * layer].buf;
                is_damaged |=
                    !open_packed(&parts[2 * layer], &parts[2 * layer + 1], merge.numel, &agent->packed[layer]);
            }
        } else {
            agent->values = parts[0].buf;
            agent->deltas = parts[1].buf;
            is_damaged |= parts[0].len != 4 * merge.numel || parts[1].len != 4 * merge.numel;
        }
    }
    if (is_damaged) {
        damaged();
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS;
    level->merge(&merge);
    Py_END_ALLOW_THREADS;
    magnitudes = sums_of(&merge);
    if (magnitudes)
        result = Py_BuildValue("(iOO)", merge.status, merge.are_agents_finite ? Py_True : Py_False, magnitudes);
done:
    for (Py_ssize_t t = 0; t < 4 * opened; t++) PyBuffer_Release(&buffers[t]);
    PyMem_Free(buffers);
    PyMem_Free(sources);
    Py_XDECREF(magnitudes);
    Py_XDECREF(fast);
    PyBuffer_Release(&base);
    PyBuffer_Release(&out);
    return result;
}

PyDoc_STRVAR(encode_doc,
             "encode(base, agent, dtype, threshold, masks, codes, escapes)\n--\n\n"
             "Differences of 16-bit floats in two layers, above the threshold and not. The last three are pairs of\n"
             "buffers to fill: ceil(n / 8), n + 64 and 2 n bytes. Returns for each layer the numbers of codes and of\n"
             "escapes, and whether the agent is finite.");

static PyObject *py_encode(PyObject *self, PyObject *args) {
    Py_buffer base, agent, outputs[6];
    Layer layers[2] = {{0}, {0}};
    int dtype, fits = 1, is_finite = 1;
    float threshold;
    if (!PyArg_ParseTuple(args, "y*y*if(w*w*)(w*w*)(w*w*)", &base, &agent, &dtype, &threshold, &outputs[0],
                          &outputs[1], &outputs[2], &outputs[3], &outputs[4], &outputs[5]))
        return NULL;
    Py_ssize_t numel = base.len / 2;
    /* below 0 equal elements would count as changed, for which there is no room */
    fits = base.len == agent.len && base.len % 2 == 0 && dtype != FLOAT32 && threshold >= 0.0f;
    for (int number = 0; number < 2; number++) {
        layers[number] = (Layer){outputs[number].buf, outputs[2 + number].buf, outputs[4 + number].buf, 0, 0};
        fits &= outputs[number].len == (numel + 7) / 8 && outputs[2 + number].len >= numel + 64 &&
                outputs[4 + number].len >= 2 * numel;
    }
    if (fits) {
        Py_BEGIN_ALLOW_THREADS;
        is_finite = level->encode(base.buf, agent.buf, dtype, numel, threshold, layers);
        Py_END_ALLOW_THREADS;
    } else {
        PyErr_SetString(PyExc_AssertionError, "buffers of other lengths, or a threshold from 0 on, are needed");
    }
    for (int number = 0; number < 6; number++) PyBuffer_Release(&outputs[number]);
    PyBuffer_Release(&agent);
    PyBuffer_Release(&base);
    if (!fits) return NULL;
    return Py_BuildValue("((nn)(nn)O)", layers[0].num_codes, layers[0].num_escapes, layers[1].num_codes,
                         layers[1].num_escapes, is_finite ? Py_True : Py_False);
}

PyDoc_STRVAR(apply_doc,
             "apply(values, mask, payload)\n--\n\n"
             "Add a layer's differences to 16-bit floats, in place. Raises ValueError for a damaged mask or payload.");

static PyObject *py_apply(PyObject *self, PyObject *args) {
    Py_buffer values, mask, payload;
    Packed packed;
    if (!PyArg_ParseTuple(args, "w*y*y*", &values, &mask, &payload)) return NULL;
    int is_damaged = !open_packed(&mask, &payload, values.len / 2, &packed);
    if (!is_damaged) {
        Py_BEGIN_ALLOW_THREADS;
        level->apply(values.buf, values.len / 2, mask.buf, packed);
        Py_END_ALLOW_THREADS;
    }
    PyBuffer_Release(&payload);
    PyBuffer_Release(&mask);
    PyBuffer_Release(&values);
    if (is_damaged) return damaged();
    Py_RETURN_NONE;
}

PyDoc_STRVAR(count_doc,
             "count(masks)\n--\n\n"
             "Overlap counts of masks of one length: for each its bits, for each the bits that no other has, and how\n"
             "many elements 0, 1, ... N of them have. The first of the last list is 0.");

static PyObject *py_count(PyObject *self, PyObject *args) {
    PyObject *masks, *fast, *result = NULL;
    if (!PyArg_ParseTuple(args, "O", &masks) || !(fast = PySequence_Fast(masks, "masks must be a sequence")))
        return NULL;
    Py_ssize_t num_agents = PySequence_Fast_GET_SIZE(fast), opened = 0, num_counts = 3 * num_agents + 1;
    Py_buffer *buffers = PyMem_Calloc((size_t)num_agents + 1, sizeof *buffers);
    const uint8_t **starts = PyMem_Calloc((size_t)num_agents + 1, sizeof *starts);
    int64_t *counts = PyMem_Calloc((size_t)num_counts, sizeof *counts);
    if (!buffers || !starts || !counts) {
        PyErr_NoMemory();
        goto done;
    }
    for (; opened < num_agents; opened++) {
        if (PyObject_GetBuffer(PySequence_Fast_GET_ITEM(fast, opened), &buffers[opened], PyBUF_SIMPLE)) goto done;
        starts[opened] = buffers[opened].buf;
        if (buffers[opened].len != buffers[0].len || num_agents >> MAX_DIGITS) {
            opened++;
            PyErr_SetString(PyExc_AssertionError, "masks must be of one length, and fewer than 65536");
            goto done;
        }
    }
    Py_BEGIN_ALLOW_THREADS;
    level->count(starts, num_agents, num_agents ? buffers[0].len : 0, counts, counts + num_agents,
                 counts + 2 * num_agents);
    Py_END_ALLOW_THREADS;
    result = PyList_New(num_counts);
    for (Py_ssize_t i = 0; result && i < num_counts; i++) {
        PyObject *count = PyLong_FromLongLong(counts[i]);
        if (!count) Py_CLEAR(result);
        else PyList_SET_ITEM(result, i, count);
    }
done:
    for (Py_ssize_t t = 0; t < opened; t++) PyBuffer_Release(&buffers[t]);
    PyMem_Free(counts);
    PyMem_Free(starts);
    PyMem_Free(buffers);
    Py_DECREF(fast);
    return result;
}

PyDoc_STRVAR(pack_gaps_doc,
             "pack_gaps(mask, gaps)\n--\n\n"
             "Write the number of zeros before each one, 255 for as many without a one; returns the number of bytes.");

static PyObject *py_pack_gaps(PyObject *self, PyObject *args) {
    Py_buffer mask, gaps;
    if (!PyArg_ParseTuple(args, "y*w*", &mask, &gaps)) return NULL;
    const uint8_t *bits = mask.buf;
    uint8_t *out = gaps.buf;
    Py_ssize_t position = 0, length = 0, capacity = gaps.len;
    Py_BEGIN_ALLOW_THREADS;
    for (Py_ssize_t start = 0; start < mask.len && length <= capacity; start += 8) {
        uint64_t word = load_up_to_8(bits + start, bits + mask.len);
        for (; word; word &= word - 1) {
            Py_ssize_t index = 8 * start + __builtin_ctzll(word), gap = index - position;
            if (length + gap / 255 + 1 > capacity) {
                length = capacity + 1;
                break;
            }
            for (; gap >= 255; gap -= 255) out[length++] = 255;
            out[length++] = (uint8_t)gap;
            position = index + 1;
        }
    }
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&gaps);
    PyBuffer_Release(&mask);
    if (length <= capacity) return PyLong_FromSsize_t(length);
    PyErr_SetString(PyExc_AssertionError, "no room for the gaps");
    return NULL;
}

PyDoc_STRVAR(unpack_gaps_doc,
             "unpack_gaps(gaps, mask)\n--\n\n"
             "Fill a mask from gaps. Raises ValueError if they go beyond it.");

static PyObject *py_unpack_gaps(PyObject *self, PyObject *args) {
    Py_buffer gaps, mask;
    if (!PyArg_ParseTuple(args, "y*w*", &gaps, &mask)) return NULL;
    const uint8_t *steps = gaps.buf;
    uint8_t *bits = mask.buf;
    Py_ssize_t position = 0, limit = 8 * mask.len, i = 0;
    Py_BEGIN_ALLOW_THREADS;
    memset(bits, 0, (size_t)mask.len);
    for (; i < gaps.len; i++) {
        position += steps[i];
        if (steps[i] == 255) continue;
        if (position >= limit) break;
        bits[position / 8] |= (uint8_t)(1u << position % 8);
        position++;
    }
    Py_END_ALLOW_THREADS;
    int is_damaged = i < gaps.len;
    PyBuffer_Release(&mask);
    PyBuffer_Release(&gaps);
    if (is_damaged) return damaged();
    Py_RETURN_NONE;
}

PyDoc_STRVAR(update_doc,
             "update(base, dtype, values, deltas, mask, payload, ...)\n--\n\n"
             "Fill float32 with what one layer, or two, make of 16-bit floats, and with the differences. Raises ValueError\n"
             "for damaged masks and payloads.");

static PyObject *py_update(PyObject *self, PyObject *args) {
    Py_buffer base, values, deltas, parts[4] = {{0}};
    Source agent = {0};
    int dtype, fits, is_damaged = 0;
    if (PyTuple_GET_SIZE(args) == 7) {
        PyErr_SetString(PyExc_TypeError, "a layer has a mask and a payload");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "y*iw*w*y*y*|y*y*", &base, &dtype, &values, &deltas, &parts[0], &parts[1], &parts[2],
                          &parts[3]))
        return NULL;
    Py_ssize_t numel = base.len / 2;
    fits = dtype != FLOAT32 && base.len == 2 * numel && values.len == 4 * numel && deltas.len == 4 * numel;
    agent.num_layers = PyTuple_GET_SIZE(args) == 8 ? 2 : 1;
    for (int layer = 0; fits && layer < agent.num_layers && !is_damaged; layer++) {
        agent.masks[layer] = parts[2 * layer].buf;
        is_damaged = !open_packed(&parts[2 * layer], &parts[2 * layer + 1], numel, &agent.next[layer]);
    }
    if (!fits) PyErr_SetString(PyExc_AssertionError, "buffers of other lengths are needed");
    if (is_damaged) damaged();
    if (fits && !is_damaged) {
        Py_BEGIN_ALLOW_THREADS;
        level->update(base.buf, dtype, numel, &agent, values.buf, deltas.buf);
        Py_END_ALLOW_THREADS;
    }
    for (int part = 0; part < 4; part++) PyBuffer_Release(&parts[part]);
    PyBuffer_Release(&deltas);
    PyBuffer_Release(&values);
    PyBuffer_Release(&base);
    if (!fits || is_damaged) return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(magnitudes_doc,
             "magnitudes(applied, agents)\n--\n\n"
             "Of what was applied to a tile, float32: for each of the agents, (deltas, mask), the sums over its unique\n"
             "elements of what was applied in the direction of its delta, and of the delta. Masks have a byte an element.");

static PyObject *py_magnitudes(PyObject *self, PyObject *args) {
    Py_buffer applied, *buffers = NULL;
    PyObject *agents, *fast = NULL, *result = NULL;
    Py_ssize_t opened = 0;
    Merge merge = {.is_sum = 1};
    if (!PyArg_ParseTuple(args, "y*O", &applied, &agents)) return NULL;
    merge.numel = applied.len / 4;
    if (!(fast = PySequence_Fast(agents, "agents must be a sequence"))) goto done;
    merge.num_agents = PySequence_Fast_GET_SIZE(fast);
    merge.agents = PyMem_Calloc((size_t)merge.num_agents + 1, sizeof *merge.agents);
    buffers = PyMem_Calloc(2 * (size_t)merge.num_agents + 1, sizeof *buffers);
    if (!merge.agents || !buffers) {
        PyErr_NoMemory();
        goto done;
    }
    for (; opened < merge.num_agents; opened++) {
        Py_buffer *pair = &buffers[2 * opened];
        PyObject *item = PySequence_Fast_GET_ITEM(fast, opened);
        if (!PyTuple_Check(item)) {
            PyErr_SetString(PyExc_TypeError, "an agent must be a tuple");
            goto done;
        }
        if (!PyArg_ParseTuple(item, "y*y*", &pair[0], &pair[1])) goto done;
        merge.agents[opened].deltas = pair[0].buf;
        merge.agents[opened].masks[0] = pair[1].buf;
        if (applied.len % 4 || pair[0].len != applied.len || pair[1].len != merge.numel) {
            opened++;
            PyErr_SetString(PyExc_AssertionError, "deltas and masks must be as long as what was applied");
            goto done;
        }
    }
    Py_BEGIN_ALLOW_THREADS;
    level->magnitudes(&merge, applied.buf);
    Py_END_ALLOW_THREADS;
    result = sums_of(&merge);
done:
    for (Py_ssize_t t = 0; t < 2 * opened; t++) PyBuffer_Release(&buffers[t]);
    PyMem_Free(buffers);
    PyMem_Free(merge.agents);
    Py_XDECREF(fast);
    PyBuffer_Release(&applied);
    return result;
}

PyDoc_STRVAR(uniform_doc,
             "uniform(out, key)\n--\n\n"
             "Fill float32 with numbers in [0, 1): SplitMix64 at successive counters, from a state on.");

static PyObject *py_uniform(PyObject *self, PyObject *args) {
    Py_buffer out;
    PyObject *key;
    if (!PyArg_ParseTuple(args, "w*O!", &out, &PyLong_Type, &key)) return NULL;
    uint64_t state = PyLong_AsUnsignedLongLongMask(key);
    Py_BEGIN_ALLOW_THREADS;
    level->uniform(out.buf, out.len / 4, state);
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&out);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(histogram_doc,
             "histogram(values, upper, counts)\n--\n\n"
             "Add to `counts`, 65536 int64, how many of the float32 values have each upper half of their bits without\n"
             "the sign; or each lower half, of those with the upper half `upper`, if it is not negative. Zeros are not\n"
             "counted.");

static PyObject *py_histogram(PyObject *self, PyObject *args) {
    Py_buffer values, counts;
    int upper;
    if (!PyArg_ParseTuple(args, "y*iw*", &values, &upper, &counts)) return NULL;
    int fits = values.len % 4 == 0 && counts.len == 8 * 65536;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS;
        level->histogram(values.buf, values.len / 4, upper, counts.buf);
        Py_END_ALLOW_THREADS;
    } else {
        PyErr_SetString(PyExc_AssertionError, "float32 values, and room for 65536 counts are needed");
    }
    PyBuffer_Release(&counts);
    PyBuffer_Release(&values);
    if (!fits) return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(measure_doc,
             "measure(deltas, thresholds, integers, sums)\n--\n\n"
             "Count and add up what N agents changed in one tile: analyzing/statistics.py. `deltas`, N + 1 float32 of\n"
             "one length, end with what a merge adds; `thresholds`: L float32, ascending. `integers`, int64, and\n"
             "`sums`, float64, are added to, but for the maxima among them; their rows of N are moved, L active,\n"
             "L unique, N overlaps, N both, N same_sign; and 2 (L + 1) sums of magnitudes, as many of squares, 3 of\n"
             "the largest, and (N + 1) squared products.");

static PyObject *py_measure(PyObject *self, PyObject *args) {
    PyObject *sequence, *deltas;
    Py_buffer thresholds, integers, sums, *buffers = NULL;
    if (!PyArg_ParseTuple(args, "Oy*w*w*", &sequence, &thresholds, &integers, &sums)) return NULL;
    Measure measure = {0};
    Py_ssize_t opened = 0, total = 0, n = -1, levels = thresholds.len / 4;
    int fits = 0;
    deltas = PySequence_Fast(sequence, "deltas are a sequence");
    if (!deltas) goto done;
    total = PySequence_Fast_GET_SIZE(deltas);
    n = total - 1;
    buffers = PyMem_Calloc((size_t)total + 1, sizeof *buffers);
    measure.deltas = PyMem_Calloc((size_t)total + 1, sizeof *measure.deltas);
    /* aligned by hand: what allocators give is not aligned to vectors */
    uint8_t *room = PyMem_Malloc((size_t)total * sizeof(Measured) + 64);
    if (!buffers || !measure.deltas || !room) {
        PyErr_NoMemory();
        PyMem_Free(room);
        goto done;
    }
    measure.chunks = (Measured *)(room + (64 - (uintptr_t)room % 64));
    for (; opened < total; opened++) {
        if (PyObject_GetBuffer(PySequence_Fast_GET_ITEM(deltas, opened), &buffers[opened], PyBUF_SIMPLE)) break;
        measure.deltas[opened] = buffers[opened].buf;
    }
    fits = opened == total && n > 0 && n <= MAX_MEASURED && levels > 0 && levels <= MAX_THRESHOLDS &&
           integers.len == 8 * n * (1 + 2 * levels + 3 * n) &&
           sums.len == 8 * (n * (4 * (levels + 1) + 3) + (n + 1) * (n + 1));
    for (Py_ssize_t t = 0; fits && t < total; t++) fits = buffers[t].len == buffers[0].len && buffers[t].len % 4 == 0 && (uintptr_t)buffers[t].buf % 4 == 0;
    if (fits) {
        measure.num_agents = n;
        measure.num_thresholds = levels;
        memcpy(measure.thresholds, thresholds.buf, (size_t)levels * 4);
        measure.moved = integers.buf;
        measure.active = measure.moved + n;
        measure.unique = measure.active + levels * n;
        measure.overlaps = measure.unique + levels * n;
        measure.both = measure.overlaps + n * n;
        measure.same_sign = measure.both + n * n;
        measure.l1 = sums.buf;
        measure.squares = measure.l1 + 2 * (levels + 1) * n;
        measure.largest = measure.squares + 2 * (levels + 1) * n;
        measure.products = measure.largest + 3 * n;
        Py_BEGIN_ALLOW_THREADS;
        level->measure(&measure, buffers[0].len / 4);
        Py_END_ALLOW_THREADS;
    } else if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_AssertionError, "deltas, thresholds and room for results do not fit each other");
    }
    PyMem_Free(room);
done:
    for (Py_ssize_t t = 0; t < opened; t++) PyBuffer_Release(&buffers[t]);
    PyMem_Free(buffers);
    PyMem_Free(measure.deltas);
    Py_XDECREF(deltas);
    PyBuffer_Release(&sums);
    PyBuffer_Release(&integers);
    PyBuffer_Release(&thresholds);
    if (!fits) return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(use_level_doc,
             "use_level(name)\n--\n\n"
             "Compute with the instructions of one of LEVELS; by default the last.");

static PyObject *py_use_level(PyObject *self, PyObject *args) {
    const char *name;
    if (!PyArg_ParseTuple(args, "s", &name)) return NULL;
    for (int i = 0; i < num_levels; i++) {
        if (!strcmp(name, LEVELS[i].name)) {
            level = &LEVELS[i];
            Py_RETURN_NONE;
        }
    }
    PyErr_Format(PyExc_ValueError, "this processor has no level %s", name);
    return NULL;
}

static PyMethodDef METHODS[] = {
    {"merge", py_merge, METH_VARARGS, merge_doc},
    {"encode", py_encode, METH_VARARGS, encode_doc},
    {"apply", py_apply, METH_VARARGS, apply_doc},
    {"count", py_count, METH_VARARGS, count_doc},
    {"pack_gaps", py_pack_gaps, METH_VARARGS, pack_gaps_doc},
    {"unpack_gaps", py_unpack_gaps, METH_VARARGS, unpack_gaps_doc},
    {"update", py_update, METH_VARARGS, update_doc},
    {"magnitudes", py_magnitudes, METH_VARARGS, magnitudes_doc},
    {"uniform", py_uniform, METH_VARARGS, uniform_doc},
    {"histogram", py_histogram, METH_VARARGS, histogram_doc},
    {"measure", py_measure, METH_VARARGS, measure_doc},
    {"use_level", py_use_level, METH_VARARGS, use_level_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, .m_name = "_kernels", .m_doc = "Fused loops over one tile.", .m_size = -1, .m_methods = METHODS,
};

PyMODINIT_FUNC PyInit__kernels(void) {
    for (unsigned bits = 0; bits < 256; bits++)
        for (int bit = 0; bit < 8; bit++)
            if (bits >> bit & 1) SPREAD_TABLE[bits] |= (uint64_t)0xFF << (8 * bit);
#ifdef HAS_LEVELS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
        __builtin_cpu_supports("fma")) {
        num_levels = 2;
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") &&
            __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512vpopcntdq"))
            num_levels = 3;
    }
#endif
    level = &LEVELS[num_levels - 1];
    PyObject *module = PyModule_Create(&MODULE), *names = PyTuple_New(num_levels);
    for (int i = 0; names && i < num_levels; i++) PyTuple_SET_ITEM(names, i, PyUnicode_FromString(LEVELS[i].name));
    if (!module || !names || PyModule_AddObject(module, "LEVELS", names)) return NULL;
    return module;
}
