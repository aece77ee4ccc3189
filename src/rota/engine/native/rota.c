/* Local training of clients, each on one core: a traced step as a list of instructions, and the
   loop over a client's mini-batches.

   R is float or double. translate.py makes the instructions, and program.py gives every result its
   place in the arena. Python checks all numbers that it passes, so they are trusted here. Tokens
   and labels are data: they are checked here, before they are used as indices. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <sys/mman.h>
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

#include "product.h"
#include "convolution.h"
#include "elementwise.h"
#include "groups.h"

/* structures.py has these constants and structures too. */
#define DIMS 5
#define OPERANDS 4

enum { ARENA, PARAMS, BUFFERS, GRADIENT, X, Y, WEIGHT, KEY, NUMBER, LOSS, CONSTANTS, SPACES };

typedef struct {
  int64_t space, offset, stride[DIMS]; /* the offset is in bytes, strides are in elements */
} Operand;

typedef struct {
  int64_t code, dims, shape[DIMS], extra[16];
  Operand at[OPERANDS];
} Instruction;

typedef struct {
  const Instruction *list;
  int64_t count, arena, width, params, buffers, x_bytes, y_bytes, fused;
  const void *constants;
  double momentum, weight_decay, prox, clip; /* clip < 0: no clipping */
  double local_decay;                        /* times the learning rate after each step */
  int64_t nesterov, adam, decoupled;         /* decoupled: the weight decay of AdamW */
  const int64_t *touched; /* see allow() */
} Program;

typedef struct {
  uint64_t key;
  int64_t first, examples, batch, per_epoch, steps;
  double rate, loss;
  const R *start, *start_buffers;
  const R *shift, *anchor; /* NULL: no shift; the anchor is the start */
  R *update, *buffers;
  int64_t status, value, size; /* value and size: an index that is not in 0..size-1 */
} Row;

/* How a row's training ended. A row is UNTRAINED until a thread has finished it. */
enum { TRAINED, UNTRAINED, TOKEN_OUTSIDE, LABEL_OUTSIDE };

/* The finaliser of SplitMix64, as in rng.py. */
static uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}
#define GOLDEN 0x9E3779B97F4A7C15u

/* rng.permutation: the order of random words as signed numbers. They are sorted by their bytes,
   from the lowest to the highest. */
static void permutation(uint64_t key, int64_t n, int64_t *order, uint64_t *words,
                        int64_t *spare_order, uint64_t *spare_words) {
  for (int64_t i = 0; i < n; i++) {
    words[i] = mix(key + (uint64_t)(i + 1) * GOLDEN) ^ (1ull << 63);
    order[i] = i;
  }
  for (int shift = 0; shift < 64; shift += 8) {
    int64_t count[257] = {0};
    for (int64_t i = 0; i < n; i++) count[((words[i] >> shift) & 255) + 1]++;
    for (int d = 0; d < 256; d++) count[d + 1] += count[d];
    for (int64_t i = 0; i < n; i++) {
      int64_t to = count[(words[i] >> shift) & 255]++;
      spare_words[to] = words[i];
      spare_order[to] = order[i];
    }
    uint64_t *w = words;
    words = spare_words;
    spare_words = w;
    int64_t *o = order;
    order = spare_order;
    spare_order = o;
  }
}

/* The codes of instructions. Those of elementwise operators are below 100. */
enum {
  CODE_PRODUCT = 100, CODE_SUM, CODE_LOG_SOFTMAX, CODE_LOG_SOFTMAX_BACKWARD, CODE_NLL,
  CODE_NLL_BACKWARD, CODE_CONVOLUTION, CODE_WEIGHT_GRADIENT, CODE_INPUT_GRADIENT, CODE_POOL,
  CODE_POOL_BACKWARD, CODE_EMBEDDING, CODE_EMBEDDING_BACKWARD, CODE_UNIFORM, CODE_REAL, CODE_FILL,
  CODE_INT_ADD, CODE_INT_MUL, CODE_INT_XOR, CODE_INT_SHIFT, CODE_INT_AND, CODE_LAYER_BACKWARD,
  CODE_SOFTMAX, CODE_SOFTMAX_BACKWARD, CODE_NORM, CODE_NORM_BACKWARD, CODE_GROUP_STATS,
  CODE_GROUP_SCALED, CODE_GROUP_SUMS, CODE_GROUP_FACTORS, CODE_GROUP_BACKWARD
};

#define AT(i) ((R *)(base[in->at[i].space] + in->at[i].offset))
#define INTS(i) ((int64_t *)(base[in->at[i].space] + in->at[i].offset))

typedef struct {
  int64_t batch, channels, high, wide, out_high, out_wide, size[2], stride[2], pad[2];
} Pool;

/* Which taps of a window that begins at `from` are inside an image of this length. */
static void inside(int64_t from, int64_t length, int64_t size, int64_t *first, int64_t *end) {
  *first = from < 0 ? -from : 0;
  *end = length - from < size ? length - from : size;
}

/* The largest number in one window, and which tap it is, for each channel. */
INLINE largest(int64_t high, int64_t wide, const R *x, int64_t line, int64_t channels,
               int64_t first, int64_t first_of_line, R *y, R *tap) {
  for (int64_t c = 0; c < channels; c += LANES) {
    V best = (V){0} - INFINITY, at = {0};
    for (int64_t u = 0; u < high; u++)
      for (int64_t v = 0; v < wide; v++) {
        V from = load_masked(x + u * line + v * channels + c, channels - c);
        Mask more = (from > best) | (from != from); /* a NaN stays: nothing is larger */
        best = choose(more, from, best);
        at = choose(more, (V){0} + (R)(first + u * first_of_line + v), at);
      }
    store_masked(y + c, best, channels - c);
    store_masked(tap + c, at, channels - c);
  }
}

static void pool(const Pool *p, const R *x, R *y, R *tap) {
  int64_t top, bottom, left, right, line = p->wide * p->channels;
  for (int64_t b = 0; b < p->batch; b++, x += p->high * line)
    for (int64_t i = 0; i < p->out_high; i++)
      for (int64_t j = 0; j < p->out_wide; j++, y += p->channels, tap += p->channels) {
        int64_t h = i * p->stride[0] - p->pad[0], w = j * p->stride[1] - p->pad[1];
        inside(h, p->high, p->size[0], &top, &bottom);
        inside(w, p->wide, p->size[1], &left, &right);
        const R *from = x + (h + top) * line + (w + left) * p->channels;
        int64_t high = bottom - top, wide = right - left, first = top * p->size[1] + left;
        int64_t across = p->size[1];
        if (high == 2 && wide == 2) largest(2, 2, from, line, p->channels, first, across, y, tap);
        else largest(high, wide, from, line, p->channels, first, across, y, tap);
      }
}

static void pool_backward(const Pool *p, const R *dy, const R *tap, R *dx) {
  int64_t top, bottom, left, right;
  int apart = p->stride[0] >= p->size[0] && p->stride[1] >= p->size[1]; /* no pixel is in two */
  memset(dx, 0, (size_t)(p->batch * p->channels * p->high * p->wide) * sizeof(R));
  for (int64_t b = 0; b < p->batch; b++, dx += p->high * p->wide * p->channels)
    for (int64_t i = 0; i < p->out_high; i++)
      for (int64_t j = 0; j < p->out_wide; j++, dy += p->channels, tap += p->channels) {
        int64_t h = i * p->stride[0] - p->pad[0], w = j * p->stride[1] - p->pad[1];
        inside(h, p->high, p->size[0], &top, &bottom);
        inside(w, p->wide, p->size[1], &left, &right);
        for (int64_t c = 0; c < p->channels; c += LANES) {
          V g = load_masked(dy + c, p->channels - c), at = load_masked(tap + c, p->channels - c);
          for (int64_t u = top; u < bottom; u++)
            for (int64_t v = left; v < right; v++) {
              R *to = dx + ((h + u) * p->wide + w + v) * p->channels + c;
              V t = (V){0} + (R)(u * p->size[1] + v), mine = choose(at == t, g, (V){0});
              if (!apart) mine += load_masked(to, p->channels - c);
              store_masked(to, mine, p->channels - c);
            }
        }
      }
}

/* dx = dy W and W -= dy^T x, for one piece of W after the other, which stays in the cache; where dy
   has many rows, most of the memory is not W's, and W is one piece. `n` is
   what CODE_PRODUCT has for dy and W, but with x's stride in place of `keep`. */
static void layer_backward(const int64_t *n, R *dx, const R *dy, R *w, const R *x, R *space) {
  int64_t many = n[0] >= 2 * HEIGHT, high = many ? n[2] : 96, wide = many ? n[1] : 256;
  for (int64_t k = 0; k < n[1]; k += wide)
    for (int64_t j = 0; j < n[2]; j += high) {
      int64_t columns = n[1] - k < wide ? n[1] - k : wide, rows = n[2] - j < high ? n[2] - j : high;
      R *piece = w + j * n[5] + k;
      product(n[0], columns, rows, dy + j * n[4], n[3], n[4], piece, n[5], 1, dx + k, n[7], 1,
              j > 0, 1, space);
      product(rows, columns, n[0], dy + j * n[4], n[4], n[3], x + k, n[9], 1, piece, n[5], 1, 1, -1,
              space);
    }
}

/* Note that an index of the data is not in 0..size-1. */
static int64_t outside(Row *row, int64_t status, int64_t value, int64_t size) {
  row->value = value;
  row->size = size;
  return status;
}

/* Run one instruction. Returns TRAINED if training can continue, or why the row failed. */
static int64_t execute(const Instruction *in, char *const *base, Row *row) {
  const int64_t *e = in->extra, *n = in->shape;
  if (in->code < 100) {
    each(EVERY[in->code], n, (int)in->dims, AT(0), in->at[0].stride, AT(1), in->at[1].stride, AT(2),
         in->at[2].stride, AT(3), in->at[3].stride);
    return TRAINED;
  }
  switch (in->code) {
  case CODE_PRODUCT: /* c a b space; n[0] products, or one without axes;
                        extra: m n k, strides of a, b and c, keep, sign */
    for (int64_t i = 0, many = in->dims ? n[0] : 1; i < many; i++)
      product(e[0], e[1], e[2], AT(1) + i * in->at[1].stride[0], e[3], e[4],
              AT(2) + i * in->at[2].stride[0], e[5], e[6], AT(0) + i * in->at[0].stride[0], e[7],
              e[8], (int)e[9], (R)e[10], AT(3));
    break;
  case CODE_LAYER_BACKWARD: /* dx dy w x; extra: as above, and at 13 the scratch space */
    layer_backward(e, AT(0), AT(1), AT(2), AT(3), (R *)(base[ARENA] + e[13]));
    break;
  case CODE_SUM: add_up(n, (int)in->dims, AT(0), in->at[0].stride, AT(1), in->at[1].stride); break;
  case CODE_LOG_SOFTMAX: /* o a; n[0] rows of n[1] numbers */
    for (int64_t i = 0; i < n[0]; i++) {
      R *o = AT(0) + i * n[1];
      const R *a = AT(1) + i * n[1];
      R most = largest_of(a, n[1]);
      R shift = most + (R)log((double)exponentials(n[1], a, most, o));
      for (int64_t j = 0; j < n[1]; j++) o[j] = a[j] - shift;
    }
    break;
  case CODE_LOG_SOFTMAX_BACKWARD: /* o g out: o = g - exp(out) sum g */
    for (int64_t i = 0; i < n[0]; i++) {
      R *o = AT(0) + i * n[1];
      const R *g = AT(1) + i * n[1], *out = AT(2) + i * n[1];
      R total = sum_apart(g, n[1], 1, 0, 0);
      for (int64_t j = 0; j < n[1]; j++) o[j] = g[j] - exponential(out[j]) * total;
    }
    break;
  case CODE_SOFTMAX: /* o a; n[0] rows of n[1] numbers; extra: whether rows of -inf give 0 */
    for (int64_t i = 0; i < n[0]; i++) {
      R *o = AT(0) + i * n[1];
      const R *a = AT(1) + i * n[1];
      R most = largest_of(a, n[1]);
      if (e[0] && most == -INFINITY) {
        memset(o, 0, (size_t)n[1] * sizeof(R));
        continue;
      }
      R scale = 1 / exponentials(n[1], a, most, o);
      for (int64_t j = 0; j < n[1]; j++) o[j] *= scale;
    }
    break;
  case CODE_SOFTMAX_BACKWARD: /* o g out: o = out (g - sum g out) */
    for (int64_t i = 0; i < n[0]; i++) {
      R *o = AT(0) + i * n[1];
      const R *g = AT(1) + i * n[1], *out = AT(2) + i * n[1];
      R total = sum_of_products(g, out, n[1]);
      for (int64_t j = 0; j < n[1]; j++) o[j] = out[j] * (g[j] - total);
    }
    break;
  case CODE_NORM: { /* o a stats; n[0] x n[1] groups of n[2] x n[3] numbers; extra: eps as bits */
    const int64_t *so = in->at[0].stride, *sa = in->at[1].stride;
    double eps;
    memcpy(&eps, e, sizeof eps);
    for (int64_t i = 0; i < n[0]; i++)
      for (int64_t j = 0; j < n[1]; j++)
        normalise(n, AT(0) + i * so[0] + j * so[1], so, AT(1) + i * sa[0] + j * sa[1], sa,
                  AT(2) + 2 * (i * n[1] + j), (R)eps);
    break;
  }
  case CODE_NORM_BACKWARD: /* dx g x stats; n[0] rows of n[1] numbers */
    for (int64_t i = 0; i < n[0]; i++)
      normalise_backward(n[1], AT(0) + i * n[1], AT(1) + i * n[1], AT(2) + i * n[1],
                         AT(3) + 2 * i);
    break;
  case CODE_GROUP_STATS: { /* stats x space; n: images, pixels, channels, groups; extra: eps */
    double eps;
    memcpy(&eps, e, sizeof eps);
    group_stats(n, AT(1), (R)eps, AT(0), AT(2));
    break;
  }
  case CODE_GROUP_SCALED: group_scaled(n, AT(1), AT(2), AT(3), AT(0)); break; /* y x scale shift */
  case CODE_GROUP_SUMS: group_sums(n, AT(1), AT(2), AT(3), AT(0)); break;     /* sums g x stats */
  case CODE_GROUP_FACTORS: /* factors sums stats weight; extra: whether there is a weight */
    group_factors(n, AT(1), AT(2), e[0] ? AT(3) : NULL, AT(0));
    break;
  case CODE_GROUP_BACKWARD: /* dx g x factors */
    group_backward(n, AT(1), AT(2), AT(3), AT(0));
    break;
  case CODE_NLL: /* loss log_p labels; extra: the label that has no loss */
    for (int64_t i = 0; i < n[0]; i++) {
      int64_t label = INTS(2)[i * in->at[2].stride[0]];
      AT(0)[i] = 0;
      if (label == e[0]) continue;
      if (label < 0 || label >= n[1]) return outside(row, LABEL_OUTSIDE, label, n[1]);
      AT(0)[i] = -AT(1)[i * n[1] + label];
    }
    break;
  case CODE_NLL_BACKWARD: /* d_log_p d_loss labels; extra: the same */
    memset(AT(0), 0, (size_t)(n[0] * n[1]) * sizeof(R));
    for (int64_t i = 0; i < n[0]; i++) {
      int64_t label = INTS(2)[i * in->at[2].stride[0]];
      if (label == e[0]) continue;
      if (label < 0 || label >= n[1]) return outside(row, LABEL_OUTSIDE, label, n[1]);
      AT(0)[i * n[1] + label] = -AT(1)[i * in->at[1].stride[0]];
    }
    break;
  case CODE_CONVOLUTION: /* y x w bias; extra: shape, scratch space, whether there is a bias */
    convolution((const Shape *)e, AT(1), AT(2), e[14] ? AT(3) : NULL, AT(0),
                (R *)(base[ARENA] + e[13]));
    break;
  case CODE_WEIGHT_GRADIENT: /* dw x dy space */
    weight_gradient((const Shape *)e, AT(1), AT(2), AT(0), AT(3));
    break;
  case CODE_INPUT_GRADIENT: /* dx dy w space */
    input_gradient((const Shape *)e, AT(1), AT(2), AT(0), AT(3));
    break;
  case CODE_POOL: pool((const Pool *)e, AT(1), AT(0), AT(2)); break;
  case CODE_POOL_BACKWARD: pool_backward((const Pool *)e, AT(1), AT(2), AT(0)); break;
  case CODE_EMBEDDING: /* o table tokens; n[0] tokens, n[1] numbers each; extra: tokens known */
    for (int64_t i = 0; i < n[0]; i++) {
      int64_t token = INTS(2)[i];
      if (token < 0 || token >= e[0]) return outside(row, TOKEN_OUTSIDE, token, e[0]);
      memcpy(AT(0) + i * n[1], AT(1) + token * n[1], (size_t)n[1] * sizeof(R));
    }
    break;
  case CODE_EMBEDDING_BACKWARD: /* o g tokens; extra: tokens known, the one without gradient */
    memset(AT(0), 0, (size_t)(e[0] * n[1]) * sizeof(R));
    for (int64_t i = 0; i < n[0]; i++) {
      int64_t token = INTS(2)[i];
      if (token == e[1]) continue;
      if (token < 0 || token >= e[0]) return outside(row, TOKEN_OUTSIDE, token, e[0]);
      R *o = AT(0) + token * n[1];
      for (int64_t j = 0; j < n[1]; j++) o[j] += AT(1)[i * n[1] + j];
    }
    break;
  case CODE_UNIFORM: {
    uint64_t key = (uint64_t)INTS(1)[0];
    for (int64_t i = 0; i < n[0]; i++)
      AT(0)[i] = (R)(mix(key + (uint64_t)(i + 1) * GOLDEN) >> 40) * (R)5.9604644775390625e-08;
    break;
  }
  case CODE_REAL:
    for (int64_t i = 0; i < n[0]; i++) AT(0)[i] = (R)INTS(1)[i];
    break;
  case CODE_FILL:
    for (int64_t i = 0; i < n[0]; i++) AT(0)[i] = AT(1)[0];
    break;
  case CODE_INT_ADD: INTS(0)[0] = (int64_t)((uint64_t)INTS(1)[0] + (uint64_t)INTS(2)[0]); break;
  case CODE_INT_MUL: INTS(0)[0] = (int64_t)((uint64_t)INTS(1)[0] * (uint64_t)INTS(2)[0]); break;
  case CODE_INT_XOR: INTS(0)[0] = INTS(1)[0] ^ INTS(2)[0]; break;
  case CODE_INT_SHIFT: INTS(0)[0] = INTS(1)[0] >> INTS(2)[0]; break;
  case CODE_INT_AND: INTS(0)[0] = INTS(1)[0] & INTS(2)[0]; break;
  }
  return TRAINED;
}

/* The local optimisers, as torch.optim does them. */
static void optimise(const Program *p, const Row *row, R *theta, R *g, R *first, R *second,
                     int64_t t) {
  int64_t n = p->params;
  R prox = (R)p->prox, decay = (R)p->weight_decay, momentum = (R)p->momentum, rate = (R)row->rate;
  const R *anchor = row->anchor ? row->anchor : row->start;
  if (p->local_decay != 1) rate *= (R)pow(p->local_decay, (double)t);
  if (prox)
    for (int64_t i = 0; i < n; i++) g[i] += prox * (theta[i] - anchor[i]);
  if (p->clip >= 0) {
    double total = 0;
    for (int64_t i = 0; i < n; i++) total += (double)g[i] * (double)g[i];
    R scale = (R)(p->clip / (sqrt(total) + 1e-6));
    if (scale < 1)
      for (int64_t i = 0; i < n; i++) g[i] *= scale;
    else if (scale != scale)
      for (int64_t i = 0; i < n; i++) g[i] = scale;
  }
  if (row->shift)
    for (int64_t i = 0; i < n; i++) g[i] += row->shift[i];
  if (decay && p->decoupled)
    for (int64_t i = 0; i < n; i++) theta[i] -= rate * decay * theta[i];
  else if (decay)
    for (int64_t i = 0; i < n; i++) g[i] += decay * theta[i];
  if (p->adam) {
    R one = (R)(1 - pow(0.9, (double)(t + 1))), two = (R)(1 - pow(0.999, (double)(t + 1)));
    for (int64_t i = 0; i < n; i++) {
      first[i] += (R)0.1 * (g[i] - first[i]);
      second[i] = (R)0.999 * second[i] + (R)0.001 * g[i] * g[i];
      theta[i] -= rate * (first[i] / one) / ((R)sqrt((double)(second[i] / two)) + (R)1e-8);
    }
  } else if (momentum) {
    for (int64_t i = 0; i < n; i++) {
      first[i] = momentum * first[i] + g[i];
      theta[i] -= rate * (p->nesterov ? g[i] + momentum * first[i] : first[i]);
    }
  } else {
    for (int64_t i = 0; i < n; i++) theta[i] -= rate * g[i];
  }
}

/* Where everything lies in a thread's memory, in bytes from its beginning. */
typedef struct {
  int64_t base[SPACES], order, spare_order, words, spare_words, first, second, end;
} Layout;

static int64_t take(int64_t *end, int64_t bytes) {
  int64_t here = *end;
  *end += (bytes + 63) / 64 * 64;
  return here;
}

/* Divide memory for rows of up to `most` examples. No sum overflows: program.py bounds the arena,
   and the other sizes are at most a few times those of arrays that exist. */
static Layout divide(const Program *p, int64_t most) {
  Layout l = {0};
  int64_t size = p->params * (int64_t)sizeof(R);
  l.base[ARENA] = take(&l.end, p->arena);
  l.base[X] = take(&l.end, p->width * p->x_bytes);
  l.base[Y] = take(&l.end, p->width * p->y_bytes);
  l.base[WEIGHT] = take(&l.end, p->width * (int64_t)sizeof(R));
  l.order = take(&l.end, most * 8);
  l.spare_order = take(&l.end, most * 8);
  l.words = take(&l.end, most * 8);
  l.spare_words = take(&l.end, most * 8);
  l.base[PARAMS] = take(&l.end, size);
  l.base[GRADIENT] = take(&l.end, size);
  l.first = take(&l.end, size);
  l.second = take(&l.end, size);
  l.base[BUFFERS] = take(&l.end, p->buffers * (int64_t)sizeof(R));
  return l;
}

/* memcpy that allows NULL where there is nothing to copy. */
static void copy(void *to, const void *from, int64_t bytes) {
  if (bytes) memcpy(to, from, (size_t)bytes);
}

#ifdef __SANITIZE_ADDRESS__
#define SLOTS (OPERANDS + 1)
/* Before a row: fill the memory with NaN, so that numbers used before they are written show. */
static void spoil(char *memory, int64_t bytes) {
  __asan_unpoison_memory_region(memory, (size_t)bytes);
  memset(memory, 255, (size_t)bytes);
}

/* Before an instruction: let it touch nothing of the thread's memory but its own operands.
   `touched` has three numbers per operand: its space, and the bytes where it begins and ends. */
static void allow(const Program *p, int64_t i, char *const *base, char *memory, int64_t bytes) {
  __asan_poison_memory_region(memory, (size_t)bytes);
  for (const int64_t *t = p->touched + i * SLOTS * 3, *end = t + SLOTS * 3; t < end; t += 3)
    if (t[0] >= 0) __asan_unpoison_memory_region(base[t[0]] + t[1], (size_t)(t[2] - t[1]));
}

static void allow_all(char *memory, int64_t bytes) {
  __asan_unpoison_memory_region(memory, (size_t)bytes);
}
#else
#define spoil(memory, bytes) ((void)0)
#define allow(p, i, base, memory, bytes) ((void)0)
#define allow_all(memory, bytes) ((void)0)
#endif

/* End a row that failed, without an update. */
static void fail(const Program *p, Row *row, int64_t status) {
  row->status = status;
  row->loss = NAN;
  for (int64_t i = 0; i < p->params; i++) row->update[i] = 0;
  copy(row->buffers, row->start_buffers, p->buffers * (int64_t)sizeof(R));
}

/* Train one row. */
static void train(const Program *p, Row *row, char *memory, const Layout *l, const char *x,
                  const char *y) {
  int64_t n = row->examples, width = p->width, number = 0;
  int64_t size = p->params * (int64_t)sizeof(R), buffers = p->buffers * (int64_t)sizeof(R);
  char *base[SPACES];
  for (int i = 0; i < SPACES; i++) base[i] = memory + l->base[i];
  R *theta = (R *)base[PARAMS], *gradient = (R *)base[GRADIENT], *weight = (R *)base[WEIGHT];
  R *first = (R *)(memory + l->first), *second = (R *)(memory + l->second), loss = 0;
  int64_t *order = (int64_t *)(memory + l->order);
  int64_t *spare_order = (int64_t *)(memory + l->spare_order);
  uint64_t *words = (uint64_t *)(memory + l->words);
  uint64_t *spare_words = (uint64_t *)(memory + l->spare_words);
  base[KEY] = (char *)&row->key;
  base[NUMBER] = (char *)&number;
  base[LOSS] = (char *)&loss;
  base[CONSTANTS] = (char *)p->constants;
  spoil(memory, l->end);
  if (!p->fused) {
    memset(first, 0, (size_t)size);
    memset(second, 0, (size_t)size);
  }
  copy(theta, row->start, size);
  copy(base[BUFFERS], row->start_buffers, buffers);
  double total = 0;
  for (int64_t t = 0; t < row->steps; t++) {
    int64_t place = t % row->per_epoch * row->batch;
    int64_t count = n - place < row->batch ? n - place : row->batch;
    if (t % row->per_epoch == 0)
      permutation(mix(row->key + (uint64_t)(t / row->per_epoch + 1) * GOLDEN), n, order, words,
                  spare_order, spare_words);
    for (int64_t i = 0; i < width; i++) {
      int64_t example = row->first + (i < count ? order[place + i] : 0);
      copy(base[X] + i * p->x_bytes, x + example * p->x_bytes, p->x_bytes);
      copy(base[Y] + i * p->y_bytes, y + example * p->y_bytes, p->y_bytes);
      weight[i] = i < count ? (R)((p->fused ? row->rate : 1.0) / (double)count) : 0;
    }
    number = t;
    loss = 0;
    for (int64_t i = 0; i < p->count; i++) {
      allow(p, i, base, memory, l->end);
      int64_t status = execute(p->list + i, base, row);
      if (status != TRAINED) {
        allow_all(memory, l->end);
        fail(p, row, status);
        return;
      }
    }
    allow_all(memory, l->end);
    total += p->fused ? (double)loss / row->rate : (double)loss;
    if (!p->fused) optimise(p, row, theta, gradient, first, second, t);
  }
  row->loss = total / (double)row->steps;
  for (int64_t i = 0; i < p->params; i++) row->update[i] = row->start[i] - theta[i];
  copy(row->buffers, base[BUFFERS], buffers);
  row->status = TRAINED;
}

/* Train rows one after the other, and take only those that no other thread has taken. If there is
   no memory, take none. */
void rota_train(const Program *p, Row *rows, int64_t count, int64_t *next, const char *x,
                const char *y) {
  int64_t most = 0, mine;
  for (int64_t i = 0; i < count; i++) most = rows[i].examples > most ? rows[i].examples : most;
  Layout l = divide(p, most);
  size_t large = (size_t)2 << 20, page = (size_t)l.end < large ? 64 : large;
  size_t whole = ((size_t)l.end + page - 1) / page * page;
  char *memory = aligned_alloc(page, whole);
  if (!memory) return;
#ifdef MADV_HUGEPAGE
  if (page == large) /* each row of a large matrix would be on a page of its own */
    madvise(memory, whole, MADV_HUGEPAGE);
#endif
  while ((mine = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < count)
    train(p, rows + mine, memory, &l, x, y);
  free(memory);
}

/* How many numbers of scratch space convolutions of this shape need; -1 if there are too many. */
int64_t rota_convolution_space(const int64_t *shape) {
  return convolution_space((const Shape *)shape);
}

/* The same for a product. */
int64_t rota_product_space(int64_t m, int64_t n) { return product_space(m, n); }

/* C = A B, all contiguous: what `rota bench` measures a core with. */
void rota_product(int64_t m, int64_t n, int64_t k, const R *a, const R *b, R *c, R *space) {
  product(m, n, k, a, k, 1, b, n, 1, c, n, 1, 0, 1, space);
}

/* The sizes of the structures, for a test that compares them with Python's. */
void rota_sizes(int64_t *out) {
  out[0] = sizeof(Instruction);
  out[1] = sizeof(Program);
  out[2] = sizeof(Row);
}
