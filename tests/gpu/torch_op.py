#!/usr/bin/env python3
"""What continuous integration cannot show of moeforge.torch: the op on a real GPU, compiled, captured and on several streams.

    PYTHONPATH=python/src python3 tests/gpu/torch_op.py PACKAGE [SHAPE]

Prints one line per step and exits 1 if any failed. Random weights and inputs; the numbers are compared with the same layer in torch's operators.
"""

import sys
from pathlib import Path

import torch

import moeforge
import moeforge.torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
from moe_paths import MoeBlock, Policy  # noqa: E402

SCORES = {moeforge.Score.SOFTMAX: "softmax", moeforge.Score.SIGMOID: "sigmoid"}
failed = False


def say(good, text):
    global failed
    failed = failed or not good
    print(f"{'ok' if good else 'FAILED':<8} {text}", flush=True)


def make(problem, moe):
    policy = Policy(SCORES[problem.score], problem.top_k, bool(problem.renormalize), problem.groups, problem.groups_kept)
    block = MoeBlock(
        problem.experts, problem.hidden, problem.intermediate, policy, shared=0, biased=bool(problem.select_bias), ue8m0=bool(problem.act_scale), device="cuda",
        seed=1,
    )
    block.drop_bf16()
    block.bind(moe)
    return block


def inputs(problem, tokens, seed=0):
    generator = torch.Generator("cuda").manual_seed(100 * tokens + seed)
    return torch.randn(tokens, 1, problem.hidden, generator=generator, device="cuda", dtype=torch.bfloat16)


@torch.no_grad()
def numbers(block, problem, max_tokens):
    worst = 0.0
    for tokens in range(1, max_tokens + 1):
        x = inputs(problem, tokens)
        block.path = "torch"
        expected = block(x).float()
        block.path = "moeforge"
        worst = max(worst, float(((block(x).float() - expected).norm(dim=-1) / expected.norm(dim=-1)).max()))
    say(worst < 5e-2, f"numbers: 1 to {max_tokens} tokens, worst relative error of a token {worst:.1e} (at most 5e-2)")


@torch.no_grad()
def compiled(block, problem, max_tokens, mode):
    function = torch.compile(lambda x: block(x), fullgraph=True, mode=mode)
    equal = True
    for tokens in (1, 2, max_tokens, 1):
        for seed in range(3):  # the first calls warm up and record
            x = inputs(problem, tokens, seed)
            equal = equal and torch.equal(function(x).clone(), block(x))
    say(equal, f"torch.compile(mode={mode!r}): equal to eager, to the bit")


@torch.no_grad()
def captured(block, problem, max_tokens):
    x = inputs(problem, max_tokens)
    block(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # on a stream that the layer has not seen
        out = block(x)
    equal = True
    for seed in range(1, 5):
        x.copy_(inputs(problem, max_tokens, seed))
        graph.replay()
        equal = equal and torch.equal(out, block(x))
    say(equal, "CUDA graph: replays with other inputs are equal to eager, to the bit")


@torch.no_grad()
def streams(block, problem, max_tokens):
    work = [(torch.cuda.Stream(), inputs(problem, max_tokens, seed)) for seed in range(4)]
    expected = [block(x) for _, x in work]
    torch.cuda.synchronize()
    results = []
    for _ in range(50):
        for stream, x in work:
            with torch.cuda.stream(stream):
                results.append(block(x))
    torch.cuda.synchronize()
    say(all(torch.equal(r, expected[i % 4]) for i, r in enumerate(results)), "four streams at once: equal to one, to the bit")


def main():
    if len(sys.argv) not in (2, 3) or not torch.cuda.is_available():
        raise SystemExit("usage: tests/gpu/torch_op.py PACKAGE [SHAPE], on a machine with a GPU")
    with moeforge.load(sys.argv[1]) as package:
        problem = package.problem(sys.argv[2] if len(sys.argv) == 3 else None)
        if problem.score not in SCORES or problem.expert_count != problem.experts or problem.zero_experts:
            raise SystemExit("this script knows softmax and sigmoid with all experts on one rank")
        moe = moeforge.torch.Moe(package, problem)
        block = make(problem, moe)
        numbers(block, problem, moe.max_tokens)
        for mode in (None, "reduce-overhead"):
            compiled(block, problem, moe.max_tokens, mode)
        captured(block, problem, moe.max_tokens)
        streams(block, problem, moe.max_tokens)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
