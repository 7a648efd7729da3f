"""The operator in plain Python, slow and short: what a package's kernel must compute (docs/accuracy.md has the definition)."""

from __future__ import annotations

import math
import random
import struct
from operator import mul
from typing import Sequence


def _e4m3(code: int) -> float:
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return math.nan
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


E4M3 = [_e4m3(code) for code in range(256)]


def f32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def bf16_bits(value: float) -> int:
    bits = struct.unpack("I", struct.pack("f", value))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def bf16(bits: int) -> float:
    return struct.unpack("f", struct.pack("I", bits << 16))[0]


def to_e4m3(value: float) -> float:
    """Nearest e4m3 value, ties to even, saturating."""
    size = min(abs(value), 448.0)
    if size == 0:
        return 0.0
    step = 2.0 ** (max(math.floor(math.log2(size)), -6) - 3)
    rounded = round(size / step) * step  # round() goes to even
    return math.copysign(min(rounded, 448.0), value)


def quantise(values: Sequence[float]) -> list[float]:
    """e4m3 with one f32 scale for each 128 values, back as numbers."""
    out: list[float] = []
    for first in range(0, len(values), 128):
        group = values[first : first + 128]
        scale = f32(max(max(map(abs, group)), 1e-10) / 448.0)
        inverse = f32(1.0 / scale)
        out += [to_e4m3(f32(v * inverse)) * scale for v in group]
    return out


def route(logits: Sequence[float], top_k: int) -> list[tuple[int, float]]:
    """Softmax, top-k, renormalised; ties go to the lowest index."""
    chosen = sorted(range(len(logits)), key=lambda e: (-logits[e], e))[:top_k]
    weights = [math.exp(logits[e] - logits[chosen[0]]) for e in chosen]
    return [(e, w / sum(weights)) for e, w in zip(chosen, weights)]


class Layer:
    """Random weights in the checkpoint's layout: w13 [E][2N][K], w2 [E][K][N] as bytes, scales [E][2][N/128][K/128] and [E][K/128][N/128] as floats."""

    def __init__(self, experts: int, top_k: int, hidden: int, intermediate: int, seed: int) -> None:
        self.experts, self.top_k, self.k, self.n = experts, top_k, hidden, intermediate
        rng = random.Random(seed)
        finite = bytes(code if code & 0x7F != 0x7F else code - 1 for code in range(256))
        self.w13 = rng.randbytes(experts * 2 * intermediate * hidden).translate(finite)
        self.w2 = rng.randbytes(experts * hidden * intermediate).translate(finite)
        blocks = experts * (intermediate // 128) * (hidden // 128)
        self.s13 = [f32(rng.uniform(1e-5, 4e-5)) for _ in range(2 * blocks)]
        self.s2 = [f32(rng.uniform(1e-5, 4e-5)) for _ in range(blocks)]

    def _row(self, weights: bytes, scales: Sequence[float], row: int, columns: int, x: Sequence[float]) -> float:
        start, scale = row * columns, row // 128 * (columns // 128)
        values = [E4M3[code] for code in weights[start : start + columns]]
        return sum(sum(map(mul, values[b : b + 128], x[b : b + 128])) * scales[scale + b // 128] for b in range(0, columns, 128))

    def token(self, x: Sequence[float], chosen: Sequence[tuple[int, float]]) -> list[float]:
        """One token through its experts."""
        y = [0.0] * self.k
        xq = quantise(x)
        for expert, weight in chosen:
            first = expert * 2 * self.n
            h = []
            for f in range(self.n):
                gate = self._row(self.w13, self.s13, first + f, self.k, xq)
                up = self._row(self.w13, self.s13, first + self.n + f, self.k, xq)
                h.append(bf16(bf16_bits(gate / (1 + math.exp(-gate)) * up)))
            hq = quantise(h)
            for c in range(self.k):
                y[c] += weight * self._row(self.w2, self.s2, expert * self.k + c, self.n, hq)
        return y
