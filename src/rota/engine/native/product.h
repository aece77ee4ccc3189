/* Matrix products with small sides, for any strides of A and B, on one core. */

#if defined(__AVX__)
#include <immintrin.h>
#endif
#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#else
#define VECTOR_BYTES 32
#endif
#define LANES ((int64_t)(VECTOR_BYTES / sizeof(R)))
#define LANES_AT_MOST (VECTOR_BYTES / 4)
typedef R V __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(R)), may_alias));
typedef __typeof__((V){0} < (V){0}) Mask; /* integers as wide as R, all bits 1 where true */

static inline V load(const R *p) { return *(const V *)p; }
static inline void store(R *p, V v) { *(V *)p = v; }

/* The first n numbers, and 0 in the other lanes; and to write the first n lanes. Lane by lane this
   would take longer than the arithmetic. */
#if defined(__AVX512F__) && !defined(__SANITIZE_ADDRESS__)
static inline V load_masked(const R *p, int64_t n) {
  if (n >= LANES) return load(p);
  if (sizeof(R) == 4) return (V)_mm512_maskz_loadu_ps((__mmask16)((1 << n) - 1), p);
  return (V)_mm512_maskz_loadu_pd((__mmask8)((1 << n) - 1), p);
}

static inline void store_masked(R *p, V v, int64_t n) {
  if (n >= LANES) store(p, v);
  else if (sizeof(R) == 4) _mm512_mask_storeu_ps(p, (__mmask16)((1 << n) - 1), (__m512)v);
  else _mm512_mask_storeu_pd(p, (__mmask8)((1 << n) - 1), (__m512d)v);
}
#elif defined(__AVX__) && !defined(__SANITIZE_ADDRESS__)
static inline __m256i first_lanes(int64_t n) {
  static const int32_t bits[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
  return _mm256_loadu_si256((const __m256i *)(bits + 8 - n * (int64_t)sizeof(R) / 4));
}

static inline V load_masked(const R *p, int64_t n) {
  if (n >= LANES) return load(p);
  if (sizeof(R) == 4) return (V)_mm256_maskload_ps((const float *)p, first_lanes(n));
  return (V)_mm256_maskload_pd((const double *)p, first_lanes(n));
}

static inline void store_masked(R *p, V v, int64_t n) {
  if (n >= LANES) store(p, v);
  else if (sizeof(R) == 4) _mm256_maskstore_ps((float *)p, first_lanes(n), (__m256)v);
  else _mm256_maskstore_pd((double *)p, first_lanes(n), (__m256d)v);
}
#else
static inline V load_masked(const R *p, int64_t n) {
  if (n >= LANES) return load(p);
  V v = {0};
  for (int64_t i = 0; i < n; i++) v[i] = p[i];
  return v;
}

static inline void store_masked(R *p, V v, int64_t n) {
  if (n >= LANES) {
    store(p, v);
    return;
  }
  for (int64_t i = 0; i < n; i++) p[i] = v[i];
}
#endif

/* a where m is true, else b. */
static inline V choose(Mask m, V a, V b) { return (V)((m & (Mask)a) | (~m & (Mask)b)); }

/* The larger numbers; NaN where one is. */
static inline V larger(V a, V b) { return choose((a > b) | (a != a), a, b); }

/* Keep a vector in its register: a compiler may think that loading it again costs nothing. */
#if defined(__AVX512F__)
#define HELD(v) __asm__("" : "+v"(v))
#elif defined(__AVX__)
#define HELD(v) __asm__("" : "+x"(v))
#else
#define HELD(v) (void)0
#endif

/* a0 b0 a1 b1 ... of the first or the last halves of a and b. */
#ifdef __has_builtin
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLES
#endif
#endif
#ifdef SHUFFLES
typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
typedef double Doubles __attribute__((vector_size(VECTOR_BYTES)));
#if VECTOR_BYTES == 64
#define LOW_4 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH_4 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#define LOW_8 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH_8 4, 12, 5, 13, 6, 14, 7, 15
#else
#define LOW_4 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH_4 4, 12, 5, 13, 6, 14, 7, 15
#define LOW_8 0, 4, 1, 5
#define HIGH_8 2, 6, 3, 7
#endif
#define ZIP(half, a, b) \
  (sizeof(R) == 4 ? (V)__builtin_shufflevector((Floats)(a), (Floats)(b), half##_4) \
                  : (V)__builtin_shufflevector((Doubles)(a), (Doubles)(b), half##_8))
static inline V zip_low(V a, V b) { return ZIP(LOW, a, b); }
static inline V zip_high(V a, V b) { return ZIP(HIGH, a, b); }
#else
static inline V zip(V a, V b, int64_t from) {
  V v;
  for (int64_t i = 0; i < LANES / 2; i++) {
    v[2 * i] = a[from + i];
    v[2 * i + 1] = b[from + i];
  }
  return v;
}

static inline V zip_low(V a, V b) { return zip(a, b, 0); }
static inline V zip_high(V a, V b) { return zip(a, b, LANES / 2); }
#endif

#define INLINE static inline __attribute__((always_inline)) void
#define UNROLL _Pragma("GCC unroll 16")

INLINE add_halves(int half, V *v) {
  UNROLL for (int i = 0; i < half; i++)
    v[i] = zip_low(v[i], v[i + half]) + zip_high(v[i], v[i + half]);
}

/* The sum of each of LANES vectors, which are overwritten. */
static inline __attribute__((always_inline)) V sums_of(V *v) {
  if (LANES >= 16) add_halves(8, v);
  if (LANES >= 8) add_halves(4, v);
  add_halves(2, v);
  add_halves(1, v);
  return v[0];
}

INLINE zip_halves(V *v) {
  V w[LANES_AT_MOST];
  UNROLL for (int i = 0; i < LANES / 2; i++) {
    w[2 * i] = zip_low(v[i], v[i + LANES / 2]);
    w[2 * i + 1] = zip_high(v[i], v[i + LANES / 2]);
  }
  UNROLL for (int i = 0; i < LANES; i++) v[i] = w[i];
}

/* LANES rows of LANES numbers, as columns. */
INLINE transpose(const R *a, int64_t a_m, R *out, int64_t of_row) {
  V v[LANES_AT_MOST];
  UNROLL for (int i = 0; i < LANES; i++) v[i] = load(a + i * a_m);
  if (LANES >= 16) zip_halves(v);
  if (LANES >= 8) zip_halves(v);
  zip_halves(v);
  zip_halves(v);
  UNROLL for (int i = 0; i < LANES; i++) store(out + i * of_row, v[i]);
}

static inline R sum_lanes(V v) {
  for (int64_t half = LANES / 2; half; half /= 2)
    for (int64_t i = 0; i < half; i++) v[i] += v[i + half];
  return v[0];
}

/* Rows of a tile of C. With two vectors of columns it fills the registers. */
#define ROWS 6
/* Depth of a block of A and B. Two vectors of columns of B then fit into the first cache. */
#define DEPTH 256
/* Rows of a block of A, which then fits into the second cache. */
#define HEIGHT 96
/* If A and B are less deep than this, most of the memory is C's, so C is computed row by row. */
#define SHALLOW 32
/* Rows of A and of B whose dot products are computed together. They fill the registers, and their
   number is a multiple of LANES. */
#define BAND 4
#define COLUMNS (VECTOR_BYTES / 16)
typedef R Few
    __attribute__((vector_size(COLUMNS * sizeof(R)), aligned(sizeof(R)), may_alias));
/* Numbers of each row that a product of rows takes at a time. A few rows of A then fit into the
   first cache. */
#define LONG 1024
/* Whether rows this far apart share a few places of the first cache, so that they drive each other
   out. */
#define FEW_PLACES(apart) ((apart) * (int64_t)sizeof(R) % 512 == 0)
/* How many rows of B are fetched in advance. Each row of a large B is on a page of its own. */
#define AHEAD 16

/* left, right += A times one or two vectors of B's columns. The last vector has `some` numbers; if
   `full`, these are all LANES. */
INLINE add_products(int m, int two, int full, int64_t some, int64_t k, const R *a, int64_t a_m,
                    int64_t a_k, const R *b, int64_t b_k, V *left, V *right) {
  for (int64_t j = 0; j < k; j++) {
    const R *row = b + j * b_k;
    V p = two || full ? load(row) : load_masked(row, some), q = p;
    if (two) q = full ? load(row + LANES) : load_masked(row + LANES, some);
    __builtin_prefetch(row + AHEAD * b_k);
#pragma GCC unroll 6
    for (int i = 0; i < m; i++) {
      R x = a[i * a_m + j * a_k];
      left[i] += x * p;
      if (two) right[i] += x * q;
    }
  }
}

/* C = keep * C + sign * A B for m rows and one or two vectors of columns of C. A's columns lie in
   `lines` pieces of k, `a_line` apart, and so do B's rows, `b_line` apart. */
INLINE tile(int m, int two, int64_t some, int64_t lines, int64_t a_line, int64_t b_line, int64_t k,
            const R *a, int64_t a_m, int64_t a_k, const R *b, int64_t b_k, R *c, int64_t c_m,
            int keep, R sign) {
  V left[ROWS], right[ROWS];
#pragma GCC unroll 6
  for (int i = 0; i < m; i++) left[i] = right[i] = (V){0};
  if (some >= LANES)
    for (int64_t l = 0; l < lines; l++)
      add_products(m, two, 1, some, k, a + l * a_line, a_m, a_k, b + l * b_line, b_k, left, right);
  else
    for (int64_t l = 0; l < lines; l++)
      add_products(m, two, 0, some, k, a + l * a_line, a_m, a_k, b + l * b_line, b_k, left, right);
#pragma GCC unroll 6
  for (int i = 0; i < m; i++) {
    R *out = c + i * c_m;
    int64_t first = two ? LANES : some;
    V v = sign * left[i];
    if (keep) v += load_masked(out, first);
    store_masked(out, v, first);
    if (two) {
      v = sign * right[i];
      if (keep) v += load_masked(out + LANES, some);
      store_masked(out + LANES, v, some);
    }
  }
}

/* The same for any number of rows. */
static void strip(int64_t end, int64_t columns, int64_t lines, int64_t a_line, int64_t b_line,
                  int64_t k, const R *a, int64_t a_m, int64_t a_k, const R *b, int64_t b_k, R *c,
                  int64_t c_m, int keep, R sign) {
  int64_t m = 0, some = columns > LANES ? columns - LANES : columns;
#define CALL(n, two) \
  tile(n, two, some, lines, a_line, b_line, k, a + m * a_m, a_m, a_k, b, b_k, c + m * c_m, c_m, \
       keep, sign)
#define REST(two) \
  for (; m + ROWS <= end; m += ROWS) CALL(ROWS, two); \
  switch (end - m) { \
  case 5: CALL(5, two); break; \
  case 4: CALL(4, two); break; \
  case 3: CALL(3, two); break; \
  case 2: CALL(2, two); break; \
  case 1: CALL(1, two); break; \
  }
  if (columns > LANES) {
    REST(1)
  } else {
    REST(0)
  }
#undef CALL
#undef REST
}

/* The same for ROWS rows and all whole pairs of column vectors, which are `b_pair` apart in B.
   Returns how many columns these have. */
static int64_t band(int64_t n, int64_t k, const R *a, int64_t a_m, int64_t a_k, const R *b,
                    int64_t b_k, int64_t b_pair, R *c, int64_t c_m, int keep, R sign) {
  int64_t j = 0;
  for (; j + 2 * LANES <= n; j += 2 * LANES, b += b_pair)
    tile(ROWS, 1, LANES, 1, 0, 0, k, a, a_m, a_k, b, b_k, c + j, c_m, keep, sign);
  return j;
}

/* C = keep * C + sign * A B^T by dot products, for some rows of A and B, which are contiguous. Of B
   there are COLUMNS rows, or the last `columns` of C, whose row is then read again. */
INLINE dots(int m, int64_t columns, int64_t k, const R *a, int64_t a_m, const R *b, int64_t b_n,
            R *c, int64_t c_m, int ahead, int keep, R sign) {
  V sums[BAND * COLUMNS];
  const R *row[COLUMNS];
  UNROLL for (int i = 0; i < BAND * COLUMNS; i++) sums[i] = (V){0};
  UNROLL for (int q = 0; q < COLUMNS; q++) row[q] = b + (q < columns ? q : columns - 1) * b_n;
  int64_t j = 0;
  for (; j + LANES <= k; j += LANES) {
    V y[COLUMNS];
    UNROLL for (int q = 0; q < COLUMNS; q++) y[q] = load(row[q] + j);
    if (ahead)
      UNROLL for (int q = 0; q < COLUMNS; q++) __builtin_prefetch(row[q] + COLUMNS * b_n + j);
    UNROLL for (int i = 0; i < m; i++) {
      V x = load(a + i * a_m + j);
      HELD(x);
      UNROLL for (int q = 0; q < COLUMNS; q++) sums[i * COLUMNS + q] += x * y[q];
    }
  }
  if (j < k)
    UNROLL for (int i = 0; i < m; i++) {
      V x = load_masked(a + i * a_m + j, k - j);
      UNROLL for (int q = 0; q < COLUMNS; q++)
        sums[i * COLUMNS + q] += x * load_masked(row[q] + j, k - j);
    }
  R found[BAND * COLUMNS];
  UNROLL for (int i = 0; i < m * COLUMNS; i += (int)LANES) store(found + i, sums_of(sums + i));
  UNROLL for (int i = 0; i < m; i++) {
    R *out = c + i * c_m;
    if (columns == COLUMNS) {
      Few v = sign * *(Few *)(found + i * COLUMNS);
      if (keep) v += *(Few *)out;
      *(Few *)out = v;
    } else
      for (int64_t q = 0; q < columns; q++)
        out[q] = (keep ? out[q] : 0) + sign * found[i * COLUMNS + q];
  }
}

/* The same for any number of rows and columns; A should have few rows. */
static void product_of_rows(int64_t m, int64_t n, int64_t k, const R *a, int64_t a_m, const R *b,
                            int64_t b_n, R *c, int64_t c_m, int keep, R sign) {
  for (int64_t from = 0; from < k; from += LONG, a += LONG, b += LONG, keep = 1) {
    int64_t some = k - from < LONG ? k - from : LONG;
    for (int64_t j = 0; j < n; j += COLUMNS) {
      int64_t i = 0, columns = n - j < COLUMNS ? n - j : COLUMNS;
#define CALL(rows, columns, ahead) \
  dots(rows, columns, some, a + i * a_m, a_m, b + j * b_n, b_n, c + i * c_m + j, c_m, ahead, keep, \
       sign)
      if (columns == COLUMNS)
        for (; i + BAND <= m; i += BAND)
          if (i) CALL(BAND, COLUMNS, 0);
          else CALL(BAND, COLUMNS, 1);
      else
        for (; i + BAND <= m; i += BAND) CALL(BAND, columns, 0);
      switch (m - i) {
      case 3: CALL(3, columns, 0); break;
      case 2: CALL(2, columns, 0); break;
      case 1: CALL(1, columns, 0); break;
      }
#undef CALL
    }
  }
}

/* How many numbers of scratch space a product needs, for panels of B or of A. */
static int64_t product_space(int64_t m, int64_t n) { return DEPTH * ((m > n ? m : n) + 4 * LANES); }

/* Some columns of B as a panel of two vectors of columns, whose rows are contiguous. */
static void pack(int64_t columns, int64_t deep, const R *b, int64_t b_k, int64_t b_n, R *panel) {
  int64_t wide = 2 * LANES, l = 0;
  if (b_n == 1 && columns == wide)
    for (; l < deep; l++) {
      store(panel + l * wide, load(b + l * b_k));
      store(panel + l * wide + LANES, load(b + l * b_k + LANES));
    }
  if (b_k == 1 && columns == wide)
    for (; l + LANES <= deep; l += LANES) {
      transpose(b + l, b_n, panel + l * wide, wide);
      transpose(b + LANES * b_n + l, b_n, panel + l * wide + LANES, wide);
    }
  for (; l < deep; l++)
    for (int64_t i = 0; i < wide; i++)
      panel[l * wide + i] = i < columns ? b[l * b_k + i * b_n] : 0;
}

/* C[m, n] = keep * C + sign * A[m, k] B[k, n]. One of C's strides must be 1. `space` holds
   product_space(m, n) numbers. */
static void product(int64_t m, int64_t n, int64_t k, const R *a, int64_t a_m, int64_t a_k,
                    const R *b, int64_t b_k, int64_t b_n, R *c, int64_t c_m, int64_t c_n, int keep,
                    R sign, R *space) {
  if (c_n != 1 && n != 1) {
    product(n, m, k, b, b_n, b_k, a, a_k, a_m, c, c_n, c_m, keep, sign, space);
    return;
  }
  if (k == 0) {
    if (!keep)
      for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) c[i * c_m + j] = 0;
    return;
  }
  if (m <= 20 && a_k == 1 && b_k == 1 && k >= 2 * LANES) {
    product_of_rows(m, n, k, a, a_m, b, b_n, c, c_m, keep, sign);
    return;
  }
  int64_t wide = 2 * LANES;
  for (int64_t from = 0; from < k; from += DEPTH) {
    int64_t deep = k - from < DEPTH ? k - from : DEPTH;
    const R *right = b + from * b_k;
    int packed = b_n != 1 || (FEW_PLACES(b_k) && m > HEIGHT / 2 && deep >= SHALLOW);
    if (packed) { /* copy B into panels of `wide` columns, whose rows are contiguous */
      for (int64_t j = 0; j < n; j += wide)
        pack(n - j < wide ? n - j : wide, deep, right + j * b_n, b_k, b_n, space + j * deep);
    }
    int64_t step = k < SHALLOW ? ROWS : HEIGHT;
    int64_t of_row = packed ? wide : b_k, of_pair = packed ? wide * deep : wide;
    if (packed) right = space;
    for (int64_t top = 0; top < m; top += step) {
      int64_t high = m - top < step ? m - top : step, j = 0;
      const R *left = a + top * a_m + from * a_k;
      R *out = c + top * c_m;
      if (k < SHALLOW && high == ROWS)
        j = band(n, deep, left, a_m, a_k, right, of_row, of_pair, out, c_m, keep || from, sign);
      for (; j < n; j += wide)
        strip(high, n - j < wide ? n - j : wide, 1, 0, 0, deep, left, a_m, a_k,
              right + j / wide * of_pair, of_row, out + j, c_m, keep || from, sign);
    }
  }
}
