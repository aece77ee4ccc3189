/* Convolutions of images with the channels last in memory: [batch, high, wide, channels].

   Kernels of 3 x 3 and 5 x 5 with stride 1 use Winograd's short products (Lavin & Gray 2016). They
   work on tiles of 6 x 6 at the points 0, 1, -1, 2, -2 and infinity; or of 8 x 8, at 1/2 and -1/2
   too. A tile gives 4 x 4 results with 36 or 64 multiplications; the definition takes 144 or 400.
   The gradient of the weights is the same with the roles of kernel and result exchanged. Images of
   few channels are convolved line by line, all others by im2col. */

typedef struct {
  int64_t batch, channels, high, wide, outputs, out_high, out_wide, size[2], stride[2], pad[2];
} Shape;

#define RESULTS 4 /* a tile gives 4 x 4 */
#define WIDEST 8

/* B^T: a line of an input tile, at all points. */
INLINE to_points(int tile, const V *x, V *y) {
  if (tile == 6) {
    V p = x[4] - 4 * x[2], q = x[3] - 4 * x[1], r = x[4] - x[2], s = 2 * (x[3] - x[1]);
    y[0] = 4 * x[0] - 5 * x[2] + x[4];
    y[1] = p + q;
    y[2] = p - q;
    y[3] = r + s;
    y[4] = r - s;
    y[5] = 4 * x[1] - 5 * x[3] + x[5];
    return;
  }
  V p = x[2] + x[6] - (R)4.25 * x[4], q = x[1] + x[5] - (R)4.25 * x[3];
  V r = (R)0.25 * x[2] - (R)1.25 * x[4] + x[6], s = (R)0.5 * x[1] - (R)2.5 * x[3] + 2 * x[5];
  V t = 4 * x[2] - 5 * x[4] + x[6], u = 2 * x[1] - (R)2.5 * x[3] + (R)0.5 * x[5];
  y[0] = x[0] - x[6] + (R)5.25 * (x[4] - x[2]);
  y[1] = p + q;
  y[2] = p - q;
  y[3] = r + s;
  y[4] = r - s;
  y[5] = t + u;
  y[6] = t - u;
  y[7] = x[7] - x[1] + (R)5.25 * (x[3] - x[5]);
}

/* G: a line of n numbers of a kernel, at all points. */
INLINE kernel_to_points(int tile, int n, const V *w, V *y) {
  V even = w[0], even2 = w[0], even_half = w[0];
  V odd = w[1], odd2 = 2 * w[1], odd_half = (R)0.5 * w[1];
  R power = 2, half = (R)0.5;
  UNROLL for (int j = 2; j < n; j++) {
    power *= 2;
    half *= (R)0.5;
    if (j % 2) {
      odd += w[j];
      odd2 += power * w[j];
      odd_half += half * w[j];
    } else {
      even += w[j];
      even2 += power * w[j];
      even_half += half * w[j];
    }
  }
  R at0 = tile == 6 ? (R)0.25 : 1, at1 = tile == 6 ? (R)(-1.0 / 6) : (R)(-2.0 / 9);
  R at2 = tile == 6 ? (R)(1.0 / 24) : (R)(1.0 / 90);
  y[0] = w[0] * at0;
  y[1] = (even + odd) * at1;
  y[2] = (even - odd) * at1;
  y[3] = (even2 + odd2) * at2;
  y[4] = (even2 - odd2) * at2;
  if (tile == 8) {
    y[5] = (even_half + odd_half) * (R)(32.0 / 45);
    y[6] = (even_half - odd_half) * (R)(32.0 / 45);
  }
  y[tile - 1] = w[n - 1];
}

/* A^T: a line of n results from their values at all points. */
INLINE from_points(int tile, int n, const V *x, V *y) {
  V sum = x[1] + x[2], apart = x[1] - x[2], sum2 = x[3] + x[4], apart2 = x[3] - x[4];
  V sum_half = {0}, apart_half = {0};
  if (tile == 8) {
    sum_half = x[5] + x[6];
    apart_half = x[5] - x[6];
  }
  R power = 1, half = 1;
  UNROLL for (int i = 0; i < n; i++) {
    y[i] = i % 2 ? apart + power * apart2 : sum + power * sum2;
    if (tile == 8) y[i] += half * (i % 2 ? apart_half : sum_half);
    power *= 2;
    half *= (R)0.5;
  }
  y[0] += x[0];
  y[n - 1] += x[tile - 1];
}

/* How images are cut into tiles: each has `down` times `across` of them. */
typedef struct {
  int64_t down, across, count;
} Cut;

static Cut cut(const Shape *s, int64_t high, int64_t wide) {
  int64_t down = (high + RESULTS - 1) / RESULTS, across = (wide + RESULTS - 1) / RESULTS;
  return (Cut){down, across, s->batch * down * across};
}

/* The distance in memory between two points' values. It is no power of two, for which a cache has
   few places. */
static int64_t spread(int64_t items) { return items + 16; }

/* How many tiles are worked on at a time. Their values at all points fit into the second cache. */
#define BLOCK 32

/* Where tile t lies: image b, tile i down and j across. */
#define FIND_TILE(t) \
  int64_t j = (t) % cut.across, i = (t) / cut.across % cut.down, b = (t) / (cut.across * cut.down)

/* Tiles from..from+count of images at all points: [points][count, channels]. A tile begins `pad`
   before its first result. */
INLINE image_points(int tile, Cut cut, int64_t from, int64_t count, const R *x, int64_t channels,
                    int64_t high, int64_t wide, int64_t pad_h, int64_t pad_w, R *out) {
  for (int64_t t = 0; t < count; t++) {
    FIND_TILE(from + t);
    int64_t top = i * RESULTS - pad_h, left = j * RESULTS - pad_w;
    int inside = top >= 0 && left >= 0 && top + tile <= high && left + tile <= wide;
    for (int64_t c = 0; c < channels; c += LANES) {
      V in[WIDEST], mid[WIDEST][WIDEST];
      int64_t some = channels - c;
      const R *at = x + ((b * high + top) * wide + left) * channels + c;
      for (int u = 0; u < tile; u++, at += wide * channels) {
        if (inside) {
          UNROLL for (int v = 0; v < tile; v++) in[v] = load_masked(at + v * channels, some);
        } else {
          for (int v = 0; v < tile; v++) {
            int64_t y = top + u, z = left + v;
            int there = y >= 0 && y < high && z >= 0 && z < wide;
            in[v] = there ? load_masked(at + v * channels, some) : (V){0};
          }
        }
        to_points(tile, in, mid[u]);
      }
      for (int v = 0; v < tile; v++) {
        V line[WIDEST], done[WIDEST];
        UNROLL for (int u = 0; u < tile; u++) line[u] = mid[u][v];
        to_points(tile, line, done);
        R *to = out + t * channels + c;
        UNROLL for (int u = 0; u < tile; u++)
          store_masked(to + (u * tile + v) * spread(count * channels), done[u], some);
      }
    }
  }
}

/* Squares of n x n numbers, `w` [n, n, items], at all points. */
INLINE squares_to_points(int tile, int n, const R *w, int64_t items, R *out) {
  for (int64_t at = 0; at < items; at += LANES) {
    V in[WIDEST], mid[WIDEST][WIDEST], done[WIDEST];
    int64_t some = items - at;
    UNROLL for (int u = 0; u < n; u++) {
      UNROLL for (int v = 0; v < n; v++) in[v] = load_masked(w + (u * n + v) * items + at, some);
      kernel_to_points(tile, n, in, mid[u]);
    }
    UNROLL for (int v = 0; v < tile; v++) {
      V line[WIDEST];
      UNROLL for (int u = 0; u < n; u++) line[u] = mid[u][v];
      kernel_to_points(tile, n, line, done);
      UNROLL for (int u = 0; u < tile; u++)
        store_masked(out + (u * tile + v) * spread(items) + at, done[u], some);
    }
  }
}

/* A square of n x n results from its values at all points, which lie `apart`. */
INLINE square_from_points(int tile, int n, const R *in, int64_t apart, int64_t some,
                          V out[WIDEST][WIDEST]) {
  V mid[WIDEST][WIDEST];
  UNROLL for (int u = 0; u < tile; u++) {
    V line[WIDEST];
    UNROLL for (int v = 0; v < tile; v++) line[v] = load_masked(in + (u * tile + v) * apart, some);
    from_points(tile, n, line, mid[u]);
  }
  UNROLL for (int v = 0; v < n; v++) {
    V line[WIDEST], done[WIDEST];
    UNROLL for (int u = 0; u < tile; u++) line[u] = mid[u][v];
    from_points(tile, n, line, done);
    UNROLL for (int u = 0; u < n; u++) out[u][v] = done[u];
  }
}

/* Write tiles from..from+count of the results, given at all points, into images, plus a bias. */
INLINE image_from_points(int tile, Cut cut, int64_t from, int64_t count, const R *in,
                         int64_t channels, int64_t high, int64_t wide, const R *bias, R *y) {
  for (int64_t t = 0; t < count; t++) {
    FIND_TILE(from + t);
    for (int64_t c = 0; c < channels; c += LANES) {
      V out[WIDEST][WIDEST], more = {0};
      int64_t some = channels - c;
      if (bias) more = load_masked(bias + c, some);
      square_from_points(tile, RESULTS, in + t * channels + c, spread(count * channels), some, out);
      for (int u = 0; u < RESULTS && i * RESULTS + u < high; u++)
        for (int v = 0; v < RESULTS && j * RESULTS + v < wide; v++)
          store_masked(y + ((b * high + i * RESULTS + u) * wide + j * RESULTS + v) * channels + c,
                     out[u][v] + more, some);
    }
  }
}

/* w [outputs, channels, taps] as [taps, channels, outputs]; or, turned by half a circle, as [taps,
   outputs, channels]. */
static void taps_first(const Shape *s, const R *w, R *out, int turned) {
  int64_t taps = s->size[0] * s->size[1], line = s->channels * taps;
  int64_t inner = turned ? s->channels : s->outputs, of_inner = turned ? taps : line;
  int64_t outer = turned ? s->outputs : s->channels, of_outer = turned ? line : taps;
  for (int64_t from = 0; from < inner; from += 16) { /* 16 rows stay in the first cache */
    int64_t some = inner - from < 16 ? inner - from : 16;
    for (int64_t j = 0; j < outer; j++)
      for (int64_t t = 0; t < taps; t++) {
        const R *in = w + j * of_outer + from * of_inner + (turned ? taps - 1 - t : t);
        for (int64_t i = 0; i < some; i++)
          out[(t * outer + j) * inner + from + i] = in[i * of_inner];
      }
  }
}

/* Whether Winograd's products are used. */
static int by_tiles(const Shape *s) {
  return s->size[0] == s->size[1] && (s->size[0] == 3 || s->size[0] == 5) && s->stride[0] == 1 &&
         s->stride[1] == 1 && s->channels >= LANES / 2 && s->outputs >= LANES / 2;
}

/* y = x convolved with `taps` [size, size, inputs, outputs]. */
INLINE convolve_tiles_of(int tile, const Shape *s, const R *x, int64_t inputs, int64_t high,
                         int64_t wide, const R *taps, int64_t outputs, int64_t out_high,
                         int64_t out_wide, int64_t pad_h, int64_t pad_w, const R *bias, R *y,
                         R *space) {
  Cut tiles = cut(s, out_high, out_wide);
  int64_t pairs = spread(inputs * outputs), points = tile * tile;
  R *kernels = space, *images = kernels + points * pairs;
  R *results = images + points * spread(BLOCK * inputs);
  R *rest = results + points * spread(BLOCK * outputs);
  squares_to_points(tile, tile + 1 - RESULTS, taps, inputs * outputs, kernels);
  for (int64_t from = 0; from < tiles.count; from += BLOCK) {
    int64_t count = tiles.count - from < BLOCK ? tiles.count - from : BLOCK;
    image_points(tile, tiles, from, count, x, inputs, high, wide, pad_h, pad_w, images);
    for (int p = 0; p < points; p++)
      product(count, outputs, inputs, images + p * spread(count * inputs), inputs, 1,
              kernels + p * pairs, outputs, 1, results + p * spread(count * outputs), outputs, 1, 0,
              1, rest);
    image_from_points(tile, tiles, from, count, results, outputs, out_high, out_wide, bias, y);
  }
}

static void convolve_tiles(const Shape *s, const R *x, int64_t inputs, int64_t high, int64_t wide,
                           const R *taps, int64_t outputs, int64_t out_high, int64_t out_wide,
                           int64_t pad_h, int64_t pad_w, const R *bias, R *y, R *space) {
  if (s->size[0] == 3)
    convolve_tiles_of(6, s, x, inputs, high, wide, taps, outputs, out_high, out_wide, pad_h, pad_w,
                      bias, y, space);
  else
    convolve_tiles_of(8, s, x, inputs, high, wide, taps, outputs, out_high, out_wide, pad_h, pad_w,
                      bias, y, space);
}

/* Tiles from..from+count of dy: [RESULTS, RESULTS, count, outputs], with zeros beyond the edge. */
static void squares_of(const Shape *s, Cut cut, int64_t from, int64_t count, const R *dy, R *out) {
  for (int64_t t = 0; t < count; t++) {
    FIND_TILE(from + t);
    for (int64_t u = 0; u < RESULTS; u++)
      for (int64_t v = 0; v < RESULTS; v++) {
        int64_t y = i * RESULTS + u, z = j * RESULTS + v;
        R *to = out + ((u * RESULTS + v) * count + t) * s->outputs;
        const R *from_dy = dy + ((b * s->out_high + y) * s->out_wide + z) * s->outputs;
        if (y < s->out_high && z < s->out_wide) memcpy(to, from_dy, (size_t)s->outputs * sizeof(R));
        else memset(to, 0, (size_t)s->outputs * sizeof(R));
      }
  }
}

/* dw [outputs, channels, taps] from x and dy. */
INLINE weight_gradient_tiles_of(int tile, const Shape *s, const R *x, const R *dy, R *dw,
                                R *space) {
  Cut tiles = cut(s, s->out_high, s->out_wide);
  int64_t size = tile + 1 - RESULTS, taps = size * size, block = 2 * BLOCK, points = tile * tile;
  int64_t pairs = spread(s->channels * s->outputs);
  R *results = space, *images = results + points * pairs;
  R *squares = images + points * spread(block * s->channels);
  R *grads = squares + RESULTS * RESULTS * block * s->outputs;
  R *rest = grads + points * spread(block * s->outputs);
  for (int64_t from = 0; from < tiles.count; from += block) {
    int64_t count = tiles.count - from < block ? tiles.count - from : block;
    image_points(tile, tiles, from, count, x, s->channels, s->high, s->wide, s->pad[0], s->pad[1],
                 images);
    squares_of(s, tiles, from, count, dy, squares);
    squares_to_points(tile, RESULTS, squares, count * s->outputs, grads);
    for (int p = 0; p < points; p++)
      product(s->channels, s->outputs, count, images + p * spread(count * s->channels), 1,
              s->channels, grads + p * spread(count * s->outputs), s->outputs, 1,
              results + p * pairs, s->outputs, 1, from > 0, 1, rest);
  }
  for (int64_t c = 0; c < s->channels; c++)
    for (int64_t o = 0; o < s->outputs; o += LANES) {
      V out[WIDEST][WIDEST];
      int64_t some = s->outputs - o < LANES ? s->outputs - o : LANES;
      square_from_points(tile, (int)size, results + c * s->outputs + o, pairs, some, out);
      for (int u = 0; u < size; u++)
        for (int v = 0; v < size; v++)
          for (int64_t l = 0; l < some; l++)
            dw[((o + l) * s->channels + c) * taps + u * size + v] = out[u][v][l];
    }
}

static void weight_gradient_tiles(const Shape *s, const R *x, const R *dy, R *dw, R *space) {
  if (s->size[0] == 3) weight_gradient_tiles_of(6, s, x, dy, dw, space);
  else weight_gradient_tiles_of(8, s, x, dy, dw, space);
}

/* im2col: x as [batch * out_high * out_wide, taps * channels]. */
static void patches(const Shape *s, const R *x, R *out) {
  int64_t line = s->size[1] * s->channels;
  for (int64_t b = 0; b < s->batch; b++)
    for (int64_t i = 0; i < s->out_high; i++)
      for (int64_t j = 0; j < s->out_wide; j++)
        for (int64_t u = 0; u < s->size[0]; u++, out += line) {
          int64_t y = i * s->stride[0] - s->pad[0] + u, z = j * s->stride[1] - s->pad[1];
          const R *from = x + ((b * s->high + y) * s->wide + z) * s->channels;
          if (y < 0 || y >= s->high) {
            for (int64_t l = 0; l < line; l++) out[l] = 0;
          } else if (z >= 0 && z + s->size[1] <= s->wide) {
            for (int64_t l = 0; l < line; l++) out[l] = from[l];
          } else
            for (int64_t v = 0; v < s->size[1]; v++)
              for (int64_t c = 0; c < s->channels; c++)
                out[v * s->channels + c] =
                    z + v >= 0 && z + v < s->wide ? from[v * s->channels + c] : 0;
        }
}

/* Whether images have few enough channels to go by lines. Every line of a patch is then a piece of
   the image, so that only the image is copied, into a border of zeros. */
static int by_lines(const Shape *s) { return s->size[1] * s->channels < SHALLOW; }

static int64_t bordered_line(const Shape *s) { return (s->wide + 2 * s->pad[1]) * s->channels; }

/* Copy images into a border of zeros. */
static void border(const Shape *s, const R *x, R *out) {
  int64_t line = bordered_line(s), edge = s->pad[0] * line;
  int64_t side = s->pad[1] * s->channels, inner = s->wide * s->channels;
  for (int64_t b = 0; b < s->batch; b++, out += edge) {
    memset(out, 0, (size_t)edge * sizeof(R));
    out += edge;
    for (int64_t i = 0; i < s->high; i++, out += line, x += inner) {
      memset(out, 0, (size_t)side * sizeof(R));
      memcpy(out + side, x, (size_t)inner * sizeof(R));
      memset(out + side + inner, 0, (size_t)side * sizeof(R));
    }
    memset(out, 0, (size_t)edge * sizeof(R));
  }
}

/* y = x convolved with `taps` [taps, channels, outputs]. */
static void convolve_lines(const Shape *s, const R *x, const R *taps, const R *bias, R *y,
                           R *space) {
  int64_t line = bordered_line(s), high = s->high + 2 * s->pad[0], deep = s->size[1] * s->channels;
  border(s, x, space);
  for (int64_t b = 0; b < s->batch; b++)
    for (int64_t i = 0; i < s->out_high; i++, y += s->out_wide * s->outputs) {
      for (int64_t j = 0; bias && j < s->out_wide; j++)
        memcpy(y + j * s->outputs, bias, (size_t)s->outputs * sizeof(R));
      for (int64_t o = 0; o < s->outputs; o += 2 * LANES)
        strip(s->out_wide, s->outputs - o < 2 * LANES ? s->outputs - o : 2 * LANES, s->size[0],
              line, deep * s->outputs, deep, space + (b * high + i * s->stride[0]) * line,
              s->stride[1] * s->channels, 1, taps + o, s->outputs, y + o, s->outputs, bias != NULL,
              1);
    }
}

/* dw as [taps, channels, outputs]. */
static void weight_gradient_lines(const Shape *s, const R *x, const R *dy, R *dw, R *space) {
  int64_t line = bordered_line(s), high = s->high + 2 * s->pad[0], deep = s->size[1] * s->channels;
  border(s, x, space);
  for (int64_t b = 0; b < s->batch; b++, dy += s->out_high * s->out_wide * s->outputs)
    for (int64_t u = 0; u < s->size[0]; u++)
      for (int64_t o = 0; o < s->outputs; o += 2 * LANES)
        strip(deep, s->outputs - o < 2 * LANES ? s->outputs - o : 2 * LANES, s->out_high,
              s->stride[0] * line, s->out_wide * s->outputs, s->out_wide,
              space + (b * high + u) * line, 1, s->stride[1] * s->channels, dy + o, s->outputs,
              dw + u * deep * s->outputs + o, s->outputs, b > 0, 1);
}

/* Whether vectors hold pixels in place of channels: images of one colour, and few outputs. */
static int by_pixels(const Shape *s) {
  return s->channels == 1 && s->stride[0] == 1 && s->stride[1] == 1 && s->outputs < LANES;
}

/* y = x convolved with w [outputs, taps]. */
static void convolve_pixels(const Shape *s, const R *x, const R *w, const R *bias, R *y, R *space) {
  int64_t line = bordered_line(s), high = s->high + 2 * s->pad[0], taps = s->size[0] * s->size[1];
  R *found = space + s->batch * high * line; /* [outputs, out_wide] */
  border(s, x, space);
  for (int64_t b = 0; b < s->batch; b++)
    for (int64_t i = 0; i < s->out_high; i++, y += s->out_wide * s->outputs) {
      const R *from = space + (b * high + i) * line;
      for (int64_t j = 0; j < s->out_wide; j += 2 * LANES)
        strip(s->outputs, s->out_wide - j < 2 * LANES ? s->out_wide - j : 2 * LANES, s->size[0],
              s->size[1], line, s->size[1], w, taps, 1, from + j, 1, found + j, s->out_wide, 0, 1);
      for (int64_t o = 0; o < s->outputs; o++) {
        R more = bias ? bias[o] : 0;
        for (int64_t j = 0; j < s->out_wide; j++)
          y[j * s->outputs + o] = found[o * s->out_wide + j] + more;
      }
    }
}

/* Outputs and taps whose gradients are summed up at the same time: they fill the registers. */
#define OUTPUTS (VECTOR_BYTES == 64 ? 6 : 3)
#define TAPS 4

/* Some gradients of an image's weights: dw[o][t] += the sum over the pixels of dy[o] times x at tap
   t. Outputs and taps beyond those that there are repeat the last one. */
INLINE add_gradients(const Shape *s, const R *x, int64_t line, const R *dy, int64_t outputs,
                     const int64_t *tap, int64_t taps, R *dw, int64_t dw_o) {
  V sums[OUTPUTS * TAPS];
  int64_t apart[OUTPUTS];
  UNROLL for (int i = 0; i < OUTPUTS * TAPS; i++) sums[i] = (V){0};
  UNROLL for (int o = 0; o < OUTPUTS; o++) apart[o] = (o < outputs ? o : outputs - 1) * s->out_wide;
  for (int64_t i = 0; i < s->out_high; i++, x += line, dy += s->outputs * s->out_wide)
    for (int64_t j = 0; j < s->out_wide; j += LANES) {
      V at[TAPS];
      UNROLL for (int t = 0; t < TAPS; t++) at[t] = load_masked(x + tap[t] + j, s->out_wide - j);
      UNROLL for (int o = 0; o < OUTPUTS; o++) {
        V g = load_masked(dy + apart[o] + j, s->out_wide - j);
        HELD(g);
        UNROLL for (int t = 0; t < TAPS; t++) sums[o * TAPS + t] += g * at[t];
      }
    }
  UNROLL for (int o = 0; o < OUTPUTS; o++)
    UNROLL for (int t = 0; t < TAPS; t++)
      if (o < outputs && t < taps) dw[o * dw_o + t] += sum_lanes(sums[o * TAPS + t]);
}

/* dw [outputs, taps]. */
static void weight_gradient_pixels(const Shape *s, const R *x, const R *dy, R *dw, R *space) {
  int64_t line = bordered_line(s), high = s->high + 2 * s->pad[0], taps = s->size[0] * s->size[1];
  R *turned = space + s->batch * high * line; /* an image of dy: [out_high, outputs, out_wide] */
  border(s, x, space);
  memset(dw, 0, (size_t)(s->outputs * taps) * sizeof(R));
  for (int64_t b = 0; b < s->batch; b++) {
    for (int64_t i = 0; i < s->out_high; i++, dy += s->out_wide * s->outputs)
      for (int64_t o = 0; o < s->outputs; o++)
        for (int64_t j = 0; j < s->out_wide; j++)
          turned[(i * s->outputs + o) * s->out_wide + j] = dy[j * s->outputs + o];
    for (int64_t t = 0; t < taps; t += TAPS) {
      int64_t tap[TAPS], some = taps - t < TAPS ? taps - t : TAPS;
      for (int64_t q = 0; q < TAPS; q++) {
        int64_t at = q < some ? t + q : taps - 1;
        tap[q] = at / s->size[1] * line + at % s->size[1];
      }
      for (int64_t o = 0; o < s->outputs; o += OUTPUTS)
        add_gradients(s, space + b * high * line, line, turned + o * s->out_wide,
                      s->outputs - o < OUTPUTS ? s->outputs - o : OUTPUTS, tap, some,
                      dw + o * taps + t, taps);
    }
  }
}

/* How many images are worked on at a time, so that their patches stay in the second cache. */
static int64_t images_at_once(const Shape *s) {
  int64_t some = 256 / (s->out_high * s->out_wide) + 1;
  return some < s->batch ? some : s->batch;
}

/* The shape of the images from..from+images_at_once. */
static Shape images_from(const Shape *s, int64_t from) {
  Shape some = *s;
  some.batch = s->batch - from < images_at_once(s) ? s->batch - from : images_at_once(s);
  return some;
}

/* y = x convolved with w [outputs, channels, taps], plus a bias if there is one. */
static void convolution(const Shape *s, const R *x, const R *w, const R *bias, R *y, R *space) {
  int64_t taps = s->size[0] * s->size[1], depth = taps * s->channels;
  int64_t pixels = s->out_high * s->out_wide, image = s->high * s->wide * s->channels;
  R *kernel = space, *rest = space + depth * s->outputs;
  if (by_pixels(s)) {
    convolve_pixels(s, x, w, bias, y, rest);
    return;
  }
  taps_first(s, w, kernel, 0);
  if (by_tiles(s)) {
    convolve_tiles(s, x, s->channels, s->high, s->wide, kernel, s->outputs, s->out_high,
                   s->out_wide, s->pad[0], s->pad[1], bias, y, rest);
    return;
  }
  if (by_lines(s)) {
    convolve_lines(s, x, kernel, bias, y, rest);
    return;
  }
  for (int64_t from = 0; from < s->batch; from += images_at_once(s)) {
    Shape some = images_from(s, from);
    int64_t many = some.batch * pixels;
    R *to = y + from * pixels * s->outputs;
    patches(&some, x + from * image, rest);
    for (int64_t i = 0; bias && i < many; i++)
      memcpy(to + i * s->outputs, bias, (size_t)s->outputs * sizeof(R));
    product(many, s->outputs, depth, rest, depth, 1, kernel, s->outputs, 1, to, s->outputs, 1,
            bias != NULL, 1, rest + many * depth);
  }
}

/* dw [outputs, channels, taps] from x and dy. */
static void weight_gradient(const Shape *s, const R *x, const R *dy, R *dw, R *space) {
  if (by_tiles(s)) {
    weight_gradient_tiles(s, x, dy, dw, space);
    return;
  }
  int64_t taps = s->size[0] * s->size[1], depth = taps * s->channels;
  int64_t pixels = s->out_high * s->out_wide, image = s->high * s->wide * s->channels;
  R *result = space, *columns = space + depth * s->outputs; /* result [taps, channels, outputs] */
  if (by_pixels(s)) {
    weight_gradient_pixels(s, x, dy, dw, columns);
    return;
  }
  if (by_lines(s)) weight_gradient_lines(s, x, dy, result, columns);
  else
    for (int64_t from = 0; from < s->batch; from += images_at_once(s)) {
      Shape some = images_from(s, from);
      int64_t many = some.batch * pixels;
      patches(&some, x + from * image, columns);
      const R *some_dy = dy + from * pixels * s->outputs;
      product(depth, s->outputs, many, columns, 1, depth, some_dy, s->outputs, 1, result,
              s->outputs, 1, from > 0, 1, columns + many * depth);
    }
  for (int64_t o = 0; o < s->outputs; o++)
    for (int64_t c = 0; c < s->channels; c++)
      for (int64_t t = 0; t < taps; t++)
        dw[(o * s->channels + c) * taps + t] = result[(t * s->channels + c) * s->outputs + o];
}

/* dx of some images from the gradients of their patches [batch, out_high, out_wide, taps,
   channels]: every pixel adds up those of the patches that hold it. */
static void pixels_of_patches(const Shape *s, const R *in, R *dx) {
  int64_t taps = s->size[0] * s->size[1], down = s->stride[0], across = s->stride[1];
  int64_t next = across * s->channels - taps * s->channels; /* from a tap to the next one's patch */
  for (int64_t b = 0; b < s->batch; b++, in += s->out_high * s->out_wide * taps * s->channels)
    for (int64_t y = s->pad[0]; y < s->high + s->pad[0]; y++)
      for (int64_t z = s->pad[1]; z < s->wide + s->pad[1]; z++, dx += s->channels) {
        int64_t last = s->out_wide - 1, beyond = z / across > last ? z / across - last : 0;
        int64_t left = z % across + beyond * across, right = z / across - beyond;
        for (int64_t c = 0; c < s->channels; c += LANES) {
          V sum = {0};
          for (int64_t u = y % down, i = y / down; u < s->size[0] && i >= 0; u += down, i--) {
            if (i >= s->out_high) continue;
            const R *at = in + ((i * s->out_wide + right) * taps + u * s->size[1] + left) *
                                   s->channels + c;
            V line = {0}; /* so that lines need not wait for one another */
            for (int64_t v = left, j = right; v < s->size[1] && j >= 0; v += across, j--) {
              line += load_masked(at, s->channels - c);
              at += next;
            }
            sum += line;
          }
          store_masked(dx + c, sum, s->channels - c);
        }
      }
}

/* dx from dy and w. */
static void input_gradient(const Shape *s, const R *dy, const R *w, R *dx, R *space) {
  int64_t taps = s->size[0] * s->size[1], depth = taps * s->channels;
  int64_t pixels = s->out_high * s->out_wide, image = s->high * s->wide * s->channels;
  R *kernel = space, *rest = space + depth * s->outputs;
  if (by_tiles(s)) {
    taps_first(s, w, kernel, 1);
    convolve_tiles(s, dy, s->outputs, s->out_high, s->out_wide, kernel, s->channels, s->high,
                   s->wide, s->size[0] - 1 - s->pad[0], s->size[1] - 1 - s->pad[1], NULL, dx, rest);
    return;
  }
  for (int64_t o = 0; o < s->outputs; o++) /* kernel [outputs, taps, channels] */
    for (int64_t t = 0; t < taps; t++)
      for (int64_t c = 0; c < s->channels; c++)
        kernel[(o * taps + t) * s->channels + c] = w[(o * s->channels + c) * taps + t];
  for (int64_t from = 0; from < s->batch; from += images_at_once(s)) {
    Shape some = images_from(s, from);
    int64_t many = some.batch * pixels;
    const R *some_dy = dy + from * pixels * s->outputs;
    product(many, depth, s->outputs, some_dy, s->outputs, 1, kernel, depth, 1, rest, depth, 1, 0, 1,
            rest + many * depth);
    pixels_of_patches(&some, rest, dx + from * image);
  }
}

/* How many numbers of scratch space the functions above need at most; -1 if more than 2^48. */
static int64_t convolution_space(const Shape *s) {
  int64_t taps = s->size[0] * s->size[1], depth = taps * s->channels;
  int64_t pixels = s->batch * s->out_high * s->out_wide;
  int64_t most = s->channels > s->outputs ? s->channels : s->outputs;
  int64_t packed = product_space(depth, most);
  double around = ((double)s->high + 2.0 * (double)s->pad[0]) * (double)s->channels *
                  ((double)s->wide + 2.0 * (double)s->pad[1]) * (double)s->batch;
  if ((double)pixels * (double)depth > 0x1p48 || around > 0x1p48) return -1;
  int64_t bordered = s->batch * (s->high + 2 * s->pad[0]) * bordered_line(s);
  int64_t columns = pixels * depth, turned = s->out_high * s->out_wide * s->outputs;
  if (bordered + turned > columns) columns = bordered + turned;
  if (!by_tiles(s)) return depth * s->outputs + columns + packed;
  int64_t tile = s->size[0] + RESULTS - 1;
  int64_t images = spread(2 * BLOCK * s->channels), results = spread(2 * BLOCK * s->outputs);
  int64_t points = tile * tile * (spread(s->channels * s->outputs) + images + results);
  return depth * s->outputs + points + RESULTS * RESULTS * 2 * BLOCK * s->outputs + packed;
}
