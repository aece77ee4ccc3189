/* Operators that treat every element alike, and sums. */

static inline R exponential(R x) {
  if (sizeof(R) == 8) return (R)exp((double)x);
  float v = (float)x;
  v = v > 88.0f ? 88.0f : v;
  v = v > -87.0f ? v : -87.0f; /* NaN becomes -87 here, because it has no integer part */
  float n = rintf(v * 1.44269504f), r = v - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  union { uint32_t i; float f; } scale = {(uint32_t)((int32_t)n + 127) << 23};
  return x != x ? x : (R)(p * scale.f);
}

static inline R hyperbolic_tangent(R x) {
  if (sizeof(R) == 8) return (R)tanh((double)x);
  float v = (float)x, e = (float)exponential((R)(2 * (v < 0 ? -v : v)));
  float far = 1.0f - 2.0f / (e + 1.0f), s = v * v; /* it loses digits near 0; the series does not */
  float near = s * (-0.33333333f + s * (0.13333333f + s * (-0.053968254f + s * 0.021869488f)));
  float size = (v < 0 ? -v : v), y = size < 0.25f ? size + size * near : far;
  return x != x ? x : (R)(v < 0 ? -y : y);
}

/* In single precision the fractional error of erfc is below 1.2e-7 (Press et al., Numerical
   Recipes, 6.2). */
static inline R error_function(R x) {
  if (sizeof(R) == 8) return (R)erf((double)x);
  float v = (float)x, z = v < 0 ? -v : v, t = 1.0f / (1.0f + 0.5f * z);
  float p = 0.17087277f;
  p = p * t - 0.82215223f;
  p = p * t + 1.48851587f;
  p = p * t - 1.13520398f;
  p = p * t + 0.27886807f;
  p = p * t - 0.18628806f;
  p = p * t + 0.09678418f;
  p = p * t + 0.37409196f;
  p = p * t + 1.00002368f;
  p = p * t - 1.26551223f;
  float far = 1.0f - t * (float)exponential((R)(p - z * z)), s = v * v;
  float near = s * (-0.33333333f + s * (0.1f + s * (-0.023809524f + s * 0.0046296296f)));
  float y = z < 0.25f ? 1.12837917f * (z + z * near) : far;
  return x != x ? x : (R)(v < 0 ? -y : y);
}

/* The chance that a standard normal number is below x. */
static inline R normal(R x) { return (R)0.5 * (1 + error_function(x * (R)0.70710678118654752)); }

/* o[i] = f(a[i], b[i], c[i]) for n elements; sx is the stride of x. */
#define ARGUMENTS \
  int64_t n, R *o, int64_t so, const R *a, int64_t sa, const R *b, int64_t sb, const R *c, \
      int64_t sc
typedef void (*Each)(ARGUMENTS);

#define ELEMENT(x, y, z, result, expression) \
  R p = x, q = y, r = z; \
  (void)p, (void)q, (void)r; \
  result = expression;

#define LOOP(x, y, z, expression) \
  _Pragma("GCC ivdep") for (int64_t i = 0; i < n; i++) { ELEMENT(x, y, z, o[i], expression) }

#define EACH(name, expression) \
  static void name(ARGUMENTS) { \
    if (so == 1 && sa == 1 && sb == 1 && sc == 0) { LOOP(a[i], b[i], c[0], expression) } \
    else if (so == 1 && sa == 1 && sb == 0 && sc == 0) { LOOP(a[i], b[0], c[0], expression) } \
    else if (so == 1 && sa == 0 && sb == 1 && sc == 0) { LOOP(a[0], b[i], c[0], expression) } \
    else \
      for (int64_t i = 0; i < n; i++) { \
        ELEMENT(a[i * sa], b[i * sb], c[i * sc], o[i * so], expression) \
      } \
  }

EACH(each_copy, p)
EACH(each_add, p + q)
EACH(each_sub, p - q)
EACH(each_mul, p * q)
EACH(each_div, p / q)
EACH(each_neg, -p)
EACH(each_relu, p < 0 ? 0 : p)
EACH(each_sigmoid, 1 / (1 + exponential(-p)))
EACH(each_tanh, hyperbolic_tangent(p))
EACH(each_exp, exponential(p))
EACH(each_sqrt, (R)sqrt(p))
EACH(each_rsqrt, 1 / (R)sqrt(p))
EACH(each_square, p * p)
EACH(each_pow, (R)pow(p, q))
EACH(each_threshold_backward, q <= 0 ? 0 : p)
EACH(each_sigmoid_backward, p * q * (1 - q))
EACH(each_tanh_backward, p * (1 - q * q))
EACH(each_ge, p >= q)
EACH(each_gt, p > q)
EACH(each_le, p <= q)
EACH(each_lt, p < q)
EACH(each_eq, p == q)
EACH(each_ne, p != q)
EACH(each_lerp, p + r * (q - p))
EACH(each_clamp, p < q ? q : p > r ? r : p)
EACH(each_where, p != 0 ? q : r)
EACH(each_abs, p < 0 ? -p : p)
EACH(each_log, (R)log((double)p))
EACH(each_maximum, p < q || q != q ? q : p)
EACH(each_minimum, p > q || q != q ? q : p)
EACH(each_erf, error_function(p))
EACH(each_gelu, p * normal(p))
EACH(each_gelu_backward,
     p * (normal(q) + q * exponential((R)-0.5 * q * q) * (R)0.39894228040143268))
EACH(each_silu, p / (1 + exponential(-p)))

/* In the order of structures.py. */
static const Each EVERY[] = {
    each_copy, each_add, each_sub, each_mul, each_div, each_neg, each_relu, each_sigmoid, each_tanh,
    each_exp, each_sqrt, each_rsqrt, each_square, each_pow, each_threshold_backward,
    each_sigmoid_backward, each_tanh_backward, each_ge, each_gt, each_le, each_lt, each_eq, each_ne,
    each_lerp, each_clamp, each_where, each_abs, each_log, each_maximum, each_minimum, each_erf,
    each_gelu, each_gelu_backward, each_silu};

static void each(Each f, const int64_t *shape, int dims, R *o, const int64_t *so, const R *a,
                 const int64_t *sa, const R *b, const int64_t *sb, const R *c, const int64_t *sc) {
  if (dims == 1) {
    f(shape[0], o, so[0], a, sa[0], b, sb[0], c, sc[0]);
    return;
  }
  for (int64_t i = 0; i < shape[0]; i++)
    each(f, shape + 1, dims - 1, o + i * so[0], so + 1, a + i * sa[0], sa + 1, b + i * sb[0],
         sb + 1, c + i * sc[0], sc + 1);
}

/* o += the sum of rows of n numbers, which are at most LANES, in whole vectors: LANES rows are n
   vectors. */
static void add_narrow_rows(int64_t rows, int64_t n, R *o, const R *a) {
  V sums[LANES_AT_MOST] = {{0}};
  int64_t r = 0;
  for (; r + LANES <= rows; r += LANES, a += LANES * n)
    for (int64_t v = 0; v < n; v++) sums[v] += load(a + v * LANES);
  for (int64_t v = 0, at = 0; v < n; v++)
    for (int64_t l = 0; l < LANES; l++, at = at + 1 < n ? at + 1 : 0) o[at] += sums[v][l];
  for (; r < rows; r++, a += n)
    for (int64_t j = 0; j < n; j++) o[j] += a[j];
}

/* o += the sum of a over the axes along which o does not move. */
static void add_up(const int64_t *shape, int dims, R *o, const int64_t *so, const R *a,
                   const int64_t *sa) {
  if (dims == 2 && so[0] == 0 && so[1] == 1 && sa[1] == 1 && sa[0] == shape[1] &&
      shape[1] <= LANES) {
    add_narrow_rows(shape[0], shape[1], o, a);
    return;
  }
  if (dims > 1) {
    for (int64_t i = 0; i < shape[0]; i++)
      add_up(shape + 1, dims - 1, o + i * so[0], so + 1, a + i * sa[0], sa + 1);
    return;
  }
  int64_t n = shape[0], i = 0;
  if (so[0] == 1 && sa[0] == 1) {
    _Pragma("GCC ivdep") for (; i < n; i++) o[i] += a[i];
  } else if (so[0] == 0 && sa[0] == 1) {
    V sum = {0};
    for (; i + LANES <= n; i += LANES) sum += load(a + i);
    R rest = sum_lanes(sum);
    for (; i < n; i++) rest += a[i];
    o[0] += rest;
  } else {
    for (; i < n; i++) o[i * so[0]] += a[i * sa[0]];
  }
}

/* The sum of a[i] - shift for n elements, or of their squares. */
static R sum_apart(const R *a, int64_t n, int64_t stride, R shift, int squared) {
  int64_t i = 0;
  V sum = {0};
  if (stride == 1)
    for (; i + LANES <= n; i += LANES) {
      V apart = load(a + i) - shift;
      if (squared) apart *= apart;
      sum += apart;
    }
  R rest = sum_lanes(sum);
  for (; i < n; i++) {
    R apart = a[i * stride] - shift;
    rest += squared ? apart * apart : apart;
  }
  return rest;
}

/* The sum of a[i] b[i]. */
static R sum_of_products(const R *a, const R *b, int64_t n) {
  int64_t i = 0;
  V sum = {0};
  for (; i + LANES <= n; i += LANES) sum += load(a + i) * load(b + i);
  R rest = sum_lanes(sum);
  for (; i < n; i++) rest += a[i] * b[i];
  return rest;
}

/* The largest of n numbers; NaN if one is. */
static R largest_of(const R *a, int64_t n) {
  int64_t i = 0;
  R most = -INFINITY;
  if (n >= LANES) {
    V best = load(a);
    for (i = LANES; i + LANES <= n; i += LANES) best = larger(load(a + i), best);
    for (int64_t l = 0; l < LANES; l++) most = best[l] <= most ? most : best[l];
  }
  for (; i < n; i++) most = a[i] <= most ? most : a[i];
  return most;
}

/* o = exp(a - most), and 0 where a is -inf; returns their sum. */
static R exponentials(int64_t n, const R *a, R most, R *o) {
  _Pragma("GCC ivdep") for (int64_t i = 0; i < n; i++) {
    R e = exponential(a[i] - most);
    o[i] = a[i] == -INFINITY ? 0 : e;
  }
  return sum_apart(o, n, 1, 0, 0);
}

/* One group of n[2] x n[3] numbers: o = (a - mean) / sqrt(variance + eps). */
static void normalise(const int64_t *n, R *o, const int64_t *so, const R *a, const int64_t *sa,
                      R *stats, R eps) {
  R count = (R)(n[2] * n[3]), mean = 0, variance = 0;
  for (int64_t i = 0; i < n[2]; i++) mean += sum_apart(a + i * sa[2], n[3], sa[3], 0, 0);
  mean /= count;
  for (int64_t i = 0; i < n[2]; i++) variance += sum_apart(a + i * sa[2], n[3], sa[3], mean, 1);
  stats[0] = mean;
  stats[1] = 1 / (R)sqrt((double)(variance / count + eps));
  for (int64_t i = 0; i < n[2]; i++)
    for (int64_t j = 0; j < n[3]; j++)
      o[i * so[2] + j * so[3]] = (a[i * sa[2] + j * sa[3]] - mean) * stats[1];
}

/* One row of n numbers: dx = (g - mean(g) - h mean(g h)) / sd, where h = (x - mean) / sd. */
static void normalise_backward(int64_t n, R *dx, const R *g, const R *x, const R *stats) {
  R mean = stats[0], scale = stats[1], total = sum_apart(g, n, 1, 0, 0), along = 0;
  int64_t j = 0;
  V sum = {0};
  for (; j + LANES <= n; j += LANES) sum += load(g + j) * (load(x + j) - mean);
  along = sum_lanes(sum);
  for (; j < n; j++) along += g[j] * (x[j] - mean);
  along *= scale * scale / (R)n;
  total /= (R)n;
  for (j = 0; j < n; j++) dx[j] = scale * (g[j] - total - (x[j] - mean) * along);
}
