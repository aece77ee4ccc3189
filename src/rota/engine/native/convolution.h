/* Convolutions on images with the channels last in memory: [batch, high, wide, channels].

   Kernels of 3 x 3 and 5 x 5 with stride 1 go by Winograd's short products on tiles of 6 x 6 (Lavin & Gray 2016), with the points
   0, 1, -1, 2, -2 and infinity: 36 multiplications give 4 x 4 results of a 3 x 3 kernel or 2 x 2 of a 5 x 5 one, where the definition
   takes 144 and 100. The gradient of the weights is the same with the roles of kernel and result exchanged. The others go by im2col. */

typedef struct {
  int64_t batch, channels, high, wide, outputs, out_high, out_wide, size[2], stride[2], pad[2];
} Shape;

#define TILE 6

/* B^T: an input tile's line. */
INLINE to_points(const V x[TILE], V y[TILE]) {
  V p = x[4] - 4 * x[2], q = x[3] - 4 * x[1], r = x[4] - x[2], s = 2 * (x[3] - x[1]);
  y[0] = 4 * x[0] - 5 * x[2] + x[4];
  y[1] = p + q;
  y[2] = p - q;
  y[3] = r + s;
  y[4] = r - s;
  y[5] = 4 * x[1] - 5 * x[3] + x[5];
}

/* G: a kernel's line of n. */
INLINE kernel_to_points(int n, const V *w, V y[TILE]) {
  V even = w[0], odd = w[1], even2 = w[0], odd2 = 2 * w[1];
  R power = 2;
#pragma GCC unroll 6
  for (int j = 2; j < n; j++) {
    power *= 2;
    if (j % 2) { odd += w[j]; odd2 += power * w[j]; } else { even += w[j]; even2 += power * w[j]; }
  }
  y[0] = w[0] * (R)0.25;
  y[1] = (even + odd) * (R)(-1.0 / 6);
  y[2] = (even - odd) * (R)(-1.0 / 6);
  y[3] = (even2 + odd2) * (R)(1.0 / 24);
  y[4] = (even2 - odd2) * (R)(1.0 / 24);
  y[5] = w[n - 1];
}

/* A^T: a line of n results. */
INLINE from_points(int n, const V x[TILE], V *y) {
  V sum = x[1] + x[2], apart = x[1] - x[2], sum2 = x[3] + x[4], apart2 = x[3] - x[4];
  R power = 1;
#pragma GCC unroll 6
  for (int i = 0; i < n; i++) {
    y[i] = i % 2 ? apart + power * apart2 : sum + power * sum2;
    power *= 2;
  }
  y[0] += x[0];
  y[n - 1] += x[5];
}

/* How an image is cut: tiles of n x n results, `down` and `across` of them in each of the batch's images. */
typedef struct {
  int64_t n, down, across, count;
} Cut;

static Cut cut(const Shape *s, int64_t high, int64_t wide) {
  int64_t n = TILE + 1 - s->size[0], down = (high + n - 1) / n, across = (wide + n - 1) / n;
  return (Cut){n, down, across, s->batch * down * across};
}

/* How far apart the 36 points of something lie: not a power of two, for which a cache has few places. */
static int64_t spread(int64_t items) { return items + 16; }

#define BLOCK 24 /* tiles that are worked on at a time: at all their points they lie in the second cache */

/* Tiles from..from+count of images, each begun `pad` before its first result, at the 36 points, each [count, channels]. */
static void image_points(Cut cut, int64_t from, int64_t count, const R *x, int64_t channels, int64_t high, int64_t wide, int64_t pad_h,
                         int64_t pad_w, R *out) {
  for (int64_t t = 0; t < count; t++) {
    int64_t j = (from + t) % cut.across, i = (from + t) / cut.across % cut.down, b = (from + t) / (cut.across * cut.down);
    int64_t top = i * cut.n - pad_h, left = j * cut.n - pad_w;
    int inside = top >= 0 && left >= 0 && top + TILE <= high && left + TILE <= wide;
    for (int64_t c = 0; c < channels; c += LANES) {
      V in[TILE], mid[TILE][TILE];
      int64_t some = channels - c;
      const R *at = x + ((b * high + top) * wide + left) * channels + c;
      for (int u = 0; u < TILE; u++, at += wide * channels) {
        if (inside && some >= LANES) {
#pragma GCC unroll 6
          for (int v = 0; v < TILE; v++) in[v] = load(at + v * channels);
        } else {
          for (int v = 0; v < TILE; v++) {
            int64_t y = top + u, z = left + v;
            in[v] = y >= 0 && y < high && z >= 0 && z < wide ? load_some(at + v * channels, some) : (V){0};
          }
        }
        to_points(in, mid[u]);
      }
      for (int v = 0; v < TILE; v++) {
        V line[TILE], done[TILE];
#pragma GCC unroll 6
        for (int u = 0; u < TILE; u++) line[u] = mid[u][v];
        to_points(line, done);
#pragma GCC unroll 6
        for (int u = 0; u < TILE; u++) store_some(out + (u * TILE + v) * spread(count * channels) + t * channels + c, done[u], some);
      }
    }
  }
}

/* Little squares of n x n in `w` [n, n, items, lanes...], each lane on its own, at the 36 points. */
INLINE squares_to_points(int n, const R *w, int64_t items, R *out) {
  for (int64_t at = 0; at < items; at += LANES) {
    V in[TILE], mid[TILE][TILE], done[TILE];
    int64_t some = items - at;
#pragma GCC unroll 6
    for (int u = 0; u < n; u++) {
#pragma GCC unroll 6
      for (int v = 0; v < n; v++) in[v] = load_some(w + (u * n + v) * items + at, some);
      kernel_to_points(n, in, mid[u]);
    }
#pragma GCC unroll 6
    for (int v = 0; v < TILE; v++) {
      V line[TILE];
#pragma GCC unroll 6
      for (int u = 0; u < n; u++) line[u] = mid[u][v];
      kernel_to_points(n, line, done);
#pragma GCC unroll 6
      for (int u = 0; u < TILE; u++) store_some(out + (u * TILE + v) * spread(items) + at, done[u], some);
    }
  }
}

INLINE square_from_points(int n, const R *in, int64_t apart, int64_t some, V out[TILE][TILE]) {
  V mid[TILE][TILE];
#pragma GCC unroll 6
  for (int u = 0; u < TILE; u++) {
    V line[TILE];
#pragma GCC unroll 6
    for (int v = 0; v < TILE; v++) line[v] = load_some(in + (u * TILE + v) * apart, some);
    from_points(n, line, mid[u]);
  }
#pragma GCC unroll 6
  for (int v = 0; v < n; v++) {
    V line[TILE], done[TILE];
#pragma GCC unroll 6
    for (int u = 0; u < TILE; u++) line[u] = mid[u][v];
    from_points(n, line, done);
#pragma GCC unroll 6
    for (int u = 0; u < n; u++) out[u][v] = done[u];
  }
}

/* Tiles from..from+count of the results at the 36 points, each [count, channels], into images [batch, high, wide, channels], plus a bias. */
INLINE image_from_points(int n, Cut cut, int64_t from, int64_t count, const R *in, int64_t channels, int64_t high, int64_t wide, const R *bias,
                         R *y) {
  for (int64_t t = 0; t < count; t++) {
    int64_t j = (from + t) % cut.across, i = (from + t) / cut.across % cut.down, b = (from + t) / (cut.across * cut.down);
    for (int64_t c = 0; c < channels; c += LANES) {
      V out[TILE][TILE], more = {0};
      int64_t some = channels - c;
      if (bias) more = load_some(bias + c, some);
      square_from_points(n, in + t * channels + c, spread(count * channels), some, out);
      for (int u = 0; u < n && i * n + u < high; u++)
        for (int v = 0; v < n && j * n + v < wide; v++)
          store_some(y + ((b * high + i * n + u) * wide + j * n + v) * channels + c, out[u][v] + more, some);
    }
  }
}

/* w [outputs, channels, taps] as [taps, channels, outputs], or turned by half a circle as [taps, outputs, channels]. */
static void taps_first(const Shape *s, const R *w, R *out, int turned) {
  int64_t taps = s->size[0] * s->size[1], inner = turned ? s->channels : s->outputs, outer = turned ? s->outputs : s->channels;
  int64_t of_inner = turned ? taps : s->channels * taps, of_outer = turned ? s->channels * taps : taps;
  for (int64_t from = 0; from < inner; from += 16) { /* few enough rows to stay in the first cache */
    int64_t some = inner - from < 16 ? inner - from : 16;
    for (int64_t j = 0; j < outer; j++)
      for (int64_t t = 0; t < taps; t++) {
        const R *in = w + j * of_outer + from * of_inner + (turned ? taps - 1 - t : t);
        for (int64_t i = 0; i < some; i++) out[(t * outer + j) * inner + from + i] = in[i * of_inner];
      }
  }
}

static int by_tiles(const Shape *s) {
  return s->size[0] == s->size[1] && (s->size[0] == 3 || s->size[0] == 5) && s->stride[0] == 1 && s->stride[1] == 1 && s->channels >= LANES &&
         s->outputs >= LANES;
}

/* y = x convolved with taps [size, size, inputs, outputs]. */
static void convolve_tiles(const Shape *s, const R *x, int64_t inputs, int64_t high, int64_t wide, const R *taps, int64_t outputs,
                           int64_t out_high, int64_t out_wide, int64_t pad_h, int64_t pad_w, const R *bias, R *y, R *space) {
  Cut tiles = cut(s, out_high, out_wide);
  int64_t pairs = spread(inputs * outputs);
  R *kernels = space, *points = kernels + 36 * pairs, *results = points + 36 * spread(BLOCK * inputs);
  R *rest = results + 36 * spread(BLOCK * outputs);
  if (s->size[0] == 3) squares_to_points(3, taps, inputs * outputs, kernels);
  else squares_to_points(5, taps, inputs * outputs, kernels);
  for (int64_t from = 0; from < tiles.count; from += BLOCK) {
    int64_t count = tiles.count - from < BLOCK ? tiles.count - from : BLOCK;
    image_points(tiles, from, count, x, inputs, high, wide, pad_h, pad_w, points);
    for (int p = 0; p < 36; p++)
      product(count, outputs, inputs, points + p * spread(count * inputs), inputs, 1, kernels + p * pairs, outputs, 1,
              results + p * spread(count * outputs), outputs, 1, 0, 1, rest);
    if (tiles.n == 4) image_from_points(4, tiles, from, count, results, outputs, out_high, out_wide, bias, y);
    else image_from_points(2, tiles, from, count, results, outputs, out_high, out_wide, bias, y);
  }
}

/* Tiles from..from+count of dy as squares of n x n: [n, n, count, outputs], zeros beyond the edge. */
static void squares_of(const Shape *s, Cut cut, int64_t from, int64_t count, const R *dy, R *out) {
  for (int64_t t = 0; t < count; t++) {
    int64_t j = (from + t) % cut.across, i = (from + t) / cut.across % cut.down, b = (from + t) / (cut.across * cut.down);
    for (int64_t u = 0; u < cut.n; u++)
      for (int64_t v = 0; v < cut.n; v++) {
        int64_t y = i * cut.n + u, z = j * cut.n + v;
        R *to = out + ((u * cut.n + v) * count + t) * s->outputs;
        if (y < s->out_high && z < s->out_wide)
          memcpy(to, dy + ((b * s->out_high + y) * s->out_wide + z) * s->outputs, (size_t)s->outputs * sizeof(R));
        else
          memset(to, 0, (size_t)s->outputs * sizeof(R));
      }
  }
}

static void weight_gradient_tiles(const Shape *s, const R *x, const R *dy, R *dw, R *space) {
  Cut tiles = cut(s, s->out_high, s->out_wide);
  int64_t size = s->size[0], pairs = spread(s->channels * s->outputs), taps = size * size, block = 2 * BLOCK;
  R *results = space, *points = results + 36 * pairs, *squares = points + 36 * spread(block * s->channels);
  R *grads = squares + tiles.n * tiles.n * block * s->outputs, *rest = grads + 36 * spread(block * s->outputs);
  for (int64_t from = 0; from < tiles.count; from += block) {
    int64_t count = tiles.count - from < block ? tiles.count - from : block;
    image_points(tiles, from, count, x, s->channels, s->high, s->wide, s->pad[0], s->pad[1], points);
    squares_of(s, tiles, from, count, dy, squares);
    if (tiles.n == 4) squares_to_points(4, squares, count * s->outputs, grads);
    else squares_to_points(2, squares, count * s->outputs, grads);
    for (int p = 0; p < 36; p++)
      product(s->channels, s->outputs, count, points + p * spread(count * s->channels), 1, s->channels,
              grads + p * spread(count * s->outputs), s->outputs, 1, results + p * pairs, s->outputs, 1, from > 0, 1, rest);
  }
  for (int64_t c = 0; c < s->channels; c++)
    for (int64_t o = 0; o < s->outputs; o += LANES) {
      V out[TILE][TILE];
      int64_t some = s->outputs - o < LANES ? s->outputs - o : LANES;
      if (size == 3) square_from_points(3, results + c * s->outputs + o, pairs, some, out);
      else square_from_points(5, results + c * s->outputs + o, pairs, some, out);
      for (int u = 0; u < size; u++)
        for (int v = 0; v < size; v++)
          for (int64_t l = 0; l < some; l++) dw[((o + l) * s->channels + c) * taps + u * size + v] = out[u][v][l];
    }
}

/* im2col: [batch * out_high * out_wide, taps * channels]. */
static void patches(const Shape *s, const R *x, R *out) {
  int64_t line = s->size[1] * s->channels;
  for (int64_t b = 0; b < s->batch; b++)
    for (int64_t i = 0; i < s->out_high; i++)
      for (int64_t j = 0; j < s->out_wide; j++)
        for (int64_t u = 0; u < s->size[0]; u++, out += line) {
          int64_t y = i * s->stride[0] - s->pad[0] + u, z = j * s->stride[1] - s->pad[1];
          const R *from = x + ((b * s->high + y) * s->wide + z) * s->channels;
          if (y < 0 || y >= s->high) { for (int64_t l = 0; l < line; l++) out[l] = 0; }
          else if (z >= 0 && z + s->size[1] <= s->wide) { for (int64_t l = 0; l < line; l++) out[l] = from[l]; }
          else
            for (int64_t v = 0; v < s->size[1]; v++)
              for (int64_t c = 0; c < s->channels; c++)
                out[v * s->channels + c] = z + v >= 0 && z + v < s->wide ? from[v * s->channels + c] : 0;
        }
}

static void convolution(const Shape *s, const R *x, const R *w, const R *bias, R *y, R *space) {
  int64_t taps = s->size[0] * s->size[1], depth = taps * s->channels, pixels = s->batch * s->out_high * s->out_wide;
  R *kernel = space, *rest = space + depth * s->outputs;
  taps_first(s, w, kernel, 0);
  if (by_tiles(s)) {
    convolve_tiles(s, x, s->channels, s->high, s->wide, kernel, s->outputs, s->out_high, s->out_wide, s->pad[0], s->pad[1], bias, y, rest);
    return;
  }
  patches(s, x, rest);
  for (int64_t i = 0; bias && i < pixels; i++) memcpy(y + i * s->outputs, bias, s->outputs * sizeof(R));
  product(pixels, s->outputs, depth, rest, depth, 1, kernel, s->outputs, 1, y, s->outputs, 1, bias != NULL, 1, rest + pixels * depth);
}

static void weight_gradient(const Shape *s, const R *x, const R *dy, R *dw, R *space) {
  if (by_tiles(s)) { weight_gradient_tiles(s, x, dy, dw, space); return; }
  int64_t taps = s->size[0] * s->size[1], depth = taps * s->channels, pixels = s->batch * s->out_high * s->out_wide;
  R *columns = space, *result = space + pixels * depth, *rest = result + depth * s->outputs;
  patches(s, x, columns);
  product(depth, s->outputs, pixels, columns, 1, depth, dy, s->outputs, 1, result, s->outputs, 1, 0, 1, rest); /* [taps, channels, outputs] */
  for (int64_t o = 0; o < s->outputs; o++)
    for (int64_t c = 0; c < s->channels; c++)
      for (int64_t t = 0; t < taps; t++) dw[(o * s->channels + c) * taps + t] = result[(t * s->channels + c) * s->outputs + o];
}

static void input_gradient(const Shape *s, const R *dy, const R *w, R *dx, R *space) {
  int64_t taps = s->size[0] * s->size[1], depth = taps * s->channels, pixels = s->batch * s->out_high * s->out_wide;
  R *kernel = space, *rest = space + depth * s->outputs;
  if (by_tiles(s)) {
    taps_first(s, w, kernel, 1);
    convolve_tiles(s, dy, s->outputs, s->out_high, s->out_wide, kernel, s->channels, s->high, s->wide, s->size[0] - 1 - s->pad[0],
                   s->size[1] - 1 - s->pad[1], NULL, dx, rest);
    return;
  }
  taps_first(s, w, kernel, 0); /* [taps, channels, outputs] */
  product(pixels, depth, s->outputs, dy, s->outputs, 1, kernel, 1, s->outputs, rest, depth, 1, 0, 1, rest + pixels * depth);
  memset(dx, 0, s->batch * s->high * s->wide * s->channels * sizeof(R));
  const R *from = rest;
  for (int64_t b = 0; b < s->batch; b++)
    for (int64_t i = 0; i < s->out_high; i++)
      for (int64_t j = 0; j < s->out_wide; j++)
        for (int64_t u = 0; u < s->size[0]; u++)
          for (int64_t v = 0; v < s->size[1]; v++, from += s->channels) {
            int64_t y = i * s->stride[0] - s->pad[0] + u, z = j * s->stride[1] - s->pad[1] + v;
            if (y < 0 || y >= s->high || z < 0 || z >= s->wide) continue;
            R *to = dx + ((b * s->high + y) * s->wide + z) * s->channels;
            for (int64_t c = 0; c < s->channels; c++) to[c] += from[c];
          }
}

/* How many numbers of scratch space the three above need at most. */
static int64_t convolution_space(const Shape *s) {
  int64_t taps = s->size[0] * s->size[1], depth = taps * s->channels, pixels = s->batch * s->out_high * s->out_wide;
  int64_t most = s->channels > s->outputs ? s->channels : s->outputs;
  int64_t packed = DEPTH * ((depth > most ? depth : most) + 4 * LANES);
  if (!by_tiles(s)) return depth * s->outputs + pixels * depth + packed;
  int64_t points = 36 * (spread(s->channels * s->outputs) + spread(2 * BLOCK * s->channels) + spread(2 * BLOCK * s->outputs));
  return depth * s->outputs + points + 16 * 2 * BLOCK * s->outputs + packed;
}
