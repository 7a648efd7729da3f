"""The vLLM plugin's own logic, over the scripted GPU, on classes that have the signatures of vLLM's and nothing else of it: this shows that the wraps choose
and fall back as they should, not that vLLM runs. Where vLLM is installed, its real classes are wrapped and its real routers read. Skipped without torch."""

from __future__ import annotations

import types
import unittest
import unittest.mock
from typing import Any

import test_torch
from support import HAS_GIVEN
from test_torch import torch

import moeforge
from moeforge import vllm_plugin as plugin

try:
    import vllm  # noqa: F401
except ImportError:
    vllm = None  # type: ignore[assignment]


class FusedTopKRouter:
    capture_fn = None

    def __init__(self) -> None:
        self.scoring_func, self.renormalize = "softmax", True

    def select_experts(self, hidden_states: Any, router_logits: Any, topk_indices_dtype: Any = None, *, input_ids: Any = None) -> Any:
        weights, ids = torch.topk(torch.softmax(router_logits.float(), -1), 2)
        return weights / weights.sum(-1, keepdim=True), ids.int()


def make_classes() -> tuple[type, type]:
    """Fresh ones for each test, since install() changes them."""

    class Fp8MoEMethod:
        block_quant, weight_block_size, is_monolithic, mk_can_overlap_shared_experts = True, [128, 128], False, False
        fp8_backend = types.SimpleNamespace(name="TRITON")

        def process_weights_after_loading(self, layer: Any) -> None:
            layer.processed = True

        def apply(self, layer: Any, x: Any, topk_weights: Any, topk_ids: Any, shared_experts: Any, shared_experts_input: Any) -> Any:
            assert topk_ids.dtype == torch.int32
            return "vllm", topk_ids

    class MoERunner:
        def __init__(self, layer_name: str, moe_config: Any, router: Any, routed_experts: Any) -> None:
            self.router, self.routed_experts = router, routed_experts

        def _apply_quant_method(self, hidden_states: Any, router_logits: Any, shared_experts_input: Any = None) -> Any:
            weights, ids = self.router.select_experts(hidden_states=hidden_states, router_logits=router_logits, topk_indices_dtype=None)
            return self.routed_experts.quant_method.apply(
                layer=self.routed_experts, x=hidden_states, topk_weights=weights, topk_ids=ids, shared_experts=None, shared_experts_input=None
            )

    return Fp8MoEMethod, MoERunner


class Experts:
    """As vLLM's RoutedExperts, the attributes that the plugin reads."""

    layer_name, activation, apply_router_weight_on_input, top_k, global_num_experts, local_num_experts = "layers.3", "silu", False, 2, 64, 64
    _expert_map = None

    def __init__(self, method: Any, tensors: list[Any]) -> None:
        parallel = types.SimpleNamespace(dp_size=1, use_all2all_kernels=False, is_sequence_parallel=False, enable_eplb=False)
        self.moe_config = types.SimpleNamespace(moe_parallel_config=parallel, has_bias=False, is_lora_enabled=False)
        self.quant_method = method
        self.w13_weight, self.w13_weight_scale_inv, self.w2_weight, self.w2_weight_scale_inv = tensors


class Wrapped(test_torch.TorchCase):
    def model(self, moe: Any) -> tuple[Any, Any, Any, plugin.Server]:
        """A runner, its layer and its inputs, with the plugin installed; weights not yet processed."""
        method_class, runner_class = make_classes()
        server = plugin.Server([moe.op.package], lambda: (0, None))
        self.assertTrue(plugin.install(method_class, runner_class, FusedTopKRouter, server))
        self.assertTrue(plugin.install(method_class, runner_class, FusedTopKRouter, server))  # once is enough
        layer = Experts(method_class(), self.weights(moe.problem))
        return runner_class("layers.3", None, FusedTopKRouter(), layer), layer, method_class, server

    def test_serves_up_to_the_packages_token_count(self) -> None:
        with self.moe() as moe:
            runner, layer, _, _ = self.model(moe)
            with self.assertLogs(plugin.log, "INFO") as logged:
                layer.quant_method.process_weights_after_loading(layer)
            self.assertTrue(layer.processed)
            self.assertIn("serves layers of 64 experts, 1024 x 256, up to 8 tokens", "\n".join(logged.output))
            for tokens in (1, 8):
                out = runner._apply_quant_method(*self.inputs(moe.problem, tokens))
                self.assertEqual(tuple(out.shape), (tokens, 1024))
            for x, logits in (self.inputs(moe.problem, 9), self.inputs(moe.problem, 0)):
                self.assertEqual(runner._apply_quant_method(x, logits)[0], "vllm")

    def test_the_weights_stay(self) -> None:
        with self.moe() as moe:
            _, layer, _, _ = self.model(moe)
            before = (layer.w13_weight, layer.w13_weight.data_ptr(), layer.w2_weight, layer.w2_weight.data_ptr())
            layer.quant_method.process_weights_after_loading(layer)
            self.assertEqual((id(layer.w13_weight), layer.w13_weight.data_ptr()), (id(before[0]), before[1]))
            self.assertEqual((id(layer.w2_weight), layer.w2_weight.data_ptr()), (id(before[2]), before[3]))
            native = layer.__dict__[plugin.BINDING].own[torch.bfloat16].native
            self.assertEqual((native.weights.w13, native.weights.w2), (before[1], before[3]))

    def test_falls_back_on_inputs(self) -> None:
        """Inputs that cannot be launched as they lie, and selections that someone else wants to see, go vLLM's way, before its routing is left out."""
        with self.moe() as moe:
            runner, layer, _, _ = self.model(moe)
            layer.quant_method.process_weights_after_loading(layer)
            x, logits = self.inputs(moe.problem, 2)
            wide = torch.zeros(2, 2048, dtype=torch.bfloat16)
            for bad_x, bad_logits in ((x.float(), logits), (x, logits.float()), (wide[:, :1024], logits), (x, torch.zeros(2, 128).bfloat16()[:, :64])):
                self.assertEqual(runner._apply_quant_method(bad_x, bad_logits)[0], "vllm")
            weights, ids = runner.router.select_experts(x, logits)  # not by the runner: a real selection
            self.assertEqual(tuple(ids.shape), (2, 2))
            runner.router.capture_fn = print
            self.assertEqual(runner._apply_quant_method(x, logits)[0], "vllm")
            runner.router.capture_fn = None
            self.assertTrue(torch.is_tensor(runner._apply_quant_method(x, logits)))
            layer.w2_weight = layer.w2_weight.clone()  # vLLM has loaded others
            self.assertEqual(runner._apply_quant_method(x, logits)[0], "vllm")

    def test_given_routing(self) -> None:
        """Where a package has score GIVEN only: vLLM routes. (The bound layer is a stand-in.)"""
        with self.moe() as moe:
            runner, layer, _, _ = self.model(moe)
            given = unittest.mock.Mock(max_tokens=4, problem=moe.problem)
            layer.__dict__[plugin.BINDING] = plugin.Binding({}, given, (layer.w13_weight.data_ptr(), layer.w2_weight.data_ptr()))
            x, logits = self.inputs(moe.problem, 4)
            self.assertIs(runner._apply_quant_method(x, logits), given.launch.return_value)
            ids = given.launch.call_args.kwargs["topk_ids"]
            self.assertEqual((ids.dtype, tuple(ids.shape)), (torch.int32, (4, 2)))
            self.assertEqual(runner._apply_quant_method(*self.inputs(moe.problem, 5))[0], "vllm")

    @unittest.skipUnless(HAS_GIVEN, "this libmoeforge does not know routing done by the engine")
    def test_a_package_with_given_routing(self) -> None:
        with self.moe("given", "libfakecuda.so") as moe:
            runner, layer, _, _ = self.model(moe)
            layer.global_num_experts = layer.local_num_experts = moe.problem.experts
            layer.quant_method.process_weights_after_loading(layer)
            binding = layer.__dict__[plugin.BINDING]
            self.assertEqual(binding.own, {})
            self.assertEqual(binding.given.problem, moe.problem)
            x, logits = self.inputs(moe.problem, 8)
            self.assertEqual(runner._apply_quant_method(x, logits).shape, x.shape)
            self.assertEqual(runner._apply_quant_method(*self.inputs(moe.problem, 9))[0], "vllm")

    def test_refusals(self) -> None:
        cases: list[tuple[str, Any]] = [
            ("blocks of 128", lambda m, e: setattr(m, "weight_block_size", [64, 128])),
            ("blocks of 128", lambda m, e: setattr(m, "block_quant", False)),
            ("Triton backend", lambda m, e: setattr(m, "fp8_backend", types.SimpleNamespace(name="FLASHINFER_CUTLASS"))),
            ("routes by itself", lambda m, e: setattr(m, "is_monolithic", True)),
            ("shared experts", lambda m, e: setattr(m, "mk_can_overlap_shared_experts", True)),
            ("activation is gelu", lambda m, e: setattr(e, "activation", "gelu")),
            ("clamped", lambda m, e: setattr(e, "swiglu_limit", 7.0)),
            ("biases", lambda m, e: setattr(e.moe_config, "has_bias", True)),
            ("LoRA", lambda m, e: setattr(e.moe_config, "is_lora_enabled", True)),
            ("input", lambda m, e: setattr(e, "apply_router_weight_on_input", True)),
            ("exchanged", lambda m, e: setattr(e.moe_config.moe_parallel_config, "dp_size", 2)),
            ("EPLB", lambda m, e: setattr(e.moe_config.moe_parallel_config, "enable_eplb", True)),
            ("follow each other", lambda m, e: setattr(e, "_expert_map", torch.tensor([0, -1] * 32))),
            ("no package", lambda m, e: setattr(e, "top_k", 3)),
            ("s13 is", lambda m, e: setattr(e, "w13_weight_scale_inv", torch.zeros(64, 8, 8))),
            ("plugin failed", lambda m, e: setattr(e, "w13_weight", None)),
        ]
        with self.moe() as moe:
            for text, change in cases:
                with self.subTest(text):
                    runner, layer, _, _ = self.model(moe)
                    change(layer.quant_method, layer)
                    with self.assertLogs(plugin.log, "INFO") as logged:
                        layer.quant_method.process_weights_after_loading(layer)
                    self.assertIn(text, "\n".join(logged.output))
                    self.assertEqual(runner._apply_quant_method(*self.inputs(moe.problem, 2))[0], "vllm")

    def test_a_run_that_is_against_it(self) -> None:
        with self.moe() as moe:
            runner, layer, _, server = self.model(moe)
            server.settings = lambda: (0, "sleep mode")
            with self.assertLogs(plugin.log, "INFO") as logged:
                layer.quant_method.process_weights_after_loading(layer)
            self.assertIn("not served, vLLM's kernel stays: sleep mode", logged.output[0])
            self.assertEqual(runner._apply_quant_method(*self.inputs(moe.problem, 2))[0], "vllm")

    def test_a_vllm_that_differs(self) -> None:
        method_class, runner_class = make_classes()
        method_class.apply = lambda self, layer, router, x: None  # type: ignore[attr-defined]
        before = dict(method_class.__dict__)
        with self.assertLogs(plugin.log, "WARNING") as logged:
            self.assertFalse(plugin.install(method_class, runner_class, FusedTopKRouter, plugin.Server([], lambda: (0, None))))
        self.assertIn("nothing is changed", logged.output[0])
        self.assertEqual(dict(method_class.__dict__), before)


class Policies(unittest.TestCase):
    def router(self, kind: str, **fields: Any) -> Any:
        return type(kind, (), {"scoring_func": "softmax", "renormalize": True, **fields})()

    def test_policies(self) -> None:
        bias = object()
        self.assertEqual(plugin.policy(self.router("FusedTopKRouter")), ({"score": 0, "renormalize": 1, "select_bias": 0}, None, 1.0))
        grouped = self.router(
            "GroupedTopKRouter", scoring_func="sigmoid", e_score_correction_bias=bias, num_expert_group=8, topk_group=4, routed_scaling_factor=2.5
        )
        self.assertEqual(plugin.policy(grouped), ({"score": 1, "renormalize": 1, "select_bias": 1, "groups": 8, "groups_kept": 4}, bias, 2.5))
        biased = self.router("FusedTopKBiasRouter", scoring_func="sqrtsoftplus", e_score_correction_bias=bias, renormalize=False)
        self.assertEqual(plugin.policy(biased), ({"score": 2, "renormalize": 0, "select_bias": 1}, bias, 1.0))

    def test_what_moeforge_has_not(self) -> None:
        for text, router in (
            ("no routing policy", self.router("CustomRoutingRouter")),
            ("two best", self.router("GroupedTopKRouter", num_expert_group=8, topk_group=4)),
            ("no score", self.router("FusedTopKRouter", scoring_func="tanh")),
            ("fused shared", self.router("FusedTopKBiasRouter", num_fused_shared_experts=1)),
        ):
            with self.assertRaisesRegex(ValueError, text):
                plugin.policy(router)


class Entry(unittest.TestCase):
    def test_nothing_without_a_package(self) -> None:
        with unittest.mock.patch.dict("os.environ", MOEFORGE_PACKAGE=""), unittest.mock.patch.dict("sys.modules", vllm=None):
            plugin.register()

    def test_never_raises(self) -> None:
        with unittest.mock.patch.dict("os.environ", MOEFORGE_PACKAGE="/nonexistent/p.moeforge"), self.assertLogs(plugin.log, "WARNING") as logged:
            plugin.register()
        self.assertIn("nothing is changed", logged.output[0])


@unittest.skipIf(vllm is None, "vLLM is not installed")
class RealClasses(test_torch.TorchCase):
    def test_a_call_through_vllms_runner(self) -> None:
        """vLLM's own MoERunner._apply_quant_method, RoutedExperts.forward_modular, FusedTopKRouter and Fp8MoEMethod.apply, wrapped; the objects are made
        without their constructors, which want a GPU and a configuration. vLLM's kernel is not called: it has none for a CPU."""
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
        from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter as Plain
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
        from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod

        class Layer(Experts):
            forward_modular = RoutedExperts.forward_modular

        class Runner(MoERunner):
            def __init__(self, layer_name: str, moe_config: Any, router: Any, routed_experts: Any) -> None:
                torch.nn.Module.__init__(self)
                self.router, self.routed_experts, self._shared_experts = router, routed_experts, None

        class Method(Fp8MoEMethod):
            block_quant, weight_block_size, mk_can_overlap_shared_experts, is_monolithic = True, [128, 128], False, False  # type: ignore[assignment]
            fp8_backend, moe_kernel = types.SimpleNamespace(name="TRITON"), None  # type: ignore[assignment]
            topk_indices_dtype = None  # type: ignore[assignment]

            def __init__(self) -> None:
                pass

            def process_weights_after_loading(self, layer: Any) -> None:
                pass

        with self.moe() as moe:
            self.assertTrue(plugin.install(Method, Runner, Plain, plugin.Server([moe.op.package], lambda: (0, None))))
            layer = Layer(Method(), self.weights(moe.problem))
            layer.w13_weight.view(torch.uint8).random_(0, 0x40)
            layer.w2_weight.view(torch.uint8).random_(0, 0x40)
            for scale in (layer.w13_weight_scale_inv, layer.w2_weight_scale_inv):
                scale.fill_(0.01)
            runner = Runner("layers.3", None, Plain(2, 64, renormalize=True), layer)
            layer.quant_method.process_weights_after_loading(layer)
            x, logits = self.inputs(moe.problem, 2)
            shared, out = runner._apply_quant_method(x, logits, None)
            self.assertIsNone(shared)
            self.assertTrue(torch.equal(out, layer.__dict__[plugin.BINDING].own[torch.bfloat16].launch(x, logits)))
            self.assertGreater(float(out.float().norm()), 0)
            with unittest.mock.patch.object(Plain, "_compute_routing", side_effect=NotImplementedError("vLLM routes")):
                with self.assertRaisesRegex(NotImplementedError, "vLLM routes"):
                    runner._apply_quant_method(*self.inputs(moe.problem, 9), None)

    def test_signatures_and_routers(self) -> None:
        from vllm.model_executor.layers.fused_moe.router.fused_moe_router import FusedMoERouter
        from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
        from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter as Plain
        from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
        from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod

        self.assertIsNone(plugin.mismatch(Fp8MoEMethod, MoERunner, FusedMoERouter))
        bias = torch.zeros(256)
        self.assertEqual(plugin.policy(Plain(8, 256, renormalize=True))[0], {"score": 0, "renormalize": 1, "select_bias": 0})
        grouped = GroupedTopKRouter(8, 256, 8, 4, scoring_func="sigmoid", routed_scaling_factor=2.5, e_score_correction_bias=bias)
        self.assertEqual(plugin.policy(grouped), ({"score": 1, "renormalize": 1, "select_bias": 1, "groups": 8, "groups_kept": 4}, bias, 2.5))
        self.assertEqual(plugin.policy(FusedTopKBiasRouter(8, 256, e_score_correction_bias=bias))[0]["score"], moeforge.Score.SIGMOID)


if __name__ == "__main__":
    unittest.main()
