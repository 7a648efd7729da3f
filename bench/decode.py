#!/usr/bin/env python3
"""Time per output token of a whole model with the MoE layers (a) written straightforwardly and (b) on moeforge, and their errors against the bf16 model.

    python3 bench/decode.py qwen3.5-35b-a3b q.moeforge               # needs a Hopper GPU, torch, transformers, triton, the moeforge wheel
    python3 bench/decode.py deepseek-v3.1-tp8 d.moeforge --layers 3 --tokens 1,4,8 --json out.json

The model is a transformers Qwen3-MoE or DeepSeek-V3 with the real sizes of a layer (one tensor-parallel rank of it, without the all-reduce), fewer layers, a
small vocabulary, and random weights; nothing is downloaded. For each batch size:

  errors   the bf16 model decodes greedily; every path is fed the same tokens (teacher forcing), and its logits are compared: KL divergence, relative
           error, agreement of the most likely token. Random weights say how two kernels differ, not how a trained model behaves.
  time     one decode step is captured into a CUDA graph per path. Rounds replay both graphs for the same number of steps in alternating order; a
           path's time is its median over rounds, the ratio and its 95 % interval come from the pairs.
  memory   the peak of torch's allocator during a path's steps, with the FP8 weights only.
"""

import argparse
import contextlib
import dataclasses
import inspect
import json
import math
import random
import statistics
import sys
from typing import Any, Callable, Iterator, Optional

import torch
from moe_paths import MoeBlock, Policy
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class ModelSizes:
    """One layer of a model on one rank. `attention` are keyword arguments of the transformers configuration."""

    kind: str  # qwen3_moe or deepseek_v3
    hidden: int
    intermediate: int
    experts: int
    policy: Policy
    attention: dict
    shared: int = 0
    biased: bool = False
    ue8m0: bool = False


_QWEN_ATTENTION = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
_DEEPSEEK_ATTENTION = {
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_DEEPSEEK_POLICY = Policy("sigmoid", 8, True, groups=8, groups_kept=4, scaling=2.5)

# Names of specs/models/, whose packages fit.
MODELS = {
    "qwen3.5-35b-a3b": ModelSizes("qwen3_moe", 2048, 512, 256, Policy(), _QWEN_ATTENTION, shared=512),
    "qwen3.5-122b-a10b": ModelSizes("qwen3_moe", 3072, 1024, 256, Policy(), _QWEN_ATTENTION, shared=1024),
    "qwen3-30b-a3b": ModelSizes("qwen3_moe", 2048, 768, 128, Policy(), _QWEN_ATTENTION),
    "deepseek-v3.1-tp8": ModelSizes("deepseek_v3", 7168, 256, 256, _DEEPSEEK_POLICY, _DEEPSEEK_ATTENTION, shared=256, biased=True, ue8m0=True),
}


# ---- the model ----
class StepCache:
    """Keys and values of a fixed length in place, written at `position`: all that a graph of one decode step needs of a transformers cache.

    Attention gets it as it gets any cache. Positions beyond the current one are masked by the caller.
    """

    is_compileable = False

    def __init__(self, length: int) -> None:
        self.length = length
        self.position: Optional[Tensor] = None  # int64 [1], on the device
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if layer not in self._kept:
            self._kept[layer] = tuple(t.new_zeros(*t.shape[:2], self.length, t.shape[3]) for t in (keys, values))  # type: ignore[assignment]
        for whole, new in zip(self._kept[layer], (keys, values)):
            whole.index_copy_(2, self.position, new)
        return self._kept[layer]

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0  # positions and mask are given to the model


def build_model(sizes: ModelSizes, layers: int, vocabulary: int, device: Any, seed: int = 0) -> Any:
    """The transformers model with a MoeBlock in every layer. Its own experts are never made: it is built with one small dense block instead."""
    import transformers

    dense = {"intermediate_size": 128, "hidden_size": sizes.hidden, "num_hidden_layers": layers, "vocab_size": vocabulary, "tie_word_embeddings": False}
    if sizes.kind == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(**dense, **sizes.attention, mlp_only_layers=list(range(layers)))
        cls = transformers.Qwen3MoeForCausalLM
    else:
        config = transformers.DeepseekV3Config(**dense, **sizes.attention, first_k_dense_replace=layers)
        cls = transformers.DeepseekV3ForCausalLM
    config._attn_implementation = "sdpa"
    torch.manual_seed(seed)
    with torch.device(device):
        model = cls(config).to(torch.bfloat16).eval()
    blocks = []
    for index, layer in enumerate(model.model.layers):
        block = MoeBlock(
            sizes.experts, sizes.hidden, sizes.intermediate, sizes.policy, shared=sizes.shared, biased=sizes.biased, ue8m0=sizes.ue8m0, device=device,
            seed=seed * 1000 + index,
        )
        layer.mlp = block
        blocks.append(block)
    model.moe_blocks = blocks  # a plain list: they are in the layers already
    return model


def set_path(model: Any, path: str) -> None:
    for block in model.moe_blocks:
        block.path = path


class Decoder:
    """Greedy decoding of `batch` sequences, one token a step, with all state in tensors that a CUDA graph can update."""

    def __init__(self, model: Any, batch: int, length: int) -> None:
        device = next(model.parameters()).device
        self.model, self.batch, self.length = model, batch, length
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.logits = torch.zeros(batch, model.config.vocab_size, dtype=torch.float32, device=device)
        self._slots = torch.arange(length, device=device)
        self._open, self._shut = (torch.tensor(v, dtype=torch.bfloat16, device=device) for v in (0.0, float("-inf")))
        self.cache = StepCache(length)
        self.cache.position = self.position
        parameters = inspect.signature(model.model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"

    def start(self, tokens: Tensor) -> None:
        self.tokens.copy_(tokens.view(self.batch, 1))
        self.position.zero_()

    @torch.no_grad()
    def step(self) -> None:
        """Reads self.tokens at self.position; leaves logits, the next tokens and the next position."""
        mask = torch.where(self._slots <= self.position, self._open, self._shut).expand(self.batch, 1, 1, self.length)
        hidden = self.model.model(
            input_ids=self.tokens, position_ids=self.position.expand(self.batch, 1), attention_mask=mask, use_cache=True, **{self._cache_name: self.cache}
        ).last_hidden_state
        self.logits.copy_(self.model.lm_head(hidden[:, -1]))
        self.tokens.copy_(self.logits.argmax(-1, keepdim=True))
        self.position.add_(1)


# ---- errors ----
def decode_greedily(decoder: Decoder, first: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Tokens read [steps, B] and logits [steps, B, V], on the host."""
    decoder.start(first)
    tokens, logits = [], []
    for _ in range(steps):
        tokens.append(decoder.tokens[:, 0].to("cpu", copy=True))
        decoder.step()
        logits.append(decoder.logits.to("cpu", copy=True))
    return torch.stack(tokens), torch.stack(logits)


def decode_forced(decoder: Decoder, tokens: Tensor) -> Tensor:
    """Logits [steps, B, V] of a path that reads the given tokens."""
    decoder.start(tokens[0])
    logits = []
    for row in tokens:
        decoder.tokens.copy_(row.view(-1, 1))
        decoder.step()
        logits.append(decoder.logits.to("cpu", copy=True))
    return torch.stack(logits)


def compare(reference: Tensor, logits: Tensor) -> dict[str, float]:
    """KL(reference || path) in nats, error of the centred logits relative to theirs, share of equal most likely tokens."""
    p, q = reference.double().log_softmax(-1), logits.double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    a, b = (t.double() - t.double().mean(-1, keepdim=True) for t in (reference, logits))
    return {
        "kl_mean": float(kl.mean()),
        "kl_max": float(kl.max()),
        "logit_error": float((a - b).norm() / a.norm()),
        "top1_agreement": float((reference.argmax(-1) == logits.argmax(-1)).double().mean()),
    }


# ---- time ----
def capture(decoder: Decoder) -> Any:
    """One step as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            decoder.start(torch.zeros(decoder.batch, dtype=torch.int64, device=decoder.tokens.device))
            decoder.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder.step()
    return graph


def time_replays(decoder: Decoder, graph: Any, first: Tensor, steps: int) -> float:
    """Microseconds per step."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    decoder.start(first)
    begin.record()
    for _ in range(steps):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1000 / steps


def paired(run: Callable[[str], float], paths: tuple[str, str], rounds: int) -> dict[str, list[float]]:
    """Both paths in every round, the order alternating."""
    samples: dict[str, list[float]] = {path: [] for path in paths}
    for index in range(rounds):
        for path in paths if index % 2 == 0 else reversed(paths):
            samples[path].append(run(path))
    return samples


def summarise(a: list[float], b: list[float], draws: int = 2000, seed: int = 1) -> dict[str, float]:
    """Medians, and the median of the paired ratios a / b with its bootstrap interval."""
    ratios = [x / y for x, y in zip(a, b)]
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(draws))
    return {
        "a_us": statistics.median(a),
        "b_us": statistics.median(b),
        "ratio": statistics.median(ratios),
        "ratio_low": medians[int(0.025 * draws)],
        "ratio_high": medians[math.ceil(0.975 * draws) - 1],
    }


@contextlib.contextmanager
def peak_memory(into: dict[str, float], name: str) -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.synchronize()
    into[name] = torch.cuda.max_memory_allocated() / 2**30


# ---- the whole run ----
def bind_all(model: Any, sizes: ModelSizes, package: Any, name: str) -> Any:
    """Gives every block a moeforge layer; refuses a package for another layer than the model's."""
    import moeforge.torch

    problem = package.problem(name)
    mine = (sizes.experts, sizes.policy.top_k, sizes.hidden, sizes.intermediate, int(sizes.ue8m0))
    theirs = (problem.experts, problem.top_k, problem.hidden, problem.intermediate, problem.act_scale)
    if mine != theirs:
        raise SystemExit(f"{package.path}: experts, top-k, hidden, intermediate, ue8m0 of {name} are {theirs}, the model has {mine}")
    moe = moeforge.torch.Moe(package, problem)
    for block in model.moe_blocks:
        block.bind(moe)
    return moe


def measure_errors(model: Any, batches: list[int], paths: tuple[str, ...], steps: int) -> dict[int, dict[str, dict[str, float]]]:
    result: dict[int, dict[str, dict[str, float]]] = {}
    for batch in batches:
        decoder = Decoder(model, batch, steps)
        first = torch.randint(model.config.vocab_size, (batch,), generator=torch.Generator().manual_seed(batch))
        set_path(model, "bf16")
        tokens, reference = decode_greedily(decoder, first, steps)
        result[batch] = {}
        for path in paths:
            set_path(model, path)
            result[batch][path] = compare(reference, decode_forced(decoder, tokens))
    return result


def measure_time(model: Any, batch: int, paths: tuple[str, str], steps: int, rounds: int) -> dict[str, Any]:
    decoders, graphs, memory = {}, {}, {}
    first = torch.zeros(batch, dtype=torch.int64, device=next(model.parameters()).device)
    for path in paths:
        set_path(model, path)
        decoders[path] = Decoder(model, batch, steps)
        with peak_memory(memory, path):
            graphs[path] = capture(decoders[path])
            time_replays(decoders[path], graphs[path], first, steps)
    samples = paired(lambda path: time_replays(decoders[path], graphs[path], first, steps), paths, rounds)
    return {**summarise(samples[paths[0]], samples[paths[1]]), "samples": samples, "peak_gib": memory}


def print_table(report: dict[str, Any], out: Any = sys.stdout) -> None:
    a, b = report["paths"]
    print(f"{report['model']}, {report['layers']} layers, {report['device']}; us per output token, CUDA graph, {report['rounds']} paired rounds", file=out)
    print(f"{'B':>3} {a:>10} {b:>10} {'ratio':>7} {'95 %':>15} {'GiB ' + a:>12} {'GiB ' + b:>12}   KL {a} / {b}          logit error {a} / {b}", file=out)
    for row in report["rows"]:
        errors = row["errors"]
        print(
            f"{row['tokens']:>3} {row['a_us']:>10.1f} {row['b_us']:>10.1f} {row['ratio']:>7.3f} {row['ratio_low']:>7.3f}-{row['ratio_high']:<7.3f}"
            f" {row['peak_gib'][a]:>12.2f} {row['peak_gib'][b]:>12.2f}   {errors[a]['kl_mean']:.2e} / {errors[b]['kl_mean']:.2e}"
            f"   {errors[a]['logit_error']:.2e} / {errors[b]['logit_error']:.2e}",
            file=out,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Time per output token and errors of a model's MoE layers: straightforward and moeforge.")
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("package", help="package made by `moeforge export`")
    parser.add_argument("--baseline", choices=("triton", "torch"), default="triton")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", default="1,2,4,8", help="batch sizes")
    parser.add_argument("--steps", type=int, default=64, help="tokens decoded in a round")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--json", help="file for the report with all samples")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench/decode.py: no GPU: times and errors are measured on one, nothing is predicted")
    import transformers

    import moeforge

    sizes, batches, paths = MODELS[args.model], [int(b) for b in args.tokens.split(",")], (args.baseline, "moeforge")
    model = build_model(sizes, args.layers, args.vocabulary, "cuda")
    with moeforge.load(args.package) as package:
        moe = bind_all(model, sizes, package, args.model)
        errors = measure_errors(model, batches, paths, args.steps)
        for block in model.moe_blocks:
            block.drop_bf16()
        torch.cuda.empty_cache()
        rows = [{"tokens": b, "errors": errors[b], **measure_time(model, b, paths, args.steps, args.rounds)} for b in batches]
        report = {
            "model": args.model, "layers": args.layers, "device": torch.cuda.get_device_name(), "paths": paths, "rounds": args.rounds, "steps": args.steps,
            "torch": torch.__version__, "transformers": transformers.__version__, "max_tokens": moe.max_tokens, "rows": rows,
        }
        print_table(report)
        if args.json:
            with open(args.json, "w") as file:
                json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
