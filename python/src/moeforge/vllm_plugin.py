"""vLLM plugin: block-FP8 MoE layers run on moeforge for batches up to the package's token count, on vLLM's own kernel otherwise.

    MOEFORGE_PACKAGE=model.moeforge vllm serve MODEL

The entry point `vllm.general_plugins` calls register() in every process. Without MOEFORGE_PACKAGE (one path, or several separated by ':') it does nothing.
docs/integrate-vllm.md says which versions its assumptions were read in.

How it hooks in, all by wrapping, nothing is replaced for good:

  MoERunner.__init__                          the layer learns of its router
  MoERunner._apply_quant_method               marks the calls in which a selection goes straight to apply()
  Fp8MoEMethod.process_weights_after_loading  after vLLM's own: if a package serves the layer, its weights are bound where they lie
  router.select_experts                       own routing: in such a call a batch that will be served passes the logits on instead of a selection
  Fp8MoEMethod.apply                          launches moeforge, or calls vLLM's

vLLM calls these inside an op of its own (torch.ops.vllm.moe_forward), so torch.compile does not see them, and CUDA graph captures record the launch.
A layer that is not served keeps vLLM's path in all of them; the reason is logged once.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import os
import threading
import weakref
from typing import Any, Callable, Optional

from .errors import Miss, MoeforgeError
from .package import ActScale, Dtype, Package, Problem, Score, load

log = logging.getLogger("vllm.plugins.moeforge")  # below vLLM's logger, so that its level and format apply

BINDING = "_moeforge_binding"
ROUTER = "_moeforge_router"
SCORES = {"softmax": Score.SOFTMAX, "sigmoid": Score.SIGMOID, "sqrtsoftplus": Score.SQRT_SOFTPLUS}


# ---- what a layer is ----
def refusal(method: Any, layer: Any) -> Optional[str]:
    """Why this layer keeps vLLM's kernel, whatever the package has; None if nothing is against it."""
    moe = layer.moe_config
    parallel = moe.moe_parallel_config
    activation = getattr(layer.activation, "value", layer.activation)
    block = getattr(method, "moe_block_shape", None) or getattr(method, "weight_block_size", None)
    tests = (
        (not getattr(method, "block_quant", False) or list(block or ()) != [128, 128], "its weights are not FP8 in blocks of 128 x 128"),
        (getattr(method.fp8_backend, "name", "") != "TRITON", f"vLLM's backend is {method.fp8_backend}, which may reorder weights: use the Triton backend"),
        (method.is_monolithic, "its kernel routes by itself"),
        (method.mk_can_overlap_shared_experts, "its kernel runs the shared experts"),
        (activation != "silu", f"its activation is {activation}"),
        (any(getattr(layer, name, None) is not None for name in ("swiglu_limit", "swiglu_alpha", "swiglu_beta")), "its activation is clamped"),
        (moe.has_bias, "its experts have biases"),
        (moe.is_lora_enabled, "LoRA is enabled"),
        (layer.apply_router_weight_on_input, "the routing weight is applied to the input"),
        (parallel.dp_size > 1 or parallel.use_all2all_kernels or parallel.is_sequence_parallel, "tokens are exchanged between ranks (DP, all-to-all or SP)"),
        (parallel.enable_eplb, "EPLB moves experts"),
    )
    return next((reason for bad, reason in tests if bad), None)


def expert_range(layer: Any) -> tuple[int, int]:
    """First expert of this rank and their number. Raises ValueError if they do not follow each other."""
    table = getattr(layer, "_expert_map", None)
    if table is None:
        return 0, int(layer.local_num_experts)
    held = [expert for expert, slot in enumerate(table.tolist()) if slot >= 0]
    if not held or [table[e].item() for e in held] != list(range(len(held))) or held[-1] - held[0] + 1 != len(held):
        raise ValueError("this rank's experts do not follow each other (use linear expert placement)")
    return held[0], len(held)


def policy(router: Any) -> tuple[dict[str, int], Optional[Any], float]:
    """Fields of the problem, selection bias and scaling factor of a router's policy. Raises ValueError if moeforge has no such policy."""
    kind = type(router).__name__
    if kind not in ("FusedTopKRouter", "GroupedTopKRouter", "FusedTopKBiasRouter"):
        raise ValueError(f"no routing policy for {kind}")
    bias = getattr(router, "e_score_correction_bias", None)
    tables: list[Any] = [getattr(router, name, None) for name in ("_hash_indices_table", "bias_vl")]
    if any(table is not None for table in tables) or bool(getattr(router, "num_fused_shared_experts", 0)):
        raise ValueError("fused shared experts, hash routing and vision biases are not served")
    if router.scoring_func not in SCORES:
        raise ValueError(f"no score {router.scoring_func}")
    fields = {"score": int(SCORES[router.scoring_func]), "renormalize": int(bool(router.renormalize)), "select_bias": int(bias is not None)}
    groups = getattr(router, "num_expert_group", None) or 1
    kept = getattr(router, "topk_group", None) or 1
    if groups > 1:
        if bias is None:
            raise ValueError("groups without a selection bias are scored by their best expert in vLLM, by their two best in moeforge")
        fields.update(groups=int(groups), groups_kept=int(kept))
    return fields, bias, float(getattr(router, "routed_scaling_factor", 1.0) or 1.0)


def shape(layer: Any, act_scale: int) -> Problem:
    """The layer's problem without a routing policy: score GIVEN."""
    begin, count = expert_range(layer)
    _, rows, hidden = layer.w13_weight.shape
    return Problem(
        experts=int(layer.global_num_experts), top_k=int(layer.top_k), hidden=int(hidden), intermediate=int(rows) // 2, expert_begin=begin,
        expert_count=count, score=int(Score.GIVEN), act_scale=act_scale,
    )


# ---- what serves it ----
@dataclasses.dataclass
class Binding:
    """The bound layers: own routing by the dtype of the logits, and routing done by vLLM."""

    own: dict[Any, Any]
    given: Optional[Any]
    weights: tuple[int, int]  # addresses that were bound

    def takes(self, bound: Any, layer: Any, x: Any, other: Any, columns: int) -> bool:
        """Can a bound layer take x and its logits or weights as they lie? Nothing may fail once vLLM's routing was left out."""
        return (
            bound is not None
            and 0 < x.shape[0] <= bound.max_tokens
            and x.shape[1] == bound.problem.hidden
            and tuple(other.shape) == (x.shape[0], columns)
            and str(x.dtype) == "torch.bfloat16"
            and x.is_contiguous()
            and other.is_contiguous()
            and x.data_ptr() % 16 == 0
            and other.data_ptr() % 16 == 0
            and (layer.w13_weight.data_ptr(), layer.w2_weight.data_ptr()) == self.weights  # vLLM has not put others in their place
        )


class Server:
    """The packages of this process and what was loaded from them."""

    def __init__(self, packages: list[Package], settings: Callable[[], tuple[int, Optional[str]]]) -> None:
        self.packages, self.settings = packages, settings
        self._moes: dict[tuple[Problem, Any], Any] = {}
        self._told: set[str] = set()

    def tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            log.info("moeforge: %s", text)

    def moe(self, problem: Problem, device: Any) -> Optional[Any]:
        """The kernels for a problem, from the first package that has them; None if none has."""
        from . import torch as mt

        key = (problem, device)
        if key not in self._moes:
            self._moes[key] = None
            for package in self.packages:
                try:
                    self._moes[key] = mt.Moe(package, problem, device=device)
                    break
                except Miss as miss:
                    self.tell(str(miss))
        return self._moes[key]

    def bind(self, layer: Any, router: Optional[Any], act_scale: int) -> Optional[Binding]:
        """Binds the layer's tensors to whatever the packages have for it."""
        import torch

        problem = shape(layer, act_scale)
        tensors = (layer.w13_weight.data, layer.w13_weight_scale_inv.data, layer.w2_weight.data, layer.w2_weight_scale_inv.data)
        device = tensors[0].device
        binding = Binding({}, None, (tensors[0].data_ptr(), tensors[2].data_ptr()))

        def bound(wanted: Problem, bias: Optional[Any] = None, scaling: float = 1.0) -> Optional[Any]:
            moe = self.moe(wanted, device)
            return moe.bind(*tensors, bias=bias, routed_scaling=scaling) if moe is not None else None

        binding.given = bound(problem)
        try:
            fields, bias, scaling = policy(router) if router is not None else ({}, None, 1.0)
        except ValueError as reason:
            self.tell(f"own routing: {reason}")
            fields = {}
        if fields:
            bias = bias.data.to(device=device, dtype=torch.float32) if bias is not None else None
            for dtype, logits in ((torch.bfloat16, Dtype.BF16), (torch.float32, Dtype.F32)):
                one = bound(dataclasses.replace(problem, logits_dtype=int(logits), **fields), bias, scaling)
                if one is not None:
                    binding.own[dtype] = one
        return binding if binding.own or binding.given is not None else None

    def attach(self, method: Any, layer: Any) -> None:
        """After the weights were loaded. Never raises: a layer that cannot be bound keeps vLLM's kernel."""
        name = getattr(layer, "layer_name", "a layer")
        layer.__dict__[BINDING] = None
        try:
            act_scale, reason = self.settings()
            reason = reason or refusal(method, layer)
            if reason is None:
                layer.__dict__[BINDING] = self.bind(layer, layer.__dict__.get(ROUTER), act_scale)
                if layer.__dict__[BINDING] is None:
                    reason = "no package has a kernel for it"
        except (MoeforgeError, ValueError) as error:
            reason = str(error)
        except Exception as error:  # a version of vLLM that differs from what was read
            log.warning("moeforge: %s: %s: %s", name, type(error).__name__, error, exc_info=True)
            reason = "the plugin failed"
        if reason is None:
            binding = layer.__dict__[BINDING]
            one = binding.given or next(iter(binding.own.values()))
            self.tell(f"serves layers of {one.problem.experts} experts, {one.problem.hidden} x {one.problem.intermediate}, up to {one.max_tokens} tokens")
        else:
            self.tell(f"not served, vLLM's kernel stays: {reason}")


# ---- the wraps ----
def wrap_runner_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        experts = self.routed_experts
        experts.__dict__[ROUTER] = self.router
        self.router.select_experts = wrap_select(self.router, weakref.ref(experts))

    return __init__


_call = threading.local()  # .router: that of the runner whose _apply_quant_method this thread is in


def wrap_runner_apply(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _apply_quant_method(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, _call.router = getattr(_call, "router", None), self.router
        try:
            return original(self, *args, **kwargs)
        finally:
            _call.router = before

    return _apply_quant_method


def wrap_select(router: Any, layer_ref: Callable[[], Any]) -> Callable[..., Any]:
    original = router.select_experts

    @functools.wraps(original)
    def select_experts(hidden_states: Any, router_logits: Any, *args: Any, **kwargs: Any) -> Any:
        layer = layer_ref()
        binding = layer.__dict__.get(BINDING) if layer is not None else None
        if (
            binding is not None
            and getattr(_call, "router", None) is router  # models also select for kernels of their own
            and getattr(router, "capture_fn", None) is None
            and getattr(router, "_routing_replay_out", None) is None
            and getattr(type(layer.quant_method).apply, "_moeforge", False)
            and (own := binding.own.get(router_logits.dtype)) is not None
            and binding.takes(own, layer, hidden_states, router_logits, own.problem.logits)
        ):
            return router_logits, None  # for apply below: not selected yet
        return original(hidden_states, router_logits, *args, **kwargs)

    return select_experts


def wrap_process(original: Callable[..., None], server: Server) -> Callable[..., None]:
    @functools.wraps(original)
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        original(self, layer)
        server.attach(self, layer)

    return process_weights_after_loading


def wrap_apply(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply(self: Any, layer: Any, x: Any, topk_weights: Any, topk_ids: Any, *args: Any, **kwargs: Any) -> Any:
        binding = layer.__dict__.get(BINDING)
        if topk_ids is None:
            return binding.own[topk_weights.dtype].launch(x, topk_weights)
        given = binding.given if binding is not None else None
        if given is not None and str(topk_ids.dtype) == "torch.int32" and str(topk_weights.dtype) == "torch.float32" and topk_ids.is_contiguous():
            if binding.takes(given, layer, x, topk_weights, given.problem.top_k):
                return given.launch(x, topk_ids=topk_ids, topk_weights=topk_weights)
        return original(self, layer, x, topk_weights, topk_ids, *args, **kwargs)

    apply._moeforge = True  # type: ignore[attr-defined]
    return apply


# Function: its first parameters. What the wraps rely on; a vLLM where they differ is left alone.
SIGNATURES = {
    "apply": ["self", "layer", "x", "topk_weights", "topk_ids"],
    "process_weights_after_loading": ["self", "layer"],
    "select_experts": ["self", "hidden_states", "router_logits"],
    "__init__": ["self", "layer_name", "moe_config", "router", "routed_experts"],
    "_apply_quant_method": ["self", "hidden_states", "router_logits"],
}


def mismatch(method_class: Any, runner_class: Any, router_class: Any) -> Optional[str]:
    """The function of this vLLM that is not as it was read, None if all are."""
    for owner, names in (
        (method_class, ("apply", "process_weights_after_loading")),
        (router_class, ("select_experts",)),
        (runner_class, ("__init__", "_apply_quant_method")),
    ):
        for name in names:
            function = getattr(owner, name, None)
            found = list(inspect.signature(function).parameters) if function is not None else []
            wanted = SIGNATURES[name]
            if found[: len(wanted)] != wanted:
                return f"{owner.__name__}.{name}({', '.join(found)})"
    return None


def install(method_class: Any, runner_class: Any, router_class: Any, server: Server) -> bool:
    """Wraps the classes; a second time does nothing. False if they are not as expected."""
    if getattr(method_class.apply, "_moeforge", False):
        return True
    wrong = mismatch(method_class, runner_class, router_class)
    if wrong is not None:
        log.warning("moeforge: this version of vLLM is not known (%s): nothing is changed", wrong)
        return False
    runner_class.__init__ = wrap_runner_init(runner_class.__init__)
    runner_class._apply_quant_method = wrap_runner_apply(runner_class._apply_quant_method)
    method_class.process_weights_after_loading = wrap_process(method_class.process_weights_after_loading, server)
    method_class.apply = wrap_apply(method_class.apply)
    return True


def _settings() -> tuple[int, Optional[str]]:
    """Activation scales: ue8m0 for checkpoints that say so (DeepSeek-V3.1), else f32. And what of this run is against moeforge as a whole."""
    from vllm.config import get_current_vllm_config

    model = get_current_vllm_config().model_config
    quantisation = getattr(getattr(model, "hf_config", None), "quantization_config", None) or {}
    ue8m0 = isinstance(quantisation, dict) and quantisation.get("scale_fmt") == "ue8m0"
    sleeps = getattr(model, "enable_sleep_mode", False)
    return int(ActScale.UE8M0 if ue8m0 else ActScale.F32), "sleep mode empties the workspaces" if sleeps else None


def register() -> None:
    """The entry point. Never raises: vLLM runs without moeforge then, and the log says why."""
    paths = [path for path in os.environ.get("MOEFORGE_PACKAGE", "").split(":") if path]
    if not paths:
        return
    try:
        from vllm.model_executor.layers.fused_moe.router.fused_moe_router import FusedMoERouter
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
        from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod

        install(Fp8MoEMethod, MoERunner, FusedMoERouter, Server([load(path) for path in paths], _settings))
    except ImportError as error:
        log.warning("moeforge: nothing is changed: %s", error)
    except (MoeforgeError, OSError) as error:
        log.warning("moeforge: nothing is changed: %s", error)
