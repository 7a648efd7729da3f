#!/usr/bin/env python3
"""What continuous integration cannot show of moeforge.torch: the op on a real GPU, compiled, captured and on several streams.

    PYTHONPATH=python/src python3 tests/gpu/torch_op.py PACKAGE [SHAPE] [--gpus]      # --gpus: the last step only

Prints one line per step and exits 1 if any failed. Random weights and inputs; the numbers are compared with the same layer in torch's operators. The last step
wants several GPUs; with one it says that it was not run.
"""

import sys
import threading
from pathlib import Path

import torch

import moeforge
import moeforge.torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
from moe_paths import block_of  # noqa: E402

failed = False


def say(good, text):
    global failed
    failed = failed or not good
    print(f"{'ok' if good else 'FAILED':<8} {text}", flush=True)


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


class Elsewhere:
    """The block's layer with copies of its weights and inputs on one GPU, called while another may be the current one."""

    def __init__(self, package, block, problem, index, max_tokens):
        device = torch.device("cuda", index)
        self.index, self.moe = index, moeforge.torch.Moe(package, problem, device=device)
        q = {name: tensor.to(device) for name, tensor in block.q.items()}
        bias = block.bias.to(device) if block.bias is not None else None
        self.layer = self.moe.bind(q["w13"], q["s13"], q["w2"], q["s2"], bias=bias, routed_scaling=block.policy.scaling)
        self.calls = []
        for tokens in (1, max_tokens):
            x = inputs(problem, tokens)[:, 0]
            logits = torch.nn.functional.linear(x, block.gate).to(block.logits_dtype)
            self.calls.append((x.to(device), logits.to(device)))

    def call(self, rounds=1):
        return [self.layer(*self.calls[i % 2]) for i in range(2 * rounds)]

    def graph(self):
        with torch.cuda.device(self.index):
            self.call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(self.index)):  # its own one is the first device's
                outs = self.call()
        return graph, outs


def equal_everywhere(expected, results):
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)
    return all(torch.equal(out.cpu(), expected[i % 2]) for outs in results for i, out in enumerate(outs))


@torch.no_grad()
def every_gpu(package, block, problem, max_tokens):
    """All GPUs give the first one's bits: called in turn whatever device is current, from a thread each that starts on device 0, and as graphs at once."""
    count = torch.cuda.device_count()
    if count < 2:
        print("not run  several GPUs: there is one", flush=True)
        return
    places = [Elsewhere(package, block, problem, index, max_tokens) for index in range(count)]
    expected = [out.cpu() for out in places[0].call()]
    for current in range(count):
        with torch.cuda.device(current):
            results = [place.call(4) for place in places]
            kept = torch.cuda.current_device() == current
        say(equal_everywhere(expected, results) and kept, f"{count} GPUs in turn, device {current} current and left so: equal to device 0 alone, to the bit")
    results = [None] * count

    def work(index):
        with torch.no_grad():
            results[index] = places[index].call(50)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    say(None not in results and equal_everywhere(expected, results), f"{count} GPUs, a thread each: equal to device 0 alone, to the bit")
    graphs = [place.graph() for place in places]
    for _ in range(20):
        for graph, _ in graphs:
            graph.replay()
    say(equal_everywhere(expected, [outs for _, outs in graphs]), f"{count} GPUs, a CUDA graph each: equal to device 0 alone, to the bit")
    say(all(out.device.index == place.index for place in places for out in place.call()), f"{count} GPUs: results lie on their layer's device")


def one_gpu(block, problem, max_tokens):
    numbers(block, problem, max_tokens)
    for mode in (None, "reduce-overhead"):
        compiled(block, problem, max_tokens, mode)
    captured(block, problem, max_tokens)
    streams(block, problem, max_tokens)


def main():
    words = [word for word in sys.argv[1:] if word != "--gpus"]
    if len(words) not in (1, 2) or not torch.cuda.is_available():
        raise SystemExit("usage: tests/gpu/torch_op.py PACKAGE [SHAPE] [--gpus], on a machine with a GPU")
    with moeforge.load(words[0]) as package:
        problem = package.problem(words[1] if len(words) == 2 else None)
        moe = moeforge.torch.Moe(package, problem)
        block = block_of(problem, 1.0, "cuda", seed=1)
        block.bind(moe)
        if "--gpus" not in sys.argv:
            one_gpu(block, problem, moe.max_tokens)
        every_gpu(package, block, problem, moe.max_tokens)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
