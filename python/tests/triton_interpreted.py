"""Run by test_bench.py with TRITON_INTERPRET=1: the Triton paths of bench/moe_paths.py and bench/triton_grouped.py against the torch path."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from triton.runtime import interpreter

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import moe_paths  # noqa: E402
from triton_grouped import Grouped  # noqa: E402

_convert = interpreter._convert_float


def convert(values, source, target, rounding):  # type: ignore[no-untyped-def]
    """The interpreter (triton 3.5) rounds ties up and loses the carry of a rounded mantissa; the GPU rounds to even, as torch does."""
    torch_type = {(8, 3): torch.float8_e4m3fn, (16, 7): torch.bfloat16}.get((target.primitive_bitwidth, target.fp_mantissa_width))
    if source.primitive_bitwidth != 32 or torch_type is None:
        return _convert(values, source, target, rounding)
    rounded = torch.from_numpy(np.frombuffer(values.tobytes(), np.float32).copy()).to(torch_type)
    bits = rounded.view(torch.uint8).numpy() if target.primitive_bitwidth == 8 else rounded.view(torch.int16).numpy().view(np.uint16)
    return bits.reshape(values.shape)


interpreter._convert_float = convert

cases = 0
for tokens, ue8m0, top_k in ((1, False, 2), (3, False, 4), (2, True, 2), (1, True, 1)):
    block = moe_paths.MoeBlock(8, 256, 256, moe_paths.Policy(top_k=top_k), shared=0, biased=False, ue8m0=ue8m0, device="cpu", seed=tokens)
    x = torch.randn(tokens, 1, 256, generator=torch.Generator().manual_seed(9)).bfloat16()
    results = {}
    for path in ("torch", "triton"):
        block.path = path
        results[path] = block(x).float()
    error = float((results["torch"] - results["triton"]).norm() / results["torch"].norm())
    assert error < 5e-3, (tokens, ue8m0, top_k, error)  # sums in another order
    cases += 1
for tokens, ue8m0, rows, policy in (
    (1, False, 128, moe_paths.Policy(top_k=3)),
    (5, False, 64, moe_paths.Policy("sigmoid", 2, renormalize=False, scaling=1.5)),
    (17, True, 128, moe_paths.Policy("sigmoid", 4, groups=4, groups_kept=2, scaling=2.5)),
):
    block = moe_paths.MoeBlock(16, 256, 128, policy, shared=0, biased=policy.groups > 1, ue8m0=ue8m0, device="cpu", seed=tokens)
    x = torch.randn(tokens, 256, generator=torch.Generator().manual_seed(9)).bfloat16()
    logits = torch.nn.functional.linear(x, block.gate)
    logits[-1] = logits[0]  # two tokens with the same experts
    ids, weights = moe_paths.route(logits, policy, block.bias, stable=True)
    expected = moe_paths.torch_experts(x, ids, weights, block.q, ue8m0).float()
    grouped = Grouped(16, 256, 128, policy, ue8m0, tokens, "cpu")
    error = float(((grouped.run(block, x, logits, rows).float() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
    assert torch.equal(grouped.ids, ids) and error < 5e-3, (tokens, policy, error)
    cases += 1
print(f"{cases} cases equal")
