/* GroupNorm of images with the channels last in memory: [images, pixels, channels].

   n has the numbers of images, pixels, channels and groups. A group is some channels that follow
   one another, in all pixels of an image. `stats` [images, groups, 2] are its mean and 1 / sd.
   What is the same for all pixels is computed first, per channel, so that images are passed over in
   whole vectors, whatever the size of a group. */

/* The sums over an image's pixels of x - shift, or of its squares, for the channels from c on. */
static V over_pixels(const R *x, int64_t pixels, int64_t channels, int64_t some, V shift,
                     int squared) {
  V sum[4] = {{0}, {0}, {0}, {0}}; /* four, because an addition takes as many cycles */
  int64_t p = 0;
  for (; p + 4 <= pixels; p += 4)
    UNROLL for (int i = 0; i < 4; i++) {
      V apart = load_masked(x + (p + i) * channels, some) - shift;
      if (squared) apart *= apart;
      sum[i] += apart;
    }
  for (; p < pixels; p++) {
    V apart = load_masked(x + p * channels, some) - shift;
    if (squared) apart *= apart;
    sum[0] += apart;
  }
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* `space` holds a number per channel, and then a vector more. */
static void group_stats(const int64_t *n, const R *x, R eps, R *stats, R *space) {
  int64_t pixels = n[1], channels = n[2], groups = n[3], each = channels / groups;
  R count = (R)(pixels * each);
  for (int64_t b = 0; b < n[0]; b++, x += pixels * channels, stats += 2 * groups)
    for (int squared = 0; squared < 2; squared++) {
      for (int64_t c = 0; c < channels; c += LANES) {
        V mean = {0};
        for (int64_t l = 0; squared && l < LANES && c + l < channels; l++)
          mean[l] = stats[2 * ((c + l) / each)];
        store(space + c, over_pixels(x + c, pixels, channels, channels - c, mean, squared));
      }
      for (int64_t g = 0; g < groups; g++) {
        R sum = 0;
        for (int64_t c = g * each; c < (g + 1) * each; c++) sum += space[c];
        if (squared) stats[2 * g + 1] = 1 / (R)sqrt((double)(sum / count + eps));
        else stats[2 * g] = sum / count;
      }
    }
}

/* y = x scale + shift; these are [images, channels]. */
static void group_scaled(const int64_t *n, const R *x, const R *scale, const R *shift, R *y) {
  int64_t size = n[1] * n[2];
  for (int64_t b = 0; b < n[0]; b++)
    for (int64_t c = 0; c < n[2]; c += LANES) {
      int64_t some = n[2] - c;
      V by = load_masked(scale + b * n[2] + c, some);
      V more = load_masked(shift + b * n[2] + c, some);
      for (int64_t at = b * size + c; at < (b + 1) * size; at += n[2])
        store_masked(y + at, load_masked(x + at, some) * by + more, some);
    }
}

/* [images, 2, channels]: the sums over the pixels of g, and of g times the normalised x. */
static void group_sums(const int64_t *n, const R *g, const R *x, const R *stats, R *sums) {
  int64_t channels = n[2], size = n[1] * channels, each = channels / n[3];
  for (int64_t b = 0; b < n[0]; b++)
    for (int64_t c = 0; c < n[2]; c += LANES) {
      int64_t some = n[2] - c;
      V mean = {0}, scale = {0}, first = {0}, second = {0}, third = {0}, fourth = {0};
      for (int64_t l = 0; l < LANES && l < some; l++) {
        const R *own = stats + 2 * (b * n[3] + (c + l) / each);
        mean[l] = own[0];
        scale[l] = own[1];
      }
      const R *from = g + b * size + c, *with = x + b * size + c, *end = from + size - c;
      for (; from + channels < end; from += 2 * channels, with += 2 * channels) {
        V one = load_masked(from, some), two = load_masked(from + channels, some);
        first += one;
        second += one * (load_masked(with, some) - mean);
        third += two;
        fourth += two * (load_masked(with + channels, some) - mean);
      }
      if (from < end) {
        first += load_masked(from, some);
        second += load_masked(from, some) * (load_masked(with, some) - mean);
      }
      R *out = sums + 2 * b * channels + c;
      store_masked(out, first + third, some);
      store_masked(out + channels, (second + fourth) * scale, some);
    }
}

/* [images, 3, channels]: what g, x and 1 are multiplied with, so that their sum is dx. With h the
   normalised x and v = g weight, that is dx = (v - mean(v) - h mean(v h)) / sd. */
static void group_factors(const int64_t *n, const R *sums, const R *stats, const R *weight,
                          R *factors) {
  int64_t channels = n[2], groups = n[3], each = channels / groups;
  R count = (R)(n[1] * each);
  for (int64_t b = 0; b < n[0]; b++, sums += 2 * channels, factors += 3 * channels)
    for (int64_t g = 0; g < groups; g++, stats += 2) {
      R mean = stats[0], scale = stats[1], level = 0, slope = 0;
      for (int64_t c = g * each; c < (g + 1) * each; c++) {
        R by = weight ? weight[c] : 1;
        level += by * sums[c];
        slope += by * sums[channels + c];
      }
      level *= scale / count;
      slope *= scale * scale / count;
      for (int64_t c = g * each; c < (g + 1) * each; c++) {
        factors[c] = scale * (weight ? weight[c] : 1);
        factors[channels + c] = -slope;
        factors[2 * channels + c] = slope * mean - level;
      }
    }
}

static void group_backward(const int64_t *n, const R *g, const R *x, const R *factors, R *dx) {
  int64_t size = n[1] * n[2];
  for (int64_t b = 0; b < n[0]; b++)
    for (int64_t c = 0; c < n[2]; c += LANES) {
      int64_t some = n[2] - c;
      const R *own = factors + 3 * b * n[2] + c;
      V of_g = load_masked(own, some), of_x = load_masked(own + n[2], some);
      V more = load_masked(own + 2 * n[2], some);
      for (int64_t at = b * size + c; at < (b + 1) * size; at += n[2]) {
        V from_x = load_masked(x + at, some) * of_x + more;
        store_masked(dx + at, load_masked(g + at, some) * of_g + from_x, some);
      }
    }
}
