"""bench/decode.py as far as a CPU goes: numbers of the paths, the decode step and its cache against transformers' own, statistics. Times, CUDA graphs and
memory need a GPU and are not run. Skipped without torch; what needs transformers or triton without them."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any

import reference
import test_torch
from support import CHECKOUT
from test_torch import torch

BENCH = CHECKOUT / "bench"
sys.path.insert(0, str(BENCH))

if torch is not None:
    import decode
    import moe_paths
try:
    import transformers
except ImportError:
    transformers = None  # type: ignore[assignment]


class Source(unittest.TestCase):
    def test_compiles(self) -> None:
        for path in (*sorted(BENCH.glob("*.py")), CHECKOUT / "tests" / "gpu" / "torch_op.py"):
            compile(path.read_text(), str(path), "exec")


@unittest.skipIf(torch is None, "torch is not installed")
class Paths(unittest.TestCase):
    def block(self, **changes: Any) -> Any:
        arguments = {"shared": 0, "biased": False, "ue8m0": False, "device": "cpu", "seed": 1, **changes}
        return moe_paths.MoeBlock(16, 512, 256, arguments.pop("policy", moe_paths.Policy(top_k=2)), **arguments)

    def run_path(self, block: Any, path: str, x: Any) -> Any:
        block.path = path
        return block(x).float()

    def test_quantisation(self) -> None:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(3, 256, generator=generator)
        for row, back in zip(x, moe_paths.fake_quantise(x, False)):
            self.assertTrue(torch.equal(torch.tensor(reference.quantise(row.tolist())), back))
        scales = moe_paths.quantise_rows(x, ue8m0=True)[1]
        self.assertTrue(torch.equal(scales, torch.exp2(torch.log2(scales).round())))
        w = torch.randn(2, 256, 384, generator=generator)
        q, s = moe_paths.quantise_weight(w)
        self.assertEqual((tuple(q.shape), tuple(s.shape)), ((2, 256, 384), (2, 2, 3)))
        self.assertLess(float((moe_paths.dequantise(q, s) - w).norm() / w.norm()), 0.03)
        self.assertEqual(float(q.float().abs().max()), 448.0)

    def test_routing(self) -> None:
        generator = torch.Generator().manual_seed(2)
        logits = torch.randn(5, 16, generator=generator)
        ids, weights = moe_paths.route(logits, moe_paths.Policy(top_k=3))
        for t in range(5):
            expected = reference.route(logits[t].tolist(), 3)
            self.assertEqual(ids[t].tolist(), [e for e, _ in expected])
            self.assertTrue(torch.allclose(weights[t], torch.tensor([w for _, w in expected])))
        grouped = moe_paths.Policy("sigmoid", 4, True, groups=4, groups_kept=2, scaling=2.5)
        bias = torch.zeros(16)
        bias[8:12] = 10  # this group is chosen by its bias, which does not weigh
        ids, weights = moe_paths.route(logits, grouped, bias)
        self.assertTrue(bool(((ids >= 8) & (ids < 12)).all()))
        self.assertTrue(torch.allclose(weights.sum(-1), torch.full((5,), 2.5)))
        scores = logits.sigmoid().gather(1, ids.long())
        self.assertTrue(torch.allclose(weights, 2.5 * scores / scores.sum(-1, keepdim=True)))

    def test_fp8_is_near_bf16(self) -> None:
        x = torch.randn(4, 1, 512, generator=torch.Generator().manual_seed(3)).bfloat16()
        grouped = moe_paths.Policy("sigmoid", 4, groups=4, groups_kept=2, scaling=2.5)
        for changes in ({}, {"ue8m0": True}, {"shared": 256}, {"biased": True, "policy": grouped}):
            block = self.block(**changes)
            exact, quantised = self.run_path(block, "bf16", x), self.run_path(block, "torch", x)
            error = float((exact - quantised).norm() / exact.norm())
            self.assertLess(error, 0.1, changes)
            self.assertGreater(error, 0.01, changes)  # else nothing was quantised
            self.assertEqual(exact.shape, x.shape)

    def test_torch_path_is_the_reference(self) -> None:
        block = self.block()
        x = torch.randn(1, 512, generator=torch.Generator().manual_seed(4)).bfloat16()
        layer = reference.Layer.__new__(reference.Layer)
        layer.experts, layer.top_k, layer.k, layer.n = 16, 2, 512, 256
        layer.w13, layer.w2 = (bytes(block.q[n].view(torch.uint8).flatten().tolist()) for n in ("w13", "w2"))
        layer.s13, layer.s2 = (block.q[n].flatten().tolist() for n in ("s13", "s2"))
        logits = torch.nn.functional.linear(x, block.gate)[0].tolist()
        expected = torch.tensor(layer.token(x[0].tolist(), reference.route(logits, 2)))
        self.assertLess(float((self.run_path(block, "torch", x)[0] - expected).norm() / expected.norm()), 5e-3)

    def test_triton_kernels_in_the_interpreter(self) -> None:
        """In a process of its own: the interpreter is chosen when triton is imported."""
        if moe_paths.triton is None:
            self.skipTest("triton is not installed")
        run = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("triton_interpreted.py"))], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
        )
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
        self.assertIn("7 cases equal", run.stdout)


class Moeforge(test_torch.TorchCase):
    def test_block_on_the_scripted_gpu(self) -> None:
        with self.moe() as moe:
            block = moe_paths.MoeBlock(64, 1024, 256, moe_paths.Policy(top_k=2), shared=0, biased=False, ue8m0=False, device="cpu", seed=5)
            block.bind(moe)
            x = torch.randn(3, 1, 1024, generator=torch.Generator().manual_seed(6)).bfloat16()
            block.path = "torch"
            expected = block(x).float()
            block.path = "moeforge"
            self.assertLess(float((block(x).float() - expected).norm() / expected.norm()), 1e-2)


@unittest.skipIf(torch is None or transformers is None, "transformers is not installed")
class Decoding(unittest.TestCase):
    def model(self, kind: str) -> Any:
        small = {"qwen3_moe": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}}.get(kind) or {
            "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
            "v_head_dim": 32,
        }
        policy = moe_paths.Policy(top_k=2) if kind == "qwen3_moe" else moe_paths.Policy("sigmoid", 2, groups=4, groups_kept=2, scaling=2.5)
        sizes = decode.ModelSizes(kind, 256, 128, 8, policy, small, shared=128, biased=kind != "qwen3_moe")
        return decode.build_model(sizes, 2, 100, "cpu")

    def test_step_against_transformers(self) -> None:
        """Logits of the decode steps, with our cache and mask, against one causal forward over the same tokens."""
        for kind in ("qwen3_moe", "deepseek_v3"):
            model = self.model(kind)
            tokens, logits = decode.decode_greedily(decode.Decoder(model, 3, 12), torch.tensor([5, 17, 42]), 8)
            self.assertEqual((tuple(tokens.shape), tuple(logits.shape)), ((8, 3), (8, 3, 100)))
            self.assertTrue(torch.equal(tokens[1:], logits[:-1].argmax(-1)))
            with torch.no_grad():
                whole = model(input_ids=tokens.t().contiguous()).logits.float().transpose(0, 1)
            self.assertLess(float((whole - logits).norm() / whole.norm()), 2e-2, kind)  # bf16 in another order
            forced = decode.decode_forced(decode.Decoder(model, 3, 12), tokens)
            self.assertTrue(torch.equal(forced, logits))

    def test_errors_of_a_path(self) -> None:
        model = self.model("qwen3_moe")
        result = decode.measure_errors(model, [1, 2], ("bf16", "torch"), 6)
        for batch in (1, 2):
            self.assertEqual(result[batch]["bf16"], {"kl_mean": 0.0, "kl_max": 0.0, "logit_error": 0.0, "top1_agreement": 1.0})
            self.assertGreater(result[batch]["torch"]["kl_mean"], 0)
            self.assertLess(result[batch]["torch"]["logit_error"], 0.2)


@unittest.skipIf(torch is None, "torch is not installed")
class Statistics(unittest.TestCase):
    def test_compare(self) -> None:
        logits = torch.randn(4, 2, 10, generator=torch.Generator().manual_seed(1))
        same = decode.compare(logits, logits + 3)  # a constant changes nothing
        self.assertAlmostEqual(same["kl_max"], 0)
        self.assertLess(same["logit_error"], 1e-6)
        p, q = torch.tensor([[[2.0, 0.0]]]), torch.tensor([[[0.0, 0.0]]])
        probability = torch.softmax(torch.tensor([2.0, 0.0]), 0)
        expected = float((probability * (probability / 0.5).log()).sum())
        self.assertAlmostEqual(decode.compare(p, q)["kl_mean"], expected, places=6)
        self.assertEqual(decode.compare(p, -p)["top1_agreement"], 0)

    def test_paired(self) -> None:
        calls: list[str] = []
        samples = decode.paired(lambda path: calls.append(path) or float(len(calls)), ("a", "b"), 3)
        self.assertEqual(calls, ["a", "b", "b", "a", "a", "b"])
        self.assertEqual(samples, {"a": [1, 4, 5], "b": [2, 3, 6]})
        s = decode.summarise([20.0, 22.0, 24.0], [10.0, 11.0, 12.0])
        self.assertEqual((s["a_us"], s["b_us"], s["ratio"], s["ratio_low"], s["ratio_high"]), (22, 11, 2, 2, 2))
        wide = decode.summarise([10.0, 20.0, 30.0, 40.0], [10.0] * 4)
        self.assertLess(wide["ratio_low"], wide["ratio"])
        self.assertGreater(wide["ratio_high"], wide["ratio"])

    def test_table(self) -> None:
        error = {"kl_mean": 1e-3, "kl_max": 1e-2, "logit_error": 4e-2, "top1_agreement": 1.0}
        row = {"tokens": 4, "errors": {"triton": error, "moeforge": error}, "peak_gib": {"triton": 1.0, "moeforge": 1.5}}
        row.update(decode.summarise([30.0, 31.0], [20.0, 20.5]))
        out = io.StringIO()
        decode.print_table({"model": "m", "layers": 4, "device": "d", "rounds": 2, "paths": ("triton", "moeforge"), "rows": [row]}, out)
        self.assertEqual(len(out.getvalue().splitlines()), 3)
        self.assertIn("30.5", out.getvalue())

    def test_models_are_those_of_the_specs(self) -> None:
        for name in decode.MODELS:
            self.assertTrue((CHECKOUT / "specs" / "models" / f"{name}.yaml").exists(), name)

    def test_says_that_it_needs_a_gpu(self) -> None:
        if torch.cuda.is_available():
            self.skipTest("there is a GPU")
        run = subprocess.run([sys.executable, str(BENCH / "decode.py"), "qwen3-30b-a3b", "x"], capture_output=True, text=True)
        self.assertEqual((run.returncode, run.stderr.count("\n")), (1, 1), run.stderr)
        self.assertIn("no GPU", run.stderr)


if __name__ == "__main__":
    unittest.main()
