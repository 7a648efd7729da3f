"""The torch op. Its host side (schema, fake implementation, checks, workspaces, torch.compile) runs on CPU tensors over the scripted GPU, whose device
memory is this process's own; nothing of it has run on a real GPU here. Skipped where torch is not installed."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
import unittest
import unittest.mock
from typing import Any, Iterator

import reference
from support import BUILD, HAS_GIVEN, HAS_SHARED, Gpu, PackageCase, driver

import moeforge

try:
    import torch

    import moeforge.torch as mt
except ImportError:
    torch = None  # type: ignore[assignment]


class ScriptedRuntime:
    """Stands where moeforge.torch has torch.cuda: CPU tensors, streams of the scripted driver."""

    device_type = "cpu"

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.current, self.is_capturing, self.made = gpu, 0, False, 0

    def stream(self, device: Any) -> int:
        return self.current

    def capturing(self) -> bool:
        return self.is_capturing

    def on(self, device: Any) -> Any:
        return contextlib.nullcontext()

    def workspace(self, size: int, device: Any) -> Any:
        self.made += 1
        address = self.gpu.upload(bytes(size))
        return torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)

    def synchronize(self, device: Any) -> None:
        pass


@unittest.skipIf(torch is None, "torch is not installed")
class TorchCase(PackageCase):
    @contextlib.contextmanager
    def moe(self, name: str = "tiny", library: str = "libfakegpu.so", max_tokens: int = 8) -> Iterator[Any]:
        with driver(library=library), Gpu(library) as gpu:
            self.runtime = ScriptedRuntime(gpu)
            with unittest.mock.patch.object(mt, "_runtime", self.runtime), moeforge.load(self.path(name)) as package:
                moe = mt.Moe(package, package.problem(), max_tokens=max_tokens)
                yield moe
                moe.op.close()

    def weights(self, p: moeforge.Problem) -> list[Any]:
        """Zero weights in the checkpoint's layout."""
        held = p.expert_count + p.shared_count
        return [
            torch.zeros(held, 2 * p.intermediate, p.hidden, dtype=torch.float8_e4m3fn),
            torch.zeros(held, 2 * p.n_blocks, p.k_blocks),
            torch.zeros(held, p.hidden, p.intermediate, dtype=torch.float8_e4m3fn),
            torch.zeros(held, p.k_blocks, p.n_blocks),
        ]

    def inputs(self, p: moeforge.Problem, tokens: int) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, p.hidden, generator=generator).bfloat16()
        return x, torch.randn(tokens, p.logits, generator=generator).bfloat16()


class Numbers(TorchCase):
    def random_layer(self, moe: Any) -> tuple[Any, reference.Layer]:
        p = moe.problem
        r = reference.Layer(p.experts, p.top_k, p.hidden, p.intermediate, seed=3)
        w13, s13, w2, s2 = self.weights(p)
        w13.view(torch.uint8).copy_(torch.frombuffer(bytearray(r.w13), dtype=torch.uint8).view(w13.shape))
        w2.view(torch.uint8).copy_(torch.frombuffer(bytearray(r.w2), dtype=torch.uint8).view(w2.shape))
        s13.copy_(torch.tensor(r.s13).view(s13.shape))
        s2.copy_(torch.tensor(r.s2).view(s2.shape))
        return moe.bind(w13, s13, w2, s2), r

    def test_eager_compiled_and_reference(self) -> None:
        with self.moe() as moe:
            layer, r = self.random_layer(moe)
            x, logits = self.inputs(moe.problem, 1)
            eager = layer(x, logits)
            expected = torch.tensor(r.token(x[0].tolist(), reference.route(logits[0].tolist(), r.top_k)))
            self.assertLess(float((eager[0].float() - expected).norm() / expected.norm()), 5e-3)
            compiled = torch.compile(lambda a, b: layer(a * 1, b) + 0, fullgraph=True, backend="aot_eager")(x, logits)
            self.assertTrue(torch.equal(eager, compiled))
            x, logits = self.inputs(moe.problem, 3)  # padded rows, and each row as it is alone
            wide = torch.zeros(3, moe.problem.hidden + 8, dtype=torch.bfloat16)
            wide[:, : moe.problem.hidden] = x
            together = layer(wide[:, : moe.problem.hidden], logits)
            for t in range(3):
                self.assertTrue(torch.equal(together[t], layer(x[t : t + 1], logits[t : t + 1])[0]))


class Op(TorchCase):
    def test_opcheck(self) -> None:
        """Schema, fake tensors, autograd registration, dynamic shapes: torch's own checks of a custom op. They copy its arguments, weights too."""
        with self.moe() as moe, unittest.mock.patch.object(mt, "_layer_of", lambda handle, w13, w2: mt._layers[handle]):
            layer = moe.bind(*self.weights(moe.problem))
            for tokens in (1, 4):
                weights = [t.view(torch.uint8) if t is not None and t.dtype == torch.float8_e4m3fn else t for t in layer.tensors]  # which torch can compare
                torch.library.opcheck(torch.ops.moeforge.fused_moe.default, (*self.inputs(moe.problem, tokens), *weights, None, layer.handle))

    def test_fake_and_meta(self) -> None:
        with self.moe() as moe:
            layer = moe.bind(*self.weights(moe.problem))
            meta = [t.to("meta") if t is not None else None for t in (*self.inputs(moe.problem, 5), *layer.tensors)]
            out = torch.ops.moeforge.fused_moe(*meta, None, layer.handle)
            self.assertEqual((out.device.type, out.dtype, tuple(out.shape)), ("meta", torch.bfloat16, (5, moe.problem.hidden)))

    def test_compile_in_one_graph_for_all_layers(self) -> None:
        """fullgraph, several layers and token counts."""
        with self.moe() as moe:
            layers = [moe.bind(*self.weights(moe.problem)) for _ in range(3)]

            def model(x: Any, logits: Any) -> Any:
                for layer in layers:
                    x = x + layer(x, logits)
                return x

            compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
            for tokens in (2, 3, 8):
                x, logits = self.inputs(moe.problem, tokens)
                self.assertTrue(torch.equal(compiled(x, logits), model(x, logits)))

    @unittest.skipUnless(HAS_GIVEN, "this libmoeforge does not know routing done by the engine")
    def test_given_routing(self) -> None:
        with self.moe("given", "libfakecuda.so") as moe:
            p = moe.problem
            layer = moe.bind(*self.weights(p))
            x = self.inputs(p, 3)[0]
            ids, weights = torch.zeros(3, p.top_k, dtype=torch.int32), torch.ones(3, p.top_k)
            self.assertEqual(layer.experts(x, ids, weights).shape, x.shape)
            self.assertEqual(torch.compile(lambda *a: layer.experts(*a), fullgraph=True, backend="aot_eager")(x, ids, weights).shape, x.shape)
            for text, bad in (
                ("topk_ids is torch.int64", (x, ids.long(), weights)),
                ("topk_weights is torch.bfloat16", (x, ids, weights.bfloat16())),
                ("topk_ids is \\[3, 1\\]", (x, ids[:, :1], weights)),
            ):
                with self.subTest(text), self.assertRaisesRegex(moeforge.UsageError, text):
                    layer.experts(*bad)
            with self.assertRaisesRegex(moeforge.UsageError, "takes topk_ids"):
                layer(x, torch.zeros(3, p.logits, dtype=torch.bfloat16))

    def test_shared_experts(self) -> None:
        with self.moe("shared", "libfakecuda.so") as moe:
            p = moe.problem
            self.assertEqual((p.shared_count, p.shared_gated), (1, True))
            layer = moe.bind(*self.weights(p))
            (x, logits), gate = self.inputs(p, 3), torch.zeros(3, 1, dtype=torch.bfloat16)
            if HAS_SHARED:
                self.assertEqual(layer(x, logits, gate).shape, x.shape)
            else:
                with self.assertRaises(moeforge.UsageError):  # an older library refuses what it does not know
                    layer(x, logits, gate)
            call = unittest.mock.Mock()
            with unittest.mock.patch.object(layer.native, "forward", call):
                layer(x, logits, gate)
            self.assertEqual(call.call_args.kwargs["shared_gate"], gate.data_ptr())
            with self.assertRaisesRegex(moeforge.UsageError, "shared_gate belongs"):
                layer(x, logits)
            with self.assertRaisesRegex(moeforge.UsageError, "shared_gate is torch.float32"):
                layer(x, logits, gate.float())
            with self.assertRaisesRegex(moeforge.UsageError, "w13 is"):
                moe.bind(*(t[:-1] for t in self.weights(p)))

    def test_zero_tokens(self) -> None:
        with self.moe() as moe:
            out = moe.bind(*self.weights(moe.problem))(*self.inputs(moe.problem, 0))
            self.assertEqual(tuple(out.shape), (0, moe.problem.hidden))

    def test_layer_that_is_gone(self) -> None:
        with self.moe() as moe:
            layer = moe.bind(*self.weights(moe.problem))
            handle, tensors = layer.handle, layer.tensors
            x, logits = self.inputs(moe.problem, 1)
            other = self.weights(moe.problem)
            with self.assertRaisesRegex(moeforge.UsageError, "not the weights"):
                mt.fused_moe(x, logits, *other, layer=layer)
            del layer
            gc.collect()
            with self.assertRaisesRegex(moeforge.UsageError, "is gone"):
                torch.ops.moeforge.fused_moe(x, logits, *tensors, None, handle)


class Checks(TorchCase):
    def test_calls(self) -> None:
        with self.moe() as moe:
            p = moe.problem
            layer = moe.bind(*self.weights(p))
            x, logits = self.inputs(p, 2)
            narrow = torch.zeros(2, p.hidden + 1, dtype=torch.bfloat16)
            for expected, text, bad_x, bad_logits in (
                (moeforge.UsageError, "x is torch.float32", x.float(), logits),
                (moeforge.UsageError, "x is \\[2, 512\\]", x[:, :512], logits),
                (moeforge.UsageError, "router_logits is \\[1, 64\\]", x, logits[:1]),
                (moeforge.UsageError, "router_logits is torch.float32", x, logits.float()),
                (moeforge.UsageError, "x is on meta", x.to("meta"), logits),
                (moeforge.MissLayout, "x has strides", narrow[:, :-1], logits),
                (moeforge.MissLayout, "x has strides", narrow[:, 1:], logits),
                (moeforge.MissLayout, "x has strides", x.t().contiguous().t(), logits),
                (moeforge.MissLayout, "router_logits has strides", x, logits.t().contiguous().t()),
                (moeforge.MissTokens, "9 tokens", *self.inputs(p, 9)),
            ):
                with self.subTest(text), self.assertRaisesRegex(expected, text):
                    layer.launch(bad_x, bad_logits)
            with self.assertRaisesRegex(moeforge.UsageError, "routes by itself"):
                layer.experts(x, torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 2))

    def test_weights(self) -> None:
        with self.moe() as moe:
            p = moe.problem
            w13, s13, w2, s2 = self.weights(p)
            moe.bind(w13, s13.view(p.experts, 2, p.n_blocks, p.k_blocks), w2, s2)
            wide = torch.zeros(p.experts, p.hidden, p.intermediate + 16, dtype=torch.float8_e4m3fn)
            self.assertEqual(moe.bind(w13, s13, wide[:, :, : p.intermediate], s2).native.weights.w2_row_stride, p.intermediate + 16)
            for expected, text, bad in (
                (moeforge.UsageError, "w13 is torch.uint8", (w13.view(torch.uint8), s13, w2, s2)),
                (moeforge.UsageError, "w13 is", (w13[:, :-16], s13, w2, s2)),
                (moeforge.UsageError, "w2 is", (w13, s13, w2[1:], s2)),
                (moeforge.UsageError, "s13 is", (w13, s13[:, :, 1:], w2, s2)),
                (moeforge.UsageError, "s2 is torch.bfloat16", (w13, s13, w2, s2.bfloat16())),
                (moeforge.MissLayout, "w13 has strides", (w13.transpose(1, 2).contiguous().transpose(1, 2), s13, w2, s2)),
                (moeforge.MissLayout, "s13 has strides", (w13, s13.transpose(1, 2).contiguous().transpose(1, 2), w2, s2)),
                (moeforge.MissLayout, "w2 has strides", (w13, s13, torch.zeros(2 * p.experts, *w2.shape[1:], dtype=w2.dtype)[::2], s2)),
            ):
                with self.subTest(text), self.assertRaisesRegex(expected, text):
                    moe.bind(*bad)
            with self.assertRaisesRegex(moeforge.UsageError, "no selection bias"):
                moe.bind(w13, s13, w2, s2, bias=torch.zeros(p.logits))

    def test_device(self) -> None:
        with driver(), moeforge.load(self.path("fixture")) as package:
            with self.assertRaisesRegex(moeforge.UsageError, "expected a CUDA device"):
                mt.Moe(package, package.problem(), device="cpu")

    def test_misses_come_through(self) -> None:
        with self.assertRaises(moeforge.MissTokens), self.moe(max_tokens=9):
            pass


class Threads(TorchCase):
    def test_a_thread_without_a_context(self) -> None:
        """What is done for it with a real GPU; the scripted driver wants a current context, too."""
        results: list[Any] = []

        def work(layer: Any, call: dict[str, int]) -> None:
            for prepare in (lambda: None, lambda: mt._Cuda().make_current(0)):
                prepare()
                try:
                    layer.forward(**call)
                    results.append("launched")
                except moeforge.DeviceError:
                    results.append("refused")

        with driver(), Gpu() as gpu, moeforge.load(self.path("fixture")) as package, package.op(package.problem()) as op:
            with op.bind(moeforge.Weights(0x10000, 0x20000, 0x30000, 0x40000)) as layer:
                workspace = gpu.upload(bytes(op.workspace_size))
                call = {"tokens": 1, "x": 0x100000, "logits": 0x200000, "out": 0x300000, "workspace": workspace}
                thread = threading.Thread(target=work, args=(layer, call))
                thread.start()
                thread.join()
        self.assertEqual(results, ["refused", "launched"])

    def test_a_thread_on_two_devices(self) -> None:
        """Each launch finds its device's context current, whichever device torch is on; contexts are retained once for each device, not at each turn."""
        library = ctypes.CDLL(str(BUILD / "tests" / "libfakecuda.so"))
        contexts = [ctypes.c_void_p(), ctypes.c_void_p()]
        current, used, results = [0], set(), []

        @contextlib.contextmanager
        def guard(device: Any) -> Iterator[None]:  # what torch does: a real call, there and back
            before, current[0] = current[0], device.index
            library.cuCtxSetCurrent(contexts[device.index])
            yield
            current[0] = before
            library.cuCtxSetCurrent(contexts[before])

        def work(layers: list[Any], call: dict[str, int]) -> None:
            runtime = mt._Cuda()
            for on, target in ((0, 0), (0, 1), (0, 0), (1, 1), (1, 0), (1, 1), (0, 0), (1, 1)):
                current[0] = on
                if on in used:  # torch believes to be on a device that it has not used yet without a call
                    library.cuCtxSetCurrent(contexts[on])
                used.add(on)
                with runtime.on(torch.device("cuda", target)):
                    layers[target].forward(**call)
                results.append(current[0] == on)

        with driver("devices=2"), Gpu() as gpu, moeforge.load(self.path("fixture")) as package, contextlib.ExitStack() as stack:
            ops = [stack.enter_context(package.op(package.problem(), index)) for index in range(2)]
            layers = [stack.enter_context(op.bind(moeforge.Weights(0x10000, 0x20000, 0x30000, 0x40000))) for op in ops]
            for index, context in enumerate(contexts):
                self.assertEqual(library.cuDevicePrimaryCtxRetain(ctypes.byref(context), index), 0)
            call = {"tokens": 1, "x": 0x100000, "logits": 0x200000, "out": 0x300000, "workspace": gpu.upload(bytes(ops[0].workspace_size))}
            stack.enter_context(unittest.mock.patch.object(torch.cuda, "current_device", lambda: current[0]))
            stack.enter_context(unittest.mock.patch.object(torch.cuda, "device", guard))
            before = library.fakecuda_alive()
            thread = threading.Thread(target=work, args=(layers, call))
            thread.start()
            thread.join()
            self.assertEqual(library.fakecuda_alive() - before, 2)
        self.assertEqual(results, [True] * 8)


class Workspaces(TorchCase):
    def test_one_for_each_stream(self) -> None:
        with self.moe("fixture", "libfakecuda.so") as moe:
            self.assertEqual(self.runtime.made, 3)
            addresses = {stream: moe.workspaces.address(stream) for stream in (0, 7, 9)}
            self.assertEqual(len(set(addresses.values())), 3)
            self.assertEqual(self.runtime.made, 3)
            self.assertEqual({stream: moe.workspaces.address(stream) for stream in addresses}, addresses)
            self.assertNotIn(moe.workspaces.address(11), addresses.values())
            self.assertEqual(self.runtime.made, 4)
            moe.reset()

    def test_capture_allocates_nothing(self) -> None:
        with self.moe("fixture", "libfakecuda.so") as moe:
            self.runtime.is_capturing = True
            for stream in (1, 2, 3):
                moe.workspaces.address(stream)
            with self.assertRaisesRegex(moeforge.UsageError, "prepare"):
                moe.workspaces.address(4)
            self.assertEqual(self.runtime.made, 3)
            self.runtime.is_capturing, self.runtime.current = False, self.runtime.gpu.stream()
            moe.prepare()
            self.runtime.is_capturing = True
            moe.workspaces.address(self.runtime.current)

    def test_capture_of_forward(self) -> None:
        """In a capture on a stream that was not seen before, nothing but the kernel is recorded."""
        log = os.path.join(self.folder, "log")
        with unittest.mock.patch.dict(os.environ, FAKECUDA_LOG=log), self.moe("fixture", "libfakecuda.so") as moe:
            layer = moe.bind(*self.weights(moe.problem))
            x, logits = self.inputs(moe.problem, 3)
            self.runtime.current = self.runtime.gpu.stream()
            launch = self.runtime.gpu.graph(self.runtime.current, lambda: layer(x, logits))
            launch()
            launch()
        with open(log) as file:
            lines = [line.split()[0] for line in file]
        self.assertEqual(lines[-4:], ["graph_launch", "launch", "graph_launch", "launch"])
        self.assertEqual(lines.count("memset"), 3)  # three workspaces, before the capture


if __name__ == "__main__":
    unittest.main()
