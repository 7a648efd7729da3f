"""Package, Op and Layer over the scripted drivers: typed misses, life times, and numbers."""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import random
import threading
import unittest
import unittest.mock

import reference
from support import BUILD, HAS_GIVEN, Gpu, PackageCase, driver

import moeforge


def alive() -> int:
    """Objects of the scripted driver that nobody has ended."""
    return ctypes.CDLL(str(BUILD / "tests" / "libfakecuda.so")).fakecuda_alive()


FAKE_WEIGHTS = moeforge.Weights(w13=0x10000, s13=0x20000, w2=0x30000, s2=0x40000)

# script of the driver, max_tokens, device, field of the problem that is changed, what is raised
MISSES = [
    ("", 9, 0, None, moeforge.MissTokens),
    ("", 8, 0, "top_k", moeforge.MissShape),
    ("", 8, 0, "act_scale", moeforge.MissShape),
    ("", 8, 1, None, moeforge.NoDevice),
    ("", 0, 0, None, moeforge.UsageError),
    ("no_device", 8, 0, None, moeforge.NoDevice),
    ("no_device", 8, 0, "hidden", moeforge.MissShape),
    ("cc=80", 8, 0, None, moeforge.MissDevice),
    ("name=NVIDIA H100 PCIe", 8, 0, None, moeforge.MissDevice),
    ("driver=12080", 8, 0, None, moeforge.MissDriver),
    ("sms=114", 8, 0, None, moeforge.MissSms),
    ("occupancy=0", 8, 0, None, moeforge.MissSms),
    ("load_fail", 8, 0, None, moeforge.MissDevice),
]


class Files(PackageCase):
    def test_missing(self) -> None:
        with self.assertRaises(moeforge.PackageIOError) as caught:
            moeforge.load(self.path("missing"))
        self.assertIn("missing.moeforge", str(caught.exception))
        self.assertEqual(caught.exception.status, moeforge.Status.ERR_IO)

    def test_damaged(self) -> None:
        with open(self.path("fixture"), "rb") as file:
            good = bytearray(file.read())
        damaged = os.path.join(self.folder, "damaged")
        for place in (0, 100, len(good) // 2, len(good) - 1):
            bad = bytearray(good)
            bad[place] ^= 1
            with open(damaged, "wb") as file:
                file.write(bad)
            with self.assertRaises(moeforge.CorruptPackage):
                moeforge.load(damaged)
        with open(damaged, "wb") as file:
            file.write(good[:-1])
        with self.assertRaises(moeforge.CorruptPackage):
            moeforge.load(damaged)

    def test_newer_format(self) -> None:
        with open(self.path("fixture"), "rb") as file:
            data = bytearray(file.read())
        data[8:12] = (1000).to_bytes(4, "little")
        newer = os.path.join(self.folder, "newer")
        with open(newer, "wb") as file:
            file.write(data)
        with self.assertRaises(moeforge.NewerFormat):
            moeforge.load(newer)

    def test_entries(self) -> None:
        with moeforge.load(self.path("fixture")) as package:
            first, second = package.entries()
            self.assertEqual((first.tokens_min, first.tokens_max, second.tokens_min, second.tokens_max), (1, 2, 3, 8))
            self.assertEqual((first.shape_name, first.device_name, first.schedule), ("fixture", "NVIDIA H200", "stream/fixture"))
            self.assertEqual((first.us, first.floor_us, first.routed_scaling, first.min_driver), (9.75, 7.25, 2.5, 13000))
            problem = moeforge.Problem(experts=16, top_k=2, hidden=512, intermediate=128, renormalize=1)
            self.assertEqual(first.problem, problem)
            self.assertEqual(package.problem(), problem)
            self.assertEqual(package.problem("fixture"), problem)
            self.assertEqual(package.max_tokens(problem), 8)
            self.assertEqual(len(json.loads(package.manifest)["entries"]), 2)

    def test_which_problem(self) -> None:
        with moeforge.load(self.path("two")) as package:
            self.assertEqual(package.problem("other").top_k, 3)
            self.assertEqual(package.max_tokens(package.problem("other")), 4)
            with self.assertRaises(moeforge.UsageError):
                package.problem()
            with self.assertRaises(moeforge.NotFound) as caught:
                package.problem("nothing")
            self.assertIn("fixture", str(caught.exception))

    def test_gap(self) -> None:
        with driver(), moeforge.load(self.path("gap")) as package:
            problem = package.problem()
            self.assertEqual(package.max_tokens(problem), 2)
            package.op(problem).close()
            with self.assertRaises(moeforge.MissTokens):
                package.op(problem, 0, 3)


class Misses(PackageCase):
    def test_typed_misses(self) -> None:
        with moeforge.load(self.path("fixture")) as package:
            for script, max_tokens, device, changed, expected in MISSES:
                problem = package.problem()
                if changed is not None:
                    problem = moeforge.package.dataclasses.replace(problem, **{changed: getattr(problem, changed) + 1})
                with self.subTest(script=script, max_tokens=max_tokens, changed=changed), driver(script):
                    with self.assertRaises(expected) as caught:
                        package.op(problem, device, max_tokens)
                    self.assertIn(caught.exception.advice, str(caught.exception))
                    self.assertEqual(isinstance(caught.exception, moeforge.Miss), "Miss" in expected.__name__)
                    self.assertEqual(alive(), 0)

    def test_no_driver(self) -> None:
        with moeforge.load(self.path("fixture")) as package, self.assertRaises(moeforge.NoDevice):
            package.op(package.problem())

    def test_unknown_shape_without_max_tokens(self) -> None:
        with moeforge.load(self.path("fixture")) as package, self.assertRaises(moeforge.MissShape):
            package.op(moeforge.Problem(experts=8, top_k=1, hidden=1024, intermediate=128))

    def test_layout(self) -> None:
        with driver(), moeforge.load(self.path("fixture")) as package, package.op(package.problem()) as op:
            for name in ("w13", "s13", "w2"):
                with self.assertRaises(moeforge.MissLayout):
                    op.bind(moeforge.package.dataclasses.replace(FAKE_WEIGHTS, **{name: 0x10008}))
            with self.assertRaises(moeforge.UsageError):
                op.bind(moeforge.package.dataclasses.replace(FAKE_WEIGHTS, s2=0))
            with self.assertRaises(moeforge.UsageError):
                op.bind(moeforge.package.dataclasses.replace(FAKE_WEIGHTS, w13_row_stride=511))

    def test_calls(self) -> None:
        with driver(), Gpu() as gpu, moeforge.load(self.path("fixture")) as package, package.op(package.problem()) as op, op.bind(FAKE_WEIGHTS) as layer:
            workspace = gpu.upload(bytes(op.workspace_size))
            good = {"x": 0x100000, "logits": 0x200000, "out": 0x300000, "workspace": workspace}
            op.init_workspace(workspace)
            for tokens in range(op.max_tokens + 1):
                layer.forward(tokens=tokens, **good)
            with self.assertRaises(moeforge.MissTokens):
                layer.forward(tokens=9, **good)
            with self.assertRaises(moeforge.UsageError):
                layer.forward(tokens=-1, **good)
            with self.assertRaises(moeforge.UsageError):
                layer.forward(tokens=1, **{**good, "workspace": workspace + 8})
            with self.assertRaises(moeforge.UsageError):
                layer.forward(tokens=1, **{**good, "out": good["x"]})
            with self.assertRaises(moeforge.MissLayout):
                layer.forward(tokens=1, **{**good, "x": 0x100002})
            with self.assertRaises(moeforge.UsageError):
                op.init_workspace(0)

    @unittest.skipUnless(HAS_GIVEN, "this libmoeforge does not know routing done by the engine")
    def test_given_routing(self) -> None:
        with driver(), Gpu() as gpu, moeforge.load(self.path("given")) as package, package.op(package.problem()) as op, op.bind(FAKE_WEIGHTS) as layer:
            self.assertEqual(op.problem.score, moeforge.Score.GIVEN)
            workspace = gpu.upload(bytes(op.workspace_size))
            op.init_workspace(workspace)
            call = {"tokens": 2, "x": 0x100000, "out": 0x300000, "workspace": workspace}
            layer.forward(ids=0x200000, weights=0x201000, **call)
            layer.forward(ids=0x200000, weights=0x201000, ids_stride=4, weights_stride=8, **call)
            for wrong in ({"logits": 0x200000}, {"ids": 0x200000}, {"weights": 0x200000}, {"ids": 0x200000, "weights": 0x201000, "ids_stride": 1}):
                with self.assertRaises(moeforge.UsageError):
                    layer.forward(**call, **wrong)

    def test_launch_failure(self) -> None:
        with driver("launch_fail"), moeforge.load(self.path("fixture")) as package, package.op(package.problem()) as op, op.bind(FAKE_WEIGHTS) as layer:
            with self.assertRaises(moeforge.DeviceError):
                layer.forward(tokens=1, x=0x100000, logits=0x200000, out=0x300000, workspace=0x400000)

    def test_capture(self) -> None:
        """A forward call is captured into a graph: the kernel is launched by the graph, each time, and not before."""
        log = os.path.join(self.folder, "log")
        with unittest.mock.patch.dict(os.environ, FAKECUDA_LOG=log), driver(), Gpu() as gpu, moeforge.load(self.path("fixture")) as package:
            with package.op(package.problem()) as op, op.bind(FAKE_WEIGHTS) as layer:
                workspace, stream = gpu.upload(bytes(op.workspace_size)), gpu.stream()
                op.init_workspace(workspace, stream)
                launch = gpu.graph(
                    stream, lambda: layer.forward(tokens=3, x=0x100000, logits=0x200000, out=0x300000, workspace=workspace, stream=stream)
                )
                launch()
                launch()
        with open(log) as file:
            lines = [line.split()[0] for line in file]
        self.assertEqual(lines[-4:], ["graph_launch", "launch", "graph_launch", "launch"])
        self.assertEqual(lines.count("launch"), 2)


class Lifetimes(PackageCase):
    def objects(self) -> tuple[moeforge.Package, moeforge.Op, moeforge.Layer]:
        package = moeforge.load(self.path("fixture"))
        op = package.op(package.problem())
        return package, op, op.bind(FAKE_WEIGHTS)

    def test_any_order(self) -> None:
        with driver():
            for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)):
                parts = self.objects()
                self.assertGreater(alive(), 0)
                for index in order:
                    parts[index].close()
                    parts[index].close()  # a second time does nothing
                self.assertEqual(alive(), 0, order)

    def test_layer_keeps_the_others(self) -> None:
        """A layer works after its op and package were closed: they are ended with it."""
        with driver(), Gpu() as gpu:
            package, op, layer = self.objects()
            workspace = gpu.upload(bytes(op.workspace_size))
            before = alive()
            op.init_workspace(workspace)
            package.close()
            op.close()
            layer.forward(tokens=2, x=0x100000, logits=0x200000, out=0x300000, workspace=workspace)
            self.assertEqual(alive(), before)
            layer.close()
            self.assertLess(alive(), before)
        self.assertEqual(alive(), 0)

    def test_collected(self) -> None:
        with driver():
            parts = list(self.objects())
            parts.append(parts)  # a cycle: the collector finalises in any order
            del parts
            gc.collect()
            self.assertEqual(alive(), 0)

    def test_closed_objects_refuse(self) -> None:
        with driver():
            package, op, layer = self.objects()
            for part in (layer, op, package):
                part.close()
                self.assertTrue(part.closed)
            with self.assertRaises(moeforge.UsageError):
                package.entries()
            with self.assertRaises(moeforge.UsageError):
                package.op(moeforge.Problem(16, 2, 512, 128, renormalize=1), 0, 1)
            with self.assertRaises(moeforge.UsageError):
                op.bind(FAKE_WEIGHTS)
            with self.assertRaises(moeforge.UsageError):
                layer.forward(tokens=1, x=1, logits=1, out=1, workspace=256)

    def test_threads(self) -> None:
        failures: list[BaseException] = []

        def work() -> None:
            try:
                for _ in range(20):
                    op = package.op(package.problem(), 0, 8)
                    op.bind(FAKE_WEIGHTS).close()
                    op.close()
            except BaseException as error:  # whatever it is, the test must show it
                failures.append(error)

        with driver(), moeforge.load(self.path("fixture")) as package:
            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.assertEqual(failures, [])
        self.assertEqual(alive(), 0)


class Numbers(PackageCase):
    def test_against_reference(self) -> None:
        """Two tokens through the binding, on the scripted GPU that computes, against the operator in Python."""
        weights = reference.Layer(64, 2, 1024, 256, seed=5)
        rng = random.Random(7)
        tokens = 2
        x = [[reference.bf16(reference.bf16_bits(rng.gauss(0, 1))) for _ in range(weights.k)] for _ in range(tokens)]
        logits = [[reference.bf16(reference.bf16_bits(rng.gauss(0, 1))) for _ in range(weights.experts)] for _ in range(tokens)]
        got = self.run_binding(weights, x, logits)
        for t in range(tokens):
            expected = weights.token(x[t], reference.route(logits[t], weights.top_k))
            norm = math.sqrt(sum(v * v for v in expected))
            error = math.sqrt(sum((a - b) ** 2 for a, b in zip(expected, got[t]))) / norm
            self.assertGreater(norm, 1e-3)
            self.assertLess(error, 5e-3)  # bf16 output rounding alone is 2e-3

    def run_binding(self, weights: reference.Layer, x: list[list[float]], logits: list[list[float]]) -> list[list[float]]:
        tokens = len(x)
        with driver(library="libfakegpu.so"), Gpu("libfakegpu.so") as gpu, moeforge.load(self.path("tiny")) as package, package.op(package.problem()) as op:

            def floats(values: list[float]) -> int:
                return gpu.upload(bytes((ctypes.c_float * len(values))(*values)))

            def halves(rows: list[list[float]]) -> int:
                return gpu.upload(b"".join(reference.bf16_bits(v).to_bytes(2, "little") for row in rows for v in row))

            with op.bind(moeforge.Weights(gpu.upload(weights.w13), floats(weights.s13), gpu.upload(weights.w2), floats(weights.s2))) as layer:
                workspace, out = gpu.upload(bytes(op.workspace_size)), gpu.upload(bytes(tokens * weights.k * 2))
                op.init_workspace(workspace)
                layer.forward(tokens=tokens, x=halves(x), logits=halves(logits), out=out, workspace=workspace)
            bits = (ctypes.c_uint16 * (tokens * weights.k)).from_address(out)
            return [[reference.bf16(bits[t * weights.k + c]) for c in range(weights.k)] for t in range(tokens)]


if __name__ == "__main__":
    unittest.main()
