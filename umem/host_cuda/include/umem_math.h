// exp, log and tanh of a float, without branches, so that vector instructions can do them: within
// 2 units in the last place, as on a GPU. The polynomials were fitted to the least relative error.
#pragma once

static inline float umem_power_of_2(int n) { return umem_bits<float>((n + 127) << 23); }  // a normal one

static inline float umem_exp(float x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: a sum with it has no fraction, and ends in the number
  const float low = x < -104.0f ? -104.0f : x, clamped = low > 89.0f ? 89.0f : low;
  const float sum = clamped * 1.44269504f + magic, n = sum - magic;
  const int number = umem_bits<int>(sum) - umem_bits<int>(magic);
  float r = n * -0.693359375f + clamped;
  r = n * 2.12194440e-4f + r;
  float p = 0.0013950476422905922f;
  p = p * r + 0.008368882350623608f;
  p = p * r + 0.04166620597243309f;
  p = p * r + 0.166665181517601f;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
  const int half = number >> 1;  // in two steps: the result may be subnormal
  return p * umem_power_of_2(half) * umem_power_of_2(number - half);
}

static inline float umem_log(float x) {
  const bool small = x < 1.17549435e-38f;  // subnormal
  const float scaled = small ? x * 8388608.0f : x;
  const int bits = umem_bits<int>(scaled), above = bits - 0x3f3504f3;  // of sqrt(1/2)
  const float e = (float)((above >> 23) - (small ? 23 : 0));
  const float f = umem_bits<float>((above & 0x7fffff) + 0x3f3504f3) - 1.0f;
  float p = 0.06746601313352585f;
  p = p * f - 0.11675640940666199f;
  p = p * f + 0.11888174712657928f;
  p = p * f - 0.12405591458082199f;
  p = p * f + 0.14219550788402557f;
  p = p * f - 0.1666799634695053f;
  p = p * f + 0.2000211924314499f;
  p = p * f - 0.25000008940696716f;
  p = p * f + 0.3333331346511841f;
  const float square = f * f;
  float y = p * f * square + e * -2.12194440e-4f;
  y = square * -0.5f + y;
  y = e * 0.693359375f + (f + y);
  const float infinity = __builtin_inff();
  y = x < infinity ? y : x;  // infinite, or NaN
  y = x == 0.0f ? -infinity : y;
  return x < 0.0f ? __builtin_nanf("") : y;
}

static inline float umem_tanh(float x) {
  const float size = __builtin_fabsf(x), square = x * x;
  float p = -0.005717036779969931f;
  p = p * square + 0.020650578662753105f;
  p = p * square - 0.05374349653720856f;
  p = p * square + 0.13331490755081177f;
  p = p * square - 0.3333328366279602f;
  const float near = p * square * size + size;
  const float far = 1.0f - 2.0f / (umem_exp(2.0f * size) + 1.0f);
  return __builtin_copysignf(size < 0.625f ? near : far, x);
}
