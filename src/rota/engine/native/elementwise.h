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

/* In the order of structures.py. */
static const Each EVERY[] = {
    each_copy, each_add, each_sub, each_mul, each_div, each_neg, each_relu, each_sigmoid, each_tanh,
    each_exp, each_sqrt, each_rsqrt, each_square, each_pow, each_threshold_backward,
    each_sigmoid_backward, each_tanh_backward, each_ge, each_gt, each_le, each_lt, each_eq, each_ne,
    each_lerp, each_clamp, each_where};

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

/* o += the sum of a over the axes along which o does not move. */
static void add_up(const int64_t *shape, int dims, R *o, const int64_t *so, const R *a,
                   const int64_t *sa) {
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
