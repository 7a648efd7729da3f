"""The MoE layer of bench/decode.py in four ways: bf16 (the unquantised model), torch and triton (the FP8 layer written straightforwardly), moeforge.

All FP8 ways share one set of weights in the checkpoint's layout, quantised here from the bf16 ones: e4m3 with one f32 scale for each 128x128 block; x and h are
quantised per token and 128 columns (docs/accuracy.md). Nothing here needs a GPU but the triton and moeforge ways; the tests run triton's interpreter.
"""

import dataclasses
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

FP8 = torch.float8_e4m3fn
E4M3_MAX = 448.0


@dataclasses.dataclass(frozen=True)
class Policy:
    """How router logits select and weigh experts."""

    score: str = "softmax"  # or sigmoid
    top_k: int = 8
    renormalize: bool = True
    groups: int = 1
    groups_kept: int = 1
    scaling: float = 1.0


def route(logits: Tensor, policy: Policy, bias: Optional[Tensor] = None, stable: bool = False) -> tuple[Tensor, Tensor]:
    """ids [T, k] int32 and weights [T, k] float32. Which of equal experts is chosen is torch's choice, or if `stable` the first, as docs/accuracy.md has it."""
    scores = logits.float().softmax(-1) if policy.score == "softmax" else logits.float().sigmoid()
    select = scores if bias is None else scores + bias
    if policy.groups > 1:
        grouped = select.view(select.shape[0], policy.groups, -1)
        best = grouped.topk(2, dim=-1)[0].sum(-1).topk(policy.groups_kept, dim=-1)[1]
        kept = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=logits.device).scatter_(1, best, True)
        select = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).view_as(select)
    ids = select.sort(dim=-1, descending=True, stable=True)[1][:, : policy.top_k] if stable else select.topk(policy.top_k, dim=-1)[1]
    weights = scores.gather(1, ids)
    if policy.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids.int(), weights * policy.scaling


# ---- quantisation ----
def quantise_weight(w: Tensor) -> tuple[Tensor, Tensor]:
    """[E, R, C] to e4m3 and scales [E, R / 128, C / 128], expert by expert to bound the memory."""
    experts, rows, columns = w.shape
    q = torch.empty(w.shape, dtype=FP8, device=w.device)
    s = torch.empty(experts, rows // 128, columns // 128, dtype=torch.float32, device=w.device)
    for e in range(experts):
        blocks = w[e].float().view(rows // 128, 128, columns // 128, 128)
        s[e] = blocks.abs().amax((1, 3)).clamp_min(1e-10) / E4M3_MAX
        q[e] = (blocks / s[e].view(rows // 128, 1, columns // 128, 1)).clamp(-E4M3_MAX, E4M3_MAX).view(rows, columns).to(FP8)
    return q, s


def dequantise(q: Tensor, s: Tensor) -> Tensor:
    """[..., R, C] back to float32."""
    return q.float() * s.repeat_interleave(128, -2).repeat_interleave(128, -1)


def quantise_rows(x: Tensor, ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """[T, C] to e4m3 and scales [T, C / 128]."""
    groups = x.float().view(x.shape[0], -1, 128)
    s = groups.abs().amax(-1).clamp_min(1e-10) / E4M3_MAX
    if ue8m0:
        s = torch.exp2(torch.ceil(torch.log2(s)))
    q = (groups * (1.0 / s).unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    return q.view(x.shape).to(FP8), s


def fake_quantise(x: Tensor, ue8m0: bool) -> Tensor:
    q, s = quantise_rows(x, ue8m0)
    return q.float() * s.repeat_interleave(128, -1)


# ---- triton ----
try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None  # type: ignore[assignment]

if triton is not None:

    @triton.jit
    def _scale(amax, UE8M0: tl.constexpr):
        s = tl.maximum(amax, 1e-10) / 448.0
        if UE8M0:
            s = tl.exp2(tl.ceil(tl.log2(s)))
        return s

    @triton.jit
    def _quantise_kernel(x, q, s, C: tl.constexpr, UE8M0: tl.constexpr):
        token, block = tl.program_id(0), tl.program_id(1)
        at = token * C + block * 128 + tl.arange(0, 128)
        v = tl.load(x + at).to(tl.float32)
        scale = _scale(tl.max(tl.abs(v), 0), UE8M0)
        tl.store(q + at, (v * (1.0 / scale)).to(q.dtype.element_ty))
        tl.store(s + token * (C // 128) + block, scale)

    @triton.jit
    def _up_kernel(xq, xs, ids, w13, s13, hq, hs, K: tl.constexpr, N: tl.constexpr, TOP_K: tl.constexpr, UE8M0: tl.constexpr):
        """One program: 128 features of one (token, expert), which are one quantisation group of h."""
        pair, block = tl.program_id(0), tl.program_id(1)
        expert = tl.load(ids + pair).to(tl.int64)
        token = pair // TOP_K
        k = tl.arange(0, 128)
        rows = tl.arange(0, 128)
        gate = tl.zeros((128,), tl.float32)
        up = tl.zeros((128,), tl.float32)
        for kb in range(K // 128):
            x = tl.load(xq + token * K + kb * 128 + k).to(tl.float32) * tl.load(xs + token * (K // 128) + kb)
            row = (expert * 2 * N + block * 128 + rows)[:, None] * K + kb * 128 + k[None, :]
            scale = s13 + (expert * 2 * (N // 128) + block) * (K // 128) + kb
            gate += tl.sum(tl.load(w13 + row).to(tl.float32) * x[None, :], 1) * tl.load(scale)
            up += tl.sum(tl.load(w13 + row + N * K).to(tl.float32) * x[None, :], 1) * tl.load(scale + (N // 128) * (K // 128))
        h = (gate / (1.0 + tl.exp(-gate)) * up).to(tl.bfloat16).to(tl.float32)
        s = _scale(tl.max(tl.abs(h), 0), UE8M0)
        tl.store(hq + pair * N + block * 128 + rows, (h * (1.0 / s)).to(hq.dtype.element_ty))
        tl.store(hs + pair * (N // 128) + block, s)

    @triton.jit
    def _down_kernel(hq, hs, ids, weights, w2, s2, out, K: tl.constexpr, N: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr):
        """One program: ROWS rows of one token's output over all of its experts."""
        token, piece = tl.program_id(0), tl.program_id(1)
        n = tl.arange(0, 128)
        rows = piece * ROWS + tl.arange(0, ROWS)
        y = tl.zeros((ROWS,), tl.float32)
        for rank in range(TOP_K):
            pair = token * TOP_K + rank
            expert = tl.load(ids + pair).to(tl.int64)
            part = tl.zeros((ROWS,), tl.float32)
            for nb in range(N // 128):
                h = tl.load(hq + pair * N + nb * 128 + n).to(tl.float32) * tl.load(hs + pair * (N // 128) + nb)
                w = tl.load(w2 + (expert * K + rows)[:, None] * N + nb * 128 + n[None, :]).to(tl.float32)
                part += tl.sum(w * h[None, :], 1) * tl.load(s2 + (expert * (K // 128) + piece * ROWS // 128) * (N // 128) + nb)
            y += part * tl.load(weights + pair)
        tl.store(out + token * K + rows, y.to(tl.bfloat16))


def triton_experts(x: Tensor, ids: Tensor, weights: Tensor, q: dict[str, Tensor], ue8m0: bool) -> Tensor:
    """The FP8 layer in three Triton kernels, one program per (token, expert, 128 features): an expert is read once per token that chose it."""
    tokens, hidden = x.shape
    n, top_k = q["w2"].shape[2], ids.shape[1]
    xq, xs = torch.empty_like(x, dtype=FP8), x.new_empty(tokens, hidden // 128, dtype=torch.float32)
    hq, hs = x.new_empty(tokens * top_k, n, dtype=FP8), x.new_empty(tokens * top_k, n // 128, dtype=torch.float32)
    out = torch.empty_like(x)
    rows = 64
    _quantise_kernel[(tokens, hidden // 128)](x, xq, xs, hidden, ue8m0, num_warps=1)
    _up_kernel[(tokens * top_k, n // 128)](xq, xs, ids, q["w13"], q["s13"], hq, hs, hidden, n, top_k, ue8m0, num_warps=8)
    _down_kernel[(tokens, hidden // rows)](hq, hs, ids, weights, q["w2"], q["s2"], out, hidden, n, top_k, rows, num_warps=4)
    return out


def _gather(q: Tensor, s: Tensor, chosen: Tensor) -> Tensor:
    """The chosen experts as float32 (torch indexes bytes, not e4m3)."""
    return dequantise(q.view(torch.uint8)[chosen].view(FP8), s[chosen])


def torch_experts(x: Tensor, ids: Tensor, weights: Tensor, q: dict[str, Tensor], ue8m0: bool) -> Tensor:
    """The same with torch's own operators: the chosen experts are gathered and dequantised. Slow, and short enough to be believed."""
    chosen = ids.long()
    gate_up = torch.einsum("tkrc,tc->tkr", _gather(q["w13"], q["s13"], chosen), fake_quantise(x, ue8m0))
    gate, up = gate_up.chunk(2, -1)
    h = (F.silu(gate) * up).bfloat16()
    h = fake_quantise(h.reshape(-1, h.shape[-1]), ue8m0).view(h.shape)
    y = torch.einsum("tkcn,tkn->tkc", _gather(q["w2"], q["s2"], chosen), h)
    return (y * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def exact_experts(x: Tensor, ids: Tensor, weights: Tensor, q: dict[str, Tensor]) -> Tensor:
    """The layer without quantisation of x and h, in float32: what errors are measured against."""
    chosen = ids.long()
    gate, up = torch.einsum("tkrc,tc->tkr", _gather(q["w13"], q["s13"], chosen), x.float()).chunk(2, -1)
    y = torch.einsum("tkcn,tkn->tkc", _gather(q["w2"], q["s2"], chosen), F.silu(gate) * up)
    return (y * weights.unsqueeze(-1)).sum(1)


def bf16_experts(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """The unquantised layer, in the model's precision."""
    chosen = ids.long()
    gate, up = torch.einsum("tkrc,tc->tkr", w13[chosen], x).chunk(2, -1)
    y = torch.einsum("tkcn,tkn->tkc", w2[chosen], F.silu(gate) * up)
    return (y.float() * weights.unsqueeze(-1)).sum(1).to(x.dtype)


class MoeBlock(torch.nn.Module):
    """Stands where a transformers model has its sparse MoE block. `path` says which way forward goes: bf16, torch, triton or moeforge."""

    def __init__(self, experts: int, hidden: int, intermediate: int, policy: Policy, *, shared: int, biased: bool, ue8m0: bool, device: Any, seed: int) -> None:
        super().__init__()
        generator = torch.Generator(device=device).manual_seed(seed)

        def normal(*size: int, fan_in: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return (torch.randn(*size, generator=generator, device=device, dtype=dtype) * fan_in**-0.5).to(dtype)

        self.policy, self.ue8m0, self.path = policy, ue8m0, "bf16"
        self.gate = normal(experts, hidden, fan_in=hidden)
        self.bias = normal(experts, fan_in=100, dtype=torch.float32) if biased else None
        self.w13: Optional[Tensor] = normal(experts, 2 * intermediate, hidden, fan_in=hidden)
        self.w2: Optional[Tensor] = normal(experts, hidden, intermediate, fan_in=intermediate)
        self.shared = [normal(2 * shared, hidden, fan_in=hidden), normal(hidden, shared, fan_in=shared)] if shared else None
        (w13, s13), (w2, s2) = quantise_weight(self.w13), quantise_weight(self.w2)
        self.q = {"w13": w13, "s13": s13, "w2": w2, "s2": s2}
        self.layer: Any = None  # a moeforge.torch.Layer
        self.logits_dtype = torch.bfloat16

    def drop_bf16(self) -> None:
        self.w13 = self.w2 = None

    def bind(self, moe: Any) -> None:
        """Gives the block a moeforge layer on the same FP8 tensors."""
        self.logits_dtype = torch.float32 if moe.problem.logits_dtype == 1 else torch.bfloat16
        self.layer = moe.bind(*(self.q[name] for name in ("w13", "s13", "w2", "s2")), bias=self.bias, routed_scaling=self.policy.scaling)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = F.linear(x, self.gate).to(self.logits_dtype)
        if self.path == "moeforge":
            y = self.layer(x, logits)
        else:
            ids, weights = route(logits, self.policy, self.bias)
            if self.path == "bf16":
                assert self.w13 is not None and self.w2 is not None
                y = bf16_experts(x, ids, weights, self.w13, self.w2)
            else:
                y = (triton_experts if self.path == "triton" else torch_experts)(x, ids, weights, self.q, self.ue8m0)
        if self.shared is not None:
            gate, up = F.linear(x, self.shared[0]).chunk(2, -1)
            y = y + F.linear(F.silu(gate) * up, self.shared[1])
        return y.view(hidden_states.shape)


def block_of(problem: Any, scaling: float, device: Any, seed: int) -> MoeBlock:
    """A layer of a package's problem with random FP8 weights."""
    scores = {0: "softmax", 1: "sigmoid"}
    odd = (problem.zero_experts, problem.intermediate_offset, problem.shared_experts, problem.weight_on_input, problem.swiglu_limit, problem.swiglu_alpha)
    if problem.score not in scores or problem.expert_count != problem.experts or any(odd):
        raise SystemExit("this program knows softmax and sigmoid, all experts on one rank, whole blocks of features, and plain SiLU")
    policy = Policy(scores[problem.score], problem.top_k, bool(problem.renormalize), problem.groups, problem.groups_kept, scaling)
    block = MoeBlock(
        problem.experts, problem.hidden, problem.intermediate, policy, shared=0, biased=bool(problem.select_bias), ue8m0=bool(problem.act_scale),
        device=device, seed=seed,
    )
    block.drop_bf16()
    block.logits_dtype = torch.float32 if problem.logits_dtype == 1 else torch.bfloat16
    return block
