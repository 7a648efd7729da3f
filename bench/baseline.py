#!/usr/bin/env python3
"""Measures what `moeforge qualify` compares a package with: the same layers in Triton (bench/triton_grouped.py), and the package beside them, round by round.

    python3 bench/baseline.py q.moeforge -o baseline.json            # needs a GPU of the package's kind, torch, triton, the Python package
    build/moeforge qualify q.moeforge --baseline baseline.json

As docs/timing.md has it: enough layers that weights are cold, other inputs in every launch of a CUDA graph, samples of two replays behind an untimed one. A round
visits all four kinds of routing with both paths next to each other, in alternating order; its two samples are sums over the default routing mix. The Triton path
gets the tile that is fastest at the token count. Before a path is timed, all outputs of its graph are poisoned, and must then agree with the other path's;
the first launch must agree with the layer in torch's operators. The file is written only if all do.
"""

import argparse
import json
import math
import statistics
from typing import Any, Callable, Iterable, Optional

import torch
from moe_paths import MoeBlock, Policy, block_of, exact_experts, route, torch_experts
from torch import Tensor

MIX = {"uniform": 0.5, "zipf": 0.2, "concentrated": 0.15, "dispersed": 0.15}  # docs/specs.md
COLD_L2_RATIO = 3
LAUNCHES = 24
REPLAYS = 2
AGREE = 0.1  # largest relative difference of a token: roundings to FP8 that fall the other way make a few hundredths, a wrong expert about 1

Sampled = tuple[Callable[[], None], list[Tensor]]  # a graph's replay, and where its outputs lie


# ---- inputs ----
def chosen_experts(kind: str, tokens: int, experts: int, policy: Policy, generator: torch.Generator) -> Tensor:
    """Whom concentrated and dispersed tokens choose, as tuner/datagen_logits.c says: bool [tokens, experts]."""
    size, kept = experts // policy.groups, policy.groups_kept if policy.groups > 1 else 1
    groups = torch.randperm(policy.groups, generator=generator)
    windows = []
    for first in range(0, policy.groups - kept + 1, kept):
        members = (groups[first : first + kept, None] * size + torch.arange(size)).flatten()
        windows.append(members[torch.randperm(len(members), generator=generator)])
    chosen = torch.zeros(tokens, experts, dtype=torch.bool)
    for token in range(tokens):
        window, turn = (windows[token % len(windows)], token // len(windows)) if kind == "dispersed" else (windows[0], 0)
        chosen[token, window[(turn * policy.top_k + torch.arange(policy.top_k)) % len(window)]] = True
    return chosen


def router_logits(kind: str, tokens: int, experts: int, policy: Policy, generator: torch.Generator) -> Tensor:
    normal = torch.randn(tokens, experts, generator=generator)
    if kind == "uniform":
        return 1.5 * normal
    if kind == "zipf":
        noise = -torch.rand(tokens, experts, generator=generator).clamp(1e-12, 1 - 1e-7).log().neg().log()
        return noise - (torch.randperm(experts, generator=generator) + 1.0).log()
    return torch.where(chosen_experts(kind, tokens, experts, policy, generator), 4.0, -4.0) + 0.25 * normal


# ---- cold weights: tuner/device_plan.c in short ----
def layers_needed(l2_bytes: int, top_k: int, expert_bytes: int) -> int:
    return max(3, math.ceil(COLD_L2_RATIO * l2_bytes / (top_k * expert_bytes)) + 1)


def graph_launches(layers: int) -> int:
    """Whole turns over the layers."""
    return math.ceil(LAUNCHES / layers) * layers


def reuse_experts(active: "list[list[int]]", layers: int) -> float:
    """Fewest experts that are read between two uses of one expert of one layer, when the graph (launch i: layer i % layers) is replayed for ever."""
    read_until: dict[tuple[int, int], int] = {}
    smallest, before = math.inf, 0
    for turn in range(2 * len(active)):
        experts = active[turn % len(active)]
        for expert in experts:
            slot = (turn % layers, expert)
            smallest = min(smallest, before - read_until.get(slot, -(2**62)))
            read_until[slot] = before + len(experts)
        before += len(experts)
    return smallest


# ---- the GPU ----
class Cuda:
    """What the measurement needs of the machine; tests have another one."""

    device = "cuda"

    def __init__(self) -> None:
        self.l2_bytes = int(torch.cuda.get_device_properties(0).L2_cache_size)
        self.name = torch.cuda.get_device_name()

    def graph(self, work: Callable[[], "list[Tensor]"]) -> Sampled:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = work()
        return graph.replay, outs

    def sample(self, replay: Callable[[], None]) -> float:
        """Microseconds of a replay."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        replay()
        begin.record()
        for _ in range(REPLAYS):
            replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1000 / REPLAYS


class Triton:
    """The baseline."""

    def __init__(self, block: MoeBlock, max_tokens: int, device: Any) -> None:
        import triton
        from triton_grouped import Grouped

        self.name = f"grouped Triton kernels of bench/triton_grouped.py, triton {triton.__version__}"
        experts, hidden, intermediate = block.q["w2"].shape
        self.grouped = Grouped(experts, hidden, intermediate, block.policy, block.ue8m0, max_tokens, device)
        self.choices: Iterable[int] = self.grouped.rows
        self.bytes = self.grouped.bytes()

    def run(self, block: MoeBlock, x: Tensor, logits: Tensor, choice: int) -> Tensor:
        return self.grouped.run(block, x, logits, choice)


# ---- measuring ----
class Profile:
    """The inputs of one token count and kind of routing, launch by launch, and a graph for each path."""

    def __init__(self, bench: "Bench", tokens: int, kind: str) -> None:
        self.bench = bench
        p, device, launches = bench.problem, bench.machine.device, bench.launches
        generator = torch.Generator().manual_seed(1000 * tokens + list(MIX).index(kind))
        policy, dtype = bench.blocks[0].policy, bench.blocks[0].logits_dtype
        logits = torch.stack([router_logits(kind, tokens, p.experts, policy, generator) for _ in range(launches)])
        self.logits = logits.to(dtype).to(device)
        self.x = torch.randn(launches, tokens, p.hidden, generator=generator).bfloat16().to(device)
        ids = route(self.logits.flatten(0, 1), policy, bench.blocks[0].bias)[0].view(launches, -1)
        active = [sorted(set(row)) for row in ids.tolist()]
        if reuse_experts(active, len(bench.blocks)) * bench.expert_bytes < COLD_L2_RATIO * bench.machine.l2_bytes:
            raise SystemExit(f"bench/baseline.py: {tokens} tokens, {kind}: some weights would come from L2")
        self.paths: dict[str, Sampled] = {}

    def package(self, i: int) -> Tensor:
        out: Tensor = self.bench.block(i).layer.launch(self.x[i], self.logits[i])
        return out

    def baseline(self, i: int, choice: int) -> Tensor:
        return self.bench.path.run(self.bench.block(i), self.x[i], self.logits[i], choice)

    def record(self, name: str, run: Callable[[int], Tensor]) -> None:
        """Makes the graph of a path; its outputs, poisoned before, are there when it has run once."""
        run(0)  # whatever is compiled or loaded at a first launch
        replay, outs = self.bench.machine.graph(lambda: [run(i) for i in range(self.bench.launches)])
        for out in outs:
            out.fill_(float("nan"))
        replay()
        self.paths[name] = replay, outs

    def sample(self, name: str) -> float:
        """Microseconds per operator."""
        return self.bench.machine.sample(self.paths[name][0]) / self.bench.launches


def difference(a: Tensor, b: Tensor) -> float:
    """The largest relative one of a token; infinite if there is anything that is no number."""
    worst = float(((a.float() - b.float()).norm(dim=-1) / b.float().norm(dim=-1)).max())
    return worst if math.isfinite(worst) else math.inf


class Bench:
    """The layers of a package's problem, cold, and both paths on them."""

    def __init__(self, machine: Any, moe: Any, scaling: float, make_path: Callable[..., Any] = Triton) -> None:
        self.machine, self.problem = machine, moe.problem
        p = moe.problem
        self.expert_bytes = 3 * p.intermediate * p.hidden
        layers = layers_needed(machine.l2_bytes, p.top_k, self.expert_bytes)
        self.launches = graph_launches(layers)
        self.blocks = [block_of(p, scaling, machine.device, seed) for seed in range(layers)]
        for block in self.blocks:
            block.bind(moe)
        self.path = make_path(self.blocks[0], moe.max_tokens, machine.device)

    def block(self, launch: int) -> MoeBlock:
        return self.blocks[launch % len(self.blocks)]

    def memory_gib(self) -> float:
        """Weights and scales of a layer, and what the baseline's kernels hand each other."""
        return (sum(t.numel() * t.element_size() for t in self.blocks[0].q.values()) + self.path.bytes) / 2**30

    def fastest_choice(self, profile: Profile) -> int:
        times = {}
        for choice in self.path.choices:
            profile.record("baseline", lambda i: profile.baseline(i, choice))
            times[choice] = min(profile.sample("baseline") for _ in range(3))
        return min(times, key=lambda choice: times[choice])

    def check(self, profiles: "dict[str, Profile]") -> "tuple[float, float, float]":
        """Worst difference between the paths; from torch's operators in the first launch; error of the baseline against the unquantised layer there."""
        between = max(difference(a, b) for p in profiles.values() for a, b in zip(p.paths["package"][1], p.paths["baseline"][1]))
        from_torch = error = 0.0
        for p in profiles.values():
            block, x, out = self.blocks[0], p.x[0], p.paths["baseline"][1][0]
            ids, weights = route(p.logits[0], block.policy, block.bias, stable=True)
            from_torch = max(from_torch, difference(out, torch_experts(x, ids, weights, block.q, block.ue8m0)))
            error = max(error, difference(out, exact_experts(x, ids, weights, block.q)))
        return between, from_torch, error

    @torch.no_grad()
    def measure(self, tokens: int, rounds: int) -> "dict[str, Any]":
        """A point of the baseline file, and what only the table shows."""
        profiles = {kind: Profile(self, tokens, kind) for kind in MIX}
        choice = self.fastest_choice(profiles["uniform"])
        for profile in profiles.values():
            profile.record("baseline", lambda i, profile=profile: profile.baseline(i, choice))  # type: ignore[misc]
            profile.record("package", profile.package)
        between, from_torch, error = self.check(profiles)
        if max(between, from_torch) > AGREE:
            far = f"{between:.2e} off the package's and {from_torch:.2e} off torch's operators, at most {AGREE}"
            raise SystemExit(f"bench/baseline.py: {tokens} tokens: a token of the baseline is {far}")
        us: dict[str, list[float]] = {"baseline": [], "package": []}
        for index in range(rounds):
            sums = dict.fromkeys(us, 0.0)
            for kind, share in MIX.items():
                for name in us if index % 2 == 0 else reversed(us):
                    sums[name] += share * profiles[kind].sample(name)
            for name, value in sums.items():
                us[name].append(value)
        return {"tokens": tokens, "us": us["baseline"], "package_us": us["package"], "error": error, "choice": choice, "between": between, "from_torch": from_torch}


# ---- the file ----
def document(name: str, device: str, shape: str, memory_gib: float, points: "list[dict[str, Any]]") -> "dict[str, Any]":
    """What docs/qualify.md describes."""
    rows = [
        {
            "shape": shape, "tokens": p["tokens"], "routing": "mix", "us": [round(v, 4) for v in p["us"]], "package_us": [round(v, 4) for v in p["package_us"]],
            "error": p["error"], "memory_gib": memory_gib,
        }
        for p in points
    ]
    return {"format": "moeforge baseline", "version": 1, "name": name, "device": device, "points": rows}


def print_row(point: "dict[str, Any]") -> None:
    a, b = (statistics.median(point[key]) for key in ("us", "package_us"))
    ratio = statistics.median(x / y for x, y in zip(point["us"], point["package_us"]))
    print(
        f"{point['tokens']:>6} {a:>10.2f} {b:>10.2f} {ratio:>7.3f} {point['choice']:>6} {point['error']:>9.2e} {point['between']:>9.2e} {point['from_torch']:>9.2e}",
        flush=True,
    )


def counts(text: str) -> "list[int]":
    """1-8,16"""
    result: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        result += range(int(low), int(high or low) + 1)
    return result


def run(package: Any, shape: Optional[str], machine: Any, output: str, tokens: "Optional[list[int]]", rounds: int, make_path: Callable[..., Any] = Triton) -> None:
    import moeforge.torch

    problem = package.problem(shape)
    entry = next(e for e in package.entries() if e.problem == problem)
    moe = moeforge.torch.Moe(package, problem)
    bench = Bench(machine, moe, entry.routed_scaling, make_path)
    name = f"{bench.path.name}, torch {torch.__version__}"
    print(f"{entry.shape_name} on {machine.name}: {name}; us per operator over the routing mix, {len(bench.blocks)} layers, {rounds} rounds")
    print(f"{'tokens':>6} {'baseline':>10} {'package':>10} {'ratio':>7} {'tile':>6} {'error':>9} {'apart':>9} {'torch':>9}", flush=True)
    points = []
    for count in tokens or range(1, moe.max_tokens + 1):
        points.append(bench.measure(count, rounds))
        print_row(points[-1])
    with open(output, "w") as file:
        json.dump(document(name, machine.name, entry.shape_name, bench.memory_gib(), points), file, indent=1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures a Triton baseline beside a package, for `moeforge qualify`.")
    parser.add_argument("package", help="package made by `moeforge export`")
    parser.add_argument("shape", nargs="?", help="if the package has several")
    parser.add_argument("-o", "--output", required=True, help="the baseline file")
    parser.add_argument("--tokens", type=counts, help="such as 1-8,16 (default: all that the package serves)")
    parser.add_argument("--rounds", type=int, default=15, help="at least 6 (default: 15)")
    args = parser.parse_args()
    if args.rounds < 6:
        raise SystemExit("bench/baseline.py: fewer than 6 rounds have no 95 % interval of their median")
    if not torch.cuda.is_available():
        raise SystemExit("bench/baseline.py: no GPU: times are measured on one, nothing is predicted")
    import moeforge

    with moeforge.load(args.package) as package:
        run(package, args.shape, Cuda(), args.output, args.tokens, args.rounds)


if __name__ == "__main__":
    main()
