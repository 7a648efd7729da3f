"""The FP8 layer as an engine writes it in Triton: experts grouped, so that each is read once for all tokens that chose it. bench/baseline.py times it.

    route -> quantise x -> gate and up of each expert -> SiLU, quantise h -> down of each expert -> weighted sum        six kernels, no host work between them

Of the pairs (token, chosen expert) the first one of each expert does the work of all: its program gathers the tokens, up to 32, into the rows of one tensor-core
tile and streams ROWS rows of the expert's matrix past it. The other pairs' programs end at once, so that nothing needs to be sorted. Numbers are those of
bench/moe_paths.py, which also has the quantisation of x.
"""

from typing import Any, Optional

import torch
import triton
import triton.language as tl
from moe_paths import FP8, MoeBlock, Policy, _quantise_kernel, _scale
from torch import Tensor

MAX_TOKENS = 32


@triton.jit
def _route_kernel(
    logits, bias, ids, weights, scaling, E: tl.constexpr, E2: tl.constexpr, TOP_K: tl.constexpr, K2: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    SIGMOID: tl.constexpr, BIASED: tl.constexpr, RENORMALIZE: tl.constexpr,
):
    """One program: one token. Of equal experts the first is chosen."""
    token = tl.program_id(0)
    e = tl.arange(0, E2)
    inside = e < E
    nothing = float("-inf")
    v = tl.load(logits + token * E + e, mask=inside, other=nothing).to(tl.float32)
    if SIGMOID:
        score = tl.where(inside, 1.0 / (1.0 + tl.exp(-v)), 0.0)
    else:
        p = tl.exp(v - tl.max(v, 0))
        score = p / tl.sum(p, 0)
    select = score
    if BIASED:
        select = score + tl.load(bias + e, mask=inside, other=0.0)
    select = tl.where(inside, select, nothing)
    if GROUPS > 1:
        grouped = tl.reshape(select, (GROUPS, E2 // GROUPS))
        column = tl.arange(0, E2 // GROUPS)
        group = tl.arange(0, GROUPS)
        second = tl.where(column[None, :] == tl.argmax(grouped, 1)[:, None], nothing, grouped)
        best = tl.max(grouped, 1) + tl.max(second, 1)
        kept = group < 0
        for _ in tl.static_range(KEPT):
            g = tl.argmax(best, 0)
            kept = kept | (group == g)
            best = tl.where(group == g, nothing, best)
        select = tl.reshape(tl.where(kept[:, None], grouped, nothing), (E2,))
    k = tl.arange(0, K2)
    chosen = tl.zeros((K2,), tl.int32)
    weight = tl.zeros((K2,), tl.float32)
    for j in tl.static_range(TOP_K):
        a = tl.argmax(select, 0)
        chosen = tl.where(k == j, a, chosen)
        weight = tl.where(k == j, tl.sum(tl.where(e == a, score, 0.0), 0), weight)
        select = tl.where(e == a, nothing, select)
    if RENORMALIZE:
        weight = weight / tl.sum(weight, 0)
    tl.store(ids + token * TOP_K + k, chosen, mask=k < TOP_K)
    tl.store(weights + token * TOP_K + k, weight * scaling, mask=k < TOP_K)


@triton.jit(do_not_specialize=["tokens"])
def _experts_kernel(
    a, a_scale, ids, w, w_scale, out, tokens, C: tl.constexpr, R: tl.constexpr, TOP_K: tl.constexpr, K2: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr,
    OF_PAIRS: tl.constexpr,
):
    """One program: ROWS of the R rows of an expert's matrix [R, C], for all tokens that chose it. Rows of `a` and of its scales are pairs' (OF_PAIRS) or
    tokens', those of `out` pairs'."""
    pair, piece = tl.program_id(0), tl.program_id(1)
    expert = tl.load(ids + pair).to(tl.int64)
    t, k = tl.arange(0, M), tl.arange(0, K2)
    pairs = t[:, None] * TOP_K + k[None, :]
    there = (t[:, None] < tokens) & (k[None, :] < TOP_K)
    same = there & (tl.load(ids + pairs, mask=there, other=-1) == expert)
    if tl.min(tl.min(tl.where(same, pairs, M * TOP_K), 1), 0) < pair:
        return
    mine = tl.max(tl.where(same, pairs, -1), 1)  # each token's pair with this expert
    active = mine >= 0
    if OF_PAIRS:
        source = mine
    else:
        source = t
    c, rows = tl.arange(0, 128), piece * ROWS + tl.arange(0, ROWS)
    a_at = a + source[:, None] * C + c[None, :]
    w_at = w + expert * R * C + rows[None, :] * C + c[:, None]
    s_at = w_scale + (expert * (R // 128) + piece * ROWS // 128) * (C // 128)
    y = tl.zeros((M, ROWS), tl.float32)
    for b in range(C // 128):
        x = tl.load(a_at + b * 128, mask=active[:, None], other=0.0)
        s = tl.load(a_scale + source * (C // 128) + b, mask=active, other=0.0) * tl.load(s_at + b)
        y += tl.dot(x, tl.load(w_at + b * 128)) * s[:, None]
    tl.store(out + mine[:, None] * R + rows[None, :], y, mask=active[:, None])


@triton.jit
def _act_kernel(gate_up, hq, hs, N: tl.constexpr, UE8M0: tl.constexpr):
    """One program: 128 features of a pair."""
    pair, block = tl.program_id(0), tl.program_id(1)
    n = block * 128 + tl.arange(0, 128)
    gate, up = tl.load(gate_up + pair * 2 * N + n), tl.load(gate_up + pair * 2 * N + N + n)
    h = (gate / (1.0 + tl.exp(-gate)) * up).to(tl.bfloat16).to(tl.float32)
    s = _scale(tl.max(tl.abs(h), 0), UE8M0)
    tl.store(hq + pair * N + n, (h * (1.0 / s)).to(hq.dtype.element_ty))
    tl.store(hs + pair * (N // 128) + block, s)


@triton.jit
def _sum_kernel(parts, weights, out, K: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr):
    """One program: ROWS rows of a token's output."""
    token, piece = tl.program_id(0), tl.program_id(1)
    rows = piece * ROWS + tl.arange(0, ROWS)
    y = tl.zeros((ROWS,), tl.float32)
    for rank in range(TOP_K):
        pair = token * TOP_K + rank
        y += tl.load(parts + pair * K + rows) * tl.load(weights + pair)
    tl.store(out + token * K + rows, y.to(tl.bfloat16))


class Grouped:
    """The kernels of one shape, with the memory that they hand each other. `rows` are the values of ROWS to choose from: what is best depends on the tokens."""

    rows = (32, 64, 128)

    def __init__(self, experts: int, hidden: int, intermediate: int, policy: Policy, ue8m0: bool, max_tokens: int, device: Any) -> None:
        if max_tokens > MAX_TOKENS or hidden % 128 or intermediate % 128 or policy.groups > 1 and triton.next_power_of_2(experts) != experts:
            raise SystemExit(f"the Triton path has up to {MAX_TOKENS} tokens, whole blocks of 128, and groups of a power of two experts")
        self.experts, self.hidden, self.intermediate, self.policy, self.ue8m0 = experts, hidden, intermediate, policy, ue8m0
        pairs = max_tokens * policy.top_k

        def empty(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(rows, columns, dtype=dtype, device=device)

        self.ids, self.weights = empty(max_tokens, policy.top_k, torch.int32), empty(max_tokens, policy.top_k, torch.float32)
        self.xq, self.xs = empty(max_tokens, hidden, FP8), empty(max_tokens, hidden // 128, torch.float32)
        self.gate_up, self.parts = empty(pairs, 2 * intermediate, torch.float32), empty(pairs, hidden, torch.float32)
        self.hq, self.hs = empty(pairs, intermediate, FP8), empty(pairs, intermediate // 128, torch.float32)

    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in vars(self).values() if isinstance(t, Tensor))

    def route(self, logits: Tensor, bias: Optional[Tensor]) -> tuple[Tensor, Tensor]:
        p, tokens = self.policy, logits.shape[0]
        _route_kernel[(tokens,)](
            logits, logits if bias is None else bias, self.ids, self.weights, p.scaling, self.experts, triton.next_power_of_2(self.experts), p.top_k,
            triton.next_power_of_2(p.top_k), p.groups, p.groups_kept, p.score == "sigmoid", bias is not None, p.renormalize, num_warps=1,
        )
        return self.ids[:tokens], self.weights[:tokens]

    def run(self, block: MoeBlock, x: Tensor, logits: Tensor, rows: int) -> Tensor:
        (tokens, hidden), n, top_k, q = x.shape, self.intermediate, self.policy.top_k, block.q
        pairs, shape = tokens * top_k, (top_k, triton.next_power_of_2(top_k), 16 if tokens <= 16 else 32, rows)
        out = torch.empty_like(x)
        self.route(logits, block.bias)
        _quantise_kernel[(tokens, hidden // 128)](x, self.xq, self.xs, hidden, self.ue8m0, num_warps=1)
        _experts_kernel[(pairs, 2 * n // rows)](
            self.xq, self.xs, self.ids, q["w13"], q["s13"], self.gate_up, tokens, hidden, 2 * n, *shape, False, num_warps=4, num_stages=4
        )
        _act_kernel[(pairs, n // 128)](self.gate_up, self.hq, self.hs, n, self.ue8m0, num_warps=1)
        _experts_kernel[(pairs, hidden // rows)](
            self.hq, self.hs, self.ids, q["w2"], q["s2"], self.parts, tokens, n, hidden, *shape, True, num_warps=4, num_stages=4
        )
        _sum_kernel[(tokens, hidden // 128)](self.parts, self.weights, out, hidden, top_k, 128, num_warps=1)
        return out
