"""Functions of CUDA's headers: each gives in a kernel what CUDA's documentation says of it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
from project import ROOT
from scipy import special
from software_programs import needs_compiler, needs_cupy, run

pytestmark = [needs_cupy, needs_compiler]
HEADER = next((ROOT / "umem").glob("**/include/umem_functions.h"))
CALLS: dict[str, float] = {
    # integers: by Python's, whose shifts round down
    "__mulhi(-7, 1 << 30)": (-7 << 30) >> 32,
    "__umulhi(7u, 1u << 31)": (7 << 31) >> 32,
    "__mul64hi(-3LL, 1LL << 62)": (-3 << 62) >> 64,
    "__umul64hi(3ull, 1ull << 63)": (3 << 63) >> 64,
    "__mul24(0x1000003, -5)": -15,
    "__umul24(0x1000003u, 5u)": 15,
    "__sad(3, -4, 5u)": 12,
    "__usad(3u, 9u, 5u)": 11,
    "__hadd(-3, 6)": 1,
    "__uhadd(3u, 6u)": 4,
    "__rhadd(-3, 6)": 2,
    "__urhadd(3u, 6u)": 5,
    "__brev(1u)": 1 << 31,
    "__brevll(1ull)": 1 << 63,
    "__byte_perm(0x03020100u, 0x07060504u, 0x5140u)": 0x05010400,
    "__byte_perm(0x80u, 0u, 0x0008u)": 0x808080FF,
    "__funnelshift_l(0x80000000u, 1u, 1u)": 3,
    "__funnelshift_r(1u, 3u, 1u)": 1 << 31,
    "__dp4a(0x010203FF, 0x01010101, 10)": 1 + 2 + 3 - 1 + 10,
    "ullmax(3ull, ~0ull)": 2**64 - 1,
    # conversions
    "__double2float_rn(0.1)": float(np.float32(0.1)),
    "__double2hiint(1.)": 0x3FF00000,
    "__double2loint(1.0000000000000002)": 1,
    "__hiloint2double(0x3ff00000, 1)": 1 + 2**-52,
    "__int2double_rn(-3)": -3,
    "__int2float_rn(16777217)": 1 << 24,
    "__uint2double_rn(4294967295u)": 2**32 - 1,
    "__uint2float_rn(4294967295u)": 2**32,
    "__ll2double_rn(-3LL)": -3,
    "__ll2float_rn(16777217LL)": 1 << 24,
    "__ull2double_rn(~0ull)": 2**64,
    "__ull2float_rn(~0ull)": 2**64,
    # arithmetic that says how it rounds
    "__saturatef(1.5f)": 1,
    "__frcp_rn(4.f)": 0.25,
    "__frsqrt_rn(4.f)": 0.5,
    "__fsub_rn(3.f, 1.f)": 2,
    "__fdiv_rn(1.f, 4.f)": 0.25,
    "__fmaf_rn(2.f, 3.f, 1.f)": 7,
    "__drcp_rn(4.)": 0.25,
    "__dsub_rn(3., 1.)": 2,
    "__ddiv_rn(1., 4.)": 0.25,
    "__dsqrt_rn(9.)": 3,
    "__fma_rn(2., 3., 1.)": 7,
    # functions: by SciPy
    "rsqrt(4.)": 0.5,
    "rcbrt(8.)": 0.5,
    "rhypot(3., 4.)": 0.2,
    "norm3d(2., 3., 6.)": 7,
    "norm3df(2.f, 3.f, 6.f)": 7,
    "fdivide(1., 4.)": 0.25,
    "sinpi(2.5)": 1,
    "cospi(3.)": -1,
    "erfinv(0.3)": special.erfinv(0.3),
    "erfcinv(0.3)": special.erfcinv(0.3),
    "erfcx(7.)": special.erfcx(7.0),
    "normcdf(0.7)": special.ndtr(0.7),
    "normcdfinv(0.7)": special.ndtri(0.7),
    "cyl_bessel_i0(1.5)": special.i0(1.5),
    "cyl_bessel_i1(-1.5)": special.i1(-1.5),
    "j0(1.5f)": special.j0(1.5),
    "j1(1.5f)": special.j1(1.5),
    "y0(1.5f)": special.y0(1.5),
    "y1(1.5f)": special.y1(1.5),
    "exp10(2.f)": 100,
    "__sinf(0.5f)": math.sin(0.5),
    "__cosf(0.5f)": math.cos(0.5),
    "__tanf(0.5f)": math.tan(0.5),
    "__exp10f(2.f)": 100,
    "__log2f(8.f)": 3,
    "__log10f(100.f)": 2,
    "__powf(2.f, 3.f)": 8,
    "(__sincosf(0.5f, &s, &c), s + 10 * c)": math.sin(0.5) + 10 * math.cos(0.5),
    "jn(2, 1.5f)": special.jv(2, 1.5),
    "yn(2, 1.5f)": special.yn(2, 1.5),
    "(sincos(0.5f, &s, &c), s + 10 * c)": math.sin(0.5) + 10 * math.cos(0.5),
    "(sincospi(0.5f, &s, &c), s + 10 * c)": 1,
    "(sincospif(1.f, &s, &c), s + 10 * c)": -10,
}
"""Calls in C++, and what they give."""
NAME = re.compile(
    r"^(?:static inline (?:[\w:]+ )+|#define (?=__))(\w+)\(|UMEM_(?:MATH|FLOAT)\((\w+)", re.M
)


def test_functions_of_the_headers_give_what_is_said_of_them(kernel_cache: Path) -> None:
    lines = "\n".join(f"  x[{number}] = (double)({call});" for number, call in enumerate(CALLS))
    source = f'extern "C" __global__ void k(double* x) {{\n  float s, c;\n{lines}\n}}'
    program = f"""
import json
x = cp.zeros({len(CALLS)})
cp.RawKernel({source!r}, "k")((1,), (1,), (x,))
print(json.dumps(x.tolist()))
"""
    found = json.loads(run(program, kernel_cache))
    for (call, expected), value in zip(CALLS.items(), found, strict=True):
        assert math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-6), call


def test_every_function_of_the_header_is_called_by_a_test() -> None:
    names = {name for pair in NAME.findall(HEADER.read_text(encoding="utf-8")) for name in pair}
    own = {name for name in names if name not in ("", "name") and not name.startswith("umem_")}
    texts = [path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("*.py")]
    called = set(re.findall(r"\b(\w+)\(", "\n".join(texts)))
    assert len(own) > 50
    assert not sorted(own - called)
