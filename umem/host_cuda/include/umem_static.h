// Functions that CuPy's headers define for every kernel, declared so that only kernels that use
// one have its code: included before them.
#pragma once
static int _floor_divide(int, int);
static long long _floor_divide(long long, long long);
static unsigned int _floor_divide(unsigned int, unsigned int);
static unsigned long long _floor_divide(unsigned long long, unsigned long long);
static float _floor_divide(float, float);
static double _floor_divide(double, double);
static long long atomicAdd(long long*, long long);
static float atomicMax(float*, float);
static double atomicMax(double*, double);
static float atomicMin(float*, float);
static double atomicMin(double*, double);
