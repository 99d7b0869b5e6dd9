/*
 * What ram_trl/analyzing/statistics.py counts and adds up of one tile; included once for every instruction set, as
 * _kernels_isa.h. The order of additions is that of the elements, by lanes: the same sums with every set.
 */

/* Ones in bytes that are 0 or 1: counted side by side, as long as a byte can count. */
static inline int64_t LEVEL(ones)(const uint8_t *flags) {
    uint8_t counts[64] = {0};
    int64_t total = 0;
    for (Py_ssize_t i = 0; i < CHUNK; i += 64)
        for (int lane = 0; lane < 64; lane++) counts[lane] += flags[i + lane];
    for (int lane = 0; lane < 64; lane++) total += counts[lane];
    return total;
}

/* Largest of the bits of magnitudes where a flag is set: positive floats are in the order of their bits. */
static inline double LEVEL(largest)(const int32_t *bits, const uint8_t *flags, double so_far) {
    int32_t most = 0;
    for (Py_ssize_t i = 0; i < CHUNK; i++) {
        int32_t chosen = bits[i] & -(int32_t)flags[i];
        most = most > chosen ? most : chosen;
    }
    double found = as_float((uint32_t)most);
    return found > so_far ? found : so_far;
}

static inline double LEVEL(dot)(const double *a, const double *b) {
    double lanes[LANES] = {0}, total = 0;
    for (Py_ssize_t i = 0; i < CHUNK; i += LANES)
        for (int lane = 0; lane < LANES; lane++) lanes[lane] += a[i + lane] * b[i + lane];
    for (int lane = 0; lane < LANES; lane++) total += lanes[lane];
    return total;
}

/* Magnitudes and their squares by bin: the number of thresholds that an element is beyond, once more for unique ones. */
static void LEVEL(add_bins)(const double *row, const uint8_t *beyond, const uint8_t *unique, const Measure *measure,
                            Py_ssize_t t) {
    /* neighbours are often in one bin, and would wait for each other */
    double l1[4][2 * (MAX_THRESHOLDS + 1)], squares[4][2 * (MAX_THRESHOLDS + 1)];
    Py_ssize_t n = measure->num_agents, bins = 2 * (measure->num_thresholds + 1);
    memset(l1, 0, sizeof l1);
    memset(squares, 0, sizeof squares);
    for (Py_ssize_t i = 0; i < CHUNK; i += 4) {
        for (int lane = 0; lane < 4; lane++) {
            double size = row[i + lane] < 0 ? -row[i + lane] : row[i + lane];
            Py_ssize_t bin = beyond[i + lane] + unique[i + lane] * (bins / 2);
            l1[lane][bin] += size;
            squares[lane][bin] += size * size;
        }
    }
    for (Py_ssize_t bin = 0; bin < bins; bin++) {
        measure->l1[bin * n + t] += (l1[0][bin] + l1[1][bin]) + (l1[2][bin] + l1[3][bin]);
        measure->squares[bin * n + t] += (squares[0][bin] + squares[1][bin]) + (squares[2][bin] + squares[3][bin]);
    }
}

/* Loads an agent's chunk. Returns the number of thresholds that any of its elements is beyond. */
static Py_ssize_t LEVEL(load)(const Measure *measure, Py_ssize_t t, Py_ssize_t start, Py_ssize_t size) {
    Measured *chunk = &measure->chunks[t];
    ALIGNED float last[CHUNK];
    ALIGNED int32_t levels[CHUNK] = {0};
    const float *delta = measure->deltas[t] + start;
    int32_t most = 0;
    Py_ssize_t used = 0;
    if (size < CHUNK) {
        memset(last, 0, sizeof last);
        memcpy(last, delta, (size_t)size * 4);
        delta = last;
    }
    for (Py_ssize_t i = 0; i < CHUNK; i++) {
        chunk->row[i] = delta[i];
        chunk->rising[i] = delta[i] > 0;
        chunk->bits[i] = (int32_t)(as_bits(delta[i]) & ~SIGN_BIT);
        chunk->moved[i] = chunk->bits[i] != 0;
        most = most > chunk->bits[i] ? most : chunk->bits[i];
    }
    for (; used < measure->num_thresholds && most > measure->thresholds[used]; used++)
        for (Py_ssize_t i = 0; i < CHUNK; i++) levels[i] += chunk->bits[i] > measure->thresholds[used];
    for (Py_ssize_t i = 0; i < CHUNK; i++) {
        chunk->beyond[i] = (uint8_t)levels[i];
        chunk->active[i] = levels[i] > 0;
    }
    return used;
}

/* How many elements each agent changed by more than a threshold, and how many of them alone. */
static void LEVEL(count_beyond)(const Measure *measure, uint8_t threshold) {
    Py_ssize_t n = measure->num_agents;
    ALIGNED uint8_t owners[CHUNK], flags[CHUNK];
    memset(owners, 0, sizeof owners);
    for (Py_ssize_t t = 0; t < n; t++)
        for (Py_ssize_t i = 0; i < CHUNK; i++) owners[i] += measure->chunks[t].beyond[i] > threshold;
    for (Py_ssize_t t = 0; t < n; t++) {
        const uint8_t *beyond = measure->chunks[t].beyond;
        for (Py_ssize_t i = 0; i < CHUNK; i++) flags[i] = beyond[i] > threshold;
        measure->active[threshold * n + t] += LEVEL(ones)(flags);
        for (Py_ssize_t i = 0; i < CHUNK; i++) flags[i] &= owners[i] == 1;
        measure->unique[threshold * n + t] += LEVEL(ones)(flags);
        if (threshold > 0) continue;
        memcpy(measure->chunks[t].unique, flags, sizeof flags);
        for (uint8_t others = 0; others < n; others++) {
            uint8_t all = others + 1;
            for (Py_ssize_t i = 0; i < CHUNK; i++) flags[i] = (beyond[i] > 0) & (owners[i] == all);
            measure->overlaps[t * n + others] += LEVEL(ones)(flags);
        }
    }
}

static void LEVEL(measure_pairs)(const Measure *measure) {
    Py_ssize_t n = measure->num_agents;
    ALIGNED uint8_t flags[CHUNK];
    for (Py_ssize_t t = 0; t < n; t++) {
        const Measured *one = &measure->chunks[t];
        for (Py_ssize_t u = t; u < n; u++) {
            const Measured *other = &measure->chunks[u];
            for (Py_ssize_t i = 0; i < CHUNK; i++) flags[i] = one->active[i] & other->active[i];
            int64_t both = LEVEL(ones)(flags);
            for (Py_ssize_t i = 0; i < CHUNK; i++) flags[i] &= one->rising[i] == other->rising[i];
            int64_t same_sign = LEVEL(ones)(flags);
            measure->both[t * n + u] += both;
            measure->same_sign[t * n + u] += same_sign;
            if (u == t) continue;
            measure->both[u * n + t] += both;
            measure->same_sign[u * n + t] += same_sign;
        }
    }
    for (Py_ssize_t t = 0; t <= n; t++) {
        for (Py_ssize_t u = t; u <= n; u++) {
            double product = LEVEL(dot)(measure->chunks[t].row, measure->chunks[u].row);
            measure->products[t * (n + 1) + u] += product;
            if (u > t) measure->products[u * (n + 1) + t] += product;
        }
    }
}

/* The last of the chunks is what a merge adds to the base: only its products are wanted. */
static void LEVEL(measure)(const Measure *measure, Py_ssize_t numel) {
    Py_ssize_t n = measure->num_agents;
    ALIGNED uint8_t shared[CHUNK];
    for (Py_ssize_t start = 0; start < numel; start += CHUNK) {
        Py_ssize_t size = numel - start < CHUNK ? numel - start : CHUNK, used = 0;
        for (Py_ssize_t t = 0; t <= n; t++) {
            Py_ssize_t of_agent = LEVEL(load)(measure, t, start, size);
            if (t < n && of_agent > used) used = of_agent;
        }
        for (Py_ssize_t t = 0; used == 0 && t < n; t++) memset(measure->chunks[t].unique, 0, CHUNK);
        for (uint8_t threshold = 0; threshold < used; threshold++) LEVEL(count_beyond)(measure, threshold);
        LEVEL(measure_pairs)(measure);
        for (Py_ssize_t t = 0; t < n; t++) {
            const Measured *chunk = &measure->chunks[t];
            double *largest = measure->largest + t;
            for (Py_ssize_t i = 0; i < CHUNK; i++) shared[i] = chunk->active[i] & !chunk->unique[i];
            measure->moved[t] += LEVEL(ones)(chunk->moved);
            largest[0] = LEVEL(largest)(chunk->bits, chunk->moved, largest[0]);
            largest[n] = LEVEL(largest)(chunk->bits, chunk->unique, largest[n]);
            largest[2 * n] = LEVEL(largest)(chunk->bits, shared, largest[2 * n]);
            LEVEL(add_bins)(chunk->row, chunk->beyond, chunk->unique, measure, t);
        }
    }
}
