// Random numbers of a thread: what kernels use of cuRAND's header of this name. The generators are as their
// authors published them, and the sizes of states are cuRAND's; the numbers may be others than cuRAND's.
#pragma once

// -- Philox4x32-10: Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3. SC 2011 ----------

static inline uint4 umem_philox(uint4 counter, uint2 key) {
  for (int i = 0; i < 10; i++, key.x += 0x9e3779b9u, key.y += 0xbb67ae85u) {
    const unsigned long long a = 0xd2511f53ull * counter.x, b = 0xcd9e8d57ull * counter.z;
    counter = {(unsigned int)(b >> 32) ^ counter.y ^ key.x, (unsigned int)b,
               (unsigned int)(a >> 32) ^ counter.w ^ key.y, (unsigned int)a};
  }
  return counter;
}
// The counter's lower half counts fours of numbers, its upper half is the subsequence.
struct curandStatePhilox4_32_10 {
  uint4 counter;
  unsigned int output[4];
  uint2 key;
  unsigned int place;  // in the output
  int has_normal, has_normal_double;
  float normal;
  double normal_double;
};
typedef curandStatePhilox4_32_10 curandStatePhilox4_32_10_t;
static_assert(sizeof(curandStatePhilox4_32_10_t) == 64, "as programs allocate it");

static inline bool umem_add(unsigned int& low, unsigned int& high, unsigned long long n) {
  const unsigned long long sum = ((unsigned long long)high << 32 | low) + n;
  low = (unsigned int)sum;
  high = (unsigned int)(sum >> 32);
  return sum < n;  // it began again at zero
}
static inline void umem_move(curandStatePhilox4_32_10_t* s, unsigned long long fours) {
  if (umem_add(s->counter.x, s->counter.y, fours)) umem_add(s->counter.z, s->counter.w, 1);
  const uint4 made = umem_philox(s->counter, s->key);
  memcpy(s->output, &made, sizeof made);
}
static inline void skipahead(unsigned long long n, curandStatePhilox4_32_10_t* s) {
  const unsigned int place = s->place + (unsigned int)(n & 3);
  s->place = place & 3;
  umem_move(s, (n >> 2) + (place >> 2));
}
static inline void skipahead_sequence(unsigned long long n, curandStatePhilox4_32_10_t* s) {
  umem_add(s->counter.z, s->counter.w, n);
  umem_move(s, 0);
}
static inline unsigned int curand(curandStatePhilox4_32_10_t* s) {
  const unsigned int found = s->output[s->place++];
  if (s->place == 4) {
    s->place = 0;
    umem_move(s, 1);
  }
  return found;
}
static inline void umem_seed(curandStatePhilox4_32_10_t* s, unsigned long long seed) {
  s->key = {(unsigned int)seed, (unsigned int)(seed >> 32)};
}

// -- XORWOW: Marsaglia: Xorshift RNGs. Journal of Statistical Software 8 (14), 2003 ----------------------------

struct curandStateXORWOW {
  unsigned int d, v[5];
  int has_normal, has_normal_double;
  float normal;
  double normal_double;
};
typedef curandStateXORWOW curandStateXORWOW_t, curandState_t, curandState;
static_assert(sizeof(curandState) == 48, "as programs allocate it");

static inline void umem_step(unsigned int* v) {
  const unsigned int t = v[0] ^ v[0] >> 2;
  for (int i = 0; i < 4; i++) v[i] = v[i + 1];
  v[4] ^= v[4] << 4 ^ t ^ t << 1;
}
static inline unsigned int curand(curandStateXORWOW_t* s) {
  umem_step(s->v);
  return s->v[4] + (s->d += 362437u);
}
// A step is linear over bits: the powers of its matrix, as what each bit alone becomes in 2^power steps.
struct UmemXorwowSteps {
  unsigned int becomes[160][5];
  static const UmemXorwowSteps& of(int power) {
    static UmemXorwowSteps all[67 + 64];
    static int known = 0;
    for (; known <= power; known++)
      for (int bit = 0; bit < 160; bit++) {
        unsigned int* v = all[known].becomes[bit];
        v[bit / 32] = 1u << bit % 32;
        if (!known) umem_step(v);
        for (int i = 0; known && i < 2; i++) all[known - 1].take(v);
      }
    return all[power];
  }
  void take(unsigned int* v) const {
    unsigned int sum[5] = {};
    for (int bit = 0; bit < 160; bit++)
      for (int i = 0; v[bit / 32] >> bit % 32 & 1u && i < 5; i++) sum[i] ^= becomes[bit][i];
    memcpy(v, sum, sizeof sum);
  }
};
static inline void skipahead(unsigned long long n, curandStateXORWOW_t* s) {
  s->d += 362437u * (unsigned int)n;
  for (int power = 0; n; n >>= 1, power++)
    if (n & 1) UmemXorwowSteps::of(power).take(s->v);
}
static inline void skipahead_sequence(unsigned long long n, curandStateXORWOW_t* s) {  // each of 2^67 numbers
  for (int power = 67; n; n >>= 1, power++)
    if (n & 1) UmemXorwowSteps::of(power).take(s->v);
}
static inline void umem_seed(curandStateXORWOW_t* s, unsigned long long seed) {
  const unsigned int begin[5] = {123456789u, 362436069u, 521288629u, 88675123u, 5783321u};
  const uint4 mixed = umem_philox({1, 0, 0, 0}, {(unsigned int)seed, (unsigned int)(seed >> 32)});
  const unsigned int mix[5] = {mixed.x, mixed.y, mixed.z, mixed.w, 0};  // the last keeps v from being zero
  for (int i = 0; i < 5; i++) s->v[i] = seed ? begin[i] ^ mix[i] : begin[i];
  s->d = 6615241u + (seed ? (unsigned int)(seed ^ seed >> 32) : 0);
}

// -- distributions -----------------------------------------------------------------------------

template <class S>
static inline void curand_init(unsigned long long seed, unsigned long long subsequence, unsigned long long offset, S* s) {
  *s = S();
  umem_seed(s, seed);
  skipahead_sequence(subsequence, s);
  skipahead(offset, s);
}
static inline float umem_uniform(unsigned int x) { return (float)x * 2.3283064e-10f + 1.16415322e-10f; }  // (0, 1]
static inline double umem_uniform(unsigned int x, unsigned int y) {
  return (double)((((unsigned long long)y << 32 | x) >> 11) + 1) * 1.1102230246251565e-16;
}
template <class S> static inline float curand_uniform(S* s) { return umem_uniform(curand(s)); }
template <class S> static inline double curand_uniform_double(S* s) {
  const unsigned int x = curand(s);
  return umem_uniform(x, curand(s));
}
// Box and Muller's pair of normal numbers from two uniform ones.
static inline float2 umem_normals(float u, float v) {
  const float size = sqrtf(-2 * logf(u)), turn = 6.2831853f * v;
  return {size * sinf(turn), size * cosf(turn)};
}
static inline double2 umem_normals(double u, double v) {
  const double size = std::sqrt(-2 * std::log(u)), turn = 6.283185307179586 * v;
  return {size * std::sin(turn), size * std::cos(turn)};
}
template <class S> static inline float2 curand_normal2(S* s) {
  const float u = curand_uniform(s);
  return umem_normals(u, curand_uniform(s));
}
template <class S> static inline double2 curand_normal2_double(S* s) {
  const double u = curand_uniform_double(s);
  return umem_normals(u, curand_uniform_double(s));
}
template <class S> static inline float curand_normal(S* s) {
  if ((s->has_normal = !s->has_normal)) {
    const float2 pair = curand_normal2(s);
    s->normal = pair.y;
    return pair.x;
  }
  return s->normal;
}
template <class S> static inline double curand_normal_double(S* s) {
  if ((s->has_normal_double = !s->has_normal_double)) {
    const double2 pair = curand_normal2_double(s);
    s->normal_double = pair.y;
    return pair.x;
  }
  return s->normal_double;
}
template <class S> static inline float curand_log_normal(S* s, float mean, float deviation) {
  return expf(mean + deviation * curand_normal(s));
}
template <class S> static inline double curand_log_normal_double(S* s, double mean, double deviation) {
  return std::exp(mean + deviation * curand_normal_double(s));
}
static inline uint4 curand4(curandStatePhilox4_32_10_t* s) {
  const unsigned int x = curand(s), y = curand(s), z = curand(s);
  return {x, y, z, curand(s)};
}
static inline float4 curand_uniform4(curandStatePhilox4_32_10_t* s) {
  const uint4 x = curand4(s);
  return {umem_uniform(x.x), umem_uniform(x.y), umem_uniform(x.z), umem_uniform(x.w)};
}
static inline float4 curand_normal4(curandStatePhilox4_32_10_t* s) {
  const float2 one = curand_normal2(s), other = curand_normal2(s);
  return {one.x, one.y, other.x, other.y};
}
