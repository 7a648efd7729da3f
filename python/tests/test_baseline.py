"""bench/baseline.py as far as a CPU goes: inputs, cold weights, the rounds, and that `moeforge qualify` reads what it writes. Times are scripted, the baseline is
the layer in torch's operators, the package runs on the scripted GPU. The Triton kernels: triton_interpreted.py. Skipped without torch."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
import os
import subprocess
import sys
import unittest
import unittest.mock
from typing import Any, Callable

import test_torch
from support import BUILD, CHECKOUT
from test_torch import torch

import moeforge

sys.path.insert(0, str(CHECKOUT / "bench"))
if torch is not None:
    import baseline
    import moe_paths


class Machine:
    """A GPU whose replays take the next of the given microseconds, package and baseline in the order of the samples."""

    device, name, l2_bytes = "cpu", "NVIDIA H200", 1 << 20

    def __init__(self) -> None:
        self.samples = 0

    def graph(self, work: Callable[[], list[Any]]) -> Any:
        outs = work()

        def replay() -> None:
            for out, new in zip(outs, work()):
                out.copy_(new)

        return replay, outs

    def sample(self, replay: Callable[[], None]) -> float:
        self.samples += 1
        return 1000.0 + self.samples


class TorchPath:
    """Stands where the Triton kernels are."""

    name, choices, bytes = "torch's operators", (1, 2), 1000
    wrong = False

    def __init__(self, block: Any, max_tokens: int, device: Any) -> None:
        self.calls: list[int] = []

    def run(self, block: Any, x: Any, logits: Any, choice: int) -> Any:
        self.calls.append(choice)
        ids, weights = moe_paths.route(logits, block.policy, block.bias, stable=True)
        return moe_paths.torch_experts(x, (ids + self.wrong) % block.q["w2"].shape[0], weights, block.q, block.ue8m0)


class WrongPath(TorchPath):
    wrong = True


@unittest.skipIf(torch is None, "torch is not installed")
class Inputs(unittest.TestCase):
    def logits(self, kind: str, tokens: int, policy: Any, seed: int = 1) -> Any:
        return baseline.router_logits(kind, tokens, 64, policy, torch.Generator().manual_seed(seed))

    def test_kinds(self) -> None:
        for policy in (moe_paths.Policy(top_k=4), moe_paths.Policy("sigmoid", 4, groups=8, groups_kept=2)):
            for kind in baseline.MIX:
                logits = self.logits(kind, 6, policy)
                self.assertEqual(tuple(logits.shape), (6, 64))
                self.assertTrue(bool(logits.isfinite().all()))
                self.assertTrue(torch.equal(logits, self.logits(kind, 6, policy)))
                self.assertFalse(torch.equal(logits, self.logits(kind, 6, policy, seed=2)))
                ids = moe_paths.route(logits, policy)[0].flatten().tolist()
                active = {"concentrated": 4, "dispersed": 24}.get(kind)
                if active is not None:
                    self.assertEqual(len(set(ids)), active, (kind, policy))
        self.assertAlmostEqual(sum(baseline.MIX.values()), 1)

    def test_skewed_is_skewed(self) -> None:
        popular = int(self.logits("zipf", 400, moe_paths.Policy(top_k=1)).argmax(-1).bincount(minlength=64).max())
        self.assertGreater(popular, 400 / sum(1 / r for r in range(1, 65)) / 1.5)  # the first of 64 ranks has a fifth
        self.assertLess(int(self.logits("uniform", 400, moe_paths.Policy(top_k=1)).argmax(-1).bincount(minlength=64).max()), 30)

    def test_tie_goes_to_the_first(self) -> None:
        ids, _ = moe_paths.route(torch.zeros(2, 64), moe_paths.Policy(top_k=5), stable=True)
        self.assertEqual(ids.tolist(), [[0, 1, 2, 3, 4]] * 2)


@unittest.skipIf(torch is None, "torch is not installed")
class Cold(unittest.TestCase):
    def test_layers(self) -> None:
        """Those that `moeforge plan` names for Qwen3.5-35B on an H200."""
        layers = baseline.layers_needed(62914560, 8, 3 * 512 * 2048)
        text = subprocess.run(
            [str(BUILD / "moeforge"), "plan", "specs/models/qwen3.5-35b-a3b.yaml", "--device", "h200"], cwd=CHECKOUT, capture_output=True, text=True, check=True
        ).stdout
        self.assertIn(f"({layers} layers, so that weights are cold)", text)
        self.assertEqual((layers, baseline.graph_launches(layers)), (9, 27))
        self.assertEqual(baseline.layers_needed(1, 8, 1 << 20), 3)

    def test_reuse(self) -> None:
        self.assertEqual(baseline.reuse_experts([[1, 2], [1], [1, 2, 3]], 3), 3)  # 3 in layer 2: behind it 2 + 1; 1 in layer 0: 1 + 3; in layer 1: 3 + 2
        self.assertEqual(baseline.reuse_experts([[1], [1]], 2), 1)
        self.assertEqual(baseline.reuse_experts([[], []], 2), math.inf)


class Measured(test_torch.TorchCase):
    blocks: dict[int, Any] = {}

    def block_of(self, problem: Any, scaling: float, device: Any, seed: int) -> Any:
        """Two sets of weights for all tests: to quantise them takes a CPU seconds."""
        if seed % 2 not in self.blocks:
            self.blocks[seed % 2] = moe_paths.block_of(problem, scaling, device, seed)
        return copy.copy(self.blocks[seed % 2])

    def setUp(self) -> None:
        for name, value in (("LAUNCHES", 3), ("block_of", self.block_of)):
            patch = unittest.mock.patch.object(baseline, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def run_baseline(self, tokens: list[int], path: Any = TorchPath) -> str:
        file = os.path.join(self.folder, "baseline.json")
        self.machine, self.table = Machine(), io.StringIO()
        with self.moe(), moeforge.load(self.path("tiny")) as package, contextlib.redirect_stdout(self.table):
            baseline.run(package, None, self.machine, file, tokens, 6, path)
        return file

    def qualify(self, file: str) -> subprocess.CompletedProcess[str]:
        spec = os.path.join(self.folder, "spec.yaml")
        with open(spec, "w") as out:
            out.write((CHECKOUT / "specs" / "models" / "tiny.yaml").read_text() + "limits:\n  min_speedup: 0.9\n")
        command = [str(BUILD / "moeforge"), "qualify", self.path("tiny"), "--baseline", file, "--spec", spec, "--json", "-o", os.path.join(self.folder, "q.moeforge")]
        return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)

    def test_qualify_reads_it(self) -> None:
        file = self.run_baseline([1, 3])
        with open(file) as source:
            points = json.load(source)["points"]
        self.assertEqual([(p["tokens"], p["routing"], len(p["us"]), len(p["package_us"])) for p in points], [(1, "mix", 6, 6), (3, "mix", 6, 6)])
        for p in points:
            self.assertTrue(0.01 < p["error"] < 0.1, p["error"])  # that of the quantisation
        # 64 experts with 3 * 256 * 1024 bytes and 48 scales each, and what the path says of its own
        self.assertAlmostEqual(points[0]["memory_gib"] * 2**30, 64 * (3 * 256 * 1024 + 48 * 4) + 1000)
        self.assertEqual(len(self.table.getvalue().splitlines()), 4)
        done = self.qualify(file)
        self.assertEqual(done.returncode, 14, done.stderr)  # the other token counts are not compared
        record = json.loads(done.stdout)
        self.assertEqual((record["kept"], record["rejected"], record["not_compared"]), (2, 0, 6))
        self.assertTrue(record["baseline"]["name"].startswith("torch's operators, torch "))
        for row, p in ((record["points"][0], points[0]), (record["points"][2], points[1])):
            self.assertEqual((row["tokens"], row["paired"], row["samples"], row["verdict"]), (p["tokens"], True, 6, "keep"))
            self.assertAlmostEqual(row["baseline_us"], sorted(p["us"])[2] / 2 + sorted(p["us"])[3] / 2, places=3)
            self.assertAlmostEqual(row["baseline_error"], p["error"], places=6)
            self.assertAlmostEqual(row["baseline_memory_gib"], p["memory_gib"], places=6)

    def test_rounds(self) -> None:
        """Six samples for the tile, then both paths side by side, four kinds of routing a round, the order alternating."""
        file = self.run_baseline([1])
        self.assertEqual(self.machine.samples, 6 + 6 * 4 * 2)
        with open(file) as source:
            point = json.load(source)["points"][0]
        shares = list(baseline.MIX.values())
        for index in range(6):
            first = 6 + index * 8 + 1  # the round's first sample
            for name, place in (("us", index % 2), ("package_us", 1 - index % 2)):
                expected = sum(share * (1000 + first + 2 * k + place) for k, share in enumerate(shares)) / 3
                self.assertAlmostEqual(point[name][index], expected, places=3)

    def test_wrong_numbers_are_not_timed(self) -> None:
        with self.assertRaisesRegex(SystemExit, "1 tokens: a token of the baseline is"):
            self.run_baseline([1], WrongPath)
        self.assertEqual(self.machine.samples, 6)
        self.assertEqual(baseline.difference(torch.tensor([[float("nan")]]), torch.ones(1, 1)), math.inf)

    def test_warm_weights_are_refused(self) -> None:
        with self.moe() as moe:
            machine = Machine()
            bench = baseline.Bench(machine, moe, 1.0, TorchPath)
            machine.l2_bytes = 1 << 40
            with self.assertRaisesRegex(SystemExit, "from L2"):
                bench.measure(1, 6)


@unittest.skipIf(torch is None, "torch is not installed")
class Command(unittest.TestCase):
    def test_counts(self) -> None:
        self.assertEqual(baseline.counts("1-3,8"), [1, 2, 3, 8])

    def test_says_that_it_needs_a_gpu(self) -> None:
        if torch.cuda.is_available():
            self.skipTest("there is a GPU")
        for words, says in (((), "no GPU"), (("--rounds", "5"), "fewer than 6 rounds")):
            done = subprocess.run([sys.executable, str(CHECKOUT / "bench" / "baseline.py"), "x", "-o", "y", *words], capture_output=True, text=True)
            self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1), done.stderr)
            self.assertIn(says, done.stderr)


if __name__ == "__main__":
    unittest.main()
